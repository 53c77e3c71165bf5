"""Define text environments: the space of any text, and a base that keeps the turns."""

from __future__ import annotations

import hashlib
import string
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from experiential.envs.arguments import one_of
from experiential.errors import ConfigError

Info = dict[str, Any]
Step = tuple[str, float, bool, bool, Info]
"""The answer of a turn: observation, reward, terminated, truncated, info."""


_PRINTABLE = string.ascii_letters + string.digits + " .,;:!?-'"


class UnicodeText(spaces.Space[str]):
    """Contain any ``str`` of at most ``max_length`` characters.

    Membership costs one type and one length check, whatever the text. Samples are short printable
    strings, or draws from ``samples`` when these are given (so that a random agent plays legal
    actions).

    Caveat: use ``AsyncVectorEnv(shared_memory=False)``; Gymnasium's shared memory has no layout for
    text of free length.

    Works in ``SyncVectorEnv`` and ``AsyncVectorEnv``, where a batch is a tuple of strings.

    >>> space = UnicodeText(max_length=16, seed=3)
    >>> "naïve ☃ 日本" in space, "x" * 17 in space, 4 in space
    (True, False, False)
    >>> UnicodeText(samples=["left", "right"], seed=0).sample() in ("left", "right")
    True

    Change log: v0.1.0 added.

    Args:
        max_length: most characters a member may have.
        samples: what ``sample`` draws from; other texts stay members.
        seed: seed of the sampler.

    Raises:
        ValueError: ``max_length`` is not positive, or a sample is no member.
    """

    def __init__(
        self,
        max_length: int = 1_000_000,
        *,
        samples: Sequence[str] = (),
        seed: int | np.random.Generator | None = None,
    ) -> None:
        if max_length < 1:
            raise ValueError(f"Expected max_length to be positive, got {max_length}")
        self.max_length = max_length
        self.samples = tuple(samples)
        for text in self.samples:
            if not self.contains(text):
                expected = f"samples of at most {max_length} characters"
                raise ValueError(f"Expected {expected}, got {text!r}")
        super().__init__(dtype=str, seed=seed)

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Return a short random text, or one of ``samples``; masks are not supported.

        Raises:
            ValueError: a mask or probability was given.
        """
        if mask is not None or probability is not None:
            raise ValueError(
                "Expected no mask and no probability, got one; filter the text instead"
            )
        if self.samples:
            return self.samples[int(self.np_random.integers(len(self.samples)))]
        length = int(self.np_random.integers(1, min(self.max_length, 24) + 1))
        return "".join(_PRINTABLE[i] for i in self.np_random.integers(len(_PRINTABLE), size=length))

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is a ``str`` that is short enough."""
        return isinstance(x, str) and len(x) <= self.max_length

    @property
    def is_np_flattenable(self) -> bool:
        """Return False: text has no array form of fixed length."""
        return False

    def __repr__(self) -> str:
        drawn = f", samples={self.samples!r}" if self.samples else ""
        return f"UnicodeText({self.max_length}{drawn})"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, UnicodeText)
            and other.max_length == self.max_length
            and other.samples == self.samples
        )


