"""What goes wrong around a bank ends in a clear error or a recovery, never in silence, and nothing
that was acknowledged is lost.
"""

import asyncio
import contextlib
import itertools
import logging
import resource
import shutil
import subprocess

import numpy as np
import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import HashingEmbedder
from experiential.bank.manager import ExperienceManager
from experiential.bank.storage.checkup import examine
from experiential.errors import BankError
from experiential.types import Add, Distillation, Generation, ParsedOperations, Trajectory
from tests.test_manager import Echo


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "bank"


def made(text):
    return Distillation(parsed=ParsedOperations(operations=(Add(text=text),)))


def texts(bank):
    return [entry.text for entry in bank.entries()]


def assert_whole(folder):
    wrong = [finding for finding in examine(folder) if finding.status == "wrong"]
    assert not wrong, wrong


# The embedder


class Moody:
    """The hashing embedder, which fails while ``fault`` says how."""

    fault = None

    def __call__(self, batch):
        if isinstance(self.fault, Exception):
            raise self.fault
        vectors = HashingEmbedder()(batch)
        return vectors if self.fault is None else self.fault(vectors)


@pytest.mark.parametrize("write", ["add", "update", "apply", "import_entries"])
def test_an_embedder_that_raises_is_heard_and_leaves_nothing_half_written(folder, write):
    embedder = Moody()
    with ExperienceBank(folder, embedder=embedder) as bank:
        entry = bank.add("before")
        head = bank.head
        embedder.fault = ConnectionError("the embedding server went away")
        calls = {
            "add": lambda: bank.add("new"),
            "update": lambda: bank.update(entry.id, "new"),
            "apply": lambda: bank.apply(made("new"), trajectory=Trajectory(task="t"), shown=[]),
            "import_entries": lambda: bank.import_entries(
                [entry.model_copy(update={"id": "x", "text": "new"})], "file"
            ),
        }
        with pytest.raises(ConnectionError, match="went away"):
            calls[write]()
        assert (
            texts(bank) == ["before"]
            and bank.head == head
            and [commit.id for commit in bank.commits()] == [head]
        )
        with pytest.raises(ConnectionError, match="went away"):
            bank.search("never asked before")
        embedder.fault = None
        calls[write]()
        assert "new" in texts(bank) and bank.search("new")[0].experience.text == "new"
    assert_whole(folder)


@pytest.mark.parametrize(
    "fault",
    [
        lambda vectors: vectors[:0],
        lambda vectors: np.full_like(vectors, np.nan),
        lambda vectors: vectors[:, :5],
        lambda vectors: vectors[0],
        lambda vectors: None,
    ],
    ids=["too few", "not numbers", "another length", "one row", "nothing"],
)
def test_an_embedder_that_gives_nonsense_is_refused(folder, fault):
    embedder = Moody()
    with ExperienceBank(folder, embedder=embedder) as bank:
        bank.add_many(["before", "more"])
        embedder.fault = fault
        with pytest.raises((BankError, ValueError), match="Expected"):
            bank.add_many(["new", "newer"])
        assert texts(bank) == ["before", "more"]
        embedder.fault = None
        assert bank.search("before")[0].experience.text == "before"


def test_distillation_outlives_an_embedder_that_is_away_for_a_while(folder):
    embedder = Moody()
    with ExperienceBank(folder, embedder=embedder) as bank:
        bank.add("before")
        embedder.fault = ConnectionError("away")

        class Returning(Echo):
            async def adistill(self, trajectory, shown):
                if len(self.distilled) == 1:
                    embedder.fault = None
                return await super().adistill(trajectory, shown)

        with ExperienceManager(bank, Returning(), retries=3, backoff=0.01) as manager:
            manager.submit(Trajectory(id="t", task="t"))
            manager.drain(timeout=60)
            assert manager.stats()["failures"] == {"distill: ConnectionError": 1}
        assert texts(bank) == ["before", "lesson of t"]


