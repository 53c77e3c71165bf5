"""Two attempts in training: the gate, the memory, hand-worked samples, internalisation, and a run
that is resumed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiential.agents.actor import ActorAgent
from experiential.agents.reflector import (
    BankMemory,
    PrivateMemory,
    Reflection,
    ReflectionMemory,
    Reflector,
    Retry,
)
from experiential.bank.folder import FolderBank
from experiential.bank.manager_like import NoBank
from experiential.config import ActorSettings, EnvSettings, OptimSettings, ReflectionSettings
from experiential.errors import BackendError, BankError, ConfigError
from experiential.llm.scripted import ScriptedLLM
from experiential.llm.transformers import TransformersLLM
from experiential.recipe import load_experiment
from experiential.rollout import Episode, Job, Rollout, Task
from experiential.training.checkpoint import CheckpointStore
from experiential.training.local import LocalRuntime
from experiential.training.methods.attempt_samples import internalised_samples, reinforced_samples
from experiential.training.methods.attempts import Attempts, SecondAttempt, split_attempts
from experiential.training.methods.reflection import memory_of
from experiential.training.metrics import read_events
from experiential.training.roles import Roles
from experiential.training.runtime import Sample, sample_from_generation
from experiential.training.trainer import Trainer
from experiential.types import Condition, Generation, Message, Trajectory, Turn
from tests.llm_tiny import tiny_random_model, tiny_tokenizer
from tests.wrapper_worlds import CorridorEnv

POOLED = ActorSettings(guided="none", advantage="pooled")
VAULT = EnvSettings(train={"split": "train", "worlds": 8})


def copy_note(messages: list[Message]) -> str:
    """A reflection on Vault: the lever that the clerk's note calls live; nothing where there is no
    note.
    """
    play = messages[1]["content"]
    return (
        f"<reflection>pull {play.split(' was live')[0].split()[-1]}</reflection>"
        if "clerk" in play
        else "I have no idea."
    )


def obey(messages: list[Message]) -> str:
    """Do what the reflection says; without one waste the try."""
    said = messages[0]["content"].split("1. ")
    return said[1].splitlines()[0] if len(said) > 1 else "pull nothing"


def jobs(count: int = 4) -> list[Job]:
    return [
        Job(Task(seed=n, group=str(n), options={"world": n}), Condition.FREE, sampling_seed=n)
        for n in range(count)
    ]


def play(
    reflect: Any = copy_note,
    act: Callable[[list[Message]], str] = obey,
    memory: ReflectionMemory | None = None,
    settings: EnvSettings = VAULT,
    threshold: float = 1.0,
    tries: Sequence[Job] | None = None,
) -> tuple[list[Episode], list[SecondAttempt], dict[str, Any]]:
    """Both attempts at four vaults and what the step's record says of them."""
    reflector = (
        Reflector(ScriptedLLM(reflect), prompts="brief")
        if not hasattr(reflect, "areflect")
        else reflect
    )
    rollout = Rollout(
        settings,
        settings.train,
        NoBank(),
        lambda: ActorAgent(ScriptedLLM(act), prompts="brief"),
        slots=4,
    )
    attempts = Attempts(rollout, reflector, memory, threshold=threshold)
    try:
        episodes = asyncio.run(attempts.play(jobs() if tries is None else tries))
    finally:
        rollout.close()
    return *split_attempts(episodes), attempts.event(episodes)


