"""Open a finished training run, for benchmarks that play with its final actor and its bank."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiential.agents.actor import ActorAgent
from experiential.agents.extractor import ExtractorAgent
from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.manager_like import NoBank
from experiential.config import Experiment
from experiential.evaluation.results import write_whole
from experiential.training.checkpoint import CheckpointStore
from experiential.training.local import build_runtimes
from experiential.training.roles import prompt_set_name
from experiential.training.runtime import PolicyRuntime
from experiential.types import Experience, Hit


@dataclass(frozen=True)
class FinishedRun:
    """Hold the newest checkpoint of a run, opened.

    Attributes:
        experiment: the run's.
        policy: the final actor.
        extractor: as the run began with it; `writers` makes it the final one.
        bank: the final one, to be read.
        folder: the checkpoint.
    """

    experiment: Experiment
    policy: PolicyRuntime
    extractor: PolicyRuntime
    bank: FolderBank
    folder: Path

    def actor(self) -> ActorAgent:
        """Return an agent with the run's own settings."""
        settings = self.experiment.actor
        return ActorAgent(
            self.policy,
            prompts=prompt_set_name(self.experiment.model),
            constrain=settings.constrain,
            max_tokens=settings.max_tokens,
            **settings.options.model_dump(include={"history", "keep_first", "advice", "system"}),
        )

    async def writers(self) -> AsyncGenerator[str]:
        """Yield "untrained" with the extractor as the run began, then "trained" with the final one.

        A second call begins with the final one, and calls it untrained: call it once.
        """
        yield "untrained"
        await self.extractor.load(self.folder / "extractor")
        yield "trained"

    def distiller(self, temperature: float) -> ExtractorAgent:
        """Return an agent that distils with the run's own settings but for the temperature."""
        settings = self.experiment.extractor
        return ExtractorAgent(
            self.extractor,
            prompts=prompt_set_name(self.experiment.extractor_model or self.experiment.model),
            max_operations=settings.max_operations,
            max_tokens=settings.max_tokens,
            temperature=temperature,
            seed=self.experiment.seed,
        )


@asynccontextmanager
async def finished(run: Path) -> AsyncGenerator[FinishedRun]:
    """Open the final policy and bank of a run; the bank is read, never written.

    Raises:
        CheckpointError: the folder has no checkpoint.
    """
    folder, manifest = CheckpointStore(run / "checkpoints").latest()
    experiment = Experiment.model_validate(manifest["experiment"])
    with ExitStack() as stack:
        optims = (experiment.actor.optim, experiment.extractor.optim)
        actor, extractor = build_runtimes(experiment.model, experiment.extractor_model, optims)
        stack.callback(actor.close)
        stack.callback(extractor.close)
        await actor.load(folder / "actor")
        bank = ExperienceBank(folder / "bank", namespace=experiment.bank.namespace, read_only=True)
        yield FinishedRun(experiment, actor, extractor, stack.enter_context(bank), folder)


class Shown(NoBank):
    """Stand in for a bank: find the entry that was set, whatever is asked; None finds nothing."""

    entry: Experience | None = None

    def search(
        self, query: Any, *, k: int | None = None, exclude_instance: Any = None, episode: Any = ""
    ) -> Any:
        """Return the entry as the only hit."""
        return [] if self.entry is None else [Hit(experience=self.entry, score=1.0)]


def keep(found: dict[str, Any], file: Path) -> None:
    """Write results as JSON to a file, and print them."""
    text = json.dumps(found, indent=1) + "\n"
    write_whole(file, text)
    sys.stdout.write(text)
