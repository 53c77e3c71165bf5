"""Judge entries by the outcomes of the episodes that they were shown in, near the query at hand.

Everything here is a function of episodes journalled in this bank. Counters that an entry brings
with it, from a file or a client, count for nothing.

* **Neighbourhood.** A lesson that is right for its own task may be wrong for another, so uses count
  that had about the relevance of the query at hand (within ``NEARBY``).
* **Recency.** Of the last ``LAST`` uses each newer one outweighs the older (``FADE``), so that an
  entry that turns bad loses soon.
* **Prior.** What is not known of an entry is learned from the others: a Beta distribution whose
  mean and strength are fitted to the rates of all entries by their beta-binomial likelihood on a
  grid (Gelman et al., Bayesian Data Analysis, section 5.3), apart by how often an extractor wrote
  the text before it was first shown. Texts that independent episodes agree on are evidence.
* **Baseline.** Episodes in which nothing was shown, because they played free or nothing was found
  or hoped for: by task, with a prior learned from all tasks.
* **Words.** Harm can be written many times over, and each text would have to fail by itself. So
  every word that an entry adds to its query and task has a cumulative sum of the log likelihood
  ratio of harm (``HARM`` times the baseline) over no effect, never below zero (Page 1954). An entry
  with a word whose sum has reached ``PROVEN`` is suspect, whatever its own past; a success frees
  the word. Of failures of one entry in a row those count that are the first near their relevance,
  ``ACCUSES`` at most, so that several entries must fail to accuse another. Good words prove
  nothing, since whoever writes poison can borrow them.
* **Interval.** Difference of two success rates, entry minus baseline, valid at any time however
  often one looks: each rate has a beta-binomial mixture confidence sequence (Robbins 1970; Howard
  et al. 2021, section 3), with half of the error probability each.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from experiential.bank.index.lexical import content_words
from experiential.bank.records import Standing
from experiential.types import Experience

if TYPE_CHECKING:
    from experiential.bank.state import Content

NEARBY = 0.1
"""Relevance within which the uses of an entry tell of one another."""
LAST = 200
"""Outcomes that are remembered: of each entry, of each task, and of all of them."""
FADE = 0.8
"""Weight of an outcome beside the next one of the same entry."""
STRONGEST = 1.0
"""Outcomes that the other entries weigh in the judgement of one."""
FORGET = 0.995
"""Weight of what is known of all entries, beside the next outcome of any."""
SAID_MOST = 3
"""Entries written at least so often share a prior."""
ERROR = 0.05
"""Probability that an interval misses the true difference, ever."""
HARM = 0.1
"""Success rate of advice that does harm, as a share of that without any."""
CAUTION = 2
"""Failures added to the baseline before an entry is accused of harm: few episodes tell little."""
PROVEN = math.log(1 / ERROR)
"""Cumulative sum at which a word is suspect."""
ACCUSES = 2
"""Failures in a row of one entry that accuse its words at most: no entry accuses another alone."""
_BAND = 0.05
_MEANS, _STRENGTHS = np.meshgrid((np.arange(20) + 0.5) / 20, [0.1, 0.3, 1.0, 3.0, 10.0, 30.0])
_WINS, _LOSSES = _MEANS * _STRENGTHS, (1 - _MEANS) * _STRENGTHS

Beta = tuple[float, float]
"""Parameters of a Beta distribution of a success rate."""


class Played(NamedTuple):
    """Hold one use of an entry with a known outcome."""

    relevance: float
    won: bool
    task: str


class Population:
    """Learn the Beta distribution from which many success rates are drawn.

    >>> coins = Population()
    >>> for _ in range(20):  # of many that were tried once each, half win
    ...     coins.note(0, 0, True)
    ...     coins.note(0, 0, False)
    >>> wins, losses = beta([coins])
    >>> round(wins / (wins + losses), 1)
    0.5
    """

    def __init__(self) -> None:
        self.log = np.zeros_like(_MEANS)

    def note(self, wins: float, losses: float, won: bool) -> None:
        """Add the next outcome of a member that has these so far."""
        top = _WINS + wins if won else _LOSSES + losses
        self.log = FORGET * self.log + np.log(top / (_STRENGTHS + wins + losses))


def beta(populations: Iterable[Population], most: float = math.inf) -> Beta:
    """Return the fitted Beta distribution: posterior mean of its mean, of its log strength.

    ``most`` bounds the strength, the number of outcomes that it weighs.
    """
    log = sum((one.log for one in populations), np.where(most >= _STRENGTHS, 0.0, -np.inf))
    weights = np.exp(log - log.max())
    weights /= weights.sum()
    strength = math.exp(float((weights * np.log(_STRENGTHS)).sum()))
    mean = float((weights * _MEANS).sum())
    return mean * strength, (1 - mean) * strength


class Outcomes:
    """Remember the outcomes of entries and of free play; any thread may call.

    Entries with equal task, kind and text are one, whatever their ids and versions.
    """

    def __init__(self) -> None:
        self._used: defaultdict[Content, deque[Played]] = defaultdict(lambda: deque(maxlen=LAST))
        self._unknown: Counter[Content] = Counter()
        self._free: defaultdict[str, deque[bool]] = defaultdict(lambda: deque(maxlen=LAST))
        self._all_used: deque[Played] = deque(maxlen=LAST)
        self._all_free: deque[bool] = deque(maxlen=LAST)
        self._entries: defaultdict[tuple[int, int], Population] = defaultdict(Population)
        self._tasks = Population()
        self._harm = dict[str, float]()  # cumulative sums of words
        self._proven = set[str]()  # whose sum has reached PROVEN
        # What was computed since the last outcome.
        self._priors: dict[tuple[int, int], Beta] = {}
        self._near: dict[int, tuple[int, bool]] = {}
        self._untried: dict[tuple[int, int, str | None, bool], Standing] = {}
        self._lock = threading.Lock()

    def note(
        self,
        task: str,
        won: bool | None,
        shown: Sequence[tuple[Content, float, int]] | None,
        *,
        again: bool = False,
    ) -> None:
        """Add an episode: each entry shown with its relevance and how often it was written.

        ``shown`` is None where nothing was shown; ``won`` None is an unknown outcome, and ``again``
        says that it was unknown before.
        """
        with self._lock:
            self._priors.clear()
            self._near.clear()
            self._untried.clear()
            if shown is None and won is not None:
                past = self._free[task]
                self._tasks.note(sum(past), len(past) - sum(past), won)
                past.append(won)
                self._all_free.append(won)
            for content, relevance, said in shown or ():
                self._unknown[content] += (won is None) - again
                if won is None:
                    continue
                past = self._used[content]
                wins, losses = _faded([one for one in past if _is_near(one, relevance)])
                kind = (round(relevance / _BAND), min(said, SAID_MOST))
                self._entries[kind].note(wins, losses, won)
                if won or _is_new(past, relevance):  # else its own record says it already
                    self._accuse(content, task, won)
                past.append(Played(relevance, won, task))
                self._all_used.append(past[-1])

    def standing(
        self,
        family: Sequence[Content],
        relevance: float | None,
        *,
        said: int = 1,
        task: str | None = None,
        age: int = 0,
        proposed: bool = False,
        query: str = "",
    ) -> Standing:
        """Return what is known of an entry near one relevance, by default that of its best use.

        Args:
            family: the entry, and all it was merged from.
            relevance: of the query at hand.
            said: times that extractors wrote the text.
            task: of the entry; its free episodes are the baseline.
            age: commits since it was written.
            proposed: whether it waits for approval.
            query: at hand; its words do not make an entry suspect.
        """
        with self._lock:
            is_suspect = self._adds_harm(family[0], self._proven - content_words(query))
            known = self._standing(family, relevance, said, task, is_suspect)
        return known.model_copy(update={"age": age, "proposed": proposed})

    def standings(
        self, query: str, asked: Iterable[tuple[Sequence[Content], float, Experience]]
    ) -> list[Standing]:
        """Return what is known of many entries near a query, without their ages.

        Of each its family and relevance are given. Entries that were never shown share a standing.
        """
        with self._lock:
            harm = self._proven - content_words(query)
            return [
                self._standing(
                    family,
                    relevance,
                    entry.provenance.said,
                    entry.task,
                    bool(harm) and self._adds_harm(family[0], harm),
                )
                for family, relevance, entry in asked
            ]

    def _standing(
        self,
        family: Sequence[Content],
        relevance: float | None,
        said: int,
        task: str | None,
        is_suspect: bool,
    ) -> Standing:
        if self._used.keys().isdisjoint(family) and self._unknown.keys().isdisjoint(family):
            band = round((1.0 if relevance is None else relevance) / _BAND)
            if same := self._untried.get((band, said, task, is_suspect)):
                return same
        past = [one for content in reversed(family) for one in self._used.get(content, ())]
        if relevance is None:
            relevance = max((one.relevance for one in past), default=1.0)
        closer = [one for one in past if one.relevance > relevance]
        past = [one for one in past if _is_near(one, relevance)]
        if not past and closer and _faded(closer)[0] < _faded(closer)[1]:
            past = closer  # what failed where it fits better is not untried here
        band, often = round(relevance / _BAND), min(said, SAID_MOST)
        unknown = sum(self._unknown.get(content, 0) for content in family)
        prior = self._priors.get((band, often))
        if prior is None:
            known = (self._entries.get((near, often)) for near in range(band - 1, band + 2))
            prior = beta(filter(None, known), STRONGEST)
            self._priors[band, often] = prior
        if band not in self._near:
            all_used = [one.won for one in self._all_used if _is_near(one, relevance)]
            overall = difference(*_counts(all_used), *_counts(self._all_free))
            self._near[band] = len(all_used), overall[0] > 0.0
        wins, losses = _faded(past)
        alone = _counts(self._free.get(task or "", ()))
        tasks = {one.task for one in past}
        matched = [won for one in tasks for won in self._free.get(one, ())]
        found = Standing(
            uses=len(past),
            successes=wins,
            failures=losses,
            unknown=unknown,
            others=self._near[band][0],
            free_successes=alone[0],
            free_failures=alone[1],
            posterior=(prior[0] + wins, prior[1] + losses),
            baseline=self._baseline(task or ""),
            tasks=sum(one in self._free for one in tasks),
            difference=_mean([one.won for one in past]) - _mean(matched)
            if past and matched
            else None,
            interval=difference(
                *_counts([one.won for one in past]), *_counts(matched or self._all_free)
            ),
            settled=self._near[band][1],
            task=task,
            said=said,
            suspect=is_suspect,
        )
        if not past and not unknown:
            self._untried[band, said, task, is_suspect] = found
        return found

    def _baseline(self, task: str) -> Beta:
        """Return the posterior of the success rate of a task with nothing shown."""
        if (prior := self._priors.get((-1, 0))) is None:
            prior = self._priors[-1, 0] = beta([self._tasks])
        wins, losses = _counts(self._free.get(task, ()))
        return prior[0] + wins, prior[1] + losses

    def _accuse(self, content: Content, task: str, won: bool) -> None:
        """Add an outcome to the cumulative sum of each word that an entry adds to its query."""
        wins, losses = self._baseline(task)
        rate = wins / (wins + losses + CAUTION)
        change = math.log(HARM if won else (1 - HARM * rate) / (1 - rate))
        change = min(change, PROVEN / (ACCUSES + 1))
        for word in _added_words(content, task):
            self._harm[word] = min(max(0.0, self._harm.get(word, 0.0) + change), PROVEN)
            (self._proven.add if self._harm[word] >= PROVEN else self._proven.discard)(word)

    def _adds_harm(self, content: Content, harm: set[str]) -> bool:
        """Return whether an entry has one of these words, and its task has not."""
        task, _, text = content
        return bool(harm & content_words(text) - content_words(task or "")) if harm else False


def _added_words(content: Content, query: str) -> set[str]:
    task, _, text = content
    return content_words(text) - content_words(query) - content_words(task or "")


def _is_near(one: Played, relevance: float) -> bool:
    return abs(one.relevance - relevance) <= NEARBY


def _is_new(past: deque[Played], relevance: float) -> bool:
    """Return whether a failure of an entry accuses its words.

    It does as the first near its relevance since the last success, at most ``ACCUSES`` times.
    """
    counted = list[float]()
    for one in reversed([*takewhile(lambda one: not one.won, reversed(past))]):
        if not any(abs(one.relevance - other) <= NEARBY for other in counted):
            counted.append(one.relevance)
    return len(counted) < ACCUSES and all(abs(relevance - one) > NEARBY for one in counted)


def _faded(past: Sequence[Played]) -> tuple[float, float]:
    """Return successes and failures, the last outcome with weight 1 and the others with less."""
    wins = losses = 0.0
    for one in past:
        wins, losses = FADE * wins + one.won, FADE * losses + (not one.won)
    return wins, losses


def _counts(past: Sequence[bool] | deque[bool]) -> tuple[int, int]:
    return sum(past), len(past) - sum(past)


def _mean(past: Sequence[bool]) -> float:
    return sum(past) / len(past)


@lru_cache(4096)
def difference(wins: int, losses: int, free_wins: int, free_losses: int) -> tuple[float, float]:
    """Return the anytime-valid interval of a success rate minus that of free play.

    >>> low, high = difference(0, 30, 8, 2)
    >>> high < 0 < difference(8, 2, 0, 30)[0]
    True
    >>> difference(0, 0, 8, 2)[1] > 0
    True
    """
    low, high = sequence(wins, losses, ERROR / 2)
    free_low, free_high = sequence(free_wins, free_losses, ERROR / 2)
    return low - free_high, high - free_low


def sequence(wins: int, losses: int, error: float) -> tuple[float, float]:
    """Return a confidence sequence of a rate: all p with p^s (1-p)^f >= error * B(s+1, f+1).

    By Ville's inequality the true rate is inside at all times with probability 1 - error, since the
    ratio of the mixture likelihood with a uniform prior to the true one is a martingale.

    >>> sequence(0, 0, 0.05)
    (0.0, 1.0)
    >>> [round(end, 2) for end in sequence(50, 50, 0.05)]
    [0.34, 0.66]
    """
    marginal = math.lgamma(wins + 1) + math.lgamma(losses + 1) - math.lgamma(wins + losses + 2)
    bound = marginal + math.log(error)

    def inside(p: float) -> bool:
        return wins * math.log(p) + losses * math.log(1 - p) >= bound

    if not wins + losses:
        return 0.0, 1.0
    peak = min(max(wins / (wins + losses), 1e-9), 1 - 1e-9)
    low = _edge(inside, peak, 1e-9) if wins else 0.0
    return low, _edge(inside, peak, 1 - 1e-9) if losses else 1.0


def _edge(inside: Callable[[float], bool], within: float, outside: float) -> float:
    """Bisect for the end of an interval between a point inside and one outside."""
    for _ in range(40):
        middle = (within + outside) / 2
        within, outside = (middle, outside) if inside(middle) else (within, middle)
    return within
