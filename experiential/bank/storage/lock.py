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
from typing import Any

from experiential.errors import BankLockedError

LOCK_NAME = "writer.lock"


class FolderLock:
    """Hold the operating-system lock of a bank folder; the file names its owner for people."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fd: int | None = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = _describe(folder, os.pread(self._fd, 4096, 0))
            self.forget()
            raise BankLockedError(message) from None
        self._sign()
        _held.add(self)

    def _sign(self) -> None:
        assert self._fd is not None
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(owner).encode(), 0)

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


def _describe(folder: Path, content: bytes) -> str:
    owner = _owner(content)
    who = (
        f"process {owner['pid']} on {owner['host']} since {owner['time']}"
        if owner
        else "another process"
    )
    return (
        f"Expected to be the only writer of the bank {str(folder)!r}, which {who} holds; "
        "close it there, or open it here with read_only=True"
    )


def _owner(content: bytes) -> dict[str, Any] | None:
    try:
        owner = json.loads(content)
    except ValueError:
        return None
    return owner if {"pid", "host", "time"} <= set(owner) else None


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
