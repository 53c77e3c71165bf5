"""Define a space that contains any text, unlike ``gymnasium.spaces.Text``."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

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
