"""What the examples share: a model server, a task with a judge, and a bank with an extractor.

Start any OpenAI-compatible server, name it by OPENAI_BASE_URL and OPENAI_MODEL, and run an example
with a folder for its bank: `python examples/agents/openai_client.py /tmp/bank`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import experiential as xp

BASE_URL = os.environ.setdefault("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
MODEL = os.environ.get("OPENAI_MODEL", "smollm2")
os.environ.setdefault("OPENAI_API_KEY", "none")  # a local server asks for none

LEVERS = ("copper", "iron", "brass")
TASK = f"Which lever opens the vault of Alder: {', '.join(LEVERS)}? Answer in one word."
_LIVE = "brass"


def judge(answer: object) -> dict[str, Any]:
    """Stand for your test, your user or your environment: say how it went."""
    named = [lever for lever in LEVERS if lever in str(answer).lower()]
    return {"success": named == [_LIVE], "feedback": f"The {_LIVE} lever was live."}


def lesson(messages: list[xp.Message]) -> str:
    """Stand for a model that distils; yours is `ExtractorAgent(OpenAILLM(MODEL))`."""
    seen = messages[-1]["content"]
    live = re.search(r"The (\w+) lever was live", seen)
    text = f"Vault of Alder: pull {live[1]}." if live else "Answer in the form that is asked for."
    operation = {"op": "return"} if text in seen else {"op": "add", "text": text}
    return f"<answer>{json.dumps([operation])}</answer>"


def manager() -> xp.ExperienceManager:
    """Open the bank named on the command line, its lessons written by `lesson`.

    One episode in ten plays without advice, for comparison; not here, where two have to do.
    """
    bank = xp.ExperienceBank(sys.argv[1], embedder="hashing")
    extractor = xp.ExtractorAgent(xp.ScriptedLLM(lesson))
    return xp.ExperienceManager(bank, extractor, free_share=0.0)


def report(shown: str, answer: object) -> None:
    """Print one run."""
    sys.stdout.write(f"advice: {shown.strip() or 'none yet'}\nanswer: {str(answer).strip()}\n\n")
