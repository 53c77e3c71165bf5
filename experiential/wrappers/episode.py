"""What one environment slot remembers of its running episode: turns, uses and how it ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.search.where import Filter, Where
from experiential.errors import BackendError, BankError
from experiential.types import Answer, Condition, Hit, Trajectory, Turn, Use, new_id

FAILURES = (BackendError, BankError, TimeoutError)
"""What a bank or its manager may raise at run time; an episode goes on without it."""


How = Literal["episode_start", "turn"]


class ManagerLike(Protocol):
    """The part of ``ExperienceManager`` that wrappers call; anything that has it will do."""

    def search(
        self,
        query: str,
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        episode: str = "",
        where: Any = None,
    ) -> list[Hit]:
        """Hits of one query; ``where`` is given by wrappers that have one."""
        ...

    async def asearch(
        self,
        query: Any,
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        episode: Any = "",
        where: Any = None,
    ) -> Any:
        """Hits of one query, or a list of hits for each of a list of queries; ``episode`` is then a list, too."""
        ...

    def submit(self, trajectory: Trajectory) -> str | None:
        """Queue a finished trajectory durably."""
        ...

    def ask(
        self,
        query: str,
        *,
        k: int = 1,
        episode: str = "",
        turn: int = 0,
        exclude_instance: str | None = None,
        where: Any = None,
    ) -> Answer:
        """Search and refine one entry."""
        ...

    def close(self) -> None:
        """Stop the manager's workers."""
        ...


def connect(bank_or_manager: Any, extractor: Any | None) -> tuple[ManagerLike, bool]:
    """The manager to use, and whether it was built here (and so is to be closed here).

    Raises:
        TypeError: neither a bank nor a manager was given.
        ValueError: an extractor was given beside a manager, which has its own.
    """
    is_bank = isinstance(bank_or_manager, ExperienceBank)
    if not is_bank and hasattr(bank_or_manager, "submit") and hasattr(bank_or_manager, "ask"):
        if extractor is not None:
            raise ValueError(
                "Expected no extractor beside a manager, got one; give it to"
                " ExperienceManager(bank, extractor)"
            )
        return cast("ManagerLike", bank_or_manager), False
    if not is_bank:
        raise TypeError(
            f"Expected an ExperienceBank or an ExperienceManager, got {bank_or_manager!r}; open a"
            " folder with ExperienceBank(path)"
        )
    return cast("ManagerLike", ExperienceManager(bank_or_manager, extractor)), True


@dataclass(frozen=True)
class EpisodeSettings:
    """What the options of ``reset`` say about the episode that they start."""

    condition: Condition = Condition.GUIDED
    group: str = ""
    policy_version: int = 0


def take_settings(
    options: Mapping[str, Any] | None, guided: bool
) -> tuple[EpisodeSettings, dict[str, Any] | None]:
    """Split reset options into the episode's settings and the options meant for the environment.

    Raises:
        TypeError: ``options["guided"]`` is not a bool.
    """
    if options is None:
        return EpisodeSettings(Condition.GUIDED if guided else Condition.FREE), None
    rest = dict(options)
    chosen = rest.pop("guided", guided)
    if not isinstance(chosen, bool | np.bool_):
        raise TypeError(f"Expected options['guided'] to be True or False, got {chosen!r}")
    condition = Condition.GUIDED if chosen else Condition.FREE
    return (
        EpisodeSettings(condition, str(rest.pop("group", "")), int(rest.pop("policy_version", 0))),
        rest,
    )


