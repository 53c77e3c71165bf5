"""Hybrid retrieval: words find what vectors miss, are always those of the live entries, and cannot
break the query language.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import BUNDLED_PACKAGE
from experiential.bank.index.lexical import Lexical, words_of
from experiential.bank.index.nearest import Nearest
from experiential.bank.options import RetrievalOptions
from experiential.bank.search.strategies import Candidate, Retrievals, select
from experiential.bank.search.where import Scope
from experiential.bank.storage.tables import Live, LiveEntries, Stored
from experiential.types import Experience, Provenance
from tests.test_serve import serving

CODE = (
    "Before you leave the harbour, count the crew, store the anchor chain and enter QX77ZP in the"
    " log."
)
OTHERS = [
    "The red door needs the brass key from the guard room.",
    "Wait for the guard to leave before you cross the yard.",
    "Heat the egg in the microwave, then put it on the table.",
    "Push the box along the wall, never into a corner.",
]
HYBRID = {"hybrid": 0.5, "strategy": "nearest"}


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[FolderBank]:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add_many([*OTHERS, CODE])
        yield bank


def found(bank: Any, query: str = "what is QX77ZP?", n: int = 1, **options: Any) -> list[str]:
    """The texts that share words with a query."""
    rows = bank.nearest([query], n, [Scope(options.get("exclude"))], words=True)
    return [hit.item.text for hit in rows[0] if hit.words > 0.0]


def live(text: str, **values: Any) -> Live:
    return Live(Experience(text=text, **values), frozenset())


# Words and their share


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Error E4711: why?", ["error", "e4711", "why"]),
        ("parse_manifest-v2()", ["parse", "manifest", "v2"]),
        ("CAFÉ cafe\u0301 straße", ["cafe", "cafe", "strasse"]),
        ('"OR" (NEAR', ["or", "near"]),
        ("\x00\ud800 .,;", []),
    ],
)
def test_words_are_runs_of_letters_and_digits(text: str, words: list[str]) -> None:
    assert words_of(text) == words


def test_the_share_equals_one_worked_by_hand() -> None:
    """Of 3 entries 1 has 'lever', 2 have 'door'; 'zebra', which none has, counts as if one had;
    'the' is no word that tells.
    """
    index = Lexical([live("the lever"), live("a door"), live("door")])
    rare, common = math.log(1 + 2.5 / 1.5) ** 2, math.log(1 + 1.5 / 2.5) ** 2
    result = index.search("the lever, the door, the zebra", 9, Scope())
    assert result.weights == pytest.approx({"lever": rare, "door": common, "zebra": rare})
    assert result.weights.share(Experience(text="Pull that LEVER.")) == pytest.approx(
        rare / (2 * rare + common)
    )
    assert result.weights.share(Experience(text="-", task="open the door")) == pytest.approx(
        common / (2 * rare + common)
    )
    assert result.weights.share(Experience(text="no such thing")) == 0.0


def test_a_query_without_a_word_that_tells_finds_nothing_by_words() -> None:
    index = Lexical([live("what is the matter")])
    for query in ("", "what is the", "?!"):
        result = index.search(query, 5, Scope())
        assert (
            result.entries == []
            and result.weights.share(Experience(text="what is the matter")) == 0.0
        )


def test_the_rarest_words_are_looked_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from experiential.bank.index import lexical

    monkeypatch.setattr(lexical, "_POSTINGS", 3)
    index = Lexical([*(live(f"door {i}") for i in range(10)), live("lever"), live("door lever")])
    assert {one.experience.text for one in index.search("door lever", 99, Scope()).entries} == {
        "lever",
        "door lever",
    }


# What the settings mean


def test_an_entry_reaches_the_floor_by_its_cosine_or_by_its_words() -> None:
    rows = [Candidate("near", 0.4), Candidate("worded", 0.0, 0.5), Candidate("neither", 0.29, 0.29)]

    def chosen(**options: Any) -> list[str]:
        settings = RetrievalOptions(strategy="nearest", floor=0.3, **options)
        return [one.id for one, _ in select(rows, Retrievals(8), settings, random.Random(0), 3)]

    assert chosen(hybrid=0.5) == ["worded", "near"]
    assert chosen(hybrid=0.1) == ["near", "worded"]
    assert chosen() == ["near"]


@given(
    rows=st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 1)), max_size=12),
    hybrid=st.floats(0, 1),
    floor=st.floats(-1, 1),
    strategy=st.sampled_from(["nearest", "diverse"]),
)
def test_words_only_ever_let_more_entries_in(
    rows: Sequence[tuple[float, float]], hybrid: float, floor: float, strategy: str
) -> None:
    candidates = [Candidate(str(i), *row) for i, row in enumerate(rows)]

    def chosen(weight: float) -> set[str]:
        settings = RetrievalOptions(strategy=strategy, floor=floor, hybrid=weight)
        return {
            one.id for one, _ in select(candidates, Retrievals(8), settings, random.Random(0), 99)
        }

    assert chosen(0.0) <= chosen(hybrid)
    assert chosen(hybrid) <= {one.id for one in candidates if max(one.cosine, one.words) >= floor}


def test_the_score_of_a_hit_is_what_it_was_ranked_by(bank: FolderBank) -> None:
    cosine, words = next(
        (hit.score, hit.words)
        for hit in bank.nearest(["QX77ZP"], 9, [Scope()], words=True)[0]
        if hit.words
    )
    assert words == 1.0
    with xp.ExperienceManager(bank, retrieval={**HYBRID, "hybrid": 0.25}) as manager:
        assert manager.search("QX77ZP")[0].score == pytest.approx(0.75 * cosine + 0.25)


# What only words find


@pytest.mark.parametrize("query", ["QX77ZP", "what does qx77zp mean?", "tell me about QX77ZP"])
def test_an_entry_that_only_words_find_is_found(bank: FolderBank, query: str) -> None:
    with xp.ExperienceManager(bank) as manager:
        assert CODE not in [hit.experience.text for hit in manager.search(query, k=2)]
    for strategy in ("diverse", "nearest", "evidence"):
        with xp.ExperienceManager(bank, retrieval={"hybrid": 0.5, "strategy": strategy}) as manager:
            assert manager.search(query)[0].experience.text == CODE


@pytest.mark.skipif(
    importlib.util.find_spec(BUNDLED_PACKAGE) is None,
    reason="the default model's package is not installed",
)
def test_the_default_model_misses_a_code_that_words_find(tmp_path: Path) -> None:
    with xp.ExperienceBank(tmp_path / "bank") as bank:
        bank.add_many(OTHERS)
        bank.add(CODE, task="put a hot egg on the kitchen table")
        with xp.ExperienceManager(bank) as manager:
            assert manager.search("what is QX77ZP?") == []
        with xp.ExperienceManager(bank, retrieval={"hybrid": 0.3}) as manager:
            assert [hit.experience.text for hit in manager.search("what is QX77ZP?")] == [CODE]
            assert manager.search("the quarterly report of the finance team") == []


@pytest.mark.parametrize("hybrid", [0.25, 0.5, 1])
@pytest.mark.parametrize("query", ["QX77ZP", "what does qx77zp mean?", "the guard of the red door"])
def test_a_search_of_the_bank_ranks_and_scores_as_a_manager_with_the_same_weight(
    bank: FolderBank, query: str, hybrid: float
) -> None:
    def told(hits: list[xp.Hit]) -> list[tuple[str, float, int]]:
        return [(hit.experience.text, pytest.approx(hit.score), hit.rank) for hit in hits]

    retrieval = {"hybrid": hybrid, "strategy": "nearest", "floor": -1.0}
    with xp.ExperienceManager(bank, retrieval=retrieval) as manager:
        assert told(bank.search(query, k=3, hybrid=hybrid)) == told(manager.search(query, k=3))
    assert told(bank.snapshot().search(query, k=3, hybrid=hybrid)) == told(
        bank.search(query, k=3, hybrid=hybrid)
    )
    assert [told(row) for row in bank.search([query, "egg"], k=3, hybrid=hybrid)][0] == told(
        bank.search(query, k=3, hybrid=hybrid)
    )


def test_a_search_finds_by_words_what_is_not_among_the_nearest(bank: FolderBank) -> None:
    bank.add_many(f"what is {number}?" for number in range(100))
    assert CODE not in [hit.experience.text for hit in bank.search("what is QX77ZP?", k=50)]
    assert bank.search("what is QX77ZP?", hybrid=0.5)[0].experience.text == CODE
    assert bank.search("what is QX77ZP?", hybrid=0.0) == bank.search("what is QX77ZP?")
    assert CODE not in [
        hit.experience.text for hit in bank.search("QX77ZP", hybrid=1.0, where={"kind": "warning"})
    ]


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan, "0.5", True, None])
def test_a_weight_outside_its_range_is_refused(bank: FolderBank, weight: Any) -> None:
    for searched in (bank, bank.snapshot()):
        with pytest.raises(ValueError, match="Expected hybrid to be a number from 0 to 1, got "):
            searched.search("door", hybrid=weight)


def test_common_words_do_not_break_abstention(bank: FolderBank) -> None:
    """One word of six is shared: less than the floor."""
    with xp.ExperienceManager(bank, retrieval={**HYBRID, "floor": 0.6}) as manager:
        assert manager.search("paint seven wooden boats before the guard") == []


def test_words_are_indexed_before_somebody_waits(bank: FolderBank) -> None:
    nearest = bank._state.nearest  # pyright: ignore[reportPrivateUsage]
    with xp.ExperienceManager(bank):
        assert nearest._lexical is None  # pyright: ignore[reportPrivateUsage]
    with xp.ExperienceManager(bank, retrieval=HYBRID):
        assert nearest._lexical is not None  # pyright: ignore[reportPrivateUsage]


# Query text is not a query language


@given(query=st.text(max_size=60) | st.text(alphabet="\"*^:(){}+-'\\,;ab \n\x00", max_size=30))
@example('"')
@example('red" OR "door')
@example("red AND NOT door")
@example("NEAR(red door, 2)")
@example("body : red*")
@example("'; DROP TABLE entries; --")
@example("{body} : ^red")
@example("\ud800\x00 red")
def test_any_text_is_a_query_and_finds_by_its_words_alone(query: str) -> None:
    index = Lexical([live("red door"), live("door"), live("lamp ab")])
    result = index.search(query, 9, Scope())
    words = set(words_of(query)) & {"red", "door", "lamp", "ab"}
    assert {one.experience.text for one in result.entries} == {
        text for text in ("red door", "door", "lamp ab") if words & set(text.split())
    }


# Always the live entries


def test_words_follow_updates_removals_and_rollback(bank: FolderBank) -> None:
    assert found(bank) == [CODE]
    entry = next(one for one in bank if one.text == CODE)
    before = bank.head
    bank.update(entry.id, "Enter KM12 in the log.")
    assert found(bank) == [] and found(bank, "KM12") == ["Enter KM12 in the log."]
    bank.rollback(before)
    assert found(bank) == [CODE] and found(bank, "KM12") == []
    bank.remove(entry.id)
    assert found(bank) == []
    assert found(bank.at(before)) == [CODE]
    bank.add("QX77ZP again")
    assert found(bank) == ["QX77ZP again"]


def test_words_are_there_again_when_a_bank_is_opened_again_and_read_only_changes_nothing(
    bank: FolderBank,
) -> None:
    found(bank)
    bank.add("KM12 is the code of the gate.")
    bank.close()
    files = {
        file: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in bank.path.rglob("*")
        if file.is_file()
    }
    with (
        xp.ExperienceBank(bank.path, read_only=True) as reader,
        xp.ExperienceManager(reader, retrieval=HYBRID) as manager,
    ):
        assert manager.search("what is QX77ZP?")[0].experience.text == CODE
        assert manager.search("KM12")[0].experience.text.startswith("KM12")
    assert files == {
        file: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in bank.path.rglob("*")
        if file.is_file()
    }
    with xp.ExperienceBank(bank.path) as again:
        assert found(again) == [CODE]


def test_words_respect_the_excluded_instance_and_the_filter(bank: FolderBank) -> None:
    seen = Experience(
        text="QX77ZP is written on the wall.",
        provenance=Provenance(instance="door#1"),
        kind="warning",
    )
    bank.import_entries([seen], "test")
    assert set(found(bank, n=9)) == {CODE, seen.text}
    assert found(bank, n=9, exclude="door#1") == [CODE]
    with xp.ExperienceManager(bank, retrieval=HYBRID) as manager:
        assert [
            hit.experience.text for hit in manager.search("QX77ZP", k=4, exclude_instance="door#1")
        ] == [CODE]
        assert [
            hit.experience.text for hit in manager.search("QX77ZP", k=4, where={"kind": "warning"})
        ] == [seen.text]


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 6),
            st.sampled_from(["red door", "door", "lamp", "red lamp", None]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_every_live_entry_is_found_once_with_its_own_share(
    steps: list[tuple[int, str | None, bool]],
) -> None:
    nearest, table = Nearest(LiveEntries(), limit=1000), dict[str, Live]()
    rng = np.random.default_rng(0)
    for seq, (number, text, ask) in enumerate(steps):
        id = str(number)
        if text is None:
            table.pop(id, None)
            nearest.publish([(id, None, seq)])
        else:
            stored = Stored(
                Experience(id=id, text=text), rng.standard_normal(4).astype(np.float32), frozenset()
            )
            table[id] = Live(stored.experience, stored.origins)
            nearest.publish([(id, stored, seq)])
        if ask and table:
            row = nearest.search(
                np.ones((1, 4), dtype=np.float32), 2, lambda: table, [Scope()], ["red lamp"]
            )[0]
            weights = Lexical(table.values()).search("red lamp", 1, Scope()).weights
            assert len({hit.item.id for hit in row}) == len(row)
            assert all(hit.item == table[hit.item.id].experience for hit in row)
            assert [hit.words for hit in row] == pytest.approx(
                [weights.share(hit.item) for hit in row]
            )
            both = [one for one in table.values() if one.experience.text == "red lamp"]
            assert sum(hit.words == 1.0 for hit in row) >= min(2, len(both))


class LargeBank(FolderBank):
    RESIDENT_LIMIT = 20


def test_words_find_what_chroma_holds_and_what_it_does_not_hold_yet(tmp_path: Path) -> None:
    with LargeBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add_many([CODE, *(f"note {i} about door {i}" for i in range(60))])
        bank.flush_index()
        assert bank._state.nearest.is_large  # pyright: ignore[reportPrivateUsage]
        assert found(bank) == [CODE]
        exact = bank.embedder(["what is QX77ZP?", CODE])
        hit = next(
            hit
            for hit in bank.nearest(["what is QX77ZP?"], 1, [Scope()], words=True)[0]
            if hit.words
        )
        assert hit.score == pytest.approx(float(exact[0] @ exact[1]), abs=1e-4)
        fresh = bank.add("KM12 is the code of the gate.")
        assert found(bank, "KM12") == [fresh.text]
        entry = next(one for one in bank if one.text == CODE)
        bank.update(entry.id, "QX77ZP is no more.")
        assert found(bank) == ["QX77ZP is no more."]
        bank.flush_index()
        assert found(bank) == ["QX77ZP is no more."]
        bank.remove(entry.id)
        assert found(bank) == []


@pytest.mark.parametrize("read_only", [False, True])
def test_a_server_finds_by_words_for_its_clients(bank: FolderBank, read_only: bool) -> None:
    with serving(bank) as url, xp.ExperienceBank(url, read_only=read_only) as client:
        wanted = [
            (hit.item.id, hit.score, hit.words)
            for hit in bank.nearest(["the QX77ZP door"], 3, [Scope()], words=True)[0]
        ]
        got = [
            (hit.item.id, hit.score, hit.words)
            for hit in client.nearest(["the QX77ZP door"], 3, [Scope()], words=True)[0]
        ]
        assert sorted(got) == sorted(wanted)
        assert found(client.snapshot()) == [CODE]
        with xp.ExperienceManager(client, retrieval=HYBRID) as manager:
            assert manager.search("what is QX77ZP?")[0].experience.text == CODE


def test_searches_go_on_while_others_write(bank: FolderBank) -> None:
    def write() -> None:
        for i in range(60):
            entry = bank.add(f"door {i} is open")
            bank.update(entry.id, f"door {i} is shut")
            bank.remove(entry.id) if i % 2 else None

    with xp.ExperienceManager(bank, retrieval=HYBRID) as manager:
        threads = [threading.Thread(target=write) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            assert manager.search("what is QX77ZP?")[0].experience.text == CODE
        for thread in threads:
            thread.join()
    assert len(found(bank, "shut", n=200)) == 60
