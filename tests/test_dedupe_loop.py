"""Two-level deduplication while a run goes on: in the manager, with an extractor's judgement, over
a real bank.
"""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.errors import ConfigError, ReadOnlyBankError
from experiential.llm.scripted import ScriptedLLM
from experiential.types import Add, Distillation, Merge, ParsedOperations, Trajectory, Use

KEY = "Use the small brass key that hangs behind the kitchen stove to open the red door."
NEAR = "Use the small brass key that hangs behind the kitchen stove to open the red doors."
THIRD = "Use the small brass key that hangs behind the kitchen stove to open the red doors!"
FAR = "Copper coins sink in the well."


class Judge:
    """Writes each trajectory's first observation down as a lesson; judges as it is told and
    remembers what it was asked.
    """

    version = 0

    def __init__(self, verdict=True):
        self.verdict = verdict
        self.asked = []

    async def adistill(self, trajectory, shown):
        return Distillation(parsed=ParsedOperations(operations=(Add(text=trajectory.task_id),)))

    async def arefine(self, query, experience):
        return experience.text, None

    async def amerge(self, experiences):
        operation = Merge(
            entries=tuple(range(1, len(experiences) + 1)), text="merged: " + experiences[0].text
        )
        return Distillation(parsed=ParsedOperations(operations=(operation,)))

    async def ajudge(self, a, b):
        self.asked.append((a.text, b.text))
        await asyncio.sleep(0)
        return self.verdict(a, b) if callable(self.verdict) else self.verdict


@pytest.fixture
def bank(tmp_path):
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def texts(bank):
    return [entry.text for entry in bank]


def distilled(manager, *lessons, task="house"):
    for i, lesson in enumerate(lessons):
        manager.submit(Trajectory(task=task, task_id=lesson, instance=f"{lesson}#{i}"))
        manager.drain(timeout=20)


def test_lessons_of_a_run_are_merged_within_their_batch_and_then_into_older_entries(bank):
    old = bank.add(KEY, task="house")
    extractor = Judge()
    with ExperienceManager(bank, extractor) as manager:
        assert manager.deduplicate() == 0 and extractor.asked == []
        distilled(manager, NEAR, FAR, THIRD)
        assert manager.deduplicate() == 2
        assert extractor.asked == [
            (NEAR, THIRD),
            (KEY, NEAR),
        ], "within the batch first, then what is left with the bank"
        assert texts(bank) == [KEY, FAR]
        assert manager.stats()["deduplicated"] == 2
    survivor = bank.get(old.id)
    assert survivor.version == 2 and len(survivor.provenance.parents) == 3
    last = bank.commits()[-1]
    assert (last.author, last.cause) == ("extractor", "dedupe") and "0.85" in last.ref


def test_it_finds_what_the_direct_way_finds(bank, tmp_path):
    def same(a, b):
        return len(a.text) % 3 != len(b.text) % 3

    words = ["brass", "iron", "small", "red", "old", "door", "stove", "well"]
    for task in ("house", "castle", None):
        bank.add_many([f"{KEY} {words[i % 8]} {words[i * 5 % 7]}" for i in range(20)], task=task)
    with bank.fork(tmp_path / "fork") as fork:
        with ExperienceManager(fork, Judge(same), dedupe_threshold=0.8) as manager:
            merged = manager.deduplicate()
        groups = bank.deduplicate(0.8, judge=same)
        assert merged == sum(len(group.merged) for group in groups) > 10
        assert texts(fork) == texts(bank)


def test_the_extractor_agent_is_asked_for_yes_or_no(bank):
    bank.add_many([KEY, NEAR])
    asked = []

    def answer(messages):
        asked.append(messages[-1]["content"])
        return "No." if len(asked) == 1 else "Yes, they do."

    with ExperienceManager(bank, ExtractorAgent(ScriptedLLM(answer))) as manager:
        assert manager.deduplicate() == 0 and len(bank) == 2
        assert manager.deduplicate() == 0 and len(asked) == 1, "what was judged is not judged again"
        bank.add(THIRD)
        assert manager.deduplicate() == 1 and len(bank) == 2
    assert KEY in asked[0] and NEAR in asked[0]


def test_only_news_is_compared_again_and_a_rewritten_entry_is_news(bank):
    a, b, c = bank.add_many([KEY, NEAR, FAR])
    extractor = Judge(verdict=False)
    with ExperienceManager(bank, extractor) as manager:
        manager.deduplicate()
        assert extractor.asked == [(KEY, NEAR)]
        extractor.verdict = True
        assert manager.deduplicate() == 0, "no news"
        bank.update(a.id, NEAR + " Now.")
        assert manager.deduplicate() == 1
        assert extractor.asked[1:] == [(NEAR, NEAR + " Now.")], "its text is the newer one"
    assert [entry.id for entry in bank] == [b.id, c.id]


def test_what_a_deduplication_wrote_is_no_news_but_what_a_merge_wrote_is(bank):
    bank.add_many([KEY, NEAR, THIRD], task="house")
    extractor = Judge(verdict=lambda a, b: b.text == NEAR)
    with ExperienceManager(bank, extractor) as manager:
        assert manager.deduplicate() == 1 and extractor.asked == [(KEY, NEAR), (KEY, THIRD)]
        assert manager.deduplicate() == 0 and len(extractor.asked) == 2, (
            "KEY has a new version with its old text"
        )
        bank.remove(next(entry.id for entry in bank if entry.text == THIRD))
        bank.add(FAR, task="house")
        assert manager.merge() == 1 and texts(bank) == ["merged: " + KEY]
        bank.add(THIRD, task="house")
        extractor.asked.clear()
        assert manager.deduplicate() == 0 and extractor.asked == [("merged: " + KEY, THIRD)]


