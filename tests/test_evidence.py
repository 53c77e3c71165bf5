"""Evidence decides what is shown: standings read from the journal alone, and what a search does
with them.
"""

import asyncio
import json
import random

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.evidence.outcomes import difference
from experiential.bank.manager import ExperienceManager
from experiential.bank.records import Asked
from experiential.bank.search.strategies import (
    STRATEGIES,
    Candidate,
    Retrievals,
    odds,
    strategy,
)
from experiential.cli import main
from experiential.cli.errors import run_app
from experiential.errors import BankError, ConfigError
from experiential.types import (
    Add,
    Condition,
    Distillation,
    Merge,
    ParsedOperations,
    Trajectory,
    Update,
    Use,
)

TASK = "open the red door"
TEXT = "take the brass key"


@pytest.fixture
def bank(tmp_path):
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def play(bank, entry, *outcomes, task=TASK, relevance=0.9, **fields):
    """Journal one episode per outcome: with the entry shown, or free for None."""
    for success in outcomes:
        uses, condition = (), Condition.FREE
        if entry is not None:
            shown = {"experience_id": entry.id, "experience_version": entry.version}
            uses, condition = (Use(**shown, score=relevance),), Condition.GUIDED
        bank.record(
            Trajectory(task=task, success=success, uses=uses, condition=condition, **fields)
        )


def standing(bank, entry, relevance=None):
    asked = Asked(id=entry.id, version=entry.version, relevance=relevance)
    return bank.standings([asked])[0]


def shown(manager, times=30, query=TASK):
    """Return how often each entry is found."""
    found = [manager.search(query) for _ in range(times)]
    ids = [row[0].experience.id if row else None for row in found]
    return {id: ids.count(id) for id in ids}


def distilled(bank, text, task=TASK):
    """Let an extractor write a lesson from a new episode."""
    made = Distillation(parsed=ParsedOperations(operations=(Add(text=text),)))
    return bank.apply(made, trajectory=Trajectory(task=task), shown=[])[0]


def merge(bank, *entries, text="merged text"):
    operation = Merge(entries=tuple(range(1, len(entries) + 1)), text=text)
    return bank.consolidate(
        Distillation(parsed=ParsedOperations(operations=(operation,))), shown=entries
    )[0]


# The interval


@pytest.mark.parametrize("rates", [(0.5, 0.5), (0.1, 0.1), (0.9, 0.9)])
def test_looking_after_every_episode_rarely_condemns_a_harmless_entry(rates):
    """Of 200 entries that do nothing, looked at after each of 100 uses, at most 5 % are ever
    quarantined or called helpful.
    """
    rng, wrong = random.Random(0), 0
    for _ in range(200):
        wins, free = [0, 0], [0, 0]
        for _ in range(100):
            wins[rng.random() >= rates[0]] += 1
            free[rng.random() >= rates[1]] += 1
            low, high = difference(*wins, *free)
            if low > 0 or high < 0:
                wrong += 1
                break
    assert wrong <= 10


def test_the_interval_holds_the_difference_and_shrinks():
    narrow, wide = difference(160, 40, 100, 100), difference(16, 4, 10, 10)
    assert wide[0] < narrow[0] < 0.3 < narrow[1] < wide[1]
    assert difference(0, 0, 0, 0) == (-1.0, 1.0)


# Standings


def test_outcomes_of_an_entry_count_from_its_uses_and_the_baseline_from_free_play(bank):
    entry = bank.add(TEXT, task=TASK)
    play(bank, entry, True, True, False, None)
    play(bank, None, False, False, True, None)
    found = standing(bank, entry)
    assert (found.uses, found.unknown, found.free_successes, found.free_failures) == (3, 1, 1, 2)
    assert found.difference == pytest.approx(2 / 3 - 1 / 3) and found.tasks == 1
    assert found.failures == 1 and 1 < found.successes < 2  # the older ones count less
    assert found.interval[0] < 0 < found.interval[1] and found.verdict == "unproven"


def test_an_episode_that_found_nothing_is_baseline_and_a_rejected_or_failed_one_no_evidence(bank):
    entry = bank.add(TEXT, task=TASK)
    bank.record(Trajectory(task=TASK, success=True))
    shown = {"experience_id": entry.id, "experience_version": 1, "score": 0.9}
    bank.record(Trajectory(task=TASK, success=False, uses=(Use(**shown),), error="broken"))
    twice = (Use(**shown), Use(**shown, how="search_and_ask"))
    bank.record(Trajectory(task=TASK, success=True, uses=twice))
    found = standing(bank, entry)
    assert (found.free_successes, found.free_failures, found.uses) == (1, 0, 1)


