"""TransformersLLM: exact behaviour log-probabilities whatever is batched, cached or forced;
batching that costs what it should.
"""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.errors import BackendError
from experiential.llm.base import SamplingParams
from experiential.llm.executor import DeviceExecutor
from experiential.llm.states import Slab
from experiential.llm.transformers import TransformersLLM
from experiential.types import FinishReason, Generation
from tests.llm_tiny import tiny_random_model

MODEL, TOKENIZER = tiny_random_model()
WORDS = (
    "north",
    "south",
    "east",
    "west",
    "up",
    "down",
    "left",
    "right",
    "open",
    "close",
    "take",
    "drop",
)
CHAT = [{"role": "user", "content": "Which door?"}]


@pytest.fixture
def llm():
    backend = TransformersLLM(MODEL, TOKENIZER, name="actor")
    yield backend
    backend.close()


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 384, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(generation: Generation) -> list[float]:
    """Return log-probabilities by one plain forward, under temperature and constraint."""
    ids = [*generation.prompt_ids, *generation.response_ids]
    with torch.inference_mode():
        logits = MODEL(torch.tensor([ids])).logits[0] / generation.temperature
    result: list[float] = []
    for i, token in enumerate(generation.response_ids):
        row = logits[len(generation.prompt_ids) + i - 1]
        allowed = generation.allowed[i] if generation.allowed else ()
        kept = torch.full_like(row, -torch.inf)
        index = list(allowed) or list(range(len(row)))
        kept[index] = row[index]
        result.append(torch.log_softmax(kept, -1)[token].item())
    return result


def assert_exact(generations: list[Generation]) -> None:
    for generation in generations:
        assert generation.logprobs == pytest.approx(reference(generation), abs=1e-4)


async def many(
    llm: TransformersLLM, prompts: list[list[int]], sampling: list[SamplingParams]
) -> list[Generation]:
    return list(
        await asyncio.gather(*(llm.generate(p, s) for p, s in zip(prompts, sampling, strict=True)))
    )


async def test_mixed_batch_has_exact_logprobs(llm: TransformersLLM):
    """Different lengths, temperatures, limits, constraints and duplicates in one batch agree with
    plain forwards.
    """
    prompts = [prompt(i % 5, 5 + 17 * (i % 5)) for i in range(20)]
    sampling = [
        SamplingParams(
            temperature=0.5 + 0.1 * i,
            max_tokens=1 + i,
            seed=i,
            choices=WORDS if i % 4 == 0 else None,
        )
        for i in range(20)
    ]
    assert_exact(await many(llm, prompts, sampling))


async def test_turns_reuse_the_prefix_and_stay_exact(llm: TransformersLLM):
    """Later turns forward only what is new, in batches where other rows have nothing cached."""
    histories = [prompt(i, 30 + i) for i in range(4)]
    for turn in range(4):
        before = llm.stats.forwarded_tokens
        fresh = prompt(100 + turn, 12 + turn)
        sampling = [SamplingParams(max_tokens=6 + i, seed=turn * 10 + i) for i in range(5)]
        generations = await many(llm, [*histories, fresh], sampling)
        assert_exact(generations)
        if turn:
            assert llm.stats.forwarded_tokens - before < 5 * 16 + 60
        histories = [
            [*h, *g.response_ids, *prompt(50 + turn, 3)]
            for h, g in zip(histories, generations, strict=False)
        ]
    assert llm.stats.cached_tokens > 200


