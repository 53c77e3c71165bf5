"""A run learns from the part of an episode that fits its model's context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiential.config import OptimSettings
from experiential.llm.base import Prompt, SamplingParams
from experiential.llm.transformers import TransformersLLM
from experiential.recipe import load_experiment
from experiential.training.local import LocalRuntime
from experiential.training.trainer import Trainer
from experiential.types import Generation
from tests.llm_tiny import tiny_random_model

SETTINGS = (
    "env.id=experiential/Vault-v0",
    "actor.groups=1",
    "actor.group_size=2",
    "actor.max_tokens=8",
    "actor.constrain=false",
    "actor.kl=0.1",  # equal rewards give samples too
    "model.prompts=brief",
    "run.steps=1",
    "eval.before=false",
    "eval.after=false",
)


def test_a_batch_keeps_its_long_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = tiny_random_model()
    lengths: list[int] = []

    class Noting(LocalRuntime):
        """Notes the length of each prompt."""

        async def generate(
            self, prompt: Prompt, sampling: SamplingParams | None = None
        ) -> Generation:
            lengths.append(len(prompt))
            return await super().generate(prompt, sampling)

    def step(context: int | None) -> dict[str, Any]:
        llm, events = TransformersLLM(model, tokenizer), list[dict[str, Any]]()
        if context is not None:
            monkeypatch.setattr(llm, "_context", context)
        policy = Noting(llm, OptimSettings(lr=1e-4), reference=True)
        folder = tmp_path / str(context)
        experiment = load_experiment("grpo", SETTINGS)
        Trainer(experiment, folder, observer=events.append, runtimes=(policy, policy)).run()
        policy.close()
        return next(event for event in events if event["event"] == "step")

    whole = step(None)
    assert "outgrown" not in whole and whole["turns"] == 2
    cut = step(max(lengths))  # the last prompt alone does not fit
    assert cut["outgrown"] == 2 and cut["errors"] == 0 and cut["turns"] == 1
    assert 0 < cut["update_tokens"] < whole["update_tokens"]
