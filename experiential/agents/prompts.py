"""Write chat messages about trajectories and entries (in the words of ``prompts.toml``); ask them.

Text from the bank, from environments and from models is data: it is escaped and can forge nothing.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import Any

from experiential.agents.dialogue import ChatTemplate
from experiential.agents.operations import clean, read_triples
from experiential.bank.text import (
    TEXT_LIMIT,
    EntryLike,
    entry_text,
    escape_tags,
    experience_block,
    indented,
    numbered,
)
from experiential.errors import NoAnswerError
from experiential.llm.base import LLM, Prompt, SamplingParams
from experiential.types import Experience, Generation, Message, Trajectory, Usage

DISTILL_BUDGET = 24_000  # characters of play that a distillation prompt holds by default
GUIDING = "guiding"  # kind of a principle that a success taught
CAUTIONARY = "cautionary"  # kind of a principle that a failure taught

THINKING = re.compile(r"^.*</think>", re.DOTALL | re.IGNORECASE)
_TAGGED = ("brief", "opened")  # sets that ask for operations between tags
_LABEL = re.compile(r"^([^\S\n]*(?:task|used|play|outcome)[^\S\n]*):", re.IGNORECASE | re.MULTILINE)
_PROMPT_SIGN = re.compile(r"^([^\S\n]*)>", re.MULTILINE)


def rewritten_text(answer: str, entry: EntryLike) -> str:
    """Return the text of an answer that rewrites an entry; the entry's own for an empty one."""
    return cut_middle(clean(THINKING.sub("", answer)), TEXT_LIMIT - 40) or entry_text(entry)


def principle_text(entry: Experience) -> str:
    """Show an entry to an agent that asks for principles: kind, Laplace score, sentence, triples.

    >>> triples = {"triples": [["mat", "hides", "key"]]}
    >>> entry = Experience(text="Look under mats.", kind="guiding", metadata=triples)
    >>> print(principle_text(entry))
    Guiding principle, score 0.50: Look under mats.
    (mat, hides, key)
    """
    title = entry.kind.capitalize()
    title += " principle" if entry.kind in (GUIDING, CAUTIONARY) else ""
    triples, _ = read_triples(entry.metadata.get("triples"))
    lines = [f"{title}, score {entry.statistics.score:.2f}: {entry.text}"]
    return "\n".join([*lines, *(f"({', '.join(triple)})" for triple in triples)])


