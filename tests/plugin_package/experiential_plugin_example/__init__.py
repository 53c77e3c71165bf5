"""One part of each kind for experiential; each notes in a file that it was called."""

import os
from pathlib import Path


def note(part: str) -> None:
    """Append the name of a part to the file that ``EXAMPLE_CALLS`` names."""
    if path := os.environ.get("EXAMPLE_CALLS"):
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{part}\n")
