"""Record the running episode of one environment: turns, uses and how it ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, cast

import numpy as np

from experiential.bank.extractor import Extractor
from experiential.bank.manager import ExperienceManager
from experiential.bank.protocol import Bank, is_bank
from experiential.bank.search.where import Filter, Where
from experiential.errors import BackendError, BankError
from experiential.types import Answer, Condition, Hit, Trajectory, Turn, Use, new_id

FAILURES = (BackendError, BankError, TimeoutError)
"""Errors of a bank or its manager at run time; an episode goes on without advice."""

How = Literal["episode_start", "turn", "search_and_ask"]


class ManagerLike(Protocol):
    """Declare the part of ``ExperienceManager`` that wrappers call, with its keyword options.

    The option ``where`` is passed only by wrappers that have a filter.
    """

    search: Callable[..., list[Hit]]
    asearch: Callable[..., Any]  # a coroutine; takes lists of queries and of episodes, too
    submit: Callable[[Trajectory], str | None]
    ask: Callable[..., Answer]
    close: Callable[[], None]


BankOrManager = Bank | ManagerLike  # A bank, or a manager that schedules its reads and writes


def connect(
    bank_or_manager: BankOrManager, extractor: Extractor | None
) -> tuple[ManagerLike, bool]:
    """Return the manager to use, and whether it was built here and must be closed here.

    Raises:
        TypeError: neither a bank nor a manager was given.
        ValueError: an extractor was given beside a manager, which has its own.
    """
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


def take_settings(
    options: Mapping[str, Any] | None, guided: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Split reset options into settings of the `Episode` and options meant for the environment.

    Raises:
        TypeError: ``options["guided"]`` is not a bool.
    """
    rest = dict(options or {})
    chosen = rest.pop("guided", bool(guided))
    if not isinstance(chosen, bool | np.bool_):
        raise TypeError(f"Expected options['guided'] to be True or False, got {chosen!r}")
    settings: dict[str, Any] = {"condition": Condition.GUIDED if chosen else Condition.FREE}
    settings["group"] = str(rest.pop("group", ""))
    settings["policy_version"] = int(rest.pop("policy_version", 0))
    return settings, None if options is None else rest


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
        self.turns: list[Turn] = []
        self.uses: list[Use] = []
        self.total = 0.0

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
        self.observation = observation
        self.total += reward

    def use(self, hits: Sequence[Hit], how: How) -> None:
        """Add the hits that reached the actor now."""
        self.uses.extend(hit.use(how, episode=self.id, turn=len(self.turns)) for hit in hits)

    def trajectory(
        self, terminated: bool, info: Mapping[str, Any], error: str | None = None
    ) -> Trajectory:
        """Return the record of this episode after its last step.

        Without ``info["success"]``, a termination with a return above 0 counts as a success.
        """
        success = info.get("success")
        return Trajectory(
            id=self.id,
            task=self.task,
            task_id=self.task_id,
            instance=self.instance,
            group=self.group,
            turns=tuple(self.turns),
            reward=self.total,
            success=bool(terminated and self.total > 0 if success is None else success),
            seed=self.seed,
            condition=self.condition,
            uses=tuple(self.uses),
            policy_version=self.policy_version,
            error=error,
        )


class EpisodeLog:
    """Follow the episodes of one environment and submit each finished one to the manager.

    Attributes:
        episode: the running episode, or None.
        last_trajectory: the last finished or abandoned episode that had a turn or an end.
        abandoned: episodes with turns that a reset or close cut off.
    """

    def __init__(
        self, manager: ManagerLike, exclude_same_instance: bool = True, where: Filter | None = None
    ) -> None:
        self.manager = manager
        self.where = Where.of(where)
        self.exclude_same_instance = exclude_same_instance
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
        return self.finish(terminated, info) if terminated or truncated else {}

    def finish(self, terminated: bool, info: Mapping[str, Any]) -> dict[str, Any]:
        """End the running episode and submit it; return the keys to add to info."""
        episode, self.episode = self.episode, None
        if episode is None:
            return {}
        self.last_trajectory = episode.trajectory(terminated, info)
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
            self.last_trajectory = episode.trajectory(False, {}, error="abandoned")
            self.abandoned += 1


def reason(error: BaseException) -> str:
    """Return one line that names a failure."""
    return f"{type(error).__name__}: {error}"
