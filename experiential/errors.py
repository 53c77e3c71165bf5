"""Define the errors that users can meet.

ExperientialError
├── ConfigError          a setting, override or recipe is wrong       (exit code 2)
├── MissingExtraError    an optional dependency is not installed      (exit code 2)
├── ModelNotFoundError   a model folder or name cannot be resolved    (exit code 2)
├── BankError            the experience bank cannot do what was asked
│   ├── BankLockedError  another process writes this bank             (exit code 2)
│   └── ReadOnlyBankError  a write on a bank opened read-only
├── BackendError         a language-model backend failed
│   ├── NoAnswerError    the reply holds no answer: refused, filtered, empty, nothing but reasoning
│   ├── ContextError     the prompt does not fit into the model's context
│   ├── LostProcessError a process that computes died or gave no answer
│   └── BudgetError      the account's quota, or the budget of the caller, is spent
├── EnvError             an environment failed where it runs: it raised, hung, or its process died
└── CheckpointError      a checkpoint cannot be read or written       (exit code 2)
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pydantic import ValidationError

    from experiential.types import Usage

Outage = Literal["passing", "lasting"]


class ExperientialError(Exception):
    """Provide the base of every error raised on purpose by this package."""


class ConfigError(ExperientialError, ValueError):
    """Report a wrong setting, override or recipe name."""


class MissingExtraError(ExperientialError, ImportError):
    """Report a missing optional dependency; the message names the extra to install."""

    def __init__(self, package: str, extra: str, then: str = "") -> None:
        run = f"pip install 'experiential-rl[{extra}]'" + (f" && {then}" if then else "")
        super().__init__(f"Expected the package {package!r}, which is not installed; run: {run}")


class ModelNotFoundError(ExperientialError, FileNotFoundError):
    """Report a model name or folder that cannot be resolved."""


class BankError(ExperientialError):
    """Report a request that the experience bank cannot fulfil."""


class BankLockedError(BankError):
    """Report that another process holds the writer lock of this bank."""


class ReadOnlyBankError(BankError):
    """Report a write on a bank opened read-only."""


class BackendError(ExperientialError):
    """Report a failure of a language-model backend: time-out, refusal, malformed reply.

    Args:
        message: the reason.
        outage: the service and not the request is at fault: ``passing`` (no connection, overloaded)
            or ``lasting`` until somebody acts (key, model or quota refused). None: the request may
            be at fault.
    """

    def __init__(self, message: str, *, outage: Outage | None = None) -> None:
        super().__init__(message)
        self.outage: Outage | None = outage


class NoAnswerError(BackendError):
    """Report a reply without an answer: refused, filtered, empty, or nothing but reasoning.

    Args:
        message: the reason.
        usage: what the reply took, where the server says so.
    """

    def __init__(self, message: str, usage: Usage | None = None) -> None:
        super().__init__(message)
        self.usage = usage


class ContextError(BackendError):
    """Report a prompt that does not fit into the model's context; asking again changes nothing."""


class LostProcessError(BackendError):
    """Report that a process of a distributed run died, or gave no answer in time."""


class BudgetError(BackendError):
    """Report that the account's quota, or the budget given for a backend, is spent."""


class EnvError(ExperientialError):
    """Report a failed environment: it raised, timed out, or its process died.

    Args:
        message: the reason.
        lost: the process that held it is gone, which says nothing against the environment; the next
            episode runs in another one.
    """

    def __init__(self, message: str, *, lost: bool = False) -> None:
        super().__init__(message)
        self.lost = lost


class CheckpointError(ExperientialError):
    """Report a checkpoint that cannot be read or written."""


def first_problem(error: ValidationError) -> str:
    """Describe the first problem of a row of a data file.

    Either ``answer is missing``, or the place and the message of the failed check.
    """
    first = error.errors(include_url=False)[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        return f"{place} is missing"
    said = first["msg"].removeprefix("Value error, ")
    return f"{place}: {said}" if place else said


def require(extra: str, *packages: str) -> None:
    """Raise MissingExtraError for the first of these packages that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(package, extra)
