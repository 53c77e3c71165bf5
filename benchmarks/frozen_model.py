"""Measure what a bank gives to a real model that is never trained: SmolLM2-135M plays and distils.

    python -m benchmarks.frozen_model dev [--worlds 16] [--games vault guess]
    python -m benchmarks.frozen_model run [--worlds 16] [--visits 3] [--games ...] [--strategy S]
    python -m benchmarks.frozen_model table

One model, weights fixed, greedy, its actions restricted to the admissible ones, is actor and
extractor. Every world of a game is met ``--visits`` times: ``off`` without a bank, ``on`` with one
that starts empty and is written between visits, and by a random player for chance. Two games are
bundled (Vault, FrozenLake with layouts of 3 x 3) and two are not (Blackjack of Gymnasium,
GuessTheNumber of TextArena; ``pip install textarena``). A world of the latter two is a seed: the
same cards, the same number. ``on`` minus ``off`` is paired by world, visits after the first.

``dev`` chooses place and wording of the advice on other worlds: a first visit is played and
distilled once; the second visit is then played under every place and wording, with the lessons of
the model itself and with right ones.

A finished cell is a small file below ``--results`` and is not played again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gymnasium as gym
import numpy as np

from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.agents.prompts import experience_block
from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.manager_like import NoBank
from experiential.envs import random_agent
from experiential.envs.make import make
from experiential.envs.text_env import UnicodeText
from experiential.evaluation.intervals import RATE, clustered_mean, paired_difference
from experiential.evaluation.page import show_percent, show_points
from experiential.evaluation.results import ResultStore
from experiential.evaluation.visits import later
from experiential.llm.base import LLM, open_llm
from experiential.rollout import episode_seed
from experiential.types import Add, Experience, Record, Trajectory
from experiential.wrappers import ExperienceWrapper, TextObservation

RESULTS = Path("benchmarks/results/frozen_model")
SLOTS = 32
"""Episodes at once; the model decodes them together."""
SEEDS = {"dev": 500, "eval": 900}
"""Seed of the worlds of each split, where a world is a seed."""
WORDINGS = {
    "block": "{block}",
    "follow": "Follow this advice from earlier episodes:\n{block}",
    "answer": "{block}Do what the experience says. Your action:",
    "notes": "Notes from your earlier visits here:\n{block}Choose the action that they favour.",
}
"""What stands around the block that fences the lessons."""
ARMS = ("random", "off", "on")
PLACES = ("system", "before", "observation")
"""In the system message; before the first observation; behind it."""


class GuessTheNumber(gym.Env[str, str]):
    """Play TextArena's GuessTheNumber; a seed fixes the number."""

    def __init__(self) -> None:
        import textarena

        self._game: Any = textarena.make("GuessTheNumber-v0")
        self.observation_space = self.action_space = UnicodeText()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Begin a game."""
        super().reset(seed=seed)
        self._game.reset(num_players=1, seed=seed)
        self._turns = 0
        return self._observe(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Guess."""
        done, _ = self._game.step(action)
        self._turns += 1
        if not done:  # refused guesses cost a turn here, so that every episode ends
            late = self._turns >= 10
            return self._observe(), 0.0, False, late, {"success": False}
        rewards, _ = self._game.close()
        won = rewards[0] >= 1.0
        return "The game is over.", float(rewards[0]), True, False, {"success": won}

    def _observe(self) -> str:
        return self._game.get_observation()[1].strip().rpartition("\n[GAME]")[2].strip()

    @property
    def answer(self) -> str:
        """Return the guess that wins."""
        return f"[{self._game.state.game_state['game_number']}]"


def vault(split: str, worlds: int) -> gym.Env[str, str]:
    """Make Vault; the vaults of training serve as dev worlds."""
    return make("experiential/Vault-v0", split={"dev": "train"}.get(split, split), worlds=worlds)


def lake(split: str, worlds: int) -> gym.Env[str, str]:
    """Make FrozenLake with small layouts."""
    named = {"split": {"dev": "train"}.get(split, split), "layouts": worlds}
    return make("experiential/FrozenLake-v0", sizes=(3, 3), **named)


