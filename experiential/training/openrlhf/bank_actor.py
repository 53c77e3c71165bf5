"""Run the bank's one writer as a Ray actor, served over HTTP to all who have its token."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from experiential.bank.folder import FolderBank
from experiential.bank.http import wire
from experiential.bank.http.client import RemoteBank
from experiential.bank.http.connection import Connection
from experiential.bank.http.wire import Body, Operation
from experiential.bank.index.site import CHROMA
from experiential.bank.options import bank_settings
from experiential.bank.protocol import ForkableBank
from experiential.config import BankSettings, ClusterSettings
from experiential.errors import (
    BackendError,
    BankError,
    BankLockedError,
    ExperientialError,
    MissingExtraError,
)
from experiential.sync import EventLoopThread
from experiential.training.openrlhf.supervisor import (
    FailedCallError,
    Incarnation,
    LostActorError,
    SilentActorError,
    Supervisor,
    answer,
    is_joined,
    joined_ray,
    start_actor,
)

if TYPE_CHECKING:
    from experiential.bank.http.namespaces import Namespaces

T = TypeVar("T")
_CALLS = 8
_CHECK_SECONDS = 10.0
_CLOSE_SECONDS = 60.0
_LOCK_SECONDS = 30.0
_FOREVER = 1e9
_PATIENCE = 300.0
"""Seconds that a client waits at most for a bank that is started again."""


class BankHost:
    """Serve an open bank folder inside the Ray actor, as ``experiential serve`` does."""

    def __init__(self) -> None:
        self._banks: Namespaces | None = None
        self._server: Any = None
        self._thread = threading.Thread()

    def begin(
        self, folder: str, settings: BankSettings, token: str, port: int, patience: float
    ) -> tuple[str, int, int]:
        """Open the folder and begin to serve it; return the node's address, port and process id.

        Port 0 takes a free one. A killed writer may hold port and folder for a moment: they are
        tried for ``patience`` seconds.

        Raises:
            BankError: the folder cannot be opened, or another process writes it.
            OSError: the port is taken.
        """
        import uvicorn

        from experiential.bank.http.limits import Limits, server_config
        from experiential.bank.http.namespaces import Namespaces
        from experiential.bank.http.service import create_app

        host = str(joined_ray().util.get_node_ip_address())
        with ExitStack() as failed:
            listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            failed.callback(listener.close)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _patiently(partial(listener.bind, (host, port)), patience)
            options = settings.model_dump(include={"embedder", "store"})
            open_banks = partial(Namespaces, folder, namespaces=(settings.namespace,), **options)
            self._banks = _patiently(open_banks, patience)
            limit = bank_settings(settings.model_dump()).text_limit
            self._banks.get(settings.namespace).bank.text_limit = limit
            failed.pop_all()
        # Only now: until then clients are refused and try again; connected, they would time out.
        listener.listen(2048)
        limits = Limits(rate=1e9)  # only the run's own processes have the token
        app = create_app(self._banks, token, limits=limits)
        self._server = uvicorn.Server(server_config(app, limits))

        def serve() -> None:
            with listener:  # uvicorn closes it only where it ends as asked
                self._server.run(sockets=[listener])

        self._thread = threading.Thread(target=serve, name="bank-server", daemon=True)
        self._thread.start()
        return host, int(listener.getsockname()[1]), os.getpid()

    def until_ended(self) -> None:
        """Return when the server has ended; an actor that dies never returns."""
        self._thread.join()

    def fork(self, namespace: str, path: str, keep_queue: bool) -> None:
        """Copy the bank into another folder of this node, with all history, and close the copy."""
        if self._banks is None:
            raise BankError("Expected an open bank to fork, got one that is not served yet")
        self._banks.get(namespace).bank.fork(path, keep_queue=keep_queue).close()

    def close(self) -> None:
        """Finish the requests under way, close the bank and give the folder back."""
        if self._server is not None:
            self._server.should_exit = True
            self._thread.join()
        if self._banks is not None:
            self._banks.close()


def _patiently(work: Callable[[], T], patience: float) -> T:
    """Return the result of ``work``, tried for ``patience`` s while a port or a lock is held."""
    until = time.monotonic() + patience
    while True:
        try:
            return work()
        except (BankLockedError, OSError):
            if time.monotonic() >= until:
                raise
        time.sleep(0.1)


class BankActor(AbstractContextManager["BankActor"]):
    """Run the bank's one writer as a Ray actor on this node, and start it again when it is lost.

    It is served at the address of this node with a random token. A bank that is started again has
    the same folder, token and port, so clients just try again; each write carries a key and is
    carried out once. Acknowledged writes are in the journal.

    >>> with BankActor("bank", BankSettings(), ClusterSettings()) as actor:  # doctest: +SKIP
    ...     actor.bank().add("The red door needs the brass key.")

    Args:
        folder: the bank's, on the disk of this node; made on first use.
        settings: namespace, embedder, place of the index and length of texts.
        cluster: time-outs and restarts.

    Attributes:
        url: address of the bank.
        token: required in every request to it.
        supervisor: starts the actor, and holds the reason of each loss.

    Raises:
        BankLockedError: another process writes the folder.
        BankError: the folder cannot be opened, or the actor did not start.
        MissingExtraError: Ray or the packages of the server are not installed.
    """

    def __init__(
        self, folder: str | os.PathLike[str], settings: BankSettings, cluster: ClusterSettings
    ) -> None:
        joined_ray()
        try:  # before an actor is started that would fail on them
            import fastapi  # noqa: F401  # pyright: ignore[reportUnusedImport]
            import uvicorn  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError as error:
            raise MissingExtraError(error.name or "uvicorn", "serve") from None
        self.settings, self.cluster = settings, cluster
        self.token, self._port = secrets.token_urlsafe(32), 0
        self._folder = str(Path(folder).resolve())
        self.supervisor = Supervisor("bank actor on an unknown node", self._begin, cluster)
        # A loop of its own: `fork` and `close` wait, and may be called from any other loop.
        self.loop = EventLoopThread("bank-actor")

        async def start() -> asyncio.Task[None]:
            await self.started()
            return asyncio.create_task(self._watch())

        try:
            self._watching = self.loop.run(start())
        except BaseException as error:
            self.supervisor.close()
            self.loop.close()
            raise _bank_error(error) from None

    def __exit__(self, *error: object) -> None:
        self.close()

    def bank(self) -> ActorBank:
        """Return a client that can also be forked; close it before this."""
        return ActorBank(self)

    def close(self) -> None:
        """Close the bank and end the actor; safe to call twice, and after Ray was shut down."""
        if self.loop.loop.is_closed():
            return

        async def stop() -> None:
            self._watching.cancel()  # or it would start the bank again
            await asyncio.gather(self._watching, return_exceptions=True)
            if is_joined():
                await self.supervisor.stop("close", _CLOSE_SECONDS)

        self.loop.run(stop())
        self.loop.close()

    def _begin(self) -> Incarnation:
        """Start the actor on this node, where the folder is."""
        ray = joined_ray()
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        # A killed writer may hold lock and port for a moment; at first they must be free.
        patience = _LOCK_SECONDS if self._port else 0.0
        begin = (self._folder, self.settings, self.token, self._port, patience)
        return start_actor(
            BankHost, begin=begin, scheduling_strategy=here, num_cpus=0, max_concurrency=_CALLS
        )

    async def started(self) -> Incarnation:
        """Return the present actor once it serves the bank, of which it has noted the address."""
        actor = await self.supervisor.started()
        node, self._port, _ = actor.result
        self.url = f"http://{f'[{node}]' if ':' in node else node}:{self._port}"
        self.supervisor.name = f"bank actor on {node}"
        return actor

    async def _watch(self) -> None:
        """Lose each actor that died, ended its server or does not answer, and start the next."""
        seconds, headers = self.cluster.call_timeout, {"Authorization": f"Bearer {self.token}"}
        while self.supervisor.alive and is_joined():
            try:
                actor = await self.started()
            except BackendError:  # the supervisor has noted and logged it
                continue
            end = answer(actor.handle.until_ended.remote(), self.supervisor.name, _FOREVER)
            ended = asyncio.ensure_future(end)
            client = httpx.AsyncClient(headers=headers, timeout=seconds, trust_env=False)
            try:
                async with client:
                    while not (await asyncio.wait([ended], timeout=_CHECK_SECONDS))[0]:
                        await client.get(f"{self.url}{wire.PREFIX}health")
                await ended
                reason = "ended its server"
            except httpx.TransportError as error:
                reason = f"did not answer within {seconds:g} s: {type(error).__name__}"
                # Ray asks the process to end, which a stopped one does only seconds later: until
                # then it would keep port and folder, and clients would wait for its answers.
                with suppress(ProcessLookupError):
                    os.kill(actor.result[2], signal.SIGKILL)
            except LostActorError as error:
                reason = error.reason
            except FailedCallError:  # of `until_ended`, by an actor that lives: watch it again
                continue
            finally:
                ended.cancel()
            self.supervisor.lose(actor, reason)


def _bank_error(error: BaseException) -> BaseException:
    """Return the bank's own error where there is one; other failures of an actor as BankError."""
    if isinstance(error, FailedCallError):
        return error.cause if isinstance(error.cause, ExperientialError) else BankError(str(error))
    return BankError(str(error)) if isinstance(error, BackendError) else error


