"""What the benchmarks compute from what they measured, by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from benchmarks import accelerator, adaptation, bank, extractor_uplift, headroom, overhead, study
from experiential.bank.bank import ExperienceBank
from experiential.types import Add, Distillation, ParsedOperations, Trajectory


def records(after: float) -> list[dict[str, Any]]:
    """Two steps of 64 episodes between three evaluations with the bank; the last one succeeds on ``after`` of the later visits."""
    outcomes = [[0, int(i < 10 * after)] for i in range(10)]
    return [
        {"event": "eval", "step": 0, "arm": "bank", "outcomes": [[1, 0]] * 10},
        {"event": "step", "step": 1, "episodes": 64},
        {"event": "eval", "step": 1, "arm": "bank", "outcomes": [[0, 1], [0, 0]] * 5},
        {"event": "eval", "step": 1, "arm": "free", "outcomes": [[1, 1]] * 10},
        {"event": "step", "step": 2, "episodes": 60},
        {"event": "eval", "step": 2, "arm": "bank", "outcomes": outcomes},
    ]


def test_a_curve_counts_training_episodes_and_leaves_the_first_visit_out() -> None:
    assert study.curve(records(0.8), "bank") == [(0, 0.0), (64, 0.5), (124, 0.8)]
    assert study.curve(records(0.8), "free") == [(64, 1.0)]
    assert study.episodes_to_target([(0, 0.0), (64, 0.5), (124, 0.8)], 0.8) == 124
    assert study.episodes_to_target([(0, 0.0), (64, 0.5)], 0.8) is None


def test_the_study_reads_runs_that_are_done_and_writes_table_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "ENVIRONMENTS", {"vault": []})
    for seed, after in enumerate((0.8, 0.6)):
        folder = tmp_path / "runs" / "vault" / "complementary" / f"seed-{seed}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records(after))))
        (folder / "done").touch()
    unfinished = tmp_path / "runs" / "vault" / "complementary" / "seed-2"
    unfinished.mkdir()
    rows = study.summarise(tmp_path / "runs")
    row = next(r for r in rows if r["arm"] == "bank")
    assert (row["seeds"], row["before"], row["after"]) == (2, 0.0, pytest.approx(0.7))
    assert (row["low"], row["high"]) == (pytest.approx(0.6), pytest.approx(0.8))
    assert (row["reached_50"], row["episodes_to_50"], row["reached_80"], row["episodes_to_80"]) == (2, 64.0, 1, 124.0)
    study.table(tmp_path / "runs", tmp_path / "results")
    text = (tmp_path / "results" / "table.md").read_text()
    assert "| vault | complementary | with | 0.000 | 0.700 [0.600, 0.800] | 64 (2 of 2) | 124 (1 of 2) |" in text
    assert (tmp_path / "results" / "curves.png").stat().st_size > 1000


def test_every_run_of_the_study_is_a_command_with_its_own_seed_and_folder(tmp_path: Path) -> None:
    made = list(study.commands(tmp_path, seeds=2))
    assert len(made) == len(study.ENVIRONMENTS) * len(study.RECIPES) * 2 == len({folder for folder, _ in made})
    assert all(command[command.index("--seed") + 1] == folder.name.removeprefix("seed-") for folder, command in made)


def test_the_way_told_is_the_way_of_the_layout_on_the_board(tmp_path: Path) -> None:
    env: Any = gym.make("experiential/FrozenLake-v0", preset="4x4", disable_env_checker=True).unwrapped
    _, info = env.reset(seed=0)
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as kept:
        told = {kind: headroom.advice(kind, env, info["task"], kept) for kind in headroom.KINDS}
        assert told["nothing"] is None and told["bank"] is None and "P" in str(told["rules"])
        for move in str(told["way"]).removeprefix("Go ").rstrip(".").split(", then "):
            _, reward, *_ = env.step(move)
        assert reward == 1.0
        kept.add("Keep left.")
        assert headroom.advice("bank", env, "Keep left.", kept) == "Keep left."


def test_advice_without_a_bank_is_another_lesson_each_time() -> None:
    handed = overhead.Handed()
    assert [handed.search("?")[0].experience.text for _ in range(3)] == overhead.LESSONS[:3]


def test_the_overhead_is_the_ratio_of_medians() -> None:
    found = overhead.ratio({"with": [1.1, 1.1, 9.0], "without": [1.0, 1.0, 1.0]})
    assert found["median"] == pytest.approx(1.1) and found["low"] == pytest.approx(1.1) and found["high"] == pytest.approx(9.0)


def test_adaptation_follows_the_changed_worlds_only(tmp_path: Path) -> None:
    def row(world: str, era: int, condition: str, success: bool) -> dict[str, Any]:
        return {"task_id": world, "instance": f"{world}-{era}#5", "condition": condition, "success": success, "error": None}

    lines = [
        {"step": 1, "rows": [row("a", 0, "guided", False)]},
        {"step": 2, "rows": [row("a", 0, "guided", True), row("a", 0, "free", True), row("b", 0, "guided", False)]},
        {"step": 3, "rows": [row("a", 1, "guided", False), row("a", 1, "free", False), row("b", 0, "free", True)]},
        {"step": 4, "rows": [row("a", 1, "guided", True), row("a", 1, "free", False), row("c", 1, "free", True)]},
    ]
    (tmp_path / "episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert adaptation.by_visit(tmp_path) == {"guided": [0.0, 1.0], "free": [0.0, 0.5]}


def test_early_and_late_entries_are_those_of_the_first_and_last_fifth_in_their_first_version(tmp_path: Path) -> None:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as store:
        store.add("by hand", task="t")
        for i in range(10):
            trajectory = Trajectory(task=f"task {i}")
            store.apply(Distillation(parsed=ParsedOperations(operations=(Add(text=f"lesson {i}"),))), trajectory=trajectory, shown=[])
        first = next(entry for entry in store.entries() if entry.text == "lesson 0")
        store.update(first.id, "changed later")
        assert {e.text for e in extractor_uplift.written(store, early=True, count=9, seed=0)} == {"lesson 0", "lesson 1"}
        assert {e.text for e in extractor_uplift.written(store, early=False, count=9, seed=0)} == {"lesson 8", "lesson 9"}


def test_the_bank_benchmark_runs_small_and_its_arms_find_the_same(tmp_path: Path) -> None:
    found = bank.search(300, tmp_path / "search")
    assert found["memory_bytes_per_entry"] >= 0 and found["disk_bytes_per_entry"] > 4 * bank.DIMENSION
    assert all(seconds > 0 for seconds in found["seconds"].values())
    lookup = bank.Lookup(40)
    _, exact = bank.exact_search(lookup.table[:30], lookup.table[30:])
    result: Any = exact()
    rows = result[1] if isinstance(result, tuple) else result
    expected = np.argsort(-(lookup.table[30:] @ lookup.table[:30].T), axis=1)[:, : bank.HITS]
    assert [set(map(int, row)) for row in rows] == [set(map(int, row)) for row in expected]


async def test_the_accelerator_table_counts_operations_and_measures_both_phases() -> None:
    assert accelerator.operations(10, 3, update=False, adapter=False) == 60
    assert (
        accelerator.operations(10, 3, update=True, adapter=False) == 180 and accelerator.operations(10, 3, update=True, adapter=True) == 120
    )
    small = [
        "--model",
        "tiny",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--sequences",
        "2",
        "--prompt",
        "8",
        "--tokens",
        "2",
        "--rounds",
        "1",
    ]
    found = await accelerator.measure(accelerator.parser().parse_args(small))
    for phase in ("rollout", "update"):
        assert found[phase]["tokens_per_s"] > 0 and 0 < found[phase]["share_of_ceiling"] < 1
    assert found["parameters"] > 1e6 and found["memory_gb"] > 0
