"""Play Vault, a text environment in which only memory helps.

Each *world* is a named vault whose live lever is fixed but cannot be seen. An episode gives a few
tries; when they are spent, a clerk's note says which lever was live, among other remarks. A first
visit can only guess; a later visit to the same world can use what an earlier one found out.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal

from experiential.envs.arguments import inside, one_of, positive
from experiential.envs.text_env import Info, Step, TextEnv

Split = Literal["train", "eval", "corpus"]

_FIRST = (
    "Autumn Bitter Broken Calm Clever Curious Distant Eager Early Empty Faithful Frozen Gentle"
    " Hidden Hollow Humble Iron Jolly Late Little Lonely Lucky Merry Northern Proud Quiet Restless"
    " Silent Sleepy Southern Stormy Winter"
).split()
_SECOND = (
    "Anchor Badger Beacon Bridge Castle Cedar Comet Eagle Falcon Fiddle Forest Garden Hammer Harbor"
    " Heron Island Lantern Library Market Meadow Mill Monk Orchard Otter Palace Pilot River Sailor"
    " Temple Tower Wagon Willow"
).split()
LEVERS = tuple(
    "amber black blue brown gold green grey ivory jade lime pink plum red rose teal white".split()
)
_REMARKS = ("bent", "oiled", "loose", "new", "cold", "dusty")
_STARTS = ("door", "window", "stair", "lamp")
_RULES = "Tries left: {}. Reply: pull <lever>."


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@lru_cache
def _names(split: Split) -> tuple[str, ...]:
    """Return the world names of a split, which repeat words late; splits share no name."""
    share = {"corpus": (0, 1), "train": (2, 3), "eval": (4, 5)}[split]
    pairs = [(first, second) for first in _FIRST for second in _SECOND]
    pairs.sort(key=lambda pair: _digest(f"order:{pair}"))
    left = [pair for pair in pairs if _digest(f"split:{pair}") % 6 in share]
    used: Counter[str] = Counter()
    names: list[str] = []
    while left:
        pair = min(left, key=lambda p: max(used[p[0]], used[p[1]]))
        left.remove(pair)
        used.update(pair)
        names.append(" ".join(pair))
    return tuple(names)


class VaultEnv(TextEnv):
    """Find the live lever of a named vault within a few tries.

    The answer holds for a world (the name in the goal), not for an episode: the seed draws which
    other levers are shown, their order, the starting place and a misleading sign.
    ``reset(options={"world": i, "era": e})`` picks a world and an era; another era of the same
    world has another live lever, so that what is remembered can become wrong.
    `docs/envs/vault.md` lists the arguments.

    >>> env = VaultEnv(levers=3)
    >>> observation, info = env.reset(seed=1, options={"world": 0})
    >>> info["task"].startswith("Open the vault of")
    True
    >>> _, reward, terminated, _, info = env.step(env.oracle_action())
    >>> reward, terminated, info["success"]
    (1.0, True, True)
    """

    def __init__(
        self,
        split: Split = "train",
        worlds: int = 32,
        levers: int = 14,
        tries: int = 2,
        era: int = 0,
        render_mode: str | None = None,
    ) -> None:
        one_of("split", split, ("train", "eval", "corpus"))
        inside("levers", levers, 2, len(LEVERS))
        positive(tries=tries)
        names = _names(split)
        inside(f"worlds of split {split}", worlds, 1, len(names))
        super().__init__(worlds, longest=4096, longest_action=4096, render_mode=render_mode)
        self.split, self.levers, self.tries, self.era = split, levers, tries, era
        self.names = names[:worlds]

    def _contents(self) -> Iterable[str]:
        return (f"{self.split} {self.levers} {self.tries} {self.era}", *self.names)

    def _begin(self, world: int) -> tuple[str, Info]:
        self._name, era = self.names[world], int(self._reset_options.get("era", self.era))
        self._live = LEVERS[_digest(f"live:{self.split}:{self._name}:{era}") % len(LEVERS)]
        others = [lever for lever in LEVERS if lever != self._live]
        self.np_random.shuffle(others)
        self._shown = [self._live, *others[: self.levers - 1]]
        self.np_random.shuffle(self._shown)
        self._left = self.tries
        name = f"vault-{self.split}-{self._name}"
        self._known: dict[str, Any] = {
            "name": name,
            "instance": f"{name}-{era}#{self._reset_seed}",
            "admissible": [f"pull {lever}" for lever in self._shown],
        }
        start, sign, remark = map(self.np_random.choice, (_STARTS, self._shown, _REMARKS))
        feedback = f"You stand by the {start}. A sign says the {sign} lever is {remark}."
        rules = _RULES.format(self._left)
        observation = f"{self.task}\n{feedback}\nLevers: {', '.join(self._shown)}.\n{rules}"
        return observation, self._report(feedback=feedback, **self._known)

    def _turn(self, action: str) -> Step:
        text = action.lower().split("<action>")[-1].replace("</action>", " ").replace(".", " ")
        *before, lever = text.split() or [""]
        invalid = lever not in self._shown or bool(before and before[-1] != "pull")
        self._left -= 1
        success = not invalid and lever == self._live
        done = success or self._left == 0
        if invalid:
            feedback = "That is no lever of this vault."
        elif success:
            feedback = f"The {lever} lever turns. The vault opens."
        else:
            feedback = f"The {lever} lever clicks."
        if done and not success:
            others = [lever for lever in self._shown if lever != self._live]
            self.np_random.shuffle(others)
            remarks = [f"{lever} was {self.np_random.choice(_REMARKS)}" for lever in others[:2]]
            remarks.insert(0, f"{self._live} was live")
            self.np_random.shuffle(remarks)
            feedback += f" The vault locks. A clerk notes: {', '.join(remarks)}."
        observation = feedback if done else f"{feedback}\n{_RULES.format(self._left)}"
        info = self._report(feedback=feedback, success=success, invalid=invalid, **self._known)
        return observation, float(success), done, False, info

    def oracle_action(self) -> str:
        """Return the action that opens the vault."""
        return f"pull {self._live}"

    @property
    def task(self) -> str:
        """Return the task in words."""
        return f"Open the vault of {self._name}."
