"""Eq. 6 of Complementary RL against numbers worked by hand, and against its plain formula."""

import math
import random

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.options import RetrievalOptions
from experiential.bank.search.strategies import (
    STRATEGIES,
    Candidate,
    Near,
    Retrievals,
    diversity_score,
    draw,
    select,
    shared_ranks,
    strategy,
)
from experiential.bank.search.where import Row, Scored
from experiential.bank.storage.tables import Live
from experiential.errors import ConfigError
from experiential.types import Experience


def candidates(*cosines):
    return [Candidate(f"m{place}", cosine) for place, cosine in enumerate(cosines)]


def rng():
    return random.Random(0)


@pytest.mark.parametrize(
    ("rank", "count", "recent", "expected"),
    [
        (0, 0, False, 0.0),
        (0, 1, True, -0.4 * math.log(2) - 1),
        (2, 0, False, -2.0),
        (1, 3, False, -1 - 0.4 * math.log(4)),
        (3, 7, True, -3 - 0.4 * math.log(8) - 1),
    ],
)
def test_score_equals_hand_worked_eq_6(rank, count, recent, expected):
    assert diversity_score(rank, count, recent, 0.4) == pytest.approx(expected)


def test_recent_rank_0_is_overtaken_by_rank_2_after_twelve_retrievals():
    """-1 - .4 log(1 + c) < -2 first holds at c = 12, the break-even of the seed report."""
    assert (
        min(
            c
            for c in range(100)
            if diversity_score(0, c, True, 0.4) < diversity_score(2, 0, False, 0.4)
        )
        == 12
    )


def test_ranks_are_shared_within_a_thousandth_of_the_first_of_a_run():
    assert shared_ranks([0.9, 0.8995, 0.899, 0.898, 0.5]) == [0, 0, 0, 3, 4]


def test_five_picks_in_a_row_follow_the_hand_worked_order():
    """Distinct cosines, lambda .4, window 8: 0; then 0 has -1.28 < -1, so 1; then -1.28, -2.28, -2
    gives 0 twice more.
    """
    seen, settings = (
        Retrievals(window=8),
        RetrievalOptions(strategy="diverse", pool=4, diversity=0.4, recency=8),
    )
    order = [
        select(candidates(0.9, 0.8, 0.7, 0.6), seen, settings, rng())[0][0].id for _ in range(4)
    ]
    assert order == ["m0", "m1", "m0", "m0"]


def test_recency_is_counted_in_retrievals():
    seen = Retrievals(window=2)
    for id in ("a", "b", "c"):
        seen.note(id)
    assert [seen.is_recent(id) for id in "abc"] == [False, True, True]


def test_window_zero_turns_recency_off():
    seen = Retrievals(window=0)
    seen.note("a")
    assert not seen.is_recent("a")


def plain_eq_6(found, seen, settings, source, k):
    """Choose as eq. 6 is written, from all candidates, one step after the other."""
    found = [one for one in found if one.cosine >= settings.floor]
    ranks = shared_ranks([one.cosine for one in found], settings.tie)
    pool, size = found, settings.pool * k
    if len(pool) > size:
        border = ranks[size - 1]
        tied = [one for one, rank in zip(found, ranks, strict=True) if rank == border]
        least = sorted(tied, key=lambda one: seen.count(one.id))[: size - border]
        pool = found[:border] + sorted(least, key=lambda one: -one.cosine)
    scores = [
        -rank - settings.diversity * math.log1p(seen.count(one.id)) - seen.is_recent(one.id)
        for one, rank in zip(pool, ranks, strict=False)
    ]
    picks = [(pool[at], chance) for at, chance in draw(scores, k, settings.exploration, source)]
    for one, _ in picks:
        seen.note(one.id)
    return picks


