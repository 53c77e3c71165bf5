"""Backends and extractors from outside: built-in names, module:attribute, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import experiential as xp
from experiential.agents.extractor import ExtractorAgent, open_extractor
from experiential.cli.main import app
from experiential.cli.options import named_model
from experiential.config import Experiment, ModelSettings
from experiential.errors import ConfigError, MissingExtraError
from experiential.llm import LLM, open_llm
from experiential.llm.base import read_options
from experiential.llm.models import open_model
from experiential.llm.scripted import ScriptedLLM
from experiential.training.roles import Roles
from experiential.types import Distillation, ParsedOperations, Trajectory

CHAT = [{"role": "user", "content": "Which door?"}]
ANSWER = '<answer>[{"op": "merge", "entries": [1, 2], "text": "Wait for green."}]</answer>'
ASKED: list[dict[str, Any]] = []


def foreign_backend(**options: Any) -> LLM:
    ASKED.append(options)
    return ScriptedLLM([ANSWER], name="foreign")


class ForeignExtractor:
    """The least that an extractor may be."""

    version = 0

    def __init__(self, llm: LLM, *, seed: int | None = None, **options: Any) -> None:
        self.llm, self.seed, self.options = llm, seed, options

    async def adistill(self, trajectory: Trajectory, shown: Any = ()) -> Distillation:
        return Distillation(parsed=ParsedOperations())

    async def arefine(self, query: str, experience: Any) -> tuple[str, None]:
        return query, None

    async def amerge(self, experiences: Any) -> Distillation:
        return Distillation(parsed=ParsedOperations())


def test_a_builtin_backend_is_opened_by_name() -> None:
    llm = open_llm("scripted", replies=["left"])
    assert asyncio.run(llm.generate(CHAT)).text == "left"
    assert open_llm("openai", model="m", base_url="http://localhost:1/v1").name == "m"


def test_a_foreign_backend_gets_the_options() -> None:
    ASKED.clear()
    assert open_llm("tests.test_llm_doors:foreign_backend", model="big", top=3).name == "foreign"
    assert ASKED == [{"model": "big", "top": 3}]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("lokal", {}, "did you mean 'local'"),
        ("scripted", {"answers": []}, "Expected options that the backend 'scripted' takes"),
        ("scripted", {"replies": []}, "non-empty list"),
        ("builtins:dict", {}, "to return an experiential.llm.LLM, got dict"),
        ("tests.test_llm_doors:nothing", {}, "Expected an attribute 'nothing'"),
    ],
)
def test_a_wrong_backend_is_a_user_error(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm(name, **options)


def test_a_backend_whose_package_is_missing_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("experiential.errors.find_spec", lambda name: None)
    asked = ModelSettings(name="tiny", generator="vllm")
    with pytest.raises(MissingExtraError, match=r"experiential-rl\[vllm\]"):
        open_model(asked)
    with pytest.raises(MissingExtraError, match=r"experiential-rl\[vllm\]"):
        open_model(named_model(None, backend="vllm"))
    with pytest.raises(ConfigError, match="no --base-url and no --api-key-env"):
        named_model("tiny", "http://localhost:1/v1", backend="vllm")


@pytest.mark.parametrize("pair", ["timeout", "=3", "a-b=1", "x={"])
def test_an_option_without_key_or_value_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="option"):
        read_options([pair])


def test_the_extractor_of_a_run_is_the_one_its_settings_name() -> None:
    llm = ScriptedLLM(["x"])
    settings = {"extractor": {"agent": "tests.test_llm_doors:ForeignExtractor"}, "seed": 5}
    extractor = Roles(Experiment.model_validate(settings), (llm, llm)).extractor()  # type: ignore[arg-type]
    assert isinstance(extractor, ForeignExtractor) and extractor.seed == 5
    assert extractor.options["max_operations"] == 3
    assert isinstance(Roles(Experiment(), (llm, llm)).extractor(), ExtractorAgent)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("defualt", "did you mean 'default'"),
        ("builtins:list", "without version, adistill, arefine, amerge"),
        ("builtins:len", "Expected options that the extractor"),
    ],
)
def test_a_wrong_extractor_is_a_user_error(name: str, message: str) -> None:
    options = {"seed": 1} if name == "builtins:len" else {}
    llm = ["x"] if name == "builtins:list" else ScriptedLLM(["x"])
    with pytest.raises(ConfigError, match=message):
        open_extractor(name, llm, **options)  # type: ignore[arg-type]


def test_the_command_line_merges_with_a_foreign_backend(tmp_path: Path) -> None:
    ASKED.clear()
    with xp.ExperienceBank(tmp_path / "bank") as bank:
        bank.add_many(["Wait for the green light.", "Wait until the light is green."])
    backend = "--backend tests.test_llm_doors:foreign_backend --backend-option top=3".split()
    done = CliRunner().invoke(app, ["bank", "merge", str(tmp_path / "bank"), *backend])
    assert done.exit_code == 0, done.output
    assert ASKED == [{"top": 3}]
    with xp.ExperienceBank(tmp_path / "bank", read_only=True) as bank:
        assert [entry.text for entry in bank] == ["Wait for green."]
