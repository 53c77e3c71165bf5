"""Keep finished results as files, so that an interrupted command goes on where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from experiential.errors import ConfigError
from experiential.types import Record

R = TypeVar("R", bound=Record)


def write_whole(path: Path, text: str) -> Path:
    """Write a text file and its folder; a reader sees the old text or the new one, no part.

    Raises:
        ConfigError: it cannot be written, as on a full disk.
    """
    draft = path.with_name(f".{path.name}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise ConfigError(f"Expected to write {path}, got {error}") from error
    return path


class ResultStore(Generic[R]):
    """Keep finished results in a folder, one JSON file each.

    A result is looked up by the name of its file; where it holds the ``settings`` that it was made
    with, it is found under these settings only.

    Args:
        folder: where the files are; the first result makes it.
        kind: type of the results.
        about: what a file holds, for error messages.
        remedy: what the user can do about a file that cannot be used, for error messages.
        overwrite: find nothing, so that everything is made again.
        indent: spaces of the JSON; None writes one line.

    >>> from tempfile import TemporaryDirectory
    >>> from experiential.evaluation.intervals import Interval
    >>> with TemporaryDirectory() as folder:
    ...     store = ResultStore(Path(folder), Interval, about="an interval")
    ...     _ = store.keep("rate", Interval(mean=0.5, low=0.4, high=0.6))
    ...     store.find("rate").mean, store.find("other")
    (0.5, None)
    """

    def __init__(
        self,
        folder: Path,
        kind: type[R],
        *,
        about: str,
        remedy: str = "remove it",
        overwrite: bool = False,
        indent: int | None = 1,
    ) -> None:
        self.folder, self._kind, self._about, self._remedy = folder, kind, about, remedy
        self._overwrite, self._indent = overwrite, indent

    def path(self, name: str) -> Path:
        """Return the file of a result; a name may begin with folders."""
        return self.folder / f"{name}.json"

    def find(self, name: str, settings: Mapping[str, Any] | None = None) -> R | None:
        """Return the stored result, or None; its own ``settings`` must equal those given.

        Raises:
            ConfigError: the file is damaged, or its result was made with other settings.
        """
        path = self.path(name)
        if self._overwrite or not path.is_file():
            return None
        found = self._read(path)
        if settings is None:
            return found
        stored: dict[str, Any] = getattr(found, "settings", {})
        check_settings(stored, settings, self._about, path, self._remedy)
        return found

    def keep(self, name: str, result: R) -> Path:
        """Store a result, in place of an older one."""
        return write_whole(self.path(name), result.model_dump_json(indent=self._indent) + "\n")

    def all(self) -> Iterator[R]:
        """Read every result in the folder and those below it, by name."""
        for path in sorted(self.folder.rglob("*.json")):
            yield self._read(path)

    def _read(self, path: Path) -> R:
        try:
            return self._kind.model_validate_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError) as error:
            raise ConfigError(
                f"Expected {self._about} in {path}, got: {str(error).splitlines()[0]};"
                f" {self._remedy}"
            ) from error


def check_settings(
    stored: Mapping[str, Any], wanted: Mapping[str, Any], about: str, path: Path, remedy: str
) -> None:
    """Check that a result was made with the settings that are wanted.

    Raises:
        ConfigError: a wanted setting has another value.
    """
    # Compared as JSON, since that is how the stored ones come back: a tuple became a list.
    wanted = json.loads(json.dumps(wanted))
    other = [key for key in wanted if stored.get(key) != wanted[key]]
    if not other:
        return
    # Nested values are too long for one line of an error.
    short = [key for key in other if not isinstance(wanted[key], list | dict)]
    shown = ", ".join(f"{key} {stored.get(key)!r} and not {wanted[key]!r}" for key in short)
    raise ConfigError(
        f"Expected {about} of the same settings in {path}, got"
        f" {shown[:400] or ', '.join(other)}; {remedy}"
    )
