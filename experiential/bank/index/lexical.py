"""Find entries that share words with a query: BM25 by SQLite's full-text index, in memory."""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
import unicodedata
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from experiential.bank.search.where import Scope
from experiential.bank.storage.tables import Live
from experiential.errors import BankError
from experiential.types import Experience

_WORD = re.compile(r"[^\W_]+")
_MATCH = "SELECT rowid FROM entries WHERE entries MATCH ? ORDER BY rank"
_POSTINGS = 4000
"""Entries that the words looked up may be in, all words together, the rarest words first."""
_MOST_WORDS = 256
"""Different words of a query that count; later ones are left out."""
_STOP = frozenset(
    """
    a about after all also an and any are as at be because been before being but by can could did do
    does doing done for from get got had has have having he her here him his how i if in into is it
    its just like may me might mine more most must my no nor not of off on once one only or other
    our out over own same shall she should so some such than that the their them then there these
    they this those through to too under until up us very was we were what when where which while
    who whom whose why will with would you your
    """.split()
)  # noqa: SIM905  (a list of words is easier to read than a list of texts)


def words_of(text: str) -> list[str]:
    """Split a text into words: runs of letters and digits, in lower case, without accents.

    >>> words_of("Café ERR_404: why?")
    ['cafe', 'err', '404', 'why']
    """
    if text.isascii():
        return _WORD.findall(text.lower())
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return _WORD.findall("".join(letter for letter in plain if not unicodedata.combining(letter)))


def content_words(text: str) -> set[str]:
    """Return the words of a text, English function words ("what", "the") left out.

    >>> sorted(content_words("What is in the red box?"))
    ['box', 'red']
    """
    return set(words_of(text)) - _STOP


class Weights(dict[str, float]):
    """Weigh the words of one query, English function words ("what", "the") left out.

    The weight of a word is the square of ln(1 + (N - n + 0.5) / (n + 0.5)), for N entries of which
    n have it; a word that no entry has counts as if one had it.
    """

    def share(self, entry: Experience) -> float:
        """Return the share of the weight that is on words of this entry, in [0, 1]."""
        whole = sum(self.values())
        if not whole:
            return 0.0
        held = set(words_of(_searched(entry)))
        return sum(weight for word, weight in self.items() if word in held) / whole


class Found(NamedTuple):
    """Hold the weights of a query's words, and entries with some of them, best BM25 first."""

    weights: Weights
    entries: list[Live]


class Lexical:
    """Index the words of the live entries, texts and tasks, in memory; the caller holds a lock."""

    def __init__(self, entries: Iterable[Live]) -> None:
        self._database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        try:
            # The tokenizer splits at blanks and ASCII marks only, of which words_of leaves blanks:
            # both always agree on what a word is.
            self._database.execute(
                "CREATE VIRTUAL TABLE entries USING fts5(body, tokenize='ascii')"
            )
            self._database.execute(
                "CREATE VIRTUAL TABLE vocabulary USING fts5vocab(entries, 'row')"
            )
        except sqlite3.OperationalError as error:
            self._database.close()
            raise BankError(
                f"Expected SQLite with FTS5 for hybrid retrieval, got {error}; set"
                " bank.options.retrieval.hybrid=0"
            ) from error
        self._rows: dict[str, int] = {}
        self._live: dict[int, Live] = {}
        self._last = 0
        self.apply({live.experience.id: live for live in entries})

    def apply(self, changes: Mapping[str, Live | None]) -> None:
        """Put these entries in place of earlier versions, or take them out (None), all at once."""
        run = self._database
        run.execute("BEGIN")
        try:
            for id, live in changes.items():
                if (old := self._rows.pop(id, None)) is not None:
                    run.execute("DELETE FROM entries WHERE rowid = ?", (old,))
                    del self._live[old]
                if live is not None:
                    self._last += 1
                    row = self._last, " ".join(words_of(_searched(live.experience)))
                    run.execute("INSERT INTO entries (rowid, body) VALUES (?, ?)", row)
                    self._rows[id], self._live[self._last] = self._last, live
        finally:
            run.execute("COMMIT")

    def search(self, query: str, n: int, scope: Scope) -> Found:
        """Return the weights of the query's words, and the ``n`` best entries in ``scope``.

        Entries are ranked by BM25 for the rarest of the words.
        """
        asked = [word for word in dict.fromkeys(words_of(query)) if word not in _STOP][:_MOST_WORDS]
        marks = ", ".join("?" * len(asked))
        statement = f"SELECT term, doc FROM vocabulary WHERE term IN ({marks})"
        counts: dict[str, int] = dict(self._database.execute(statement, asked).fetchall())
        weights = Weights()
        for word in asked:
            holders = counts.get(word, 1)
            odds = max(0.0, len(self._live) - holders + 0.5) / (holders + 0.5)
            weights[word] = math.log1p(odds) ** 2
        words: list[str] = []
        postings = 0
        for word, count in sorted(counts.items(), key=lambda pair: pair[1]):
            postings += count
            if words and postings > _POSTINGS:
                break
            words.append(word)
        if not words:
            return Found(weights, [])
        # Words are letters and digits only: quoted, none can be read as an operator of the query
        # language.
        match = " OR ".join(f'"{word}"' for word in words)
        found: list[Live] = []
        with contextlib.closing(self._database.execute(_MATCH, (match,))) as rows:
            for (row,) in rows:
                if len(found) == n:
                    break
                if scope.admits(live := self._live[row]):
                    found.append(live)
        return Found(weights, found)


def _searched(entry: Experience) -> str:
    """Return the text whose words are indexed: the entry's own and its task's, like its vector."""
    return f"{entry.text}\n{entry.task or ''}"
