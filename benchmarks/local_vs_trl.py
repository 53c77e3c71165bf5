"""Compare the throughput of `LocalRuntime` with that of TRL's GRPO trainer.

    python3.11 -m venv trl-venv && trl-venv/bin/pip install torch trl peft  # one of its own
    python -m benchmarks.local_vs_trl --trl-python trl-venv/bin/python [--model tiny]
        [--prompts 8] [--group-size 8] [--steps 10] [--new-tokens 32 128 512]
        [--prompt-tokens 100 1000] [--dtype float32 bfloat16]
        [--results benchmarks/results/local_vs_trl.json]

Both have the same weights, prompts, group size, threads and machine.

A step is one rollout (``prompts`` x ``group-size`` sampled responses), one reward per response,
group-normalised advantages and one AdamW step on the clipped GRPO loss without a KL term; full
weights, or with ``--lora`` rank 8 adapters on all linear layers. Each side is a
process of its own that waits for its turn, so steps alternate; the first step of each is warm-up
and left out. All rates are per second of the processor, which other work on the machine moves
little; wall times are in the results, too. Every combination of the lengths and precisions given is
a cell, and each finished one is written at once. In ``bfloat16`` our side has bfloat16 weights and
float32 masters (without ``--lora``), TRL's has float32 weights under autocast.

The prompts are first and second turns of Vault and FrozenLake episodes, new ones every step,
through the model's chat template, filled up in front to ``prompt-tokens`` where they are shorter.
``tokens`` are the prompt and response tokens of all responses, counted once for the rollout and
once for the update, on both sides alike, whatever a side really computes. Two scenarios:

* ``text``: every response has exactly ``new-tokens`` tokens. TRL has ``min_new_tokens``
  for it, on our side no token ends a response; so neither side pads responses.
* ``action``: our side picks one of the environment's admissible actions, which costs it as many
  tokens as the action has. TRL cannot choose among strings and generates 8 tokens, enough for most
  of them. Compared in responses per second.

TRL runs as its documentation has it without vLLM, but without gradient checkpointing, logging and
checkpoints, and with ``--trl-micro-batch`` responses per forward of its update: of 4, 8, 16 and all
at once, tried in one run each on a CPU, none was clearly faster than 8.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

READY = "@@"
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE = 1e-5


def reward(text: str) -> float:
    """Return a number that two different texts hardly share, so that every group has a spread."""
    return hashlib.sha256(text.encode()).digest()[0] / 255.0


# The two workers


def await_turn() -> None:
    """Wait until the parent gives this side the machine."""
    if not sys.stdin.readline():
        raise SystemExit(0)


def answer(**values: Any) -> None:
    """Send the parent the measurements of a step."""
    sys.stdout.write(READY + json.dumps(values) + "\n")
    sys.stdout.flush()


def work_local(job: dict[str, Any]) -> None:
    """Run our side: rollouts and updates of `LocalRuntime`."""
    import torch

    from experiential.config import LoraSettings, ModelSettings, OptimSettings
    from experiential.llm.models import load_model
    from experiential.llm.transformers import TransformersLLM
    from experiential.training.local import LocalRuntime

    torch.set_num_threads(job["threads"])
    lora = LoraSettings(rank=8, alpha=16) if job["lora"] else None
    model, tokenizer = load_model(
        ModelSettings(name=job["model"], dtype=job["dtype"], device=job["device"], lora=lora),
        adapters=("actor",),
    )
    llm = TransformersLLM(model, tokenizer, adapter="actor" if lora else None)
    if not job["choose"]:
        # No token ends a response, so that every one is as long as TRL's.
        llm._eos = frozenset({-1})
    runtime = LocalRuntime(llm, OptimSettings(lr=LEARNING_RATE))
    for prompts in job["steps"]:
        await_turn()
        answer(**asyncio.run(local_step(runtime, prompts, job)))


async def local_step(
    runtime: Any, prompts: list[dict[str, Any]], job: dict[str, Any]
) -> dict[str, Any]:
    """Run one rollout and one update."""
    from experiential.llm.base import SamplingParams
    from experiential.training.advantages import cell_advantages
    from experiential.training.runtime import LossSettings, sample_from_generation

    size = job["group_size"]
    begin, spent = time.perf_counter(), time.process_time()
    sampling = [
        SamplingParams(
            max_tokens=job["new_tokens"], choices=tuple(p["actions"]) if job["choose"] else None
        )
        for p in prompts
    ]
    calls = [
        runtime.generate(p["messages"], s)
        for p, s in zip(prompts, sampling, strict=True)
        for _ in range(size)
    ]
    generations = await asyncio.gather(*calls)
    middle, rollout_cpu = time.perf_counter(), time.process_time() - spent
    advantages = cell_advantages(
        [reward(g.text) for g in generations],
        [i // size for i in range(len(generations))],
        [False] * len(generations),
    )
    weight = 1 / len(generations)
    samples = [
        sample_from_generation(g, float(a), weight=weight)
        for g, a in zip(generations, advantages, strict=True)
    ]
    stats = await runtime.train(samples, LossSettings())
    end = time.perf_counter()
    prompt, response = (
        sum(len(g.prompt_ids) for g in generations),
        sum(len(g.response_ids) for g in generations),
    )
    found = {
        "responses": len(generations),
        "prompt": prompt,
        "response": response,
        "forwarded": stats.forwarded_tokens,
    }
    return found | {
        "rollout": middle - begin,
        "update": end - middle,
        "rollout_cpu": rollout_cpu,
        "cpu": time.process_time() - spent,
        "grad_norm": stats.grad_norm,
    }


def work_trl(job: dict[str, Any]) -> None:
    """Run TRL's side: ``GRPOTrainer``.

    A step waits for its turn when it begins, and reports when its optimiser has stepped.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(job["threads"])
    rows = len(job["steps"][0]) * job["group_size"]
    micro = min(job["trl_micro_batch"] or rows, rows)
    seen: dict[str, Any] = {}

    class Timed(GRPOTrainer):
        """Time the rollout and count its tokens."""

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            begin, spent = time.perf_counter(), time.process_time()
            output = super()._generate_and_score_completions(inputs)
            seen["rollout_cpu"] = time.process_time() - spent
            seen["responses"], seen["rollout"] = (
                len(output["completion_mask"]),
                time.perf_counter() - begin,
            )
            seen["prompt"], seen["response"] = (
                int(output["prompt_mask"].sum()),
                int(output["completion_mask"].sum()),
            )
            return output

    class Turn(TrainerCallback):
        """Wait for the turn, and report."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            await_turn()
            seen["begin"], seen["spent"] = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            total, cpu = (
                time.perf_counter() - seen.pop("begin"),
                time.process_time() - seen.pop("spent"),
            )
            answer(**seen, update=total - seen["rollout"], cpu=cpu)

    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=job["device"] == "cpu",
            bf16=job["dtype"] == "bfloat16",
            model_init_kwargs={"dtype": "float32"},
            learning_rate=LEARNING_RATE,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=rows // micro,
            num_generations=job["group_size"],
            max_completion_length=job["new_tokens"],
            generation_kwargs={"min_new_tokens": job["new_tokens"]},
            temperature=1.0,
            loss_type="grpo",
            beta=0.0,
            max_grad_norm=1.0,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            shuffle_dataset=False,
            max_steps=len(job["steps"]),
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Timed(
            model=job["model"],
            reward_funcs=lambda completions, **_: [reward(c[0]["content"]) for c in completions],
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": p["messages"]} for prompts in job["steps"] for p in prompts]
            ),
            peft_config=(
                LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS, task_type="CAUSAL_LM")
                if job["lora"]
                else None
            ),
            callbacks=[Turn()],
        )
        trainer.train()


# The parent


class Worker:
    """Hold one side in a process of its own."""

    def __init__(self, name: str, python: str, job: dict[str, Any], folder: Path) -> None:
        file = folder / f"{name}.json"
        file.write_text(json.dumps(job))
        threads = str(job["threads"])
        environ = os.environ | {"OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": str(Path(__file__).parents[1])}
        command = [python, str(Path(__file__).resolve()), "--worker", name, "--job", str(file)]
        self.name, self._log = name, (folder / f"{name}.log").open("w+")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environ,
        )

    def step(self) -> dict[str, Any]:
        """Let this side do one step; return its measurements."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(READY):
                return json.loads(line.removeprefix(READY))
        self._log.seek(0)
        raise SystemExit(
            f"Expected {self.name} to finish its step, got the end of its"
            f" process:\n{self._log.read()[-4000:]}"
        )

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


