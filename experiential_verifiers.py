"""Offer the text environments to `verifiers` under the id ``experiential-verifiers``.

verifiers imports a plug-in as a top-level module that exports one taskset and one environment. See
`docs/elsewhere.md`. Needs the extra ``verifiers``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from experiential.agents.actor import extract_action
from experiential.agents.prompts import prompt_set
from experiential.envs.make import make

__all__ = ["TextEnvironment", "TextTaskset", "load_environment"]

ID = "experiential-verifiers"


class TextData(vf.TaskData):
    """Hold one episode: the environment, the seed of its reset and its world."""

    env: str
    arguments: dict[str, Any]
    seed: int
    options: dict[str, int]


class TextTask(vf.Task[TextData]):
    """Stand for one episode; the environment itself rewards it."""


class TextTasksetConfig(vf.TasksetConfig):
    """Say which environment is played, and which episodes of it."""

    env: str = "experiential/FrozenLake-v0"
    """A name for `experiential.envs.make.resolve_env`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Of the environment, such as ``{"split": "train", "preset": "erl"}``."""
    episodes: int | None = Field(None, ge=1)
    """How many.  [default: one for each world; 100 where the environment lists none]"""
    seed: int = 0
    """Of the first episode; the others count on from it."""
    instruction: str = ""
    """Said to the model about the environment, before the format of an action."""


class TextTaskset(vf.Taskset[TextTask, TextTasksetConfig]):
    """Yield the worlds of an environment, over and over where more episodes are wanted."""

    def load(self) -> Iterator[TextTask]:
        """Yield a task for each episode."""
        config = self.config
        env = make(config.env, **config.arguments)
        worlds: list[int] = list(getattr(env.unwrapped, "worlds", []))
        env.close()
        system = prompt_set("full").actor_system(config.instruction)
        for number in range(config.episodes or len(worlds) or 100):
            world = {"world": worlds[number % len(worlds)]} if worlds else {}
            data = TextData(
                name=f"{config.env}#{number}",
                system_prompt=system,
                env=config.env,
                arguments=config.arguments,
                seed=config.seed + number,
                options=world,
            )
            yield TextTask(data, config.task)


class TextEnvironmentConfig(vf.EnvConfig):
    """Name the one agent, the player: by default a chat without tools, in a process here.

    Such a chat runs no code, so it needs none of the remote machines that verifiers defaults to.
    """

    player: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "subprocess"})


class TextEnvironment(vf.Env[TextEnvironmentConfig]):
    """Play an episode: observations are the user's turns, the last ``<action>`` is the action.

    The reward ``episode_reward`` is the sum of the environment's rewards, also of an episode that
    a limit of the agent ended, and the metric ``success`` is 1 where it was won.
    """

    async def run(self, task: TextTask, agents: vf.Agents) -> None:
        """Play one episode; an environment may block, so it runs in threads."""
        data, total, over = task.data, 0.0, False
        env = await asyncio.to_thread(lambda: make(data.env, **data.arguments))
        try:
            seen, info = await asyncio.to_thread(env.reset, seed=data.seed, options=data.options)
            async with agents.player.interaction(task) as interaction:
                segment = await interaction.turn(seen)
                while not segment.terminated and not over:
                    action = extract_action(segment.last_reply)
                    played = await asyncio.to_thread(env.step, action)
                    seen, reward, terminated, truncated, info = played
                    total, over = total + float(reward), terminated or truncated
                    if not over:
                        segment = await interaction.turn(seen)
        finally:
            await asyncio.to_thread(env.close)
        interaction.trace.record_reward("episode_reward", total)
        interaction.trace.record_metric("success", float(info["success"]))


def load_environment(
    env: str,
    *,
    episodes: int | None = None,
    seed: int = 0,
    instruction: str = "",
    player: vf.AgentConfig | None = None,
    **arguments: Any,
) -> vf.Env:
    """Return an environment of verifiers that plays a text environment.

    Args:
        env: its name, such as ``experiential/Sokoban-v0``.
        episodes: how many; by default one for each world.
        seed: of the first episode.
        instruction: said to the model about the environment.
        player: harness, model and limits; by default a chat loop without tools.
        **arguments: those of the environment, such as ``split="train"``.

    Raises:
        ConfigError: there is no such environment.
        MissingExtraError: a package that it needs is not installed.
    """
    taskset = {
        "id": ID,
        "env": env,
        "arguments": arguments,
        "episodes": episodes,
        "seed": seed,
        "instruction": instruction,
    }
    seats = {} if player is None else {"player": player}
    return vf.load_environment(TextEnvironmentConfig(taskset=taskset, **seats))
