"""Advise the agent of any text environment from an experience bank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, Protocol, cast, get_args

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from experiential.agents.prompts import experience_block
from experiential.bank.extractor import Extractor
from experiential.bank.manager import ExperienceManager
from experiential.bank.protocol import Bank, is_bank
from experiential.bank.search.where import Filter, Where
from experiential.envs.text_env import UnicodeText
from experiential.errors import BackendError, BankError, EnvError
from experiential.types import Answer, Condition, Hit, How, Trajectory, Turn, Use, new_id
from experiential.wrappers.outcome import Success, check_success, known_success

DRAIN_SECONDS = 60.0
"""Time that a manager built by a wrapper has for distillation when the wrapper is closed."""
FAILURES = (BackendError, BankError, TimeoutError)
"""Errors of a bank or its manager at run time; an episode goes on without advice."""

When = Literal["episode", "turn", "both"]
Inject = Literal["observation", "system", "none"]
TaskOf = Callable[[str, dict[str, Any]], str]
"""Returns the task of an episode from its first observation and info."""


class ManagerLike(Protocol):
    """Declare the part of ``ExperienceManager`` that wrappers call, with its keyword options.

    The option ``where`` is passed only by wrappers that have a filter.
    """

    search: Callable[..., list[Hit]]
    asearch: Callable[..., Any]  # a coroutine; takes lists of queries and of episodes, too
    submit: Callable[[Trajectory], str | None]
    ask: Callable[..., Answer]
    close: Callable[..., None]


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
    in ``info["trajectory_id"]``. ``reset(options={"guided": False})`` makes one episode ``FREE``:
    the bank is not read for it. Options ``guided``, ``group`` and ``policy_version`` are consumed,
    others reach the environment.

    Caveat: only what happens below this wrapper is recorded; put ``TimeLimit`` inside it and
    ``SearchAndAskWrapper`` outside. An episode cut off by an early ``reset`` is counted in
    ``abandoned`` and not submitted. With ``inject="none"`` the hits in info count as used, since
    that is how they reach the actor.

    A vector version exists: ``ExperienceVectorWrapper``. Inside ``AsyncVectorEnv`` give each
    process its own read-only bank.

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
        k: entries per retrieval.
        when: retrieve at ``episode`` start, at every ``turn``, or ``both``.
        inject: prepend the experience to the ``observation``, put it in
            ``info["experience_prompt"]`` (``system``), or ``none``.
        guided: the condition of episodes whose reset does not say.
        exclude_same_instance: hide entries that were made from the very instance being played, as
            an evaluation must.
        where: show only entries whose kind, task and metadata are so, ``{"tags": "alfworld"}`` (see
            ``Where``); a ``SearchAndAskWrapper`` outside does the same.
        success: whether an episode succeeded: a function of its ``Trajectory`` that returns True,
            False or None (unknown), or the return from which on it counts. By default
            ``info["success"]``, ``["is_success"]`` or ``["won"]`` of the last step says so, or a
            return that reaches the environment's ``reward_threshold``; else it is unknown, and
            counts neither for nor against an entry.
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
        k: int = 1,
        when: When = "episode",
        inject: Inject = "observation",
        guided: bool = True,
        exclude_same_instance: bool = False,
        where: Filter | None = None,
        success: Success | None = None,
        task: TaskOf | None = None,
    ) -> None:
        options: dict[str, Any] = {"k": k, "when": when, "inject": inject, "guided": guided}
        options |= {"exclude_same_instance": exclude_same_instance, "where": where}
        options |= {"success": success, "task": task}
        super().__init__(env, bank_or_manager=bank_or_manager, extractor=extractor, **options)
        check_retrieval(k, when, inject, where)
        check_success(success)
        # the innermost first, since others share its log
        for layer in reversed(list(layers(env))):
            if isinstance(layer, BankWrapper):  # it would submit twice, and read in a FREE episode
                raise ValueError(
                    f"Expected no {type(layer).__name__} below ExperienceWrapper, got one; put it"
                    " outside, and use one bank"
                )
        self.k, self.when, self.inject, self.guided = k, when, inject, guided
        self.manager, self._owned = connect(bank_or_manager, extractor)
        self.log = EpisodeLog(self.manager, exclude_same_instance, where, success, env.spec)
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
        if self._task_of is not None:
            info = {**info, "task": str(self._task_of(observation, info))}
        self.log.episode = Episode(observation, info, seed, **settings)
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
            scope = self.log.scope()
            try:
                hits = self.manager.search(episode.query, k=self.k, episode=episode.id, **scope)
            except FAILURES as failure:
                error = reason(failure)
            episode.use(hits, how)
        shown, extra = present(observation, self.inject, hits, error)
        return shown, {**info, **extra}


class EpisodeLog:
    """Follow the episodes of one environment and submit each finished one to the manager.

    Attributes:
        episode: the running episode, or None.
        last_trajectory: the last finished or abandoned episode that had a turn or an end.
        abandoned: episodes with turns that a reset or close cut off.
        needs_outcome: refuse an episode of unknown outcome with an EnvError, unsubmitted.
    """

    needs_outcome = False

    def __init__(
        self,
        manager: ManagerLike,
        exclude_same_instance: bool = False,
        where: Filter | None = None,
        success: Success | None = None,
        spec: Any = None,
    ) -> None:
        self.manager = manager
        self.where = Where.of(where)
        self.exclude_same_instance = exclude_same_instance
        self._success = success
        self._threshold: float | None = getattr(spec, "reward_threshold", None)
        self.episode: Episode | None = None
        self.last_trajectory: Trajectory | None = None
        self.abandoned = 0

    def scope(self) -> dict[str, Any]:
        """Return the arguments of a search that hide entries from the running episode."""
        instance = self.episode.instance if self.episode and self.exclude_same_instance else ""
        filtered = {} if self.where is None else {"where": self.where}
        return {"exclude_instance": instance or None, **filtered}

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
            self.episode.record(action, reward, observation, info)
        return self.finish(info) if terminated or truncated else {}

    def finish(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """End the running episode and submit it; return the keys to add to info."""
        episode, self.episode = self.episode, None
        if episode is None:
            return {}
        ended = episode.trajectory()
        won = known_success(ended, info, self._success, self._threshold)
        if won is None and self.needs_outcome:
            raise EnvError(
                "Expected the environment to say at the end whether the episode was a success, got"
                " no info['success']; set it, or wrap it in TextObservation(success=return)"
            )
        self.last_trajectory = ended.model_copy(update={"success": won})
        extra: dict[str, Any] = {"trajectory_id": episode.id}
        try:
            self.manager.submit(self.last_trajectory)
        except FAILURES as error:
            extra["experience_error"] = reason(error)
        return extra

    def abandon(self) -> None:
        """Cut off the running episode: keep it as ``last_trajectory`` and count it, unsubmitted."""
        episode, self.episode = self.episode, None
        if episode is not None and episode.turns:
            self.last_trajectory = episode.trajectory(error="abandoned")
            self.abandoned += 1


class Episode:
    """Hold a running episode in plain lists; make a ``Trajectory`` of it when it ends."""

    def __init__(
        self,
        observation: str,
        info: Mapping[str, Any],
        seed: int | None,
        *,
        condition: Condition = Condition.GUIDED,
        group: str = "",
        policy_version: int = 0,
    ) -> None:
        self.id = new_id()
        self.seed, self.group, self.policy_version = seed, group, policy_version
        self.condition, self.guided = condition, condition is Condition.GUIDED
        self.task = str(info.get("task") or observation)
        self.task_id = str(info.get("task_id") or "")
        named = f"{self.task_id or self.task}#{seed}" if seed is not None else ""
        self.instance = str(info.get("instance") or named)
        self.observation = observation
        self.query = self.task  # of a retrieval now: the task, then with the observation
        self.turns: list[Turn] = []
        self.uses: list[Use] = []
        self.reward = 0.0

    def record(self, action: Any, reward: float, observation: str, info: Mapping[str, Any]) -> None:
        """Add one turn; ``info["withheld"]`` is feedback that the agent was not shown."""
        turn = Turn(
            observation=self.observation,
            action=str(action),
            reward=reward,
            feedback=observation,
            invalid=bool(info.get("invalid", False)),
            withheld=str(info.get("withheld") or ""),
        )
        self.turns.append(turn)
        self.observation, self.query = observation, f"{self.task}\n{observation}"
        self.reward += reward

    def use(self, hits: Sequence[Hit], how: How) -> None:
        """Add the hits that reached the actor now."""
        self.uses.extend(hit.use(how, episode=self.id, turn=len(self.turns)) for hit in hits)

    def trajectory(self, error: str | None = None) -> Trajectory:
        """Return the record of this episode so far, its outcome left open."""
        same = {name: vars(self)[name] for name in Trajectory.model_fields if name in vars(self)}
        return Trajectory(**same, error=error)


def take_settings(
    options: Mapping[str, Any] | None, guided: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Split reset options into settings of the `Episode` and options meant for the environment."""
    rest = dict(options or {})
    chosen = rest.pop("guided", bool(guided))
    if not isinstance(chosen, bool | np.bool_):
        raise TypeError(f"Expected options['guided'] to be True or False, got {chosen!r}")
    settings: dict[str, Any] = {"condition": Condition.GUIDED if chosen else Condition.FREE}
    settings["group"] = str(rest.pop("group", ""))
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


def reason(error: BaseException) -> str:
    """Return one line that names a failure."""
    return f"{type(error).__name__}: {error}"


def layers(env: gym.Env[Any, Any]) -> Iterator[gym.Env[Any, Any]]:
    """Yield the environment and everything that it wraps, outermost first."""
    yield env
    while isinstance(env, gym.Wrapper):
        env = cast("gym.Wrapper[Any, Any, Any, Any]", env).env
        yield env


def check_retrieval(k: int, when: str, inject: str, where: Filter | None = None) -> None:
    """Check the arguments of retrieval."""
    if k < 1:
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
