"""Generate text for the tiny models.

The tasks: reading notes, acting on them, copying facts, lessons as operations, grid games.

The corpus is *half skilled* on purpose: an answer is right only in a documented share of the
samples (`SKILL`), so that the models know every part of the task but prefer none, and reinforcement
learning has something to choose. World names come from the split ``corpus`` of Vault and layouts
from the split ``train``; evaluation never meets them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from experiential.agents.prompts import experience_block, prompt_set
from experiential.envs.frozen_lake import FrozenLakeEnv
from experiential.envs.sokoban import SokobanEnv
from experiential.envs.vault import LEVERS, VaultEnv
from experiential.types import Experience, Message, Trajectory, Turn

BRIEF = prompt_set("brief")
SKILL = {
    "follow": 0.20,
    "right_lesson": 0.36,
    "wrong_lesson": 0.28,
    "generic": 0.15,
    "return": 0.12,
    "grid": 0.35,
}
"""Shares of the answers; what is left of the lessons is malformed."""

Sample = list[Message]
LESSONS = (
    "{world}: pull {lever}.",
    "In {world} the {lever} lever is live.",
    "{world}: the {lever} lever opens it.",
    "Pull {lever} in {world}.",
)
GENERIC = (
    "Try each lever once.",
    "Read the note first.",
    "Signs can be wrong.",
    "Be quick.",
    "Do not pull twice.",
    "Look around first.",
)
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivo", "Jane", "Kai", "Lena")
THINGS = (
    "apple",
    "boat",
    "coin",
    "drum",
    "egg",
    "flag",
    "glove",
    "hat",
    "key",
    "map",
    "pear",
    "ring",
)


def _lesson(rng: random.Random, world: str, lever: str) -> str:
    return rng.choice(LESSONS).format(world=world, lever=lever)


def _world(env: VaultEnv, rng: random.Random) -> str:
    return rng.choice(env.names)


def _answer(*operations: dict[str, object]) -> str:
    return f"<answer>{json.dumps(list(operations), separators=(',', ':'))}</answer>"


def _say(system: str, *turns: str) -> Sample:
    roles = ("user", "assistant")
    messages: Sample = [Message(role="system", content=system)]
    return messages + [Message(role=roles[i % 2], content=text) for i, text in enumerate(turns)]  # type: ignore[typeddict-item]


class VaultTasks:
    """Playing Vault with and without a note, and writing lessons about it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.env = VaultEnv(split="corpus", worlds=200)

    def act(self) -> Sample:
        """Play an episode.

        A small share of the pulls follows a note about this world; the others are random.
        """
        rng = self.rng
        observation, info = self.env.reset(
            seed=rng.randrange(2**31),
            options={"world": rng.randrange(200), "era": rng.randrange(50)},
        )
        world, shown = (
            self.env.names[self.env.names.index(info["task"][18:-1])],
            [a[5:] for a in info["admissible"]],
        )
        note, target = self._note(world, shown)
        turns: list[str] = []
        done = False
        while not done:
            lever = (
                target
                if target is not None and rng.random() < SKILL["follow"]
                else rng.choice(shown)
            )
            turns += [observation, f"pull {lever}"]
            observation, _, done, _, info = self.env.step(turns[-1])
        return _say(BRIEF.actor_system("", note), *turns)

    def _note(self, world: str, shown: list[str]) -> tuple[str | None, str | None]:
        rng, kind = self.rng, self.rng.random()
        if kind < 0.6:
            lever = rng.choice(shown)
            return experience_block([_lesson(rng, world, lever)]), lever
        if kind < 0.7:
            return experience_block([_lesson(rng, _world(self.env, rng), rng.choice(LEVERS))]), None
        if kind < 0.8:
            return experience_block([rng.choice(GENERIC)]), None
        return None, None

    def obey(self) -> Sample:
        """Make a pull that follows the note about this world, among other notes.

        It teaches how to read a note.
        """
        rng = self.rng
        observation, info = self.env.reset(
            seed=rng.randrange(2**31),
            options={"world": rng.randrange(200), "era": rng.randrange(50)},
        )
        lever = rng.choice(info["admissible"])[5:]
        notes = [_lesson(rng, info["task"][18:-1], lever)]
        notes += [
            _lesson(rng, _world(self.env, rng), rng.choice(LEVERS)) for _ in range(rng.randrange(3))
        ]
        rng.shuffle(notes)
        return _say(
            f"Do what the note says.\n{experience_block(notes)}", observation, f"pull {lever}"
        )

    def fact(self) -> Sample:
        """Ask for the live lever of a finished episode: how to read a report."""
        trajectory, world, live = self.episode()
        user = BRIEF.distill_messages(trajectory, [], 1)[1]["content"]
        return _say("Name the live lever.", user, self.rng.choice((f"{live}", f"{world}: {live}")))

    def episode(self) -> tuple[Trajectory, str, str]:
        """Return a random finished episode, its world and the live lever."""
        rng = self.rng
        observation, info = self.env.reset(
            seed=rng.randrange(2**31),
            options={"world": rng.randrange(200), "era": rng.randrange(50)},
        )
        live, shown, turns, done = self.env.oracle_action()[5:], info["admissible"], [], False
        while not done:
            action = f"pull {live}" if rng.random() < 0.15 else rng.choice(shown)
            following, reward, done, _, info = self.env.step(action)
            turns.append(
                Turn(observation=observation, action=action, reward=reward, feedback=following)
            )
            observation = following
        trajectory = Trajectory(
            task=info["task"], turns=tuple(turns), success=info["success"], reward=reward
        )
        return trajectory, info["task"][18:-1], live

    def distill(self) -> Sample:
        """Distil a finished episode: a right, wrong, generic, missing or malformed lesson."""
        rng = self.rng
        trajectory, world, live = self.episode()
        text = " ".join(t.action + " " + t.feedback for t in trajectory.turns)
        mentioned = [lever for lever in LEVERS if lever in text and lever != live] or [
            rng.choice(LEVERS)
        ]
        shown: list[Experience] = []
        if rng.random() < 0.4:
            shown = [Experience(text=_lesson(rng, world, rng.choice((live, rng.choice(LEVERS)))))]
        messages = BRIEF.distill_messages(trajectory, shown, 3)
        kind = rng.random()
        right, wrong = SKILL["right_lesson"], SKILL["right_lesson"] + SKILL["wrong_lesson"]
        if kind < wrong:
            lesson = _lesson(rng, world, live if kind < right else rng.choice(mentioned))
            write = (
                {"op": "update", "entry": 1, "text": lesson}
                if shown and rng.random() < 0.6
                else {"op": "add", "text": lesson}
            )
            answer = _answer(write)
        elif kind < wrong + SKILL["generic"]:
            answer = _answer({"op": "add", "text": rng.choice(GENERIC)})
        elif kind < wrong + SKILL["generic"] + SKILL["return"]:
            answer = _answer({"op": "return"})
        else:
            answer = rng.choice(
                (
                    "<answer>[]</answer>",
                    "<answer>none</answer>",
                    _lesson(rng, world, rng.choice(mentioned)),
                )
            )
        return [*messages, Message(role="assistant", content=answer)]

    def merge(self) -> Sample:
        """Consolidate notes: equal ones are merged, others kept."""
        rng = self.rng
        worlds = [_world(self.env, rng) for _ in range(rng.randint(1, 3))]
        facts = [(w, rng.choice(LEVERS)) for w in worlds for _ in range(rng.randint(1, 2))][:5]
        if len(facts) < 2:
            facts.append(facts[0])
        if rng.random() < 0.6:
            facts[-1] = facts[0]
        notes = [_lesson(rng, w, c) for w, c in facts]
        operations: list[dict[str, object]] = []
        if facts[-1] == facts[0]:
            operations.append({"op": "merge", "entries": [1, len(facts)], "text": notes[0]})
        operations += [
            {"op": "keep", "entry": i + 1}
            for i in range(len(facts))
            if not (facts[-1] == facts[0] and i in (0, len(facts) - 1))
        ]
        return [
            *BRIEF.merge_messages([Experience(text=n) for n in notes]),
            Message(role="assistant", content=_answer(*operations)),
        ]

    def refine(self) -> Sample:
        """Restate a note for a question."""
        rng = self.rng
        world, lever = _world(self.env, rng), rng.choice(LEVERS)
        question = rng.choice(
            (
                f"Which lever opens {world}?",
                f"Open the vault of {world}.",
                f"What to pull in {world}?",
            )
        )
        messages = BRIEF.refine_messages(question, Experience(text=_lesson(rng, world, lever)))
        return [*messages, Message(role="assistant", content=f"Pull {lever}.")]

    def judge(self) -> Sample:
        """Whether two notes say the same."""
        rng = self.rng
        world, lever = _world(self.env, rng), rng.choice(LEVERS)
        same = rng.random() < 0.5
        other = (
            (world, lever)
            if same
            else rng.choice(((world, rng.choice(LEVERS)), (_world(self.env, rng), lever)))
        )
        messages = BRIEF.judge_messages(_lesson(rng, world, lever), _lesson(rng, *other))
        return [
            *messages,
            Message(role="assistant", content="yes" if other == (world, lever) else "no"),
        ]


