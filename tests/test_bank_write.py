"""What people ask of a bank on the command line: add, edit, retire, erase, back up, compact."""

from __future__ import annotations

import errno
import io
import json
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import experiential as xp
from experiential.bank.storage import erase
from experiential.bank.storage.journal import JOURNAL_NAME, Journal
from experiential.cli import main
from experiential.cli.errors import exit_code, run_app
from experiential.types import Distillation, Generation, Use
from tests.test_serve import serving, texts

Run = Callable[..., tuple[int, str, str]]
SECRET = 'The safe of "Ann" opens with hünter2.'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "bank"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run_app(main.app, ["bank", *(str(argument) for argument in arguments)])
        return (code, *capsys.readouterr())

    return call


def taught(folder: Path) -> dict[str, str]:
    """A bank in which the secret is everywhere that a text can be; the ids of its parts."""
    with xp.ExperienceBank(folder, embedder="hashing") as bank:
        seen = xp.Turn(observation=f"A note: {SECRET}", action="read")
        source = xp.Trajectory(task="open the safe", instance="safe#1", turns=(seen,))
        bank.submit(source)
        made = Generation(text=f"lesson: {SECRET}", prompt_ids=(1, 2), response_ids=(3,))
        parsed = xp.parse_operations(
            "<answer>" + json.dumps([{"op": "add", "text": SECRET}]) + "</answer>"
        )
        distilled = Distillation(parsed=parsed, generation=made)
        [entry] = bank.apply(distilled, trajectory=source, shown=[], item=source.id)
        bank.update(entry.id, f"{SECRET} Twice.")
        kept = bank.add("Doors open outward.", task="open the door", key="k1")
        bank.add(f"Gone: {SECRET}"[:12], key="k2")
        uses = (
            Use(experience_id=entry.id, experience_version=1),
            Use(experience_id=kept.id, experience_version=1),
        )
        shown = xp.Trajectory(task="open the door", uses=uses, success=True)
        bank.record(shown)
        dead = xp.Trajectory(task="dead", turns=(xp.Turn(observation="o", action="a"),))
        bank.submit(dead)
        bank.queue.fail(dead.id, f"the server said: {SECRET}", last=True)
        bank.search("safe", hybrid=0.5)
        bank.rebuild()  # the index, with the texts in it
        ids = {"entry": entry.id, "kept": kept.id, "source": source.id, "shown": shown.id}
        return ids | {"generation": made.id, "dead": dead.id}


def places(folder: Path, text: str) -> int:
    """In how many files of a folder a text is found, as a user would look."""
    forms = [text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]]
    files = [file.read_bytes() for file in folder.rglob("*") if file.is_file()]
    return sum(any(form.encode() in file for form in forms) for file in files)


@pytest.mark.parametrize("by", ["id", "text", "instance"])
def test_purge_leaves_no_byte_of_the_text_and_says_only_that_it_was(
    folder: Path, run: Run, by: str
) -> None:
    ids = taught(folder)
    assert places(folder, SECRET) >= 2  # the journal and the index
    how = {"id": [ids["entry"]], "text": ["--text", SECRET], "instance": ["--instance", "safe#1"]}
    code, out, _ = run("purge", folder, *how[by], "--dry-run", "--json")
    assert (code, json.loads(out)[0]["entries"]) == (0, 1) and places(folder, SECRET) >= 2
    code, out, error = run("purge", folder, *how[by], "--yes", "--json")
    assert code == 0, error
    said = json.loads(out)
    assert said["places with the text"] == 0 and said["entries"] == 1
    assert said["trajectories"] == 1 and said["generations"] == 1
    assert places(folder, SECRET) == places(folder, "hünter2") == 0
    with xp.ExperienceBank(folder) as bank:
        assert bank.get(ids["entry"]) is None and bank.version(ids["entry"], 1) is None
        assert bank.trajectory(ids["source"]) is None
        assert bank.generation(ids["generation"]) is None
        assert bank.queue.state(ids["source"]) is None
        assert bank.queue.dead_letters()[0].reason == ""
        # the others are as they were, with their evidence
        assert "Doors open outward." in texts(bank)
        assert bank.outcomes(ids["kept"], 1) == [1]
        shown = bank.why(ids["shown"]).shown
        assert [one.text for one in shown] == [None, "Doors open outward."]
        last = bank.commits()[-1]
        assert last.cause == "purge" and last.ref is None and last.author
        assert SECRET not in str(bank.history()) and ids["entry"] not in str(bank.history())
        bank.rebuild()
        assert bank.search("door", k=9)
    code, out, _ = run("doctor", folder, "--json")
    assert code == 0, out