def test_what_is_known_for_one_neighbourhood_says_nothing_of_another(bank):
    entry = bank.add(TEXT, task=TASK)
    play(bank, entry, *[True] * 5, relevance=0.95)
    play(bank, entry, *[False] * 5, relevance=0.4)
    near, far = standing(bank, entry, 0.95), standing(bank, entry, 0.4)
    assert (near.uses, near.failures, far.uses, far.successes) == (5, 0, 5, 0)
    assert standing(bank, entry).uses == near.uses  # by default where it was nearest


def test_an_update_starts_anew_and_a_rollback_brings_back_all_that_was_learned(bank):
    entry = bank.add(TEXT, task=TASK)
    play(bank, entry, True, True)
    head = bank.head
    second = bank.update(entry.id, "take the iron key")
    assert standing(bank, second).uses == 0
    play(bank, entry, False)
    bank.rollback(head)
    assert standing(bank, bank.get(entry.id)).uses == 3


def test_a_lesson_written_again_keeps_its_evidence_and_counts_as_said_twice(bank):
    first = distilled(bank, TEXT)
    play(bank, first, True)
    again = distilled(bank, TEXT)
    assert (again.id, again.version) == (first.id, 2)
    found = standing(bank, again)
    assert (found.uses, found.said) == (1, 2)


def test_a_merged_entry_stands_on_the_joint_evidence_of_its_parents_and_they_not_on_its(bank):
    good, bad = bank.add(TEXT, task=TASK), bank.add("walk into the well", task=TASK)
    play(bank, good, True, True)
    play(bank, bad, False)
    merged = merge(bank, good, bad)
    assert standing(bank, merged).uses == 3
    play(bank, merged, True)
    assert (standing(bank, merged).uses, standing(bank, good).uses) == (4, 2)


def test_deduplication_keeps_the_evidence_of_the_survivor(bank):
    entry = bank.add(TEXT, task=TASK)
    bank.add(TEXT + "s", task=TASK)
    play(bank, entry, True)
    bank.deduplicate(0.5)
    assert bank.get(entry.id).version == 2 and standing(bank, bank.get(entry.id)).uses == 1


def test_counters_that_come_with_an_import_count_for_nothing(bank, tmp_path):
    entry = bank.add(TEXT, task=TASK)
    play(bank, entry, *[True] * 30)
    bank.export(tmp_path / "file.jsonl")
    with ExperienceBank(tmp_path / "other", embedder="hashing") as other:
        other.import_(tmp_path / "file.jsonl")
        [copy] = other
        assert copy.statistics.uses == 0 and copy.provenance.said == 1
        assert standing(other, copy).uses == 0 and standing(other, copy).posterior[0] < 1


def test_an_outcome_that_is_known_only_later_counts_then(bank):
    entry = bank.add(TEXT, task=TASK)
    standing(bank, entry)
    uses = (Use(experience_id=entry.id, experience_version=1, score=0.9),)
    ended = Trajectory(task=TASK, uses=uses)
    bank.record(ended)
    assert (standing(bank, entry).uses, standing(bank, entry).unknown) == (0, 1)
    bank.conclude(ended.id, True)
    assert (standing(bank, entry).uses, standing(bank, entry).unknown) == (1, 0)


def test_standings_that_followed_the_writes_are_those_of_the_journal(bank, tmp_path):
    rng = random.Random(3)
    entries = [distilled(bank, f"advice {i}", task=f"task {i % 3}") for i in range(6)]
    bank.standings([])  # from here on they are kept up to date
    for turn in range(80):
        entry = rng.choice([*entries, None])
        relevance = rng.choice([0.5, 0.9])
        outcome = rng.choice([True, False, False, None])
        play(bank, entry, outcome, task=f"task {turn % 3}", relevance=relevance)
        if turn in (20, 50):
            entries.append(merge(bank, entries.pop(0), entries.pop(0), text=f"merged {turn}"))
        if turn == 60:
            entries[0] = bank.update(entries[0].id, "other advice")
    asked = [
        Asked(id=one.id, version=one.version, relevance=r) for one in entries for r in (0.5, 1)
    ]
    known = bank.standings(asked)
    assert sum(one.uses for one in known) > 20
    with bank.fork(tmp_path / "fork") as fork:
        assert fork.standings(asked) == known
    bank.close()
    with ExperienceBank(bank.path, read_only=True) as again:
        assert again.standings(asked) == known
    with ExperienceBank(bank.path, namespace="other") as other, pytest.raises(BankError):
        other.standings(asked)