class ActorConnection(Connection):
    """Call the server of a `BankActor`; once no restart is left, errors say why it was lost."""

    supervisor: Supervisor

    def call(self, operation: Operation, namespace: str, body: Body, key: str | None = None) -> Any:
        """Return the result of one operation; ``key`` names a write.

        Raises:
            BankError: the actor is gone for good, or as for any server.
        """
        if not self.supervisor.alive:
            reasons = "; ".join(self.supervisor.failures) or "it was closed"
            raise BankError(f"Expected a bank that is served, got one that is not: {reasons}")
        return super().call(operation, namespace, body, key)


class ActorBank(RemoteBank, ForkableBank):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Use the bank of a `BankActor`, which can also be forked: its folder is on this node's disk.

    A lost connection is tried again for as long as a restart of the actor should take.
    """

    def __init__(self, actor: BankActor) -> None:
        self._actor, timeout = actor, actor.cluster.call_timeout
        patience = min(_PATIENCE, actor.cluster.start_timeout)
        options: dict[str, Any] = {"token": actor.token, "timeout": timeout, "patience": patience}
        connection = ActorConnection(actor.url, **options)
        connection.supervisor = actor.supervisor
        super().__init__(connection, namespace=actor.settings.namespace, **options)

    def fork(self, path: str | os.PathLike[str], *, keep_queue: bool = False) -> FolderBank:
        """Return a writable copy in another folder of this node; begin again if the actor dies.

        Raises:
            BankError: the bank refused, no restart is left, or the actor gave no answer in time.
        """
        path = Path(path).resolve()
        actor, supervisor, there = self._actor, self._actor.supervisor, path.exists()
        while True:
            try:
                begun = actor.loop.run(actor.started())  # after a restart that is under way
                work = supervisor.ask(begun, "fork", self.namespace, str(path), keep_queue)
                actor.loop.run(work)
                return FolderBank(path, namespace=self.namespace, store=CHROMA)
            except BackendError as error:
                lost = isinstance(error, LostActorError) and not isinstance(error, SilentActorError)
                if not lost or there or not supervisor.alive:
                    raise _bank_error(error) from None
                shutil.rmtree(path, ignore_errors=True)  # what the dead one had copied
