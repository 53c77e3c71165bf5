"""ReflectionWrapper: a second attempt at the same instance; FeedbackWrapper: who reads the
environment's comments.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import pytest
from gymnasium.wrappers import TimeLimit

from experiential.agents.actor import ActorAgent
from experiential.agents.judge import Judge
from experiential.agents.reflector import PrivateMemory, Reflector, Retry
from experiential.envs.frozen_lake import FrozenLakeEnv
from experiential.envs.text_env import UnicodeText
from experiential.envs.vault import VaultEnv
from experiential.errors import BackendError, EnvError
from experiential.llm.scripted import ScriptedLLM
from experiential.types import Message, Trajectory
from experiential.wrappers import (
    ExperienceWrapper,
    FeedbackWrapper,
    ReflectionWrapper,
    SearchAndAskWrapper,
)
from experiential.wrappers.feedback import with_comment, without_comment
from tests.wrapper_worlds import CorridorEnv, CountingManager

LAKE = "P F F F\nF H F H\nF F F H\nH F F G"
BLOCK = "<experience>\n1. Say go.\n</experience>\n"


def reflector(*replies: str) -> Reflector:
    return Reflector(
        ScriptedLLM([f"<reflection>{reply}</reflection>" for reply in replies or ("Say go.",)]),
        prompts="brief",
    )


def play(env: gym.Env[Any, Any], *actions: str, **reset: Any) -> list[tuple[Any, ...]]:
    """Reset and act; returns what each call gave."""
    return [env.reset(**reset), *(env.step(action) for action in actions)]


def test_a_failed_attempt_is_reflected_on_and_tried_again_on_the_same_instance() -> None:
    asked = reflector()
    env = ReflectionWrapper(CorridorEnv(), asked)
    calls = play(env, "stay", "fall", "go", "go", seed=3)
    (first, told), (_, *_, during), (second, reward, terminated, truncated, info), *_, last = calls
    assert told["attempt"] == during["attempt"] == 1 and "reflection" not in during
    assert (first, second) == ("Cell 0 of a blue corridor.", f"{BLOCK}Cell 0 of a blue corridor.")
    assert second in env.observation_space
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert (info["attempt"], info["reflection"], info["first_return"]) == (2, "Say go.", 0.0)
    assert (
        info["final_observation"] == "Cell 0 of a blue corridor."
        and info["final_info"]["invalid"] is False
    )
    assert last[1:3] == (1.0, True) and (last[4]["attempt"], last[4]["reflection"]) == (
        2,
        "Say go.",
    )
    assert isinstance(asked.llm, ScriptedLLM)
    (prompt,) = asked.llm.calls
    assert "> stay\n" in prompt[1]["content"] and "Outcome: failure" in prompt[1]["content"]


def test_an_attempt_that_reaches_the_threshold_ends_the_episode_at_once() -> None:
    env = ReflectionWrapper(CorridorEnv(), Reflector(ScriptedLLM(asked)))
    *_, (_, reward, terminated, _, info) = play(env, "go", "go", seed=3)
    assert (reward, terminated, info["attempt"]) == (1.0, True, 1) and "reflection" not in info


def asked(messages: list[Message]) -> str:
    raise AssertionError("the reflector was asked")


def test_the_threshold_is_compared_with_the_return() -> None:
    """A return of 0.0 is not below a threshold of 0.0."""
    env = ReflectionWrapper(CorridorEnv(), Reflector(ScriptedLLM(asked)), threshold=0.0)
    assert play(env, "fall", seed=3)[-1][2]


VERDICTS = ['{"reason": "It fell.", "verdict": "no"}', '{"reason": "It got up.", "verdict": "yes"}']


@pytest.mark.parametrize(
    "success", [lambda run: len(run.turns) < 2, 2.0, Judge(ScriptedLLM(VERDICTS), "It got up.")]
)
def test_success_says_instead_of_the_threshold_whether_an_attempt_passed(success: Any) -> None:
    memory = PrivateMemory()
    env = ReflectionWrapper(CorridorEnv(), reflector(), success=success, memory=memory)
    calls = play(env, "go", "go", "fall", seed=3)  # the return of the first attempt is 1, then 0
    assert calls[2][2] is False and calls[2][4]["attempt"] == 2
    kept = list(memory.recall(Trajectory(task="a")))
    assert calls[3][2] and kept == ([] if success == 2.0 else ["Say go."])


def test_an_attempt_of_unknown_success_has_not_passed() -> None:
    env = ReflectionWrapper(CorridorEnv(), reflector(), success=lambda run: None)
    assert play(env, "go", "go", seed=3)[-1][4]["attempt"] == 2


def test_two_attempts_are_all_there_are() -> None:
    env = ReflectionWrapper(CorridorEnv(), reflector())
    _, again, (*_, terminated, _, info) = play(env, "fall", "fall", seed=3)
    assert not again[2] and terminated and info["attempt"] == 2
    assert env.reset(seed=4)[1]["attempt"] == 1


def test_without_a_seed_one_is_drawn_so_that_the_instance_can_be_met_again() -> None:
    """Colours are drawn by the seed; the same seed for the first episode gives the same later
    episodes.
    """

    def colours() -> list[str]:
        env = ReflectionWrapper(CorridorEnv(), reflector())
        seen = [env.reset(seed=5)[0]]
        for _ in range(12):
            start, _ = env.reset()
            again, *_ = env.step("fall")
            assert again == BLOCK + start
            seen.append(start)
        return seen

    assert colours() == colours() and len(set(colours())) == 3


def test_options_are_given_again() -> None:
    inner = CorridorEnv()
    play(ReflectionWrapper(inner, reflector()), "fall", seed=1, options={"world": 2})
    assert inner.seen_options == {"world": 2}


class Wanderer(CorridorEnv):
    """Names another instance after every reset."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        observation, info = super().reset(seed=seed, options=options)
        self.resets = getattr(self, "resets", 0) + 1
        return observation, info | {"instance": f"world {self.resets}"}