def test_what_failed_is_tried_again_on_the_same_instance_with_the_reflection() -> None:
    firsts, seconds, event = play()
    assert [e.trajectory.success for e in firsts] == [False] * 4 and [
        e.trajectory.success for e in seconds
    ] == [True] * 4
    for first, second in zip(firsts, seconds, strict=True):
        assert second.first is first and first.job is not None and second.job is not None
        assert (second.trajectory.instance, second.job.task) == (
            first.trajectory.instance,
            first.job.task,
        )
        assert second.trajectory.turns[0].observation == first.trajectory.turns[0].observation
        assert (first.job.attempt, second.job.attempt) == (
            1,
            2,
        ) and second.job.sampling_seed != first.job.sampling_seed
        assert second.job.advice == second.reflection.block and str(second.reflection.text) in str(
            second.job.advice
        )
    expected = {
        "gated": 1.0,
        "r1": 0.0,
        "r2": 1.0,
        "success_first": 0.0,
        "success_second": 1.0,
        "reflections": 4,
        "memory_writes": 0,
    }
    assert event == expected | {"unread": {}}


def test_what_succeeded_is_not_reflected_on() -> None:
    """Three of four vaults are opened at once; only the fourth is tried again."""

    def lucky(messages: list[Message]) -> str:
        name = messages[1]["content"].split("vault of ")[1].split(".")[0]
        return (
            levers[name]
            if len(messages[0]["content"].split("1. ")) == 1 and name in levers
            else obey(messages)
        )

    levers = {s.trajectory.task[18:-1]: str(s.reflection.text) for s in play()[1][:3]}
    firsts, seconds, event = play(act=lucky)
    assert [e.trajectory.success for e in firsts] == [True, True, True, False]
    assert (
        [e.first for e in seconds] == [firsts[3]]
        and event["gated"] == 0.25
        and event["success_first"] == 0.75
    )
    assert play(threshold=0.0)[1] == [], "r1 = 0 is not below a threshold of 0"


def test_an_attempt_that_failed_for_a_technical_reason_is_data_and_is_not_reflected_on() -> None:
    def broken(messages: list[Message]) -> str:
        if "1. " in messages[0]["content"]:
            raise BackendError("Expected an answer, got a time-out")
        return obey(messages)

    firsts, seconds, _ = play(
        tries=[
            jobs()[0],
            Job(Task(seed=1, group="x", options={"world": 99}), Condition.FREE, sampling_seed=0),
        ]
    )
    assert "Expected world between" in str(firsts[1].trajectory.error) and len(seconds) == 1
    firsts, seconds, event = play(act=broken)
    assert all("time-out" in str(e.trajectory.error) for e in seconds) and event["r2"] is None
    assert reinforced_samples([*firsts, *seconds], POOLED) == [], (
        "a reflection whose second attempt broke has no reward"
    )


def test_a_second_attempt_at_another_instance_is_a_failure_with_a_reason() -> None:
    class Wanderer(CorridorEnv):
        resets = 0

        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[str, dict[str, Any]]:
            Wanderer.resets += 1
            observation, info = super().reset(seed=seed, options=options)
            return observation, info | {"instance": f"corridor {Wanderer.resets}"}

    def make(settings: EnvSettings, kwargs: dict[str, Any]) -> Wanderer:
        return Wanderer()

    rollout = Rollout(
        EnvSettings(),
        {},
        NoBank(),
        lambda: ActorAgent(ScriptedLLM(["fall"])),
        slots=1,
        make_env=make,
    )
    reflector = Reflector(ScriptedLLM(["<reflection>Say go.</reflection>"]))
    _, (again,) = split_attempts(
        asyncio.run(Attempts(rollout, reflector, None, threshold=1.0).play(jobs(1)))
    )
    rollout.close()
    assert again.trajectory.error == "env: came back as corridor 2, not as corridor 1"


def failing(messages: list[Message]) -> str:
    raise BackendError("Expected an answer, got a time-out")


@pytest.mark.parametrize(
    ("reflect", "why"),
    [
        (lambda messages: "Hm.", "no_reflection"),
        (failing, "backend: Expected an answer, got a time-out"),
    ],
)
def test_without_a_readable_reflection_the_second_attempt_is_bare_and_counted(
    reflect: Any, why: str
) -> None:
    _, seconds, event = play(reflect=reflect, memory=PrivateMemory())
    assert len(seconds) == 4 and all(e.job is not None and e.job.advice is None for e in seconds)
    assert event["unread"] == {why: 4} and event["reflections"] == event["memory_writes"] == 0


