"""Turn a first attempt into guidance for a second one, and remember guidance that worked."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from experiential.agents.actor import blocking
from experiential.agents.operations import parse_operations
from experiential.agents.prompts import DISTILL_BUDGET, Asker, EntryLike, prompt_set
from experiential.bank.protocol import Bank
from experiential.bank.text import TEXT_LIMIT, clean
from experiential.errors import CheckpointError
from experiential.llm.base import LLM, SamplingParams
from experiential.types import Add, FinishReason, Generation, Record, Trajectory, Update

KIND = "reflection"  # kind of the entries that hold reflections in a bank
_STOP = ("</reflection>", "</answer>")
_OPEN = re.compile(r"<\s*reflection\s*>", re.IGNORECASE)
_CLOSE = re.compile(r"<\s*/\s*reflection\s*>", re.IGNORECASE)


class Unread(StrEnum):
    """Name the reason why no reflection could be read from an answer."""

    NO_REFLECTION = "no_reflection"  # neither the tags nor an operation that says something
    EMPTY_TEXT = "empty_text"
    TRUNCATED = "truncated"  # the answer was cut before the closing tag
    TEXT_TOO_LONG = "text_too_long"  # longer than ``TEXT_LIMIT`` characters


class Reflection(Record):
    """Hold a reflector's answer about one attempt."""

    text: str | None = None  # the guidance; None when none could be read, and for `Retry`
    block: str | None = None  # the text for the prompt of a second attempt
    generation: Generation | None = None  # to be rewarded by the result of the second attempt
    reason: str | None = None  # why there is no text: an `Unread`, or the failure of the backend


