"""Which of the nearest entries a query receives: eq. 6 of Complementary RL and other strategies, as pure functions and one small memory.

A strategy of your own is a function registered under a name, which ``bank.retrieval.strategy`` then
chooses:

>>> @strategy("second best")
... def second_best(candidates, seen, settings, rng, k):
...     return [(candidate, 1.0) for candidate in candidates[1 : k + 1]]
>>> [c.id for c, _ in second_best([Candidate("a", 0.9), Candidate("b", 0.8)], Retrievals(8), RetrievalSettings(), random.Random(0), 1)]
['b']
>>> _ = STRATEGIES.pop("second best")
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

from experiential.config import RetrievalSettings
from experiential.errors import ConfigError


class Candidate(NamedTuple):
    """One entry near a query: its id, its cosine similarity, and with hybrid retrieval the share of the query's words that it has."""

    id: str
    cosine: float
    words: float = 0.0

    def relevance(self, hybrid: float) -> float:
        """By what candidates are ranked: (1 - w) cosine + w words; the cosine when w, ``bank.retrieval.hybrid``, is 0."""
        return (1.0 - hybrid) * self.cosine + hybrid * self.words

    def reaches(self, floor: float, hybrid: float) -> bool:
        """Whether the cosine is at or above the floor or, with hybrid retrieval, the share of words is."""
        return self.cosine >= floor or (hybrid > 0.0 and 0.0 < self.words >= floor)


_COSINE = attrgetter("cosine")
_TIED = 4
"""Candidates fetched for each place of the pool, so that ties at its border can rotate."""


def candidates_for(k: int, pool: int) -> int:
    """How many entries to fetch by cosine, and as many by words, when ``k`` are to be chosen."""
    return k * pool * _TIED


class Pick(NamedTuple):
    """One entry chosen: its place in the candidate list, and the probability with which the draw took it."""

    place: int
    propensity: float


class Retrievals:
    """How often and how recently each entry was retrieved; time is counted in retrievals, never in seconds.

    Args:
        window: retrievals that count as recent.
        earlier: retrievals of an entry before this session.
        utility: Laplace score of an entry, for strategies that ask for it.

    >>> seen = Retrievals(window=2)
    >>> for id in ("a", "b", "a", "c"):
    ...     seen.note(id)
    >>> seen.count("a"), seen.is_recent("a"), seen.is_recent("b")
    (2, True, False)
    """

    def __init__(
        self,
        window: int,
        earlier: Callable[[str], int] = lambda id: 0,
        utility: Callable[[str], float] = lambda id: 0.5,
    ) -> None:
        self.total = 0
        self.utility = utility
        self._window = window
        self._earlier = earlier
        self._counts: Counter[str] = Counter()
        self._last: dict[str, int] = {}

    def note(self, id: str) -> None:
        """One more retrieval of entry ``id``."""
        self.total += 1
        self._counts[id] += 1
        self._last[id] = self.total

    def count(self, id: str) -> int:
        """c(m): retrievals so far, those of earlier sessions included."""
        return self._earlier(id) + self._counts[id]

    def is_recent(self, id: str) -> bool:
        """Whether the entry was among the last ``window`` retrievals."""
        last = self._last.get(id)
        return last is not None and self.total - last < self._window


def shared_ranks(cosines: Sequence[float], tie: float = 1e-3) -> list[int]:
    """0-based ranks of cosines (or relevances) given in falling order; a run within ``tie`` of its first member shares that member's rank.

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
    """Eq. 6: s(m) = s_rank(m) - lambda log(1 + c(m)) - 1[m was retrieved recently], with s_rank = -rank."""
    return -rank - weight * math.log1p(count) - float(recent)


def above_floor(
    candidates: Sequence[Candidate], floor: float, hybrid: float = 0.0
) -> list[Candidate]:
    """The candidates that reach the floor, the most relevant first."""
    if not hybrid:
        return sorted([c for c in candidates if c.cosine >= floor], key=_COSINE, reverse=True)
    return sorted(
        [c for c in candidates if c.reaches(floor, hybrid)], key=lambda c: -c.relevance(hybrid)
    )


def cut_pool(
    candidates: Sequence[Candidate],
    seen: Retrievals,
    size: int,
    floor: float,
    tie: float = 1e-3,
    hybrid: float = 0.0,
) -> list[Candidate]:
    """The top ``size`` candidates that reach the floor; of those tied at the border, the least retrieved come first."""
    above = above_floor(candidates, floor, hybrid)
    if len(above) <= size:
        return above
    ranks = shared_ranks([c.relevance(hybrid) for c in above], tie)
    border = ranks[size - 1]
    tied = sorted(
        (place for place in range(border, len(above)) if ranks[place] == border),
        key=lambda place: seen.count(above[place].id),
    )
    return above_floor(
        [*above[:border], *(above[place] for place in tied[: size - border])], floor, hybrid
    )


def draw(scores: Sequence[float], k: int, temperature: float, rng: random.Random) -> list[Pick]:
    """Take ``k`` places without replacement.

    Args:
        scores: s(m) of each place.
        k: how many.
        temperature: 0 takes the best (earlier places win ties) with propensity 1; above 0, each
            pick is drawn with probability softmax(s / temperature) over the places left, and that
            probability is its propensity.
        rng: where the draws come from.
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


