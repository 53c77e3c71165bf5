"""Generate text for a tiny model that must earn its memory: worlds that tell nothing by themselves.

Vault without a clerk, where a failed visit only rules levers out, and FrozenLake in dialects of the
words for moves, where a lesson says which word moves where. The games of `tools.tiny_corpus` stay
in a small share; its tasks that are skilled in every sample are left out, which does not undo what
the bundled model learned of them.

There are two stages. The first teaches each part in nearly every sample (`TAUGHT`), for a part that
is shown in one sample of three does not form within this budget. The second shows the same parts in
the shares `HALF`, and is what the model ends with. Names are those of the split ``corpus``, as are
the layouts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from experiential.agents.prompts import experience_block, prompt_set
from experiential.envs.dialect import DIRECTIONS
from experiential.envs.frozen_lake import FrozenLakeEnv
from experiential.envs.names import NamedSplit
from experiential.envs.vault import LEVERS, VaultEnv
from experiential.types import Experience, Message, Trajectory, Turn
from tools.tiny_corpus import BRIEF, GENERIC, ReadingTasks, Sample, VaultTasks, _answer, _say

OPENED = prompt_set("opened")
TAUGHT = {"avoid": 0.97, "follow": 0.97, "walk": 0.97, "lesson": 0.97, "join": 0.97}
HALF = {"avoid": 0.50, "follow": 0.40, "walk": 0.50, "lesson": 0.45, "join": 0.50}
"""Shares of the skilled answers: pulls that avoid what is ruled out and follow a lever named, moves
on a shortest way in the words of the note, lessons that are right and complete, lists joined."""
HABIT = {"walk": 0.90, "lesson": 1.0, "vague": 0.75}
"""Shares of the stage that leaves a habit: three of four lessons are `VAGUE`, and the others right
and complete, so that the likeliest lesson helps nobody. Moves are skilled with 0.9."""
VAGUE = ("Mind the holes.", "Plan each move.", "Look around first.", "Be quick.", "Do not hurry.",
         "Keep to the ice.")  # fmt: skip
"""Advice that is true of every lake."""

POINTS = dict(zip(DIRECTIONS, "NSWE", strict=True))
LAKE = {"preset": "dialects", "sizes": (4, 4), "frozen": (0.85, 0.95), "words_only": True}
"""The lakes of the corpus and of the study."""


def ruled_out(world: str, levers: Sequence[str]) -> str:
    """Return the lesson that levers were tried in vain."""
    return f"{world}: not {' '.join(levers)}."


def live(world: str, lever: str) -> str:
    """Return the lesson that a lever opens the vault."""
    return f"Pull {lever} in {world}."


def legend(name: str, known: Mapping[str, str]) -> str:
    """Return the lesson where words move; ``known`` has a direction for each word found out.

    Words stand in the order of ``known``, which is that in which they were found out: a model that
    reads a record from its beginning writes each word down as it comes. A point of the compass
    stands right before its word: the tiny model has heads that say what followed a token before,
    and none that skip a sign between the two.
    """
    told = (f"{POINTS[direction]}{word}" for word, direction in known.items())
    return f"{name}:{','.join(told)}."


def _written(text: str, update: bool) -> str:
    """Return the answer that writes a lesson, in place of the entry shown or beside it."""
    return _answer(
        {"op": "update", "entry": 1, "text": text} if update else {"op": "add", "text": text}
    )


class BlindVaultTasks:
    """Play vaults without a clerk, and keep lists of the levers ruled out."""

    def __init__(
        self, rng: random.Random, skill: Mapping[str, float], split: NamedSplit = "corpus"
    ) -> None:
        self.rng, self.skill = rng, skill
        worlds = 200 if split == "corpus" else 100
        self.env = VaultEnv(split, worlds, note=False)
        self.longer = VaultEnv(split, worlds, note=False, tries=6)

    def _reset(self, env: VaultEnv | None = None) -> tuple[str, str, list[str], str]:
        """Begin an episode; return the observation, the world, its levers and the live one."""
        env, world = env or self.env, self.rng.choice(self.env.worlds)
        observation, info = env.reset(
            seed=self.rng.randrange(2**31), options={"world": world, "era": self.rng.randrange(50)}
        )
        shown = [action[5:] for action in info["admissible"]]
        return observation, env.names[world], shown, env.oracle_action()[5:]

    def act(self) -> Sample:
        """Pull levers, with a list of those ruled out, a lever named, or neither."""
        return self.pulls()[0]

    def pulls(self) -> tuple[Sample, list[dict[str, float]]]:
        """Return an episode, and of each of its pulls how likely each lever should be.

        Half of the vaults allow six tries, for each pull teaches.
        """
        rng = self.rng
        env = self.longer if rng.random() < 0.5 else self.env
        observation, world, shown, right = self._reset(env)
        dead = [lever for lever in rng.sample(shown, len(shown)) if lever != right]
        kind, notes, target, out = rng.random(), list[str](), None, set[str]()
        if kind < 0.65:
            listed = dead[: rng.randint(1, 12)]
            notes, out = [ruled_out(world, listed)], set(listed)
        elif kind < 0.85:
            target = right if rng.random() < 0.5 else rng.choice(dead)
            notes = [live(world, target)]
        elif kind < 0.9:
            notes = [rng.choice(GENERIC)]
        turns, wanted, done = list[str](), list[dict[str, float]](), False
        while not done:
            wanted.append(self._wanted(shown, out, target))
            (lever,) = rng.choices(list(wanted[-1]), list(wanted[-1].values()))
            turns += [observation, f"pull {lever}"]
            out.add(lever)
            observation, _, done, _, _ = env.step(turns[-1])
        block = experience_block(notes) if notes else None
        return _say(BRIEF.actor_system("", block), *turns), wanted

    def _wanted(self, shown: list[str], out: set[str], target: str | None) -> dict[str, float]:
        """Return the shares of the levers: skilled ones avoid ``out`` and follow ``target``."""
        left = [lever for lever in shown if lever not in out] or shown
        avoids, follows = self.skill["avoid"], self.skill["follow"]
        if target is None or target in out:
            follows = 0.0
        return {
            lever: (1 - follows)
            * ((lever in left) * avoids / len(left) + (1 - avoids) / len(shown))
            + (lever == target) * follows
            for lever in shown
        }

    def left(self) -> Sample:
        """Name the levers that a list has not ruled out: how to tell which levers are in it.

        The lists are short in most samples: with none ruled out the answer is a copy, which the
        model can make before, and a lever to leave out is learned from there.
        """
        rng = self.rng
        world = rng.choice(self.env.names)
        shown = rng.sample(LEVERS, rng.choice((3, 4, 5, 6, 8, 14)))
        listed = rng.sample(shown, rng.randint(0, len(shown) - 1))
        left = [lever for lever in shown if lever not in listed]
        if rng.random() >= self.skill["avoid"]:
            left = rng.sample(shown, len(left))
        question = f"{ruled_out(world, listed)}\nLevers: {' '.join(shown)}."
        return _say("Name the levers left.", question, f"{' '.join(left)}.")

    def distill(self) -> Sample:
        """Write a lesson about a visit: a lever found, or the list of those ruled out, longer.

        Pulls mostly try what is not ruled out yet, as those of an actor that reads the list.
        """
        rng = self.rng
        observation, world, shown, right = self._reset()
        dead = [lever for lever in rng.sample(shown, len(shown)) if lever != right]
        before: list[str] | None = None
        entry: str | None = None
        named = ""
        kind = rng.random()
        if kind < 0.5:
            before = dead[: rng.choice((1, 2, 2, 2, 3, 4, 4, 5, 6, 8, 10))]
            entry = ruled_out(world, before)
        elif kind < 0.65:
            named = right if rng.random() < 0.5 else rng.choice(dead)
            entry = live(world, named)
        turns: list[Turn] = []
        done, reward, success = False, 0.0, False
        while not done:
            out = (before or []) + [turn.action[5:] for turn in turns]
            fresh = [one for one in shown if one not in out or rng.random() < 0.1]
            lever = right if rng.random() < 0.25 else rng.choice(fresh)
            following, reward, done, _, info = self.env.step(f"pull {lever}")
            success = bool(info["success"])
            turns.append(
                Turn(observation=observation, action=f"pull {lever}", reward=reward,
                     feedback=following)
            )  # fmt: skip
            observation = following
        trajectory = Trajectory(
            task=f"Open the vault of {world}.", turns=tuple(turns), success=success, reward=reward
        )
        tried = list(dict.fromkeys(turn.action[5:] for turn in turns))
        messages = BRIEF.distill_messages(trajectory, [entry] if entry else [], 3)
        idle = bool(named) and not success and named not in tried  # the lever may yet be right
        answer = self._lesson(world, shown, entry, before, tried, success, idle)
        return [*messages, Message(role="assistant", content=answer)]

    def _lesson(
        self,
        world: str,
        shown: list[str],
        entry: str | None,
        before: list[str] | None,
        tried: list[str],
        success: bool,
        idle: bool,
    ) -> str:
        rng = self.rng
        if rng.random() < self.skill["lesson"]:
            if idle:
                return _answer({"op": "return"})
            if success:
                text = live(world, tried[-1])
            else:
                known = before or []
                text = ruled_out(world, known + [one for one in tried if one not in known])
            update = entry is not None
        else:
            kind = rng.random()
            if kind < 0.5:  # a claim, or what was tried in this visit alone, or another list
                some = rng.sample(shown, rng.randint(1, 4))
                text = rng.choice(
                    (live(world, rng.choice(tried)), ruled_out(world, tried),
                     ruled_out(world, some))
                )  # fmt: skip
            elif kind < 0.75:
                text = rng.choice(GENERIC)
            else:
                return _answer({"op": "return"})
            update = entry is not None and rng.random() < 0.5
        return _written(text, update)

    def merge(self) -> Sample:
        """Join two lists of one world, or keep a lever found; entries of other worlds stay."""
        rng = self.rng
        _, world, shown, right = self._reset()
        dead = [lever for lever in rng.sample(shown, len(shown)) if lever != right]
        first, second = (dead[i : i + rng.randint(1, 5)] for i in (0, rng.randint(1, 5)))
        lists = [first, second]
        notes = [ruled_out(world, one) for one in lists]
        joined = ruled_out(world, list(dict.fromkeys(first + second)))
        if rng.random() < 0.25:
            notes[rng.randrange(2)] = joined = live(world, right)
        if rng.random() < self.skill["join"]:
            answer = _answer({"op": "merge", "entries": [1, 2], "text": joined})
        else:
            answer = _answer({"op": "keep", "entry": 1}, {"op": "keep", "entry": 2})
        messages = BRIEF.merge_messages([Experience(text=one) for one in notes])
        return [*messages, Message(role="assistant", content=answer)]


class DialectTasks:
    """Cross lakes in a dialect of the words for moves, and write down which word moves where."""

    def __init__(
        self, rng: random.Random, skill: Mapping[str, float], split: NamedSplit = "corpus"
    ) -> None:
        self.rng, self.skill = rng, skill
        self.env = FrozenLakeEnv(split, **LAKE, dialects=100)  # type: ignore[arg-type]

    def _begin(self) -> tuple[str, str, dict[str, str]]:
        """Begin an episode; return the observation, the dialect's name and its meanings."""
        rng = self.rng
        observation, _ = self.env.reset(
            seed=rng.randrange(2**31), options={"world": rng.randrange(100)}
        )
        return (
            observation,
            self.env.dialect.name,
            dict(zip(DIRECTIONS, self.env.dialect.directions, strict=True)),
        )

    def _some(self, known: Mapping[str, str], least: int) -> dict[str, str]:
        words = self.rng.sample(DIRECTIONS, self.rng.randint(least, 4))
        return {word: known[word] for word in words}

    def act(self) -> Sample:
        """Play an episode with a legend, in part, of another dialect, or with none.

        The note decides where words are thought to move, whatever they do, so that one grid has
        different right answers under different notes.
        """
        rng = self.rng
        observation, name, known = self._begin()
        notes: list[str] = []
        kind = rng.random()
        if kind < 0.7:
            told = self._some(known, 4 if rng.random() < 0.75 else 2)
            notes = [legend(name, told)]
        elif kind < 0.9:
            values = rng.sample(DIRECTIONS, 4)
            told = dict(zip(rng.sample(DIRECTIONS, 4), values, strict=True))
            notes = [legend(name, told)]
        else:
            told = {}
            if kind < 0.93:
                notes = [rng.choice(GENERIC)]
            elif "vague" in self.skill:
                notes = [rng.choice(VAGUE)]
        words = {direction: word for word, direction in told.items()}
        turns: list[str] = []
        done = False
        while not done and len(turns) < 14:
            action = rng.choice(DIRECTIONS)
            if rng.random() < self.skill["walk"]:
                way = self.env._solve()
                unknown = [word for word in DIRECTIONS if word not in told]
                if way and (way[0] in words or unknown):
                    action = words.get(way[0]) or rng.choice(unknown)
            turns += [observation, action]
            observation, _, terminated, truncated, _ = self.env.step(action)
            done = terminated or truncated
        return _say(OPENED.actor_system("", experience_block(notes) if notes else None), *turns)

    def ways(self) -> Sample:
        """Say on which way the goal is, on some boards: how to read one."""
        turns: list[str] = []
        for _ in range(4):
            observation, _, _ = self._begin()
            way = self.env._solve()
            clever = way and self.rng.random() < self.skill["walk"]
            turns += [observation, POINTS[way[0] if clever and way else self._any()]]
        return _say("Which way?", *turns)

    def words(self) -> Sample:
        """Say which word moves on some ways: how to read a legend."""
        rng = self.rng
        told = self._some(dict(zip(DIRECTIONS, rng.sample(DIRECTIONS, 4), strict=True)), 1)
        words, turns = {direction: word for word, direction in told.items()}, list[str]()
        for _ in range(4):
            direction = rng.choice(list(words))
            skilled = rng.random() < self.skill["walk"]
            turns += [POINTS[direction], words[direction] if skilled else self._any()]
        block = experience_block([legend(rng.choice(self.env.dialects).name, told)])
        return _say(f"Which word?\n{block}", *turns)

    def moves(self) -> Sample:
        """Say which way each move of an episode went: how to read a record."""
        rng = self.rng
        observation, _, known = self._begin()
        said, boards, done = list[str](), [observation], False
        while not done and len(said) < 4:
            action, place = self._any(), self.env.agent
            following, _, terminated, truncated, _ = self.env.step(action)
            direction = known[action] if self.env.agent != place else ""
            if rng.random() >= self.skill["lesson"]:
                direction = self._any()
            said.append(POINTS.get(direction, "0"))
            boards.append(f"> {action}\n{following}")
            done = terminated or truncated
        return _say("Which ways?", "\n".join(boards), ",".join(said))

    def _any(self) -> str:
        return self.rng.choice(DIRECTIONS)

    def distill(self) -> Sample:
        """Write down which word moves where, as far as an episode and the entry shown tell."""
        rng = self.rng
        observation, name, known = self._begin()
        told = self._some(known, 1) if rng.random() < 0.35 else {}
        turns: list[Turn] = []
        seen: dict[str, str] = {}
        done, reward, success = False, 0.0, False
        clever = rng.random()
        while not done:
            plan = self.env.plan()
            action = plan[0] if plan and rng.random() < clever else rng.choice(DIRECTIONS)
            place = self.env.agent
            following, reward, terminated, truncated, info = self.env.step(action)
            if self.env.agent != place:
                seen.setdefault(action, known[action])
            success = bool(info["success"])
            turns.append(
                Turn(observation=observation, action=action, reward=reward, feedback=following)
            )
            observation, done = following, terminated or truncated
        trajectory = Trajectory(
            task=self.env.task, turns=tuple(turns), success=success, reward=reward
        )
        entry = legend(name, told) if told else None
        vague = self.skill.get("vague", 0.0)
        if entry is None and rng.random() < vague:
            entry = rng.choice(VAGUE)
        messages = OPENED.distill_messages(trajectory, [entry] if entry else [], 3)
        if rng.random() < vague:
            answer = _written(rng.choice(VAGUE), entry is not None)
        else:
            answer = self._lesson(name, entry, told | seen)
        return [*messages, Message(role="assistant", content=answer)]

    def _lesson(self, name: str, entry: str | None, known: dict[str, str]) -> str:
        rng = self.rng
        if known and rng.random() < self.skill["lesson"]:
            text, update = legend(name, known), entry is not None
        else:
            kind = rng.random()
            if kind < 0.6:
                values = rng.sample(DIRECTIONS, 4)
                words = list(known) or rng.sample(DIRECTIONS, 2)
                text = legend(name, dict(zip(words, values, strict=False)))
            elif kind < 0.75:
                text = rng.choice(GENERIC)
            else:
                return _answer({"op": "return"})
            update = entry is not None and rng.random() < 0.5
        return _written(text, update)


