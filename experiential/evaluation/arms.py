"""Open the arms of an evaluation: which experience the actor sees in each, and from which bank.

An arm is one condition under which the same held-out worlds are played. ``off`` reaches no bank.
``on`` sees the bank as trained, which goes on filling between visits. ``frozen`` sees the bank as
trained, opened read-only. ``shuffled`` and ``placebo`` are as ``on``, but show experience of other
tasks, or text without content. Every bank here is a copy in a scratch folder.

Baselines need no trained bank. ``history-k`` and ``template`` keep, for each task, what a function
writes about its last episodes here; ``best-of-n`` plays n attempts without any memory.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiential.agents.functions import FunctionExtractor, template, transcript
from experiential.agents.prompts import entry_text, experience_block
from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.manager import ExperienceManager
from experiential.bank.manager_like import ManagerLike, NoBank
from experiential.bank.protocol import Bank, ForkableBank
from experiential.config import Arm
from experiential.errors import BackendError
from experiential.sync import run_sync
from experiential.types import Answer, Condition, Experience, Generation, Hit, Trajectory

PLACEBO = "placebo"
"""Id of the entries that the placebo arm shows; no bank holds such an entry."""
WORDS = ("and", "as", "in", "is", "it", "of", "so", "that", "the", "to")
"""Words that carry no content by themselves; the placebo arm shows texts of them."""
_LONGEST = 4096
"""Words of the longest filler that is tried."""
NEEDS_BANK: frozenset[Arm] = frozenset(("on", "frozen", "shuffled", "placebo"))
"""Arms that only a run with a bank can play."""
FUNCTIONS: dict[Arm, tuple[Callable[[Trajectory], str], int]] = {
    "history-1": (transcript, 1),
    "history-2": (transcript, 2),
    "history-3": (transcript, 3),
    "template": (template, 1),
}
"""Arms whose entries a function writes: that function, and how many of a task's last are shown."""


class Substitute(ABC):
    """Stand between a wrapper and a manager, and change what is shown.

    As many hits come back as the manager found, so that an episode sees as many entries as it would
    have without it. The manager searches, records and distils, and stays open.
    """

    def __init__(self, manager: ExperienceManager, seed: int) -> None:
        self.manager, self.seed = manager, seed

    @abstractmethod
    def replaced(self, hits: Sequence[Hit], query: str, instance: str) -> list[Hit]:
        """Return what is shown in place of the hits of a query; ``instance`` may be empty."""

    def search(self, query: str, **options: Any) -> list[Hit]:
        """Return what is shown for a query; ``options`` are those of the manager's ``search``."""
        hits = self.manager.search(query, **options)
        return self.replaced(hits, query, options.get("exclude_instance") or "")

    async def asearch(self, query: Any, **options: Any) -> Any:
        """Search for one query in a thread."""
        return await asyncio.to_thread(lambda: self.search(query, **options))

    def submit(self, trajectory: Trajectory) -> str | None:
        """Hand a finished trajectory on."""
        return self.manager.submit(trajectory)

    def plays_free(self, task: str) -> bool:
        """Return False: the episodes of an arm are all alike."""
        return False

    def close(self) -> None:  # noqa: B027  (a duty of the protocol, and nothing to do)
        """Close nothing: the manager is another's."""


