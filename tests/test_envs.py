"""What every registered text environment promises: Gymnasium's own checks, vector twins, seeding,
pickling, an oracle.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import tomllib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import experiential.envs as envs
from experiential.envs.action_text import parse_action
from experiential.envs.grid import MOVES
from experiential.envs.readiness import READINESS, Entry
from experiential.envs.shortest_path import shortest_path
from experiential.envs.split import split_of
from experiential.envs.text_env import Info, Step, TextEnv

NAMES = sorted(set(envs.ENVS) - {"experiential/BFCL-v0", "experiential/SWE-v0"})
"""All but SWE, whose episodes are folders and processes, and BFCL, where any text is an answer:
test_swe.py and test_bfcl.py look at the same things there.
"""
GIVEN: dict[str, dict[str, Any]] = {
    "experiential/ALFWorld-v0": {"data": "made", "turns": 30},
    "experiential/BabyAI-v0": {"binary": True},
    "experiential/HotpotQA-v0": {"choices": True},
    "experiential/MiniHack-v0": {"preset": "maze"},
}
"""What an environment is made with here, so that it needs no data, names admissible actions and
ends.
"""
EPISODES = {"experiential/ALFWorld-v0": 2, "experiential/MiniHack-v0": 10}
"""How many are played of those that take long."""


def listed(name: str, *more: Any) -> Any:
    """A parameter that is skipped where a package is missing."""
    missing = " && ".join(READINESS[name].missing())
    slow = (
        [pytest.mark.slow] if name == "experiential/ALFWorld-v0" else []
    )  # each environment starts a process
    return pytest.param(
        name, *more, marks=[pytest.mark.skipif(bool(missing), reason=f"needs {missing}"), *slow]
    )


IDS = [listed(name) for name in NAMES]
VARIANTS: list[Any] = [
    *(listed(name, {"split": split}) for name in NAMES for split in ("train", "eval")),
    ("experiential/FrozenLake-v0", {"preset": "4x4"}),
    ("experiential/FrozenLake-v0", {"preset": "8x8"}),
    (
        "experiential/FrozenLake-v0",
        {"sizes": [5, 5], "budget": 12, "symbols": "wxyz", "feedback": "neutral"},
    ),
    ("experiential/Sokoban-v0", {"preset": "complementary"}),
    ("experiential/FrozenLake-v0", {"preset": "dialects", "split": "dev"}),
    ("experiential/Sokoban-v0", {"preset": "dialects", "legend": True}),
    ("experiential/Vault-v0", {"note": False, "law": "first", "split": "dev"}),
    (
        "experiential/Sokoban-v0",
        {"sizes": [5, 6], "boxes": 2, "max_solution": 12, "budget": 14, "feedback": False},
    ),
]
INFO = {
    "task": str,
    "task_id": str,
    "instance": str,
    "admissible": list,
    "success": bool,
    "invalid": bool,
    "feedback": str,
}


def make(name: str, **kwargs: Any) -> gym.Env[Any, Any]:
    """An environment as ``GIVEN`` has it, with other arguments beside."""
    return gym.make(name, **(GIVEN.get(name, {}) | kwargs))


def play(
    env: gym.Env[Any, Any], agent: Callable[[str, dict[str, Any]], str], **reset: Any
) -> list[tuple[Any, ...]]:
    """One episode: the reset, then every step, as tuples."""
    log: list[tuple[Any, ...]] = [env.reset(**reset)]
    while len(log) < 2 or not (log[-1][2] or log[-1][3]):
        log.append(env.step(agent(log[-1][0], log[-1][-1])))
    return log


def test_importing_registers_every_id_without_importing_an_environment_or_a_heavy_package() -> None:
    code = (
        f"import sys, experiential.envs, gymnasium\nassert set({sorted(envs.ENVS)!r}) <="
        " set(gymnasium.registry), list(gymnasium.registry)\nheavy = {'torch', 'transformers',"
        " 'chromadb', 'experiential.envs.vault', 'experiential.envs.sokoban'} &"
        " set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


def test_registering_again_is_silent_and_changes_nothing() -> None:
    before = gym.registry["experiential/Sokoban-v0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        envs.register()
    assert gym.registry["experiential/Sokoban-v0"] is before


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS)
def test_gymnasiums_checker_finds_nothing_to_object_to(name: str, kwargs: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*No render fps.*")  # text has no frame rate
        check_env(make(name, **kwargs).unwrapped)


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS)
def test_the_oracle_wins_every_episode_within_the_budget(name: str, kwargs: dict[str, Any]) -> None:
    env = make(name, **kwargs)
    agent = envs.oracle(env)
    for seed in range(EPISODES.get(name, 60)):
        log = play(env, agent, seed=seed)
        assert log[-1][1] == 1.0 and log[-1][2] and not log[-1][3] and log[-1][4]["success"], (
            seed,
            log,
        )
        assert [entry[-1]["success"] for entry in log[:-1]] == [False] * (len(log) - 1)
    env.close()


@pytest.mark.parametrize(("name", "kwargs"), VARIANTS)
def test_every_info_has_the_promised_keys_and_every_admissible_action_is_valid(
    name: str, kwargs: dict[str, Any]
) -> None:
    env = make(name, **kwargs)
    for seed in range(min(8, EPISODES.get(name, 8))):
        log = play(
            env,
            lambda _, info, turn=seed: info["admissible"][turn % len(info["admissible"])],
            seed=seed,
        )
        for entry in log:
            info = entry[-1]
            assert {key: type(info[key]) for key in INFO} == INFO
            assert info["admissible"] and not info["invalid"]
            assert env.observation_space.contains(entry[0])


@pytest.mark.parametrize("name", IDS)
def test_nonsense_is_invalid_and_never_wins(name: str) -> None:
    env = make(name)
    log = play(env, lambda *_: "I would rather not.", seed=3)
    assert all(entry[-1]["invalid"] for entry in log[1:])
    assert sum(entry[1] for entry in log[1:]) == 0.0 and not log[-1][-1]["success"]


@pytest.mark.parametrize("name", IDS)
def test_an_action_that_is_not_text_is_an_invalid_turn(name: str) -> None:
    env: Any = make(name)
    for action in (None, 3, b"Up", ["Up"]):
        env.reset(seed=3)
        _, reward, terminated, _, info = env.unwrapped.step(action)
        assert info["invalid"] and not terminated and reward <= 0.0
    env.close()


@pytest.mark.parametrize("name", IDS)
def test_a_reset_after_close_begins_another_episode(name: str) -> None:
    env = make(name)
    agent = envs.oracle(env)
    before = play(env, agent, seed=3)
    env.close()
    assert play(env, agent, seed=3) == before
    env.close()


@pytest.mark.parametrize("name", IDS)
def test_the_same_seed_gives_the_same_episode_and_other_seeds_give_others(name: str) -> None:
    first, second = make(name), make(name)
    agent = envs.oracle(first), envs.oracle(second)
    seeds = range(min(5, EPISODES.get(name, 5)))
    assert [play(first, agent[0], seed=s) for s in seeds] == [
        play(second, agent[1], seed=s) for s in seeds
    ]
    assert len({first.reset(seed=s)[0] for s in range(4 * len(seeds))}) > 2 * len(seeds)


@pytest.mark.parametrize("name", IDS)
def test_unseeded_resets_continue_the_seeded_stream(name: str) -> None:
    first, second = make(name), make(name)
    for env in (first, second):
        env.reset(seed=11)
    assert [first.reset()[0] for _ in range(5)] == [second.reset()[0] for _ in range(5)]


@pytest.mark.parametrize("name", IDS)
def test_the_option_world_picks_a_world_whatever_the_seed(name: str) -> None:
    env = make(name, split="eval")
    worlds = env.unwrapped.worlds
    assert worlds == list(range(len(worlds)))
    ids = [
        {env.reset(seed=seed, options={"world": world})[1]["task_id"] for seed in (0, 1)}
        for world in worlds[:10]
    ]
    assert all(len(found) == 1 for found in ids) and len(set.union(*ids)) == 10
    with pytest.raises(ValueError, match="Expected"):
        env.reset(options={"world": len(worlds)})


@pytest.mark.parametrize("name", IDS)
def test_a_pickled_environment_continues_its_episode(name: str) -> None:
    env = make(name).unwrapped
    env.reset(seed=5)
    twin = pickle.loads(pickle.dumps(env))
    action = env.oracle_action()
    assert env.step(action) == twin.step(action)
    assert env.reset() == twin.reset()


@pytest.mark.parametrize("name", IDS)
def test_stepping_after_the_end_asks_for_a_reset(name: str) -> None:
    env = make(name).unwrapped
    play(env, envs.oracle(env), seed=0)
    with pytest.raises(gym.error.ResetNeeded):
        env.step("Up")


@pytest.mark.parametrize("name", IDS)
def test_ansi_rendering_is_text_and_no_mode_renders_nothing(name: str) -> None:
    env = make(name, render_mode="ansi")
    observation, _ = env.reset(seed=0)
    assert isinstance(env.render(), str) and str(env.render()) in observation
    assert make(name).unwrapped.render() is None


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(
    "vector", [gym.vector.SyncVectorEnv, partial(gym.vector.AsyncVectorEnv, shared_memory=False)]
)
def test_vector_environments_give_what_single_ones_give(
    name: str, vector: Callable[..., gym.vector.VectorEnv[Any, Any, Any]]
) -> None:
    singles = [make(name) for _ in range(2)]
    batch = vector([partial(make, name)] * 2)
    try:
        observations, infos = batch.reset(seed=[7, 8])
        alone = [env.reset(seed=seed) for env, seed in zip(singles, (7, 8), strict=True)]
        assert list(observations) == [observation for observation, _ in alone]
        assert list(infos["task"]) == [info["task"] for _, info in alone]
        actions = [envs.oracle(env)("", {}) for env in singles]
        after, rewards, *_ = batch.step(tuple(actions))
        expected = [env.step(action) for env, action in zip(singles, actions, strict=True)]
        assert list(after) == [step[0] for step in expected] and list(rewards) == [
            step[1] for step in expected
        ]
    finally:
        batch.close()


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize(
    "vector", [gym.vector.SyncVectorEnv, partial(gym.vector.AsyncVectorEnv, shared_memory=False)]
)
def test_hostile_text_is_an_invalid_turn_of_one_member_of_a_vector(
    name: str, vector: Callable[..., gym.vector.VectorEnv[Any, Any, Any]]
) -> None:
    batch = vector([partial(make, name)] * 3)
    try:
        batch.reset(seed=[7, 8, 9])
        alone = make(name)
        alone.reset(seed=9)
        right = envs.oracle(alone)("", {})
        observations, _, _, _, infos = batch.step(("\ud800 lone", "x" * 10_000_000, right))
        assert [bool(invalid) for invalid in infos["invalid"]] == [True, True, False]
        assert observations[2] == alone.step(right)[0]
    finally:
        batch.close()


def test_the_oracle_of_an_environment_without_one_is_refused() -> None:
    with pytest.raises(TypeError, match=r"oracle_action\(\), got CartPoleEnv"):
        envs.oracle(gym.make("CartPole-v1"))


@settings(deadline=None)
@given(
    name=st.sampled_from(list(MOVES)),
    case=st.sampled_from([str.lower, str.upper, str.title]),
    tail=st.text(" .,!\n\t", max_size=4),
)
def test_an_action_is_read_bare_tagged_or_fenced_whatever_its_case_and_tail(
    name: str, case: Callable[[str], str], tail: str
) -> None:
    word = case(name) + tail
    tagged = (
        f"<action>{word}</action>",
        f"left? <ACTION>{word}</Action> so",
        f"right <action>down</action><action> {word}</action>",
    )
    for text in (word, *tagged):
        assert parse_action(text, MOVES) == name
    assert parse_action(f"I think so.\n```{word}```", MOVES) == name
    assert parse_action(f"<action>oops <action>{word}</action>", MOVES) == name


@settings(deadline=None)
@given(st.text(max_size=60))
def test_reading_an_action_never_fails_and_only_gives_members(text: str) -> None:
    assert parse_action(text, MOVES) in {None, *MOVES}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "go up",
        "up down",
        "<action></action>",
        "<action>jump</action> up",
        "<action>up",
        "upp",
        "up</action>",
    ],
)
def test_anything_else_is_no_action(text: str) -> None:
    assert parse_action(text, MOVES) is None


def test_reading_a_long_hostile_text_is_fast() -> None:
    assert parse_action("<action>" * 20_000 + "```" * 9_999, MOVES) is None


@settings(deadline=None)
@given(st.text(max_size=30))
def test_a_content_belongs_to_exactly_one_split_for_ever(content: str) -> None:
    assert split_of(content) == split_of(content)
    assert split_of(content) in ("train", "eval")
    assert (split_of("S/FG"), split_of("SG"), split_of("GS")) == tuple(
        map(split_of, ("S/FG", "SG", "GS"))
    )


@settings(max_examples=40, deadline=None)
@given(
    edges=st.dictionaries(st.integers(0, 7), st.lists(st.integers(0, 7), max_size=3), max_size=8),
    goal=st.integers(0, 7),
)
def test_search_agrees_with_bellman_ford_on_small_graphs(
    edges: dict[int, list[int]], goal: int
) -> None:
    distance = {0: 0}
    for _ in range(8):
        for node, after in edges.items():
            for other in after:
                if node in distance:
                    distance[other] = min(distance.get(other, 99), distance[node] + 1)
    path = shortest_path(
        0,
        lambda node: ((str(other), other) for other in edges.get(node, [])),
        lambda node: node == goal,
    )
    assert (None if path is None else len(path)) == distance.get(goal)
    if path:
        assert (
            shortest_path(
                0,
                lambda n: ((str(o), o) for o in edges.get(n, [])),
                lambda n: n == goal,
                len(path) - 1,
            )
            is None
        )


READY = [
    name
    for name in sorted(envs.ENVS)
    if not READINESS[name].missing() and not READINESS[name].costly
]


@pytest.mark.parametrize("name", READY)
def test_our_own_checker_finds_no_broken_convention(name: str) -> None:
    env = gym.make(name, disable_env_checker=True)
    assert envs.check_text_env(env) == []
    env.close()


class UnrulyEnv(gym.Env[Any, Any]):
    """Breaks many conventions at once, each in its own way."""

    observation_space = gym.spaces.Discrete(3)
    action_space = gym.spaces.Text(5)
    count = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self.count += 1
        return self.count, {
            "task": "",
            "task_id": 7,
            "instance": "a",
            "success": True,
            "invalid": False,
            "admissible": [],
        }

    def step(self, action: str) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if len(action) > 100:
            raise MemoryError("too long")
        return (
            "text",
            float("nan"),
            1,
            False,
            {"task": "x", "task_id": "x", "instance": "a", "success": False, "invalid": False},
        )

    def oracle_action(self) -> int:
        return 3


def test_the_checker_lists_every_fault_and_does_not_stop_at_the_first() -> None:
    faults = envs.check_text_env(UnrulyEnv())
    for part in (
        "observation_space: expected a space of text, got Discrete",
        "action_space: expected a space that holds blanks",
        "reset: expected text as observation, got int",
        "reset: expected info['task_id'] to be str, got int",
        "reset: expected info['success'] only at the end",
        "reset: expected info['admissible'] to name an action",
        "reset: expected info['task'] to say what is asked",
        "reset: expected the same observation for seed 0 twice",
        "step: expected a finite reward, got nan",
        "step: expected terminated to be a bool, got 1",
        "step: expected gymnasium.error.ResetNeeded after the end",
        "step('xxxxxxxxxxxx'...): expected an invalid turn, it raised MemoryError",
        "oracle_action: expected text, got int",
    ):
        assert any(fault.startswith(part) for fault in faults), (part, faults)
    assert len(faults) == len(set(faults))


def test_the_checker_survives_an_environment_that_only_raises() -> None:
    class Broken(UnrulyEnv):
        def reset(
            self, *, seed: int | None = None, options: dict[str, Any] | None = None
        ) -> tuple[Any, dict[str, Any]]:
            raise RuntimeError("no")

    faults = envs.check_text_env(Broken())
    assert {
        "resets: raised RuntimeError: no; it must not raise",
        "plays: raised RuntimeError: no; it must not raise",
        "oracle: raised RuntimeError: no; it must not raise",
    } < set(faults)


class CountEnv(TextEnv):
    """Count to three; ``flaw`` names the one convention that it breaks."""

    task = "Count."

    def __init__(self, flaw: str = "") -> None:
        super().__init__(4)
        self.flaw, self.listed, self.closed = flaw, ["one", "two"], False
        self.thread = threading.get_ident()

    @property
    def worlds(self) -> list[int]:
        return [1, 2, 3] if self.flaw == "worlds" else super().worlds

    def _info(self, said: str = "", **more: Any) -> Info:
        listed: Any = {
            "text": "one",
            "members": ["one", 2],
            "blank": [""],
            "unacceptable": ["nine"],
            "absent": None,
            "alone": None,
            "sometimes": ["one", "two"] if self.said == 0 else None,
            "aliased": self.listed,
        }.get(self.flaw, ("one", "two"))
        info = self._report(self.name, said, **more)
        patterns = {"pattern": "say[", "look": "say(?=[a-z])", "alone": "say", "open": "say [a-z]+"}
        if self.flaw in patterns:
            info["admissible_pattern"] = patterns[self.flaw]
        return info if listed is None else info | {"admissible": listed}

    def _begin(self, world: int) -> tuple[str, Info]:
        self.name = f"count-{self.np_random.random() if self.flaw == 'named' else world}"
        self.said = 0
        return "Say one or two.", self._info()

    def _turn(self, action: str) -> Step:
        if self.flaw == "thread" and threading.get_ident() != self.thread:
            raise RuntimeError("another thread")
        self.said += 1
        invalid = action not in ("one", "two")
        if self.flaw == "aliased":
            self.listed.append("one")
        said = "Say one or two." if invalid else f"{self.said}."
        return said, 0.0, self.said == 3, False, self._info(said, invalid=invalid)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, Info]:
        start = super().reset(seed=seed, options=options)
        if self.flaw == "options" and options:
            options.clear()
        return start

    def close(self) -> None:
        if self.flaw == "close" and self.closed:
            raise RuntimeError("closed before")
        self.closed = True


@pytest.mark.parametrize("flaw", ["", "absent", "open"])
def test_an_environment_may_list_its_actions_in_any_sequence_or_not_at_all(flaw: str) -> None:
    assert envs.check_text_env(CountEnv(flaw)) == []


@pytest.mark.parametrize(
    ("flaw", "said"),
    [
        ("text", "expected info['admissible'] to be list, got str; list the actions that are"),
        ("members", "to hold text of the action space, got '2' (int); list the texts that step()"),
        ("pattern", "without look-around and back-references, got 'say[' (unterminated"),
        ("look", "without look-around and back-references, got 'say(?=[a-z])' ("),
        ("alone", "to be a regular expression beside info['admissible'], which is missing; list"),
        ("blank", "to hold text of the action space, got '' (str)"),
        (
            "unacceptable",
            "step: expected admissible actions to be valid, got info['invalid']; list",
        ),
        ("sometimes", "in every info of a running episode or in none, got it in some; list"),
        ("aliased", "step: expected the info of earlier steps to stay as it was, got it changed"),
        ("thread", "step: expected to play in another thread too, it raised RuntimeError: another"),
        ("named", "reset: expected one info['task_id'] for world 3 whatever the seed, got 'count-"),
        ("worlds", "worlds: expected the numbers from 0 on, got [1, 2, 3]; list what reset("),
        ("options", "reset: expected options to stay {'world': 3}, got {}; copy before changing"),
        ("close", "close: expected a second close to do nothing, it raised RuntimeError: closed"),
    ],
)
def test_each_fault_is_found_and_says_what_to_do(flaw: str, said: str) -> None:
    found = envs.check_text_env(CountEnv(flaw))
    assert any(said in fault for fault in found), found
    assert all("; " in fault for fault in found)


def test_every_registered_environment_has_a_row_that_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert set(READINESS) == set(envs.ENVS)
    entry = Entry(
        "x",
        modules=("json", "no_such_package"),
        extra="some",
        variable="SOME_DATA",
        data_step="get it",
        data_needed=True,
    )
    assert (
        entry.missing() == ["pip install 'experiential-rl[some]'", "get it"]
        and not entry.has_data()
    )
    monkeypatch.setenv("SOME_DATA", str(tmp_path / "gone"))
    assert replace(entry, modules=("json",)).missing() == ["get it"]
    monkeypatch.setenv("SOME_DATA", str(tmp_path))
    assert replace(entry, modules=()).missing() == [] and entry.optional() == ""
    monkeypatch.delenv("SOME_DATA")
    assert (
        replace(entry, modules=(), data_needed=False).missing() == []
        and replace(entry, data_needed=False).optional() == "get it"
    )


def test_the_empty_folder_that_alfworld_makes_for_itself_is_no_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usual = tmp_path / ".cache" / "alfworld"
    usual.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ALFWORLD_DATA", str(usual))  # as importing alfworld does
    assert not READINESS["experiential/ALFWorld-v0"].has_data()
    (usual / "json_2.1.1").mkdir()
    assert READINESS["experiential/ALFWorld-v0"].has_data()


def test_the_extra_of_every_row_exists() -> None:
    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert {entry.extra for entry in READINESS.values()} - {""} <= set(extras)
