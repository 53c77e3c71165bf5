"""Carry out what a person asks of a bank: add, edit, retire, purge, back up and compact."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from experiential.cli.bank import (
    DryRun,
    Folder,
    Place,
    Yes,
    check_folder,
    confirm,
    opened_at,
    summary_row,
)
from experiential.cli.options import AsJson, Embedder, Namespace
from experiential.cli.rows import printable, show_json, show_pairs, show_rows
from experiential.errors import BankError, ConfigError
from experiential.ids import whole_id
from experiential.types import Experience

if TYPE_CHECKING:
    from experiential.bank.protocol import Bank
    from experiential.bank.storage.erase import Doomed
    from experiential.bank.storage.journal import Journal

_MEBIBYTE = 2**20
_DAY = 86_400.0
Text = Annotated[str, Argument(help="The text; - reads it from stdin.")]


def add(
    place: Place,
    text: Text,
    task: Annotated[str | None, Option(help="What the entry is for.")] = None,
    kind: Annotated[str, Option(help="Kind of the entry.")] = "lesson",
    namespace: Namespace = "default",
    embedder: Embedder = None,
    as_json: AsJson = False,
) -> None:
    """Write an entry; a folder that is not there becomes a bank."""
    is_remote = place.startswith(("http://", "https://"))
    options: dict[str, Any] = {} if is_remote else {"make": True}
    with opened_at(place, namespace, write=True, embedder=embedder, **options) as bank:
        entry = bank.add(_read(text), task=task, kind=kind)
    show_rows([summary_row(entry)], as_json)


def edit(
    place: Place,
    id: Annotated[str, Argument(help="Id of an entry, or its first digits.")],
    text: Text,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Write the next version of an entry; its history keeps the old one."""
    with opened_at(place, namespace, write=True) as bank:
        [known] = _entries(bank, [id], place)
        entry = bank.update(known.id, _read(text))
    show_rows([summary_row(entry)], as_json)


