"""The bonus for certainty, measured on a real model: the entropy over the observation with an entry
and without.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import experiential as xp
from experiential.agents.actor import ActorAgent
from experiential.agents.prompts import experience_block
from experiential.bank.folder import FolderBank
from experiential.config import EntropyBonusSettings, OptimSettings
from experiential.llm.transformers import TransformersLLM
from experiential.training.local import LocalRuntime
from experiential.training.methods.entropy_bonus import EntropyBonus
from experiential.types import Condition, Trajectory, Turn, Use
from tests.llm_tiny import tiny_random_model

OBSERVATION = "A vault with a jade lever."


@pytest.fixture
def runtime() -> LocalRuntime:
    model, tokenizer = tiny_random_model()
    return LocalRuntime(TransformersLLM(model, tokenizer), OptimSettings())


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[FolderBank]:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def entropy_of_observation(runtime: LocalRuntime, text: str | None) -> float:
    """Mean entropy over the user's tokens, by a plain forward pass."""
    actor = ActorAgent(runtime, prompts="brief")
    tokens, kinds = actor.opening(OBSERVATION, None if text is None else experience_block([text]))
    with torch.no_grad():
        logits = runtime.llm.model(input_ids=torch.tensor([tokens])).logits[0].double()
    places = [i for i, kind in enumerate(kinds) if kind == "user" and i]
    assert OBSERVATION in runtime.tokenizer.decode([tokens[i] for i in places])
    p = torch.softmax(logits[[i - 1 for i in places]], dim=1)
    return float(-(p * p.log()).sum(dim=1).mean())


def trajectory(
    *uses: Use, condition: Condition = Condition.GUIDED, error: str | None = None
) -> Trajectory:
    return Trajectory(
        task="t",
        turns=(Turn(observation=OBSERVATION, action="a"),),
        uses=uses,
        condition=condition,
        error=error,
    )


async def test_a_bonus_is_the_share_of_entropy_that_the_entry_takes_away(
    runtime: LocalRuntime, bank: FolderBank
) -> None:
    entry, other = bank.add("Pull the jade lever."), bank.add("Quite another thing.")
    uses = [Use(experience_id=e.id, experience_version=e.version) for e in (entry, entry, other)]
    late = Use(experience_id=entry.id, experience_version=1, how="search_and_ask")
    gone = Use(experience_id="nobody", experience_version=1)
    settings = EntropyBonusSettings(kind="relative", weight=2.0)
    made = EntropyBonus(runtime, ActorAgent(runtime, prompts="brief"), bank, settings)
    given = await made.bonuses(
        [trajectory(use) for use in uses]
        + [trajectory(uses[2], late), trajectory(gone), trajectory(late, error="x")]
    )
    before = entropy_of_observation(runtime, None)
    for use, text in zip(uses, (entry.text, entry.text, other.text), strict=True):
        assert given[use.id] == pytest.approx(
            2 * (before - entropy_of_observation(runtime, text)) / before, rel=1e-3, abs=1e-5
        )
    assert (
        set(given) == {use.id for use in uses}
        and given[uses[0].id] == given[uses[1].id] != given[uses[2].id]
    )
    assert made.metrics["entropy_bonus"] == pytest.approx(sum(given.values()) / 3)


async def test_free_and_failed_episodes_have_no_bonus(
    runtime: LocalRuntime, bank: FolderBank
) -> None:
    use = Use(experience_id=bank.add("Pull it.").id, experience_version=1)
    made = EntropyBonus(runtime, ActorAgent(runtime, prompts="brief"), bank, EntropyBonusSettings())
    assert (
        await made.bonuses(
            [
                trajectory(use, condition=Condition.FREE),
                trajectory(use, error="env: gone"),
                Trajectory(task="t"),
            ]
        )
        == {}
    )
