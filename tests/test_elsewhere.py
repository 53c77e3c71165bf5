"""Environments in the trainers of other packages: the same episodes, rewards and ends."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import uvicorn
from websockets.exceptions import ConnectionClosed

from experiential.adapters import openenv_app, register_with_gem
from experiential.agents.prompts import prompt_set
from experiential.envs import ENVS, random_agent
from experiential.envs.make import make
from experiential.envs.readiness import READINESS
from experiential.errors import ConfigError

LONGEST = 60
"""Turns of an episode, so that one that is played at random ends in time."""


@pytest.fixture(params=sorted(ENVS))
def env_id(request: pytest.FixtureRequest) -> str:
    entry = READINESS[request.param]
    if steps := entry.missing():
        pytest.skip(f"needs: {' && '.join(steps)}")
    if entry.costly:
        pytest.skip(entry.costly)
    return request.param


def actions_and_rewards(env_id: str, seed: int, world: int) -> tuple[list[str], list[float], bool]:
    """Play an episode directly, by the oracle as long as it knows an action, else at random."""
    env: gym.Env[str, str] = make(env_id)
    seen, info = env.reset(seed=seed, options={"world": world})
    inner: Any = env.unwrapped
    chosen = random_agent(env, seed)
    actions, rewards, over = list[str](), list[float](), False
    while not over and len(actions) < LONGEST:
        try:
            action = inner.oracle_action()
        except (AttributeError, ValueError):
            action = chosen(seen, info)
        seen, reward, terminated, truncated, info = env.step(action)
        actions.append(action)
        rewards.append(float(reward))
        over = terminated or truncated
    env.close()
    return actions, rewards, info["success"]


class Scripted:
    """Stand for verifiers' agent: answer each turn with the next action, in a reply around it."""

    def __init__(self, actions: list[str]) -> None:
        self._actions = actions
        self.asked: list[str] = []
        self.rewards: dict[str, float] = {}
        self.trace = SimpleNamespace(
            record_reward=self.rewards.__setitem__, record_metric=self.rewards.__setitem__
        )

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[Scripted]:
        yield self

    async def turn(self, message: str) -> Any:
        self.asked.append(message)
        over = len(self.asked) > len(self._actions)
        said = "" if over else f"Let me see.\n<action>{self._actions[len(self.asked) - 1]}</action>"
        return SimpleNamespace(terminated=over, last_reply=said)


@pytest.fixture
def plugin() -> Any:
    pytest.importorskip("verifiers.v1", reason="needs the extra verifiers")
    return pytest.importorskip("experiential_verifiers")


def test_verifiers_plays_the_same_episodes(plugin: Any, env_id: str) -> None:
    environment = plugin.load_environment(env_id, episodes=2, seed=5)
    tasks = list(environment.taskset)
    assert [task.data.seed for task in tasks] == [5, 6]
    task = tasks[1]
    actions, rewards, success = actions_and_rewards(env_id, 6, task.data.options["world"])
    agent = Scripted(actions)
    asyncio.run(environment.run(task, SimpleNamespace(player=agent)))
    assert agent.rewards == {"episode_reward": sum(rewards), "success": float(success)}


def test_verifiers_finds_the_plug_in_by_its_id_and_its_worlds(plugin: Any) -> None:
    import verifiers.v1 as vf

    config = vf.TasksetConfig(id=plugin.ID)
    assert vf.load_environment(plugin.TextEnvironmentConfig(taskset=config)).taskset
    resolved = vf.utils.loaders.resolve_env_config({"taskset": {"id": plugin.ID}})
    assert type(resolved) is plugin.TextEnvironmentConfig
    assert (resolved.player.harness.id, resolved.player.runtime.type) == ("null", "subprocess")
    lake = plugin.load_environment("experiential/FrozenLake-v0", split="eval", instruction="Walk.")
    tasks = list(lake.taskset)
    worlds = make("experiential/FrozenLake-v0", split="eval").unwrapped.worlds  # pyright: ignore
    assert [task.data.options["world"] for task in tasks] == worlds
    assert tasks[0].data.system_prompt == prompt_set("full").actor_system("Walk.")
    assert len({task.key for task in tasks}) == len(worlds)