class TextEnv(gym.Env[str, str], ABC):
    """Play numbered worlds turn by turn, with text in and out.

    A subclass states the task (``task``), begins a world (``_begin``) and plays a turn
    (``_turn``). This class keeps the rest: spaces, the world that a reset picks, the last
    observation for ``render``, and the refusal of a step where no episode runs. Where ``_begin`` or
    ``_turn`` raises, the episode is over and a reset begins another.

    >>> class Guess(TextEnv):
    ...     task = "Guess a digit in three turns."
    ...
    ...     def _begin(self, world):
    ...         self.world, self.left = world, 3
    ...         return "Which digit?", self._report(f"guess-{world}")
    ...
    ...     def _turn(self, action):
    ...         self.left -= 1
    ...         won, invalid = action.strip() == str(self.world), not action.strip().isdecimal()
    ...         said = "Reply with a digit." if invalid else "Right." if won else "Wrong."
    ...         info = self._report(f"guess-{self.world}", said, success=won, invalid=invalid)
    ...         return said, float(won), won, not won and self.left == 0, info
    >>> from experiential.envs import check_text_env
    >>> check_text_env(Guess(worlds=10))
    []

    Args:
        worlds: how many worlds there are.
        longest: characters that an observation may have.
        longest_action: characters that an action in the action space may have; ``_turn`` must bear
            any text.
        render_mode: ``ansi`` (the last observation) or None.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 4}
    _shares: Sequence[float] = ()
    """The sums of the worlds' weights, where they are not drawn evenly."""

    def __init__(
        self,
        worlds: int,
        *,
        longest: int = 1_000_000,
        longest_action: int = 100_000,
        render_mode: str | None = None,
    ) -> None:
        one_of("render_mode", render_mode, (None, "ansi"))
        self.render_mode = render_mode
        self.observation_space = UnicodeText(max_length=longest)
        self.action_space = UnicodeText(max_length=longest_action)
        self._count = worlds
        self._observation = ""
        self._over = True

    @property
    @abstractmethod
    def task(self) -> str:
        """Return the task in words; a bank is searched with it."""

    @abstractmethod
    def _begin(self, world: int) -> tuple[str, Info]:
        """Begin an episode of ``world``; return the first observation and its info."""

    @abstractmethod
    def _turn(self, action: str) -> Step:
        """Play ``action``, any text; an invalid one uses the turn, and the answer says so."""

    @property
    def worlds(self) -> list[int]:
        """Return the indices that ``reset(options={"world": i})`` accepts."""
        return list(range(self._count))

    def digest(self) -> str:
        """Return a digest of the worlds, 12 hexadecimal digits: the same for the same data."""
        total = hashlib.sha256()
        for content in self._contents():
            total.update(f"{len(content)}:{content}".encode("utf-8", "surrogatepass"))
        return total.hexdigest()[:12]

    def _contents(self) -> Iterable[str]:
        """Yield all that the worlds are made of; by default only their name and number."""
        yield f"{type(self).__qualname__} {self._count}"

    @property
    def chance(self) -> float | None:
        """Return the success rate of the best blind play; None where it is not known exactly."""
        return None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, Info]:
        """Begin an episode of the world with the index ``options["world"]``, else of a drawn one.

        Raise ConfigError where there is no such world, EnvError where what plays it failed.
        """
        super().reset(seed=seed)
        # in any case, so that the option leaves the later draws alone
        if self._shares:
            drawn = bisect_right(self._shares, self.np_random.random() * self._shares[-1])
            drawn = min(drawn, self._count - 1)
        else:
            drawn = int(self.np_random.integers(self._count))
        self._reset_seed, self._reset_options = seed, dict(options or {})
        world = int(self._reset_options.get("world", drawn))
        if not 0 <= world < self._count:
            raise ConfigError(f"Expected world between 0 and {self._count - 1}, got {world}")
        self._over = True
        self._observation, info = self._begin(world)
        self._over = False
        return self._observation, info

    def step(self, action: str) -> Step:
        """Play one turn; raise ResetNeeded where no episode runs, EnvError where it failed.

        An action that is not text is played as an empty one: an invalid turn.
        """
        if self._over:
            expected = "reset() before this step: the episode is over or was never begun"
            raise gym.error.ResetNeeded(f"Expected {expected}")
        self._over = True
        given: Any = action  # an agent may hand over anything
        step = self._turn(given if isinstance(given, str) else "")
        if not isinstance(given, str):
            step[4]["invalid"] = True
        self._observation, self._over = step[0], step[2] or step[3]
        return step

    def render(self) -> str | None:  # type: ignore[override]  # Gymnasium types frames; text is one
        """Return the last observation."""
        return self._observation if self.render_mode == "ansi" else None

    def _report(
        self,
        name: str,
        feedback: str = "",
        *,
        success: bool = False,
        invalid: bool = False,
        admissible: Iterable[str] | None = None,
        instance: str = "",
    ) -> Info:
        """Return the info of a reset or step; actions that cannot be listed are left out of it.

        ``name`` is the id of the task, the same for a world whatever the seed, and ``instance``
        that of this very game, by default the task's.
        """
        info = {
            "task": self.task,
            "task_id": name,
            "instance": instance or name,
            "success": success,
            "invalid": invalid,
            "feedback": feedback,
        }
        return info if admissible is None else info | {"admissible": list(admissible)}
