"""Turn an extractor's operations into a commit: distillation and consolidation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from experiential.bank.index.embed import EntryKey
from experiential.bank.index.vectors import Vector
from experiential.bank.state import Draft, origins_of
from experiential.bank.text import clean
from experiential.types import (
    Add,
    Discard,
    Distillation,
    Experience,
    Merge,
    Provenance,
    Trajectory,
    Update,
)

Vectors = Mapping[EntryKey, Vector]
"""The vector of every entry that a commit may write, by what it is found by."""


def keys_to_embed(
    distillation: Distillation, shown: Sequence[Experience], task: str | None = None
) -> list[EntryKey]:
    """Return the cleaned texts to embed before a distillation is applied under the lock."""
    keys: list[EntryKey] = []
    task = (clean(task).text or None) if task is not None else None
    for operation in distillation.parsed.operations:
        if isinstance(operation, Add):
            keys.append(EntryKey(clean(operation.text).text, task))
        elif isinstance(operation, Update) and operation.entry <= len(shown):
            keys.append(EntryKey(clean(operation.text).text, shown[operation.entry - 1].task))
        elif isinstance(operation, Merge):
            keys.append(
                EntryKey(clean(operation.text).text, common_task(_named(operation.entries, shown)))
            )
    return keys


class Distiller:
    """Apply the operations of a distillation to a draft; impossible ones are counted as refused."""

    def __init__(
        self,
        draft: Draft,
        vectors: Vectors,
        source: Provenance,
        task: str | None,
        shown: Sequence[Experience],
    ) -> None:
        self._draft = draft
        self._vectors = vectors
        self._source = source
        self._task = task
        self._shown = shown

    def apply(self, distillation: Distillation) -> list[Experience]:
        """Apply all operations; return the entries written, in order."""
        written: list[Experience] = []
        for operation in distillation.parsed.operations:
            entry = None
            if isinstance(operation, Add):
                entry = self._add(operation)
            elif isinstance(operation, Update):
                entry = self._update(operation)
            elif operation.op != "return":
                self._draft.refused["not_a_distillation"] += 1
            if entry is not None:
                written.append(entry)
        return written

    def _add(self, operation: Add) -> Experience:
        provenance = self._source.model_copy(update={"cause": "add", "span": operation.span})
        vector = self._vectors[EntryKey(operation.text, self._task)]
        twin = self._draft.twin((self._task, operation.kind, operation.text))
        if twin is not None:
            return self._draft.revise(twin, operation.text, provenance, vector)
        metadata = (
            {"triples": [list(triple) for triple in operation.triples]} if operation.triples else {}
        )
        entry = Experience(
            text=operation.text,
            kind=operation.kind,
            task=self._task,
            metadata=metadata,
            provenance=provenance,
        )
        return self._draft.put(entry, vector, origins_of(provenance))

    def _update(self, operation: Update) -> Experience | None:
        if operation.entry > len(self._shown):
            self._draft.refused["entry_out_of_range"] += 1
            return None
        entry = self._shown[operation.entry - 1]
        if self._draft.live(entry.id) is None:
            self._draft.refused["entry_gone"] += 1
            return None
        provenance = self._source.model_copy(update={"cause": "update", "span": operation.span})
        return self._draft.revise(
            entry.id,
            operation.text,
            provenance,
            self._vectors[EntryKey(operation.text, entry.task)],
        )


class Consolidator:
    """Apply the operations of a merge to a draft; one on an entry that changed is refused."""

    def __init__(
        self, draft: Draft, vectors: Vectors, source: Provenance, shown: Sequence[Experience]
    ) -> None:
        self._draft = draft
        self._vectors = vectors
        self._source = source
        self._shown = shown
        self._settled: set[int] = set()

    def apply(self, distillation: Distillation) -> list[Experience]:
        """Apply all operations; return the merged entries, in order."""
        written: list[Experience] = []
        for operation in distillation.parsed.operations:
            if isinstance(operation, Merge) and self._may_change(operation.entries):
                written.append(self._merge(operation))
            elif isinstance(operation, Discard) and self._may_change((operation.entry,)):
                self._draft.remove(self._shown[operation.entry - 1].id)
            elif operation.op not in ("keep", "merge", "discard"):
                self._draft.refused["not_a_consolidation"] += 1
        return written

    def _may_change(self, numbers: Sequence[int]) -> bool:
        reason = self._objection(numbers)
        if reason is not None:
            self._draft.refused[reason] += 1
            return False
        self._settled.update(numbers)
        return True

    def _objection(self, numbers: Sequence[int]) -> str | None:
        if any(not 1 <= number <= len(self._shown) for number in numbers):
            return "entry_out_of_range"
        if len(set(numbers)) < len(numbers) or self._settled & set(numbers):
            return "entry_repeated"
        return (
            "entry_changed"
            if any(self._is_stale(self._shown[number - 1]) for number in numbers)
            else None
        )

    def _is_stale(self, shown: Experience) -> bool:
        live = self._draft.live(shown.id)
        return live is None or live.experience.version != shown.version

    def _merge(self, operation: Merge) -> Experience:
        parents = _named(operation.entries, self._shown)
        origins = frozenset[str]().union(
            *(live.origins for p in parents if (live := self._draft.live(p.id)) is not None)
        )
        entry = _merged(operation, parents, self._source, origins)
        for parent in parents:
            self._draft.remove(parent.id)
        entry = self._draft.put(entry, self._vectors[EntryKey(entry.text, entry.task)], origins)
        self._draft.inherit(entry.id, [parent.id for parent in parents])
        return entry


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
    kind = kinds.pop() if len(kinds) == 1 else "lesson"
    metadata = (
        parents[0].metadata
        if all(parent.metadata == parents[0].metadata for parent in parents)
        else {}
    )
    return Experience(
        text=operation.text,
        kind=kind,
        task=common_task(parents),
        metadata=metadata,
        provenance=provenance,
    )


def source_of(
    distillation: Distillation, trajectory: Trajectory | None, extractor_version: int | None
) -> Provenance:
    """Return the provenance of everything that a distillation writes."""
    generation = distillation.generation
    return Provenance(
        author="extractor",
        trajectory=trajectory.id if trajectory else None,
        instance=trajectory.instance or None if trajectory else None,
        generation=generation.id if generation else None,
        extractor_version=generation.policy_version if generation else extractor_version,
    )


def common_task(entries: Iterable[Experience]) -> str | None:
    """Return the task that all entries share, else None."""
    tasks = {entry.task for entry in entries}
    return tasks.pop() if len(tasks) == 1 else None


def _named(numbers: Iterable[int], shown: Sequence[Experience]) -> list[Experience]:
    return [shown[number - 1] for number in numbers if 1 <= number <= len(shown)]