def test_tasks_and_kinds_stay_apart(bank):
    bank.add(KEY, task="house")
    bank.add(KEY, task="castle")
    bank.add(KEY, task="house", kind="warning")
    with ExperienceManager(bank, Judge()) as manager:
        assert manager.deduplicate() == 0


def test_uses_and_credit_go_to_the_survivor(bank):
    a, b = bank.add_many([KEY, NEAR])
    for entry in (a, b):
        bank.record(
            Trajectory(
                task="t", success=True, uses=(Use(experience_id=entry.id, experience_version=1),)
            )
        )
    with ExperienceManager(bank, Judge()) as manager:
        assert manager.deduplicate() == 1
    assert bank.get(a.id).statistics.uses == 2 and set(bank.lineage(a.id, 2)) == {
        (a.id, 2),
        (a.id, 1),
        (b.id, 1),
    }


def test_a_failing_judge_loses_its_own_task_only_and_is_asked_again(bank):
    bank.add_many([KEY, NEAR], task="bad")
    bank.add_many([KEY, NEAR], task="good")
    broken = [True]

    def verdict(a, b):
        if a.task == "bad" and broken[0]:
            raise ConnectionError("backend went away")
        return True

    with ExperienceManager(bank, Judge(verdict)) as manager:
        assert manager.deduplicate() == 1
        assert manager.stats()["failures"] == {"deduplicate: ConnectionError": 1}
        assert [entry.task for entry in bank] == ["bad", "bad", "good"]
        broken[0] = False
        assert manager.deduplicate() == 1, "the next pass compares again what the failure left"
    assert [entry.task for entry in bank] == ["bad", "good"]


def test_a_judge_that_hangs_is_timed_out(bank):
    class Slow(Judge):
        async def ajudge(self, a, b):
            await asyncio.sleep(60)

    bank.add_many([KEY, NEAR])
    with ExperienceManager(bank, Slow(), distill_timeout=0.05) as manager:
        assert manager.deduplicate() == 0
        assert manager.stats()["failures"] == {"deduplicate: timeout": 1}


def test_an_entry_that_changed_while_the_judge_thought_stays(bank):
    _, b = bank.add_many([KEY, NEAR])

    def slow(older, newer):
        bank.update(b.id, FAR)
        return True

    with ExperienceManager(bank, Judge(slow)) as manager:
        assert manager.deduplicate() == 0
    assert texts(bank) == [KEY, FAR]


def test_a_pass_cut_off_keeps_what_it_wrote_and_the_next_manager_does_the_rest(bank):
    """Closed in the middle of a pass: the task that is judged is merged, the one that still waits
    is whole.
    """
    bank.add_many([KEY, NEAR], task="quick")
    bank.add_many([KEY, NEAR], task="hanging")
    merged, waiting = threading.Event(), threading.Event()

    class Half(Judge):
        async def ajudge(self, a, b):
            if a.task == "hanging":
                waiting.set()
                await asyncio.sleep(600)
            return True

    class Watched(FolderBank):
        def merge_duplicates(self, found, ref="groups given", *, author="human"):
            done = super().merge_duplicates(found, ref, author=author)
            merged.set()
            return done

    path = bank.path
    bank.close()
    with Watched(path) as watched:
        manager = ExperienceManager(watched, Half())
        caller = threading.Thread(target=lambda: pytest.raises(CancelledError, manager.deduplicate))
        caller.start()
        assert merged.wait(60) and waiting.wait(60)
        manager.close()
        caller.join(60)
        assert not caller.is_alive()
        assert [entry.task for entry in watched] == ["quick", "hanging", "hanging"]
    with ExperienceBank(path) as again, ExperienceManager(again, Judge()) as manager:
        assert [entry.task for entry in again] == ["quick", "hanging", "hanging"]
        assert manager.deduplicate() == 1 and len(again) == 2


async def test_passes_come_one_after_the_other_and_searches_go_on(bank):
    bank.add_many([KEY, NEAR])
    gate = asyncio.Event()
    extractor = Judge()
    loop = asyncio.get_running_loop()

    async def ajudge(a, b):
        extractor.asked.append((a.text, b.text))
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(gate.wait(), loop))
        return True

    extractor.ajudge = ajudge
    manager = ExperienceManager(bank, extractor)
    try:
        passes = [asyncio.ensure_future(manager.adeduplicate()) for _ in range(3)]
        assert len(await manager.asearch(KEY)) == 1
        gate.set()
        assert sorted(await asyncio.gather(*passes)) == [0, 0, 1] and len(extractor.asked) == 1
    finally:
        manager.close()


def test_who_cannot_deduplicate(bank):
    class Mute:
        version = 0

    bank.add_many([KEY, NEAR])
    with ExperienceManager(bank) as manager:
        assert manager.deduplicate() == 0
    with ExperienceManager(bank, Mute()) as manager, pytest.raises(ConfigError, match="ajudge"):
        manager.deduplicate()
    bank.close()
    with (
        ExperienceBank(bank.path, read_only=True) as reader,
        ExperienceManager(reader, Judge()) as manager,
        pytest.raises(ReadOnlyBankError),
    ):
        manager.deduplicate()
    with pytest.raises(ConfigError, match="dedupe_threshold"):
        ExperienceManager(bank, dedupe_threshold=0)
