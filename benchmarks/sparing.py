"""Leave what helped as it is: a rule of thumb for an extractor, which no training has to find.

`extractor.agent=benchmarks.sparing:Sparing` asks the model as ever, but not about a success with an
entry, so that later visits read the very entry that helped.
"""

from __future__ import annotations

from collections.abc import Sequence

from experiential.agents.extractor import ExtractorAgent
from experiential.types import Distillation, Experience, Trajectory


class Sparing(ExtractorAgent):
    """Distil like the model, but nothing from a success that used an entry."""

    async def adistill(self, trajectory: Trajectory, shown: Sequence[Experience]) -> Distillation:
        """Return the model's answer, or nothing after a success with an entry."""
        if shown and trajectory.success:
            return Distillation()
        return await super().adistill(trajectory, shown)
