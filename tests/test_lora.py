"""Two policies over one frozen base: each learns in its own adapter and leaves the other and the
base alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from experiential.config import LoraSettings, ModelSettings, OptimSettings
from experiential.errors import ModelNotFoundError
from experiential.llm.base import SamplingParams
from experiential.llm.models import adapter_and_base, load_model, resolve_dtype, resolve_model
from experiential.llm.transformers import TransformersLLM
from experiential.training.local import LocalRuntime, build_runtimes
from experiential.training.runtime import LossSettings, sample_from_generation
from experiential.types import Message
from tests.llm_tiny import tiny_random_model

PROMPT = [Message(role="user", content="Which door?")]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[LocalRuntime, LocalRuntime]]:
    for part in tiny_random_model():
        part.save_pretrained(tmp_path / "model")
    settings = ModelSettings(
        name=str(tmp_path / "model"), device="cpu", lora=LoraSettings(rank=4, alpha=8)
    )
    runtimes = build_runtimes(
        settings, None, (OptimSettings(lr=1e-2), OptimSettings(lr=1e-2)), references=(True, True)
    )
    yield runtimes
    for runtime in runtimes:
        runtime.close()


def named(runtime: LocalRuntime, part: str) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in runtime.llm.model.named_parameters() if part in n}


async def learn(runtime: LocalRuntime, steps: int = 3) -> float:
    generation = await runtime.generate(PROMPT, SamplingParams(max_tokens=5, seed=1))
    sample = sample_from_generation(generation, 1.0)
    for _ in range(steps):
        stats = await runtime.train([sample], LossSettings(kl=0.01))
    return stats.metrics["kl_reference"]


async def adapted(folder: Path, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return the adapters of actor and extractor after three updates, with dropout."""
    lora = LoraSettings(rank=4, alpha=8, dropout=0.3)
    settings = ModelSettings(name=str(folder), device="cpu", lora=lora)
    optims = (OptimSettings(lr=1e-2), OptimSettings(lr=1e-2))
    runtimes = build_runtimes(settings, None, optims, references=(True, True), seed=seed)
    for runtime in runtimes:
        await learn(runtime)
    found = [named(one, f".{one.name}.") for one in runtimes]
    for runtime in runtimes:
        runtime.close()
    return found


async def test_adapters_and_their_dropout_are_drawn_with_the_seed(tmp_path: Path) -> None:
    for part in tiny_random_model():
        part.save_pretrained(tmp_path)
    torch.manual_seed(1)
    one = await adapted(tmp_path, 3)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)  # torch's own generator stays as it was
    again, other = await adapted(tmp_path, 3), await adapted(tmp_path, 4)
    for mine, same, new in zip(one, again, other, strict=True):
        assert mine and all(torch.equal(mine[name], same[name]) for name in mine)
        assert not any(torch.equal(mine[name], new[name]) for name in mine)
    actor, extractor = ([w for n, w in each.items() if "lora_A" in n] for each in one)
    assert not any(map(torch.equal, actor, extractor))


async def test_the_base_is_shared_and_stays_frozen(pair: tuple[LocalRuntime, LocalRuntime]) -> None:
    actor, extractor = pair
    assert actor.llm.model is extractor.llm.model
    base = {n: p for n, p in named(actor, "").items() if "lora_" not in n}
    await learn(actor)
    await learn(extractor)
    assert all(torch.equal(p, base[n]) for n, p in named(actor, "").items() if "lora_" not in n)


async def test_an_update_moves_its_own_adapter_only(
    pair: tuple[LocalRuntime, LocalRuntime],
) -> None:
    actor, extractor = pair
    before = named(actor, ".actor."), named(extractor, ".extractor.")
    kl = await learn(actor)
    assert any(not torch.equal(p, before[0][n]) for n, p in named(actor, ".actor.").items())
    assert all(torch.equal(p, before[1][n]) for n, p in named(extractor, ".extractor.").items())
    assert kl > 0
    assert (actor.version, extractor.version) == (3, 0)


