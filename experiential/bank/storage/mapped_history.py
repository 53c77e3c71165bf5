"""Answer questions about the history from the mapped file, and from what was written since.

A reader then needs no copy of the journal. The file is proved by its own checksums, and the later
commits were proved when they were read; see `experiential.bank.storage.in_place`.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from experiential.bank.evidence.uplift import ALWAYS, LAST_SEQ, MERGED
from experiential.bank.index.store import IndexLostError
from experiential.bank.storage import tables
from experiential.bank.storage.in_place import Since
from experiential.bank.storage.mapped import Mapped


class MappedHistory:
    """Answer the statements of `History` and `Evidence` about commits and changes.

    A change is named by its place among all changes of the namespace, in their order.

    Args:
        mapped: the file.
        since: what the journal holds beyond it.
    """

    def __init__(self, mapped: Mapped, since: Since) -> None:
        self._mapped, self._since = mapped, since
        self._commit_ids = mapped.column("commit_ids")
        self._commit_ends = mapped.column("commit_change_ends")
        self._commits = mapped.texts("commits")
        self._entries = mapped.column("change_entries")
        self._versions = mapped.column("change_versions")
        self._of_entry = mapped.column("entry_changes")
        self._entry_ends = mapped.column("entry_change_ends")
        self._late: dict[str, list[int]] = {}
        for place, (_, id, _) in enumerate(since.changes, start=len(self._entries)):
            self._late.setdefault(id, []).append(place)
        self._answers: dict[str, Callable[..., list[Any] | None]] = {
            tables.COMMITS: self._commits_after,
            tables.HAS_COMMIT: self._has_commit,
            tables.LAST_VERSION: self._last_version,
            tables.STORED: self._stored,
            tables.LOG: self._log,
            tables.LOG_OF: self._log_of,
            tables.TOUCHED: self._touched,
            tables.WRITTEN_FROM: self._written_from,
            LAST_SEQ: lambda: [(since.seq,)],
            MERGED: self._merged,
        }

    def rows(self, statement: str, arguments: tuple[Any, ...]) -> list[Any] | None:
        """Return all rows of a statement; None where the file is lost or cannot tell."""
        answer = self._answers.get(statement)
        try:
            return None if answer is None else answer(*arguments)
        except IndexLostError:
            return None

    # The statements

    def _commits_after(self, namespace: str, commit: int) -> list[Any]:
        return [row[:5] for row in self._rows_of_commits(self._count_commits(commit))]

    def _has_commit(self, namespace: str, commit: int) -> list[Any]:
        count = self._count_commits(commit)
        return [(1,)] if count and self._commit(count - 1)[0] == commit else []

    def _last_version(self, namespace: str, id: str) -> list[Any]:
        # Each version that was written was made the live one.
        return [(max((version or 0 for _, version in self._changes(id)), default=None),)]

    def _stored(self, namespace: str, id: str, version: int) -> list[Any] | None:
        # The journal has those that there are; of those that there are not, it could be damage.
        return None if version in {one for _, one in self._changes(id)} else []

    def _log(self, namespace: str) -> list[Any]:
        return self._rows_of_commits(0)

    def _log_of(self, namespace: str, id: str) -> list[Any]:
        found = {self._commit_of(place): version for place, version in self._changes(id)}
        return [(*self._commit(number), version) for number, version in found.items()]

    def _touched(self, namespace: str, a: int, b: int) -> list[Any]:
        low, high = self._count_changes(a), self._count_changes(b)
        found: list[tuple[int, Any]] = []
        for id in {self._entry(place) for place in range(low, high)}:
            changes = self._changes(id)
            then, now = (
                next((version for place, version in reversed(changes) if place < end), None)
                for end in (low, high)
            )
            found.append((changes[0][0], (id, then, now)))
        return [row for _, row in sorted(found)]

    def _written_from(self, namespace: str, trajectory: str) -> list[Any]:
        found: list[Any] = []
        for number, (_, _, _, cause, ref, _) in enumerate(self._log(namespace)):
            if cause == "trajectory" and ref == trajectory:
                for place in range(self._change_end(number - 1), self._change_end(number)):
                    if (version := self._version(place)) is not None:
                        found.append((self._entry(place), version))
        return found

    def _merged(self, seen: int, last: int, namespace: str, until: int) -> list[Any] | None:
        if until != ALWAYS or last != self._since.seq or seen not in (0, last):
            return None
        if seen:
            return []
        return json.loads(self._mapped.column("merges")[:].tobytes()) + self._since.merges

    # Commits by number, and changes by place

    def _commit(self, number: int) -> tuple[Any, ...]:
        late = number - len(self._commits)
        return self._since.commits[late] if late >= 0 else tuple(json.loads(self._commits[number]))

    def _rows_of_commits(self, first: int) -> list[Any]:
        count = len(self._commits) + len(self._since.commits)
        return [self._commit(number) for number in range(first, count)]

    def _count_commits(self, commit: int) -> int:
        """Return how many commits there are up to and with this one."""
        held = range(len(self._commit_ids))
        count = bisect_right(held, commit, key=self._commit_ids.item)
        return count + bisect_right(self._since.commits, commit, key=lambda row: row[0])

    def _count_changes(self, commit: int) -> int:
        """Return how many changes there are up to and with this commit."""
        return self._change_end(self._count_commits(commit) - 1)

    def _change_end(self, number: int) -> int:
        late = number - len(self._commits)
        if late < 0:
            return self._commit_ends.item(number) if number >= 0 else 0
        commit = self._since.commits[late][0]
        count = bisect_right(self._since.changes, commit, key=lambda change: change[0])
        return len(self._entries) + count

    def _commit_of(self, place: int) -> int:
        """Return the number of the commit that made a change."""
        late = place - len(self._entries)
        if late < 0:
            held = range(len(self._commit_ends))
            return bisect_right(held, place, key=self._commit_ends.item)
        return self._count_commits(self._since.changes[late][0]) - 1

    def _entry(self, place: int) -> str:
        late = place - len(self._entries)
        if late >= 0:
            return self._since.changes[late][1]
        return self._mapped.named(self._entries.item(place))

    def _version(self, place: int) -> int | None:
        late = place - len(self._entries)
        return self._since.changes[late][2] if late >= 0 else self._versions.item(place) or None

    def _changes(self, id: str) -> list[tuple[int, int | None]]:
        """Return place and version of all changes of an entry, in order."""
        places: list[int] = []
        if (number := self._mapped.number(id)) is not None:
            begin, end = self._entry_ends[number : number + 2].tolist()
            places = self._of_entry[begin:end].tolist()
        places += self._late.get(id, ())
        return [(place, self._version(place)) for place in places]
