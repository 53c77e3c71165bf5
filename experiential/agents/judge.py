"""Let a language model say whether an episode succeeded."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from experiential.agents.actor import blocking
from experiential.agents.prompts import DISTILL_BUDGET, THINKING, Asker, prompt_set
from experiential.bank.outcome import Judgement
from experiential.errors import NoAnswerError
from experiential.llm.base import LLM, SamplingParams
from experiential.types import Trajectory, Usage

RUBRIC = "The task was done as it was asked, and the record shows it."
_SAID = {"yes": True, "no": False, "cannot tell": None}
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "reason": {"type": "string", "maxLength": 400},
        "verdict": {"type": "string", "enum": list(_SAID)},
    },
    "required": ["reason", "verdict"],
    "additionalProperties": False,
}
_VERDICT = re.compile(r'"verdict"\s*:\s*"(yes|no|cannot tell)"', re.IGNORECASE)
_BARE = re.compile(r"\A\W*(yes|no|cannot tell)\b", re.IGNORECASE)


class Judge:
    """Ask a model whether an episode succeeded: yes, no, or that it cannot tell.

    Give it as ``success=`` to a wrapper, to ``TextObservation`` or to an episode. A manager asks it
    in the background before it distils, so that the agent never waits; the outcome is journalled
    when it is known. Without a manager (``TextObservation``, a training run) the last step waits.

    Caveat: a verdict is an opinion of a model about a record. A model that fails, or answers
    neither, leaves the outcome unknown; the manager warns once and counts it under
    ``stats()["failures"]``. No vector version is needed: the coroutine may run concurrently.

    >>> from experiential.llm.scripted import ScriptedLLM
    >>> llm = ScriptedLLM(['{"reason": "No table was booked.", "verdict": "no"}'])
    >>> judge = Judge(llm, "A table for two is booked.")
    >>> judge.judge(Trajectory(task="Book a table for two."))
    Judgement(success=False, reason='No table was booked.')

    Args:
        llm: the backend to ask.
        rubric: what makes an episode a success, in words; trusted text.
        temperature: sampling temperature; 0 is greedy.
        max_tokens: tokens of an answer.
        max_chars: characters of play shown; longer episodes are shortened in the middle.
        seed: makes every request repeatable.

    Raises:
        ValueError: the rubric is blank, or ``max_chars`` is not positive.
    """

    def __init__(
        self,
        llm: LLM,
        rubric: str = RUBRIC,
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        max_chars: int = DISTILL_BUDGET,
        seed: int | None = None,
    ) -> None:
        if not rubric.strip():
            raise ValueError(f"Expected a rubric that says what a success is, got {rubric!r}")
        if max_chars < 1:
            raise ValueError(f"Expected max_chars to be positive, got {max_chars}")
        self.rubric, self.max_chars = rubric.strip(), max_chars
        sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens, priority=1)
        self._asker = Asker(llm, sampling, seed)

    @property
    def spent(self) -> Usage | None:
        """Return tokens and cost of all replies so far; None if none has reported them."""
        return self._asker.spent

    async def ajudge(self, trajectory: Trajectory) -> Judgement:
        """Return the verdict on a finished episode.

        Raises:
            BackendError: the model failed; NoAnswerError: its answer holds no verdict.
        """
        asked = prompt_set("full").outcome_messages(trajectory, self.rubric, budget=self.max_chars)
        answer = THINKING.sub("", (await self._asker.ask(asked, json_schema=_SCHEMA)).text)
        try:
            fields: Any = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
        except ValueError:  # cut short, or not JSON at all
            fields = {}
        fields = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
        # the last verdict, for small models repeat the form before they fill it in
        named = _VERDICT.findall(answer) or _BARE.findall(answer)
        word = str(fields.get("verdict") or (named[-1] if named else "")).strip().lower()
        if word not in _SAID:
            raise NoAnswerError(
                f"Expected a verdict of {', '.join(_SAID)}, got {answer[:200]!r}; ask a larger"
                " model, or give it more max_tokens"
            )
        return Judgement(success=_SAID[word], reason=str(fields.get("reason") or answer)[:1000])

    judge = blocking(ajudge)
