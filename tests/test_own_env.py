"""An environment of a user's own: a package made by `init`, a foreign one, one without text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiential.cli import main, train
from experiential.cli.errors import run_app
from experiential.training.metrics import read_events

FOREIGN = '''
"""A text environment that knows nothing of experiential."""
import gymnasium as gym

CODES = {"red": "7", "green": "3"}


class Bell(gym.Env):
    def __init__(self):
        self.observation_space = gym.spaces.Text(200)
        self.action_space = gym.spaces.Text(200)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.colour = ("red", "green")[int(self.np_random.integers(2))]
        return f"A {self.colour} bell. Say its number.", {"task": f"Ring the {self.colour} bell."}

    def step(self, action):
        won = CODES[self.colour] in action
        return f"It was {CODES[self.colour]}.", float(won), True, False, {"success": won}


class Broken(Bell):
    def step(self, action):
        raise KeyError("my bug")  # here


if "Bell-v0" not in gym.registry:
    gym.register("Bell-v0", entry_point=Bell)
'''
SMALL = [
    "bank.embedder=hashing",
    "actor.groups=4",
    "actor.group_size=2",
    "actor.max_tokens=8",
    "eval.before=false",
    "eval.after=false",
    "run.trackers=[]",
]


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a user, whose module is found because commands run there."""
    (tmp_path / "bells.py").write_text(FOREIGN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "bells", raising=False)
    return tmp_path


def run_train(recipe: str, *arguments: str) -> int:
    Path("mine.yaml").write_text(recipe)
    options = ["--recipe", "mine.yaml", "--output", "run", "--plain"]
    return run_app(train.app, [*options, *arguments])


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(folder / "metrics.jsonl") if event["event"] == "step"]


def test_a_foreign_environment_trains_by_a_few_lines_and_retrieves_in_step_2(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = "extends: [complementary, tiny]\nenv: {id: bells:Bell-v0}\nrun: {steps: 2}\n"
    assert run_train(recipe, *SMALL, "extractor.agent=template", "extractor.train=false") == 0
    rows = [event["rows"] for event in read_events(foreign / "run" / "episodes.jsonl")]
    assert len(rows) == 2 and any(row["uses"] for row in rows[1])
    assert not any(row["error"] for step in rows for row in step)
    assert len(steps_of(foreign / "run")) == 2
    assert "the model tiny was made for Vault" in capsys.readouterr().out


def test_an_environment_that_raises_is_shown_with_file_and_line(
    foreign: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = FOREIGN[: FOREIGN.index("# here")].count("\n") + 1
    code = run_train("extends: [grpo, tiny]\nenv: {id: bells:Broken}\nrun: {steps: 1}\n", *SMALL)
    said = capsys.readouterr()
    assert code == 1 and f"env: KeyError: 'my bug' (bells.py:{line}) (8 times)" in said.err
    assert f"an episode of random play: KeyError: 'my bug' (bells.py:{line})" in said.out
    (episodes,) = read_events(foreign / "run" / "episodes.jsonl")
    assert {row["error"] for row in episodes["rows"]} == {
        f"env: KeyError: 'my bug' (bells.py:{line})"
    }


@pytest.mark.parametrize("env_id", ["Blackjack-v1", "CartPole-v1", "FrozenLake-v1"])
def test_an_environment_without_text_is_refused_in_one_line_that_names_the_key(
    foreign: Path, capsys: pytest.CaptureFixture[str], env_id: str
) -> None:
    assert run_train(f"extends: [grpo, tiny]\nenv: {{id: {env_id}}}\n") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"Expected {env_id!r} to speak text" in error
    assert "set env.text" in error and not Path("run").exists()


def test_an_environment_without_text_is_wrapped_from_the_recipe(foreign: Path) -> None:
    (foreign / "cards.py").write_text(
        "def show(observation, info):\n    return f'You hold {observation[0]}.'\n"
    )
    text = "{actions: [stick, hit], render: 'cards:show', success: 1, instruction: Win at cards.}"
    recipe = (
        "extends: [grpo, tiny]\nrun: {steps: 1}\n"
        f"env: {{id: Blackjack-v1, max_turns: 5, text: {text}}}\n"
    )
    assert run_train(recipe, *SMALL) == 0
    (episodes,) = read_events(foreign / "run" / "episodes.jsonl")
    assert [row["error"] for row in episodes["rows"]] == [None] * 8
    assert {row["success"] for row in episodes["rows"]} >= {False}
    lake = "extends: [grpo, tiny]\nenv: {id: FrozenLake-v1, text: {success: 1}}\nrun: {steps: 1}\n"
    assert run_train(lake, *SMALL, "--overwrite") == 0, "its actions are numbers"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{actions: [stick]}", "Expected env.text to fit 'Blackjack-v1': Expected 2 action names"),
        ("{render: 'nowhere:show'}", "Expected to import 'nowhere'"),
        ("{acions: [a, b]}", "did you mean env.text.actions?"),
    ],
)
def test_a_wrong_wrapping_is_one_line(
    foreign: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    assert run_train(f"extends: [grpo, tiny]\nenv: {{id: Blackjack-v1, text: {text}}}\n") == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.slow
def test_init_writes_a_package_whose_test_passes_and_which_trains(tmp_path: Path) -> None:
    """In processes of their own and without an installation, as a user has it first."""
    assert run_app(main.app, ["init", str(tmp_path / "my-env")]) == 0
    folder = tmp_path / "my-env"
    assert len((folder / "recipe.yaml").read_text().splitlines()) <= 10
    variables = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", str(Path.cwd()))}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        told: dict[str, Any] = {"capture_output": True, "text": True, "check": False}
        return subprocess.run(
            [sys.executable, "-m", *command], cwd=folder, env=variables, timeout=300, **told
        )

    tested = run("pytest", "-q", "-p", "no:cacheprovider")
    assert tested.returncode == 0 and "3 passed" in tested.stdout, tested.stdout
    train = ("experiential.cli.train", "--recipe", "recipe.yaml", "--output", "run", "--plain")
    trained = run(*train, *SMALL, "run.steps=2")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    rows = [event["rows"] for event in read_events(folder / "run" / "episodes.jsonl")]
    assert not any(row["error"] for step in rows for row in step)


def test_init_touches_no_existing_files_and_wants_a_name_for_a_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "work.txt").write_text("mine")
    for name, said in (("full", "got files"), ("7up", "got '7up'"), ("class", "got 'class'")):
        assert run_app(main.app, ["init", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "work.txt"]
    (tmp_path / "empty").mkdir()
    assert run_app(main.app, ["init", str(tmp_path / "empty")]) == 0
