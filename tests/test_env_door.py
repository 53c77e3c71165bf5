"""Environments from outside: entry points, Gymnasium's module form and module:attribute."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from experiential.cli.errors import run_app
from experiential.cli.main import app
from experiential.cli.train import app as train
from experiential.envs.make import make, resolve_env
from experiential.envs.readiness import readiness
from experiential.errors import ConfigError

GUESS = '''
"""A distribution's module."""
import gymnasium as gym

from experiential.envs.text_env import TextEnv


class GuessEnv(TextEnv):
    """Guess a digit.

    In a few turns.
    """

    presets = {"short": {"turns": 1}, "long": {"turns": 9}}

    def __init__(self, worlds=10, turns=3, **kwargs):
        super().__init__(worlds, **kwargs)
        self.turns = turns

    task = "Guess the digit."

    def _begin(self, world):
        self.world, self.left = world, self.turns
        return "Which digit?", self._report(f"guess-{world}", admissible=list("0123456789"))

    def _turn(self, action):
        self.left -= 1
        won, invalid = action.strip() == str(self.world), action.strip() not in "0123456789"
        said = "Reply with a digit." if invalid else "Right." if won else "Wrong."
        over = won or self.left == 0
        info = self._report(
            f"guess-{self.world}", said, success=won, invalid=invalid, admissible=list("0123456789")
        )
        return said, float(won), over, False, info


class Silent(gym.Env):
    """Break every convention."""

    observation_space = action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}


def long_guess(**kwargs):
    return GuessEnv(turns=9, **kwargs)


number = 7
'''
REGISTERING = """
import gymnasium as gym

for name in ("acme/One-v0", "acme/Two-v0", "Loose-v3"):
    if name not in gym.registry:
        gym.register(name, entry_point="foreign_guess:GuessEnv")
"""
POINTS = """
[experiential.envs]
digits = foreign_guess:GuessEnv
acme = foreign_ids
gone = no_such_module:Env
"""


@pytest.fixture(autouse=True)
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lay out what an installer leaves behind; forget it afterwards."""
    (tmp_path / "foreign_guess.py").write_text(GUESS)
    (tmp_path / "foreign_ids.py").write_text(REGISTERING)
    info = tmp_path / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(gym.registry)
    yield
    for name in set(gym.registry) - known:
        del gym.registry[name]
    for module in ("foreign_guess", "foreign_ids"):
        sys.modules.pop(module, None)


@pytest.fixture
def envs(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run `experiential envs` and return exit code, output and errors."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = run_app(app, ["envs", *argv])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


@pytest.mark.parametrize(
    "name",
    [
        "digits",
        "acme/Two-v0",
        "foreign_ids:Loose-v3",
        "foreign_ids:acme/One-v0",
        "foreign_guess:GuessEnv",
        "foreign_guess:long_guess",
    ],
)
def test_an_environment_from_outside_is_made_and_checked_by_each_kind_of_name(
    name: str, envs: Callable[..., tuple[int, str, str]]
) -> None:
    env = make(name, max_episode_steps=2)
    assert env.reset(seed=0)[0] == "Which digit?"
    assert env.spec is not None and env.spec.max_episode_steps == 2
    assert readiness(name).missing() == []
    assert envs("check", name, "worlds=10") == (0, f"{name}: nothing to mend\n", "")


def test_presets_of_the_class_are_arguments_that_others_win_over() -> None:
    known: Any = make("digits", preset="long").unwrapped
    assert known.turns == 9
    other: Any = make("digits", preset="long", turns=2).unwrapped
    assert other.turns == 2
    with pytest.raises(ConfigError, match="preset of digits .*'lng'; did you mean 'long'?"):
        make("digits", preset="lng")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("experiential/Valt-v0", "'experiential/Valt-v0'; did you mean 'experiential/Vault-v0'?"),
        ("digitz", "got 'digitz'; did you mean 'digits'?"),
        ("acme/Twoo-v0", "did you mean 'acme/Two-v0'?"),
        ("foreign_guess:GuesEnv", "did you mean 'GuessEnv'?"),
        ("foreign_guess:number", "a function that makes one, got int"),
        ("no_such_module:Some-v0", "no_such_module"),
        ("gone", "Expected the entry point 'gone' of envs to load"),
        ("not an id", "got 'not an id'"),
    ],
)
def test_a_wrong_name_is_one_line_with_the_nearest(
    name: str, said: str, envs: Callable[..., tuple[int, str, str]]
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_env(name)
    assert said in str(caught.value)
    code, out, error = envs("check", name)
    assert code == 2 and out == "" and error.count("\n") == 1


def test_the_list_has_environments_of_installed_packages_and_says_what_is_broken(
    envs: Callable[..., tuple[int, str, str]],
) -> None:
    rows = {row["id"]: row for row in json.loads(envs("list", "--json")[1])}
    assert rows["digits"]["about"] == "Guess a digit" and rows["digits"]["ready"]
    assert rows["acme/One-v0"]["ready"] and rows["acme/Two-v0"]["ready"]
    assert not rows["gone"]["ready"] and "no_such_module" in rows["gone"]["to_do"]
    assert rows["experiential/Vault-v0"]["ready"]


def test_show_has_arguments_presets_and_the_first_observation(
    envs: Callable[..., tuple[int, str, str]],
) -> None:
    out = envs("show", "digits")[1]
    assert "digits: Guess a digit" in out and "turns" in out and "Which digit?" in out
    assert " preset='short': turns=1\n" in out


def test_check_says_what_to_mend_and_fails(envs: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = envs("check", "foreign_guess:Silent")
    assert code == 1 and "observation_space: expected a space of text, got Discrete" in out
    code, _, error = envs("check", "digits", "colour=red")
    assert code == 2 and "colour" in error
    assert envs("check", "digits", "turns")[0] == 2
    assert envs("check", "digits", "turns=[")[0] == 2  # no YAML


def test_training_plans_with_an_environment_from_outside_and_refuses_a_wrong_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    common = ["--dry-run", "env.train={}", "env.eval={}"]
    assert run_app(train, [*common, "env.id=digits", "env.kwargs={preset: long}"]) == 0
    capsys.readouterr()
    assert run_app(train, [*common, "env.id=digitz"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'digits'?" in said and said.count("\n") == 1
