"""Remember past episodes: the memories that `experiential bench stream` compares.

A memory is an object with two methods, `recall` and `learn`, made anew for every stream. The names
in `MEMORIES` are built in; another one is an entry point of group ``experiential.memories`` or
``module:attribute``, called with a `Setup`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from experiential.agents.functions import template_extractor, transcript
from experiential.bank.extractor import Extractor
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import CachedEmbedder
from experiential.bank.manager import ExperienceManager
from experiential.bank.manager_like import ManagerLike
from experiential.bank.text import experience_block
from experiential.envs.bm25 import BM25
from experiential.errors import ConfigError
from experiential.evaluation.arms import Placebo, Shuffled
from experiential.plugins import resolve
from experiential.types import (
    Condition,
    Distillation,
    Experience,
    Generation,
    Hit,
    ParsedOperations,
    Trajectory,
)


class Memory(Protocol):
    """Define what a stream asks of a memory: two methods, called one at a time from any thread.

    Two more are called where a memory has them. ``relearn(trajectory, kept)`` takes the place of
    ``learn`` when an interrupted stream goes on: ``kept`` is what ``learn`` returned, as JSON. A
    memory without it learns again. ``close()`` is called at the end of a stream.
    """

    def recall(self, task: str) -> str:
        """Return the advice for a task, as the agent reads it; empty for none."""
        ...

    def learn(self, trajectory: Trajectory) -> Any:
        """Take in a finished episode; return what is to be kept in the log of it, as JSON."""
        ...


@dataclass(frozen=True)
class Setup:
    """Hold what a memory may be built from."""

    seed: int
    """Of every draw."""
    k: int
    """Entries or past episodes to recall."""
    folder: Path
    """Empty at first, and removed after the stream."""
    embedder: CachedEmbedder
    """Of texts; vectors have unit length."""
    extractor: Extractor
    """Distils episodes: a language model, or the extractor ``template`` where none is chosen."""


MakeMemory = Callable[[Setup], Memory]


class NoMemory:
    """Remember nothing."""

    def __init__(self, setup: Setup) -> None:
        pass

    def recall(self, task: str) -> str:
        """Return no advice."""
        return ""

    def learn(self, trajectory: Trajectory) -> None:
        """Do nothing."""


class Examples:
    """Show the past episodes nearest to a task in full: few-shot prompting by nearest neighbours.

    Tasks are compared by the cosine of their vectors; of equally near episodes the newest is first.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._tasks: list[str] = []
        self._texts: list[str] = []

    def recall(self, task: str) -> str:
        """Return the transcripts of the nearest episodes."""
        return experience_block([self._texts[i] for i in self._nearest(task)])

    def learn(self, trajectory: Trajectory) -> None:
        """Keep the transcript of an episode."""
        self._tasks.append(trajectory.task)
        self._texts.append(transcript(trajectory))

    def _nearest(self, task: str) -> list[int]:
        if not self._tasks:
            return []
        vectors = self._setup.embedder([task, *self._tasks])
        # equal texts are equally near
        cosines = np.asarray(vectors[1:] @ vectors[0], np.float32).round(6)
        newest = np.arange(len(cosines))[::-1]
        best = newest[np.argsort(-cosines[newest], kind="stable")]
        return [int(i) for i in best[: self._setup.k]]


class BM25Examples(Examples):
    """Show the past episodes whose transcripts share the most telling words with a task (BM25)."""

    def _nearest(self, task: str) -> list[int]:
        newest = [*reversed(range(len(self._texts)))]
        best = BM25([self._texts[i] for i in newest]).best(task, self._setup.k) if newest else []
        return [newest[place] for place in best]


