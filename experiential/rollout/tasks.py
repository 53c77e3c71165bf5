"""Choose the tasks of a step by seed and step alone, so that a resumed run draws the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiential.config import EnvSettings, WorldChange
from experiential.envs.make import make
from experiential.rollout.rollout import Job, Task, guided_members

_WORLDS = 1  # third coordinate of the draws of worlds, so that they differ from those of seeds


class TaskSource:
    """Draw the tasks of each step.

    An environment that lists ``worlds`` is asked for them by ``reset(options={"world": i})``, each
    world once per step while there are enough, and the same ones for ``settings.visits`` steps in a
    row; any other environment (``worlds`` is None) gets fresh seeds.
    """

    def __init__(self, settings: EnvSettings, worlds: int | None, seed: int) -> None:
        self._changes: Sequence[WorldChange] = sorted(settings.changes, key=lambda c: c.step)
        self._worlds, self._visits, self._seed = worlds, settings.visits, seed

    def tasks(self, step: int, groups: int) -> list[Task]:
        """Return the tasks of a step."""
        seeds = np.random.default_rng([self._seed, step]).integers(2**31 - 1, size=groups)
        options: list[dict[str, Any]] = [{} for _ in range(groups)]
        if self._worlds is not None:
            rng = np.random.default_rng([self._seed, step // self._visits, _WORLDS])
            change = next((c for c in reversed(self._changes) if c.step <= step), None)
            active = min(change.worlds, self._worlds) if change else self._worlds
            rounds = [rng.permutation(active) for _ in range(-(-groups // active))]
            options = [
                {"world": int(w)} | ({"era": change.era} if change and w < change.changed else {})
                for w in np.concatenate(rounds)[:groups]
            ]
        return [
            Task(seed=int(s), group=f"{step}.{i}", options=o)
            for i, (s, o) in enumerate(zip(seeds, options, strict=True))
        ]

    def jobs(self, step: int, groups: int, group_size: int, guided: str) -> list[Job]:
        """Return the episodes of a step: each task once per member of its group."""
        conditions = guided_members(group_size, guided)
        return [
            Job(task, condition, sampling_seed=episode_seed(self._seed, step, g, k))
            for g, task in enumerate(self.tasks(step, groups))
            for k, condition in enumerate(conditions)
        ]


def episode_seed(*parts: int) -> int:
    """Derive a sampling seed from the coordinates of an episode."""
    return int(np.random.SeedSequence([p & 0xFFFFFFFF for p in parts]).generate_state(1)[0])


def world_count(env_id: str, kwargs: dict[str, Any]) -> int | None:
    """Return the number of worlds of an environment; None if it lists none."""
    env = make(env_id, **kwargs)
    worlds = getattr(env.unwrapped, "worlds", None)
    env.close()
    return None if worlds is None else len(worlds)
