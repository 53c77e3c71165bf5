"""Trust in entries: earned on independent tasks, read from the journal alone, and what a search
shows meanwhile.
"""

import asyncio
import json
import math
import threading

import gymnasium as gym
import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.evidence import trust
from experiential.bank.evidence.trust import Standing, judge, may_try
from experiential.bank.manager import ExperienceManager
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
    Use,
)
from experiential.wrappers.experience import ExperienceWrapper

TEXT = "open the red door with the brass key"


@pytest.fixture
def bank(tmp_path):
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def play(bank, world, guided, free, *entries, group=None, task="open the door"):
    """One group: guided members that used the entries, free members that saw no bank."""
    group = group or f"{world}/{bank.head}"
    for condition, outcomes in ((Condition.GUIDED, guided), (Condition.FREE, free)):
        for success in outcomes:
            bank.record(episode(world, group, condition, success, *entries, task=task))


def episode(world, group, condition, success, *entries, task="open the door"):
    guided = condition is Condition.GUIDED
    uses = (
        tuple(Use(experience_id=entry.id, experience_version=entry.version) for entry in entries)
        if guided
        else ()
    )
    return Trajectory(
        task=task, task_id=world, group=group, condition=condition, success=bool(success), uses=uses
    )


def help_on(bank, count, *entries, start=0):
    for i in range(start, start + count):
        play(bank, f"world {i}", [1, 1], [0, i % 2], *entries)


def merge(bank, *entries, text="merged text"):
    operation = Merge(entries=tuple(range(1, len(entries) + 1)), text=text)
    return bank.consolidate(
        Distillation(parsed=ParsedOperations(operations=(operation,))), shown=entries
    )[0]


def trusted(bank, after=3, at=None):
    return [(entry.id, entry.version) for entry in bank.trusted(after=after, at=at)]


# The rule


def test_tasks_and_not_groups_are_what_the_interval_counts(bank):
    """Task means 3/4, 1/2 and 1: mean 3/4, standard deviation 1/4, t(2) = 4.30265; many seeds of
    one task count as one.
    """
    entry = bank.add(TEXT)
    for free in ([0, 0], [1, 0]):
        play(bank, "door", [1], free, entry)
    play(bank, "well", [1], [0, 1], entry)
    play(bank, "oven", [1], [0], entry)
    half = 4.30265273 * 0.25 / math.sqrt(3)
    found = bank.standing(entry.id, after=3)
    assert (found.tasks, found.mean, found.trusted) == (3, 0.75, True)
    assert found.interval == pytest.approx((0.75 - half, 0.75 + half), abs=1e-7)
    assert bank.uplift(entry.id).groups == 4
    assert not bank.standing(entry.id, after=4).trusted
    assert trusted(bank, 3) == [(entry.id, 1)] and trusted(bank, 4) == []


def test_a_lower_end_at_or_below_zero_is_not_enough(bank):
    entry, useless = bank.add(TEXT), bank.add("look under the mat")
    for i, free in enumerate(([0], [0], [1])):
        play(bank, f"w{i}", [1], free, entry)
        play(bank, f"w{i}", [0], [0], useless)
    found = bank.standing(entry.id, after=2)
    assert (
        found.tasks == 3
        and found.interval is not None
        and found.interval[0] < 0
        and not found.trusted
    )
    assert bank.standing(useless.id, after=2).interval == (0.0, 0.0) and trusted(bank, 2) == []


def test_one_task_is_never_enough_however_often_it_was_won(bank):
    entry = bank.add(TEXT)
    for _ in range(6):
        play(bank, "door", [1], [0], entry)
    assert not bank.standing(entry.id, after=1).trusted and trusted(bank, 1) == []
    play(bank, "well", [1], [0], entry)
    assert bank.standing(entry.id, after=1).trusted and trusted(bank, 1) == [(entry.id, 1)]


