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
from heapq import nsmallest
from operator import attrgetter, itemgetter
from random import Random
from typing import NamedTuple, overload

import numpy as np

from experiential.bank.options import RetrievalOptions
from experiential.bank.records import Standing
from experiential.bank.search.where import Ranking, Row
from experiential.errors import ConfigError
from experiential.plugins import resolve
from experiential.types import Experience


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


class Near(Candidates):
    """Show what a search found as candidates, nearest first, each made when it is looked at.

    Attributes:
        ids: of all candidates.
        cosines: of the same.
    """

    __slots__ = ("_found", "cosines", "ids")

    def __init__(self, found: Ranking) -> None:
        self._found = found
        self.ids: Sequence[str]
        self.cosines: Sequence[float]
        if isinstance(found, Row):
            self.ids, self.cosines = found.ids, found.scores
        else:
            self.ids = [one.item.id for one in found]
            self.cosines = [one.score for one in found]

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> Candidate: ...

    @overload
    def __getitem__(self, place: slice) -> list[Candidate]: ...

    def __getitem__(self, place: int | slice) -> Candidate | list[Candidate]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self.ids)))]
        item, score, words = self._found[place]
        return Candidate(item.id, score, words, item.provenance.commit or 0)

    def __iter__(self) -> Iterator[Candidate]:
        return map(self.__getitem__, range(len(self.ids)))

    def above(self, floor: float) -> Near:
        """Return the candidates that reach the floor by cosine."""
        if not self.cosines or self.cosines[-1] >= floor:
            return self
        return Near(self._found[: sum(cosine >= floor for cosine in self.cosines)])

    def at(self, places: Sequence[int]) -> Near:
        """Return the candidates at these places."""
        found = self._found
        return Near(found.at(places) if isinstance(found, Row) else [found[one] for one in places])

    def entries(self) -> list[Experience]:
        """Return the entries of all candidates."""
        found = self._found
        return found.entries() if isinstance(found, Row) else [one.item for one in found]

    def entry(self, id: str) -> Experience:
        """Return the entry of a candidate."""
        return self._found[self.ids.index(id)].item

    def commits(self) -> list[int]:
        """Return the commit that wrote each candidate; 0 where the bank does not say."""
        return [entry.provenance.commit or 0 for entry in self.entries()]


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
        if (known := self._counts.get(id)) is None:
            known = self._counts[id] = self.earlier(id)
        return known

    def is_recent(self, id: str) -> bool:
        """Return whether the entry was among the last ``window`` retrievals."""
        last = self._last.get(id)
        return last is not None and self.total - last < self.window


def shared_ranks(cosines: Sequence[float], tie: float = 1e-3, size: int | None = None) -> list[int]:
    """Return 0-based ranks of falling cosines; a run within ``tie`` of its first shares its rank.

    With ``size``, of so many and of those that share the rank of the last of them.

    >>> shared_ranks([0.9, 0.8995, 0.7, 0.5])
    [0, 0, 2, 3]
    >>> shared_ranks([0.9, 0.8995, 0.7, 0.5], size=1)
    [0, 0]
    """
    ranks: list[int] = []
    first, best = 0, cosines[0] if cosines else 0.0
    for place, cosine in enumerate(cosines):
        if best - cosine > tie + 1e-9:  # differences of float32 cosines carry rounding
            if size is not None and place >= size:
                break
            first, best = place, cosine
        ranks.append(first)
    return ranks


def diversity_score(rank: int, count: int, recent: bool, weight: float) -> float:
    """Return s(m) of eq. 6: -rank(m) - lambda log(1 + c(m)) - 1[m was retrieved recently]."""
    return -rank - weight * math.log1p(count) - float(recent)


