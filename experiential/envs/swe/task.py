"""Read software tasks: rows with the fields of SWE-bench."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator

from experiential.envs.arguments import checked
from experiential.errors import ConfigError

BUNDLED = Path(__file__).with_name("tasks.jsonl")
"""Tasks that are shipped: their patches, not their sources."""
_TOUCHED = re.compile(r"^(?:---|\+\+\+) [ab]/([^\t\r\n]+)", re.MULTILINE)


class Task(BaseModel):
    """Hold one task; fields in capitals and the first seven are SWE-bench's, others are ignored."""

    model_config = ConfigDict(frozen=True)

    instance_id: str = Field(pattern=r"^\w[\w.\-]*$", max_length=150)
    repo: str = Field(min_length=1)  # owner and name of the project
    base_commit: str = ""  # any stable text where the source is no repository
    problem_statement: str = Field(min_length=1)  # the issue as reported
    patch: str = Field(min_length=1)  # the right change, as a diff in git's form; never shown
    test_patch: str = ""  # the change of the tests; never shown
    version: str = ""
    # names of tests (``file::name``, as pytest prints them) that must pass afterwards
    FAIL_TO_PASS: tuple[str, ...] = Field(min_length=1)
    PASS_TO_PASS: tuple[str, ...] = ()
    # archive (``.tar.gz``, ``.zip``, …) in the folder of sources or beside the file of tasks, or
    # ``pip:NAME==VERSION`` for a source archive of the package index; empty for an archive that is
    # called after the instance, or after repository and commit
    source: str = ""
    sha256: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")  # empty to take any archive
    solved: bool = False  # the archive is mended: both patches are undone first
    requirements: tuple[str, ...] = ("pytest",)  # what pip installs into the virtual environment
    pythonpath: tuple[str, ...] = (".", "src")  # folders of the repository to import from
    test_command: tuple[str, ...] = tuple(
        "python -m pytest -p no:cacheprovider --color=no -rfEp".split()
    )  # the files of the tests come after it
    split: Literal["train", "eval", ""] = ""  # by default by a hash of its name

    @field_validator("FAIL_TO_PASS", "PASS_TO_PASS", mode="wrap")
    @classmethod
    def _named(cls, value: Any, check: Callable[[Any], tuple[str, ...]]) -> tuple[str, ...]:
        """Check names of tests; the list may be JSON inside a text, as in SWE-bench."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError as error:
                raise ValueError(
                    f"Input should be a list of names, or one as JSON, not {value[:60]!r}"
                ) from error
        names = check(value)
        for name in names:
            file = name.partition("::")[0]
            if "::" not in name or file.startswith(("/", "-")) or ".." in Path(file).parts:
                raise ValueError(
                    "Input should name tests as pytest does (tests/test_x.py::test_y), not"
                    f" {name[:60]!r}"
                )
        return names

    @field_validator("patch", "test_patch")
    @classmethod
    def _diff(cls, text: str) -> str:
        if text and not _TOUCHED.search(text):
            raise ValueError(
                "Input should be a diff in git's form, with lines --- a/file and +++ b/file"
            )
        return text

    @property
    def key(self) -> str:
        """Return the name of the work folder's cache: the instance and a hash of the task."""
        digest = hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]
        return f"{self.instance_id}-{digest}"

    @property
    def test_files(self) -> tuple[str, ...]:
        """Return the files of the tests that decide."""
        names = (*self.FAIL_TO_PASS, *self.PASS_TO_PASS)
        return tuple(dict.fromkeys(name.partition("::")[0] for name in names))


def touched(patch: str) -> tuple[str, ...]:
    r"""Return the files that a git diff names.

    >>> touched("--- a/one.py\n+++ b/one.py\n@@ -1 +1 @@\n-1\n+2\n--- /dev/null\n+++ b/two.py\n")
    ('one.py', 'two.py')
    """
    return tuple(dict.fromkeys(match[1] for match in _TOUCHED.finditer(patch)))


def load_tasks(file: str | Path = BUNDLED) -> tuple[Task, ...]:
    """Read the tasks of a file with one JSON object a line, once per version of the file.

    Raises:
        ConfigError: the file cannot be read, or a line of it is no task.
    """
    path = Path(file).expanduser().resolve()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(
            f"Expected a file of tasks with SWE-bench's fields, got {str(file)!r}: {error.strerror}"
        ) from error
    return _loaded(path, stamp)


@lru_cache(maxsize=4)
def _loaded(path: Path, stamp: int) -> tuple[Task, ...]:
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Expected a file of tasks in UTF-8, got {path}: {error}") from error
    expected = f"a task with SWE-bench's fields in each line of {path}"
    tasks: dict[str, Task] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = cast(object, json.loads(line))
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"Expected one JSON object a line in {path}, got line {number}: {error}"
            ) from error
        task = checked(Task, row, expected, f"line {number}")
        tasks[task.instance_id] = task
    if not tasks:
        raise ConfigError(f"Expected at least one task in {path}, got none")
    return tuple(tasks.values())
