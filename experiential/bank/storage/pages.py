"""Find whole rows in the bytes of a damaged journal, without its b-trees.

A row is found by its shape (the record format of SQLite, https://sqlite.org/fileformat2.html) and
proved by its checksum, so that it does not matter which pages lead to it, or whether its page can
be read by SQLite.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiential.bank.storage.checksums import SIZE, TABLES, Row, checksum

_PAGE = 4096
_SUM = 12 + 2 * SIZE  # serial type of a checksum
_LONGEST = 64  # bytes of the header of a row: at most 11 types
_INTEGERS = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_HEADED = ("commits", "changes", "queue")
"""Tables whose first column is the rowid, for which the row itself holds NULL. The checksum of a
commit covers it; the other two leave it out.
"""
_REALS = {"commits": 2, "trajectories": 7, "scores": 3}
"""Place of the column in which SQLite writes a whole number as an integer."""
_BY_WIDTH: dict[int, list[str]] = {}
for _name, _columns in TABLES.items():
    # The checksum comes on top; a commit's chain value; and the rowid where TABLES leaves it out.
    _BY_WIDTH.setdefault(len(_columns) + 1 + (_name in _HEADED), []).append(_name)


def rows(file: Path) -> Iterator[Row]:
    """Yield every whole row in a journal and its write-ahead log, in no order; some twice."""
    image = _image(file)
    for number, page in image.items():
        data = np.frombuffer(page, dtype=np.uint8)
        ends = np.arange(len(data)) + data - 1  # of the header, if one starts here
        likely = (data > 3) & (data < _LONGEST) & (ends < len(data))
        starts = np.flatnonzero(likely)
        for start in starts[data[ends[starts]] == _SUM]:
            row = _row(image, number, int(start))
            if row is not None:
                yield row


def _image(file: Path) -> dict[int, bytes]:
    """Return the pages by number, as of the last commit in the log."""
    raw = file.read_bytes() if file.is_file() else b""
    size = int.from_bytes(raw[16:18], "big")
    # A damaged header has no page size; that of all journals is SQLite's usual one.
    size = size if raw[:16] == b"SQLite format 3\0" and size in (512, 1024, 2048, 8192) else _PAGE
    parts = range(0, len(raw), size)
    image = {place // size + 1: raw[place : place + size].ljust(size, b"\0") for place in parts}
    log = Path(f"{file}-wal")
    data = log.read_bytes() if log.is_file() else b""
    salt, pending = data[16:24], dict[int, bytes]()
    for place in range(32, len(data) - 24 - size + 1, 24 + size):
        number, committed = struct.unpack_from(">II", data, place)
        if data[place + 8 : place + 16] != salt:
            break
        pending[number] = data[place + 24 : place + 24 + size]
        if committed:
            image.update(pending)
            pending.clear()
    return image


def _row(image: Mapping[int, bytes], number: int, start: int) -> Row | None:
    """Return the row whose header begins here, if it is one."""
    page = image[number]
    types: list[int] = []
    place, end = start + 1, start + page[start]
    while place < end:
        kind, place = _varint(page, place)
        types.append(kind)
    tables = _BY_WIDTH.get(len(types), ())
    if place != end or not tables or any(kind in (10, 11) for kind in types):
        return None
    sizes = [_INTEGERS.get(kind, 8 if kind == 7 else max(0, kind - 12) // 2) for kind in types]
    total = page[start] + sum(sizes)
    payload = _payload(image, page, start, total)
    if payload is None:
        return None
    values: list[Any] = []
    place = page[start]
    for kind, size in zip(types, sizes, strict=True):
        raw = payload[place : place + size]
        place += size
        if kind in _INTEGERS:
            values.append(int.from_bytes(raw, "big", signed=True))
        elif kind == 7:
            values.append(struct.unpack(">d", raw)[0])
        elif kind < 12:
            values.append({0: None, 8: 0, 9: 1}[kind])
        elif kind % 2:
            try:
                values.append(raw.decode())
            except UnicodeDecodeError:
                return None
        else:
            values.append(raw)
    rowid = _rowid(page, start, total)
    for table in tables:
        fields: list[Any] = values[: len(TABLES[table]) + (table in ("changes", "queue"))]
        own = values[len(fields)]
        if table in _HEADED:
            if values[0] is not None:
                continue
            fields = fields[1:] if table != "commits" else [rowid, *fields[1:]]
        if (real := _REALS.get(table)) is not None and isinstance(fields[real], int):
            fields[real] = float(fields[real])
        if checksum(table, fields) == own:
            return Row(table, rowid, tuple(fields))
    return None


def _payload(image: Mapping[int, bytes], page: bytes, start: int, total: int) -> bytes | None:
    """Return the bytes of a row, those on its overflow pages included."""
    size = len(page)
    local = total
    if total > size - 35:
        least = (size - 12) * 32 // 255 - 23
        local = least + (total - least) % (size - 4)
        local = local if local <= size - 35 else least
    if start + local > size or total > len(image) * size:
        return None
    parts, left = [page[start : start + local]], total - local
    following = int.from_bytes(page[start + local : start + local + 4], "big")
    while left > 0:
        further = image.get(following)
        if further is None:
            return None
        parts.append(further[4 : 4 + left])
        following = int.from_bytes(further[:4], "big")
        left -= size - 4
    return b"".join(parts)


def _rowid(page: bytes, start: int, total: int) -> int | None:
    """Return the rowid that stands before a row, behind the length of the row."""
    length = _as_varint(total)
    for place in range(start - 1, max(start - 10, -1), -1):
        found, end = _varint(page, place)
        if end == start and page[max(0, place - len(length)) : place] == length:
            return found
    return None


def _varint(page: bytes, place: int) -> tuple[int, int]:
    """Return the number here and the place after it; past the end of a page there are zeros."""
    value = 0
    for count in range(9):
        byte = page[place] if place < len(page) else 0
        place += 1
        if count == 8:
            return (value << 8 | byte), place
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            break
    return value, place


def _as_varint(value: int) -> bytes:
    parts = [value & 0x7F]
    while value := value >> 7:
        parts.append(value & 0x7F | 0x80)
    return bytes(reversed(parts))
