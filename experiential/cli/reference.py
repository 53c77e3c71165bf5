"""Generate the configuration page of the documentation from the settings themselves."""

from __future__ import annotations

from experiential.recipe import Setting, settings_reference

HEADER = """# Configuration

Made by `make docs` from the settings themselves; do not edit. Any key can be set in a YAML \
file or on the command line:

    experiential-train --recipe complementary run.steps=100 actor.optim.lr=1e-4

A key that does not exist is refused, and the nearest one is named. Settings of type `options` \
hold those of one part, in tables of their own below.
"""


def configuration_page() -> str:
    """Return the page as Markdown."""
    settings = list(settings_reference())
    sections = {setting.key.split(".")[0] for setting in settings if "." in setting.key}
    whole = "The run as a whole"  # the settings that belong to no section
    tables: dict[str, list[Setting]] = {whole: []}
    for setting in settings:
        section = setting.key.split(".")[0]
        tables.setdefault(section if section in sections else whole, []).append(setting)
    for option in settings_reference(options=True):
        part = option.key.rpartition(".")[0]
        tables.setdefault(f"Options: {part}", []).append(option)
    lines = [HEADER.rstrip("\n")]
    for heading, rows in tables.items():
        lines += ["", f"## {heading}", "", "| Key | Type | Default | |", "|---|---|---|---|"]
        for row in rows:
            kind = row.type.replace("|", "or")
            lines.append(f"| `{row.key}` | {kind} | `{row.default}` | {row.description} |")
    return "\n".join([*lines, ""])
