"""Advise the agent of any text environment from an experience bank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, cast, get_args

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from experiential.bank.episode import Episode, EpisodeOptions, text_of
from experiential.bank.extractor import Extractor
from experiential.bank.manager import ExperienceManager
from experiential.bank.manager_like import ManagerLike
from experiential.bank.outcome import Score, Success, check_success
from experiential.bank.protocol import Bank, is_bank
from experiential.bank.search.where import Filter, Where
from experiential.bank.text import experience_block
from experiential.envs.text_env import UnicodeText
from experiential.errors import EnvError
from experiential.types import Hit, How, Trajectory, Use

DRAIN_SECONDS = 60.0
"""Time that a manager built by a wrapper has for distillation when the wrapper is closed."""

When = Literal["episode", "turn", "both"]
Inject = Literal["observation", "system", "none"]
TaskOf = Callable[[str, dict[str, Any]], str]
"""Returns the task of an episode from its first observation and info."""


BankOrManager = Bank | ManagerLike  # a manager schedules the reads and writes of its bank


class LiveArguments(dict[str, Any]):
    """Hold constructor arguments that are live objects (a bank, a model): copies share them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveArguments:
        return LiveArguments(self)


class TextWrapper(RecordConstructorArgs, gym.Wrapper[str, str, str, str]):
    """Serve as base of wrappers of text environments: record arguments, require text."""

    def __init__(self, env: gym.Env[str, str], **arguments: Any) -> None:
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, **arguments)
        self._saved_kwargs = LiveArguments(self._saved_kwargs)
        cast("Any", gym.Wrapper).__init__(self, env)
        require_text(env.observation_space)


class BankWrapper(TextWrapper):
    """Serve as base of wrappers that record episodes in a log, their own or one from below."""

    log: EpisodeLog
    _owned = False  # whether the manager was built here and must be closed here

    @property
    def episode(self) -> Episode | None:
        """Return the running episode, or None."""
        return self.log.episode

    @property
    def last_trajectory(self) -> Trajectory | None:
        """Return the last finished or abandoned episode."""
        return self.log.last_trajectory

    @property
    def abandoned(self) -> int:
        """Return how many episodes with turns a reset or close cut off."""
        return self.log.abandoned

    def close(self) -> None:
        """Close the environment, and the manager if this wrapper built it; the bank stays open.

        Such a manager has up to a minute to distil what is left.
        """
        self.log.abandon()
        super().close()
        if self._owned:
            self._owned = False
            cast("ExperienceManager", self.log.manager).close(drain=DRAIN_SECONDS)


