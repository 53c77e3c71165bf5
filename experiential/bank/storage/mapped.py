"""Keep live entries and history of a namespace in a file that is mapped into memory, not read.

The file is derived from the journal and may vanish at any time. A stamp says to which commit of
which journal it belongs, by the commit's chain value. It is never changed: a new one is written
beside it and renamed. Every block has a checksum, which is compared before the first use of the
block, so that opening costs the same whatever the size, and damage is never read.

Layout: the sections; their table and the stamp as JSON, with the CRC-32 of each block; and a
trailer with the lengths of both and a checksum over them.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from experiential.bank.index.store import IndexLostError
from experiential.bank.storage.tables import Live, LiveEntries, Past, origins_of, roomy
from experiential.errors import BankError

PATTERN = "entries-*.map*"
"""Of these files in the folder of a bank, with those whose writing was cut off."""
_MAGIC = b"xp-map-2"
_TRAILER = struct.Struct("<8sQQ16s")
_BLOCK = 1 << 16
_ALIGN = 64
_PARSED = 1 << 14
"""Entries kept parsed of those that were read."""
_NAMED = 1 << 16
"""Ids kept of those that were read."""
Floats = npt.NDArray[np.float32]
Numbers = npt.NDArray[Any]


class Stamp(NamedTuple):
    """Say which state of which journal a file has.

    Attributes:
        namespace: whose entries.
        commit: the last commit of the journal, of any namespace.
        chain: the chain value of that commit, in hexadecimal.
        seq: position of the last change in the journal, of any namespace.
        head: the last commit of the namespace.
        facts: the bank's id, and what ``meta`` says of the embedder.
    """

    namespace: str
    commit: int
    chain: str
    seq: int
    head: int
    facts: dict[str, str | None]


def mapped_file(folder: Path, namespace: str) -> Path:
    """Return where the mapped entries of a namespace are."""
    return folder / f"entries-{hashlib.sha256(namespace.encode()).hexdigest()[:16]}.map"


def write(
    file: Path,
    stamp: Stamp,
    entries: Mapping[str, Live],
    vectors: Iterable[Floats],
    gone: Sequence[str],
    past: Past,
) -> None:
    """Write the file anew; a process that has the old one open keeps that.

    Args:
        file: its place.
        stamp: the state that it has.
        entries: the live ones, oldest first.
        vectors: those of the entries, in this order.
        gone: ids of entries that were removed, sorted.
        past: all commits and changes; entries are numbered in the order above, then those gone.
    """
    labels: dict[str, list[int]] = {}
    for row, live in enumerate(entries.values()):
        for label in live.origins:
            labels.setdefault(label, []).append(row)
    named = sorted((label.encode("utf-8", "surrogatepass"), rows) for label, rows in labels.items())
    ids = [id.encode("utf-8", "surrogatepass") for id in entries]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    proposed = [row for row, live in enumerate(entries.values()) if live.proposed]
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as stream:
        out = _Sections(stream)
        out.add("vectors", "<f4", (one for one, _ in zip(vectors, entries, strict=False)))
        out.add_texts("ids", ids)
        out.add("order", "<u4", [np.array(order, "<u4")])
        lengths: list[int] = []

        def records() -> Iterator[bytes]:
            for live in entries.values():
                origins = json.dumps(sorted(live.origins))
                text = f"{live.record}\n{origins}".encode("utf-8", "surrogatepass")
                lengths.append(len(text))
                yield text

        out.add("records", "|u1", records())
        out.add("record_ends", "<u8", [np.array(_ends(lengths), "<u8")])
        out.add("proposed", "<u4", [np.array(proposed, "<u4")])
        out.add_texts("labels", [label for label, _ in named])
        rows = [row for _, held in named for row in held]
        out.add("label_rows", "<u4", [np.array(rows, "<u4")])
        ends = [np.array(_ends(len(held) for _, held in named), "<u8")]
        out.add("label_row_ends", "<u8", ends)
        out.add_texts("gone", [id.encode("utf-8", "surrogatepass") for id in gone])
        _add_past(out, past, len(ids) + len(gone))
        table = {"stamp": stamp._asdict(), "count": len(entries), "sections": out.table}
        head = json.dumps(table).encode()
        sums = np.array(out.finished(), "<u4").tobytes()
        stream.write(head + sums)
        stream.write(_TRAILER.pack(_MAGIC, len(head), len(sums), _digest(head + sums)))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, file)


def _add_past(out: _Sections, past: Past, count: int) -> None:
    """Write the commits, the changes in their order, and the changes of each entry."""
    commits = np.array([row[0] for row in past.commits], "<i8")
    if np.any(np.diff(past.change_commits) < 0):
        raise BankError("Expected changes in the order of their commits, got others")
    out.add("commit_ids", "<i8", [commits])
    ends = np.searchsorted(past.change_commits, commits, side="right")
    out.add("commit_change_ends", "<u8", [ends.astype("<u8")])
    out.add_texts("commits", [json.dumps(row).encode() for row in past.commits])
    out.add("change_entries", "<u4", [past.change_entries.astype("<u4")])
    out.add("change_versions", "<u4", [past.change_versions.astype("<u4")])
    order = np.argsort(past.change_entries, kind="stable")
    out.add("entry_changes", "<u4", [order.astype("<u4")])
    found = np.bincount(past.change_entries, minlength=count)
    out.add("entry_change_ends", "<u8", [np.append(0, np.cumsum(found)).astype("<u8")])
    out.add("merges", "|u1", [json.dumps(list(past.merges)).encode()])


def _ends(lengths: Iterable[int]) -> list[int]:
    total, found = 0, [0]
    for length in lengths:
        total += length
        found.append(total)
    return found


def _digest(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=16).digest()


class _Sections:
    """Write sections one after the other, and the checksum of each block."""

    def __init__(self, stream: Any) -> None:
        self.table: dict[str, tuple[int, int, str]] = {}  # begin, end, type of the elements
        self._stream = stream
        self._sums: list[int] = []
        self._place = self._sum = 0

    def add(self, name: str, kind: str, parts: Iterable[bytes | Numbers]) -> None:
        self._write(b"\0" * (-self._place % _ALIGN))
        begin = self._place
        for part in parts:
            self._write(part if isinstance(part, bytes) else part.tobytes())
        self.table[name] = begin, self._place, kind

    def add_texts(self, name: str, texts: Sequence[bytes]) -> None:
        self.add(name, "|u1", texts)
        self.add(f"{name}_ends", "<u8", [np.array(_ends(map(len, texts)), "<u8")])

    def _write(self, raw: bytes) -> None:
        self._stream.write(raw)
        left = memoryview(raw)
        while len(left):
            room = _BLOCK - self._place % _BLOCK
            here, left = left[:room], left[room:]
            self._sum = zlib.crc32(here, self._sum)
            self._place += len(here)
            if self._place % _BLOCK == 0:
                self._sums.append(self._sum)
                self._sum = 0

    def finished(self) -> list[int]:
        """Return the checksums of all blocks."""
        return self._sums + [self._sum] * (self._place % _BLOCK > 0)


class Mapped(Sequence[Live]):
    """Read a mapped file: its entries by row, oldest first; a row is also that of the vector.

    Attributes:
        stamp: the state that the file has.

    Raises:
        IndexLostError: the file is missing or damaged; so do all methods.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            with file.open("rb") as stream:
                size = os.fstat(stream.fileno()).st_size
                self._fd = os.dup(stream.fileno())
        except OSError as error:
            raise self._lost(str(error)) from error
        try:
            tail = os.pread(self._fd, _TRAILER.size, max(0, size - _TRAILER.size))
            magic, head, sums, digest = _TRAILER.unpack(tail)
            begin = size - _TRAILER.size - head - sums
            if magic != _MAGIC or begin < 0:
                raise ValueError("no such file")
            raw = os.pread(self._fd, head + sums, begin)
            if _digest(raw) != digest:
                raise ValueError("its table differs from its checksum")
            table = json.loads(raw[:head])
            self.stamp = Stamp(**table["stamp"])
            self._count: int = table["count"]
            self._sections: dict[str, tuple[int, int, str]] = table["sections"]
            self._sums = np.frombuffer(raw, "<u4", offset=head)
            self._end = begin
            if len(self._sums) != -(-begin // _BLOCK):
                raise ValueError("it was cut")
            self._is_whole = bytearray(len(self._sums))
            self._map = mmap.mmap(self._fd, size, prot=mmap.PROT_READ)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            os.close(self._fd)
            raise self._lost(str(error)) from error
        self._live = lru_cache(_PARSED)(self.read)

    def __del__(self) -> None:
        if hasattr(self, "_map"):  # the map itself ends with the last array over it
            os.close(self._fd)

    def _lost(self, why: str) -> IndexLostError:
        return IndexLostError(f"Expected the entries in {self._file.name} to be whole, got {why}")

    def check(self, begin: int = 0, end: int | None = None) -> None:
        """Compare the blocks that hold these bytes with their checksums, once; by default all."""
        first, last = begin // _BLOCK, -(-(self._end if end is None else end) // _BLOCK)
        for block in range(first, last):
            if self._is_whole[block]:
                continue
            place = block * _BLOCK
            try:  # read, because a map of a bad sector ends the process
                raw = os.pread(self._fd, min(_BLOCK, self._end - place), place)
            except OSError as error:
                raise self._lost(str(error)) from error
            if zlib.crc32(raw) != self._sums[block]:
                raise self._lost(f"another checksum of block {block}")
            self._is_whole[block] = 1

    @property
    def dimension(self) -> int:
        """Return the length of a vector."""
        begin, end, _ = self._sections["vectors"]
        return (end - begin) // 4 // self._count

    def check_texts(self) -> None:
        """Compare everything but the vectors."""
        self.check(self._sections["ids"][0])

    def _array(self, name: str) -> Numbers:
        begin, end, kind = self._sections[name]
        self.check(begin, end)
        size = np.dtype(kind).itemsize
        return np.frombuffer(self._map, kind, (end - begin) // size, begin)

    @cached_property
    def vectors(self) -> Floats:
        """Return the vectors, shape (n, d); the first call compares their checksums."""
        return self._array("vectors").reshape(self._count, -1)

    @cached_property
    def dead(self) -> npt.NDArray[np.intp]:
        """Return the rows that no search may find, because their entries are proposed."""
        return self._array("proposed").astype(np.intp)

    @cached_property
    def _ids(self) -> _Texts:
        return _Texts(self._array("ids").data, self._array("ids_ends"))

    @cached_property
    def _some_ids(self) -> Sequence[bytes]:
        return self.texts("ids")

    @cached_property
    def _order(self) -> Column:
        return self.column("order")

    @cached_property
    def _record_ends(self) -> Numbers:
        return self._array("record_ends")

    @cached_property
    def labels(self) -> Mapping[str, Sequence[int]]:
        """Return the rows made from each task instance."""
        texts = _Texts(self._array("labels").data, self._array("labels_ends"))
        return _Labels(texts, self._array("label_rows"), self._array("label_row_ends"))

    def column(self, name: str) -> Column:
        """Return a section of numbers, whose blocks are compared when they are looked at."""
        begin, end, kind = self._sections[name]
        size = np.dtype(kind).itemsize
        held: Numbers = np.frombuffer(self._map, kind, (end - begin) // size, begin)
        return Column(held, begin, self._is_whole, self.check)

    def texts(self, name: str) -> Sequence[bytes]:
        """Return a section of texts, likewise."""
        return _Texts(self.column(name), self.column(f"{name}_ends"))

    def ids(self) -> set[str]:
        """Return the ids of all entries there ever were."""
        self.check_texts()
        live = {self.id(row) for row in range(self._count)}
        return live.union(id.decode("utf-8", "surrogatepass") for id in self.texts("gone"))

    @cached_property
    def names(self) -> _Names:
        """Return the ids of the entries in the rows; the last ones that were read are kept."""
        return _Names(self)

    def __len__(self) -> int:
        return self._count

    def id(self, row: int) -> str:
        """Return the id of the entry in a row."""
        return self._ids[row].decode("utf-8", "surrogatepass")

    def row(self, id: str) -> int | None:
        """Return the row of an entry, None where it is not live."""
        if (known := self.names.rows.get(id)) is not None:
            return known
        wanted, order, ids = id.encode("utf-8", "surrogatepass"), self._order, self._some_ids
        place = bisect_left(range(self._count), wanted, key=lambda at: ids[order.item(at)])
        if place < self._count and ids[row := order.item(place)] == wanted:
            return self.names.keep(row, id)
        return None

    def number(self, id: str) -> int | None:
        """Return the number of an entry: its row, or above all rows for one that was removed."""
        if (row := self.row(id)) is not None:
            return row
        gone, wanted = self.texts("gone"), id.encode("utf-8", "surrogatepass")
        place = bisect_left(gone, wanted)
        return self._count + place if place < len(gone) and gone[place] == wanted else None

    def place(self, id: str) -> tuple[float, int]:
        """Return where an entry stands among the rows, as a key to sort by.

        That is its row; before a row and by its first change for an entry that was removed; and
        after all rows for one that the file does not know.
        """
        number = self.number(id)
        if number is None:
            return math.inf, 0
        if number < self._count:
            return number, 0
        changes, ends = self.column("entry_changes"), self.column("entry_change_ends")

        def first(number: int) -> int:
            return changes.item(ends.item(number))

        own = first(number)
        return bisect_left(range(self._count), own, key=first) - 0.5, own

    def named(self, number: int) -> str:
        """Return the id of the entry with a number."""
        if number < self._count:
            raw = self._some_ids[number]
        else:
            raw = self.texts("gone")[number - self._count]
        return raw.decode("utf-8", "surrogatepass")

    @overload
    def __getitem__(self, index: int) -> Live: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Live]: ...

    def __getitem__(self, index: int | slice) -> Live | Sequence[Live]:
        if isinstance(index, slice):
            return _Part(self, range(*index.indices(self._count)))
        return self._live(index)

    def load(self, *, most_vectors: float = math.inf) -> LiveEntries:
        """Return all entries; the vectors of more than ``most_vectors`` are left out."""
        self.check()
        ids = [self.id(row) for row in range(self._count)]
        entries = [self.read(row) for row in range(self._count)]
        if self._count > most_vectors:
            return LiveEntries(ids, entries)
        vectors = roomy(self._count, self.dimension)
        vectors[: self._count] = self.vectors
        return LiveEntries(ids, entries, vectors)

    def part(self, rows: Sequence[int | Live]) -> Sequence[Live]:
        """Return the entries in rows, between others; each is read when it is looked at.

        Their checksums are compared now, so that whoever looks finds no damage.
        """
        own = np.unique(np.array([row for row in rows if isinstance(row, int)], dtype=np.intp))
        begin, ends = self._sections["records"][0], self._record_ends
        first, last = (begin + ends[at].astype(np.intp) for at in (own, own + 1))
        unseen = np.append(0, np.cumsum(np.frombuffer(self._is_whole, np.uint8) == 0))
        unknown = unseen[-(-last // _BLOCK)] > unseen[first // _BLOCK]
        for start, end in zip(first[unknown].tolist(), last[unknown].tolist(), strict=True):
            self.check(start, end)
        return _Part(self, rows)

    def read(self, row: int) -> Live:
        """Return the entry in a row, read anew."""
        begin = self._sections["records"][0]
        first, last = self._record_ends.item(row), self._record_ends.item(row + 1)
        self.check(begin + first, begin + last)
        text = self._map[begin + first : begin + last].decode("utf-8", "surrogatepass")
        record, _, origins = text.rpartition("\n")
        return Live(record, origins_of(origins))


class _Part(Sequence[Live]):
    """Read some rows, each when it is looked at; entries that stand between them are given."""

    def __init__(self, mapped: Mapped, rows: Sequence[int | Live]) -> None:
        self._mapped, self._rows = mapped, rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        one = cast("int | Live", self._rows[index])
        return self._mapped[one] if isinstance(one, int) else one


class _Names(Sequence[str]):
    """Read ids by row, and keep the last ones, and their rows."""

    def __init__(self, mapped: Mapped) -> None:
        self._mapped = mapped
        self._ids: dict[int, str] = {}
        self.rows: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._mapped)

    def __getitem__(self, index: Any) -> Any:
        id = self._ids.get(index)
        if id is None:
            id = self._mapped.id(index)
            self.keep(index, id)
        return id

    def keep(self, row: int, id: str) -> int:
        """Keep the id of a row, and return the row."""
        if len(self._ids) >= _NAMED:
            self._ids, self.rows = {}, {}
        self._ids[row], self.rows[id] = id, row
        return row


class Column:
    """Read numbers of a section; a block is compared with its checksum before its first use."""

    def __init__(
        self,
        held: Numbers,
        begin: int,
        is_whole: Sequence[int],
        check: Callable[[int, int], object],
    ) -> None:
        self._all, self._begin, self._is_whole, self._check = held, begin, is_whole, check

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, part: slice) -> Numbers:
        start, stop, _ = part.indices(len(self._all))
        size = self._all.itemsize
        self._check(self._begin + start * size, self._begin + stop * size)
        return self._all[start:stop]

    def item(self, index: int) -> int:
        """Return one number."""
        place = self._begin + index * self._all.itemsize  # of a number that lies in one block
        if not self._is_whole[place // _BLOCK]:
            self._check(place, place + 1)
        return self._all.item(index)


class _Texts(Sequence[bytes]):
    """Read texts that lie one after the other."""

    def __init__(self, raw: memoryview | Column, ends: Numbers | Column) -> None:
        self._raw, self._ends = raw, ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        return self._raw[self._ends.item(index) : self._ends.item(index + 1)].tobytes()


class _Labels(Mapping[str, Sequence[int]]):
    """Look up the rows of a label among sorted ones."""

    def __init__(self, texts: _Texts, rows: Numbers, ends: Numbers) -> None:
        self._texts, self._rows, self._ends = texts, rows, ends

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        return (text.decode("utf-8", "surrogatepass") for text in self._texts)

    def __getitem__(self, label: str) -> Sequence[int]:
        wanted = label.encode("utf-8", "surrogatepass")
        place = bisect_left(self._texts, wanted)
        if place == len(self._texts) or self._texts[place] != wanted:
            raise KeyError(label)
        return self._rows[int(self._ends[place]) : int(self._ends[place + 1])].tolist()


class MappedEntries(Mapping[str, Live]):
    """Show the live entries of a mapped file and what was written since, oldest first.

    Args:
        mapped: the file.
        changed: entries written since, in the order of their first change; None removes one.
    """

    def __init__(self, mapped: Mapped, changed: Mapping[str, Live | None]) -> None:
        self.mapped = mapped
        self._changed = changed
        rows = {id for id in changed if mapped.row(id) is not None}
        self._gone = sum(changed[id] is None for id in rows)
        more = [id for id, live in changed.items() if live is not None and id not in rows]
        self._more = sorted(((mapped.place(id), id) for id in more), key=itemgetter(0))

    def ids(self) -> set[str]:
        """Return the ids of all entries there ever were."""
        return self.mapped.ids().union(self._changed)

    def over(self, changed: Mapping[str, Live | None]) -> MappedEntries:
        """Return the entries with further changes."""
        return MappedEntries(self.mapped, {**self._changed, **changed})

    def __len__(self) -> int:
        return len(self.mapped) - self._gone + len(self._more)

    def __getitem__(self, id: str) -> Live:
        if id in self._changed:
            live = self._changed[id]
        else:
            row = self.mapped.row(id)
            live = None if row is None else self.mapped[row]
        if live is None:
            raise KeyError(id)
        return live

    def __iter__(self) -> Iterator[str]:
        return (id for id, _ in self._rows())

    def values(self) -> ValuesView[Live]:
        """Return the entries, each read when it is asked for and not kept."""
        return _Values(self)

    def _rows(self) -> Iterator[tuple[str, Live | int]]:
        begin, count = 0, len(self.mapped)
        for (place, _), more in [*self._more, ((math.inf, 0), "")]:
            end = math.ceil(min(place, count))
            for row in range(begin, end):
                id = self.mapped.id(row)
                live = self._changed.get(id, row)
                if live is not None:
                    yield id, live
            if more:
                yield more, self[more]
            begin = end


class _Values(ValuesView[Live]):
    def __init__(self, entries: MappedEntries) -> None:
        super().__init__(entries)
        self._entries = entries
        entries.mapped.check_texts()  # now, so that no iteration ends half way

    def __iter__(self) -> Iterator[Live]:
        mapped = self._entries.mapped
        for _, live in self._entries._rows():  # pyright: ignore[reportPrivateUsage]
            yield mapped.read(live) if isinstance(live, int) else live
