"""Model names: each resolves to weights or to one clear line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from experiential import errors
from experiential.config import LoraSettings, ModelSettings
from experiential.errors import MissingExtraError, ModelNotFoundError
from experiential.llm import models
from experiential.llm.base import SamplingParams
from experiential.llm.models import (
    convert_gguf,
    load_model,
    load_tokenizer,
    merged_weights,
    resolve_device,
    resolve_model,
)
from experiential.llm.transformers import TransformersLLM
from tests.llm_tiny import tiny_random_model

CHAT = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny_random_model()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


async def test_a_folder_loads_with_dtype_left_padding_and_same_weights(folder: Path):
    model, tokenizer = load_model(ModelSettings(name=str(folder), dtype="bfloat16", device="cpu"))
    assert model.dtype is torch.bfloat16 and not model.training and tokenizer.padding_side == "left"
    llm = TransformersLLM(str(folder))
    twin = TransformersLLM(*tiny_random_model())
    sampling = SamplingParams(max_tokens=8, seed=0)
    assert (await llm.generate(CHAT, sampling)).response_ids == (
        await twin.generate(CHAT, sampling)
    ).response_ids
    llm.close()
    twin.close()


def test_lora_adds_one_trainable_adapter_per_name_over_a_frozen_base(folder: Path):
    model, _ = load_model(
        ModelSettings(name=str(folder), device="cpu", lora=LoraSettings(rank=2)),
        adapters=("actor", "extractor"),
    )
    assert set(model.peft_config) == {"actor", "extractor"} and model.active_adapter == "actor"
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert trainable and all("lora_" in name and ".actor." in name for name in trainable)


def test_merged_weights_are_those_of_a_checkpoint_with_the_adapter_in_them(folder: Path):
    settings = ModelSettings(name=str(folder), device="cpu", lora=LoraSettings(rank=2))
    model, _ = load_model(settings, adapters=("actor", "extractor"))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    base = model.get_base_model()
    kept = {name: weight.clone() for name, weight in base.named_parameters()}
    found = {
        adapter: {name: w.clone() for name, w in merged_weights(base, adapter)}
        for adapter in ("actor", "extractor")
    }
    assert all(torch.equal(weight, kept[name]) for name, weight in base.named_parameters())
    plain, _ = load_model(ModelSettings(name=str(folder), device="cpu"))
    names = [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in merged_weights(plain, None)]
    ids = torch.arange(10)[None]
    for adapter, weights in found.items():
        assert list(weights) == names
        plain.load_state_dict(weights, strict=False)
        model.set_adapter(adapter)
        with torch.no_grad():
            assert torch.allclose(plain(ids).logits, model(ids).logits, atol=1e-4)
    assert not torch.allclose(*(w[names[1]] for w in found.values()))


def test_lora_without_peft_names_the_extra(folder: Path, monkeypatch: pytest.MonkeyPatch):
    real = errors.find_spec
    monkeypatch.setattr(errors, "find_spec", lambda name: None if name == "peft" else real(name))
    with pytest.raises(MissingExtraError, match=r"experiential-rl\[local\]"):
        load_model(ModelSettings(name=str(folder), device="cpu", lora=LoraSettings()))


def test_missing_tiny_model_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "_TINY", tmp_path)
    with pytest.raises(ModelNotFoundError, match="make tiny-models"):
        resolve_model("tiny")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("tiny") == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing-here", "a/b/c", ""])
def test_paths_that_do_not_exist_are_named(name: str):
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        resolve_model(name)


def test_a_folder_without_config_is_not_a_model(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=r"config\.json"):
        resolve_model(str(tmp_path))


def test_hub_names_pass_through_and_an_unreachable_hub_is_one_line(monkeypatch: pytest.MonkeyPatch):
    assert resolve_model("someone/some-model") == "someone/some-model"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="someone/no-such-model") as caught:
        load_tokenizer("someone/no-such-model")
    assert "\n" not in str(caught.value)


def test_device_auto_is_what_torch_has():
    assert resolve_device("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cuda:1") == "cuda:1"


def test_a_failed_conversion_leaves_nothing_behind(tmp_path: Path):
    source = tmp_path / "broken.gguf"
    source.write_bytes(b"not a gguf file")
    with pytest.raises(Exception):  # noqa: B017  (whatever the reader raises; what counts is what is left on disk)
        convert_gguf(source, tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == []


def test_importing_the_backends_loads_no_torch():
    code = (
        "import sys, experiential.llm, experiential.llm.models, experiential.llm.openai,"
        " experiential.llm.scripted, experiential.llm.transformers; sys.exit(any(m in sys.modules"
        " for m in ('torch', 'transformers', 'chromadb')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
async def test_smollm2_converts_once_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The bundled weights convert into the cache, are found again without work, and know the
    capital of France.
    """
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = resolve_model("smollm2")
    assert (
        isinstance(path, Path)
        and path.name.startswith("smollm2-")
        and path.parent == tmp_path / "experiential" / "models"
    )
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(models, "convert_gguf", lambda *args: pytest.fail("converted twice"))
    assert resolve_model("smollm2") == path
    llm = TransformersLLM("smollm2")
    assert (
        "Paris" in (await llm.generate(CHAT, SamplingParams(temperature=0.0, max_tokens=16))).text
    )
    choice = await llm.generate(
        CHAT, SamplingParams(temperature=0.0, choices=("London", "Paris", "Rome"))
    )
    assert choice.text == "Paris" and choice.logprobs[0] > -0.5
    llm.close()