class Shuffled(Substitute):
    """Show entries of other tasks.

    An entry is never shown in a task that it comes from, whether by one of its versions or by an
    entry merged into it. The task of an entry is the world of the instances it was made from (see
    `world_of`); where either side has no instance, the text of the task decides. An entry of which
    neither is known is never shown. The uses recorded are those of the entries shown.
    """

    def __init__(self, manager: ExperienceManager, seed: int) -> None:
        super().__init__(manager, seed)
        self.entries: list[Experience] | None = None  # where None, the next draw reads the bank
        self._worlds: dict[tuple[str, int], frozenset[str]] = {}

    def replaced(self, hits: Sequence[Hit], query: str, instance: str) -> list[Hit]:
        """Return entries of other tasks; fewer where the bank has fewer of them.

        The draw follows from seed, query and instance.
        """
        if self.entries is None:
            bank = self.manager.bank
            # Ids are random: an order by them would make the draw another one in every run.
            entries = sorted(bank.entries(), key=lambda entry: (entry.task or "", entry.text))
            for entry in entries:
                key = (entry.id, entry.version)  # the worlds of a version never change
                if key not in self._worlds:
                    self._worlds[key] = worlds(bank, entry)
            self.entries = entries  # last, since episodes search in several threads
        others: list[Experience] = []
        for entry in self.entries:
            made_in = self._worlds[entry.id, entry.version]
            if made_in and instance:
                other = world_of(instance) not in made_in
            else:
                other = entry.task is not None and entry.task.strip() != query.strip()
            if other:
                others.append(entry)
        rng = random.Random(f"{self.seed}|{instance}|{query}")
        drawn = rng.sample(others, min(len(hits), len(others)))
        pairs = zip(drawn, hits, strict=False)
        return [Hit(experience=entry, score=hit.score, rank=hit.rank) for entry, hit in pairs]

    def ask(self, query: str, *, episode: str = "", turn: int = 0, **options: Any) -> Answer:
        """Refine an entry of another task for the question."""
        hits = self.search(query, **{"k": 1, **options})
        if not hits:
            return Answer()
        entry, extractor = hits[0].experience, self.manager.extractor
        text: str = entry.text
        generation: Generation | None = None
        if extractor is not None:
            with suppress(BackendError):  # an entry that cannot be refined is shown as it stands
                text, generation = run_sync(extractor.arefine(query, entry))
        refinement = generation.id if generation else None
        use = hits[0].use("search_and_ask", episode=episode, turn=turn, refinement=refinement)
        return Answer(text=text, hit=hits[0], generation=generation, use=use)


class Placebo(Substitute):
    """Show text without content, as long as the entry that was found.

    Length is counted in the actor's tokens, in words without its tokenizer, of what ``render``
    makes of an entry. Nothing of the bank was shown, so no uses are recorded.
    """

    def __init__(
        self,
        manager: ExperienceManager,
        seed: int,
        tokenizer: Any | None = None,
        render: Callable[[Experience], str] = entry_text,
    ) -> None:
        super().__init__(manager, seed)
        self._count, self._render = token_count(tokenizer), render

    def replaced(self, hits: Sequence[Hit], query: str, instance: str) -> list[Hit]:
        """Return hits without content.

        Kind and statistics of an entry stay, since some wrappers show them; text and metadata go.
        """

        def emptied(hit: Hit) -> Hit:
            entry = hit.experience.model_copy(update={"id": PLACEBO, "metadata": {}})
            text = filler(
                self._count(self._render(hit.experience)),
                lambda text: self._count(self._render(entry.model_copy(update={"text": text}))),
                f"{self.seed}|{instance}|{query}|{hit.rank}",
            )
            return hit.model_copy(update={"experience": entry.model_copy(update={"text": text})})

        return [emptied(hit) for hit in hits]

    def submit(self, trajectory: Trajectory) -> str | None:
        """Hand a finished trajectory on, without uses."""
        return self.manager.submit(trajectory.model_copy(update={"uses": ()}))

    def ask(self, query: str, **options: Any) -> Answer:
        """Return an answer without content, as long as the one that was found."""
        answer = self.manager.ask(query, **options)
        if answer.text is None:
            return Answer()
        seed = f"{self.seed}|{options.get('exclude_instance')}|{query}"
        text = filler(self._count(answer.text), self._count, seed)
        return Answer(text=text, generation=answer.generation)


@dataclass(frozen=True)
class ArmBank:
    """Hold the bank of an arm."""

    shown: ManagerLike | NoBank
    """Searched by the wrappers."""
    manager: ExperienceManager | None = None
    """Distils behind it; None without a bank."""
    entries: int = 0
    """Of the bank at the beginning."""
    condition: Condition = Condition.FREE
    """Of the arm's episodes."""

    @asynccontextmanager
    async def visit(self) -> AsyncGenerator[None]:
        """Queue what is submitted in the block, and distil it after; not where the block fails.

        What a visit sees must not depend on how fast other episodes finish.
        """
        if self.manager is not None:
            self.manager.pause()
        if isinstance(self.shown, Shuffled):
            self.shown.entries = None
        yield
        if self.manager is not None:
            self.manager.resume()
            await self.manager.adrain()


