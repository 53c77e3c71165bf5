"""Let the actor judge retrieved experience (appendix B.1 of Complementary RL)."""

from __future__ import annotations

import re
from typing import cast, get_args

from experiential.agents.actor import blocking
from experiential.agents.prompts import (
    THINKING,
    Asker,
    EntryLike,
    entry_text,
    prompt_set,
    rewritten_text,
)
from experiential.llm.base import LLM, SamplingParams
from experiential.types import Record, Verdict

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
_WORD = re.compile(r"\b(accept|refine|reject)", re.IGNORECASE)


class Critique(Record):
    """Hold the actor's verdict on one entry."""

    verdict: Verdict | None  # None when the answer named none; the entry is then shown unchanged
    text: str | None  # the text to show, the entry's own or a refined one; None for a rejected one


class CriticAgent:
    """Let an actor accept, refine or reject an entry, knowing how often it succeeds at the task.

    The verdict is one of three words, to which the response is restricted where the backend can;
    refining is a second request.

    Caveat: an episode waits for both. A failing backend raises ``BackendError``. No vector version
    is needed: the coroutine may run concurrently.

    >>> from experiential.llm.scripted import ScriptedLLM
    >>> CriticAgent(ScriptedLLM(["reject"])).judge("Open the door.", "Doors open inwards.", 0.9)
    Critique(verdict='reject', text=None)

    Args:
        llm: the actor's backend.
        prompts: ``full`` for instruct models, ``brief`` for the bundled tiny model.
        temperature: sampling temperature.
        max_tokens: tokens of a refined entry.
        seed: makes every request repeatable.

    Raises:
        ValueError: the prompt set does not exist.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        prompts: str = "full",
        temperature: float = 1.0,
        max_tokens: int = 256,
        seed: int | None = None,
    ) -> None:
        self.prompts = prompt_set(prompts)
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, priority=0)
        self._asker = Asker(llm, sampling, seed)
        self._choices = VERDICTS if llm.supports_choices else None

    async def ajudge(self, task: str, entry: EntryLike, success_rate: float) -> Critique:
        """Return the verdict on an entry retrieved for a task.

        ``success_rate`` is the actor's at this task so far, in [0, 1].
        """
        asked = self.prompts.critic_messages(task, entry, success_rate)
        answer = THINKING.sub("", (await self._asker.ask(asked, choices=self._choices)).text)
        named = _WORD.search(answer)
        verdict = cast("Verdict", named[1].lower()) if named else None
        if verdict == "reject":
            return Critique(verdict=verdict, text=None)
        if verdict != "refine":
            return Critique(verdict=verdict, text=entry_text(entry))
        adapted = await self._asker.ask(self.prompts.critic_messages(task, entry, None))
        return Critique(verdict=verdict, text=rewritten_text(adapted.text, entry))

    judge = blocking(ajudge)