@pytest.mark.parametrize("seed", range(40))
def test_the_queries_of_a_batch_are_answered_as_by_the_plain_formula(seed):
    """Few entries, many queries and coarse cosines: reservations, and ties at every place."""
    source = random.Random(seed)
    entries = [Experience(id=f"m{i}", text=str(i)) for i in range(source.randint(1, 24))]
    earlier = {entry.id: source.choice([0, 0, 1, 5]) for entry in entries}
    settings = RetrievalOptions(
        strategy="diverse",
        pool=source.choice([1, 2, 4]),
        tie=source.choice([0.0, 1e-3, 1e-2]),
        diversity=source.choice([0.0, 0.4]),
        recency=source.choice([0, 3, 8]),
        exploration=source.choice([0.0, 0.0, 0.5]),
        floor=source.choice([-1.0, 0.7]),
    )
    memories = [Retrievals(settings.recency, earlier.__getitem__) for _ in range(4)]
    sources = [random.Random(7) for _ in range(4)]
    k = source.choice([1, 1, 2, 3])
    for _ in range(60):
        some = source.sample(entries, source.randint(0, len(entries)))
        digits = source.choice([2, 3, 4])
        hits = [Scored(entry, round(source.uniform(0.6, 0.9), digits)) for entry in some]
        hits.sort(key=lambda hit: -hit.score)
        listed = [Candidate(hit.item.id, hit.score) for hit in hits]
        live = [Live(hit.item, frozenset()) for hit in hits]
        ids, cosines = [one.id for one in listed], [one.cosine for one in listed]
        row = Row(["?", *ids], [Live("?", frozenset()), *live], [2.0, *cosines], 1, 1 + len(ids))
        forms = [listed, Near(hits), Near(row)]
        expected = plain_eq_6(listed, memories[3], settings, sources[3], k)
        for form, seen, own in zip(forms, memories, sources, strict=False):
            assert select(form, seen, settings, own, k) == expected


def test_candidates_are_cut_sliced_and_looped_over_as_a_list_of_them():
    entries = [Experience(id=f"m{i}", text=str(i)) for i in range(4)]
    cosines = [0.9, 0.8, 0.7, 0.6]
    live = [Live(entry, frozenset()) for entry in entries]
    listed = [Candidate(f"m{i}", cosine) for i, cosine in enumerate(cosines)]
    row = Row([one.id for one in listed], live, cosines, 0, 4)
    hits = [Scored(entry, cosine) for entry, cosine in zip(entries, cosines, strict=True)]
    assert list(row) == hits and row[-3:] == hits[-3:] and row[::2] == hits[::2]
    for near in (Near(row), Near(hits)):
        assert list(near) == listed and near[1:3] == listed[1:3] and near[-1] == listed[-1]
        assert list(near.above(0.7)) == listed[:3] and list(near.above(0.95)) == []
        assert list(near.at([2, 0])) == [listed[2], listed[0]]
        assert near.entry("m2") is entries[2]
        with pytest.raises(IndexError):
            near[4]


def test_counts_of_earlier_sessions_are_added():
    seen = Retrievals(window=2, earlier=lambda id: 5)
    seen.note("a")
    assert seen.count("a") == 6


def test_identical_queries_rotate_over_tied_entries():
    seen, settings = Retrievals(window=8), RetrievalOptions(strategy="diverse", pool=4)
    tied = candidates(*[0.8 - i * 1e-5 for i in range(16)])
    got = [select(tied, seen, settings, rng())[0][0].id for _ in range(16)]
    assert set(got) == {c.id for c in tied}


def test_floor_abstains():
    assert (
        select(
            candidates(0.29, 0.1),
            Retrievals(8),
            RetrievalOptions(strategy="diverse", floor=0.3),
            rng(),
        )
        == []
    )


def test_only_entries_above_the_floor_are_in_the_pool():
    seen, settings = Retrievals(8), RetrievalOptions(strategy="diverse", floor=0.5, pool=8)
    got = {select(candidates(0.9, 0.6, 0.4), seen, settings, rng())[0][0].id for _ in range(50)}
    assert got == {"m0", "m1"}


def test_pool_is_cut_to_its_size_and_border_ties_prefer_the_least_retrieved():
    seen = Retrievals(8)
    seen.note("m1")
    settings = RetrievalOptions(strategy="diverse", floor=0.0, pool=1)
    picks = select(candidates(0.9, 0.5, 0.5, 0.4), seen, settings, rng(), k=2)
    assert [candidate.id for candidate, _ in picks] == ["m0", "m2"]


def test_deterministic_draw_has_propensity_one_and_takes_the_best():
    assert draw([-1.0, 0.0, -2.0], 2, 0.0, rng()) == [(1, 1.0), (0, 1.0)]


def test_softmax_draw_logs_the_probability_of_each_pick():
    scores, counts = [0.0, -1.0], [0, 0]
    generator = random.Random(7)
    first = 1 / (1 + math.exp(-1 / 0.5))
    for _ in range(4000):
        pick = draw(scores, 1, 0.5, generator)[0]
        counts[pick.place] += 1
        assert pick.propensity == pytest.approx(first if pick.place == 0 else 1 - first)
    assert counts[0] / 4000 == pytest.approx(first, abs=0.02)


