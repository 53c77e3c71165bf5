"""Read, roll back, prune, merge and check an experience bank with `experiential bank`."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from experiential.cli.errors import complain, new_app
from experiential.cli.options import (
    AsJson,
    Backend,
    BackendOption,
    BaseUrl,
    Embedder,
    KeyEnv,
    Namespace,
    Store,
    named_model,
    opened_extractor,
)
from experiential.cli.rows import printable, show_json, show_pairs, show_rows
from experiential.errors import BankError, BankLockedError, BudgetError, ConfigError
from experiential.ids import short_ids, whole_id
from experiential.types import Statistics

if TYPE_CHECKING:
    from experiential.bank.folder import FolderBank
    from experiential.bank.protocol import Bank
    from experiential.bank.records import Difference, Standing
    from experiential.types import Estimate, Experience

Folder = Annotated[Path, Argument(help="Folder of the bank.")]
Place = Annotated[
    str, Argument(metavar="BANK", help="Folder of the bank, or the address of its server.")
]
Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, Option("--dry-run", help="Change nothing, only show what would change.")]
Limit = Annotated[int, Option(min=0, help="Rows to show; 0 shows all.")]

_PATIENCE = 5.0  # for a server that is being restarted; somebody waits for the command

app = new_app("Read and mend an experience bank.")


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds no bank."""
    if not (folder / "journal.sqlite").is_file():
        raise ConfigError(
            f"Expected the folder of an experience bank, got {folder}, which has no journal.sqlite"
        )


@contextmanager
def opened(
    folder: Path, namespace: str, *, write: bool = False, make: bool = False, **options: Any
) -> Generator[FolderBank]:
    """Open the bank of a folder, read-only unless ``write``; its errors become user errors.

    ``make`` makes it when it is not there; ``options`` are further ones of `ExperienceBank`.
    """
    if not make:
        check_folder(folder)
    from experiential.bank.bank import ExperienceBank

    try:
        with ExperienceBank(folder, namespace=namespace, read_only=not write, **options) as bank:
            yield bank
    except BankLockedError:
        raise
    except (BankError, ValueError) as error:
        raise ConfigError(str(error)) from error
    except sqlite3.DatabaseError as error:
        raise BankError(
            f"Expected a whole journal in {folder}, got: {error}; run: experiential bank doctor"
            f" {folder}"
        ) from error


@contextmanager
def opened_at(
    place: str, namespace: str, *, write: bool = False, **options: Any
) -> Generator[Bank]:
    """Open the bank of a folder as `opened` does, or the one behind the address of a server."""
    if not place.startswith(("http://", "https://")):
        with opened(Path(place), namespace, write=write, **options) as bank:
            yield bank
        return
    from experiential.bank.bank import ExperienceBank

    options = {"patience": _PATIENCE, **options}
    try:
        with ExperienceBank(place, namespace=namespace, read_only=not write, **options) as bank:
            yield bank
    except (BankError, ValueError) as error:
        raise ConfigError(str(error)) from error


def confirm(question: str, yes: bool) -> bool:
    """Ask on the terminal whether to go on, unless ``yes``; with nobody there, it is refused."""
    if yes:
        return True
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort as error:
        raise ConfigError(
            "Expected an answer, got none and changed nothing; pass --yes to go on without being"
            " asked"
        ) from error
    if not agreed:
        sys.stderr.write("nothing was changed\n")
    return agreed


# Reading


def summary_row(entry: Experience) -> dict[str, Any]:
    """Return the row of one entry in a list."""
    counts = entry.statistics.model_dump(include={"uses", "successes"})
    return entry.model_dump(include={"id", "version", "kind"}) | counts | {"text": entry.text}


