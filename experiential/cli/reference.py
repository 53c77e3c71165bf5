"""Generate the configuration page of the documentation from the settings themselves."""

from __future__ import annotations

from collections.abc import Iterator

from experiential.recipe import Setting, settings_reference

HEADER = """# Configuration

Made by `make docs` from the settings themselves; do not edit. Any key can be set in a YAML \
file or on the command line:

    experiential-train --recipe complementary run.steps=100 actor.optim.lr=1e-4

A key that does not exist is refused, and the nearest one is named.
"""

WHOLE = "The run as a whole"
"""Heading of the settings that belong to no section."""


def configuration_page() -> str:
    """Return the page as Markdown."""
    return HEADER + "\n".join(_lines())


def _lines() -> Iterator[str]:
    blocks: dict[str, list[Setting]] = {WHOLE: []}
    known = [*settings_reference()]
    sections = {setting.key.split(".")[0] for setting in known if "." in setting.key}
    for setting in known:
        section = setting.key.split(".")[0]
        blocks.setdefault(section if section in sections else WHOLE, []).append(setting)
    for block, settings in blocks.items():
        yield f"\n## {block}\n"
        yield "| Key | Type | Default | |"
        yield "|---|---|---|---|"
        yield from (_row(setting) for setting in settings)
    yield ""


def _row(setting: Setting) -> str:
    kind = setting.type.replace("|", "or")
    return f"| `{setting.key}` | {kind} | `{setting.default}` | {setting.description} |"
