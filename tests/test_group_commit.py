"""Writers that come at one moment share a transaction; each still gets its own commit, its own
error and its own promise.
"""

import asyncio
import contextlib
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.errors import BankError
from experiential.types import Add, Distillation, Merge, ParsedOperations, Trajectory, Use
from tests.test_manager import Echo


@pytest.fixture
def bank(tmp_path):
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank._embed(["the first text of a bank writes its dimension"])
        yield bank


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited for a minute"
        time.sleep(0.001)


def made(*operations):
    return Distillation(parsed=ParsedOperations(operations=operations))


@contextlib.contextmanager
def gathering(bank):
    """Inside this block a transaction of another thread is open, so that all writes gather; gives
    how many wait.
    """
    entered, leave = threading.Event(), threading.Event()
    holder = threading.Thread(
        target=bank._writes.run, args=(lambda group: entered.set() or leave.wait(60),)
    )
    holder.start()
    assert entered.wait(60)
    try:
        yield lambda: bank._writes._batcher.waiting
    finally:
        leave.set()
        holder.join(60)


def together(bank, *writes):
    """What writes gave or raised, that were made in this order in one group; each in a thread of
    its own.
    """
    outcomes = [None] * len(writes)

    def call(place, write):
        try:
            outcomes[place] = write()
        except Exception as error:
            outcomes[place] = error

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(writes)]
    with gathering(bank) as waiting:
        for count, thread in enumerate(threads, 1):
            thread.start()
            until(lambda count=count: waiting() == count)
    for thread in threads:
        thread.join(60)
    return outcomes


@contextlib.contextmanager
def statements(bank):
    """The SQL that the bank's connection runs inside this block."""
    seen = []
    bank._journal._connection.set_trace_callback(seen.append)
    try:
        yield seen
    finally:
        bank._journal._connection.set_trace_callback(None)


def test_writers_that_wait_share_one_transaction_and_keep_a_commit_each(bank):
    old = bank.add("old")
    with statements(bank) as seen:
        a, new, none, b, recorded = together(
            bank,
            lambda: bank.add("a", task="t"),
            lambda: bank.update(old.id, "new"),
            lambda: bank.remove(old.id),
            lambda: bank.apply(
                made(Add(text="b")), trajectory=Trajectory(id="t1", task="t"), shown=[]
            ),
            lambda: bank.submit(Trajectory(id="t2", task="t")),
        )
    assert seen.count("COMMIT") == 2, "the one that they waited for, and theirs"
    told = [(commit.author, commit.cause, commit.ref) for commit in bank.commits()[1:]]
    assert told == [
        ("human", "add", None),
        ("human", "update", old.id),
        ("human", "remove", old.id),
        ("extractor", "trajectory", "t1"),
        ("run", "record", "t2"),
    ]
    numbers = [commit.id for commit in bank.commits()[1:]]
    assert [a.provenance.commit, new.provenance.commit, b[0].provenance.commit] == [
        numbers[0],
        numbers[1],
        numbers[3],
    ]
    assert none is None and recorded is True and bank.head == numbers[-1]
    assert [entry.text for entry in bank.entries()] == ["a", "b"]
    assert [entry.text for entry in bank.at(numbers[1])] == [
        "new",
        "a",
    ], "each commit can be looked at by itself"


def test_a_writer_alone_waits_for_nobody_and_starts_no_thread(bank):
    threads = threading.active_count()
    with statements(bank) as seen:
        for number in range(5):
            bank.add(f"lesson {number}")
    assert seen.count("COMMIT") == 5 and threading.active_count() == threads


def test_a_failing_member_fails_alone_and_leaves_no_trace(bank):
    entry = bank.add("old")
    commits = len(bank.commits())
    first, gone, missing, last = together(
        bank,
        lambda: bank.add("first"),
        lambda: bank.remove(entry.id),
        lambda: bank.remove(entry.id),
        lambda: bank.add("last"),
    )
    assert gone is None and isinstance(missing, BankError) and "live entry" in str(missing)
    assert [entry.text for entry in bank.entries()] == ["first", "last"] and len(
        bank.commits()
    ) == commits + 3
    assert first.provenance.commit < last.provenance.commit == bank.head


