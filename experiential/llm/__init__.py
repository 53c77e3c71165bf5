"""Language-model backends behind one contract (``base.LLM``); import each from its own module, the heavy ones load torch on use."""

from __future__ import annotations

from experiential.llm.base import LLM, Prompt, SamplingParams

__all__ = ["LLM", "Prompt", "SamplingParams"]
