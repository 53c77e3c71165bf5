"""Scores of answers: SQuAD's normal form, exact match, token F1, Experiential RL's threshold."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.envs.answers import SCORES, exact_match, normalise, thresholded, token_f1


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The Beatles", "beatles"),
        ("  an  Apple a day!", "apple day"),
        ("A", ""),
        ("théâtre", "théâtre"),
        ("anthem", "anthem"),
        ("9-10", "910"),
    ],
)
def test_the_normal_form_by_hand(text: str, normal: str) -> None:
    assert normalise(text) == normal


def test_exact_match_takes_any_gold_answer_and_nothing_more() -> None:
    assert exact_match("the arno!", ["Tiber", "Arno"]) == 1.0
    assert exact_match("Arno and Tiber", ["Tiber", "Arno"]) == 0.0
    assert exact_match("", ["Arno"]) == 0.0


@pytest.mark.parametrize(
    ("given_", "gold", "f1"),
    [
        ("Ana Belo", "Ana Belo", 1.0),
        ("Ana", "Ana Belo", 2 / 3),  # precision 1, recall 1/2
        ("Ana Ana", "Ana Belo", 0.5),  # one of two words each way
        ("Cor", "Ana Belo", 0.0),
        ("yes", "yes", 1.0),
        ("yes indeed", "yes", 0.0),  # a closed answer scores whole or not at all
        ("no", "no doubt", 0.0),
    ],
)
def test_token_f1_by_hand(given_: str, gold: str, f1: float) -> None:
    assert token_f1(given_, [gold]) == pytest.approx(f1)


def test_the_threshold_keeps_f1_from_three_tenths_on() -> None:
    gold = ["one"]
    assert thresholded("one two three four five", gold) == pytest.approx(2 / 6)  # 0.333
    assert thresholded("one two three four five six", gold) == 0.0  # 0.286
    assert thresholded("The one", gold) == 1.0


@settings(deadline=None)
@given(st.text(max_size=30), st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=3))
def test_scores_stay_within_bounds_and_agree_on_a_full_match(text: str, golds: list[str]) -> None:
    scores = {name: score(text, golds) for name, score in SCORES.items()}
    assert all(0.0 <= value <= 1.0 for value in scores.values())
    assert scores["erl"] in (scores["em"], scores["f1"], 0.0)
    if scores["em"] == 1.0 and normalise(text):
        assert scores["f1"] == scores["erl"] == 1.0
