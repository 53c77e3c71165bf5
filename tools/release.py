"""Prepare a release: `python -m tools.release 0.2.0`.

Sets the package's version, and makes the section `[Unreleased]` of CHANGELOG.md that of the
version, below a new and empty one. Nothing is committed.
"""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEADING = "## [Unreleased]\n"


def prepare(version: str, root: Path = ROOT) -> None:
    """Write the version into the package and the changelog below ``root``; both or neither.

    Raises:
        ValueError: the version is none, or is in the changelog, or nothing is unreleased.
    """
    package, log = root / "experiential" / "__init__.py", root / "CHANGELOG.md"
    code, text = package.read_text("utf-8"), log.read_text("utf-8")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise ValueError(f"Expected a version such as 0.2.0, got {version!r}")
    if f"## [{version}]" in text:
        raise ValueError(f"Expected a version that {log.name} does not have, got {version}")
    before, heading, after = text.partition(HEADING)
    if not heading or not after.partition("\n## ")[0].strip():
        raise ValueError(f"Expected changes below {HEADING.strip()!r} in {log.name}, got none")
    dated = f"{HEADING}\n## [{version}] - {datetime.now(UTC):%Y-%m-%d}\n"
    package.write_text(
        re.sub(r'(?m)^__version__ = ".*"$', f'__version__ = "{version}"', code), "utf-8"
    )
    log.write_text(f"{before}{dated}{after}", "utf-8")


if __name__ == "__main__":
    try:
        prepare(sys.argv[1] if len(sys.argv) > 1 else "")
    except ValueError as error:
        sys.exit(f"error: {error}")
