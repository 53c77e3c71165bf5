"""Use elsewhere what a run has trained: exported, opened, played, and equal to its evaluation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch
import yaml
from safetensors import torch as safetensors_torch
from transformers import AutoModelForCausalLM

import experiential as xp
from experiential.cli import main, train
from experiential.cli.errors import run_app
from experiential.envs.text_env import UnicodeText
from experiential.llm.models import adapter_and_base, bundled_id, load_model
from experiential.trained import TrainedAgent
from experiential.training.metrics import read_events
from experiential.training.roles import prompt_set_name
from tests.llm_tiny import tiny_random_model

SMALL = (
    "run.steps=1 run.drain=true run.trackers=[] run.minutes=null eval.before=false eval.after=false"
    " actor.groups=2 actor.group_size=2 actor.optim.lr=0.01 bank.embedder=hashing"
    " bank.retrieval.floor=-1 eval.worlds=4 eval.visits=2 model.threads=1"
).split()
ELSEWHERE = """
import json, sys
import experiential as xp

with xp.load_agent(sys.argv[1]) as agent:
    played = [agent.play(seed=seed) for seed in (1, 2)]
    text = {one.text for one in agent.bank}
    print(json.dumps([[turn.action for one in played for turn in one.turns], len(text)]))
    assert agent.extractor.distill(played[0]).generation.text
"""


def trained(folder: Path, *overrides: str) -> Path:
    assert run_app(train.app, [*SMALL, *overrides, "--output", str(folder), "--plain"]) == 0
    return folder


def command(*arguments: object) -> int:
    return run_app(main.app, [str(one) for one in arguments])


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "full")


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("runs") / "lora", "model.lora.rank=4")


def plain_model(folder: Path) -> Any:
    """Load a model as a user of transformers does."""
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder)


def elsewhere(folder: Path, home: Path) -> Any:
    """Open a folder in a fresh process of another user, in another working directory."""
    home.mkdir()
    package = Path(xp.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, folder.name],
        cwd=folder.parent,
        env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": "", "PYTHONPATH": str(package)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_export_is_played_under_another_home_without_the_run(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(request.getfixturevalue(kind), run)
    with xp.load_agent(run) as agent:
        played = [turn.action for seed in (1, 2) for turn in agent.play(seed=seed).turns]
        entries = len({one.text for one in agent.bank or ()})
    assert command("export", run, "--to", tmp_path / "there" / "model") == 0
    run.rename(tmp_path / "away")
    assert elsewhere(tmp_path / "there" / "model", tmp_path / "home") == [played, entries]
    assert entries
    written = [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
    here = (str(tmp_path).encode(), str(Path(xp.__file__).parent).encode())
    assert [path for path in written if any(one in path.read_bytes() for one in here)] == []


@pytest.mark.parametrize("role", ["actor", "extractor"])
def test_merged_weights_are_those_of_the_adapter_over_its_base(
    role: str, lora: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(lora, run)
    file = run / role / "adapter_model.safetensors"
    files: Any = safetensors_torch
    weights = files.load_file(file)  # a step leaves them too near to none for a comparison
    files.save_file({name: weight + 0.05 for name, weight in weights.items()}, file)
    assert command("export", run, "--to", tmp_path / "plain") == 0
    assert command("export", run, "--to", tmp_path / "merged", "--merge") == 0
    adapted, tokenizer = load_model(
        xp.Experiment().model.model_copy(update={"name": str(tmp_path / "plain" / role)}),
        merge=False,
    )
    base, _ = load_model(xp.Experiment().model)
    merged = plain_model(tmp_path / "merged" / role)
    ids = tokenizer("Open the vault of Iron Mill. pull red", return_tensors="pt").input_ids
    with torch.no_grad():
        wanted, got, untrained = (model(ids).logits for model in (adapted, merged, base))
    assert torch.allclose(wanted, got, atol=1e-4)
    assert not torch.allclose(untrained, got, atol=1e-3)
    assert not (tmp_path / "merged" / role / "adapter_config.json").exists()


def outcomes(folder: Path, arm: str) -> list[str]:
    """Return the outcomes of an evaluation's cell: a text of 0 and 1 for each world."""
    (cell,) = (folder / "cells").glob(f"*-{arm}.json")
    return json.loads(cell.read_text())["outcomes"]


def played_outcomes(agent: TrainedAgent, worlds: int, visits: int, *, free: bool) -> list[str]:
    """Play the same episodes one after the other through the agent."""
    digits: dict[int, str] = {}
    for task in islice(agent.held_out(), worlds * visits):
        won = agent.play(seed=task.seed, options=task.options, free=free).success
        digits[task.options["world"]] = digits.get(task.options["world"], "") + str(int(bool(won)))
    return [digits[world] for world in range(worlds)]


