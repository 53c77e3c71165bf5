"""Responses restricted to a JSON schema: always valid, exactly what was sampled from, and trained
on as such.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import torch

from experiential.agents.extractor import ExtractorAgent
from experiential.agents.operations import operations_schema, parse_operations
from experiential.config import OptimSettings
from experiential.errors import BackendError
from experiential.llm.base import SamplingParams
from experiential.llm.request import Schemas, canonical
from experiential.llm.transformers import TransformersLLM
from experiential.training.local import LocalRuntime
from experiential.training.runtime import LossSettings, sample_from_generation
from experiential.types import Experience, FinishReason, Generation, Trajectory
from tests.llm_tiny import tiny_random_model

MODEL, TOKENIZER = tiny_random_model()
SCHEMA = operations_schema(1, shown=2, max_chars=12)
PROMPTS = [[11, 12, 13, 20 + i] for i in range(6)]


async def sample(llm: TransformersLLM | LocalRuntime, **options: object) -> list[Generation]:
    sampling = [
        SamplingParams(**{"json_schema": SCHEMA, "max_tokens": 90, "seed": i} | options)
        for i in range(len(PROMPTS))
    ]  # pyright: ignore[reportArgumentType]
    return list(
        await asyncio.gather(*(llm.generate(p, s) for p, s in zip(PROMPTS, sampling, strict=True)))
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
async def test_every_answer_of_a_random_model_is_read(temperature: float) -> None:
    """Untrained weights, tokens of single bytes: nothing but the schema can make these answers
    valid.
    """
    for generation in await sample(TransformersLLM(MODEL, TOKENIZER), temperature=temperature):
        assert generation.finish_reason is FinishReason.STOP
        parsed = parse_operations(generation.text, shown=2)
        assert isinstance(json.loads(generation.text), dict)
        blank = all(refusal.reason == "empty_text" for refusal in parsed.refused)
        assert len(parsed.operations) + len(parsed.refused) == 1 and blank


async def test_logprobs_are_those_of_the_restricted_distribution() -> None:
    schemas = Schemas(TOKENIZER, 384)
    for generation in await sample(TransformersLLM(MODEL, TOKENIZER), temperature=0.7):
        ids = torch.tensor([[*generation.prompt_ids, *generation.response_ids]])
        with torch.inference_mode():
            logits = MODEL(ids).logits[0] / 0.7
        assert generation.allowed is not None and generation.json_schema == canonical(SCHEMA)
        drawn = [i for i, allowed in enumerate(generation.allowed) if not allowed]
        masks = schemas.allowed(canonical(SCHEMA), generation.response_ids, drawn)
        assert 0 < len(drawn) < len(generation.response_ids)
        for i, mask in zip(drawn, masks, strict=True):
            row = logits[len(generation.prompt_ids) + i - 1].masked_fill(
                ~torch.as_tensor(mask), -torch.inf
            )
            expected = torch.log_softmax(row, -1)[generation.response_ids[i]].item()
            assert generation.logprobs[i] == pytest.approx(expected, abs=1e-4)
        forced = [i for i, allowed in enumerate(generation.allowed) if allowed]
        assert all(
            generation.allowed[i] == (generation.response_ids[i],) and generation.logprobs[i] == 0
            for i in forced
        )


async def test_the_first_update_has_ratio_one_and_learns_only_from_choices() -> None:
    model, tokenizer = tiny_random_model()
    policy = LocalRuntime(TransformersLLM(model, tokenizer), OptimSettings(lr=1e-3))
    generations = await sample(policy)
    samples = [sample_from_generation(g, 1.0 - 2 * (i % 2)) for i, g in enumerate(generations)]
    stats = await policy.train(samples, LossSettings(kind="cispo"))
    assert stats.metrics["ratio"] == pytest.approx(1.0, abs=1e-3)
    assert stats.tokens == sum(allowed == () for g in generations for allowed in g.allowed or ())
    assert stats.grad_norm > 0


async def test_restricted_and_free_requests_share_a_batch() -> None:
    llm = TransformersLLM(MODEL, TOKENIZER)
    free = SamplingParams(max_tokens=12, seed=3)
    alone = await llm.generate(PROMPTS[0], free)
    restricted, together = await asyncio.gather(sample(llm), llm.generate(PROMPTS[0], free))
    assert (
        together.response_ids == alone.response_ids
        and together.allowed is None
        and together.json_schema is None
    )
    assert [g.response_ids for g in restricted] == [g.response_ids for g in await sample(llm)]


@pytest.mark.parametrize("limit", [1, 5, 12])
async def test_an_answer_that_does_not_fit_is_cut_and_says_so(limit: int) -> None:
    for generation in await sample(TransformersLLM(MODEL, TOKENIZER), max_tokens=limit):
        assert (
            len(generation.response_ids)
            == limit
            == len(generation.logprobs)
            == len(generation.allowed or ())
        )
        assert generation.finish_reason is FinishReason.LENGTH


async def test_a_number_ends_where_the_model_ends_it() -> None:
    """After a digit both a further one and the end are allowed: here the end of turn is drawn, not
    forced.
    """
    llm = TransformersLLM(MODEL, TOKENIZER)
    ended = [
        g
        for g in await sample(llm, json_schema={"type": "integer"}, max_tokens=60)
        if g.finish_reason is FinishReason.STOP
    ]
    assert ended and all(json.loads(g.text) == int(g.text) for g in ended)


OPEN = {"json_schema": None, "choices": ("wait", "go north.", "say[hello]"), "max_tokens": 40}
SAY = r"say\[[a-z]{1,8}\]"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_pattern_opens_a_choice_to_free_words(temperature: float) -> None:
    llm = TransformersLLM(MODEL, TOKENIZER)
    made = await sample(llm, **OPEN, pattern=SAY, temperature=temperature)
    assert all(g.finish_reason is FinishReason.STOP for g in made)
    assert all(g.text in OPEN["choices"] or re.fullmatch(SAY, g.text) for g in made)
    closed = await sample(llm, **OPEN, temperature=temperature)
    assert {g.text for g in closed} <= {*OPEN["choices"]}


async def test_an_open_choice_can_be_any_and_its_logprobs_are_those_of_the_grammar() -> None:
    llm, schemas = TransformersLLM(MODEL, TOKENIZER), Schemas(TOKENIZER, 384)
    made = [g for n in range(20) for g in await sample(llm, **OPEN, pattern=SAY, seed=n)]
    assert "wait" in {g.text for g in made} and any(g.text.startswith("say[") for g in made)
    generation = next(g for g in made if g.text.startswith("say["))
    assert generation.json_schema is not None and generation.allowed is not None
    start, ids = len(generation.prompt_ids), generation.response_ids
    with torch.inference_mode():
        logits = MODEL(torch.tensor([[*generation.prompt_ids, *ids]])).logits[0]
    drawn = [i for i, allowed in enumerate(generation.allowed) if not allowed]
    masks = schemas.allowed(generation.json_schema, ids, drawn)
    for i, mask in zip(drawn, masks, strict=True):
        row = logits[start + i - 1].masked_fill(~torch.as_tensor(mask), -torch.inf)
        expected = torch.log_softmax(row, -1)[ids[i]].item()
        assert generation.logprobs[i] == pytest.approx(expected, abs=1e-4)


async def test_an_open_choice_is_trained_on_under_its_grammar() -> None:
    model, tokenizer = tiny_random_model()
    policy = LocalRuntime(TransformersLLM(model, tokenizer), OptimSettings(lr=1e-3))
    made = await sample(policy, **OPEN, pattern=SAY)
    samples = [sample_from_generation(g, 1.0 - 2 * (i % 2)) for i, g in enumerate(made)]
    stats = await policy.train(samples, LossSettings(kind="cispo"))
    assert stats.metrics["ratio"] == pytest.approx(1.0, abs=1e-3) and stats.grad_norm > 0


@pytest.mark.parametrize("pattern", ["say[", "say(?=a)", 7])
async def test_a_pattern_that_is_none_fails_the_request(pattern: Any) -> None:
    sampling = SamplingParams(choices=("wait",)).model_copy(update={"pattern": pattern})
    with pytest.raises(BackendError, match="pattern"):
        await TransformersLLM(MODEL, TOKENIZER).generate(PROMPTS[0], sampling)


async def test_a_schema_that_cannot_be_compiled_is_named() -> None:
    with pytest.raises(BackendError, match="JSON schema or pattern that can be compiled"):
        await TransformersLLM(MODEL, TOKENIZER).generate(
            PROMPTS[0], SamplingParams(json_schema={"type": "nothing"})
        )


async def test_an_untrained_extractor_keeps_the_form() -> None:
    """The answer fits into the tokens it was given, so that a first bank can be written by any
    model. Of random characters one may be cut: a text is limited by characters, three a token.
    """
    extractor = ExtractorAgent(
        TransformersLLM(MODEL, TOKENIZER),
        max_tokens=200,
        max_operations=1,
        temperature=1.0,  # else random weights say one character until the end
        seed=1,
    )
    found = await asyncio.gather(
        *(
            extractor.adistill(Trajectory(task=f"Open door {i}."), [Experience(text="Knock.")])
            for i in range(6)
        )
    )
    ended = [
        d.generation is not None and d.generation.finish_reason is FinishReason.STOP for d in found
    ]
    assert sum(ended) >= 5
    assert sum(len(d.parsed.operations) for d in found) >= 5