def test_the_entries_near_a_query_are_judged_as_each_by_itself_but_without_ages(bank):
    texts = [f"take the cursed key {i}" if i % 3 else f"pull lever {i}" for i in range(16)]
    entries = [distilled(bank, text, task=f"task {i % 2}") for i, text in enumerate(texts)]
    play(bank, None, *[True] * 30)
    for place, entry in enumerate(entries[:9]):
        play(bank, entry, place % 3 == 0, place % 3 == 0, None)
    found = [(entry, relevance) for entry in entries for relevance in (0.4, 0.7, 0.9, 1.0)]
    for query in (TASK, "take the cursed key"):
        each = [
            bank.standings([Asked(id=one.id, version=one.version, relevance=of, query=query)])[0]
            for one, of in found
        ]
        near = bank.standings_near(query, found)
        assert near == [one.model_copy(update={"age": 0}) for one in each]
        assert {one.suspect for one in near} == {query == TASK, False}
        assert {one.uses for one in near} == {0, 2} and len({one.age for one in each}) > 1
        first, last = (near[found.index((entries[place], 0.4))] for place in (9, 15))
        assert first is last and not first.uses  # of one task, never shown


def test_a_strategy_of_ones_own_is_told_the_ages_of_entries(bank):
    old, _, new = (distilled(bank, f"take key {i}") for i in range(3))
    ages = []

    @strategy("youngest")
    def youngest(candidates, seen, settings, rng, k):
        ages.extend(zip([one.id for one in candidates], seen.evidence(candidates), strict=True))
        return [(min(candidates, key=lambda one: dict(ages)[one.id].age), 1.0)][:k]

    try:
        with ExperienceManager(bank, retrieval={"strategy": "youngest", "floor": -1.0}) as manager:
            assert manager.search(TASK)[0].experience.id == new.id
    finally:
        del STRATEGIES["youngest"]
    known = dict(ages)
    assert known[old.id].age == known[new.id].age + 2 == 2


def test_a_use_journalled_while_there_was_trust_can_be_read():
    old = {"id": "u", "experience_id": "a", "experience_version": 1}
    assert Use.model_validate(old | {"provisional": True, "admitted": False}) == Use(**old)


# What is shown


def test_an_entry_is_shown_before_anything_is_known_and_the_next_when_it_failed(bank):
    first, second = bank.add(TEXT, task=TASK), bank.add("take the iron key", task=TASK)
    with ExperienceManager(bank) as manager:
        assert sum(shown(manager, 4).values()) == 4 and None not in shown(manager, 4)
        play(bank, None, False, False)
        play(bank, first, False, False, False)
        assert shown(manager)[second.id] >= 25
        play(bank, second, True, True)
        assert shown(manager) == {second.id: 30}


def test_nothing_is_shown_but_for_trial_where_nothing_helps(bank):
    entries = [bank.add(f"take key {i}", task=TASK) for i in range(4)]
    with ExperienceManager(bank) as manager:
        for entry in entries:
            play(bank, entry, False, False, False)
        play(bank, None, *[True] * 12)
        assert shown(manager, 100).get(None, 0) >= 80


def test_an_entry_that_turns_bad_loses_to_a_fresh_one(bank):
    old = bank.add(TEXT, task=TASK)
    play(bank, None, *[False] * 4)
    play(bank, old, *[True] * 8)
    with ExperienceManager(bank) as manager:
        assert shown(manager) == {old.id: 30}
        new = distilled(bank, "take the iron key")
        assert shown(manager) == {old.id: 30}
        play(bank, old, *[False] * 3)
        assert shown(manager)[new.id] >= 20


def test_a_text_that_episodes_agree_on_is_tried_first(bank):
    once = [distilled(bank, f"take key {i}") for i in range(3)]
    agreed = [distilled(bank, TEXT) for _ in range(2)][-1]
    newest = distilled(bank, "take the iron key")
    with ExperienceManager(bank) as manager:
        assert manager.search(TASK)[0].experience.id == agreed.id
        assert agreed.id not in (newest.id, *(one.id for one in once))