def test_a_member_sees_those_before_it_and_nobody_else_does_before_all_are_durable(bank):
    seen = {}

    def look(group):
        [entry] = [live for live in group._staged.values() if live is not None]
        seen["inside"] = entry.experience.text
        seen["outside"] = (
            [entry.text for entry in bank.entries()],
            bank.search("early"),
            bank.get(entry.experience.id),
        )

    early, _ = together(bank, lambda: bank.add("early"), lambda: bank._writes.run(look))
    assert seen == {"inside": "early", "outside": ([], [], None)}
    assert bank.get(early.id) == early and bank.search("early")[0].experience.id == early.id


def test_no_reader_sees_part_of_a_transaction(bank):
    """A reader of another thread asks while a member is being written: memory has nothing of it,
    the journal waits for the end.
    """
    entered, answers = threading.Event(), []

    def write(group):
        with group.draft("human", "add") as draft:
            entered.set()
            until(lambda: answers)
            return draft.commit

    def read():
        assert entered.wait(60)
        answers.append(len(bank))
        answers.append([commit.id for commit in bank.commits()])

    reader = threading.Thread(target=read)
    reader.start()
    commit = bank._writes.run(write)
    reader.join(60)
    assert answers == [0, [commit]], "the list of commits came after the commit, not in its middle"


def test_what_two_members_say_alike_becomes_one_entry(bank):
    ended = [Trajectory(id=f"t{i}", task="t") for i in range(2)]
    one, two = together(
        bank,
        *[
            lambda ended=ended: bank.apply(made(Add(text="same")), trajectory=ended, shown=[])
            for ended in ended
        ],
    )
    assert one[0].id == two[0].id and (one[0].version, two[0].version) == (1, 2) and len(bank) == 1


def test_merges_of_the_same_entries_in_one_group_happen_once(bank):
    shown = bank.add_many(["a", "b"])
    merge = made(Merge(entries=(1, 2), text="a and b"))
    first, second = together(bank, *[lambda: bank.consolidate(merge, shown=shown)] * 2)
    assert (
        [len(first), len(second)] == [1, 0]
        and len(bank) == 1
        and bank.refused == {"entry_changed": 1}
    )


def test_counters_add_up_over_members(bank):
    entry = bank.add("open the door")
    used = [
        Trajectory(
            id=f"t{i}",
            task="t",
            success=i % 2 == 0,
            uses=(Use(experience_id=entry.id, experience_version=1),),
        )
        for i in range(5)
    ]
    assert together(bank, *[lambda ended=ended: bank.record(ended) for ended in used]) == [True] * 5
    bank.note_retrievals([entry.id])
    bank.close()
    with ExperienceBank(bank.path) as again:
        known = again.get(entry.id).statistics
        assert (known.uses, known.successes, known.retrievals) == (5, 3, 1)


def test_the_same_item_finished_twice_in_one_group_is_written_once(bank):
    ended = Trajectory(id="t", task="t")
    bank.submit(ended)
    write = lambda text: bank.apply(made(Add(text=text)), trajectory=ended, shown=[], item="t")  # noqa: E731
    first, second = together(bank, lambda: write("one"), lambda: write("two"))
    assert (
        [entry.text for entry in first] == ["one"]
        and second == []
        and len(bank) == 1
        and bank.queue.state("t") == "done"
    )


def test_the_same_trajectory_submitted_twice_in_one_group_is_recorded_once(bank):
    ended = Trajectory(id="t", task="t")
    assert together(bank, *[lambda: bank.submit(ended)] * 3) == [True, False, False]
    assert len(bank.commits()) == 1 and bank.queue.waiting() == ["t"]


def test_a_trajectory_submitted_again_writes_nothing_to_the_disk(bank):
    ended, log = Trajectory(id="t", task="t"), bank.path / "journal.sqlite-wal"
    assert bank.submit(ended)
    size = log.stat().st_size
    assert not bank.submit(ended) and log.stat().st_size == size


