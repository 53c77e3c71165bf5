"""The log of played episodes: cut off anywhere, killed at any moment, claimed by one writer."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiential.errors import ConfigError
from experiential.evaluation.play_log import (
    BankChange,
    PlayedEpisode,
    PlayedTurn,
    PlayLog,
    Retrieved,
    read_log,
)
from experiential.llm.metered import Spent

SETTINGS = {"suite": "lake", "seed": 0, "tasks": ("a", "b")}


def episode(world: int, **more: Any) -> PlayedEpisode:
    """An episode with all that a log keeps of one."""
    turn = PlayedTurn(observation="Höhle 🕳", reply="I go.\n<action>Up</action>", action="Up")
    known: dict[str, Any] = {
        "task": "lake", "arm": "on", "world": world, "visit": 0, "task_id": f"lake-{world}",
        "success": True, "reward": 1.0, "turns": 1, "prompt_tokens": 12, "response_tokens": 3,
        "seconds": 0.5, "shown": 1, "transcript": (turn,), "end": "You won.",
        "retrieved": (Retrieved(turn=0, id="e1", text="Go up.", score=0.5),),
        "spent": Spent(requests=1, prompt_tokens=12, generated_tokens=3, cost=0.25),
    }  # fmt: skip
    return PlayedEpisode(**{**known, **more})


def test_what_is_appended_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    change = BankChange(task="lake", arm="on", entries=(0, 2), extractor=Spent(cost=0.5))
    with PlayLog(path, SETTINGS) as log:
        log.append(episode(1))
        log.append(change)
        log.append(episode(2, place={"order": 1}))
    assert [*read_log(path)] == [
        episode(1, time=log.episodes[episode(1).key].time),
        change,
        episode(2, place={"order": 1}, time=log.episodes["lake", "on", 2, 0, ("order", 1)].time),
    ]
    with PlayLog(path, SETTINGS) as log:
        assert log.finished == {("lake", "on", 1, 0), ("lake", "on", 2, 0, ("order", 1))}
        assert log.changes == [change]
        assert log.cost == 1.0  # two episodes at 0.25 and the extractor's 0.5
        assert log.spent["lake", "on"].tokens == 30
        assert log.episodes["lake", "on", 1, 0].transcript == ()


def test_a_technical_failure_is_played_again_and_what_it_took_still_counts(tmp_path: Path) -> None:
    with PlayLog(tmp_path / "log.jsonl", SETTINGS) as log:
        log.append(episode(1, success=False, error="backend: no answer", again=True))
        log.append(episode(2, success=False, error="backend: a refusal"))
        assert log.finished == {episode(2).key} and len(log.episodes) == 2
    with PlayLog(tmp_path / "log.jsonl", SETTINGS) as log:
        log.append(episode(1))
        assert log.finished == {episode(1).key, episode(2).key} and log.cost == 0.75
        assert log.episodes[episode(1).key].error is None


def test_cut_off_at_any_byte_the_whole_lines_are_kept_and_the_log_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with PlayLog(path, SETTINGS) as log:
        log.append(episode(1))
        log.append(episode(2))
    whole = path.read_bytes()
    ends = [number + 1 for number, byte in enumerate(whole) if byte == 10]
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        kept = max(0, sum(end <= size for end in ends) - 1)
        assert len([*read_log(path)]) == kept
        with PlayLog(path, SETTINGS) as log:
            assert len(log.episodes) == kept
            log.append(episode(3))
        assert [one.world for one in read_log(path) if isinstance(one, PlayedEpisode)] == [
            *range(1, kept + 1),
            3,
        ]


def test_other_settings_are_refused_unless_nothing_was_played(tmp_path: Path) -> None:
    path, other = tmp_path / "log.jsonl", {**SETTINGS, "seed": 1}
    PlayLog(path, SETTINGS).close()
    with PlayLog(path, other) as log:
        log.append(episode(1))
    with pytest.raises(ConfigError, match=r"got seed 1 and not 0; use another file"):
        PlayLog(path, SETTINGS, remedy="use another file")
    with PlayLog(path, SETTINGS, overwrite=True) as log:
        assert not log.episodes
    assert json.loads(path.read_text())["settings"]["seed"] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "got another file; remove it"),
        ('{"kind": "settings", "settings": {}}\n{"kind": "episode"}\n', "in line 2: "),
        ('{"kind": "settings", "settings": {}}\nnonsense\n', "in line 2: "),
    ],
)
def test_a_file_that_is_no_log_stays_as_it_is(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        PlayLog(path, {})
    assert path.read_text() == text


def test_a_second_writer_is_refused_until_the_first_is_done(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with PlayLog(path, SETTINGS) as log:
        log.append(episode(1))
        with pytest.raises(ConfigError, match="which another process is writing"):
            PlayLog(path, SETTINGS, overwrite=True)
        log.append(episode(2))
    with PlayLog(path, SETTINGS) as log:
        assert len(log.episodes) == 2


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "log.jsonl"
    with PlayLog(path, SETTINGS) as log:
        log.append(episode(1))

        def full(file: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("experiential.evaluation.play_log.os.fsync", full)
            with pytest.raises(ConfigError, match="No space left on device"):
                log.append(episode(2))
        log.append(episode(3))
    assert [one.world for one in read_log(path) if isinstance(one, PlayedEpisode)] == [1, 3]


WRITER = """
import sys
from pathlib import Path
from tests.test_play_log import SETTINGS, episode
from experiential.evaluation.play_log import PlayLog

with PlayLog(Path(sys.argv[1]), SETTINGS) as log:
    for world in range(len(log.episodes), 10**6):
        log.append(episode(world, end="x" * 50_000))
        print(world, flush=True)
"""


def test_a_killed_writer_loses_nothing_that_it_had_appended(tmp_path: Path) -> None:
    path, expected = tmp_path / "log.jsonl", 0
    for _ in range(3):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        for line in writer.stdout:
            expected = int(line) + 1
            if expected % 20 == 0:
                writer.send_signal(signal.SIGKILL)
                break
        writer.wait()
        said = [int(line) + 1 for line in writer.stdout]
        expected = max([expected, *said])
        found = [one.world for one in read_log(path) if isinstance(one, PlayedEpisode)]
        assert found == [*range(len(found))] and expected <= len(found) <= expected + 1
