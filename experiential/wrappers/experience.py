"""Advise the agent of any text environment from an experience bank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any, Literal, cast, get_args

import gymnasium as gym
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from experiential.agents.prompts import experience_block
from experiential.bank.extractor import Extractor
from experiential.bank.search.where import Filter, Where
from experiential.envs.text_space import UnicodeText
from experiential.types import Hit, Trajectory, Use
from experiential.wrappers.episode import (
    FAILURES,
    BankOrManager,
    Episode,
    EpisodeLog,
    How,
    connect,
    reason,
    take_settings,
)

When = Literal["episode", "turn", "both"]
Inject = Literal["observation", "system", "none"]


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


def require_text(space: spaces.Space[Any]) -> None:
    """Check that members of ``space`` are ``str``."""
    known = isinstance(space, UnicodeText | spaces.Text)
    if not known and not isinstance(deepcopy(space).sample(), str):
        raise TypeError(
            f"Expected text observations, got {space}; wrap the environment in TextObservation"
            " first"
        )


def require_choice(name: str, value: str, choices: object) -> None:
    """Check that ``value`` is one of the strings of ``choices``, a ``Literal``."""
    if value not in get_args(choices):
        raise ValueError(
            f"Expected {name} to be one of {', '.join(get_args(choices))}, got {value!r}"
        )


def present(
    observation: str, inject: str, hits: Sequence[Hit] = (), error: str | None = None
) -> tuple[str, dict[str, Any]]:
    """Return the observation to show after a retrieval, and the keys to add to info."""
    extra: dict[str, Any] = {"experience": [hit_as_dict(hit) for hit in hits]}
    if error is not None:
        extra["experience_error"] = error
    if hits and inject == "observation":
        return f"{experience_block(hits)}{observation}", extra
    if hits and inject == "system":
        extra["experience_prompt"] = experience_block(hits)
    return observation, extra


def hit_as_dict(hit: Hit) -> dict[str, Any]:
    """Return a hit as ``info["experience"]`` holds it; escape its raw text before prompting."""
    entry = hit.experience
    return {
        "id": entry.id,
        "version": entry.version,
        "text": entry.text,
        "score": hit.score,
        "rank": hit.rank,
        "propensity": hit.propensity,
        "task": entry.task,
    }


def retrieval_query(episode: Episode, how: How) -> str:
    """Return the task, with the current observation when retrieving inside the episode."""
    return episode.task if how == "episode_start" else f"{episode.task}\n{episode.observation}"


class ExperienceWrapper(TextWrapper):
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
        exclude_same_instance: hide entries that were made from the very instance being played.
        where: show only entries whose kind, task and metadata are so, ``{"tags": "alfworld"}`` (see
            ``Where``); a ``SearchAndAskWrapper`` outside does the same.

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
        exclude_same_instance: bool = True,
        where: Filter | None = None,
    ) -> None:
        super().__init__(
            env,
            bank_or_manager=bank_or_manager,
            extractor=extractor,
            k=k,
            when=when,
            inject=inject,
            guided=guided,
            exclude_same_instance=exclude_same_instance,
            where=where,
        )
        check_retrieval(k, when, inject, where)
        for layer in layers(env):  # it would submit episodes twice, and read in a FREE episode
            if isinstance(getattr(layer, "log", None), EpisodeLog):
                raise ValueError(
                    f"Expected no {type(layer).__name__} below ExperienceWrapper, got one; put it"
                    " outside, and use one bank"
                )
        self.k, self.when, self.inject, self.guided = k, when, inject, guided
        self.manager, self._owned = connect(bank_or_manager, extractor)
        self.log = EpisodeLog(self.manager, exclude_same_instance, where)
        if inject == "observation":
            self.observation_space = UnicodeText()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start an episode and retrieve for it; see the class for the options consumed here.

        Raises:
            TypeError: ``options["guided"]`` is not a bool.
        """
        settings, rest = take_settings(options, self.guided)
        self.log.abandon()
        observation, info = self.env.reset(seed=seed, options=rest)
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

    def close(self) -> None:
        """Close the environment, and the manager if this wrapper built it; the bank stays open."""
        self.log.abandon()
        super().close()
        if self._owned:
            self._owned = False
            self.manager.close()

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
            query, scope = retrieval_query(episode, how), self.log.scope()
            try:
                hits = self.manager.search(query, k=self.k, episode=episode.id, **scope)
            except FAILURES as failure:
                error = reason(failure)
            episode.use(hits, how)
        shown, extra = present(observation, self.inject, hits, error)
        return shown, {**info, **extra}


def check_retrieval(k: int, when: str, inject: str, where: Filter | None = None) -> None:
    """Check the arguments of retrieval."""
    if k < 1:
        raise ValueError(f"Expected k to be positive, got {k}")
    require_choice("when", when, When)
    require_choice("inject", inject, Inject)
    Where.of(where)


def layers(env: gym.Env[Any, Any]) -> Iterator[gym.Env[Any, Any]]:
    """Yield the environment and everything that it wraps, outermost first."""
    yield env
    while isinstance(env, gym.Wrapper):
        env = cast("gym.Wrapper[Any, Any, Any, Any]", env).env
        yield env
