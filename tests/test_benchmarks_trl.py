"""The comparison with TRL: its prompts differ, and its ratio is that of the rates."""

from __future__ import annotations

import json

import pytest

from benchmarks.local_vs_trl import fill, prompts, reward, summary
from experiential.llm.models import load_tokenizer


def test_every_prompt_is_another_and_names_its_actions() -> None:
    found = prompts(12, "brief")
    assert len({json.dumps(p["messages"]) for p in found}) == 12
    assert all(p["actions"] for p in found)
    assert {len(p["messages"]) for p in found} == {2, 4}


def test_prompts_are_filled_up_to_a_length_and_stay_different() -> None:
    found = prompts(4, "brief")
    fill(found, "tiny", 1000)
    template = load_tokenizer("tiny").apply_chat_template
    lengths = [
        len(template(p["messages"], add_generation_prompt=True, return_dict=False)) for p in found
    ]
    assert all(1000 <= length <= 1100 for length in lengths)
    assert len({p["messages"][-1]["content"][:40] for p in found}) == 4


def test_rewards_spread() -> None:
    assert len({reward(str(i)) for i in range(50)}) > 30


def test_the_ratio_is_that_of_the_rates_and_its_interval_comes_from_paired_steps() -> None:
    ours = [
        {"rollout_cpu": 1.0, "cpu": 2.0 + i, "prompt": 90, "response": 10, "responses": 4}
        for i in range(3)
    ]
    theirs = [s | {"rollout_cpu": 2.0, "cpu": 2.0 + 3 * (s["cpu"] - 1.0)} for s in ours]
    found = summary({"local": ours, "trl": theirs}, choose=False)
    assert found["rollout"]["local"] == pytest.approx(100.0)
    assert found["update"]["ratio"] == pytest.approx({"value": 3.0, "low": 3.0, "high": 3.0})
    assert found["total"]["local"] == pytest.approx(600 / 9)
    assert 2.0 < found["total"]["ratio"]["low"] <= found["total"]["ratio"]["high"] < 3.0
    acting = summary({"local": ours, "trl": theirs}, choose=True)
    assert acting["rollout"]["trl"] == pytest.approx(2.0)
