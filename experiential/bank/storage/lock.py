"""Allow one writer per bank folder, by a file held with ``flock``, which dies with its process."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import weakref
from pathlib import Path

from experiential.errors import BankLockedError

LOCK_NAME = "writer.lock"


class FolderLock:
    """Hold the operating-system lock of a bank folder; the file names its owner for people."""

    def __init__(self, folder: Path) -> None:
        self._fd: int | None = None
        fd = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = described_owner(os.pread(fd, 4096, 0))
            os.close(fd)
            raise BankLockedError(
                f"Expected to be the only writer of the bank {str(folder)!r}, which {owner} holds;"
                " close it there, or open it here with read_only=True"
            ) from None
        self._fd = fd
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "time": now}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(owner).encode(), 0)
        _held.add(self)

    def release(self) -> None:
        """Let another process write."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
        self.forget()

    def forget(self) -> None:
        """Close this process's handle; the lock stays while the parent of a fork has one."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def described_owner(content: bytes) -> str:
    """Describe the process that wrote a lock file."""
    try:
        owner = json.loads(content)
        return f"process {owner['pid']} on {owner['host']} since {owner['time']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


class WriterLock:
    """Hold the right to write one namespace of a folder.

    Namespaces of one folder may be open side by side in one process, which then shares the folder's
    lock between them; any other process, and a second writer of the same namespace, is refused with
    ``BankLockedError``.
    """

    def __init__(self, folder: Path, namespace: str) -> None:
        self._key = os.path.realpath(folder)
        self._namespace = namespace
        with _guard:
            lock, names = _shared.get(self._key) or (FolderLock(folder), set[str]())
            if namespace in names:
                raise BankLockedError(
                    f"Expected one writer of namespace {namespace!r} in the bank {str(folder)!r},"
                    f" which this process ({os.getpid()}) has already open; use that object, close"
                    " it first, or open with read_only=True"
                )
            names.add(namespace)
            _shared[self._key] = (lock, names)

    def release(self) -> None:
        """Release the right; safe to call twice."""
        with _guard:
            lock, names = _shared.get(self._key, (None, set[str]()))
            if lock is None or self._namespace not in names:
                return
            names.discard(self._namespace)
            if not names:
                del _shared[self._key]
                lock.release()


_guard = threading.RLock()
_shared: dict[str, tuple[FolderLock, set[str]]] = {}
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.forget()
    _shared.clear()


os.register_at_fork(after_in_child=_forget_in_child)
