"""Compare the outcomes that wrappers record in games of other people with how the games ended.

    python -m benchmarks.outcomes [--episodes 20] [--seed 0]

Each game is played by a player that knows it, and by one that acts at random, through the wrappers
that a user would take. What the bank recorded is compared with the state inside the game, which no
wrapper reads: once without an argument, where an outcome may stay unknown, and once with the one
argument in ``RULES``. The result is in `benchmarks/results/outcomes.json`. GEM and TextArena games
need `pip install gem-llm textarena`; without them their rows of an earlier result are kept.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np

import experiential as xp

RESULT = Path(__file__).parent / "results" / "outcomes.json"
PACKAGES = ("gymnasium", "gem-llm", "textarena")
MOVES = ["left", "down", "right", "up"]


class Game(NamedTuple):
    """Describe one game: its text form, a player that knows it, its true end, the one argument.

    ``make`` gets ``success``; ``expert`` and ``chance`` get the innermost game and random numbers.
    """

    name: str
    make: Callable[[Any], gym.Env[str, str]]
    expert: Callable[[Any, random.Random], str]
    chance: Callable[[Any, random.Random], str]
    won: Callable[[Any, str], bool]  # the innermost game after its end, and the last action
    rule: Any


def planned(names: list[str], is_end: Callable[[Any, int], bool]) -> Callable[..., str]:
    """Return a player of Gymnasium's toy games: breadth first through their transition table."""

    def act(game: Any, rng: random.Random) -> str:
        first: dict[int, int] = {}
        waiting = [int(game.s)]
        for state in waiting:
            for action, outcomes in game.P[state].items():
                _, after, reward, done = max(outcomes)
                if (done and reward > -100 and is_end(game, after)) or after == int(game.s):
                    if after != int(game.s):
                        return names[first.get(state, action)]
                elif after not in first and not done and reward > -10:
                    first[after] = first.get(state, action)
                    waiting.append(after)
        return names[0]

    return act


def named(names: list[str]) -> Callable[..., str]:
    """Return a player that takes any of these actions."""
    return lambda game, rng: rng.choice(names)


def toy(id: str, names: list[str], max_turns: int | None = None, **arguments: Any) -> Any:
    """Return what makes a Gymnasium game with named actions."""
    return lambda success: xp.TextObservation(
        gym.make(id, **arguments), actions=names, success=success, max_turns=max_turns
    )


def _balance(game: Any, rng: random.Random) -> str:
    place, speed, angle, spin = game.state
    return "right" if angle + 0.5 * spin + 0.03 * speed + 0.01 * place > 0 else "left"


def _hand(game: Any, rng: random.Random) -> str:
    points = sum(game.player) + 10 * (1 in game.player and sum(game.player) < 12)
    return "hit" if points < 17 else "stick"


def _beats(game: Any, action: str) -> bool:
    def points(cards: list[int]) -> tuple[int, bool]:
        total = sum(cards) + 10 * (1 in cards and sum(cards) < 12)
        # Sutton and Barto's rule, the default of this id: 21 in two cards beats any other 21
        return (0, False) if total > 21 else (total, total == 21 and len(cards) == 2)

    return points(game.player) > points(game.dealer)


def _delivered(game: Any, action: str) -> bool:
    _, _, passenger, destination = game.decode(game.s)
    return passenger == destination and action == "drop off"


def _boxed(*parts: object) -> str:
    return "\\boxed{" + " ".join(map(str, parts)) + "}"


def _cell(game: Any, rng: random.Random, wanted: Callable[[int, int], bool]) -> tuple[int, int]:
    cells = [(r, c) for r in range(game.rows) for c in range(game.cols)]
    return rng.choice([cell for cell in cells if wanted(*cell)] or cells)


def _safe(game: Any, rng: random.Random) -> tuple[int, int]:
    """Return a hidden cell without a mine; where there are no mines yet, any cell."""
    return _cell(game, rng, lambda r, c: not game.revealed[r][c] and game.grid[r][c] != -1)


def _sweep(game: Any, rng: random.Random) -> str:
    """Flag the mines, once there are any, and then reveal the rest: only so GEM ends a game."""
    cells = [(r, c) for r in range(game.rows) for c in range(game.cols)]
    mines = [(r, c) for r, c in cells if game.grid[r][c] == -1 and not game.flags[r][c]]
    if mines:
        return _boxed("flag", *rng.choice(mines))
    return _boxed("reveal", *_safe(game, rng))


def _cleared(game: Any, action: str) -> bool:
    cells = zip(sum(game.grid, []), sum(game.revealed, []), strict=True)
    return -1 in sum(game.grid, []) and all(shown for number, shown in cells if number != -1)


def _hidden(game: Any, rng: random.Random) -> tuple[int, int]:
    return _cell(game, rng, lambda r, c: not game.revealed[r][c])


