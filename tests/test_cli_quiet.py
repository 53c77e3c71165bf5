"""What a user reads on stderr is ours, or of their own environment."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path

import pytest

import experiential as xp
from experiential.cli.quiet import quieten
from tests.llm_tiny import tiny_random_llama, tiny_tokenizer


def said(module: str, *arguments: object) -> str:
    """Run a command of a user, whose terminal is 80 columns wide; return its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", f"experiential.cli.{module}", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_deprecations_of_libraries_are_silent_and_other_warnings_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "warnoptions", [])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quieten()
        for module, category in (
            ("transformers.modeling_utils", FutureWarning),
            ("pydantic.main", DeprecationWarning),
            ("torch.cuda", UserWarning),
            ("torchlike_env", FutureWarning),
            ("experiential.bank.folder", FutureWarning),
        ):
            warnings.warn_explicit(module, category, "file.py", 1, module=module)
    kept = [str(one.message) for one in seen]
    assert kept == ["torch.cuda", "torchlike_env", "experiential.bank.folder"]


@pytest.mark.slow
def test_training_adapters_and_searching_say_nothing_of_libraries(tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny_random_llama().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    settings = f"model.name={model} model.prompts=brief bank.embedder=hashing actor.groups=2"
    settings += " actor.group_size=2 eval.worlds=1 eval.visits=1 run.steps=1"
    lora = ("model.lora={rank: 4}", "model.gradient_checkpointing=true")
    run = tmp_path / "run"
    assert said("train", "--output", run, "--plain", *settings.split(), *lora) == ""
    if find_spec("sentence_transformers"):
        with xp.ExperienceBank(tmp_path / "bank") as bank:
            bank.add("The red key opens the north door.")
        assert said("main", "bank", "search", tmp_path / "bank", "door") == ""
