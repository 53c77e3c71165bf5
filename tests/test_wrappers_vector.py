"""Vector environments: episode boundaries in every autoreset mode, one retrieval per call."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.errors import BankError
from experiential.types import Condition, Trajectory
from experiential.wrappers import ExperienceVectorWrapper, ExperienceWrapper, SearchAndAskWrapper
from tests.wrapper_worlds import CorridorEnv, CountingManager

MODES = list(AutoresetMode)


def twin(
    manager: CountingManager,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    count: int = 2,
    **kwargs: Any,
) -> ExperienceVectorWrapper:
    return ExperienceVectorWrapper(
        SyncVectorEnv([CorridorEnv] * count, autoreset_mode=mode), manager, **kwargs
    )


def scalar(
    manager: CountingManager,
    mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    count: int = 2,
    **kwargs: Any,
) -> SyncVectorEnv:
    return SyncVectorEnv(
        [lambda: ExperienceWrapper(CorridorEnv(), manager, **kwargs)] * count, autoreset_mode=mode
    )


def bare(infos: Any) -> Any:
    """Infos as plain data; identifiers, which are random, only say that they are there."""
    if isinstance(infos, dict):
        return {
            key: bare(value) if key != "trajectory_id" else [v is not None for v in value]
            for key, value in infos.items()
        }
    return [bare(item) for item in infos] if isinstance(infos, list | tuple | np.ndarray) else infos


def content(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory without its random identifiers."""
    record = trajectory.model_dump(exclude={"id", "uses"})
    return record | {"uses": [use.model_dump(exclude={"id", "episode"}) for use in trajectory.uses]}


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(MODES),
    when=st.sampled_from(["episode", "turn", "both"]),
    inject=st.sampled_from(["observation", "system", "none"]),
    guided=st.booleans(),
    actions=st.lists(
        st.lists(st.sampled_from(["go", "stay", "fall"]), min_size=2, max_size=2), max_size=15
    ),
)
def test_the_twin_gives_what_scalar_wrappers_inside_a_vector_environment_give(
    mode: AutoresetMode, when: Any, inject: Any, guided: bool, actions: list[list[str]]
) -> None:
    managers = CountingManager("Say go.", "Walk."), CountingManager("Say go.", "Walk.")
    options = {"when": when, "inject": inject, "k": 2}
    one, other = twin(managers[0], mode, **options), scalar(managers[1], mode, **options)
    assert (
        one.observation_space == other.observation_space
        and one.single_observation_space == other.single_observation_space
    )
    calls = [env.reset(seed=4, options={"guided": guided}) for env in (one, other)]
    assert calls[0][0] == calls[1][0] and bare(calls[0][1]) == bare(calls[1][1])
    done = np.zeros(2, dtype=bool)
    for row in actions:
        if mode is AutoresetMode.DISABLED and done.any():
            for env in (one, other):
                env.reset(options={"reset_mask": done.copy(), "guided": guided})
        steps = [env.step(tuple(row)) for env in (one, other)]
        assert steps[0][0] == steps[1][0] and bare(steps[0][4]) == bare(steps[1][4])
        assert all((a == b).all() for a, b in zip(steps[0][1:4], steps[1][1:4], strict=True))
        done = steps[0][2] | steps[0][3]
    assert [content(t) for t in managers[0].submitted] == [
        content(t) for t in managers[1].submitted
    ]


@pytest.mark.parametrize("mode", MODES)
def test_each_finished_episode_is_one_trajectory_with_its_own_turns(mode: AutoresetMode) -> None:
    manager = CountingManager("Say go.")
    envs = twin(manager, mode)
    envs.reset(seed=4)
    for _ in range(7):
        *_, terminated, truncated, _ = envs.step(("go", "stay"))
        done = terminated | truncated
        if mode is AutoresetMode.DISABLED and done.any():
            envs.reset(options={"reset_mask": done})
    walked = [t for t in manager.submitted if t.success]
    waited = [t for t in manager.submitted if not t.success]
    assert len(walked) == (2 if mode is AutoresetMode.NEXT_STEP else 3) and len(waited) == 1
    assert all([turn.action for turn in t.turns] == ["go", "go"] for t in walked)
    assert [turn.feedback[:6] for turn in walked[1].turns] == ["Cell 1", "Cell 2"] and len(
        waited[0].turns
    ) == 6
    assert [t.seed for t in walked] == [4] + [None] * (len(walked) - 1) and waited[0].seed == 5
    assert envs.abandoned == 0 and all(len(t.uses) == 1 for t in manager.submitted)


def test_episodes_that_start_together_are_searched_for_in_one_call_per_hidden_instance() -> None:
    manager = CountingManager("Say go.")
    envs = twin(manager, count=3)
    envs.reset(seed=7)
    assert manager.searches == [(["Cross the corridor."] * 3, 1, None)]
    for _ in range(2):
        envs.step(("go", "stay", "go"))
    assert len(manager.searches) == 1
    envs.step(("go", "stay", "go"))
    assert manager.searches[1:] == [(["Cross the corridor."] * 2, 1, None)]
    hiding = twin(manager, count=3, exclude_same_instance=True)
    hiding.reset(seed=[7, None, 9])
    assert manager.searches[2:] == [
        (["Cross the corridor."], 1, name) for name in ("corridor#7", None, "corridor#9")
    ]