def test_a_result_whose_answer_was_lost_is_not_distilled_again(folder):
    class Cut(FolderBank):
        """As if behind a server that dies between the first commit and its answer."""

        fault = True

        def apply(self, *arguments, **options):
            written = super().apply(*arguments, **options)
            if self.fault:
                self.fault = False
                raise BankError("Expected an answer from the server, got none")
            return written

    extractor = Echo()
    with (
        Cut(folder, embedder="hashing") as bank,
        ExperienceManager(bank, extractor, retries=3, backoff=0.01) as manager,
    ):
        manager.submit(Trajectory(id="t", task="t"))
        manager.drain(timeout=60)
        assert extractor.distilled == ["t"] and texts(bank) == ["lesson of t"]
        assert bank.queue.fail("t", "late", last=False) == 0
        assert bank.queue.counts() == {"queued": 0, "done": 1, "dead": 0}


# The extractor


class Stuck(Echo):
    """Never answers."""

    async def adistill(self, trajectory, shown):
        await asyncio.sleep(3600)

    async def arefine(self, query, experience):
        await asyncio.sleep(3600)

    async def amerge(self, experiences):
        await asyncio.sleep(3600)


def test_each_time_out_of_an_extractor_is_counted_and_harms_nothing_else(folder):
    with ExperienceBank(folder, embedder="hashing") as bank:
        bank.add_many(["open the door", "shut the door"], task="door")
        with ExperienceManager(
            bank, Stuck(), retries=1, backoff=0.01, distill_timeout=0.05
        ) as manager:
            manager.submit(Trajectory(id="t", task="t"))
            assert manager.ask("open the door").text == "open the door", (
                "the entry itself is the answer"
            )
            assert manager.merge() == 0
            manager.drain(timeout=60)
            stats = manager.stats()
            assert stats["failures"] == {
                "distill: timeout": 2,
                "refine: timeout": 1,
                "merge: timeout": 1,
            }
            assert [(letter.id, letter.reason) for letter in manager.dead_letters()] == [
                ("t", "timeout")
            ]
            assert len(manager.search("open the door")) == 1, "actors are served as before"
        assert texts(bank) == ["open the door", "shut the door"]


# The disk


@contextlib.contextmanager
def file_limit(size):
    """No file of this process may grow above ``size`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def small_disk(path, size):
    """A file system of ``size`` bytes; the test is skipped where we may not make one."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(bank, kept):
    """Write until the disk has no room."""
    for number in range(10_000):
        kept.append(bank.add(f"{number} " + "x" * 1500).id)
    pytest.fail("the disk never got full")


def test_a_file_that_may_not_grow_is_a_clear_error_and_the_same_bank_writes_again(folder):
    kept = []
    with ExperienceBank(folder, embedder="hashing") as bank:
        first = bank.add("first")
        bank.note_retrievals([first.id])
        with (
            file_limit(1_500_000),
            pytest.raises(
                BankError, match="Expected to write the journal.*nothing of this write was kept"
            ),
        ):
            fill(bank, kept)
        assert len(kept) > 10 and len(bank) == len(kept) + 1 == len(bank.at(bank.head))
        assert bank.search("first")[0].experience.id == first.id
        after = bank.add("after")
    with ExperienceBank(folder) as again:
        assert {first.id, after.id, *kept} == {entry.id for entry in again.entries()}
        assert again.get(first.id).statistics.retrievals == 1
    assert_whole(folder)


def test_a_full_disk_is_a_clear_error_reading_goes_on_and_with_room_writing_too(tmp_path):
    with small_disk(tmp_path / "disk", "3m") as disk:
        kept, ballast = [], disk / "ballast"
        ballast.write_bytes(b"x" * 1_500_000)
        with ExperienceBank(disk / "bank", embedder="hashing") as bank:
            first = bank.add("first")
            with pytest.raises(BankError, match=r"disk is full.*make room"):
                fill(bank, kept)
            [refused] = bank.submit_many([Trajectory(id="t", task="t" * 100_000)])
            assert isinstance(refused, BankError) and "disk is full" in str(refused)
            assert bank.search("first")[0].experience.id == first.id and len(bank) == len(kept) + 1
            assert bank.trajectory("t") is None and bank.queue.state("t") is None
            ballast.unlink()
            after = bank.add("after")
        with ExperienceBank(disk / "bank") as again:
            assert {first.id, after.id, *kept} == {entry.id for entry in again.entries()}


