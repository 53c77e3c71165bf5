"""A second attempt at a task that was not solved, with a reflection on the first."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Literal, Protocol

import gymnasium as gym
import numpy as np

from experiential.agents.reflector import Reflection, ReflectionMemory, passes
from experiential.bank.episode import FAILURES, reason
from experiential.bank.manager_like import NoBank
from experiential.bank.outcome import OutcomeJudge, Success, check_success, judged
from experiential.envs.text_env import UnicodeText
from experiential.errors import EnvError
from experiential.types import Trajectory
from experiential.wrappers.experience import EpisodeLog, TextWrapper, require_choice

Inject = Literal["observation", "system"]
_INSTANCE = ("instance", "task_id", "task")


class ReflectorLike(Protocol):
    """Declare what the wrapper asks of a `Reflector` or a `Retry`."""

    def reflect(self, trajectory: Trajectory, memory: Sequence[str] = ()) -> Reflection:
        """Return guidance for another attempt."""
        ...


class ReflectionWrapper(TextWrapper):
    r"""Give the agent a second attempt at an instance if its first return is below a threshold.

    After such a first attempt the reflector is asked, the environment is reset with the same seed
    and options, and the episode goes on: ``step`` returns the first observation of the second
    attempt behind the reflection as a fenced block. A first attempt that reaches the threshold ends
    the episode (algorithm 2 of Experiential RL, without training).

    ``info["attempt"]`` is 1 or 2. From the step that begins the second attempt on,
    ``info["first_return"]`` and ``info["reflection"]`` (None when there is none, then
    ``info["reflection_error"]`` says why and the attempt is played without) are there; that step
    also has ``final_observation`` and ``final_info``, what the end of the first attempt looked
    like. An agent with a memory of the conversation is to be reset when ``attempt`` becomes 2: the
    paper's second attempt sees the reflection and not the first attempt.

    Rewards pass unchanged, so that the return of a whole episode is that of both attempts together.
    ``terminated`` and ``truncated`` of the first attempt are not shown when a second one follows. A
    ``TimeLimit`` inside gives each attempt all its steps; one outside counts the steps of both, and
    may cut the second one off. An ``ExperienceWrapper`` inside takes each attempt for an episode:
    both read the bank and both are submitted. One outside sees a single episode of both attempts,
    whose success is the last one's, and the reflection in its turns; put it inside.

    Caveat: the environment must come back to the same instance for the same seed and options; one
    whose ``info`` names another instance is refused. The reflector is asked inside ``step``, which
    waits for it.

    No vector version: attempts end at different steps. Use this wrapper on each environment inside
    a vector environment.

    >>> from experiential.agents.reflector import Reflector
    >>> from experiential.envs.vault import VaultEnv
    >>> from experiential.llm.scripted import ScriptedLLM
    >>> reflector = Reflector(ScriptedLLM(["<reflection>Read the note.</reflection>"]))
    >>> env = ReflectionWrapper(VaultEnv(tries=1), reflector)
    >>> _, info = env.reset(seed=1)
    >>> observation, reward, terminated, _, info = env.step("pull nothing")
    >>> reward, terminated, info["attempt"], info["reflection"]
    (0.0, False, 2, 'Read the note.')
    >>> "<experience>\n1. Read the note.\n</experience>" in observation
    True
    >>> env.step(env.unwrapped.oracle_action())[1:3]
    (1.0, True)

    Args:
        env: a text environment that can be reset to the same instance.
        reflector: a `Reflector`, or a `Retry`, which shows the record of the first attempt instead.
        threshold: tau: a first attempt whose return is lower is reflected on; a reflection whose
            second attempt reaches it is kept.
        success: says instead of the threshold whether an attempt passed: a function of its
            ``Trajectory`` that returns True, False or None (unknown, which is not passed), or a
            ``Judge``, which ``step`` waits for.
        memory: where reflections that passed are kept and found again, across episodes; None keeps
            none.
        inject: put the block before the ``observation``, or in ``info["experience_prompt"]``
            (``system``), as ``ExperienceWrapper`` does; behind the experience that is there
            already.

    Raises:
        TypeError: the environment does not give text, or ``reflector`` has no ``reflect``.
        ValueError: ``threshold`` is not finite, ``success`` is ``better``, which a bank says, or
            ``inject`` is not one of these.
    """

    def __init__(
        self,
        env: gym.Env[str, str],
        reflector: ReflectorLike,
        *,
        threshold: float = 1.0,
        success: Success | None = None,
        memory: ReflectionMemory | None = None,
        inject: Inject = "observation",
    ) -> None:
        super().__init__(
            env,
            reflector=reflector,
            threshold=threshold,
            success=success,
            memory=memory,
            inject=inject,
        )
        if not callable(getattr(reflector, "reflect", None)):
            raise TypeError(f"Expected a Reflector or a Retry, got {reflector!r}")
        if not np.isfinite(threshold):
            raise ValueError(f"Expected threshold to be a finite number, got {threshold}")
        require_choice("inject", inject, Inject)
        check_success(success)
        if success == "better":
            raise ValueError(
                "Expected success to be a return, a function or a Judge, got 'better', which a bank"
                " says; give it to the wrapper that records the episode"
            )
        self.reflector, self.threshold, self._success = reflector, threshold, success
        self.memory, self.inject = memory, inject
        self._random = np.random.default_rng()
        self._again: dict[str, Any] = {}
        self._names: tuple[Any, ...] = ()
        self._log = EpisodeLog(NoBank(), {"guided": True, "success": success})
        self._attempt: dict[str, Any] = {}  # the keys that this wrapper adds to info
        self._reflection: Reflection | None = None
        self.observation_space = UnicodeText()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Start the first attempt; without a seed, draw one, so that it can be started again."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        drawn = int(self._random.integers(2**31)) if seed is None else seed
        self._again = {"seed": drawn, "options": options}
        self._reflection = None
        observation, info = self.env.reset(**deepcopy(self._again))
        self._names = _instance(observation, info)
        self._log.begin(observation, info, drawn)
        self._attempt = {"attempt": 1}
        return observation, {**info, **self._attempt}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Act; the last step of a first attempt below the threshold begins the second one.

        Raises:
            EnvError: the environment came back with another instance.
        """
        observation, reward, terminated, truncated, info = self.env.step(action)
        reward, is_running = float(reward), self._log.episode is not None
        self._log.step(action, reward, observation, terminated, truncated, info)
        attempt = self._log.last_trajectory
        if is_running and (terminated or truncated) and attempt is not None:
            if isinstance(self._success, OutcomeJudge):
                attempt = judged(attempt, self._success)
            passed = passes(attempt.reward, self.threshold)
            if self._success is not None:
                passed = attempt.success is True
            if self._attempt["attempt"] == 1 and not passed:
                shown, fresh = self._second(attempt)
                fresh |= {"final_observation": observation, "final_info": info}
                return shown, reward, False, False, fresh
            text = self._reflection.text if self._reflection is not None else None
            if self.memory is not None and text is not None and passed:
                try:
                    self.memory.keep(text, attempt)
                except FAILURES as error:
                    self._attempt["reflection_error"] = reason(error)
        return observation, reward, terminated, truncated, {**info, **self._attempt}

    def _second(self, first: Trajectory) -> tuple[str, dict[str, Any]]:
        """Reflect and start again; return the observation and info to show."""
        try:
            memory = self.memory.recall(first) if self.memory is not None else ()
            reflection = self.reflector.reflect(first, memory)
        except FAILURES as error:  # the second attempt is played without a reflection
            reflection = Reflection(reason=reason(error))
        self._reflection = reflection
        observation, info = self.env.reset(**deepcopy(self._again))
        if (names := _instance(observation, info)) != self._names:
            raise EnvError(
                f"Expected the same instance after reset with {self._again}, {self._names}, got"
                f" {names}; ReflectionWrapper needs an environment that seed and options determine"
            )
        more = {"attempt": 2, "first_return": first.reward, "reflection": reflection.text}
        if reflection.reason is not None:
            more["reflection_error"] = reflection.reason
        self._log.begin(observation, info, self._again["seed"])
        self._attempt = more
        block = reflection.block or ""
        if self.inject == "observation":
            return f"{block}{observation}", {**info, **more}
        prompt = f"{info.get('experience_prompt') or ''}{block}"
        return observation, {**info, **more, **({"experience_prompt": prompt} if prompt else {})}


def _instance(observation: str, info: dict[str, Any]) -> tuple[Any, ...]:
    """Return the names of the instance in info, else the first observation."""
    named = info.keys() & set(_INSTANCE)
    return tuple(info.get(name) for name in _INSTANCE) if named else (observation,)
