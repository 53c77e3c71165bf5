"""Record what a process asks of its disk, and draw what a power cut may leave of it.

`record` runs a command under ``strace`` and reads every change of one folder from the log. `Disk`
replays the changes and keeps apart what was synced from what was only written. At a cut, everything
synced is there. Of the rest, each sector or page holds one of the states that it went through, a
file has one of its sizes, and names are those after some of the unsynced creations, renames and
removals. Three assumptions are SQLite's own: a sector is written whole, a write leaves the bytes
beside it alone, and a rename happens or does not.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from experiential.errors import ConfigError

UNITS = (512, 4096)
"""Bytes that a disk, and a page cache, write at once."""
FATES = ("nothing", "everything", "in order", "torn")
"""What a cut may leave of the unsynced changes as a whole."""
_MAPPED = "-shm"  # SQLite maps this file into memory, and makes it again
_CALLS = (
    "?open,openat,?creat,read,readv,write,writev,pwrite64,pwritev,?pwritev2,lseek,ftruncate,truncate,fallocate"
    ",?rename,renameat,?renameat2,?unlink,unlinkat,?mkdir,mkdirat,?rmdir,fsync,fdatasync"
)
_LINE = re.compile(r"(\d+) +(?:<\.\.\. \w+ resumed>)?(.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\w+|\?).*")
_UNFINISHED = " <unfinished ...>"
_HEX = r"((?:\\x[0-9a-f]{2})*)"
_TEXT = re.compile(rf'"{_HEX}"(\.\.\.)?')
_OPENED = re.compile(rf"(\w+)<{_HEX}>")
_NUMBER = re.compile(r"(?<=, )\d+(?=, |$)")


@dataclass(eq=False)
class File:
    """A file, whatever its names: its content when the recording began, and its size now."""

    content: bytes = b""
    size: int = 0


@dataclass(eq=False)
class Folder:
    """A folder: its names when the recording began, and now."""

    names: dict[str, File | Folder] = field(default_factory=dict[str, "File | Folder"])
    now: dict[str, File | Folder] = field(default_factory=dict[str, "File | Folder"])


class Rename(NamedTuple):
    """Names that were set, or removed (None), in one step."""

    places: tuple[tuple[Folder, str, File | Folder | None], ...]


class Write(NamedTuple):
    """Bytes that were written."""

    file: File
    offset: int
    data: bytes


class Resize(NamedTuple):
    """A file that was cut, or made longer."""

    file: File
    size: int


class Sync(NamedTuple):
    """A sync that has ended; it covers the changes before number ``since``."""

    node: File | Folder
    since: int


class Said(NamedTuple):
    """What the process wrote to its standard output."""

    text: str


Change = Rename | Write | Resize | Sync | Said


class Recording(NamedTuple):
    """A folder as it was, and all that was done to it, in order."""

    root: Folder
    changes: list[Change]


def record(command: Sequence[str], home: Path, scratch: Path) -> Recording:
    """Run a command and record what it does to the existing folder ``home``.

    That the recording is complete is checked: replayed as a whole it gives the folder as it is.

    Raises:
        ConfigError: strace is missing, or may not trace.
        RuntimeError: the command failed, or changed the folder in a way that was not recorded.
    """
    if shutil.which("strace") is None:
        raise ConfigError(
            "Expected strace to record a process with, got none; install it (apt install strace)"
        )
    home, scratch = home.resolve(), scratch.resolve()
    root, log, said = _read(home), scratch / "strace.log", scratch / "said.log"
    tracing = ["strace", "-f", "--seccomp-bpf", "-y", "-xx", "-s", str(1 << 26), "-o", str(log)]
    tracing += ["-e", f"trace={_CALLS}", "-e", "raw=read,readv", "-e", "signal=none", *command]
    with said.open("wb") as output:
        ended = subprocess.run(tracing, stdout=output, stderr=subprocess.PIPE, check=False)
    if ended.returncode:
        lines = ended.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        if lines[0].startswith("strace:"):
            raise ConfigError(f"Expected a strace that may trace a process, got {lines[0]!r}")
        raise RuntimeError(f"The recorded command failed: {lines[-1]}")
    recording = Recording(root, _Reader(root, home, said).read(log))
    disk = Disk(recording)
    disk.advance(len(recording.changes))
    found, wanted = disk.left(random.Random(0), "everything"), Disk(Recording(_read(home), []))
    expected = wanted.left(random.Random(0), "everything")
    if lacking := [name for name in {*found, *expected} if found.get(name) != expected.get(name)]:
        raise RuntimeError(f"The recording lacks changes of {', '.join(sorted(lacking))}")
    return recording


def put(files: dict[str, bytes | None], home: Path) -> None:
    """Write files, and folders (None), into a new folder."""
    home.mkdir(parents=True)
    for name, content in files.items():
        if content is None:
            (home / name).mkdir()
        else:
            (home / name).write_bytes(content)


def _read(folder: Path) -> Folder:
    names: dict[str, File | Folder] = {}
    for path in folder.iterdir():
        if path.is_dir():
            names[path.name] = _read(path)
        else:
            content = path.read_bytes()
            names[path.name] = File(content, len(content))
    return Folder(names, dict(names))


class _Reader:
    """Read the log of strace, following names, sizes and positions as the process sees them."""

    def __init__(self, root: Folder, home: Path, said: Path) -> None:
        self._root, self._home, self._said = root, home, said
        self._changes: list[Change] = []
        self._nodes: dict[str, File | Folder] = {}  # by descriptor
        self._positions: dict[str, int] = {}
        self._appending: set[str] = set()

    def read(self, log: Path) -> list[Change]:
        """Return all changes."""
        begun: dict[str, tuple[str, int]] = {}  # calls during which other threads were seen
        with log.open(encoding="ascii") as lines:
            for line in lines:
                start = _LINE.match(line)
                thread, text = start.groups() if start else ("", "")
                if text.startswith(("+++", "---")):
                    continue
                if text.endswith(_UNFINISHED):
                    begun[thread] = text.removesuffix(_UNFINISHED), len(self._changes)
                    continue
                first, since = begun.pop(thread, ("", len(self._changes)))
                call = _CALL.match(first + text)
                if call is None:
                    raise RuntimeError(f"A line of strace cannot be read: {line[:120]!r}")
                name, arguments, result = call.groups()
                if result != "?" and (given := int(result, 0)) >= 0:
                    self._take(name, arguments, given, since)
        return self._changes

    def _take(self, name: str, arguments: str, result: int, since: int) -> None:
        if name in ("read", "readv"):  # printed as bare numbers, for it only moves the position
            descriptor = str(int(arguments.partition(",")[0], 0))
            self._positions[descriptor] = self._positions.get(descriptor, 0) + result
            return
        found = _TEXT.findall(arguments)
        if any(shortened for _, shortened in found):
            raise RuntimeError(f"strace shortened the data of a {name}")
        texts = [_bytes(text) for text, _ in found]
        opened = [
            (number, os.fsdecode(_bytes(path))) for number, path in _OPENED.findall(arguments)
        ]
        numbers = [int(number) for number in _NUMBER.findall(arguments)]
        if name in ("open", "openat", "creat"):
            if (place := self._place(texts[0], opened)) is not None:
                self._open(place, arguments, str(result))
        elif name.startswith(("rename", "unlink", "mkdir", "rmdir", "truncate")):
            # Of two paths from open folders, the second belongs to the last of these.
            places = [
                self._place(text, opened[-1:] if at else opened) for at, text in enumerate(texts)
            ]
            known = [place for place in places if place is not None]
            if len(known) == len(texts):
                self._rename(name, known, numbers)
            elif known:
                raise RuntimeError(f"A {name} moved a file into the recorded folder, or out of it")
        elif opened:
            descriptor, path = opened[0]
            if Path(path) == self._said and name == "write":
                self._changes.append(Said(texts[0].decode()))
            elif Path(path.removesuffix(" (deleted)")).is_relative_to(self._home):
                if name == "lseek":  # also by a copy of a descriptor, of a folder that is listed
                    self._positions[descriptor] = result
                    return
                meant = self._at(path)
                if descriptor not in self._nodes or meant not in (None, self._nodes[descriptor]):
                    raise RuntimeError(f"The log lacks the opening of {path}, before a {name}")
                self._change(name, descriptor, b"".join(texts)[:result], numbers, result, since)

    def _at(self, path: str) -> File | Folder | None:
        """Return what bears a path now; None if nothing does any more."""
        node: File | Folder | None = self._root
        for part in Path(path).relative_to(self._home).parts:
            node = node.now.get(part) if isinstance(node, Folder) else None
        return node

    def _place(self, path: bytes, opened: list[tuple[str, str]]) -> tuple[Folder, str] | None:
        """Return the folder and the name of a path; None if it is outside of the recorded one."""
        whole = Path(opened[0][1] if opened else "/", os.fsdecode(path))
        if not whole.is_relative_to(self._home):
            return None
        folder, parts = self._root, whole.relative_to(self._home).parts
        for part in parts[:-1]:
            below = folder.now[part]
            assert isinstance(below, Folder)
            folder = below
        return folder, parts[-1] if parts else ""

    def _open(self, place: tuple[Folder, str], arguments: str, descriptor: str) -> None:
        folder, name = place
        node = folder.now.get(name) if name else self._root
        if node is None:
            node = File()
            self._name((folder, name, node))
        elif isinstance(node, File) and "O_TRUNC" in arguments and node.size:
            self._resize(node, 0)
        self._nodes[descriptor] = node
        self._positions[descriptor] = 0
        (self._appending.add if "O_APPEND" in arguments else self._appending.discard)(descriptor)

    def _rename(self, call: str, places: list[tuple[Folder, str]], numbers: list[int]) -> None:
        folder, name = places[0]
        if call.startswith("rename"):
            self._name((folder, name, None), (*places[1], folder.now[name]))
        elif call.startswith("mkdir"):
            self._name((folder, name, Folder()))
        elif call == "truncate":
            node = folder.now[name]
            assert isinstance(node, File)
            self._resize(node, numbers[0])
        else:
            self._name((folder, name, None))

    def _change(
        self, call: str, descriptor: str, data: bytes, numbers: list[int], result: int, since: int
    ) -> None:
        node = self._nodes[descriptor]
        if call in ("fsync", "fdatasync"):
            self._changes.append(Sync(node, since))
            return
        assert isinstance(node, File)
        if call == "ftruncate":
            self._resize(node, numbers[0])
        elif call == "fallocate":
            self._resize(node, max(node.size, numbers[-1] + numbers[-2]))
        else:
            at = node.size if descriptor in self._appending else self._positions[descriptor]
            if call.startswith("pwrite"):
                at = numbers[-1]
            else:
                self._positions[descriptor] = at + result
            self._changes.append(Write(node, at, data))
            node.size = max(node.size, at + result)

    def _name(self, *places: tuple[Folder, str, File | Folder | None]) -> None:
        _apply(places, lambda folder: folder.now)
        self._changes.append(Rename(places))

    def _resize(self, file: File, size: int) -> None:
        file.size = size
        self._changes.append(Resize(file, size))


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def _apply(
    places: Sequence[tuple[Folder, str, File | Folder | None]],
    names: Callable[[Folder], dict[str, File | Folder]],
) -> None:
    for folder, name, node in places:
        if node is None:
            names(folder).pop(name, None)
        else:
            names(folder)[name] = node


class Disk:
    """Replay a recording, and say what the disk may hold at a cut.

    Args:
        recording: what to replay.
        ordered: any sync keeps all earlier names too, as ext4, XFS and Btrfs do; without, as POSIX
            has it, only the sync of a folder keeps the names in it.
        lying: syncs do nothing, as on a disk that acknowledges what it holds in memory.
    """

    def __init__(self, recording: Recording, *, ordered: bool = True, lying: bool = False) -> None:
        self._recording, self._ordered, self._lying = recording, ordered, lying
        self.at = 0
        self._synced: dict[File, bytearray] = {}
        self._written: defaultdict[File, list[tuple[int, Write | Resize]]] = defaultdict(list)
        self._names: dict[Folder, dict[str, File | Folder]] = {}
        self._renamed: list[tuple[int, Rename]] = []

    def advance(self, to: int) -> list[str]:
        """Replay the changes before number ``to``; return what was said meanwhile."""
        said: list[str] = []
        for number in range(self.at, to):
            change = self._recording.changes[number]
            match change:
                case Rename():
                    self._renamed.append((number, change))
                case Write() | Resize():
                    self._written[change.file].append((number, change))
                case Sync():
                    if not self._lying:
                        self._keep(change.node, change.since)
                case Said():
                    said.append(change.text)
        self.at = to
        return said

    def left(self, draw: random.Random, fate: str) -> dict[str, bytes | None]:
        """Return what a cut here leaves: the content by name, None for a folder."""
        limit = {"nothing": 0, "everything": self.at}.get(fate, draw.randint(0, self.at))
        if fate == "torn":
            renamed = self._some_names(draw)
        else:
            renamed = [change for number, change in self._renamed if number < limit]
        names = {folder: dict(known) for folder, known in self._names.items()}
        for change in renamed:
            _apply(change.places, lambda one: names.setdefault(one, dict(one.names)))
        found: dict[str, bytes | None] = {}

        def walk(folder: Folder, path: str) -> None:
            for name, node in sorted(names.get(folder, folder.names).items()):
                if isinstance(node, Folder):
                    found[path + name] = None
                    walk(node, f"{path}{name}/")
                elif not name.endswith(_MAPPED):
                    found[path + name] = self._content(
                        node, draw, None if fate == "torn" else limit
                    )
                elif fate == "torn" and draw.random() < 0.5:  # whatever was in memory
                    found[path + name] = draw.randbytes(node.size)

        walk(self._recording.root, "")
        return found

    def _keep(self, node: File | Folder, since: int) -> None:
        """Make what a sync covers part of what every cut leaves."""
        if isinstance(node, File):
            written = self._written.pop(node, [])
            content = self._base(node)
            for number, change in written:
                if number < since:
                    _write(content, change)
            self._synced[node] = content
            if later := [one for one in written if one[0] >= since]:
                self._written[node] = later
        # A name is kept together with what happened to the same names before.
        needed: set[tuple[Folder, str]] = set()
        kept: dict[int, Rename] = {}
        for number, change in reversed(self._renamed):
            places = {(folder, name) for folder, name, _ in change.places}
            asked = self._ordered or any(folder is node for folder, _ in places)
            if number < since and (asked or places & needed):
                needed |= places
                kept[number] = change
        for _, change in sorted(kept.items()):
            _apply(change.places, lambda one: self._names.setdefault(one, dict(one.names)))
        self._renamed = [one for one in self._renamed if one[0] not in kept]

    def _some_names(self, draw: random.Random) -> list[Rename]:
        """Draw from the unsynced renames: a beginning of them, or any that need none left out."""
        changes = [change for _, change in self._renamed]
        if self._ordered:
            return changes[: draw.randint(0, len(changes))]
        share, kept, lost = draw.choice((0.2, 0.5, 0.8)), list[Rename](), set[tuple[Folder, str]]()
        for change in changes:
            places = {(folder, name) for folder, name, _ in change.places}
            if places & lost or draw.random() > share:
                lost |= places
            else:
                kept.append(change)
        return kept

    def _base(self, file: File) -> bytearray:
        return bytearray(self._synced.get(file, file.content))

    def _content(self, file: File, draw: random.Random, limit: int | None) -> bytes:
        """Return the synced content with the unsynced changes before ``limit``; None draws some."""
        content, written = self._base(file), self._written.get(file, [])
        if limit is not None:
            for number, change in written:
                if number < limit:
                    _write(content, change)
            return bytes(content)
        changes = [change for _, change in written]
        # Up to one of the points at which the file was cut short, all is as it was then.
        size, cuts = len(content), [0]
        for place, change in enumerate(changes, start=1):
            if isinstance(change, Resize) and change.size < size:
                cuts.append(place)
            size = _end(size, change)
        first = draw.randrange(len(cuts))
        for change in changes[: cuts[first]]:
            _write(content, change)
        changes = changes[cuts[first] : [*cuts, len(changes) + 1][first + 1] - 1]
        sizes = [len(content)]
        for change in changes:
            sizes.append(_end(sizes[-1], change))
        # Each sector or page was written by itself, at some moment or never.
        unit, share = draw.choice(UNITS), draw.choice((0.1, 0.5, 0.9))
        pieces: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        for change in changes:
            if isinstance(change, Write):
                start = change.offset
                while start < change.offset + len(change.data):
                    end = min(change.offset + len(change.data), start - start % unit + unit)
                    piece = change.data[start - change.offset : end - change.offset]
                    pieces[start // unit].append((start, piece))
                    start = end
        more = sizes[-1] - len(content)
        content += draw.choice((bytes(more), draw.randbytes(more)))  # room that nothing was put in
        for _, known in sorted(pieces.items()):
            for start, data in known[: draw.randint(1, len(known)) if draw.random() < share else 0]:
                content[start : start + len(data)] = data
        return bytes(content[: draw.choice(sizes)])


def _end(size: int, change: Write | Resize) -> int:
    if isinstance(change, Resize):
        return change.size
    return max(size, change.offset + len(change.data))


def _write(content: bytearray, change: Write | Resize) -> None:
    size = _end(len(content), change)
    content.extend(bytes(max(0, size - len(content))))
    if isinstance(change, Write):
        content[change.offset : change.offset + len(change.data)] = change.data
    else:
        del content[size:]
