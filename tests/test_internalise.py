"""Self-distillation: what is imitated, what the imitated prompts hold, and when it pauses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

import experiential as xp
from experiential.agents.actor import ActorAgent
from experiential.config import EnvSettings, SelfDistillSettings
from experiential.llm.transformers import TransformersLLM
from experiential.rollout import Episode, Job, Rollout, Task
from experiential.training.methods.internalise import (
    CollapseGuard,
    SelfDistillation,
    beyond_free,
    imitation_samples,
    without_help,
)
from experiential.types import Condition, Generation, Trajectory
from tests.llm_tiny import tiny_random_model


def told(
    reward: float, condition: Condition, group: str = "a", error: str | None = None
) -> Episode:
    made = Generation(text="x", prompt_ids=(1,), response_ids=(2,), logprobs=(-1.0,))
    return Episode(
        Trajectory(
            task="t",
            group=group,
            condition=condition,
            reward=reward,
            success=reward > 0,
            error=error,
        ),
        (made,),
    )


def test_guided_episodes_above_the_mean_of_the_free_ones_are_chosen() -> None:
    free = [told(1.0, Condition.FREE), told(0.0, Condition.FREE)]
    above, equal, below = (
        told(1.0, Condition.GUIDED),
        told(0.5, Condition.GUIDED),
        told(0.0, Condition.GUIDED),
    )
    alone = told(1.0, Condition.GUIDED, group="no free member")
    failed = (
        told(0.0, Condition.FREE, error="env: gone"),
        told(1.0, Condition.GUIDED, error="env: gone"),
    )
    assert beyond_free([*free, above, equal, below, alone, *failed]) == [above]
    assert beyond_free([]) == []


def test_the_guard_pauses_far_below_the_best_and_is_remembered() -> None:
    guard = CollapseGuard(margin=0.2, memory=0.0)
    assert [guard.allows(x) for x in (0.3, 0.9, 0.8, 0.6, None, 0.75)] == [
        True,
        True,
        True,
        False,
        False,
        True,
    ]
    first = CollapseGuard(margin=0.0, memory=0.9)
    assert first.allows(5 / 6) and first.mean == 5 / 6, "the first step's rate, not rounded"
    again = CollapseGuard(margin=0.2, memory=0.0, mean=guard.mean, best=guard.best)
    assert not again.allows(0.65)


class Asking(TransformersLLM):
    """Asks the bank first, then acts: the words are given, their tokens are the model's."""

    async def generate(self, prompt, sampling=None):  # type: ignore[no-untyped-def]  # signature of the base
        made = await super().generate(prompt, sampling)
        calls = getattr(self, "calls", 0)
        self.calls = calls + 1
        return (
            made.model_copy(update={"text": "<search_and_ask>which lever?</search_and_ask>"})
            if calls == 0
            else made
        )


@pytest.fixture
def played(tmp_path: Path) -> Iterator[tuple[Episode, ActorAgent]]:
    """A guided episode with advice and a question to the bank, and an agent as played it."""
    model, tokenizer = tiny_random_model()
    llm = Asking(model, tokenizer)

    def actor() -> ActorAgent:
        return ActorAgent(llm, prompts="brief", max_tokens=4)

    with (
        xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank,
        xp.ExperienceManager(bank, retrieval={"floor": -1.0}) as manager,
    ):
        bank.add("Quetzal is the word.")
        settings = EnvSettings(max_turns=5)
        rollout = Rollout(settings, {"worlds": 2}, manager, actor, slots=1, search_and_ask=1)
        (episode,) = asyncio.run(rollout.play([Job(Task(1, "g"), Condition.GUIDED, 1)]))
        rollout.close()
        yield episode, actor()


def test_imitated_prompts_hold_no_experience_and_no_question(
    played: tuple[Episode, ActorAgent],
) -> None:
    episode, actor = played
    decode = actor.llm.tokenizer.decode  # type: ignore[union-attr]
    assert episode.asked[0] and not any(episode.asked[1:]) and episode.trajectory.uses
    seen = decode(episode.generations[-1].prompt_ids)
    assert "Quetzal" in seen and "search_result" in seen
    replayed = without_help(episode, actor)
    assert [g.response_ids for g in replayed] == [g.response_ids for g in episode.generations[1:]]
    for generation in replayed:
        shown = decode(generation.prompt_ids)
        assert "Quetzal" not in shown and "search" not in shown and "experience" not in shown


def test_only_the_actors_own_tokens_are_imitated(played: tuple[Episode, ActorAgent]) -> None:
    episode, actor = played
    samples = imitation_samples([episode, episode], actor, 0.4)
    trained = [sample.tokens[p] for sample in samples for p in sample.positions]
    sampled = [token for g in episode.acts() for token in g.response_ids]
    assert trained == sampled * 2
    assert all(s.kind == "sft" for s in samples) and sum(
        s.weight for s in samples
    ) == pytest.approx(0.4)


def test_imitation_comes_at_its_interval_and_not_while_it_is_paused(
    played: tuple[Episode, ActorAgent],
) -> None:
    episode, actor = played
    winner = Episode(
        episode.trajectory.model_copy(update={"group": "a", "reward": 1.0}),
        episode.generations,
        asked=episode.asked,
    )
    good = [told(0.5, Condition.FREE), winner]
    bad = [told(0.0, Condition.FREE), winner]
    settings = SelfDistillSettings(every=2, guard=0.5, memory=0.0)
    every = SelfDistillation(settings, lambda: actor)
    made = [bool(asyncio.run(every.samples(good, step))) for step in range(4)]
    assert made == [False, True, False, True]
    assert asyncio.run(every.samples(bad, 5)) == [] and every.paused == 1
    again = SelfDistillation(settings, lambda: actor)
    again.load_state_dict(every.state_dict())
    assert again.paused == 1 and asyncio.run(again.samples(bad, 7)) == []