def prompts(count: int, prompt_set: str) -> list[dict[str, Any]]:
    """Return messages and admissible actions of first and second turns, every one different.

    Vault and FrozenLake take turns.
    """
    import gymnasium as gym

    import experiential as xp

    shown: list[Any] = []

    def listen(messages: Any) -> str:
        shown.append(messages)
        return ""

    found: list[dict[str, Any]] = []
    for i in range(count):
        env: Any = gym.make(
            ("experiential/Vault-v0", "experiential/FrozenLake-v0")[i % 2], disable_env_checker=True
        )
        actor = xp.ActorAgent(xp.ScriptedLLM(listen), prompts=prompt_set)
        actor.reset()
        observation, info = env.reset(seed=i)
        for turn in range(1 + i // 2 % 2):
            if turn:
                after, _, terminated, _, news = env.step(
                    str(info["admissible"][i % len(info["admissible"])])
                )
                if terminated:
                    break
                observation, info = after, news
            actor.act(observation, info)
        found.append(
            {
                "messages": [dict(m) for m in shown[-1]],
                "actions": [str(a) for a in info["admissible"]],
            }
        )
        env.close()
    return found


def fill(every: list[dict[str, Any]], model: str, tokens: int) -> None:
    """Put sentences in front of each last message until its prompt has about so many tokens.

    Every prompt has sentences of its own, so that only members of a group share them.
    """
    from experiential.llm.models import load_tokenizer

    tokenizer = load_tokenizer(model)
    for number, prompt in enumerate(every):
        last, count = prompt["messages"][-1], 0
        while True:
            missing = tokens - len(
                tokenizer.apply_chat_template(
                    prompt["messages"], add_generation_prompt=True, return_dict=False
                )
            )
            if missing <= 0:
                break
            said = "".join(
                f"Lever {number * 1000 + count + i} was dark.\n" for i in range(1 + missing // 20)
            )
            count += 1 + missing // 20
            last["content"] = said + last["content"]


def measure(
    options: argparse.Namespace, model: str, cell: dict[str, Any], *, choose: bool
) -> dict[str, Any]:
    """Run both sides over the same prompts, steps alternating; return seconds and tokens."""
    every = prompts((options.steps + 1) * options.prompts, options.prompt_set)
    fill(every, model, cell["prompt_tokens"])
    job = {
        "model": model,
        "lora": options.lora,
        "threads": options.threads,
        "device": options.device,
        "group_size": options.group_size,
        "trl_micro_batch": options.trl_micro_batch,
        "choose": choose,
        "new_tokens": 8 if choose else cell["new_tokens"],
        "dtype": cell["dtype"],
        "steps": [every[i : i + options.prompts] for i in range(0, len(every), options.prompts)],
    }
    steps: dict[str, list[dict[str, Any]]] = {"local": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        pythons = {"local": sys.executable, "trl": options.trl_python}
        workers = [Worker(name, python, job, Path(folder)) for name, python in pythons.items()]
        for step in range(options.steps + 1):
            for worker in workers if step % 2 else reversed(workers):
                steps[worker.name].append(found := worker.step())
                # Shown at once, so that an interrupted run is not lost.
                sys.stderr.write(f"{worker.name} step {step}: {json.dumps(found)}\n")
        for worker in workers:
            worker.close()
    steps = {name: records[1:] for name, records in steps.items()}
    if [s["prompt"] for s in steps["local"]] != [s["prompt"] for s in steps["trl"]]:
        raise SystemExit(
            "Expected both sides to see the same prompts, got different numbers of prompt tokens"
        )
    return summary(steps, choose) | {"steps": steps}


def summary(steps: dict[str, list[dict[str, Any]]], choose: bool) -> dict[str, Any]:
    """Return the rates of both sides, and the ratio of ours to TRL's.

    Its 95 % interval is a bootstrap over paired steps.
    """
    phases: dict[str, Callable[[dict[str, Any]], float]] = {
        "rollout": lambda s: s["rollout_cpu"],
        "update": lambda s: s["cpu"] - s["rollout_cpu"],
        "total": lambda s: s["cpu"],
    }
    found: dict[str, Any] = {"unit": "responses/CPU-s" if choose else "tokens/CPU-s"}
    for phase, seconds in phases.items():
        work = {
            name: [(amount(s, phase, choose), seconds(s)) for s in records]
            for name, records in steps.items()
        }
        found[phase] = {
            name: sum(n for n, _ in pairs) / sum(t for _, t in pairs)
            for name, pairs in work.items()
        }
        found[phase]["ratio"] = ratio(work["local"], work["trl"])
    return found


def amount(step: dict[str, Any], phase: str, choose: bool) -> float:
    """Return the work of a phase: responses, or prompt and response tokens.

    Rollout and update together count the tokens twice.
    """
    if choose:
        return step["responses"]
    return (step["prompt"] + step["response"]) * (2 if phase == "total" else 1)


def ratio(ours: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> dict[str, float]:
    """Return our rate over theirs.

    Its interval is a bootstrap over paired steps.
    """
    import numpy as np

    a, b = np.array(ours), np.array(theirs)

    def of(picks: Any) -> Any:
        x, y = a[picks].sum(axis=-2), b[picks].sum(axis=-2)
        return (x[..., 0] / x[..., 1]) / (y[..., 0] / y[..., 1])

    low, high = np.quantile(
        of(np.random.default_rng(0).integers(len(a), size=(10_000, len(a)))), (0.025, 0.975)
    )
    return {"value": float(of(np.arange(len(a)))), "low": float(low), "high": float(high)}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trl-python", help="the interpreter of the environment that TRL is installed in"
    )
    parser.add_argument("--model", default="tiny", help="tiny, smollm2 or a folder")
    parser.add_argument(
        "--lora",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="rank 8 adapters; default: only for smollm2",
    )
    parser.add_argument("--prompts", type=int, default=8, help="distinct prompts per step")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, default=10, help="measured steps, after one of warm-up"
    )
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--dtype", nargs="+", default=["float32"], choices=("float32", "bfloat16"))
    parser.add_argument("--prompt-set", default="brief", choices=("brief", "full"))
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--trl-micro-batch",
        type=int,
        default=8,
        help="responses per forward of TRL's update; 0 takes all at once",
    )
    parser.add_argument("--scenario", default="both", choices=("both", "text", "action"))
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results/local_vs_trl.json")
    )
    parser.add_argument("--worker", choices=("local", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        {"local": work_local, "trl": work_trl}[options.worker](json.loads(options.job.read_text()))
        return
    if not options.trl_python:
        parser.error("Expected --trl-python, the interpreter of an environment with TRL, got none")
    report(options)


def report(options: argparse.Namespace) -> None:
    """Measure cell after cell, print the ratios, and write the results under the model's name.

    Results of other models and cells in the file stay.
    """
    import torch

    from experiential.llm.models import resolve_model

    if options.lora is None:
        options.lora = options.model == "smollm2"
    model = str(resolve_model(options.model))
    versions = (
        "import json, torch, transformers, trl; print(json.dumps({m.__name__: m.__version__ for m"
        " in (torch, transformers, trl)}))"
    )
    asked = subprocess.run(
        [options.trl_python, "-c", versions], capture_output=True, text=True, check=True
    )
    conditions = {
        key: getattr(options, key)
        for key in (
            "lora",
            "prompts",
            "group_size",
            "prompt_set",
            "threads",
            "device",
            "trl_micro_batch",
        )
    }
    conditions |= {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "trl_side": json.loads(asked.stdout.splitlines()[-1]),
    }
    names = ("text", "action") if options.scenario == "both" else (options.scenario,)
    cells = [
        {"dtype": dtype, "prompt_tokens": prompt, "new_tokens": new}
        for dtype in options.dtype
        for prompt in options.prompt_tokens
        for new in options.new_tokens
    ]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    for cell in cells:
        label = "{dtype} prompt {prompt_tokens} response {new_tokens}".format(**cell)
        for name in names:
            if name == "action" and cell["new_tokens"] != options.new_tokens[0]:
                continue  # its responses are as long as the actions
            result = measure(options, model, cell, choose=name == "action")
            for phase in ("rollout", "update", "total"):
                r = result[phase]
                sys.stdout.write(
                    f"{label} {name:7} {phase:8} local {r['local']:9.1f}  trl {r['trl']:9.1f}"
                    f" {result['unit']}  ratio {r['ratio']['value']:.2f}"
                    f" [{r['ratio']['low']:.2f}, {r['ratio']['high']:.2f}]\n"
                )
            sys.stdout.flush()
            done = json.loads(options.results.read_text()) if options.results.exists() else {}
            kept = done.setdefault(Path(options.model).name, {}).setdefault("cells", {})
            kept.setdefault(label, {})[name] = {"conditions": conditions, **result}
            options.results.write_text(json.dumps(done, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