def test_without_a_task_id_the_words_of_the_task_tell_tasks_apart(bank):
    entry = bank.add(TEXT)
    for i in range(3):
        play(bank, "", [1], [0], entry, group=f"g{i}", task="the same words")
    assert bank.standing(entry.id, after=2).tasks == 1
    play(bank, "", [1], [0], entry, group="g3", task="other words")
    assert bank.standing(entry.id, after=2).tasks == 2


def test_no_tasks_asked_for_trusts_everything(bank):
    entry = bank.add(TEXT)
    assert (
        bank.trust_after == 0
        and bank.standing(entry.id).trusted
        and trusted(bank, 0) == [(entry.id, 1)]
    )
    assert judge("a", 1, {}, 0).trusted and not judge("a", 1, {}, 1).trusted


def test_an_update_starts_anew_and_a_rollback_brings_the_trust_back(bank):
    entry = bank.add(TEXT)
    help_on(bank, 4, entry)
    head = bank.head
    assert trusted(bank) == [(entry.id, 1)]
    bank.update(entry.id, "open the red door with the iron key")
    assert trusted(bank) == [] and bank.standing(entry.id, after=3) == Standing(
        id=entry.id, version=2, after=3, trusted=False
    )
    bank.rollback(head)
    assert trusted(bank) == [(entry.id, 1)]


def test_a_rollback_does_not_forget_what_was_learned_since(bank):
    entry = bank.add(TEXT)
    help_on(bank, 4, entry)
    head = bank.head
    for i in range(4):
        play(bank, f"world {i}", [0, 0], [1, 1], entry)
    bank.rollback(head)
    assert trusted(bank) == [] and trusted(bank, at=head) == [(entry.id, 1)]


def test_a_merged_entry_stands_on_the_joint_evidence_of_its_parents(bank):
    good, new, bad = (bank.add(text) for text in (TEXT, "take the brass key", "walk into the well"))
    help_on(bank, 4, good)
    merged = merge(bank, good, new)
    assert trusted(bank) == [(merged.id, 1)]
    for i in range(4):
        play(bank, f"world {i}", [0, 0], [1, 1], bad)
    assert trusted(bank) == [(merged.id, 1)]
    last = merge(bank, merged, bad)
    assert trusted(bank) == [] and bank.standing(last.id, after=3).tasks == 4


def test_a_parent_does_not_stand_on_what_its_heirs_did(bank):
    parent, other = bank.add(TEXT), bank.add("take the brass key")
    head = bank.head
    help_on(bank, 4, merge(bank, parent, other))
    bank.rollback(head)
    assert len(bank) == 2 and trusted(bank) == []
    assert bank.uplift(parent.id).lineage.groups == 4


def test_deduplication_keeps_the_trust_of_the_survivor(bank):
    entry = bank.add(TEXT)
    bank.add(TEXT + "s")
    help_on(bank, 4, entry)
    bank.deduplicate(0.9)
    assert trusted(bank) == [(entry.id, 2)]


def test_the_past_is_judged_as_it_was(bank):
    """``trusted(at=c)`` is what ``trusted()`` said when c was the last commit: after every kind of
    commit.
    """
    a, b = bank.add(TEXT), bank.add("take the brass key")
    told = {bank.head: trusted(bank)}

    def note():
        told[bank.head] = trusted(bank)

    for i in range(5):
        play(bank, f"world {i}", [1], [], a, group=f"g{i}")
        note()
        play(
            bank, f"world {i}", [], [0], group=f"g{i}"
        )  # the free member comes later and completes the pair
        note()
    c = merge(bank, a, b)
    note()
    bank.update(c.id, "another text")
    note()
    bank.rollback(2)
    note()
    bank.remove(b.id)
    note()
    assert {commit: trusted(bank, at=commit) for commit in told} == told
    assert [] in told.values() and [(a.id, 1)] in told.values() and [(c.id, 1)] in told.values()


