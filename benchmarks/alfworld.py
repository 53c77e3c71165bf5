"""Measure ALFWorld with TextWorld sped up and as it comes, and compare every character.

    python -m benchmarks.alfworld [--games 40] [--splits valid_seen train] [--data FOLDER]
        [--only-fast] [--results benchmarks/results/alfworld.json]

Two processes play the same games, one after the other: along the walkthrough, then eight commands
drawn with a seed. A digest of all that a game answers (observation, admissible commands, won) must
be the same in both. Figures are processor seconds; a start is that of another game whose
translation is on disk, as in a second epoch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from experiential.envs.alfworld import caches
from experiential.envs.alfworld.games import Game, default_folder, open_games
from experiential.envs.alfworld.player import GameHost
from experiential.evaluation.suites import find_data

DRAWN = 8
"""Commands of the random play of a game."""
_RECYCLE = 50
_hosts: list[GameHost] = []


def begin(fast: bool) -> None:
    """Open the game of a worker; without ``fast``, TextWorld's grammar stays as it comes."""
    if not fast:
        caches.TEXTGEN = ""  # no version of TextWorld is known
    _hosts.append(GameHost())


def play(game: Game, seed: int) -> dict[str, Any]:
    """Play a game twice; return its digest, processor seconds, steps, and whether it was won."""
    textgen: Any = import_module("textworld.envs.pddl.textgen")
    host, rng, digest = _hosts[0], random.Random(seed), hashlib.sha256()
    seconds, steps, won = [0.0, 0.0], 0, False

    def ask(part: int, **request: Any) -> dict[str, Any]:
        since = time.process_time()
        reply = host.answer(request)
        seconds[part] += time.process_time() - since
        digest.update(json.dumps(reply).encode())
        return reply

    host.answer({"do": "start", "game": game.data})  # the translation is on disk now
    host.close()
    reply = ask(0, do="start", game=game.data)
    for command in game.walkthrough:
        reply, steps = ask(1, do="step", command=command), steps + 1
    won = reply["won"]
    reply = host.answer({"do": "start", "game": game.data})
    for _ in range(DRAWN):
        if not reply["won"]:
            command = rng.choice(reply["admissible"])
            reply, steps = ask(1, do="step", command=command), steps + 1
    return {
        "digest": digest.hexdigest(),
        "start_s": seconds[0],
        "step_s": seconds[1],
        "steps": steps,
        "won": won,
        "sped_up": hasattr(textgen.Symbol, "__deepcopy__"),
    }


def measure(data: str, split: str, count: int | None, *, both: bool) -> dict[str, Any]:
    """Play ``count`` games of a split, evenly spread over it; None plays all of them."""
    entries = open_games(data, split)
    places = range(len(entries))
    if count is not None and count < len(entries):
        places = [i * len(entries) // count for i in range(count)]
    context = multiprocessing.get_context("spawn")  # each has a TextWorld of its own
    arms = {"fast": True, "plain": False} if both else {"fast": True}
    pools = {
        name: ProcessPoolExecutor(
            1,
            mp_context=context,
            initializer=begin,
            initargs=(fast,),
            max_tasks_per_child=_RECYCLE,  # TextWorld keeps some 4.5 MB of every game
        )
        for name, fast in arms.items()
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for number, place in enumerate(places):
        game = entries[place].load()
        for name, pool in pools.items():
            found[name].append(pool.submit(play, game, place).result())
        if (number + 1) % 50 == 0:
            sys.stderr.write(f"{split}: {number + 1} games\n")
    for pool in pools.values():
        pool.shutdown()
    result: dict[str, Any] = {name: _summary(games) for name, games in found.items()}
    result["games"] = len(places)
    if both:
        result["different"] = sum(
            one["digest"] != other["digest"]
            for one, other in zip(found["fast"], found["plain"], strict=True)
        )
        result["steps_ratio"] = (
            result["fast"]["steps_per_second"] / result["plain"]["steps_per_second"]
        )
    return result


def _summary(games: list[dict[str, Any]]) -> dict[str, Any]:
    steps, seconds = (sum(one[name] for one in games) for name in ("steps", "step_s"))
    starts = sorted(one["start_s"] for one in games)
    return {
        "steps": steps,
        "steps_per_second": steps / seconds,
        "start_ms_median": starts[len(starts) // 2] * 1e3,
        "won": sum(one["won"] for one in games),
        "digest": hashlib.sha256("".join(one["digest"] for one in games).encode()).hexdigest(),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--games", type=int, default=40, help="of each split; 0 for all")
    parser.add_argument("--splits", nargs="+", default=["valid_seen", "train"])
    parser.add_argument("--data", help="as of the environment; by default what ALFWORLD_DATA names")
    parser.add_argument("--only-fast", action="store_true", help="leave the slow process out")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/alfworld.json"))
    options = parser.parse_args()
    find_data()
    data = options.data or default_folder()
    if data is None:
        raise SystemExit("Expected ALFWorld's games, got none; set ALFWORLD_DATA or give --data")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    found = {
        split: measure(data, split, options.games or None, both=not options.only_fast)
        for split in options.splits
    }
    text = json.dumps(found, indent=1) + "\n"
    options.results.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
