"""Rollouts: an environment that fails is data with a named reason; what our own code does wrong is
not taken for it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import gymnasium as gym
import pytest

from experiential.agents.actor import ActorAgent
from experiential.config import EnvSettings
from experiential.errors import (
    BackendError,
    ContextError,
    EnvError,
    ExperientialError,
    MissingExtraError,
)
from experiential.llm.base import SamplingParams
from experiential.llm.scripted import ScriptedLLM
from experiential.rollout import (
    AwaitedEnv,
    Episode,
    Job,
    Rollout,
    Start,
    Step,
    Task,
    failures,
    refuse_broken,
    with_experience,
)
from experiential.types import Condition, Generation, Message, Trajectory
from tests.wrapper_worlds import CorridorEnv, CountingManager


class BrittleEnv(CorridorEnv):
    """A corridor in which ``options["fate"]`` says what goes wrong: ``reset``, ``step`` or an
    answer that is none.
    """

    made: ClassVar[list[BrittleEnv]] = []

    def __init__(self, close: str = "") -> None:
        super().__init__()
        self.fate, self.close_error, self.closed = "", close, 0
        self.made.append(self)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self.fate = (options or {}).get("fate", "")
        if self.fate == "reset":
            raise OSError("no such room\nIt was torn down.")
        return super().reset(seed=seed, options=options)

    def step(self, action: str) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        answers: dict[str, Any] = {
            "no number": (observation, "much", terminated, truncated, info),
            "not finite": (observation, float("nan"), terminated, truncated, info),
            "no text": (7, reward, terminated, truncated, info),
            "no info": (observation, reward, terminated, truncated, None),
            "too few": (observation, reward, terminated, info),
        }
        if self.fate == "step":
            raise ValueError("the floor gave way")
        if self.fate == "stop":
            raise StopIteration
        return answers.get(self.fate, (observation, reward, terminated, truncated, info))

    def close(self) -> None:
        self.closed += 1
        if self.close_error:
            raise OSError(self.close_error)


class AwaitedBrittleEnv(BrittleEnv):
    """The same world with coroutines, as a remote one has them."""

    async def areset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> Start:
        return self.reset(seed=seed, options=options)

    async def astep(self, action: str) -> Step:
        return self.step(action)


@pytest.fixture(autouse=True)
def made() -> Iterator[list[BrittleEnv]]:
    BrittleEnv.made.clear()
    yield BrittleEnv.made


def job(fate: str = "", seed: int = 0, condition: Condition = Condition.FREE) -> Job:
    return Job(
        Task(seed, f"g{seed}", {"fate": fate} if fate else {}), condition, sampling_seed=seed
    )


class Forgetful(ScriptedLLM):
    """A model whose context holds ``longest`` messages."""

    def __init__(self, longest: int) -> None:
        super().__init__(["stay"])
        self.longest = longest

    async def generate(self, prompt: Any, sampling: SamplingParams | None = None) -> Generation:
        if len(prompt) > self.longest:
            raise ContextError("Expected a shorter prompt")
        return await super().generate(prompt, sampling)


@pytest.mark.parametrize("keeps", [True, False])
async def test_an_episode_that_outgrows_the_context_is_kept_without_success(keeps: bool) -> None:
    manager = CountingManager("Say go.")
    for longest, turns in ((6, 3), (1, 0)):  # system, then an observation and a reply a turn
        llm = Forgetful(longest)
        play = Rollout(
            EnvSettings(),
            {},
            manager,
            lambda llm=llm: ActorAgent(llm),
            slots=1,
            make_env=lambda *_: CorridorEnv(length=9, limit=9),
            keeps_outgrown=keeps,
        )
        first, second = await play.play([job(), job()])
        play.close()
        for episode in (first, second):
            kept = keeps and turns > 0
            assert episode.outgrown == kept
            if kept:
                assert episode.trajectory.error is None and episode.trajectory.success is False
                assert len(episode.trajectory.turns) == len(episode.generations) == turns
            else:
                assert episode.trajectory.error == "backend: Expected a shorter prompt"
    assert len(manager.submitted) == (2 if keeps else 0), "what is kept can be distilled"


@contextmanager
def rollout(
    make: Callable[[], gym.Env[str, str]] = BrittleEnv,
    slots: int = 1,
    manager: Any = None,
    reply: Callable[..., str] = lambda _: "go",
) -> Iterator[Rollout]:
    llm = ScriptedLLM(reply)
    made = Rollout(
        EnvSettings(),
        {},
        manager or CountingManager("Say go."),
        lambda: ActorAgent(llm),
        slots=slots,
        make_env=lambda *_: make(),
    )
    try:
        yield made
    finally:
        made.close()


def errors(episodes: list[Episode]) -> list[str | None]:
    """Return the reasons, without the line of this file that raised."""
    found = [episode.trajectory.error for episode in episodes]
    return [error and re.sub(PLACE, "", error) for error in found]


PLACE = r" \(\S*test_rollout\.py:\d+\)"
REASONS = {
    "reset": "env: OSError: no such room\nIt was torn down.",
    "step": "env: ValueError: the floor gave way",
    "stop": "env: StopIteration: ",
    "no number": "env: ValueError: could not convert string to float: 'much'",
    "not finite": "env: ValueError: Expected step() to give a finite reward, got nan",
    "no text": (
        "env: TypeError: Expected the environment to observe text, got int; wrap it in"
        " TextObservation"
    ),
    "no info": "env: TypeError: Expected the environment's info to be a dict, got NoneType",
    "too few": "env: ValueError: not enough values to unpack (expected 5, got 4)",
}


@pytest.mark.parametrize("fate", [fate for fate in REASONS if fate != "stop"])
@pytest.mark.parametrize("kind", [BrittleEnv, AwaitedBrittleEnv])
async def test_what_an_environment_does_wrong_fails_its_episode_by_name(
    kind: type[BrittleEnv], fate: str
) -> None:
    with rollout(kind) as play:
        before, failed, after = await play.play([job(), job(fate, 7), job()])
    assert errors([before, failed, after]) == [None, REASONS[fate], None]
    assert (before.broken, failed.broken, after.broken) == (False, True, False)
    told = failed.trajectory
    assert (told.seed, told.group, told.turns, told.uses, failed.generations) == (
        7,
        "g7",
        (),
        (),
        (),
    )


async def test_a_reason_names_the_file_and_line_of_the_environment_that_raised() -> None:
    lines = Path(__file__).read_text("utf-8").splitlines()
    with rollout() as play:
        for fate, code in (("reset", 'raise OSError("no'), ("step", 'raise ValueError("the floor')):
            (failed,) = await play.play([job(fate)])
            number = next(i for i, line in enumerate(lines, 1) if line.strip().startswith(code))
            first = (failed.trajectory.error or "").partition("\n")[0]
            assert re.search(rf"test_rollout\.py:{number}\)$", first)
        (invalid,) = await play.play([job("not finite")])
    assert not re.search(PLACE, invalid.trajectory.error or ""), "no line of it raised"


async def test_an_exception_that_a_thread_cannot_hand_over_is_one_too() -> None:
    with rollout() as play:
        assert errors(await play.play([job("stop")])) == [REASONS["stop"]]


async def test_a_failed_episode_is_not_submitted_and_credits_no_use() -> None:
    manager = CountingManager("Say go.")
    with rollout(manager=manager) as play:
        failed, played = await play.play(
            [job("step", condition=Condition.GUIDED), job(condition=Condition.GUIDED)]
        )
    assert [one.id for one in manager.submitted] == [played.trajectory.id]
    assert failed.trajectory.uses == () and len(played.trajectory.uses) == 1


async def test_the_next_episode_of_a_slot_gets_a_fresh_environment_and_the_old_one_is_closed(
    made: list[BrittleEnv],
) -> None:
    with rollout() as play:
        await play.play([job(), job("step"), job(), job()])
        assert [env.closed for env in made] == [1, 0]
        await play.play([job("reset"), job()])
        assert [env.closed for env in made] == [1, 1, 0]
    assert [env.closed for env in made] == [1, 1, 1]


async def test_a_backend_that_fails_leaves_the_environment_where_it_is(
    made: list[BrittleEnv],
) -> None:
    def reply(messages: list[Message]) -> str:
        raise BackendError("no answer")

    with rollout(reply=reply) as play:
        played = await play.play([job(), job()])
    assert errors(played) == ["backend: no answer"] * 2
    assert not any(episode.broken for episode in played) and len(made) == 1


async def test_an_environment_that_cannot_be_closed_is_counted_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        caplog.at_level(logging.ERROR),
        rollout(lambda: BrittleEnv(close="stuck\nin the door")) as play,
    ):
        assert errors(await play.play([job("step"), job("step"), job()]))[2] is None
        assert [*play.close_errors.values()] == [2]
    ((reason, times),) = play.close_errors.items()
    assert re.fullmatch(rf"OSError: stuck{PLACE}", reason) and times == 3


async def test_an_environment_that_cannot_be_made_fails_one_episode_after_the_other() -> None:
    tries = iter(range(9))

    def make() -> BrittleEnv:
        if next(tries) < 2:
            raise ConnectionError("nobody there")
        return BrittleEnv()

    with rollout(make) as play:
        assert errors(await play.play([job(), job(), job()])) == [
            "env: ConnectionError: nobody there"
        ] * 2 + [None]


class ForgetfulManager(CountingManager):
    """Our own code with a mistake in it."""

    def search(self, query: Any, **options: Any) -> Any:
        raise KeyError("a mistake of ours")


async def test_a_mistake_of_ours_is_not_taken_for_the_environments() -> None:
    with (
        rollout(manager=ForgetfulManager()) as play,
        pytest.raises(KeyError, match="a mistake of ours"),
    ):
        await play.play([job(condition=Condition.GUIDED)])


class Telling(CorridorEnv):
    """Raises the error that it was made with."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def step(self, action: str) -> Step:
        raise self.error