def _hanoi(game: Any, rng: random.Random) -> str:
    """Return the next move of the shortest solution from any legal board."""
    place = {disk: name for name, disks in game.board.items() for disk in disks}
    target, move = "C", ("A", "B")
    for disk in sorted(place, reverse=True):
        if place[disk] != target:
            move = (place[disk], target)
            target = ({"A", "B", "C"} - set(move)).pop()
    return _boxed(*move)


def _lake(game: Any, rng: random.Random) -> str:
    """Return a step on the shortest way over the ice of TextArena."""
    grid, goal = game.state.game_state["grid"], tuple(game.state.game_state["goal_pos"])
    start = tuple(game.state.game_state["player_pos"])
    waiting: list[tuple[tuple[int, int], str]] = [(start, "")]
    seen = {start}
    for (row, column), first in waiting:
        for name, (down, right) in game.actions.items():
            step = row + down, column + right
            inside = 0 <= step[0] < game.size and 0 <= step[1] < game.size
            if inside and step not in seen and grid[step[0]][step[1]] != "H":
                if step == goal:
                    return f"[{first or name}]"
                seen.add(step)
                waiting.append((step, first or name))
    return "[up]"


def _number(game: Any, rng: random.Random) -> str:
    return f"[{rng.randint(game.min_number, game.max_number)}]"


def _blank(game: Any, rng: random.Random) -> tuple[int, int]:
    board = game.state.game_state["board"]
    return rng.choice([(r, c) for r in range(9) for c in range(9) if board[r][c] == 0])


def _solved(game: Any, rng: random.Random) -> str:
    row, column = _blank(game, rng)
    return f"[{row + 1} {column + 1} {game.full_grid[row][column]}]"


def _guessed(game: Any, rng: random.Random) -> str:
    row, column = _blank(game, rng)
    return f"[{row + 1} {column + 1} {rng.randint(1, 9)}]"


def _last(pattern: str) -> Callable[[xp.Trajectory], bool]:
    """Return the rule that the game's last words match a pattern."""
    return lambda run: re.search(pattern, run.turns[-1].feedback) is not None


def gem(name: str) -> Any:
    """Return what makes a game of GEM; the rule is for the wrapper that records it."""

    def make(success: Any) -> gym.Env[str, str]:
        from experiential.adapters import GemEnv

        return GemEnv(name)

    return make


def arena(name: str) -> Any:
    """Return what makes a game of TextArena."""

    def make(success: Any) -> gym.Env[str, str]:
        from experiential.adapters import TextArenaEnv

        return TextArenaEnv(name)

    return make


GUESS = r"\d+"
TAXI = ["south", "north", "east", "west", "pick up", "drop off"]
SIDES = ["[down]", "[left]", "[right]", "[up]"]
CLIFF = ["up", "right", "down", "left"]
GAMES = [
    Game("CartPole-v1", toy("CartPole-v1", ["left", "right"]), _balance,
         named(["left", "right"]), lambda g, a: abs(g.state[2]) < g.theta_threshold_radians
         and abs(g.state[0]) < g.x_threshold, 500),
    Game("MountainCar-v0", toy("MountainCar-v0", ["back", "wait", "on"]),
         lambda g, rng: "on" if g.state[1] >= 0 else "back", named(["back", "wait", "on"]),
         lambda g, a: bool(g.state[0] >= g.goal_position), -199),
    Game("CliffWalking-v1", toy("CliffWalking-v1", CLIFF, 200),
         planned(CLIFF, lambda g, s: s == 47), named(CLIFF), lambda g, a: int(g.s) == 47,
         _last(r"^47\b")),
    Game("FrozenLake-v1", toy("FrozenLake-v1", MOVES, is_slippery=False),
         planned(MOVES, lambda g, s: s == 15), named(MOVES), lambda g, a: int(g.s) == 15, 1),
    Game("Taxi-v3", toy("Taxi-v3", TAXI), planned(TAXI, lambda g, s: True),
         named(TAXI), _delivered, lambda run: run.turns[-1].reward == 20),
    Game("Acrobot-v1", toy("Acrobot-v1", ["pull", "rest", "push"]),
         lambda g, rng: "push" if g.state[3] - g.state[2] > 0 else "pull",
         named(["pull", "rest", "push"]), lambda g, a: bool(
             -np.cos(g.state[0]) - np.cos(g.state[0] + g.state[1]) > 1.0), -499),
    Game("Blackjack-v1", toy("Blackjack-v1", ["stick", "hit"]), _hand, named(["stick", "hit"]),
         _beats, 1),
    Game("GEM GuessTheNumber", gem("game:GuessTheNumber-v0-hard"),
         lambda g, rng: _boxed(g.game_number), lambda g, rng: g.sample_random_action(),
         lambda g, a: int(re.findall(GUESS, a)[-1]) == g.game_number, _last("Congratulations")),
    Game("GEM Mastermind", gem("game:Mastermind-v0-hard"),
         lambda g, rng: _boxed(*g.game_code), lambda g, rng: g.sample_random_action(),
         lambda g, a: [int(n) for n in re.findall(r"\d+", a)] == list(g.game_code),
         _last("Congratulations")),
    Game("GEM Minesweeper", gem("game:Minesweeper-v0-hard"), _sweep,
         lambda g, rng: _boxed("reveal", *_hidden(g, rng)), _cleared, 0.999),
    Game("GEM TowerofHanoi", gem("game:TowerofHanoi-v0-hard"), _hanoi,
         lambda g, rng: _boxed(*rng.sample("ABC", 2)),
         lambda g, a: len(g.board["C"]) == g.num_disks, _last("Congratulations")),
    Game("TextArena FrozenLake", arena("FrozenLake-v0"), _lake,
         lambda g, rng: f"[{rng.choice(list(g.actions))}]",
         lambda g, a: g.state.game_state["player_pos"] == g.state.game_state["goal_pos"],
         _last("Congratulations")),
    Game("TextArena GuessTheNumber", arena("GuessTheNumber-v0"),
         lambda g, rng: f"[{g.game_number}]", _number,
         lambda g, a: int(re.findall(GUESS, a)[-1]) == g.game_number,
         _last(r"Congratulations|Guess: (\d+), Target: \1\b")),
    Game("TextArena Minesweeper", arena("Minesweeper-v0"),
         lambda g, rng: "[{} {}]".format(*_safe(g, rng)),
         lambda g, rng: "[{} {}]".format(*_hidden(g, rng)), _cleared, _last("Congratulations")),
    Game("TextArena 2048 (64)", arena("2048-v0-mega-easy"), named(["[down]", "[left]"] * 9 + SIDES),
         named(SIDES),
         lambda g, a: max(map(max, g.state.game_state["board"])) >= g.target_tile,
         _last("Congratulations")),
    Game("TextArena Sudoku", arena("Sudoku-v0"), _solved, _guessed,
         lambda g, a: g.state.game_state["board"] == g.full_grid, _last("Congratulations")),
]  # fmt: skip


