"""Measure rollout time with bank and distillation over rollout time without, same tasks.

    python -m benchmarks.overhead [--model tiny] [--env vault frozen-lake sokoban]
        [--rounds 12] [--think 48]
    python -m benchmarks.overhead --step [--model tiny] [--env vault] [--steps 4 4]
        [--runs without untrained with]

Rounds alternate, so that a noisy machine disturbs both arms alike. Nothing is subtracted: a round
with the bank includes retrieval, injection, the longer prompts, submission, and whatever
distillation takes of the machine meanwhile. As in the bundled recipes the executor belongs to
the rollout while one runs, and distillation has the time between rollouts: ``distil_s`` is that
time per round, ``step_ratio`` counts it in. What the actor reads changes what it does:
``turns_ratio`` and ``forwarded_ratio`` say how many turns were played and tokens computed, over
those without. A third arm reads advice that costs nothing to find and keeps nothing: ``bank_ratio``
is the time with the bank over that, which leaves retrieval, writing and distillation;
``advice_ratio`` is that over nothing, the price of reading.

``--step`` measures whole training steps instead, updates included, in seconds of the processor:
those of the recipe with a bank over those of plain GRPO, and what of it the extractor's update
is. Its first steps are not counted: the bank is empty, and no sample waits for the extractor.
``parts`` says where the seconds of a step go, and ``gflops`` how fast each update computes, beside
products of matrices alone (``products``). Torch gets one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch

from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.manager_like import NoBank
from experiential.config import EnvSettings, ModelSettings, OptimSettings
from experiential.envs.alfworld.env import ALFWorldEnv
from experiential.envs.text_env import Step
from experiential.llm.engine import Engine
from experiential.recipe import load_experiment
from experiential.rollout import Rollout, TaskSource, world_count
from experiential.training.local import LocalRuntime, build_runtimes
from experiential.training.metrics import peak_memory_gb
from experiential.training.roles import prompt_set_name
from experiential.training.trainer import Trainer
from experiential.types import Experience, Hit

ENVIRONMENTS: dict[str, tuple[EnvSettings, dict[str, Any]]] = {
    "vault": (EnvSettings(train={"split": "train", "worlds": 32}), {}),
    "frozen-lake": (
        EnvSettings(id="experiential/FrozenLake-v0", train={"split": "train"}),
        {"history": 0, "keep_first": False},
    ),
    "sokoban": (
        EnvSettings(id="experiential/Sokoban-v0", train={"split": "train"}),
        {"history": 0, "keep_first": False},
    ),
    "alfworld": (
        EnvSettings(
            id="experiential/ALFWorld-v0",
            kwargs={"data": "made", "households": 40},
            max_turns=30,
        ),
        {},
    ),
    "alfworld-drawn": (
        EnvSettings(
            id="experiential-benchmarks/DrawnALFWorld-v0",
            kwargs={"data": "made", "households": 40, "turns": 10},
            max_turns=10,  # the tiny model's context ends after about 18
        ),
        {},
    ),
}
"""Settings of the environment and of its actor. Vault is the hardest case: two turns, and prompts
that a group shares without a bank.
"""
USUAL = tuple(name for name in ENVIRONMENTS if not name.startswith("alfworld"))
"""Environments that need no package of their own."""
LESSONS = [
    f"Look at the {place} first and remember what happened on try {i}."
    for i, place in enumerate(("goal", "wall", "sign", "edge") * 8)
]
"""What the bank holds from the start, so that guided episodes have advice whatever the extractor
writes.
"""
THINKING_TURNS = 4
"""Turns of an episode where the actor writes before it acts."""
ARMS = {"without": "none", "advice": "half", "with": "half"}
"""The arms that are timed, and which members of a group are guided."""
WARM_UP = 2
"""Rounds that are not counted."""

RUNS = {
    "without": ("grpo", []),
    "untrained": ("complementary", ["extractor.train=false"]),
    "with": ("complementary", []),
}
"""Runs whose training steps are timed: without a bank, with one, and with the extractor's update
left out.
"""
STEPS = 4, 4
"""Steps that are not counted, and that are. A world is visited in four steps, so four steps hold
each visit equally often."""


class DrawnALFWorld(ALFWorldEnv):
    """Call a drawn half of the lost episodes won, so that policies which win none are updated.

    Costs are as in ALFWorld; what is learned means nothing.
    """

    def _turn(self, action: str) -> Step:
        observation, reward, won, spent, info = super()._turn(action)
        if spent and zlib.crc32(" ".join(self._commands).encode()) % 2:
            return observation, 1.0, True, False, info | {"success": True}
        return observation, reward, won, spent, info


gym.register("experiential-benchmarks/DrawnALFWorld-v0", DrawnALFWorld)


class Handed(NoBank):
    """Hand out the lessons in turn: advice as from a bank, without one."""

    def __init__(self) -> None:
        self._next = count()

    def search(
        self, query: Any, *, k: int | None = None, exclude_instance: Any = None, episode: Any = ""
    ) -> Any:
        """Return one lesson for a query."""
        lesson = Experience(text=LESSONS[next(self._next) % len(LESSONS)])
        return [Hit(experience=lesson, score=1.0)]


async def measure(
    settings: ModelSettings, name: str, rounds: int, groups: int, group_size: int, think: int = 0
) -> dict[str, Any]:
    """Measure the seconds per rollout of every arm, alternating.

    With ``think`` the actor writes so many tokens a turn, else it chooses an action.
    """
    actor, extractor = build_runtimes(settings, None, (OptimSettings(), OptimSettings()))
    prompts = prompt_set_name(settings)
    place: Literal["system", "observation"] = "system" if prompts == "brief" else "observation"
    env, options = ENVIRONMENTS[name]
    if think:
        # An actor that was not trained for it seldom writes an action: it would go on for ever.
        env = env.model_copy(update={"max_turns": THINKING_TURNS})
    source = TaskSource(env, world_count(env.id, env.kwargs | env.train), 0)

    def make_actor() -> ActorAgent:
        return ActorAgent(
            actor,
            prompts=prompts,
            constrain=not think,
            max_tokens=think or 32,
            advice=place,
            **options,
        )

    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    between: list[float] = []
    forwarded, turns = dict.fromkeys(ARMS, 0), dict.fromkeys(ARMS, 0)
    with tempfile.TemporaryDirectory() as folder, ExperienceBank(Path(folder) / "bank") as bank:
        bank.add_many(LESSONS)
        manager = ExperienceManager(
            bank,
            ExtractorAgent(extractor, prompts=prompts, max_tokens=96),
            share_queue=False,
            merge_every=0,
            retrieval={"strategy": "diverse", "floor": 0.0},
        )
        arms = {
            name: Rollout(env, env.train, m, make_actor, slots=groups * group_size)
            for name, m in zip(ARMS, (NoBank(), Handed(), manager), strict=True)
        }
        for step in range(rounds + WARM_UP):
            for arm, guided in ARMS.items():
                actor.llm.weights_changed(
                    step
                )  # as after an update: no prefix is reused from the other arm
                begin, tokens = time.perf_counter(), actor.llm.stats.forwarded_tokens
                with actor.foreground():
                    episodes = await arms[arm].play(source.jobs(step, groups, group_size, guided))
                if step >= WARM_UP:
                    seconds[arm].append(time.perf_counter() - begin)
                    forwarded[arm] += actor.llm.stats.forwarded_tokens - tokens
                    turns[arm] += sum(len(episode.trajectory.turns) for episode in episodes)
            begin = time.perf_counter()
            await manager.adrain()
            between.append(time.perf_counter() - begin)
        stats = manager.stats()
        for rollout in arms.values():
            rollout.close()
        manager.close()
    actor.close()
    extractor.close()
    between = between[WARM_UP:]
    steps = {
        "with": [a + b for a, b in zip(seconds["with"], between, strict=True)],
        "without": seconds["without"],
    }
    return {
        "ratio": ratio(seconds),
        "bank_ratio": ratio({"with": seconds["with"], "without": seconds["advice"]}),
        "advice_ratio": ratio({"with": seconds["advice"], "without": seconds["without"]}),
        "step_ratio": ratio(steps),
        "distil_s": float(np.median(between)),
        "search_p50_ms": stats["search_p50_ms"],
        "distilled": stats["distilled"],
        "forwarded_ratio": forwarded["with"] / forwarded["without"],
        "turns_ratio": turns["with"] / turns["without"],
        "seconds": seconds,
    }


def ratio(seconds: dict[str, list[float]]) -> dict[str, float]:
    """Return the ratio of the medians, with a bootstrap interval over paired rounds."""
    a, b = np.array(seconds["with"]), np.array(seconds["without"])
    picks = np.random.default_rng(0).integers(len(a), size=(10_000, len(a)))
    low, high = np.quantile(
        np.median(a[picks], axis=1) / np.median(b[picks], axis=1), (0.025, 0.975)
    )
    return {"median": float(np.median(a) / np.median(b)), "low": float(low), "high": float(high)}


class Parts:
    """Count the seconds of one processor that parts of a step take, and the updates' arithmetic."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()

    @contextmanager
    def counting(self) -> Generator[None]:
        """Count inside the block."""
        step, train = Engine._step, LocalRuntime._train

        def counted(name: str, call: Callable[[], Any]) -> Any:
            begin = time.thread_time()
            try:
                return call()
            finally:
                self.seconds[name] += time.thread_time() - begin

        def generate(engine: Engine, track: Any) -> None:
            name = "distillation" if track.priority else "rollout"
            counted(name, lambda: step(engine, track))

        def update(policy: LocalRuntime, samples: Any, loss: Any) -> Any:
            name = f"{policy.name} update"
            stats = counted(name, lambda: train(policy, samples, loss))
            head = policy._base.get_output_embeddings()
            layers = policy._base.base_model.named_modules()
            frozen = policy.llm.adapter is not None
            size = sum(
                layer.in_features * layer.out_features
                for place, layer in layers
                if hasattr(layer, "in_features")
                and "lora_" not in place
                and not hasattr(layer, "base_layer")
            )
            # forward, and backward to inputs and to weights that are trained
            passes = (2 if frozen else 3) + (loss.kl > 0)
            self.flops[name] += 2 * passes * stats.forwarded_tokens * size
            self.flops[name] += 2 * passes * loss.epochs * stats.tokens * head.weight.numel()
            return stats

        Engine._step, LocalRuntime._train = generate, update  # type: ignore[method-assign]
        try:
            yield
        finally:
            Engine._step, LocalRuntime._train = step, train  # type: ignore[method-assign]


