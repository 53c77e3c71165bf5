"""EvolveR's reward and upkeep by hand, and its recipe on the tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.bank.bank import ExperienceBank
from experiential.config import ActorSettings, EvolverSettings
from experiential.envs.answers import exact_match
from experiential.errors import ConfigError
from experiential.recipe import load_experiment
from experiential.rollout import Episode
from experiential.training.methods.evolver import (
    ALL_PARTS,
    evolver_reward,
    format_reward,
    search_score,
    shaped_reward,
    think_score,
)
from experiential.training.samples import actor_samples, env_reward
from experiential.training.trainer import Trainer, prune
from experiential.types import Generation, Trajectory, Use

THINK, ASK, LOOK, ANSWER = (
    "<think>Hm.</think>",
    "<search_experience>a</search_experience>",
    "<search_knowledge>b</search_knowledge>",
    "<answer>no</answer>",
)


def test_the_outcome_is_the_exact_match() -> None:
    assert (exact_match("The Arno.", ["Arno"]), exact_match("Tiber", ["Arno"])) == (1.0, 0.0)


def test_think_scores_have_no_gap() -> None:
    """The published code gives 0 for seven and eight thoughts."""
    assert [think_score(n) for n in range(10)] == [0.0, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("experience", "knowledge", "kinds", "score"),
    [
        (0, 0, 2, 0.0),
        (1, 0, 2, 0.2),  # one of two kinds
        (0, 3, 2, 0.4),  # one kind, two searches more
        (1, 1, 2, 0.5),
        (2, 2, 2, 0.7),
        (9, 9, 2, 1.0),  # further searches add .5 at most
        (1, 0, 1, 0.5),  # the only kind there is
        (3, 0, 1, 0.7),
    ],
)
def test_search_scores_by_hand(experience: int, knowledge: int, kinds: int, score: float) -> None:
    assert search_score(experience, knowledge, kinds) == pytest.approx(score)


@pytest.mark.parametrize(
    ("responses", "parts", "reward"),
    [
        ([THINK + ASK, LOOK, ANSWER], ALL_PARTS, (0.2 + 0.5) / 2),
        ([THINK + ASK, THINK + LOOK, THINK + LOOK, ANSWER], ALL_PARTS, (0.4 + 0.6) / 2),
        ([THINK + LOOK, ANSWER], ALL_PARTS, (0.2 + 0.2) / 2),
        (
            [THINK + "search[b]", "answer[c]"],
            ALL_PARTS,
            (0.2 + 0.2) / 2,
        ),  # the other form of the same actions
        ([ASK, LOOK, ANSWER], ALL_PARTS, 0.0),  # no thought
        ([THINK, ANSWER], ALL_PARTS, 0.0),  # no search
        ([THINK + ASK, LOOK], ALL_PARTS, 0.0),  # no answer
        ([THINK + ASK, "<answer> </answer>"], ALL_PARTS, 0.0),  # an empty answer is none
        (["<think> </think>" + ASK, ANSWER], ALL_PARTS, 0.0),  # an empty thought is none
        (["<think>" + ASK, ANSWER], ALL_PARTS, 0.0),  # nor is one that does not end
        ([], ALL_PARTS, 0.0),
        ([ASK, "pull red"], ("search_experience",), 0.5),
        (["pull red"], ("search_experience",), 0.0),
        ([THINK + "go"], ("think",), 0.2),
        ([THINK + ASK, "go"], ("think", "search_experience"), (0.2 + 0.5) / 2),
    ],
)
def test_the_format_reward_by_hand(
    responses: list[str], parts: Sequence[Any], reward: float
) -> None:
    assert format_reward(responses, parts) == pytest.approx(reward)


def test_a_format_of_answers_alone_is_refused() -> None:
    with pytest.raises(ValueError, match="think or a search"):
        format_reward([ANSWER], ("answer",))


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from([THINK, ASK, LOOK, ANSWER, "x"]), max_size=12).map("".join),
        max_size=4,
    )
)
def test_the_format_reward_stays_within_bounds_and_never_beats_an_outcome(
    responses: list[str],
) -> None:
    reward = format_reward(responses)
    assert 0.0 <= reward <= 1.0
    assert evolver_reward(0.0, reward) < evolver_reward(1.0, 0.0)


def test_the_weighted_reward_by_hand() -> None:
    assert evolver_reward(1.0, 0.0) == pytest.approx(1 / 1.1)
    assert evolver_reward(0.0, 0.35) == pytest.approx(0.035 / 1.1)
    assert evolver_reward(1.0, 0.5, outcome_weight=1.0, format_weight=1.0) == 0.75
    for weights in ((0.0, 0.0), (-1.0, 2.0)):
        with pytest.raises(ValueError, match="Expected weights"):
            evolver_reward(1.0, 1.0, outcome_weight=weights[0], format_weight=weights[1])


def episode(group: str, reward: float, *texts: str) -> Episode:
    """A finished episode of these responses, two tokens each."""
    said = tuple(
        Generation(text=t, prompt_ids=(1,), response_ids=(2, 3), logprobs=(-1.0, -1.0))
        for t in texts
    )
    return Episode(Trajectory(task="t", group=group, reward=reward, success=reward > 0), said)


def test_advantages_follow_the_weighted_reward_and_the_record_keeps_the_environments() -> None:
    """Two failures of one group differ by their format alone: with the weight the better form
    gains, without it neither learns.
    """
    batch = [episode("g", 0.0, ASK, "pull red"), episode("g", 0.0, "pull red")]
    actor = ActorSettings(guided="all", advantage="pooled")
    form = EvolverSettings(format_reward=0.1, format_parts=("search_experience",))
    assert actor_samples(batch, actor, env_reward) == []
    shaped = partial(shaped_reward, settings=form)
    assert [shaped(one) for one in batch] == pytest.approx([0.1 * 0.5 / 1.1, 0.0])
    samples = actor_samples(batch, actor, shaped)
    assert {s.advantages[0] > 0 for s in samples if len(s.tokens)} == {True, False}
    assert [one.trajectory.reward for one in batch] == [0.0, 0.0]


def test_pruning_takes_out_what_is_below_the_score_and_says_so(tmp_path: Path) -> None:
    """Laplace: two failures give 1/4, one failure 1/3, none 1/2; only the first is below 0.3."""
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        entries = [bank.add(text) for text in ("twice wrong", "once wrong", "never used")]
        for i, entry in enumerate((entries[0], entries[0], entries[1])):
            use = Use(experience_id=entry.id, experience_version=1, episode=f"e{i}")
            bank.record(Trajectory(id=f"e{i}", task="t", uses=(use,), success=False))
        events: list[dict[str, Any]] = []
        asyncio.run(prune(bank, 0.3, 10, events.append))
        assert [entry.text for entry in bank.entries()] == ["once wrong", "never used"]
        assert events == [{"event": "prune", "step": 10, "pruned": 1, "entries": 2}]
        assert bank.history()[-1].author == "run"


def test_two_ways_to_ask_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match="search_and_ask or actor.search_experience, got both"):
        load_experiment("evolver", ["actor.search_and_ask=1"])


SMALL = [
    "run.steps=2",
    "run.drain=true",
    "actor.groups=2",
    "actor.group_size=4",
    "eval.worlds=3",
    "eval.visits=2",
    "eval.before=false",
]
ENVS = {
    "vault": ["env.train={split: train, worlds: 4}", "bank.prune_every=1", "bank.dedupe_every=1"],
    "hotpotqa": [
        "env.id=experiential/HotpotQA-v0",
        "env.kwargs={choices: true, style: tags, k: 1}",
        "env.train={split: train, questions: 20}",
        "env.eval={split: eval, questions: 10}",
        "methods.evolver.format_parts=[search_experience, search_knowledge, answer]",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("env", list(ENVS))
def test_the_recipe_runs_with_one_set_of_weights(env: str, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    trainer = Trainer(
        load_experiment("evolver", [*SMALL, *ENVS[env]]), tmp_path, observer=events.append
    )
    trainer.run()
    assert trainer.actor is trainer.extractor and trainer.actor.version > 0
    steps = [event for event in events if event["event"] == "step"]
    assert len(steps) == 2 and all(
        event["errors"] == 0 and event["success_free"] is None for event in steps
    )
    assert steps[-1]["extractor_updates"] == 0  # distillation is not rewarded
    with ExperienceBank(tmp_path / "bank", read_only=True) as bank:
        assert {entry.kind for entry in bank.entries()} <= {"guiding", "cautionary"}
    if env == "vault":
        assert [event["step"] for event in events if event["event"] == "prune"] == [1, 2]
