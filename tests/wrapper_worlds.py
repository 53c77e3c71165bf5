"""A small text world and a counting manager for the wrapper tests."""

from __future__ import annotations

from typing import Any

import gymnasium as gym

from experiential.envs.text_env import UnicodeText
from experiential.types import Answer, Experience, Hit, Trajectory, Use


class CorridorEnv(gym.Env[str, str]):
    """Walk ``length`` cells with 'go'; 'stay' waits; 'fall' ends without success; truncated after
    ``limit`` steps.
    """

    metadata = {"render_modes": []}

    def __init__(self, length: int = 2, limit: int = 6, named: bool = True) -> None:
        self.length, self.limit, self.named = length, limit, named
        self.render_mode = None
        self.observation_space = UnicodeText(4096)
        self.action_space = UnicodeText(4096, samples=("go", "stay"))
        self.steps = self.cell = 0
        self.seen_options: dict[str, Any] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.seen_options = options
        self.steps = self.cell = 0
        self.colour = ("red", "green", "blue")[int(self.np_random.integers(3))]
        return self._text(), self._info()

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.cell += action == "go"
        done = self.cell >= self.length
        fell = action == "fall"
        info = self._info() | {"invalid": action not in ("go", "stay", "fall"), "success": done}
        return (
            self._text(),
            float(done),
            done or fell,
            not (done or fell) and self.steps >= self.limit,
            info,
        )

    def _text(self) -> str:
        return f"Cell {self.cell} of a {self.colour} corridor."

    def _info(self) -> dict[str, Any]:
        return (
            {"task": "Cross the corridor.", "task_id": "corridor", "admissible": ["go", "stay"]}
            if self.named
            else {}
        )


class CountingManager:
    """Keeps what it is asked; answers every query with the first ``k`` of ``texts``."""

    def __init__(self, *texts: str, error: Exception | None = None) -> None:
        self.entries = [Experience(id=f"e{i}", text=text) for i, text in enumerate(texts)]
        self.error = error
        self.searches: list[tuple[Any, int | None, Any]] = []
        self.asked: list[tuple[str, str | None]] = []
        self.submitted: list[Trajectory] = []
        self.closed = 0

    def _hits(self, k: int) -> list[Hit]:
        return [
            Hit(experience=entry, score=0.5, rank=rank)
            for rank, entry in enumerate(self.entries[:k])
        ]

    def search(
        self,
        query: Any,
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
    ) -> Any:
        self.searches.append((query, k, exclude_instance))
        if self.error is not None:
            raise self.error
        return self._hits(k or 1) if isinstance(query, str) else [self._hits(k or 1) for _ in query]

    async def asearch(
        self,
        query: Any,
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
    ) -> Any:
        return self.search(query, k=k, exclude_instance=exclude_instance)

    def ask(self, query: str, *, k: int = 1, exclude_instance: str | None = None) -> Any:
        self.asked.append((query, exclude_instance))
        if self.error is not None:
            raise self.error
        hit = next(iter(self._hits(1)), None)
        if hit is None:
            return Answer()
        use = Use(
            experience_id=hit.experience.id,
            experience_version=1,
            how="search_and_ask",
            refinement="g1",
        )
        return Answer(text=hit.experience.text, hit=hit, use=use)

    def submit(self, trajectory: Trajectory) -> str | None:
        if self.error is not None:
            raise self.error
        self.submitted.append(trajectory)
        return trajectory.id

    def plays_free(self, task: str) -> bool:
        return False

    def close(self) -> None:
        self.closed += 1