def test_reflections_of_a_step_see_the_memory_of_its_start_and_the_last_passing_is_kept() -> None:
    memory, llm = PrivateMemory(), ScriptedLLM(copy_note)
    memory.keep("Old.", Trajectory(task="t"))
    _, seconds, event = play(reflect=Reflector(llm, prompts="brief"), memory=memory)
    assert all("Used:\n1. Old.\n" in call[1]["content"] for call in llm.calls)
    assert memory.text == seconds[-1].reflection.text != "Old." and event["memory_writes"] == 4


def test_a_reflection_whose_second_attempt_failed_is_not_kept() -> None:
    memory = PrivateMemory()
    _, seconds, event = play(
        reflect=lambda messages: "<reflection>pull nothing</reflection>", memory=memory
    )
    assert len(seconds) == 4 and memory.text == "" and event["memory_writes"] == 0


class FailingMemory(PrivateMemory):
    """Cannot be read."""

    def recall(self, trajectory: Trajectory) -> list[str]:
        raise BankError("Expected a bank, got none")


def test_a_memory_that_fails_is_counted_and_the_step_goes_on() -> None:
    _, seconds, event = play(memory=FailingMemory())
    assert [e.trajectory.success for e in seconds] == [True] * 4 and event["memory_errors"] == {
        "Expected a bank, got none": 4
    }


def test_a_retry_shows_the_first_attempt_and_makes_no_reflection() -> None:
    _, seconds, event = play(reflect=Retry(prompts="full"), act=lambda messages: "pull nothing")
    assert all(
        "pull nothing" in str(e.job and e.job.advice) and e.reflection.generation is None
        for e in seconds
    )
    assert event["reflections"] == 0 and event["unread"] == {} and len(seconds) == 4


@pytest.mark.parametrize(
    ("feedback", "actor", "told"),
    [("shown", True, True), ("hidden", False, False), ("reflector", False, True)],
)
def test_the_baseline_sees_the_same_feedback_as_the_reflector_unless_told_otherwise(
    feedback: Any, actor: bool, told: bool
) -> None:
    """Only a reflector that reads the clerk's note can name the lever; ``hidden`` hides it from
    both.
    """
    firsts, seconds, _ = play(settings=VAULT.model_copy(update={"feedback": feedback}))
    assert all(("clerk" in e.trajectory.turns[-1].feedback) == actor for e in firsts)
    assert [e.trajectory.success for e in seconds] == [told] * 4


def made(reward: float, *, group: str = "g", error: str | None = None) -> Episode:
    generation = Generation(text="a", prompt_ids=(1, 2), response_ids=(3,), logprobs=(-0.5,))
    trajectory = Trajectory(
        task="t", group=group, reward=reward, condition=Condition.FREE, error=error
    )
    return Episode(trajectory, () if error else (generation,))


def second(
    first: Episode, reward: float, token: int = 7, *, read: bool = True, group: str = "g"
) -> SecondAttempt:
    episode = made(reward, group=group)
    response = Generation(text="r", prompt_ids=(5, 6), response_ids=(token,), logprobs=(-0.25,))
    reflection = (
        Reflection(text="r", block="b", generation=response)
        if read
        else Reflection(generation=response, reason="no_reflection")
    )
    return SecondAttempt(
        trajectory=episode.trajectory,
        generations=episode.generations,
        first=first,
        reflection=reflection,
    )