@pytest.mark.parametrize("gb", [0, None])
async def test_result_does_not_depend_on_company_or_cache(gb: float | None):
    """A seeded request gives the same tokens alone and among others, with the cache on or off."""
    llm = TransformersLLM(MODEL, TOKENIZER, prefix_cache_gb=gb)
    mine = SamplingParams(max_tokens=20, seed=7)
    alone = await llm.generate(prompt(1, 40), mine)
    others = [SamplingParams(max_tokens=5 + i, seed=100 + i) for i in range(6)]
    crowd = await many(
        llm, [prompt(1, 40), *(prompt(i, 20 + 5 * i) for i in range(6))], [mine, *others]
    )
    assert crowd[0].response_ids == alone.response_ids
    assert crowd[0].logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    llm.close()


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 12), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_any_batch_is_exact(rows: list[tuple[int, int, int, bool]]):
    """Invariant over random batches, small max_batch (rows wait and join) and a small cache
    (entries are evicted).
    """
    llm = TransformersLLM(
        MODEL,
        TOKENIZER,
        max_batch=3,
        prefix_cache_gb=150 * 2 * 2 * 2 * 16 * 4 / 1e9,
        batch_wait=0.0,
    )
    sampling = [
        SamplingParams(max_tokens=limit, seed=i, choices=WORDS[:5] if bound else None)
        for i, (_, _, limit, bound) in enumerate(rows)
    ]
    assert_exact(
        asyncio.run(many(llm, [prompt(seed, length) for seed, length, _, _ in rows], sampling))
    )
    llm.close()


async def test_choices_take_one_forward_of_the_distinct_prompts():
    """64 requests over 8 prompts, whose 12 strings differ in their first token, cost one forward of
    8 rows.
    """
    llm = TransformersLLM(MODEL, TOKENIZER, batch_wait=1.0)  # a busy machine asks slowly
    firsts = {
        TOKENIZER(word, add_special_tokens=False)["input_ids"][0]: word for word in "abcdefghijkl"
    }
    choices = tuple(f"{word} and then some more words" for word in firsts.values())
    assert len(choices) == 12
    prompts = [prompt(i % 8, 100) for i in range(64)]
    generations = await many(llm, prompts, [SamplingParams(choices=choices)] * 64)
    assert (llm.stats.forwards, llm.stats.forwarded_rows, llm.stats.forwarded_tokens) == (1, 8, 800)
    assert all(g.text in choices and g.finish_reason is FinishReason.CHOICE for g in generations)
    assert_exact(generations)
    for g in generations:
        assert (
            g.allowed is not None
            and len(g.allowed) == len(g.response_ids)
            and len(g.allowed[0]) == 12
        )
        assert g.logprobs[1:] == (0.0,) * (len(g.logprobs) - 1)
        assert g.response_ids[-1] == TOKENIZER.eos_token_id
    llm.close()


async def test_forced_prefix_joins_the_prompts_forward(llm: TransformersLLM):
    choices = ("go to the north", "go to the south")
    trie_first = TOKENIZER("go to the", add_special_tokens=False)["input_ids"]
    generation = await llm.generate(CHAT, SamplingParams(choices=choices, seed=1))
    assert llm.stats.forwards == 1
    assert generation.logprobs[: len(trie_first)] == (0.0,) * len(trie_first)
    assert_exact([generation])


async def test_decisions_with_forced_runs_between_them_are_exact(llm: TransformersLLM):
    """A row that feeds several tokens at once (decision, forced run, decision) decodes beside rows
    that feed one.
    """
    choices = (
        "take the red key",
        "take the red box",
        "open the old door",
        "open the old gate",
        "wait",
    )
    sampling = [
        SamplingParams(choices=choices, seed=i) if i % 2 else SamplingParams(max_tokens=6, seed=i)
        for i in range(24)
    ]
    generations = await many(llm, [prompt(i % 3, 15 + i % 3) for i in range(24)], sampling)
    assert {g.text for g in generations[1::2]} & set(choices[:4])
    assert_exact(generations)


async def test_a_single_choice_needs_no_model(llm: TransformersLLM):
    generation = await llm.generate(CHAT, SamplingParams(choices=("wait",)))
    assert (generation.text, set(generation.logprobs), llm.stats.forwards) == ("wait", {0.0}, 0)


