"""Give SmolLM2 a cold start in dialects of FrozenLake, from walkthroughs of a script.

    python -m benchmarks.dialects demonstrations OUT.jsonl [--seed 0]
    python -m benchmarks.dialects start build/dialects [--seed 0]
    python -m benchmarks.dialects probe build/dialects [--episodes 48]
    python -m benchmarks.dialects worth [--episodes 400]
    python -m benchmarks.dialects notes BANK [BANK ...]

A world is a dialect, in which each word for a move leads somewhere of its own. The observation is a
sentence, because this model does not read a grid: where the goal and the holes beside the agent
lie. The script takes a shortest way by the words it knows and tries an unknown word where it knows
none. Four of five of its episodes, in dialects of the split corpus, show a note: the words that
lead somewhere, three of four times all of them. ``demonstrations`` writes the chats that an actor
would have had in the episodes that succeeded, and after some episodes, won or lost, the chat in
which an extractor writes the note or goes on with it. ``start`` trains a LoRA adapter on them and
saves the model with it merged, which all recipes of the study's environment ``lake-words-smollm2``
start from. ``probe`` says what a model can do in dialects of the split dev: how often it succeeds
with a note of all words, with that of another dialect, and without, and how right its own notes
about plays of the script are. ``worth`` says how often the script itself wins there, by how many
words it is told before. ``notes`` counts, in banks of such dialects, how right the notes are, and
what a note that goes on with another makes of the words that the play adds and of those that it
shows to be wrong.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cold_start
from benchmarks.cold_start import Chat
from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.config import Experiment
from experiential.envs.dialect import DIRECTIONS, Dialect, dialects_of
from experiential.envs.names import NAMED_SPLITS
from experiential.llm.models import open_model
from experiential.recipe import load_experiment
from experiential.rollout import make_env
from experiential.training.roles import prompt_set_name
from experiential.types import Experience, Trajectory

SETTINGS = (
    "env.id=experiential/FrozenLake-v0", "env.max_turns=5",
    "env.kwargs={preset: dialects, sizes: [4, 4], frozen: [0.85, 0.95], words_only: true,"
    " described: true,"
    " budget: 5}",  # with 8, a script that remembers nothing wins 82 %; so 33

    "env.train={split: train, dialects: 120}", "env.eval={split: eval, dialects: 40}",
    "model.name=build/dialects",
)  # fmt: skip
"""Environment and model of the study."""
EPISODES = 2000
"""Played for the cold start."""
NOTED = 0.8
"""Share of the episodes that show a note."""
COMPLETE = 0.75
"""Share of the notes that have all four words."""
DISTILLED = 0.25
"""Share of the episodes that are distilled."""


def legend(name: str, known: Mapping[str, str]) -> str:
    """Return the note which word leads where.

    >>> legend("Iron Mill", {"Up": "Left", "Right": "Down"})
    'In the dialect of Iron Mill: to go left, say Up, to go down, say Right.'
    """
    ways = ", ".join(f"to go {way.lower()}, say {word}" for word, way in known.items())
    return f"In the dialect of {name}: {ways}."


def words_of(note: str) -> dict[str, str]:
    """Return the words of a note, each with where it leads; the reverse of `legend`.

    >>> words_of("In the dialect of Iron Mill: to go left, say Up, to go down, say Right.")
    {'Up': 'Left', 'Right': 'Down'}
    """
    ways = "|".join(DIRECTIONS).lower()
    found = re.findall(rf"to go ({ways}), say (\w+)", note)
    return {word: way.capitalize() for way, word in found}


def moved(trajectory: Trajectory) -> dict[str, str]:
    """Return the words of an episode, each with where it led, or did not because of the edge."""
    found: dict[str, str] = {}
    for turn in trajectory.turns:
        went = re.search(r"You (?:moved|cannot move) (\w+)\.", turn.feedback)
        if went:
            found[turn.action] = went[1].capitalize()
    return found


def dialect_of(task: str) -> str:
    """Return the dialect that a task names."""
    return task.removeprefix("Cross the ice in the dialect of ").rstrip(".")


class Walker:
    """Cross the ice in one episode, by the words known, and try others where none is known.

    Args:
        env: the lake.
        known: words, and where a note says that they lead.
        rng: of the word tried.
    """

    def __init__(self, env: Any, known: Mapping[str, str], rng: random.Random) -> None:
        self._env, self._known, self._rng = env, dict(known), rng

    def act(self, info: Mapping[str, Any]) -> str:
        """Return the next action."""
        dialect: Dialect = self._env.dialect
        best = dialect.direction(self._env.oracle_action())
        word = next((word for word, way in self._known.items() if way == best), None)
        if word is None:
            word = self._rng.choice([one for one in DIRECTIONS if one not in self._known])
            self._known[word] = dialect.direction(word)  # the answer will tell
        return word


def meanings(dialect: Dialect) -> dict[str, str]:
    """Return where each word leads."""
    return dict(zip(DIRECTIONS, dialect.directions, strict=True))


def some(known: Mapping[str, str], rng: random.Random, complete: float) -> dict[str, str]:
    """Return known words in a drawn order: all with this probability, else fewer."""
    count = len(known) if rng.random() < complete else rng.randint(1, 3)
    return {word: known[word] for word in rng.sample(list(known), min(count, len(known)))}


def demonstrations(experiment: Experiment, episodes: int, seed: int) -> Iterator[Chat]:
    """Yield chats of episodes in dialects of the split corpus: acting, distilling."""
    rng = random.Random(seed)
    with closing(make_env(experiment.env, {"split": "corpus", "dialects": 120})) as env:
        lake: Any = env.unwrapped
        for _ in range(episodes):
            world = rng.randrange(len(lake.dialects))
            dialect: Dialect = lake.dialects[world]
            told = some(meanings(dialect), rng, COMPLETE) if rng.random() < NOTED else {}
            note = legend(dialect.name, told) if told else ""
            chat, trajectory = walked(env, world, told, note, experiment, rng)
            if trajectory.success:
                yield chat
            if rng.random() < DISTILLED:
                entry = some(meanings(dialect), rng, 0.1) if rng.random() < 0.5 else {}
                yield distilled(trajectory, entry, experiment)


def walked(
    env: Any,
    world: int,
    told: Mapping[str, str],
    note: str,
    experiment: Experiment,
    rng: random.Random,
) -> tuple[Chat, Trajectory]:
    """Play one episode by the words told; return it as a chat and as a trajectory."""
    return cold_start.played(
        env, world, note, lambda seen: Walker(env.unwrapped, told, rng).act, experiment, rng
    )


def distilled(trajectory: Trajectory, known: Mapping[str, str], experiment: Experiment) -> Chat:
    """Return the chat in which an extractor adds the words of a play to those known."""
    say = partial(legend, dialect_of(trajectory.task))
    return cold_start.distilled(trajectory, known, moved(trajectory), say, experiment)


def write(file: Path, seed: int) -> int:
    """Write the demonstrations; return how many chats these are."""
    return cold_start.write(demonstrations(_experiment("smollm2"), EPISODES, seed), file)


def train(model: str, seed: int, folder: Path) -> None:
    """Train a model on the demonstrations and save it, adapter merged."""
    chats = demonstrations(_experiment("smollm2"), EPISODES, seed)
    cold_start.train(chats, SETTINGS, model, seed, folder, batch_size=8)


def _experiment(model: str) -> Experiment:
    return load_experiment("complementary+small", [*SETTINGS, f"model.name={model}"])


def probe(model: str, episodes: int, dialects: int = 24) -> dict[str, Any]:
    """Return what a model does in dialects of the split dev, and how right its own notes are."""
    experiment, rng = _experiment(model), random.Random(0)
    prompts = prompt_set_name(experiment.model)
    with (
        closing(open_model(experiment.model)) as llm,
        closing(make_env(experiment.env, {"split": "dev", "dialects": dialects})) as env,
    ):
        actor = ActorAgent(llm, prompts=prompts, advice="observation", constrain=True)
        extractor = ExtractorAgent(
            llm, prompts=prompts, max_operations=1, max_tokens=80, temperature=0.1, seed=0
        )
        won: dict[str, list[bool]] = {"its own": [], "another's": [], "no": []}
        told, known = Counter[str](), [meanings(one) for one in env.unwrapped.dialects]  # type: ignore[attr-defined]
        for number in range(episodes):
            world = number % dialects
            other = next(one for one in known[world:] + known if one != known[world])
            name = env.unwrapped.dialects[world].name  # type: ignore[attr-defined]
            for arm, words in (("its own", known[world]), ("another's", other), ("no", {})):
                note = legend(name, some(words, rng, 1.0)) if words else ""
                won[arm].append(cold_start.wins(actor, env, world, note, number))
            _, trajectory = walked(env, world, {}, "", experiment, rng)
            entry = some(known[world], rng, 0.1) if number % 2 else {}
            told.update(_graded(extractor, trajectory, entry, known[world]))
        return {
            **{f"success with {arm} note": float(np.mean(each)) for arm, each in won.items()},
            **told,
        }


def worth(episodes: int, dialects: int = 40) -> dict[str, float]:
    """Return how often the script wins in dialects of the split dev, by the words it is told."""
    experiment, won = _experiment("smollm2"), dict[str, float]()
    with closing(make_env(experiment.env, {"split": "dev", "dialects": dialects})) as env:
        lake: Any = env.unwrapped
        for count in range(len(DIRECTIONS) + 1):
            rng, successes = random.Random(0), 0
            for number in range(episodes):
                world = number % dialects
                known = meanings(lake.dialects[world])
                told = {word: known[word] for word in rng.sample(DIRECTIONS, count)}
                successes += walked(env, world, told, "", experiment, rng)[1].success
            won[f"success if told {count} words"] = successes / episodes
    return won


def notes(folders: Sequence[Path]) -> dict[str, dict[str, int]]:
    """Count the words of notes in banks: of first ones, and of those that go on with another."""
    every = [one for split in NAMED_SPLITS for one in dialects_of(split, "ABCD", words_only=True)]
    right = {one.name: meanings(one) for one in every}
    counts: dict[str, Counter[str]] = {"first": Counter(), "going on": Counter()}
    for folder in folders:
        with ExperienceBank(folder, embedder="hashing", read_only=True) as bank:
            for known, play, said in _written(bank):
                true, seen = right[dialect_of(play.task)], moved(play)
                good = sum(true.get(word) == way for word, way in said.items())
                new = seen.keys() - known.keys()
                wrong = [word for word in seen.keys() & known.keys() if seen[word] != known[word]]
                counts["going on" if known else "first"].update(
                    {
                        "notes": 1,
                        "right words": good,
                        "wrong words": len(said) - good,
                        "new words": len(new),
                        "new words taken up": sum(said.get(word) == seen[word] for word in new),
                        "wrong words shown": len(wrong),
                        "wrong words corrected": sum(said.get(one) == seen[one] for one in wrong),
                    }
                )
    return {kind: dict(each) for kind, each in counts.items()}


def _written(bank: ExperienceBank) -> Iterator[tuple[dict[str, str], Trajectory, dict[str, str]]]:
    """Yield each note that was written about a play: the words read in it, the play, the words."""
    for entry in bank:
        for number in range(1, entry.version + 1):
            note = bank.version(entry.id, number)
            play = bank.trajectory(note.provenance.trajectory or "") if note else None
            if note is None or play is None:
                continue
            read = [bank.version(use.experience_id, use.experience_version) for use in play.uses]
            yield words_of(read[0].text) if read and read[0] else {}, play, words_of(note.text)


def _graded(
    extractor: ExtractorAgent,
    trajectory: Trajectory,
    entry: Mapping[str, str],
    right: Mapping[str, str],
) -> Counter[str]:
    """Return the operation of a lesson, and how many of its words are right, wrong, left out."""
    shown = [Experience(text=legend(dialect_of(trajectory.task), entry))] if entry else []
    operations = extractor.distill(trajectory, shown).parsed.operations
    text = getattr(operations[0], "text", "") if operations else ""
    found = words_of(text)
    good = sum(right.get(word) == way for word, way in found.items())
    graded = Counter({f"op {operations[0].op}" if operations else "op none": 1})
    if text:
        wanted = {**moved(trajectory), **entry}
        left = sum(word not in found for word in wanted)
        graded += Counter(right=good, wrong=len(found) - good, left_out=left)
    return graded


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    told = commands.add_parser("demonstrations", help="write the chats")
    begun = commands.add_parser("start", help="train SmolLM2 on the chats")
    for one in (told, begun):
        one.add_argument("out", type=Path)
        one.add_argument("--seed", type=int, default=0)
    begun.add_argument("--from", dest="base", default="smollm2", help="model to begin with")
    asked = commands.add_parser("probe", help="say what a model can do")
    asked.add_argument("model")
    asked.add_argument("--episodes", type=int, default=48)
    valued = commands.add_parser("worth", help="say what words are worth to the script")
    valued.add_argument("--episodes", type=int, default=400)
    counted = commands.add_parser("notes", help="say how right the notes of banks are")
    counted.add_argument("banks", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "notes":
        print(json.dumps(notes(options.banks), indent=1))
    elif options.command == "probe":
        print(json.dumps(probe(options.model, options.episodes), indent=1))
    elif options.command == "worth":
        print(json.dumps(worth(options.episodes), indent=1))
    elif options.command == "demonstrations":
        print(f"{write(options.out, options.seed)} chats: {options.out}")
    else:
        train(options.base, options.seed, options.out)


if __name__ == "__main__":
    main()