class Reflector:
    """Reflect on a first attempt: what to do differently when the same task is tried again.

    This is the draw of the reflection, line 9 of algorithm 1 and line 13 of algorithm 2 of
    Experiential RL: from the task, the attempt's turns with the environment's feedback, the reward,
    and the memory of earlier reflections.

    Caveat: a coroutine raises ``BackendError`` when the backend fails; an answer that cannot be
    read is no error but a `Reflection` without text that says why. No vector version is needed: the
    coroutines may run concurrently.

    >>> from experiential.llm.scripted import ScriptedLLM
    >>> answer = "It stayed shut. <reflection>Pull the jade lever.</reflection>"
    >>> reflector = Reflector(ScriptedLLM([answer]))
    >>> reflector.reflect(Trajectory(task="Open the vault.")).text
    'Pull the jade lever.'

    Args:
        llm: the backend; in Experiential RL the actor's own.
        prompts, temperature, top_p, max_tokens, max_chars, seed: as for `ExtractorAgent`.
        priority: of the requests, lower runs first.

    Raises:
        ValueError: the prompt set does not exist, or a number is not positive.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        prompts: str = "full",
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 512,
        max_chars: int = DISTILL_BUDGET,
        seed: int | None = None,
        priority: int = 0,
    ) -> None:
        if max_chars < 1:
            raise ValueError(f"Expected max_chars to be positive, got {max_chars}")
        self.llm = llm
        self.prompts = prompt_set(prompts)
        self.max_chars = max_chars
        draw: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "priority": priority}
        self._asker = Asker(llm, SamplingParams(max_tokens=max_tokens, stop=_STOP, **draw), seed)

    async def areflect(
        self, trajectory: Trajectory, memory: Sequence[EntryLike] = (), *, seed: int | None = None
    ) -> Reflection:
        """Return guidance for another attempt at the task of ``trajectory``, which failed.

        ``memory`` are reflections that led to success before; ``seed`` is of this one request,
        in place of the agent's.
        """
        messages = self.prompts.reflect_messages(trajectory, memory, budget=self.max_chars)
        generation = await self._asker.ask(messages, **({} if seed is None else {"seed": seed}))
        cut = generation.finish_reason is FinishReason.LENGTH
        text, reason = read_reflection(generation.text, cut=cut)
        block = None if text is None else self.prompts.reflected(text)
        return Reflection(text=text, block=block, generation=generation, reason=reason)

    reflect = blocking(areflect)


class Retry:
    """Replace the reflector in the ablation without reflection: show the attempt's raw record.

    It asks no model, so there is nothing to reward and nothing to remember (section 4.4 and table 9
    of Experiential RL).

    >>> block = Retry().reflect(Trajectory(task="Open the vault.", reward=0.5)).block
    >>> "reward 0.5" in block, block.count("<attempt>")
    (True, 1)

    Args:
        prompts, max_chars: see `Reflector`.

    Raises:
        ValueError: the prompt set does not exist, or the number is not positive.
    """

    def __init__(self, *, prompts: str = "full", max_chars: int = DISTILL_BUDGET) -> None:
        if max_chars < 1:
            raise ValueError(f"Expected max_chars to be positive, got {max_chars}")
        self.prompts, self.max_chars = prompt_set(prompts), max_chars

    def reflect(self, trajectory: Trajectory, memory: Sequence[EntryLike] = ()) -> Reflection:
        """Return the record of the attempt as a block; ``memory`` is not used."""
        return Reflection(block=self.prompts.retry(trajectory, budget=self.max_chars))

    async def areflect(
        self, trajectory: Trajectory, memory: Sequence[EntryLike] = (), *, seed: int | None = None
    ) -> Reflection:
        """Return the same as `reflect`; nothing is sampled, so ``seed`` is not used."""
        return self.reflect(trajectory, memory)


def read_reflection(text: str, *, cut: bool = False) -> tuple[str | None, str | None]:
    """Return the guidance in an answer, or the reason why there is none.

    It stands in the last ``<reflection>``, whose closing tag may be missing unless the answer was
    cut; the bundled tiny model, which does not know that tag, says it in the text of its first
    ``add`` or ``update``. The text is cleaned as the bank cleans what it keeps. ``cut`` says that
    the response ended for want of tokens.

    Returns:
        the text and None, or None and an `Unread` or the reason why an operation was refused.

    >>> read_reflection("<reflection> Go left. </reflection>"), read_reflection("I give up.")
    (('Go left.', None), (None, <Unread.NO_REFLECTION: 'no_reflection'>))
    """
    openings = list(_OPEN.finditer(text))
    if openings:
        start = openings[-1].end()
        closing = _CLOSE.search(text, start)
        if closing is None and cut:
            return None, Unread.TRUNCATED
        guidance = text[start : closing.start() if closing else len(text)]
    else:
        parsed = parse_operations(text)
        written = [one.text for one in parsed.operations if isinstance(one, Add | Update)]
        if not written:
            refused = [] if parsed.operations else [one.reason for one in parsed.refused]
            unread = not refused or refused[0] == "no_operations"
            return None, Unread.NO_REFLECTION if unread else refused[0]
        guidance = written[0]
    cleaned = clean(guidance).text
    if not cleaned:
        return None, Unread.EMPTY_TEXT
    return (cleaned, None) if len(cleaned) <= TEXT_LIMIT else (None, Unread.TEXT_TOO_LONG)


class ReflectionMemory(ABC):
    """Keep the reflections that passed, and show them to a reflector.

    Algorithms 1 and 2 write "m <- reflection if r2 > tau" with tau = 1. Rewards do not exceed 1
    there, so that as printed nothing would ever be kept; here, as in the authors' code, a
    reflection is kept when r2 >= tau (`passes`).
    """

    @abstractmethod
    def recall(self, trajectory: Trajectory) -> Sequence[str]:
        """Return the reflections to show when this attempt is reflected on."""

    @abstractmethod
    def keep(self, text: str, trajectory: Trajectory) -> None:
        """Keep a reflection that led to success; ``trajectory`` is the second attempt."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON; empty where the memory lives elsewhere."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; one of another kind of memory is a `CheckpointError`."""
        if state:
            raise CheckpointError(
                f"Expected no state for {type(self).__name__}, got {dict(state)!r}"
            )


def passes(reward: float, threshold: float) -> bool:
    """Return whether a second attempt earns its reflection a place in the memory: r2 >= tau."""
    return reward >= threshold


class PrivateMemory(ReflectionMemory):
    """Keep one string, as in the paper: each reflection that passed overwrites the one before.

    >>> memory = PrivateMemory()
    >>> memory.keep("Check the box first.", Trajectory(task="a"))
    >>> memory.keep("Never turn back.", Trajectory(task="b"))
    >>> memory.recall(Trajectory(task="c"))
    ['Never turn back.']
    """

    text = ""  # before the first reflection

    def recall(self, trajectory: Trajectory) -> list[str]:
        """Return the one reflection for any task; none before the first."""
        return [self.text] if self.text else []

    def keep(self, text: str, trajectory: Trajectory) -> None:
        """Overwrite the reflection."""
        self.text = text

    def state_dict(self) -> dict[str, Any]:
        """Return the string."""
        return {"text": self.text}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the string; a state of another kind of memory is a `CheckpointError`."""
        text = state.get("text")
        if not isinstance(text, str):
            raise CheckpointError(
                f"Expected the state of a private reflection memory, a text, got {dict(state)!r}"
            )
        self.text = text


class BankMemory(ReflectionMemory):
    """Keep reflections as entries of a bank, found by their task: an extension the paper names.

    Other readers of the bank find them, too. Nothing is overwritten: two attempts at one task
    give two entries. The bank's own journal makes it durable.

    Args:
        bank: where entries are added and searched.
        k: reflections shown at once.
        same_task: show only reflections on the very task, word for word.

    Raises:
        ValueError: ``k`` is not positive.
    """

    def __init__(self, bank: Bank, *, k: int = 1, same_task: bool = False) -> None:
        if k < 1:
            raise ValueError(f"Expected k to be positive, got {k}")
        self.bank, self.k, self.same_task = bank, k, same_task

    def recall(self, trajectory: Trajectory) -> list[str]:
        """Return the reflections of the nearest tasks, or those of this task alone."""
        where = {"kind": KIND} | ({"task": trajectory.task} if self.same_task else {})
        hits = self.bank.search(trajectory.task, k=self.k, where=where)
        return [hit.experience.text for hit in hits]

    def keep(self, text: str, trajectory: Trajectory) -> None:
        """Add the reflection under its task."""
        metadata = {"trajectory": trajectory.id, "instance": trajectory.instance}
        self.bank.add(text, task=trajectory.task, kind=KIND, metadata=metadata)
