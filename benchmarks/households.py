"""Give SmolLM2 a cold start in ALFWorld's made households, from walkthroughs of a script.

    python -m benchmarks.households demonstrations OUT.jsonl [--seed 0]
    python -m benchmarks.households start build/homes [--seed 0]
    python -m benchmarks.households probe build/homes [--episodes 48] [--households 24]
        [--turns 10] [--objects 10] [--law street] [--data '$ALFWORLD_DATA']
    python -m benchmarks.households lists RUN [--episodes 96] [--households 24]

A world is a household, in which each kind of object is always kept in one place; the task is to
bring an object somewhere. The script goes where a note says that the object is kept, else it
looks into one place after the other, in an order that it draws. Seven of ten of its episodes in
the training households show a note, made by two earlier visits of its own: a list of what was seen
where, or the sentences that said so. ``demonstrations`` writes the chats that an actor would have
had in the episodes that succeeded, and after some episodes, won or lost, the chat in which an
extractor writes the list or goes on with it. ``start`` trains a LoRA adapter on them, in two
stages, and saves the model with it merged, which all recipes of the study's environment
``alfworld-homes`` start from. ``probe`` says what a model can do in households of the split dev:
how often it succeeds with a list of what two looks around showed, and without, and how right its
lists are about plays of the script; with ``--data``, in ALFWorld's own scenes. ``lists`` says how
right those of a run's extractor are before and after its training, about equal plays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cold_start
from benchmarks.cold_start import Chat
from benchmarks.finished_run import finished
from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.config import Experiment
from experiential.llm.models import open_model
from experiential.recipe import load_experiment
from experiential.rollout import make_env
from experiential.training.roles import prompt_set_name
from experiential.types import Distillation, Experience, Trajectory

SETTINGS = (
    "env.id=experiential/ALFWorld-v0", "env.max_turns=10",
    "env.kwargs={data: made, task_types: [pick_and_place_simple], turns: 10,"
    " show_actions: false, goal_in_task: false}",
    "env.train={split: train, households: 200}", "env.eval={split: eval, households: 40}",
    "model.name=build/homes",
)  # fmt: skip
"""Environment and model of the cold start; the study allows eight turns. An actor that chooses
among the possible commands needs no list of them in its prompt."""
NOTED = 0.7
"""Share of the episodes that show a note."""


@dataclass(frozen=True)
class Stage:
    """Describe a stage of the cold start.

    Attributes:
        episodes: that are played.
        distilled: share of them that are distilled.
        listed: most kinds of objects in the list that an extractor has to go on from; None has no
            limit. With few, most visits have something to add.
    """

    episodes: int
    distilled: float
    listed: int | None = None


STAGES = (Stage(700, 0.25), Stage(120, 1.0, listed=3))
"""The first teaches to act and to read, and lists; the second to go on with a list."""

_SIGHT = re.compile(r"(?:On the ([a-z]+ \d+)|The ([a-z]+ \d+) is open\. In it), you see ([^.]*)\.")
_GOAL = re.compile(r"Your task is to: put (?:a|some) (\w+) (?:in|on) (\w+)\.")


def sights(text: str) -> dict[str, str]:
    """Return the kinds of objects that a text says are seen, each with the place seen first.

    >>> sights("You arrive at bed 1. On the bed 1, you see a vase 2, a vase 1, and a pen 1.")
    {'vase': 'bed 1', 'pen': 'bed 1'}
    >>> sights("The drawer 1 is open. In it, you see nothing.")
    {}
    """
    seen: dict[str, str] = {}
    for on, inside, listed in _SIGHT.findall(text):
        for kind in re.findall(r"an? (\w+) \d+", listed):
            seen.setdefault(kind, on or inside)
    return seen


def listing(house: str, kept: Mapping[str, str]) -> str:
    """Return the note where kinds of objects are kept.

    >>> listing("the house of Iron Mill", {"vase": "bed 1", "pen": "desk 1"})
    'In the house of Iron Mill: vase at bed 1, pen at desk 1.'
    """
    return f"In {house}: {', '.join(f'{kind} at {place}' for kind, place in kept.items())}."


def listed(note: str) -> dict[str, str]:
    """Return the kinds of objects of a list, each with its place; the reverse of `listing`.

    >>> listed("In the house of Iron Mill: vase at bed 1, pen at desk 1.")
    {'vase': 'bed 1', 'pen': 'desk 1'}
    """
    return dict(re.findall(r"(\w+) at (\w+ \d+)", note))


class Resident:
    """Bring the object where the goal asks for, in one episode.

    Args:
        observation: the first one, with the goal.
        known: kinds of objects and the places where a note says that they are kept.
        rng: of the order in which places are looked into.
    """

    def __init__(self, observation: str, known: Mapping[str, str], rng: random.Random) -> None:
        goal = _GOAL.search(observation)
        assert goal is not None, observation
        self._kind, self._end = goal.groups()
        self._first, self._rng = known.get(self._kind), rng
        self._visited: set[str] = set()
        self._held = False

    def act(self, info: Mapping[str, Any]) -> str:
        """Return the next action."""
        can: Sequence[str] = info["admissible"]
        for verb in ("move", "take"):
            for action in can:
                parts = re.fullmatch(rf"{verb} {self._kind} \d+ (?:to|from) (\w+) \d+", action)
                if parts and (verb == "move") == (parts[1] == self._end):
                    self._held = verb == "take"
                    return action
        opening = [action for action in can if action.startswith("open ")]
        if opening:  # of the place where it stands
            return opening[0]
        return f"go to {self._next([one[6:] for one in can if one.startswith('go to ')])}"

    def _next(self, places: Sequence[str]) -> str:
        if self._held:
            return next(place for place in sorted(places) if place.split()[0] == self._end)
        if self._first in places and self._first not in self._visited:
            place = str(self._first)
        else:  # a wanted object is never where it must go
            left = [
                place
                for place in places
                if place not in self._visited and place.split()[0] != self._end
            ]
            place = self._rng.choice(left or list(places))
        self._visited.add(place)
        return place


def explored(env: Any, world: int, rng: random.Random, looks: int) -> tuple[dict[str, str], str]:
    """Look into some places of a household; return what was seen where, and the sentences."""
    _, info = env.reset(seed=rng.randrange(2**31), options={"world": world})
    places = [one for one in info["admissible"] if one.startswith("go to ")]
    answers: list[str] = []
    over = False
    for place in rng.sample(places, min(looks, len(places))):
        if over:
            break
        answer, *_, over, info = env.step(place)
        for action in (one for one in info["admissible"] if one.startswith("open ") and not over):
            answer, *_, over, info = env.step(action)
        answers.append(answer)
    said = [found[0] for answer in answers if sights(answer) and (found := _SIGHT.search(answer))]
    return sights("\n".join(said)), "\n".join(said)


def demonstrations(experiment: Experiment, stage: Stage, seed: int) -> Iterator[Chat]:
    """Yield the chats of a stage, played in the training households: acting, distilling."""
    rng = random.Random(seed)
    with closing(make_env(experiment.env, experiment.env.train)) as env:
        worlds = len(env.unwrapped.worlds)  # type: ignore[attr-defined]
        for _ in range(stage.episodes):
            world, known, note = rng.randrange(worlds), dict[str, str](), ""
            if rng.random() < NOTED:
                (known, said), (later, more) = (explored(env, world, rng, 5) for _ in range(2))
                known, said = {**later, **known}, f"{said}\n{more}".strip()
                if known:
                    task = env.unwrapped.task  # type: ignore[attr-defined]
                    note = listing(house_of(task), known) if rng.random() < 0.5 else said
            chat, trajectory = walked(env, world, known, note, experiment, rng)
            if trajectory.success:
                yield chat
            if rng.random() < stage.distilled:
                entry = known if rng.random() < 0.5 else {}
                if stage.listed is not None and entry:
                    kinds = rng.sample(sorted(entry), min(len(entry), rng.randint(1, stage.listed)))
                    entry = {kind: entry[kind] for kind in kinds}
                yield distilled(trajectory, entry, experiment)


def walked(
    env: Any,
    world: int,
    known: Mapping[str, str],
    note: str,
    experiment: Experiment,
    rng: random.Random,
) -> tuple[Chat, Trajectory]:
    """Play one episode by what is known; return it as a chat and as a trajectory."""
    return cold_start.played(
        env, world, note, lambda seen: Resident(seen, known, rng).act, experiment, rng
    )


def distilled(trajectory: Trajectory, known: Mapping[str, str], experiment: Experiment) -> Chat:
    """Return the chat in which an extractor adds what was seen to the list that was known."""
    seen = sights("\n".join(turn.feedback for turn in trajectory.turns))
    say = partial(listing, house_of(trajectory.task))
    return cold_start.distilled(trajectory, known, seen, say, experiment)


def house_of(task: str) -> str:
    """Return the household that a task names."""
    return task.removeprefix("Do what is asked in ").rstrip(".")


def write(file: Path, stage: Stage, seed: int) -> int:
    """Write the demonstrations of a stage; return how many chats these are."""
    return cold_start.write(demonstrations(_experiment(), stage, seed), file)


def train(model: str, stage: Stage, seed: int, folder: Path) -> None:
    """Train a model on the demonstrations of a stage and save it, adapter merged."""
    cold_start.train(demonstrations(_experiment(), stage, seed), SETTINGS, model, seed, folder)


def _experiment() -> Experiment:
    return load_experiment("complementary+small", [*SETTINGS, "model.name=smollm2"])


def probe(model: str, episodes: int, households: int, settings: Sequence[str]) -> dict[str, Any]:
    """Return what a model does in households of the split dev, and how right its own lists are.

    Each episode is played with a list and without. ``settings`` are those of the households.
    """
    experiment = load_experiment(
        "complementary+small", [*SETTINGS, f"model.name={model}", *settings]
    )
    prompts = prompt_set_name(experiment.model)
    with (
        closing(open_model(experiment.model)) as llm,
        closing(make_env(experiment.env, {"split": "dev", "households": households})) as env,
    ):
        actor = ActorAgent(llm, prompts=prompts, advice="observation", constrain=True)
        extractor = ExtractorAgent(
            llm, prompts=prompts, max_operations=1, max_tokens=128, temperature=0.5, seed=0
        )
        won: dict[str, list[bool]] = {"with": [], "without": []}
        told = Counter[str]()
        plays = scripted(env, experiment, episodes, households)
        for number, (known, entry, trajectory) in enumerate(plays):
            note = listing(house_of(trajectory.task), known) if known else ""
            for arm, shown in (("with", note), ("without", "")):
                won[arm].append(cold_start.wins(actor, env, number % households, shown, number))
            answer = extractor.distill(trajectory, _entries(trajectory, entry))
            told.update(graded(answer, _wanted(trajectory, entry)))
        return {
            **{f"success {arm} a list": float(np.mean(each)) for arm, each in won.items()},
            **told,
        }


async def lists(run: Path, episodes: int, households: int) -> dict[str, Counter[str]]:
    """Return how right the lists of a run's extractor are before and after its training.

    Both are drawn at the run's temperature, about the same plays in households of the split dev.
    """
    told: dict[str, Counter[str]] = {}
    async with finished(run) as final:
        settings = final.experiment.env
        extractor = final.distiller(final.experiment.extractor.temperature)
        split = {"split": "dev", "households": households}
        with closing(make_env(settings, split)) as env:
            plays = list(scripted(env, final.experiment, episodes, households))
        async for writer in final.writers():
            counted = told[writer] = Counter[str]()
            for _, entry, trajectory in plays:
                answer = await extractor.adistill(trajectory, _entries(trajectory, entry))
                counted.update(graded(answer, _wanted(trajectory, entry)))
    return told


def scripted(
    env: Any, experiment: Experiment, episodes: int, households: int
) -> Iterator[tuple[dict[str, str], dict[str, str], Trajectory]]:
    """Yield what two looks around a household show, a part of that as a list, and a visit after."""
    rng = random.Random(0)
    for number in range(episodes):
        world = number % households
        known, _ = explored(env, world, rng, 5)
        known |= explored(env, world, rng, 5)[0]
        _, trajectory = walked(env, world, {}, "", experiment, rng)
        kinds = rng.sample(sorted(known), min(len(known), number % 4))
        yield known, {kind: known[kind] for kind in kinds}, trajectory


def graded(answer: Distillation, wanted: Mapping[str, str]) -> Counter[str]:
    """Return the operation of a lesson, and how many of its pairs are right, wrong, left out.

    Of a kind that is named again the last place counts; ``kind_again`` counts the others. A lesson
    that cannot be read, as one that is cut is, has no operation: ``op none``.

    >>> from experiential.types import Add, ParsedOperations
    >>> lesson = Add(text="In the house of Iron Mill: cup at bed 1, cup at desk 1, pen at bed 1.")
    >>> answer = Distillation(parsed=ParsedOperations(operations=(lesson,)))
    >>> dict(graded(answer, {"cup": "desk 1", "pen": "desk 1", "vase": "bed 1"}))
    {'op add': 1, 'right': 1, 'wrong': 1, 'left_out': 2, 'kind_again': 1}
    >>> dict(graded(Distillation(), {"cup": "desk 1"}))
    {'op none': 1}
    """
    operations = answer.parsed.operations
    counted = Counter({f"op {operations[0].op}" if operations else "op none": 1})
    if text := getattr(operations[0], "text", "") if operations else "":
        found = listed(text)
        right = sum(wanted.get(kind) == place for kind, place in found.items())
        counted += Counter(right=right, wrong=len(found) - right, left_out=len(wanted) - right)
        counted += Counter(kind_again=text.count(" at ") - len(found))
    return counted


def _entries(trajectory: Trajectory, known: Mapping[str, str]) -> list[Experience]:
    """Return the list that an extractor is shown; none of an empty one."""
    return [Experience(text=listing(house_of(trajectory.task), known))] if known else []


def _wanted(trajectory: Trajectory, entry: Mapping[str, str]) -> dict[str, str]:
    """Return what a list should say after a play: what was seen, and what the entry said."""
    return {**sights("\n".join(turn.feedback for turn in trajectory.turns)), **entry}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    told = commands.add_parser("demonstrations", help="write the chats of the first stage")
    begun = commands.add_parser("start", help="train SmolLM2 on both stages")
    for one in (told, begun):
        one.add_argument("out", type=Path)
        one.add_argument("--seed", type=int, default=0)
    asked = commands.add_parser("probe", help="say what a model can do")
    asked.add_argument("model")
    asked.add_argument("--episodes", type=int, default=48)
    asked.add_argument("--households", type=int, default=24, help="of the split dev")
    asked.add_argument("--turns", type=int, default=10)
    asked.add_argument("--objects", type=int, default=10, help="kinds in a made household")
    asked.add_argument("--law", default="null", help="by which made households are alike")
    asked.add_argument("--data", default="made", help="folder of ALFWorld's games")
    graded = commands.add_parser("lists", help="compare a run's extractor with its first weights")
    graded.add_argument("run", type=Path)
    graded.add_argument("--episodes", type=int, default=96)
    graded.add_argument("--households", type=int, default=24, help="of the split dev")
    begun.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="1, 2 or both")
    begun.add_argument("--from", dest="base", default="smollm2", help="model to begin with")
    options = parser.parse_args()
    if options.command == "probe":
        settings = [
            f"env.max_turns={options.turns}",
            *(
                f"env.kwargs.{one}={getattr(options, one)}"
                for one in ("turns", "objects", "law", "data")
            ),
        ]
        found = probe(options.model, options.episodes, options.households, settings)
        print(json.dumps(found, indent=1))
        return
    if options.command == "lists":
        told = asyncio.run(lists(options.run, options.episodes, options.households))
        print(json.dumps(told, indent=1))
        return
    if options.command == "demonstrations":
        print(f"{write(options.out, STAGES[0], options.seed)} chats: {options.out}")
        return
    model = options.base
    for number in options.stages:
        train(model, STAGES[number - 1], options.seed + number - 1, options.out)
        model = str(options.out)


if __name__ == "__main__":
    main()
