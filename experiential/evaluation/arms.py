"""The arms of an evaluation: what an actor is shown in each, and which bank stands behind it.

`off` reaches no bank. `on` sees the bank as trained, which goes on filling between visits. `frozen`
sees the bank as trained, opened read-only. `shuffled` and `placebo` are as `on`, but what is shown
is experience of other tasks, or text that says nothing. Every bank here is a copy in a scratch
folder.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiential.agents.actor import run_sync
from experiential.agents.prompts import entry_text
from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.config import Arm
from experiential.errors import BackendError
from experiential.evaluation.filler import filler, shown_length
from experiential.rollout.rollout import NoBank
from experiential.types import Answer, Condition, Experience, Generation, Hit, Trajectory
from experiential.wrappers.episode import ManagerLike

PLACEBO = "placebo"
"""Id of what the placebo arm shows; no bank holds such an entry."""


class Substitute(ABC):
    """Stands between a wrapper and a manager, and changes what is shown.

    As many hits come back as the manager found, so that an episode sees as many entries as it would
    have without it.

    Args:
        manager: what really searches, records and distils; it stays open.
        seed: of what is shown instead.
    """

    def __init__(self, manager: ExperienceManager, seed: int) -> None:
        self.manager, self.seed = manager, seed

    @abstractmethod
    def instead(self, hits: Sequence[Hit], query: str, instance: str) -> list[Hit]:
        """What is shown in place of these hits."""

    def search(
        self,
        query: str,
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        episode: str = "",
        where: Any = None,
    ) -> list[Hit]:
        """What is shown in place of the hits of a query."""
        hits = self.manager.search(
            query, k=k, exclude_instance=exclude_instance, episode=episode, where=where
        )
        return self.instead(hits, query, exclude_instance or "")

    async def asearch(
        self,
        query: Any,
        *,
        k: int | None = None,
        exclude_instance: str | None = None,
        episode: Any = "",
        where: Any = None,
    ) -> Any:
        """``search`` of one query, awaitable."""
        return await asyncio.to_thread(
            self.search, query, k=k, exclude_instance=exclude_instance, episode=episode, where=where
        )

    def submit(self, trajectory: Trajectory) -> str | None:
        """Hand a finished trajectory on."""
        return self.manager.submit(trajectory)

    @abstractmethod
    def ask(
        self,
        query: str,
        *,
        k: int = 1,
        episode: str = "",
        turn: int = 0,
        exclude_instance: str | None = None,
        where: Any = None,
    ) -> Answer:
        """The answer to a question, as this arm gives it."""

    def close(self) -> None:  # noqa: B027  (a duty of the protocol, and nothing to do)
        """Nothing to close: the manager is another's."""

    def renew(self) -> None:  # noqa: B027  (an optional hook, not an abstract method)
        """The bank may have changed."""


class Shuffled(Substitute):
    """Shows entries of other tasks: never one that comes from the task being played, from any version of it or from what it was merged of.

    The task of an entry is the world of the instances that it was made from, ``info["instance"]``
    up to its last ``#``; where either side has none it is the text of the task. An entry of which
    neither is known is never shown. The uses recorded are those of the entries shown.
    """

    def __init__(self, manager: ExperienceManager, seed: int) -> None:
        super().__init__(manager, seed)
        self._shelf: list[tuple[Experience, frozenset[str]]] | None = None
        self._worlds: dict[tuple[str, int], frozenset[str]] = {}  # of a version they never change

    def renew(self) -> None:
        """Read the bank again."""
        self._shelf = None

    def instead(self, hits: Sequence[Hit], query: str, instance: str) -> list[Hit]:
        """Entries of other tasks, drawn by seed, query and instance; fewer where the bank has fewer."""
        others = [
            entry for entry, worlds in self._entries() if _is_other(entry, worlds, query, instance)
        ]
        drawn = random.Random(f"{self.seed}|{instance}|{query}").sample(
            others, min(len(hits), len(others))
        )
        return [
            Hit(experience=entry, score=hit.score, rank=hit.rank)
            for entry, hit in zip(drawn, hits, strict=False)
        ]

    def ask(
        self,
        query: str,
        *,
        k: int = 1,
        episode: str = "",
        turn: int = 0,
        exclude_instance: str | None = None,
        where: Any = None,
    ) -> Answer:
        """An entry of another task, refined for the question."""
        hits = self.search(
            query, k=k, exclude_instance=exclude_instance, episode=episode, where=where
        )
        if not hits:
            return Answer()
        text, generation = self._refined(query, hits[0].experience)
        use = hits[0].use(
            "search_and_ask",
            episode=episode,
            turn=turn,
            refinement=generation.id if generation else None,
        )
        return Answer(text=text, hit=hits[0], generation=generation, use=use)

    def _refined(self, query: str, entry: Experience) -> tuple[str, Generation | None]:
        if self.manager.extractor is None:
            return entry.text, None
        try:
            return run_sync(self.manager.extractor.arefine(query, entry))
        except BackendError:
            return entry.text, None

    def _entries(self) -> list[tuple[Experience, frozenset[str]]]:
        """The entries and their worlds, in an order that does not depend on their random ids."""
        if self._shelf is None:
            bank = self.manager.bank
            entries = sorted(bank.entries(), key=lambda entry: (entry.task or "", entry.text))
            self._worlds |= {
                key: worlds(bank, entry)
                for entry in entries
                if (key := (entry.id, entry.version)) not in self._worlds
            }
            self._shelf = [(entry, self._worlds[entry.id, entry.version]) for entry in entries]
        return self._shelf