def test_gem_plays_the_same_episodes(env_id: str) -> None:
    gem = pytest.importorskip("gem", reason="needs the package gem-llm")
    register_with_gem()
    register_with_gem()  # again does nothing
    actions, rewards, success = actions_and_rewards(env_id, 3, 0)
    game = gem.make(env_id, seed=3, instruction="Win.")
    seen, info = game.reset(options={"world": 0})
    assert seen.startswith(prompt_set("full").actor_system("Win."))
    got, over = list[float](), False
    for action in actions:
        assert not over
        reply = f"So be it.\n<action>{action}</action>"
        _, reward, terminated, truncated, info = game.step(reply)
        got.append(reward)
        over = terminated or truncated
    assert over or len(actions) == LONGEST
    assert (got, info["success"]) == (rewards, success)
    game.close()


def test_gem_makes_several_at_once_and_spawns_and_draws_actions() -> None:
    gem = pytest.importorskip("gem", reason="needs the package gem-llm")
    register_with_gem()
    games = gem.make_vec(["experiential/FrozenLake-v0"] * 2, seed=4)
    seen, _ = games.reset()
    assert seen[0] != seen[1]
    one = games.envs[0].spawn()
    first, _ = one.reset(seed=4)
    assert first == seen[0]
    reply = one.sample_random_action()
    assert not one.step(reply)[4]["invalid"]
    with pytest.raises(NotImplementedError):
        one.spawn(same_state=True)


@contextmanager
def openenv_client(env_id: str, **arguments: Any) -> Iterator[Any]:
    """Connect OpenEnv's own client to OpenEnv's own server, which a thread of this process runs."""
    core = pytest.importorskip("openenv.core", reason="needs the package openenv")
    app = openenv_app(env_id, **arguments)
    listener = socket.create_server(("127.0.0.1", 0))  # a client may connect before the server runs
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield lambda: core.GenericEnvClient(address, 300, 300).sync()  # seconds
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def test_openenv_plays_the_same_episodes(env_id: str) -> None:
    with openenv_client(env_id, instruction="Win.") as client, client() as game:
        actions, rewards, success = actions_and_rewards(env_id, 3, 0)
        seen = game.reset(seed=3, world=0, episode_id="first")
        assert seen.observation["text"].startswith(prompt_set("full").actor_system("Win."))
        assert not seen.done and game.state()["episode_id"] == "first"
        got = list[float]()
        for action in actions:
            assert not seen.done
            seen = game.step({"text": f"So be it.\n<action>{action}</action>"})
            got.append(seen.reward)
        assert seen.done or len(actions) == LONGEST
        assert (got, seen.observation["success"]) == (rewards, success)
        assert game.state()["step_count"] == len(actions)


def test_openenv_keeps_sessions_apart_and_says_what_is_wrong() -> None:
    lake = "experiential/FrozenLake-v0"
    with openenv_client(lake, sessions=2) as client, client() as one, client() as other:
        with pytest.raises(RuntimeError, match="reset"):
            one.step({"text": "Up"})
        first = [game.reset(seed=4, world=0).observation for game in (one, other)]
        assert first[0] == first[1] and first[0]["task"]
        one.step({"text": "Up"})
        assert (one.state()["step_count"], other.state()["step_count"]) == (1, 0)
        assert one.step({"text": "no move"}).observation["invalid"]
        with pytest.raises(RuntimeError, match="Expected world between"):
            one.reset(world=-1)
        # the refusal is read, or it is known already that the connection is closed
        with client() as third, pytest.raises((RuntimeError, ConnectionClosed)):
            third.reset()


def test_openenv_refuses_arguments_before_it_serves() -> None:
    with pytest.raises(ConfigError, match="to be positive"):
        openenv_app("experiential/FrozenLake-v0", sessions=0)
    with pytest.raises(ConfigError, match="experiential/Vault-v0"):
        openenv_app("experiential/Vualt-v0")


def test_without_openenv_the_command_that_installs_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core.env_server", None)
    with pytest.raises(ConfigError, match="pip install openenv"):
        openenv_app("experiential/Vault-v0")
