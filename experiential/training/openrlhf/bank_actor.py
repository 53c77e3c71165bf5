"""The bank's one writer as a Ray actor, served over HTTP to the trainer and to whoever else has its token."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from experiential.bank.bank import ExperienceBank
from experiential.bank.http import wire
from experiential.bank.http.remote import RemoteBank
from experiential.bank.index.chroma_server import FOLDER
from experiential.config import BankSettings, ClusterSettings
from experiential.errors import BankError, BankLockedError, ExperientialError, MissingExtraError
from experiential.training.openrlhf.calls import cause_of, is_joined, joined_ray, told

if TYPE_CHECKING:
    from experiential.bank.http.shelf import Shelf

T = TypeVar("T")
_log = logging.getLogger(__name__)
_CALLS = 8
_CHECK_SECONDS = 10.0
_CLOSE_SECONDS = 60.0
_LOCK_SECONDS = 30.0
_PATIENCE = 300.0
"""Seconds that a client waits at most for a bank that is started again."""


@dataclass(frozen=True)
class Serving:
    """What is served, and where.

    Attributes:
        folder: the bank's, absolute.
        settings: namespace, embedder, place of the index and length of texts.
        token: what every request must carry.
        port: 0 takes a free one.
    """

    folder: str
    settings: BankSettings
    token: str
    port: int = 0


class BankHost:
    """The inside of the Ray actor: an open bank folder and the HTTP server of ``experiential serve`` in a thread."""

    def __init__(self) -> None:
        self._shelf: Shelf | None = None
        self._server: Any = None
        self._ended = threading.Event()

    def serve(self, serving: Serving, patience: float) -> tuple[str, int]:
        """Open the folder and begin to serve it; gives address of the node and port.

        Args:
            serving: what, and where.
            patience: seconds to wait for port and folder, which a killed writer may hold for a
                moment.

        Raises:
            BankError: the folder cannot be opened, or another process writes it.
            OSError: the port is taken.
        """
        host = str(joined_ray().util.get_node_ip_address())
        listener = _patiently(partial(_listening, host, serving.port), patience)
        with ExitStack() as failed:
            failed.callback(listener.close)
            shelf = self._shelf = _patiently(partial(_opened, serving), patience)
            failed.pop_all()
        self._server = _server(shelf, serving.token)
        threading.Thread(
            target=self._run, args=(listener,), name="bank-server", daemon=True
        ).start()
        return host, int(listener.getsockname()[1])

    def _run(self, listener: socket.socket) -> None:
        try:
            self._server.run(sockets=[listener])
        finally:
            listener.close()
            self._ended.set()

    def until_ended(self) -> None:
        """Return when the server has ended; an actor that dies never returns."""
        self._ended.wait()

    def fork(self, namespace: str, path: str, keep_queue: bool) -> None:
        """Copy the bank into another folder of this node, with all history, and close the copy.

        Raises:
            BankError: the folder holds a bank already, or this one is closed.
        """
        if self._shelf is None:
            raise BankError("Expected an open bank to fork, got one that is not served yet")
        self._shelf.get(namespace).bank.fork(path, keep_queue=keep_queue).close()

    def close(self) -> None:
        """Finish the requests under way, close the bank and give the folder back."""
        if self._server is not None:
            self._server.should_exit = True
            self._ended.wait()
        if self._shelf is not None:
            self._shelf.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _opened(serving: Serving) -> Shelf:
    from experiential.bank.http.shelf import Shelf

    settings = serving.settings
    shelf = Shelf(
        serving.folder,
        namespaces=(settings.namespace,),
        embedder=settings.embedder,
        chroma=settings.chroma,
    )
    shelf.get(settings.namespace).bank.text_limit = settings.text_limit
    return shelf


def _patiently(work: Callable[[], T], patience: float) -> T:
    """What ``work`` gives, tried again for a while where a port or a lock is held."""
    until = time.monotonic() + patience
    while True:
        try:
            return work()
        except (BankLockedError, OSError):
            if time.monotonic() >= until:
                raise
        time.sleep(0.1)


def _check_server_packages() -> None:
    try:
        import fastapi  # noqa: F401  (asked for before an actor is started)  # pyright: ignore[reportUnusedImport]
        import uvicorn  # noqa: F401  (as above)  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise MissingExtraError(error.name or "uvicorn", "serve") from None


def _server(shelf: Shelf, token: str) -> Any:
    import uvicorn

    from experiential.bank.http.service import create_app

    return uvicorn.Server(
        uvicorn.Config(
            create_app(shelf, token),
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=10,
        )
    )


class BankActor:
    """Runs the bank's one writer as a Ray actor on this node, and starts it again when it dies or does not answer.

    It is served at the address of this node with a random token. A bank that is started again has
    the same folder, token and port, so clients just try again; each write carries a key and is
    carried out once. What was acknowledged is in the journal.

    >>> with BankActor("bank", BankSettings(), ClusterSettings()) as actor:  # doctest: +SKIP
    ...     actor.bank().add("The red door needs the brass key.")

    Args:
        folder: the bank's, on the disk of this node; made on first use.
        settings: namespace, embedder, place of the index and length of texts.
        cluster: time-outs and restarts.

    Attributes:
        url: where the bank is served.
        token: what its clients send.
        failures: why each life of the actor that is over ended, oldest first.

    Raises:
        BankLockedError: another process writes the folder.
        BankError: the folder cannot be opened, or the actor did not start.
        MissingExtraError: Ray or the packages of the server are not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], settings: BankSettings, cluster: ClusterSettings
    ) -> None:
        joined_ray()
        _check_server_packages()
        self._cluster = cluster
        self._serving = Serving(str(Path(folder).resolve()), settings, secrets.token_urlsafe(32))
        self.failures: list[str] = []
        self._closing = threading.Event()
        self._starting = threading.Lock()
        self._host: Any = None
        self._node = "a node unknown yet"
        self._start(patience=0.0)
        self._watch = threading.Thread(target=self._watching, name="bank-actor", daemon=True)
        self._watch.start()

    def __enter__(self) -> BankActor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __str__(self) -> str:
        return f"bank actor on {self._node}"

    @property
    def token(self) -> str:
        """What clients send as a bearer token."""
        return self._serving.token

    @property
    def settings(self) -> BankSettings:
        """What the bank was opened with."""
        return self._serving.settings

    @property
    def alive(self) -> bool:
        """Whether the bank is served, or will be again."""
        return self._restartable() and not self._closing.is_set()

    def _restartable(self) -> bool:
        return len(self.failures) <= self._cluster.restarts

    def bank(self) -> ActorBank:
        """A client that can also be forked; close it before this."""
        return ActorBank(
            self,
            timeout=self._cluster.call_timeout,
            patience=min(_PATIENCE, self._cluster.start_timeout),
        )

    def fork(self, path: str | os.PathLike[str], *, keep_queue: bool = False) -> None:
        """Copy the bank into another folder on this node's disk, as ``ExperienceBank.fork`` does; the copy is closed.

        Raises:
            BankError: the folder holds a bank already, the actor died meanwhile, or gave no answer
                in time.
        """
        with self._starting:  # a restart under way is waited for
            self._ask(
                "fork",
                self.settings.namespace,
                str(Path(path).resolve()),
                keep_queue,
                seconds=self._cluster.call_timeout,
            )

    def close(self) -> None:
        """Close the bank and end the actor; safe to call twice, and after Ray was shut down."""
        if self._closing.is_set():
            return
        self._closing.set()
        if is_joined():
            with self._starting:
                self._finish()
        self._watch.join()

    def _finish(self) -> None:
        try:
            self._ask("close", seconds=min(_CLOSE_SECONDS, self._cluster.call_timeout))
        except ExperientialError as error:
            _log.warning(
                "%s was not closed cleanly; what it acknowledged is in the journal: %s", self, error
            )
        joined_ray().kill(self._host)

    def _start(self, patience: float) -> None:
        """Begin a life; one that cannot serve the bank is ended at once."""
        ray = joined_ray()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        options = {
            "num_cpus": 0,
            "max_restarts": 0,
            "max_task_retries": 0,
            "max_concurrency": _CALLS,
        }
        self._host = ray.remote(BankHost).options(scheduling_strategy=here, **options).remote()
        try:
            self._node, port = self._ask(
                "serve", self._serving, patience, seconds=self._cluster.start_timeout
            )
        except ExperientialError:
            ray.kill(self._host)
            raise
        self._serving = replace(self._serving, port=port)
        self.url = (
            f"http://[{self._node}]:{port}" if ":" in self._node else f"http://{self._node}:{port}"
        )
        self._life: Any = self._host.until_ended.remote()

    def _ask(self, method: str, *arguments: Any, seconds: float) -> Any:
        """What a method of the host gives; its own errors come as they are, all else as ``BankError``."""
        ray = joined_ray()
        try:
            return ray.get(getattr(self._host, method).remote(*arguments), timeout=seconds)
        except ray.exceptions.RayTaskError as error:
            cause = cause_of(error)
            if isinstance(cause, ExperientialError):
                raise cause from None
            raise BankError(
                f"Expected {method} of the {self} to succeed, got {type(cause).__name__}:"
                f" {told(cause)}"
            ) from None
        except ray.exceptions.GetTimeoutError:
            raise BankError(
                f"Expected an answer to {method} from the {self} within {seconds:g} s, got none"
            ) from None
        except ray.exceptions.RayError as error:
            raise BankError(
                f"Expected an answer to {method} from the {self}, but it died: {told(error)}"
            ) from None

    def _watching(self) -> None:
        """Until closed: wait for the end of a life, note why, start the next."""
        while self.alive and is_joined():
            reason = self._end_of_life()
            while reason is not None and self.alive:
                with self._starting:
                    reason = self._again(reason)

    def _end_of_life(self) -> str | None:
        """Why the present life is over, or None: it is not, the server has answered."""
        ray = joined_ray()
        ended, _ = ray.wait([self._life], timeout=_CHECK_SECONDS)
        if not ended:
            return self._unheard()
        try:
            ray.get(self._life, timeout=_CHECK_SECONDS)
        except ray.exceptions.RayError as error:
            return f"died: {told(error)}"
        return "ended its server"

    def _unheard(self) -> str | None:
        """A complaint when the server does not answer, whatever it says."""
        try:
            headers = {"Authorization": f"Bearer {self.token}"}
            httpx.get(
                f"{self.url}{wire.PREFIX}health",
                headers=headers,
                timeout=self._cluster.call_timeout,
                trust_env=False,
            )
        except httpx.TransportError as error:
            return f"did not answer within {self._cluster.call_timeout:g} s: {type(error).__name__}"
        return None

    def _again(self, reason: str) -> str | None:
        """Note that a life is over and start the next, if any is left; gives why that failed, if it did."""
        if self._closing.is_set():
            return None
        self.failures.append(f"{self} {reason}")
        joined_ray().kill(self._host)
        if not self._restartable():
            _log.error("%s; no restart is left of %d", self.failures[-1], self._cluster.restarts)
            return None
        _log.warning(
            "%s; restart %d of %d", self.failures[-1], len(self.failures), self._cluster.restarts
        )
        try:
            self._start(_LOCK_SECONDS)
        except ExperientialError as error:
            return f"did not start again: {error}"
        return None