def test_advantages_are_relative_to_attempts_of_the_same_kind() -> None:
    """Four first attempts (1, 0, 0, 0); second ones 1 and 0 with, and 1 without a reflection that
    could be read.

    Reflections get 1, 0 and 0 (not read, whatever its attempt got): mean 1/3, spread sqrt(2)/3, so
    sqrt(2), -1/sqrt(2), -1/sqrt(2). Second attempts with a reflection get 1 and -1; the one without
    is alone and teaches nothing. Every sample weighs as a first attempt: 1/4.
    """
    firsts = [made(1.0), made(0.0), made(0.0), made(0.0)]
    seconds = [second(firsts[1], 1.0), second(firsts[2], 0.0), second(firsts[3], 1.0, read=False)]
    samples = reinforced_samples([*firsts, *seconds], POOLED)
    assert [s.tokens for s in samples] == [(5, 6, 7)] * 3 + [(1, 2, 3)] * 2
    assert [s.advantages[0] for s in samples] == pytest.approx(
        [2**0.5, -(0.5**0.5), -(0.5**0.5), 1.0, -1.0], abs=1e-5
    )
    assert [s.weight for s in samples] == pytest.approx([1 / 4] * 5)
    assert {s.kind for s in samples} == {None}


def test_an_unreadable_reflection_gets_the_lowest_reward() -> None:
    first = made(0.0)
    assert [second(first, r, read=False).reflection_reward for r in (1.0, 0.0, -1.0)] == [
        0.0,
        0.0,
        -1.0,
    ]
    assert second(first, 0.5).reflection_reward == 0.5


def test_credit_by_turn_gives_a_reflection_all_of_its_reward() -> None:
    firsts = [made(0.0), made(0.0)]
    settings = POOLED.model_copy(update={"credit": "turn"})
    samples = reinforced_samples(
        [*firsts, second(firsts[0], 1.0), second(firsts[1], 0.0)], settings
    )
    assert [s.advantages[0] for s in samples if s.tokens[0] == 5] == pytest.approx(
        [1.0, -1.0], abs=1e-5
    )


def test_a_group_with_nobody_to_compare_with_gives_no_sample() -> None:
    first = made(0.0)
    assert reinforced_samples([first, second(first, 1.0)], POOLED) == []
    assert reinforced_samples([made(0.0, error="env: gone")], POOLED) == []


def internalise(
    episodes: Sequence[Episode],
    agent: ActorAgent,
    policy: LocalRuntime | None = None,
    kind: Any = "sft",
    weight: float = 0.5,
) -> list[Sample]:
    settings = ReflectionSettings(internalise=kind, weight=weight)
    return asyncio.run(internalised_samples(episodes, settings, agent, policy))  # type: ignore[arg-type]  # sft asks no policy


def test_successes_are_imitated_without_the_reflection() -> None:
    """No prompt of a sample holds a token of the reflection; what is learnt are the very tokens
    that were drawn.
    """
    tokenizer = tiny_tokenizer()
    reflector = Reflector(ScriptedLLM(copy_note), prompts="brief")

    def act(messages: list[Message]) -> str:
        (text,) = (message["content"] for message in messages)
        return text.split("1. ")[1].splitlines()[0] if "1. " in text else "pull nothing"

    def actor() -> ActorAgent:
        return ActorAgent(ScriptedLLM(act, tokenizer=tokenizer), prompts="brief")

    rollout = Rollout(VAULT, VAULT.train, NoBank(), actor, slots=4)
    episodes = asyncio.run(Attempts(rollout, reflector, None, threshold=1.0).play(jobs()))
    rollout.close()
    firsts, seconds = split_attempts(episodes)
    seconds[3] = replace(
        seconds[3], trajectory=seconds[3].trajectory.model_copy(update={"reward": 0.0})
    )
    samples = internalise([*firsts, *seconds], actor())
    assert len(samples) == 3 and {s.kind for s in samples} == {"sft"}
    assert [s.weight for s in samples] == pytest.approx([0.5 / 4] * 3), (
        "weight 0.5, mean over four first attempts"
    )
    for sample, episode in zip(samples, seconds, strict=False):
        (generation,) = episode.generations
        prompt = tokenizer.decode(sample.tokens[: sample.positions[0]])
        assert (
            "<experience>" in tokenizer.decode(generation.prompt_ids) and "experience" not in prompt
        )
        assert str(episode.reflection.text) not in prompt and episode.trajectory.task in prompt
        assert [sample.tokens[p] for p in sample.positions] == list(generation.response_ids)
    assert internalise([*firsts, *seconds], actor(), kind="none") == []


