"""Allow one writer per bank folder, by a file held with ``flock``, which dies with its process."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path

from experiential.errors import BankLockedError

LOCK_NAME = "writer.lock"
_guard = threading.RLock()
_held: dict[str, tuple[int, set[str]]] = {}
"""Descriptor of the lock file and namespaces being written, by folder."""


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
            descriptor, names = _held.get(self._key, (-1, set[str]()))
            if namespace in names:
                raise BankLockedError(
                    f"Expected one writer of namespace {namespace!r} in the bank {str(folder)!r},"
                    f" which this process ({os.getpid()}) has already open; use that object, close"
                    " it first, or open with read_only=True"
                )
            if not names:  # the lock lives as long as the descriptor, and the file names its owner
                descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    owner = described_owner(os.pread(descriptor, 4096, 0))
                    os.close(descriptor)
                    raise BankLockedError(
                        f"Expected to be the only writer of the bank {str(folder)!r}, which"
                        f" {owner} holds; close it there, or open it here with read_only=True"
                    ) from None
                now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
                owner = {"pid": os.getpid(), "host": socket.gethostname(), "time": now}
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(owner).encode(), 0)
            self.is_first = not names
            """Whether this process had no other namespace of the folder open."""
            names.add(namespace)
            _held[self._key] = (descriptor, names)

    def release(self) -> None:
        """Release the right; safe to call twice."""
        with _guard:
            descriptor, names = _held.get(self._key, (-1, set[str]()))
            if self._namespace not in names:
                return
            names.discard(self._namespace)
            if not names:
                del _held[self._key]
                os.ftruncate(descriptor, 0)
                os.close(descriptor)


def lock_owner(folder: Path) -> str | None:
    """Describe the process that writes a bank folder now; None if none does."""
    with _guard:
        if os.path.realpath(folder) in _held:
            return "this process"
        try:
            descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
        except FileNotFoundError:
            return None
        content = os.pread(descriptor, 4096, 0)
        try:
            if content:  # a writer empties it when it ends, a killed one leaves it
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return described_owner(content)
        finally:
            os.close(descriptor)  # and with it the lock just taken
        return None


def described_owner(content: bytes) -> str:
    """Describe the process that wrote a lock file."""
    try:
        owner = json.loads(content)
        return f"process {owner['pid']} on {owner['host']} since {owner['time']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _forget_in_child() -> None:
    # The lock stays while the parent of a fork has a descriptor; the child must not keep it.
    for descriptor, _ in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)
