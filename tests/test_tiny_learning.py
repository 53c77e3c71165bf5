"""The bundled tiny model learns: the recipe as shipped, a shortened run, real embedder, real
gradients.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiential.recipe import load_experiment
from experiential.training.trainer import Trainer


def mean(name: str, chosen: list[dict[str, Any]]) -> float:
    return sum(e[name] for e in chosen) / len(chosen)


def trained(folder: Path, seed: int) -> list[dict[str, Any]]:
    seen: list[dict[str, Any]] = []
    overrides = [
        f"seed={seed}",
        "run.steps=64",
        "run.minutes=null",
        "run.checkpoint_every=0",
        "eval.before=false",
        "eval.after=false",
    ]
    Trainer(load_experiment("complementary", overrides), folder, observer=seen.append).run()
    return [e for e in seen if e["event"] == "step"]


def shortfalls(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Name what did not rise far enough, with what it lacks."""
    first, last = steps[:8], steps[-32:]
    guided = mean("success_guided", last)
    reward = mean("extractor_reward", last) - mean("extractor_reward", first)
    margins = {
        "guided success over its beginning, by 0.1": guided - mean("success_guided", first) - 0.1,
        "guided over free success, by 0.15": guided - mean("success_free", last) - 0.15,
        "the extractor's reward over its beginning, by 0.1": reward - 0.1,
        "entries over 100": steps[-1]["entries"] - 100,
        "updates of the extractor over 30": steps[-1]["extractor_updates"] - 30,
    }
    return {name: margin for name, margin in margins.items() if margin <= 0}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_guided_success_rises_above_free_success(tmp_path: Path) -> None:
    """Guided episodes come to succeed more often than they first did, and than free ones do at the
    end.

    The loop is asynchronous, so no two runs are equal. Means are over whole blocks of visits to the
    same worlds. In four runs guided success rose by 0.19 to 0.35 and ended 0.31 to 0.56 above free
    success. One of seven later runs collapsed: the actor came to pull one lever whatever it was
    told, and free members did as well as guided ones. So another seed decides where the first run
    falls short: two of two do so in about one of fifty tests.
    """
    found = shortfalls(trained(tmp_path / "first", seed=0))
    if found:
        again = shortfalls(trained(tmp_path / "second", seed=1))
        assert not again, f"the first run lacked {found}"
