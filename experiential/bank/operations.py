"""Turn an extractor's operations into a commit: distillation and consolidation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experiential.bank.evidence.credit import total
from experiential.bank.index.embed import EntryKey, Vector
from experiential.bank.index.lexical import content_words
from experiential.bank.state import Draft, unknown_entry
from experiential.bank.text import clean
from experiential.errors import BankError
from experiential.types import (
    Add,
    Discard,
    Distillation,
    Experience,
    Merge,
    Provenance,
    Statistics,
    Update,
)

_MOVED = 0.5
REWRITES = "rewrites"
"""Field in the metadata of a proposed entry: the entry whose next text it is."""
Vectors = Mapping[EntryKey, Vector]
"""The vector of every entry that a commit may write, by what it is found by."""


def keys_to_embed(
    distillation: Distillation, shown: Sequence[Experience], task: str | None = None
) -> list[EntryKey]:
    """Return the cleaned texts to embed before a distillation is applied under the lock."""
    keys: list[EntryKey] = []
    task = clean(task or "").text or None
    for operation in distillation.parsed.operations:
        if isinstance(operation, Add):
            keys.append(EntryKey(clean(operation.text).text, task))
        elif isinstance(operation, Update) and operation.entry <= len(shown):
            text = clean(operation.text).text
            keys.append(EntryKey(text, subject(text, shown[operation.entry - 1].task, task)))
        elif isinstance(operation, Merge):
            task_of_all = common_task(_named(operation.entries, shown))
            keys.append(EntryKey(clean(operation.text).text, task_of_all))
    return keys


def distil(
    draft: Draft,
    distillation: Distillation,
    vectors: Vectors,
    source: Provenance,
    task: str | None,
    shown: Sequence[Experience],
    review: bool = False,
) -> list[Experience]:
    """Write the operations of a distillation; impossible ones are counted as refused.

    An update whose text is about the episode's task, and not its entry's, changes the entry's task.
    Under ``review`` new texts are proposed entries; an update names its entry in the metadata.

    Returns:
        the versions written, in order.
    """
    written: list[Experience] = []
    for operation in distillation.parsed.operations:
        provenance = source.model_copy(update={"cause": operation.op, "span": operation.span})
        if isinstance(operation, Add):
            text, kind = operation.text, operation.kind
            vector = vectors[EntryKey(text, task)]
            twin = draft.twin((task, kind, text))
            if twin is not None:
                said = draft.said(twin) + 1
                again = provenance.model_copy(update={"said": said})
                written.append(draft.revise(twin, text, task, again, vector))
                continue
            metadata = {"triples": [list(one) for one in operation.triples]}
            entry = Experience(
                text=text,
                kind=kind,
                task=task,
                metadata=metadata if operation.triples else {},
                proposed=review,
                provenance=provenance,
            )
            written.append(draft.put(entry, vector))
        elif isinstance(operation, Update):
            if operation.entry > len(shown):
                draft.refused["entry_out_of_range"] += 1
                continue
            entry = shown[operation.entry - 1]
            if draft.entries.get(entry.id) is None:
                draft.refused["entry_gone"] += 1
                continue
            text, about = operation.text, subject(operation.text, entry.task, task)
            vector = vectors[EntryKey(text, about)]
            if review:
                proposal = Experience(
                    text=text,
                    kind=entry.kind,
                    task=about,
                    metadata={REWRITES: entry.id},
                    proposed=True,
                    provenance=provenance,
                )
                written.append(draft.put(proposal, vector))
            else:
                written.append(draft.revise(entry.id, text, about, provenance, vector))
        elif operation.op != "return":
            draft.refused["not_a_distillation"] += 1
    return written


def approve(draft: Draft, id: str) -> Experience:
    """Write the approved version of a proposed entry, or the next version of that it rewrites.

    Raises:
        BankError: there is no such entry, or it is not proposed.
    """
    live = draft.entries.get(id)
    if live is None:
        raise unknown_entry(id)
    entry, origins = live.experience, live.origins
    if not entry.proposed:
        raise BankError(
            f"Expected the id of a proposed entry, got {id!r}, which is approved; list them with:"
            " experiential bank ls"
        )
    vector, metadata = draft.vector(entry), dict(entry.metadata)
    provenance = entry.provenance.model_copy(update={"cause": "approve"})
    target = metadata.pop(REWRITES, None)
    if target is not None and draft.entries.get(target) is not None:
        draft.remove(id)
        return draft.revise(target, entry.text, entry.task, provenance, vector)
    update = {"version": entry.version + 1, "proposed": False, "metadata": metadata}
    return draft.put(entry.model_copy(update={**update, "provenance": provenance}), vector, origins)


def consolidate(
    draft: Draft,
    distillation: Distillation,
    vectors: Vectors,
    source: Provenance,
    shown: Sequence[Experience],
) -> list[Experience]:
    """Write the operations of a merge; one on an entry that changed since is refused.

    Returns:
        the merged entries, in order.
    """
    written: list[Experience] = []
    settled: set[int] = set()
    for operation in distillation.parsed.operations:
        if not isinstance(operation, Merge | Discard):
            if operation.op != "keep":
                draft.refused["not_a_consolidation"] += 1
            continue
        numbers = operation.entries if isinstance(operation, Merge) else (operation.entry,)
        named = _named(numbers, shown)
        if len(named) < len(numbers):
            draft.refused["entry_out_of_range"] += 1
        elif len(set(numbers)) < len(numbers) or settled & set(numbers):
            draft.refused["entry_repeated"] += 1
        elif not all(draft.has(entry) for entry in named):
            draft.refused["entry_changed"] += 1
        else:
            settled.update(numbers)
            live = [draft.entries.get(entry.id) for entry in named]
            for entry in named:
                draft.remove(entry.id)
            if isinstance(operation, Merge):
                origins = frozenset[str]().union(*(now.origins for now in live if now is not None))
                entry = _merged(operation, named, source, origins)
                vector = vectors[EntryKey(entry.text, entry.task)]
                written.append(draft.put(entry, vector, origins))
                counts = [draft.counted(parent.id) or Statistics() for parent in named]
                draft.count(entry.id, total(counts))
    return written


def _merged(
    operation: Merge, parents: Sequence[Experience], source: Provenance, origins: frozenset[str]
) -> Experience:
    provenance = source.model_copy(
        update={
            "cause": "merge",
            "span": operation.span,
            "parents": tuple((parent.id, parent.version) for parent in parents),
            "instance": next(iter(origins)) if len(origins) == 1 else None,
        }
    )
    kinds = {parent.kind for parent in parents}
    metadata = parents[0].metadata
    return Experience(
        text=operation.text,
        kind=kinds.pop() if len(kinds) == 1 else "lesson",
        task=common_task(parents),
        metadata=metadata if all(parent.metadata == metadata for parent in parents) else {},
        provenance=provenance,
    )


def common_task(entries: Iterable[Experience]) -> str | None:
    """Return the task that all entries share, else None."""
    tasks = {entry.task for entry in entries}
    return tasks.pop() if len(tasks) == 1 else None


def subject(text: str, task: str | None, other: str | None) -> str | None:
    """Return the task that a rewritten text is about: its entry's, or that of the episode.

    Compared are the words that only one of the two tasks has. The text has moved to the other task
    when it has half of that task's words, or more, beyond its share of its own task's. An entry
    without a task belongs to all, and stays so.

    >>> subject("The vault of Bob: jade.", "Open the vault of Ann.", "Open the vault of Bob.")
    'Open the vault of Bob.'
    >>> subject("Unlike Bob's, Ann's is red.", "Open the vault of Ann.", "Open the vault of Bob.")
    'Open the vault of Ann.'
    """
    if task is None or other is None or task == other:
        return task
    said, words, others = content_words(text), content_words(task), content_words(other)
    own, its = words - others, others - words
    lead = len(said & its) / max(len(its), 1) - len(said & own) / max(len(own), 1)
    return other if lead >= _MOVED else task


def _named(numbers: Iterable[int], shown: Sequence[Experience]) -> list[Experience]:
    return [shown[number - 1] for number in numbers if 1 <= number <= len(shown)]