async def test_generation_uses_the_adapter_of_its_policy(
    pair: tuple[LocalRuntime, LocalRuntime],
) -> None:
    actor, extractor = pair
    await learn(actor, steps=8)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    first, second = await actor.generate(PROMPT, greedy), await extractor.generate(PROMPT, greedy)
    assert first.logprobs != pytest.approx(second.logprobs, abs=1e-3)
    assert (first.policy, second.policy) == ("actor", "extractor")


async def test_an_adapter_is_saved_and_loaded(
    pair: tuple[LocalRuntime, LocalRuntime], tmp_path: Path
) -> None:
    actor, _ = pair
    await learn(actor)
    kept = named(actor, ".actor.")
    await actor.save(tmp_path / "state")
    await learn(actor)
    await actor.load(tmp_path / "state")
    assert all(torch.equal(p, kept[n]) for n, p in named(actor, ".actor.").items())
    await actor.export(tmp_path / "export")
    assert (tmp_path / "export" / "adapter_model.safetensors").is_file()


async def test_an_exported_adapter_plays_as_it_was_trained_and_is_a_start(
    pair: tuple[LocalRuntime, LocalRuntime], tmp_path: Path
) -> None:
    actor, _ = pair
    await learn(actor, steps=8)
    greedy = SamplingParams(temperature=0, max_tokens=6)
    trained = await actor.generate(PROMPT, greedy)
    await actor.export(tmp_path / "export")
    with closing(TransformersLLM(str(tmp_path / "export"))) as llm:
        again = await llm.generate(PROMPT, greedy)
    assert (again.text, again.logprobs) == (trained.text, trained.logprobs)
    model, _ = load_model(ModelSettings(name=str(tmp_path / "export"), lora=LoraSettings()))
    ids = torch.tensor([trained.prompt_ids])
    from transformers import AutoModelForCausalLM

    other = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    with torch.no_grad():
        logits = [one(ids).logits for one in (model, other)]
    assert torch.allclose(*logits, atol=1e-4)
    with pytest.raises(ModelNotFoundError, match="merge it first"):
        resolve_model(str(tmp_path / "export"))


async def test_an_adapter_over_an_adapter_is_exported_and_played(
    pair: tuple[LocalRuntime, LocalRuntime], tmp_path: Path
) -> None:
    greedy, name = SamplingParams(temperature=0, max_tokens=6), str(tmp_path / "first")
    await learn(pair[0], steps=8)
    await pair[0].export(tmp_path / "first")
    options = (OptimSettings(lr=1e-2), OptimSettings(lr=1e-2))
    lora = ModelSettings(name=name, device="cpu", lora=LoraSettings(rank=2))
    seconds = build_runtimes(lora, None, options, references=(False, False))
    try:
        await learn(seconds[0], steps=8)
        trained = await seconds[0].generate(PROMPT, greedy)
        await seconds[0].export(tmp_path / "second")
    finally:
        for runtime in seconds:
            runtime.close()
    with closing(TransformersLLM(str(tmp_path / "second"))) as llm:
        again = await llm.generate(PROMPT, greedy)
    assert (again.text, again.logprobs) == (trained.text, trained.logprobs)
    assert resolve_dtype(ModelSettings(name=str(tmp_path / "second"))) == "float32"


async def test_the_base_of_an_adapter_from_another_machine_is_found(
    pair: tuple[LocalRuntime, LocalRuntime], tmp_path: Path
) -> None:
    await pair[0].export(tmp_path / "export")
    file = tmp_path / "export" / "adapter_config.json"
    written = json.loads(file.read_text())
    for base, found in {
        "/home/elsewhere/site-packages/experiential/llm/tiny": "tiny",
        "/home/elsewhere/tiny-llama": "/home/elsewhere/tiny-llama",
        "someone/tiny-llama": "someone/tiny-llama",
    }.items():
        file.write_text(json.dumps(written | {"base_model_name_or_path": base}))
        assert adapter_and_base(str(tmp_path / "export"))[1] == found
