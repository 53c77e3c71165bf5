"""Greedy decoding of model families, whatever their attention, equals ``transformers.generate``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from experiential.llm.base import SamplingParams
from experiential.llm.transformers import TransformersLLM
from experiential.types import Generation
from tests.llm_tiny import tiny_random_model

TOKENIZER = tiny_random_model()[1]
SIZES = {
    "vocab_size": 384,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TOKENS = 8


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt2", {}),
        ("gpt_neox", {}),
        ("gptj", {"rotary_dim": 4}),
        ("bloom", {}),
        ("falcon", {"alibi": True}),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
        ("stablelm", {"num_key_value_heads": 2}),
        ("nemotron", {"num_key_value_heads": 2}),  # takes part in the interface only by name
        ("diffllama", {"num_key_value_heads": 2}),  # two attentions in each layer
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"num_key_value_heads": 4, "head_dim": 16, "attention_bias": True}),
        ("llama", {"num_key_value_heads": 2, "hidden_act": "gelu"}),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": None}),
        ("qwen2", {"num_key_value_heads": 2}),
        ("qwen3", {"num_key_value_heads": 1, "head_dim": 16}),
    ],
)
async def test_greedy_tokens_are_those_of_transformers(family: str, options: dict[str, Any]):
    """Prompts of several lengths at once, then a second turn on their states.

    Families whose layers are known are computed by a `Decoder`.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **options)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    shared = prompt(0, 20)
    prompts = [*([*shared, *prompt(n, n)] for n in (1, 3, 9, 9)), prompt(7, 12)]
    prompts[3][-4:] = prompt(8, 4)
    expected: list[list[int]] = []
    for ids in prompts:
        given = torch.tensor([ids])
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        expected.append(made[0, len(ids) :].tolist())
    assert len({*map(tuple, expected)}) > 1
    llm = TransformersLLM(model, TOKENIZER)
    llm._eos = frozenset()

    async def ask(prompts: list[list[int]], tokens: int) -> list[Generation]:
        sampling = SamplingParams(temperature=0, max_tokens=tokens)
        return list(await asyncio.gather(*(llm.generate(ids, sampling) for ids in prompts)))

    half = TOKENS // 2
    first = await ask(prompts, half)
    assert [[*one.response_ids] for one in first] == [ids[:half] for ids in expected]
    later = [[*ids, *one.response_ids] for ids, one in zip(prompts, first, strict=True)]
    second = await ask(later, half)
    assert [[*one.response_ids] for one in second] == [ids[half:] for ids in expected]
    assert llm.stats.cached_tokens > 0
    known = family in {"llama", "mistral", "qwen2", "qwen3"} and "hidden_act" not in options
    assert (llm._engine.forward._decoder is not None) == known
    llm.close()