def altered(folder: Path, statement: str) -> None:
    """Change a journal behind the library's back."""
    with sqlite3.connect(folder / JOURNAL_NAME) as connection:
        connection.execute(statement)
    connection.close()


@pytest.mark.parametrize("how", ["id", "text", "instance", "task", "compact"])
def test_the_checksums_of_a_journal_hold_after_rows_were_erased(
    folder: Path, run: Run, how: str, tmp_path: Path
) -> None:
    ids = taught(folder)
    with xp.ExperienceBank(folder, namespace="other", embedder="hashing") as bank:
        bank.add("Elsewhere.")
        bank.record(xp.Trajectory(task="t", turns=(xp.Turn(observation="o", action="a"),)))
    with xp.ExperienceBank(folder) as bank:
        bank.record(xp.Trajectory(task="t", turns=(xp.Turn(observation="o", action="a"),)))
    asked = {"id": [ids["entry"][:8]], "text": ["--text", SECRET], "task": ["--task", "dead"]}
    asked |= {"instance": ["--instance", "safe#1"]}
    done = ("compact", folder, "--older-than", 0)
    assert run(*done if how == "compact" else ("purge", folder, *asked[how], "--yes"))[0] == 0
    for namespace in ("default", "other"):
        for options in ({"read_only": True}, {}):
            with xp.ExperienceBank(folder, namespace=namespace, **options) as bank:
                assert bank.damage == ()
                known = {entry.id: entry.text for entry in bank}
        assert known
    code, said, error = run("recover", folder, "--to", tmp_path / "new", "--json")
    assert code == 0, error
    assert not any(row["lost"] for row in json.loads(said)), said
    # ... and still tell of damage, to rows and to the chain
    altered(folder, "UPDATE trajectories SET record = replace(record, 'task', 'tusk')")
    altered(folder, "DELETE FROM changes WHERE seq = (SELECT MAX(seq) FROM changes)")
    with xp.ExperienceBank(folder, read_only=True) as bank:
        assert {one.table for one in bank.damage} == {"trajectories", "commits"}


def test_damage_is_set_aside_before_rows_are_erased_and_not_sealed(folder: Path, run: Run) -> None:
    ids = taught(folder)
    altered(folder, "UPDATE versions SET record = replace(record, 'outward', 'inward')")
    assert run("purge", folder, ids["entry"], "--yes")[0] == 0
    with xp.ExperienceBank(folder) as bank:
        assert bank.get(ids["kept"]) is None and bank.damage == ()
    assert places(folder, "inward") == places(folder, SECRET) == 0


def test_purge_of_one_entry_refuses_where_another_holds_its_text(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder, embedder="hashing") as bank:
        short = bank.add("Go north.")
        long = bank.add("Go north. Then east.")
    code, _, error = run("purge", folder, short.id, "--yes")
    assert code == 2 and long.id in error and "--text" in error
    assert run("purge", folder, "--text", "Go north.", "--yes")[0] == 0
    with xp.ExperienceBank(folder) as bank:
        assert texts(bank) == []


def test_purge_says_where_the_text_still_is(folder: Path, run: Run) -> None:
    for namespace in ("default", "other"):
        with xp.ExperienceBank(folder, namespace=namespace, embedder="hashing") as bank:
            bank.add("the word is xyzzy")
    (folder / "export.txt").write_text("xyzzy")
    code, _, error = run("purge", folder, "--text", "xyzzy", "--yes")
    assert code == 1 and "export.txt (1)" in error and "'other'" in error
    (folder / "export.txt").unlink()
    code, *_ = run("purge", folder, "--text", "xyzzy", "--yes", "--namespace", "other")
    assert code == 0 and places(folder, "xyzzy") == 0


