"""The agent that turns episodes into experience, and keeps the experience in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from experiential.agents.actor import run_sync
from experiential.agents.asking import Asker
from experiential.agents.operations import (
    CONSOLIDATION,
    PRINCIPLES,
    TEXT_LIMIT,
    clean,
    operations_schema,
    parse_operations,
)
from experiential.agents.principles import principle_kind
from experiential.agents.prompts import (
    DISTILL_BUDGET,
    EntryLike,
    cut_middle,
    entry_text,
    prompt_set,
)
from experiential.bank.extractor import Extractor
from experiential.errors import ConfigError
from experiential.llm.base import LLM, SamplingParams
from experiential.plugins import resolve
from experiential.types import Add, Distillation, Generation, Trajectory

_STOP = ("</answer>",)
_FRAME_TOKENS = 16
"""Tokens of an operation beside its text."""
_CHARS_PER_TOKEN = 3
_SHORTEST_TEXT = 80
_THINKING = re.compile(r"^.*</think>", re.DOTALL | re.IGNORECASE)
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def open_extractor(name: str, llm: LLM, **options: Any) -> Extractor:
    """Return the extractor called ``name``, asking ``llm``.

    Args:
        name: ``default``, an entry point of ``experiential.extractors``, or ``module:attribute``: a
            callable that takes the backend and keyword options and returns an object with what
            `experiential.bank.extractor.Extractor` lists (``version``, ``adistill``, ``arefine``,
            ``amerge``). Training passes the options of `ExtractorAgent`; a foreign extractor uses
            the ones it needs and takes the rest as ``**options``.

    Raises:
        ConfigError: no such extractor, options that it refuses, or an object without those
            attributes.

    >>> from experiential.llm.scripted import ScriptedLLM
    >>> open_extractor("default", ScriptedLLM(["[]"]), max_operations=2).version
    0
    """
    builtins: dict[str, Callable[..., Extractor] | str] = {"default": ExtractorAgent}
    make = resolve("extractors", name, builtins)
    try:
        extractor = make(llm, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"Expected options that the extractor {name!r} takes, got"
            f" {', '.join(options) or 'none'}: {error}"
        ) from error
    wanted = ("version", "adistill", "arefine", "amerge")
    if missing := [part for part in wanted if not hasattr(extractor, part)]:
        raise ConfigError(
            f"Expected {name!r} of extractors to return an object with {', '.join(wanted)}, got"
            f" {type(extractor).__name__} without {', '.join(missing)}"
        )
    return extractor


class ExtractorAgent:
    """Distils trajectories, refines entries for a question, merges entries and compares them.

    Caveat: a coroutine raises ``BackendError`` when the backend fails; an answer that cannot be
    read is no error but a `Distillation` with refusals. No vector version is needed: the coroutines
    may run concurrently.

    >>> from experiential.llm.scripted import ScriptedLLM
    >>> extractor = ExtractorAgent(ScriptedLLM(['<answer>[{"op": "add", "text": "Look under mats."}]</answer>']))
    >>> distillation = extractor.distill(Trajectory(task="Open the door.", success=True))
    >>> distillation.parsed.operations[0].text
    'Look under mats.'

    Change log: v0.1.0 added; v0.2.0 ``principles``.

    Args:
        llm: the backend.
        prompts: ``full`` for instruct models, ``brief`` for the bundled tiny model.
        max_operations: operations accepted from one distillation.
        temperature: sampling temperature; 0 is greedy.
        top_p: nucleus sampling.
        max_tokens: tokens per response.
        max_chars: characters of play shown; longer trajectories are shortened in the middle, and
            the prompt says so.
        principles: distil as EvolveR does: additions only, without the entries shown; each is
            ``guiding`` after a success and ``cautionary`` after a failure, whatever the answer
            says, and may hold triples.
        seed: makes every request repeatable: it is mixed with the prompt and with how often that
            prompt was asked before.
        priority: of the requests, lower runs first; refinement, which an episode waits for, runs at
            0 or lower.

    Raises:
        ValueError: the prompt set does not exist, or a number is not positive.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        prompts: str = "full",
        max_operations: int = 3,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        max_chars: int = DISTILL_BUDGET,
        principles: bool = False,
        seed: int | None = None,
        priority: int = 1,
    ) -> None:
        for name, number in (("max_operations", max_operations), ("max_chars", max_chars)):
            if number < 1:
                raise ValueError(f"Expected {name} to be positive, got {number}")
        self.llm = llm
        self.prompts = prompt_set(prompts)
        self.max_operations = max_operations
        self.max_chars = max_chars
        self.principles = principles
        self.seed = seed
        self._sampling = SamplingParams(
            temperature=temperature, top_p=top_p, max_tokens=max_tokens, priority=priority
        )
        self._asker = Asker(llm, self._sampling, seed)

    @property
    def version(self) -> int:
        """Optimiser steps that the backend's weights have seen."""
        return self.llm.version

    def distill(self, trajectory: Trajectory, shown: Sequence[EntryLike] = ()) -> Distillation:
        """What one trajectory teaches; see `adistill`."""
        return run_sync(self.adistill(trajectory, shown))

    def refine(self, query: str, experience: EntryLike) -> str:
        """An entry rewritten for a question; see `arefine`."""
        return run_sync(self.arefine(query, experience))[0]

    def merge(self, experiences: Sequence[EntryLike]) -> Distillation:
        """How to consolidate entries; see `amerge`."""
        return run_sync(self.amerge(experiences))

    def judge(self, a: EntryLike, b: EntryLike) -> bool:
        """Whether two entries teach the same lesson; see `ajudge`."""
        return run_sync(self.ajudge(a, b))

    async def adistill(
        self, trajectory: Trajectory, shown: Sequence[EntryLike] = ()
    ) -> Distillation:
        """Operations on the bank that one trajectory gives cause to.

        Args:
            trajectory: a finished episode.
            shown: the entries that reached its actor, in order; an update names one of them by its
                number.

        Raises:
            BackendError: the backend failed.
        """
        if self.principles:
            return await self._principles(trajectory)
        messages = self.prompts.distill_messages(
            trajectory, shown, self.max_operations, budget=self.max_chars
        )
        generation = await self._asker.ask(
            messages, **self._form(self.max_operations, shown=len(shown))
        )
        parsed = parse_operations(
            generation.text, max_operations=self.max_operations, shown=len(shown)
        )
        return Distillation(parsed=parsed, generation=generation)

    async def _principles(self, trajectory: Trajectory) -> Distillation:
        """What one trajectory of the same policy teaches, as principles of the kind that its outcome decides."""
        messages = self.prompts.principle_messages(
            trajectory, self.max_operations, budget=self.max_chars
        )
        generation = await self._asker.ask(
            messages, **self._form(self.max_operations, shown=0, triples=True)
        )
        parsed = parse_operations(
            generation.text, max_operations=self.max_operations, shown=0, kinds=PRINCIPLES
        )
        kind = principle_kind(trajectory)
        typed = tuple(
            one.model_copy(update={"kind": kind}) if isinstance(one, Add) else one
            for one in parsed.operations
        )
        return Distillation(
            parsed=parsed.model_copy(update={"operations": typed}), generation=generation
        )

    async def arefine(self, query: str, experience: EntryLike) -> tuple[str, Generation | None]:
        """An entry rewritten for a question, and the response that did it; an empty response leaves the entry as it is.

        Raises:
            BackendError: the backend failed.
        """
        priority = min(self._sampling.priority, 0)
        generation = await self._asker.ask(
            self.prompts.refine_messages(query, experience), priority=priority
        )
        text = clean(_THINKING.sub("", generation.text))
        return (cut_middle(text, TEXT_LIMIT - 40) or entry_text(experience)), generation

    async def amerge(self, experiences: Sequence[EntryLike]) -> Distillation:
        """Operations that make a chunk of entries fewer: keep, merge and discard, by their numbers.

        Raises:
            BackendError: the backend failed.
        """
        count = len(experiences)
        messages = self.prompts.merge_messages(experiences)
        generation = await self._asker.ask(
            messages, **self._form(max(count, 1), merge=True, shown=max(count, 1))
        )
        parsed = parse_operations(
            generation.text, max_operations=count, shown=count, kinds=CONSOLIDATION
        )
        return Distillation(parsed=parsed, generation=generation)

    async def ajudge(self, a: EntryLike, b: EntryLike) -> bool:
        """Whether two entries teach the same lesson; an answer that is neither yes nor no counts as no.

        Raises:
            BackendError: the backend failed.
        """
        generation = await self._asker.ask(self.prompts.judge_messages(a, b))
        verdict = _VERDICT.search(_THINKING.sub("", generation.text))
        return verdict is not None and verdict[1].lower() == "yes"

    def _form(
        self, operations: int, *, shown: int, merge: bool = False, triples: bool = False
    ) -> dict[str, Any]:
        """How an answer ends, and the schema it is asked for under, with texts that fit into ``max_tokens``."""
        if not self.prompts.structured:
            return {"stop": _STOP}
        tokens = self._sampling.max_tokens // operations - _FRAME_TOKENS
        limit = min(TEXT_LIMIT, max(_SHORTEST_TEXT, _CHARS_PER_TOKEN * tokens))
        return {
            "stop": _STOP,
            "json_schema": operations_schema(
                operations, merge, shown=shown, max_chars=limit, triples=triples
            ),
        }