LAKE_STAGES: dict[str, tuple[Mapping[str, float], Mapping[str, float]]] = {
    "taught": (TAUGHT, {"act": 0.40, "ways": 0.20, "words": 0.10, "moves": 0.12, "distill": 0.18}),
    "written": (TAUGHT, {"act": 0.25, "ways": 0.05, "words": 0.05, "moves": 0.25, "distill": 0.40}),
    "half": (HALF, {"act": 0.30, "moves": 0.20, "distill": 0.50}),
    "habit": (HABIT, {"act": 0.30, "moves": 0.10, "distill": 0.60}),
}
"""Skill and shares of the tasks, by stage: moves come first, then lessons, which take longest to
form, and a last stage unlearns half of both (``half``), or hides the lessons (``habit``)."""


def lake_sampler(seed: int, stage: str = "half") -> Callable[[], Sample]:
    """Return a seeded source of conversations about lakes in dialects alone."""
    skill, shares = LAKE_STAGES[stage]
    rng = random.Random(seed)
    dialect = DialectTasks(rng, skill)
    makers: list[Callable[[], Sample]] = [getattr(dialect, task) for task in shares]
    weights = list(shares.values())
    return lambda: rng.choices(makers, weights)[0]()


def sampler(seed: int, skill: Mapping[str, float] = HALF) -> Callable[[], Sample]:
    """Return a seeded source of conversations whose last message is the wanted answer."""
    rng = random.Random(seed)
    blind, dialect = BlindVaultTasks(rng, skill), DialectTasks(rng, skill)
    clerk, reading = VaultTasks(rng), ReadingTasks(rng)
    tasks: list[tuple[float, Callable[[], Sample]]] = [
        (0.30, blind.act), (0.04, blind.left), (0.18, blind.distill), (0.02, blind.merge),
        (0.12, dialect.act), (0.04, dialect.ways), (0.12, dialect.words), (0.05, dialect.moves),
        (0.06, dialect.distill),
        (0.02, clerk.act), (0.02, clerk.distill), (0.01, clerk.refine), (0.03, reading.copy),
    ]  # fmt: skip
    weights, makers = [w for w, _ in tasks], [m for _, m in tasks]
    return lambda: rng.choices(makers, weights)[0]()
