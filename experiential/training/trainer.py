"""The trainer: rollouts and both policies' updates around one experience manager.

Primary track: retrieve, act, update the actor. Background track: distil, write, merge, update the extractor. The
primary track waits for the background one only when distillation lags by more than ``extractor.max_lag`` steps, or where
an experiment asks for repeatable runs (``run.drain``).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.config import Experiment, ModelSettings
from experiential.training.actor_samples import actor_samples
from experiential.training.ahead import RolloutsAhead
from experiential.training.checkpoint import CheckpointStore
from experiential.training.evaluate import VisitEvaluator, Visits, compare
from experiential.training.extractor_track import ExtractorTrack
from experiential.training.metrics import Metrics, Observer, peak_memory_gb
from experiential.training.rollout import Episode, MakeEnv, NoBank, Rollout, failures, make_env, refuse_broken
from experiential.training.runtime import LossSettings, PolicyRuntime, TrainStats
from experiential.training.tasks import TaskSource, world_count
from experiential.types import Condition

_FILES = ("metrics.jsonl", "episodes.jsonl", "bank", "checkpoints", "evaluation", "actor", "extractor")

Runtimes = tuple[PolicyRuntime, PolicyRuntime]


class Trainer:
    """Runs one experiment in a folder.

    Args:
        experiment: everything that defines the run.
        output: folder for metrics, bank and checkpoints; created.
        resume: continue from the newest checkpoint in ``output``.
        observer: receives every event as a dict (see docs/quickstart.md).
        runtimes: actor and extractor policies; built from the experiment when None.

    Raises:
        CheckpointError: ``resume`` and there is nothing to resume from.
        ConfigError, ModelNotFoundError, MissingExtraError: the experiment cannot be run as it is.
    """

    def __init__(
        self, experiment: Experiment, output: Path, resume: bool = False, observer: Observer | None = None, runtimes: Runtimes | None = None
    ) -> None:
        self.experiment, self.output, self._resume = experiment, Path(output), resume
        self._store = CheckpointStore(self.output / "checkpoints", experiment.run.keep_checkpoints)
        self._restored = self._store.latest() if resume else None
        self._observer = observer
        self.actor, self.extractor = runtimes or _build(experiment)
        self._start = 0
        self._visits: list[Visits] = []

    def run(self) -> dict[str, Any]:
        """Train and evaluate; returns the summary.

        The summary holds ``evaluations`` (eval events), ``steps``, ``seconds``, ``peak_memory_gb``, ``output``,
        ``ratio_later_visits`` (success with the bank on later visits, after over before), ``difference`` (with the bank
        minus without, after training, with its interval) and ``files``.
        """
        return asyncio.run(self.arun())

    async def arun(self) -> dict[str, Any]:
        """Coroutine form of ``run``."""
        begin = time.perf_counter()
        self._background: set[asyncio.Task[Any]] = set()
        async with contextlib.AsyncExitStack() as stack:
            await self._open(stack)
            steps = await self._train()
            await self._settle()
            if self.experiment.eval.after:
                await self._evaluate(steps)
            await self._checkpoint(steps)
            await self._export()
            self._metrics.emit({"event": "end", "step": steps, "seconds": time.perf_counter() - begin, "peak_memory_gb": peak_memory_gb()})
        return self._summary(steps, time.perf_counter() - begin)

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Open bank, manager, environments and metrics, each closed by ``stack``; restore the checkpoint when resuming."""
        settings = self.experiment
        self.output.mkdir(parents=True, exist_ok=True)
        self._open_bank(stack)
        self._metrics = Metrics(self.output / "metrics.jsonl", self._observer)
        stack.callback(self._metrics.close)
        self._episodes = Metrics(self.output / "episodes.jsonl")
        stack.callback(self._episodes.close)
        self._tasks = TaskSource(settings.env, world_count(settings.env.id, settings.env.kwargs | settings.env.train), settings.seed)
        self._make_env = self._env_maker(stack)
        self._rollout = Rollout(
            settings.env,
            settings.env.train,
            self._manager or NoBank(),
            lambda: self._make_actor(settings.actor.temperature),
            slots=settings.actor.groups * settings.actor.group_size,
            search_and_ask=settings.actor.search_and_ask,
            make_env=self._make_env,
        )
        stack.callback(self._rollout.close)
        stack.push_async_callback(self._cancel_background)
        self._ahead = RolloutsAhead(self._play, settings.run.ahead)
        stack.push_async_callback(self._ahead.close)
        if self._restored is not None:
            await self._restore(*self._restored)
        self._metrics.emit(
            {"event": "start", "step": self._start, "steps": settings.run.steps, "recipe": settings.recipe, "seed": settings.seed}
        )
        if self._restored is None and settings.eval.before:
            await self._evaluate(0)

    def _open_bank(self, stack: contextlib.AsyncExitStack) -> None:
        settings = self.experiment
        self._bank: ExperienceBank | None = None
        self._manager: ExperienceManager | None = None
        self._track: ExtractorTrack | None = None
        if not settings.extractor.enabled:
            return
        folder = self.output / "bank"
        if self._restored is not None:
            _replace_bank(folder, self._restored[0] / "bank")
        elif settings.bank.path is not None:
            with ExperienceBank(
                settings.bank.path, namespace=settings.bank.namespace, embedder=settings.bank.embedder, read_only=True
            ) as source:
                source.fork(folder).close()
        self._bank = stack.enter_context(self._opened_bank(folder, stack))
        options: dict[str, Any] = settings.bank.model_dump(exclude={"path", "namespace", "embedder", "chroma"})
        self._manager = stack.enter_context(ExperienceManager(self._bank, self._make_extractor(), seed=settings.seed, **options))
        self._bank.embedder(["warm up"])  # loads the embedder now and not in the first rollout
        self._track = ExtractorTrack(self.extractor, self._bank, settings.extractor)
        self._manager.on_distillation = self._track.on_distillation

    def _opened_bank(self, folder: Path, stack: contextlib.AsyncExitStack) -> ExperienceBank:
        """The run's bank, written by this process or by a Ray actor."""
        settings, cluster = self.experiment.bank, self.experiment.cluster
        if self.experiment.runtime != "openrlhf" or not cluster.remote_bank:
            return ExperienceBank(folder, namespace=settings.namespace, embedder=settings.embedder, chroma=settings.chroma)
        from experiential.training.openrlhf.bank_actor import BankActor

        return stack.enter_context(BankActor(folder, settings, cluster)).bank()

    def _env_maker(self, stack: contextlib.AsyncExitStack) -> MakeEnv:
        """What builds environments: in this process, or in workers on the cluster."""
        cluster = self.experiment.cluster
        if self.experiment.runtime != "openrlhf" or not cluster.env_workers:
            return make_env
        from experiential.training.openrlhf.env_workers import EnvWorkers

        return stack.enter_context(EnvWorkers(cluster)).make

    async def _train(self) -> int:
        """All steps; returns the last one done."""
        settings = self.experiment.run
        self._begin = time.perf_counter()
        step = self._start
        while step < settings.steps and not self._out_of_time():
            await self._step(step)
            step += 1
            if settings.checkpoint_every and step % settings.checkpoint_every == 0:
                await self._checkpoint(step)
            if self.experiment.eval.every and step % self.experiment.eval.every == 0 and step < settings.steps:
                await self._evaluate(step)
        await self._ahead.close()
        return step

    def _next_pause(self, step: int) -> int:
        """The step before which a checkpoint, an evaluation or the end comes: rollouts do not run ahead of these."""
        every = [n for n in (self.experiment.run.checkpoint_every, self.experiment.eval.every) if n]
        return min([self.experiment.run.steps, *((step // n + 1) * n for n in every)])

    def _out_of_time(self) -> bool:
        minutes = self.experiment.run.minutes
        return minutes is not None and time.perf_counter() - self._begin > 60 * minutes

    async def _step(self, step: int) -> None:
        begin = time.perf_counter()
        tokens_before = self._tokens()
        episodes, rollout_s = await self._ahead.take(step, self._next_pause(step))
        waited = time.perf_counter() - begin
        if self._track is not None:
            await self._track.credit([e.trajectory for e in episodes])
            await self._track.step(step)
        update = await self._update_actor(episodes, step)
        await self._consolidate(step)
        wall = time.perf_counter() - begin
        speed = (self._tokens() - tokens_before + update.sequence_tokens) / wall
        times = {"rollout_s": rollout_s, "waited_s": waited, "step_s": wall, "tokens_per_s": speed}
        self._episodes.emit({"event": "episodes", "step": step + 1, "rows": [_row(e) for e in episodes]})
        self._metrics.emit(self._step_event(step, episodes, update) | times)
        refuse_broken(episodes)

    async def _play(self, step: int) -> tuple[list[Episode], float]:
        """The episodes of a step, and how long they took in seconds."""
        settings = self.experiment.actor
        begin = time.perf_counter()
        guided = settings.guided if self._manager is not None and step >= settings.warmup_steps else "none"
        with self.actor.foreground():
            episodes = await self._rollout.play(self._tasks.jobs(step, settings.groups, settings.group_size, guided))
        return episodes, time.perf_counter() - begin

    async def _consolidate(self, step: int) -> None:
        """Start the periodic merge and deduplication; wait for what runs beside when it lags too far, or the run must be repeatable."""
        if self._manager is None:
            return
        every = self.experiment.bank.merge_every
        if every and (step + 1) % every == 0:
            self._spawn(self._manager.amerge())
        every = self.experiment.bank.dedupe_every
        if every and (step + 1) % every == 0:
            self._spawn(self._manager.adeduplicate())
        if self.experiment.run.drain:
            await self._settle()
        actor = self.experiment.actor
        await self._manager.adrain(leave=self.experiment.extractor.max_lag * actor.groups * actor.group_size)

    async def _update_actor(self, episodes: Sequence[Episode], step: int) -> TrainStats:
        settings = self.experiment.actor
        if not settings.train:
            return TrainStats(version=self.actor.version)
        loss = LossSettings(
            kind="ppo",
            low=settings.clip_low,
            high=settings.clip_high,
            ratio=settings.ratio,
            kl=settings.kl,
            epochs=settings.epochs,
            mini_batches=settings.mini_batches,
            seed=step,
        )
        samples, version = actor_samples(episodes, settings), self.actor.version
        stats = await self.actor.train(samples, loss)
        await self.actor.sync()
        stats.metrics["staleness"] = sum(version - s.policy_version for s in samples) / max(1, len(samples))
        return stats

    def _step_event(self, step: int, episodes: Sequence[Episode], update: TrainStats) -> dict[str, Any]:
        played = [e.trajectory for e in episodes if e.trajectory.error is None]
        event: dict[str, Any] = {
            "event": "step",
            "step": step + 1,
            "episodes": len(episodes),
            "errors": len(episodes) - len(played),
            "reward": _mean([t.reward for t in played]),
            "turns": _mean([float(len(t.turns)) for t in played]),
            "success_guided": _mean([float(t.success) for t in played if t.condition is Condition.GUIDED]),
            "success_free": _mean([float(t.success) for t in played if t.condition is Condition.FREE]),
            "success_advised": _mean([float(t.success) for t in played if t.uses]),
            "actor_loss": update.loss,
            "actor_grad_norm": update.grad_norm,
            "actor_version": update.version,
            "update_s": update.seconds,
            "update_tokens": update.sequence_tokens,
            "forwarded_tokens": update.forwarded_tokens,
            "elapsed_s": time.perf_counter() - self._begin,
            "memory_gb": peak_memory_gb(),
        }
        event |= {f"actor_{name}": value for name, value in (update.metrics | self.actor.busy()).items()}
        event |= {f"extractor_{name}": value for name, value in self.extractor.busy().items()}
        found = {"failures": failures(episodes), "close_errors": dict(self._rollout.close_errors)}
        return event | {name: counts for name, counts in found.items() if counts} | self._bank_event()

    def _bank_event(self) -> dict[str, Any]:
        if self._manager is None or self._track is None or self._bank is None:
            return {}
        track = self._track
        return {
            "entries": len(self._bank),
            "extractor_updates": track.updates,
            "extractor_loss": track.last.loss,
            "extractor_reward": track.mean_reward,
            "staleness": track.staleness,
            "malformed": track.malformed,
            "buffer": len(track.buffer),
            "manager": self._manager.stats(),
        }

    async def _settle(self) -> None:
        """Let the background track finish what it has."""
        if self._background:
            await asyncio.gather(*self._background)
        if self._manager is not None:
            await self._manager.adrain()
        if self._track is not None:
            await self._track.finish()

    async def _evaluate(self, step: int) -> None:
        """Both arms by visit, on the same worlds and seeds, with the weights of now."""
        await self._settle()
        evaluator = VisitEvaluator(
            self.experiment,
            lambda: self._make_actor(self.experiment.eval.temperature),
            self._make_extractor() if self._manager is not None else None,
            make_env=self._make_env,
        )
        arms = [await evaluator.without_bank(step)]
        if self._bank is not None:
            scratch = self.output / "evaluation" / f"step-{step:06d}"
            shutil.rmtree(scratch, ignore_errors=True)
            arms.append(await evaluator.with_bank(self._bank, scratch, step))
        for visits in arms:
            self._visits.append(visits)
            self._metrics.emit(visits.event())

    async def _checkpoint(self, step: int) -> None:
        draft = self._store.begin(step)
        if self._track is not None:
            await self._track.finish()
        await self.actor.save(draft / "actor")
        await self.extractor.save(draft / "extractor")
        manifest: dict[str, Any] = {
            "recipe": self.experiment.recipe,
            "seed": self.experiment.seed,
            "experiment": self.experiment.model_dump(mode="json"),
        }
        if self._bank is not None and self._track is not None:
            self._bank.fork(draft / "bank", keep_queue=True).close()
            manifest |= {"bank_commit": self._bank.head, "track": self._track.state_dict()}
        path = await asyncio.to_thread(self._store.commit, draft, step, manifest)
        self._metrics.emit({"event": "checkpoint", "step": step, "path": str(path)})

    async def _export(self) -> None:
        """Write the trained weights in Hugging Face format."""
        settings = self.experiment
        if settings.actor.train:
            await self.actor.export(self.output / "actor")
        if settings.extractor.enabled and settings.extractor.train:
            await self.extractor.export(self.output / "extractor")

    async def _restore(self, folder: Path, manifest: dict[str, Any]) -> None:
        await self.actor.load(folder / "actor")
        await self.extractor.load(folder / "extractor")
        if self._track is not None:
            self._track.load_state_dict(manifest["track"])
        self._start = int(manifest["step"])
        self._metrics.rewind(self._start)
        self._episodes.rewind(self._start)

    async def _cancel_background(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        if self._track is not None:
            await self._track.finish()

    def _make_actor(self, temperature: float) -> ActorAgent:
        settings = self.experiment.actor
        return ActorAgent(
            self.actor,
            prompts=prompt_set_name(self.experiment.model),
            temperature=temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            constrain=settings.constrain,
            history=settings.history,
            keep_first=settings.keep_first,
            advice=settings.advice,
        )

    def _make_extractor(self) -> ExtractorAgent:
        settings = self.experiment.extractor
        return ExtractorAgent(
            self.extractor,
            prompts=prompt_set_name(self.experiment.extractor_model or self.experiment.model),
            max_operations=settings.max_operations,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            seed=self.experiment.seed,
        )

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _tokens(self) -> int:
        return self.actor.tokens_processed + self.extractor.tokens_processed

    def _summary(self, steps: int, seconds: float) -> dict[str, Any]:
        last = {v.arm: v for v in self._visits if v.step == steps}
        first = {v.arm: v for v in self._visits if v.step == 0}
        difference = compare(last["bank"], last["free"]).model_dump() if {"bank", "free"} <= last.keys() else None
        ratio = None
        if "bank" in last and "bank" in first and steps and first["bank"].later().any():
            ratio = float(last["bank"].later().mean() / first["bank"].later().mean())
        return {
            "evaluations": [v.event() for v in self._visits],
            "steps": steps,
            "seconds": seconds,
            "peak_memory_gb": peak_memory_gb(),
            "output": str(self.output),
            "ratio_later_visits": ratio,
            "difference": difference,
            "files": {Path(name).stem: str(self.output / name) for name in _FILES if (self.output / name).exists()},
        }


def prompt_set_name(settings: ModelSettings) -> str:
    """The template set of a model: what the settings name, or ``brief`` for the tiny model and ``full`` for others."""
    if settings.prompts != "auto":
        return settings.prompts
    return "brief" if settings.name == "tiny" else "full"


def _build(experiment: Experiment) -> Runtimes:
    if experiment.runtime == "openrlhf":
        from experiential.training.openrlhf.runtime import build_runtimes as build_on_cluster

        return build_on_cluster(experiment)
    from experiential.training.local import build_runtimes

    optims = (experiment.actor.optim, experiment.extractor.optim)
    references = (experiment.actor.kl > 0, experiment.extractor.kl > 0)
    return build_runtimes(experiment.model, experiment.extractor_model, optims, references=references)


def _replace_bank(folder: Path, source: Path) -> None:
    """Put the checkpoint's bank in place of the run's; refused while another process writes it."""
    if folder.exists():
        ExperienceBank(folder).close()
        shutil.rmtree(folder)
    shutil.copytree(source, folder)


def _row(episode: Episode) -> dict[str, Any]:
    """One line of the episode log."""
    t = episode.trajectory
    fields = {"task_id": t.task_id, "instance": t.instance, "group": t.group, "condition": t.condition.value, "seed": t.seed}
    return fields | {"success": t.success, "reward": t.reward, "turns": len(t.turns), "uses": len(t.uses), "error": t.error}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
