"""Vault: the answer holds for a world, cannot be seen, and is told when the tries are spent."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.memory_headroom import (
    Memory,
    Transcript,
    after_failures,
    first_word,
    lever_player,
    play,
    second_word,
)
from experiential.envs import oracle
from experiential.envs.names import FIRST, world_names
from experiential.envs.vault import LEVERS, VaultEnv, law_lever


def live(env: VaultEnv, world: int, seed: int, era: int = 0) -> str:
    env.reset(seed=seed, options={"world": world, "era": era})
    return env.oracle_action()


def test_splits_share_no_name() -> None:
    names = {split: world_names(split) for split in ("train", "dev", "eval", "corpus")}
    counts = {split: len(listed) for split, listed in names.items()}
    assert counts == {"train": 318, "dev": 120, "eval": 218, "corpus": 368}
    assert len({name for listed in names.values() for name in listed}) == sum(counts.values())


def test_worlds_of_published_figures_stay_as_they_were() -> None:
    """The digests were taken before there was a development split."""
    digests = {split: VaultEnv(split=split, worlds=120).digest() for split in ("train", "eval")}
    assert digests == {"train": "4b1da12180a6", "eval": "39100c3f2197"}
    played = [live(VaultEnv(split="eval"), world, 7 * world) for world in range(4)]
    assert played == ["pull jade", "pull green", "pull gold", "pull green"]


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
    "arguments",
    [
        {"split": "test"},
        {"law": "second"},
        {"note": None},
        {"levers": 1},
        {"levers": 17},
        {"tries": 0},
        {"worlds": 0},
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="Expected"):
        VaultEnv(**arguments)  # type: ignore[arg-type]


# Without the clerk's note


def test_without_a_note_a_failed_visit_names_no_lever_but_those_pulled() -> None:
    env = VaultEnv(note=False)
    for seed in range(50):
        _, info = env.reset(seed=seed, options={"world": seed % 32})
        wrong = [action for action in info["admissible"] if action != env.oracle_action()][:2]
        env.step(wrong[0])
        observation, *_, info = env.step(wrong[1])
        assert observation == f"The {wrong[1][5:]} lever clicks. The vault locks."
        assert info["feedback"] == observation


def test_without_a_note_a_world_has_its_own_levers_in_an_order_of_the_seed() -> None:
    """Levers absent from one visit only would be ruled out for nothing."""
    env = VaultEnv(note=False)
    shown = [
        [env.reset(seed=seed, options={"world": world})[1]["admissible"] for seed in range(12)]
        for world in range(32)
    ]
    assert all(len({frozenset(one) for one in visits}) == 1 for visits in shown)
    assert all(len({tuple(one) for one in visits}) > 1 for visits in shown)
    assert len({frozenset(visits[0]) for visits in shown}) > 16
    places = [
        env.reset(seed=world, options={"world": world})[1]["admissible"].index(env.oracle_action())
        for world in env.worlds
    ]
    assert len(set(places)) > 6  # the live lever stands anywhere


def test_a_memory_of_all_visits_follows_the_ideal_and_that_of_the_last_one_stalls() -> None:
    """By hand, for 14 levers and two tries: after v failed visits all of them leave 14 - 2v levers
    and so 2 / (14 - 2v); the last one alone leaves 12, so 2 / 12 for ever. Seeds are fixed.
    """
    env = VaultEnv(worlds=300, note=False)
    seeds = range(4)
    every = np.concatenate([play(env, lever_player(s), 7, seed=s) for s in seeds])
    last = np.concatenate([play(env, lever_player(s), 7, seed=s, window=1) for s in seeds])
    assert every[:, 6].all()  # six failures leave two levers
    assert after_failures(every) == pytest.approx(
        [2 / 14, 2 / 12, 2 / 10, 2 / 8, 2 / 6, 2 / 4, 1], abs=0.06
    )
    assert after_failures(last) == pytest.approx([2 / 14, *[2 / 12] * 6], abs=0.06)
    assert last[:, 6].mean() == pytest.approx(1 - 12 / 14 * (10 / 12) ** 6, abs=0.04)


def test_an_order_agreed_on_makes_the_last_visit_stand_for_all() -> None:
    """The limit of the variant, which its page states: going on in the alphabet needs no more."""
    env = VaultEnv(worlds=60, note=False)
    assert play(env, lever_player(sweep=True), 7, window=1)[:, 6].all()


def test_eras_without_a_note_have_levers_and_an_answer_of_their_own() -> None:
    env = VaultEnv(note=False, worlds=100)
    answers = [(live(env, w, 0), live(env, w, 0, era=1)) for w in range(100)]
    assert sum(first != second for first, second in answers) > 80


# Under the law


def test_under_the_law_the_lever_follows_from_the_first_word_in_every_split() -> None:
    for split in ("train", "dev", "eval"):
        for note in (True, False):
            env = VaultEnv(split=split, worlds=100, law="first", note=note)
            for world, name in enumerate(env.names):
                assert live(env, world, world) == f"pull {law_lever(name.split()[0])}"
    first = {split: {name.split()[0] for name in world_names(split)} for split in ("train", "eval")}
    assert first["train"] == first["eval"] == set(FIRST)


def test_the_law_gives_each_lever_two_words_and_each_era_another_law() -> None:
    for era in (0, 1):
        levers = [law_lever(word, era) for word in FIRST]
        assert sorted(levers) == sorted(2 * LEVERS)
    assert sum(law_lever(word) != law_lever(word, 1) for word in FIRST) > 24
    names = [name.split()[0] for name in world_names("eval")[:160]]
    counts = np.unique([law_lever(word) for word in names], return_counts=True)[1]
    assert len(counts) == 16 and counts.min() >= 7 and counts.max() <= 12


def test_the_law_cannot_be_guessed_from_the_words() -> None:
    """Neither alphabetical order, nor initials, nor the answers of vaults without the law fit."""
    levers = [LEVERS.index(law_lever(word)) for word in FIRST]
    for guess in (
        [index % 16 for index in range(32)],
        [index // 2 for index in range(32)],
        [len(word) for word in FIRST],
    ):
        assert sum(one == other for one, other in zip(levers, guess, strict=True)) <= 5
    assert abs(np.corrcoef(levers, range(32))[0, 1]) < 0.35
    assert sum(law_lever(word)[0] == word[0].lower() for word in FIRST) <= 5
    plain, lawful = VaultEnv(worlds=160), VaultEnv(worlds=160, law="first")
    assert sum(live(plain, w, 0) == live(lawful, w, 0) for w in range(160)) < 25


def transfer(key: Any, note: bool = True) -> float:
    """Success on the first visit to evaluation vaults with the read-only bank of the training."""
    bank = Memory(list[Transcript])
    train = VaultEnv(worlds=160, law="first", note=note)
    play(train, lever_player(), 1, key=key, memory=bank)
    held_out = VaultEnv(split="eval", worlds=160, law="first", note=note)
    return float(play(held_out, lever_player(), 1, key=key, memory=bank, write=False).mean())


def test_who_knows_the_law_from_training_opens_every_held_out_vault() -> None:
    assert transfer(first_word) == 1.0
    assert transfer(second_word) < 0.25  # chance: 2 / 14
    assert 0.25 < transfer(first_word, note=False) < 1.0


def test_vaults_under_the_law_are_other_tasks_with_another_digest() -> None:
    variants = [{}, {"law": "first"}, {"note": False}, {"law": "first", "note": False}]
    envs = [VaultEnv(**arguments) for arguments in variants]
    assert len({env.digest() for env in envs}) == 4
    names = [env.reset(seed=0)[1]["task_id"] for env in envs]
    assert names[0] == names[2] != names[1] == names[3]