def test_errors_of_this_package_say_what_they_say() -> None:
    for error in (
        EnvError("worker 3 died", lost=True),
        MissingExtraError("x", "y"),
        ExperientialError("no worker is left"),
    ):
        env = AwaitedEnv(Telling(error))
        env.reset()
        with pytest.raises(type(error)) as caught:
            env.step("go")
        assert caught.value is error


async def test_an_episode_lost_with_its_process_says_nothing_against_the_environment() -> None:
    with rollout(lambda: Telling(EnvError("env worker 0 died", lost=True))) as play:
        played = await play.play([job(), job()])
    assert errors(played) == ["env: env worker 0 died"] * 2
    refuse_broken(played)


def test_a_step_that_the_environment_fails_as_a_whole_is_refused_with_its_reasons() -> None:
    def failed(reason: str, broken: bool = True) -> Episode:
        return Episode(Trajectory(task="t", error=reason), (), broken)

    broken = [
        failed("env: OSError: torn\ndown"),
        failed("env: OSError: torn\napart"),
        failed("env: ValueError: x"),
    ]
    said = (
        r"3 of 3 episodes that it failed: env: OSError: torn \(2 times\); env: ValueError: x \(1"
        r" times\)"
    )
    with pytest.raises(ExperientialError, match=said):
        refuse_broken(broken)
    refuse_broken([*broken, Episode(Trajectory(task="t"), ())])
    refuse_broken([*broken, failed("backend: x", broken=False)])
    refuse_broken([])