def test_reverse_kl_teaches_the_first_attempts_tokens_by_the_policy_with_the_reflection() -> None:
    """Teacher and student are one policy; its score under the prompt with the reflection, taken by
    hand, is the teacher's.
    """
    model, tokenizer = tiny_random_model()
    policy = LocalRuntime(TransformersLLM(model, tokenizer), OptimSettings())
    agent = ActorAgent(policy, prompts="brief", max_tokens=4, seed=1)
    observations = ["A vault.", "It clicks."]
    for observation in observations:
        agent.act(observation)
    turns = tuple(Turn(observation=o, action="a", feedback="f") for o in observations)
    first = Episode(Trajectory(task="t", group="g", turns=turns), tuple(agent.generations))
    block = "<experience>\n1. Pull jade.\n</experience>\n"
    better = SecondAttempt(
        trajectory=Trajectory(task="t", group="g", reward=1.0),
        generations=first.generations,
        first=first,
        reflection=Reflection(text="Pull jade.", block=block),
    )
    samples = internalise([first, better], agent, policy, "reverse_kl")
    assert [s.kind for s in samples] == ["reverse_kl"] * 2 and sum(
        s.weight for s in samples
    ) == pytest.approx(0.5)
    told = ActorAgent(policy, prompts="brief").replay(observations, first.generations, advice=block)
    by_hand = asyncio.run(policy.score([sample_from_generation(g, 0.0) for g in told]))
    for sample, generation, teacher, taught in zip(
        samples, first.generations, by_hand, told, strict=True
    ):
        assert sample.tokens == generation.prompt_ids + generation.response_ids, (
            "the student is trained without the reflection"
        )
        assert sample.teacher == pytest.approx(teacher) and "Pull jade." in tokenizer.decode(
            taught.prompt_ids
        )
        assert sample.teacher != pytest.approx(sample.logprobs, abs=1e-4)
    full = internalise([first, better], agent, policy, "full_forward_kl")
    assert [s.kind for s in full] == ["full_forward_kl"] * 2
    assert [s.weight for s in full] == [s.weight for s in samples]
    for sample, taught in zip(full, told, strict=True):
        assert sample.taught == sample_from_generation(taught, 0.0)
    worse = replace(better, trajectory=better.trajectory.model_copy(update={"reward": 0.0}))
    assert internalise([first, worse], agent, policy, "reverse_kl") == []
    policy.close()


def test_the_ablations_keep_no_memory() -> None:
    assert isinstance(memory_of(ReflectionSettings(), None), PrivateMemory)
    assert (
        memory_of(ReflectionSettings(memory="none"), None) is None
        and memory_of(ReflectionSettings(mode="retry"), None) is None
    )
    with pytest.raises(ValueError, match="Expected a bank"):
        memory_of(ReflectionSettings(memory="bank"), None)


def test_options_of_reflection_reach_its_parts(tmp_path: Path) -> None:
    options = "methods.reflection={memory: bank, recall: 3, same_task: true, max_tokens: 17}"
    bank = ["extractor.enabled=true", "extractor.distill=false"]
    experiment = load_experiment("erl", [options, *bank])
    settings = experiment.methods.reflection
    assert settings is not None
    with FolderBank(tmp_path / "bank", embedder="hashing") as bank:
        memory = memory_of(settings, bank)
    assert isinstance(memory, BankMemory) and (memory.k, memory.same_task) == (3, True)
    policy = LocalRuntime(TransformersLLM(*tiny_random_model()), OptimSettings())
    reflection = Roles(experiment, (policy, policy)).reflector().reflect(Trajectory(task="t"))
    assert reflection.generation is not None and len(reflection.generation.response_ids) <= 17
    assert reflection.generation.temperature == experiment.actor.temperature == 1.0
    cooler = load_experiment("erl", ["methods.reflection.temperature=0.3"])
    drawn = Roles(cooler, (policy, policy)).reflector().reflect(Trajectory(task="t")).generation
    assert drawn is not None and drawn.temperature == 0.3
    policy.close()