def measure_steps(
    name: str, model: str, further: list[str], runs: list[str], steps: tuple[int, int]
) -> dict[str, Any]:
    """Measure the processor's seconds per training step of runs in `RUNS`."""
    env, options = ENVIRONMENTS[name]
    skipped, counted = steps
    common = [f"model.name={model}", "model.threads=1", f"env={env.model_dump_json()}"]
    common += [f"actor.options.{key}={json.dumps(value)}" for key, value in options.items()]
    common += [f"run.steps={skipped + counted}", "run.minutes=null", "run.drain=true"]
    common += ["run.checkpoint_every=0", "eval.before=false", "eval.after=false", *further]
    seconds: dict[str, list[float]] = {}
    parts: dict[str, dict[str, float]] = {}
    gflops: dict[str, dict[str, float]] = {}
    memory: dict[str, float] = {}
    for run in runs:
        recipe, own = RUNS[run]
        ends: list[float] = []
        found = Parts()

        def observe(event: dict[str, Any], ends: list[float] = ends, found: Parts = found) -> None:
            if event["event"] == "step":
                ends.append(time.process_time())
                if len(ends) == skipped:
                    found.seconds.clear()
                    found.flops.clear()

        with tempfile.TemporaryDirectory() as folder, found.counting():
            experiment = load_experiment(recipe, [*common, *own])
            trainer = Trainer(experiment, Path(folder) / "run", observer=observe)
            trainer.run()
        seconds[run] = np.diff(ends[skipped - 1 :]).tolist()
        memory[run] = peak_memory_gb()
        parts[run] = {part: value / counted for part, value in found.seconds.items()}
        parts[run]["rest"] = float(np.mean(seconds[run])) - sum(parts[run].values())
        gflops[run] = {
            part: flops / found.seconds[part] / 1e9 for part, flops in found.flops.items()
        }
    mean = {run: float(np.mean(values)) for run, values in seconds.items()}
    result: dict[str, Any] = {"mean": mean}
    if {"with", "without"} <= mean.keys():
        result["step_ratio"] = mean["with"] / mean["without"]
    if {"with", "untrained"} <= mean.keys():
        result["extractor_update_share"] = 1 - mean["untrained"] / mean["with"]
    return result | {
        "parts": parts,
        "gflops": gflops,
        "products": {kind: measure_products(kind) for kind in ("float32", "bfloat16")},
        "peak_gb": memory,
        "seconds": seconds,
    }