def test_failures_are_counted_by_the_first_line_of_their_reason() -> None:
    reasons = ["env: A: x\none", None, "backend: y", "env: A: x\nother", "env: " + "z" * 500]
    episodes = [Episode(Trajectory(task="t", error=reason), ()) for reason in reasons]
    assert failures(episodes) == {"env: A: x": 2, "backend: y": 1, "env: " + "z" * 195: 1}
    assert next(iter(failures(episodes))) == "env: A: x"


async def test_a_rollout_hides_entries_made_from_the_instance_that_it_plays() -> None:
    manager = CountingManager("Say go.")
    with rollout(CorridorEnv, manager=manager) as made:
        await made.play([job(seed=3, condition=Condition.GUIDED)])
    assert manager.searches == [("Cross the corridor.", None, "corridor#3")]


async def test_an_episode_of_unknown_outcome_fails_by_name_and_is_not_submitted() -> None:
    class SilentEnv(CorridorEnv):
        def step(self, action: str) -> Any:
            *rest, info = super().step(action)
            return *rest, {key: info[key] for key in info if key != "success"}

    manager = CountingManager("Say go.")
    with rollout(SilentEnv, manager=manager) as made:
        [episode] = await made.play([job(condition=Condition.GUIDED)])
    assert "whether the episode was a success" in (episode.trajectory.error or "")
    assert manager.submitted == []


@pytest.mark.parametrize("guided", [True, False])
def test_an_actor_that_may_only_choose_can_choose_to_ask_the_bank(guided: bool) -> None:
    manager = CountingManager("Say go.")
    env = with_experience(CorridorEnv(), manager, search_and_ask=1)
    _, info = env.reset(options={"guided": guided})
    *actions, call = info["admissible"] if guided else [*info["admissible"], ""]
    assert actions == ["go", "stay"]
    if guided:
        observation, *_, info = env.step(call)
        assert "Say go." in observation and info["admissible"] == ["go", "stay"]