def test_recipes_are_the_method_and_its_ablations_at_the_budget_of_the_baseline() -> None:
    grpo, erl, no_memory, no_reflection = (
        load_experiment(name) for name in ("grpo", "erl", "erl-no-memory", "erl-no-reflection")
    )
    assert grpo.methods.reflection is None and erl.methods.reflection is not None
    assert (
        2 * erl.actor.group_size == grpo.actor.group_size and erl.actor.groups == grpo.actor.groups
    )
    assert erl.methods.reflection == ReflectionSettings(
        mode="reflect", memory="private", internalise="sft", threshold=1.0, weight=0.1
    )
    assert no_memory.methods.reflection == erl.methods.reflection.model_copy(
        update={"memory": "none"}
    )
    assert no_reflection.methods.reflection == erl.methods.reflection.model_copy(
        update={"mode": "retry", "memory": "none"}
    )
    assert erl.env == grpo.env and not erl.extractor.enabled


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("actor.guided=all", "actor.guided=none"),
        ("methods.reflection.memory=bank", "Expected a bank"),
    ],
)
def test_settings_that_do_not_fit_are_refused(override: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_experiment("erl", [override])


SMALL = (
    "actor.groups=4",
    "eval.before=false",
    "eval.after=false",
    "actor.epochs=1",
    "actor.mini_batches=1",
    "env.train={split: train, worlds: 4}",
)


def memory_in(folder: Path) -> str:
    methods = CheckpointStore(folder / "checkpoints").latest()[1]["methods"]
    return methods["Reflection"]["memory"]["text"]


@pytest.mark.slow
def test_a_resumed_run_plays_and_remembers_the_same(tmp_path: Path) -> None:
    """The tiny model on Vault: stopped after one of two steps and resumed, it ends with the memory
    of an unbroken run.
    """
    whole, part = tmp_path / "whole", tmp_path / "part"
    Trainer(load_experiment("erl", [*SMALL, "run.steps=2"]), whole).run()
    Trainer(load_experiment("erl", [*SMALL, "run.steps=1"]), part).run()
    half = memory_in(part)
    Trainer(load_experiment("erl", [*SMALL, "run.steps=2"]), part, resume=True).run()
    assert half and memory_in(part) == memory_in(whole)
    rows = [
        [
            {name: value for name, value in row.items() if name not in ("id", "shown")}
            for e in read_events(folder / "episodes.jsonl")
            for row in e["rows"]
        ]
        for folder in (whole, part)
    ]
    assert rows[0] == rows[1]
    steps = [e for e in read_events(whole / "metrics.jsonl") if e["event"] == "step"]
    assert sum(e["memory_writes"] for e in steps) > 0 and all(e["reflections"] > 0 for e in steps)
    assert (
        sum(e["reinforced_samples"] for e in steps) > 0
        and sum(e["internalised_samples"] for e in steps) > 0
    )
    assert all(e["episodes"] == 16 + e["reflections"] + sum(e["unread"].values()) for e in steps)


def test_reflections_can_live_in_the_bank_of_the_run(tmp_path: Path) -> None:
    bank = (
        "methods.reflection.memory=bank",
        "extractor.enabled=true",
        "extractor.distill=false",
        "bank.embedder=hashing",
    )
    Trainer(load_experiment("erl", [*SMALL, *bank, "run.steps=1"]), tmp_path).run()
    (step,) = (e for e in read_events(tmp_path / "metrics.jsonl") if e["event"] == "step")
    assert step["entries"] == step["memory_writes"] > 0
