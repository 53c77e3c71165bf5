"""Language-model backends behind one contract; import each from its own module.

The heavy modules load torch when they are used.
"""

from __future__ import annotations

from experiential.llm.base import LLM, Prompt, SamplingParams, open_llm

__all__ = ["LLM", "Prompt", "SamplingParams", "open_llm"]
