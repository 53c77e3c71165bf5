"""A FREE episode reaches the bank by no path: no injection, no search, no question, no counter."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from hypothesis import given
from hypothesis import strategies as st

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.types import Condition
from experiential.wrappers import ExperienceVectorWrapper, ExperienceWrapper, SearchAndAskWrapper
from tests.wrapper_worlds import CorridorEnv, CountingManager

CALL = "<search_and_ask>how to cross the corridor?</search_and_ask>"
MODES = list(itertools.product(["episode", "turn", "both"], ["observation", "system", "none"]))


class Spy:
    """Stands for a bank or a manager and fails on everything but submitting while ``sealed``."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.sealed, self.touched = inner, False, 0

    def __getattr__(self, name: str) -> Any:
        if self.sealed and name not in ("submit", "close"):
            raise AssertionError(f"A FREE episode reached {name!r} of {type(self.inner).__name__}")
        self.touched += name in ("search", "asearch", "ask")
        return getattr(self.inner, name)


def play_free(env: gym.Env[Any, Any], spy: Spy) -> list[tuple[Any, ...]]:
    """One FREE episode with questions in it; the spy is sealed from reset to the end."""
    spy.sealed = True
    calls = [env.reset(seed=3, options={"guided": False})]
    calls += [env.step(action) for action in (CALL, "stay", CALL, CALL, "go", "go")]
    spy.sealed = False
    return calls


def stacks(manager: Any, when: Any, inject: Any) -> dict[str, gym.Env[Any, Any]]:
    below = ExperienceWrapper(CorridorEnv(), manager, when=when, inject=inject)
    return {
        "both": SearchAndAskWrapper(below),
        "ask alone": SearchAndAskWrapper(CorridorEnv(), bank=manager),
    }


@pytest.mark.parametrize(("when", "inject"), MODES)
@pytest.mark.parametrize("which", ["both", "ask alone"])
def test_no_path_through_the_wrappers_reads_the_bank(which: str, when: Any, inject: Any) -> None:
    spy = Spy(CountingManager("Say go."))
    env = stacks(spy, when, inject)[which]
    for _ in range(2):
        before = spy.touched
        calls = play_free(env, spy)
        assert spy.touched == before
        texts = [call[0] for call in calls]
        assert not any("Say go." in text or "<experience>" in text for text in texts)
        assert all(
            "experience_prompt" not in call[-1] and not call[-1].get("experience") for call in calls
        )
        play_guided(env)
    submitted = spy.inner.submitted
    assert [t.condition for t in submitted] == [Condition.FREE, Condition.GUIDED] * 2
    assert all(bool(t.uses) == (t.condition is Condition.GUIDED) for t in submitted)


def play_guided(env: gym.Env[Any, Any]) -> None:
    env.reset(seed=3)
    for action in (CALL, "go", "go"):
        env.step(action)


def test_what_a_free_episode_sees_does_not_depend_on_what_the_bank_holds() -> None:
    def seen(when: Any, inject: Any, *texts: str) -> list[Any]:
        spy = Spy(CountingManager(*texts))
        calls = play_free(stacks(spy, when, inject)["both"], spy)
        return [
            (call[0], {key: value for key, value in call[-1].items() if key != "trajectory_id"})
            for call in calls
        ]

    for when, inject in MODES:
        assert seen(when, inject, "Say go.", "Walk.") == seen(when, inject)


@given(
    guided=st.lists(st.booleans(), min_size=1, max_size=6),
    actions=st.lists(st.sampled_from(["go", "stay", "fall", CALL]), min_size=1, max_size=8),
    when=st.sampled_from(["episode", "turn", "both"]),
)
def test_any_order_of_conditions_and_actions_keeps_free_episodes_apart(
    guided: list[bool], actions: list[str], when: Any
) -> None:
    spy = Spy(CountingManager("Say go."))
    env = stacks(spy, when, "observation")["both"]
    for condition in guided:
        spy.sealed = not condition
        env.reset(options={"guided": condition})
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
    assert all(not t.uses for t in spy.inner.submitted if t.condition is Condition.FREE)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("when", ["episode", "turn", "both"])
def test_the_vector_twin_keeps_free_episodes_apart(mode: AutoresetMode, when: Any) -> None:
    spy = Spy(CountingManager("Say go."))
    envs = ExperienceVectorWrapper(
        SyncVectorEnv([CorridorEnv] * 2, autoreset_mode=mode), spy, when=when, guided=False
    )
    spy.sealed = True
    observations, infos = envs.reset(seed=3)
    for _ in range(8):
        assert list(infos["experience"]) == [[], []] and not any(
            "<experience>" in text for text in observations
        )
        observations, _, terminated, truncated, infos = envs.step(("go", "stay"))
        if mode is AutoresetMode.DISABLED and (done := terminated | truncated).any():
            observations, infos = envs.reset(options={"reset_mask": done})
    assert spy.inner.submitted and all(
        t.condition is Condition.FREE and not t.uses for t in spy.inner.submitted
    )


def test_a_real_bank_counts_nothing_of_free_episodes_but_keeps_their_trajectories(
    tmp_path: Path,
) -> None:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        entry = bank.add("Cross the corridor: say go.", task="Cross the corridor.")
        manager = ExperienceManager(bank)
        spy = Spy(manager)
        env = stacks(spy, "both", "observation")["both"]
        play_free(env, spy)
        manager.drain(timeout=30)
        assert bank.get(entry.id).statistics == entry.statistics
        assert env.get_wrapper_attr("last_trajectory").uses == ()
        play_guided(env)
        manager.drain(timeout=30)
        guided = env.get_wrapper_attr("last_trajectory")
        assert {use.how for use in guided.uses} == {"episode_start", "turn", "search_and_ask"}
        assert bank.get(entry.id).statistics.uses > 0
        env.close()
        manager.close()
