"""Fill a bank with the untrained actor before training: the offline baseline of section 2.2."""

from __future__ import annotations

from dataclasses import dataclass

from experiential.bank.manager import ExperienceManager
from experiential.rollout import TaskSource, refuse_broken, world_count
from experiential.training.methods.method import Method, Run

_SEED = 0x0FF11E  # added to the run's seed: training must not meet the episodes collected here


@dataclass(eq=False)
class OfflineBank(Method):
    """Play, distil, deduplicate and merge before training, with the weights of then.

    The actor plays ``methods.prepare.steps`` steps alone, on training tasks; nothing is learnt from
    these episodes but what the extractor writes.
    """

    run: Run
    manager: ExperienceManager
    steps: int

    async def begin(self) -> None:
        """Fill the bank, and record the episodes.

        Raises:
            ExperientialError: the environment failed every episode of a step.
        """
        experiment, manager = self.run.experiment, self.manager
        actor, bank, env = experiment.actor, experiment.bank, experiment.env
        worlds = world_count(env.id, env.kwargs | env.train)
        tasks = TaskSource(env, worlds, experiment.seed + _SEED)
        played = won = 0
        for step in range(self.steps):
            jobs = tasks.jobs(step, actor.groups, actor.group_size, "none")
            episodes = await self.run.rollout.play(jobs)
            refuse_broken(episodes)
            played += len(episodes)
            won += sum(bool(e.trajectory.success) for e in episodes)
            await manager.adrain()
        await manager.adeduplicate()
        if bank.merge_every:
            await manager.amerge()
        counts = {"episodes": played, "successes": won, "entries": len(manager.bank)}
        self.run.emit({"event": "prepared", "step": 0} | counts)