def blackjack(split: str, worlds: int) -> gym.Env[str, str]:
    """Make Gymnasium's Blackjack; a success is a hand that wins."""

    def hand(observation: Any, info: Any) -> str:
        total, dealer, ace = observation
        soft = ", one of them an ace that counts 11" if ace else ""
        return f"Your cards add up to {total}{soft}. The dealer shows {dealer}."

    cards: Any = make("Blackjack-v1")
    return TextObservation(cards, render=hand, actions=["stick", "hit"], success=1.0)


def guess(split: str, worlds: int) -> gym.Env[str, str]:
    """Make TextArena's GuessTheNumber."""
    numbers = {f"[{n}]": f"[{n}]" for n in range(1, 21)}
    return TextObservation(GuessTheNumber(), actions=numbers)


@dataclass(frozen=True)
class Game:
    """Hold how to make a game, and the lesson that is right for where it stands.

    ``named`` says that a world has a name of its own; else its task is its number and its start.
    """

    make: Callable[[str, int], gym.Env[str, str]]
    right: Callable[[Any], str | None]
    listed: bool = True
    named: bool = False


def right_pull(env: Any) -> str:
    """Return the lesson that is right in a vault."""
    lever = env.oracle_action().removeprefix("pull ")
    return f"In {env.task[5:-1]} the {lever} lever is live. Pull {lever}."


def right_guess(env: Any) -> str:
    """Return the lesson that is right for a number."""
    return f"The number is {env.answer[1:-1]}. Answer {env.answer}."


def no_lesson(env: Any) -> None:
    """Return no lesson: nothing short is right for all of a game."""


GAMES = {
    "vault": Game(vault, right_pull, named=True),
    "lake": Game(lake, lambda env: f"Go {', then '.join(env.plan())}."),
    "blackjack": Game(blackjack, no_lesson, listed=False),
    "guess": Game(guess, right_guess, listed=False),
}


class Cell(Record):
    """Hold the outcomes of one arm of a game."""

    settings: dict[str, Any]
    outcomes: tuple[tuple[bool, ...], ...]
    """``outcomes[w][v]``: whether visit v to world w succeeded."""
    entries: int = 0
    """Of the bank at the end."""
    examples: tuple[str, ...] = ()
    """Some of its entries, as the model wrote them."""
    shown: float = 0.0
    """Share of the episodes after the first visit that were shown an entry."""
    seconds: float = 0.0


class Placed(ActorAgent):
    """Show advice in a place and wording, on the first turn."""

    def __init__(self, llm: LLM, place: str, wording: str) -> None:
        super().__init__(
            llm,
            constrain=True,
            temperature=0.0,
            advice="system" if place == "system" else "observation",
        )
        self._place, self._wording = place, wording

    def act(self, observation: str, info: Any = None) -> str:  # type: ignore[override]
        """Return the action for an observation."""
        info = dict(info)
        if block := info.pop("experience_prompt", None):
            shown = WORDINGS[self._wording].format(block=block)
            if self._place == "before":
                observation = f"{shown}{observation}"
            else:
                info["experience_prompt"] = shown
        return super().act(observation, info)


