"""Edit files below one folder: view, create, replace, insert and undo."""

from __future__ import annotations

import io
import json
import re
from itertools import islice
from pathlib import Path
from typing import cast

from experiential.envs.swe.call import Call

COMMANDS = ("view", "create", "str_replace", "insert", "undo")
_NEEDS = {"create": ["file_text"], "str_replace": ["old_str"], "insert": ["insert_line", "new_str"]}
_LISTED = 300
_LARGEST = 2_000_000
_AROUND = 3


class BadCallError(ValueError):
    """Refuse a call that is malformed; the message says what is legal."""


class RefusedError(ValueError):
    """Refuse an edit that these files do not allow; the message says why."""


class Editor:
    """Edit text files below ``folder``, and remember their earlier contents.

    Args:
        folder: nothing outside it is read or written, through no link either.
        shown: how a command sees ``folder``; paths may begin with it.
    """

    def __init__(self, folder: Path, shown: Path) -> None:
        self._folder, self._shown = folder.resolve(), shown
        self._before: dict[Path, list[str | None]] = {}

    def run(self, call: Call) -> str:
        """Do what the call asks, and describe the result.

        Raises:
            BadCallError: the command is unknown, or a parameter is missing or of a wrong form.
            RefusedError: the file is missing, binary, outside the folder, or lacks the text to
                replace.
        """
        command = (call.text("command") or "").strip().removesuffix("_edit")
        if command not in COMMANDS:
            raise BadCallError(
                f"Expected command to be one of {', '.join(COMMANDS)}, got {command[:40]!r}."
            )
        for name in ["path", *_NEEDS.get(command, [])]:
            if call.text(name) is None:
                raise BadCallError(f"Expected the parameter {name} with {command}.")
        given = (call.text("path") or "").strip()
        relative = Path(given)
        for root in (self._shown, self._folder):
            relative = relative.relative_to(root) if relative.is_relative_to(root) else relative
        try:
            path = (self._folder / relative).resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise RefusedError(f"{given[:100]!r} is no path.") from error
        if not path.is_relative_to(self._folder) or ".git" in path.relative_to(self._folder).parts:
            raise RefusedError(
                f"{given[:100]} is outside the repository; give paths relative to its root."
            )
        try:
            return getattr(self, f"_{command}")(path, call)
        except (OSError, RecursionError) as error:
            raise RefusedError(
                f"{self._name(path)}: {getattr(error, 'strerror', None) or 'cannot be used'}."
            ) from error

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def _read(self, path: Path) -> str:
        if not path.is_file():
            raise RefusedError(f"{self._name(path)} is no file.")
        if path.stat().st_size > _LARGEST:
            raise RefusedError(
                f"{self._name(path)} is larger than {_LARGEST} bytes; use execute_bash."
            )
        data = path.read_bytes()
        if b"\0" in data:
            raise RefusedError(f"{self._name(path)} is no text file.")
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise RefusedError(f"{self._name(path)} is not in UTF-8; use execute_bash.") from error

    def _edit(self, path: Path, before: str, text: str, line: int, count: int) -> str:
        """Write a text and keep the one before; return ``count`` lines from ``line`` on."""
        path.write_bytes(text.encode("utf-8", "replace"))
        self._before.setdefault(path, []).append(before)
        lines = _lines(self._read(path))
        last = min(len(lines), line + count - 1 + _AROUND)
        around = _numbered(lines, max(1, line - _AROUND), last)
        return f"{self._name(path)} was edited:\n{around}"

    def _view(self, path: Path, call: Call) -> str:
        if not path.is_dir():
            lines = _lines(self._read(path))
            first, last = 1, len(lines)
            if (given := (call.text("view_range") or "").strip()) != "":
                try:
                    value = json.loads(given)
                except (ValueError, RecursionError):
                    value = None
                numbers = cast("list[int]", value) if isinstance(value, list) else []
                if len(numbers) != 2 or not all(type(number) is int for number in numbers):
                    raise BadCallError(
                        "Expected view_range to be two line numbers such as [10, 40]."
                    )
                first, last = numbers[0], last if numbers[1] == -1 else min(numbers[1], last)
                if not 1 <= first <= max(1, last):
                    raise RefusedError(
                        f"Expected view_range within the {len(lines)} lines of the file."
                    )
            return _numbered(lines, first, last) or "(The file is empty.)"
        found: list[str] = []  # two levels, without hidden files
        for entry in sorted(path.iterdir()):
            if entry.name.startswith("."):
                continue
            deeper = entry.is_dir() and not entry.is_symlink()
            for one in (entry, *(sorted(entry.iterdir()) if deeper else ())):
                if not one.name.startswith("."):
                    mark = "/" if one.is_dir() else ""
                    found.append(f"{one.relative_to(path).as_posix()}{mark}")
        more = [f"[... {len(found) - _LISTED} more ...]"] if len(found) > _LISTED else []
        return "\n".join([*found[:_LISTED], *more]) or "(The folder is empty.)"

    def _create(self, path: Path, call: Call) -> str:
        if path.exists():
            raise RefusedError(f"{self._name(path)} exists already; use str_replace or insert.")
        text = call.text("file_text") or ""
        text = text if text.endswith("\n") or not text else f"{text}\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("utf-8", "replace"))
        self._before.setdefault(path, []).append(None)
        return f"{self._name(path)} was created."

    def _str_replace(self, path: Path, call: Call) -> str:
        text, old, new = self._read(path), call.text("old_str") or "", call.text("new_str") or ""
        if "\r\n" in text and old not in text:
            old, new = (part.replace("\r\n", "\n").replace("\n", "\r\n") for part in (old, new))
        if not old:
            raise BadCallError("Expected old_str to hold text.")
        count, found = text.count(old), re.finditer(re.escape(old), text)
        places = [text.count("\n", 0, match.start()) + 1 for match in islice(found, 10)]
        if not count:
            raise RefusedError(
                f"old_str does not stand in {self._name(path)}; it must be exactly as in the file,"
                " blanks and line breaks included."
            )
        if count > 1:
            raise RefusedError(
                f"old_str stands {count} times in {self._name(path)} (lines"
                f" {', '.join(map(str, places))}); give more of the lines around it."
            )
        return self._edit(path, text, text.replace(old, new), places[0], new.count("\n") + 1)

    def _insert(self, path: Path, call: Call) -> str:
        text = self._read(path)
        lines = list(io.StringIO(text, newline=""))
        given = (call.text("insert_line") or "").strip()
        if not given.removeprefix("-").isdecimal() or len(given) >= 10:
            raise BadCallError("Expected insert_line to be a whole number.")
        line = int(given)
        if not 0 <= line <= len(lines):
            raise RefusedError(
                f"Expected insert_line between 0 and {len(lines)}: the text goes after that line."
            )
        ending = "\r\n" if "\r\n" in text else "\n"
        new = "".join(f"{one}{ending}" for one in (call.text("new_str") or "").splitlines() or [""])
        if line and not lines[line - 1].endswith(("\n", "\r")):
            lines[line - 1] += ending
        changed = "".join([*lines[:line], new, *lines[line:]])
        return self._edit(path, text, changed, line + 1, new.count("\n"))

    def _undo(self, path: Path, call: Call) -> str:
        history = self._before.get(path)
        if not history:
            raise RefusedError(f"Nothing was edited in {self._name(path)} that could be undone.")
        before = history.pop()
        if before is None:
            path.unlink(missing_ok=True)
            return f"{self._name(path)} was removed again."
        path.write_bytes(before.encode())
        return f"The last edit of {self._name(path)} was undone."


def _lines(text: str) -> list[str]:
    """Return lines as other tools count them: a form feed does not end a line."""
    return [line.rstrip("\r\n") for line in io.StringIO(text, newline="")]


def _numbered(lines: list[str], first: int, last: int) -> str:
    return "\n".join(f"{number:6d}\t{lines[number - 1]}" for number in range(first, last + 1))
