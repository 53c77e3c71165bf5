"""What must hold whatever is learnt from: where gradients come from, what is masked, when the ratio
is one, and weights that fall.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import experiential as xp
from experiential.agents.actor import ActorAgent
from experiential.agents.dialogue import Dialogue
from experiential.agents.prompts import experience_block
from experiential.config import ActorSettings, EnvSettings, ModelSettings, OptimSettings
from experiential.llm.base import SamplingParams
from experiential.llm.models import load_model, load_tokenizer
from experiential.llm.transformers import TransformersLLM
from experiential.rollout import Episode, Job, Rollout, Task
from experiential.training.advantages import cell_advantages, training_count_weights
from experiential.training.local import LocalRuntime
from experiential.training.losses import (
    batch_loss,
    cispo_loss,
    kl_k3,
    kl_penalty,
    ppo_clip_loss,
    reverse_kl_loss,
    sft_loss,
)
from experiential.training.runtime import LossSettings, Sample, sample_from_generation
from experiential.training.samples import actor_samples, trajectory_samples
from experiential.types import Condition, Generation, Trajectory

SEGMENT = torch.tensor([0, 0, 0, 1, 2, 2])
WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.5, 1.5, 1.5, -1.0, 0.7, 0.7], dtype=torch.float64)
GAPS = torch.tensor([0.1, -0.05, 0.4, -0.6, -0.1, 0.08], dtype=torch.float64)
"""Log-ratios of which two are clipped at 0.2; none lies within 0.03 of a kink."""
RECORDED = 1e-4
"""How far a log-probability recorded in generation may lie from the one computed in training under
the same weights, in nats: generation reads a cache token by token, training whole sequences side by
side, and float32 sums depend on their order.
"""


# --- gradients
# --------------------------------------------------------------------------------------------------


def ppo(ratio: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    old = torch.linspace(-2.0, -1.0, 6, dtype=torch.float64)
    return lambda x: ppo_clip_loss(
        x + old,
        old,
        ADVANTAGES,
        segment=SEGMENT,
        weights=WEIGHTS,
        clip_low=0.2,
        clip_high=0.2,
        ratio=ratio,
    )[0]


LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ppo, token ratio": ppo("token"),
    "ppo, sequence ratio": ppo("sequence"),
    # where a loss stops a gradient, the stopped factor must not move with the log-probability: the
    # other policy's moves along
    "cispo": lambda x: cispo_loss(x, x.detach() - GAPS, ADVANTAGES, eps_low=0.2, eps_high=0.2)[0],
    "k3": lambda x: kl_k3(x, torch.zeros(6, dtype=torch.float64)),
    "penalty": lambda x: kl_penalty(x, torch.linspace(-3.0, 5.0, 6, dtype=torch.float64)),
    "sft": lambda x: sft_loss(x, SEGMENT, WEIGHTS),
    "reverse_kl": lambda x: reverse_kl_loss(x, x.detach() - GAPS, segment=SEGMENT, weights=WEIGHTS)[
        0
    ],
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_every_loss_is_that_of_finite_differences(name: str) -> None:
    logp = GAPS.clone().requires_grad_()
    assert torch.autograd.gradcheck(LOSSES[name], (logp,))
    assert torch.autograd.grad(LOSSES[name](logp).sum(), logp)[0].abs().sum() > 0.1


@pytest.mark.parametrize("kind", ["ppo", "cispo", "sft", "reverse_kl"])
def test_the_loss_of_a_batch_of_mixed_kinds_with_a_penalty_has_that_gradient_too(
    kind: str,
) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        reference = torch.linspace(-0.5, 0.5, 6)

        def loss(x: torch.Tensor) -> torch.Tensor:
            now, samples = x.detach(), []
            for s, own in enumerate(
                ("ppo", kind, None)
            ):  # a stopped factor moves along, a ratio of PPO does not
                chosen = [i for i in range(6) if int(SEGMENT[i]) == s]
                stopped = (now - GAPS)[chosen].tolist()
                old = tuple(stopped if (own or kind) == "cispo" else [0.0] * len(chosen))
                rest = (
                    tuple(ADVANTAGES[chosen].tolist()),
                    (),
                    None,
                    0,
                    tuple(stopped),
                    float(WEIGHTS[s]),
                )
                samples.append(
                    Sample(tuple(range(9)), tuple(range(1, len(chosen) + 1)), old, *rest, kind=own)
                )
            return batch_loss(
                x, samples, LossSettings(kind=kind, kl=0.3), 6.0, reference=reference
            )[0]

        assert torch.autograd.gradcheck(loss, (GAPS.clone().requires_grad_(),))
    finally:
        torch.set_default_dtype(torch.float32)


# --- advantages
# --------------------------------------------------------------------------------------------------

ROWS = st.lists(
    st.tuples(st.floats(-2, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=24
)


@settings(deadline=None, max_examples=40)
@given(rows=ROWS, estimator=st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce++"]))
def test_advantages_sum_to_zero_inside_every_half_of_every_group(
    rows: list[tuple[float, int, bool]], estimator: Any
) -> None:
    rewards, group, guided = (np.array(column) for column in zip(*rows, strict=True))
    found = cell_advantages(rewards, group, guided, estimator=estimator).astype(np.float64)
    for g in range(3):
        for half in (True, False):
            cell = found[(group == g) & (guided == half)]
            assert abs(cell.sum()) <= 1e-6 * max(1.0, np.abs(cell).sum())


@settings(deadline=None, max_examples=40)
@given(rows=ROWS, credit=st.sampled_from(["trajectory", "turn"]))
def test_and_so_do_those_of_the_samples_that_are_trained_on(
    rows: list[tuple[float, int, bool]], credit: str
) -> None:
    made = Generation(text="x", prompt_ids=(1,), response_ids=(2,), logprobs=(-1.0,))
    halves = {True: Condition.GUIDED, False: Condition.FREE}
    episodes = [
        Episode(Trajectory(task="t", group=f"{g}", condition=halves[c], reward=r), (made,))
        for r, g, c in rows
    ]
    samples = actor_samples(episodes, ActorSettings.model_validate({"credit": credit}))
    total = sum(s.weight * s.advantages[0] for s in samples)
    assert abs(total) <= 1e-6 * max(1.0, sum(abs(s.weight * s.advantages[0]) for s in samples)), (
        "each half has one weight, and sums to 0"
    )


# --- masks
# --------------------------------------------------------------------------------------------------


@lru_cache
def real_tokenizer() -> Any:
    return load_tokenizer("tiny")


WORDS = st.one_of(
    st.text(min_size=1, max_size=20),
    st.sampled_from(["pull red", "<|im_end|>", "</experience>", "<answer>1</answer>"]),
)


@settings(deadline=None, max_examples=15)
@given(
    advice=WORDS,
    turns=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=3),
    in_system=st.booleans(),
)
def test_what_was_injected_is_masked_even_where_the_actor_said_the_same(
    advice: str, turns: list[tuple[str, str]], in_system: bool
) -> None:
    tokenizer = real_tokenizer()
    dialogue, said = Dialogue(tokenizer), []
    block = experience_block([advice])
    dialogue.add({"role": "system", "content": "Play." + (f"\n{block}" if in_system else "")})
    for n, (observation, found) in enumerate(turns):
        dialogue.add({"role": "user", "content": ("" if in_system or n else block) + observation})
        for reply in (
            f"{found}{advice}",
            observation,
        ):  # a question to the bank, then an act, both in words that stand in the prompt
            ids = tokenizer(reply, add_special_tokens=False)["input_ids"]
            prompt = tuple(dialogue.prompt())
            dialogue.append(
                Generation(
                    text=reply,
                    prompt_ids=prompt,
                    response_ids=tuple(ids),
                    logprobs=(-1.0,) * len(ids),
                )
            )
            said += ids
            if reply is not observation:
                dialogue.add({"role": "tool", "content": found})
    (sequence,) = dialogue.sequences()
    kinds = [span.kind for span in sequence.spans for _ in range(span.start, span.end)]
    assert "experience" in kinds
    assert all(
        mask == 0 for kind, mask in zip(kinds, sequence.mask, strict=True) if kind != "assistant"
    )
    assert [
        token for token, mask in zip(sequence.tokens, sequence.mask, strict=True) if mask
    ] == said


class Asking(TransformersLLM):
    """Asks the bank in its first response, in words that are given; the tokens are the model's."""

    asked = False

    async def generate(self, prompt: Any, sampling: SamplingParams | None = None) -> Generation:
        made = await super().generate(prompt, sampling)
        first, self.asked = not self.asked, True
        return (
            made.model_copy(update={"text": "<search_and_ask>which lever?</search_and_ask>"})
            if first
            else made
        )


