"""The experience manager: retrieval that rotates, a queue that loses nothing, an extractor that may
fail.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.consolidation.consolidate import merge_group, recent_groups
from experiential.bank.index.embed import HashingEmbedder
from experiential.bank.manager import ExperienceManager
from experiential.errors import BankError, ConfigError, ReadOnlyBankError
from experiential.types import (
    Add,
    Distillation,
    Experience,
    Generation,
    Merge,
    ParsedOperations,
    Refusal,
    Trajectory,
    Update,
    Use,
)


class Echo:
    """Adds one lesson a trajectory; refines by a prefix; merges whatever it is shown into one."""

    version = 5

    def __init__(self, delay=0.0, fail=0):
        self.delay = delay
        self.fail = fail
        self.distilled = []
        self.shown = []
        self.merged = []

    async def adistill(self, trajectory, shown):
        await asyncio.sleep(self.delay)
        self.distilled.append(trajectory.id)
        self.shown.append(list(shown))
        if self.fail > 0:
            self.fail -= 1
            raise ConnectionError("backend went away")
        operations = (Add(text=f"lesson of {trajectory.id}"),)
        return Distillation(
            parsed=ParsedOperations(operations=operations, refused=(Refusal(reason="too_many"),))
        )

    async def arefine(self, query, experience):
        return f"{query}: {experience.text}", Generation(text="refined")

    async def amerge(self, experiences):
        self.merged.append([e.text for e in experiences])
        operation = Merge(
            entries=tuple(range(1, len(experiences) + 1)),
            text=" + ".join(e.text for e in experiences),
        )
        return Distillation(parsed=ParsedOperations(operations=(operation,)))


@pytest.fixture
def bank(tmp_path):
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def wait_until(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def trajectories(count, **fields):
    return [Trajectory(id=f"t{i}", task="open the door", **fields) for i in range(count)]


def test_thirty_two_identical_queries_in_one_batch_spread_over_many_entries(bank):
    bank.add_many([f"open the red door {chr(97 + i)}" for i in range(16)])
    with ExperienceManager(
        bank, retrieval={"strategy": "diverse", "pool": 16, "batch_size": 32}
    ) as manager:
        rows = manager.search(["open the red door"] * 32)
        assert len({row[0].experience.id for row in rows}) >= 3
        assert manager.stats()["mean_batch"] == 32


def test_identical_texts_all_get_their_turn(bank):
    bank.add_many(["open the red door"] * 16)
    with ExperienceManager(bank) as manager:
        rows = manager.search(["open the red door"] * 32)
        assert len({row[0].experience.id for row in rows}) == 16


def test_counts_are_seen_at_once_and_journalled_by_close(bank):
    entry = bank.add("open the red door")
    with ExperienceManager(bank) as manager:
        commits = len(bank.commits())
        manager.search(["open the red door"] * 3)
        assert bank.get(entry.id).statistics.retrievals == 3 and len(bank.commits()) == commits
    bank.close()
    with ExperienceBank(bank.path) as again:
        assert again.get(entry.id).statistics.retrievals == 3


def test_it_abstains_below_the_floor_and_on_blank_text(bank):
    bank.add("bake bread in the oven")
    with ExperienceManager(bank, retrieval={"floor": 0.6}) as manager:
        assert manager.search("unlock doors with keys") == []
        assert manager.search("  ") == []
        assert manager.search(["bake bread in the oven", ""])[1] == []
        assert manager.stats()["abstentions"] == 1 and manager.stats()["retrievals"] == 1


def test_exclude_instance_holds_inside_one_batch(bank):
    made = Distillation(parsed=ParsedOperations(operations=(Add(text="open the red door"),)))
    bank.apply(made, trajectory=Trajectory(task="t", instance="i1"), shown=[])

    with ExperienceManager(bank, retrieval={"batch_wait": 0.05}) as manager:

        async def both():
            return await asyncio.gather(
                manager.asearch("open the red door", exclude_instance="i1"),
                manager.asearch("open the red door"),
            )

        hidden, seen = asyncio.run(both())
        assert hidden == [] and len(seen) == 1 and manager.stats()["mean_batch"] == 2


def test_same_seed_same_hits(bank):
    bank.add_many([f"open door {i}" for i in range(20)])
    picks = []
    for _ in range(2):
        with bank.fork(bank.path.parent / f"copy{len(picks)}") as copy:
            with ExperienceManager(
                copy, seed=4, retrieval={"strategy": "diverse", "exploration": 0.7}
            ) as manager:
                rows = manager.search([f"open door {i % 5}" for i in range(60)], k=2)
            picks.append([[(h.experience.id, h.propensity) for h in row] for row in rows])
    assert picks[0] == picks[1] and any(p < 1 for row in picks[0] for _, p in row)


def test_a_read_only_bank_is_searched_with_counts_in_memory_only(bank):
    bank.add_many(["open the red door"] * 4)
    with (
        ExperienceBank(bank.path, read_only=True) as reader,
        ExperienceManager(reader, Echo()) as manager,
    ):
        rows = manager.search(["open the red door"] * 8)
        assert len({row[0].experience.id for row in rows}) == 4
        assert manager.submit(Trajectory(task="t")) is None
        assert manager.ask("open the red door").text is not None
        manager.drain(timeout=5)
        assert all(entry.statistics.retrievals == 0 for entry in reader.entries())
        with pytest.raises(ReadOnlyBankError):
            manager.merge()


def test_a_cancelled_search_blocks_nobody(tmp_path):
    gate = threading.Event()

    def slow(batch):
        import numpy as np

        if any("slow" in text for text in batch):
            gate.wait(10)
        return np.ones((len(batch), 8), dtype=np.float32)

    with ExperienceBank(tmp_path / "slow", embedder=slow) as bank:
        bank.add("a")
        with ExperienceManager(bank) as manager:

            async def scene():
                waiting = asyncio.ensure_future(manager.asearch("slow"))
                await asyncio.sleep(0.05)
                waiting.cancel()
                await asyncio.wait([waiting], timeout=5)  # it has left before the gate opens
                assert waiting.cancelled()
                gate.set()
                return await asyncio.wait_for(manager.asearch("quick"), 5)

            assert len(asyncio.run(scene())) == 1
            assert manager.stats()["retrievals"] == 1, "the cancelled query counts nothing"


def test_a_failing_embedder_raises_to_its_own_callers_and_the_next_search_works(tmp_path):
    def embed(batch):
        import numpy as np

        if "bad" in batch:
            raise RuntimeError("no vector for this")
        return np.ones((len(batch), 8), dtype=np.float32)

    with ExperienceBank(tmp_path / "b", embedder=embed) as bank, ExperienceManager(bank) as manager:
        bank.add("a")
        with pytest.raises(RuntimeError, match="no vector"):
            manager.search("bad")
        assert len(manager.search("good")) == 1


def test_submitted_trajectories_are_distilled_with_what_they_were_shown(bank):
    entry = bank.add("old")
    bank.update(entry.id, "newer")
    use = Use(experience_id=entry.id, experience_version=1)
    extractor, news = Echo(), []
    with ExperienceManager(bank, extractor) as manager:
        manager.on_distillation = lambda *args: news.append(args)
        item = manager.submit(Trajectory(id="t9", task="t", uses=(use, use), success=True))
        manager.drain(timeout=10)
        assert item == "t9" and [e.text for e in extractor.shown[0]] == ["old"]
        trajectory, _, written = news[0]
        assert trajectory.id == "t9" and [e.text for e in written] == ["lesson of t9"]
        assert written[0].provenance.extractor_version == 5
        stats = manager.stats()
        assert (stats["distilled"], stats["queued"], stats["running"]) == (1, 0, 0)
        assert stats["operations"] == {"add": 1} and stats["refused"] == {"too_many": 1}
    assert bank.get(entry.id).statistics.uses == 2


def test_drain_returns_at_once_when_nothing_was_submitted(bank):
    with ExperienceManager(bank, Echo()) as manager:
        manager.drain(timeout=5)


def test_drain_says_how_much_is_left_when_time_is_up(bank):
    with ExperienceManager(bank, Echo()) as manager:
        manager.pause()
        manager.submit(Trajectory(task="t"))
        with pytest.raises(TimeoutError, match="1 items are left"):
            manager.drain(timeout=0.1)
        assert manager.paused and manager.stats()["queued"] == 1
        manager.resume()
        manager.drain(timeout=10)


def test_a_full_queue_makes_submit_wait(bank):
    with ExperienceManager(bank, Echo(), queue_size=2) as manager:
        manager.pause()
        for trajectory in trajectories(2):
            manager.submit(trajectory)
        third = threading.Thread(target=manager.submit, args=(Trajectory(id="late", task="t"),))
        third.start()
        third.join(0.2)
        assert third.is_alive() and bank.trajectory("late") is None
        manager.resume()
        third.join(10)
        manager.drain(timeout=10)
        assert not third.is_alive() and manager.stats()["distilled"] == 3


def test_a_failure_is_retried_and_then_a_dead_letter_that_can_be_requeued(bank):
    extractor = Echo(fail=3)
    with ExperienceManager(bank, extractor, retries=2, backoff=0.01) as manager:
        manager.submit(Trajectory(id="t0", task="t"))
        manager.drain(timeout=10)
        assert extractor.distilled == ["t0"] * 3
        [letter] = manager.dead_letters()
        assert (letter.id, letter.attempts, letter.reason) == (
            "t0",
            3,
            "ConnectionError: backend went away",
        )
        assert (
            manager.stats()["failures"] == {"distill: ConnectionError": 3}
            and manager.stats()["dead"] == 1
        )
        with pytest.raises(BankError, match="dead letter"):
            manager.requeue("nobody")
        manager.requeue("t0")
        manager.drain(timeout=10)
        assert manager.dead_letters() == [] and len(bank) == 1


def test_the_first_failure_of_a_kind_is_a_warning_with_the_words_of_the_server(bank, caplog):
    with ExperienceManager(bank, Echo(fail=3), retries=0, backoff=0.01) as manager:
        for i in range(4):
            manager.submit(Trajectory(id=f"t{i}", task="t"))
        manager.drain(timeout=10)
        assert manager.stats()["distilled"] == 1
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "distill failed: ConnectionError: backend went away" in record.getMessage()


def test_close_distils_what_is_left_within_the_time_given_and_names_the_rest(bank, caplog):
    manager = ExperienceManager(bank, Echo(delay=0.02))
    for i in range(5):
        manager.submit(Trajectory(id=f"t{i}", task="t"))
    manager.close(drain=20)
    assert len(bank) == 5 and not caplog.records
    manager = ExperienceManager(bank, Echo(delay=30))
    for i in range(3):
        manager.submit(Trajectory(id=f"late{i}", task="t"))
    start = time.monotonic()
    manager.close(drain=0.2)
    assert time.monotonic() - start < 10 and len(bank.queue.waiting()) == 3
    [record] = caplog.records
    assert "3 finished episodes are not distilled yet" in record.getMessage()
    with ExperienceManager(bank, Echo()) as manager:
        manager.drain(timeout=20)
    assert len(bank) == 8


def test_an_extractor_that_hangs_is_timed_out(bank):
    with ExperienceManager(bank, Echo(delay=30), retries=0, distill_timeout=0.05) as manager:
        manager.submit(Trajectory(task="t"))
        manager.drain(timeout=10)
        assert manager.stats()["failures"] == {"distill: timeout": 1}


def test_a_failing_hook_is_counted_and_harms_nothing(bank):
    with ExperienceManager(bank, Echo()) as manager:
        manager.on_distillation = lambda *args: 1 / 0
        manager.submit(Trajectory(task="t"))
        manager.drain(timeout=10)
        assert (
            manager.stats()["failures"] == {"on_distillation: ZeroDivisionError": 1}
            and len(bank) == 1
        )


def test_what_close_interrupts_is_distilled_by_the_next_manager(bank):
    with ExperienceManager(bank, Echo(delay=30)) as manager:
        for trajectory in trajectories(5):
            manager.submit(trajectory)
        time.sleep(0.05)
    assert len(bank.queue.waiting()) == 5
    extractor = Echo()
    with ExperienceManager(bank, extractor) as manager:
        manager.drain(timeout=10)
    assert sorted(extractor.distilled) == [f"t{i}" for i in range(5)] and len(bank) == 5


def test_no_more_than_distill_workers_run_at_once(bank):
    class Crowd(Echo):
        now = most = 0

        async def adistill(self, trajectory, shown):
            self.now += 1
            self.most = max(self.most, self.now)
            await asyncio.sleep(0.01)
            self.now -= 1
            return await super().adistill(trajectory, shown)

    extractor = Crowd()
    with ExperienceManager(bank, extractor, distill_workers=3) as manager:
        manager.pause()
        for trajectory in trajectories(12):
            manager.submit(trajectory)
        manager.resume()
        manager.drain(timeout=60)
    assert 1 < extractor.most <= 3


def test_without_an_extractor_and_a_shared_queue_outcomes_are_recorded_only(bank):
    entry = bank.add("a")
    with ExperienceManager(bank, share_queue=False) as manager:
        assert (
            manager.submit(
                Trajectory(
                    task="t",
                    success=False,
                    uses=(Use(experience_id=entry.id, experience_version=1),),
                )
            )
            is None
        )
        manager.drain(timeout=5)
    assert bank.queue.waiting() == [] and bank.get(entry.id).statistics.uses == 1


def test_a_manager_whose_extractor_is_taken_away_only_records(bank):
    with ExperienceManager(bank, Echo(), share_queue=False) as manager:
        manager.extractor = None
        assert manager.submit(Trajectory(id="t", task="open the door")) is None
        assert bank.trajectory("t") is not None and list(bank.queue.waiting()) == []


def test_what_a_manager_without_an_extractor_submits_waits_for_one(bank):
    with ExperienceManager(bank) as worker:
        assert worker.submit(Trajectory(id="t", task="open the door")) == "t"
        worker.drain(timeout=5)
        stats = worker.stats()
        assert (stats["queued"], stats["waiting"], bank.queue.waiting()) == (0, 1, ["t"])
    with ExperienceManager(bank, Echo()) as manager:
        manager.drain(timeout=20)
        assert manager.stats()["waiting"] == 0
    assert [entry.text for entry in bank] == ["lesson of t"]


def test_an_extractor_takes_live_what_others_submit(bank):
    with ExperienceManager(bank) as worker, ExperienceManager(bank, Echo()) as manager:
        manager.drain(timeout=5)
        for trajectory in trajectories(5):
            worker.submit(trajectory)
        wait_until(lambda: manager.stats()["distilled"] == 5)
        assert len(bank) == 5 and worker.stats()["distilled"] == 0


def test_two_extractors_on_one_bank_share_the_work(bank):
    first, second = Echo(delay=0.1), Echo(delay=0.1)
    with (
        ExperienceManager(bank) as worker,
        ExperienceManager(bank, first, distill_workers=2) as one,
        ExperienceManager(bank, second, distill_workers=2) as two,
    ):
        for trajectory in trajectories(30):
            worker.submit(trajectory)
        one.submit(Trajectory(id="own", task="t"))
        one.drain(timeout=20)
        two.drain(timeout=20)
    done = sorted(first.distilled + second.distilled)
    assert done == sorted(["own", *(f"t{i}" for i in range(30))]), "each once"
    assert len(first.distilled) > 3 and len(second.distilled) > 3
    assert "own" in first.distilled


def test_a_closed_manager_gives_back_what_it_held(bank):
    slow, quick = Echo(delay=60), Echo()
    with ExperienceManager(bank) as worker:
        for trajectory in trajectories(3):
            worker.submit(trajectory)
    manager = ExperienceManager(bank, slow)
    wait_until(lambda: manager.stats()["running"] == 3)
    assert bank.queue.lease("another", 9) == []
    manager.close()
    with ExperienceManager(bank, quick) as manager:
        manager.drain(timeout=20)
    assert sorted(quick.distilled) == ["t0", "t1", "t2"]


def test_a_distiller_that_falls_silent_loses_its_items_and_the_first_result_counts(bank):
    bank.submit_many(trajectories(2))
    assert bank.queue.lease("silent", 1, seconds=0.2) == ["t0"]
    extractor = Echo()
    with ExperienceManager(bank, extractor, lease=0.3) as manager:
        wait_until(lambda: bank.queue.waiting() == [])
        manager.drain(timeout=20)
    late = Distillation(parsed=ParsedOperations(operations=(Add(text="too late"),)))
    assert bank.apply(late, trajectory=trajectories(1)[0], shown=(), item="t0") == []
    assert sorted(entry.text for entry in bank) == ["lesson of t0", "lesson of t1"]


def test_a_drain_that_ends_too_early_loses_nothing_that_it_took(bank, monkeypatch):
    with ExperienceManager(bank) as worker, ExperienceManager(bank, Echo()) as manager:
        lease = bank.queue.lease

        def late(*args, **kwargs):
            taken = lease(*args, **kwargs)
            time.sleep(0.2)  # as over a slow network
            return taken

        monkeypatch.setattr(type(bank.queue), "lease", lambda self, *a, **k: late(*a, **k))
        worker.submit(Trajectory(id="t", task="t"))
        for _ in range(20):
            with contextlib.suppress(TimeoutError):
                manager.drain(timeout=0.01)
        wait_until(lambda: manager.stats()["distilled"] == 1, seconds=10)


def test_close_does_not_wait_for_what_others_go_on_submitting(bank):
    ended = threading.Event()

    def submit_for_ever():
        with ExperienceManager(bank) as worker:
            while not ended.is_set():
                worker.submit(Trajectory(task="t"))

    thread = threading.Thread(target=submit_for_ever)
    thread.start()
    try:
        manager = ExperienceManager(bank, Echo(delay=0.05), distill_workers=2)
        wait_until(lambda: manager.stats()["distilled"] > 3)
        start = time.monotonic()
        manager.close(drain=60)
        assert time.monotonic() - start < 20
    finally:
        ended.set()
        thread.join()


def test_ask_refines_the_hit_and_names_everything_that_earns_credit(bank):
    entry = bank.add("open the red door with the brass key")
    with ExperienceManager(bank, Echo()) as manager:
        answer = manager.ask("open the red door", episode="e1", turn=4)
        assert answer.text == "open the red door: open the red door with the brass key"
        assert (answer.use.experience_id, answer.use.experience_version, answer.use.how) == (
            entry.id,
            1,
            "search_and_ask",
        )
        assert (answer.use.episode, answer.use.turn, answer.use.refinement) == (
            "e1",
            4,
            answer.generation.id,
        )
        assert bank.generation(answer.generation.id) == answer.generation
        assert manager.ask("zzz qqq").text is None and manager.ask("zzz qqq").hit is None


def test_ask_falls_back_on_the_entry_when_the_extractor_fails(bank):
    class Mute(Echo):
        async def arefine(self, query, experience):
            raise ConnectionError

    bank.add("open the red door")
    with ExperienceManager(bank, Mute()) as manager:
        answer = manager.ask("open the red door")
        assert answer.text == "open the red door" and answer.use.refinement is None
        assert manager.stats()["failures"] == {"refine: ConnectionError": 1}


def test_merge_consolidates_related_entries_and_keeps_lineage(bank):
    parents = bank.add_many([f"n{i}" for i in range(4)], task="t") + bank.add_many(
        ["lonely"], task="u"
    )
    extractor, news = Echo(), []
    with ExperienceManager(bank, extractor, merge_chunk=3) as manager:
        manager.on_merge = lambda *args: news.append(args)
        assert manager.merge() == 2
    assert extractor.merged == [["n0", "n1", "n2"], ["n0 + n1 + n2", "n3"]] and len(news) == 2
    assert [e.text for e in bank.entries()] == ["lonely", "n0 + n1 + n2 + n3"]
    merged = list(bank.entries())[1]
    assert {(e.id, 1) for e in parents[:4]} < set(bank.lineage(merged.id, 1))


def test_a_failing_merge_leaves_its_chunk_as_it_was(bank):
    class Clumsy(Echo):
        async def amerge(self, experiences):
            if experiences[0].task == "bad":
                raise ValueError
            return await super().amerge(experiences)

    bank.add_many(["a", "b"], task="bad")
    bank.add_many(["c", "d"], task="good")
    with ExperienceManager(bank, Clumsy()) as manager:
        assert manager.merge() == 1
        assert manager.stats()["failures"] == {"merge: ValueError": 1}
    assert sorted(e.text for e in bank.entries()) == ["a", "b", "c + d"]


async def test_the_carry_of_a_chunk_is_bounded_and_every_entry_is_seen_once():
    entries = [Experience(text=str(i)) for i in range(11)]
    chunks = []

    async def keep_all_as_merged(shown):
        chunks.append(list(shown))
        return [entry.model_copy(update={"text": entry.text + "'"}) for entry in shown]

    await merge_group(entries, 4, keep_all_as_merged)
    assert all(len(chunk) <= 4 for chunk in chunks)
    assert sorted(e.text for chunk in chunks for e in chunk if "'" not in e.text) == sorted(
        e.text for e in entries
    )


def test_entries_alone_in_their_task_form_the_last_group():
    entries = [
        Experience(text=text, task=task)
        for text, task in [("a", "x"), ("b", "y"), ("c", "x"), ("d", None)]
    ]
    assert [[e.text for e in group] for group in recent_groups(entries, since=-1, size=9)] == [
        ["a", "c"],
        ["b", "d"],
    ]


class Drafter(Echo):
    """Number the answers; rewrite an entry if one is shown."""

    async def adistill(self, trajectory, shown):
        await super().adistill(trajectory, shown)
        number = len(self.distilled)
        text = f"draft {number} of {trajectory.id}"
        operation = Update(entry=1, text=text) if shown else Add(text=text)
        return Distillation(parsed=ParsedOperations(operations=(operation,)))


def test_drafts_about_one_episode_stand_side_by_side(bank):
    entry, told = bank.add("old", task="t"), []
    ended = Trajectory(
        id="one", task="t", uses=(Use(experience_id=entry.id, experience_version=1),)
    )
    with ExperienceManager(
        bank, Drafter(), drafts=3, on_distillation=lambda *args: told.append(args)
    ) as manager:
        manager.submit(ended)
        manager.drain(timeout=10)
        stats = manager.stats()
    drafts = [one for one in bank.entries() if one.id != entry.id]
    assert [(one.text, one.version) for one in bank if one.id == entry.id] == [("old", 1)]
    assert sorted(one.text for one in drafts) == [f"draft {n} of one" for n in (1, 2, 3)]
    assert {one.provenance.trajectory for one in drafts} == {"one"}
    assert {one.task for one in drafts} == {"t"}
    assert [args[0].id for args in told] == ["one"] * 3
    assert [len(args[2]) for args in told] == [1, 1, 1]
    assert (stats["distilled"], stats["waiting"], stats["operations"]) == (1, 0, {"add": 3})


def test_no_draft_at_all_is_refused(bank):
    with pytest.raises(ConfigError, match="drafts of at least 1"):
        ExperienceManager(bank, Drafter(), drafts=0)


def test_a_draft_that_fails_is_drawn_again_with_the_others(bank):
    extractor = Drafter(fail=1)
    with ExperienceManager(bank, extractor, drafts=3, backoff=0.01) as manager:
        manager.submit(Trajectory(id="one", task="t"))
        manager.drain(timeout=10)
        stats = manager.stats()
    assert len(extractor.distilled) == 6
    assert len(bank) == 3 and stats["waiting"] == 0 and stats["distilled"] == 1


def test_updates_go_through_the_queue(bank):
    class Reviser(Echo):
        async def adistill(self, trajectory, shown):
            return Distillation(
                parsed=ParsedOperations(
                    operations=(Update(entry=1, text="revised"), Update(entry=2, text="nobody"))
                )
            )

    entry = bank.add("old")
    with ExperienceManager(bank, Reviser()) as manager:
        manager.submit(
            Trajectory(task="t", uses=(Use(experience_id=entry.id, experience_version=1),))
        )
        manager.drain(timeout=10)
        assert manager.stats()["refused"] == {"entry_out_of_range": 1}
    assert bank.get(entry.id).text == "revised"


async def test_coroutines_can_be_awaited_on_a_foreign_loop_and_sync_calls_made_inside_one(bank):
    bank.add("open the red door")
    manager = ExperienceManager(bank, Echo())
    try:
        assert len(await manager.asearch("open the red door")) == 1
        assert len(manager.search("open the red door")) == 1
        assert await manager.asubmit(Trajectory(id="t", task="t")) == "t"
        await manager.adrain(timeout=10)
        assert (await manager.aask("open the red door")).hit is not None
        assert await manager.amerge() == 1
    finally:
        manager.close()
        manager.close()
    with pytest.raises(BankError, match="open manager"):
        manager.search("x")


@pytest.mark.parametrize(
    "options", [{"quue_size": 3}, {"queue_size": 0}, {"retrieval": {"lambda": 1}}]
)
def test_wrong_options_are_named(bank, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        ExperienceManager(bank, **options)


def test_a_path_instead_of_a_bank_is_refused():
    with pytest.raises(ValueError, match="Expected bank to be an ExperienceBank"):
        ExperienceManager("bank")


def test_close_in_the_middle_of_anything_ends_and_loses_nothing(bank):
    """A cancellation that meets a finishing wait_for is swallowed by Python before 3.12; close must
    not wait for ever.
    """
    for turn in range(15):
        manager = ExperienceManager(bank, Echo())
        for i in range(4):
            manager.submit(Trajectory(id=f"{turn}-{i}", task="t"))
        time.sleep(turn * 0.0007)
        manager.close()
    with ExperienceManager(bank, Echo()) as manager:
        manager.drain(timeout=20)
    assert sorted(entry.provenance.trajectory for entry in bank.entries()) == sorted(
        f"{t}-{i}" for t in range(15) for i in range(4)
    )


def test_lessons_that_come_while_one_is_embedded_are_embedded_together(tmp_path):
    calls, extractor = [], Echo()

    def embedder(texts):
        calls.append(list(texts))
        while len(extractor.distilled) < 32:  # the first call lasts until every other lesson waits
            time.sleep(0.005)
        return [[float(len(text)), 1.0, 0.0] for text in texts]

    with (
        ExperienceBank(tmp_path / "bank", embedder=embedder) as bank,
        ExperienceManager(bank, extractor) as manager,
    ):
        for trajectory in trajectories(32):
            manager.submit(trajectory)
        manager.drain(timeout=60)
        assert len(bank) == 32
    assert len(calls) <= 4 and sum(map(len, calls)) == 33, "32 lessons and the task, in a few calls"


def test_a_failing_embedder_is_a_reason_and_the_lesson_is_tried_again(tmp_path):
    calls = []

    def embedder(texts):
        calls.append(list(texts))
        if len(calls) == 1:
            raise ConnectionError("embedding service went away")
        return [[float(len(text)), 1.0, 0.0] for text in texts]

    with (
        ExperienceBank(tmp_path / "bank", embedder=embedder) as bank,
        ExperienceManager(bank, Echo(), backoff=0.01) as manager,
    ):
        manager.submit(trajectories(1)[0])
        manager.drain(timeout=60)
        assert len(bank) == 1
        assert manager.stats()["failures"] == {"distill: ConnectionError": 1}


def test_a_later_pass_of_merging_looks_at_what_is_new_and_its_neighbours_only():
    def entry(name, commit, task="a", cause="add"):
        return Experience(
            id=name, text=name, task=task, provenance={"commit": commit, "cause": cause}
        )

    entries = [entry(f"a{i}", i + 1) for i in range(6)] + [
        entry("b0", 3, "b"),
        entry("b1", 4, "b"),
        entry("a6", 9),
        entry("a7", 10),
    ]
    assert [[e.id for e in g] for g in recent_groups(entries, since=8, size=3)] == [
        ["a4", "a5", "a6", "a7"]
    ]
    assert recent_groups(entries, since=10, size=3) == []
    assert recent_groups([entry("m", 12, cause="merge"), entry("n", 5)], since=8, size=3) == []
    assert [[e.id for e in g] for g in recent_groups(entries, since=0, size=3)][1] == ["b0", "b1"]


def test_merging_again_without_news_asks_the_extractor_nothing(bank):
    extractor = Echo()
    bank.add_many(["n0", "n1"], task="t")
    with ExperienceManager(bank, extractor) as manager:
        assert manager.merge() == 1 and manager.merge() == 0
        assert len(extractor.merged) == 1
        bank.add("n2", task="t")
        assert manager.merge() == 1
    assert extractor.merged[1] == ["n0 + n1", "n2"]


async def test_a_search_that_hangs_fails_in_time_and_the_next_ones_are_answered(
    tmp_path: Path,
) -> None:
    """The embedder stands still: every caller gets an error that says so, and nothing is lost once
    it goes on.
    """
    halt, free = threading.Event(), threading.Event()
    free.set()

    class Slow(HashingEmbedder):
        def __call__(self, texts: Sequence[str]) -> Any:
            if any("stuck" in text for text in texts):
                halt.set()
                assert free.wait(60)
            return super().__call__(texts)

    with ExperienceBank(tmp_path, embedder=Slow()) as bank:
        bank.add("Knock first.")
        with ExperienceManager(bank, retrieval={"floor": -1.0, "timeout": 0.3}) as manager:
            free.clear()
            with pytest.raises(BankError, match=r"within 0.3 s"):
                manager.search("stuck?")
            with pytest.raises(BankError, match=r"within 0.3 s"):
                await manager.asearch("stuck again?")
            assert halt.is_set() and manager.stats()["search_timeouts"] == 2
            free.set()
            await asyncio.sleep(0.1)
            assert manager.search("knock?")[0].experience.text == "Knock first."
