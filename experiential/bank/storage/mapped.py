"""Keep the live entries of a namespace in a file that is mapped into memory, not read.

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
import mmap
import os
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from experiential.bank.index.store import IndexLostError
from experiential.bank.storage.tables import Live, origins_of

PATTERN = "entries-*.map*"
"""Of these files in the folder of a bank, with those whose writing was cut off."""
_MAGIC = b"xp-map-1"
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
    gone: Iterable[str],
) -> None:
    """Write the file anew; a process that has the old one open keeps that.

    Args:
        file: its place.
        stamp: the state that it has.
        entries: the live ones, oldest first.
        vectors: those of the entries, in this order.
        gone: ids of entries that were removed.
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
        out.add("ids", "|u1", ids)
        out.add("order", "<u4", [np.array(order, "<u4")])
        ends = [np.array(_ends(map(len, ids)), "<u8")]
        out.add("id_ends", "<u8", ends)
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
        out.add("labels", "|u1", [label for label, _ in named])
        ends = [np.array(_ends(len(label) for label, _ in named), "<u8")]
        out.add("label_ends", "<u8", ends)
        rows = [row for _, held in named for row in held]
        out.add("label_rows", "<u4", [np.array(rows, "<u4")])
        ends = [np.array(_ends(len(held) for _, held in named), "<u8")]
        out.add("label_row_ends", "<u8", ends)
        out.add("gone", "|u1", [json.dumps(list(gone)).encode()])
        table = {"stamp": stamp._asdict(), "count": len(entries), "sections": out.table}
        head = json.dumps(table).encode()
        sums = np.array(out.finished(), "<u4").tobytes()
        stream.write(head + sums)
        stream.write(_TRAILER.pack(_MAGIC, len(head), len(sums), _digest(head + sums)))
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(part, file)


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
        return _Texts(self._array("ids"), self._array("id_ends"))

    @cached_property
    def _order(self) -> Numbers:
        return self._array("order")

    @cached_property
    def _record_ends(self) -> Numbers:
        return self._array("record_ends")

    @cached_property
    def labels(self) -> Mapping[str, Sequence[int]]:
        """Return the rows made from each task instance."""
        texts = _Texts(self._array("labels"), self._array("label_ends"))
        return _Labels(texts, self._array("label_rows"), self._array("label_row_ends"))

    def ids(self) -> set[str]:
        """Return the ids of all entries there ever were."""
        self.check_texts()
        live = {self.id(row) for row in range(self._count)}
        return live.union(json.loads(self._array("gone").tobytes()))

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
        wanted, order = id.encode("utf-8", "surrogatepass"), self._order
        place = bisect_left(order, wanted, key=lambda row: self._ids[row])
        if place < len(order) and self._ids[row := int(order[place])] == wanted:
            return row
        return None

    @overload
    def __getitem__(self, index: int) -> Live: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Live]: ...

    def __getitem__(self, index: int | slice) -> Live | Sequence[Live]:
        if isinstance(index, slice):
            return _Part(self, range(*index.indices(self._count)))
        return self._live(index)

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
            if len(self._ids) >= _NAMED:
                self._ids, self.rows = {}, {}
            id = self._ids[index] = self._mapped.id(index)
            self.rows[id] = index
        return id


class _Texts(Sequence[bytes]):
    """Read texts that lie one after the other."""

    def __init__(self, raw: Numbers, ends: Numbers) -> None:
        self._raw, self._ends = raw.data, ends

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
        rows = {id: mapped.row(id) for id in changed}
        self._fresh = [id for id, live in changed.items() if rows[id] is None and live is not None]
        self._gone = sum(
            live is None and rows[id] is not None for id, live in self._changed.items()
        )

    def ids(self) -> set[str]:
        """Return the ids of all entries there ever were."""
        return self.mapped.ids().union(self._changed)

    def over(self, changed: Mapping[str, Live | None]) -> MappedEntries:
        """Return the entries with further changes."""
        return MappedEntries(self.mapped, {**self._changed, **changed})

    def __len__(self) -> int:
        return len(self.mapped) - self._gone + len(self._fresh)

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
        for row in range(len(self.mapped)):
            id = self.mapped.id(row)
            live = self._changed.get(id, row)
            if live is not None:
                yield id, live
        for id in self._fresh:
            yield id, self[id]


class _Values(ValuesView[Live]):
    def __init__(self, entries: MappedEntries) -> None:
        super().__init__(entries)
        self._entries = entries
        entries.mapped.check_texts()  # now, so that no iteration ends half way

    def __iter__(self) -> Iterator[Live]:
        mapped = self._entries.mapped
        for _, live in self._entries._rows():  # pyright: ignore[reportPrivateUsage]
            yield mapped.read(live) if isinstance(live, int) else live