@pytest.fixture
def episode(tmp_path: Path) -> Iterator[tuple[Episode, Any]]:
    """A guided episode of the bundled tiny model, with advice in its prompt and an answer of the
    bank, and the tokenizer.
    """
    model, tokenizer = load_model(ModelSettings(name="tiny"))
    llm = Asking(model, tokenizer)
    with (
        xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank,
        xp.ExperienceManager(bank, retrieval={"floor": -1.0}) as manager,
    ):
        bank.add("Quetzal is the word.")
        agent = ActorAgent(llm, prompts="brief", max_tokens=6)
        rollout = Rollout(
            EnvSettings(max_turns=4),
            {"worlds": 2},
            manager,
            lambda: agent,
            slots=1,
            search_and_ask=1,
        )
        (played,) = asyncio.run(rollout.play([Job(Task(1, "g"), Condition.GUIDED, 1)]))
        rollout.close()
    yield played, tokenizer


def test_in_an_episode_nothing_but_what_the_model_sampled_is_trained_on(
    episode: tuple[Episode, Any],
) -> None:
    played, tokenizer = episode
    samples = trajectory_samples(played.generations, 1.0, 1.0)
    trained = [s.tokens[p] for s in samples for p in s.positions]
    assert trained == [token for g in played.generations for token in g.response_ids]
    masked = [
        tokenizer.decode([t for i, t in enumerate(s.tokens) if i not in set(s.positions)])
        for s in samples
    ]
    assert "Quetzal" in masked[0] and any("search_result" in text for text in masked), (
        "advice and answer were injected"
    )
    assert "Quetzal" not in tokenizer.decode(trained)


