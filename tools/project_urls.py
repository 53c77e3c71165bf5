"""Write the address of the repository into the metadata of a build, as hatchling's hook.

The address is that of the repository whose release workflow builds, and stands in the environment
variable `EXPERIENTIAL_REPOSITORY`; a build without it names none.
"""

from __future__ import annotations

import os
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

VARIABLE = "EXPERIENTIAL_REPOSITORY"


class ProjectUrls(MetadataHookInterface):
    """Set the dynamic field `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Name the repository and its issues."""
        address = os.environ.get(VARIABLE, "").rstrip("/")
        if not address:
            metadata["urls"] = {}
            return
        if not address.startswith("https://"):
            raise ValueError(
                f"Expected an address that begins with https:// in {VARIABLE}, got {address!r};"
                " correct it, or leave it out"
            )
        metadata["urls"] = {"Repository": address, "Issues": f"{address}/issues"}