@dataclass(frozen=True)
class Table:
    """Play the worlds of a game, one visit at a time, ``SLOTS`` episodes at once."""

    game: str
    split: str
    worlds: int
    llm: LLM | None
    place: str = "observation"
    wording: str = "block"

    def visit(
        self, number: int, manager: Any, lessons: Sequence[str | None] | None = None
    ) -> list[Trajectory]:
        """Play each world once; ``lessons`` are shown in place of what the bank gives."""
        with ThreadPoolExecutor(SLOTS) as pool:
            given = lessons or [None] * self.worlds
            played = [
                pool.submit(self._play, world, number, manager, given[world])
                for world in range(self.worlds)
            ]
            return [one.result() for one in played]

    def _play(self, world: int, number: int, manager: Any, lesson: str | None) -> Trajectory:
        game = GAMES[self.game]
        inner = game.make(self.split, self.worlds)
        env = ExperienceWrapper(
            inner, manager, inject="system", task=lambda obs, info: self._task(world, obs, info)
        )
        with closing(env):
            base = SEEDS[self.split]
            # the world is the seed where none is listed, else the seed draws what is not the world
            seed = episode_seed(base, world, number if game.listed else 0)
            observation, info = env.reset(
                seed=seed, options={"world": world} if game.listed else None
            )
            if lesson is not None:
                info = {**info, "experience_prompt": experience_block([lesson])}
            if self.llm is None:
                act: Any = random_agent(inner, episode_seed(base, world, number))
            else:
                act = Placed(self.llm, self.place, self.wording).act
            done = False
            while not done:
                observation, _, terminated, truncated, info = env.step(act(observation, info))
                done = terminated or truncated
            assert env.log.last_trajectory is not None
            return env.log.last_trajectory

    def _task(self, world: int, observation: str, info: dict[str, Any]) -> str:
        if GAMES[self.game].named:
            return str(info["task"])
        return f"{self.game} {world}: {observation}"

    def rights(self) -> list[str | None]:
        """Return the right lesson of each world, as on its second visit."""
        game, found = GAMES[self.game], list[str | None]()
        for world in range(self.worlds):
            with closing(game.make(self.split, self.worlds)) as env:
                seed = episode_seed(SEEDS[self.split], world, 1 if game.listed else 0)
                env.reset(seed=seed, options={"world": world} if game.listed else None)
                found.append(game.right(env.unwrapped))
        return found


def extractor_of(llm: LLM) -> ExtractorAgent:
    """Return the extractor: the same model, one short lesson an episode."""
    return ExtractorAgent(llm, temperature=0.0, max_tokens=64, max_operations=1)


def dev(options: argparse.Namespace, llm: LLM, store: ResultStore[Cell]) -> None:
    """Play a second visit under each place and wording, after one first visit."""
    for game in options.games:
        table = Table(game, "dev", options.worlds, llm)
        settings = {"game": game, "worlds": options.worlds, "dtype": options.dtype}
        firsts = table.visit(0, NoBank())
        own: list[str | None] = []
        with ThreadPoolExecutor(SLOTS) as pool:
            for found in pool.map(extractor_of(llm).distill, firsts):
                added = [one.text for one in found.parsed.operations if isinstance(one, Add)]
                own.append(added[0] if added else None)
        for name, lessons in (("none", None), ("own", own), ("right", table.rights())):
            if lessons is not None and None in lessons and name == "right":
                continue
            variants = [(p, w) for w in options.wordings for p in PLACES] if lessons else [("", "")]
            for place, wording in variants:
                settings |= {"lessons": name, "place": place, "wording": wording}
                key = "-".join(filter(None, ("dev/" + game, name, place, wording)))
                if store.find(key, settings) is not None:
                    continue
                begin = time.perf_counter()
                varied = Table(
                    game, "dev", options.worlds, llm, place or "system", wording or "block"
                )
                played = varied.visit(1, NoBank(), lessons)
                outcomes = tuple((bool(one.success),) for one in played)
                examples = tuple(text for text in (lessons or ())[:6] if text)
                seconds = round(time.perf_counter() - begin, 1)
                cell = Cell(
                    settings=dict(settings), outcomes=outcomes, examples=examples, seconds=seconds
                )
                store.keep(key, cell)
                print(key, f"{np.mean(outcomes):.3f}", f"{seconds} s", flush=True)


