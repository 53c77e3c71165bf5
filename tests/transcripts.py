"""Transcripts in the pages of the environments: read, played again, written anew by `python -m
tests.transcripts PAGE...`.

A transcript is a fenced block whose first line makes the environment and resets it. A line that
begins with ``> `` is an action, and more of them in a row are the lines of one action. What lies
between is the observation as it came, and the last line, which begins with ``= ``, tells the last
reward and what `end` names. An episode may be left before its end; then there is no such line.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym

import experiential

assert experiential  # importing it registers the environments

_BLOCK = re.compile(r"```text\n(env = gym\.make\(.*?)\n```", re.DOTALL)
DATA = ("ALFWORLD_DATA", "HOTPOTQA_DATA", "SWE_TASKS", "WEBSHOP_DATA")
"""Variables that would put a user's data in the place of what the transcripts play."""


@dataclass(frozen=True)
class Transcript:
    """One block of a page: the line that makes the environment, what is done, and all that is
    shown.
    """

    text: str

    @property
    def first(self) -> str:
        """The line that makes and resets the environment."""
        return self.text.partition("\n")[0]

    @property
    def env_id(self) -> str:
        """The environment's id."""
        return _arguments(self.first)[0]

    @property
    def actions(self) -> list[str]:
        """Actions in order, each without its marks."""
        runs = re.findall(r"^> .*(?:\n> .*)*", self.text, re.MULTILINE)
        return [re.sub("^> ", "", run, flags=re.MULTILINE) for run in runs]

    def played(self) -> str:
        """The same transcript, made again."""
        env_id, made, reset = _arguments(self.first)
        env = gym.make(env_id, disable_env_checker=True, **made)
        try:
            return "\n".join([self.first, *_episode(env, reset, self.actions)])
        finally:
            env.close()


def _arguments(line: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Id, keyword arguments of `gym.make` and keyword arguments of `reset`, of ``env =
    gym.make(...); env.reset(...)``.
    """
    make, reset = (
        node.value for node in ast.parse(line).body if isinstance(node, ast.Assign | ast.Expr)
    )
    assert isinstance(make, ast.Call) and isinstance(reset, ast.Call)
    given = [
        {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        for call in (make, reset)
    ]
    return ast.literal_eval(make.args[0]), given[0], given[1]


def _episode(env: gym.Env[Any, Any], reset: dict[str, Any], actions: list[str]) -> list[str]:
    observation, _ = env.reset(**reset)
    lines = [observation]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        lines += ["\n".join(f"> {line}" for line in action.split("\n")), observation]
        lines += (
            [end(float(reward), terminated, truncated, info)] if terminated or truncated else []
        )
    return lines


def end(reward: float, terminated: bool, truncated: bool, info: dict[str, Any]) -> str:
    """The last line of a whole episode."""
    told = {"terminated": terminated, "truncated": truncated, "success": info["success"]}
    return ", ".join([f"= reward {reward}", *(name for name, holds in told.items() if holds)])


def transcripts(page: str) -> list[Transcript]:
    """All transcripts of a page."""
    return [Transcript(text) for text in _BLOCK.findall(page)]


def rewritten(page: str) -> str:
    """The page with its transcripts as they come out now."""
    return _BLOCK.sub(lambda match: f"```text\n{Transcript(match[1]).played()}\n```", page)


if __name__ == "__main__":
    for variable in DATA:
        os.environ.pop(variable, None)
    for name in sys.argv[1:]:
        Path(name).write_text(rewritten(Path(name).read_text("utf-8")), "utf-8")
