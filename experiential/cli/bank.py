"""`experiential bank`: read an experience bank; nothing here can change it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiential.cli.errors import new_app
from experiential.cli.rows import AsJson, show_json, show_rows
from experiential.errors import ConfigError

if TYPE_CHECKING:
    from experiential.bank.bank import ExperienceBank
    from experiential.types import Experience

Folder = Annotated[Path, typer.Argument(help="Folder of the bank.")]
Namespace = Annotated[str, typer.Option(help="Namespace inside the bank.")]

app = new_app("Read an experience bank; nothing here can change it.")


def open_bank(folder: Path, namespace: str) -> ExperienceBank:
    """The bank of a folder, read-only.

    Raises:
        ConfigError: there is no bank in the folder.
    """
    if not (folder / "journal.sqlite").is_file():
        raise ConfigError(f"Expected the folder of an experience bank, got {folder}, which has no journal.sqlite")
    from experiential.bank.bank import ExperienceBank

    return ExperienceBank(folder, namespace=namespace, read_only=True)


def summary_row(entry: Experience) -> dict[str, Any]:
    """What a list shows of one entry."""
    uses, successes = entry.statistics.uses, entry.statistics.successes
    return {"id": entry.id, "version": entry.version, "kind": entry.kind, "uses": uses, "successes": successes, "text": entry.text}


@app.command("ls")
def list_entries(
    folder: Folder,
    namespace: Namespace = "default",
    limit: Annotated[int, typer.Option(min=0, help="Entries to show; 0 shows all.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List entries, the most used first."""
    with open_bank(folder, namespace) as bank:
        entries = sorted(bank, key=lambda entry: -entry.statistics.uses)
    show_rows([summary_row(entry) for entry in (entries[:limit] if limit else entries)], as_json)


@app.command()
def show(folder: Folder, id: Annotated[str, typer.Argument(help="Id of an entry.")], namespace: Namespace = "default") -> None:
    """Show one entry with its provenance and statistics, as JSON."""
    with open_bank(folder, namespace) as bank:
        entry = bank.get(id)
    if entry is None:
        raise ConfigError(f"Expected the id of an entry of {folder}, got {id!r}; see: experiential bank ls {folder}")
    show_json(entry.model_dump(mode="json"))


@app.command()
def search(
    folder: Folder,
    query: Annotated[str, typer.Argument(help="What to look for.")],
    k: Annotated[int, typer.Option(min=1, help="Hits to show.")] = 5,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Search a bank; nothing is counted."""
    with open_bank(folder, namespace) as bank:
        hits = bank.search(query, k=k)
    rows = [{"rank": hit.rank, "score": round(hit.score, 4), "id": hit.experience.id, "text": hit.experience.text} for hit in hits]
    show_rows(rows, as_json)


@app.command()
def stats(folder: Folder, namespace: Namespace = "default", as_json: AsJson = False) -> None:
    """Count entries, commits, uses and successes."""
    with open_bank(folder, namespace) as bank:
        entries, commits = list(bank), len(bank.commits())
    counts = [entry.statistics for entry in entries]
    numbers = {
        "entries": len(entries),
        "commits": commits,
        "retrievals": sum(count.retrievals for count in counts),
        "uses": sum(count.uses for count in counts),
        "successes": sum(count.successes for count in counts),
    }
    show_json(numbers) if as_json else show_rows([{"what": name, "count": value} for name, value in numbers.items()], False)


@app.command()
def export(folder: Folder, file: Annotated[Path, typer.Argument(help="File to write.")], namespace: Namespace = "default") -> None:
    """Write all entries to a file that `ExperienceBank.import_` reads."""
    with open_bank(folder, namespace) as bank:
        try:
            bank.export(file)
        except OSError as error:
            raise ConfigError(f"Expected a file that can be written, got {file}: {error.strerror or error}") from error
    sys.stdout.write(f"{file}\n")