def test_reopened_read_only_and_forked_banks_agree(bank, tmp_path):
    entry = bank.add(TEXT)
    bank.add("take the brass key")
    help_on(bank, 4, entry)
    bank.trust_after = 3
    found = trusted(bank, None)
    assert found == [(entry.id, 1)]
    with bank.fork(tmp_path / "fork") as fork:
        assert trusted(fork, None) == found
    bank.close()
    with ExperienceBank(bank.path, read_only=True) as again:
        assert trusted(again, None) == found and again.trust_after == 3
    with ExperienceBank(bank.path) as again:
        assert trusted(again, None) == found
    with ExperienceBank(bank.path, namespace="other") as other:
        assert other.trust_after == 0


def test_a_book_that_reads_on_says_what_a_new_one_says(bank):
    book = bank.trust_book(2)
    entries = bank.add_many([f"advice {i}" for i in range(6)])

    def agree():
        fresh = bank.trust_book(2)
        fresh.refresh()
        book.refresh()
        assert book.trusted == fresh.trusted
        return len(book.trusted)

    sizes = [agree()]
    for turn in range(12):
        used = [entries[turn % 6], entries[(turn * 5 + 1) % 6]]
        play(bank, f"world {turn % 4}", [turn < 7, turn < 7], [], *used, group=f"g{turn}")
        sizes.append(agree())
        play(bank, f"world {turn % 4}", [], [0, turn % 5 == 0 or turn > 6], group=f"g{turn}")
        if turn in (4, 8):
            entries.append(merge(bank, entries[turn % 6], entries[-1], text=f"merged {turn}"))
        sizes.append(agree())
    assert max(sizes) > 2 and any(a > b for a, b in zip(sizes, sizes[1:], strict=False)), (
        "trust is lost, too"
    )


def test_a_refresh_judges_only_what_is_new(bank, monkeypatch):
    a, b = bank.add(TEXT), bank.add("take the brass key")
    book, judged = bank.trust_book(2), []
    monkeypatch.setattr(trust, "judge", lambda *one: judged.append(one[:2]) or judge(*one))
    help_on(bank, 4, a, b)
    book.refresh()
    assert sorted(judged) == sorted([(a.id, 1), (b.id, 1)])
    judged.clear()
    bank.update(b.id, "take the iron key")
    book.refresh()
    assert judged == []
    play(bank, "world 9", [1], [0], a)
    book.refresh()
    assert judged == [(a.id, 1)] and book.trusted == {(a.id, 1), (b.id, 1)}