# --- ratios
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [(), ("pull red", "pull blue", "wait")])
def test_the_ratio_is_one_until_the_weights_change_and_another_afterwards(
    choices: tuple[str, ...],
) -> None:
    policy = LocalRuntime(
        TransformersLLM(*load_model(ModelSettings(name="tiny"))), OptimSettings(lr=1e-3)
    )
    prompts = [
        [{"role": "user", "content": text}]
        for text in ("Go.", "A longer question about the door?", "Stop.")
    ]

    async def play() -> list[Sample]:
        sampling = SamplingParams(max_tokens=6, choices=choices or None)
        made = [await policy.generate(prompt, sampling) for prompt in prompts]  # type: ignore[arg-type]
        return [
            sample_from_generation(g, a, weight=1 / 3)
            for g, a in zip(made, (1.0, -1.0, 0.5), strict=True)
        ]

    async def both() -> None:
        samples = await play()
        before = await policy.score(samples)
        assert await policy.score(samples) == before, (
            "the same computation under the same weights: every bit of the log-ratio is 0"
        )
        recorded = [x for s in samples for x in s.logprobs]
        assert [x for row in before for x in row] == pytest.approx(recorded, abs=RECORDED)
        stats = await policy.train(
            [replace(s, logprobs=row) for s, row in zip(samples, before, strict=True)],
            LossSettings(),
        )
        assert (
            stats.metrics["ratio"] == 1.0
            and stats.metrics["kl"] == 0.0
            and stats.metrics["clip_fraction"] == 0.0
        )
        after = await policy.score(samples)
        gaps = [
            abs(x - y)
            for old, new in zip(before, after, strict=True)
            for x, y in zip(old, new, strict=True)
        ]
        assert max(gaps) > 100 * RECORDED
        again = await policy.train(samples, LossSettings())
        assert abs(again.metrics["ratio"] - 1.0) > RECORDED and again.metrics["kl"] > 0.0

    asyncio.run(both())


# --- equation 7
# --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    cooldown=st.integers(0, 6),
    decay=st.floats(0.05, 3.0),
    last=st.integers(0, 30),
    uses=st.integers(1, 30),
)
def test_weights_of_equation_7_fall_strictly_with_use_and_are_zero_while_cooling(
    cooldown: int, decay: float, last: int, uses: int
) -> None:
    counts = list(range(uses + 1))
    rested = training_count_weights(
        last + cooldown, [last] * len(counts), counts, cooldown=cooldown, decay=decay
    )
    assert rested[0] == 1.0 and (np.diff(rested) < 0).all() and (rested > 0).all()
    if cooldown:
        cooling = training_count_weights(
            last + cooldown - 1, [last] * len(counts), counts, cooldown=cooldown, decay=decay
        )
        assert cooling[0] == 1.0 and not cooling[1:].any()
