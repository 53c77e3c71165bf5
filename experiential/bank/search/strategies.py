"""Choose among the nearest entries: eq. 6 of Complementary RL and other retrieval strategies.

The strategies are pure functions over one small memory, ``Retrievals``. To add one, write a
function, and name it in ``bank.retrieval.strategy`` as ``module:function``, or as an entry point of
group ``experiential.strategies``. In Python it may also be registered under a short name:

>>> @strategy("second best")
... def second_best(candidates, seen, settings, rng, k):
...     return [(candidate, 1.0) for candidate in candidates[1 : k + 1]]
>>> near = [Candidate("a", 0.9), Candidate("b", 0.8)]
>>> second_best(near, Retrievals(8), RetrievalOptions(), Random(0), 1)[0][0].id
'b'
>>> _ = STRATEGIES.pop("second best")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from random import Random
from typing import NamedTuple

from experiential.bank.options import RetrievalOptions
from experiential.errors import ConfigError
from experiential.plugins import resolve


class Candidate(NamedTuple):
    """Hold one entry near a query.

    Attributes:
        cosine: similarity to the query, in [-1, 1].
        words: weighted share of the query's words in the entry, in [0, 1]; 0 without hybrid
            retrieval.
    """

    id: str
    cosine: float
    words: float = 0.0

    def relevance(self, hybrid: float) -> float:
        """Return (1 - w) cosine + w words, by which candidates are ranked; w is ``hybrid``."""
        return (1.0 - hybrid) * self.cosine + hybrid * self.words


Candidates = Sequence[Candidate]
Picks = list[tuple[Candidate, float]]
"""Chosen candidates, each with the probability with which it was drawn."""
PER_PLACE = 4
"""Candidates to fetch for each place of the pool, so that ties at its border can rotate."""


class Pick(NamedTuple):
    """Hold the place of a chosen candidate, and the probability with which it was drawn."""

    place: int
    propensity: float


@dataclass(eq=False)
class Retrievals:
    """Count how often and how recently each entry was retrieved; the clock ticks per retrieval.

    Args:
        window: retrievals that count as recent.
        earlier: retrievals of an entry before this session; asked once for each entry.
        utility: Laplace score of an entry, for strategies that ask for it.

    >>> seen = Retrievals(window=2)
    >>> for id in ("a", "b", "a", "c"):
    ...     seen.note(id)
    >>> seen.count("a"), seen.is_recent("a"), seen.is_recent("b")
    (2, True, False)
    """

    window: int
    earlier: Callable[[str], int] = lambda id: 0
    utility: Callable[[str], float] = lambda id: 0.5
    total: int = field(default=0, init=False)
    _counts: dict[str, int] = field(default_factory=dict[str, int], init=False)
    _last: dict[str, int] = field(default_factory=dict[str, int], init=False)

    def note(self, id: str) -> None:
        """Count one more retrieval of entry ``id``."""
        self.total += 1
        self._counts[id] = self.count(id) + 1
        self._last[id] = self.total

    def count(self, id: str) -> int:
        """Return c(m): retrievals so far, those of earlier sessions included."""
        if id not in self._counts:
            self._counts[id] = self.earlier(id)
        return self._counts[id]

    def is_recent(self, id: str) -> bool:
        """Return whether the entry was among the last ``window`` retrievals."""
        last = self._last.get(id)
        return last is not None and self.total - last < self.window


def shared_ranks(cosines: Sequence[float], tie: float = 1e-3) -> list[int]:
    """Return 0-based ranks of falling cosines; a run within ``tie`` of its first shares its rank.

    >>> shared_ranks([0.9, 0.8995, 0.7, 0.5])
    [0, 0, 2, 3]
    """
    ranks: list[int] = []
    first = 0
    for place, cosine in enumerate(cosines):
        if cosines[first] - cosine > tie + 1e-9:  # differences of float32 cosines carry rounding
            first = place
        ranks.append(first)
    return ranks


def diversity_score(rank: int, count: int, recent: bool, weight: float) -> float:
    """Return s(m) of eq. 6: -rank(m) - lambda log(1 + c(m)) - 1[m was retrieved recently]."""
    return -rank - weight * math.log1p(count) - float(recent)


def above_floor(candidates: Candidates, floor: float, hybrid: float = 0.0) -> list[Candidate]:
    """Return the candidates that reach the floor by cosine or words, the most relevant first."""
    if not hybrid:
        above = [c for c in candidates if c.cosine >= floor]
        return sorted(above, key=attrgetter("cosine"), reverse=True)
    above = [c for c in candidates if c.cosine >= floor or 0.0 < c.words >= floor]
    return sorted(above, key=lambda c: -c.relevance(hybrid))


def draw(scores: Sequence[float], k: int, temperature: float, rng: Random) -> list[Pick]:
    """Draw ``k`` places without replacement, each with softmax(s / temperature) over those left.

    That probability is the propensity of a pick. Temperature 0 takes the best with propensity 1;
    earlier places win ties.
    """
    left = sorted(range(len(scores)), key=lambda place: -scores[place])
    if temperature == 0.0:
        return [Pick(place, 1.0) for place in left[:k]]
    picks: list[Pick] = []
    while left and len(picks) < k:
        weights = [math.exp((scores[place] - scores[left[0]]) / temperature) for place in left]
        chosen = rng.choices(range(len(left)), weights)[0]
        picks.append(Pick(left.pop(chosen), weights[chosen] / sum(weights)))
    return picks


Strategy = Callable[[Candidates, Retrievals, RetrievalOptions, Random, int], Picks]
"""Takes candidates (most relevant first), earlier retrievals, settings, a source of draws and k;
returns up to k (candidate, propensity) pairs.
"""
STRATEGIES: dict[str, Strategy] = {}
"""The registered strategies by name."""


def strategy(name: str) -> Callable[[Strategy], Strategy]:
    """Register a function as a retrieval strategy; the name must be new."""

    def register(function: Strategy) -> Strategy:
        if name in STRATEGIES:
            raise ConfigError(
                f"Expected a new name for a retrieval strategy, got {name!r}, which is taken"
            )
        STRATEGIES[name] = function
        return function

    return register


def select(
    candidates: Candidates,
    seen: Retrievals,
    settings: RetrievalOptions,
    rng: Random,
    k: int | None = None,
    choose: Strategy | None = None,
) -> Picks:
    """Choose the entries for one query, and note them in ``seen``; none if none reach the floor.

    Calling this for the queries of a micro-batch one after the other is the reservation: a group of
    identical queries spreads over the pool. ``k`` and ``choose``, the strategy, are by default
    those of the settings.
    """
    above = above_floor(candidates, settings.floor, settings.hybrid)
    choose = choose or resolve("strategies", settings.strategy, STRATEGIES)
    picks = choose(above, seen, settings, rng, settings.k if k is None else k)
    for candidate, _ in picks:
        seen.note(candidate.id)
    return picks


@strategy("diverse")
def diverse(
    candidates: Candidates, seen: Retrievals, settings: RetrievalOptions, rng: Random, k: int
) -> Picks:
    """Choose by eq. 6 among the ``pool * k`` most relevant candidates.

    Of candidates tied at the border of the pool, those retrieved least are in it.
    """
    pool, size = list(candidates), settings.pool * k
    ranks = shared_ranks([one.relevance(settings.hybrid) for one in pool], settings.tie)
    if len(pool) > size:
        border = ranks[size - 1]
        tied = [one for one, rank in zip(pool, ranks, strict=True) if rank == border]
        tied = sorted(tied, key=lambda one: seen.count(one.id))[: size - border]
        pool[border:] = sorted(tied, key=lambda one: -one.relevance(settings.hybrid))
    scores = [
        diversity_score(rank, seen.count(one.id), seen.is_recent(one.id), settings.diversity)
        for rank, one in zip(ranks, pool, strict=False)
    ]
    picks = draw(scores, k, settings.exploration, rng)
    return [(pool[place], propensity) for place, propensity in picks]


@strategy("nearest")
def nearest(
    candidates: Candidates, seen: Retrievals, settings: RetrievalOptions, rng: Random, k: int
) -> Picks:
    """Choose the ``k`` nearest, always the same ones, as most systems do."""
    return [(candidate, 1.0) for candidate in candidates[:k]]


@strategy("utility")
def by_utility(
    candidates: Candidates, seen: Retrievals, settings: RetrievalOptions, rng: Random, k: int
) -> Picks:
    """Choose by relevance times EvolveR's Laplace score (s + 1)/(u + 2) among ``pool * k``."""
    pool = candidates[: settings.pool * k]
    scores = [one.relevance(settings.hybrid) * seen.utility(one.id) for one in pool]
    picks = draw(scores, k, settings.exploration, rng)
    return [(pool[place], propensity) for place, propensity in picks]


@strategy("random")
def at_random(
    candidates: Candidates, seen: Retrievals, settings: RetrievalOptions, rng: Random, k: int
) -> Picks:
    """Draw ``k`` of the nearest ``pool * k`` uniformly: the control of experiments on retrieval."""
    pool = candidates[: settings.pool * k]
    count = min(k, len(pool))
    return [(candidate, count / len(pool)) for candidate in rng.sample(pool, count)]