def above_floor(candidates: Candidates, floor: float, hybrid: float = 0.0) -> Candidates:
    """Return the candidates that reach the floor by cosine or words, the most relevant first."""
    if not hybrid:
        if isinstance(candidates, Near):
            return candidates.above(floor)
        above = [c for c in candidates if c.cosine >= floor]
        return sorted(above, key=attrgetter("cosine"), reverse=True)
    above = [c for c in candidates if c.cosine >= floor or 0.0 < c.words >= floor]
    return sorted(above, key=lambda c: -c.relevance(hybrid))


def _columns(candidates: Candidates, hybrid: float) -> tuple[Sequence[str], Sequence[float]]:
    """Return ids and relevances."""
    if isinstance(candidates, Near) and not hybrid:
        return candidates.ids, candidates.cosines
    return [one.id for one in candidates], [one.relevance(hybrid) for one in candidates]


def draw(scores: Sequence[float], k: int, temperature: float, rng: Random) -> list[Pick]:
    """Draw ``k`` places without replacement, each with softmax(s / temperature) over those left.

    That probability is the propensity of a pick. Temperature 0 takes the best with propensity 1;
    earlier places win ties.
    """
    left = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
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
    size, (ids, relevances) = settings.pool * k, _columns(candidates, settings.hybrid)
    ranks = shared_ranks(relevances, settings.tie, size)
    pool = list(range(len(ranks)))
    if len(ids) > size and (border := ranks[size - 1]) < len(ranks) - 1:
        tied = sorted(pool[border:], key=lambda place: seen.count(ids[place]))[: size - border]
        pool[border:] = sorted(tied, key=lambda place: -relevances[place])
    scores = [
        diversity_score(
            rank, seen.count(ids[place]), seen.is_recent(ids[place]), settings.diversity
        )
        for rank, place in zip(ranks, pool, strict=False)
    ]
    picks = draw(scores, k, settings.exploration, rng)
    return [(candidates[pool[place]], propensity) for place, propensity in picks]


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
    ids, relevances = _columns(candidates, settings.hybrid)
    tasks: set[str | None] = set()
    first: list[tuple[int, Standing]] = []
    for window in _windows(relevances):
        # untried ones are alike
        tried = (place for place in window[nearest:] if seen.count(ids[place]))
        places = [*window[:nearest], *tried]
        if isinstance(candidates, Near):
            near = candidates.at(places)
            commits = near.commits()
        else:
            near = [candidates[place] for place in places]
            commits = [one.commit for one in near]
        known = seen.evidence(near)
        tasks = tasks or {None, *(of.task for of in known)}
        arms: list[tuple[int, Standing]] = []
        suspects: list[tuple[int, Standing]] = []
        fresh: list[tuple[tuple[int, int, float, int], int, Standing]] = []
        for place, commit, of in zip(places, commits, known, strict=True):
            if of.task not in tasks or (of.uses and of.verdict == "quarantined"):
                continue
            if of.suspect:
                suspects.append((place, of))
            elif of.uses:
                arms.append((place, of))
            else:
                order = -of.said, seen.count(ids[place]), -round(relevances[place], 2), -commit
                fresh.append((order, place, of))
        arms += [(place, of) for _, place, of in nsmallest(k, fresh, key=itemgetter(0))]
        picks: Picks = []
        while arms and len(picks) < k:
            beliefs = tuple((*of.posterior, of.uses, of.successes - of.failures) for _, of in arms)
            chances = odds(beliefs, arms[0][1].baseline)
            if not picks and not any(chances):
                break
            drawn = rng.random()
            for place, chance in enumerate(chances):
                if drawn < chance:
                    picks.append((candidates[arms.pop(place)[0]], chance))
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
    return [(candidates[least[0]], EXPLORE)]


def _windows(relevances: Sequence[float]) -> Iterator[range]:
    """Yield the places of those as near as the best, then as near as the best of the rest."""
    start = 0
    for place, relevance in enumerate(relevances):
        if relevances[start] - relevance > NEAR:
            yield range(start, place)
            start = place
    if relevances:
        yield range(start, len(relevances))


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