def retire(
    place: Place,
    ids: Annotated[list[str], Argument(help="Ids of entries, or their first digits.")],
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Take entries out, so that no search finds them; `rollback` brings them back."""
    with opened_at(place, namespace, write=True) as bank:
        entries = _entries(bank, ids, place)
        for entry in entries:
            bank.remove(entry.id)
    show_rows([summary_row(entry) for entry in entries], as_json)


def _entries(bank: Bank, given: Sequence[str], place: str) -> list[Experience]:
    """Return the entries with these ids, in full or by their first digits, each once."""
    known = {entry.id: entry for entry in bank.entries()}
    wanted, see = f"the id of an entry of {place}", f"experiential bank ls {place}"
    ids = dict.fromkeys(whole_id(id, known, wanted, see) for id in given)
    return [known[id] for id in ids]


def _read(text: str) -> str:
    return sys.stdin.read() if text == "-" else text


def purge(
    folder: Folder,
    id: Annotated[str | None, Argument(help="Id of an entry, or its first digits.")] = None,
    task: Annotated[str | None, Option(help="Instead: all of this task.")] = None,
    instance: Annotated[str | None, Option(help="Instead: all of this task instance.")] = None,
    text: Annotated[
        str | None, Option(help="Instead: all that holds this text, as it is spelt; - reads it.")
    ] = None,
    namespace: Namespace = "default",
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Erase entries for good, with all that was made from them or led to them, and prove it.

    All versions, trajectories, generations, receipts and queue items go, and the index is made
    again. History keeps that somebody purged something, and when. Exports and backups are not
    touched. The exit code is 1 if the text is still found.
    """
    wanted = {"id": id, "task": task, "instance": instance, "text": text}
    given = {name: value for name, value in wanted.items() if value is not None}
    if len(given) != 1:
        raise ConfigError(
            "Expected one of ID, --task, --instance and --text to say what to purge, got"
            f" {len(given)}"
        )
    if text is not None:
        given["text"] = _read(text).rstrip("\n")
    if not all(value.strip() for value in given.values()):
        raise ConfigError("Expected a text that is not blank to say what to purge, got a blank one")
    check_folder(folder)
    from experiential.bank.storage import erase

    with erase.exclusive(folder) as journal:
        if id is not None:
            wanted_id, see = f"the id of an entry of {folder}", f"experiential bank ls {folder}"
            known = erase.entries(journal, namespace)
            given["id"] = whole_id(id, known, wanted_id, see)
        try:
            doomed = erase.find(journal, namespace, **given)
        except BankError as error:
            raise ConfigError(f"{error} {namespace!r} of {folder}") from error
        counts = _counts(doomed)
        if doomed.others:
            raise ConfigError(
                f"Expected a text that no other entry holds, got one that is also in"
                f" {', '.join(doomed.others[:5])}; edit and purge these, or pass --text with it"
            )
        if dry_run:
            show_rows([counts], as_json)
            return
        named = ", ".join(f"{count} {name}" for name, count in counts.items())
        if not confirm(f"Erase {named} of {folder} for good?", yes):
            return
        erase.drop_mapped(folder)  # first: a kill between the two must leave no text behind
        commit = erase.erase(journal, namespace, doomed)
        elsewhere = _elsewhere(journal, namespace, doomed)
    erase.drop_index(folder)
    _renew_server_index(folder, namespace)
    proof = erase.prove(folder, doomed.texts)
    found = {"commit": commit} | counts
    found |= {"files read": proof.files, "bytes read": proof.bytes}
    found["places with the text"] = sum(proof.found.values())
    if as_json:
        show_json(found | {"found": proof.found, "namespaces": elsewhere})
    else:
        show_pairs(found)
    if proof.found:
        where = ", ".join(f"{printable(name)} ({count})" for name, count in proof.found.items())
        hint = f"; purge it from namespace {', '.join(map(repr, elsewhere))} too" * bool(elsewhere)
        sys.stderr.write(f"still found in {where}{hint}\n")
        raise typer.Exit(1)


def _counts(doomed: Doomed) -> dict[str, int]:
    return {name: len(getattr(doomed, name)) for name in ("entries", "trajectories", "generations")}


def _elsewhere(journal: Journal, namespace: str, doomed: Doomed) -> list[str]:
    """Return the other namespaces of the folder that hold one of the texts."""
    from experiential.bank.storage.erase import holding, namespaces

    tables = ("versions", "trajectories", "generations")
    return [
        name
        for name in namespaces(journal)
        if name != namespace
        and any(holding(journal, table, name, doomed.texts) for table in tables)
    ]


def _renew_server_index(folder: Path, namespace: str) -> None:
    """Write the index again where it is on a server, which forgets the collection it had."""
    from experiential.bank.bank import ExperienceBank
    from experiential.bank.index.site import recorded_site
    from experiential.bank.storage.journal import Journal
    from experiential.bank.storage.tables import History

    journal = Journal.open_copy(folder)
    try:
        site = recorded_site(folder, namespace, History(journal, namespace))
    finally:
        journal.close()
    if site is not None and site.folder is None:
        with ExperienceBank(folder, namespace=namespace) as bank:
            bank.rebuild()


def backup(
    place: Place,
    to: Annotated[Path, Argument(metavar="DIR", help="New folder, which is a bank again.")],
    as_json: AsJson = False,
) -> None:
    """Copy the journal of a bank into a new folder, beside its writer or through its server."""
    if place.startswith(("http://", "https://")):
        with opened_at(place, "default") as bank:
            bank.backup(to)
    else:
        check_folder(Path(place))
        from experiential.bank.storage.journal import Journal, new_folder

        journal = Journal.open_copy(Path(place))
        try:
            journal.backup(new_folder(to))
        except BankError as error:
            raise ConfigError(str(error)) from error
        finally:
            journal.close()
    if as_json:
        show_json([{"folder": str(to)}])
    else:
        sys.stdout.write(f"{printable(to)}\n")


def compact(
    folder: Folder,
    older_than: Annotated[
        float | None,
        Option(
            min=0,
            metavar="DAYS",
            help="Also drop turns of trajectories, and generations, that are older and explain no"
            " entry.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the journal anew without unused room; entries, history and evidence stay."""
    check_folder(folder)
    from experiential.bank.storage import erase
    from experiential.bank.storage.journal import JOURNAL_NAME

    before = (folder / JOURNAL_NAME).stat().st_size
    with erase.exclusive(folder) as journal:
        dropped = {} if older_than is None else erase.forget_old(journal, older_than * _DAY)
        erase.vacuum(journal)
    after = (folder / JOURNAL_NAME).stat().st_size
    sizes = {"MiB before": before / _MEBIBYTE, "MiB after": after / _MEBIBYTE}
    show_rows([dropped | {name: round(size, 2) for name, size in sizes.items()}], as_json)