async def test_choice_frequencies_follow_the_reported_probabilities(llm: TransformersLLM):
    drawn = await many(
        llm,
        [prompt(3, 20)] * 2000,
        [SamplingParams(choices=("a", "b", "c"), temperature=2.0)] * 2000,
    )
    expected = {g.text: torch.tensor(g.logprobs).sum().exp().item() for g in drawn}
    for text, probability in expected.items():
        share = sum(g.text == text for g in drawn) / len(drawn)
        assert share == pytest.approx(
            probability, abs=5 * (probability * (1 - probability) / 2000) ** 0.5 + 1e-9
        )


async def test_greedy_is_argmax_with_logprobs_at_temperature_one(llm: TransformersLLM):
    generation = await llm.generate(prompt(5, 25), SamplingParams(temperature=0.0, max_tokens=10))
    assert generation.temperature == 1.0
    assert_exact([generation])
    with torch.inference_mode():
        ids = list(generation.prompt_ids)
        for token in generation.response_ids:
            assert int(MODEL(torch.tensor([ids])).logits[0, -1].argmax()) == token
            ids.append(token)


async def test_truncated_logprobs_are_renormalised(llm: TransformersLLM):
    """With top-k 3, the probability reported is the share among the three best tokens."""
    generation = await llm.generate(prompt(6, 25), SamplingParams(max_tokens=8, top_k=3, seed=0))
    ids = [*generation.prompt_ids, *generation.response_ids]
    with torch.inference_mode():
        logits = MODEL(torch.tensor([ids])).logits[0]
    for i, (token, logprob) in enumerate(
        zip(generation.response_ids, generation.logprobs, strict=True)
    ):
        best = logits[len(generation.prompt_ids) + i - 1].topk(3)
        assert token in best.indices
        assert logprob == pytest.approx(
            best.values.log_softmax(-1)[best.indices == token].item(), abs=1e-4
        )


async def test_stop_string_ends_at_its_token_and_stays_in_the_text(llm: TransformersLLM):
    free = await llm.generate(prompt(8, 30), SamplingParams(max_tokens=40, seed=3))
    stop = next(
        free.text[i : i + 2]
        for i in range(8, len(free.text))
        if free.text[i : i + 2].isascii() and len(free.text[i : i + 2]) == 2
    )
    stopped = await llm.generate(
        prompt(8, 30), SamplingParams(max_tokens=40, seed=3, stop=("never there", stop))
    )
    assert stopped.text.endswith(stop) and stopped.text.count(stop) == 1
    assert stopped.finish_reason is FinishReason.STOP
    n = len(stopped.response_ids)
    assert stopped.response_ids == free.response_ids[:n]
    assert stop in TOKENIZER.decode(stopped.response_ids) and stop not in TOKENIZER.decode(
        stopped.response_ids[:-1]
    )


async def test_length_and_context(llm: TransformersLLM):
    """max_tokens ends with LENGTH and is cut to the context; a prompt that leaves no room is
    refused with both lengths.
    """
    generation = await llm.generate(prompt(1, 10), SamplingParams(max_tokens=3, seed=2))
    assert generation.finish_reason is FinishReason.LENGTH and len(generation.response_ids) == 3
    nearly = await llm.generate(prompt(1, 2046), SamplingParams(max_tokens=50, seed=4))
    assert len(nearly.response_ids) <= 2
    with pytest.raises(BackendError, match="2048.*3000"):
        await llm.generate(prompt(1, 3000))
    with pytest.raises(BackendError, match="empty"):
        await llm.generate([])
    with pytest.raises(BackendError, match="token ids from 0 to 383"):
        await llm.generate([5, 384])


async def test_messages_use_the_chat_template(llm: TransformersLLM):
    generation = await llm.generate(CHAT, SamplingParams(max_tokens=1))
    expected = TOKENIZER.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert TOKENIZER.decode(generation.prompt_ids) == expected
    assert (generation.policy, generation.policy_version) == ("actor", 0)