def test_a_harmful_entry_is_quarantined_until_it_is_rewritten(bank):
    harmful = bank.add(TEXT, task=TASK)
    play(bank, harmful, *[False] * 30)
    play(bank, None, *[True] * 12)
    assert standing(bank, harmful).verdict == "quarantined"
    with ExperienceManager(bank) as manager:
        assert shown(manager, 100) == {None: 100}
        bank.update(harmful.id, "take the iron key")
        assert harmful.id in shown(manager, 100)


def test_a_few_are_chosen_with_the_probabilities_that_they_say(bank):
    a, b = bank.add(TEXT, task=TASK), bank.add("take the iron key", task=TASK)
    play(bank, a, True, True, False)
    play(bank, b, True, False, True)
    with ExperienceManager(bank) as manager:
        hits = [manager.search(TASK)[0] for _ in range(300)]
        for entry in (a, b):
            said = {hit.propensity for hit in hits if hit.experience.id == entry.id}
            share = sum(hit.experience.id == entry.id for hit in hits) / 300
            assert len(said) <= 1 and (not said or abs(said.pop() - share) < 0.1)
        assert len(manager.search(TASK, k=2)) == 2


def test_the_odds_follow_the_posteriors_the_baseline_and_the_budget():
    good, bad, unknown = (9.0, 1.0, 9, 6.0), (1.0, 9.0, 9, -6.0), (0.5, 0.5, 0, 0.0)
    assert odds((good, bad), (1.0, 4.0)) == (1.0, 0.0)
    assert odds((bad, bad), (9.0, 1.0)) == (0.0, 0.0)
    assert sum(odds((unknown,), (0.5, 0.5))) == 1.0
    tried = (3.0, 6.0, 9, -3.0)
    assert odds((tried,), (3.0, 6.0)) == (1.0,)  # even odds will do,
    assert odds(((3.0, 7.0, 10, -3.0),), (3.0, 6.0)) == (0.0,)  # but not for ever


def test_the_same_seed_and_journal_choose_the_same(bank):
    for i in range(6):
        play(bank, bank.add(f"take key {i}", task=TASK), i % 2 == 0, i % 3 == 0)

    def choices(number, seed):
        with bank.fork(bank.path.parent / number) as copy:
            with ExperienceManager(copy, seed=seed) as manager:
                rows = [manager.search(TASK, k=2) for _ in range(20)]
                plays = [manager.plays_free(TASK) for _ in range(50)]
            return [[(h.experience.id, h.propensity) for h in row] for row in rows], plays

    assert choices("a", 1) == choices("b", 1) != choices("c", 2)