class Placebo(Substitute):
    """Shows text without content, as many tokens of the actor's as the entry that was found; as many words where it shows no tokenizer.

    Nothing of the bank was shown, so no uses are recorded.

    Args:
        manager: as for `Substitute`.
        seed: as for `Substitute`.
        tokenizer: the actor's, None when it shows none.
        render: what the actor is shown of an entry; its text by default.
    """

    def __init__(
        self,
        manager: ExperienceManager,
        seed: int,
        tokenizer: Any | None = None,
        render: Callable[[Experience], str] = entry_text,
    ) -> None:
        super().__init__(manager, seed)
        self._count, self._render = shown_length(tokenizer), render

    def instead(self, hits: Sequence[Hit], query: str, instance: str) -> list[Hit]:
        """Hits without content."""
        return [self._empty(hit, f"{self.seed}|{instance}|{query}|{hit.rank}") for hit in hits]

    def submit(self, trajectory: Trajectory) -> str | None:
        """Hand a finished trajectory on, without uses."""
        return self.manager.submit(trajectory.model_copy(update={"uses": ()}))

    def ask(
        self,
        query: str,
        *,
        k: int = 1,
        episode: str = "",
        turn: int = 0,
        exclude_instance: str | None = None,
        where: Any = None,
    ) -> Answer:
        """An answer without content, as long as the one that was found."""
        answer = self.manager.ask(
            query, k=k, episode=episode, turn=turn, exclude_instance=exclude_instance, where=where
        )
        if answer.text is None:
            return Answer()
        text = filler(
            self._count(answer.text), self._count, f"{self.seed}|{exclude_instance}|{query}"
        )
        return Answer(text=text, generation=answer.generation)

    def _empty(self, hit: Hit, seed: str) -> Hit:
        """The hit with another text and without metadata; its kind and statistics, which some wrappers show, stay."""
        entry = hit.experience

        def emptied(text: str) -> Experience:
            return entry.model_copy(update={"id": PLACEBO, "text": text, "metadata": {}})

        wanted = self._count(self._render(entry))
        text = filler(wanted, lambda text: self._count(self._render(emptied(text))), seed)
        return hit.model_copy(update={"experience": emptied(text)})


@dataclass(frozen=True)
class ArmBank:
    """What an arm plays with: what the wrappers search, the manager that distils behind it, and how many entries it began with."""

    shown: ManagerLike | NoBank
    manager: ExperienceManager | None = None
    entries: int = 0

    @property
    def condition(self) -> Condition:
        """The condition of the arm's episodes."""
        return Condition.FREE if self.manager is None else Condition.GUIDED

    def hold(self) -> None:
        """Let nothing be distilled until ``settle``, so that what a visit sees does not depend on how fast others finish."""
        if self.manager is not None:
            self.manager.pause()
        if isinstance(self.shown, Substitute):
            self.shown.renew()

    async def settle(self) -> None:
        """Distil what was submitted."""
        if self.manager is not None:
            self.manager.resume()
            await self.manager.adrain()


@contextmanager
def opened_arm(
    arm: Arm,
    bank: ExperienceBank | None,
    scratch: Path,
    extractor: Any | None,
    options: dict[str, Any],
    *,
    tokenizer: Any | None = None,
    render: Callable[[Experience], str] = entry_text,
) -> Generator[ArmBank]:
    """The bank of one arm, closed at the end of the block; ``bank`` itself is only read.

    Args:
        arm: which arm.
        bank: the bank as trained; not needed by ``off``.
        scratch: a folder that does not hold a bank yet, for the arm's copy.
        extractor: what distils and refines; None leaves the copy as it is.
        options: of the ``ExperienceManager``, its seed included.
        tokenizer: the actor's, None when it shows none.
        render: what the actor is shown of an entry.

    Raises:
        ValueError: an arm with a bank was asked for, and there is none.
    """
    if arm == "off":
        yield ArmBank(NoBank())
        return
    if bank is None:
        raise ValueError(
            f"Expected a bank for the arm {arm!r}, got None; without one only 'off' can be played"
        )
    with (
        _copied(bank, scratch, read_only=arm == "frozen") as copy,
        ExperienceManager(copy, extractor, **options) as manager,
    ):
        shown: ManagerLike = manager
        if arm == "shuffled":
            shown = Shuffled(manager, options["seed"])
        elif arm == "placebo":
            shown = Placebo(manager, options["seed"], tokenizer, render)
        yield ArmBank(shown, manager, len(copy))


def worlds(bank: ExperienceBank, entry: Experience) -> frozenset[str]:
    """The worlds whose episodes an entry was made from: those of all its versions and of all that it was merged of."""
    versions = [
        one for version in range(1, entry.version + 1) for one in bank.lineage(entry.id, version)
    ]
    instances = {
        found.provenance.instance for one in versions if (found := bank.version(*one)) is not None
    }
    return frozenset(world_of(instance) for instance in instances if instance)


def world_of(instance: str) -> str:
    """The world of an instance: what stands before its last ``#``, or all of it.

    >>> world_of("vault-eval-Iron Mill#7"), world_of("lake-eval-3")
    ('vault-eval-Iron Mill', 'lake-eval-3')
    """
    return instance.rpartition("#")[0] or instance


def _is_other(entry: Experience, worlds: frozenset[str], task: str, instance: str) -> bool:
    if worlds and instance:
        return world_of(instance) not in worlds
    return entry.task is not None and entry.task.strip() != task.strip()


@contextmanager
def _copied(bank: ExperienceBank, scratch: Path, *, read_only: bool) -> Generator[ExperienceBank]:
    copy = bank.fork(scratch)
    if read_only:
        embedder = copy.embedder.wrapped
        copy.close()
        copy = ExperienceBank(scratch, namespace=bank.namespace, embedder=embedder, read_only=True)
    with copy:
        yield copy