def test_the_proof_finds_what_lies_across_two_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    (folder / "file").write_bytes(b"a" * 5 + b"needle" + b"b" * 20 + b"needle")
    monkeypatch.setattr(erase, "_CHUNK", 8)
    proof = erase.prove(folder, ["needle"])
    assert proof.found == {"file": 2} and (proof.files, proof.bytes) == (1, 37)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "got 0"),
        (["someid", "--task", "t"], "got 2"),
        (["--text", " "], "blank"),
        (["nobody"], "Expected the id of an entry"),
        (["--text", "nowhere"], "nothing of the kind"),
    ],
)
def test_a_purge_that_makes_no_sense_is_a_user_error(
    folder: Path, run: Run, arguments: list[str], said: str
) -> None:
    with xp.ExperienceBank(folder, embedder="hashing") as bank:
        bank.add("stays")
    code, _, error = run("purge", folder, *arguments, "--yes")
    assert code == 2 and said in error and error.count("\n") == 1
    code, _, error = run("purge", folder / "nothing", "x", "--yes")
    assert code == 2


def test_nothing_is_purged_beside_a_writer(folder: Path, run: Run) -> None:
    code = "import sys, time, experiential as xp; bank = xp.ExperienceBank(sys.argv[1],"
    code += " embedder='hashing'); bank.add('x'); print('open', flush=True); time.sleep(60)"
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None and writer.stdout.readline() == "open\n"
            for arguments in (("purge", folder, "--text", "x", "--yes"), ("compact", folder)):
                code_, _, error = run(*arguments)
                assert code_ == 2 and str(writer.pid) in error
            # but a backup is made
            code_, out, _ = run("backup", folder, folder.parent / "copy", "--json")
            assert code_ == 0 and json.loads(out) == [{"folder": str(folder.parent / "copy")}]
            with xp.ExperienceBank(folder.parent / "copy") as bank:
                assert texts(bank) == ["x"]
        finally:
            writer.kill()


def test_a_backup_through_a_server_is_a_bank(folder: Path, run: Run, tmp_path: Path) -> None:
    with serving(folder, embedder="hashing") as url:
        with xp.ExperienceBank(url) as bank, xp.ExperienceBank(url, namespace="b") as other:
            entry = bank.add("one")
            other.add("of the other")
            code, out, error = run("backup", url, tmp_path / "copy")
            assert code == 0 and out.strip() == str(tmp_path / "copy"), error
            bank.add("later")
        code, _, error = run("backup", url, tmp_path / "copy")
        assert code == 2 and "without a bank" in error
    with xp.ExperienceBank(tmp_path / "copy") as bank:
        assert list(bank) == [entry]
    with xp.ExperienceBank(tmp_path / "copy", namespace="b") as bank:
        assert texts(bank) == ["of the other"]
    with serving(folder, namespaces=["default"]) as url:
        code, _, error = run("backup", url, tmp_path / "part")
        assert code == 2 and "whole folder" in error


def test_compact_drops_what_is_old_and_explains_no_entry(folder: Path, run: Run) -> None:
    ids = taught(folder)
    with xp.ExperienceBank(folder) as bank:
        turn = xp.Turn(observation="long " * 10_000, action="a")
        free = xp.Trajectory(task="open the door", turns=(turn,), success=False, score=0.25)
        bank.record(free)
        bank.keep_generation(Generation(id="orphan", text="refused"))
        source = xp.Trajectory(task="t")
        late = Generation(id="late", text="lesson")
        parsed = xp.parse_operations('<answer>[{"op": "add", "text": "Late."}]</answer>')
        bank.apply(Distillation(parsed=parsed, generation=late), trajectory=source, shown=[])
        before = [*bank.standings([]), list(bank), bank.history()]
        kept = {id: bank.trajectory(id) for id in (ids["source"], ids["dead"])}
    code, out, _ = run("compact", folder, "--older-than", 1, "--json")
    assert code == 0 and json.loads(out)[0]["turns of trajectories"] == 0
    code, out, error = run("compact", folder, "--older-than", 0, "--json")
    assert code == 0, error
    said = json.loads(out)[0]
    assert said["turns of trajectories"] == 1 and said["generations"] == 1
    assert said["MiB after"] < said["MiB before"]
    with xp.ExperienceBank(folder) as bank:
        assert [*bank.standings([]), list(bank), bank.history()] == before
        assert {id: bank.trajectory(id) for id in kept} == kept
        assert bank.generation("orphan") is None and bank.generation("late") == late
        assert bank.generation(ids["generation"]) is not None
        assert bank.trajectory(free.id) == free.model_copy(update={"turns": ()})