def test_a_strategy_of_ones_own_reads_the_counters(bank, tmp_path, monkeypatch):
    (tmp_path / "my_strategies.py").write_text(
        "def thompson(candidates, seen, settings, rng, k):\n"
        "    near = [c for c in candidates if candidates[0].cosine - c.cosine <= 0.05]\n"
        "    drawn = [rng.betavariate(*one.posterior) for one in seen.evidence(near)]\n"
        "    best = sorted(zip(drawn, near), reverse=True)\n"
        "    return [(candidate, 1.0) for _, candidate in best[:k]]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    good, bad = bank.add(TEXT, task=TASK), bank.add("take the iron key", task=TASK)
    play(bank, good, *[True] * 20)
    play(bank, bad, *[False] * 20)
    with ExperienceManager(bank, retrieval={"strategy": "my_strategies:thompson"}) as manager:
        assert shown(manager, 20) == {good.id: 20}
    assert [one.uses for one in Retrievals(8).evidence([Candidate("a", 0.9)])] == [0]


# Attacks


def test_a_poisoned_entry_for_a_known_query_is_shown_a_few_times_and_no_more(bank):
    """It lies nearest, claims 1,000 successes, and ruins every episode."""
    good = bank.add(TEXT, task=TASK)
    play(bank, None, *[False] * 6)
    play(bank, good, *[True] * 6)
    poison = bank.get(good.id).model_copy(
        update={
            "id": "poison",
            "text": f"{TASK}: give up",
            "statistics": good.statistics.model_copy(update={"uses": 1000, "successes": 1000}),
        }
    )
    bank.import_entries([poison], "stranger")
    exposed = 0
    with ExperienceManager(bank) as manager:
        for _ in range(200):
            for hit in manager.search(TASK):
                exposed += hit.experience.id == "poison"
                play(bank, hit.experience, hit.experience.id == good.id, relevance=hit.score)
    assert exposed <= 2


def test_a_proven_entry_is_found_behind_a_crowd_of_copies_of_an_unproven_one(bank):
    proven = bank.add(f"{TASK} {TEXT}", task=TASK)
    with ExperienceManager(bank) as manager:
        [hit] = manager.search(TASK)
        play(bank, None, *[False] * 6)
        play(bank, proven, *[True] * 6, relevance=hit.score)
        bank.add_many([TASK] * 300, task=TASK)
        nearest = bank.search(TASK, k=16)
        assert proven.id not in {one.experience.id for one in nearest}
        manager.search(TASK)  # sees that there are outcomes near
        assert shown(manager, 10) == {proven.id: 10}


# Free episodes


def test_a_share_of_the_episodes_plays_free_until_outcomes_settle_it(bank):
    entry = bank.add(TEXT, task=TASK)
    with ExperienceManager(bank, free_share=0.25) as manager:
        manager.search(TASK)
        assert 60 < sum(manager.plays_free(TASK) for _ in range(400)) < 140
        [hit] = manager.search(TASK)
        play(bank, None, *[False] * 12)
        play(bank, entry, *[True] * 30, relevance=hit.score)
        manager.search(TASK)
        assert not any(manager.plays_free(TASK) for _ in range(400))
        play(bank, entry, *[False] * 100, relevance=hit.score)
        manager.search(TASK)
        assert any(manager.plays_free(TASK) for _ in range(400))
    with ExperienceManager(bank, free_share=0.0) as manager:
        assert not any(manager.plays_free(TASK) for _ in range(100))
    with pytest.raises(ConfigError, match="free_share"):
        ExperienceManager(bank, free_share=1.5)
    with pytest.raises(ConfigError, match="'trust_after': evidence decides"):
        ExperienceManager(bank, trust_after=2)


def test_an_episode_that_nobody_decides_for_plays_free_now_and_then(bank):
    bank.add(TEXT, task=TASK)
    with ExperienceManager(bank, free_share=0.5) as manager:
        guided = []
        for _ in range(40):
            with manager.episode(TASK) as episode:
                episode.record("a door", "pull")
                episode.finish(success=episode.guided)
            guided.append(episode.guided)
            assert bool(episode.advice) <= episode.guided
        assert set(guided) == {True, False}


def test_uplift_without_groups_compares_with_free_episodes_of_the_same_task(bank):
    entry = bank.add(TEXT, task=TASK)
    play(bank, entry, True, True, True, False)
    play(bank, None, False, False, True, False)
    play(bank, None, *[True] * 50, task="another task")
    found = bank.uplift(entry.id)
    assert (found.baseline, found.groups, found.mean) == ("tasks", 1, 0.5)
    assert found.interval == standing(bank, entry).interval
    play(bank, entry, True, group="g")
    play(bank, None, False, group="g")
    assert (bank.uplift(entry.id).baseline, bank.uplift(entry.id).mean) == ("groups", 1.0)


# Review


class Lessons:
    """Writes one lesson for each episode, and another text for what was shown."""

    version = 0

    async def adistill(self, trajectory, shown):
        operations = [Add(text=f"lesson of {trajectory.instance}")]
        operations += [Update(entry=1, text="take the iron key")] if shown else []
        return Distillation(parsed=ParsedOperations(operations=tuple(operations)))

    async def arefine(self, query, experience):
        return experience.text, None

    async def amerge(self, experiences):
        return Distillation()


def test_under_review_nothing_new_is_shown_before_a_person_approves(bank, tmp_path, capsys):
    entry = bank.add(TEXT, task=TASK)
    with ExperienceManager(bank, Lessons(), review=True, free_share=0.0) as manager:
        with manager.episode(TASK, instance="one") as episode:
            assert TEXT in episode.advice
            episode.finish(success=True)
        manager.drain(20)
        lesson, rewritten = (one for one in bank if one.proposed)
        assert bank.get(entry.id).text == TEXT and len(bank) == 3
        assert shown(manager) == {entry.id: 30}
        assert [standing(bank, one).verdict for one in (lesson, rewritten)] == ["proposed"] * 2
        with pytest.raises(ConfigError, match="review=False"):
            manager.merge()
    bank.export(tmp_path / "file.md")
    bank.close()
    with ExperienceBank(bank.path) as again:
        assert len(again.search(TASK, k=9)) == 1
    assert run_app(main.app, ["bank", "approve", str(bank.path), rewritten.id, lesson.id]) == 0
    with ExperienceBank(bank.path) as again:
        assert {hit.experience.text for hit in again.search(TASK, k=9)} == {
            "take the iron key",
            "lesson of one",
        }
        assert again.get(entry.id).version == 2 and again.get(rewritten.id) is None
        assert [one.cause for one in again.history()][-2:] == ["approve", "approve"]
        for id in (entry.id, "nobody"):
            with pytest.raises(BankError):
                again.approve(id)
    with ExperienceBank(tmp_path / "other", embedder="hashing") as other:
        other.import_(tmp_path / "file.md")
        assert sum(one.proposed for one in other) == 2 and len(other.search(TASK, k=9)) == 1


def test_a_proposal_is_not_found_by_words_nor_in_a_view_nor_joined_to_approved_ones(bank):
    bank.add(TEXT, task=TASK)
    made = Distillation(parsed=ParsedOperations(operations=(Add(text=TEXT + "s"),)))
    [proposed] = bank.apply(made, trajectory=Trajectory(task=TASK), shown=[], review=True)
    assert len(bank.search(TASK, k=9, hybrid=0.5)) == 1
    assert bank.deduplicate(0.1) == []
    assert len(bank.at(bank.head).search(TASK, k=9)) == 1
    bank.approve(proposed.id)
    assert len(bank.search(TASK, k=9)) == 2


# Kept up to date


def test_outcomes_submitted_to_a_manager_are_seen_by_its_next_search(bank):
    entry, other = bank.add(TEXT, task=TASK), bank.add("take the iron key", task=TASK)
    with ExperienceManager(bank) as manager:
        for _ in range(8):
            for one, success in ((entry, False), (other, True), (None, False)):
                shown_now = {"experience_version": 1, "score": 0.9}
                use = () if one is None else (Use(experience_id=one.id, **shown_now),)
                manager.submit(
                    Trajectory(
                        task=TASK,
                        success=success,
                        uses=use,
                        condition=Condition.GUIDED if one else Condition.FREE,
                    )
                )
        assert shown(manager) == {other.id: 30}


def test_a_search_never_waits_for_a_write(bank):
    """Standings are in memory: a search ends while a transaction holds the journal."""
    bank.add(TEXT, task=TASK)
    with ExperienceManager(bank) as manager:
        manager.search(TASK)
        with bank._transaction():
            rows = asyncio.run(asyncio.wait_for(manager.asearch(TASK), 10))
        assert len(rows) == 1


def test_a_read_only_bank_judges_too_and_stays_as_it_is(bank):
    good, bad = bank.add(TEXT, task=TASK), bank.add("take the iron key", task=TASK)
    play(bank, None, *[False] * 6)
    play(bank, good, *[True] * 6)
    play(bank, bad, *[False] * 6)
    bank.close()
    files = {file.name: file.read_bytes() for file in bank.path.rglob("*") if file.is_file()}
    with (
        ExperienceBank(bank.path, read_only=True) as reader,
        ExperienceManager(reader) as manager,
    ):
        assert shown(manager) == {good.id: 30}
    again = {file.name: file.read_bytes() for file in bank.path.rglob("*") if file.is_file()}
    assert again == files


def test_the_command_line_says_it_in_words(bank, capsys):
    good, bad, new = (bank.add(text, task=TASK) for text in (TEXT, "take the iron key", "knock"))
    play(bank, None, *[True, False] * 12)
    play(bank, good, *[True] * 60)
    play(bank, bad, *[False] * 60)
    bank.close()

    def told(*args):
        assert run_app(main.app, ["bank", *map(str, args)]) == 0
        return capsys.readouterr().out

    rows = json.loads(told("ls", bank.path, "--json"))
    verdicts = {good.id: "helps", bad.id: "quarantined", new.id: "unproven"}
    assert {row["id"]: row["evidence"] for row in rows} == verdicts
    assert "quarantined: never shown, since it harms" in told("show", bank.path, bad.id)
    assert json.loads(told("stats", bank.path, "--json"))["quarantined"] == 1