def innermost(env: Any) -> Any:
    """Return the game inside all wrappers, of whichever package."""
    while (inner := getattr(env, "env", None) or getattr(env, "_env", None)) is not None:
        env = inner
    return env


def play(game: Game, rule: Any, episodes: int, seed: int) -> dict[str, int]:
    """Play one game and count true wins, and labels that are right, wrong and unknown."""
    rng, counts = random.Random(f"{game.name} {seed}"), Counter[str]()
    with (
        tempfile.TemporaryDirectory() as folder,
        xp.ExperienceBank(folder, embedder="hashing") as bank,
        xp.ExperienceManager(bank) as manager,
    ):
        # a foreign game gets its rule at the wrapper that records, Gymnasium's at TextObservation
        inner = game.make(rule)
        own = rule if not isinstance(inner, xp.TextObservation) else None
        env = xp.ExperienceWrapper(inner, manager, success=own)
        for episode in range(episodes):
            act = game.expert if episode % 2 else game.chance
            env.reset(seed=seed * 10_000 + episode)
            action, ended = "", False
            while not ended:
                action = act(innermost(env), rng)
                *_, terminated, truncated, info = env.step(action)
                ended = terminated or truncated
            won = bool(game.won(innermost(env), action))
            recorded = bank.trajectory(info["trajectory_id"])
            said = None if recorded is None else recorded.success
            counts["won"] += won
            counts["unknown" if said is None else "right" if said is won else "wrong"] += 1
        env.close()
    return {key: counts[key] for key in ("won", "right", "wrong", "unknown")}


def words_of(rule: Any) -> str:
    """Return a rule as it is shown in the table."""
    return f"success={rule}" if isinstance(rule, int | float) else "success=function"


def main() -> None:
    """Play all games that are installed, print the table and write the result."""
    parser = argparse.ArgumentParser(description="Compare recorded outcomes with how games ended.")
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULT)
    asked = parser.parse_args()
    found: dict[str, Any] = {"games": {}, "versions": {}}
    if asked.output.is_file():
        found = json.loads(asked.output.read_text())
    for package in PACKAGES:
        try:
            found["versions"][package] = version(package)
        except PackageNotFoundError:
            print(f"{package} is not installed: its games are left out")
    found |= {"episodes": asked.episodes, "seed": asked.seed}
    print("game | won | no argument: right, wrong, unknown | one argument: right, wrong, unknown")
    for game in GAMES:
        try:
            rows = [play(game, rule, asked.episodes, asked.seed) for rule in (None, game.rule)]
        except (ImportError, xp.ConfigError) as error:
            print(f"{game.name}: {error}")
            continue
        none, one = rows
        found["games"][game.name] = {"argument": words_of(game.rule), "none": none, "one": one}
        shown = [", ".join(str(row[key]) for key in ("right", "wrong", "unknown")) for row in rows]
        print(f"{game.name} | {one['won']}/{asked.episodes} | {shown[0]} | {shown[1]}", flush=True)
    wrong = [name for name, row in found["games"].items() if row["one"]["wrong"]]
    print(f"wrong labels with one argument: {', '.join(wrong) or 'none'}")
    asked.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
