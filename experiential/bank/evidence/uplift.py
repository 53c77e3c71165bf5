"""Estimate an entry's uplift: guided members of a group that used it against free members.

The members of a group start from one task and one seed, so the difference of the success rates of
those that used an entry and of those that saw no bank is a paired one. Its mean over groups
estimates the entry's uplift. The interval is Student's t over groups.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist, mean, stdev

from experiential.bank.evidence.credit import Ancestor, lineage
from experiential.bank.storage.journal import Journal
from experiential.types import Estimate, Uplift

LEVEL = 0.95
_EXACT_UP_TO = 30
_TALLY = """
    SELECT COUNT(*), COUNT(success), COALESCE(SUM(success), 0) FROM uses
    WHERE namespace = ? AND experience = ? AND version = ?"""
# CROSS JOIN keeps this order: from the uses of one entry to their episodes to those of the group.
_DIFFERENCES = """
    WITH named (experience, version) AS (VALUES {pairs}),
    guided AS (
        SELECT DISTINCT t.id, t.grp, t.success FROM named n
        CROSS JOIN uses u
            ON u.namespace = ?1 AND u.experience = n.experience AND u.version = n.version
        CROSS JOIN trajectories t ON t.namespace = ?1 AND t.id = u.trajectory
        WHERE t.condition = 'guided' AND t.error IS NULL AND t.success IS NOT NULL
            AND t.grp <> ''{guided}),
    rates AS (SELECT grp, AVG(success) AS rate FROM guided GROUP BY grp)
    SELECT g.grp, g.rate - AVG(f.success) FROM rates g
    CROSS JOIN trajectories f
        ON f.namespace = ?1 AND f.grp = g.grp AND f.condition = 'free' AND f.error IS NULL
            AND f.success IS NOT NULL{free}
    GROUP BY g.grp ORDER BY g.grp"""
LAST_SEQ = "SELECT MAX(seq) FROM changes"
# The + keeps SQLite from the index by namespace, which would read every change at each call.
MERGED = """
    SELECT v.id, v.version, json_extract(v.record, '$.provenance.parents') FROM changes c
    CROSS JOIN versions v ON v.namespace = c.namespace AND v.id = c.id
        AND v.version = c.version AND v.commit_id = c.commit_id
    WHERE c.seq > ? AND c.seq <= ? AND +c.namespace = ? AND c.commit_id <= ?
        AND instr(v.record, '"parents":[[') > 0"""
ALWAYS = 2**62
"""A commit after every other."""


@dataclass(eq=False)
class Evidence:
    """Read the outcomes and merges of entry versions of one namespace, up to a commit.

    Attributes:
        children: versions merged from a version, as of the last ``read_merges``.
        parents: versions that a version was merged from, likewise.
    """

    journal: Journal
    namespace: str
    until: int = ALWAYS
    children: dict[Ancestor, list[Ancestor]] = field(default_factory=dict[Ancestor, list[Ancestor]])
    parents: dict[Ancestor, list[Ancestor]] = field(default_factory=dict[Ancestor, list[Ancestor]])
    _seen: int = 0

    def read_merges(self) -> list[Ancestor]:
        """Read the merges since the last call; return the merged versions."""
        with self.journal.lock:
            last = self.journal.value(LAST_SEQ) or 0
            bounds = (self._seen, last, self.namespace, self.until)
            heirs: list[Ancestor] = []
            for id, version, merged in self.journal.rows(MERGED, *bounds):
                parents = [(one[0], one[1]) for one in json.loads(merged)]
                self.parents[id, version] = parents
                for parent in parents:
                    self.children.setdefault(parent, []).append((id, version))
                heirs.append((id, version))
            self._seen = last
            return heirs

    def uplift(self, id: str, version: int) -> Uplift:
        """Return counts and estimates of one entry version."""
        uses, outcomes, successes = self.journal.rows(_TALLY, self.namespace, id, version)[0]
        self.read_merges()
        below = lineage(id, version, lambda id, at: self.children.get((id, at), ()))
        family = list(dict.fromkeys([*self.ancestors(id, version), *below]))
        alone = estimate(self._differences([(id, version)]).values())
        return Uplift(
            id=id,
            version=version,
            uses=uses,
            outcomes=outcomes,
            successes=successes,
            lineage=alone if len(family) == 1 else estimate(self._differences(family).values()),
            **dict(alone),
        )

    def _differences(self, versions: Sequence[Ancestor]) -> dict[str, float]:
        """Return per group the success rate of guided members that used a version minus the free.

        An episode counts once however often it used them; one that failed for a technical cause
        does not count.
        """
        pairs = ", ".join(f"(?{2 * i + 3}, ?{2 * i + 4})" for i in range(len(versions)))
        named = [value for version in versions for value in version]
        # Without a bound, an index alone answers for the free members.
        bound = "" if self.until == ALWAYS else " AND {}.commit_id <= ?2"
        statement = _DIFFERENCES.format(
            pairs=pairs, guided=bound.format("t"), free=bound.format("f")
        )
        return dict(self.journal.rows(statement, self.namespace, self.until, *named))

    def ancestors(self, id: str, version: int) -> list[Ancestor]:
        """Return the version itself and, as of ``read_merges``, all that it was merged from."""
        return lineage(id, version, lambda id, at: self.parents.get((id, at), ()))


def estimate(differences: Iterable[float]) -> Estimate:
    """Return the mean of differences with its interval, mean ± t(0.975, n - 1) · s / √n.

    Groups that all differ by the same amount give an interval of no width, however few they are.

    >>> estimate([0.5, 1.0, 0.0]).mean
    0.5
    >>> [round(end, 3) for end in estimate([0.5, 1.0, 0.0]).interval]
    [-0.742, 1.742]
    """
    values = list(differences)
    if len(values) < 2:
        return Estimate(groups=len(values), mean=values[0] if values else None)
    middle = mean(values)
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Estimate(groups=len(values), mean=middle, interval=(middle - half, middle + half))


@cache
def t_quantile(df: int) -> float:
    """Return the two-sided 95 % quantile of Student's distribution with ``df`` degrees.

    Abramowitz & Stegun: up to 30 degrees the finite sums 26.7.3 and 26.7.4, solved by bisection;
    above, the expansion 26.7.5, whose error is below 1e-7 there.

    >>> [round(t_quantile(df), 3) for df in (1, 2, 10, 30, 120)]
    [12.706, 4.303, 2.228, 2.042, 1.98]
    """
    if df < 1:
        raise ValueError(f"Expected at least one degree of freedom, got {df}")
    if df > _EXACT_UP_TO:
        z = NormalDist().inv_cdf((1 + LEVEL) / 2)
        terms = (
            z,
            (z**3 + z) / 4,
            (5 * z**5 + 16 * z**3 + 3 * z) / 96,
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
        )
        return sum(term / df**i for i, term in enumerate(terms))
    low, high, odd = 0.0, math.pi / 2, df % 2
    for _ in range(60):
        angle = (low + high) / 2
        # P(|T| < √df · tan(angle)), by 26.7.3 for odd and 26.7.4 for even df.
        cosine = math.cos(angle)
        term, total = cosine if odd else 1.0, 0.0
        for power in range(odd, df - 1, 2):
            total += term
            term *= (power + 1) / (power + 2) * cosine**2
        total *= math.sin(angle)
        central = 2 / math.pi * (angle + total) if odd else total
        low, high = (angle, high) if central < LEVEL else (low, angle)
    return math.sqrt(df) * math.tan(low)
