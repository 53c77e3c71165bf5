"""The bundled tiny model learns: the recipe as shipped, a shortened run, real embedder, real gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiential.recipe import load_experiment
from experiential.training.trainer import Trainer


@pytest.mark.slow
def test_guided_success_rises_above_free_success(tmp_path: Path) -> None:
    """After 40 steps guided episodes succeed more often than they first did, and than free ones do now."""
    seen: list[dict[str, Any]] = []
    overrides = ["run.steps=40", "run.minutes=null", "run.checkpoint_every=0", "eval.before=false", "eval.after=false"]
    Trainer(load_experiment("complementary", overrides), tmp_path, observer=seen.append).run()
    steps = [e for e in seen if e["event"] == "step"]

    def mean(name: str, chosen: list[dict[str, Any]]) -> float:
        return sum(e[name] for e in chosen) / len(chosen)

    first, last = steps[:4], steps[-12:]  # whole blocks of visits to the same worlds
    assert mean("success_guided", last) > mean("success_guided", first) + 0.15
    assert mean("success_guided", last) > mean("success_free", last) + 0.15
    assert mean("extractor_reward", last) > mean("extractor_reward", steps[1:9])
    assert steps[-1]["entries"] > 100
    assert steps[-1]["extractor_updates"] > 30
