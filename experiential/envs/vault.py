"""Play Vault, a text environment in which only memory helps.

Each *world* is a named vault whose live lever is fixed but cannot be seen. An episode gives a few
tries; when they are spent, a clerk's note says which lever was live, among other remarks. A first
visit can only guess; a later visit to the same world can use what an earlier one found out. One
variant has no clerk, and one a law by which names and levers go together.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from experiential.envs.arguments import inside, one_of, positive
from experiential.envs.names import FIRST, NAMED_SPLITS, NamedSplit, digest_of, world_names
from experiential.envs.text_env import Info, Step, TextEnv

LEVERS = tuple(
    "amber black blue brown gold green grey ivory jade lime pink plum red rose teal white".split()
)
_REMARKS = ("bent", "oiled", "loose", "new", "cold", "dusty")
_STARTS = ("door", "window", "stair", "lamp")
_RULES = "Tries left: {}. Reply: pull <lever>."


def law_lever(word: str, era: int = 0) -> str:
    """Return the live lever of all vaults whose name begins with ``word``, under the law.

    The same in every split. Each lever belongs to two of the 32 words in each era.
    """
    ranked = sorted(FIRST, key=lambda first: digest_of(f"first:{era}:{first}"))
    return LEVERS[ranked.index(word) % len(LEVERS)]


class VaultEnv(TextEnv):
    """Find the live lever of a named vault within a few tries.

    The answer holds for a world (the name in the goal), not for an episode: the seed draws which
    other levers are shown, their order, the starting place and a misleading sign.
    ``reset(options={"world": i, "era": e})`` picks a world and an era; another era of the same
    world has another live lever, so that what is remembered can become wrong.
    Without ``note``, a failed visit only rules out the levers pulled, and a world always has the
    same levers. Under ``law="first"`` the live lever follows from the first word of the name, in
    the same way in every split. `docs/envs/vault.md` lists the arguments.

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
        split: NamedSplit = "train",
        worlds: int = 32,
        levers: int = 14,
        tries: int = 2,
        era: int = 0,
        note: bool = True,
        law: Literal["first"] | None = None,
        render_mode: str | None = None,
    ) -> None:
        one_of("split", split, NAMED_SPLITS)
        one_of("note", note, (True, False))
        one_of("law", law, (None, "first"))
        inside("levers", levers, 2, len(LEVERS))
        positive(tries=tries)
        names = world_names(split)
        inside(f"worlds of split {split}", worlds, 1, len(names))
        super().__init__(worlds, longest=4096, longest_action=4096, render_mode=render_mode)
        self.split, self.levers, self.tries, self.era = split, levers, tries, era
        self.note, self.law = note, law
        self.names = names[:worlds]

    def _contents(self) -> Iterable[str]:
        variant = ("" if self.note else " note=False") + (f" law={self.law}" if self.law else "")
        return (f"{self.split} {self.levers} {self.tries} {self.era}{variant}", *self.names)

    def _begin(self, world: int) -> tuple[str, Info]:
        self._name, era = self.names[world], int(self._reset_options.get("era", self.era))
        if self.law:
            self._live = law_lever(self._name.split()[0], era)
        else:
            number = digest_of(f"live:{self.split}:{self._name}:{era}")
            self._live = LEVERS[number % len(LEVERS)]
        others = [lever for lever in LEVERS if lever != self._live]
        if self.note:
            self.np_random.shuffle(others)
        else:  # a lever missing from one visit would be ruled out for free
            others.sort(key=lambda lever: digest_of(f"shown:{self._name}:{era}:{lever}"))
        self._shown = [self._live, *others[: self.levers - 1]]
        self.np_random.shuffle(self._shown)
        self._left = self.tries
        kind = f"vault-law-{self.law}" if self.law else "vault"
        name = f"{kind}-{self.split}-{self._name}"
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
            feedback += " The vault locks."
        if done and not success and self.note:
            others = [lever for lever in self._shown if lever != self._live]
            self.np_random.shuffle(others)
            remarks = [f"{lever} was {self.np_random.choice(_REMARKS)}" for lever in others[:2]]
            remarks.insert(0, f"{self._live} was live")
            self.np_random.shuffle(remarks)
            feedback += f" A clerk notes: {', '.join(remarks)}."
        observation = feedback if done else f"{feedback}\n{_RULES.format(self._left)}"
        info = self._report(feedback=feedback, success=success, invalid=invalid, **self._known)
        return observation, float(success), done, False, info

    def oracle_action(self) -> str:
        """Return the action that opens the vault."""
        return f"pull {self._live}"

    @property
    def chance(self) -> float:
        """Return the success rate of trying different levers blindly."""
        return min(self.tries, self.levers) / self.levers

    @property
    def task(self) -> str:
        """Return the task in words."""
        return f"Open the vault of {self._name}."
