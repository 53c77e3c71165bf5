"""Filters of searches: what `where` means, that nothing that passes is missed, and that every way
into a bank takes it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.bank.http.connection import Connection
from experiential.bank.index import indexed
from experiential.bank.index.nearest import Nearest
from experiential.bank.protocol import Bank
from experiential.bank.search.where import Scope, Where
from experiential.bank.storage.tables import Live, LiveEntries, Stored
from experiential.cli import main
from experiential.types import Experience, Hit, Provenance
from tests.test_serve import serving
from tests.wrapper_worlds import CorridorEnv

TAGS, KINDS, TASKS = (
    ("alfworld", "webshop", "kitchen"),
    ("lesson", "warning", "fact"),
    ("door", "well", None),
)
WORDS = ("red", "door", "key", "well", "coin", "guard", "lamp", "rope")


def entry(**values: Any) -> Experience:
    return Experience(text="Look twice.", **values)


# What a filter means


@pytest.mark.parametrize(
    ("where", "passes"),
    [
        ({"kind": "lesson"}, True),
        ({"kind": ["warning", "lesson"]}, True),
        ({"kind": "Lesson"}, False),
        ({"task": "door"}, True),
        ({"task": None}, False),
        ({"tags": "alfworld"}, True),
        ({"tags": ["webshop", "kitchen"]}, True),
        ({"tags": "alf"}, False),
        ({"tags": "alfworld", "kind": "warning"}, False),
        ({"level": 3}, True),
        ({"level": 3.0}, True),
        ({"level": "3"}, False),
        ({"solved": True}, True),
        ({"solved": 1}, False),
        ({"level": True}, False),
        ({"missing": None}, True),
        ({"empty": None}, True),
        ({"tags": None}, False),
        ({"tags": [None, "alfworld"]}, True),
        ({"nested": "a"}, False),
        ({"day": "2026-11-21"}, True),
    ],
)
def test_an_entry_passes_when_every_field_has_one_of_the_values(
    where: dict[str, Any], passes: bool
) -> None:
    metadata = {
        "tags": ["alfworld", "kitchen"],
        "level": 3,
        "solved": True,
        "empty": [],
        "nested": {"a": 1},
        "day": datetime.date(2026, 11, 21),
    }
    assert Where(where).matches(entry(task="door", metadata=metadata)) is passes


@pytest.mark.parametrize(
    "where",
    [
        "kind",
        ["kind"],
        {"kind": []},
        {"kind": {"a": 1}},
        {"": "a"},
        {3: "a"},
        {"level": float("nan")},
        {"tags": [["a"]]},
    ],
)
def test_what_is_no_filter_is_refused(tmp_path: Path, where: Any) -> None:
    with (
        xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank,
        pytest.raises(ValueError, match="Expected .*where"),
    ):
        bank.search("door", where=where)


def test_filters_that_ask_for_the_same_are_equal_and_true_is_not_one() -> None:
    assert Where({"a": 1, "b": ["x", "y"]}) == Where({"b": ("y", "x"), "a": 1.0})
    assert hash(Where({"a": 1, "b": ["x", "y"]})) == hash(Where({"b": ("y", "x"), "a": 1.0}))
    assert Where({"a": 1}) != Where({"a": True})
    assert Where.of({}) is None and Where.of(None) is None


def test_a_filter_survives_json() -> None:
    where = Where({"kind": "lesson", "tags": ["a", None, 3, True]})
    assert Where(json.loads(json.dumps(where.fields))) == where


def test_text_is_found_in_the_form_in_which_it_was_given_and_in_the_one_that_is_kept(
    tmp_path: Path,
) -> None:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add(
            "Look twice.", task="cafe\u0301", metadata={"tags": ["</experience>", "cafe\u0301"]}
        )
        for where in (
            {"task": "cafe\u0301"},
            {"task": "caf\u00e9"},
            {"tags": "cafe\u0301"},
            {"tags": "</experience>"},
        ):
            assert bank.search("look", where=where), where


# Nothing that passes is missed


def of(values: Sequence[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(values), st.lists(st.sampled_from(values), min_size=1, max_size=2)
    )


wheres = st.fixed_dictionaries(
    {},
    optional={
        "kind": of(KINDS),
        "task": of(TASKS),
        "tags": of([*TAGS, None]),
        "level": of([0, 1, 2]),
    },
)
phrases = st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join)


def fill(bank: Bank, count: int) -> None:
    """Entries of all sorts, some of them rewritten, some gone."""
    rng = np.random.default_rng(0)
    for i in range(count):
        tags = [tag for tag in TAGS if rng.random() < 0.4]
        metadata: dict[str, Any] = {"tags": tags, "level": int(rng.integers(3))} if i % 5 else {}
        text = " ".join(rng.choice(WORDS, size=4)) + f" {i}"
        bank.add(text, task=TASKS[rng.integers(3)], kind=KINDS[rng.integers(3)], metadata=metadata)
    for i, one in enumerate(list(bank)):
        if i % 7 == 0:
            bank.remove(one.id)
        elif i % 7 == 1:
            bank.update(one.id, f"{one.text} again")


class LargeBank(FolderBank):
    RESIDENT_LIMIT = 20


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    with xp.ExperienceBank(tmp_path_factory.mktemp("small"), embedder="hashing") as bank:
        fill(bank, 80)
        yield bank


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    with LargeBank(tmp_path_factory.mktemp("large"), embedder="hashing") as bank:
        fill(bank, 150)
        bank.flush_index()
        assert bank._state.nearest.is_large  # pyright: ignore[reportPrivateUsage]
        bank.add(
            "red door key well", kind="warning", metadata={"tags": ["alfworld"]}
        )  # not in Chroma yet
        yield bank


def scores(hits: Sequence[Hit]) -> list[float]:
    return [round(hit.score, 4) for hit in hits]


@given(where=wheres, query=phrases, k=st.integers(1, 40))
def test_a_filtered_search_is_the_filter_of_the_full_ranking(
    small: Bank, where: dict[str, Any], query: str, k: int
) -> None:
    ranking = [
        hit for hit in small.search(query, k=len(small)) if Where(where).matches(hit.experience)
    ]
    found = small.search(query, k=k, where=where)
    assert [(hit.experience.id, hit.score) for hit in found] == [
        (hit.experience.id, hit.score) for hit in ranking[:k]
    ]
    assert scores(small.snapshot().search(query, k=k, where=where)) == scores(found)


@pytest.mark.parametrize(("few", "most"), [(500, 4096), (3, 4096), (0, 8)])
@given(where=wheres, query=phrases, k=st.integers(1, 20))
def test_a_filtered_search_of_a_large_bank_misses_nothing(
    large: Bank, few: int, most: int, where: dict[str, Any], query: str, k: int
) -> None:
    """By comparing all that pass, by asking Chroma for more, and by asking it for some and
    comparing the rest.
    """
    query_vector = large.embedder([query])[0]
    stored = large._history.live(large.head)  # pyright: ignore[reportPrivateUsage]  (vectors have no public way out)
    passing = [Where(where).matches(one.experience) for one in stored.entries]
    cosines = np.round(stored.vectors[: len(stored)][passing] @ query_vector, 4)
    expected = sorted(cosines.tolist(), reverse=True)[:k]
    before = indexed._FEW, indexed._MOST  # pyright: ignore[reportPrivateUsage]
    indexed._FEW, indexed._MOST = few, most  # pyright: ignore[reportPrivateUsage]
    try:
        hits = large.search(query, k=k, where=where)
    finally:
        indexed._FEW, indexed._MOST = before  # pyright: ignore[reportPrivateUsage]
    assert scores(hits) == pytest.approx(expected, abs=2e-4)
    assert all(Where(where).matches(hit.experience) for hit in hits)


def test_a_large_bank_gives_all_hits_beside_an_excluded_instance(tmp_path: Path) -> None:
    """The 100 nearest are of the excluded instance: more than Chroma is asked for at first."""
    with LargeBank(tmp_path / "bank", embedder="hashing") as bank:
        seen = Provenance(instance="door#1")
        near = [Experience(text=f"the red door {i}", provenance=seen) for i in range(100)]
        far = [Experience(text=f"red lamp and rope, coin {i}") for i in range(20)]
        bank.import_entries([*near, *far], "test")
        bank.flush_index()
        hits = bank.search("the red door", k=10, exclude_instance="door#1")
        assert len(hits) == 10 and all(hit.experience.provenance.instance is None for hit in hits)


def test_a_filter_of_a_large_bank_follows_what_is_written_after_it_was_asked_first(
    tmp_path: Path,
) -> None:
    with LargeBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add_many([f"red door {i}" for i in range(30)])
        gone = bank.add("red door", kind="warning")
        bank.flush_index()

        def warnings() -> set[str]:
            return {
                hit.experience.text
                for hit in bank.search("red door", k=9, where={"kind": "warning"})
            }

        assert warnings() == {"red door"}
        kept = bank.add("red gate", kind="warning")
        before = bank.head
        bank.remove(gone.id)
        bank.update(kept.id, "red gate again")
        bank.flush_index()
        assert warnings() == {"red gate again"}
        bank.rollback(before)
        assert warnings() == {"red door", "red gate"}
        bank.flush_index()
        assert warnings() == {"red door", "red gate"}


def unit(seed: int) -> Any:
    vector = np.random.default_rng(seed).standard_normal(4).astype(np.float32)
    return vector / np.linalg.norm(vector)


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from([None, *KINDS]), st.booleans()), max_size=60
    ),
    where=st.sampled_from([Where({"kind": "lesson"}), Where({"kind": ["warning", "fact"]})]),
)
@example(steps=[(0, "lesson", False), (0, None, True)], where=Where({"kind": "lesson"}))
def test_filters_stay_true_while_entries_come_change_and_go(
    steps: list[tuple[int, str | None, bool]], where: Where
) -> None:
    """The filter is asked after some of the writes, so that its memory is of different ages."""
    nearest, live = Nearest(LiveEntries(), limit=1000), dict[str, Live]()
    vectors = dict[str, Any]()
    for seq, (number, kind, ask) in enumerate(steps):
        id = str(number)
        if kind is None:
            live.pop(id, None)
            nearest.publish([(id, None, seq)])
        else:
            stored = Stored(Experience(id=id, text="-", kind=kind), unit(seq), frozenset())
            live[id], vectors[id] = Live(stored.experience, stored.origins), stored.vector
            nearest.publish([(id, stored, seq)])
        if ask:
            query = unit(12345)
            passing = {id for id, one in live.items() if where.matches(one.experience)}
            best = sorted(passing, key=lambda id: -float(vectors[id] @ query))[:3]
            found = nearest.search(query[None], 3, lambda: live, [Scope(where=where)])[0]
            assert [hit.item.id for hit in found] == best
            assert set(nearest.passing(lambda: live, where)) == passing


@pytest.mark.parametrize("words", [False, True])
def test_a_lookup_without_a_scope_for_each_query_is_refused(tmp_path: Path, words: bool) -> None:
    with FolderBank(tmp_path / "bank", embedder="hashing", store="exact") as bank:
        bank.add("take the brass key")
        with pytest.raises(ValueError, match="Expected 2 scopes, one per query, got 1"):
            bank.nearest(["key", "door"], 1, [Scope()], words=words)


# Every way in


@pytest.fixture
def tagged(tmp_path: Path) -> Iterator[Bank]:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add("Cross the corridor: say go twice.", metadata={"tags": ["corridor"]})
        bank.add(
            "Cross the corridor: say go thrice.",
            kind="warning",
            metadata={"tags": ["maze"], "level": 3},
        )
        yield bank


def only(hits: Any) -> str:
    assert len(hits) == 1
    return hits[0].experience.text


def test_a_manager_filters_what_it_finds_and_what_it_answers(tagged: Bank) -> None:
    with xp.ExperienceManager(tagged) as manager:
        for where, text in (
            ({"tags": "maze"}, "thrice"),
            ({"kind": "lesson"}, "twice"),
            ({"level": 3}, "thrice"),
        ):
            assert text in only(manager.search("cross the corridor", k=4, where=where))
            assert text in (manager.ask("cross the corridor", k=4, where=where).text or "")
        assert manager.search("cross the corridor", where={"tags": "none such"}) == []
        with pytest.raises(ValueError, match="where"):
            manager.search("cross the corridor", where={"tags": []})


def test_queries_of_one_micro_batch_keep_their_own_filters(tagged: Bank) -> None:
    import asyncio

    async def both(manager: xp.ExperienceManager) -> Any:
        asked = (
            manager.asearch("cross the corridor", where={"tags": tag})
            for tag in ("maze", "corridor")
        )
        return await asyncio.gather(*asked)

    with xp.ExperienceManager(tagged, retrieval={"batch_wait": 0.2, "batch_size": 2}) as manager:
        assert ["thrice" in only(hits) for hits in asyncio.run(both(manager))] == [True, False]
        assert manager.stats()["mean_batch"] == 2


@pytest.mark.parametrize("read_only", [False, True])
def test_a_client_filters_as_the_bank_does(tagged: Bank, read_only: bool) -> None:
    with serving(tagged) as url, xp.ExperienceBank(url, read_only=read_only) as client:
        for where in ({"tags": "maze"}, {"kind": ["lesson"]}, {"level": [3, None]}, None):
            wanted = tagged.search("cross the corridor", k=4, where=where)
            assert client.search("cross the corridor", k=4, where=where) == wanted
            assert client.snapshot().search("cross the corridor", k=4, where=where) == wanted
        with pytest.raises(ValueError, match="where"):
            client.search("cross", where={"kind": []})
        with xp.ExperienceManager(client) as manager:
            assert "thrice" in only(
                manager.search("cross the corridor", k=4, where={"tags": "maze"})
            )


def test_wrappers_show_only_what_passes(tagged: Bank) -> None:
    env = xp.SearchAndAskWrapper(
        xp.ExperienceWrapper(CorridorEnv(), tagged, k=4, where={"tags": "maze"})
    )
    observation, info = env.reset(seed=1)
    assert "thrice" in observation and "twice" not in observation and len(info["experience"]) == 1
    assert "thrice" in env.step("<search_and_ask>cross the corridor, say go</search_and_ask>")[0]
    env.close()
    envs = xp.ExperienceVectorWrapper(
        gym.vector.SyncVectorEnv([CorridorEnv] * 2), tagged, k=4, where={"tags": "maze"}
    )
    _, infos = envs.reset(seed=1)
    assert [len(hits) for hits in infos["experience"]] == [1, 1]
    envs.close()
    with pytest.raises(ValueError, match="where"):
        xp.ExperienceWrapper(CorridorEnv(), tagged, where={"tags": []})


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--where", "tags=maze"], ["thrice"]),
        (["--where", "tags=maze", "--where", "tags=corridor"], ["thrice", "twice"]),
        (["--kind", "lesson"], ["twice"]),
        (["--kind", "lesson", "--where", "tags=maze"], []),
        (["--where", "level=3"], ["thrice"]),
    ],
)
def test_the_command_line_filters(tagged: Bank, options: list[str], found: list[str]) -> None:
    folder = str(tagged.path)
    tagged.close()
    result = CliRunner().invoke(
        main.app, ["bank", "search", folder, "cross the corridor", "--json", *options]
    )
    assert result.exit_code == 0
    assert sorted(row["text"].split()[-1].strip(".") for row in json.loads(result.stdout)) == found


def test_the_command_line_says_what_is_wrong_with_a_filter(
    tagged: Bank, capsys: pytest.CaptureFixture[str]
) -> None:
    from experiential.cli.errors import run_app

    assert run_app(main.app, ["bank", "search", str(tagged.path), "cross", "--where", "maze"]) == 2
    assert "--where FIELD=VALUE" in capsys.readouterr().err


def test_a_manager_over_http_asks_nothing_for_each_candidate(
    tagged: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counters come with the candidates; the calls of a search do not grow with them."""
    tagged.add_many([f"Cross the corridor {i} times." for i in range(30)])
    asked: list[str] = []
    send: Callable[..., Any] = Connection._send  # pyright: ignore[reportPrivateUsage]

    def counted(self: Connection, name: str, *arguments: Any) -> Any:
        asked.append(name)
        return send(self, name, *arguments)

    monkeypatch.setattr(Connection, "_send", counted)
    for strategy, calls in (("evidence", ["standings"]), ("diverse", [])):
        with (
            serving(tagged) as url,
            xp.ExperienceBank(url) as client,
            xp.ExperienceManager(client, retrieval={"strategy": strategy}) as manager,
        ):
            asked.clear()
            assert manager.search("cross the corridor")
            assert sorted(asked) == sorted(["nearest", "note_retrievals", "read", *calls])
