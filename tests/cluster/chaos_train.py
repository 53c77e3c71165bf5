"""`experiential-train` for engines that answer with a whole `Generation`; see `small_engine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiential.cli.train import main
from experiential.llm.base import SamplingParams
from experiential.training.openrlhf import runtime
from experiential.types import Generation


async def draw(
    ask: Any, ids: Sequence[int], sampling: SamplingParams, room: int, **record: Any
) -> Generation:
    """Ask for a response as `TransformersLLM` draws it."""
    limit = min(sampling.max_tokens, room)
    made: Generation = await ask(ids, sampling.model_copy(update={"max_tokens": limit}))
    kept = {name: record[name] for name in ("policy", "policy_version")}
    return made.model_copy(update=kept)


if __name__ == "__main__":
    runtime.draw_response = draw  # type: ignore[assignment]
    main()