@app.command("ls")
def list_entries(
    folder: Folder,
    namespace: Namespace = "default",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List entries, the most used first, and what their outcomes say of them."""
    with opened(folder, namespace) as bank:
        entries = sorted(bank, key=lambda entry: -entry.statistics.uses)
        entries = entries[:limit] if limit else entries
        standings = standings_of(bank, entries)
        short = short_ids(bank.ids())
    rows = [summary_row(entry) for entry in entries]
    for row, standing in zip(rows, standings, strict=True):
        row["evidence"] = standing.verdict
        row["text"] = row.pop("text")  # the last column
    show_rows(rows, as_json, short)


@app.command()
def show(
    folder: Folder,
    id: Annotated[str, Argument(help="Id of an entry, or its first digits.")],
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Show one entry with its provenance, its statistics, its uplift and what outcomes say."""
    with opened(folder, namespace) as bank:
        wanted, see = f"the id of an entry of {folder}", f"experiential bank ls {folder}"
        entry = bank.get(whole_id(id, (one.id for one in bank), wanted, see))
        assert entry is not None
        uplift, [standing] = bank.uplift(entry.id), standings_of(bank, [entry])
    if as_json:
        score = entry.statistics.score
        evidence = {"score": score, "uplift": uplift, "evidence": standing}
        show_json(entry.model_dump(mode="json") | evidence)
        return
    made = entry.provenance.model_dump(exclude_none=True, exclude_defaults=True)
    shown = {
        **{name: getattr(entry, name) for name in ("id", "version", "kind", "task", "text")},
        **{name: str(value) for name, value in made.items()},
        **entry.statistics.model_dump(),
        "score": f"{entry.statistics.score:.3f}",
        "uplift of this version": in_words(uplift),
        "uplift with its lineage": in_words(uplift.lineage),
        "evidence": standing_in_words(standing),
    }
    show_pairs({name: "" if value is None else value for name, value in shown.items()})


def in_words(estimate: Estimate) -> str:
    """Format an uplift estimate for people.

    >>> from experiential.types import Estimate
    >>> in_words(Estimate(groups=3, mean=0.5, interval=(0.1, 0.9)))
    '+0.500 (95 % +0.100 to +0.900, 3 groups)'
    """
    if estimate.mean is None:
        return "no episode of its tasks played without it yet"
    unit = "task" if getattr(estimate, "baseline", "groups") == "tasks" else "group"
    if estimate.interval is None:
        return f"{estimate.mean:+.3f} ({estimate.groups} {unit}, no interval)"
    low, high = estimate.interval
    several = unit if estimate.groups == 1 else f"{unit}s"
    return f"{estimate.mean:+.3f} (95 % {low:+.3f} to {high:+.3f}, {estimate.groups} {several})"


def standings_of(bank: Bank, entries: Sequence[Experience]) -> list[Standing]:
    """Return what outcomes say of live entries."""
    from experiential.bank.records import Asked

    return bank.standings([Asked(id=entry.id, version=entry.version) for entry in entries])


def standing_in_words(standing: Standing) -> str:
    """Format for people what outcomes say of an entry.

    >>> from experiential.bank.records import Standing
    >>> standing_in_words(Standing(uses=30, interval=(-0.9, -0.1)))
    'quarantined: never shown, since it harms (-0.900 to -0.100, 30 uses)'
    """
    low, high = standing.interval
    found = f"({low:+.3f} to {high:+.3f}, {standing.uses} uses)"
    return {
        "proposed": "proposed: shown once a person approves, see: experiential bank approve",
        "quarantined": f"quarantined: never shown, since it harms {found}",
        "suspect": f"suspect: hardly shown, since one of its words did harm elsewhere {found}",
        "helps": f"helps {found}",
        "unproven": f"unproven {found}",
    }[standing.verdict]


@app.command()
def search(
    folder: Folder,
    query: Annotated[str, Argument(help="What to look for.")],
    k: Annotated[int, Option(min=1, help="Hits to show.")] = 5,
    hybrid: Annotated[
        float,
        Option(
            min=0.0, max=1.0, help="Weight of shared words beside the cosine; 0 leaves words out."
        ),
    ] = 0.0,
    kind: Annotated[
        list[str] | None,
        Option(help="Only entries of this kind; given again, of this one too."),
    ] = None,
    where: Annotated[
        list[str] | None,
        Option(
            metavar="FIELD=VALUE",
            help="Only entries whose task or metadata field is so; for one field again, or so.",
        ),
    ] = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Search a bank; nothing is counted."""
    fields = filter_of(kind or [], where or [])
    with opened(folder, namespace) as bank:
        hits = bank.search(query, k=k, hybrid=hybrid, where=fields)
        short = short_ids(bank.ids())
    rows = [
        {"rank": hit.rank, "score": round(hit.score, 4)}
        | hit.experience.model_dump(include={"id", "text"})
        for hit in hits
    ]
    show_rows(rows, as_json, short)


def filter_of(kinds: Sequence[str], pairs: Sequence[str]) -> dict[str, list[Any]]:
    """Return the filter of the options ``--kind`` and ``--where``.

    A value that is valid JSON also matches as the parsed value.

    >>> filter_of(["lesson"], ["tags=alfworld", "level=3"])
    {'kind': ['lesson'], 'tags': ['alfworld'], 'level': ['3', 3]}
    """
    fields: dict[str, list[Any]] = {"kind": list(kinds)} if kinds else {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"Expected --where FIELD=VALUE, got {pair!r}; for example: --where tags=alfworld"
            )
        values = fields.setdefault(name.strip(), [])
        values.append(value)
        with suppress(ValueError):
            read = json.loads(value)
            if isinstance(read, int | None) or (isinstance(read, float) and math.isfinite(read)):
                values.append(read)
    return fields


@app.command()
def why(
    folder: Folder,
    trajectory: Annotated[str, Argument(help="Id of a recorded trajectory, or its first digits.")],
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Say what an episode was shown, how it ended, and what was written from it."""
    with opened(folder, namespace) as bank:
        known = bank.ids()
        wanted, see = f"the id of an episode of {folder}", f"experiential bank history {folder}"
        found = bank.why(whole_id(trajectory, known, wanted, see))
    short = short_ids(known)
    if as_json:
        show_json(found)
        return
    said = {True: "success", False: "failure", None: "unknown"}
    outcome = found.error or said[found.success]
    ended = {"condition": found.condition.value, "outcome": outcome, "reward": found.reward}
    said_later = {"judged": found.judgement, "score": found.score, "usual score": found.baseline}
    ended |= {name: value for name, value in said_later.items() if value not in (None, "")}
    show_pairs({"task": found.task} | ended)
    sys.stdout.write("\nshown\n")
    shown = [
        one.model_dump(include={"turn", "how", "rank"})
        | {
            "score": f"{one.score:.3f}",
            "propensity": f"{one.propensity:.3f}",
            "entry": f"{short.get(one.id, one.id)} v{one.version}",
            "uplift": in_words(one.uplift),
            "text": one.refined or one.text or "",
        }
        for one in found.shown
    ]
    show_rows(shown, False)
    sys.stdout.write("\nwritten from it\n")
    show_rows([summary_row(entry) for entry in found.written], False, short)


@app.command()
def history(
    folder: Folder,
    id: Annotated[
        str | None, Argument(help="Id of an entry: only the commits that changed it.")
    ] = None,
    namespace: Namespace = "default",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List commits, the newest last, with the number of entries that each changed."""
    with opened(folder, namespace) as bank:
        known = bank.ids()
        if id is not None:
            wanted, see = f"the id of an entry of {folder}", f"experiential bank ls {folder}"
            id = whole_id(id, known, wanted, see)
        commits = bank.history(id)
    hidden = None if id else {"version"}
    rows = [
        commit.model_dump(exclude=hidden) for commit in (commits[-limit:] if limit else commits)
    ]
    if not as_json:
        for row in rows:
            row["time"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
            row["ref"] = row["ref"] or ""
            if id:
                row["version"] = row["version"] or "removed"
    show_rows(rows, as_json, short_ids(known))


@app.command()
def diff(
    folder: Folder,
    a: Annotated[int, Argument(help="A commit; 0 is before the first.")],
    b: Annotated[int | None, Argument(help="A later commit; the last one by default.")] = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Show which entries were added, removed and changed from one commit to another."""
    with opened(folder, namespace) as bank:
        found = bank.diff(a, bank.head if b is None else b)
        short = short_ids(bank.ids())
    show_rows(difference_rows(found), as_json, short)


def difference_rows(found: Difference) -> list[dict[str, Any]]:
    """Return one row for each changed entry, with its old and its new text."""
    changes = [
        *(("added", entry.id, None, entry.text) for entry in found.added),
        *(("removed", entry.id, entry.text, None) for entry in found.removed),
        *(("changed", pair.new.id, pair.old.text, pair.new.text) for pair in found.changed),
    ]
    return [dict(zip(("what", "id", "old", "new"), change, strict=True)) for change in changes]


@app.command()
def stats(
    place: Place,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Count entries, what outcomes say of them, commits, uses and successes."""
    with opened_at(place, namespace) as bank:
        entries = list(bank)
        verdicts = Counter(standing.verdict for standing in standings_of(bank, entries))
        counts = [entry.statistics.model_dump() for entry in entries]
        names = ("helps", "unproven", "suspect", "quarantined", "proposed")
        numbers = {
            "entries": len(entries),
            **{name: verdicts[name] for name in names},
            "commits": len(bank.commits()),
            **{name: sum(count[name] for count in counts) for name in Statistics.model_fields},
            "queued": len(bank.queue.waiting()),
            "dead letters": len(bank.queue.dead_letters()),
        }
    if as_json:
        show_json(numbers)
    else:
        show_pairs(numbers, "count")


# Changing


@app.command()
def rollback(
    folder: Folder,
    commit: Annotated[int, Argument(help="The commit to go back to; 0 is before the first.")],
    namespace: Namespace = "default",
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Restore the state after an earlier commit, by a new commit, and show the changes.

    Nothing is erased, counters stay.
    """
    with opened(folder, namespace, write=not dry_run) as bank:
        rows = difference_rows(bank.diff(bank.head, commit))
        if not dry_run:
            if not confirm(f"Change {len(rows)} entries of {folder} back to commit {commit}?", yes):
                return
            bank.rollback(commit)
        short = short_ids(bank.ids())
    show_rows(rows, as_json, short)


@app.command()
def approve(
    folder: Folder,
    ids: Annotated[
        list[str] | None, Argument(help="Ids of proposed entries; without any, they are listed.")
    ] = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Approve proposed entries, so that searches find them; without ids, list what waits."""
    with opened(folder, namespace, write=bool(ids)) as bank:
        waiting = [entry for entry in bank if entry.proposed]
        known = [entry.id for entry in bank]
        see = f"experiential bank approve {folder}"
        whole = [whole_id(id, known, "the id of a proposed entry", see) for id in ids or ()]
        entries = [bank.approve(id) for id in whole] if whole else waiting
        short = short_ids(bank.ids())
    show_rows([summary_row(entry) for entry in entries], as_json, short)


@app.command()
def prune(
    folder: Folder,
    score: Annotated[
        float | None, Option(help="Take out entries whose Laplace score is below it.")
    ] = None,
    uplift: Annotated[
        float | None, Option(help="Take out entries whose uplift interval ends below it.")
    ] = None,
    min_uses: Annotated[int, Option(min=0, help="Uses that an entry must have had.")] = 5,
    namespace: Namespace = "default",
    yes: Yes = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Remove tried entries that did not help, and show them. `rollback` brings them back."""
    if score is None and uplift is None:
        raise ConfigError(
            "Expected --score or --uplift to prune by, got neither; for example: --score 0.3"
        )
    with opened(folder, namespace, write=not dry_run) as bank:
        doomed = bank.prune(score=score, uplift_below=uplift, min_uses=min_uses, dry_run=True)
        if not dry_run and doomed:
            if not confirm(f"Take {len(doomed)} of {len(bank)} entries out of {folder}?", yes):
                return
            doomed = bank.prune(score=score, uplift_below=uplift, min_uses=min_uses)
        short = short_ids(bank.ids())
    show_rows([summary_row(entry) for entry in doomed], as_json, short)


@app.command()
def merge(
    folder: Folder,
    model: Annotated[
        str | None,
        Option(
            help="Merges related entries: tiny, smollm2, a model folder, a hub name, or with"
            " --base-url its name at the server."
        ),
    ] = None,
    base_url: BaseUrl = None,
    api_key_env: KeyEnv = None,
    backend: Backend = None,
    backend_option: BackendOption = None,
    threshold: Annotated[
        float, Option(help="Without a model: cosine of two texts from which on they are one.")
    ] = 0.95,
    across_tasks: Annotated[
        bool,
        Option("--across-tasks", help="Without a model: compare entries of different tasks too."),
    ] = False,
    namespace: Namespace = "default",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> int:
    """Merge related entries, and show the changes.

    A model merges; without one, near-duplicates are merged by their cosine.
    """
    if (model, base_url, api_key_env, backend) == (None,) * 4:
        with opened(folder, namespace, write=not dry_run) as bank:
            found = bank.deduplicate(threshold, across_tasks=across_tasks, dry_run=dry_run)
            short = short_ids(bank.ids())
        rows: list[dict[str, Any]] = []
        for group in found:
            kept = {"merged into": group.survivor.id, "its text": group.survivor.text}
            rows += [{"id": one.id, "text": one.text} | kept for one in group.merged]
        sys.stderr.write(
            f"no --model: texts with a cosine of {threshold:g} or more count as one, the oldest"
            " stays as it is\n"
        )
        show_rows(rows, as_json, short)
        return 0

    from experiential.bank.manager import ExperienceManager
    from experiential.cli.preflight import check_model

    settings = named_model(model, base_url, api_key_env, backend, backend_option)
    check_model(settings)
    with ExitStack() as stack:
        bank = stack.enter_context(opened(folder, namespace, write=not dry_run))
        if dry_run:  # a copy is merged
            scratch = stack.enter_context(TemporaryDirectory(prefix="experiential-merge-"))
            bank = stack.enter_context(bank.fork(scratch))
        head, spent = bank.head, None
        extractor = stack.enter_context(opened_extractor(settings, seed=0))
        with ExperienceManager(bank) as manager:
            manager.extractor = extractor  # given now, it leaves the queue to `experiential distil`
            try:
                manager.merge()
            except BudgetError as error:
                spent = error
            failures: dict[str, int] = manager.stats()["failures"]
        for reason, count in failures.items():
            sys.stderr.write(f"{count} x {printable(reason)}\n")
        changes = difference_rows(bank.diff(head, bank.head))
        short = short_ids(bank.ids())
    show_rows(changes, as_json, short)
    return 0 if spent is None else complain(f"{spent}; the same command goes on", 1)


# Moving and mending


@app.command()
def export(
    folder: Folder,
    file: Annotated[Path, Argument(help="File to write.")],
    namespace: Namespace = "default",
) -> None:
    """Write all entries to a file that `import` reads.

    The format is Markdown if the name ends in .md, else JSON Lines.
    """
    with opened(folder, namespace) as bank:
        try:
            bank.export(file)
        except OSError as error:
            raise ConfigError(
                f"Expected a file that can be written, got {file}: {error.strerror or error}"
            ) from error
    sys.stdout.write(f"{file}\n")


@app.command("import")
def import_entries(
    folder: Annotated[Path, Argument(help="Folder of the bank; made when it is not there.")],
    file: Annotated[Path, Argument(help="File that `export` wrote.")],
    namespace: Namespace = "default",
    embedder: Embedder = None,
    edited: Annotated[
        bool,
        Option("--edited", help="The file was changed on purpose since it was exported."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Add the entries of an exported file in one commit, those excepted that are there already."""
    if not file.is_file():
        raise ConfigError(
            f"Expected a file that `experiential bank export` wrote, got {file}, which is not there"
        )
    with opened(folder, namespace, write=True, make=True, embedder=embedder) as bank:
        added = bank.import_(file, edited=edited)
        entries = len(bank)
    show_rows([{"added": added, "entries": entries}], as_json)


@app.command("dead-letters")
def dead_letters(place: Place, namespace: Namespace = "default", as_json: AsJson = False) -> None:
    """List the episodes whose distillation was given up, oldest first, with the last reason."""
    with opened_at(place, namespace) as bank:
        rows: list[dict[str, Any]] = []
        for letter in bank.queue.dead_letters():
            trajectory = bank.trajectory(letter.id)
            task = trajectory.task if trajectory else ""
            rows.append({**letter.model_dump(), "task": task})
    show_rows(rows, as_json, short_ids(row["id"] for row in rows))


@app.command()
def requeue(
    place: Place,
    ids: Annotated[
        list[str] | None, Argument(help="Ids of dead letters; all of them by default.")
    ] = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Queue dead letters again; `experiential distil`, or a manager with an extractor, distils."""
    with opened_at(place, namespace, write=True) as bank:
        dead = [letter.id for letter in bank.queue.dead_letters()]
        see = f"experiential bank dead-letters {place}"
        chosen = [whole_id(id, dead, "the id of a dead letter", see) for id in ids or ()]
        queued = [id for id in chosen or dead if bank.queue.requeue(id)]
    show_rows([{"queued": len(queued)}], as_json)


@app.command()
def doctor(folder: Folder, as_json: AsJson = False) -> None:
    """Check journal, index and queue of all namespaces of a bank.

    Nothing is changed. The exit code is 1 if something is wrong.
    """
    check_folder(folder)
    from experiential.bank.storage.checkup import examine

    findings = examine(folder)
    show_rows([finding.model_dump() for finding in findings], as_json)
    if any(finding.status == "wrong" for finding in findings):
        raise typer.Exit(1)


@app.command()
def recover(
    folder: Annotated[Path, Argument(help="Folder of the damaged bank; it is not changed.")],
    to: Annotated[Path, Option("--to", help="Folder of the new bank.")],
    from_export: Annotated[
        Path | None, Option(help="File that `export` wrote, for what the journal has lost.")
    ] = None,
    namespace: Namespace = "default",
    embedder: Embedder = None,
    as_json: AsJson = False,
) -> None:
    """Write a new bank with all that is undamaged in a damaged one, and report what is lost.

    Rows come from the journal, page by page where SQLite cannot read it; entries that it has lost
    come from the export and from the index.
    """
    from experiential.bank.recover import recover as recovered

    options: dict[str, Any] = {"namespace": namespace, "embedder": embedder}
    try:
        report = recovered(folder, to, export=from_export, **options)
    except (BankError, ValueError) as error:
        raise ConfigError(str(error)) from error
    show_rows([{**row.model_dump(), "names": ", ".join(row.names)} for row in report], as_json)


@app.command()
def rebuild(
    folder: Folder,
    store: Store = None,
    namespace: Namespace = "default",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make the index again from the journal."""
    with opened(folder, namespace, write=True, store=store) as bank:
        question = f"Make the index of namespace {namespace!r} in {folder} again from the journal?"
        if confirm(question, yes):
            show_rows([{"indexed": bank.rebuild()}], as_json)
