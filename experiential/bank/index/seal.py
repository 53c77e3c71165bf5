"""Seal the folder of an index store: checksums of its vector files, checked before it is opened.

Chroma writes those files in place and trusts them when it reads them. Of 20 damages tried, 6 gave
wrong hits silently and 2 ended the process by a segmentation fault; a kill in the middle of writing
may leave such files, too.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

SEAL_NAME = "seal.json"
Known = tuple[tuple[int, int], list[int]]
"""Of a file: time of its last change and size, and its size and checksum when they were so."""
_BLOCK = 1 << 20
_lock = threading.RLock()
_users: Counter[str] = Counter()


@dataclass(eq=False)
class Seal:
    """Seal the files of one folder at the end of each block in which they may change.

    Blocks of one process exclude each other, because the namespaces of a bank share the folder. A
    kill inside leaves a broken seal. Files one folder below are sealed, where Chroma has its
    vectors: its database, beside them, checks itself and changes when it is opened. Without a
    folder nothing is sealed.
    """

    folder: Path | None
    _known: dict[str, Known] = field(default_factory=dict[str, Known], init=False)
    _is_used: bool = field(default=False, init=False)

    def is_broken(self) -> bool:
        """Return whether the files of a folder not open here differ from those that were sealed."""
        with _lock:
            if self.folder is None or _users[str(self.folder)]:
                return False
            found = self._fingerprint(self.folder)
            return bool(found) and found != _sealed(self.folder)

    @contextmanager
    def changing(self) -> Generator[None]:
        """Let the files change inside the block, and seal them unless it fails."""
        if self.folder is None:
            yield
            return
        with _lock:
            if not self._is_used:
                self._is_used = True
                _users[str(self.folder)] += 1
            yield
            if self.folder.is_dir():
                self._write(self.folder)

    def leave(self) -> None:
        """Say that the folder is closed."""
        with _lock:
            if self._is_used:
                self._is_used = False
                _users[str(self.folder)] -= 1

    def _write(self, folder: Path) -> None:
        if (found := self._fingerprint(folder)) != _sealed(folder):
            part = folder / f"{SEAL_NAME}.part"
            part.write_text(json.dumps(found))
            os.replace(part, folder / SEAL_NAME)

    def _fingerprint(self, folder: Path) -> dict[str, list[int]]:
        """Return size and checksum of every file; an unchanged one is not read again."""
        now: dict[str, Known] = {}
        for file in sorted(folder.glob("*/*")):
            name, status = file.relative_to(folder).as_posix(), file.stat()
            state = (status.st_mtime_ns, status.st_size)
            known = self._known.get(name)
            if known is None or known[0] != state:
                checksum = 0
                with file.open("rb") as stream:
                    while block := stream.read(_BLOCK):
                        checksum = zlib.crc32(block, checksum)
                known = state, [status.st_size, checksum]
            now[name] = known
        self._known = now
        return {name: sums for name, (_, sums) in now.items()}


def _sealed(folder: Path) -> dict[str, list[int]]:
    try:
        return json.loads((folder / SEAL_NAME).read_text())
    except (OSError, ValueError):
        return {}