@contextmanager
def opened_arm(
    arm: Arm,
    bank: ForkableBank | None,
    scratch: Path,
    extractor: Any | None,
    options: dict[str, Any],
    *,
    tokenizer: Any | None = None,
    render: Callable[[Experience], str] = entry_text,
) -> Generator[ArmBank]:
    """Open the bank of one arm until the end of the block; ``bank`` itself is only read.

    Args:
        arm: which arm.
        bank: the bank as trained; not needed by ``off``.
        scratch: a folder without a bank, for the arm's copy.
        extractor: distils and refines; None leaves the copy as it is.
        options: of the ``ExperienceManager``, its seed included.
        tokenizer: the actor's; None where the backend has none.
        render: makes the text that the actor reads of an entry.

    Raises:
        ValueError: the arm needs a bank (`NEEDS_BANK`), and there is none.
    """
    if arm in FUNCTIONS:
        write, k = FUNCTIONS[arm]
        retrieval = {"strategy": "recent", "same_task": True, "k": k, "floor": -1.0}
        kept = {name: options[name] for name in ("seed", "merge_every", "queue_size")}
        kept |= {"retrieval": retrieval, "text_limit": 6000, "rounds": options.get("rounds")}
        with (
            FolderBank(scratch, embedder="hashing", store="exact") as empty,
            ExperienceManager(
                empty, FunctionExtractor(write), share_queue=False, **kept
            ) as manager,
        ):
            yield ArmBank(manager, manager, 0, Condition.GUIDED)
        return
    if arm not in NEEDS_BANK:
        yield ArmBank(NoBank())
        return
    if bank is None:
        raise ValueError(
            f"Expected a bank for the arm {arm!r}, got None; without one only 'off' and baselines"
            " can be played"
        )
    copy = bank.fork(scratch)
    if arm == "frozen":
        embedder = copy.embedder.wrapped
        copy.close()
        copy = ExperienceBank(scratch, namespace=bank.namespace, embedder=embedder, read_only=True)
    with copy, ExperienceManager(copy, extractor, share_queue=False, **options) as manager:
        shown: ManagerLike = manager
        if arm == "shuffled":
            shown = Shuffled(manager, options["seed"])
        elif arm == "placebo":
            shown = Placebo(manager, options["seed"], tokenizer, render)
        yield ArmBank(shown, manager, len(copy), Condition.GUIDED)


def attempts(arm: Arm) -> int:
    """Return the episodes that an arm plays of each task and seed; one success is enough.

    >>> attempts("on"), attempts("best-of-4")
    (1, 4)
    """
    return int(arm.removeprefix("best-of-")) if arm.startswith("best-of-") else 1


def worlds(bank: Bank, entry: Experience) -> frozenset[str]:
    """Return the worlds that an entry was made from, by all its versions and all merged into it."""
    versions = range(1, entry.version + 1)
    made_of = {one for version in versions for one in bank.lineage(entry.id, version)}
    ancestors = [bank.version(*one) for one in made_of]
    instances = [one.provenance.instance for one in ancestors if one is not None]
    return frozenset(world_of(instance) for instance in instances if instance)


def world_of(instance: str) -> str:
    """Return the world of an instance: everything before its last ``#``, or all of it.

    >>> world_of("vault-eval-Iron Mill#7"), world_of("lake-eval-3")
    ('vault-eval-Iron Mill', 'lake-eval-3')
    """
    return instance.rpartition("#")[0] or instance


def token_count(tokenizer: Any | None) -> Callable[[str], int]:
    """Return a function that counts the tokens of an entry inside the block that an actor reads.

    Without a tokenizer it counts words.
    """
    if tokenizer is None:
        return lambda text: len(text.split())
    return lambda text: len(tokenizer.encode(experience_block([text]), add_special_tokens=False))


def filler(wanted: int, count: Callable[[str], int], seed: str = "") -> str:
    """Return text without content that counts ``wanted``, or as near to it as can be had.

    ``count`` gives the length of an entry with a text in it, which grows with every word; ``seed``
    is of the draw among `WORDS`.

    >>> len(filler(4, lambda text: len(text.split()), seed="a").split())
    4
    """
    # Words of one token each make every length reachable; a tokenizer may have none.
    words = [word for word in WORDS if count(f"{word} {word}") == count(word) + 1] or list(WORDS)
    rng = random.Random(seed)
    drawn = [rng.choice(words) for _ in range(_LONGEST)]
    low, high = 1, 8
    while high < _LONGEST and count(" ".join(drawn[:high])) < wanted:
        low, high = high + 1, 2 * high
    while low < high:  # bisect for the shortest filler of at least the wanted length
        middle = (low + high) // 2
        if count(" ".join(drawn[:middle])) < wanted:
            low = middle + 1
        else:
            high = middle
    # A word may cost two tokens at a border. A full stop or a single word can make up for it.
    plain = [" ".join(drawn[:n]) for n in range(max(1, low - 2), low + 1)]
    candidates = [*plain, *(f"{text}." for text in plain), *WORDS, "."]
    return min(candidates, key=lambda text: abs(count(text) - wanted))
