"""Vault: the answer holds for a world, cannot be seen, and is told when the tries are spent."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.envs import oracle
from experiential.envs.vault import LEVERS, VaultEnv, _names


def live(env: VaultEnv, world: int, seed: int, era: int = 0) -> str:
    env.reset(seed=seed, options={"world": world, "era": era})
    return env.oracle_action()


def test_splits_share_no_name() -> None:
    names = [set(_names(split)) for split in ("train", "eval", "corpus")]
    assert all(len(n) > 300 for n in names)
    assert not (names[0] & names[1] or names[0] & names[2] or names[1] & names[2])


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 31), st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_the_answer_depends_on_the_world_and_not_on_the_seed(
    world: int, first: int, second: int
) -> None:
    env = VaultEnv()
    assert live(env, world, first) == live(env, world, second)


def test_another_era_has_another_answer_for_most_worlds() -> None:
    env = VaultEnv(worlds=100)
    assert sum(live(env, w, 0) != live(env, w, 0, era=1) for w in range(100)) > 80


def test_answers_are_spread_over_the_levers() -> None:
    env = VaultEnv(worlds=300)
    counts = np.unique([live(env, w, 0) for w in range(300)], return_counts=True)[1]
    assert len(counts) == len(LEVERS)
    assert counts.max() < 40


def test_a_first_observation_says_nothing_about_the_answer() -> None:
    """The live lever is no likelier than any other to stand first, or on the sign."""
    env = VaultEnv(levers=4)
    first = sign = 0
    for seed in range(800):
        observation, info = env.reset(seed=seed)
        lever = env.oracle_action()[5:]
        first += info["admissible"][0][5:] == lever
        sign += f"the {lever} lever is" in observation
    assert 140 < first < 260
    assert 140 < sign < 260


def test_random_play_succeeds_as_often_as_chance() -> None:
    env, rng = VaultEnv(levers=12, tries=2), np.random.default_rng(0)
    wins = 0
    for seed in range(1500):
        _, info = env.reset(seed=seed)
        picks = rng.choice(12, size=2, replace=False)
        for pick in picks:
            _, reward, done, _, info = env.step(info["admissible"][pick])
            if done:
                break
        wins += info["success"]
    assert 0.13 < wins / 1500 < 0.21


def test_spent_tries_end_with_a_note_that_names_the_live_lever_among_others() -> None:
    env = VaultEnv(tries=2)
    _, info = env.reset(seed=4)
    wrong = [a for a in info["admissible"] if a != env.oracle_action()]
    _, _, done, _, _ = env.step(wrong[0])
    assert not done
    observation, reward, done, truncated, info = env.step(wrong[1])
    assert (reward, done, truncated, info["success"]) == (0.0, True, False, False)
    assert f"{env.oracle_action()[5:]} was live" in observation
    assert observation.count(" was ") == 3
    with pytest.raises(gym.error.ResetNeeded):
        env.step(wrong[0])


@pytest.mark.parametrize(
    "form", ["{}", "<action>{}</action>", " {}. ", "I think: <Action>{}</Action>"]
)
def test_accepted_forms_of_an_action(form: str) -> None:
    env = VaultEnv()
    env.reset(seed=1)
    assert env.step(form.format(env.oracle_action()))[1] == 1.0


def test_an_unreadable_action_wastes_a_try_and_says_so() -> None:
    env = VaultEnv(tries=1)
    env.reset(seed=1)
    _, reward, done, _, info = env.step("dance")
    assert (reward, done, info["invalid"]) == (0.0, True, True)


def test_oracle_opens_every_vault_and_gymnasium_finds_nothing_wrong() -> None:
    env = gym.make("experiential/Vault-v0", split="eval", worlds=40)
    policy = oracle(env)
    for seed in range(40):
        observation, info = env.reset(seed=seed)
        assert env.step(policy(observation, info))[1] == 1.0
    check_env(VaultEnv(), skip_render_check=True)


@pytest.mark.parametrize(
    "arguments", [{"split": "test"}, {"levers": 1}, {"levers": 17}, {"tries": 0}, {"worlds": 0}]
)
def test_wrong_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        VaultEnv(**arguments)  # type: ignore[arg-type]
