"""Published layouts of FrozenLake and Sokoban, read from files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiential.envs.frozen_lake import FrozenLakeEnv, published_lake
from experiential.envs.sokoban import SokobanEnv
from experiential.errors import ConfigError
from experiential.evaluation.suites import find_suite

ROOM = ["######", "#@   #", "# $  #", "#    #", "#  . #", "######"]


def test_a_folder_holds_a_file_for_each_split(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"layout": ROOM, "index": 0}))
    env = SokobanEnv("eval", data=str(tmp_path))
    _, info = env.reset(options={"world": 0})
    assert env._layout(0).content == "/".join(ROOM)
    assert info["task_id"] == "sokoban-published-eval-0"
    done = False
    while not done:
        _, reward, done, _, info = env.step(env.oracle_action())
    assert reward == 1.0
    with pytest.raises(ConfigError, match=r"file of published layouts, got .*train.parquet"):
        SokobanEnv("train", data=str(tmp_path))


def test_a_lake_follows_from_seed_size_and_share(tmp_path: Path) -> None:
    rows = [{"seed": seed, "size": 5, "p": 0.7} for seed in range(40)]
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    env = FrozenLakeEnv("eval", data=str(tmp_path))
    lakes = [env._layout(world) for world in env.worlds]
    assert len(lakes) == 40 and lakes[7] == published_lake(7, 5, 0.7, 8)
    assert all(lake.path(lake.start) is not None for lake in lakes)
    # what ERL's own generator (microsoft/experiential_rl 20cd646) draws for these seeds
    assert [lake.content for lake in lakes[:2]] == [
        "FFFFH/HFHFH/HFHFG/FSFFF/FFFFF",
        "FHFSF/FHGFF/HFFHF/FFFFF/HFFHH",
    ]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"layout": ROOM[:-1]}, "square"),
        ({"layout": [*ROOM[:-1], "### ##"]}, "walls all around"),
        ({"seed": 1}, "layout"),
    ],
)
def test_a_bad_row_is_named(row: object, told: str, tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=rf"test.jsonl, got row 1 .*{told}"):
        SokobanEnv("eval", data=str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [({"sizes": (4, 4)}, "without sizes, got data="), ({"layouts": -1}, "layouts to be positive")],
)
def test_arguments_of_drawn_layouts_are_refused(
    arguments: dict[str, Any], told: str, tmp_path: Path
) -> None:
    (tmp_path / "test.jsonl").write_text(json.dumps({"layout": ROOM, "seed": 1, "size": 4, "p": 1}))
    for env in (SokobanEnv, FrozenLakeEnv):
        with pytest.raises(ConfigError, match=told):
            env("eval", data=str(tmp_path), **arguments)


def test_the_digest_is_of_every_published_layout(tmp_path: Path) -> None:
    digests: list[str] = []
    for last in (149, 150):
        rows = [{"seed": seed, "size": 5, "p": 0.7} for seed in (*range(149), last)]
        (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        digests.append(FrozenLakeEnv(data=str(tmp_path)).digest())
    assert digests[0] != digests[1]
    (tmp_path / "train.jsonl").write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="file of published layouts"):
        FrozenLakeEnv(data=str(tmp_path))


def test_the_official_suite_takes_all_hundred_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERL_DATA", str(tmp_path))
    suite = find_suite("frozenlake-published")
    with pytest.raises(
        ConfigError, match=r"FrozenLake-v0: run export ERL_DATA=FOLDER .*frozenlake"
    ):
        suite.ready()
    (tmp_path / "frozenlake").mkdir()
    file = tmp_path / "frozenlake" / "test.jsonl"
    rows = [json.dumps({"seed": seed, "size": 4, "p": 0.8}) for seed in range(100)]
    file.write_text("\n".join(rows))
    (facts,) = suite.ready()
    assert (facts.data, facts.worlds) == ("real", 100)
    file.write_text("\n".join(rows[:99]))
    with pytest.raises(ConfigError, match="Expected the 100 worlds"):
        suite.ready()
