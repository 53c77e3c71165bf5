"""A `Decoder` finds the logits of its model, or the model computes them itself."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from experiential.llm import decoder as module
from experiential.llm.forward import ForwardPass, LLMStats
from experiential.llm.states import PrefixCache
from tests.llm_tiny import tiny_random_llama

peft: Any = pytest.importorskip("peft")
DRAW = torch.Generator().manual_seed(0)
PROMPTS = [torch.randint(3, 384, (n,), generator=DRAW).numpy() for n in (100, 40, 40)]
TURN = torch.randint(3, 384, (5,), generator=DRAW).numpy()


def llama() -> Any:
    """A model whose norms differ from one another, as in trained ones; equal at each call."""
    model, draw = tiny_random_llama(), torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5, generator=draw)
    return model


def forward_of(model: Any) -> ForwardPass:
    return ForwardPass(model, adapter=None, stats=LLMStats())


@torch.inference_mode()
def logits_of(forward: ForwardPass) -> Tensor:
    """Logits after each prompt, after a token more of each, and after a turn more of one."""
    cache = PrefixCache(forward.layers)
    rows = [cache.open(ids, 64) for ids in PROMPTS]
    found = [forward.extend(rows, PROMPTS), forward.extend(rows, [[7]] * len(rows))]
    return torch.cat([*found, forward.extend(rows[:1], [TURN])])


@torch.no_grad()
def expected_of(model: Any) -> Tensor:
    given = [*PROMPTS, *(np.append(ids, 7) for ids in PROMPTS)]
    given.append(np.concatenate((PROMPTS[0], [7], TURN)))
    return torch.stack([model(torch.as_tensor(ids[None])).logits[0, -1] for ids in given])


def lora(model: Any, **options: Any) -> Any:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", **options))
    for name, weight in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return wrapped.eval()


def with_two(model: Any) -> Any:
    wrapped = lora(model)
    wrapped.add_adapter("second", peft.LoraConfig(target_modules=["q_proj"], r=4))
    wrapped.base_model.set_adapter(["default", "second"])
    return wrapped


def merged(model: Any) -> Any:
    wrapped = lora(model)
    wrapped.merge_adapter()
    return wrapped


def trained_norm(model: Any) -> Any:
    return lora(model, modules_to_save=["input_layernorm"])


@pytest.mark.parametrize(
    ("change", "fast"),
    [
        (lambda model: model, True),
        (lora, True),
        (lambda model: lora(model, use_dora=True), True),
        (lambda model: lora(model, use_rslora=True, r=4, lora_alpha=3, lora_dropout=0.5), True),
        (with_two, True),
        (merged, True),
        (trained_norm, False),
    ],
)
def test_logits_are_those_of_the_model_with_whatever_adapters_it_has(change: Any, fast: bool):
    model = change(llama())
    forward = forward_of(model)
    assert torch.allclose(logits_of(forward), expected_of(model), atol=1e-4)
    assert (forward._decoder is not None) == fast


def test_adapters_can_be_switched_off_and_weights_change_between_two_forwards():
    model = lora(llama())
    forward = forward_of(model)
    before = logits_of(forward)
    with model.disable_adapter():
        assert torch.allclose(logits_of(forward), expected_of(llama()), atol=1e-4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    after = logits_of(forward)
    assert torch.allclose(after, expected_of(model), atol=1e-4)
    assert not torch.allclose(after, before, atol=0.1)


@pytest.mark.parametrize("how", ["hook", "replaced", "patched"])
def test_a_model_that_computes_something_else_does_so_itself(
    how: str, monkeypatch: pytest.MonkeyPatch
):
    model = llama()
    layer = model.model.layers[1].mlp
    usual = modeling_llama.LlamaMLP.forward
    if how == "hook":
        layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    elif how == "replaced":
        layer.forward = lambda x: 2 * usual(layer, x)
    else:  # nothing tells but the logits
        monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, x: 2 * usual(self, x))
    forward = forward_of(model)
    assert torch.allclose(logits_of(forward), expected_of(model), atol=1e-4)
    assert forward._decoder is None


@pytest.mark.parametrize("options", [None, {}, {"use_dora": True}])
def test_products_in_float32_are_nearer_to_the_exact_ones(
    options: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch
):
    """Where they are faster than those in bfloat16, prompts are computed in float32."""
    model = llama().to(torch.bfloat16)
    model = model if options is None else lora(model, lora_alpha=1, **options)
    exact = expected_of(deepcopy(model).float())
    errors: dict[bool, Tensor] = {}
    for faster in (False, True):
        monkeypatch.setattr(module, "multiplies_bfloat16", lambda faster=faster: not faster)
        forward = forward_of(model)
        errors[faster] = (logits_of(forward) - exact).square().mean(1).sqrt() / exact.std(1)
        assert forward._decoder is not None
        assert errors[faster].max() < 0.1
    assert errors[True][:3].mean() < (0.7 if options is None else 0.9) * errors[False][:3].mean()
