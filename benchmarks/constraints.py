"""Compare the trie of choices with the same choices as a grammar of llguidance.

    python -m benchmarks.constraints [--model tiny smollm2] [--actions 30] [--turns 40]

A turn has its own set of actions, as in a text environment. Times are medians over the turns.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import mean, median
from typing import Any

import numpy as np

from experiential.llm.models import load_tokenizer
from experiential.llm.request import ChoiceTrie

VERBS = ("go to", "take", "open", "close", "put", "use")
THINGS = ("apple", "mug", "drawer 3", "cabinet 12", "fridge 1", "countertop 2", "desk lamp", "sink")

Walk = Callable[[Sequence[str], random.Random], tuple[float, list[float], list[int]]]
"""Gives seconds to compile, seconds at each branch, and the tokens allowed at each branch."""


def actions(count: int, draw: random.Random) -> list[str]:
    """Return distinct actions, as many as ``count``."""
    return [
        f"{draw.choice(VERBS)} {draw.choice(THINGS)} with {draw.choice(THINGS)} {number}"
        for number in range(count)
    ]


def trie_walk(tokenizer: Any) -> Walk:
    """Return a walk through the trie to a random choice."""

    def walk(choices: Sequence[str], draw: random.Random) -> tuple[float, list[float], list[int]]:
        start = time.perf_counter()
        node = ChoiceTrie(choices, tokenizer).root.landing
        compiled = time.perf_counter() - start
        seconds: list[float] = []
        widths: list[int] = []
        while node.children:
            token = draw.choice(node.allowed)
            start = time.perf_counter()
            widths.append(len(node.allowed))
            node = node.children[token].landing
            seconds.append(time.perf_counter() - start)
        return compiled, seconds, widths

    return walk


def grammar_walk(tokenizer: Any, *, text: bool) -> Walk:
    """Return a walk through a grammar of alternatives, as text or as token ids."""
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    known = from_tokenizer(tokenizer, len(tokenizer))

    def walk(choices: Sequence[str], draw: random.Random) -> tuple[float, list[float], list[int]]:
        start = time.perf_counter()
        ids = tokenizer(list(choices), add_special_tokens=False)["input_ids"]
        spelt = map(json.dumps, choices) if text else (" ".join(f"<[{i}]>" for i in x) for x in ids)
        matcher: Any = LLMatcher(known, LLMatcher.grammar_from_lark(f"start: {' | '.join(spelt)}"))
        compiled = time.perf_counter() - start
        seconds: list[float] = []
        widths: list[int] = []
        while not matcher.is_stopped():
            start = time.perf_counter()
            for token in matcher.compute_ff_tokens():
                matcher.consume_token(token)
            if matcher.is_stopped():
                break
            bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: len(tokenizer)])
            token = int(draw.choice(allowed.tolist()))
            assert matcher.consume_token(token), matcher.get_error()
            seconds.append(time.perf_counter() - start)
            widths.append(len(allowed))
        return compiled, seconds, widths

    return walk


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a row of the table in docs/decisions/020 for each model."""
    parser = argparse.ArgumentParser(description="Compare two ways to restrict a choice.")
    parser.add_argument("--model", nargs="+", default=["tiny", "smollm2"])
    parser.add_argument("--actions", type=int, default=30)
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args(arguments)
    for name in options.model:
        tokenizer = load_tokenizer(name)
        walks = [
            trie_walk(tokenizer),
            grammar_walk(tokenizer, text=False),
            grammar_walk(tokenizer, text=True),
        ]
        cells: list[str] = []
        allowed: list[float] = []
        for walk in walks:
            draw = random.Random(0)
            turns = [walk(actions(options.actions, draw), draw) for _ in range(options.turns)]
            compiled = median(turn[0] for turn in turns)
            branch = median(second for turn in turns for second in turn[1])
            cells.append(f"{compiled * 1e3:.1f} ms, {branch * 1e6:.1f} us")
            allowed.append(mean(width for turn in turns for width in turn[2]))
        row = (f"{name}, {len(tokenizer)}", *cells, f"{allowed[0]:.1f}, {allowed[2]:.1f}")
        sys.stdout.write(f"| {' | '.join(row)} |\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
