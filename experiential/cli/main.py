"""Inspect banks, runs, environments and the installation with `experiential`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument, Option

from experiential.cli import (
    bank,
    bank_write,
    bench,
    bench_export,
    distil,
    envs,
    episodes,
    evaluate,
    init,
    mcp,
    serve,
    stream,
    ui,
)
from experiential.cli import export as exporting
from experiential.cli import play as playing
from experiential.cli.errors import complain, new_app, run_process
from experiential.cli.examples import add_examples
from experiential.cli.options import AsJson, Version
from experiential.cli.rows import show_line, show_rows
from experiential.config import BankSettings
from experiential.errors import MissingExtraError
from experiential.recipe import (
    Setting,
    describe_recipe,
    profile_names,
    recipe_names,
    settings_reference,
)

Markdown = Annotated[bool, Option("--markdown", help="Print the page for the documentation.")]
RayAddress = Annotated[
    str | None,
    Option("--address", help="Ray cluster to check.  [default: RAY_ADDRESS, or one started here]"),
]
Cluster = Annotated[
    bool, Option("--cluster", help="Also check versions, GPUs, Ray, ports and shared memory.")
]
CONFIGURATION_HEADER = """# Configuration

Made by `make docs` from the settings themselves; do not edit. Any key can be set in a YAML \
file or on the command line:

    experiential-train --recipe complementary run.steps=100 actor.optim.lr=1e-4

A key that does not exist is refused, and the nearest one is named. Settings of type `options` \
hold those of one part, in tables of their own below.
"""

app = new_app(
    "Inspect banks, runs, environments and the installation of experiential.", completion=True
)
for command in (
    *(bank_write.add, bank_write.edit, bank_write.retire),
    *(bank_write.purge, bank_write.backup, bank_write.compact),
):
    bank.app.command(command.__name__)(command)
app.add_typer(bank.app, name="bank")
bench.app.command("stream")(stream.stream)
bench.app.command("export")(bench_export.export)
app.add_typer(bench.app, name="bench")
app.add_typer(envs.app, name="envs")
app.command("episodes")(episodes.episodes)
app.command("eval")(evaluate.evaluate)
app.command("serve")(serve.serve)
app.command("distil")(distil.distil)
app.command("mcp")(mcp.mcp)
app.command("init")(init.init)
app.command("ui")(ui.ui)
app.command("export")(exporting.export)
app.command("play")(playing.play)


@app.callback(invoke_without_command=True)
def options(context: typer.Context, version: Version = False) -> None:
    """Inspect banks, runs, environments and the installation of experiential."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def recipes(as_json: AsJson = False) -> None:
    """List the bundled recipes, and the profiles to compose them with: complementary+small."""
    names = [*recipe_names(), *profile_names()]
    rows = [{"recipe": name, "what it does": describe_recipe(name)} for name in names]
    show_rows(rows, as_json)


@app.command()
def settings(markdown: Markdown = False, as_json: AsJson = False) -> None:
    """List every setting with its type and default."""
    if markdown:
        sys.stdout.write(configuration_page())
        return
    rows = [
        {"key": s.key, "type": s.type, "default": s.default, "about": s.description}
        for s in (*settings_reference(), *option_reference())
    ]
    show_rows(rows, as_json)


def option_reference() -> Iterator[Setting]:
    """Yield the options of all parts, those of the bank's manager last."""
    from experiential.bank.options import ManagerOptions

    yield from settings_reference(options=True)
    prefix = "bank.options."
    settings = {setting.key for setting in settings_reference(BankSettings(), prefix)}
    for option in settings_reference(ManagerOptions(), prefix):
        if option.key not in settings:
            yield option


def configuration_page() -> str:
    """Return the page of the documentation with all settings, as Markdown."""
    keys = list(settings_reference())
    sections = {setting.key.split(".")[0] for setting in keys if "." in setting.key}
    whole = "The run as a whole"  # the settings that belong to no section
    tables: dict[str, list[Setting]] = {whole: []}
    for setting in keys:
        section = setting.key.split(".")[0]
        tables.setdefault(section if section in sections else whole, []).append(setting)
    for option in option_reference():
        part = option.key.rpartition(".")[0]
        tables.setdefault(f"Options: {part}", []).append(option)
    lines = [CONFIGURATION_HEADER.rstrip("\n")]
    for heading, rows in tables.items():
        lines += ["", f"## {heading}", "", "| Key | Type | Default | |", "|---|---|---|---|"]
        for row in rows:
            kind, about = row.type.replace("|", "or"), row.description.replace("|", r"\|")
            lines.append(f"| `{row.key}` | {kind} | `{row.default}` | {about} |")
    return "\n".join([*lines, ""])


@app.command()
def doctor(as_json: AsJson = False, cluster: Cluster = False, address: RayAddress = None) -> int:
    """Show installed and missing parts, and how to get them.

    With --cluster, --address or an installed Ray, also show what the cluster engine needs. The exit
    code is 1 where something is broken: a required package or the model tiny is missing, or an
    installed torch does not load. What is optional may be missing.
    """
    from experiential.cli.doctor import Finding, examine, examine_cluster, version_of

    findings = list(examine())
    if cluster or address is not None or version_of("ray"):
        findings += examine_cluster(address)
    else:
        findings.append(Finding("cluster", "ray", "missing: see experiential doctor --cluster"))
    found = [finding._asdict() for finding in findings]
    if not as_json:
        for row in found:
            extra = row["extra"]
            packaged = extra not in ("machine", "models", "core")
            hint = f"missing: pip install 'experiential-rl[{extra}]'" if packaged else "missing"
            row["found"] = row["found"] or hint
            del row["broken"]
    show_rows(found, as_json)
    if broken := [finding.name for finding in findings if finding.broken]:
        return complain(f"broken: {', '.join(broken)}; install it anew, see the line above", 1)
    return 0


@app.command()
def report(folder: Annotated[Path, Argument(help="Output folder of a run.")]) -> None:
    """Show the results of a run again, draw its learning curve, and write its static page."""
    from experiential.cli.report import show_report
    from experiential.ui.page import REPORT_FILE, write_report
    from experiential.ui.source import Source

    show_report(Console(), folder)
    with closing(Source(folder)) as source:
        try:
            written = write_report(source, folder / REPORT_FILE)
        except MissingExtraError as error:
            show_line(Console(), f"no page: {error}")
        else:
            show_line(Console(), f"{'page':>15}  {written}")


add_examples(app, "experiential")


def main() -> None:
    """Run `experiential`, as its entry point."""
    run_process(app)


if __name__ == "__main__":
    main()