class ExperienceWrapper(BankWrapper):
    """Show retrieved experience to the agent and submit each finished episode for distillation.

    ``reset`` retrieves once by the task (``info["task"]``, else the first observation); with
    ``when="turn"`` or ``"both"`` each ``step`` retrieves by task and observation. What was found is
    in ``info["experience"]`` of that call, a list of dicts that is empty when nothing was
    retrieved. An episode that ends is queued as a ``Trajectory``, never distilled inline, and named
    in ``info["trajectory_id"]``, and the tokens and cost of an `ActorAgent` with a hosted model and
    of refined answers in ``info["usage"]``. ``reset(options={"guided": False})`` makes one episode
    ``FREE``: the bank is not read for it. Options ``guided``, ``group``,
    ``distil`` (False: no lesson is made of the episode) and ``policy_version`` are consumed, others
    reach the environment.

    Caveat: only what happens below this wrapper is recorded; put ``TimeLimit`` inside it and
    ``SearchAndAskWrapper`` outside. An episode cut off by an early ``reset`` is counted in
    ``abandoned`` and not submitted. With ``inject="none"`` the hits in info count as used, since
    that is how they reach the actor.

    A vector version exists: ``ExperienceVectorWrapper``. Inside ``AsyncVectorEnv`` every process
    uses the bank, or the manager, of the process that made it.

    >>> import tempfile
    >>> from experiential.bank.bank import ExperienceBank
    >>> from experiential.envs.vault import VaultEnv
    >>> bank = ExperienceBank(tempfile.mkdtemp(), embedder="hashing")
    >>> env = ExperienceWrapper(VaultEnv(worlds=1), bank)
    >>> _, info = env.reset(seed=1)
    >>> entry = bank.add(f"{info['task']} Its jade lever is live.")
    >>> observation, info = env.reset(seed=2)
    >>> "Its jade lever is live." in observation, info["experience"][0]["id"] == entry.id
    (True, True)
    >>> env.reset(seed=2, options={"guided": False})[1]["experience"]
    []
    >>> env.close(), bank.close()
    (None, None)

    Args:
        env: an environment whose observations and actions are ``str`` (see ``TextObservation``).
        bank_or_manager: a bank, for which a manager is built and closed with this wrapper, or a
            manager, which stays open.
        extractor: the agent that distils trajectories, when a bank is given.
        k: entries per retrieval; None takes the manager's ``retrieval.k``.
        when: retrieve at ``episode`` start, at every ``turn``, or ``both``.
        inject: prepend the experience to the ``observation``, put it in
            ``info["experience_prompt"]`` (``system``), or ``none``.
        guided: whether episodes whose reset does not say may see the bank; None lets the manager
            decide (``free_share``).
        exclude_same_instance: hide entries that were made from the very instance being played, as
            an evaluation must.
        where: show only entries whose kind, task and metadata are so, ``{"tags": "alfworld"}`` (see
            ``Where``); a ``SearchAndAskWrapper`` outside does the same.
        success: whether an episode succeeded: a function of its ``Trajectory`` that returns True,
            False or None (unknown), the score from which on it counts, a ``Judge``, whom the
            manager asks in the background, or ``better``: a score above the mean of the earlier
            episodes of this task. By default ``info["success"]``, ``["is_success"]`` or
            ``["won"]`` of the last step says so, or a return that reaches the environment's
            ``reward_threshold``; else it is unknown, and counts neither for nor against an entry.
        score: how good an episode was: a function of its ``Trajectory``; by default its return.
        task: the query and the task of entries: a function of the first observation and info. By
            default ``info["task"]``, else the first observation.

    Raises:
        TypeError: the environment does not give text, or the second argument is neither bank nor
            manager.
        ValueError: an argument is outside its range, or another bank wrapper lies below.
    """

    def __init__(
        self,
        env: gym.Env[str, str],
        bank_or_manager: BankOrManager,
        *,
        extractor: Extractor | None = None,
        k: int | None = 1,
        when: When = "episode",
        inject: Inject = "observation",
        guided: bool | None = None,
        exclude_same_instance: bool = False,
        where: Filter | None = None,
        success: Success | None = None,
        score: Score | None = None,
        task: TaskOf | None = None,
    ) -> None:
        options: dict[str, Any] = {"k": k, "when": when, "inject": inject, "guided": guided}
        options |= {"exclude_same_instance": exclude_same_instance, "where": where}
        options |= {"success": success, "score": score, "task": task}
        super().__init__(env, bank_or_manager=bank_or_manager, extractor=extractor, **options)
        check_retrieval(k, when, inject, where)
        check_success(success, score, task)
        # the innermost first, since others share its log
        for layer in reversed(list(layers(env))):
            if isinstance(layer, BankWrapper):  # it would submit twice, and read in a FREE episode
                raise ValueError(
                    f"Expected no {type(layer).__name__} below ExperienceWrapper, got one; put it"
                    " outside, and use one bank"
                )
        self.k, self.when, self.inject, self.guided = k, when, inject, guided
        self.manager, self._owned = connect(bank_or_manager, extractor)
        each: EpisodeOptions = {"k": k, "success": success, "score": score}
        each |= {"where": Where.of(where), "exclude_same_instance": exclude_same_instance}
        self.log = EpisodeLog(self.manager, each, env.spec)
        self._task_of = task
        if inject == "observation":
            self.observation_space = UnicodeText()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode and retrieve for it; see the class for the options consumed here."""
        settings, rest = take_settings(options, self.guided)
        self.log.abandon()
        observation, info = self.env.reset(seed=seed, options=rest)
        info = with_task(self._task_of, observation, info)
        self.log.begin(observation, info, seed, settings)
        return self._advise(observation, info, "episode_start")

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act; the last step of an episode also submits it."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        reward = float(reward)
        extra = self.log.step(action, reward, observation, terminated, truncated, info)
        if terminated or truncated:
            none: dict[str, Any] = {"experience": []}
            info = {**info, **none, **extra}
        else:
            observation, info = self._advise(observation, info, "turn")
        return observation, reward, terminated, truncated, info

    def add_use(self, use: Use) -> None:
        """Credit a retrieval made outside this wrapper to the running episode.

        Raises:
            RuntimeError: no guided episode is running.
        """
        if self.episode is None or not self.episode.guided:
            raise RuntimeError(
                "Expected a running guided episode, got none; a FREE episode has no uses"
            )
        self.episode.uses.append(use)

    def _advise(
        self, observation: str, info: dict[str, Any], how: How
    ) -> tuple[str, dict[str, Any]]:
        """Retrieve where it is wanted now; return observation and info with what was found."""
        episode, hits, error = self.log.episode, list[Hit](), None
        wanted = self.when != ("turn" if how == "episode_start" else "episode")
        if wanted and episode is not None and episode.guided:
            error = episode.advise(how)
            hits = episode.hits
        shown, extra = present(observation, self.inject, hits, error)
        return shown, {**info, **extra}


class EpisodeLog:
    """Run the episodes of one environment, one after the other, and submit each that finishes.

    Args:
        manager: searched and submitted to.
        options: of every `Episode`.
        spec: of the environment; its ``reward_threshold`` may say what a success is.

    Attributes:
        episode: the running episode, or None.
        last_trajectory: the last finished or abandoned episode that had a turn or an end.
        abandoned: episodes with turns that a reset or close cut off.
        needs_outcome: refuse an episode of unknown outcome with an EnvError, unsubmitted.
    """

    needs_outcome = False

    def __init__(
        self, manager: ManagerLike, options: EpisodeOptions | None = None, spec: Any = None
    ) -> None:
        self.manager = manager
        self._options: EpisodeOptions = options or {}
        self._threshold: float | None = getattr(spec, "reward_threshold", None)
        self.episode: Episode | None = None
        self.last_trajectory: Trajectory | None = None
        self.abandoned = 0

    def begin(
        self,
        observation: str,
        info: Mapping[str, Any],
        seed: int | None,
        settings: EpisodeOptions | None = None,
    ) -> Episode:
        """Start an episode from what ``reset`` gave and `take_settings` took."""
        options: EpisodeOptions = {**self._options, **(settings or {}), "seed": seed}
        options["task_id"] = str(info.get("task_id") or "")
        options["instance"] = str(info.get("instance") or "")
        self.episode = Episode(
            self.manager,
            str(info.get("task") or observation),
            reward_threshold=self._threshold,
            # training and evaluation compare success rates, and keep the prompts of the papers
            return_is_score=not self.needs_outcome,
            **options,
        )
        self.episode.observe(observation)
        return self.episode

    def step(
        self,
        action: Any,
        reward: float,
        observation: str,
        terminated: bool,
        truncated: bool,
        info: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Record a step of the running episode, if any; submit the episode if it was the last.

        Returns:
            the keys to add to info.
        """
        if self.episode is not None:
            self.episode.step(action, reward, observation, info)
        return self.finish(info) if terminated or truncated else {}

    def finish(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """End the running episode and submit it; return the keys to add to info."""
        episode, self.episode = self.episode, None
        if episode is None:
            return {}
        try:
            ended = episode.settle(info)
        except Exception:
            self.last_trajectory = episode.trajectory
            if not self.needs_outcome:  # a rollout records its failures itself
                episode.submit()
            raise
        if ended.success is None and self.needs_outcome:
            raise EnvError(
                "Expected the environment to say at the end whether the episode was a success, got"
                " no info['success']; set it, or env.text.success (TextObservation(success=return))"
            )
        self.last_trajectory = ended
        failure = episode.submit()
        extra: dict[str, Any] = {} if failure is None else {"experience_error": failure}
        if ended.usage:
            extra["usage"] = {role: one.model_dump() for role, one in ended.usage.items()}
        return {"trajectory_id": episode.id, **extra}

    def abandon(self) -> None:
        """Cut off the running episode: keep it as ``last_trajectory`` and count it, unsubmitted."""
        episode, self.episode = self.episode, None
        if episode is not None and episode.turns:
            self.last_trajectory = episode.end(error="abandoned")
            self.abandoned += 1


def with_task(task: TaskOf | None, observation: str, info: dict[str, Any]) -> dict[str, Any]:
    """Return the first info of an episode with the task that the caller's function gives it."""
    if task is None:
        return info
    return {**info, "task": text_of(task(observation, info), "task(observation, info)")}


def take_settings(
    options: Mapping[str, Any] | None, guided: bool | None
) -> tuple[EpisodeOptions, dict[str, Any] | None]:
    """Split reset options into those of the `Episode` and those meant for the environment."""
    rest = dict(options or {})
    chosen: object = rest.pop("guided", guided)
    if not isinstance(chosen, bool | np.bool_ | None):
        raise TypeError(f"Expected options['guided'] to be True, False or None, got {chosen!r}")
    settings: EpisodeOptions = {"guided": None if chosen is None else bool(cast("Any", chosen))}
    settings["group"] = str(rest.pop("group", ""))
    settings["distil"] = bool(rest.pop("distil", True))
    settings["policy_version"] = int(rest.pop("policy_version", 0))
    return settings, None if options is None else rest


def present(
    observation: str, inject: str, hits: Sequence[Hit] = (), error: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the observation to show after a retrieval, and the keys to add to info.

    The text of a hit in ``info["experience"]`` is raw; escape it before prompting.
    """
    found: list[dict[str, Any]] = []
    for hit in hits:
        entry = hit.experience
        shown = {"id": entry.id, "version": entry.version, "text": entry.text}
        drawn = {"score": hit.score, "rank": hit.rank, "propensity": hit.propensity}
        found.append(shown | drawn | {"task": entry.task})
    extra: dict[str, Any] = {"experience": found}
    if error is not None:
        extra["experience_error"] = error
    if hits and inject == "observation":
        return f"{experience_block(hits)}{observation}", extra
    if hits and inject == "system":
        extra["experience_prompt"] = experience_block(hits)
    return observation, extra


def connect(
    bank_or_manager: BankOrManager, extractor: Extractor | None
) -> tuple[ManagerLike, bool]:
    """Return the manager to use, and whether it was built here and must be closed here."""
    if is_bank(bank_or_manager):
        return ExperienceManager(bank_or_manager, extractor), True
    if not (hasattr(bank_or_manager, "submit") and hasattr(bank_or_manager, "ask")):
        raise TypeError(
            f"Expected an ExperienceBank or an ExperienceManager, got {bank_or_manager!r}; open a"
            " folder with ExperienceBank(path)"
        )
    if extractor is not None:
        raise ValueError(
            "Expected no extractor beside a manager, got one; give it to"
            " ExperienceManager(bank, extractor)"
        )
    return cast("ManagerLike", bank_or_manager), False


def layers(env: gym.Env[Any, Any]) -> Iterator[gym.Env[Any, Any]]:
    """Yield the environment and everything that it wraps, outermost first."""
    yield env
    while isinstance(env, gym.Wrapper):
        env = cast("gym.Wrapper[Any, Any, Any, Any]", env).env
        yield env


def check_retrieval(k: int | None, when: str, inject: str, where: Filter | None = None) -> None:
    """Check the arguments of retrieval."""
    if k is not None and k < 1:
        raise ValueError(f"Expected k to be positive, got {k}")
    require_choice("when", when, When)
    require_choice("inject", inject, Inject)
    Where.of(where)


def require_choice(name: str, value: str, choices: object) -> None:
    """Check that ``value`` is one of the strings of ``choices``, a ``Literal``."""
    if value not in get_args(choices):
        raise ValueError(
            f"Expected {name} to be one of {', '.join(get_args(choices))}, got {value!r}"
        )


def require_text(space: spaces.Space[Any]) -> None:
    """Check that members of ``space`` are ``str``."""
    known = isinstance(space, UnicodeText | spaces.Text)
    if not known and not isinstance(deepcopy(space).sample(), str):
        raise TypeError(
            f"Expected text observations, got {space}; wrap the environment in TextObservation"
            " first"
        )
