"""Read multi-hop questions and their paragraphs from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from experiential.envs.hotpotqa.passages import Passage
from experiential.envs.rows import checked
from experiential.errors import ConfigError


@dataclass(frozen=True)
class Question:
    """Hold one question.

    Attributes:
        id: stable name.
        text: the question.
        answers: the right answer first, then other forms of it.
        hops: titles of the paragraphs that hold the answer, in the order in which they lead to each
            other where that is known.
    """

    id: str
    text: str
    answers: tuple[str, ...]
    hops: tuple[str, ...]


@dataclass(frozen=True)
class QuestionSet:
    """Hold questions, and all their paragraphs in one pool."""

    questions: tuple[Question, ...]
    passages: tuple[Passage, ...]


class _Row(BaseModel):
    """Check a row of HotpotQA, of 2WikiMultihopQA (the same fields) or of MuSiQue."""

    model_config = ConfigDict(populate_by_name=True)

    id: str = Field(default="", alias="_id")
    question: str = Field(min_length=1)
    answer: str = Field(min_length=1)
    answer_aliases: list[str] = Field(default_factory=list)
    context: list[tuple[str, list[str]]] = Field(min_length=1)
    supporting_facts: list[tuple[str, int]] = Field(default_factory=list[tuple[str, int]])

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, row: Any) -> Any:
        """Turn MuSiQue's ``paragraphs`` into ``context``, and exported columns into rows."""
        if not isinstance(row, Mapping):
            return row
        fields = dict(cast("Mapping[str, Any]", row))
        if "context" not in fields and isinstance(fields.get("paragraphs"), list):
            known = [
                cast("Mapping[str, Any]", one)
                for one in cast("list[Any]", fields["paragraphs"])
                if isinstance(one, Mapping)
            ]
            fields["context"] = [(one.get("title"), [one.get("paragraph_text")]) for one in known]
            fields["supporting_facts"] = [
                (one.get("title"), 0) for one in known if one.get("is_supporting")
            ]
        for name, (first, second) in {
            "context": ("title", "sentences"),
            "supporting_facts": ("title", "sent_id"),
        }.items():
            if isinstance(columns := fields.get(name), Mapping):
                known = cast("Mapping[str, list[Any]]", columns)
                pair = [
                    column if isinstance(column := known.get(key), list) else []
                    for key in (first, second)
                ]
                fields[name] = list(zip(*pair, strict=False))
        return fields

    @field_validator("question", "answer")
    @classmethod
    def _visible(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("Input should hold something visible")
        return text.strip()

    def asked(self) -> Question:
        """Return the question without its paragraphs."""
        name = self.id or hashlib.sha256(self.question.encode()).hexdigest()[:16]
        hops = tuple(dict.fromkeys(title for title, _ in self.supporting_facts))
        return Question(
            name, self.question, tuple(dict.fromkeys((self.answer, *self.answer_aliases))), hops
        )

    def passages(self) -> Iterator[Passage]:
        """Yield the paragraphs."""
        for title, sentences in self.context:
            yield Passage(title, " ".join(sentence.strip() for sentence in sentences))


def load_questions(file: str | Path) -> QuestionSet:
    """Read a file in HotpotQA's format: a JSON list, or one JSON object a line.

    Each has ``question``, ``answer``, ``context`` (title and sentences of each paragraph) and,
    where known, ``_id`` (or ``id``), ``supporting_facts`` and ``answer_aliases``. A question that
    comes twice (by its id) is taken once. A file is read once per process and version of it.

    Raises:
        ConfigError: the file cannot be read, or a question in it lacks a field or has a wrong one;
            the first one is named.
    """
    path = Path(file).expanduser()
    try:
        stamp = path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(
            f"Expected a file of questions in HotpotQA's format, got {str(file)!r}:"
            f" {error.strerror}"
        ) from error
    return _loaded(path, stamp)


@lru_cache(maxsize=4)
def _loaded(path: Path, stamp: int) -> QuestionSet:
    rows = [_checked(row, number, path) for number, row in enumerate(_rows(path), 1)]
    if not rows:
        raise ConfigError(f"Expected at least one question in {path}, got none")
    questions = {question.id: question for row in rows if (question := row.asked())}
    return QuestionSet(
        tuple(questions.values()),
        tuple(dict.fromkeys(passage for row in rows for passage in row.passages())),
    )


def _rows(path: Path) -> list[Any]:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Expected a file of questions in UTF-8, got {path}: {error}") from error
    try:
        whole = json.loads(text)
    except ValueError as error:
        return _lines(text, path, error)
    return cast("list[Any]", whole) if isinstance(whole, list) else [whole]


def _lines(text: str, path: Path, whole: ValueError) -> list[Any]:
    rows: list[Any] = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            cause = f"line {number}: {error}" if rows else str(whole)
            raise ConfigError(
                f"Expected a JSON list of questions, or one a line, in {path}, got {cause}"
            ) from error
    return rows


def _checked(row: Any, number: int, path: Path) -> _Row:
    if isinstance(row, dict) and "_id" not in row and "id" in row:
        row = cast("dict[str, Any]", row) | {"_id": str(cast("dict[str, Any]", row)["id"])}
    expected = (
        f"question, answer and context in each question of {path} (files of a test set, which have"
        " no answers, cannot be played)"
    )
    return checked(_Row, row, expected, f"question {number}")
