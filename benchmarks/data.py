"""Where the real data of the environments is: one folder for all of it, or each environment's own variable."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = "EXPERIENTIAL_DATA"
"""Variable that names one folder with the data of all environments."""
PLACES = {
    "ALFWORLD_DATA": "alfworld",
    "WEBSHOP_DATA": "webshop",
    "HOTPOTQA_DATA": "hotpotqa/*.json",
    "SWE_TASKS": "swe/*.jsonl",
}
"""Variable of an environment to what it means below that folder; of a pattern the first file by
name.
"""


def find_data() -> None:
    """Set the variable of each environment that has none to what `FOLDER` holds for it; nothing without that folder."""
    folder = os.environ.get(FOLDER)
    for variable, place in PLACES.items() if folder else ():
        found = sorted(Path(folder or "").expanduser().glob(place))
        if found and not os.environ.get(variable):
            os.environ[variable] = str(found[0].resolve())
