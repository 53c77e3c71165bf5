"""Answer multi-hop questions over a pool of paragraphs, real (HotpotQA's format) or invented."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from experiential.bank.text import escape
from experiential.envs.answers import SCORES, exact_match
from experiential.envs.arguments import one_of, positive, with_preset
from experiential.envs.hotpotqa.multihop import invented_questions
from experiential.envs.hotpotqa.passages import Library, Passage
from experiential.envs.hotpotqa.questions import Question, QuestionSet, load_questions
from experiential.envs.split import split_of
from experiential.envs.text_env import Info, Step, TextEnv
from experiential.errors import ConfigError

Split = Literal["train", "eval", "all"]
Style = Literal["brackets", "tags"]
Embedder = Callable[[list[str]], Any] | str

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
    r"<(?P<tag>search_knowledge|answer)>(?P<inside>(?:(?!<(?:search_knowledge|answer)>).)*?)</(?P=tag)>"
    r"|(?<![\w<])(?P<word>search|answer)\[(?P<held>[^\[\]\n]*(?:\[[^\[\]\n]*\][^\[\]\n]*)*)\]",
    re.DOTALL | re.IGNORECASE,
)
_CAPITALISED = r"(?:[A-ZÀ-ÖØ-Þ]\.(?= )|[A-ZÀ-ÖØ-Þ][\w'’-]*)"
_NAME = re.compile(rf"\b{_CAPITALISED}(?: (?:(?:of the|of|de|von|van|&) )?{_CAPITALISED})*")
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
    word = (last["tag"] or last["word"]).lower()
    text = (last["inside"] if last["tag"] else last["held"]).strip()
    return Call("answer" if word == "answer" else "search", text) if text else None


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
    read too, and shown as the form to use with ``style="tags"``. The last call in an action counts.
    An action without one uses up a turn, and the reply names the legal calls. When the turns are
    spent the episode is truncated. The right answer is never shown, not even at the end; the reply
    to an answer says only whether it is right.

    The pool holds the paragraphs of all questions of the file. ``info["instance"]`` is the
    question, so a wrapper never shows an entry made from a question while that question is played.

    Args:
        split: ``train`` or ``eval``, of a file by a hash of the question (one in four is for
            evaluation), or ``all`` of it.
        data: a file in HotpotQA's format (see `load_questions`); by default the one that
            ``HOTPOTQA_DATA`` names, and without that an invented world.
        questions: how many; of a file the first ones of the split, by default all; of the invented
            world 600 or 150 by default.
        turns: searches and answers allowed; 6 by default.
        k: paragraphs per search.
        reward: ``em`` (the usual; exact match after SQuAD's normalisation), ``f1`` (of tokens), or
            ``erl`` (1 for an exact match, F1 from 0.3 on, else 0). Success is always the exact
            match.
        style: form of action in the text and in ``choices``: ``brackets`` (the usual)
            or ``tags``.
        embedder: search by this embedder's cosine (a callable or name as a bank takes it); None
            searches by BM25.
        choices: offer actions in ``info["admissible"]``: searches for names in the question and in
            what was read, and answers from what was read. They are found in the text alone, so the
            right answer may be missing among them.
        generation: seed of the invented world.
        preset: ``erl`` (``reward="erl"``, 5 turns) or ``evolver`` (``style="tags"``); where an
            argument above is None, the preset's value holds.
        render_mode: ``ansi`` or None.

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
        self.questions, self._library, self._name = _opened(
            split, data, questions, generation, embedder
        )
        super().__init__(len(self.questions), render_mode=render_mode)
        self._score = SCORES[chosen["reward"]]
        self._search, self._answer = _FORMS[chosen["style"]]

    @property
    def task(self) -> str:
        """Return the question."""
        return self._question.text

    def _begin(self, world: int) -> tuple[str, Info]:
        self._question: Question = self.questions[world]
        self._left = self.turns
        self._read: list[Passage] = []
        self._asked: list[str] = []
        return f"Question: {self.task}\n{self._rules()}", self._info("")

    def _turn(self, action: str) -> Step:
        """Search or answer."""
        call = read_call(action)
        self._left -= 1
        if call is not None and call.kind == "answer":
            return self._end(call.text)
        shown, feedback = (
            self._looked_up(call.text) if call is not None else (_NONE, f"{_NONE} {self._legal()}")
        )
        over = self._left == 0
        tail = "No turns are left." if over else self._rules()
        return f"{shown}\n{tail}", 0.0, False, over, self._info(feedback, invalid=call is None)

    def oracle_action(self) -> str:
        """Search for each paragraph of the answer, then answer; answer on the last turn."""
        missing = [title for title in self._question.hops if title not in self._asked]
        if missing and self._left > 1:
            return self._search.format(missing[0])
        return self._answer.format(self._question.answers[0])

    def _end(self, answer: str) -> Step:
        golds = self._question.answers
        success = exact_match(answer, golds) == 1.0
        feedback = "That is the right answer." if success else "That is not the right answer."
        info = self._info(feedback, success=success)
        return feedback, self._score(answer, golds), True, False, info

    def _looked_up(self, query: str) -> tuple[str, str]:
        """Search; return the text to show, and the feedback in one line."""
        self._asked.append(query)
        found = self._library.search(query, self.k)
        self._read += [passage for passage in found if passage not in self._read]
        if not found:
            return "Nothing was found.", "Nothing was found."
        listed = "\n".join(f"[{n}] {_shown(passage)}" for n, passage in enumerate(found, 1))
        shown = f"<information>\n{listed}\n</information>" if self.style == "tags" else listed
        return shown, f"Found: {'; '.join(escape(passage.title) for passage in found)}."

    def _rules(self) -> str:
        return f"Turns left: {self._left}. {self._legal()}"

    def _legal(self) -> str:
        return f"Reply: {self._search.format('words')} or {self._answer.format('text')}."

    def _admissible(self) -> list[str]:
        """Return new searches, and answers from the paragraphs read, in the order they were met."""
        read = [name for passage in self._read for name in _names(passage)]
        names = list(dict.fromkeys([*names_in(self.task), *read]))
        asked = {query.casefold() for query in self._asked}
        searches = [
            self._search.format(name)
            for name in names or [self.task]
            if name.casefold() not in asked
        ]
        answers = [name for passage in self._read for name in (*_names(passage), *_years(passage))]
        closed = (
            ["yes", "no"]
            if self._read
            and re.match(r"(?:are|did|do|does|is|was|were)\b", self.task, re.IGNORECASE)
            else []
        )
        offered = [
            *searches,
            *(self._answer.format(name) for name in dict.fromkeys([*closed, *answers])),
        ]
        return [action for action in offered if _is_call(action)] or [
            self._answer.format("unknown")
        ]

    def _info(self, feedback: str, *, success: bool = False, invalid: bool = False) -> Info:
        name = f"{self._name}-{self._question.id}"
        offered = self._admissible() if self.choices else None
        return self._report(name, feedback, success=success, invalid=invalid, admissible=offered)


@lru_cache(maxsize=_KEPT)
def _names(passage: Passage) -> tuple[str, ...]:
    return tuple(dict.fromkeys([passage.title.strip(), *names_in(passage.text)]))


@lru_cache(maxsize=_KEPT)
def _years(passage: Passage) -> tuple[str, ...]:
    return tuple(_YEAR.findall(passage.text))


@lru_cache(maxsize=_KEPT)
def _is_call(action: str) -> bool:
    return read_call(action) is not None


@lru_cache(maxsize=_KEPT)
def _shown(passage: Passage) -> str:
    """Return a paragraph on one line, cut to length, without tags that this package reads."""
    text = " ".join(f"{passage.title}: {passage.text}".split())
    return escape(text if len(text) <= _PASSAGE else f"{text[:_PASSAGE]} [...]")


def _opened(
    split: Split, data: str | None, count: int | None, generation: int, embedder: Embedder | None
) -> tuple[Sequence[Question], Library, str]:
    """Return the questions of a split, their library, and the start of their task ids."""
    file = data or os.environ.get("HOTPOTQA_DATA") or None
    if file is None:
        if split == "all":
            raise ConfigError(
                "Expected split train or eval of the invented world, got 'all'; give data= for a"
                " file"
            )
        known = invented_questions(split, count or INVENTED[split], generation)
        return known.questions, _library(known, embedder), f"invented-{split}"
    known = load_questions(file)
    chosen = [
        question for question in known.questions if split in ("all", split_of(question.text))
    ][:count]
    if not chosen:
        raise ConfigError(
            f"Expected a file with questions of split {split}, got none in {file}; use split='all'"
            " for a small file"
        )
    return chosen, _library(known, embedder), Path(file).stem


@lru_cache(maxsize=8)
def _library(known: QuestionSet, embedder: Embedder | None) -> Library:
    return Library(known.passages, embedder)
