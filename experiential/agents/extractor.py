"""Turn episodes into experience, and keep the experience in order."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from experiential.agents.actor import blocking
from experiential.agents.functions import template_extractor, transcript_extractor
from experiential.agents.judge import Judge
from experiential.agents.operations import (
    CONSOLIDATION,
    DISTILLATION,
    PRINCIPLES,
    TEXT_LIMIT,
    operations_schema,
    parse_operations,
)
from experiential.agents.prompts import (
    CAUTIONARY,
    DISTILL_BUDGET,
    GUIDING,
    THINKING,
    Asker,
    EntryLike,
    prompt_set,
    rewritten_text,
)
from experiential.bank.extractor import Extractor
from experiential.bank.outcome import Judgement
from experiential.errors import ConfigError
from experiential.llm.base import LLM, SamplingParams
from experiential.plugins import resolve
from experiential.sync import run_sync
from experiential.types import Add, Distillation, Generation, Message, Trajectory, Usage

EXTRACTORS: dict[str, Callable[..., Extractor] | str] = {
    "default": "experiential.agents.extractor:ExtractorAgent",
    "template": template_extractor,
    "transcript": transcript_extractor,
}
"""The built-in extractors by name."""
_STOP = ("</answer>",)
_FRAME_TOKENS = 16  # of an operation beside its text, at most
_CHARS_PER_TOKEN = 3
_SHORTEST_TEXT = 80
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)


def open_extractor(name: str, llm: LLM, **options: Any) -> Extractor:
    """Return the extractor called ``name``, asking ``llm``.

    Args:
        name: ``default``, ``template`` or ``transcript`` (see `functions`), an entry point of
            ``experiential.extractors``, or ``module:attribute``: a callable that takes the backend
            and keyword options and returns an `Extractor`.
        llm: the backend to ask.
        **options: those of `ExtractorAgent`; a foreign extractor uses the ones it needs.

    Raises:
        ConfigError: no such extractor, options that it refuses, or an incomplete object.

    >>> from experiential.llm.scripted import ScriptedLLM
    >>> open_extractor("default", ScriptedLLM(["[]"]), max_operations=2).version
    0
    """
    make = resolve("extractors", name, EXTRACTORS)
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
    """Distil trajectories, refine entries for a question, merge entries and compare them.

    Caveat: a coroutine raises ``BackendError`` when the backend fails; an answer that cannot be
    read is no error but a `Distillation` with refusals. No vector version is needed: the coroutines
    may run concurrently.

    >>> from experiential.llm.scripted import ScriptedLLM
    >>> answer = '<answer>[{"op": "add", "text": "Look under mats."}]</answer>'
    >>> extractor = ExtractorAgent(ScriptedLLM([answer]))
    >>> distillation = extractor.distill(Trajectory(task="Open the door.", success=True))
    >>> distillation.parsed.operations[0].text
    'Look under mats.'

    Args:
        llm: the backend.
        prompts: ``full`` for instruct models, ``brief`` for the bundled tiny model.
        max_operations: operations accepted from one distillation.
        temperature: sampling temperature; 0 is greedy. At 1 small models write worse lessons
            (decision 034), but reinforcement learning wants the variety (`extractor.temperature`).
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
        temperature: float = 0.3,
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
        draw: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "priority": priority}
        self._sampling = SamplingParams(max_tokens=max_tokens, **draw)
        self._asker = Asker(llm, self._sampling, seed)

    @property
    def version(self) -> int:
        """Return the optimiser steps that the backend's weights have seen."""
        return self.llm.version

    @property
    def spent(self) -> Usage | None:
        """Return tokens and cost of all replies so far; None if none has reported them."""
        return self._asker.spent

    def refine(self, query: str, experience: EntryLike) -> str:
        """Rewrite an entry for a question; see `arefine`."""
        return run_sync(self.arefine(query, experience))[0]

    async def adistill(
        self, trajectory: Trajectory, shown: Sequence[EntryLike] = ()
    ) -> Distillation:
        """Return the operations on the bank that one trajectory calls for.

        Args:
            trajectory: a finished episode.
            shown: the entries that reached its actor, in order; an update names one of them by its
                number.
        """
        limit, budget = self.max_operations, self.max_chars
        if not self.principles:
            messages = self.prompts.distill_messages(trajectory, shown, limit, budget=budget)
            return await self._operations(messages, limit, len(shown), DISTILLATION)
        # principles are additions only, so no entry is shown to be updated
        messages = self.prompts.principle_messages(trajectory, limit, budget=budget)
        found = await self._operations(messages, limit, 0, PRINCIPLES)
        # the outcome decides the kind, whatever the answer says
        kind = {"kind": CAUTIONARY if trajectory.success is False else GUIDING}
        typed = tuple(
            one.model_copy(update=kind) if isinstance(one, Add) else one
            for one in found.parsed.operations
        )
        parsed = found.parsed.model_copy(update={"operations": typed})
        return found.model_copy(update={"parsed": parsed})

    distill = blocking(adistill)

    async def arefine(self, query: str, experience: EntryLike) -> tuple[str, Generation | None]:
        """Rewrite an entry for a question; return the text and the response that it came from.

        An empty response leaves the entry unchanged.
        """
        messages = self.prompts.refine_messages(query, experience)
        priority = min(self._sampling.priority, 0)
        generation = await self._asker.ask(messages, priority=priority)
        return rewritten_text(generation.text, experience), generation

    async def amerge(self, experiences: Sequence[EntryLike]) -> Distillation:
        """Return operations that make entries fewer: keep, merge and discard, by their numbers."""
        messages, count = self.prompts.merge_messages(experiences), len(experiences)
        return await self._operations(messages, count, count, CONSOLIDATION)

    merge = blocking(amerge)

    async def ajudge(self, a: EntryLike, b: EntryLike) -> bool:
        """Return whether two entries teach the same lesson; an unclear answer counts as no."""
        generation = await self._asker.ask(self.prompts.judge_messages(a, b))
        verdict = _VERDICT.search(THINKING.sub("", generation.text))
        return verdict is not None and verdict[1].lower() == "yes"

    judge = blocking(ajudge)

    async def aoutcome(self, trajectory: Trajectory) -> Judgement:
        """Say whether an episode succeeded, by the rubric that was recorded with it.

        A manager asks this for what another process left to be judged. The bundled tiny model was
        taught no such question: with its ``brief`` prompts the outcome stays unknown.
        """
        if not self.prompts.structured:
            return Judgement(success=None, reason="the brief prompts have no question about it")
        return await Judge(self.llm, trajectory.rubric, seed=self.seed).ajudge(trajectory)

    async def _operations(
        self, messages: list[Message], most: int, shown: int, kinds: tuple[str, ...]
    ) -> Distillation:
        """Ask for at most ``most`` operations on ``shown`` entries, and read the answer."""
        form: dict[str, Any] = {"stop": _STOP}
        if self.prompts.structured:
            merge = kinds is CONSOLIDATION
            # texts that fit into ``max_tokens`` with the tokens beside them
            tokens = self._sampling.max_tokens // max(most, 1) - _FRAME_TOKENS
            form["json_schema"] = operations_schema(
                max(most, 1),
                merge,
                shown=max(shown, 1) if merge else shown,
                max_chars=min(TEXT_LIMIT, max(_SHORTEST_TEXT, _CHARS_PER_TOKEN * tokens)),
                triples=kinds is PRINCIPLES,
            )
        generation = await self._asker.ask(messages, **form)
        parsed = parse_operations(generation.text, max_operations=most, shown=shown, kinds=kinds)
        return Distillation(parsed=parsed, generation=generation)