def test_a_trajectory_submitted_again_is_known_without_reading_its_record(bank):
    ended = Trajectory(id="t", task="t")
    assert bank.record(ended)
    with bank._journal.transaction():
        bank._journal.run("UPDATE trajectories SET record = 'unreadable'")
    assert not bank.record(ended)
    assert [bank.submit(ended), bank.submit(ended)] == [True, False]


def test_each_keyed_write_of_a_group_gets_its_own_receipt_and_a_failing_one_none(bank):
    def keyed(key, write):
        def call():
            with bank.receipts.noting(key, "digest"):
                return write()

        return call

    a, _, b = together(
        bank,
        keyed("k1", lambda: bank.add("a")),
        keyed("k2", lambda: bank.remove("nobody")),
        keyed("k3", lambda: bank.add("b")),
    )
    commits = [bank.receipts.find(key) for key in ("k1", "k2", "k3")]
    assert commits[1] is None and [commits[0].commit, commits[2].commit] == [
        a.provenance.commit,
        b.provenance.commit,
    ]


def test_a_lost_transaction_is_tried_again_member_by_member(bank):
    """A full disk ends the whole transaction; the small writes fit, the large one is told so."""
    bank.add("warm")
    pages = bank._journal.value("PRAGMA page_count")
    bank._journal.run(f"PRAGMA max_page_count={pages + 30}")
    large = [f"{number} " + "x" * 1000 for number in range(200)]
    one, failed, two = together(
        bank, lambda: bank.add("one"), lambda: bank.add_many(large), lambda: bank.add("two")
    )
    assert isinstance(failed, BankError) and "disk is full" in str(failed)
    assert [entry.text for entry in bank.entries()] == ["warm", "one", "two"]
    assert [commit.id for commit in bank.commits()][1:] == [
        one.provenance.commit,
        two.provenance.commit,
    ]
    bank._journal.run("PRAGMA max_page_count=1000000")
    assert len(bank.add_many(large)) == 200, "with room again, the same bank writes"


def test_retrieval_counts_outlive_a_transaction_that_failed(bank):
    entry = bank.add("counted")
    bank.note_retrievals([entry.id] * 3)
    with pytest.raises(ZeroDivisionError):
        bank._writes.run(lambda group: bank._journal._connection.execute("ROLLBACK") and 1 / 0)
    with pytest.raises(KeyError), bank._draft("human", "add"):
        raise KeyError
    bank.close()
    with ExperienceBank(bank.path) as again:
        assert again.get(entry.id).statistics.retrievals == 3


def test_an_interrupted_leader_leaves_nobody_waiting(bank):
    def interrupt(group):
        raise KeyboardInterrupt

    def lead():
        with pytest.raises(KeyboardInterrupt):
            bank._writes.run(interrupt)

    _, follower = together(bank, lead, lambda: bank.add("behind it"))
    assert isinstance(follower, BankError) and "interrupted" in str(follower)
    assert bank.add("after").text == "after" and [entry.text for entry in bank.entries()] == [
        "after"
    ]


