"""Use an object of one process from others on the same machine: it is served where it was made.

The files and threads of a bank or manager belong to one process. A copy of it that a child process
gets, in a pickle or by a fork, is a handle there: its calls are carried out by a thread of the
process that made it. They travel as pickles over a Unix socket in a folder that only this user can
open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import shutil
import socket
import tempfile
import threading
import time
import weakref
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from experiential.errors import BankError
from experiential.types import new_id

_LOGGER = logging.getLogger(__name__)
_guard = threading.RLock()
"""Held while sockets are made, and during a fork: a child must close those of its parent, or it
would keep the connections of its siblings open when the parent dies."""


class Handle(NamedTuple):
    """Describe what stands for an object in another process: ``kind(line, **options)``."""

    kind: type[Any]
    options: dict[str, Any]


class Shared:
    """Base of objects that child processes use by handles; ``_offer`` ends the constructor."""

    _key: str  # names the object in the calls of other processes

    def _offer(self) -> None:
        """Let pickles and forks of this object be handles from now on."""
        self._key = new_id()
        _shared[self._key] = self

    @property
    def closed(self) -> bool:
        """Return whether ``close`` was called."""
        raise NotImplementedError

    def _handle(self) -> Handle:
        """Return what stands for this object in another process."""
        raise NotImplementedError

    def _answering(self) -> Any:
        """Return the object that answers the calls of handles, by default this one."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.closed:
            raise BankError(
                f"Expected an open {type(self).__name__} to pickle, got a closed one; open it again"
            )
        line = Line(_running_server().address, os.getpid(), self._key)
        return _unpickled, (line, self._handle())


class Line:
    """Call an object that another process has open, from any thread of this one.

    A pickled or forked copy opens its own sockets.

    Args:
        address: of the Unix socket.
        owner: id of the process that has the object.
        key: of the object there.
    """

    def __init__(self, address: str, owner: int, key: str) -> None:
        self.address = address
        self.owner = owner
        self.key = key
        self.closed = False
        self._idle: list[Any] = []  # files of connected sockets
        self._pid = os.getpid()
        self._has_failed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Line, (self.address, self.owner, self.key)

    def __str__(self) -> str:
        return f"process {self.owner}"

    def call(self, path: str, /, *args: Any, **kwargs: Any) -> Any:
        """Return what a method of the object returns, or the value of an attribute.

        Raises:
            BankError: the other process has ended or closed the object, or raised what cannot be
                pickled. Its other errors keep their type.
        """
        if self.closed:
            raise BankError("Expected an open handle, got a closed one; pass the object again")
        if self._pid != os.getpid():  # the sockets of the process that was forked are in use there
            self._idle, self._pid = [], os.getpid()
        request = pickle.dumps((self.key, path, args, kwargs))
        try:
            file = self._idle.pop()  # one thread at a time has it
        except IndexError:
            file = None
        try:
            if file is None:
                with socket.socket(socket.AF_UNIX) as opened:
                    opened.connect(self.address)
                    file = opened.makefile("rwb")
            file.write(request)
            file.flush()
            is_answer, answer = pickle.load(file)
        except BaseException as error:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
            if isinstance(error, (OSError, EOFError, pickle.UnpicklingError)):
                message = (
                    f"Expected an answer of process {self.owner}, which opened this bank, got"
                    f" {type(error).__name__}: {error}; keep that process and its bank until those"
                    " that it started have ended"
                )
                if not self._has_failed:
                    self._has_failed = True
                    _LOGGER.warning("%s (said once)", message)
                raise BankError(message) from error
            raise
        self._idle.append(file)
        if not is_answer:
            raise answer
        return answer

    def close(self) -> None:
        """Close the sockets of this process; safe to call twice."""
        self.closed = True
        idle, self._idle = self._idle, []
        for file in idle if self._pid == os.getpid() else ():
            with contextlib.suppress(OSError):
                file.close()


