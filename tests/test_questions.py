"""Files in HotpotQA's format, and the invented world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiential.envs.hotpotqa.multihop import MOST, invented_questions
from experiential.envs.hotpotqa.passages import Passage
from experiential.envs.hotpotqa.questions import load_questions
from experiential.errors import ConfigError

ROW: dict[str, Any] = {
    "_id": "q1",
    "question": "Which river flows through Pisa?",
    "answer": "Arno",
    "supporting_facts": [["Pisa", 0], ["Pisa", 1]],
    "context": [
        ["Pisa", ["Pisa is a town.", " It lies on the Arno."]],
        ["Rome", ["Rome is a city."]],
    ],
}


def written(folder: Path, content: str) -> Path:
    path = folder / "questions.json"
    path.write_text(content, encoding="utf-8")
    return path


@pytest.mark.parametrize("lines", [False, True])
def test_hotpotqas_own_form_as_a_list_and_by_lines(tmp_path: Path, lines: bool) -> None:
    rows = [ROW, ROW | {"_id": "q2", "answer_aliases": ["the Arno", "Arno"]}]
    found = load_questions(
        written(tmp_path, "\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    )
    assert [(q.id, q.answers, q.hops) for q in found.questions] == [
        ("q1", ("Arno",), ("Pisa",)),
        ("q2", ("Arno", "the Arno"), ("Pisa",)),
    ]
    assert found.passages == (
        Passage("Pisa", "Pisa is a town. It lies on the Arno."),
        Passage("Rome", "Rome is a city."),
    )


def test_musiques_form_and_columns_are_read_too(tmp_path: Path) -> None:
    musique = {
        "id": "m1",
        "question": "Where?",
        "answer": "Here",
        "paragraphs": [
            {"idx": 0, "title": "A", "paragraph_text": "Here.", "is_supporting": True},
            {"idx": 1, "title": "B", "paragraph_text": "There.", "is_supporting": False},
        ],
    }
    columns = ROW | {
        "id": 7,
        "context": {"title": ["Pisa"], "sentences": [["On the Arno."]]},
        "supporting_facts": {"title": ["Pisa"], "sent_id": [0]},
    }
    del columns["_id"]
    found = load_questions(written(tmp_path, json.dumps([musique, columns])))
    assert [(q.id, q.hops) for q in found.questions] == [("m1", ("A",)), ("7", ("Pisa",))]
    assert found.passages[-1] == Passage("Pisa", "On the Arno.")


def test_a_question_without_an_id_gets_a_stable_one_and_twins_count_once(tmp_path: Path) -> None:
    row = {key: value for key, value in ROW.items() if key != "_id"}
    found = load_questions(written(tmp_path, json.dumps([row, row])))
    assert len(found.questions) == 1 and len(found.questions[0].id) == 16


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "at least one question"),
        ("[]", "at least one question"),
        ("[1]", "question 1 where"),
        ('{"a": ', "a JSON list of questions, or one a line"),
        (json.dumps(ROW) + "\n{oops", "line 2"),
        (
            json.dumps([ROW, {k: v for k, v in ROW.items() if k != "answer"}]),
            "question 2 where answer is missing",
        ),
        (
            json.dumps([{k: v for k, v in ROW.items() if k != "context"}]),
            "question 1 where context is missing",
        ),
        (json.dumps([ROW | {"context": []}]), "question 1 where context"),
        (
            json.dumps([ROW | {"context": {"title": 3, "sentences": []}}]),
            "question 1 where context",
        ),
        (json.dumps([ROW | {"context": [["only a title"]]}]), "question 1 where context.0"),
        (json.dumps([ROW | {"question": "  "}]), "question 1 where question"),
        (json.dumps([ROW | {"answer": None}]), "question 1 where answer"),
        (json.dumps([ROW | {"paragraphs": "none", "context": 5}]), "question 1 where context"),
    ],
)
def test_a_broken_file_is_one_clear_error(tmp_path: Path, content: str, told: str) -> None:
    with pytest.raises(ConfigError, match="Expected") as caught:
        load_questions(written(tmp_path, content))
    assert (
        told in str(caught.value)
        and "questions.json" in str(caught.value)
        and "\n" not in str(caught.value)
    )


def test_a_missing_or_binary_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_questions(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="No such file|Is a directory"):
        load_questions(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_questions(tmp_path / "binary.json")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps([ROW]))
    assert load_questions(path) is load_questions(path)
    import os

    path.write_text(json.dumps([ROW | {"_id": "new"}]))
    os.utime(path, ns=(1, 1))
    assert load_questions(path).questions[0].id == "new"


@pytest.mark.parametrize("count", [1, 30, 600])
def test_the_invented_parts_share_no_name_and_no_question(count: int) -> None:
    train, test = invented_questions("train", count), invented_questions("eval", count)
    assert len(train.questions) == len(test.questions) == count
    words = [
        {word for passage in part.passages for word in passage.title.split()} - {"Works"}
        for part in (train, test)
    ]
    assert not words[0] & words[1]
    assert not {q.text for q in train.questions} & {q.text for q in test.questions}


def test_every_invented_question_is_answered_by_its_two_paragraphs_together() -> None:
    part = invented_questions("train", 300)
    text = {passage.title: passage.text for passage in part.passages}
    assert len(text) == len(part.passages)
    for question in part.questions:
        first, second = question.hops
        assert first in question.text and second in text
        assert question.answers[0] in text[second] or question.answers[0] == first
        if "earlier" not in question.text:
            assert second in text[first] and question.answers[0] not in question.text


def test_the_world_is_drawn_from_its_generation() -> None:
    assert invented_questions("train", 20) == invented_questions("train", 20)
    assert invented_questions("train", 20, 1) != invented_questions("train", 20)
    with pytest.raises(ConfigError, match=f"between 1 and {MOST}, got|between 1 and {MOST} of"):
        invented_questions("train", MOST + 1)
