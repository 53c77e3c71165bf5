"""Wrap vector environments with experience, in one batched retrieval per call."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from experiential.bank.episode import Episode, EpisodeOptions
from experiential.bank.extractor import Extractor
from experiential.bank.manager import ExperienceManager
from experiential.bank.outcome import KEYS, Score, Success, check_success
from experiential.bank.search.where import Filter, Where
from experiential.envs.text_env import UnicodeText
from experiential.sync import attempted, shared_loop
from experiential.types import Hit, How, Trajectory
from experiential.wrappers.experience import (
    DRAIN_SECONDS,
    BankOrManager,
    EpisodeLog,
    Inject,
    LiveArguments,
    TaskOf,
    When,
    check_retrieval,
    connect,
    present,
    require_text,
    take_settings,
    with_task,
)

_SETTINGS = ("guided", "group", "policy_version")
_READ = ("task", "task_id", "instance", "invalid", *KEYS)
Observations = tuple[str, ...]
Array = np.ndarray[Any, Any]


class ExperienceVectorWrapper(VectorWrapper, RecordConstructorArgs):
    """Do for a vector environment what ``ExperienceWrapper`` does for a single one.

    All episodes that start in one call, or all turns of one call, are retrieved for together, in
    one micro-batch of the manager. Episode boundaries are right in the three autoreset modes
    (``NEXT_STEP``, ``SAME_STEP``, ``DISABLED`` with ``reset_mask``). Options ``guided``, ``group``
    and ``policy_version`` take one value for all or a sequence with one per environment; they hold
    for the episodes started by that ``reset``, and an autoreset goes back to the constructor's
    ``guided``.

    Caveat: make an ``AsyncVectorEnv`` with ``shared_memory=False``; its shared memory cannot hold
    text. This wrapper stays in the main process, so the bank needs no sharing. In ``SAME_STEP``
    mode ``trajectory_id`` is in ``infos["final_info"]``.

    The scalar version is ``ExperienceWrapper``.

    >>> import tempfile
    >>> from gymnasium.vector import SyncVectorEnv
    >>> from experiential.bank.bank import ExperienceBank
    >>> from experiential.envs.vault import VaultEnv
    >>> with ExperienceBank(tempfile.mkdtemp(), embedder="hashing") as bank:
    ...     envs = ExperienceVectorWrapper(SyncVectorEnv([VaultEnv] * 2), bank)
    ...     _, infos = envs.reset(seed=1, options={"guided": [True, False]})
    ...     envs.close()
    >>> list(infos["experience"])
    [[], []]

    Args:
        env: a vector environment with text observations.
        bank_or_manager: as for ``ExperienceWrapper``, and so are ``extractor``, ``k``, ``when``,
            ``inject``, ``exclude_same_instance``, ``where``, ``success``, ``score`` and ``task``.
        guided: as there, for all or one per environment.

    Raises:
        TypeError: the environment does not give text, or the second argument is neither bank nor
            manager.
        ValueError: an argument is outside its range, or the environments send text through shared
            memory.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        bank_or_manager: BankOrManager,
        *,
        extractor: Extractor | None = None,
        k: int = 1,
        when: When = "episode",
        inject: Inject = "observation",
        guided: bool | None | Sequence[bool | None] = None,
        exclude_same_instance: bool = False,
        where: Filter | None = None,
        success: Success | None = None,
        score: Score | None = None,
        task: TaskOf | None = None,
    ) -> None:
        options: dict[str, Any] = {"k": k, "when": when, "inject": inject, "guided": guided}
        options |= {"exclude_same_instance": exclude_same_instance, "where": where}
        options |= {"success": success, "score": score, "task": task}
        options |= {"bank_or_manager": bank_or_manager, "extractor": extractor}
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, **options)
        self._saved_kwargs = LiveArguments(self._saved_kwargs)
        # Gymnasium closes a deleted wrapper, also one whose constructor raised.
        self.logs: list[EpisodeLog] = []
        self._owned = False
        cast("Any", VectorWrapper).__init__(self, env)
        self._envs: Any = env
        require_text(cast("Any", env).single_observation_space)
        if getattr(env.unwrapped, "shared_memory", False):
            # In shared memory Gymnasium's own Text space silently arrives as "000...".
            raise ValueError(
                "Expected AsyncVectorEnv(..., shared_memory=False) for text, got"
                " shared_memory=True, which loses it"
            )
        check_retrieval(k, when, inject, where)
        check_success(success, score, task)
        self.k, self.when, self.inject = k, when, inject
        self.guided = _one_each("guided", guided, env.num_envs)
        self.manager, self._owned = connect(bank_or_manager, extractor)
        each: EpisodeOptions = {"k": k, "success": success, "score": score}
        each |= {"where": Where.of(where), "exclude_same_instance": exclude_same_instance}
        self.logs = [EpisodeLog(self.manager, each, env.spec) for _ in range(env.num_envs)]
        self._task_of = task
        self._mode = AutoresetMode(env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._waiting = np.zeros(env.num_envs, dtype=np.bool_)
        if inject == "observation":
            self.single_observation_space = UnicodeText()
            self.observation_space = batch_space(self.single_observation_space, env.num_envs)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start all episodes, or those in ``options["reset_mask"]``."""
        rest, count = dict(options or {}), self.num_envs
        rows = {key: _one_each(key, rest.pop(key), count) for key in _SETTINGS if key in rest}
        settings = [
            take_settings({key: row[i] for key, row in rows.items()}, self.guided[i])[0]
            for i in range(count)
        ]
        started = [int(i) for i in np.flatnonzero(rest.get("reset_mask", [True] * count))]
        for i in started:
            self.logs[i].abandon()
        observations, infos = self._envs.reset(seed=seed, options=options and rest)
        seeds: Sequence[int | None] = [None] * count
        if isinstance(seed, int | np.integer):
            seeds = range(int(seed), int(seed) + count)
        elif seed is not None:
            seeds = seed
        for i in started:
            info = self._started(observations[i], infos, i)
            self.logs[i].begin(observations[i], info, seeds[i], settings[i])
            self._waiting[i] = False
        return self._advise(observations, infos, started, [])

    def step(self, actions: Any) -> tuple[Observations, Array, Array, Array, dict[str, Any]]:
        """Act in every environment; submit the episodes that end, advise those that start."""
        observations, rewards, terminated, truncated, infos = self._envs.step(actions)
        started: list[int] = []
        stepped: list[int] = []
        for i, log in enumerate(self.logs):
            ended = any(over := (bool(terminated[i]), bool(truncated[i])))
            if self._waiting[i]:
                started.append(i)
            elif ended and self._mode is AutoresetMode.SAME_STEP:
                final, shown = info_of(infos["final_info"], i), infos["final_obs"][i]
                extra = log.step(actions[i], float(rewards[i]), shown, *over, final)
                self._add_info(infos["final_info"], {"experience": [], **extra}, i)
                started.append(i)
            else:
                info = info_of(infos, i)
                extra = log.step(actions[i], float(rewards[i]), observations[i], *over, info)
                self._add_info(infos, extra, i)
                stepped += [] if ended else [i]
            self._waiting[i] = ended and self._mode is AutoresetMode.NEXT_STEP
        for i in started:
            settings, _ = take_settings(None, self.guided[i])
            info = self._started(observations[i], infos, i)
            self.logs[i].begin(observations[i], info, None, settings)
        shown, infos = self._advise(observations, infos, started, stepped)
        return shown, rewards, terminated, truncated, infos

    def _started(self, observation: str, infos: dict[str, Any], i: int) -> dict[str, Any]:
        """Return the first info of an episode, with the task that the caller's function names."""
        return with_task(self._task_of, observation, info_of(infos, i))

    def close(self, **kwargs: Any) -> None:
        """Close the environments, and the manager if this wrapper built it; the bank stays open."""
        for log in self.logs:
            log.abandon()
        super().close(**kwargs)
        if self._owned:
            self._owned = False
            cast("ExperienceManager", self.manager).close(drain=DRAIN_SECONDS)

    @property
    def last_trajectories(self) -> list[Trajectory | None]:
        """Return the last finished or abandoned episode of each environment."""
        return [log.last_trajectory for log in self.logs]

    @property
    def abandoned(self) -> int:
        """Return how many episodes with turns a reset or close cut off."""
        return sum(log.abandoned for log in self.logs)

    def _advise(
        self, observations: Any, infos: dict[str, Any], started: list[int], stepped: list[int]
    ) -> tuple[Any, dict[str, Any]]:
        """Retrieve once for all episodes that want advice now, and show it."""
        wanted: dict[int, How] = {}
        if self.when != "turn":
            wanted |= {i: "episode_start" for i in started}
        if self.when != "episode":
            wanted |= {i: "turn" for i in stepped}
        rows: list[tuple[int, Episode, How]] = []
        for i, how in wanted.items():
            episode = self.logs[i].episode
            if episode is not None and episode.guided:
                rows.append((i, episode, how))
        advice: dict[int, tuple[Sequence[Hit], str | None]] = {}
        found: dict[int, list[Hit]] | Exception = {}
        if rows:
            found = attempted(shared_loop().run, self._search(rows))
        for i, episode, how in rows:
            error = episode.advised(found if isinstance(found, Exception) else found[i], how)
            advice[i] = episode.hits, error
        shown = list(observations)
        for i, observation in enumerate(observations):
            shown[i], extra = present(observation, self.inject, *advice.get(i, ((), None)))
            infos = self._add_info(infos, extra, i)
        return (tuple(shown) if self.inject == "observation" else observations), infos

    async def _search(self, rows: Sequence[tuple[int, Episode, How]]) -> dict[int, list[Hit]]:
        """Search once per hidden instance; the manager's micro-batch joins concurrent calls."""
        groups: dict[str | None, list[tuple[int, Episode, How]]] = {}
        for row in rows:
            groups.setdefault(row[1].scope()["exclude_instance"], []).append(row)
        calls = [
            self.manager.asearch(
                [episode.query for _, episode, _ in group],
                k=self.k,
                **group[0][1].scope(),
            )
            for group in groups.values()
        ]
        found: dict[int, list[Hit]] = {}
        for group, answers in zip(groups.values(), await asyncio.gather(*calls), strict=True):
            found |= {i: hits for (i, _, _), hits in zip(group, answers, strict=True)}
        return found


def info_of(infos: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Return the keys of one environment's info that wrappers read."""
    return {
        key: infos[key][index]
        for key in _READ
        if key in infos and (f"_{key}" not in infos or infos[f"_{key}"][index])
    }


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, list | tuple | np.ndarray):
        return [value] * count
    values = list(cast("Sequence[Any]", value))
    if len(values) != count:
        raise ValueError(
            f"Expected {count} values of {name}, one per environment, got {len(values)}"
        )
    return values
