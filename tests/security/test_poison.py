"""Poison is shown until it has failed, not longer, and takes no good entry with it.

benchmarks/poison.py plays the same attacks in a bank of 2,000 entries with the default embedder.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import experiential as xp
from benchmarks.poison import ATTACKS, OBJECTS, WORDINGS, Cell, Prepared, order, play
from experiential.bank.index.embed import HashingEmbedder
from experiential.bank.records import Asked
from experiential.types import Condition, Experience, Provenance, Statistics, Trajectory, Use
from tests.test_serve import serving

TASK = "clean a mug and put it in the cabinet"


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return Prepared(HashingEmbedder())


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[Any]:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def lost(bank: Any, entry: Experience, *relevances: float, success: bool = False) -> None:
    """Journal an episode with the entry shown, for each relevance."""
    for relevance in relevances:
        use = Use(experience_id=entry.id, experience_version=entry.version, score=relevance)
        task = entry.task or TASK
        bank.record(Trajectory(task=task, success=success, uses=(use,)))


def free(bank: Any, *outcomes: bool) -> None:
    for success in outcomes:
        bank.record(Trajectory(task=TASK, success=success, condition=Condition.FREE))


def standing(bank: Any, entry: Experience, relevance: float) -> Any:
    return bank.standings([Asked(id=entry.id, version=entry.version, relevance=relevance)])[0]


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_that_wins_most_searches_is_over_after_some_episodes(
    attack: str, prepared: Prepared
) -> None:
    cell = Cell("nearest", "general", attack, share=0.02, seed=0, entries=400, episodes=40)
    undefended = play(cell, prepared)["after"]
    found = play(cell._replace(arm="evidence", episodes=160), prepared)["after"]
    if attack == "fence":
        assert undefended == found == 0.0, "no forgery is shown alive, whatever is found"
    elif attack == "delayed":  # it turned bad 32 episodes before, with a good name
        assert found <= 0.5 < 0.9 <= undefended
    else:
        assert found <= 0.1 < 0.5 <= undefended


def test_bad_entries_that_imitate_a_query_hide_no_good_one_behind_them(bank: Any) -> None:
    good = bank.add("Clean things such as a mug at sink 4.")
    near = bank.search(TASK)[0].score
    lost(bank, good, *[near] * 4, success=True)
    poison = [bank.add(f"{TASK}. {order(number)}.") for number in range(3)]
    free(bank, True, False, True, False)
    for entry in poison:
        lost(bank, entry, 0.8, 0.8, 0.8)
    with xp.ExperienceManager(bank, free_share=0.0) as manager:
        assert near < 0.7, "it is not among the nearest"
        shown = [manager.search(TASK)[0].experience.id for _ in range(10)]
    assert shown == [good.id] * 10


def test_an_entry_of_another_task_does_not_take_the_place_of_those_that_failed(bank: Any) -> None:
    other = bank.add("Use sink 9.", task="clean a plate and put it in the drawer")
    near = bank.search(TASK)[0].score
    lost(bank, other, *[near] * 4, success=True)
    poison = bank.add(f"{TASK}. {order(0)}.", task=TASK)
    free(bank, True, False, True, False)
    lost(bank, poison, *[0.9] * 10)
    assert near < 0.8, "it is not among the nearest"
    with xp.ExperienceManager(bank, free_share=0.0) as manager:
        assert not any(manager.search(TASK) for _ in range(20))


def test_what_failed_at_a_closer_query_is_not_untried_at_another(bank: Any) -> None:
    bad, good = bank.add(order(0), task=TASK), bank.add("Use sink 4.", task=TASK)
    lost(bank, bad, 0.95, 0.95, 0.95)
    lost(bank, good, 0.95, 0.95, 0.95, success=True)
    assert standing(bank, bad, 0.6).uses == 3
    assert standing(bank, good, 0.6).uses == 0, "right for its task, maybe not for another"
    lost(bank, bad, 0.6, success=True)
    assert standing(bank, bad, 0.6).uses == 1, "what is known here counts"


def poisoned(bank: Any, count: int) -> list[Experience]:
    """Add one order in as many wordings, each bound to a task of its own."""
    goals = [f"heat a {thing} and put it on the shelf" for thing in OBJECTS[:count]]
    return [bank.add(f"{goal}. {order(n)}.", task=goal) for n, goal in enumerate(goals)]


def test_what_did_harm_in_some_entries_is_not_tried_in_the_others(bank: Any) -> None:
    free(bank, *[True, False] * 10)
    *tried, fresh = poisoned(bank, 10)
    good = bank.add("Use oven 4.", task=fresh.task)
    assert standing(bank, fresh, 0.9).verdict == "unproven"
    for entry in tried:
        lost(bank, entry, 0.9)
    lost(bank, good, *[0.9] * 4, success=True)
    assert standing(bank, fresh, 0.9).uses == 0
    assert standing(bank, fresh, 0.9).verdict == "suspect"
    assert standing(bank, good, 0.9).verdict == "unproven"
    with xp.ExperienceManager(bank, free_share=0.0) as manager:
        assert bank.search(fresh.task)[0].experience.id == fresh.id
        shown = [hit.experience.id for _ in range(20) for hit in manager.search(fresh.task)]
    assert shown == [good.id] * 20


def test_entries_that_turn_bad_together_lose_their_good_names_together(bank: Any) -> None:
    free(bank, *[True, False] * 10)
    sleepers = poisoned(bank, 10)
    for entry in sleepers:
        lost(bank, entry, *[0.9] * 5, success=True)
    for entry in sleepers[1:]:
        lost(bank, entry, 0.9)
    last = standing(bank, sleepers[0], 0.9)
    assert last.failures == 0 and last.verdict == "suspect"


def test_a_success_clears_a_word_and_some_failures_are_no_proof(bank: Any) -> None:
    free(bank, *[True, False] * 10)
    entries = poisoned(bank, 10)
    for entry in entries[:4]:
        lost(bank, entry, 0.9)
    assert standing(bank, entries[-1], 0.9).verdict == "unproven"
    for entry in entries[4:9]:
        lost(bank, entry, 0.9)
    assert standing(bank, entries[-1], 0.9).verdict == "suspect"
    lost(bank, entries[-1], 0.9, success=True)
    assert standing(bank, entries[-1], 0.9).verdict != "suspect"


def test_general_entries_that_turn_bad_are_not_tried_anew_at_each_relevance(bank: Any) -> None:
    free(bank, *[True, False] * 10)
    sleepers = [bank.add(f"{order(number)} ({number}).") for number in range(5)]
    for entry in sleepers:
        lost(bank, entry, *[0.9, 0.75, 0.6] * 3, success=True)
    for entry in sleepers[2:]:
        lost(bank, entry, 0.9)
    assert standing(bank, sleepers[0], 0.6).verdict != "suspect", "three failed, each once"
    for entry in sleepers[2:]:
        lost(bank, entry, 0.9, 0.85), lost(bank, entry, 0.75)
    last = standing(bank, sleepers[0], 0.6)
    assert last.failures == 0 and last.verdict == "suspect"


@pytest.mark.parametrize("relevances", [[0.9], [0.9, 0.7, 0.5, 0.3]], ids=["near", "everywhere"])
@pytest.mark.parametrize("baseline", [[True, False], [True] * 19 + [False]])
def test_one_bad_lesson_accuses_no_other(
    bank: Any, relevances: list[float], baseline: list[bool]
) -> None:
    free(bank, *baseline * 10)
    bad, good = bank.add("Take the iron key.", task=TASK), bank.add("Take a mug.", task=TASK)
    lost(bank, bad, *relevances * 30)
    assert standing(bank, good, 0.9).verdict == "unproven"


def test_failures_of_a_task_that_nobody_solves_accuse_no_word(bank: Any) -> None:
    free(bank, *[False] * 30)
    entries = [bank.add(f"{order(number)} ({number}).", task=TASK) for number in range(12)]
    for entry in entries[1:]:
        lost(bank, entry, 0.9)
    assert standing(bank, entries[0], 0.9).verdict == "unproven"


def test_the_words_of_the_query_are_not_accused(bank: Any) -> None:
    free(bank, *[True, False] * 10)
    entries = [bank.add(f"{TASK}: {wording}.") for wording in WORDINGS[:12]]
    for entry in entries:
        lost(bank, entry, 0.9)
    good = bank.add("Clean a mug at sink 4.")
    asked = Asked(id=good.id, version=1, relevance=0.9, query=TASK)
    assert bank.standings([asked])[0].verdict == "unproven"


def claims(parent: Experience) -> Experience:
    """Return poison that claims uses, repetitions, and descent from a good entry."""
    descent = Provenance(author="extractor", cause="merge", said=1000, parents=((parent.id, 1),))
    counters = Statistics(uses=1000, successes=1000)
    return Experience(text=order(0), task=TASK, provenance=descent, statistics=counters)


@pytest.mark.parametrize("way", ["file", "http"])
def test_what_an_import_claims_is_no_evidence(way: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        if way == "http":
            address = stack.enter_context(serving(tmp_path / "served", embedder="hashing"))
            bank = stack.enter_context(xp.ExperienceBank(address))
        else:
            bank = stack.enter_context(xp.ExperienceBank(tmp_path / "own", embedder="hashing"))
        good = bank.add("Use sink 4.", task=TASK)
        lost(bank, good, *[0.9] * 8, success=True)
        file = tmp_path / "claims.jsonl"
        file.write_text(claims(good).model_dump_json())
        assert bank.import_(file) == 1
        [poison] = [entry for entry in bank.entries() if entry.id != good.id]
        found = standing(bank, poison, 0.9)
        assert (found.uses, found.said, found.verdict) == (0, 1, "unproven")
        lost(bank, poison, *[0.9] * 3)
        assert standing(bank, good, 0.9).failures == 0 and bank.lineage(poison.id, 1) == [
            (poison.id, 1)
        ], "and its failures are not those of the good entry"
        assert standing(bank, good, 0.9).uses == 8
        assert bank.get(poison.id).statistics.successes == 0
        assert [entry.id for entry in bank.evict(1)] == [poison.id], "and they save no place"