def test_draw_without_replacement_renormalises():
    picks = draw([0.0, 0.0, 0.0], 3, 1.0, rng())
    assert sorted(p.place for p in picks) == [0, 1, 2]
    assert [p.propensity for p in picks] == pytest.approx([1 / 3, 1 / 2, 1.0])


def test_same_seed_same_draws():
    def run():
        seen, generator = Retrievals(8), random.Random(3)
        settings = RetrievalOptions(strategy="diverse", exploration=1.0, pool=8)
        return [
            select(candidates(0.9, 0.8, 0.7, 0.6), seen, settings, generator)[0] for _ in range(20)
        ]

    assert run() == run()


def test_nearest_gives_the_same_entries_again_and_again():
    seen, settings = Retrievals(8), RetrievalOptions(strategy="nearest", floor=0.5)
    rows = [select(candidates(0.7, 0.9, 0.4), seen, settings, rng(), k=2) for _ in range(3)]
    assert rows == [[(Candidate("m1", 0.9), 1.0), (Candidate("m0", 0.7), 1.0)]] * 3
    assert seen.count("m1") == 3 and seen.count("m2") == 0


def test_random_draws_each_of_the_pool_alike_and_says_so():
    seen, settings, source = (
        Retrievals(8),
        RetrievalOptions(strategy="random", pool=2, floor=0.0),
        rng(),
    )
    drawn = [
        select(candidates(0.9, 0.8, 0.7, 0.6, 0.5), seen, settings, source, k=2) for _ in range(400)
    ]
    assert {p for row in drawn for _, p in row} == {0.5}
    counts = [seen.count(f"m{i}") for i in range(5)]
    assert counts[4] == 0 and all(150 < count < 250 for count in counts[:4])
    assert select([], seen, settings, source, k=2) == []


def test_recent_shows_the_last_notes_on_the_very_task_and_only_those(tmp_path):
    retrieval = {"strategy": "recent", "same_task": True, "floor": -1.0}
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        for text in ("open the red door", "try the green lever", "sing"):
            bank.add(text, task="open the red door")
            bank.add(f"elsewhere: {text}", task="open the blue door")
        with ExperienceManager(bank, retrieval=retrieval) as manager:

            def texts(k, **options):
                hits = manager.search("open the red door", k=k, **options)
                return [hit.experience.text for hit in hits]

            assert texts(1) == ["sing"]  # the nearest is the oldest
            assert texts(9) == ["sing", "try the green lever", "open the red door"]
            assert texts(1, where={"kind": "rule"}) == []
            assert manager.search("open the door") == []


def test_a_registered_strategy_is_chosen_by_name_and_an_unknown_one_refused(tmp_path):
    @strategy("last")
    def last(found, seen, settings, source, k):
        return [(candidate, 1.0) for candidate in found[-k:]]

    try:
        with pytest.raises(ConfigError, match="new name"):
            strategy("last")(last)
        with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
            bank.add_many(["open the red door", "open the red gate", "bake bread"])
            with ExperienceManager(bank, retrieval={"strategy": "last", "floor": 0.3}) as manager:
                assert manager.search("open the red door")[0].experience.text == "open the red gate"
            with pytest.raises(
                ConfigError,
                match="diverse, nearest, evidence, random, recent, last.*; did you mean 'last'",
            ):
                ExperienceManager(bank, retrieval={"strategy": "lasd"})
    finally:
        del STRATEGIES["last"]


def test_a_strategy_of_a_foreign_module_is_named_by_module_and_attribute(tmp_path, monkeypatch):
    (tmp_path / "foreign_strategy.py").write_text(
        "def farthest(candidates, seen, settings, rng, k):\n"
        "    return [(candidate, 0.5) for candidate in candidates[-k:]]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add_many(["open the red door", "open the red gate"])
        chosen = {"strategy": "foreign_strategy:farthest", "floor": 0.3}
        with ExperienceManager(bank, retrieval=chosen) as manager:
            [hit] = manager.search("open the red door")
            assert (hit.experience.text, hit.propensity) == ("open the red gate", 0.5)
        with pytest.raises(ConfigError, match="did you mean 'farthest'"):
            ExperienceManager(bank, retrieval={"strategy": "foreign_strategy:farhest"})