async def test_changed_weights_drop_the_cache():
    """After weights_changed no state of the old weights is used, and generations carry the new
    version.
    """
    model, tokenizer = tiny_random_model(seed=5)
    llm = TransformersLLM(model, tokenizer)
    await llm.generate(prompt(1, 60), SamplingParams(max_tokens=1))

    def change() -> None:
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        llm.weights_changed(3)

    await llm.executor.run(change)
    generation = await llm.generate(prompt(1, 60), SamplingParams(max_tokens=4, seed=0))
    assert generation.policy_version == 3 and llm.stats.cached_tokens == 0
    with torch.inference_mode():
        logits = model(torch.tensor([[*generation.prompt_ids, *generation.response_ids]])).logits[
            0, 59:-1
        ]
    picked = logits.log_softmax(-1)[
        range(len(generation.response_ids)), list(generation.response_ids)
    ]
    assert generation.logprobs == pytest.approx(picked.tolist(), abs=1e-4)
    llm.close()


async def test_a_row_that_outlives_its_weights_is_not_reused(llm: TransformersLLM):
    """States of a response that was decoding while the weights changed never reach the cache."""
    task = asyncio.create_task(llm.generate(prompt(1, 60), SamplingParams(max_tokens=100, seed=1)))
    while llm.stats.forwards < 3:
        await asyncio.sleep(0.001)
    llm.weights_changed(1)
    assert (await task).policy_version == 0
    assert (await llm.generate(prompt(1, 60), SamplingParams(max_tokens=1))).policy_version == 1
    assert llm.stats.cached_tokens == 0


async def test_requests_from_several_event_loops_share_batches(llm: TransformersLLM):
    results: list[list[Generation]] = []

    def other() -> None:
        results.append(
            asyncio.run(
                many(
                    llm,
                    [prompt(i, 30) for i in range(4)],
                    [SamplingParams(max_tokens=10, seed=i) for i in range(4)],
                )
            )
        )

    threads = [threading.Thread(target=other) for _ in range(3)]
    for thread in threads:
        thread.start()
    await asyncio.gather(*(asyncio.to_thread(thread.join) for thread in threads))
    assert len(results) == 3 and llm.stats.forwards < 3 * 4 * 10
    for generations in results:
        assert [g.response_ids for g in generations] == [g.response_ids for g in results[0]]


async def test_cancelled_requests_leave_and_others_finish(llm: TransformersLLM):
    doomed = asyncio.create_task(
        llm.generate(prompt(1, 20), SamplingParams(max_tokens=2000, seed=1))
    )
    kept = asyncio.create_task(llm.generate(prompt(2, 20), SamplingParams(max_tokens=60, seed=2)))
    while llm.stats.forwards < 3:
        await asyncio.sleep(0.001)
    doomed.cancel()
    assert_exact([await kept])
    await llm.executor.run(lambda: None, priority=9)
    assert llm.stats.forwards < 300


async def test_background_is_served_while_a_rollout_decodes(llm: TransformersLLM):
    """Priorities decode in separate batches; the background neither waits for the rollout's end nor
    delays it by more than a step.
    """
    rollout = asyncio.create_task(
        llm.generate(prompt(1, 20), SamplingParams(max_tokens=1500, seed=11, temperature=0.01))
    )
    background = await llm.generate(prompt(2, 20), SamplingParams(max_tokens=2, seed=2, priority=1))
    assert_exact([background])
    assert 1 in llm.executor.busy and 0 in llm.executor.busy
    rollout.cancel()


async def test_a_failing_forward_fails_its_requests_and_no_later_ones(
    monkeypatch: pytest.MonkeyPatch,
):
    model, tokenizer = tiny_random_model(seed=6)
    llm = TransformersLLM(model, tokenizer)
    real = model.forward
    monkeypatch.setattr(
        model, "forward", lambda **kwargs: (_ for _ in ()).throw(RuntimeError("out of memory"))
    )
    with pytest.raises(BackendError, match="RuntimeError: out of memory"):
        await llm.generate(prompt(1, 10))
    monkeypatch.setattr(model, "forward", real)
    assert (await llm.generate(prompt(1, 10), SamplingParams(max_tokens=2, seed=0))).response_ids
    llm.close()
    with pytest.raises(BackendError, match="close"):
        await llm.generate(prompt(1, 10))


