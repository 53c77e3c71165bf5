"""The public surface: what `import experiential as xp` offers, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import gymnasium as gym
import pytest

import experiential as xp

PACKAGE = Path(str(xp.__file__)).parent
PLUMBING = {"annotations", "Any", "Path", "import_module"}
THREE_LINES = """
import gymnasium as gym
import experiential as xp


def play(plain: gym.Env[str, str]) -> None:
    bank = xp.ExperienceBank("bank")
    env = xp.ExperienceWrapper(plain, bank)
    env = xp.SearchAndAskWrapper(env, max_calls=2)
    reveal_type(bank.add)
"""
PROBE = """
import sys, time
start = time.process_time()
import experiential
seconds = time.process_time() - start
wanted = ("torch", "transformers", "chromadb", "sentence_transformers", "peft", "openai")
heavy = [name for name in wanted if name in sys.modules]
print(seconds, *heavy)
"""


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_is_sorted_and_without_duplicates() -> None:
    assert xp.__all__ == sorted(set(xp.__all__))


@pytest.mark.parametrize("name", xp.__all__)
def test_every_name_in_all_can_be_imported(name: str) -> None:
    assert getattr(xp, name) is not None


def test_nothing_else_is_exported() -> None:
    """After all names were used, the module holds no public name that `__all__` lacks."""
    for name in xp.__all__:
        getattr(xp, name)
    found = {
        name
        for name, value in vars(xp).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert found - PLUMBING == set(xp.__all__) - {"__version__"}


@pytest.mark.slow
def test_an_editor_knows_the_types_of_the_three_line_api(tmp_path: Path) -> None:
    sample = tmp_path / "sample.py"
    sample.write_text(THREE_LINES)
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(PACKAGE.parent)]})
    )
    pyright = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        [*pyright, "--project", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    assert 'Type of "bank.add" is' in done.stdout and "Experience" in done.stdout


def test_names_are_listed_before_they_are_used() -> None:
    assert set(xp.__all__) <= set(dir(xp))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Bnak'"):
        xp.Bnak  # noqa: B018


def test_import_is_fast_and_light() -> None:
    """Under one second of processor time (best of five), and none of the heavy packages."""
    outputs = [run_python(PROBE).split() for _ in range(5)]
    assert all(len(output) == 1 for output in outputs), outputs
    assert min(float(output[0]) for output in outputs) < 1.0


def test_importing_registers_the_environments() -> None:
    names = run_python(
        "import experiential, gymnasium; print(*[name for name in gymnasium.registry if"
        " name.startswith('experiential/')])"
    )
    assert {
        "experiential/FrozenLake-v0",
        "experiential/Sokoban-v0",
        "experiential/Vault-v0",
    } <= set(names.split())


@pytest.mark.parametrize(
    "name", ["experiential/FrozenLake-v0", "experiential/Sokoban-v0", "experiential/Vault-v0"]
)
def test_registered_environments_can_be_made(name: str) -> None:
    env = gym.make(name)
    observation, _ = env.reset(seed=0)
    assert isinstance(observation, str) and observation
    env.close()


def test_errors_share_one_base() -> None:
    errors = [getattr(xp, name) for name in xp.__all__ if name.endswith("Error")]
    assert len(errors) > 5
    assert all(issubclass(error, xp.ExperientialError) for error in errors)


def test_missing_extra_names_the_command() -> None:
    assert "pip install 'experiential-rl[local]'" in str(xp.MissingExtraError("torch", "local"))


def test_the_three_line_example_runs() -> None:
    example = Path(__file__).parent.parent / "examples" / "three_lines.py"
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, *_, last = [int(line.split()[2]) for line in done.stdout.splitlines()]
    assert first <= 5 and last >= 8, done.stdout
