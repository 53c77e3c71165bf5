"""Read multi-hop questions and their paragraphs from files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from experiential.envs.arguments import checked
from experiential.envs.hotpotqa.passages import Passage
from experiential.errors import ConfigError

Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


@dataclass(frozen=True)
class Question:
    """Hold one question."""

    id: str
    text: str
    answers: tuple[str, ...]
    """The right one first, then other forms of it."""
    hops: tuple[str, ...]
    """Titles of the paragraphs that hold it, in the order in which they lead to each other."""


@dataclass(frozen=True)
class QuestionSet:
    """Hold questions, and all their paragraphs in one pool."""

    questions: tuple[Question, ...]
    passages: tuple[Passage, ...]


class _Row(BaseModel):
    """Check a row of HotpotQA, of 2WikiMultihopQA (the same fields) or of MuSiQue."""

    model_config = ConfigDict(populate_by_name=True)

    id: str = Field(default="", alias="_id")
    question: Text
    answer: Text
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
        if "_id" not in fields and "id" in fields:
            fields["_id"] = str(fields["id"])
        if "context" not in fields and isinstance(fields.get("paragraphs"), list):
            every = cast("list[Any]", fields["paragraphs"])
            known = [cast("Mapping[str, Any]", one) for one in every if isinstance(one, Mapping)]
            fields["context"] = [(one.get("title"), [one.get("paragraph_text")]) for one in known]
            telling = [one for one in known if one.get("is_supporting")]
            fields["supporting_facts"] = [(one.get("title"), 0) for one in telling]
        for name, second in (("context", "sentences"), ("supporting_facts", "sent_id")):
            if isinstance(columns := fields.get(name), Mapping):
                column_of = cast("Mapping[str, Any]", columns)
                pair: list[Any] = [column_of.get("title"), column_of.get(second)]
                listed = all(isinstance(column, list) for column in pair)
                fields[name] = list(zip(*pair, strict=False)) if listed else []
        return fields


def load_questions(file: str | Path) -> QuestionSet:
    """Read a file in HotpotQA's format: a JSON list, or one JSON object a line.

    Each has ``question``, ``answer``, ``context`` (title and sentences of each paragraph) and,
    where known, ``_id`` (or ``id``), ``supporting_facts`` and ``answer_aliases``. A question that
    comes twice (by its id) is taken once. A file is read once per process and version of it.
    ConfigError names the first question that lacks a field or has a wrong one.
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
    """Read a file of questions; ``stamp`` is the version of the file that the cache knows."""
    expected = (
        f"question, answer and context in each question of {path} (files of a test set, which have"
        " no answers, cannot be played)"
    )
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"Expected a file of questions in UTF-8, got {path}: {error}") from error
    rows: list[Any] = []
    try:
        whole = json.loads(text)
        rows = cast("list[Any]", whole) if isinstance(whole, list) else [whole]
    except ValueError as no_list:
        for number, line in enumerate(text.splitlines(), 1):
            try:
                rows += [json.loads(line)] if line.strip() else []
            except ValueError as error:
                got = f"line {number}: {error}" if rows else str(no_list)
                raise ConfigError(
                    f"Expected a JSON list of questions, or one a line, in {path}, got {got}"
                ) from error
    questions: dict[str, Question] = {}
    passages: dict[Passage, None] = {}
    for number, row in enumerate(rows, 1):
        known = checked(_Row, row, expected, f"question {number}")
        name = known.id or hashlib.sha256(known.question.encode()).hexdigest()[:16]
        answers = tuple(dict.fromkeys((known.answer, *known.answer_aliases)))
        hops = tuple(dict.fromkeys(title for title, _ in known.supporting_facts))
        questions[name] = Question(name, known.question, answers, hops)
        for title, sentences in known.context:
            passages[Passage(title, " ".join(sentence.strip() for sentence in sentences))] = None
    if not questions:
        raise ConfigError(f"Expected at least one question in {path}, got none")
    return QuestionSet(tuple(questions.values()), tuple(passages))
