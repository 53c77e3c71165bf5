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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from random import Random
from typing import NamedTuple

import numpy as np

from experiential.bank.options import RetrievalOptions
from experiential.bank.records import Standing
from experiential.errors import ConfigError
from experiential.plugins import resolve


class Candidate(NamedTuple):
    """Hold one entry near a query.

    Attributes:
        cosine: similarity to the query, in [-1, 1].
        words: weighted share of the query's words in the entry, in [0, 1]; 0 without hybrid
            retrieval.
        commit: that wrote this version of the entry; 0 where the bank does not say.
    """

    id: str
    cosine: float
    words: float = 0.0
    commit: int = 0

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
        evidence: what outcomes tell of each of several candidates, for strategies that ask for it.

    >>> seen = Retrievals(window=2)
    >>> for id in ("a", "b", "a", "c"):
    ...     seen.note(id)
    >>> seen.count("a"), seen.is_recent("a"), seen.is_recent("b")
    (2, True, False)
    """

    window: int
    earlier: Callable[[str], int] = lambda id: 0
    evidence: Callable[[Candidates], list[Standing]] = lambda near: [Standing() for _ in near]
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


NEAR = 0.05
"""Relevance below the best within which an entry is as near as the best."""
LEAST = 0.4
"""Probability to be better than nothing that an entry needs to be shown."""
BUDGET = 10
"""Uses after which an entry needs more than even odds."""
SLACK = 0.1
"""Success rate within which the entry used most is good enough."""
EXPLORE = 0.1
"""Share of searches that show an entry although nothing seems to help."""
_DRAWS = 1024


@strategy("evidence")
def by_evidence(
    candidates: Candidates, seen: Retrievals, settings: RetrievalOptions, rng: Random, k: int
) -> Picks:
    """Choose by outcomes among the entries as near as the best: Thompson sampling, or nothing.

    An entry is shown with the probability of being best (see ``odds``). Of the entries without an
    outcome, only ``k`` are rivals, those written most often, then retrieved least, then nearest:
    with all of them, one of many unknowns would nearly always look best, and so the members of a
    batch try different ones. Where none of these seems to help, the next nearest follow, if they
    belong to no task or to one of the nearest: bad entries that imitate a query hide no good ones.
    Where nothing seems to help, one in ten searches shows an entry all the same, within its budget.
    There, entries with a suspect word have their turn, too. Quarantined ones are never shown.
    """
    nearest = PER_PLACE * settings.pool * k
    tasks: set[str | None] = set()
    first: list[tuple[Candidate, Standing]] = []
    for near in _windows(candidates, settings.hybrid):
        # untried ones are alike
        near[nearest:] = [one for one in near[nearest:] if seen.count(one.id)]
        known = list(zip(near, seen.evidence(near), strict=True))
        tasks = tasks or {None, *(of.task for _, of in known)}
        known = [(one, of) for one, of in known if of.task in tasks]
        known = [(one, of) for one, of in known if of.verdict != "quarantined"]
        suspects = [(one, of) for one, of in known if of.suspect]
        known = [(one, of) for one, of in known if not of.suspect]
        arms = [(one, of) for one, of in known if of.uses]
        fresh = [(one, of) for one, of in known if not of.uses]
        fresh.sort(
            key=lambda arm: (
                -arm[1].said,
                seen.count(arm[0].id),
                -round(arm[0].relevance(settings.hybrid), 2),
                arm[1].age,
            )
        )
        arms += fresh[:k]
        picks: Picks = []
        while arms and len(picks) < k:
            beliefs = tuple((*of.posterior, of.uses, of.successes - of.failures) for _, of in arms)
            chances = odds(beliefs, arms[0][1].baseline)
            if not picks and not any(chances):
                break
            drawn = rng.random()
            for place, chance in enumerate(chances):
                if drawn < chance:
                    picks.append((arms.pop(place)[0], chance))
                    break
                drawn -= chance
            else:
                return picks
        if picks:
            return picks
        first = first or [*arms, *suspects]
    least = min(first, key=lambda arm: arm[1].uses, default=None)
    if least is None or least[1].uses >= BUDGET or rng.random() >= EXPLORE:
        return []
    return [(least[0], EXPLORE)]


def _windows(candidates: Candidates, hybrid: float) -> Iterator[list[Candidate]]:
    """Yield the candidates as near as the best, then those as near as the best of the rest."""
    near: list[Candidate] = []
    for one in candidates:
        if near and near[0].relevance(hybrid) - one.relevance(hybrid) > NEAR:
            yield near
            near = []
        near.append(one)
    if near:
        yield near


@lru_cache(4096)
def odds(
    arms: tuple[tuple[float, float, int, float], ...], baseline: tuple[float, float]
) -> tuple[float, ...]:
    """Return the probability with which Thompson sampling shows each arm; the rest shows nothing.

    Each draw takes a success rate from every posterior. Of the arms that beat the baseline, those
    within ``SLACK`` of the best will do, and the one with most to its credit is shown. An arm with
    too little hope (``LEAST``, ``BUDGET``) never is. The draws are the same at every call.

    Args:
        arms: of each entry the parameters of its Beta posterior, its uses, and its recent successes
            less its recent failures.
        baseline: the Beta posterior of showing nothing.

    >>> odds(((9.0, 1.0, 9, 6.0), (1.0, 9.0, 9, -6.0)), (2.0, 8.0))
    (1.0, 0.0)
    """
    rng = np.random.default_rng(0)
    wins, losses, uses, credit = (np.array(column)[:, None] for column in zip(*arms, strict=True))
    rates = rng.beta(wins, losses, (len(arms), _DRAWS))
    hope = (rates > rng.beta(*baseline, _DRAWS)).mean(axis=1, keepdims=True)
    better = np.broadcast_to((hope >= LEAST) & ((uses < BUDGET) | (hope > 0.5)), rates.shape)
    rates = np.where(better, rates, -1.0)
    enough = better & (rates >= rates.max(axis=0) - SLACK)
    shown = np.where(enough, credit + rates, -np.inf).argmax(axis=0)[enough.any(axis=0)]
    return tuple((np.bincount(shown, minlength=len(arms)) / _DRAWS).tolist())


@strategy("random")
def at_random(
    candidates: Candidates, seen: Retrievals, settings: RetrievalOptions, rng: Random, k: int
) -> Picks:
    """Draw ``k`` of the nearest ``pool * k`` uniformly: the control of experiments on retrieval."""
    pool = candidates[: settings.pool * k]
    count = min(k, len(pool))
    return [(candidate, count / len(pool)) for candidate in rng.sample(pool, count)]


@strategy("recent")
def recent(
    candidates: Candidates, seen: Retrievals, settings: RetrievalOptions, rng: Random, k: int
) -> Picks:
    """Choose the ``k`` written last, newest first, however near they are.

    With ``same_task`` these are the last notes on the very task.
    """
    return [(one, 1.0) for one in sorted(candidates, key=lambda one: -one.commit)[:k]]
