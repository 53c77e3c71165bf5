"""Train: run rollouts and both policies' updates around one experience manager.

Primary track: retrieve, act, update the actor. Background track: distil, write, merge, update the
extractor. The primary track waits for the background one only when distillation lags by more than
``extractor.max_lag`` steps, or after every step with ``run.drain``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.manager_like import NoBank
from experiential.bank.protocol import Bank, ForkableBank
from experiential.bank.storage.lock import WriterLock
from experiential.config import Experiment
from experiential.errors import (
    BudgetError,
    CheckpointError,
    ExperientialError,
    LostProcessError,
)
from experiential.evaluation.arms import NEEDS_BANK
from experiential.evaluation.episode_log import EPISODES_FILE, episode_row
from experiential.evaluation.intervals import paired_difference
from experiential.evaluation.visits import Meters, VisitEvaluator, Visits, manager_options
from experiential.llm.base import LLM
from experiential.llm.metered import Metered
from experiential.llm.rounds import Rounds
from experiential.plugins import resolve
from experiential.rollout import (
    Episode,
    Reviewer,
    Rollout,
    TaskSource,
    refuse_broken,
    world_count,
)
from experiential.sync import cancel_tasks, ending_with_callbacks
from experiential.training.checkpoint import CheckpointStore
from experiential.training.extractor_track import ExtractorTrack, telling
from experiential.training.methods.cold_start import ColdStart
from experiential.training.methods.critic import Critic
from experiential.training.methods.entropy_bonus import EntropyBonus
from experiential.training.methods.internalise import SelfDistillation
from experiential.training.methods.method import Method, Run
from experiential.training.methods.prepare import OfflineBank
from experiential.training.methods.reflection import Reflection
from experiential.training.metrics import Metrics, Observer, peak_memory_gb, step_event
from experiential.training.preflight import find_warnings, look_at
from experiential.training.roles import Roles
from experiential.training.runtime import METHODS, LossSettings, Policies, TrainStats, build_runtime

_METRICS = "metrics.jsonl"
_FILES = f"{_METRICS} episodes.jsonl bank checkpoints evaluation actor extractor".split()


class Trainer:
    """Run one experiment in a folder.

    Args:
        experiment: everything that defines the run.
        output: folder for metrics, bank and checkpoints; created.
        resume: continue from the newest checkpoint in ``output``.
        observer: receives every event as a dict (see docs/quickstart.md).
        runtimes: actor and extractor policies, which stay open; None builds and closes its own.
        warnings: of the settings, recorded as events at the start.

    Raises:
        CheckpointError: ``resume`` and there is nothing to resume from.
        ConfigError, ModelNotFoundError, MissingExtraError: the experiment cannot be run.
    """

    def __init__(
        self,
        experiment: Experiment,
        output: Path,
        resume: bool = False,
        observer: Observer | None = None,
        runtimes: Policies | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self.experiment, self.output = experiment, Path(output)
        self._store = CheckpointStore(self.output / "checkpoints")
        self._restored = self._store.latest() if resume else None
        self._observer, self._given, self._warnings = observer, runtimes, tuple(warnings)
        self._start = self._at = 0
        self._opened = self._reopening = False
        self._began = 0.0
        self._went_back: list[str] = []  # texts that say why, until the log holds them
        self._restarts: list[int] = []  # step of each checkpoint that the run went on from
        self._evaluated = self.output / "evaluation" / EPISODES_FILE  # episodes of evaluations
        self._visits: list[Visits] = []
        self._bank: ForkableBank | None = None
        self._manager: ExperienceManager | None = None
        self._track: ExtractorTrack | None = None

    def run(self) -> dict[str, Any]:
        """Train and evaluate; return the summary.

        It holds ``evaluations`` (eval events), ``steps``, ``seconds``, ``peak_memory_gb``,
        ``output``, ``ratio_later_visits`` (success with the bank on later visits, after over
        before), ``difference`` (with the bank minus without, after training, with its interval) and
        ``files``.

        Raises:
            ExperientialError: an event loop runs in this thread, as in a notebook: await ``arun``.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.arun())
        raise ExperientialError(
            "Expected run() outside an event loop, got a running one, as in a notebook;"
            " use `await trainer.arun()` there"
        )

    async def arun(self) -> dict[str, Any]:
        """Train and evaluate from inside an event loop; see ``run``.

        An error of any callback of the loop ends the run. The last event is ``end``; its ``reason``
        is steps, minutes, budget or interrupted.

        When a process is lost without which the run cannot go on, all parts are closed and opened
        again, and the run goes on from its last checkpoint, at most ``cluster.restarts`` times from
        the same one.
        """
        begin = time.perf_counter()
        try:
            while True:
                try:
                    step = await ending_with_callbacks(self._run(begin))
                    break
                except ExperientialError as error:
                    # Once begun, a start that fails may fail for the same death: try again.
                    if not (isinstance(error, LostProcessError) or self._reopening):
                        raise
                    self._go_back(error)
        except (asyncio.CancelledError, BudgetError) as error:
            reason = "budget" if isinstance(error, BudgetError) else "interrupted"
            with contextlib.closing(Metrics(self.output / _METRICS, self._observer)) as metrics:
                metrics.emit(self._end(reason, begin))
            raise
        except (OSError, MemoryError) as error:
            raise ExperientialError(
                f"Expected room to train in {self.output}, got {type(error).__name__}: {error};"
                " free some disk or memory, then go on with --resume"
            ) from error
        return self._summary(step, time.perf_counter() - begin)

    async def _run(self, begin: float) -> int:
        """Train, evaluate and export; return the number of steps taken."""
        async with contextlib.AsyncExitStack() as stack:
            self._reopening = self._opened
            await self._open(stack)
            self._opened, self._reopening = True, False
            run, evaluation = self.experiment.run, self.experiment.eval
            self._begin, step = self._began or time.perf_counter(), self._start
            self._began = self._begin
            limit = math.inf if run.minutes is None else self._begin + 60 * run.minutes
            actor, extractor = self.experiment.actor, self.experiment.extractor
            try:
                while step < run.steps and time.perf_counter() <= limit:
                    await self._step(step)
                    step = self._at = step + 1
                    await self._committed(wait=False)
                    if run.checkpoint_every and step % run.checkpoint_every == 0:
                        await self._checkpoint(step)
                    if evaluation.every and step % evaluation.every == 0 and step < run.steps:
                        await self._evaluate(step)
                if step < run.steps:
                    text = f"stopped after step {step} of {run.steps}: run.minutes={run.minutes}"
                    warning = {"event": "warning", "step": step, "text": f"{text} are over"}
                    self._metrics.emit(warning)
                await self._ahead.close()
                await self._settle()
                await self._tidy()
                if evaluation.after:
                    await self._evaluate(step)
            except BudgetError:
                # weights that an unfinished step has changed must not be changed by it again
                if step == run.steps or not (actor.train or extractor.train):
                    await self._checkpoint(step)
                    await self._committed()
                raise
            await self._checkpoint(step)
            await self._committed()
            if actor.train:
                await self.actor.export(self.output / "actor")
            if extractor.enabled and extractor.train and self.extractor is not self.actor:
                await self.extractor.export(self.output / "extractor")
            self._metrics.emit(self._end("steps" if step >= run.steps else "minutes", begin))
        return step

    def _go_back(self, error: ExperientialError) -> None:
        """Prepare to go on from the last checkpoint, else from the beginning; or raise ``error``.

        It is raised where the parts are not the run's own, before the run has once begun, and when
        no restart is left.
        """
        found = self._store.latest() if self._store.all() else None
        step = int(found[1]["step"]) if found else 0
        again = self._restarts.count(step)
        if self._given is not None or not self._opened or again >= self.experiment.cluster.restarts:
            raise error
        self._restarts.append(step)
        self._restored = found
        self._start = self._at = 0
        self._visits = [visits for visits in self._visits if visits.step <= step]
        self._bank = self._manager = self._track = None
        if found is None:
            self._visits = []
            for name in _FILES:
                path = self.output / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        place = f"its checkpoint of step {step}" if found else "its beginning"
        limit = self.experiment.cluster.restarts
        text = f"{error}; the run goes on from {place}, restart {again + 1} of {limit}"
        self._went_back.append(text)

    async def _tidy(self) -> None:
        """Leave the entries of each task that are about it and did best, as ``bank.keep`` says."""
        keep = self.experiment.bank.keep
        if self._bank is not None and keep:
            await asyncio.to_thread(
                self._bank.evict, keep, "subject", per_task=True, author="trainer"
            )

    def _end(self, reason: str, begin: float) -> dict[str, Any]:
        cost = {"seconds": time.perf_counter() - begin, "peak_memory_gb": peak_memory_gb()}
        return {"event": "end", "step": self._at, "reason": reason} | cost

    async def aevaluate(
        self, checkpoint: Path, manifest: dict[str, Any], episodes: Path | None = None
    ) -> list[dict[str, Any]]:
        """Evaluate any run's checkpoint in this run's folder; return the eval events.

        Args:
            checkpoint: its folder.
            manifest: what it says of itself.
            episodes: the file that the episodes are added to, in place of the run's own.
        """
        self._restored = checkpoint, manifest
        self._evaluated = episodes or self._evaluated
        async with contextlib.AsyncExitStack() as stack:
            await self._open(stack)
            await self._evaluate(self._start)
        return [visits.event() for visits in self._visits]

    async def _open(self, stack: contextlib.AsyncExitStack) -> None:
        """Build all parts of the run, each closed by ``stack``, and restore or prepare them."""
        settings = self.experiment
        self.output.mkdir(parents=True, exist_ok=True)
        self._runtime = build_runtime(settings, self._given, self.output)
        stack.callback(self._runtime.close)
        self.actor, self.extractor = self._runtime.actor, self._runtime.extractor
        self._policies = {"actor": self.actor}
        if self.extractor is not self.actor:
            self._policies["extractor"] = self.extractor
        self._roles = Roles(settings, (self.actor, self.extractor))
        self._metrics = Metrics(self.output / _METRICS, self._observer)
        stack.callback(self._metrics.close)
        self._episodes = Metrics(self.output / EPISODES_FILE)
        stack.callback(self._episodes.close)
        if settings.extractor.enabled:
            self._open_bank(stack)
        worlds = world_count(settings.env.id, settings.env.kwargs | settings.env.train)
        self._tasks = TaskSource(settings.env, worlds, settings.seed)
        self._rollout = Rollout(
            settings.env,
            settings.env.train,
            self._manager or NoBank(),
            self._roles.actor,
            slots=settings.actor.groups * settings.actor.group_size,
            search_and_ask=settings.actor.search_and_ask,
            search_experience=settings.actor.search_experience,
            make_env=self._runtime.make_env,
            in_order=settings.repeatable,
            keeps_outgrown=True,  # else a batch would lack its long episodes, which fail
        )
        stack.callback(self._rollout.close)
        emit = self._metrics.emit
        run = Run(settings, self._roles, self.actor, self._rollout, self._bank, self._manager, emit)
        self._methods = build_methods(run)
        self._rollout.critic = self._reviewer()
        # Closed before the parts they use: rollouts ahead, bank upkeep, the extractor's update.
        self._upkeep: set[asyncio.Task[Any]] = set()  # merging, deduplicating and pruning
        stack.push_async_callback(cancel_tasks, self._upkeep)
        if self._track is not None:
            stack.push_async_callback(self._track.close)
        self._ahead = RolloutsAhead(self._play, settings.run.ahead)
        stack.push_async_callback(self._ahead.close)
        self._committing: set[asyncio.Task[None]] = set()  # the checkpoint that is being written
        stack.push_async_callback(cancel_tasks, self._committing)
        if self._restored is not None:
            await self._restore(*self._restored)
        about = {"steps": settings.run.steps, "minutes": settings.run.minutes}
        about |= {"recipe": settings.recipe, "seed": settings.seed}
        emit({"event": "start", "step": self._start} | about)
        while self._went_back:
            emit({"event": "warning", "step": self._start, "text": self._went_back.pop(0)})
        if self._restored is None:
            await self._warn(listed=worlds is not None)
        if self._restored is None:
            for method in self._methods:
                await method.begin()
        if self._manager is not None and not settings.extractor.distill:
            self._manager.extractor = None  # from here on it only records what is submitted
        if self._restored is None and settings.eval.before:
            await self._evaluate(0)

    def _open_bank(self, stack: contextlib.AsyncExitStack) -> None:
        """Open the run's bank, from a checkpoint, another bank or empty, and its manager."""
        settings = self.experiment
        folder = self.output / "bank"
        if self._restored is not None:
            if folder.exists():
                # Refused while another process writes it; its journal may be damaged or gone.
                WriterLock(folder, "default").release()
                shutil.rmtree(folder)
            shutil.copytree(self._restored[0] / "bank", folder)
        elif settings.bank.path is not None:
            namespace, embedder = settings.bank.namespace, settings.bank.embedder
            with FolderBank(
                settings.bank.path, namespace=namespace, embedder=embedder, read_only=True
            ) as source:
                source.fork(folder).close()
        self._bank = stack.enter_context(self._runtime.open_bank(folder))
        self._track = ExtractorTrack(self.extractor, self._bank, settings.extractor)
        rounds = Rounds(self.extractor) if settings.repeatable else None
        self._manager = ExperienceManager(
            self._bank,
            self._roles.extractor(rounds),
            share_queue=False,
            rounds=rounds,
            on_distillation=self._track.on_distillation,  # also of what a resumed run left
            drafts=settings.extractor.drafts,
            seed=settings.seed,
            **manager_options(settings),
        )
        stack.callback(self._manager.close, drain=None)  # a resumed run goes on with its queue
        self._bank.embedder(["warm up"])  # loads the embedder now and not in the first rollout

    async def _warn(self, *, listed: bool) -> None:
        """Record the warnings of the settings, and those of a look at the environment."""
        settings, texts = self.experiment, list(self._warnings)
        if settings.run.preflight and settings.run.steps:
            tasks = self._tasks.tasks(0, 8)
            remote = settings.runtime == "openrlhf" and settings.cluster.env_workers
            look = await asyncio.to_thread(look_at, settings, [] if remote else tasks)
            found = find_warnings(settings, look, listed=listed, bank=self._bank)
            texts += await asyncio.to_thread(list, found)
        for text in texts:
            self._metrics.emit({"event": "warning", "step": self._start, "text": text})

    def _reviewer(self, llm: LLM | None = None) -> Reviewer | None:
        """Return the judge of retrieved experience, where a method has one."""
        return next(filter(None, (method.reviewer(llm) for method in self._methods)), None)

    async def _step(self, step: int) -> None:
        """Play, credit the extractor, update the actor, and keep the bank in order."""
        run = self.experiment.run
        begin = time.perf_counter()
        tokens = sum(policy.tokens_processed for policy in self._policies.values())
        # Rollouts ahead stop before the next checkpoint, evaluation or end.
        every = filter(None, (run.checkpoint_every, self.experiment.eval.every))
        pause = min([run.steps, *((step // n + 1) * n for n in every)])
        episodes, rollout_s = await self._ahead.take(step, pause)
        waited = time.perf_counter() - begin
        if self._track is not None:
            trajectories = [e.trajectory for e in episodes]
            bonuses: dict[str, float] = {}
            for method in self._methods:
                for use, bonus in (await method.bonuses(trajectories)).items():
                    bonuses[use] = bonuses.get(use, 0.0) + bonus
            await self._track.credit(trajectories, bonuses)
            await self._track.step(step)
            if run.drain:
                await self._track.finish()
        update = TrainStats(version=self.actor.version)
        if self.experiment.actor.train:
            samples = [s for m in self._methods for s in await m.samples(episodes, step)]
            losses = filter(None, (method.loss(step) for method in self._methods))
            update = await self.actor.train(samples, next(losses, LossSettings(seed=step)))
            await self.actor.sync()
        for method in self._methods:
            await method.after_step(episodes, step)
        if self._manager is not None:
            if run.drain:
                await self._settle()
            self._keep_bank(step + 1, self._manager)
            if run.drain:
                await self._settle()
            actor = self.experiment.actor
            lag = self.experiment.extractor.max_lag * actor.groups * actor.group_size
            await self._manager.adrain(leave=lag)
        wall = time.perf_counter() - begin
        tokens = sum(policy.tokens_processed for policy in self._policies.values()) - tokens
        rows = [episode_row(e) for e in episodes]
        self._episodes.emit({"event": "episodes", "step": step + 1, "rows": rows})
        event = step_event(step, episodes, update) | {
            "elapsed_s": time.perf_counter() - self._begin,
            "rollout_s": rollout_s,
            "waited_s": waited,
            "step_s": wall,
            "tokens_per_s": (tokens + update.sequence_tokens) / wall,
        }
        for role, policy in self._policies.items():
            event |= {f"{role}_{name}": value for name, value in policy.busy().items()}
        event |= self._roles.spent()
        for method in self._methods:
            event |= method.event(episodes)
        if self._rollout.close_errors:
            event["close_errors"] = dict(self._rollout.close_errors)
        if self._manager is not None and self._track is not None and self._bank is not None:
            event |= {"entries": len(self._bank), "manager": self._manager.stats()}
            event |= self._track.event()
            if text := self._track.warning():
                self._metrics.emit({"event": "warning", "step": step + 1, "text": text})
        self._metrics.emit(event)
        refuse_broken(episodes)

    def _keep_bank(self, steps: int, manager: ExperienceManager) -> None:
        """Start the bank's work due after so many steps; raise what failed since."""
        for task in [task for task in self._upkeep if task.done()]:
            self._upkeep.discard(task)
            task.result()  # a failed merge ends the run with its reason, not in silence
        bank, below = self.experiment.bank, manager.settings.prune_below
        plan: list[tuple[int, Callable[[], Coroutine[Any, Any, Any]]]] = [
            (bank.merge_every, manager.amerge),
            (bank.dedupe_every, manager.adeduplicate),
            (bank.prune_every, partial(prune, manager.bank, below, steps, self._metrics.emit)),
        ]

        async def in_turn() -> None:
            for every, work in plan:
                if every and steps % every == 0:
                    await work()

        self._upkeep.add(asyncio.create_task(in_turn()))

    async def _play(self, step: int) -> tuple[list[Episode], float]:
        """Play the episodes of a step; return them, and the seconds that took."""
        settings, begin = self.experiment.actor, time.perf_counter()
        per_group = self.experiment.extractor.per_group
        with_bank = self._manager is not None and step >= settings.warmup_steps
        guided = settings.guided if with_bank else "none"
        size = settings.groups, settings.group_size
        jobs = self._tasks.jobs(step, *size, guided, distil=not per_group)
        with self.actor.foreground():
            for method in self._methods:
                if (episodes := await method.play(jobs)) is not None:
                    break
            else:
                episodes = await self._rollout.play(jobs)
        if per_group and self._manager is not None:
            for trajectory in telling([episode.trajectory for episode in episodes], per_group):
                await self._manager.asubmit(trajectory)
        return episodes, time.perf_counter() - begin

    async def _settle(self) -> None:
        """Let the background track finish its work."""
        await asyncio.gather(*self._upkeep)
        self._upkeep.clear()
        if self._manager is not None:
            await self._manager.adrain()
        if self._track is not None:
            await self._track.finish()

    async def _evaluate(self, step: int) -> None:
        """Evaluate the configured arms by visit, on equal worlds and seeds."""
        await self._settle()
        meters = Meters()
        extractor, rounds = None, None
        if self._manager is not None and self.experiment.extractor.distill:
            answering: LLM = Metered(self.extractor, meters.extractor)
            if self.experiment.repeatable:
                answering = rounds = Rounds(answering)
            extractor = self._roles.extractor(answering)
        llm, temperature = Metered(self.actor, meters.actor), self.experiment.eval.temperature
        episodes = Metrics(self._evaluated)
        evaluator = VisitEvaluator(
            self.experiment,
            lambda: self._roles.actor(temperature, llm),
            extractor,
            make_env=self._runtime.make_env,
            meters=meters,
            critic=self._reviewer(llm),
            rounds=rounds,
            record=episodes.emit,
        )
        scratch = self.output / "evaluation" / f"step-{step:06d}"
        shutil.rmtree(scratch, ignore_errors=True)
        with contextlib.closing(episodes):
            for arm in self.experiment.eval.arms:
                if arm not in NEEDS_BANK or self._bank is not None:
                    visits = await evaluator.play(arm, step, self._bank, scratch / arm)
                    self._visits.append(visits)
                    self._metrics.emit(visits.event())

    async def _checkpoint(self, step: int) -> None:
        """Save the state of now, and commit it as soon as all of it is written."""
        await self._committed()  # at most one is being written
        begin = time.perf_counter()
        draft = self._store.begin(step)
        if self._track is not None:
            await self._track.finish()
        written = [await p.begin_save(draft / role) for role, p in self._policies.items()]
        manifest: dict[str, Any] = {
            "recipe": self.experiment.recipe,
            "seed": self.experiment.seed,
            "experiment": self.experiment.model_dump(mode="json"),
            "methods": {type(m).__name__: m.state_dict() for m in self._methods},
        }
        if self._bank is not None and self._track is not None:
            self._bank.fork(draft / "bank", keep_queue=True).close()
            manifest |= {"bank_commit": self._bank.head, "track": self._track.state_dict()}
        manifest = json.loads(json.dumps(manifest))  # the run goes on and changes its parts

        async def commit() -> None:
            for one in written:
                await one()
            work = asyncio.ensure_future(
                asyncio.to_thread(self._store.commit, draft, step, manifest)
            )
            try:
                path = await asyncio.shield(work)
            finally:  # also when cancelled: the next one that begins must not meet it
                await asyncio.wait([work])
            event = {"event": "checkpoint", "step": step, "path": str(path)}
            self._metrics.emit(event | {"seconds": time.perf_counter() - begin, "begun_s": begun})

        begun = time.perf_counter() - begin
        self._committing.add(asyncio.create_task(commit()))
        if not self.experiment.cluster.background_checkpoints:
            await self._committed()

    async def _committed(self, *, wait: bool = True) -> None:
        """Raise what a checkpoint failed with; ``wait`` until it is committed."""
        for task in [task for task in self._committing if wait or task.done()]:
            self._committing.discard(task)
            await task

    async def _restore(self, folder: Path, manifest: dict[str, Any]) -> None:
        if "methods" not in manifest:
            raise CheckpointError(
                f"Expected a checkpoint of this version in {folder}, got one without methods;"
                " train again"
            )
        for role, policy in self._policies.items():
            await policy.load(folder / role)
        for method in self._methods:
            if state := manifest["methods"].get(type(method).__name__):
                method.load_state_dict(state)
        if self._track is not None:
            self._track.load_state_dict(manifest["track"])
        self._start = self._at = int(manifest["step"])
        self._metrics.rewind(self._start)
        self._episodes.rewind(self._start)
        own = self.output / "evaluation" / EPISODES_FILE
        if own.is_file():
            with contextlib.closing(Metrics(own)) as episodes:
                episodes.rewind(self._start)

    def _summary(self, steps: int, seconds: float) -> dict[str, Any]:
        last = {v.arm: v for v in self._visits if v.step == steps}
        first = {v.arm: v for v in self._visits if v.step == 0}
        both = {"on", "off"} <= last.keys()
        ratio = difference = None
        if both:
            gain = paired_difference(last["on"].later(), last["off"].later())
            difference = gain.model_dump()
        if "on" in last and "on" in first and steps and first["on"].later().any():
            ratio = float(last["on"].later().mean() / first["on"].later().mean())
        return {
            "evaluations": [v.event() for v in self._visits],
            "steps": steps,
            "seconds": seconds,
            "peak_memory_gb": peak_memory_gb(),
            "output": str(self.output),
            "ratio_later_visits": ratio,
            "difference": difference,
            "files": {
                Path(f).stem: str(self.output / f) for f in _FILES if (self.output / f).exists()
            },
        }


def build_methods(run: Run) -> list[Method]:
    """Build the main method, and then the additions that the settings ask for.

    Raises:
        ConfigError: a method is unknown.
    """
    asked = run.experiment.methods
    name = run.experiment.method or ("policy_gradient" if asked.evolver is None else "evolver")
    builtins: dict[str, str | Callable[[Run], Method]] = dict(METHODS)
    methods = [resolve("methods", name, builtins)(run)]
    if asked.cold_start is not None:
        methods.append(ColdStart(run, asked.cold_start))
    if asked.prepare is not None and asked.prepare.steps and run.manager is not None:
        methods.append(OfflineBank(run, run.manager, asked.prepare.steps))
    if asked.critic is not None:
        methods.append(Critic(run))
    if asked.entropy_bonus is not None and run.bank is not None:
        methods.append(EntropyBonus(run.actor, run.roles.actor(), run.bank, asked.entropy_bonus))
    if asked.self_distill is not None:
        methods.append(SelfDistillation(asked.self_distill, run.roles.actor))
    if asked.reflection is not None:
        methods.append(Reflection(run, asked.reflection))
    outside = (other for other, options in asked.outside().items() if options is not None)
    methods += [resolve("methods", other, builtins)(run) for other in outside if other != name]
    return methods


T = TypeVar("T")


class RolloutsAhead(Generic[T]):
    """Play steps one after the other, at most ``ahead`` beyond the last one taken.

    So a step is played by weights that lack at most ``ahead`` updates; its samples carry the
    version and the log-probabilities of the weights that drew them. 0 plays a step when it is asked
    for.
    """

    def __init__(self, play: Callable[[int], Awaitable[T]], ahead: int) -> None:
        self._play, self._ahead = play, ahead
        self._tasks: dict[int, asyncio.Task[T]] = {}
        self._turn = asyncio.Lock()

    async def take(self, step: int, until: int) -> T:
        """Return the result of ``step``; start later steps, up to ``until`` (exclusive)."""
        if step not in self._tasks:
            self._tasks[step] = asyncio.create_task(self._in_turn(step))
        try:
            played = await self._tasks[step]
        finally:
            self._tasks.pop(step, None)
        for later in range(step + 1, min(step + 1 + self._ahead, until)):
            if later not in self._tasks:
                self._tasks[later] = asyncio.create_task(self._in_turn(later))
        return played

    async def close(self) -> None:
        """Cancel the steps still being played."""
        tasks, self._tasks = self._tasks, {}
        await cancel_tasks(tasks.values())

    async def _in_turn(self, step: int) -> T:
        async with self._turn:
            return await self._play(step)


async def prune(bank: Bank, below: float, step: int, emit: Observer) -> None:
    """Remove the entries with a Laplace score below ``below``, and record how many.

    An entry that was never used has a score of 0.5 and stays. At 0.3, the value of EvolveR's
    script, so does one whose only use was in a failure.
    """
    gone = await asyncio.to_thread(partial(bank.prune, score=below, min_uses=0, author="run"))
    emit({"event": "prune", "step": step, "pruned": len(gone), "entries": len(bank)})
