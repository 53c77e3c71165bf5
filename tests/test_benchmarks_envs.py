"""The table of environments: real small measurements, what is kept of them, and rows that cannot be
measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from benchmarks import env_cost, env_play, env_table, envs
from benchmarks.env_rows import ROWS, Row, chosen
from experiential.envs import ENVS, random_agent
from experiential.envs.readiness import READINESS
from experiential.envs.vault import VaultEnv
from experiential.errors import ConfigError
from experiential.evaluation.suites import find_data

QUICK = ("--episodes", "6", "--memory-episodes", "6", "--tokenizer", "tiny")


def test_every_row_names_a_registered_environment_and_every_environment_has_a_row() -> None:
    assert {row.id for row in ROWS.values()} == set(ENVS)
    assert all(READINESS[row.id].variable for row in ROWS.values() if row.real)


def test_rows_are_chosen_by_name_or_first_word_and_another_name_is_refused() -> None:
    assert [row.name for row in chosen(["sokoban", "vault"])] == [
        "vault",
        "sokoban-erl",
        "sokoban-complementary",
        "sokoban-dialects",
    ]
    assert len(chosen(None)) == len(ROWS)
    with pytest.raises(ConfigError, match="Expected rows among vault"):
        chosen(["sok"])


def test_two_rows_are_measured_kept_and_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "envs.json"
    command = ["--envs", "sokoban-erl", "frozenlake-4x4", *QUICK, "--results", str(results)]
    assert envs.main(command) == 0
    found = json.loads(results.read_text())
    assert (
        list(found["rows"]) == ["frozenlake-4x4", "sokoban-erl"]
        and found["machine"]["versions"]["gymnasium"]
    )
    for row in found["rows"].values():
        parts = row["parts"]
        assert (
            parts["oracle"]["success"]["mean"] == 1.0
            and parts["oracle"]["episodes"] == 6
            and parts["oracle"]["failures"] == []
        )
        assert (
            parts["play"]["steps"] >= 6
            and parts["play"]["steps_per_second"]["cpu"] > 0
            and parts["play"]["tokens"]["mean"] > 10
        )
        assert parts["memory"]["episodes"] == 6 and parts["memory"]["resident_mib"] > 10
    table = results.with_suffix(".md").read_text()
    assert table.count("| 100 % [61, 100] of 6 | 1.000 [0.610, 1.000] |") == 2
    before = results.read_bytes()
    capsys.readouterr()
    assert envs.main(command) == 0
    assert capsys.readouterr().out.count("measured already") == 2 and results.read_bytes() == before


def test_another_number_of_episodes_measures_that_part_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "envs.json"
    command = ["--envs", "frozenlake-4x4", "--parts", "oracle", "--results", str(results)]
    assert envs.main([*command, "--oracle", "3"]) == 0
    assert (
        envs.main(
            [*command, "--oracle", "2", "--memory-episodes", "2", "--parts", "oracle", "memory"]
        )
        == 0
    )
    assert "measured memory, oracle" in capsys.readouterr().out
    parts = json.loads(results.read_text())["rows"]["frozenlake-4x4"]["parts"]
    assert (parts["oracle"]["episodes"], parts["memory"]["episodes"]) == (2, 2)


def test_a_row_without_its_data_says_what_to_do_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("SWE_TASKS", "EXPERIENTIAL_DATA"):
        monkeypatch.delenv(variable, raising=False)
    results = tmp_path / "envs.json"
    assert envs.main(["--envs", "swe-tasks", "--results", str(results)]) == 0
    assert (
        "* swe-tasks: not ready; run: export SWE_TASKS=FILE"
        in results.with_suffix(".md").read_text()
    )


def test_damaged_data_fails_its_row_with_the_reason_and_leaves_the_invented_world_alone(
    tmp_path: Path, monkeypatch: Any
) -> None:
    broken = tmp_path / "hotpot.json"
    broken.write_text("[{]")
    monkeypatch.setenv("HOTPOTQA_DATA", str(broken))
    results = tmp_path / "envs.json"
    assert (
        envs.main(
            ["--envs", "hotpotqa", "--parts", "oracle", "--oracle", "5", "--results", str(results)]
        )
        == 1
    )
    rows = json.loads(results.read_text())["rows"]
    assert (
        rows["hotpotqa-invented"]["parts"]["oracle"]["success"]["mean"] == 1.0
        and "reason" not in rows["hotpotqa-invented"]
    )
    assert str(broken) in rows["hotpotqa-real"]["reason"] and not rows["hotpotqa-real"]["parts"]


def test_a_process_that_dies_is_a_row_with_its_last_words(tmp_path: Path) -> None:
    options = envs.arguments().parse_args(["--results", str(tmp_path / "envs.json")])
    got = envs.run_row(Row("no-such-row", "experiential/Vault-v0"), {"oracle": 1}, options)
    assert got["reason"].startswith("exit code 1: KeyError: 'no-such-row'") and got["parts"] == {}


def test_wrong_arguments_and_other_files_end_with_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"rows": []}')
    assert envs.main(["--envs", "vault", "--results", str(other)]) == 2
    assert envs.main(["--envs", "nothing"]) == 2
    told = capsys.readouterr().err
    assert "Expected results of benchmarks.envs in" in told and "got 'nothing'" in told
    with pytest.raises(SystemExit, match="2"):
        envs.main(["--episodes", "0"])


class Leaking(VaultEnv):
    """Keeps 8 MiB of every episode: more than a process has free that lived before."""

    kept: list[bytearray]

    def reset(self, **arguments: Any) -> tuple[str, dict[str, Any]]:
        """Begin an episode."""
        self.kept = [*getattr(self, "kept", []), bytearray(os.urandom(8 << 20))]
        return super().reset(**arguments)


class RowOf(Row):
    """A row of an environment that is not registered."""

    def make(self) -> gym.Env[str, str]:
        """The environment."""
        return Leaking()


def test_growth_of_memory_is_seen_and_a_steady_environment_does_not_grow_so() -> None:
    assert (
        env_cost.memory(RowOf("leaking", "experiential/Vault-v0"), 40)["growth_mib_per_1000"] > 4000
    )
    assert env_cost.memory(ROWS["vault"], 40)["growth_mib_per_1000"] < 1000


def test_processor_time_of_worker_processes_counts() -> None:
    clock = env_cost.Clock()
    with clock:
        subprocess.run(
            [sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True
        )
    assert clock.cpu[0] >= 0.25 and clock.wall[0] > 0


def test_an_episode_that_raises_is_a_failure_with_the_reason() -> None:
    env = ROWS["vault"].make()
    outcome = env_play.play(env, lambda observation, info: 1 / 0, seed=0, world=0)  # type: ignore[arg-type,return-value]
    assert not outcome.success and outcome.reason == "ZeroDivisionError: division by zero"
    told = env_play.summary([outcome, env_play.play(env, env_play.oracle(env), 0, 1)], reasons=True)
    assert (told["episodes"], told["failed"], told["success"]["mean"], told["reward"]["mean"]) == (
        2,
        1,
        0.5,
        0.5,
    )


def test_the_random_agent_draws_what_is_admissible_and_else_what_the_row_names() -> None:
    env = ROWS["vault"].make()
    agent = random_agent(env, seed=1, actions=("look",))
    assert {agent("", {"admissible": ["a", "b"]}) for _ in range(50)} == {"a", "b"}
    assert agent("", {}) == "look" and isinstance(random_agent(env, seed=1)("", {}), str)


def test_the_table_tells_failures_of_the_oracle() -> None:
    outcomes = [
        env_play.Outcome(0, "w-0", 0.0, False, 40, "truncated after 40 turns with reward 0"),
        env_play.Outcome(1, "w-1", 1.0, True, 3),
    ]
    text = env_table.markdown(
        {
            "machine": envs.machine(),
            "rows": {"vault": {"parts": {"oracle": env_play.summary(outcomes, reasons=True)}}},
        }
    )
    assert (
        "* vault: 1 of 2, among them w-0: truncated after 40 turns with reward 0" in text
        and "50 % [9.5, 90.5] of 2" in text
    )


def test_one_folder_stands_for_the_variables_of_all_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "alfworld").mkdir()
    (tmp_path / "hotpotqa").mkdir()
    (tmp_path / "hotpotqa" / "dev.json").write_text("[]")
    monkeypatch.setenv("EXPERIENTIAL_DATA", str(tmp_path))
    for variable in ("ALFWORLD_DATA", "HOTPOTQA_DATA", "SWE_TASKS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WEBSHOP_DATA", "elsewhere")
    find_data()
    found = {
        name: os.environ.get(name)
        for name in ("ALFWORLD_DATA", "WEBSHOP_DATA", "HOTPOTQA_DATA", "SWE_TASKS")
    }
    for variable in ("ALFWORLD_DATA", "HOTPOTQA_DATA"):
        os.environ.pop(variable)
    assert found["ALFWORLD_DATA"] == str(tmp_path / "alfworld") and found["HOTPOTQA_DATA"] == str(
        tmp_path / "hotpotqa" / "dev.json"
    )
    assert found["WEBSHOP_DATA"] == "elsewhere" and found["SWE_TASKS"] is None


@pytest.mark.parametrize("name", ["minihack-room", "minihack-maze"])
def test_a_level_is_measured_beside_the_raw_game(name: str) -> None:
    pytest.importorskip("minihack", reason="needs the extra minihack")
    found = env_cost.beside_raw(ROWS[name], 2)
    assert found["words"]["cpu"] > 0 and found["ratio"]["cpu"] == pytest.approx(
        found["words"]["cpu"] / found["raw"]["cpu"]
    )


@pytest.mark.parametrize(
    ("name", "package"), [("alfworld-valid-seen", "alfworld"), ("webshop-real", "thefuzz")]
)
def test_the_oracle_wins_on_real_data(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package, reason=f"needs the extra of {name}")
    variable = READINESS[ROWS[name].id].variable
    if not os.environ.get("EXPERIENTIAL_DATA"):
        pytest.skip("needs real data: EXPERIENTIAL_DATA names no folder with it")
    monkeypatch.setenv(variable, "")  # importing alfworld sets its own
    find_data()
    if ROWS[name].missing():
        pytest.skip(f"needs real data: EXPERIENTIAL_DATA holds none for {variable}")
    env = ROWS[name].make()
    outcomes = env_play.play_oracle(env, env_play.spread(env_play.worlds_of(env), 2))
    env.close()
    assert [outcome.success for outcome in outcomes] == [True, True], outcomes


def test_a_reward_that_is_the_same_in_every_episode_has_an_interval() -> None:
    outcomes = [env_play.Outcome(world, f"w-{world}", 1.0, True, 3) for world in range(8)]
    told = env_play.summary(outcomes)
    assert told["reward"] == pytest.approx(told["success"])  # Wilson, 8 of 8