def test_the_real_manager_serves_them_in_one_micro_batch(tmp_path: Path) -> None:
    with (
        ExperienceBank(tmp_path, embedder="hashing") as bank,
        ExperienceManager(bank, retrieval={"batch_wait": 0.25, "floor": 0.0}) as manager,
    ):
        bank.add_many(
            ["Cross the corridor: say go.", "Cross the corridor: never fall."],
            task="Cross the corridor.",
        )
        envs = ExperienceVectorWrapper(SyncVectorEnv([CorridorEnv] * 4), manager)
        _, infos = envs.reset(seed=1)
        assert len({hits[0]["id"] for hits in infos["experience"]}) == 2
        stats = manager.stats()
        assert (stats["searches"], stats["mean_batch"]) == (4, 4.0)


def test_guided_group_and_version_may_differ_per_environment() -> None:
    manager = CountingManager("Say go.")
    envs = twin(manager, AutoresetMode.SAME_STEP, count=3, guided=[True, True, False])
    observations, infos = envs.reset(
        seed=1,
        options={"guided": [True, False, False], "group": ["a", "a", "b"], "policy_version": 5},
    )
    assert [text.startswith("<experience>") for text in observations] == [True, False, False]
    assert [len(hits) for hits in infos["experience"]] == [1, 0, 0] and [
        len(query) for query, *_ in manager.searches
    ] == [1]
    for _ in range(2):
        observations, *_ = envs.step(("go",) * 3)
    assert [(t.condition, t.group, t.policy_version) for t in manager.submitted] == [
        (Condition.GUIDED, "a", 5),
        (Condition.FREE, "a", 5),
        (Condition.FREE, "b", 5),
    ]
    assert [text.startswith("<experience>") for text in observations] == [True, True, False]
    with pytest.raises(ValueError, match="Expected 3 values of guided, one per environment, got 2"):
        envs.reset(options={"guided": [True, False]})


def test_a_reset_of_some_environments_leaves_the_others_running() -> None:
    manager = CountingManager("Say go.")
    envs = twin(manager, AutoresetMode.DISABLED)
    envs.reset(seed=4)
    envs.step(("stay", "stay"))
    options = {"reset_mask": np.array([True, False]), "guided": False, "map": 2}
    observations, _ = envs.reset(options=options)
    assert options.keys() == {"reset_mask", "guided", "map"} and not observations[0].startswith(
        "<experience>"
    )
    assert [log.episode.guided for log in envs.logs if log.episode] == [
        False,
        True,
    ] and envs.abandoned == 1
    envs.step(("fall", "fall"))
    assert [len(t.turns) if t else None for t in envs.last_trajectories] == [1, 2]


def test_a_failing_bank_is_named_per_environment_and_play_goes_on() -> None:
    envs = twin(CountingManager("Say go.", error=BankError("disk full")))
    observations, infos = envs.reset(seed=4)
    assert (
        list(infos["experience_error"]) == ["BankError: disk full"] * 2
        and "<experience>" not in observations[0]
    )
    *_, infos = envs.step(("fall", "stay"))
    assert list(infos["experience_error"]) == ["BankError: disk full", None]


def test_the_twin_works_over_processes_and_closes_them() -> None:
    manager = CountingManager("Say go.")
    envs = ExperienceVectorWrapper(AsyncVectorEnv([CorridorEnv] * 2, shared_memory=False), manager)
    observations, _ = envs.reset(seed=4)
    assert all(
        text.startswith("<experience>\n1. Say go.\n</experience>\nCell 0") for text in observations
    )
    for _ in range(2):
        envs.step(("go", "stay"))
    assert [(t.success, len(t.turns)) for t in manager.submitted] == [(True, 2)]
    envs.close()
    assert envs.abandoned == 1 and manager.closed == 0


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_search_and_ask_lives_inside_the_vector_environment_with_a_shared_manager(
    mode: AutoresetMode,
) -> None:
    manager = CountingManager("Say go.")
    make = [lambda: SearchAndAskWrapper(ExperienceWrapper(CorridorEnv(), manager))] * 2
    envs = SyncVectorEnv(make, autoreset_mode=mode)
    envs.reset(seed=4)
    observations, *_, infos = envs.step(("<search_and_ask>how?</search_and_ask>", "go"))
    assert "<search_result>" in observations[0] and observations[1].startswith("Cell 1")
    assert list(infos["search_and_ask"]["query"]) == ["how?", None]
    for _ in range(2):
        envs.step(("go", "go"))
    assert [[use.how for use in t.uses] for t in manager.submitted] == [
        ["episode_start"],
        ["episode_start", "search_and_ask"],
    ]
    envs.close()


def test_wrong_arguments_are_refused_at_once() -> None:
    for kwargs, match in [
        ({"k": 0}, "k to be positive"),
        ({"when": "x"}, "Expected when"),
        ({"guided": [True]}, "Expected 2 values of guided"),
    ]:
        with pytest.raises(ValueError, match=match):
            twin(CountingManager(), **kwargs)
    with pytest.raises(TypeError, match="Expected text observations"):
        ExperienceVectorWrapper(gym.make_vec("CartPole-v1", num_envs=2), CountingManager())


def test_text_through_shared_memory_is_refused() -> None:
    class Told(CorridorEnv):
        def __init__(self) -> None:
            super().__init__()
            self.observation_space = gym.spaces.Text(64, charset=string.printable)

    envs = AsyncVectorEnv([Told] * 2, shared_memory=True)
    try:
        with pytest.raises(ValueError, match="shared_memory=False"):
            ExperienceVectorWrapper(envs, CountingManager("Say go."))
    finally:
        envs.close()
