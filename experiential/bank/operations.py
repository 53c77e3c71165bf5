"""Turn an extractor's operations into a commit: distillation and consolidation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experiential.bank.evidence.credit import total
from experiential.bank.index.embed import EntryKey, Vector
from experiential.bank.state import Draft
from experiential.bank.text import clean
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
            keys.append(EntryKey(clean(operation.text).text, shown[operation.entry - 1].task))
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
) -> list[Experience]:
    """Write the operations of a distillation; impossible ones are counted as refused.

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
                written.append(draft.revise(twin, text, provenance, vector))
                continue
            metadata = {"triples": [list(one) for one in operation.triples]}
            entry = Experience(
                text=text,
                kind=kind,
                task=task,
                metadata=metadata if operation.triples else {},
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
            vector = vectors[EntryKey(operation.text, entry.task)]
            written.append(draft.revise(entry.id, operation.text, provenance, vector))
        elif operation.op != "return":
            draft.refused["not_a_distillation"] += 1
    return written


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


def _named(numbers: Iterable[int], shown: Sequence[Experience]) -> list[Experience]:
    return [shown[number - 1] for number in numbers if 1 <= number <= len(shown)]
