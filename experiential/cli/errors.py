"""Map errors to exit codes by one policy.

The codes: 0 done, 2 user error (one line on stderr), 1 failure, 130 interrupted.
"""

from __future__ import annotations

import errno
import gc
import sqlite3
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

import typer

from experiential import __version__
from experiential.cli.quiet import quieten
from experiential.cli.rows import printable
from experiential.errors import (
    BankLockedError,
    CheckpointError,
    ConfigError,
    ExperientialError,
    MissingExtraError,
    ModelNotFoundError,
)

_OF_THE_DISK = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.ENAMETOOLONG, errno.EMFILE, errno.ENFILE),
)
USER_ERRORS = (ConfigError, MissingExtraError, ModelNotFoundError, BankLockedError, CheckpointError)


class Interrupted(Exception):
    """Say that the user stopped a command, what was saved and how to go on; exit code 130."""


def run_app(app: typer.Typer, argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; see `exit_code`."""
    quieten()
    return exit_code(lambda: app(args=argv, standalone_mode=False))


def run_process(app: typer.Typer) -> NoReturn:
    """Run the command line of this process, and end the process with its exit code."""
    code = run_app(app)
    # Python's end looks for cycles among all objects, for seconds with torch's; it needs none of
    # them: threads are waited for and exit handlers run as ever
    gc.freeze()
    sys.exit(code)


def exit_code(action: Callable[[], object], interrupted: str = "interrupted") -> int:
    """Run ``action`` and return its number, else 0, or the exit code of its error.

    Errors raised on purpose become one line on stderr; anything else is a bug and keeps its
    traceback (exit code 1). ``interrupted`` is said where the user stops it.
    """
    try:
        code = action()
    except USER_ERRORS as error:
        return complain(error, 2)
    except ExperientialError as error:
        return complain(error, 1)
    except typer.TyperException as error:
        return complain(error.format_message(), error.exit_code)
    except Interrupted as error:
        return complain(error, 130)
    except OSError as error:
        if error.errno not in _OF_THE_DISK:
            raise
        place = f" at {error.filename}" if error.filename else ""
        said = f"Expected to use the disk{place}, got: {error.strerror}; see df, ls -ld and TMPDIR"
        return complain(said, 1)
    except sqlite3.OperationalError as error:
        said = f"Expected to use the bank's files, got: {error}; see df, ls -ld and TMPDIR"
        return complain(said, 1)
    except (KeyboardInterrupt, typer.Abort):
        return complain(interrupted, 130)
    if code == 130:  # typer turns an interrupt into this code and says nothing
        return complain(interrupted, 130)
    return code if isinstance(code, int) else 0


def complain(error: object, code: int) -> int:
    """Write one line on stderr and return the exit code; notes of an error follow, if it has any.

    Notes are the last lines of the log of another process.
    """
    sys.stderr.write(f"error: {' '.join(printable(error).split())}\n")
    for note in getattr(error, "__notes__", ()):
        sys.stderr.write(f"{printable(note)}\n")
    return code


def new_app(about: str, *, completion: bool = False) -> typer.Typer:
    """Create a typer application without decorated tracebacks; programs install a completion."""
    return typer.Typer(
        help=about, add_completion=completion, pretty_exceptions_enable=False, rich_markup_mode=None
    )


def show_version(wanted: bool) -> None:
    """Print the version for `--version`."""
    if wanted:
        typer.echo(f"experiential-rl {__version__}")
        raise typer.Exit
