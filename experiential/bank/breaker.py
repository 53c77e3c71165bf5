"""Pause distillation while the service behind it is out, and end it when its budget is spent."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from experiential.errors import BackendError, BudgetError, Outage

_LOGGER = logging.getLogger(__name__)
_LASTING = frozenset({401, 402, 403, 404})
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504, 529})


class CircuitBreaker:
    """Let requests through until the service fails ``threshold`` of them in a row.

    Then it is open: requests wait for the end of a pause, and one of them tries alone (half-open).
    A failed trial doubles the pause; an answer, even a bad one, closes the breaker. Only failures
    of the service count (see `outage_of`). A `BudgetError` of the caller's own limit stops it for
    good: requests wait for ever.

    Caveat: all calls come from one event loop.

    Args:
        what: pauses, in the log; such as ``distillation``.
        threshold: failures in a row that open it.
        first: seconds of the first pause; each is shortened at random by up to a half.
        longest: seconds of a pause at most.
        patience: seconds after which waiting for the end of an outage is given up.

    Attributes:
        error: the reason while it is open, or for good; None while it is closed.
        pauses: how many pauses there have been.
    """

    def __init__(
        self,
        what: str,
        *,
        threshold: int = 3,
        first: float = 5.0,
        longest: float = 300.0,
        patience: float = 600.0,
    ) -> None:
        self.error: Exception | None = None
        self.pauses = 0
        self._what, self._threshold, self._patience = what, threshold, patience
        self._first, self._longest = first, longest
        self._failed = 0  # in a row
        self._since = self._until = 0.0
        self._trials = 0  # that failed in this outage
        self._stopped = False
        self._trial = asyncio.Lock()

    def hopeless(self) -> Exception | None:
        """Return the error for which it makes no sense to wait any longer; None if it does.

        That is a spent budget, a refusal that lasts (of the key, say) and was met again after a
        pause, or an outage longer than ``patience``.
        """
        lasts = self._trials and outage_of(self.error) == "lasting"
        long = self._trials and time.monotonic() - self._since > self._patience
        return self.error if self._stopped or lasts or long else None

    @asynccontextmanager
    async def turn(self) -> AsyncGenerator[None]:
        """Run one request in the block: at once while closed, else alone after the pause."""
        await self._trial.acquire()  # held by the one that tries the service
        tries = self.error is not None
        try:
            if self._stopped:
                await asyncio.Event().wait()
            if tries:
                await asyncio.sleep(self._until - time.monotonic())
            else:
                self._trial.release()
            yield
        except Exception as error:
            self._note(error, tries)
            raise
        else:
            if self._failed or self.error is not None:
                self._close()
        finally:
            if tries:
                self._trial.release()

    def _note(self, error: Exception, tried: bool) -> None:
        if is_over_budget(error):
            if not self._stopped:
                _LOGGER.warning("%s ends here, what is queued stays queued: %s", self._what, error)
            self.error, self._stopped = error, True
        elif outage_of(error) is not None or (tried and isinstance(error, TimeoutError)):
            self._failed += 1
            if tried or (self.error is None and self._failed >= self._threshold):
                self._open(error, tried)
        elif not isinstance(error, TimeoutError):
            self._close()  # the service answers

    def _open(self, error: Exception, tried: bool) -> None:
        if tried:
            self._trials += 1
        else:
            self._trials, self._since = 0, time.monotonic()
        self.error = error
        self.pauses += 1
        pause = min(self._first * 2**self._trials, self._longest) * random.uniform(0.5, 1.0)
        self._until = time.monotonic() + pause
        _LOGGER.log(
            logging.INFO if tried else logging.WARNING,
            "%s pauses until %s, then one request tries again: %s",
            self._what,
            time.strftime("%H:%M:%S", time.localtime(time.time() + pause)),
            error,
        )

    def _close(self) -> None:
        self._failed = 0
        if self.error is not None and not self._stopped:
            self.error, self._trials = None, 0
            _LOGGER.info("%s goes on", self._what)


def outage_of(error: Exception | None) -> Outage | None:
    """Return whether an error says that a service is out, and not that a request is at fault.

    Backends of this package say so; of others, a refused connection and the attribute
    ``status_code`` (as the errors of OpenAI's client have it) are known.
    """
    if isinstance(error, BackendError):
        return error.outage
    if isinstance(error, ConnectionRefusedError):
        return "passing"
    status = getattr(error, "status_code", None)
    if status in _LASTING:
        return "lasting"
    return "passing" if status in _PASSING else None


def is_over_budget(error: Exception | None) -> bool:
    """Return whether the caller's own limit is reached, which nothing in this process changes."""
    return isinstance(error, BudgetError) and error.outage is None
