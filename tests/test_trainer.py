"""The trainer end to end on a small random model: what it writes, what it never touches, and what
survives a kill.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.config import ActorSettings, EnvSettings, Experiment, OptimSettings
from experiential.errors import (
    BackendError,
    BankError,
    BankLockedError,
    CheckpointError,
    ExperientialError,
)
from experiential.evaluation.intervals import paired_difference, wilson
from experiential.evaluation.visits import Visits
from experiential.llm.base import Prompt, SamplingParams
from experiential.llm.transformers import TransformersLLM
from experiential.recipe import load_experiment
from experiential.rollout import Episode, TaskSource
from experiential.training.extractor_track import telling
from experiential.training.local import LocalRuntime
from experiential.training.metrics import read_events
from experiential.training.samples import actor_samples
from experiential.training.trainer import Trainer
from experiential.types import Condition, Generation, Trajectory, Turn
from tests.llm_tiny import tiny_random_model

SMALL = (
    "bank.embedder=hashing", "bank.retrieval.floor=0", "model.prompts=brief", "actor.groups=2",
    "actor.group_size=4", "run.steps=2",
    "eval.worlds=3", "eval.visits=2", "extractor.batch_size=2", "extractor.max_tokens=24",
    "env.train={split: train, worlds: 6}",
    "extractor.kl=0",
)  # fmt: skip


class Scribe(LocalRuntime):
    """A trainable policy whose free text is replaced by a valid lesson, so that a random model
    fills a bank.
    """

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """The model's own choice among actions; otherwise a lesson, with the model's
        log-probabilities.
        """
        if sampling is None or sampling.choices is None:
            text = '<answer>[{"op":"add","text":"Pull the jade lever of this vault."}]</answer>'
            sampling = (sampling or SamplingParams()).model_copy(
                update={"choices": (text,), "stop": ()}
            )
            made = await super().generate(prompt, sampling)
            return made.model_copy(
                update={"allowed": None, "logprobs": tuple(-1.0 for _ in made.response_ids)}
            )
        return await super().generate(prompt, sampling)


def policies(
    kind: type[LocalRuntime] = Scribe, lr: float = 1e-3
) -> tuple[LocalRuntime, LocalRuntime]:
    made: list[LocalRuntime] = []
    executor = None
    for name in ("actor", "extractor"):
        model, tokenizer = tiny_random_model()
        llm = TransformersLLM(model, tokenizer, executor=executor, name=name)
        executor = llm.executor
        made.append(kind(llm, OptimSettings(lr=lr), name=name))
    return made[0], made[1]


def experiment(recipe: str = "complementary", *overrides: str) -> Experiment:
    return load_experiment(recipe, [*SMALL, *overrides])


def digest(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }


def weights(policy: LocalRuntime) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.llm.model.parameters()])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    runtimes = policies()
    before = [weights(p).clone() for p in runtimes]
    seen: list[dict[str, Any]] = []
    settings = experiment(
        "complementary", "run.steps=5", "run.drain=true", "run.checkpoint_every=2"
    )
    summary = Trainer(settings, folder, observer=seen.append, runtimes=runtimes).run()
    yield {
        "folder": folder,
        "summary": summary,
        "events": seen,
        "before": before,
        "runtimes": runtimes,
    }
    for policy in runtimes:
        policy.close()


def test_weights_bank_loss_and_metrics_all_move(run: dict[str, Any]) -> None:
    for policy, before in zip(run["runtimes"], run["before"], strict=True):
        assert not torch.equal(weights(policy), before), policy.name
    steps = [e for e in run["events"] if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4, 5]
    assert steps[-1]["entries"] >= 1
    assert steps[-1]["extractor_updates"] >= 1
    assert any(e["actor_grad_norm"] > 0 for e in steps)
    assert all(e["step_s"] >= e["rollout_s"] > 0 for e in steps)


def test_every_event_is_in_the_metrics_file(run: dict[str, Any]) -> None:
    written = read_events(run["folder"] / "metrics.jsonl")
    assert [e["event"] for e in written] == [e["event"] for e in run["events"]]
    assert (written[-1]["event"], written[-1]["reason"]) == ("end", "steps")


def test_free_episodes_never_use_an_entry_and_guided_ones_do(run: dict[str, Any]) -> None:
    rows = [row for e in read_events(run["folder"] / "episodes.jsonl") for row in e["rows"]]
    assert sum(row["uses"] for row in rows if row["condition"] == "free") == 0
    assert sum(row["uses"] for row in rows if row["condition"] == "guided") > 0


def test_members_of_a_group_share_their_instance_and_split_in_halves(run: dict[str, Any]) -> None:
    for event in read_events(run["folder"] / "episodes.jsonl"):
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in event["rows"]:
            groups.setdefault(row["group"], []).append(row)
        for members in groups.values():
            assert len({row["instance"] for row in members}) == 1
            assert [row["condition"] for row in members] == ["guided", "guided", "free", "free"]


def test_evaluation_is_paired_and_leaves_the_training_bank_alone(run: dict[str, Any]) -> None:
    evals = [e for e in run["events"] if e["event"] == "eval"]
    assert [(e["step"], e["arm"]) for e in evals] == [(0, "off"), (0, "on"), (5, "off"), (5, "on")]
    assert all([v["episodes"] for v in e["visits"]] == [3, 3] for e in evals)
    folder = run["folder"] / "bank"
    before = digest(folder)
    with ExperienceBank(folder, read_only=True) as bank:
        assert all("eval" not in (entry.provenance.instance or "") for entry in bank.entries())
    assert digest(folder) == before


def test_trained_weights_are_exported_as_a_loadable_folder(run: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(run["folder"] / "actor")
    trained = run["runtimes"][0].llm.model
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), trained.parameters(), strict=True)
    )


def test_grpo_has_no_bank_and_all_episodes_are_free(tmp_path: Path) -> None:
    summary = Trainer(experiment("grpo"), tmp_path, runtimes=policies(LocalRuntime)).run()
    assert not (tmp_path / "bank").exists()
    assert {e["arm"] for e in summary["evaluations"]} == {"off"}
    rows = [row for e in read_events(tmp_path / "episodes.jsonl") for row in e["rows"]]
    assert {row["condition"] for row in rows} == {"free"}


def test_a_run_whose_time_is_over_says_so(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    settings = experiment("grpo", "run.minutes=1e-9", "eval.before=false", "eval.after=false")
    assert (
        Trainer(settings, tmp_path, observer=seen.append, runtimes=policies()).run()["steps"] == 0
    )
    [said] = [event["text"] for event in seen if event["event"] == "warning"]
    assert said == "stopped after step 0 of 2: run.minutes=1e-09 are over"
    assert (seen[0]["minutes"], seen[-1]["reason"]) == (1e-9, "minutes")
    assert read_events(tmp_path / "metrics.jsonl")[-1]["reason"] == "minutes"


def test_rollouts_may_run_ahead_of_updates_but_not_of_a_checkpoint(tmp_path: Path) -> None:
    settings = (
        "run.steps=4",
        "run.ahead=1",
        "run.checkpoint_every=3",
        "eval.before=false",
        "eval.after=false",
    )
    Trainer(experiment("grpo", *settings), tmp_path, runtimes=policies()).run()
    steps = [e for e in read_events(tmp_path / "metrics.jsonl") if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2, 3, 4]
    lag, versions = [e["actor_staleness"] for e in steps], [e["actor_version"] for e in steps]
    assert lag[0] == 0 and lag[3] == 0, (
        "the first step, and the one after the checkpoint, were played by the newest weights"
    )
    assert all(
        0 <= a <= new - old for a, old, new in zip(lag[1:3], versions, versions[1:], strict=False)
    ), "one step behind at most"


@pytest.mark.parametrize(("recipe", "still"), [("static-online", 1), ("exp-only", 0)])
def test_a_frozen_policy_keeps_its_weights(tmp_path: Path, recipe: str, still: int) -> None:
    runtimes = policies()
    before = [weights(p).clone() for p in runtimes]
    Trainer(
        experiment(
            recipe, "run.steps=3", "run.drain=true", "eval.before=false", "eval.after=false"
        ),
        tmp_path,
        runtimes=runtimes,
    ).run()
    assert torch.equal(weights(runtimes[still]), before[still])


@pytest.mark.parametrize(
    ("recipe", "guided", "opening"), [("history", 8, "Task: Open the"), ("template", 4, "Open the")]
)
def test_a_function_writes_what_the_actor_reads_about_the_same_task(
    tmp_path: Path, recipe: str, guided: int, opening: str
) -> None:
    settings = ("bank.retrieval.floor=-1", "bank.retrieval.k=2", "eval.before=false")
    # One world, met in both steps: the second reads what the first one left, two entries each.
    world = "env.train={split: train, worlds: 1}"
    chosen = (*settings, world, "actor.groups=1", "actor.group_size=8", "eval.after=false")
    own = policies()
    runtimes = (own[0], own[0])  # one policy: no model writes
    Trainer(experiment(recipe, *chosen), tmp_path, runtimes=runtimes).run()
    with ExperienceBank(tmp_path / "bank", embedder="hashing", read_only=True) as bank:
        texts = [entry.text for entry in bank.entries()]
    assert texts and all(text.startswith(opening) for text in texts)
    assert all(("Outcome:" in text) == (recipe == "history") for text in texts)
    rows = [e["rows"] for e in read_events(tmp_path / "episodes.jsonl")]
    assert sorted(row["uses"] for row in rows[1]) == [0] * (8 - guided) + [2] * guided


class Failing(LocalRuntime):
    """Fails every third request."""

    calls = 0

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """A response, or a failure."""
        self.calls += 1
        if self.calls % 3 == 0:
            raise BackendError("Expected an answer, got a broken pipe")
        return await super().generate(prompt, sampling)


def test_failing_episodes_are_counted_with_their_reason_and_end_nothing(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    Trainer(
        experiment(
            "complementary", "bank.options.retries=0", "eval.before=false", "eval.after=false"
        ),
        tmp_path,
        observer=seen.append,
        runtimes=policies(Failing),
    ).run()
    steps = [e for e in seen if e["event"] == "step"]
    assert len(steps) == 2
    assert sum(e["errors"] for e in steps) > 0
    rows = [row for e in read_events(tmp_path / "episodes.jsonl") for row in e["rows"]]
    assert any("broken pipe" in (row["error"] or "") for row in rows)


def test_a_failed_merge_ends_the_run_with_its_reason_and_not_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: ExperienceManager) -> int:
        raise BankError("Expected room to merge, got none")

    quiet = ("bank.merge_every=1", "run.drain=true", "eval.before=false", "eval.after=false")
    trainer = Trainer(experiment("complementary", *quiet), tmp_path, runtimes=policies())
    with monkeypatch.context() as patch:
        patch.setattr(ExperienceManager, "amerge", fail)
        with pytest.raises(BankError, match="room to merge"):
            trainer.run()
    assert trainer.run()["steps"] == 2


def test_resume_plays_the_same_next_batches(tmp_path: Path) -> None:
    """Stopped after two of four steps and resumed, a run plays the instances that an unbroken run
    plays.
    """

    def instances(folder: Path) -> list[list[str]]:
        return [
            [row["instance"] for row in e["rows"]] for e in read_events(folder / "episodes.jsonl")
        ]

    quiet = ("eval.before=false", "eval.after=false", "run.drain=true", "run.checkpoint_every=1")
    whole, part = tmp_path / "whole", tmp_path / "part"
    Trainer(experiment("complementary", *quiet, "run.steps=4"), whole, runtimes=policies()).run()
    Trainer(experiment("complementary", *quiet, "run.steps=2"), part, runtimes=policies()).run()
    first = policies()
    Trainer(
        experiment("complementary", *quiet, "run.steps=4"), part, resume=True, runtimes=first
    ).run()
    assert instances(part) == instances(whole)
    versions = [
        e["actor_version"] for e in read_events(part / "metrics.jsonl") if e["event"] == "step"
    ]
    assert len(versions) == 4
    assert versions == sorted(versions)
    assert versions[-1] == first[0].version > 0


def test_resume_needs_a_checkpoint_and_an_unlocked_bank(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found none"):
        Trainer(experiment(), tmp_path, resume=True, runtimes=policies())
    Trainer(
        experiment("complementary", "eval.before=false", "eval.after=false"),
        tmp_path,
        runtimes=policies(),
    ).run()
    with ExperienceBank(tmp_path / "bank") as bank:
        entries = len(bank)
        with pytest.raises(BankLockedError):
            Trainer(
                experiment("complementary", "run.steps=3"),
                tmp_path,
                resume=True,
                runtimes=policies(),
            ).run()
        assert len(bank) == entries
    # A kill while the bank is put back leaves a part of it.
    (tmp_path / "bank" / "journal.sqlite").unlink()
    again = experiment("complementary", "run.steps=3", "eval.before=false", "eval.after=false")
    Trainer(again, tmp_path, resume=True, runtimes=policies()).run()
    with ExperienceBank(tmp_path / "bank") as bank:
        assert not bank.damage


@pytest.mark.slow
def test_kill_at_any_moment_and_resume(tmp_path: Path) -> None:
    """kill -9 at seeded moments; every resume continues, and in the end all steps were played once,
    in order.
    """
    model, tokenizer = tiny_random_model()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    command = [
        sys.executable, "-m", "experiential.cli.train", "--recipe", "complementary", "--plain",
        "--output", str(tmp_path / "run"), *SMALL,
        f"model.name={tmp_path / 'model'}", "run.steps=24", "run.checkpoint_every=1",
        "eval.before=false", "eval.after=false",
    ]  # fmt: skip
    log = tmp_path / "run" / "episodes.jsonl"
    rng = np.random.default_rng(0)
    kills = 0
    for _ in range(12):
        played = log.read_bytes().count(b"\n") if log.exists() else 0
        resume = (
            ["--resume"] if list((tmp_path / "run").glob("checkpoints/step-*")) else ["--overwrite"]
        )
        process = subprocess.Popen(
            [*command, *resume],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        # Counted in steps, not seconds: a fast machine plays all 24 before a clock would kill.
        enough = played + int(rng.integers(0, 5))
        while process.poll() is None and kills < 5:
            if log.exists() and log.read_bytes().count(b"\n") > enough:
                time.sleep(rng.uniform(0, 0.1))
                process.send_signal(signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.01)
        _, errors = process.communicate()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
    assert process.returncode == 0
    assert kills == 5
    events = read_events(log)
    assert [e["step"] for e in events] == list(range(1, 25))
    expected = [
        task.seed for step in range(24) for task in TaskSource(EnvSettings(), 6, 0).tasks(step, 2)
    ]
    assert [row["seed"] for e in events for row in e["rows"][::4]] == expected


def test_actor_samples_carry_the_advantages_and_weights_of_equation_5() -> None:
    """Two guided (1, 0) and two free (1, 1) members: guided get +1 and -1 at weight 1/4, free get
    nothing.
    """
    made = Generation(text="a", prompt_ids=(1, 2), response_ids=(3,), logprobs=(-0.5,))
    members = [
        (Condition.GUIDED, 1.0),
        (Condition.GUIDED, 0.0),
        (Condition.FREE, 1.0),
        (Condition.FREE, 1.0),
    ]
    episodes = [
        Episode(Trajectory(task="t", group="g", condition=c, reward=r), (made,)) for c, r in members
    ]
    samples = actor_samples(episodes, ActorSettings())
    assert [s.advantages for s in samples] == [
        pytest.approx((1.0,), abs=1e-4),
        pytest.approx((-1.0,), abs=1e-4),
    ]
    assert [s.weight for s in samples] == [0.25, 0.25]
    pooled = actor_samples(episodes, ActorSettings(advantage="pooled"))
    assert [round(s.advantages[0], 3) for s in pooled] == [0.577, -1.732, 0.577, 0.577]


def test_worlds_change_by_schedule() -> None:
    changes = ({"step": 2, "worlds": 4, "changed": 2, "era": 1},)
    source = TaskSource(EnvSettings.model_validate({"changes": changes}), 4, seed=0)
    before = {t.options["world"]: t.options.get("era", 0) for t in source.tasks(1, 4)}
    after = {t.options["world"]: t.options.get("era", 0) for t in source.tasks(2, 4)}
    assert before == {0: 0, 1: 0, 2: 0, 3: 0}
    assert after == {0: 1, 1: 1, 2: 0, 3: 0}


def test_of_several_changes_at_one_step_the_last_counts() -> None:
    changes = ({"step": 2, "worlds": 2}, {"step": 2, "worlds": 4}, {"step": 0, "worlds": 1})
    source = TaskSource(EnvSettings.model_validate({"changes": changes}), 4, seed=0)
    assert [{t.options["world"] for t in source.tasks(step, 4)} for step in (1, 2)] == [
        {0},
        {0, 1, 2, 3},
    ]


def test_the_same_worlds_come_for_as_many_steps_as_visits_says_with_fresh_seeds() -> None:
    source = TaskSource(EnvSettings(visits=3), 100, seed=0)
    steps = [source.tasks(step, 4) for step in range(6)]
    worlds = [[t.options["world"] for t in tasks] for tasks in steps]
    assert worlds[0] == worlds[1] == worlds[2] != worlds[3] == worlds[4] == worlds[5]
    assert len({t.seed for tasks in steps for t in tasks}) == 24
    assert len({t.group for tasks in steps for t in tasks}) == 24


def test_chosen_episodes_of_a_group_differ_in_outcome_and_play() -> None:
    def played(group: str, action: str, success: bool | None, **more: Any) -> Trajectory:
        turns = (Turn(observation="Which?", action=action),)
        return Trajectory(task="t", group=group, turns=turns, success=success, **more)

    lost, again, won = (
        played("a", "red", False),
        played("a", "red", False),
        played("a", "tin", True),
    )
    late, other, failed = (
        played("a", "tin", True, condition=Condition.FREE),
        played("a", "jade", None),
        played("a", "oak", False, error="backend: gone"),
    )
    alone = played("b", "red", False)
    found = [lost, again, alone, won, late, other, failed]
    assert telling(found, 1) == [lost, alone]
    assert telling(found, 2) == [lost, won, alone]
    assert telling(found, 3) == [lost, won, other, alone]
    assert telling(found, 9) == [lost, won, other, alone]


def test_as_many_members_of_a_group_are_distilled_as_per_group_says(tmp_path: Path) -> None:
    runtimes = policies()
    overrides = ("run.steps=1", "extractor.per_group=1", "eval.before=false", "eval.after=false")
    Trainer(experiment("template", *overrides), tmp_path / "run", runtimes=runtimes).run()
    for policy in runtimes:
        policy.close()
    with ExperienceBank(tmp_path / "run" / "bank", read_only=True) as bank:
        entries = len(bank)
    [event] = read_events(tmp_path / "run" / "episodes.jsonl")
    assert len(event["rows"]) == 8
    assert entries == 2


def test_a_run_warns_of_answers_that_their_limit_cuts(tmp_path: Path) -> None:
    runtimes = policies(LocalRuntime)  # with random weights, which seldom end an answer
    small = (
        "run.steps=1", "run.drain=true", "eval.before=false", "eval.after=false",
        "actor.groups=4", "actor.group_size=8", "extractor.per_group=0", "extractor.max_tokens=4",
    )  # fmt: skip
    Trainer(experiment("complementary", *small), tmp_path, runtimes=runtimes).run()
    for policy in runtimes:
        policy.close()
    events = read_events(tmp_path / "metrics.jsonl")
    [step] = [event for event in events if event["event"] == "step"]
    assert step["cut"] > 8
    told = [event["text"] for event in events if event["event"] == "warning"]
    assert any("answers were cut at extractor.max_tokens (4)" in text for text in told)


def test_as_many_entries_of_a_task_stay_as_bank_keep_says(tmp_path: Path) -> None:
    left: dict[int, Counter[str | None]] = {}
    for keep in (0, 1):
        folder, runtimes = tmp_path / f"keep-{keep}", policies()
        overrides = ("run.steps=2", "run.drain=true", f"bank.keep={keep}", "env.visits=2")
        settings = experiment("template", *overrides, "eval.before=false", "eval.after=false")
        Trainer(settings, folder, runtimes=runtimes).run()
        with ExperienceBank(folder / "bank", read_only=True) as bank:
            left[keep] = Counter(entry.task for entry in bank)
            causes = [commit.cause for commit in bank.commits()]
        for policy in runtimes:
            policy.close()
    assert set(left[0]) == set(left[1]) and max(left[0].values()) > 1
    assert set(left[1].values()) == {1}
    assert causes[-1] == "evict"


def test_an_extractor_may_take_several_updates_in_a_step(tmp_path: Path) -> None:
    """Four guided episodes a step use at least two entries each step after the first: two batches
    of one.
    """
    seen: list[dict[str, Any]] = []
    overrides = (
        "extractor.batch_size=1",
        "extractor.updates_per_step=2",
        "extractor.kl=0.1",
        "extractor.max_lag=0",
        "run.drain=true",
    )
    settings = experiment(
        "complementary",
        *overrides,
        "run.steps=4",
        "eval.before=false",
        "eval.after=false",
        "env.visits=4",
    )
    with_reference = tuple(
        Scribe(p.llm, OptimSettings(), name=p.name, reference=True) for p in policies()
    )
    Trainer(settings, tmp_path, observer=seen.append, runtimes=with_reference).run()
    updates = [e["extractor_updates"] for e in seen if e["event"] == "step"]
    assert max(b - a for a, b in zip(updates, updates[1:], strict=False)) == 2


def test_intervals_by_hand() -> None:
    """Wilson for 8 of 10: centre (0.8 + 0.19207)/1.38415 = 0.7167, half width 0.2267."""
    interval = wilson(8, 10)
    assert (round(interval.low, 4), round(interval.high, 4)) == (0.4902, 0.9433)
    difference = paired_difference(np.array([1.0, 1.0, 1.0]), np.array([0.0, 0.0, 0.0]))
    # Newcombe: 1 - sqrt(2) z²/(3 + z²) = 1 - 1.41421 * 0.56150
    assert (difference.mean, round(difference.low, 4), difference.high) == (1.0, 0.2059, 1.0)
    bank = Visits(arm="on", step=1, outcomes=((False, True, True), (False, True, False)))
    free = Visits(arm="off", step=1, outcomes=((False, False, False), (True, False, False)))
    assert paired_difference(bank.later(), free.later()).mean == 0.75
    rates = [visit["successes"] / visit["episodes"] for visit in bank.event()["visits"]]
    assert rates == [0.0, 1.0, 0.5]


def test_a_metrics_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"event": "step", "step": 1}) + '\n{"event": "st')
    assert read_events(path) == [{"event": "step", "step": 1}]


async def test_in_a_running_loop_run_names_the_coroutine_which_trains(tmp_path: Path) -> None:
    settings = experiment("grpo", "eval.before=false", "eval.after=false")
    runtimes = policies()
    trainer = Trainer(settings, tmp_path / "run", runtimes=runtimes)
    with pytest.raises(ExperientialError, match=r"use `await trainer.arun\(\)`"):
        trainer.run()
    assert (await trainer.arun())["steps"] == 2
    for policy in runtimes:
        policy.close()