class Episode:
    """A running episode: plain lists while it runs, a ``Trajectory`` when it ends."""

    __slots__ = (
        "id",
        "instance",
        "observation",
        "seed",
        "settings",
        "task",
        "task_id",
        "total",
        "turns",
        "uses",
    )

    def __init__(
        self, observation: str, info: Mapping[str, Any], seed: int | None, settings: EpisodeSettings
    ) -> None:
        self.id = new_id()
        self.seed, self.settings = seed, settings
        self.task = str(info.get("task") or observation)
        self.task_id = str(info.get("task_id") or "")
        named = f"{self.task_id or self.task}#{seed}" if seed is not None else ""
        self.instance = str(info.get("instance") or named)
        self.observation = observation
        self.turns: list[tuple[str, str, float, str, bool, str]] = []
        self.uses: list[Use] = []
        self.total = 0.0

    @property
    def guided(self) -> bool:
        """Whether this episode may see the bank."""
        return self.settings.condition is Condition.GUIDED

    def record(
        self, action: str, reward: float, observation: str, invalid: bool, withheld: str = ""
    ) -> None:
        """Add one turn; ``withheld`` is what the environment said of it and the agent was not shown."""
        self.turns.append((self.observation, action, reward, observation, invalid, withheld))
        self.observation = observation
        self.total += reward

    def use(self, hits: Sequence[Hit], how: How) -> None:
        """Note that these hits reached the actor now."""
        self.uses.extend(hit.use(how, episode=self.id, turn=len(self.turns)) for hit in hits)

    def trajectory(self, success: bool, error: str | None = None) -> Trajectory:
        """The record of this episode."""
        return Trajectory(
            id=self.id,
            task=self.task,
            task_id=self.task_id,
            instance=self.instance,
            group=self.settings.group,
            turns=tuple(
                Turn(observation=o, action=a, reward=r, feedback=f, invalid=i, withheld=w)
                for o, a, r, f, i, w in self.turns
            ),
            reward=self.total,
            success=success,
            seed=self.seed,
            condition=self.settings.condition,
            uses=tuple(self.uses),
            policy_version=self.settings.policy_version,
            error=error,
        )

    def ended(self, terminated: bool, info: Mapping[str, Any]) -> Trajectory:
        """The record of this episode, whose last step gave this; without ``info["success"]`` a termination with a return above 0 is one."""
        return self.trajectory(
            bool(info["success"])
            if info.get("success") is not None
            else bool(terminated) and self.total > 0
        )


class EpisodeLog:
    """Follows the episodes of one environment slot and hands each finished one to the manager.

    Attributes:
        episode: the running episode, or None.
        last_trajectory: the last finished or abandoned episode that had a turn or an end.
        abandoned: episodes with turns that a reset or close cut off.
    """

    def __init__(
        self,
        manager: ManagerLike,
        *,
        exclude_same_instance: bool = True,
        where: Filter | None = None,
    ) -> None:
        self.manager = manager
        self.where = Where.of(where)
        self.exclude_same_instance = exclude_same_instance
        self.episode: Episode | None = None
        self.last_trajectory: Trajectory | None = None
        self.abandoned = 0

    def begin(
        self, observation: str, info: Mapping[str, Any], seed: int | None, settings: EpisodeSettings
    ) -> Episode:
        """Start an episode from what reset returned."""
        self.episode = Episode(observation, info, seed, settings)
        return self.episode

    def excluded(self) -> str | None:
        """The instance whose entries the running episode must not see."""
        return (
            (self.episode.instance or None) if self.episode and self.exclude_same_instance else None
        )

    def only(self) -> dict[str, Any]:
        """The filter of every search for these episodes, as an argument; nothing where there is none."""
        return {} if self.where is None else {"where": self.where}

    def record(self, action: Any, reward: float, observation: str, info: Mapping[str, Any]) -> None:
        """Add a step to the running episode, if any."""
        if self.episode is not None:
            withheld = str(info.get("withheld") or "")
            self.episode.record(
                str(action), reward, observation, bool(info.get("invalid", False)), withheld
            )

    def add_use(self, use: Use) -> None:
        """Credit a retrieval made elsewhere to the running episode.

        Raises:
            RuntimeError: no guided episode is running.
        """
        if self.episode is None or not self.episode.guided:
            raise RuntimeError(
                "Expected a running guided episode, got none; a FREE episode has no uses"
            )
        self.episode.uses.append(use)

    def finish(self, terminated: bool, info: Mapping[str, Any]) -> dict[str, Any]:
        """End the running episode and submit it; gives what to add to info."""
        episode, self.episode = self.episode, None
        if episode is None:
            return {}
        self.last_trajectory = episode.ended(terminated, info)
        extra: dict[str, Any] = {"trajectory_id": episode.id}
        try:
            self.manager.submit(self.last_trajectory)
        except FAILURES as error:
            extra["experience_error"] = reason(error)
        return extra

    def abandon(self) -> None:
        """Cut off the running episode: kept as ``last_trajectory``, counted, and not submitted."""
        episode, self.episode = self.episode, None
        if episode is not None and episode.turns:
            self.last_trajectory = episode.trajectory(False, error="abandoned")
            self.abandoned += 1


def reason(error: BaseException) -> str:
    """One line that names a failure."""
    return f"{type(error).__name__}: {error}"
