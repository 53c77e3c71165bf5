"""A bank made before training: episodes of the untrained actor, distilled and put in order (the offline baseline of section 2.2)."""

from __future__ import annotations

from typing import Any

from experiential.bank.manager import ExperienceManager
from experiential.config import Experiment
from experiential.rollout.rollout import Rollout, refuse_broken
from experiential.rollout.tasks import TaskSource

_SEED = 0x0FF11E  # added to the seed of a run, so that other episodes are collected than training will play


async def fill_bank(
    experiment: Experiment, manager: ExperienceManager, rollout: Rollout, worlds: int | None
) -> dict[str, Any]:
    """Play, distil, deduplicate and merge, with the weights of now; gives an event for the metrics.

    The actor plays alone, on training tasks; nothing is learnt from these episodes but what the
    extractor writes.

    Args:
        experiment: ``bank.prepare_steps`` says how many steps of ``actor.groups`` times
            ``actor.group_size`` episodes.
        manager: of the bank to fill.
        rollout: plays training tasks.
        worlds: how many worlds the environment lists, None when it lists none.

    Raises:
        ExperientialError: the environment failed every episode of a step.
    """
    actor, bank = experiment.actor, experiment.bank
    tasks = TaskSource(experiment.env, worlds, experiment.seed + _SEED)
    played = won = 0
    for step in range(bank.prepare_steps):
        episodes = await rollout.play(tasks.jobs(step, actor.groups, actor.group_size, "none"))
        refuse_broken(episodes)
        played += len(episodes)
        won += sum(e.trajectory.success for e in episodes)
        await manager.adrain()
    await manager.adeduplicate()
    if bank.merge_every:
        await manager.amerge()
    return {
        "event": "prepared",
        "step": 0,
        "episodes": played,
        "successes": won,
        "entries": len(manager.bank),
    }