async def test_closing_the_executor_fails_waiting_requests():
    executor = DeviceExecutor("t")
    llm = TransformersLLM(MODEL, TOKENIZER, executor=executor)
    task = asyncio.create_task(
        llm.generate(prompt(1, 10), SamplingParams(max_tokens=2000, temperature=0.01, seed=0))
    )
    await asyncio.sleep(0.05)
    await asyncio.to_thread(executor.close)
    with pytest.raises(BackendError, match="executor"):
        await task


async def test_two_adapters_share_one_base():
    """Each policy generates with its own LoRA adapter, exactly, though both decode at the same time
    on one executor.
    """
    from experiential.config import LoraSettings
    from experiential.llm.models import add_adapters

    base, tokenizer = tiny_random_model(seed=9)
    model = add_adapters(base, LoraSettings(rank=4), ("actor", "extractor")).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B.extractor" in name:
                weight.normal_(std=0.5, generator=torch.Generator().manual_seed(len(name)))
    executor = DeviceExecutor("shared")
    policies = [
        TransformersLLM(model, tokenizer, executor=executor, adapter=name, name=name)
        for name in ("actor", "extractor")
    ]
    sampling = SamplingParams(max_tokens=12, seed=4)
    results = await asyncio.gather(
        *(llm.generate(prompt(1, 30), sampling) for llm in policies for _ in range(2))
    )
    assert results[0].response_ids != results[2].response_ids
    for generation in results:
        model.set_adapter(generation.policy)
        with torch.inference_mode():
            logits = model(
                input_ids=torch.tensor([[*generation.prompt_ids, *generation.response_ids]])
            ).logits[0, 29:-1]
        picked = logits.log_softmax(-1)[
            range(len(generation.response_ids)), list(generation.response_ids)
        ]
        assert generation.logprobs == pytest.approx(picked.tolist(), abs=1e-4)
    executor.close()


def test_bad_arguments_are_refused_at_once():
    with pytest.raises(ValueError, match="tokenizer"):
        TransformersLLM(MODEL)
    with pytest.raises(ValueError, match="max_batch"):
        TransformersLLM(MODEL, TOKENIZER, max_batch=0)


async def test_a_beginning_that_prompts_share_is_forwarded_once(llm: TransformersLLM) -> None:
    system = prompt(1, 120)
    prompts = [system + prompt(10 + i, 20 + i) for i in range(6)]
    assert_exact(await many(llm, prompts, [SamplingParams(max_tokens=1, seed=i) for i in range(6)]))
    assert llm.stats.forwarded_tokens == 120 + sum(20 + i for i in range(6))
    assert llm.stats.forwards == 2


async def test_beginnings_of_tasks_stay_until_all_their_prompts_have_them() -> None:
    """Though memory is short: this cache may hold 150 tokens, and nine prompts of 160 come."""
    llm = TransformersLLM(MODEL, TOKENIZER, prefix_cache_gb=150 * 2 * 2 * 2 * 16 * 4 / 1e9)
    for turn in range(2):  # the size of a token's states is known from the second time on
        before = llm.stats.forwarded_tokens
        tasks = [prompt(9 * turn, 40) + prompt(100 * turn + 10 + i, 100) for i in range(3)]
        prompts = [tasks[i % 3] + prompt(200 * turn + 50 + i, 20) for i in range(9)]
        asked = [SamplingParams(max_tokens=1, seed=i) for i in range(9)]
        with llm.together():  # all in one batch, on a busy machine too
            answers = asyncio.ensure_future(many(llm, prompts, asked))
            while llm._engine._tracks.get(0) is None or len(llm._engine._tracks[0].waiting) < 9:
                await asyncio.sleep(0.001)
        assert_exact(await answers)
        assert llm.stats.forwarded_tokens - before <= 40 + 3 * 100 + 9 * 20
    llm.close()


