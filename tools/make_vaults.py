"""Train the tiny model on for Vault without a clerk: avoid levers ruled out, and list them.

    python -m tools.make_vaults START FOLDER --stage pulls --updates 1500
    python -m tools.make_vaults START FOLDER --stage lists --updates 1500

Pulls come first, then lessons. Where many levers are right, a sampled one says little: the model is
shown how likely each of them should be.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiential.envs.vault import LEVERS
from tools.earned_corpus import TAUGHT, BlindVaultTasks
from tools.make_tiny import encode, save, update
from tools.tiny_corpus import Sample

STAGES: dict[str, tuple[Mapping[str, float], Mapping[str, float]]] = {
    "pulls": (dict.fromkeys(TAUGHT, 1.0), {"act": 1.0}),
    "lists": (TAUGHT, {"act": 0.35, "distill": 0.55, "merge": 0.10}),
}
"""Skill and shares of the tasks, by stage."""


@dataclass(frozen=True)
class Lesson:
    """Hold a conversation as token ids, and what is learned of it.

    Attributes:
        ids: of the whole conversation, shape (tokens,).
        weights: of each token as an answer, shape (tokens,); 0 for text that is read.
        wanted: at some places, how likely each token should be there.
    """

    ids: list[int]
    weights: list[int]
    wanted: dict[int, dict[int, float]]


def lesson(tokenizer: Any, sample: Sample, wanted: Sequence[Mapping[str, float]]) -> Lesson:
    """Encode a conversation; ``wanted`` has the shares of the levers of each of its pulls."""
    ids, weights = encode(tokenizer, sample, even=True)  # type: ignore[arg-type]
    first = {lever: tokenizer.encode(f" {lever}", add_special_tokens=False)[0] for lever in LEVERS}
    levers = set(first.values())
    places = [place for place, (token, weight) in enumerate(zip(ids, weights, strict=True))
              if weight and token in levers]  # fmt: skip
    shares = [{first[lever]: share for lever, share in one.items() if share} for one in wanted]
    return Lesson(ids, weights, dict(zip(places, shares, strict=True)) if wanted else {})


def source(tokenizer: Any, stage: str, seed: int) -> Callable[[], Lesson]:
    """Return a seeded source of conversations of a stage."""
    skill, shares = STAGES[stage]
    rng = random.Random(seed)
    tasks = BlindVaultTasks(rng, skill)

    def draw() -> Lesson:
        (task,) = rng.choices(list(shares), list(shares.values()))
        made = tasks.pulls() if task == "act" else (getattr(tasks, task)(), ())
        return lesson(tokenizer, *made)

    return draw


def parts(draw: Callable[[], Lesson], batch: int, count: int = 4) -> Iterator[list[Lesson]]:
    """Yield the parts of a batch of conversations, each of similar lengths, which saves padding."""
    drawn = sorted((draw() for _ in range(batch)), key=lambda one: len(one.ids))
    for part in np.array_split(np.arange(batch), min(count, batch)):
        yield [drawn[index] for index in part]


def loss_of(model: Any, part: Sequence[Lesson], dtype: str) -> Any:
    """Return the sum of the weighted cross-entropies of the answers' tokens."""
    import torch

    width = max(len(one.ids) for one in part)
    tokens = np.zeros((len(part), width), dtype=np.int64)
    rows, places, weights, wanted = list[int](), list[int](), list[float](), []
    for row, one in enumerate(part):
        tokens[row, : len(one.ids)] = one.ids
        for place, weight in enumerate(one.weights):
            if weight:
                target = np.zeros(model.config.vocab_size, dtype=np.float32)
                shares = one.wanted.get(place, {one.ids[place]: 1.0})
                target[list(shares)] = list(shares.values())
                rows.append(row)
                places.append(place - 1)
                weights.append(weight)
                wanted.append(target)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        hidden = model.model(input_ids=torch.from_numpy(tokens)).last_hidden_state
    said = torch.log_softmax(model.lm_head(hidden[rows, places].float()), -1)
    each = -(torch.from_numpy(np.array(wanted)) * said).sum(-1)
    return (each * torch.tensor(weights)).sum()


def train(
    start: Path, folder: Path, *, stage: str, updates: int, batch: int, lr: float, seed: int,
    dtype: str, threads: int | None,
) -> None:  # fmt: skip
    """Train a model on in one stage, and save it every 100 updates and at the end."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    torch.set_flush_denormal(True)
    tokenizer = AutoTokenizer.from_pretrained(start)
    model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    draw, begin, recent = source(tokenizer, stage, seed), time.time(), list[float]()
    for step in range(updates):
        made = list(parts(draw, batch))
        total = sum(sum(one.weights) for part in made for one in part)
        found = 0.0
        for part in made:
            loss = loss_of(model, part, dtype) / total
            loss.backward()
            found += loss.item()
        rate = min(1.0, (step + 1) / 50) * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * step / updates)))
        update(model, optimizer, lr * rate)
        recent.append(found)
        if step % 50 == 49:
            spent = time.time() - begin
            sys.stdout.write(
                f"{stage} {step + 1}/{updates} loss {np.mean(recent):.3f} {spent:.0f} s\n"
            )
            sys.stdout.flush()
            recent.clear()
        if step % 100 == 99:
            save(model, tokenizer, folder)
    save(model, tokenizer, folder)
    note = {
        "stage": stage, "updates": updates, "batch": batch, "lr": lr, "seed": seed, "dtype": dtype,
        "seconds": round(time.time() - begin), "torch": torch.__version__,
    }  # fmt: skip
    (folder / "made.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("start", type=Path, help="folder of the model to go on from")
    parser.add_argument("folder", type=Path, help="where to save the model")
    parser.add_argument("--stage", required=True, choices=STAGES)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--batch", type=int, default=32, help="conversations an update")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, help="of torch")
    train(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