def test_closing_on_a_full_disk_says_so_and_gives_the_folder_back(folder):
    bank = ExperienceBank(folder, embedder="hashing")
    entry = bank.add("entry")
    bank.note_retrievals([entry.id])
    with file_limit(1000), pytest.raises(BankError, match="Expected to write the journal"):
        bank.close()
    assert bank.closed
    with ExperienceBank(folder) as again:
        assert again.get(entry.id).text == "entry"


def test_the_manager_waits_for_room_and_then_distils_what_was_submitted(folder):
    limit = contextlib.ExitStack()

    class Filling(Echo):
        """The disk is full from the first distillation on, and has room again at the third."""

        async def adistill(self, trajectory, shown):
            if not self.distilled:
                limit.enter_context(file_limit(1000))
            if len(self.distilled) == 2:
                limit.close()
            return await super().adistill(trajectory, shown)

    with limit, ExperienceBank(folder, embedder="hashing") as bank:
        bank.add("before")
        with ExperienceManager(bank, Filling(), retries=1, backoff=0.01) as manager:
            manager.submit(Trajectory(id="t", task="t"))
            manager.drain(timeout=60)
            stats = manager.stats()
            assert (
                stats["failures"] == {"distill: BankError": 2, "queue: BankError": 2}
                and stats["distilled"] == 1
            )
        assert texts(bank) == ["before", "lesson of t"] and bank.queue.state("t") == "done"


def test_a_refusal_to_write_reaches_who_submits_and_who_asks(folder):
    class Refining(Echo):
        async def arefine(self, query, experience):
            return "refined", Generation(text="refined", response_ids=tuple(range(2000)))

    with (
        ExperienceBank(folder, embedder="hashing") as bank,
        ExperienceManager(bank, Refining()) as manager,
    ):
        bank.add("open the door")
        with file_limit(1000):
            for call in (
                lambda: manager.submit(Trajectory(id="t", task="t")),
                lambda: manager.ask("open the door"),
            ):
                with pytest.raises(BankError, match="Expected to write the journal"):
                    call()
        assert (
            manager.submit(Trajectory(id="t", task="t")) == "t"
            and manager.ask("open the door").text == "refined"
        )
        manager.drain(timeout=60)


def test_a_fork_that_finds_no_room_leaves_no_bank_behind(folder, tmp_path):
    with ExperienceBank(folder, embedder="hashing") as bank:
        bank.add_many(["x" * 1900 + str(number) for number in range(100)])
        with file_limit(50_000), pytest.raises(BankError, match="make room"):
            bank.fork(tmp_path / "copy")
        with pytest.raises(BankError, match="existing bank"):
            ExperienceBank(tmp_path / "copy", read_only=True)
        with bank.fork(tmp_path / "copy") as copy:
            assert len(copy) == 100


# Chroma's folder


