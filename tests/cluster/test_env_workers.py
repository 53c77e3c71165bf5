"""Environments in Ray actors: the same episodes, thousands at once, and a reason for each one that
is lost.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from experiential.agents.actor import ActorAgent
from experiential.bank.manager_like import NoBank
from experiential.config import ClusterSettings, EnvSettings
from experiential.errors import EnvError, ExperientialError, MissingExtraError
from experiential.llm.scripted import ScriptedLLM
from experiential.rollout import Episode, Job, Rollout, Task, make_env
from experiential.training.openrlhf.env_workers import EnvWorkers
from experiential.training.openrlhf.supervisor import joined_ray
from experiential.types import Condition, Message
from experiential.wrappers.experience import ExperienceWrapper
from experiential.wrappers.search_and_ask import SearchAndAskWrapper
from tests.cluster.kills import kill
from tests.cluster.worlds import SLEEPY
from tests.wrapper_worlds import CountingManager

pytest.importorskip("ray", reason="Ray is not installed; `make test-cluster` runs these tests")
pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("ray_cluster")]

CALL_TIMEOUT = 8.0
"""Seconds after which a call counts as hung here: far above what any call takes that is not."""


def cluster(**values: Any) -> ClusterSettings:
    return ClusterSettings(
        **{"env_workers": 2, "start_timeout": 120.0, "call_timeout": 120.0} | values
    )


@pytest.fixture
def workers(ray_cluster: Any) -> Iterator[EnvWorkers]:
    with EnvWorkers(cluster()) as pool:
        yield pool


def sleepy(seconds: float = 0.0, length: int = 5, meet: int = 0) -> EnvSettings:
    return EnvSettings(
        id=SLEEPY, kwargs={"seconds": seconds, "length": length, "meet": meet}, train={}
    )


def jobs(*fates: str) -> list[Job]:
    tasks = (
        Task(seed, f"g{seed}", {"fate": fate} if fate else {}) for seed, fate in enumerate(fates)
    )
    return [Job(task, Condition.FREE, sampling_seed=task.seed) for task in tasks]


@contextmanager
def rollout(
    workers: EnvWorkers,
    settings: EnvSettings,
    slots: int,
    reply: Callable[[list[Message]], str] = lambda _: "sleep",
    **options: Any,
) -> Iterator[Rollout]:
    llm = ScriptedLLM(reply)
    made = Rollout(
        settings,
        settings.train,
        NoBank(),
        lambda: ActorAgent(llm),
        slots=slots,
        make_env=workers.make,
        **options,
    )
    try:
        yield made
    finally:
        made.close()


def failures(workers: EnvWorkers) -> list[str]:
    return [failure for worker in workers.workers for failure in worker.failures]


def errors(episodes: list[Episode]) -> list[str | None]:
    return [episode.trajectory.error for episode in episodes]


def actions_of(env: gym.Env[str, str], seed: int) -> Iterator[str]:
    """Actions that are the same for equal worlds: drawn from what the environment samples."""
    env.action_space.seed(seed)
    while True:
        yield env.action_space.sample()


def episode(env: gym.Env[str, str], seed: int, options: dict[str, Any] | None = None) -> list[Any]:
    """Everything that an environment gives in one episode of at most 40 steps."""
    seen: list[Any] = [env.reset(seed=seed, options=options)]
    rng = np.random.default_rng(seed)
    for action in actions_of(env, seed):
        admissible = seen[-1][-1].get("admissible")
        seen.append(env.step(str(rng.choice(admissible)) if admissible else action))
        if seen[-1][2] or seen[-1][3] or len(seen) > 40:
            return seen
    raise AssertionError("an environment never ends")


@pytest.mark.parametrize("name", ["experiential/Vault-v0", "experiential/FrozenLake-v0"])
def test_equal_seeds_give_the_same_episodes_as_in_this_process(
    workers: EnvWorkers, name: str
) -> None:
    settings = EnvSettings(id=name, max_turns=12, train={})
    here, there = make_env(settings, {}), workers.make(settings, {})
    for seed in range(5):
        assert episode(there, seed) == episode(here, seed)
    here.close()
    there.close()


def test_options_reach_the_environment(workers: EnvWorkers) -> None:
    settings = EnvSettings(kwargs={"worlds": 4}, train={})
    here, there = make_env(settings, {}), workers.make(settings, {})
    starts = [
        (env.reset(seed=3, options={"world": 2}), env.reset(seed=3, options={"world": 3}))
        for env in (here, there)
    ]
    assert starts[0] == starts[1]
    assert starts[0][0] != starts[0][1]


def test_a_remote_environment_has_the_spaces_and_attributes_of_the_local_one(
    workers: EnvWorkers,
) -> None:
    here, there = make_env(EnvSettings(), {}), workers.make(EnvSettings(), {})
    assert (there.observation_space, there.action_space) == (
        here.observation_space,
        here.action_space,
    )
    assert (there.metadata, there.render_mode, there.unwrapped) == (
        here.metadata,
        here.render_mode,
        there,
    )
    lazy = workers.make(sleepy(length=7), {})
    lazy.reset(seed=0)
    assert lazy.get_wrapper_attr("length") == 7
    assert lazy.get_wrapper_attr("pid") != os.getpid()
    assert lazy.has_wrapper_attr("length") and not lazy.has_wrapper_attr("width")


def test_wrappers_stand_around_a_remote_environment_as_around_any(workers: EnvWorkers) -> None:
    manager = CountingManager("Beds are soft.")
    env = SearchAndAskWrapper(
        ExperienceWrapper(workers.make(sleepy(length=2), {}), manager), max_calls=1
    )
    observation, info = env.reset(seed=0)
    assert "Beds are soft." in observation
    assert [hit["id"] for hit in info["experience"]] == ["e0"]
    assert "Beds are soft." in env.step("<search_and_ask>which bed?</search_and_ask>")[0]
    env.step("sleep")
    *_, terminated, _, last = env.step("sleep")
    assert terminated
    assert [t.id for t in manager.submitted] == [last["trajectory_id"]]
    assert [turn.action for turn in manager.submitted[0].turns] == ["sleep", "sleep"]
    env.close()


async def test_a_call_to_the_bank_does_not_step_the_remote_environment(workers: EnvWorkers) -> None:
    replies = iter(["<search_and_ask>which bed?</search_and_ask>", "sleep", "sleep"])
    with rollout(workers, sleepy(length=2), 1, lambda _: next(replies), search_and_ask=2) as play:
        (played,) = await play.play([Job(Task(0, "g"), Condition.GUIDED, 0)])
    assert played.trajectory.error is None
    assert [turn.action for turn in played.trajectory.turns] == ["sleep", "sleep"]
    assert len(played.generations) == 3


async def test_two_hundred_episodes_are_inside_a_step_at_once_and_hold_no_threads_here(
    workers: EnvWorkers,
) -> None:
    number, threads, before = 200, [0], threading.active_count()

    def reply(messages: list[Message]) -> str:
        threads[0] = max(threads[0], threading.active_count())
        return "sleep"

    with rollout(workers, sleepy(length=2, meet=number // 2), number, reply) as play:
        assert errors(await play.play(jobs(*[""] * number))) == [None] * number
    assert threads[0] - before < 64


async def test_five_hundred_episodes_take_far_less_than_one_after_the_other(
    workers: EnvWorkers,
) -> None:
    number, length, seconds = 500, 10, 0.02
    with rollout(workers, sleepy(seconds, length), number) as play:
        begin = time.perf_counter()
        played = await play.play(jobs(*[""] * number))
        elapsed = time.perf_counter() - begin
    assert errors(played) == [None] * number
    assert all(e.trajectory.success and len(e.trajectory.turns) == length for e in played)
    serial = number * length * seconds
    assert elapsed < serial / 4, (
        f"{elapsed:.1f} s; one after the other they sleep for {serial:.0f} s"
    )


async def test_a_killed_worker_fails_its_episodes_by_name_and_the_next_ones_run(
    ray_cluster: Any,
) -> None:
    calls = iter(range(10**6))
    with EnvWorkers(cluster()) as workers:

        def reply(messages: list[Message]) -> str:
            if next(calls) == 20:
                ray_cluster.kill(workers.workers[0].current.handle)
            return "sleep"

        with rollout(workers, sleepy(0.01, length=20), 8, reply) as play:
            played = errors(await play.play(jobs(*[""] * 8)))
            lost = [error for error in played[::2] if error is not None]
            assert len(lost) == 4 and played[1::2] == [None] * 4
            assert all(
                error.startswith("env: env worker 0 on ") and "died: " in error for error in lost
            )
            assert errors(await play.play(jobs(*[""] * 8))) == [None] * 8
        assert len(failures(workers)) == 1


async def test_an_environment_that_ends_its_process_is_a_failed_episode_too(
    ray_cluster: Any,
) -> None:
    with EnvWorkers(cluster(env_workers=1)) as workers, rollout(workers, sleepy(), 1) as play:
        first, second = errors(await play.play(jobs("die", "")))
        assert first is not None and first.startswith("env: env worker 0 on ") and "died: " in first
        assert second is None


async def test_a_hung_environment_is_given_up_and_its_worker_goes_on(ray_cluster: Any) -> None:
    with (
        EnvWorkers(cluster(env_workers=1, call_timeout=CALL_TIMEOUT)) as workers,
        rollout(workers, sleepy(), 4) as play,
    ):
        hung, *others = errors(await play.play(jobs("hang", "", "", "")))
        assert hung is not None and hung.startswith("env: env worker 0 on ")
        assert f"step gave no answer within {CALL_TIMEOUT:g} s" in hung
        assert others == [None] * 3
        assert errors(await play.play(jobs(*[""] * 4))) == [None] * 4
        assert failures(workers) == []


async def test_a_worker_that_answers_nothing_is_started_again(ray_cluster: Any) -> None:
    with EnvWorkers(cluster(env_workers=1, call_timeout=CALL_TIMEOUT)) as workers:
        env = workers.make(sleepy(), {})
        pid = env.reset(seed=0)[1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            with pytest.raises(
                EnvError, match=r"env worker 0 on .* hangs: step gave no answer within 8 s"
            ):
                await env.astep("sleep")
            assert env.reset(seed=0)[1]["pid"] != pid
            assert env.step("sleep")[0] == "Night 1."
        finally:
            os.kill(pid, signal.SIGKILL)


async def test_what_an_environment_raises_is_the_reason_of_its_episode(workers: EnvWorkers) -> None:
    with rollout(workers, sleepy(), 2) as play:
        first, second, third = errors(await play.play(jobs("raise", "", "")))
    assert first is not None and first.endswith("step failed: ValueError: the bed broke")
    assert (second, third) == (None, None)
    assert failures(workers) == []


async def test_a_step_of_a_lost_episode_names_the_end_of_its_worker(
    ray_cluster: Any, workers: EnvWorkers
) -> None:
    first, second = workers.make(sleepy(), {}), workers.make(sleepy(), {})
    for env in (first, second):
        env.reset(seed=0)
    kill(ray_cluster, workers.workers[0].current.handle)
    for _ in range(2):
        with pytest.raises(EnvError, match="env worker 0 on .* died"):
            await first.astep("sleep")
    assert (await second.astep("sleep"))[0] == "Night 1."


async def test_without_restarts_others_take_over_and_the_last_one_ends_the_run(
    ray_cluster: Any,
) -> None:
    with EnvWorkers(cluster(restarts=0)) as workers, rollout(workers, sleepy(), 2) as play:
        assert errors(await play.play(jobs("", ""))) == [None, None]
        kill(ray_cluster, workers.workers[0].current.handle)
        first, second = errors(await play.play(jobs("", "")))
        assert first is not None and "env worker 0" in first and second is None
        assert errors(await play.play(jobs("", ""))) == [None, None]
        kill(ray_cluster, workers.workers[1].current.handle)
        assert all("env worker 1" in str(error) for error in errors(await play.play(jobs("", ""))))
        with pytest.raises(
            ExperientialError,
            match="got none after 0 restarts each: env worker 0 .*; env worker 1 ",
        ):
            await play.play(jobs("", ""))


def test_an_environment_that_cannot_be_made_is_named_at_once(workers: EnvWorkers) -> None:
    with pytest.raises(EnvError, match="describe failed: .*no-such"):
        workers.make(EnvSettings(id="experiential/no-such-v0"), {})


def test_no_workers_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="Expected cluster.env_workers of at least 1, got 0"):
        EnvWorkers(ClusterSettings())


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"experiential-rl\[openrlhf\]"):
        joined_ray()