def test_an_environment_that_comes_back_as_another_instance_is_refused() -> None:
    env = ReflectionWrapper(Wanderer(), reflector())
    env.reset(seed=1)
    with pytest.raises(EnvError, match="Expected the same instance after reset"):
        env.step("fall")


def test_a_reflection_that_passed_is_remembered_and_shown_to_the_next() -> None:
    asked, memory = reflector("Fall.", "Say go.", "Say go again."), PrivateMemory()
    env = ReflectionWrapper(CorridorEnv(), asked, memory=memory)
    play(env, "fall", "fall", seed=1)
    assert memory.text == ""
    play(env, "fall", "go", "go", seed=2)
    assert memory.text == "Say go."
    play(env, "fall", "fall", seed=3)
    assert memory.text == "Say go."
    assert isinstance(asked.llm, ScriptedLLM)
    assert ["Say go." in call[1]["content"] for call in asked.llm.calls] == [False, False, True]


def failing(messages: list[Message]) -> str:
    raise BackendError("Expected an answer, got a time-out")


@pytest.mark.parametrize(
    ("reply", "why"),
    [(lambda messages: "Hm.", "no_reflection"), (failing, "BackendError: Expected an answer")],
)
def test_without_a_readable_reflection_the_second_attempt_is_played_bare(
    reply: Any, why: str
) -> None:
    env = ReflectionWrapper(CorridorEnv(), Reflector(ScriptedLLM(reply)), memory=PrivateMemory())
    (first, _), (second, *_, info), *_, last = play(env, "fall", "go", "go", seed=1)
    assert (
        first == second and info["reflection"] is None and info["reflection_error"].startswith(why)
    )
    assert last[1] == 1.0 and env.memory is not None and env.memory.state_dict() == {"text": ""}