class ActorBank(RemoteBank):
    """The bank of a ``BankActor``: a drop-in client that can be forked, since its folder is on this node's disk.

    Args:
        actor: where the bank is written.
        timeout: seconds to wait for one answer.
        patience: seconds during which a lost connection is tried again; a restart of the actor
            should fit in.
    """

    def __init__(
        self, actor: BankActor, *, timeout: float = 60.0, patience: float = _PATIENCE
    ) -> None:
        self._actor = actor
        super().__init__(
            actor.url,
            namespace=actor.settings.namespace,
            token=actor.token,
            timeout=timeout,
            patience=patience,
        )

    def __setattr__(self, name: str, value: object) -> None:
        if (
            name != "text_limit" or value != self._actor.settings.text_limit
        ):  # the actor was opened with it
            super().__setattr__(name, value)

    def __len__(self) -> int:
        if not self._actor.alive:
            raise BankError(
                "Expected a bank that is served, got one that is not:"
                f" {'; '.join(self._actor.failures) or 'it was closed'}"
            )
        return super().__len__()

    def fork(self, path: str | os.PathLike[str], *, keep_queue: bool = False) -> ExperienceBank:
        """A writable copy in another folder of this node, made where the journal is and then opened here."""
        self._actor.fork(path, keep_queue=keep_queue)
        return ExperienceBank(path, namespace=self.namespace, chroma=FOLDER)