@contextlib.contextmanager
def interruptible():
    """SIGINT raises KeyboardInterrupt inside this block, also where the shell started the tests
    with the signal ignored.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupted_follower_writes_nothing_and_the_next_one_leads(bank):
    main = threading.get_ident()
    with interruptible(), ThreadPoolExecutor(2) as pool, gathering(bank) as waiting:
        later = []

        def interrupt():
            until(lambda: waiting() == 1)
            later.append(pool.submit(bank.add, "behind it"))
            until(lambda: waiting() == 2)
            signal.pthread_kill(main, signal.SIGINT)

        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            bank.add("never")
        until(lambda: waiting() == 1)
    assert later[0].result(60).text == "behind it" and [entry.text for entry in bank.entries()] == [
        "behind it"
    ]


def test_many_submitted_at_once_are_one_transaction_and_a_bad_one_fails_alone(bank):
    good = [Trajectory(id=f"t{i}", task="t") for i in range(64)]
    bad = Trajectory(id="\ud800", task="t")
    with statements(bank) as seen:
        outcomes = bank.submit_many([*good[:30], bad, *good[30:], good[0]])
    assert seen.count("COMMIT") == 1
    assert (
        outcomes[:30] + outcomes[31:-1] == [True] * 64
        and outcomes[-1] is False
        and isinstance(outcomes[30], UnicodeEncodeError)
    )
    assert bank.queue.waiting() == [ended.id for ended in good] and len(bank.commits()) == 64
    assert bank.submit_many([]) == []


def test_trajectories_that_end_together_wait_for_few_commits(bank):
    ended = [Trajectory(id=f"t{i}", task="t") for i in range(64)]
    with ExperienceManager(bank, Echo()) as manager:
        manager.pause()

        async def submit():
            return await asyncio.gather(*(manager.asubmit(trajectory) for trajectory in ended))

        with statements(bank) as seen, ThreadPoolExecutor(1) as pool:
            with gathering(bank):
                submitted = pool.submit(asyncio.run, submit())
                until(lambda: manager._distiller._reserved == 64)
            assert submitted.result(60) == [f"t{i}" for i in range(64)]
        assert seen.count("COMMIT") <= 3, (
            "the one that they waited for, those who came first, the others"
        )
        assert (
            bank.queue.waiting() == [f"t{i}" for i in range(64)] and manager.stats()["queued"] == 64
        )
        manager.resume()
        manager.drain(timeout=60)
    assert len(bank) == 64


def test_a_cancelled_submission_is_distilled_all_the_same(bank):
    with ExperienceManager(bank, Echo()) as manager:

        async def scene():
            with gathering(bank):
                waiting = asyncio.ensure_future(manager.asubmit(Trajectory(id="t", task="t")))
                while not manager._distiller._reserved:
                    await asyncio.sleep(0.001)
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            while bank.queue.state("t") != "done":
                await asyncio.sleep(0.001)

        asyncio.run(asyncio.wait_for(scene(), 60))
    assert [entry.text for entry in bank.entries()] == ["lesson of t"]


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_do_anything_leave_memory_and_journal_alike(tmp_path, seed):
    """Eight threads write at random; what the open bank shows is what a new process reads, and each
    acknowledged write is in it.
    """
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        shared = [bank.add(f"shared {number}").id for number in range(4)]
        texts = [f"w{number}" for number in range(40)]
        bank.embedder(texts)
        acknowledged = []

        def work(number):
            rng = random.Random(100 * seed + number)
            for turn in range(25):
                kind, text = rng.randrange(5), rng.choice(texts)
                if kind == 0:
                    acknowledged.append(bank.add(text))
                elif kind == 1:
                    with contextlib.suppress(BankError):
                        acknowledged.append(bank.update(rng.choice(shared), text))
                elif kind == 2:
                    ended = Trajectory(
                        id=f"{number}.{turn}",
                        task="t",
                        success=False,
                        uses=(Use(experience_id=shared[0], experience_version=1),),
                    )
                    assert bank.submit(ended)
                    acknowledged.extend(
                        bank.apply(made(Add(text=text)), trajectory=ended, shown=[], item=ended.id)
                    )
                elif kind == 3:
                    bank.note_retrievals([rng.choice(shared)])
                elif turn % 10 == 0:
                    with contextlib.suppress(BankError):
                        bank.remove(rng.choice(shared[1:]))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        before, commits = list(bank.entries()), [commit.id for commit in bank.commits()]
        used = bank.get(shared[0]).statistics.uses
    with ExperienceBank(tmp_path) as again:
        assert (
            list(again.entries()) == before
            and again.head == commits[-1]
            and commits == sorted(set(commits))
        )
        assert all(
            again.version(entry.id, entry.version).text == entry.text for entry in acknowledged
        )
        assert used == sum(commit.cause == "record" for commit in again.commits())
