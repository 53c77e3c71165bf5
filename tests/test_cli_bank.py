"""`experiential bank` over a real bank: what it shows, what it changes and asks before, and what
its doctor finds.
"""

from __future__ import annotations

import hashlib
import io
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import experiential as xp
from experiential.bank.index.follower import Replica
from experiential.bank.index.site import Site
from experiential.cli import main
from experiential.cli.errors import run_app
from tests.test_serve import serving

Run = Callable[..., tuple[int, str, str]]
TEXTS = [
    "The red key opens the north door.",
    "Wait for the guard to leave.",
    "Copper coins sink in the well.",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        for text in TEXTS:
            bank.add(text, task="castle")
    return tmp_path / "bank"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run_app(main.app, ["bank", *(str(argument) for argument in arguments)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def journal_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "journal.sqlite").read_bytes()).hexdigest()


def test_ls_lists_every_entry(folder: Path, run: Run) -> None:
    code, out, _ = run("ls", folder, "--json")
    assert code == 0
    assert {row["text"] for row in json.loads(out)} == set(TEXTS)


def test_ls_limit(folder: Path, run: Run) -> None:
    assert len(json.loads(run("ls", folder, "--json", "--limit", 1)[1])) == 1


def test_search_finds_the_entry_and_counts_nothing(folder: Path, run: Run) -> None:
    before = journal_digest(folder)
    code, out, _ = run("search", folder, "red key north door", "--k", 1, "--json")
    assert code == 0
    assert json.loads(out)[0]["text"] == TEXTS[0]
    assert journal_digest(folder) == before


def test_search_can_weigh_words(folder: Path, run: Run) -> None:
    plain, worded = (
        json.loads(run("search", folder, "red key", "--hybrid", weight, "--json")[1])
        for weight in (0, 1)
    )
    assert [row["text"] for row in worded][0] == TEXTS[0]
    assert worded[0]["score"] == 1.0 != plain[0]["score"]
    code, _, error = run("search", folder, "red key", "--hybrid", 1.5)
    assert code == 2 and "--hybrid" in error


def test_show_gives_one_entry_whole(folder: Path, run: Run) -> None:
    entry = json.loads(run("ls", folder, "--json")[1])[0]
    shown = json.loads(run("show", folder, entry["id"], "--json")[1])
    assert shown["text"] == entry["text"] and shown["task"] == "castle"
    assert shown["score"] == 0.5 and shown["uplift"]["groups"] == 0
    assert "castle" in run("show", folder, entry["id"])[1]


def test_listings_show_short_ids_which_every_command_takes(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder) as bank:
        entry = next(iter(bank))
        bank.update(entry.id, "The red key opens the south door.")
    short = entry.id[:8]
    for command in (("ls",), ("search", "key"), ("diff", 0)):
        name, *rest = command
        code, out, _ = run(name, folder, *rest)
        assert code == 0 and short in out and entry.id not in out, command
        assert entry.id in run(name, folder, *rest, "--json")[1]
    assert json.loads(run("show", folder, short, "--json")[1])["id"] == entry.id
    assert [row["version"] for row in json.loads(run("history", folder, short, "--json")[1])] == [
        1,
        2,
    ]


def test_an_ambiguous_id_names_the_candidates(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder, read_only=True) as bank:
        ids = [entry.id for entry in bank]
    for number in range(40):  # until two of them begin with one digit
        if len({id[0] for id in ids}) < len(ids):
            break
        with xp.ExperienceBank(folder) as bank:
            ids.append(bank.add(f"Lesson {number}.").id)
    digit = next(id[0] for id in ids if sum(other[0] == id[0] for other in ids) > 1)
    code, _, error = run("show", folder, digit)
    assert code == 2 and error.count("\n") == 1 and f"got {digit!r}" in error
    assert all(id[:8] in error for id in ids if id[0] == digit)
    assert run("show", folder, "")[0] == 2


@pytest.mark.parametrize("width", [40, 60, 80])
def test_tables_keep_their_columns_in_a_narrow_terminal(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Every name and value is there, words whole; at 40 columns as lines instead of columns."""
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run("ls", folder)
    assert max(map(len, out.splitlines())) <= width
    words = out.split()
    assert {"id", "version", "kind", "uses", "successes", "evidence", "text"} <= set(words)
    assert words.count("unproven") == len(TEXTS) and {"Copper", "north", "guard"} <= set(words)


def test_show_of_an_unknown_id_is_a_user_error(folder: Path, run: Run) -> None:
    code, _, error = run("show", folder, "nothing")
    assert code == 2 and "nothing" in error and error.count("\n") == 1


def test_stats_counts(folder: Path, run: Run) -> None:
    numbers = json.loads(run("stats", folder, "--json")[1])
    assert numbers["entries"] == 3 and numbers["uses"] == 0


def test_export_reads_back_into_another_bank(folder: Path, run: Run, tmp_path: Path) -> None:
    code, _, _ = run("export", folder, tmp_path / "bank.jsonl")
    assert code == 0
    with xp.ExperienceBank(tmp_path / "other", embedder="hashing") as other:
        other.import_(tmp_path / "bank.jsonl")
        assert {entry.text for entry in other} == set(TEXTS)


def test_export_to_an_unwritable_file_is_a_user_error(folder: Path, run: Run) -> None:
    code, _, error = run("export", folder, folder / "journal.sqlite" / "x")
    assert code == 2 and error.count("\n") == 1


def test_a_bank_that_another_process_writes_can_be_read(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder, embedder="hashing") as writer:
        writer.add("Fourth lesson.")
        assert run("ls", folder)[0] == 0


# Episodes, history and differences


def told(run: Run, *arguments: object) -> Any:
    """What a command printed as JSON; it must have gone well."""
    code, out, error = run(*arguments, "--json")
    assert code == 0, error
    return json.loads(out)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def by_text(run: Run, folder: Path) -> dict[str, str]:
    return {row["text"]: row["id"] for row in told(run, "ls", folder)}


def fail_with(folder: Path, text: str, times: int) -> str:
    """Episodes that used one entry and failed, each beside a free one that did not; gives the id of
    the last.
    """
    with xp.ExperienceBank(folder) as bank:
        entry = next(entry for entry in bank if entry.text == text)
        trajectory = None
        for group in range(times):
            use = xp.Use(experience_id=entry.id, experience_version=entry.version, score=0.5)
            trajectory = xp.Trajectory(task="castle", group=str(group), success=False, uses=(use,))
            bank.record(trajectory)
            bank.record(
                xp.Trajectory(
                    task="castle", group=str(group), success=True, condition=xp.Condition.FREE
                )
            )
    assert trajectory is not None
    return trajectory.id


def test_why_tells_what_was_shown(folder: Path, run: Run) -> None:
    trajectory = fail_with(folder, TEXTS[1], 3)
    found = told(run, "why", folder, trajectory)
    assert found["success"] is False and found["shown"][0]["text"] == TEXTS[1]
    assert found["shown"][0]["uplift"]["mean"] == -1.0 and found["written"] == []
    out = run("why", folder, trajectory)[1]
    assert "failure" in out and "written from it" in out


def test_why_tells_what_a_judge_said_and_what_is_usual(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder) as bank:
        bank.record(xp.Trajectory(task="castle", score=2.0))
        bank.record(ended := xp.Trajectory(task="castle", score=5.0))
        bank.conclude(ended.id, False, judgement="The gate\x1b[2J stayed shut.")
    out = run("why", folder, ended.id)[1]
    assert "stayed shut." in out and "\x1b" not in out and "usual score" in out
    assert {"5.0", "2.0", "failure"} <= set(out.split())


def test_why_of_an_unknown_trajectory_is_a_user_error(folder: Path, run: Run) -> None:
    code, _, error = run("why", folder, "nobody")
    assert code == 2 and error.count("\n") == 1 and "nobody" in error


def test_history_lists_commits_and_those_of_one_entry(folder: Path, run: Run) -> None:
    id = by_text(run, folder)[TEXTS[1]]
    with xp.ExperienceBank(folder) as bank:
        bank.update(id, "Wait until the guard leaves.")
        bank.remove(id)
    log = told(run, "history", folder)
    assert [row["cause"] for row in log] == ["add", "add", "add", "update", "remove"]
    assert (
        set(log[0]) == {"id", "time", "author", "cause", "ref", "changes"}
        and log[0]["changes"] == 1
    )
    assert [row["id"] for row in told(run, "history", folder, "--limit", 2)] == [
        log[-2]["id"],
        log[-1]["id"],
    ]
    assert [(row["cause"], row["version"]) for row in told(run, "history", folder, id)] == [
        ("add", 1),
        ("update", 2),
        ("remove", None),
    ]
    assert " removed " in run("history", folder, id)[1]
    assert run("history", folder, "nobody")[0] == 2


def test_diff_has_old_and_new_text(folder: Path, run: Run) -> None:
    ids = by_text(run, folder)
    head = told(run, "history", folder)[-1]["id"]
    with xp.ExperienceBank(folder) as bank:
        bank.update(ids[TEXTS[0]], "The brass key opens the north door.")
        bank.remove(ids[TEXTS[1]])
        bank.add("Fourth.")
    rows = {row["what"]: row for row in told(run, "diff", folder, head)}
    assert (rows["changed"]["old"], rows["changed"]["new"]) == (
        TEXTS[0],
        "The brass key opens the north door.",
    )
    assert (rows["removed"]["old"], rows["removed"]["new"]) == (TEXTS[1], None)
    assert rows["added"]["new"] == "Fourth."
    assert len(told(run, "diff", folder, head, head + 1)) == 1
    assert run("diff", folder, 999)[0] == 2


# Changing


def test_rollback_shows_asks_and_goes_back(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = told(run, "history", folder)[0]["id"]
    before = journal_digest(folder)
    assert (
        len(told(run, "rollback", folder, first, "--dry-run")) == 2
        and journal_digest(folder) == before
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, error = run("rollback", folder, first)
    assert code == 2 and "--yes" in error
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    code, _, error = run("rollback", folder, first)
    assert code == 0 and "nothing was changed" in error and len(by_text(run, folder)) == 3
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert run("rollback", folder, first)[0] == 0
    assert set(by_text(run, folder)) == {TEXTS[0]}
    assert (
        len(told(run, "rollback", folder, first + 2, "--yes")) == 2
        and len(by_text(run, folder)) == 3
    )


def test_rollback_to_no_commit_is_a_user_error(folder: Path, run: Run) -> None:
    code, _, error = run("rollback", folder, 999, "--yes")
    assert code == 2 and "999" in error and error.count("\n") == 1


@pytest.mark.parametrize("bound", [("--score", 0.3), ("--uplift", -0.5)])
def test_prune_takes_out_what_did_not_help(
    folder: Path, run: Run, bound: tuple[str, float]
) -> None:
    fail_with(folder, TEXTS[2], 6)
    assert [row["text"] for row in told(run, "prune", folder, *bound, "--dry-run")] == [TEXTS[2]]
    assert told(run, "prune", folder, *bound, "--min-uses", 7, "--yes") == []
    assert len(by_text(run, folder)) == 3
    assert [row["text"] for row in told(run, "prune", folder, *bound, "--yes")] == [TEXTS[2]]
    assert set(by_text(run, folder)) == set(TEXTS[:2])


def test_prune_needs_a_bound(folder: Path, run: Run) -> None:
    code, _, error = run("prune", folder)
    assert code == 2 and "--score" in error and error.count("\n") == 1


def test_merge_without_a_model_merges_near_duplicates_and_says_so(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder) as bank:
        bank.add(TEXTS[0], task="castle")
    code, out, error = run("merge", folder, "--dry-run", "--json")
    assert code == 0 and len(json.loads(out)) == 1 and "no --model" in error
    assert len(told(run, "ls", folder)) == 4
    (row,) = told(run, "merge", folder)
    assert row["text"] == row["its text"] == TEXTS[0] and len(told(run, "ls", folder)) == 3


def test_merge_with_a_model_runs_one_pass(folder: Path, run: Run) -> None:
    """The bundled tiny model merges a copy in a dry run, and the bank itself without."""
    with xp.ExperienceBank(folder) as bank:
        bank.submit(xp.Trajectory(task="castle"))
    before = digests(folder)
    planned = told(run, "merge", folder, "--model", "tiny", "--dry-run")
    assert digests(folder) == before
    changed = told(run, "merge", folder, "--model", "tiny")
    assert [(row["what"], row["new"]) for row in changed] == [
        (row["what"], row["new"]) for row in planned
    ]
    assert "merge" in {row["cause"] for row in told(run, "history", folder)}
    with xp.ExperienceBank(folder, read_only=True) as bank:
        assert bank.queue.counts()["queued"] == 1, "it merges, and distils nothing"


def test_merge_with_an_unknown_model_is_a_user_error(folder: Path, run: Run) -> None:
    code, _, error = run("merge", folder, "--model", "tinny")
    assert code == 2 and error.count("\n") == 1


def test_import_makes_a_bank_and_adds_nothing_twice(folder: Path, run: Run, tmp_path: Path) -> None:
    run("export", folder, tmp_path / "bank.md")
    assert told(run, "import", tmp_path / "new", tmp_path / "bank.md", "--embedder", "hashing") == [
        {"added": 3, "entries": 3}
    ]
    assert told(run, "import", tmp_path / "new", tmp_path / "bank.md") == [
        {"added": 0, "entries": 3}
    ]
    assert run("import", folder, tmp_path / "none.jsonl")[0] == 2
    (tmp_path / "bank.md").write_text(
        (tmp_path / "bank.md").read_text().replace("red key", "blue key")
    )
    code, _, error = run("import", folder, tmp_path / "bank.md")
    assert code == 2 and error.count("\n") == 1
    assert told(run, "import", folder, tmp_path / "bank.md", "--edited")[0]["added"] == 1


@pytest.mark.parametrize(
    "command",
    [
        ("rollback", 0, "--yes"),
        ("prune", "--score", 0.5, "--yes"),
        ("merge",),
        ("rebuild", "--yes"),
    ],
)
def test_a_bank_that_another_process_writes_is_not_changed(
    folder: Path, run: Run, command: tuple[object, ...]
) -> None:
    with xp.ExperienceBank(folder):
        code, _, error = run(command[0], folder, *command[1:])
    assert code == 2 and "already open" in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["ls", "stats", "history", "doctor", "merge", "rebuild"])
def test_a_folder_without_a_bank_is_a_user_error(tmp_path: Path, run: Run, command: str) -> None:
    code, _, error = run(command, tmp_path)
    assert code == 2 and "journal.sqlite" in error and list(tmp_path.iterdir()) == []


# Doctor


def ill(run: Run, folder: Path) -> dict[str, dict[str, str]]:
    """What the doctor calls wrong, by what it looked at."""
    code, out, _ = run("doctor", folder, "--json")
    findings = {row["what"]: row for row in json.loads(out) if row["status"] == "wrong"}
    assert code == (1 if findings else 0)
    return findings


def test_doctor_finds_a_whole_bank_whole_and_changes_nothing(folder: Path, run: Run) -> None:
    before = digests(folder)
    assert ill(run, folder) == {}
    assert digests(folder) == before
    assert "integrity_check says ok" in run("doctor", folder)[1]


def test_doctor_says_who_writes_and_leaves_the_index_alone(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder):
        findings = {row["what"]: row for row in told(run, "doctor", folder)}
    assert findings["writer"]["status"] == "note" and "process" in findings["writer"]["found"]
    assert "default: index" not in findings and findings["journal"]["status"] == "ok"


def index_of(folder: Path) -> Any:
    digest = hashlib.sha256(b"default").hexdigest()[:16]
    return Replica(Site("chroma", f"experience-{digest}", folder / "chroma"))


def drop_one(folder: Path) -> None:
    index = index_of(folder)
    index.store._collection.delete(ids=index.store._collection.get()["ids"][:1])
    index.close()


def turn_one(folder: Path) -> None:
    index = index_of(folder)
    id = index.store._collection.get()["ids"][0]
    index.store._collection.update(ids=[id], embeddings=[[1.0] + [0.0] * 255])
    index.close()


def age_one(folder: Path) -> None:
    index = index_of(folder)
    id = index.store._collection.get()["ids"][0]
    index.store._collection.update(ids=[id], metadatas=[{"version": 9}])
    index.close()


def put_behind(folder: Path) -> None:
    index = index_of(folder)
    index.store._collection.modify(metadata={"mark": "1 of another journal"})
    index.close()


def garble(folder: Path) -> None:
    (folder / "chroma" / "chroma.sqlite3").write_bytes(b"no database" * 100)


def test_an_index_that_is_not_made_yet_is_no_fault(folder: Path, run: Run, tmp_path: Path) -> None:
    def index(bank: Path) -> dict[str, str]:
        return next(row for row in told(run, "doctor", bank) if row["what"] == "default: index")

    copy = tmp_path / "copy"
    assert run("backup", folder, copy)[0] == 0
    told(run, "purge", folder, next(iter(by_text(run, folder).values())), "--yes")
    for bank in (folder, copy):
        assert index(bank)["status"] == "note" and "no folder chroma" in index(bank)["found"]
    told(run, "add", folder, "Look behind the clock.")
    *_, command = index(copy)["mend"].partition("experiential bank ")
    told(run, *command.split(), "--yes")
    assert index(folder)["status"] == index(copy)["status"] == "ok"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (drop_one, "holds 2 entries, the journal 3"),
        (turn_one, "1 of 3 entries compared"),
        (age_one, "1 of 3 entries compared"),
        (put_behind, "at position 1, the journal at 3"),
        (garble, "cannot be opened"),
    ],
)
def test_doctor_finds_a_harmed_index_and_its_command_mends_it(
    folder: Path, run: Run, harm: Callable[[Path], None], says: str
) -> None:
    harm(folder)
    found = ill(run, folder)
    assert list(found) == ["default: index"] and says in found["default: index"]["found"]
    _, _, *command = found["default: index"]["mend"].split()
    assert command[0] == "rebuild"
    assert told(run, *command, "--yes") == [{"indexed": 3}]
    assert ill(run, folder) == {}


def test_doctor_finds_a_harmed_journal(folder: Path, run: Run) -> None:
    content = bytearray((folder / "journal.sqlite").read_bytes())
    for page in range(4096, len(content), 4096):
        content[page : page + 64] = b"\xff" * 64
    (folder / "journal.sqlite").write_bytes(content)
    assert "backup" in ill(run, folder)["journal"]["mend"]
    code, _, error = run("ls", folder)
    assert code in (1, 2) and error.count("\n") == 1


def test_doctor_counts_dead_letters_and_finds_lost_queue_items(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder) as bank:
        for name in ("dead", "lost"):
            bank.submit(xp.Trajectory(id=name, task="castle"))
        bank.queue.fail("dead", "timeout", last=True)
    findings = {row["what"]: row for row in told(run, "doctor", folder)}
    assert (
        findings["default: dead letters"]["status"] == "note"
        and "1 trajectories" in findings["default: dead letters"]["found"]
    )
    assert findings["default: queue"]["found"].startswith("1 queued")
    with sqlite3.connect(folder / "journal.sqlite") as connection:
        connection.execute("DELETE FROM trajectories WHERE id = 'lost'")
    connection.close()
    assert "1 without a recorded trajectory" in ill(run, folder)["default: queue"]["found"]


def test_doctor_looks_at_every_namespace(folder: Path, run: Run) -> None:
    with xp.ExperienceBank(folder, namespace="second one", embedder="hashing") as bank:
        bank.add("Elsewhere.")
    findings = {row["what"]: row["status"] for row in told(run, "doctor", folder)}
    assert findings["second one: index"] == findings["default: index"] == "ok"


def test_the_queue_of_a_served_bank_is_looked_at_and_mended_by_its_address(
    folder: Path, run: Run
) -> None:
    with serving(folder) as url:
        with xp.ExperienceBank(url) as bank:
            bank.submit(xp.Trajectory(id="a", task="task a"))
            bank.queue.fail("a", "BackendError: 401 wrong key", last=True)
        assert run("requeue", folder)[0] == 2, "another process writes the folder"
        assert [row["task"] for row in told(run, "dead-letters", url)] == ["task a"]
        assert told(run, "requeue", url, "a") == [{"queued": 1}]
        counts = json.loads(run("stats", url, "--json")[1])
        assert (counts["queued"], counts["dead letters"]) == (1, 0)
    code, _, error = run("stats", url)
    assert code == 2 and "experiential serve" in error


def test_dead_letters_are_listed_with_their_reason_and_put_back(folder: Path, run: Run) -> None:
    assert run("dead-letters", folder, "--json")[1].strip() == "[]"
    with xp.ExperienceBank(folder) as bank:
        for id in ("a", "b"):
            bank.submit(xp.Trajectory(id=id, task=f"task {id}"))
            bank.queue.fail(id, "BackendError: 401 wrong key", last=True)
    [first, second] = told(run, "dead-letters", folder)
    assert first == {
        "id": "a",
        "attempts": 1,
        "reason": "BackendError: 401 wrong key",
        "task": "task a",
    }
    assert second["id"] == "b"
    code, _, error = run("requeue", folder, "a", "nobody")
    assert code == 2 and "got 'nobody'" in error
    assert told(run, "requeue", folder, "b") == [{"queued": 1}]
    assert [row["id"] for row in told(run, "dead-letters", folder)] == ["a"]
    assert told(run, "requeue", folder) == [{"queued": 1}]
    with xp.ExperienceBank(folder, read_only=True) as bank:
        assert sorted(bank.queue.waiting()) == ["a", "b"]
