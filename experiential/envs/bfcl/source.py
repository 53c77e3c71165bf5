"""Find BFCL's files, and load its dialogues, function descriptions, simulated APIs and checker."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from experiential.envs.arguments import checked
from experiential.errors import ConfigError

PACKAGE = "bfcl_eval"
INSTALL = "pip install --no-deps bfcl-eval mpmath"
"""Without what else bfcl-eval asks for (model servers' clients, numpy 1): none of it is used."""
_CONSTANTS = f"{PACKAGE}.constants.executable_backend_config"
_CHECKER = f"{PACKAGE}.eval_checker.multi_turn_eval.multi_turn_checker"
_PROMPTS = f"{PACKAGE}.constants.default_prompts"


class Message(BaseModel):
    """Hold a message of the user."""

    content: str


class Entry(BaseModel):
    """Hold a row of a file of dialogues, with the messages of each turn of the user."""

    id: str
    question: list[list[Message]]
    initial_config: dict[str, Any]
    involved_classes: list[str]
    missed_function: dict[int, list[str]] = {}
    """Functions that are described from a turn on, which has no message: of miss_func alone."""


class Answer(BaseModel):
    """Hold a row of a file of answers: the calls of each turn."""

    id: str
    ground_truth: list[list[str]]


class Dialogue(BaseModel):
    """Hold a dialogue: what the user says in each turn, and the calls that answer it."""

    id: str
    requests: list[str]
    answers: list[list[str]]
    scenario: dict[str, Any]
    """Initial state by name of an API."""
    apis: list[str]
    held: dict[int, list[str]] = {}
    """Functions that are not described before a turn, by that turn from 0."""

    @property
    def number(self) -> str:
        """Return the number, which variants of a dialogue share."""
        return self.id.rpartition("_")[2]


def default_folder() -> str | None:
    """Return the folder of BFCL's files: BFCL_DATA, else the installed package's; None without."""
    if named := os.environ.get("BFCL_DATA"):
        return named
    spec = find_spec(PACKAGE)
    return str(Path(spec.origin).parent) if spec is not None and spec.origin else None


class Source:
    """Read one copy of BFCL: the folder ``bfcl_eval`` of the package or of a repository.

    Raises:
        ConfigError: the folder lacks a file, a row is wrong, another copy is already in use, or
            a package that its APIs import (mpmath) is missing.
    """

    def __init__(self, folder: str | None) -> None:
        found = folder or default_folder()
        if found is None:
            raise ConfigError(
                "Expected BFCL's files, got neither data=, BFCL_DATA nor its package; run:"
                f" {INSTALL}"
            )
        self.folder = Path(found).expanduser().resolve()
        if not (self.folder / "eval_checker").is_dir() or not (self.folder / "data").is_dir():
            raise ConfigError(
                f"Expected a folder {PACKAGE} with data and eval_checker in it, got {self.folder}"
            )
        _import_package(self.folder)
        self.checker: Any = _imported(_CHECKER, self.folder)
        self._backend: Any = _imported(_CONSTANTS, self.folder)

    def dialogues(self, category: str) -> list[Dialogue]:
        """Return the dialogues of a category, in the order of its file."""
        entries = [
            checked(Entry, row, f"a dialogue of BFCL in {file}", f"line {line}")
            for file, line, row in self._rows("data", category)
        ]
        answers = {
            one.id: one.ground_truth
            for file, line, row in self._rows("data/possible_answer", category)
            for one in [checked(Answer, row, f"an answer of BFCL in {file}", f"line {line}")]
        }
        for one in entries:
            calls = answers.get(one.id)
            if calls is None or len(calls) != len(one.question):
                raise ConfigError(
                    f"Expected an answer with {len(one.question)} turns for {one.id} in"
                    f" {self.folder}, got {'none' if calls is None else len(calls)}"
                )
            if unknown := set(one.involved_classes) - set(self._backend.CLASS_FILE_PATH_MAPPING):
                raise ConfigError(
                    f"Expected APIs of BFCL in {one.id}, got {', '.join(sorted(unknown))}"
                )
        return [
            Dialogue(
                id=one.id,
                requests=[
                    "\n".join(said.content for said in turn)
                    if number not in one.missed_function
                    else self.more_functions
                    for number, turn in enumerate(one.question)
                ],
                answers=answers[one.id],
                scenario=one.initial_config,
                apis=one.involved_classes,
                held=one.missed_function,
            )
            for one in entries
        ]

    @cached_property
    def more_functions(self) -> str:
        """Return what BFCL's user says when functions are described that were held back."""
        prompts: Any = _imported(_PROMPTS, self.folder)
        return prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC

    def descriptions(self, api: str) -> list[dict[str, Any]]:
        """Return the descriptions of an API's functions: name, description, parameters."""
        name = self._backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING[api]
        file = self.folder / "data" / "multi_turn_func_doc" / name
        return [
            {key: row[key] for key in ("name", "description", "parameters")}
            for _, row in _json_lines(file)
        ]

    def api(self, name: str) -> Any:
        """Return a new instance of a simulated API, without its scenario."""
        module = _imported(self._backend.CLASS_FILE_PATH_MAPPING[name], self.folder)
        return getattr(module, name)()

    def stateless(self, name: str) -> bool:
        """Return whether an API takes no scenario."""
        return name in self._backend.STATELESS_CLASSES

    def _rows(self, folder: str, category: str) -> Iterator[tuple[str, int, Any]]:
        files = sorted((self.folder / folder).glob(f"BFCL_v*_multi_turn_{category}.json"))
        if not files:
            raise ConfigError(
                f"Expected BFCL_v4_multi_turn_{category}.json in {self.folder / folder}, got none;"
                " point BFCL_DATA to a folder bfcl_eval that has it (docs/envs/bfcl.md)"
            )
        for line, row in _json_lines(files[-1]):
            yield str(files[-1]), line, row


@lru_cache(maxsize=8)
def source(folder: str | None) -> Source:
    """Return the source of a folder, read once."""
    return Source(folder)


def _import_package(folder: Path) -> None:
    """Import ``bfcl_eval`` from ``folder``; its modules import each other by that name."""
    present: ModuleType | None = sys.modules.get(PACKAGE)
    if present is not None:
        if Path(list(present.__path__)[0]).resolve() != folder:
            raise ConfigError(
                f"Expected one copy of BFCL in a process, got {folder} beside"
                f" {list(present.__path__)[0]}; use another process"
            )
        return
    spec = spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules[PACKAGE] = module = module_from_spec(spec)
    spec.loader.exec_module(module)


def _imported(module: str, folder: Path) -> ModuleType:
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"Expected {module} of {folder} to be importable, got: {error}; run: {INSTALL}"
        ) from error


def _json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    try:
        lines = file.read_text("utf-8").splitlines()
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, json.loads(line)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Expected JSON Lines in {file}, got {error}") from error
