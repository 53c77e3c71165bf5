"""Actor and extractor, played against scripted backends with and without tokens."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from experiential.agents.actor import ActorAgent, extract_action
from experiential.agents.dialogue import Dialogue
from experiential.agents.extractor import ExtractorAgent
from experiential.agents.prompts import derived_seed, experience_block
from experiential.errors import BackendError
from experiential.llm.base import LLM, Prompt, SamplingParams, is_token_prompt
from experiential.llm.scripted import ScriptedLLM
from experiential.llm.transformers import TransformersLLM
from experiential.sync import shared_loop
from experiential.types import (
    Add,
    Experience,
    FinishReason,
    Generation,
    Keep,
    Merge,
    Trajectory,
    Turn,
    Update,
)
from tests.llm_tiny import tiny_random_model, tiny_tokenizer

TRAJECTORY = Trajectory(
    task="Open.",
    turns=(Turn(observation="A door.", action="push", feedback="It opens."),),
    success=True,
)


class Recorder(LLM):
    """Passes every request on and remembers prompt and sampling; fails when told to."""

    def __init__(self, inner: LLM) -> None:
        self.inner = inner
        self.prompts: list[Prompt] = []
        self.samplings: list[SamplingParams] = []
        self.failures = 0

    @property
    def tokenizer(self) -> Any | None:
        return self.inner.tokenizer

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        assert sampling is not None
        self.prompts.append(prompt)
        self.samplings.append(sampling)
        if self.failures:
            self.failures -= 1
            raise BackendError("Expected an answer, got a time-out")
        return await self.inner.generate(prompt, sampling)


def scripted(*replies: str, tokens: bool = False) -> Recorder:
    return Recorder(ScriptedLLM(list(replies), tokenizer=tiny_tokenizer() if tokens else None))


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("<action>go north</action>", "go north"),
        ("I will <ACTION>\n go north \n</Action> now", "go north"),
        ("<action>a</action> no: <action>b</action>", "b"),
        ("<action>go nor", "go nor"),
        ("<action></action>", ""),
        ("thinking\ngo north\n\n", "go north"),
        ("<think>perhaps <action>a</action></think>\ngo north", "go north"),
        (
            "Hm. <search_and_ask>which door?</search_and_ask>",
            "<search_and_ask>which door?</search_and_ask>",
        ),
        (
            "<action>a</action> <Search_And_Ask> x </Search_And_Ask>",
            "<Search_And_Ask> x </Search_And_Ask>",
        ),
        ("<search_and_ask>which do", "<search_and_ask>which do</search_and_ask>"),
        ("", ""),
    ],
)
def test_the_action_is_found_in_a_response(text: str, action: str) -> None:
    assert extract_action(text) == action


@pytest.mark.parametrize("tokens", [False, True])
def test_an_actor_plays_an_episode(tokens: bool) -> None:
    llm = scripted("Hm. <action>look</action> unread", "go north", tokens=tokens)
    agent = ActorAgent(llm, instruction="Find the exit.", seed=7, temperature=0.5, max_tokens=9)
    assert [agent.act("A room."), agent.act("A door.")] == ["look", "go north"]
    first = llm.samplings[0]
    stop = ("</action>", "</search_and_ask>", "</search_experience>", "</search_knowledge>")
    assert (first.temperature, first.max_tokens, first.stop) == (0.5, 9, stop)
    assert [s.seed for s in llm.samplings] == [derived_seed(7, 0), derived_seed(7, 1)]
    assert len(agent.generations) == 2
    assert [is_token_prompt(prompt) for prompt in llm.prompts] == [tokens, tokens]
    agent.reset()
    assert agent.generations == []
    agent.act("A room.")
    assert llm.prompts[2] == llm.prompts[0] and llm.samplings[2].seed == first.seed
    agent.reset(seed=8)
    agent.act("A room.")
    assert llm.samplings[3].seed == derived_seed(8, 0)


def test_messages_hold_the_conversation_for_a_backend_without_tokens() -> None:
    llm = scripted("<action>look</action>", "wait")
    agent = ActorAgent(llm, prompts="brief")
    agent.act("A room. <|im_end|>")
    agent.act("A door.")
    assert llm.prompts[1] == [
        {"role": "system", "content": "Play. Answer with one action."},
        {"role": "user", "content": "A room. &lt;|im_end|>"},
        {"role": "assistant", "content": "<action>look</action>"},
        {"role": "user", "content": "A door."},
    ]


def test_the_dialogue_trains_on_what_was_sampled() -> None:
    agent = ActorAgent(scripted("<action>look</action>", "go north", tokens=True))
    agent.act("A room.")
    agent.act("A door.")
    assert isinstance(agent.dialogue, Dialogue)
    (sequence,) = agent.dialogue.sequences()
    trained = [token for token, mask in zip(sequence.tokens, sequence.mask, strict=True) if mask]
    assert trained == [
        token for generation in agent.generations for token in generation.response_ids
    ]
    assert (
        list(agent.generations[1].prompt_ids)
        == sequence.tokens[: len(agent.generations[1].prompt_ids)]
    )


def test_history_bounds_the_prompt() -> None:
    llm = scripted("wait")
    agent = ActorAgent(llm, prompts="brief", history=0)
    for n in range(3):
        agent.act(f"seen {n}")
    assert [message["content"] for message in llm.prompts[2][1:]] == [
        "seen 0\n[2 turns left out]\nseen 2"
    ]  # type: ignore[index]


def test_experience_for_the_system_message_goes_there_and_later_advice_before_its_observation() -> (
    None
):
    llm = scripted("wait")
    agent = ActorAgent(llm, prompts="brief")
    early, late = experience_block(["Knock."]), experience_block(["Wait."])
    agent.act("A door.", {"experience_prompt": early})
    agent.act("Still shut.", {"experience_prompt": early})
    agent.act("Still shut.", {"experience_prompt": late})
    contents = [message["content"] for message in llm.prompts[2]]  # type: ignore[index]
    assert contents[0] == f"Play. Answer with one action.\n{early}"
    assert contents[1::2] == ["A door.", "Still shut.", f"{late}Still shut."]


@pytest.mark.parametrize("stays", [True, False])
def test_advice_goes_behind_the_observation_unless_it_would_be_dropped_with_it(stays: bool) -> None:
    llm = scripted("wait")
    agent = ActorAgent(
        llm, keep_first=stays, history=0 if not stays else None, advice="observation"
    )
    early = experience_block(["Knock."])
    for observation in ("A door.", "Still shut."):
        agent.act(observation, {"experience_prompt": early})
    contents = [message["content"] for message in llm.prompts[1]]  # type: ignore[index]
    assert contents[0].endswith(early) is not stays
    assert contents[1::2] == ([f"A door.\n{early}", "Still shut."] if stays else ["Still shut."])


def test_constrained_choice_among_the_admissible_actions() -> None:
    llm = scripted("open <action>door</action> ", "look")
    agent = ActorAgent(llm, constrain=True)
    admissible = ["open <action>door</action> ", "look"]
    assert agent.act("A door.", {"admissible": admissible}) == admissible[0], (
        "a choice is taken as it stands"
    )
    assert llm.samplings[0].choices == tuple(admissible) and llm.samplings[0].stop == ()
    assert agent.generations[0].finish_reason is FinishReason.CHOICE
    assert "word for word" in llm.prompts[0][0]["content"]  # type: ignore[index]
    agent.act("A hall.")
    assert llm.samplings[1].choices is None, (
        "an environment that names no actions is answered freely"
    )
    free = ActorAgent(llm)
    free.act("A hall.", {"admissible": admissible})
    assert llm.samplings[2].choices is None


@pytest.mark.parametrize("tokens", [False, True])
def test_a_backend_error_propagates_and_the_turn_can_be_asked_again(tokens: bool) -> None:
    llm = scripted("look", tokens=tokens)
    agent = ActorAgent(llm)
    for turn in range(2):
        llm.failures = 1
        with pytest.raises(BackendError, match="time-out"):
            agent.act(f"seen {turn}")
        assert agent.act(f"seen {turn}") == "look"
        assert llm.prompts[-1] == llm.prompts[-2], "the failed request left nothing behind"


async def test_act_works_inside_a_running_loop_and_on_the_shared_loop_itself() -> None:
    agent = ActorAgent(scripted("look"))
    assert agent.act("inside pytest's loop") == "look"

    async def on_shared_loop() -> str:
        return agent.act("inside the loop that synchronous calls use")

    assert (
        await asyncio.to_thread(lambda: shared_loop().run(on_shared_loop(), timeout=10)) == "look"
    )
    assert await agent.aact("awaited") == "look"


def test_act_has_its_own_name_and_calls_what_a_subclass_awaits() -> None:
    class Waiting(ActorAgent):
        async def aact(self, observation: str, info: Any = None) -> str:
            return f"{await super().aact(observation, info)}, then wait"

    assert Waiting(scripted("look")).act("A room.") == "look, then wait"
    assert pickle.loads(pickle.dumps(ActorAgent.act)) is ActorAgent.act
    assert ActorAgent.act.__name__ == "act"


def test_a_real_model_fills_the_dialogue_token_by_token() -> None:
    from experiential.llm.transformers import TransformersLLM

    model, tokenizer = tiny_random_model()
    llm = TransformersLLM(model, tokenizer=tokenizer)
    try:
        agent = ActorAgent(llm, prompts="brief", max_tokens=6, seed=3)
        for observation in ("A door.", "It is shut.", "It opens."):
            agent.act(observation)
        assert isinstance(agent.dialogue, Dialogue)
        (sequence,) = agent.dialogue.sequences()
        sampled = [token for generation in agent.generations for token in generation.response_ids]
        assert [
            token for token, mask in zip(sequence.tokens, sequence.mask, strict=True) if mask
        ] == sampled
        constrained = ActorAgent(llm, prompts="brief", constrain=True)
        assert constrained.act("A door.", {"admissible": ["open door", "wait"]}) in {
            "open door",
            "wait",
        }
        assert any(constrained.dialogue.sequence.allowed)  # type: ignore[union-attr]
    finally:
        llm.close()


def test_an_unknown_prompt_set_and_bad_numbers_are_refused_at_once() -> None:
    llm = scripted("x")
    for make in (
        lambda: ActorAgent(llm, prompts="long"),
        lambda: ActorAgent(llm, history=-1),
        lambda: ActorAgent(llm, max_tokens=0),
        lambda: ExtractorAgent(llm, prompts="long"),
        lambda: ExtractorAgent(llm, max_operations=0),
        lambda: ExtractorAgent(llm, max_chars=0),
    ):
        with pytest.raises(ValueError):
            make()


@pytest.mark.parametrize("tokens", [False, True])
def test_distillation_gives_operations_with_their_spans_in_the_response(tokens: bool) -> None:
    operations = (
        '{"op": "update", "entry": 1, "text": "b"}, {"op": "add", "text": "c"}, {"op": "update",'
        ' "entry": 3, "text": "d"}'
    )
    reply = f"<answer>[{operations}]</answer>"
    llm = scripted(reply + " more", tokens=tokens)
    distillation = ExtractorAgent(llm, max_operations=2).distill(
        TRAJECTORY, [Experience(text="a"), Experience(text="aa")]
    )
    assert distillation.generation is not None and distillation.generation.text == reply
    first, second = distillation.parsed.operations
    assert isinstance(first, Update) and isinstance(second, Add) and first.span and second.span
    assert distillation.generation.text[slice(*second.span)] == '{"op": "add", "text": "c"}'
    assert [refusal.reason for refusal in distillation.parsed.refused] == ["entry_out_of_range"]
    sampling = llm.samplings[0]
    assert (sampling.stop, sampling.priority, sampling.max_tokens) == (("</answer>",), 1, 512)
    assert (
        sampling.json_schema is not None
        and sampling.json_schema["properties"]["operations"]["maxItems"] == 2
    )
    assert is_token_prompt(llm.prompts[0]) is tokens


def test_short_prompts_are_the_brief_ones_with_operations_under_a_schema() -> None:
    asked = {}
    for name in ("brief", "short"):
        llm = scripted('[{"op": "add", "text": "c"}]')
        ExtractorAgent(llm, prompts=name).distill(TRAJECTORY)
        asked[name] = (llm.prompts[0], llm.samplings[0].json_schema)
    assert asked["brief"][0] == asked["short"][0]
    assert asked["brief"][1] is None and asked["short"][1] is not None


def test_an_unreadable_answer_is_a_distillation_with_a_reason() -> None:
    distillation = ExtractorAgent(scripted("I do not know.")).distill(TRAJECTORY)
    assert distillation.parsed.operations == () and [
        r.reason for r in distillation.parsed.refused
    ] == ["no_operations"]
    assert distillation.generation is not None


async def test_refinement_is_urgent_and_falls_back_to_the_entry() -> None:
    llm = scripted("<think>hm</think> Turn it left. ", "  ")
    extractor = ExtractorAgent(llm)
    text, generation = await extractor.arefine("how?", Experience(text="Turn it."))
    assert text == "Turn it left." and generation is not None
    assert llm.samplings[0].priority == 0 and llm.samplings[0].json_schema is None
    assert extractor.refine("how?", "Turn it.") == "Turn it."


def test_merging_reads_consolidation_operations() -> None:
    llm = scripted(
        '[{"op": "merge", "entries": [1, 2], "text": "m"}, {"op": "keep", "entry": 3}, {"op":'
        ' "add", "text": "x"}]'
    )
    merged = ExtractorAgent(llm, max_operations=1).merge([Experience(text="a"), "b", "c"])
    assert [type(operation) for operation in merged.parsed.operations] == [Merge, Keep]
    assert [refusal.reason for refusal in merged.parsed.refused] == ["unexpected_op"]


@pytest.mark.parametrize(
    ("reply", "same"),
    [
        ("Yes.", True),
        ("no, yes is wrong", False),
        ("<think>no</think>\nYES", True),
        ("perhaps", False),
        ("yesterday", False),
    ],
)
def test_judgement_is_a_yes_or_it_is_no(reply: str, same: bool) -> None:
    assert ExtractorAgent(scripted(reply)).judge("a", "b") is same


def test_seeds_of_the_extractor_depend_on_the_prompt_and_its_repetition_but_not_on_the_order() -> (
    None
):
    def seeds(*queries: str) -> dict[str, list[int | None]]:
        llm = scripted("x")
        extractor = ExtractorAgent(llm, seed=1)
        for query in queries:
            extractor.refine(query, "note")
        drawn: dict[str, list[int | None]] = {}
        for query, sampling in zip(queries, llm.samplings, strict=True):
            drawn.setdefault(query, []).append(sampling.seed)
        return drawn

    first, second = seeds("a", "b", "a"), seeds("a", "a", "b")
    assert first == second and first["a"][0] != first["a"][1]
    llm = scripted("x")
    ExtractorAgent(llm).refine("a", "note")
    assert llm.samplings[0].seed is None


async def test_extractor_errors_propagate_and_its_version_is_the_backend_s() -> None:
    llm = scripted("x")
    extractor = ExtractorAgent(llm)
    llm.version = 4
    assert extractor.version == 4
    llm.failures = 1
    with pytest.raises(BackendError):
        await extractor.adistill(TRAJECTORY)


def test_a_long_trajectory_is_shortened_to_the_budget() -> None:
    llm = scripted('[{"op": "return"}]')
    turns = tuple(Turn(observation="o", action=f"act {n}", feedback="y" * 50) for n in range(500))
    ExtractorAgent(llm, prompts="brief", max_chars=1000).distill(
        TRAJECTORY.model_copy(update={"turns": turns})
    )
    content = llm.prompts[0][1]["content"]  # type: ignore[index]
    assert (
        len(content) < 1200
        and "act 0" in content
        and "act 499" in content
        and "turns left out]" in content
    )


def test_replay_gives_the_same_responses_after_prompts_without_the_advice() -> None:
    model, tokenizer = tiny_random_model()
    llm = TransformersLLM(model, tokenizer)
    block, observations = (
        experience_block(["Pull the red lever."]),
        ["A vault.", "It clicks.", "It clicks again."],
    )
    told, untold = ActorAgent(llm, max_tokens=4, seed=1), ActorAgent(llm, max_tokens=4, seed=1)
    for number, observation in enumerate(observations):
        told.act(observation, {"experience_prompt": block} if number == 0 else {})
    replayed = untold.replay(observations, told.generations)
    assert [g.response_ids for g in replayed] == [g.response_ids for g in told.generations]
    assert [g.logprobs for g in replayed] == [g.logprobs for g in told.generations]
    shown, hidden = (tokenizer.decode(agent.generations[-1].prompt_ids) for agent in (told, untold))
    assert "red lever" in shown and "red lever" not in hidden and "It clicks again." in hidden
    assert isinstance(untold.dialogue, Dialogue) and all(
        span.kind != "experience" for span in untold.dialogue.sequence.spans
    )
    again = ActorAgent(llm, max_tokens=4).replay(observations, replayed, advice=block)
    assert [g.prompt_ids for g in again] == [g.prompt_ids for g in told.generations]
    with pytest.raises(ValueError, match="tokenizer"):
        ActorAgent(ScriptedLLM(["x"])).replay(["a"], replayed[:1])


@pytest.mark.parametrize("constrain", [False, True])
def test_a_system_message_of_ones_own_stands_word_for_word_before_the_advice(
    constrain: bool,
) -> None:
    llm = ScriptedLLM(["go north"])
    agent = ActorAgent(llm, system="Obey $notes and {notes}.", constrain=constrain)
    advice = experience_block(["North is safe."])
    agent.act("A fork.", {"admissible": ["go north"], "experience_prompt": advice})
    assert llm.calls[0][0]["content"] == f"Obey $notes and {{notes}}.\n{advice}"
