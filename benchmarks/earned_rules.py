"""Write the lessons of worlds that must be remembered by rules, not by a model.

The best that an extractor could do there: `extractor.agent=benchmarks.earned_rules:vault` keeps the
list of the levers tried in vain, or the one that opened; `...:lake` compares each board of
FrozenLake with the one before, and `...:dialect` reads the sentences in its place; `...:home` lists
what was seen where in a household of ALFWorld. All go on from the entry that the actor was shown.
They know the games, so they bound an extractor from above and are no method.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from benchmarks import dialects
from benchmarks.households import house_of, listed, listing, sights
from experiential.agents.functions import FunctionExtractor
from experiential.envs.grid import MOVES
from experiential.llm.base import LLM
from experiential.types import Add, Distillation, Experience, ParsedOperations, Trajectory, Update
from tools.earned_corpus import legend, live, ruled_out


class Rule(FunctionExtractor):
    """Write a lesson from an episode and the entry shown, which it rewrites."""

    def __init__(self, lesson: Any) -> None:
        super().__init__(lambda trajectory: lesson(trajectory, ""))
        self._lesson = lesson

    async def adistill(self, trajectory: Trajectory, shown: Sequence[Experience]) -> Distillation:
        """Return the lesson as a new text of the entry shown, or as an entry of its own."""
        text = self._lesson(trajectory, shown[0].text if shown else "")
        if not text:
            return Distillation()
        written = Update(entry=1, text=text) if shown else Add(text=text)
        return Distillation(parsed=ParsedOperations(operations=(written,)))


def vault_lesson(trajectory: Trajectory, known: str) -> str:
    """Return the lever that opened, else the list of those known and tried in vain.

    Where the entry names a lever that was not tried, nothing is learned: the text is empty.

    >>> from experiential.types import Turn
    >>> turn = Turn(observation="", action="pull red", feedback="")
    >>> episode = Trajectory(task="Open the vault of Iron Mill.", turns=(turn,), success=False)
    >>> vault_lesson(episode, "Iron Mill: not jade.")
    'Iron Mill: not jade red.'
    """
    world = trajectory.task.removeprefix("Open the vault of ").rstrip(".")
    tried = [turn.action.split()[-1] for turn in trajectory.turns]
    if trajectory.success:
        return live(world, tried[-1])
    named = re.match(r"Pull (\w+) in", known)
    if named and named[1] not in tried:
        return ""
    found = re.search(r": not (.*)\.", known)
    listed = found[1].split() if found else []
    return ruled_out(world, list(dict.fromkeys(listed + tried)))


def _place(board: str) -> tuple[int, int] | None:
    """Return where the agent stands: in a hole it is an X, on the goal a tick."""
    for row, line in enumerate(board.split("\n\n")[0].splitlines()):
        for column, symbol in enumerate(line.split()):
            if symbol in "AX√":
                return row, column
    return None


def lake_lesson(trajectory: Trajectory, known: str) -> str:
    """Return which word moves where, by the boards and the entry known."""
    name = trajectory.task.removeprefix("Cross the ice in the dialect of ").rstrip(".")
    letters = dict(zip("NSWE", MOVES, strict=True))
    told = re.findall(r"([NSWE])(Up|Down|Left|Right)", known)
    found = {word: letters[letter] for letter, word in told}
    for turn in trajectory.turns:
        before, after = _place(turn.observation), _place(turn.feedback)
        if before is None or after is None:
            continue
        step = (after[0] - before[0], after[1] - before[1])
        for direction, delta in MOVES.items():
            if delta == step:
                found[turn.action] = direction
    return legend(name, found) if found else ""


def dialect_lesson(trajectory: Trajectory, known: str) -> str:
    r"""Return which word moves where, by the sentences after the moves and the entry known.

    >>> from experiential.types import Turn
    >>> after = "The goal is 4 up.\n\nYou moved down."
    >>> turn = Turn(observation="The goal is 3 up.", action="Up", feedback=after)
    >>> visit = Trajectory(task="Cross the ice in the dialect of Iron Mill.", turns=(turn,))
    >>> dialect_lesson(visit, "In the dialect of Iron Mill: to go up, say Down.")
    'In the dialect of Iron Mill: to go up, say Down, to go down, say Up.'
    """
    found = dialects.words_of(known) | dialects.moved(trajectory)
    return dialects.legend(dialects.dialect_of(trajectory.task), found) if found else ""


def home_lesson(trajectory: Trajectory, known: str) -> str:
    """Return where each kind of object was seen, in this visit or by the entry known.

    >>> from experiential.types import Turn
    >>> turn = Turn(observation="", action="go to bed 1", feedback="On the bed 1, you see a pen 1.")
    >>> visit = Trajectory(task="Do what is asked in the house of Iron Mill.", turns=(turn,))
    >>> home_lesson(visit, "In the house of Iron Mill: cd at safe 1.")
    'In the house of Iron Mill: cd at safe 1, pen at bed 1.'
    """
    kept = listed(known) | sights("\n".join(turn.feedback for turn in trajectory.turns))
    return listing(house_of(trajectory.task), kept) if kept else ""


def vault(llm: LLM, **options: Any) -> Rule:
    """Build the rule for Vault as an extractor."""
    return Rule(vault_lesson)


def lake(llm: LLM, **options: Any) -> Rule:
    """Build the rule for FrozenLake as an extractor."""
    return Rule(lake_lesson)


def dialect(llm: LLM, **options: Any) -> Rule:
    """Build the rule for FrozenLake in sentences as an extractor."""
    return Rule(dialect_lesson)


def home(llm: LLM, **options: Any) -> Rule:
    """Build the rule for ALFWorld's households as an extractor."""
    return Rule(home_lesson)
