"""Use what a run has trained: its actor with the prompts of training, its bank, its extractor."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

import gymnasium as gym

from experiential.agents.actor import ActorAgent
from experiential.bank.extractor import Extractor
from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.manager_like import NoBank
from experiential.config import Experiment, ModelSettings
from experiential.errors import CheckpointError, ConfigError
from experiential.evaluation.play_log import PlayedTurn, Retrieved
from experiential.evaluation.players import retrieved
from experiential.evaluation.visits import evaluation_options, held_out_task, manager_options
from experiential.export import Role, Trained, is_adapter, model_settings, open_trained
from experiential.llm.base import LLM
from experiential.llm.models import open_model
from experiential.recipe import load_experiment
from experiential.rollout import AwaitedEnv, Reviewer, Task, make_env, with_experience
from experiential.sync import run_sync
from experiential.training.methods.critic import ActorCritic, SuccessRates
from experiential.training.roles import CONFIG, Roles
from experiential.types import Trajectory
from experiential.wrappers.experience import DRAIN_SECONDS

Observe = Callable[[PlayedTurn, Sequence[Retrieved]], object]
"""Called with each turn of an episode, and with the entries that reached the agent before it."""


def load_agent(
    run: str | os.PathLike[str],
    *,
    write: bool = False,
    llm: LLM | None = None,
    overrides: Sequence[str] = (),
) -> TrainedAgent:
    """Open what a run has trained, or what ``experiential export`` wrote of it.

    Args:
        run: the folder of a run, or of an export. Of a run that has not ended it is the newest
            checkpoint.
        write: open the bank for writing, and let the extractor distil what is played.
        llm: acts in place of the weights in the folder, such as a server that has them; it stays
            open.
        overrides: settings to change, as ``["model.device=cpu"]``.

    Raises:
        CheckpointError: the folder is neither, or holds no weights.
        ModelNotFoundError: the base of an adapter is not on this machine.
        BankLockedError: ``write``, and another process writes the bank.
    """
    folder = Path(run)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"Expected the folder of a run or of an export, got {folder}, which has no {CONFIG}"
        )
    return TrainedAgent(folder, load_experiment(folder / CONFIG, overrides), write=write, llm=llm)


class TrainedAgent:
    """Hold the actor, the bank and the extractor of a run, as its evaluation uses them.

    The actor has the prompts, the constraint, the sampling and the history of the run's
    evaluation, at the temperature ``eval.temperature``. The extractor is loaded on first use.

    Caveat: one agent plays one episode at a time.

    Use as context manager, or call ``close``.

    Args:
        folder: of the run or export.
        experiment: its settings.
        write: see `load_agent`, and so is ``llm``.
        llm: answers for the actor.

    Attributes:
        experiment: the settings.
        step: training steps taken.
        actor: the `ActorAgent`.
        bank: the run's bank, read-only unless ``write``; None for a run without one.
    """

    def __init__(
        self, folder: Path, experiment: Experiment, *, write: bool = False, llm: LLM | None = None
    ) -> None:
        self.experiment, self._write = experiment, write
        self._envs: dict[bool, gym.Env[str, str]] = {}
        with ExitStack() as stack:
            self._trained = stack.enter_context(open_trained(folder, experiment))
            self.step = self._trained.step
            self._llm = self._open("actor", stack) if llm is None else llm
            self._roles = Roles(experiment, (self._llm, self._llm))
            self.actor: ActorAgent = self._roles.actor(experiment.eval.temperature)
            self.bank: FolderBank | None = None
            if self._trained.bank is not None:
                options = experiment.bank.model_dump(include={"namespace", "embedder"})
                bank = FolderBank(self._trained.bank, read_only=not write, **options)
                self.bank = stack.enter_context(bank)
            self._stack = stack.pop_all()

    def __enter__(self) -> TrainedAgent:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def extractor(self) -> Extractor | None:
        """Return the agent that distils; None for a run without a bank."""
        settings = self.experiment.extractor
        if not settings.enabled:
            return None
        llm = self._llm if settings.shared else self._open("extractor", self._stack)
        return self._roles.extractor(llm)

    def wrap(self, env: gym.Env[str, str], *, free: bool = False) -> gym.Env[str, str]:
        """Wrap a text environment, so that ``actor`` is shown the bank as in training.

        Args:
            env: a text environment, without another wrapper for a bank.
            free: show nothing of the bank.
        """
        actor = self.experiment.actor
        wrapped = with_experience(
            env,
            NoBank() if free else self._manager,
            feedback=self.experiment.env.feedback,
            search_and_ask=actor.search_and_ask,
            search_experience=actor.search_experience,
        )
        return wrapped if free or self._critic is None else Reviewed(wrapped, self._critic)

    def play(
        self,
        env: gym.Env[str, str] | None = None,
        *,
        seed: int | None = None,
        options: dict[str, Any] | None = None,
        free: bool = False,
        observe: Observe | None = None,
    ) -> Trajectory:
        """Play one episode.

        Args:
            env: a text environment, which is wrapped for the episode; None takes that of the run's
                evaluation.
            seed: of the environment's reset and of the actor's sampling.
            options: of the environment's reset.
            free: show nothing of the bank.
            observe: called after each turn.

        Raises:
            BackendError: the model failed.
            EnvError: the run's environment failed.
        """
        wrapped = self._own_env(free) if env is None else self.wrap(env, free=free)
        self.actor.reset(seed=seed)
        condition = {"guided": False} if free or self.bank is None else {}
        observation, info = wrapped.reset(seed=seed, options={**(options or {}), **condition})
        done, turn = False, 0
        while not done:
            shown = retrieved(info, turn)
            action = self.actor.act(observation, info)
            reply = self.actor.generations[-1].text
            played = {"observation": observation, "reply": reply, "action": action}
            observation, reward, terminated, truncated, info = wrapped.step(action)
            done, turn = terminated or truncated, turn + 1
            if observe is not None:
                asked = "search_and_ask" in info  # and did not step the environment
                observe(PlayedTurn(**played, reward=None if asked else float(reward)), shown)
        return wrapped.get_wrapper_attr("log").last_trajectory

    def held_out(self, seed: int | None = None) -> Iterator[Task]:
        """Yield the starts of the run's evaluation without end: all worlds, visit after visit.

        Args:
            seed: of the evaluation; the run's own ``eval.seed`` by default.
        """
        settings = self.experiment.eval
        with closing(self._make_env()) as env:
            listed = getattr(env.unwrapped, "worlds", None)
        worlds = settings.worlds if listed is None else min(settings.worlds, len(listed))
        seed = settings.seed if seed is None else seed
        for visit in count():
            for world in range(worlds):
                yield held_out_task(seed, world, visit, listed is not None)

    def close(self) -> None:
        """Close the environment, the bank and the models; what is to be distilled has a minute."""
        for env in self._envs.values():
            env.close()
        self._envs.clear()
        self._stack.close()

    def _open(self, role: Role, stack: ExitStack) -> LLM:
        llm = open_model(trained_model(self.experiment, self._trained, role))
        stack.callback(llm.close)
        return llm

    @cached_property
    def _manager(self) -> ExperienceManager | NoBank:
        if self.bank is None:
            return NoBank()
        settings, actor = self.experiment, self.experiment.actor
        options = manager_options(settings) if self._write else evaluation_options(settings)
        distils = self._write and settings.extractor.distill
        if not self._write:  # every episode may see the bank
            options["options"] = {**options["options"], "free_share": 0.0}
        extractor = self.extractor if distils or actor.search_and_ask else None
        manager = ExperienceManager(self.bank, extractor, share_queue=False, **options)
        self._stack.callback(manager.close, drain=DRAIN_SECONDS if distils else None)
        return manager

    @cached_property
    def _critic(self) -> Reviewer | None:
        if self.experiment.methods.critic is None:
            return None
        rates, state = SuccessRates(), self._trained.methods.get("Critic")
        if state is not None:
            rates.played.update(state["played"])
            rates.won.update(state["won"])
        return ActorCritic(self._roles.critic(self._llm), rates)

    def _own_env(self, free: bool) -> gym.Env[str, str]:
        if free not in self._envs:
            inner = AwaitedEnv(self._make_env(), self.experiment.env.reward_range)
            self._envs[free] = self.wrap(inner, free=free)
        return self._envs[free]

    def _make_env(self) -> gym.Env[str, str]:
        settings = self.experiment.env
        try:
            return make_env(settings, settings.eval)
        except ConfigError:
            raise
        except (TypeError, ValueError, gym.error.Error) as error:
            raise ConfigError(
                f"Expected env.kwargs and env.eval to be arguments of {settings.id!r}, got"
                f" {settings.kwargs | settings.eval}: {error}"
            ) from error


class Reviewed(gym.Wrapper[str, str, str, str]):
    """Let a critic judge what is retrieved before the first action, as in training."""

    def __init__(self, env: gym.Env[str, str], critic: Reviewer) -> None:
        super().__init__(env)
        self._critic = critic

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode."""
        observation, info = self.env.reset(seed=seed, options=options)
        return observation, run_sync(self._critic.review(self.env, info))


def trained_model(experiment: Experiment, trained: Trained, role: Role) -> ModelSettings:
    """Return the settings to open a role's model with: its weights in the folder, else its start.

    An adapter is played by this package's engine, which keeps it beside its base.
    """
    settings, folder = model_settings(experiment, role), trained.weights / role
    if not folder.is_dir():
        return settings
    update: dict[str, Any] = {"name": str(folder), "lora": None}
    if is_adapter(folder):
        update["generator"] = "engine"
    return settings.model_copy(update=update)