def test_a_refresh_that_fails_leaves_its_work_to_the_next(bank, monkeypatch):
    entry, book = bank.add(TEXT), bank.trust_book(3)
    help_on(bank, 4, entry)
    monkeypatch.setattr(trust, "judge", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        book.refresh()
    monkeypatch.undo()
    assert book.trusted == frozenset()
    book.refresh()
    assert book.trusted == {(entry.id, 1)}


def test_wrong_numbers_and_strangers_are_refused(bank):
    with pytest.raises(ValueError, match="Expected a positive number of tasks"):
        bank.trust_book(0)
    with pytest.raises(BankError, match="Expected the id of a live entry"):
        bank.standing("nobody")
    with pytest.raises(ConfigError, match="provisional_share"):
        ExperienceManager(bank, provisional_share=1.5)


# The draw


def test_the_share_of_episodes_is_the_one_asked_for_and_each_keeps_its_draw():
    draws = [may_try(7, f"episode {i}", 0.3) for i in range(4000)]
    assert sum(draws) / 4000 == pytest.approx(0.3, abs=0.03)
    assert draws == [may_try(7, f"episode {i}", 0.3) for i in range(4000)]
    assert draws != [may_try(8, f"episode {i}", 0.3) for i in range(4000)]
    assert not may_try(0, "x", 0.0) and may_try(0, "x", 1.0)


def with_one_of_each(bank):
    """A trusted entry, and a provisional one that lies nearer to the query."""
    old, new = bank.add("open the red door with a key"), bank.add(TEXT)
    help_on(bank, 4, old)
    return old, new


def test_provisional_entries_reach_their_share_of_episodes_and_no_other(bank):
    old, new = with_one_of_each(bank)
    with ExperienceManager(
        bank, trust_after=3, provisional_share=0.25, seed=5, retrieval={"strategy": "nearest"}
    ) as manager:
        for i in range(60):
            (hit,) = manager.search(TEXT, episode=f"e{i}")
            admitted = may_try(5, f"e{i}", 0.25)
            assert (
                hit.experience.id == (new.id if admitted else old.id)
                and hit.admitted == hit.provisional == admitted
            )
            assert hit.propensity == (0.25 if admitted else 1.0)
        stats = manager.stats()
        assert (stats["trusted"], stats["provisional"]) == (1, 1)
        assert (
            5 < stats["searches_admitted"] < 25
            and stats["searches_admitted"] + stats["searches_held_back"] == 60
        )


def test_all_searches_of_an_episode_end_alike_and_a_batch_may_mix_episodes(bank):
    old, new = with_one_of_each(bank)
    with ExperienceManager(
        bank, trust_after=3, provisional_share=0.5, retrieval={"strategy": "nearest"}
    ) as manager:
        names = [f"e{i}" for i in range(32)]
        wanted = [new.id if may_try(0, name, 0.5) else old.id for name in names]
        for _ in range(2):
            assert [
                row[0].experience.id for row in manager.search([TEXT] * 32, episode=names)
            ] == wanted
        asked = [manager.ask(TEXT, episode=name) for name in names]
        assert [answer.hit.experience.id for answer in asked] == wanted
        assert (
            [answer.use.provisional for answer in asked]
            == [answer.use.admitted for answer in asked]
            == [id == new.id for id in wanted]
        )
        with pytest.raises(ValueError, match="one for each of the 2 queries, got 3"):
            manager.search(["a", "b"], episode=["1", "2", "3"])


def test_searches_without_an_episode_draw_for_themselves_from_the_seed(bank):
    with_one_of_each(bank)

    def draws(seed):
        with ExperienceManager(bank, trust_after=3, provisional_share=0.5, seed=seed) as manager:
            return [manager.search(TEXT)[0].admitted for _ in range(40)]

    assert draws(1) == draws(1) != draws(2) and 8 < sum(draws(1)) < 32


@pytest.mark.parametrize(("share", "found"), [(0.0, False), (1.0, True)])
def test_a_share_of_nothing_and_of_all(bank, share, found):
    bank.add(TEXT)
    with ExperienceManager(bank, trust_after=1, provisional_share=share) as manager:
        assert all(bool(manager.search(TEXT, episode=f"e{i}")) == found for i in range(10))


def test_trust_off_draws_nothing_and_says_nothing(bank):
    bank.add(TEXT)
    with ExperienceManager(bank) as manager:
        (hit,) = manager.search(TEXT, episode="e")
        assert (hit.provisional, hit.admitted, hit.propensity) == (False, None, 1.0)
        assert "trusted" not in manager.stats()
    assert bank.trust_after == 0


def test_a_trusted_entry_is_found_behind_a_crowd_of_provisional_ones(bank):
    old = bank.add("open the red door with a key")
    help_on(bank, 4, old)
    bank.add_many([TEXT] * 300)
    with ExperienceManager(bank, trust_after=3, provisional_share=0.0) as manager:
        assert [hit.experience.id for hit in manager.search(TEXT, episode="e")] == [old.id]
        assert manager.search("bake bread in the oven", episode="e") == []


# Kept up to date


class Lessons:
    """Writes one lesson for each trajectory."""

    version = 0

    async def adistill(self, trajectory, shown):
        return Distillation(
            parsed=ParsedOperations(operations=(Add(text=f"lesson of {trajectory.id}"),))
        )

    async def arefine(self, query, experience):
        return experience.text, None

    async def amerge(self, experiences):
        operation = Merge(entries=tuple(range(1, len(experiences) + 1)), text=TEXT)
        return Distillation(parsed=ParsedOperations(operations=(operation,)))


def test_outcomes_submitted_to_a_manager_are_seen_by_its_next_searches(bank):
    entry = bank.add(TEXT)
    with ExperienceManager(bank, Lessons(), trust_after=3, provisional_share=0.0) as manager:
        assert manager.search(TEXT) == []
        for i in range(3):
            for condition in Condition:
                manager.submit(
                    episode(f"w{i}", f"g{i}", condition, condition is Condition.GUIDED, entry)
                )
        manager.drain(timeout=20)
        (hit,) = manager.search(TEXT)
        assert hit.experience.id == entry.id and not hit.provisional
        assert manager.stats()["trusted"] == 1 and manager.stats()["provisional"] == 6
        bank.update(entry.id, TEXT + " now")
        assert manager.search(TEXT) == []


def test_what_is_judged_while_a_search_looks_up_is_trusted_by_it(bank):
    entry = bank.add(TEXT)
    with ExperienceManager(bank, trust_after=3, provisional_share=0.0) as manager:
        lookup = bank.nearest

        def slow(*arguments, **options):
            assert manager._probation._refreshing.result(60)
            return lookup(*arguments, **options)

        bank.nearest = slow
        help_on(bank, 4, entry)
        assert [hit.experience.id for hit in manager.search(TEXT)] == [entry.id]


def test_merging_in_the_manager_carries_trust_along(bank):
    a, b = bank.add(TEXT, task="t"), bank.add("take the brass key", task="t")
    help_on(bank, 4, a, b)
    with ExperienceManager(bank, Lessons(), trust_after=3, provisional_share=0.0) as manager:
        assert manager.merge() == 1
        manager.drain(timeout=20)
        (hit,) = manager.search(TEXT)
        assert hit.experience.id not in (a.id, b.id) and not hit.provisional


def test_a_search_never_waits_for_trust_to_be_judged(bank):
    """While a refresh hangs, searches answer from what was known."""
    entry = bank.add(TEXT)
    with ExperienceManager(bank, trust_after=3, provisional_share=0.0) as manager:
        book, gate, begun = manager._probation.book, threading.Event(), threading.Event()
        refresh = book.refresh

        def slow():
            begun.set()
            assert gate.wait(60)
            refresh()

        book.refresh = slow
        help_on(bank, 4, entry)
        assert manager.search(TEXT) == []
        assert begun.wait(60) and manager.search(TEXT) == []
        gate.set()
        manager.drain(timeout=60)
        assert len(manager.search(TEXT)) == 1


def test_a_refresh_that_fails_is_counted_and_the_next_one_catches_up(bank):
    entry = bank.add(TEXT)
    with ExperienceManager(bank, trust_after=3, provisional_share=0.0) as manager:
        book = manager._probation.book
        refresh, book.refresh = book.refresh, lambda: 1 / 0
        help_on(bank, 4, entry)
        manager.drain(timeout=20)
        assert (
            manager.search(TEXT) == []
            and manager.stats()["failures"]["trust: ZeroDivisionError"] >= 1
        )
        book.refresh = refresh
        manager.drain(timeout=20)
        assert len(manager.search(TEXT)) == 1


def test_a_read_only_bank_holds_back_too_and_stays_as_it_is(bank):
    old, new = with_one_of_each(bank)
    bank.close()
    before = {file.name: file.read_bytes() for file in bank.path.rglob("*") if file.is_file()}
    with (
        ExperienceBank(bank.path, read_only=True) as reader,
        ExperienceManager(reader, trust_after=3, provisional_share=0.5) as manager,
    ):
        names = [f"e{i}" for i in range(20)]
        found = {name: manager.search(TEXT, episode=name)[0].experience.id for name in names}
        assert {id for name, id in found.items() if not may_try(0, name, 0.5)} == {old.id}
        assert new.id in found.values()
    assert {
        file.name: file.read_bytes() for file in bank.path.rglob("*") if file.is_file()
    } == before


# Logged


class Door(gym.Env):
    """One turn, always won."""

    observation_space = gym.spaces.Text(64)
    action_space = gym.spaces.Text(64)

    def reset(self, *, seed=None, options=None):
        return TEXT, {"task": TEXT}

    def step(self, action):
        return "open", 1.0, True, False, {}


def test_what_an_episode_drew_is_journalled_with_its_uses(bank):
    old, new = with_one_of_each(bank)
    with ExperienceManager(
        bank, trust_after=3, provisional_share=0.5, retrieval={"strategy": "nearest"}
    ) as manager:
        env = ExperienceWrapper(Door(), manager, when="both")
        seen = set()
        for _ in range(20):
            _, info = env.reset()
            _, _, _, _, last = env.step("open")
            trajectory = bank.trajectory(last["trajectory_id"])
            admitted = may_try(0, trajectory.id, 0.5)
            (use,) = trajectory.uses
            assert (use.admitted, use.provisional, use.propensity) == (
                admitted,
                admitted,
                0.5 if admitted else 1.0,
            )
            assert use.experience_id == (new.id if admitted else old.id)
            assert info["experience"][0]["propensity"] == use.propensity
            seen.add(admitted)
        assert seen == {True, False}


def test_a_use_journalled_before_there_was_trust_can_be_read():
    old = json.loads(
        Use(experience_id="a", experience_version=1).model_dump_json(
            exclude={"provisional", "admitted"}
        )
    )
    assert Use.model_validate(old) == Use(id=old["id"], experience_id="a", experience_version=1)


def test_concurrent_searches_of_many_episodes_get_what_their_own_draw_allows(bank):
    old, new = with_one_of_each(bank)
    with ExperienceManager(
        bank, trust_after=3, provisional_share=0.5, retrieval={"strategy": "nearest"}
    ) as manager:

        async def all_at_once():
            return await asyncio.gather(
                *(manager.asearch(TEXT, episode=f"e{i}") for i in range(64))
            )

        rows = asyncio.run(all_at_once())
    assert [row[0].experience.id for row in rows] == [
        new.id if may_try(0, f"e{i}", 0.5) else old.id for i in range(64)
    ]


# Told


def told(capsys, *args):
    assert run_app(main.app, ["bank", *map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_line_tells_who_is_trusted(bank, capsys):
    old, new = with_one_of_each(bank)
    bank.close()
    assert {row["id"]: row["trust"] for row in told(capsys, "ls", bank.path)} == {
        old.id: "trusted",
        new.id: "trusted",
    }
    asked = ("--trust-after", 3)
    assert {row["id"]: row["trust"] for row in told(capsys, "ls", bank.path, *asked)} == {
        old.id: "trusted",
        new.id: "provisional",
    }
    shown = told(capsys, "show", bank.path, old.id, *asked)["trust"]
    assert (shown["after"], shown["tasks"], shown["trusted"]) == (3, 4, True)
    counts = told(capsys, "stats", bank.path, "--trust-after", 5)
    assert (counts["entries"], counts["trusted"], counts["provisional"]) == (2, 0, 2)


def test_the_command_line_knows_what_the_last_run_asked_for(bank, capsys):
    _, new = with_one_of_each(bank)
    ExperienceManager(bank, trust_after=3).close()
    ExperienceManager(bank).close()
    bank.close()
    assert {row["trust"] for row in told(capsys, "ls", bank.path)} == {"trusted", "provisional"}
    assert told(capsys, "show", bank.path, new.id)["trust"]["trusted"] is False
    counts = told(capsys, "stats", bank.path)
    assert (counts["trusted"], counts["provisional"]) == (1, 1)