def test_a_retry_shows_the_record_in_place_of_a_reflection() -> None:
    env = ReflectionWrapper(CorridorEnv(), Retry())
    _, (second, *_, info) = play(env, "fall", seed=1)
    assert (
        "<action>fall</action>" in second
        and second.endswith("Cell 0 of a green corridor.")
        and info["reflection"] is None
    )


def test_a_time_limit_inside_counts_each_attempt_and_one_outside_counts_both() -> None:
    inside = ReflectionWrapper(TimeLimit(CorridorEnv(), 2), reflector())
    assert [call[2:4] for call in play(inside, "stay", "stay", "stay", "stay", seed=1)[1:]] == [
        (False, False)
    ] * 3 + [(False, True)]
    outside = TimeLimit(ReflectionWrapper(CorridorEnv(limit=2), reflector()), 3)
    assert [call[3] for call in play(outside, "stay", "stay", "stay", seed=1)[1:]] == [
        False,
        False,
        True,
    ]


def test_an_experience_wrapper_inside_records_two_episodes_and_outside_one() -> None:
    manager = CountingManager("Never fall.")
    inside = ReflectionWrapper(ExperienceWrapper(CorridorEnv(), manager), reflector())
    _, (second, *_), *_ = play(inside, "fall", "go", "go", seed=1)
    assert (
        second == f"{BLOCK}<experience>\n1. Never fall.\n</experience>\nCell 0 of a green corridor."
    )
    assert [t.success for t in manager.submitted] == [False, True] and len(manager.searches) == 2
    outer = CountingManager()
    play(
        ExperienceWrapper(ReflectionWrapper(CorridorEnv(), reflector()), outer),
        "fall",
        "go",
        "go",
        seed=1,
    )
    assert [(t.success, len(t.turns)) for t in outer.submitted] == [(True, 3)]


def test_system_injection_stands_behind_the_experience() -> None:
    env = ReflectionWrapper(
        ExperienceWrapper(CorridorEnv(), CountingManager("Never fall."), inject="system"),
        reflector(),
        inject="system",
    )
    _, (second, *_, info) = play(env, "fall", seed=1)
    assert second == "Cell 0 of a green corridor."
    assert info["experience_prompt"] == f"<experience>\n1. Never fall.\n</experience>\n{BLOCK}"


def test_an_actor_that_is_reset_between_the_attempts_plays_vault_by_the_note() -> None:
    """The clerk's note names the live lever; a reflector that copies it lets the second attempt
    succeed.
    """

    def copy_note(messages: list[Message]) -> str:
        play = messages[1]["content"]
        return f"<reflection>pull {play.split(' was live')[0].split()[-1]}</reflection>"

    def obey(messages: list[Message]) -> str:
        said = messages[0]["content"].split("1. ")
        return said[1].splitlines()[0] if len(said) > 1 else "pull nothing"

    actor = ActorAgent(ScriptedLLM(obey), prompts="brief")
    env = ReflectionWrapper(VaultEnv(), Reflector(ScriptedLLM(copy_note)), inject="system")
    for seed in range(5):
        actor.reset()
        observation, info = env.reset(seed=seed)
        done, attempt, reward = False, 1, 0.0
        while not done:
            observation, reward, terminated, truncated, info = env.step(
                actor.act(observation, info)
            )
            done = terminated or truncated
            if info["attempt"] != attempt:
                actor.reset()
                attempt = info["attempt"]
        assert (attempt, reward, info["success"]) == (2, 1.0, True)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="Expected a Reflector"):
        ReflectionWrapper(CorridorEnv(), object())  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="Expected threshold to be a finite number, got nan"):
        ReflectionWrapper(CorridorEnv(), reflector(), threshold=float("nan"))
    with pytest.raises(ValueError, match="got 'better', which a bank says"):
        ReflectionWrapper(CorridorEnv(), reflector(), success="better")
    with pytest.raises(
        ValueError, match="Expected inject to be one of observation, system, got 'none'"
    ):
        ReflectionWrapper(CorridorEnv(), reflector(), inject="none")  # type: ignore[arg-type]  # that is the point
    with pytest.raises(
        ValueError, match="Expected feedback to be one of shown, hidden, reflector, got 'no'"
    ):
        FeedbackWrapper(CorridorEnv(), "no")  # type: ignore[arg-type]  # that is the point