def agreement(run: Path, tmp_path: Path, settings: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Count, by arm, the episodes that an export ends as ``experiential eval`` does, and all."""
    evaluated = tmp_path / "evaluation"
    arms = ("--arms", "off,frozen")
    assert command("eval", run, *settings, *arms, "--output", evaluated, "--plain") == 0
    assert command("export", run, "--to", tmp_path / "export") == 0
    found: dict[str, tuple[int, int]] = {}
    for arm in ("off", "frozen"):
        wanted = outcomes(evaluated, arm)
        with xp.load_agent(tmp_path / "export", overrides=settings) as agent:
            got = played_outcomes(agent, len(wanted), len(wanted[0]), free=arm == "off")
        assert {"0", "1"} == {*"".join(wanted)}, "an arm of equal outcomes compares nothing"
        pairs = list(zip("".join(wanted), "".join(got), strict=True))
        found[arm] = (sum(one == other for one, other in pairs), len(pairs))
    return found


def test_an_export_ends_its_episodes_as_the_evaluation_does(full: Path, tmp_path: Path) -> None:
    found = agreement(full, tmp_path, ["eval.worlds=8", "eval.visits=2"])
    assert found == {"off": (16, 16), "frozen": (16, 16)}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), ("model.lora.rank=4",)], ids=["full", "lora"])
def test_forty_worlds_end_as_in_the_evaluation(lora: tuple[str, ...], tmp_path: Path) -> None:
    settings = ["run.steps=6", "actor.groups=4", "actor.group_size=4", "actor.optim.lr=0.0003"]
    default = ["bank.embedder=null", "bank.retrieval.floor=0.3"]
    run = trained(tmp_path / "run", *settings, *default, *lora)
    found = agreement(run, tmp_path, ["eval.worlds=40", "eval.visits=1"])
    assert found == {"off": (40, 40), "frozen": (40, 40)}


@pytest.mark.parametrize("reason", [None, "interrupted", "budget"])
def test_the_newest_checkpoint_is_exported_of_a_run_that_was_stopped(
    reason: str | None, full: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    events = [one for one in read_events(run / "metrics.jsonl") if one["event"] != "end"]
    if reason is not None:  # else the process was killed
        events.append({"event": "end", "step": 1, "reason": reason})
    (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events))
    (run / "actor" / "model.safetensors").write_bytes(b"of an earlier end")
    shutil.rmtree(run / "extractor")
    assert command("export", run, "--to", tmp_path / "to") == 0
    for role in ("actor", "extractor"):
        wanted, got = (plain_model(one / role) for one in (full, tmp_path / "to"))
        pairs = zip(wanted.parameters(), got.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


def test_the_card_has_the_figures_of_the_run(full: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    extra = [
        {"event": "eval", "step": step, "arm": "on", "outcomes": [[1, 1]], "visits": [
            {"visit": 1, "successes": 8, "episodes": 40},
            {"visit": 2, "successes": won, "episodes": 40},
        ]}
        for step, won in ((0, 10), (1, 30))
    ]  # fmt: skip
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(one) + "\n" for one in extra)
    arms = ("--arms", "off", "eval.visits=1", "--output", run / "evaluation", "--plain")
    assert command("eval", run, *arms) == 0
    assert command("export", run, "--to", tmp_path / "to") == 0
    text = (tmp_path / "to" / "README.md").read_text()
    front = yaml.safe_load(text.split("---")[1])
    assert (front["base_model"], front["library_name"]) == ("tiny", "transformers")
    assert "1 steps, 4 episodes, seed 0." in text
    assert "| 2 | 25 % [14, 40] | 75 % [60, 86] |" in text
    assert "arm: off; seeds: 1" in text
    assert all((tmp_path / "to" / role / "README.md").is_file() for role in ("actor", "extractor"))


def test_no_run_has_the_blank_card_of_peft(lora: Path) -> None:
    assert not (lora / "actor" / "README.md").exists()


@pytest.mark.parametrize("damage", ["config", "checkpoint", "weights"])
def test_what_holds_nothing_trained_is_refused_in_one_line(
    damage: str, full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(full, run)
    if damage == "config":
        (run / "config.yaml").unlink()
    elif damage == "weights":
        shutil.rmtree(run / "actor")
    else:
        shutil.rmtree(run / "checkpoints")
        (run / "metrics.jsonl").unlink()
    capsys.readouterr()
    assert command("export", run, "--to", tmp_path / "to") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: Expected ") and str(run) in line
    assert not (tmp_path / "to").exists()


def test_a_folder_with_something_in_it_is_left_alone(
    full: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("kept")
    capsys.readouterr()
    assert command("export", full, "--to", tmp_path) == 2
    assert "Expected an empty or new folder for --to" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_adapter_over_a_folder_of_this_machine_needs_to_be_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in tiny_random_model():
        part.save_pretrained(tmp_path / "base")
    name = f"model.name={tmp_path / 'base'}"
    run = trained(tmp_path / "run", name, "model.lora.rank=2", "extractor.enabled=false")
    capsys.readouterr()
    assert command("export", run, "--to", tmp_path / "to") == 2
    assert "use --merge" in capsys.readouterr().err
    assert not (tmp_path / "to").exists()
    assert command("export", run, "--to", tmp_path / "to", "--merge") == 0
    (tmp_path / "base").rename(tmp_path / "gone")
    with xp.load_agent(tmp_path / "to") as agent, xp.load_agent(run, llm=agent.actor.llm) as other:
        assert agent.bank is None and agent.extractor is None
        assert agent.actor.prompts == other.actor.prompts
        assert agent.play(seed=1).turns == other.play(seed=1).turns


def test_an_adapter_is_not_put_over_other_weights_of_the_bundled_model(
    lora: Path, tmp_path: Path
) -> None:
    assert command("export", lora, "--to", tmp_path / "to") == 0
    file = tmp_path / "to" / "actor" / "adapter_config.json"
    settings = json.loads(file.read_text())
    assert settings["base_model_name_or_path"] == bundled_id("tiny")
    assert adapter_and_base(str(file.parent))[1] == "tiny"
    file.write_text(json.dumps(settings | {"base_model_name_or_path": "tiny-00000000"}))
    with pytest.raises(xp.ModelNotFoundError, match="Expected the base tiny-00000000"):
        xp.load_agent(tmp_path / "to")


def test_playing_leaves_the_bank_as_it_is_unless_it_may_write(full: Path, tmp_path: Path) -> None:
    assert command("export", full, "--to", tmp_path / "to") == 0
    journal = tmp_path / "to" / "bank" / "journal.sqlite"
    before = journal.read_bytes()
    with xp.load_agent(tmp_path / "to") as agent:
        assert agent.play(seed=1).uses
        assert not agent.play(seed=1, free=True).uses
        with pytest.raises(xp.ReadOnlyBankError):
            assert agent.bank is not None and agent.bank.add("Pull twice.")
    assert journal.read_bytes() == before
    with xp.load_agent(tmp_path / "to", write=True) as agent:
        assert agent.bank is not None
        head = agent.bank.head
        agent.play(seed=1)
    with xp.ExperienceBank(tmp_path / "to" / "bank", read_only=True) as bank:
        assert bank.head > head


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_trained_extractor_distils_elsewhere_as_it_was_trained(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run = request.getfixturevalue(kind)
    with xp.load_agent(run) as agent:
        played = [agent.play(seed=seed) for seed in range(6)]
        assert agent.extractor is not None
        taught = [agent.extractor.distill(one) for one in played]  # type: ignore[attr-defined]
    with xp.ExperienceBank(tmp_path, embedder="hashing") as bank:
        for one in played:
            bank.submit(one)
    assert command("distil", tmp_path, "--model", run / "extractor", "--until-empty") == 0
    wanted = {one.generation.prompt_ids: one.generation for one in taught}
    with xp.ExperienceBank(tmp_path, read_only=True) as bank:
        answers = [bank.generation(one.provenance.generation or "") for one in bank]
    assert answers
    for one in answers:
        assert one is not None and one.response_ids == wanted[one.prompt_ids].response_ids


def test_models_of_a_run_keep_its_prompts_unless_others_are_named(full: Path) -> None:
    for role in ("actor", "extractor"):
        model = xp.Experiment().model.model_copy(update={"name": str(full / role)})
        assert prompt_set_name(model) == "brief"
        assert prompt_set_name(model.model_copy(update={"prompts": "full"})) == "full"


def test_an_environment_of_ones_own_is_wrapped_in_one_line(full: Path) -> None:
    with xp.load_agent(full) as agent:
        env = agent.wrap(Noisy())
        observation, info = env.reset(seed=3)
        assert info["experience"] and agent.actor.act(observation, info) in info["admissible"]
        assert agent.wrap(Noisy(), free=True).reset(seed=3)[1]["experience"] == []
        assert agent.play(Noisy(), seed=3).turns


def test_a_critic_reviews_advice_as_in_training(full: Path) -> None:
    for settings, judged in (([], False), (["methods.critic={}"], True)):
        with xp.load_agent(full, overrides=settings) as agent:
            uses = agent.play(seed=1).uses
        assert uses and all((use.verdict is not None) == judged for use in uses)


class Noisy(gym.Env[str, str]):
    """Say control sequences of a terminal, for one turn."""

    observation_space = action_space = UnicodeText()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        return "\x1b[2J\x9b31mA quiet room.\r\x07", {"task": "Wait.", "admissible": ["wait", "go"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "\x1b[2JDone.", 1.0, True, False, {"success": True}


def test_play_shows_turns_and_marks_advice(full: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert command("play", full, "--episodes", "2", "--seed", "5") == 0
    out = capsys.readouterr().out
    assert out.count("> advice ") == 2 and out.count("observation 1:") == 2
    assert "of 2 episodes succeeded" in out
    assert command("play", full, "--free", "--world", "1", "--json") == 0
    (episode,) = json.loads(capsys.readouterr().out)
    assert episode["world"] == 1 and not any(turn["advice"] for turn in episode["turns"])
    assert command("play", full, "--world", "77") == 2


def test_control_sequences_do_not_reach_the_terminal(
    full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], ["--json"]):
        capsys.readouterr()
        assert command("play", full, "--env", f"{__name__}:Noisy", *flags) == 0
        out = capsys.readouterr().out
        assert "A quiet room." in out
        assert not {"\x1b", "\x9b", "\x07", "\r"} & {*out}
