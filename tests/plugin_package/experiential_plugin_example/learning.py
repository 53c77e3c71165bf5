"""An advantage estimator, a policy loss, a runtime, a method and a tracker."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from experiential.rollout import Episode
from experiential.training.advantages import Cells
from experiential.training.local import InProcessRuntime
from experiential.training.losses import Terms
from experiential.training.methods.method import Run
from experiential.training.methods.policy_gradient import PolicyGradient
from experiential_plugin_example import note


def maxrl(cells: Cells) -> npt.NDArray[np.float64]:
    """Return A = (r - mean) / mean; cells without success count 0."""
    note("estimators")
    above = np.where(cells.mean > 0, cells.mean, np.inf)
    return (cells.rewards - cells.mean) / above


def reinforce(terms: Terms) -> tuple[Tensor, dict[str, float]]:
    """Minimise - sum_s w_s mean_t A log pi: no ratio and no clipping."""
    note("losses")
    size = terms.segment.bincount(minlength=len(terms.weights)).clamp(min=1)
    share = (terms.weights / size)[terms.segment]
    return -(share * terms.advantages * terms.logp).sum(), {}


class LoudRuntime(InProcessRuntime):
    """Train in this process, as ``local`` does."""

    def __init__(self, *arguments: Any) -> None:
        note("runtimes")
        super().__init__(*arguments)


class Brevity(PolicyGradient):
    """Learn from groups of episodes, and prefer short responses."""

    def __init__(self, run: Run) -> None:
        note("methods")
        super().__init__(run)
        self._tokens = 0

    def reward(self, episode: Episode) -> float:
        """Return the reward of the environment, less 0.001 for each token."""
        return super().reward(episode) - 0.001 * tokens(episode)

    async def after_step(self, episodes: Sequence[Episode], step: int) -> None:
        """Count the tokens of all steps."""
        self._tokens += sum(map(tokens, episodes))

    def event(self, episodes: Sequence[Episode]) -> dict[str, Any]:
        """Return the count, beside the metrics of the policy gradient."""
        return super().event(episodes) | {"response_tokens": self._tokens}

    def state_dict(self) -> dict[str, Any]:
        """Return the count."""
        return {"tokens": self._tokens}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count."""
        self._tokens = state["tokens"]


def tokens(episode: Episode) -> int:
    """Return the number of tokens in the actor's responses."""
    return sum(len(generation.response_ids) for generation in episode.generations)


class LineTracker:
    """Write each event as a line of JSON into ``lines.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "lines.jsonl").open("a", encoding="utf-8")

    def handle(self, event: dict[str, Any]) -> None:
        """Write one event."""
        note("trackers")
        self._file.write(json.dumps(event, default=str) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