async def test_long_conversations_stay_in_place_and_exact(llm: TransformersLLM) -> None:
    """Five talks of different lengths, twenty turns: one forward of new tokens each, and a group
    that branches off one of them.
    """
    talks = [prompt(i, 20 + 7 * i) for i in range(5)]
    for turn in range(20):
        sampling = [SamplingParams(max_tokens=3 + i, seed=100 * turn + i) for i in range(5)]
        generations = await many(llm, talks, sampling)
        talks = [[*g.prompt_ids, *g.response_ids, *prompt(turn, 6)] for g in generations]
    assert_exact(generations)
    assert llm.stats.forwarded_tokens < 1.1 * sum(map(len, talks))
    group = [SamplingParams(max_tokens=8, seed=i) for i in range(4)]
    assert_exact(await many(llm, [talks[0]] * 3 + [talks[0][:90] + talks[1]], group))


async def test_what_the_prompts_of_one_task_share_is_forwarded_once() -> None:
    """Twelve prompts of two tasks: one system prompt, two first observations, and advice that
    differs.
    """
    # a busy machine must not split the requests over two batches
    llm = TransformersLLM(MODEL, TOKENIZER, batch_wait=0.2)
    system, tasks = prompt(1, 60), [prompt(2, 70), prompt(3, 80)]
    prompts = [system + tasks[i % 2] + prompt(10 + i, 20) for i in range(12)]
    assert_exact(
        await many(llm, prompts, [SamplingParams(max_tokens=1, seed=i) for i in range(12)])
    )
    assert llm.stats.forwarded_tokens == 60 + 70 + 80 + 12 * 20
    assert llm.stats.forwards == 3
    llm.close()


@pytest.mark.parametrize("gb", [0, None])
async def test_memory_that_runs_out_is_returned_and_fails_no_more_than_it_must(
    gb: float | None, monkeypatch: pytest.MonkeyPatch
):
    """Each allocation of states fails once: no row is lost, none has two owners."""
    states = Slab.states
    for fails in range(7):
        llm = TransformersLLM(MODEL, TOKENIZER, prefix_cache_gb=gb, batch_wait=0.02)
        calls = 0

        def scarce(slab: Slab, like: torch.Tensor, fails: int = fails) -> torch.Tensor:
            nonlocal calls
            calls += slab.data is None
            if slab.data is None and calls == fails:
                raise MemoryError("no room")
            return states(slab, like)

        with monkeypatch.context() as patch:
            patch.setattr("experiential.llm.states._SLAB", 64)  # a slab for each row
            patch.setattr("experiential.llm.engine._ROOM", 8)  # rows grow
            patch.setattr(Slab, "states", scarce)
            prompts = [prompt(1, 40), prompt(2, 40), prompt(1, 40), prompt(1, 40)]
            sampling = [SamplingParams(max_tokens=1 if i == 1 else 30, seed=i) for i in range(4)]
            made = await asyncio.gather(
                *(llm.generate(p, s) for p, s in zip(prompts, sampling, strict=True)),
                return_exceptions=True,
            )
        assert_exact([one for one in made if isinstance(one, Generation)])
        failures = [one for one in made if not isinstance(one, Generation)]
        assert all("no room" in str(one) for one in failures) and bool(failures) == (
            0 < fails <= calls
        )
        assert len(failures) < 4 or fails <= 2  # while prompts are forwarded, both fail
        assert_exact(await many(llm, prompts, sampling))
        llm.executor.submit(lambda: None).result()
        cache = llm._engine.cache
        cache.clear()
        assert cache.tokens == 0
        llm.close()
