"""The tiny model's corpus: seeded, in the shipped prompt set, and apart from everything that
evaluation uses.
"""

from __future__ import annotations

import re

from experiential.agents.operations import parse_operations
from experiential.envs.names import world_names
from experiential.llm.models import load_tokenizer
from tools.tiny_corpus import SKILL, sampler

SAMPLES = [make() for make in [sampler(3)] for _ in range(1500)]
TEXT = ["\n".join(m["content"] for m in sample) for sample in SAMPLES]


def test_equal_seeds_give_equal_text() -> None:
    first, second = sampler(3), sampler(3)
    assert [first() for _ in range(20)] == [second() for _ in range(20)]


def test_no_world_of_training_or_evaluation_is_named() -> None:
    names = set(world_names("train")) | set(world_names("eval"))
    found = {m for text in TEXT for m in re.findall(r"[A-Z][a-z]+ [A-Z][a-z]+", text)}
    assert not found & names
    assert found & set(world_names("corpus"))


def test_every_sample_ends_with_the_assistant_and_encodes_with_the_shipped_tokenizer() -> None:
    tokenizer = load_tokenizer("tiny")
    for sample in SAMPLES[:200]:
        assert sample[-1]["role"] == "assistant"
        text = sample[-1]["content"]
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_lessons_are_right_in_about_the_stated_share() -> None:
    """Over distillation samples: the lesson names the lever that the play shows to be live."""
    right = total = 0
    for sample in SAMPLES:
        if sample[0]["content"] != "Write what was learned as JSON operations.":
            continue
        total += 1
        play = sample[1]["content"]
        live = re.search(r"The (\w+) lever turns|(\w+) was live", play)
        assert live is not None
        lever = live[1] or live[2]
        right += any(
            lever in getattr(op, "text", "")
            for op in parse_operations(sample[-1]["content"]).operations
        )
    assert total > 150
    assert abs(right / total - SKILL["right_lesson"]) < 0.1
