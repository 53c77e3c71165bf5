"""The journal survives kill -9."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.storage import journal
from experiential.bank.storage.journal import Journal, copy_stable
from experiential.errors import BankError
from experiential.types import Trajectory


def run_until_killed(code, lines, tmp_path):
    """Start a writer, kill it -9 once it has acknowledged ``lines`` writes, give what it
    acknowledged.
    """
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(code))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "bank")], stdout=subprocess.PIPE, text=True
    )
    said = [process.stdout.readline().strip() for _ in range(lines)]
    time.sleep(0.003 * (lines % 5))
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().split("\n")[:-1]
    process.wait()
    assert process.returncode == -signal.SIGKILL
    return [line for line in said + rest if line]


@pytest.mark.parametrize("lines", [1, 7, 40])
def test_every_acknowledged_write_survives_kill_9(tmp_path, lines):
    code = """
        import sys
        from experiential.bank.bank import ExperienceBank
        bank = ExperienceBank(sys.argv[1], embedder="hashing")
        i = 0
        while True:
            texts = [f"lesson {i}", f"twin {i}"]
            entry = bank.add(texts[0]) if i % 3 else bank.add_many(texts)[0]
            print(entry.id, i, flush=True)
            i += 1
    """
    said = run_until_killed(code, lines, tmp_path)
    with ExperienceBank(tmp_path / "bank") as bank:
        for line in said:
            id, number = line.split()
            assert bank.get(id).text == f"lesson {number}"
        written = [entry.text for entry in bank.entries()]
        for number in range(0, len(said), 3):
            assert f"twin {number}" in written, "half a commit is never seen"
        assert bank.add("after the crash").version == 1 and bank.rebuild() == len(bank)


@pytest.mark.parametrize("lines", [3, 11])
def test_a_queue_killed_at_work_distils_each_trajectory_exactly_once(tmp_path, lines):
    code = """
        import sys
        from experiential.bank.bank import ExperienceBank
        from experiential.types import Add, Distillation, ParsedOperations, Trajectory
        bank = ExperienceBank(sys.argv[1], embedder="hashing")
        trajectories = [Trajectory(id=f"t{i}", task="t") for i in range(30)]
        for trajectory in trajectories:
            bank.submit(trajectory)
        for id in bank.queue.waiting():
            made = Distillation(parsed=ParsedOperations(operations=(Add(text=f"from {id}"),)))
            bank.apply(made, trajectory=bank.trajectory(id), shown=[], item=id)
            print(id, flush=True)
        import time; time.sleep(60)
    """
    said = run_until_killed(code, lines, tmp_path)
    from experiential.bank.manager import ExperienceManager
    from tests.test_manager import Echo

    with ExperienceBank(tmp_path / "bank") as bank:
        assert not set(said) & set(bank.queue.waiting()), "what was acknowledged is done"
        with ExperienceManager(bank, Echo()) as manager:
            manager.drain(timeout=20)
        sources = sorted(entry.provenance.trajectory for entry in bank.entries())
        assert sources == sorted(f"t{i}" for i in range(30)), "none lost, none twice"


def test_a_finished_item_writes_nothing_the_second_time(tmp_path):
    from experiential.types import Add, Distillation, ParsedOperations

    made = Distillation(parsed=ParsedOperations(operations=(Add(text="x"),)))
    with ExperienceBank(tmp_path, embedder="hashing") as bank:
        trajectory = Trajectory(task="t")
        assert bank.submit(trajectory) and not bank.submit(trajectory)
        assert len(bank.apply(made, trajectory=trajectory, shown=[], item=trajectory.id)) == 1
        assert bank.apply(made, trajectory=trajectory, shown=[], item=trajectory.id) == []
        assert len(bank) == 1


def test_a_failed_transaction_leaves_nothing(tmp_path):
    journal = Journal.open(tmp_path)
    with pytest.raises(KeyError), journal.transaction():
        journal.insert("meta", "n", "k", "v")
        raise KeyError
    assert journal.rows("SELECT * FROM meta WHERE namespace = 'n'") == []
    journal.close()


def test_a_newer_or_broken_journal_is_refused_with_what_to_do(tmp_path):
    journal = Journal.open(tmp_path)
    journal.run("PRAGMA user_version=99")
    journal.close()
    with pytest.raises(BankError, match="update experiential-rl"):
        ExperienceBank(tmp_path)
    (tmp_path / "journal.sqlite").write_bytes(b"garbage" * 1000)
    with pytest.raises(BankError, match="Expected a readable journal"):
        ExperienceBank(tmp_path)


def test_a_copy_beside_a_busy_writer_is_whole(tmp_path):
    """Read-only opens while another process commits: each sees a prefix of the commits."""
    code = """
        import sys
        from experiential.bank.bank import ExperienceBank
        bank = ExperienceBank(sys.argv[1], embedder="hashing")
        i = 0
        while True:
            bank.add_many([f"{i} a", f"{i} b"])
            print(i, flush=True)
            i += 1
    """
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(code))
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "bank")], stdout=subprocess.PIPE, text=True
    )
    try:
        for _ in range(5):
            seen = int(process.stdout.readline())
            with ExperienceBank(tmp_path / "bank", read_only=True) as reader:
                texts = [entry.text for entry in reader.entries()]
            assert len(texts) >= 2 * (seen + 1)
            assert texts == [f"{i} {x}" for i in range(len(texts) // 2) for x in "ab"]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_journal_just_written_is_copied_at_once(tmp_path, monkeypatch):
    source = tmp_path / "source"
    source.write_bytes(b"a" * 5000)
    monkeypatch.setattr(journal.time, "time_ns", lambda: source.stat().st_mtime_ns)  # it stays new
    copy_stable(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()


def test_a_write_that_shows_in_no_date_is_seen(tmp_path, monkeypatch):
    source, target = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(b"a" * 5000)
    dated = source.stat().st_mtime_ns
    monkeypatch.setattr(journal.time, "time_ns", lambda: dated)
    copyfile, copies = shutil.copyfile, []

    def beside_a_writer(source, target):
        copyfile(source, target)
        if len(copies) < 2:  # as large, and within the same tick
            source.write_bytes(bytes([98 + len(copies)]) * 5000)
            os.utime(source, ns=(dated, dated))
        copies.append(source)

    monkeypatch.setattr(journal.shutil, "copyfile", beside_a_writer)
    copy_stable(source, target)
    assert len(copies) == 3 and target.read_bytes() == b"c" * 5000
