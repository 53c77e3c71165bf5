"""The experience bank through its public methods, on real SQLite and real Chroma."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import BUNDLED_PACKAGE, HashingEmbedder
from experiential.bank.storage.checkup import examine
from experiential.errors import BankError, BankLockedError, ReadOnlyBankError
from experiential.types import (
    Add,
    Discard,
    Distillation,
    Generation,
    Keep,
    Merge,
    ParsedOperations,
    Return,
    Trajectory,
    Update,
)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "bank"


@pytest.fixture
def bank(folder):
    with ExperienceBank(folder, embedder="hashing") as bank:
        yield bank


def distillation(*operations, version=3):
    return Distillation(
        parsed=ParsedOperations(operations=operations),
        generation=Generation(text="raw", policy_version=version),
    )


def hashes(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in files
    }


def texts(bank):
    return [entry.text for entry in bank.entries()]


def test_a_write_is_read_back_after_reopening(folder):
    with ExperienceBank(folder, embedder="hashing") as bank:
        entry = bank.add(
            "use the brass key", task="open the door", kind="warning", metadata={"n": 1}
        )
    with ExperienceBank(folder) as again:
        assert again.get(entry.id) == entry
        assert (entry.version, entry.task, entry.kind, entry.metadata) == (
            1,
            "open the door",
            "warning",
            {"n": 1},
        )
        assert len(again) == 1 and again.head == entry.provenance.commit


def test_update_makes_a_version_and_keeps_the_old_one(bank):
    entry = bank.add("old")
    new = bank.update(entry.id, "new")
    assert (new.id, new.version, new.text) == (entry.id, 2, "new")
    assert bank.version(entry.id, 1).text == "old"
    assert bank.get(entry.id).text == "new"
    assert bank.search("old")[0].experience.text == "new"


def test_remove_takes_the_entry_from_reads_and_searches(bank):
    keep, gone = bank.add("keep this"), bank.add("drop that")
    bank.remove(gone.id)
    assert bank.get(gone.id) is None
    assert [hit.experience.id for hit in bank.search("drop that", k=5)] == [keep.id]
    with pytest.raises(BankError, match="Expected the id of a live entry"):
        bank.remove(gone.id)
    with pytest.raises(BankError, match="Expected the id of a live entry"):
        bank.update(gone.id, "x")


def test_search_ranks_by_cosine_and_takes_one_query_or_many(bank):
    door = bank.add("open the red door with the brass key")
    bread = bank.add("bake bread in the oven at noon")
    hits = bank.search("red door key", k=2)
    assert [hit.experience.id for hit in hits] == [door.id, bread.id]
    assert [hit.rank for hit in hits] == [0, 1] and hits[0].score > hits[1].score
    both = bank.search(["red door key", "bake bread"], k=1)
    assert [row[0].experience.id for row in both] == [door.id, bread.id]
    assert bank.search([]) == []


def test_search_equals_brute_force(bank):
    """The score of an entry is the cosine of the query to the sum of its text's embedding and twice
    its task's.
    """
    embed = HashingEmbedder()
    entries = bank.add_many(
        [f"word{i} shared word{i % 7} door" for i in range(300)], task="open it"
    )
    both = embed([entry.text for entry in entries]) + 2 * embed(["open it"])
    vectors = both / np.linalg.norm(both, axis=1, keepdims=True)
    for query in ("word3 door", "shared word5", "open", "nothing at all"):
        scores = vectors @ embed([query])[0]
        hits = bank.search(query, k=10)
        assert [hit.score for hit in hits] == pytest.approx(
            np.sort(scores)[::-1][:10].tolist(), abs=1e-5
        )
        found = {entry.id: score for entry, score in zip(entries, scores, strict=True)}
        assert all(found[hit.experience.id] == pytest.approx(hit.score, abs=1e-5) for hit in hits)


def test_an_entry_of_the_task_asked_about_comes_first_whatever_its_wording(bank):
    """Its text shares no word with the query; the other entry's text is the query itself."""
    query = "open the vault of the heron"
    other = bank.add(query, task="bake bread before noon")
    own = bank.add("try gold", task=query)
    assert [hit.experience.id for hit in bank.search(query, k=2)] == [own.id, other.id]