def test_arguments_are_recorded() -> None:
    asked = reflector()
    env = ReflectionWrapper(CorridorEnv(), asked, threshold=0.5)
    assert env._saved_kwargs["reflector"] is asked and env._saved_kwargs["threshold"] == 0.5  # pyright: ignore[reportPrivateUsage]


class Commented(gym.Env[str, str]):
    """Says in info what it does not say in its observations."""

    observation_space = UnicodeText()
    action_space = UnicodeText()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "A grid.", {"feedback": "Welcome."}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "A grid.", 0.0, action == "end", False, {"feedback": "A wall."}


@pytest.mark.parametrize(
    ("make", "shown", "hidden"),
    [
        (Commented, "A grid.\n\nA wall.", "A grid."),
        (lambda: FrozenLakeEnv(preset="4x4"), f"{LAKE}\n\nNo valid actions were recorded.", LAKE),
        (
            lambda: FrozenLakeEnv(preset="4x4", feedback=False),
            f"{LAKE}\n\nNo valid actions were recorded.",
            LAKE,
        ),
        (
            VaultEnv,
            "That is no lever of this vault.\nTries left: 1. Reply: pull <lever>.",
            "Tries left: 1. Reply: pull <lever>.",
        ),
    ],
)
def test_comments_are_in_every_observation_or_in_none(make: Any, shown: str, hidden: str) -> None:
    """Wherever the environment writes them itself, and whether it does."""
    seen = {
        mode: play(FeedbackWrapper(make(), mode), "Up", seed=0)
        for mode in ("shown", "hidden", "reflector")
    }  # type: ignore[arg-type]
    assert len({calls[0][0] for calls in seen.values()}) == 1, (
        "the start of an episode stays as it is"
    )
    assert seen["shown"][1][0] == shown
    assert seen["hidden"][1][0] == seen["reflector"][1][0] == hidden
    comment = seen["hidden"][1][4]["feedback"]
    assert seen["reflector"][1][4]["withheld"] == comment
    assert "withheld" not in seen["hidden"][1][4] and "withheld" not in seen["shown"][1][4]


def test_a_comment_is_cut_as_whole_lines_only() -> None:
    assert without_comment("The lamp is on.\nIt is on.", "is on.") == "The lamp is on.\nIt is on."
    assert without_comment("Bang.", "Bang.") == "" and with_comment("", "Bang.") == "Bang."
    assert without_comment("a\n\nBang.\n\nb", "Bang.") == "a\nb"
    assert with_comment("a", "") == without_comment("a", "") == "a"


@pytest.mark.parametrize("mode", ["shown", "hidden", "reflector"])
def test_the_reflector_sees_what_the_mode_says(mode: Any) -> None:
    asked = reflector()
    observation, *_ = play(
        ReflectionWrapper(FeedbackWrapper(Commented(), mode), asked), "go", "end", seed=1
    )[1]
    assert isinstance(asked.llm, ScriptedLLM)
    assert ("A wall." in observation) == (mode == "shown")
    assert ("A wall." in asked.llm.calls[0][1]["content"]) == (mode != "hidden")


def test_a_question_is_credited_to_the_attempt_in_which_it_was_asked() -> None:
    manager = CountingManager("Say go.")
    inner = ReflectionWrapper(ExperienceWrapper(CorridorEnv(), manager), reflector())
    ask = "<search_and_ask>how?</search_and_ask>"
    play(SearchAndAskWrapper(inner), ask, "fall", "go", ask, "go", seed=3)
    first, second = manager.submitted
    for attempt, turn in ((first, 0), (second, 1)):
        (use,) = [use for use in attempt.uses if use.how == "search_and_ask"]
        assert (use.episode, use.turn) == (attempt.id, turn)
    assert (first.success, second.success) == (False, True)
