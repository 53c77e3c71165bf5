"""Answer multi-hop questions over a pool of paragraphs, real (HotpotQA's format) or invented."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiential.bank.text import escape
from experiential.envs.answers import SCORES, exact_match
from experiential.envs.arguments import one_of, positive, with_preset
from experiential.envs.hotpotqa.multihop import invented_questions
from experiential.envs.hotpotqa.passages import Embedder, Library, Passage
from experiential.envs.hotpotqa.questions import Question, load_questions
from experiential.envs.split import split_of
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError

Split = Literal["train", "eval", "all"]
Style = Literal["brackets", "tags"]

INVENTED = {"train": 600, "eval": 150}
"""Questions of the invented world where none are asked for."""
USUAL: dict[str, Any] = {"turns": 6, "reward": "em", "style": "brackets"}
PRESETS: dict[str, dict[str, Any]] = {
    "erl": {"turns": 5, "reward": "erl"},
    "evolver": {"style": "tags"},
}
"""Settings of papers: Experiential RL, B.3, and EvolveR's form of actions."""
_NONE = "That is no action."
_PASSAGE = 1200
"""Characters of a paragraph that are shown."""
_KEPT = 16_384
"""Entries of the caches of paragraphs and offered actions."""
_FORMS: dict[Style, tuple[str, str]] = {
    "brackets": ("search[{}]", "answer[{}]"),
    "tags": ("<search_knowledge>{}</search_knowledge>", "<answer>{}</answer>"),
}
_CALL = re.compile(
    r"<(?P<tag>search_knowledge|answer)>"
    r"(?P<inside>(?:(?!<(?:search_knowledge|answer)>).)*?)</(?P=tag)>"
    r"|(?<![\w<])(?P<word>search|answer)\[(?P<held>[^\[\]\n]*(?:\[[^\[\]\n]*\][^\[\]\n]*)*)\]",
    re.DOTALL | re.IGNORECASE,
)
_CAPITALISED = r"(?:[A-ZÀ-ÖØ-Þ]\.(?= )|[A-ZÀ-ÖØ-Þ][\w'’-]*)"
_NAME = re.compile(rf"\b{_CAPITALISED}(?: (?:(?:of the|of|de|von|van|&) )?{_CAPITALISED})*")
_CLOSED = re.compile(r"(?:are|did|do|does|is|was|were)\b", re.IGNORECASE)
_YEAR = re.compile(r"\b\d{3,4}\b")
_OPENERS = frozenset(
    """
    a after an and are at both by did do does during for from he her his how if in is it its of
    on or she since that the their they this to was were what when where which who whom whose
    why with
    """.split()
)  # noqa: SIM905  (a list of words is easier to read than a list of texts)


class Call(NamedTuple):
    """Hold the call of an action."""

    kind: Literal["search", "answer"]
    text: str


def read_call(action: str) -> Call | None:
    """Return the last ``search[x]``, ``answer[x]`` or tag of EvolveR in ``action``, or None.

    >>> read_call("Hm. <search_knowledge>the Arno</search_knowledge> <ANSWER>Pisa</answer>")
    Call(kind='answer', text='Pisa')
    >>> read_call("search[]") is None
    True
    """
    found = list(_CALL.finditer(action))
    if not found:
        return None
    last = found[-1]
    word = last["tag"] or last["word"]
    text = (last["inside"] if last["tag"] else last["held"]).strip()
    return Call("answer" if word.lower() == "answer" else "search", text) if text else None


_cached_call = lru_cache(maxsize=_KEPT)(read_call)
_library = lru_cache(maxsize=8)(Library)


def names_in(text: str) -> list[str]:
    """Return the runs of capitalised words in ``text``, each once, without sentence openers.

    >>> names_in("Which river flows through the town where Ana Belo was born?")
    ['Ana Belo']
    """
    names: dict[str, None] = {}
    for match in _NAME.finditer(text):
        words = match.group().rstrip("'’-").split()
        while words and words[0].lower() in _OPENERS:
            del words[0]
        if words:
            names[" ".join(words)] = None
    return list(names)