def test_commits_say_who_and_why(bank):
    entry = bank.add("a")
    bank.update(entry.id, "b")
    bank.remove(entry.id)
    bank.rollback(bank.commits()[0].id)
    assert [commit.cause for commit in bank.commits()] == ["add", "update", "remove", "rollback"]
    assert bank.commits()[-1].id == bank.head and bank.commits()[0].author == "human"


def test_at_shows_the_bank_as_it_was_and_stays_fixed(bank):
    a = bank.add("first door")
    view = bank.at(bank.head)
    bank.update(a.id, "second window")
    bank.add("third")
    assert [e.text for e in view] == ["first door"] and len(view) == 1
    assert view.get(a.id).text == "first door"
    assert view.search("first door")[0].experience.version == 1
    assert len(bank.at(0)) == 0 and bank.at(0).search("x") == []


def test_rollback_is_a_new_commit_that_erases_nothing(bank):
    a, b = bank.add("a one"), bank.add("b one")
    point = bank.head
    bank.update(a.id, "a two")
    bank.remove(b.id)
    c = bank.add("c one")
    before = bank.head
    bank.rollback(point)
    assert {e.id: e.text for e in bank.entries()} == {a.id: "a one", b.id: "b one"}
    assert bank.head > before and bank.at(before).get(c.id).text == "c one"
    assert bank.search("a two")[0].experience.text == "a one"
    assert bank.update(a.id, "a three").version == 3, "a version number is never given twice"


@pytest.mark.parametrize("commit", [99, -1, "1", None, 1.0])
def test_an_unknown_commit_is_refused(bank, commit):
    bank.add("a")
    for call in (bank.at, bank.rollback):
        with pytest.raises(BankError, match="Expected a commit id"):
            call(commit)


@pytest.mark.parametrize("text", ["", "  \n", None, 3, b"x", ["a"]])
def test_wrong_text_is_refused(bank, text):
    entry = bank.add("a")
    for call in (
        lambda: bank.add(text),
        lambda: bank.update(entry.id, text),
        lambda: bank.add_many([text]),
        lambda: bank.search([text]),
    ):
        with pytest.raises(ValueError, match="Expected"):
            call()
    assert texts(bank) == ["a"]


def test_other_wrong_arguments_are_refused(bank, folder):
    calls = [
        lambda: bank.add("a", task=3),
        lambda: bank.add("a", kind=""),
        lambda: bank.add("a", metadata=[1]),
        lambda: bank.add_many("abc"),
        lambda: bank.search("a", k=0),
        lambda: bank.search(3),
        lambda: bank.get(3),
        lambda: ExperienceBank(3),
        lambda: ExperienceBank(folder, namespace=""),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="Expected"):
            call()


def test_an_address_is_no_folder(bank):
    with pytest.raises(BankError, match="only ExperienceBank takes one, with http:// or https://"):
        bank.fork("http://localhost:1234")
    with pytest.raises(BankError, match="Expected a folder, got the address"):
        ExperienceBank("ftp://localhost:1234")


def test_namespaces_of_one_folder_do_not_meet(folder):
    with (
        ExperienceBank(folder, embedder="hashing") as one,
        ExperienceBank(folder, namespace="two", embedder="hashing") as two,
    ):
        a = one.add("only in one")
        b = two.add("only in two")
        assert texts(one) == ["only in one"] and texts(two) == ["only in two"]
        assert one.get(b.id) is None and two.search("only in one")[0].experience.id == b.id
        two.rollback(0)
        assert one.get(a.id) is not None and len(one.commits()) == 1


