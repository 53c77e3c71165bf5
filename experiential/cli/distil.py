"""Distil what waits in a bank's queue, as it comes, with `experiential distil`."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from experiential.cli.bank import opened_at
from experiential.cli.options import (
    Backend,
    BackendOption,
    BaseUrl,
    Embedder,
    KeyEnv,
    Namespace,
    Review,
    Store,
    named_model,
    opened_extractor,
)
from experiential.cli.rows import printable
from experiential.cli.serve import TOKEN_VARIABLE, NoToken, bank_server, chosen_token
from experiential.errors import BackendError, BankError, BudgetError, ConfigError
from experiential.sync import attempted

if TYPE_CHECKING:
    from experiential.bank.manager import ExperienceManager
    from experiential.bank.protocol import Bank
    from experiential.types import Distillation, Experience, Trajectory

_SECONDS_TO_FINISH = 10.0
_LOOK_SECONDS = 0.5
_SHOWN = 60  # characters


def distil(
    bank: Annotated[
        str,
        Argument(
            metavar="BANK",
            help="Folder of a bank, which this command also serves to others, or the address of a"
            " bank server.",
        ),
    ],
    model: Annotated[
        str | None,
        Option(
            help="Model that distils: tiny, smollm2, a folder, a hub name, or with --base-url its"
            " name at the server."
        ),
    ] = None,
    base_url: BaseUrl = None,
    api_key_env: KeyEnv = None,
    backend: Backend = None,
    backend_option: BackendOption = None,
    workers: Annotated[int, Option(min=1, help="Simultaneous distillations.")] = 8,
    review: Review = False,
    until_empty: Annotated[
        bool,
        Option(
            "--until-empty",
            "--once",
            help="End when the queue is empty, with exit code 1 if an episode was given up; a"
            " folder is not served meanwhile.",
        ),
    ] = False,
    namespace: Namespace = "default",
    host: Annotated[str, Option(help="Address to serve a folder at.")] = "127.0.0.1",
    port: Annotated[
        int, Option(min=0, max=65535, help="Port to serve a folder at; 0 takes a free one.")
    ] = 8321,
    token: Annotated[
        str | None,
        Option(
            envvar=TOKEN_VARIABLE,
            help="Bearer token of the bank server: of this one (default: random), or of that at"
            " BANK.",
        ),
    ] = None,
    no_token: NoToken = False,
    embedder: Embedder = None,
    store: Store = None,
) -> None:
    """Distil the episodes that others submit to a bank, until Ctrl-C or SIGTERM.

    Work in progress then has ten seconds to finish, or goes back into the queue. Any number of
    distillers may share a bank; after half a minute another takes over the work of a killed one.
    """
    if (model, base_url, backend) == (None, None, None):
        raise ConfigError(
            "Expected a model that distils, got none; pass --model, for example --model smollm2, or"
            " --base-url with the address of a server"
        )
    from experiential.bank.manager import ExperienceManager
    from experiential.cli.preflight import check_model

    settings = named_model(model, base_url, api_key_env, backend, backend_option)
    check_model(settings)
    told = _Told()
    with ExitStack() as stack:
        serve: Callable[[], None] | None = None
        source: Bank
        is_remote = bank.startswith(("http://", "https://"))
        chosen: dict[str, Any] = {"embedder": embedder, "store": store}
        if is_remote or until_empty:
            options = {"token": token, "embedder": embedder} if is_remote else chosen
            source = stack.enter_context(opened_at(bank, namespace, write=True, **options))
        else:
            asked = chosen_token(host, token, no_token=no_token)
            server = bank_server(Path(bank), host, port, asked, **chosen)
            banks, serve = stack.enter_context(server)
            try:
                source = banks.get(namespace).bank
            except ValueError as error:
                raise ConfigError(str(error)) from error
        extractor = stack.enter_context(opened_extractor(settings))
        stopped = stack.enter_context(_stop_signal())
        if serve is not None:
            threading.Thread(target=serve, name="bank-server", daemon=True).start()
        dead = source.queue.counts()["dead"]
        manager = ExperienceManager(
            source, extractor, on_distillation=told, distill_workers=workers, review=review
        )
        given_up = 0
        try:
            _distil_until(stopped, manager, until_empty)
        finally:
            with suppress(BankError):  # without its server a bank cannot save its counters
                manager.close(drain=_SECONDS_TO_FINISH)
            left = attempted(source.queue.counts)
            end = ""
            if not isinstance(left, Exception):
                given_up = left["dead"] - dead
                end = f", {given_up} given up; {left['queued']} wait in the queue"
            say(f"{told.distilled} distilled, {told.written} entries written{end}")
    if given_up and until_empty:
        sys.stderr.write("experiential bank dead-letters says why\n")
        raise typer.Exit(1)


@dataclass(slots=True)
class _Told:
    """Print each distillation, and count."""

    distilled: int = 0
    written: int = 0

    def __call__(self, trajectory: Trajectory, _: Distillation, entries: list[Experience]) -> None:
        self.distilled += 1
        self.written += len(entries)
        task = " ".join(trajectory.task.split())
        task = task if len(task) <= _SHOWN else f"{task[: _SHOWN - 1]}…"
        clock = time.strftime("%H:%M:%S")
        say(f"{clock} {self.distilled} distilled, {len(entries)} entries written: {task}")


@contextmanager
def _stop_signal() -> Generator[threading.Event]:
    """Note the first Ctrl-C or SIGTERM in the event; a second one ends the process at once."""
    stopped = threading.Event()

    def stop(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stopped.set()

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _distil_until(stopped: threading.Event, manager: ExperienceManager, until_empty: bool) -> None:
    """Wait while the manager distils, for a signal or, with ``until_empty``, the last episode."""
    while not stopped.wait(_LOOK_SECONDS):
        try:
            manager.drain(_LOOK_SECONDS)
            if until_empty and not manager.bank.queue.counts()["queued"]:
                break
        except TimeoutError:
            continue
        except BackendError as error:  # the model; it may come back, but spent money not
            if until_empty or isinstance(error, BudgetError):
                raise
        except BankError:  # the bank's server; the manager waits until it is back
            if until_empty:
                raise


def say(line: str) -> None:
    """Print one line at once."""
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()
