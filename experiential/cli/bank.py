"""Read, roll back, prune, merge and check an experience bank with `experiential bank`."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from experiential.cli.errors import new_app
from experiential.cli.rows import AsJson, show_json, show_rows
from experiential.errors import BankError, BankLockedError, ConfigError

if TYPE_CHECKING:
    from experiential.bank.consolidation.dedupe import Duplicates
    from experiential.bank.evidence.explain import Explanation
    from experiential.bank.evidence.trust import Standing
    from experiential.bank.folder import FolderBank
    from experiential.bank.records import Difference
    from experiential.types import Estimate, Experience

Folder = Annotated[Path, typer.Argument(help="Folder of the bank.")]
Namespace = Annotated[str, typer.Option(help="Namespace inside the bank.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Change nothing, only show what would change.")
]
Limit = Annotated[int, typer.Option(min=0, help="Rows to show; 0 shows all.")]
TrustAfter = Annotated[
    int | None,
    typer.Option(
        min=0,
        help=(
            "Tasks on which an entry must have helped; by default what the last run asked for, 0"
            " trusts all."
        ),
    ),
]

app = new_app("Read and mend an experience bank.")


@contextmanager
def opened(
    folder: Path,
    namespace: str,
    *,
    write: bool = False,
    make: bool = False,
    embedder: str | None = None,
    store: str | None = None,
) -> Generator[FolderBank]:
    """Open the bank of a folder, read-only unless ``write``; its errors become user errors.

    Args:
        folder: of the bank.
        namespace: inside the bank.
        write: open it as its only writer.
        make: make it when it is not there.
        embedder: for a namespace that was never written.
        store: where the index is to be from now on.

    Raises:
        ConfigError: there is no bank in the folder, or it refused what was asked.
        BankLockedError: another process writes it.
        BankError: the journal is damaged.
    """
    if not make and not (folder / "journal.sqlite").is_file():
        raise ConfigError(
            f"Expected the folder of an experience bank, got {folder}, which has no journal.sqlite"
        )
    from experiential.bank.bank import ExperienceBank

    try:
        with ExperienceBank(
            folder, namespace=namespace, embedder=embedder, read_only=not write, store=store
        ) as bank:
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


def confirm(question: str, yes: bool) -> bool:
    """Ask on the terminal whether to go on, unless ``yes``.

    Raises:
        ConfigError: nobody is there to answer.
    """
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
    uses, successes = entry.statistics.uses, entry.statistics.successes
    return {
        "id": entry.id,
        "version": entry.version,
        "kind": entry.kind,
        "uses": uses,
        "successes": successes,
        "text": entry.text,
    }


@app.command("ls")
def list_entries(
    folder: Folder,
    namespace: Namespace = "default",
    limit: Limit = 50,
    trust_after: TrustAfter = None,
    as_json: AsJson = False,
) -> None:
    """List entries, the most used first, and tell who is trusted."""
    with opened(folder, namespace) as bank:
        entries = sorted(bank, key=lambda entry: -entry.statistics.uses)
        trusted = {entry.id for entry in bank.trusted(after=trust_after)}
    rows = [summary_row(entry) for entry in (entries[:limit] if limit else entries)]
    for row in rows:
        row["trust"] = "trusted" if row["id"] in trusted else "provisional"
        row["text"] = row.pop("text")  # the last column
    show_rows(rows, as_json)


@app.command()
def show(
    folder: Folder,
    id: Annotated[str, typer.Argument(help="Id of an entry.")],
    namespace: Namespace = "default",
    trust_after: TrustAfter = None,
    as_json: AsJson = False,
) -> None:
    """Show one entry with its provenance, its statistics, its uplift and how far it is trusted."""
    with opened(folder, namespace) as bank:
        entry = bank.get(id)
        if entry is None:
            raise ConfigError(
                f"Expected the id of an entry of {folder}, got {id!r}; see: experiential bank ls"
                f" {folder}"
            )
        uplift, standing = bank.uplift(id), bank.standing(id, after=trust_after)
    if as_json:
        told = {
            "score": entry.statistics.score,
            "uplift": uplift.model_dump(mode="json"),
            "trust": standing.model_dump(mode="json"),
        }
        show_json(entry.model_dump(mode="json") | told)
        return
    made = entry.provenance.model_dump(exclude_none=True, exclude_defaults=True)
    shown = {
        **{name: getattr(entry, name) for name in ("id", "version", "kind", "task", "text")},
        **{name: str(value) for name, value in made.items()},
        **entry.statistics.model_dump(),
        "score": f"{entry.statistics.score:.3f}",
        "uplift of this version": in_words(uplift),
        "uplift with its lineage": in_words(uplift.lineage),
        "trust": standing_in_words(standing),
    }
    show_rows(
        [{"what": name, "value": "" if value is None else value} for name, value in shown.items()],
        False,
    )


def in_words(estimate: Estimate) -> str:
    """Format an uplift estimate for people.

    >>> from experiential.types import Estimate
    >>> in_words(Estimate(groups=3, mean=0.5, interval=(0.1, 0.9)))
    '+0.500 (95 % +0.100 to +0.900, 3 groups)'
    """
    if estimate.mean is None:
        return "no group with guided and free members"
    if estimate.interval is None:
        return f"{estimate.mean:+.3f} ({estimate.groups} group, no interval)"
    low, high = estimate.interval
    return f"{estimate.mean:+.3f} (95 % {low:+.3f} to {high:+.3f}, {estimate.groups} groups)"


def standing_in_words(standing: Standing) -> str:
    """Format the trust in an entry for people.

    >>> from experiential.bank.evidence.trust import Standing
    >>> interval = (-0.1, 1.1)
    >>> standing_in_words(
    ...     Standing(
    ...         id="a", version=1, after=3, tasks=2, mean=0.5, interval=interval, trusted=False
    ...     )
    ... )
    'provisional (2 of 3 tasks, +0.500, 95 % -0.100 to +1.100)'
    """
    if not standing.after:
        return "trusted (no tasks asked for)"
    name = "trusted" if standing.trusted else "provisional"
    mean = "" if standing.mean is None else f", {standing.mean:+.3f}"
    interval = (
        ""
        if standing.interval is None
        else f", 95 % {standing.interval[0]:+.3f} to {standing.interval[1]:+.3f}"
    )
    return f"{name} ({standing.tasks} of {standing.after} tasks{mean}{interval})"


@app.command()
def search(
    folder: Folder,
    query: Annotated[str, typer.Argument(help="What to look for.")],
    k: Annotated[int, typer.Option(min=1, help="Hits to show.")] = 5,
    hybrid: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="Weight of shared words beside the cosine; 0 leaves words out."
        ),
    ] = 0.0,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only entries of this kind; given again, of this one too."),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
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
    rows = [
        {
            "rank": hit.rank,
            "score": round(hit.score, 4),
            "id": hit.experience.id,
            "text": hit.experience.text,
        }
        for hit in hits
    ]
    show_rows(rows, as_json)


def filter_of(kinds: Sequence[str], pairs: Sequence[str]) -> dict[str, list[Any]]:
    """Return the filter of the options ``--kind`` and ``--where``.

    A value that is valid JSON also matches as the parsed value.

    >>> filter_of(["lesson"], ["tags=alfworld", "level=3"])
    {'kind': ['lesson'], 'tags': ['alfworld'], 'level': ['3', 3]}

    Raises:
        ConfigError: a pair has no field or no '='.
    """
    fields: dict[str, list[Any]] = {"kind": list(kinds)} if kinds else {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError(
                f"Expected --where FIELD=VALUE, got {pair!r}; for example: --where tags=alfworld"
            )
        fields.setdefault(name.strip(), []).extend((value, *_read_as_json(value)))
    return fields


def _read_as_json(value: str) -> tuple[Any, ...]:
    try:
        read = json.loads(value)
    except ValueError:
        return ()
    return (
        (read,)
        if read is None
        or isinstance(read, bool | int)
        or (isinstance(read, float) and math.isfinite(read))
        else ()
    )


@app.command()
def why(
    folder: Folder,
    trajectory: Annotated[str, typer.Argument(help="Id of a recorded trajectory.")],
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Say what an episode was shown, how it ended, and what was written from it."""
    with opened(folder, namespace) as bank:
        explanation = bank.why(trajectory)
    if as_json:
        show_json(explanation.model_dump(mode="json"))
    else:
        _tell(explanation)


