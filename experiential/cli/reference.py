"""The configuration page of the documentation, generated from the settings themselves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from experiential.recipe import Setting, settings_reference

HEADER = """# Configuration

Made by `make docs` from the settings themselves; do not edit. Any key can be set in a YAML file or on the command line:

    experiential-train --recipe complementary run.steps=100 actor.optim.lr=1e-4

A key that does not exist is refused, and the nearest one is named.
"""


def configuration_page() -> str:
    """The page as Markdown."""
    return HEADER + "\n".join(_lines())


def _lines() -> Iterator[str]:
    for block, settings in groupby(settings_reference(), key=_block):
        yield f"\n## {block}\n"
        yield "| Key | Type | Default | |"
        yield "|---|---|---|---|"
        yield from (_row(setting) for setting in settings)
    yield ""


def _block(setting: Setting) -> str:
    return setting.key.split(".")[0] if "." in setting.key else "run identity"


def _row(setting: Setting) -> str:
    kind = setting.type.replace("|", "or")
    return f"| `{setting.key}` | {kind} | `{setting.default}` | {setting.description} |"
