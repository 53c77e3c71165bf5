"""Run without training: models that are only asked, loaded here or behind a server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiential.bank.folder import FolderBank
from experiential.config import Experiment
from experiential.errors import ConfigError
from experiential.llm.base import LLM, Prompt, SamplingParams
from experiential.llm.metered import Meter, Metered, Spent
from experiential.llm.models import open_model
from experiential.rollout import make_env
from experiential.training.runtime import LossSettings, Policies, PolicyRuntime, Sample, TrainStats
from experiential.types import Generation, Usage


class FrozenPolicy(PolicyRuntime):
    """Answer for one role with a backend whose weights never change; count what it takes.

    Its part of a checkpoint is a name; any policy's part can be gone on from, since nothing of it
    is needed.
    """

    def __init__(self, llm: LLM, name: str) -> None:
        self.name, self.tokenizer, self.meter = name, llm.tokenizer, Meter()
        self.supports_choices = llm.supports_choices
        self._llm = Metered(llm, self.meter)
        self._told = Spent()

    @property
    def supports_tools(self) -> bool:  # type: ignore[override]  # a live value here
        """Return whether responses can call tools."""
        return self._llm.supports_tools

    @property
    def tokens_processed(self) -> int:
        """Count the prompt and response tokens of all generations so far."""
        return self.meter.spent().tokens

    def busy(self) -> dict[str, float]:
        """Return the tokens and the cost since the last call, as far as replies report them."""
        now = self.meter.spent()
        since, self._told = now - self._told, now
        return since.reported()

    async def generate(self, prompt: Prompt, sampling: SamplingParams | None = None) -> Generation:
        """Sample one response; where its backend reports no tokens, its ids are counted."""
        generation = await self._llm.generate(prompt, sampling)
        if generation.usage is None and generation.response_ids:
            read, written = len(generation.prompt_ids), len(generation.response_ids)
            usage = Usage(prompt_tokens=read, completion_tokens=written)
            return generation.model_copy(update={"usage": usage})
        return generation

    async def train(self, samples: Sequence[Sample], loss: LossSettings) -> TrainStats:
        """Raise ConfigError: nothing is trained."""
        raise ConfigError(f"Expected a runtime that trains the {self.name}, got frozen")

    async def score(self, samples: Sequence[Sample]) -> list[tuple[float, ...]]:
        """Raise ConfigError: a server does not score."""
        raise ConfigError(f"Expected a runtime that scores by the {self.name}, got frozen")

    async def sync(self) -> int:
        """Return 0, the version of weights that were never trained."""
        return 0

    async def save(self, folder: Path) -> None:
        """Write the name of the model; no weights."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"name": self.name, "model": self._llm.name, "version": 0})
        (folder / "policy.json").write_text(text, encoding="utf-8")

    async def load(self, folder: Path) -> None:
        """Restore nothing."""


class FrozenRuntime:
    """Ask two models that stay as they are; bank and environments are in this process.

    Where both roles name one model it is opened once. Policies that are passed stay open.
    """

    make_env = staticmethod(make_env)

    def __init__(
        self,
        experiment: Experiment,
        policies: Policies | None = None,
        output: Path | None = None,  # noqa: ARG002  (all is on this machine)
    ) -> None:
        self._bank, self._opened = experiment.bank, list[LLM]()
        if policies is None:
            first, second = experiment.model, experiment.extractor_model
            self._opened = [open_model(first)]
            if experiment.extractor.enabled and second is not None and second != first:
                self._opened.append(open_model(second))
            actor, extractor = self._opened[0], self._opened[-1]
            policies = FrozenPolicy(actor, "actor"), FrozenPolicy(extractor, "extractor")
        self.actor, self.extractor = policies

    def open_bank(self, folder: Path) -> FolderBank:
        """Open the run's bank in this process."""
        return FolderBank(
            folder, **self._bank.model_dump(include={"namespace", "embedder", "store"})
        )

    def close(self) -> None:
        """Close the models that were opened here."""
        for llm in self._opened:
            llm.close()