def test_entries_are_added_edited_and_retired_by_hand(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, error = run("add", folder, "One.", "--task", "t", "--embedder", "hashing", "--json")
    assert code == 0, error
    id = json.loads(out)[0]["id"]
    monkeypatch.setattr("sys.stdin", io.StringIO("From stdin."))
    assert run("edit", folder, id[:8], "-")[0] == 0
    with xp.ExperienceBank(folder, read_only=True) as bank:
        [entry] = bank
        assert (entry.text, entry.task, entry.version) == ("From stdin.", "t", 2)
    code, _, error = run("retire", folder, id, "nobody")
    assert code == 2 and "nobody" in error
    assert run("retire", folder, id)[0] == 0
    with xp.ExperienceBank(folder, read_only=True) as bank:
        assert len(bank) == 0 and bank.version(id, 1) is not None
    with serving(folder) as url:
        assert run("add", url, "Through the server.")[0] == 0
    with xp.ExperienceBank(folder, read_only=True) as bank:
        assert texts(bank) == ["Through the server."]


# What a terminal gets

HOSTILE = "\x1b]0;PWNED\x07\x1b[2J\x9b31mred\x9d0;x\x9c\x07 \x85\u202e end"


def test_no_command_sends_control_sequences_to_the_terminal(folder: Path, run: Run) -> None:
    bad = HOSTILE
    with xp.ExperienceBank(folder, embedder="hashing") as bank:
        entry = xp.Experience(id=f"e{bad}", text=f"text {bad}", task=f"task {bad}", kind="lesson")
        bank.import_entries([entry], f"ref {bad}")
        [entry] = bank
        use = Use(experience_id=entry.id, experience_version=1)
        id = f"t{bad}"
        bank.record(xp.Trajectory(id=id, task=f"task {bad}", uses=(use,), error=f"error {bad}"))
        judged = xp.Trajectory(id="j", task=f"task {bad}", judgement=f"said {bad}")
        bank.submit(judged)
        bank.queue.fail("j", f"reason {bad}", last=True)
        bank.update(entry.id, f"again {bad}")
    for arguments in (
        ("ls", folder),
        ("show", folder, entry.id),
        ("search", folder, "text"),
        ("why", folder, id),
        ("why", folder, "j"),
        ("history", folder),
        ("history", folder, entry.id),
        ("diff", folder, 0),
        ("stats", folder),
        ("dead-letters", folder),
        ("doctor", folder),
        ("approve", folder),
        ("why", folder, bad),
        ("prune", folder, "--score", "0.9", "--min-uses", "0", "--dry-run"),
        ("rollback", folder, 0, "--dry-run"),
        ("purge", folder, entry.id, "--dry-run"),
        ("retire", folder, bad),
    ):
        for extra in ((), ("--json",)):
            _, out, error = run(*arguments, *extra)
            found = re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", out + error)
            assert not found, (arguments, found)
            if extra and out:
                json.loads(out)


# Errors of the disk


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
        OSError(errno.EROFS, "Read-only file system"),
        sqlite3.OperationalError("attempt to write a readonly database"),
    ],
)
def test_errors_of_the_disk_are_one_line(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise error

    assert exit_code(fail) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: Expected") and said.count("\n") == 1
    assert str(getattr(error, "strerror", None) or error) in said


def test_other_os_errors_keep_their_traceback() -> None:
    def fail() -> None:
        raise ConnectionResetError(errno.ECONNRESET, "reset")

    with pytest.raises(ConnectionResetError):
        exit_code(fail)


def test_a_temporary_folder_without_room_is_one_line(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with xp.ExperienceBank(folder, embedder="hashing") as bank:
        bank.add("x")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/tmp/copy")

    monkeypatch.setattr("shutil.copyfile", full)
    for arguments in (("ls", folder), ("backup", folder, folder.parent / "copy")):
        code, _, error = run(*arguments)
        assert code == 1 and "No space" in error and error.count("\n") == 1


def test_the_journal_of_a_purged_bank_has_no_free_page(folder: Path, run: Run) -> None:
    ids = taught(folder)
    assert run("purge", folder, ids["entry"], "--yes")[0] == 0
    journal = Journal.open_copy(folder)
    assert journal.value("PRAGMA freelist_count") == 0
    journal.close()
    assert not (folder / f"{JOURNAL_NAME}-wal").exists()