class ReadingTasks:
    """Facts to look up and texts to copy."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.worlds = VaultEnv(split="corpus", worlds=300).names

    def look_up(self) -> Sample:
        """Ask about one of several facts."""
        rng = self.rng
        people = rng.sample(NAMES, rng.randint(2, 5))
        facts = {p: (rng.choice(THINGS), rng.choice(LEVERS)) for p in people}
        person = rng.choice(people)
        story = " ".join(f"{p} has a {colour} {thing}." for p, (thing, colour) in facts.items())
        thing, colour = facts[person]
        question, answer = rng.choice(
            (
                (f"What has {person}?", f"a {colour} {thing}"),
                (f"Which colour has {person}?", colour),
            )
        )
        return _say("Answer the question.", f"{story}\n{question}", answer)

    def copy(self) -> Sample:
        """Ask to repeat a text."""
        rng = self.rng
        words = [
            rng.choice((rng.choice(LEVERS + THINGS + NAMES), rng.choice(self.worlds)))
            for _ in range(rng.randint(3, 14))
        ]
        return _say("Repeat the text.", " ".join(words), " ".join(words))


class GridTasks:
    """Make moves in FrozenLake and Sokoban.

    A share of the samples has the shortest plan's move, the others any move.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.lakes = [FrozenLakeEnv(split="train", sizes=(2, n)) for n in (3, 4, 5, 9)]
        self.sokoban = SokobanEnv(split="train")

    def lake(self) -> Sample:
        """One move on a frozen lake."""
        return self._move(self.rng.choice(self.lakes))

    def push(self) -> Sample:
        """One move in a Sokoban room."""
        return self._move(self.sokoban)

    def solve(self) -> Sample:
        """One move on a frozen lake, always of a shortest way: how to read a grid."""
        return self._move(
            self.rng.choice(self.lakes[:3]), system="Take the shortest way.", skill=1.0
        )

    def _move(
        self,
        env: FrozenLakeEnv | SokobanEnv,
        system: str | None = None,
        skill: float = SKILL["grid"],
    ) -> Sample:
        rng = self.rng
        observation, info = env.reset(seed=rng.randrange(100_000))
        for _ in range(rng.randrange(4)):
            action = env.oracle_action() if rng.random() < 0.6 else rng.choice(info["admissible"])
            following, _, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                break
            observation = following
        else:
            terminated = truncated = False
        if terminated or truncated:
            return self._move(env, system, skill)
        action = env.oracle_action() if rng.random() < skill else rng.choice(info["admissible"])
        return _say(system or BRIEF.actor_system("", None), observation, action)


def sampler(seed: int) -> Callable[[], Sample]:
    """Return a seeded source of conversations whose last message is the wanted answer."""
    rng = random.Random(seed)
    vault, reading, grid = VaultTasks(rng), ReadingTasks(rng), GridTasks(rng)
    tasks: list[tuple[float, Callable[[], Sample]]] = [
        (0.18, vault.act), (0.12, vault.obey), (0.20, vault.distill), (0.10, vault.fact),
        (0.04, vault.merge), (0.02, vault.refine),
        (0.01, vault.judge), (0.06, reading.look_up), (0.09, reading.copy), (0.06, grid.lake),
        (0.02, grid.push), (0.10, grid.solve),
    ]  # fmt: skip
    weights, makers = [w for w, _ in tasks], [m for _, m in tasks]
    return lambda: rng.choices(makers, weights)[0]()
