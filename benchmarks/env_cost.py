"""Measure the cost of an environment: time in ``reset`` and ``step``, memory, and tokens."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil

from benchmarks.env_play import Outcome, begin, play, spread, summary, worlds_of
from benchmarks.env_rows import Row
from experiential.envs import random_agent
from experiential.envs.make import make
from experiential.llm.models import load_tokenizer, resolve_model

_TEXTS = 500
"""Observations whose tokens are counted, evenly spread over those that were seen."""
RAW_KEYS = ("chars", "message", "screen_descriptions", "blstats", "inv_strs", "inv_letters")
"""The arrays that the raw game is asked for: those that a text adapter reads."""


@dataclass
class Clock:
    """Time blocks, on the wall clock and on processors, worker processes included.

    Processor time of workers comes in ticks of 10 ms, that of this process exactly.
    """

    wall: list[float] = field(default_factory=list[float])
    cpu: list[float] = field(default_factory=list[float])

    def __enter__(self) -> Clock:
        self._workers, self._cpu, self._wall = (
            _worker_seconds(),
            time.process_time(),
            time.perf_counter(),
        )
        return self

    def __exit__(self, *_: object) -> None:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        self.wall.append(wall)
        self.cpu.append(cpu + max(0.0, _worker_seconds() - self._workers))

    def rates(self, steps: int) -> dict[str, float]:
        """Return steps a second of both."""
        return {"cpu": steps / max(sum(self.cpu), 1e-9), "wall": steps / max(sum(self.wall), 1e-9)}

    def milliseconds(self) -> dict[str, float]:
        """Return median and 95th percentile of both."""
        parts = {"wall": self.wall, "cpu": self.cpu}
        return {
            f"{name}_{q}": float(np.percentile(parts[name], at) * 1e3)
            for name in parts
            for q, at in (("median", 50), ("p95", 95))
        }


def _worker_seconds() -> float:
    """Return the processor time of the processes below this one.

    Those that have ended count, too.
    """
    ended = os.times()
    return (
        ended.children_user
        + ended.children_system
        + sum(_seconds(child) for child in psutil.Process().children(recursive=True))
    )


def _seconds(process: psutil.Process) -> float:
    try:
        spent = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return spent.user + spent.system


def resident() -> float:
    """Return the memory of this process and those below it, in MiB, after a collection."""
    gc.collect()
    return (
        sum(
            _resident(process)
            for process in (psutil.Process(), *psutil.Process().children(recursive=True))
        )
        / 2**20
    )


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


class Recorder:
    """Record what an agent saw and did."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.seen: list[str] = []
        self.actions: list[str] = []

    def __call__(self, observation: str, info: dict[str, Any]) -> str:
        """Act."""
        self.seen.append(observation)
        self.actions.append(self.agent(observation, info))
        return self.actions[-1]


def played(row: Row, episodes: int) -> dict[str, Any]:
    """Measure speed, resets, observations and success of the random agent.

    Each episode is begun (timed), played by the random agent, then begun again and its actions
    repeated as one timed block, so that the agent's own time is not in the figure.
    """
    env = row.make()
    resets, steps = Clock(), Clock()
    number, outcomes, texts = 0, list[Outcome](), list[str]()
    for seed, world in enumerate(spread(worlds_of(env), episodes)):
        with resets:
            first = begin(env, seed, world)
        recorder = Recorder(random_agent(env, seed, row.actions))
        outcomes.append(play(env, recorder, seed, world))
        begin(env, seed, world)
        with steps:
            number += repeat(env, recorder.actions)
        texts += recorder.seen or [first[0]]
    env.close()
    return {
        "steps": number,
        "steps_per_second": steps.rates(number),
        "reset_ms": resets.milliseconds(),
        "random": summary(outcomes),
        "observations": texts[:: -(-len(texts) // _TEXTS)],
    }


def repeat(env: gym.Env[str, str], actions: Sequence[str]) -> int:
    """Step through actions until the episode ends; return the number of steps."""
    for number, action in enumerate(actions, 1):
        _, _, over, late, _ = env.step(action)
        if over or late:
            return number
    return len(actions)


def memory(row: Row, episodes: int) -> dict[str, Any]:
    """Measure the growth of the memory over episodes of the random agent, in MiB per 1,000.

    As many episodes on the same worlds come before.

    The worlds are the same before and after, so that what is kept of each of them once counts as
    warm-up.
    """
    env = row.make()
    worlds = spread(worlds_of(env), min(episodes, 100))
    looks: list[float] = []
    for phase in range(2):
        for seed, world in enumerate(islice(cycle(worlds), episodes)):
            play(env, random_agent(env, seed, row.actions), phase * episodes + seed, world)
        looks.append(resident())
    env.close()
    return {
        "episodes": episodes,
        "resident_mib": looks[1],
        "growth_mib_per_1000": (looks[1] - looks[0]) * 1000 / episodes,
    }


def token_counter(name: str) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text, special ones left out.

    A folder's ``tokenizer.json`` is read without transformers.

    Args:
        name: as ``load_tokenizer`` knows it.

    Raises:
        ModelNotFoundError: there is no such tokenizer.
        MissingExtraError: the packages that read it are missing.
    """
    file = Path(resolve_model(name)) / "tokenizer.json"
    if not file.exists() or find_spec("tokenizers") is None:
        tokenizer = load_tokenizer(name)
        return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])
    fast: Any = import_module("tokenizers").Tokenizer.from_file(str(file))
    return lambda text: len(fast.encode(text, add_special_tokens=False).ids)


def tokens(texts: Sequence[str], count: Callable[[str], int]) -> dict[str, float]:
    """Return mean and 95th percentile of the tokens of texts."""
    counts = [count(text) for text in texts]
    return {
        "mean": float(np.mean(counts)),
        "p95": float(np.percentile(counts, 95)),
        "texts": len(counts),
    }


def beside_raw(row: Row, episodes: int) -> dict[str, Any]:
    """Measure steps a second of a MiniHack level in words and of the raw level, in turn.

    Both are played by uniform draws; the raw game is asked for the arrays of `RAW_KEYS`, and gives
    them without making a text of them.
    """
    env, raw = row.make(), _raw_level(row.level)
    rng = np.random.default_rng(0)
    clocks, counts = (Clock(), Clock()), [0, 0]
    for seed in range(episodes):
        recorder = Recorder(random_agent(env, seed))
        play(env, recorder, seed, seed)
        begin(env, seed, seed)
        with clocks[0]:
            counts[0] += repeat(env, recorder.actions)
        raw.unwrapped.seed(seed, seed, reseed=False)
        raw.reset()
        drawn: list[Any] = rng.integers(raw.action_space.n, size=2000).tolist()
        with clocks[1]:
            counts[1] += repeat(raw, drawn)
    env.close()
    raw.close()
    rates = [clock.rates(count) for clock, count in zip(clocks, counts, strict=True)]
    return {
        "episodes": episodes,
        "words": rates[0],
        "raw": rates[1],
        "ratio": {name: rates[0][name] / rates[1][name] for name in rates[0]},
        "raw_keys": RAW_KEYS,
    }


def _raw_level(level: str) -> Any:
    import_module("minihack")
    return make(level, observation_keys=RAW_KEYS)