def measure_products(dtype: str) -> float:
    """Measure the GFLOP/s of one processor in products of the size that updates of SmolLM2 have."""
    torch.set_num_threads(1)
    a, b = (torch.ones(shape, dtype=getattr(torch, dtype)) for shape in ((512, 576), (576, 1536)))
    spent: list[float] = []
    for _ in range(20):
        begin = time.thread_time()
        torch.mm(a, b)
        spent.append(time.thread_time() - begin)
    return 2 * 512 * 576 * 1536 / min(spent) / 1e9


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--env", nargs="+", choices=tuple(ENVIRONMENTS), default=list(USUAL))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument(
        "--think",
        type=int,
        default=0,
        help="tokens that the actor may write before its action; 0: it chooses an action",
    )
    parser.add_argument("--step", action="store_true", help="measure whole training steps")
    parser.add_argument(
        "--steps", nargs=2, type=int, default=STEPS, help="steps to skip and to count"
    )
    parser.add_argument("--runs", nargs="+", choices=tuple(RUNS), default=list(RUNS))
    parser.add_argument("--set", nargs="*", default=[], help="further settings of the steps' runs")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    size = (options.groups, options.group_size)
    found: dict[str, Any] = {"model": options.model, "groups": size[0], "group_size": size[1]}
    found |= {"think": options.think, "torch": torch.__version__}
    if options.step:
        found = {"model": options.model, "settings": options.set, "torch": torch.__version__}
    for name in options.env:
        if options.step:
            found[name] = measure_steps(
                name, options.model, options.set, options.runs, tuple(options.steps)
            )
        else:
            settings = ModelSettings(name=options.model)
            found[name] = asyncio.run(measure(settings, name, options.rounds, *size, options.think))
        sys.stdout.write(
            f"{name} {json.dumps({k: v for k, v in found[name].items() if k != 'seconds'})}\n"
        )
    file = "overhead_step.json" if options.step else "overhead.json"
    results = options.results or Path("benchmarks/results") / file
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