def test_a_second_writer_is_told_who_holds_the_bank(bank, folder):
    code = (
        f"from experiential.bank.bank import ExperienceBank; ExperienceBank({str(folder)!r},"
        " namespace='other')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    last = result.stderr.strip().splitlines()[-1]
    assert "BankLockedError" in last and str(os.getpid()) in last and "read_only=True" in last
    with pytest.raises(BankLockedError, match=str(os.getpid())):
        ExperienceBank(folder)


def test_the_lock_goes_with_close_and_with_the_last_reference(folder):
    with ExperienceBank(folder, embedder="hashing") as bank:
        bank.close()
        ExperienceBank(folder).close()
    bank = ExperienceBank(folder)
    del bank
    ExperienceBank(folder).close()


def test_another_embedder_is_refused_and_none_means_the_recorded_one(folder):
    def mine(batch):
        return np.ones((len(batch), 8), dtype=np.float32)

    with ExperienceBank(folder, embedder="hashing") as bank:
        bank.add("a")
    with pytest.raises(BankError, match="hashing-256"):
        ExperienceBank(folder, embedder=mine)
    with ExperienceBank(folder) as bank:
        assert bank.embedder.id == "hashing-256"


def test_a_bank_of_an_unknown_embedder_opens_and_reads_but_does_not_search(folder):
    def mine(batch):
        return np.eye(8, dtype=np.float32)[[len(t) % 8 for t in batch]]

    with ExperienceBank(folder, embedder=mine) as bank:
        entry = bank.add("a")
    with ExperienceBank(folder) as bank:
        assert bank.get(entry.id) == entry
        with pytest.raises(BankError, match="pass it as embedder="):
            bank.search("a")


@pytest.mark.parametrize(
    "give", [lambda n: np.full((n, 4), np.nan), lambda n: np.ones((n + 1, 4)), lambda n: np.ones(n)]
)
def test_what_is_no_embedding_is_refused_and_nothing_is_written(folder, give):
    with ExperienceBank(folder, embedder=lambda batch: give(len(batch))) as bank:
        with pytest.raises(BankError, match="finite vectors"):
            bank.add("a")
        assert len(bank) == 0 and bank.head == 0


def test_a_failing_embedder_leaves_the_bank_as_it_was(folder):
    def broken(batch):
        raise RuntimeError("no model")

    with ExperienceBank(folder, embedder=broken) as bank:
        with pytest.raises(RuntimeError, match="no model"):
            bank.add("a")
        assert len(bank) == 0 and bank.commits() == []


def test_read_only_changes_not_one_byte_beside_a_live_writer(bank, folder):
    bank.add("a")
    bank.flush_index()
    before = hashes(folder)
    assert any(name.endswith("-wal") for name in before), (
        "the writer's log must be part of the picture"
    )
    with ExperienceBank(folder, read_only=True) as reader:
        assert texts(reader) == ["a"] and reader.search("a")[0].experience.text == "a"
        assert len(reader.at(1)) == 1 and len(reader.commits()) == 1
        for write in (
            lambda: reader.add("x"),
            lambda: reader.rollback(0),
            lambda: reader.record(Trajectory(task="t")),
        ):
            with pytest.raises(ReadOnlyBankError):
                write()
        bank_sees = len(bank)
    assert hashes(folder) == before and bank_sees == 1


def test_read_only_changes_not_one_byte_of_a_closed_bank(folder):
    with ExperienceBank(folder, embedder="hashing") as bank:
        bank.add_many(["a", "b"])
    before = hashes(folder)
    with ExperienceBank(folder, read_only=True) as reader:
        assert texts(reader) == ["a", "b"]
    assert hashes(folder) == before


def test_read_only_is_a_fixed_picture(bank, folder):
    bank.add("a")
    with ExperienceBank(folder, read_only=True) as reader:
        bank.add("b")
        assert texts(reader) == ["a"]
    with pytest.raises(BankError, match="read-only"):
        ExperienceBank(folder / "none", read_only=True)


def test_a_closed_bank_says_so(folder):
    bank = ExperienceBank(folder, embedder="hashing")
    bank.add("a")
    bank.close()
    bank.close()
    for call in (lambda: bank.add("x"), lambda: bank.search("x"), bank.commits):
        with pytest.raises(BankError, match="open bank"):
            call()


def test_apply_writes_one_commit_with_provenance(bank):
    shown = [bank.add("old text")]
    trajectory = Trajectory(task="open the door", instance="vault-7")
    made = distillation(
        Add(text="new lesson", span=(3, 9)), Update(entry=1, text="better text"), Return()
    )
    commits = len(bank.commits())
    added, updated = bank.apply(made, trajectory=trajectory, shown=shown)
    assert len(bank.commits()) == commits + 1 and bank.commits()[-1].ref == trajectory.id
    assert (added.task, added.version, added.provenance.span) == ("open the door", 1, (3, 9))
    assert (updated.id, updated.version, updated.text) == (shown[0].id, 2, "better text")
    for entry in (added, updated):
        source = entry.provenance
        assert (source.author, source.trajectory, source.instance) == (
            "extractor",
            trajectory.id,
            "vault-7",
        )
        assert (source.extractor_version, source.generation) == (3, made.generation.id)
    assert bank.generation(made.generation.id) == made.generation


ANCHOR, BRIDGE = "Open the vault of Broken Anchor.", "Open the vault of Broken Bridge."


def rewritten(bank, text, *, task=BRIDGE):
    """An entry about the anchor's vault, rewritten by a distillation of an episode of ``task``."""
    entry = bank.add("The vault of Broken Anchor: jade lever.", task=ANCHOR)
    made = distillation(Update(entry=1, text=text))
    return entry, bank.apply(made, trajectory=Trajectory(task=task), shown=[entry])[0]


@pytest.mark.parametrize(
    ("text", "task"),
    [
        ("The vault of Broken Bridge: pull the teal lever.", BRIDGE),
        ("In Broken Bridge's vault signs lie.", BRIDGE),
        ("The vault of Broken Anchor: the rose lever, not jade.", ANCHOR),
        ("Unlike Broken Bridge, Broken Anchor opens with jade.", ANCHOR),
        ("Signs can be wrong.", ANCHOR),
    ],
)
def test_an_update_that_changes_the_subject_changes_the_task(bank, text, task):
    entry, updated = rewritten(bank, text)
    assert (updated.id, updated.version, updated.task) == (entry.id, 2, task)
    assert [hit.experience.id for hit in bank.search(task, where={"task": task})] == [entry.id]


def test_the_old_subject_stays_in_history_and_comes_back_by_rollback(bank):
    entry, _ = rewritten(bank, "The vault of Broken Bridge: teal lever.")
    head = bank.head
    assert (bank.version(entry.id, 1).task, bank.get(entry.id).task) == (ANCHOR, BRIDGE)
    same = distillation(Add(text=entry.text))
    assert bank.apply(same, trajectory=Trajectory(task=ANCHOR), shown=[])[0].id != entry.id
    bank.rollback(head - 1)
    assert bank.get(entry.id) == entry and not bank.search("teal", where={"task": BRIDGE})
    bank.rollback(head)
    assert bank.get(entry.id).task == BRIDGE


def test_a_hand_edit_and_an_entry_for_all_tasks_keep_their_task(bank):
    entry = bank.add("The vault of Broken Anchor: jade.", task=ANCHOR)
    assert bank.update(entry.id, "The vault of Broken Bridge: teal.").task == ANCHOR
    general = bank.add("Signs can be wrong.")
    made = distillation(Update(entry=1, text="The vault of Broken Bridge has wrong signs."))
    updated = bank.apply(made, trajectory=Trajectory(task=BRIDGE), shown=[general])[0]
    assert (updated.id, updated.task) == (general.id, None)


def test_the_checkup_names_entries_that_are_about_another_task(bank):
    right = bank.add("The vault of Broken Bridge: teal.", task=BRIDGE)
    wrong = bank.add("The vault of Broken Bridge: jade.", task=ANCHOR)
    bank.add_many(["Signs can be wrong.", "Broken Anchor and Broken Bridge differ."], task=ANCHOR)
    bank.submit(Trajectory(task=ANCHOR))
    found = {finding.what: finding for finding in examine(bank.path)}
    tasks, waiting = found["default: tasks"], found["default: waiting"]
    assert tasks.status == waiting.status == "note"
    assert tasks.found.startswith("1 entries") and f"{wrong.id}: {BRIDGE}" in tasks.found
    assert right.id not in tasks.found and "experiential distil" in waiting.mend
    bank.remove(wrong.id)
    assert "default: tasks" not in {finding.what for finding in examine(bank.path)}


def test_operations_that_name_nothing_are_refused_and_counted(bank):
    gone = bank.add("gone")
    bank.remove(gone.id)
    made = distillation(
        Update(entry=2, text="x"), Update(entry=1, text="y"), Keep(entry=1), Add(text="good")
    )
    written = bank.apply(made, trajectory=Trajectory(task="t"), shown=[gone])
    assert [e.text for e in written] == ["good"]
    assert bank.refused == {"entry_out_of_range": 1, "entry_gone": 1, "not_a_distillation": 1}


def test_the_same_lesson_again_is_a_new_version_credited_to_its_newest_author(bank):
    trajectory = Trajectory(task="t", instance="i1")
    first = bank.apply(distillation(Add(text="same")), trajectory=trajectory, shown=[])[0]
    made = distillation(Add(text="same"), Add(text="same", kind="warning"))
    second, other = bank.apply(made, trajectory=Trajectory(task="t", instance="i2"), shown=[])
    assert (second.id, second.version) == (
        first.id,
        2,
    ) and second.provenance.generation == made.generation.id
    assert other.id != first.id and len(bank) == 2
    assert bank.add("same", task="t").id != first.id, "a person's add always adds"


def test_exclude_instance_hides_what_was_made_from_it_through_updates_and_merges(bank):
    made = distillation(Add(text="the red door needs a key"))
    [entry] = bank.apply(made, trajectory=Trajectory(task="t", instance="i1"), shown=[])
    other = bank.add("the red door needs a push")
    assert [h.experience.id for h in bank.search("red door", k=5, exclude_instance="i1")] == [
        other.id
    ]
    entry = bank.update(entry.id, "the red door needs two keys")
    assert [h.experience.id for h in bank.search("red door", k=5, exclude_instance="i1")] == [
        other.id
    ]
    [merged] = bank.consolidate(
        distillation(Merge(entries=(1, 2), text="the red door: keys, push")), shown=[entry, other]
    )
    assert bank.search("red door", k=5, exclude_instance="i1") == []
    assert bank.search("red door", k=5, exclude_instance="i2")[0].experience.id == merged.id
    bank.close()
    with ExperienceBank(bank.path) as again:
        assert again.search("red door", k=5, exclude_instance="i1") == []


def test_merge_keeps_all_parents_and_discards_what_it_is_told(bank):
    shown = [bank.add(text, task="t") for text in ("a", "b", "c", "d")]
    made = distillation(Merge(entries=(1, 3), text="a and c"), Discard(entry=2))
    [merged] = bank.consolidate(made, shown=shown)
    assert sorted(texts(bank)) == ["a and c", "d"]
    assert merged.provenance.parents == ((shown[0].id, 1), (shown[2].id, 1)) and merged.task == "t"
    assert bank.commits()[-1].cause == "merge"


def test_a_concurrent_change_loses_only_the_merge_it_touches(bank):
    shown = [bank.add(text) for text in ("a", "b", "c", "d", "e")]
    bank.update(shown[0].id, "a changed meanwhile")
    bank.remove(shown[4].id)
    made = distillation(
        Merge(entries=(1, 2), text="x"),
        Merge(entries=(3, 4), text="cd"),
        Discard(entry=5),
        Discard(entry=9),
    )
    bank.consolidate(made, shown=shown)
    assert sorted(texts(bank)) == ["a changed meanwhile", "b", "cd"]
    assert bank.refused == {"entry_changed": 2, "entry_out_of_range": 1}


def test_export_and_import_carry_provenance_and_counters(bank, tmp_path):
    a = bank.add("a text", task="t", metadata={"x": [1]})
    bank.update(a.id, "a second text")
    bank.add("ünïcode\u2028line\nbreak")
    file = tmp_path / "out" / "bank.jsonl"
    assert bank.export(file) == 2
    header = json.loads(file.read_text(encoding="utf-8").split("\n")[0])
    assert header["embedder"] == "hashing-256" and header["entries"] == 2
    with ExperienceBank(tmp_path / "second", embedder="hashing") as second:
        second.add("a second text", task="t")
        assert second.import_(file) == 1, "what is known already is not imported again"
    with ExperienceBank(tmp_path / "third", embedder="hashing") as third:
        assert third.import_(file) == 2 and third.import_(file) == 0
        got, want = third.get(a.id), bank.get(a.id)
        assert got.model_copy(update={"provenance": want.provenance}) == want
        assert third.commits()[0].cause == "import"


def test_a_bad_import_names_the_line_and_writes_nothing(bank, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "fine"}\n{"txt": "typo"}\n')
    with pytest.raises(BankError, match=r"line 2 of bad\.jsonl"):
        bank.import_(file)
    with pytest.raises(BankError, match="readable export file"):
        bank.import_(tmp_path / "missing.jsonl")
    assert len(bank) == 0


def test_fork_is_an_independent_copy(bank, tmp_path):
    a = bank.add("a")
    bank.submit(Trajectory(task="t"))
    with bank.fork(tmp_path / "copy") as copy:
        copy.update(a.id, "changed in the copy")
        copy.add("b")
        assert copy.queue.waiting() == [] and copy.commits()[0] == bank.commits()[0]
    assert texts(bank) == ["a"] and len(bank.queue.waiting()) == 1
    with bank.fork(tmp_path / "checkpoint", keep_queue=True) as copy:
        assert copy.queue.waiting() == bank.queue.waiting()
    with pytest.raises(BankError, match="without a bank"):
        bank.fork(tmp_path / "copy")
    with (
        ExperienceBank(bank.path, read_only=True) as reader,
        reader.fork(tmp_path / "other") as copy,
    ):
        assert texts(copy) == ["a"]


def test_many_threads_write_and_read_at_once(bank):
    errors = []

    def work(name):
        try:
            for i in range(15):
                entry = bank.add(f"lesson {name} {i}")
                assert bank.search(entry.text)[0].experience.id == entry.id
                bank.update(entry.id, f"lesson {name} {i} again")
                if i % 3 == 0:
                    bank.remove(entry.id)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcdef"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and len(bank) == 6 * 10


def test_a_missing_or_damaged_chroma_folder_loses_nothing(folder):
    with ExperienceBank(folder, embedder="hashing") as bank:
        bank.add_many([f"entry {i}" for i in range(20)])
    shutil.rmtree(folder / "chroma")
    with ExperienceBank(folder) as bank:
        assert len(bank) == 20 and bank.search("entry 7")[0].experience.text == "entry 7"
        bank.flush_index()
    assert (folder / "chroma" / "chroma.sqlite3").exists()
    (folder / "chroma" / "chroma.sqlite3").write_bytes(b"not a database at all" * 100)
    with ExperienceBank(folder) as bank:
        assert len(bank) == 20 and bank.rebuild() == 20
    assert list(folder.glob("chroma.damaged-*")), "the damaged folder is set aside, not deleted"


class LargeBank(FolderBank):
    RESIDENT_LIMIT = 20


def test_above_the_limit_chroma_answers_and_sees_every_write_at_once(folder):
    with LargeBank(folder, embedder="hashing") as bank:
        entries = bank.add_many([f"note{i} about door{i}" for i in range(60)])
        bank.flush_index()
        assert bank.search("note31 about door31")[0].experience.id == entries[31].id
        bank.update(entries[31].id, "something else entirely")
        bank.remove(entries[32].id)
        fresh = bank.add("brand new words")
        assert bank.search("brand new words")[0].experience.id == fresh.id
        assert bank.search("something else entirely")[0].experience.version == 2
        assert entries[32].id not in [
            hit.experience.id for hit in bank.search("note32 about door32", k=10)
        ]
        bank.flush_index()
        assert bank.search("something else entirely")[0].experience.version == 2
        assert len(bank.search("note", k=10)) == 10
    with LargeBank(folder) as bank:
        assert bank.search("brand new words")[0].experience.id == fresh.id


@pytest.mark.skipif(
    __import__("importlib.util").util.find_spec(BUNDLED_PACKAGE) is None,
    reason="the default model's package is not installed",
)
def test_the_default_model_finds_by_meaning(folder):
    with ExperienceBank(folder) as bank:
        key = bank.add("A brass key unlocks the crimson gate.")
        bank.add("Knead the dough for ten minutes.")
        hit = bank.search("How do I open the red door?")[0]
        assert hit.experience.id == key.id and hit.score > 0.3
        assert bank.embedder.id.endswith("all-MiniLM-L6-v2")
