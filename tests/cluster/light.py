"""`experiential-train` with engines and ranks that start in a second, on a real Ray.

Trainer, runtime, supervisors, env workers, bank actor and checkpoints are the project's own. What
stands below them is small: a policy is one number for each token, which says how likely an answer
with that token is. An engine is, like vLLM's, an actor above a process that draws; after the death
of that process ``generate`` fails and other calls get no answer. Ranks add up their gradients
through sockets; when one dies, the others fail, as under gloo.

    python -m tests.cluster.light [arguments of experiential-train]
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Client, Listener
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from experiential.llm.base import SamplingParams
from experiential.types import FinishReason, Generation
from tests.cluster.stub_engine import EngineDeadError

TOKENS = 65536
"""More than the tokenizer has."""
LR = 0.3
HOLD = os.environ.get("LIGHT_HOLD", "")
"""A folder; while it is there, a process that is sent weights notes its id there and waits."""
KEYS = ("weight", "exp_avg", "exp_avg_sq")
LESSON = '<answer>[{"op":"add","text":"Pull the lever that was right in vault %d."}]</answer>'


def compute(pipe: Any, seed: int) -> None:
    """Draw one of some answers, given as token ids, by the weights of their tokens."""
    weights, rng = np.zeros(TOKENS), random.Random(seed)
    pipe.send((-1, None))
    while True:
        try:
            number, method, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        result: Any = None
        if method == "generate":
            answers, temperature = arguments
            scores = [float(weights[list(answer)].mean()) / temperature for answer in answers]
            best = max(scores)
            chances = [math.exp(score - best) for score in scores]
            [chosen] = rng.choices(range(len(answers)), chances)
            result = chosen, math.log(chances[chosen] / sum(chances))
        elif method == "update_weight":
            while HOLD and os.path.isdir(HOLD):
                with suppress(FileNotFoundError):
                    Path(HOLD, str(os.getpid())).touch()
                time.sleep(0.05)
            weights = arguments[0]
        pipe.send((number, result))


class RolloutRayActor:
    """Has the methods of OpenRLHF's that are used here."""

    async def __init__(self, seed: int, **_: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._core = spawn.Process(target=compute, args=(theirs, seed), daemon=True)
        self._core.start()
        theirs.close()
        self._loop, self._numbers = asyncio.get_running_loop(), count()
        self._calls: dict[int, tuple[str, asyncio.Future[Any]]] = {}
        self._calls[-1] = "generate", self._loop.create_future()
        self._free = asyncio.Event()
        self._free.set()
        self.llm, self.errored = self, False
        self.dead_error = EngineDeadError("EngineCore encountered an issue")
        threading.Thread(target=self._read, daemon=True).start()
        await self._calls[-1][1]

    def _read(self) -> None:
        while True:
            try:
                number, result = self._pipe.recv()
            except (EOFError, OSError):
                self._loop.call_soon_threadsafe(self._died)
                return
            self._loop.call_soon_threadsafe(self._answer, number, result)

    def _answer(self, number: int, result: Any) -> None:
        _, call = self._calls.pop(number)
        if not call.done():
            call.set_result(result)

    def _died(self) -> None:
        self.errored = True
        for method, call in self._calls.values():
            if method == "generate" and not call.done():
                call.set_exception(self.dead_error)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        number, call = next(self._numbers), self._loop.create_future()
        self._calls[number] = method, call
        try:
            self._pipe.send((number, method, arguments))
        except OSError:
            self._died()
        if self.errored and method == "generate":
            raise self.dead_error
        return await call

    def get_num_unfinished_requests(self) -> int:
        return 0

    async def generate(self, answers: Any, temperature: Any) -> Any:
        await self._free.wait()
        return SimpleNamespace(outputs=[await self._ask("generate", answers, temperature)])

    async def pause_generation(self) -> None:
        await self._ask("reset_prefix_cache")
        self._free.clear()

    async def resume_generation(self) -> None:
        self._free.set()
        await self._ask("reset_prefix_cache")

    async def reset_prefix_cache(self) -> None:
        await self._ask("reset_prefix_cache")

    async def update_weight(self, weights: Any) -> None:
        await self._ask("update_weight", weights)

    init_process_group = update_weight_cuda_ipc = sleep = wake_up = reset_prefix_cache


@dataclass
class Step:
    """The learner's, without torch."""

    rows: Sequence[Sequence[int]]
    tokens: int


@dataclass
class RankStats:
    """The learner's, without torch."""

    loss: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    grad_norm: float = 0.0
    forwarded_tokens: int = 0


class PolicyRank:
    """Has the methods of the project's rank that a run calls."""

    def __init__(self, rank: int, ranks: int, address: tuple[str, int] | None) -> None:
        self._rank, self._ranks, self._address = rank, ranks, address
        self._state = {key: np.zeros(TOKENS) for key in KEYS}
        self._listener = Listener(("127.0.0.1", 0)) if rank == 0 else None
        self._others: list[Any] = []
        self._engines: list[Any] = []

    def get_master_addr_port(self) -> Any:
        assert self._listener is not None
        return self._listener.address

    def start(self, strategy: Any, model: str, engines: list[Any], _: bool) -> tuple[int, bool]:
        if self._listener is not None:
            self._others = [self._listener.accept() for _ in range(self._ranks - 1)]
        else:
            self._others = [Client(self._address)]
        self._engines = engines
        return TOKENS, True

    def _sum(self, value: Any) -> Any:
        """Return the sum over all ranks, which all must ask for."""
        try:
            if self._listener is not None:
                value = value + sum(other.recv() for other in self._others)
            for other in self._others:
                other.send(value)
            return value if self._listener is not None else self._others[0].recv()
        except (EOFError, OSError):
            raise RuntimeError("Connection closed by peer") from None

    def learn(self, samples: Sequence[Any], steps: Sequence[Any], _: Any, version: int) -> Any:
        stats = RankStats()
        for step in steps:
            gradient = np.zeros(TOKENS)
            for i in (i for row in step.rows for i in row):
                sample = samples[i]
                for position, advantage in zip(sample.positions, sample.advantages, strict=True):
                    gradient[sample.tokens[position]] += advantage * sample.weight
                stats.forwarded_tokens += len(sample.tokens)
            gradient = self._sum(gradient)
            self._state["weight"] += LR * np.sign(gradient)
            self._state["exp_avg"] += gradient
            stats.grad_norm += float(np.abs(gradient).sum())
        return stats

    def score(self, samples: Sequence[Any], rows: Any) -> list[tuple[float, ...]]:
        return [sample.logprobs for sample in samples]

    def reconnect(self, engines: list[Any]) -> None:
        self._engines = engines

    def broadcast_to_vllm(self) -> None:
        import ray

        if self._rank == 0:
            weights = ray.put(self._state["weight"])
            ray.get([engine.update_weight.remote(weights) for engine in self._engines])
        self._sum(0)

    def save_state(self, folder: str) -> dict[str, Any]:
        from safetensors.numpy import save_file

        Path(folder).mkdir(parents=True, exist_ok=True)
        keys = [key for i, key in enumerate(KEYS) if i % self._ranks == self._rank]
        file = f"state-{self._rank:05d}-00000.safetensors"
        save_file({f"policy:{key}": self._state[key] for key in keys}, Path(folder) / file)
        self._sum(0)
        return {"places": {f"policy:{key}": file for key in keys}, "steps": 0}

    def load_state(self, folder: str) -> None:
        from safetensors.numpy import load_file

        index = json.loads((Path(folder) / "state.json").read_text())
        for name, file in index["places"].items():
            self._state[name.partition(":")[2]] = load_file(Path(folder) / file)[name]

    def export(self, folder: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        if self._rank == 0:
            np.save(Path(folder) / "policy.npy", self._state["weight"])


def start_ranks(settings: Any, group: Any, first: int, **_: Any) -> Any:
    """Start the ranks of a policy in its bundle, as `parts.start_ranks` does."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    size = settings.nodes * settings.gpus_per_node

    def start(rank: int, address: Any) -> Any:
        place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=first)
        options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 1, "scheduling_strategy": place}
        return ray.remote(PolicyRank).options(**options).remote(rank, size, address)

    handles = [start(0, None)]
    address = ray.get(handles[0].get_master_addr_port.remote(), timeout=600)
    return SimpleNamespace(
        _actor_handlers=[*handles, *(start(rank, address) for rank in range(1, size))]
    )


async def draw(
    ask: Any, ids: tuple[int, ...], sampling: SamplingParams, room: int, *, stops: Any, **more: Any
) -> Generation:
    """Draw one of the choices, or a lesson where there are none."""
    texts = list(sampling.choices or (LESSON % (sum(ids) % 1000),))
    answers = [tuple(stops.encode(text)) for text in texts]
    chosen, logprob = await ask(answers, sampling.temperature or 1.0)
    each = logprob / len(answers[chosen])
    return Generation(
        text=texts[chosen],
        prompt_ids=ids,
        response_ids=answers[chosen],
        logprobs=tuple(each for _ in answers[chosen]),
        temperature=sampling.temperature or 1.0,
        finish_reason=FinishReason.STOP,
        policy=more["policy"],
        policy_version=more["policy_version"],
    )


def main() -> None:
    """Put the small parts in place, and run the command line."""
    import ray

    from experiential.cli.train import main as train
    from experiential.training.openrlhf import parts, runtime

    module: Any = ModuleType("openrlhf.trainer.ray.vllm_engine")
    module.RolloutRayActor = ray.remote(RolloutRayActor)
    sys.modules["openrlhf.trainer.ray.vllm_engine"] = module

    class Finder:
        """Has the tokenizer of a policy."""

        def __init__(self, tokenizer: Any) -> None:
            self._tokenizer = tokenizer

        def encode(self, text: str) -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=False)

    changes: dict[str, Any] = {"draw_response": draw, "StopFinder": Finder, "Step": Step}
    changes["check_weights"] = lambda _: None
    for name, value in changes.items():
        setattr(runtime, name, value)
    parts.start_ranks = start_ranks
    parts.strategy = lambda *_, **__: None
    train()


if __name__ == "__main__":
    # Under its own name: actors are pickled by it.
    from tests.cluster import light

    light.main()