class LargeBank(FolderBank):
    """Answers from Chroma at once."""

    RESIDENT_LIMIT = 10


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A bank with vector files on the disk: Chroma writes them after a thousand changes."""
    folder = tmp_path_factory.mktemp("large") / "bank"
    with LargeBank(folder, embedder="hashing") as bank:
        bank.add_many([f"word{number} thing{number % 31}" for number in range(1100)])
    assert list(folder.glob("chroma/*/data_level0.bin"))
    return folder


HOWS = ["deleted", "reversed", "cut", "zero"]
FILES = [
    "chroma.sqlite3",
    "seal.json",
    "*/data_level0.bin",
    "*/header.bin",
    "*/index_metadata.pickle",
    "*/length.bin",
    "*/link_lists.bin",
]


def damage(file, how):
    content = file.read_bytes()
    file.unlink()
    if how != "deleted":
        file.write_bytes(
            {
                "reversed": content[::-1],
                "cut": content[: len(content) // 2],
                "zero": bytes(len(content)),
            }[how]
        )


FAST = [("*/header.bin", "cut"), ("*/data_level0.bin", "zero")]
DAMAGES = [
    pytest.param(*one, marks=() if one in FAST else pytest.mark.slow)
    for one in itertools.product(FILES, HOWS)
]


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_file_of_chroma_is_noticed_and_the_index_made_again(
    large, tmp_path, caplog, name, how
):
    folder = tmp_path / "bank"
    shutil.copytree(large, folder)
    [file] = (folder / "chroma").glob(name)
    damage(file, how)
    with caplog.at_level(logging.WARNING), LargeBank(folder) as bank:
        bank.flush_index()
        assert bank.search("word77 thing15")[0].experience.text == "word77 thing15"
        assert len(bank) == 1100
    is_told = any("set aside" in record.message for record in caplog.records)
    assert is_told == bool(list(folder.glob("chroma.damaged-*"))) and (
        is_told or (name, how) == ("chroma.sqlite3", "deleted")
    )
    assert_whole(folder)


def test_the_doctor_names_a_damaged_file_and_what_mends_it(large, tmp_path):
    folder = tmp_path / "bank"
    shutil.copytree(large, folder)
    [file] = folder.glob("chroma/*/header.bin")
    damage(file, "cut")
    [finding] = [finding for finding in examine(folder) if finding.status == "wrong"]
    assert "index" in finding.what and "bank rebuild" in finding.mend
    assert not list(folder.glob("chroma.damaged-*")), "looking changes nothing"


def test_an_undamaged_folder_is_opened_as_it_is(large, tmp_path):
    folder = tmp_path / "bank"
    shutil.copytree(large, folder)
    with LargeBank(folder) as bank:
        assert bank.search("word77 thing15")[0].experience.text == "word77 thing15"
        bank.add_many([f"later{number}" for number in range(1100)])
        bank.flush_index()
        assert bank.search("later77")[0].experience.text == "later77"
    with LargeBank(folder) as bank:
        assert (
            bank.search("later77")[0].experience.text == "later77"
            and bank.search("word77 thing15")[0].score > 0.99
        )
    assert not list(folder.glob("chroma.damaged-*"))


def test_the_vector_files_hold_no_unused_memory_of_the_process(tmp_path):
    with FolderBank(tmp_path, embedder="hashing") as bank:
        bank.add("pull lever A")
        bank.flush_index()
        for name in ("data_level0.bin", "length.bin"):
            [file] = tmp_path.glob(f"chroma/*/{name}")
            room = file.read_bytes()
            assert room and not any(room), "a key of this process could be among them"
    with LargeBank(tmp_path) as bank:
        bank.add_many([f"word{number} thing{number % 31}" for number in range(1100)])
        bank.flush_index()
        found = [bank.search(text)[0].experience.text for text in ("pull lever A", "word7 thing7")]
    assert found == ["pull lever A", "word7 thing7"]


def test_namespaces_that_share_the_folder_do_not_break_each_other(tmp_path):
    with (
        LargeBank(tmp_path, embedder="hashing") as one,
        LargeBank(tmp_path, namespace="two", embedder="hashing") as two,
    ):
        for turn in range(3):
            for bank in (one, two):
                bank.add_many([f"word{turn}x{number}" for number in range(400)])
                bank.flush_index()
    for namespace in ("default", "two"):
        with LargeBank(tmp_path, namespace=namespace) as bank:
            assert bank.search("word2x77")[0].experience.text == "word2x77"
    assert not list(tmp_path.glob("chroma.damaged-*"))
    assert_whole(tmp_path)


def test_a_chroma_folder_deleted_while_closed_is_made_again(large, tmp_path):
    folder = tmp_path / "bank"
    shutil.copytree(large, folder)
    shutil.rmtree(folder / "chroma")
    with LargeBank(folder) as bank:
        assert bank.search("word77 thing15")[0].experience.text == "word77 thing15"
    assert_whole(folder)