class _Replayed:
    """Distil as an extractor does, or as it did before an interruption.

    Entries are not deduplicated: a judge asked again could answer otherwise.
    """

    def __init__(self, extractor: Extractor) -> None:
        self._extractor = extractor
        self.kept: dict[str, Any] | None = None

    @property
    def version(self) -> int:
        return self._extractor.version

    async def adistill(self, trajectory: Trajectory, shown: Sequence[Experience]) -> Distillation:
        if self.kept is not None:
            return Distillation(parsed=ParsedOperations.model_validate(self.kept))
        return await self._extractor.adistill(trajectory, shown)

    async def arefine(self, query: str, experience: Experience) -> tuple[str, Generation | None]:
        return await self._extractor.arefine(query, experience)

    async def amerge(self, experiences: Sequence[Experience]) -> Distillation:
        return await self._extractor.amerge(experiences)


class BankMemory:
    """Remember by an experience bank of its own, with the settings of `ExperienceManager`.

    An episode is distilled before the next one begins. Nothing is merged or deduplicated.

    Args:
        setup: see `Setup`.
        substitute: stands between the agent and the manager, and changes what is shown.
    """

    def __init__(
        self,
        setup: Setup,
        substitute: Callable[[ExperienceManager, int], ManagerLike] | None = None,
    ) -> None:
        self._k, self._hits = setup.k, list[Hit]()
        self._extractor = _Replayed(setup.extractor)
        self._written: list[dict[str, Any]] = []
        self._bank = FolderBank(setup.folder, embedder=setup.embedder.wrapped, store="exact")
        self._manager = ExperienceManager(
            self._bank,
            self._extractor,
            share_queue=False,
            merge_every=0,
            seed=setup.seed,
            on_distillation=self._note,
        )
        manager = self._manager
        self._shown = manager if substitute is None else substitute(manager, setup.seed)

    def recall(self, task: str) -> str:
        """Return the entries that the bank finds for a task."""
        if isinstance(self._shown, Shuffled):
            self._shown.entries = None  # the bank has grown
        self._hits = self._shown.search(task, k=self._k)
        return experience_block(self._hits)

    def learn(self, trajectory: Trajectory) -> Any:
        """Distil an episode; return the operations on the bank, None where distilling failed."""
        uses = tuple(hit.use("episode_start", episode=trajectory.id) for hit in self._hits)
        seen = trajectory.model_copy(update={"condition": Condition.GUIDED, "uses": uses})
        self._written.clear()
        self._shown.submit(seen)
        self._manager.drain()
        return self._written[0] if self._written else None

    def relearn(self, trajectory: Trajectory, kept: Any) -> None:
        """Apply the operations that a distillation gave before an interruption."""
        self._extractor.kept = kept or {}
        self.learn(trajectory)
        self._extractor.kept = None

    def close(self) -> None:
        """Close manager and bank."""
        self._manager.close()
        self._bank.close()

    def _note(self, _: Trajectory, told: Distillation, entries: list[Experience]) -> None:
        self._written.append(told.parsed.model_dump(mode="json"))


def _template(setup: Setup) -> BankMemory:
    return BankMemory(
        Setup(setup.seed, setup.k, setup.folder, setup.embedder, template_extractor())
    )


NONE = "none"
FROZEN = "bank-frozen"
MEMORIES: dict[str, MakeMemory] = {
    NONE: NoMemory,
    "trajectory": Examples,
    "bm25": BM25Examples,
    "template": _template,
    "bank": BankMemory,
    FROZEN: BankMemory,  # the stream stops to teach it
    "bank-shuffled": partial(BankMemory, substitute=Shuffled),
    "bank-placebo": partial(BankMemory, substitute=Placebo),
}
"""The built-in memories by name."""


def find_memory(name: str) -> MakeMemory:
    """Return what builds the memory of a name.

    Raises:
        ConfigError: the name stands for nothing that can be called.
    """
    found = cast("Any", resolve("memories", name, MEMORIES))
    if not callable(found):
        raise ConfigError(
            f"Expected {name} to be a class or function that makes a memory from a Setup, got"
            f" {type(found).__name__}"
        )
    return cast("MakeMemory", found)