class _Server:
    """Carry out the calls of other processes, each connection in a thread of its own."""

    def __init__(self) -> None:
        folder = tempfile.mkdtemp(prefix="experiential-")  # for this user only
        self.finalizer = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.address = str(Path(folder) / "bank")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._connections: set[socket.socket] = set()
        threading.Thread(target=self._accept, name="experiential-server", daemon=True).start()

    def _accept(self) -> None:
        while True:
            select.select([self._listener], [], [])
            try:
                with _guard:
                    connection, _ = self._listener.accept()
                    self._connections.add(connection)
            except OSError:  # the caller is gone, or no file is free
                time.sleep(0.05)
                continue
            serve = partial(self._serve, connection)
            threading.Thread(target=serve, name="experiential-server", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError), connection, connection.makefile("rwb") as file:
            while True:
                key, path, args, kwargs = pickle.load(file)
                reply = self._answer(key, path, args, kwargs)
                file.write(reply)
                file.flush()
        with _guard:
            self._connections.discard(connection)

    def _answer(self, key: str, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Return the pickled result or error of one call."""
        try:
            if (shared := _shared.get(key)) is None:
                raise BankError(
                    "Expected an object that is open where it was made, got one that is gone; keep"
                    " it until the processes that use it have ended"
                )
            answer = attrgetter(path)(shared._answering())  # pyright: ignore[reportPrivateUsage]
            if callable(answer):
                answer = answer(*args, **kwargs)
            return pickle.dumps((True, answer))
        except Exception as error:  # noqa: BLE001  (raised where the call was made)
            try:
                pickle.loads(reply := pickle.dumps((False, error)))
                return reply
            except Exception:  # noqa: BLE001  (whatever the pickle of an unknown class does)
                return pickle.dumps((False, BankError(f"{type(error).__name__}: {error}")))

    def forget(self) -> None:
        """Close in a child what belongs to the parent, which goes on with it."""
        self.finalizer.detach()
        for one in (self._listener, *self._connections):
            with contextlib.suppress(OSError):  # it was just closed
                os.close(one.detach())


_server: _Server | None = None
_shared: weakref.WeakValueDictionary[str, Shared] = weakref.WeakValueDictionary()
_at_fork: list[tuple[Shared, Line | None, Handle | None]] = []
_inherited: list[Any] = []
"""What a forked process has of its parent's files and threads: never used, and never collected,
since closing them would disturb the parent."""


def _running_server() -> _Server:
    global _server
    with _guard:
        try:
            _server = _server or _Server()
        except OSError as error:
            raise BankError(
                f"Expected to make a socket for other processes in {tempfile.gettempdir()!r}, got"
                f" {error}; set TMPDIR to a short path with room"
            ) from error
        return _server


def _unpickled(line: Line, handle: Handle) -> Any:
    """Return the object itself in the process that made it, and a handle in any other."""
    if line.owner == os.getpid() and (known := _shared.get(line.key)) is not None:
        return known
    return handle.kind(line, **handle.options)


def _before_fork() -> None:
    _guard.acquire()
    alive = [one for ref in _shared.valuerefs() if (one := ref()) is not None and not one.closed]
    for one in alive:
        try:
            _at_fork.append((one, *one.__reduce__()[1]))
        except BankError as error:
            _LOGGER.warning("The forked process cannot use %r: %s", one, error)
            _at_fork.append((one, None, None))


def _in_parent() -> None:
    _at_fork.clear()
    _guard.release()


def _in_child() -> None:
    global _server, _guard, _shared
    _guard = threading.RLock()
    if _server is not None:
        _server.forget()
        _inherited.append(_server)
        _server = None
    _shared = weakref.WeakValueDictionary()
    for shared, line, handle in _at_fork:
        # All that the child has of the object is a reference; so the object becomes the handle.
        _inherited.append(shared.__dict__)
        shared.__dict__ = {}
        if line is not None and handle is not None:
            kind: Any = handle.kind
            shared.__class__ = kind
            kind.__init__(shared, line, **handle.options)
    _at_fork.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