@dataclass(frozen=True)
class PromptSet:
    r"""Fill in one versioned set of templates.

    Operations are asked for under a JSON schema if ``structured``; the bundled tiny model was
    taught the tagged form alone.

    >>> prompt_set("brief").judge_messages("Wait for green.", "Go on green.")[1]["content"]
    'A: Wait for green.\nB: Go on green.'
    """

    name: str
    version: str
    texts: Mapping[str, Callable[..., str]]  # each fills in one template
    structured: bool = True

    def actor_system(
        self, instruction: str, experience: str | None = None, *, constrained: bool = False
    ) -> str:
        """Return the actor's system message, which explains no format if ``constrained``.

        ``instruction`` is the description by the environment's author: trusted text, unused in
        ``brief``. ``experience`` is a block made by `experience_block`.
        """
        given = f"{instruction.strip()}\n\n" if instruction.strip() else ""
        text = self.texts["actor_choice" if constrained else "actor_system"](instruction=given)
        return f"{text}\n{experience}" if experience else text

    def with_system(self, text: str) -> PromptSet:
        """Return this set with ``text`` as the actor's system message, word for word."""

        def written(**slots: str) -> str:
            return text

        texts = {**self.texts, "actor_system": written, "actor_choice": written}
        return replace(self, texts=MappingProxyType(texts))

    def distill_messages(
        self,
        trajectory: Trajectory,
        shown: Sequence[EntryLike],
        max_operations: int,
        *,
        budget: int = DISTILL_BUDGET,
    ) -> list[Message]:
        """Return the question to the extractor about one trajectory.

        Play longer than ``budget`` characters is shortened in the middle.
        """
        entries = self.texts["entries" if shown else "no_entries"](numbered=numbered(shown))
        record = self._record(trajectory, budget)
        return self._ask("distill", entries=entries, max_operations=str(max_operations), **record)

    def principle_messages(
        self, trajectory: Trajectory, max_operations: int, *, budget: int = DISTILL_BUDGET
    ) -> list[Message]:
        """Return the question to a policy about an episode of its own: which principle it teaches.

        Of the environment it holds only what the actor saw and did, and whether it succeeded.
        """
        kind = CAUTIONARY if trajectory.success is False else GUIDING
        words = {
            "kind": kind,
            "about": self.texts[kind](),
            "max_operations": str(max_operations),
        }
        return self._ask("principle", **words, **self._record(trajectory, budget))

    def outcome_messages(
        self, trajectory: Trajectory, rubric: str, *, budget: int = DISTILL_BUDGET
    ) -> list[Message]:
        """Return the question to a judge whether an episode succeeded; ``rubric`` is trusted."""
        return self._ask(
            "outcome", rubric=rubric, **self._record(trajectory, budget, withheld=True)
        )

    def reflect_messages(
        self,
        trajectory: Trajectory,
        memory: Sequence[EntryLike] = (),
        *,
        budget: int = DISTILL_BUDGET,
    ) -> list[Message]:
        """Return the question to a reflector about a first attempt, withheld comments included.

        ``memory`` are reflections that led to success before.
        """
        shown = self.texts["memory" if memory else "no_memory"](numbered=numbered(memory))
        record = self._record(trajectory, budget, withheld=True)
        return self._ask("reflect", memory=shown, **record)

    def reflected(self, reflection: str) -> str:
        """Return the block that shows a reflection to the actor of a second attempt."""
        return self.texts["reflected"](block=experience_block([reflection]))

    def retry(self, trajectory: Trajectory, *, budget: int = DISTILL_BUDGET) -> str:
        """Return the block that shows the record of a first attempt instead (table 9 of ERL)."""
        return self.texts["retry"](**self._record(trajectory, budget))

    def refine_messages(self, query: str, experience: EntryLike) -> list[Message]:
        """Return the request to the extractor to fit one entry to an agent's question."""
        return self._ask("refine", note=indented(experience), query=indented(query))

    def critic_messages(
        self, task: str, entry: EntryLike, success_rate: float | None
    ) -> list[Message]:
        """Return the question to an actor about an entry; ``success_rate`` is in [0, 1].

        Without a rate it is the request to refine the entry by the actor's own knowledge.
        """
        slots = {"task": _quoted(task, DISTILL_BUDGET), "note": indented(entry)}
        if success_rate is None:
            return self._ask("adapt", **slots)
        return self._ask("critic", **slots, rate=f"{100 * success_rate:.0f}")

    def merge_messages(self, experiences: Sequence[EntryLike]) -> list[Message]:
        """Return the request to the extractor to consolidate entries."""
        return self._ask("merge", numbered=numbered(experiences))

    def judge_messages(self, a: EntryLike, b: EntryLike) -> list[Message]:
        """Return the question to the extractor whether two entries teach the same."""
        return self._ask("judge", first=indented(a), second=indented(b))

    def _ask(self, name: str, **values: str) -> list[Message]:
        return [
            {"role": "system", "content": self.texts[f"{name}_system"](**values)},
            {"role": "user", "content": self.texts[f"{name}_user"](**values)},
        ]

    def _record(
        self, trajectory: Trajectory, budget: int, *, withheld: bool = False
    ) -> dict[str, str]:
        """Return task, play and outcome under the names that the templates use.

        Play beyond ``budget`` characters lacks its middle turns; ``withheld`` adds the comments
        that the actor was not shown.
        """
        limit = max(budget // 4, 1)
        texts: list[str] = []
        for turn in trajectory.turns:
            action, feedback = _quoted(turn.action, limit), _quoted(turn.feedback, limit)
            text = self.texts["turn"](action=action, feedback=feedback)
            if withheld and turn.withheld:
                text += self.texts["withheld"](comment=_quoted(turn.withheld, limit))
            texts.append(text)
        head, tail = kept_ends([len(text) for text in texts], budget)
        if missing := len(texts) - head - tail:
            texts[head : head + missing] = [self.texts["left_out"](count=str(missing))]
        if trajectory.error is not None:
            outcome = self.texts["error"](error=_quoted(trajectory.error, len(trajectory.error)))
        else:
            won, lost = ("better", "worse") if trajectory.relative else ("success", "failure")
            outcome = self.texts[{True: won, False: lost, None: "unknown"}[trajectory.success]]()
        score = ""
        if trajectory.score is not None and trajectory.error is None:
            score = self.texts["score"](score=f"{trajectory.score:.6g}")
            if trajectory.baseline is not None:
                score += self.texts["usual"](usual=f"{trajectory.baseline:.6g}")
        opening = trajectory.turns[0].observation if trajectory.turns else ""
        return {
            "task": _quoted(trajectory.task, budget),
            "opening": self.texts["opening"](observation=_quoted(opening, budget // 4)),
            "play": "".join(texts),
            "outcome": outcome,
            "score": score,
            "reward": f"{trajectory.reward:g}",
        }


def kept_ends(lengths: Sequence[int], budget: int) -> tuple[int, int]:
    """Return how many items to keep at both ends: all if they fit, else in turn, at least one each.

    >>> kept_ends([10, 10, 10, 10, 10], 35)
    (2, 1)
    """
    head, tail, used = 0, 0, 0
    while head + tail < len(lengths):
        front = head <= tail
        used += lengths[head] if front else lengths[-1 - tail]
        if used > budget and head and tail:
            break
        head, tail = (head + 1, tail) if front else (head, tail + 1)
    return head, tail


def cut_middle(text: str, limit: int) -> str:
    """Return ``text``, or its two ends and the number of characters missing beyond ``limit``."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [{len(text) - 2 * half} characters left out] {text[len(text) - half :]}"


@lru_cache(maxsize=4)
def prompt_set(name: str) -> PromptSet:
    """Return a prompt set by its name.

    ``full`` is for instruct models and ``brief`` for the bundled tiny model. ``short`` has the
    words of ``brief`` and asks for operations under a schema: for small models to be trained, to
    which the long prompts of ``full`` are mostly cost. ``opened`` is ``brief`` with the first
    observation in each record, for grids.

    Raises:
        ValueError: there is no such set.
    """
    words = tomllib.loads(Path(__file__).with_name("prompts.toml").read_text("utf-8"))
    if name not in words["versions"]:
        known = ", ".join(sorted(words["versions"]))
        raise ValueError(f"Expected a prompt set of {known}, got {name!r}")
    shared = words["shared"]
    spelled = words["full"] if name == "full" else words["brief"] | words.get(name, {})
    texts = {
        key: Template(Template(text).safe_substitute(shared)).substitute
        for key, text in spelled.items()
    }
    shown = MappingProxyType(texts)  # one set serves all agents of a process
    return PromptSet(name, words["versions"][name], shown, structured=name not in _TAGGED)


@dataclass
class Asker:
    """Put prompts to a backend, each on its own.

    Caveat: with a ``seed`` the answer to a prompt depends on how often that prompt was asked
    before, so that equal questions get different draws and a run can still be repeated.
    """

    llm: LLM
    sampling: SamplingParams  # how answers are drawn unless a question says otherwise
    seed: int | None  # makes every request repeatable; None leaves it to the backend
    spent: Usage | None = field(default=None, init=False)  # as far as replies report it
    _asked: Counter[int] = field(default_factory=Counter[int], init=False)

    async def ask(self, messages: list[Message], **options: Any) -> Generation:
        """Return the answer to one prompt; ``options`` replace parts of the sampling."""
        seed = None
        if self.seed is not None:
            base = derived_seed(self.seed, json.dumps(messages))
            self._asked[base] += 1
            seed = derived_seed(base, self._asked[base])
        prompt: Prompt = messages
        if self.llm.tokenizer is not None:
            # as token ids, so that no text can pass for a control token of this tokenizer
            system, user = messages
            prompt, _ = ChatTemplate(self.llm.tokenizer).opening(system["content"], user)
        sampling = self.sampling.model_copy(update={"seed": seed, **options})
        usage: Usage | None = None
        try:
            generation = await self.llm.generate(prompt, sampling)
            usage = generation.usage
            return generation
        except NoAnswerError as error:
            usage = error.usage
            raise
        finally:
            if usage is not None:
                self.spent = usage if self.spent is None else self.spent + usage


def derived_seed(seed: int, *parts: int | str) -> int:
    """Return a seed of 31 bits that depends on ``seed`` and every part, equal on all machines.

    >>> derived_seed(1, 0) == derived_seed(1, 0), derived_seed(1, 0) == derived_seed(1, 1)
    (True, False)
    """
    text = repr((seed, *parts)).encode("utf-8", "backslashreplace")
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "big") >> 1


def _quoted(text: str, limit: int) -> str:
    """Cut and escape a text, and the labels that structure a prompt where they begin a line."""
    escaped = _LABEL.sub(r"\1&#58;", escape_tags(cut_middle(text, limit)))
    return _PROMPT_SIGN.sub(r"\1&gt;", escaped)