def run(options: argparse.Namespace, llm: LLM, store: ResultStore[Cell]) -> None:
    """Play every arm of every game."""
    for game in options.games:
        for arm in options.arms:
            settings: dict[str, Any] = {"game": game, "arm": arm, "worlds": options.worlds}
            settings |= {"visits": options.visits, "dtype": options.dtype}
            if arm == "on":
                settings |= {name: vars(options)[name] for name in ("place", "wording", "strategy")}
            key = f"{game}-{arm}" + (f"-{options.strategy}" if arm == "on" else "")
            if store.find(key, settings) is not None:
                continue
            begin = time.perf_counter()
            actor = None if arm == "random" else llm
            table = Table(game, "eval", options.worlds, actor, options.place, options.wording)
            visits: list[list[Trajectory]] = []
            entries: list[Experience] = []
            with ExitStack() as stack:
                manager: Any = NoBank()
                bank: Any = None
                if arm == "on":
                    folder = stack.enter_context(TemporaryDirectory())
                    bank = stack.enter_context(ExperienceBank(folder))
                    retrieval = {"strategy": options.strategy, "floor": options.floor}
                    patient: dict[str, Any] = {"distill_workers": SLOTS, "distill_timeout": 900.0}
                    if options.strategy != "evidence":  # the others learn nothing from free ones
                        patient["free_share"] = 0.0
                    manager = ExperienceManager(
                        bank, extractor_of(llm), seed=0, retrieval=retrieval, **patient
                    )
                    stack.callback(manager.close, drain=None)  # nobody asks for the last visit's
                for visit in range(options.visits):
                    if arm == "on":
                        manager.pause()  # what a visit sees does not depend on the order of ends
                    visits.append(table.visit(visit, manager))
                    if arm == "on" and visit + 1 < options.visits:
                        manager.resume()
                        manager.drain()
                        entries = list(bank.entries())
                    rate = np.mean([bool(one.success) for one in visits[-1]])
                    print(
                        f"{game} {arm} visit {visit + 1}: {rate:.3f}, {len(entries)} entries",
                        flush=True,
                    )
            worlds = zip(*visits, strict=True)
            cell = Cell(
                settings=settings,
                outcomes=tuple(tuple(bool(one.success) for one in world) for world in worlds),
                entries=len(entries),
                examples=tuple(entry.text for entry in entries[:6]),
                shown=float(np.mean([bool(one.uses) for visit in visits[1:] for one in visit])),
                seconds=round(time.perf_counter() - begin, 1),
            )
            store.keep(key, cell)


def print_table(store: ResultStore[Cell]) -> None:
    """Print the committed cells: a table of the arms, and one of the places and wordings."""
    cells = list(store.all())
    print("| Game | chance | `off` | strategy | `on` | `on` - `off`, points | entries | shown |")
    print("|---|---|---|---|---|---|---|---|")
    for game in GAMES:
        arms = [c for c in cells if c.settings["game"] == game and "arm" in c.settings]
        tables = {c.settings["arm"]: np.array(c.outcomes) for c in arms}
        for on in (c for c in arms if c.settings["arm"] == "on" and len(tables) == len(ARMS)):
            tables["on"] = np.array(on.outcomes)
            worlds, visits = tables["on"].shape  # the other arms may have played more
            rates = {arm: later(table[:worlds, :visits]) for arm, table in tables.items()}
            chance, off, shown = (
                show_percent(clustered_mean(rates[arm][None], bounds=RATE)) for arm in ARMS
            )
            gain = show_points(paired_difference(rates["on"], rates["off"]))
            row = [game, chance, off, f"`{on.settings['strategy']}`", shown, gain]
            print(f"| {' | '.join(row)} | {on.entries} | {100 * on.shown:.0f} % |")
    print("\n| dev: lessons | wording | " + " | ".join(PLACES) + " |\n|---|---|---|---|---|")
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in (c for c in cells if "lessons" in c.settings):
        named = tuple(cell.settings.get(name, "") for name in ("game", "lessons", "wording"))
        place, share = cell.settings.get("place", ""), f"{100 * np.mean(cell.outcomes):.0f} %"
        rows.setdefault(named, {})[place] = share
    for (game, lessons, wording), row in sorted(rows.items()):
        shown = " | ".join(row.get(place, row.get("", "")) for place in PLACES)
        print(f"| {game}: {lessons} | {wording} | {shown} |")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", choices=("dev", "run", "table"))
    parser.add_argument("--games", nargs="+", choices=GAMES, default=list(GAMES))
    parser.add_argument("--worlds", type=int, default=16)
    parser.add_argument("--visits", type=int, default=3)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--wordings", nargs="+", choices=WORDINGS, default=list(WORDINGS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--place", choices=PLACES, default="observation")
    parser.add_argument("--wording", choices=WORDINGS, default="block")
    parser.add_argument("--strategy", default="diverse")
    parser.add_argument("--floor", type=float, default=0.5)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    store = ResultStore(options.results, Cell, about="a cell of the frozen model", indent=None)
    if options.command == "table":
        print_table(store)
        return
    with closing(open_llm("local", model="smollm2", dtype=options.dtype)) as llm:
        (dev if options.command == "dev" else run)(options, llm, store)


if __name__ == "__main__":
    main()