def _tell(explanation: Explanation) -> None:
    ended = explanation.error or ("success" if explanation.success else "failure")
    told = {
        "task": explanation.task,
        "condition": explanation.condition.value,
        "outcome": ended,
        "reward": explanation.reward,
    }
    show_rows([{"what": name, "value": value} for name, value in told.items()], False)
    sys.stdout.write("\nshown\n")
    show_rows(
        [
            {
                **one.model_dump(include={"turn", "how", "rank"}),
                "score": f"{one.score:.3f}",
                "propensity": f"{one.propensity:.3f}",
                "entry": f"{one.id} v{one.version}",
                "uplift": in_words(one.uplift),
                "text": one.refined or one.text or "",
            }
            for one in explanation.shown
        ],
        False,
    )
    sys.stdout.write("\nwritten from it\n")
    show_rows([summary_row(entry) for entry in explanation.written], False)


@app.command()
def history(
    folder: Folder,
    id: Annotated[
        str | None, typer.Argument(help="Id of an entry: only the commits that changed it.")
    ] = None,
    namespace: Namespace = "default",
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """List commits, the newest last, with the number of entries that each changed."""
    with opened(folder, namespace) as bank:
        commits = bank.history(id)
    rows = [
        commit.model_dump(exclude=None if id else {"version"})
        for commit in (commits[-limit:] if limit else commits)
    ]
    if not as_json:
        for row in rows:
            row["time"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
            row["ref"] = row["ref"] or ""
            if id:
                row["version"] = row["version"] or "removed"
    show_rows(rows, as_json)


@app.command()
def diff(
    folder: Folder,
    a: Annotated[int, typer.Argument(help="A commit; 0 is before the first.")],
    b: Annotated[
        int | None, typer.Argument(help="A later commit; the last one by default.")
    ] = None,
    namespace: Namespace = "default",
    as_json: AsJson = False,
) -> None:
    """Show which entries were added, removed and changed from one commit to another."""
    with opened(folder, namespace) as bank:
        found = bank.diff(a, bank.head if b is None else b)
    show_rows(difference_rows(found), as_json)


def difference_rows(found: Difference) -> list[dict[str, Any]]:
    """Return one row for each changed entry, with its old and its new text."""
    return [
        *(
            {"what": "added", "id": entry.id, "old": None, "new": entry.text}
            for entry in found.added
        ),
        *(
            {"what": "removed", "id": entry.id, "old": entry.text, "new": None}
            for entry in found.removed
        ),
        *(
            {"what": "changed", "id": pair.new.id, "old": pair.old.text, "new": pair.new.text}
            for pair in found.changed
        ),
    ]


@app.command()
def stats(
    folder: Folder,
    namespace: Namespace = "default",
    trust_after: TrustAfter = None,
    as_json: AsJson = False,
) -> None:
    """Count entries, those trusted and not, commits, uses and successes."""
    with opened(folder, namespace) as bank:
        entries, commits, trusted = (
            list(bank),
            len(bank.commits()),
            len(bank.trusted(after=trust_after)),
        )
        queued, dead = len(bank.queue.waiting()), len(bank.queue.dead_letters())
    counts = [entry.statistics for entry in entries]
    numbers = {
        "entries": len(entries),
        "trusted": trusted,
        "provisional": len(entries) - trusted,
        "commits": commits,
        "retrievals": sum(count.retrievals for count in counts),
        "uses": sum(count.uses for count in counts),
        "successes": sum(count.successes for count in counts),
        "queued": queued,
        "dead letters": dead,
    }
    (
        show_json(numbers)
        if as_json
        else show_rows([{"what": name, "count": value} for name, value in numbers.items()], False)
    )


# Changing


@app.command()
def rollback(
    folder: Folder,
    commit: Annotated[int, typer.Argument(help="The commit to go back to; 0 is before the first.")],
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
    show_rows(rows, as_json)


@app.command()
def prune(
    folder: Folder,
    score: Annotated[
        float | None, typer.Option(help="Take out entries whose Laplace score is below it.")
    ] = None,
    uplift: Annotated[
        float | None, typer.Option(help="Take out entries whose uplift interval ends below it.")
    ] = None,
    min_uses: Annotated[int, typer.Option(min=0, help="Uses that an entry must have had.")] = 5,
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
    show_rows([summary_row(entry) for entry in doomed], as_json)


@app.command()
def merge(
    folder: Folder,
    model: Annotated[
        str | None,
        typer.Option(help="Merges related entries: tiny, smollm2, a model folder, or a hub name."),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help=(
                "Runs the model: local (default), openai, an entry point of experiential.llms, or"
                " module:attribute."
            )
        ),
    ] = None,
    backend_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Passed to the backend; may be repeated."),
    ] = None,
    threshold: Annotated[
        float, typer.Option(help="Without a model: cosine of two texts from which on they are one.")
    ] = 0.95,
    across_tasks: Annotated[
        bool,
        typer.Option(
            "--across-tasks", help="Without a model: compare entries of different tasks too."
        ),
    ] = False,
    namespace: Namespace = "default",
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Merge related entries, and show the changes.

    A model merges; without one, near-duplicates are merged by their cosine.
    """
    if model is not None or backend is not None:
        from experiential.llm.base import read_options

        options = ({} if model is None else {"model": model}) | read_options(backend_option or ())
        rows = _merge_with(backend or "local", options, folder, namespace, dry_run)
    else:
        with opened(folder, namespace, write=not dry_run) as bank:
            rows = _duplicate_rows(
                bank.deduplicate(threshold, across_tasks=across_tasks, dry_run=dry_run)
            )
        sys.stderr.write(
            f"no --model: texts with a cosine of {threshold:g} or more count as one, the oldest"
            " stays as it is\n"
        )
    show_rows(rows, as_json)


def _duplicate_rows(found: Sequence[Duplicates]) -> list[dict[str, Any]]:
    return [
        {
            "id": one.id,
            "text": one.text,
            "merged into": group.survivor.id,
            "its text": group.survivor.text,
        }
        for group in found
        for one in group.merged
    ]


def _merge_with(
    backend: str, options: dict[str, Any], folder: Path, namespace: str, dry_run: bool
) -> list[dict[str, Any]]:
    """Run one pass of the periodic merge; a dry run merges a copy."""
    from experiential.cli.preflight import check_extras, check_model
    from experiential.config import ModelSettings

    if backend == "local":
        options = {"model": "tiny", **options}
        check_extras(ModelSettings(name=options["model"]))
        check_model(options["model"])
    with TemporaryDirectory(prefix="experiential-merge-") as scratch:
        if not dry_run:
            with opened(folder, namespace, write=True) as bank:
                return _merged(bank, backend, options)
        with opened(folder, namespace) as bank, bank.fork(scratch) as copy:
            return _merged(copy, backend, options)


def _merged(bank: FolderBank, backend: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    from experiential.agents.extractor import ExtractorAgent
    from experiential.bank.manager import ExperienceManager
    from experiential.config import ModelSettings
    from experiential.llm.base import open_llm
    from experiential.training.roles import prompt_set_name

    head = bank.head
    with closing(open_llm(backend, **options)) as llm:
        # a name of a foreign backend says nothing about our bundled model
        name = options["model"] if backend == "local" else backend
        prompts = prompt_set_name(ModelSettings(name=name))
        with ExperienceManager(bank, ExtractorAgent(llm, prompts=prompts, seed=0)) as manager:
            manager.merge()
            failures: dict[str, int] = manager.stats()["failures"]
    for reason, count in failures.items():
        sys.stderr.write(f"{count} x {reason}\n")
    return difference_rows(bank.diff(head, bank.head))


# Moving and mending


@app.command()
def export(
    folder: Folder,
    file: Annotated[Path, typer.Argument(help="File to write.")],
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
    folder: Annotated[Path, typer.Argument(help="Folder of the bank; made when it is not there.")],
    file: Annotated[Path, typer.Argument(help="File that `export` wrote.")],
    namespace: Namespace = "default",
    embedder: Annotated[
        str | None,
        typer.Option(help="For a new bank: a sentence-transformers name or folder, or hashing."),
    ] = None,
    edited: Annotated[
        bool,
        typer.Option("--edited", help="The file was changed on purpose since it was exported."),
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


@app.command()
def doctor(folder: Folder, as_json: AsJson = False) -> None:
    """Check journal, index and queue of all namespaces of a bank.

    Nothing is changed. The exit code is 1 if something is wrong.
    """
    if not (folder / "journal.sqlite").is_file():
        raise ConfigError(
            f"Expected the folder of an experience bank, got {folder}, which has no journal.sqlite"
        )
    from experiential.bank.storage.checkup import examine

    findings = examine(folder)
    show_rows([finding.model_dump() for finding in findings], as_json)
    if any(finding.status == "wrong" for finding in findings):
        raise typer.Exit(1)


@app.command()
def rebuild(
    folder: Folder,
    store: Annotated[
        str | None,
        typer.Option(
            help=(
                "Where the index is from now on: chroma, address of a Chroma server, exact, an"
                " entry point or module:attribute."
            )
        ),
    ] = None,
    namespace: Namespace = "default",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make the index again from the journal."""
    with opened(folder, namespace, write=True, store=store) as bank:
        if not confirm(
            f"Make the index of namespace {namespace!r} in {folder} again from the journal?", yes
        ):
            return
        show_rows([{"indexed": bank.rebuild()}], as_json)