Strategy = Callable[
    [Sequence[Candidate], Retrievals, RetrievalSettings, random.Random, int],
    list[tuple[Candidate, float]],
]
"""Takes candidates (most relevant first), what was retrieved so far, settings, a source of draws
and k; gives picks with propensities.
"""
STRATEGIES: dict[str, Strategy] = {}
"""By name, what ``bank.retrieval.strategy`` may say."""


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


def find_strategy(name: str) -> Strategy:
    """The strategy of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in STRATEGIES:
        raise ConfigError(
            f"Expected bank.retrieval.strategy among {', '.join(sorted(STRATEGIES))}; got {name!r}"
        )
    return STRATEGIES[name]


def select(
    candidates: Sequence[Candidate],
    seen: Retrievals,
    settings: RetrievalSettings,
    rng: random.Random,
    k: int | None = None,
) -> list[tuple[Candidate, float]]:
    """The entries that one query receives, each with its propensity; noted in ``seen``, so that the next query sees them taken.

    Calling this for the queries of a micro-batch one after the other is the reservation: a group of
    identical queries spreads over the pool. Empty when nothing reaches the floor: an entry does if
    its cosine is at least ``settings.floor`` or, with hybrid retrieval, if the share of the query's
    words that it has is. So words only ever let more entries in.
    """
    above = above_floor(candidates, settings.floor, settings.hybrid)
    picks = find_strategy(settings.strategy)(
        above, seen, settings, rng, settings.k if k is None else k
    )
    for candidate, _ in picks:
        seen.note(candidate.id)
    return picks


@strategy("diverse")
def diverse(
    candidates: Sequence[Candidate],
    seen: Retrievals,
    settings: RetrievalSettings,
    rng: random.Random,
    k: int,
) -> list[tuple[Candidate, float]]:
    """Eq. 6 over the ``pool * k`` most relevant candidates."""
    pool = cut_pool(
        candidates, seen, settings.pool * k, settings.floor, settings.tie, settings.hybrid
    )
    ranks = shared_ranks([candidate.relevance(settings.hybrid) for candidate in pool], settings.tie)
    scores = [
        diversity_score(
            rank, seen.count(candidate.id), seen.is_recent(candidate.id), settings.diversity
        )
        for rank, candidate in zip(ranks, pool, strict=True)
    ]
    return [
        (pool[pick.place], pick.propensity) for pick in draw(scores, k, settings.exploration, rng)
    ]


@strategy("nearest")
def nearest(
    candidates: Sequence[Candidate],
    seen: Retrievals,
    settings: RetrievalSettings,
    rng: random.Random,
    k: int,
) -> list[tuple[Candidate, float]]:
    """The ``k`` nearest, always the same ones: what most systems do."""
    return [(candidate, 1.0) for candidate in candidates[:k]]


@strategy("utility")
def by_utility(
    candidates: Sequence[Candidate],
    seen: Retrievals,
    settings: RetrievalSettings,
    rng: random.Random,
    k: int,
) -> list[tuple[Candidate, float]]:
    """Of the nearest ``pool * k``, those with the best relevance times Laplace score (s + 1)/(u + 2) (EvolveR's score)."""
    pool = candidates[: settings.pool * k]
    scores = [
        candidate.relevance(settings.hybrid) * seen.utility(candidate.id) for candidate in pool
    ]
    return [
        (pool[pick.place], pick.propensity) for pick in draw(scores, k, settings.exploration, rng)
    ]


@strategy("random")
def at_random(
    candidates: Sequence[Candidate],
    seen: Retrievals,
    settings: RetrievalSettings,
    rng: random.Random,
    k: int,
) -> list[tuple[Candidate, float]]:
    """``k`` of the nearest ``pool * k`` at random, each as likely: the control of an experiment on retrieval."""
    pool = candidates[: settings.pool * k]
    return [
        (pool[place], min(k, len(pool)) / len(pool))
        for place in rng.sample(range(len(pool)), min(k, len(pool)))
    ]