class HotpotQAEnv(TextEnv):
    """Answer a question after searching a pool of paragraphs.

    Each step is ``search[words]``, which shows the best paragraphs of the pool, or
    ``answer[text]``, which ends the episode; EvolveR's ``<search_knowledge>`` and ``<answer>`` are
    read too. The last call in an action counts. An action without one uses up a turn, and the reply
    names the legal calls. When the turns are spent the episode is truncated. The right answer is
    never shown; the reply to an answer says only whether it is right.

    The pool holds the paragraphs of all questions of the file. ``info["instance"]`` is the
    question, so a wrapper never shows an entry made from a question while that question is played.
    `docs/envs/hotpotqa.md` lists the arguments.

    Raises:
        ConfigError: an argument is outside its range, or the file cannot be used.

    >>> env = HotpotQAEnv(questions=10, choices=True)
    >>> _, info = env.reset(seed=0)
    >>> terminated = False
    >>> while not terminated:
    ...     _, reward, terminated, _, info = env.step(env.oracle_action())
    >>> reward, info["success"]
    (1.0, True)
    """

    presets = PRESETS

    def __init__(
        self,
        split: Split = "train",
        *,
        data: str | None = None,
        questions: int | None = None,
        turns: int | None = None,
        k: int = 3,
        reward: str | None = None,
        style: Style | None = None,
        embedder: Embedder | None = None,
        choices: bool = False,
        generation: int = 0,
        preset: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        chosen = with_preset(preset, PRESETS, USUAL, turns=turns, reward=reward, style=style)
        one_of("split", split, ("train", "eval", "all"))
        one_of("reward", chosen["reward"], SCORES)
        one_of("style", chosen["style"], _FORMS)
        positive(turns=chosen["turns"], k=k, questions=questions)
        self.split, self.k, self.choices = split, k, choices
        self.turns, self.style = int(chosen["turns"]), chosen["style"]
        file = data or os.environ.get("HOTPOTQA_DATA") or "made"
        if file != "made":
            known, self._name = load_questions(file), Path(file).stem
            wanted = (one for one in known.questions if split in ("all", split_of(one.text)))
            self.questions = tuple(islice(wanted, questions))
        elif split == "all":
            raise ConfigError(
                "Expected split train or eval of the invented world, got 'all'; give data= for a"
                " file"
            )
        else:
            known = invented_questions(split, questions or INVENTED[split], generation)
            self.questions, self._name = known.questions, f"invented-{split}"
        if not self.questions:
            raise ConfigError(
                f"Expected a file with questions of split {split}, got none in {file}; use"
                " split='all' for a small file"
            )
        self._library = _library(known.passages, embedder)
        super().__init__(len(self.questions), render_mode=render_mode)
        self._score = SCORES[chosen["reward"]]
        self._search, self._answer = _FORMS[chosen["style"]]
        calls = f"{self._search.format('words')} or {self._answer.format('text')}"
        self._legal = f"Reply: {calls}."

    @property
    def task(self) -> str:
        """Return the question."""
        return self._question.text

    def _contents(self) -> Iterable[str]:
        """Yield the questions with their answers, and the paragraphs that are searched."""
        for one in self.questions:
            yield f"{one.id} {one.text} {one.answers}"
        yield from (f"{one.title} {one.text}" for one in self._library.passages)

    def _begin(self, world: int) -> tuple[str, Info]:
        self._question: Question = self.questions[world]
        self._left = self.turns
        self._read: list[Passage] = []
        self._asked: list[str] = []
        rules = f"Turns left: {self._left}. {self._legal}"
        return f"Question: {self.task}\n{rules}", self._info("")

    def _turn(self, action: str) -> Step:
        call = read_call(action)
        self._left -= 1
        if call is not None and call.kind == "answer":
            golds = self._question.answers
            success = exact_match(call.text, golds) == 1.0
            feedback = f"That is {'' if success else 'not '}the right answer."
            info = self._info(feedback, success=success)
            return feedback, self._score(call.text, golds), True, False, info
        if call is None:
            shown, feedback = _NONE, f"{_NONE} {self._legal}"
        else:
            self._asked.append(call.text)
            found = self._library.search(call.text, self.k)
            self._read += [passage for passage in found if passage not in self._read]
            shown = "\n".join(f"[{n}] {_shown(passage)}" for n, passage in enumerate(found, 1))
            if self.style == "tags":
                shown = f"<information>\n{shown}\n</information>"
            feedback = f"Found: {'; '.join(escape(passage.title) for passage in found)}."
            if not found:
                shown = feedback = "Nothing was found."
        over = self._left == 0
        tail = "No turns are left." if over else f"Turns left: {self._left}. {self._legal}"
        return f"{shown}\n{tail}", 0.0, False, over, self._info(feedback, invalid=call is None)

    def oracle_action(self) -> str:
        """Search for each paragraph of the answer, then answer; answer on the last turn."""
        missing = [title for title in self._question.hops if title not in self._asked]
        if missing and self._left > 1:
            return self._search.format(missing[0])
        return self._answer.format(self._question.answers[0])

    def _info(self, feedback: str, *, success: bool = False, invalid: bool = False) -> Info:
        name = f"{self._name}-{self._question.id}"
        offered: list[str] | None = None
        if self.choices:  # new searches, and answers from the paragraphs read, as they were met
            read = [_named(passage) for passage in self._read]
            words = dict.fromkeys(names_in(self.task) + [one for names, _ in read for one in names])
            asked = {query.casefold() for query in self._asked}
            new = [one for one in words or [self.task] if one.casefold() not in asked]
            answers = [answer for names, years in read for answer in (*names, *years)]
            if read and _CLOSED.match(self.task):
                answers = ["yes", "no", *answers]
            offered = [self._search.format(one) for one in new]
            offered += [self._answer.format(one) for one in dict.fromkeys(answers)]
            offered = [one for one in offered if _cached_call(one)] or [
                self._answer.format("unknown")
            ]
        return self._report(name, feedback, success=success, invalid=invalid, admissible=offered)


@lru_cache(maxsize=_KEPT)
def _named(passage: Passage) -> tuple[list[str], list[str]]:
    """Return the names in a paragraph, its title first, and the years."""
    names = dict.fromkeys([passage.title.strip(), *names_in(passage.text)])
    return list(names), _YEAR.findall(passage.text)


@lru_cache(maxsize=_KEPT)
def _shown(passage: Passage) -> str:
    """Return a paragraph on one line, cut to length, without tags that this package reads."""
    text = " ".join(f"{passage.title}: {passage.text}".split())
    return escape(text if len(text) <= _PASSAGE else f"{text[:_PASSAGE]} [...]")
