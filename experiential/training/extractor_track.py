"""Train the extractor in the background: credit entries for their uses and update by CISPO.

A buffer holds one sample per version of an entry, its rewards averaged over its uses.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice, zip_longest
from typing import Any, NamedTuple

from pydantic import Field

from experiential.bank.protocol import Bank
from experiential.config import ExtractorSettings
from experiential.errors import CheckpointError, ConfigError
from experiential.sync import cancel_tasks
from experiential.training.advantages import (
    batch_advantages,
    cell_advantages,
    critic_reward,
    outcome,
    relative_rewards,
    training_count_weights,
    use_reward,
)
from experiential.training.runtime import (
    LossSettings,
    PolicyRuntime,
    Sample,
    TrainStats,
    sample_from_generation,
)
from experiential.types import (
    Condition,
    Distillation,
    Experience,
    FinishReason,
    Generation,
    Record,
    Trajectory,
    Use,
)

CUT_AMONG, CUT_SHARE = 32, 0.25
"""A run warns once more than this share of so many answers in a row were cut at their limit."""


def telling(trajectories: Sequence[Trajectory], most: int) -> list[Trajectory]:
    """Choose up to ``most`` episodes of each group that tell different things.

    The first one is taken, then one with another outcome, and so on in turn. No two were played
    alike, whatever advice was shown. Episodes that failed for a technical reason are left out.
    """
    groups: dict[str, dict[bool, dict[object, Trajectory]]] = {}
    for one in trajectories:
        if one.error is None:
            played = one.instance, tuple((turn.observation, turn.action) for turn in one.turns)
            kinds = groups.setdefault(one.group, {})
            kinds.setdefault(one.success is True, {}).setdefault(played, one)
    chosen: list[Trajectory] = []
    for kinds in groups.values():
        turns = chain.from_iterable(zip_longest(*(kind.values() for kind in kinds.values())))
        chosen += islice((one for one in turns if one is not None), most)
    return chosen


class ExtractorTrack:
    """Train the extractor on whether its entries helped, on a schedule of its own.

    Every use of an entry version gives the generation that wrote it, and those of its merged
    ancestors, a reward of -1 or +1; malformed answers are samples with the lowest reward. When the
    buffer holds a batch, CISPO updates run as a task beside the rollouts.

    Of several drafts about an episode each is a sample: one with the text of another earns what the
    entry earns, and with ``reward: relative`` one that adds nothing earns 0, the gain of playing
    without advice.

    Attributes:
        malformed: answers that could not be read.
        silent: drafts that could be read and added nothing.
        cut: answers that ended at ``extractor.max_tokens``.
        uncredited: uses without a reward, for want of a free member to compare with.
        weight: mean weight of eq. 7 over the last batch.
    """

    def __init__(self, runtime: PolicyRuntime, bank: Bank, settings: ExtractorSettings) -> None:
        self._runtime, self._bank, self._settings = runtime, bank, settings
        options = settings.options
        self.buffer = ExtractorBuffer(
            options.buffer_size,
            batch_size=settings.batch_size,
            max_staleness=settings.max_staleness,
            cooldown=options.cooldown,
            decay=options.decay,
            malformed_share=options.malformed_share,
            by_episode=settings.drafts > 1,
        )
        self.updates = self.malformed = self.silent = self.cut = self.uncredited = 0
        self.last = TrainStats()
        self.mean_reward, self.staleness, self.weight = 0.0, 0.0, 1.0
        self._running: asyncio.Task[None] | None = None
        # Filled by the manager's thread, emptied on the event loop.
        self._unwritten: deque[_Unwritten] = deque()
        self._warnings: deque[str] = deque()
        # Of the manager's thread alone.
        self._lately: deque[bool] = deque(maxlen=CUT_AMONG)  # whether each answer was cut
        self._warned = False

    def on_distillation(
        self, trajectory: Trajectory, distillation: Distillation, written: Sequence[Experience]
    ) -> None:
        """Keep an answer that wrote nothing, as a sample of its own; the manager calls this."""
        made, is_malformed = distillation.generation, not distillation.parsed.operations
        if made is not None:
            self._note_length(is_cut=made.finish_reason is FinishReason.LENGTH)
        if made is not None and not written and (is_malformed or self._settings.drafts > 1):
            self._unwritten.append(_Unwritten(made, trajectory.id, is_malformed))

    async def credit(
        self, trajectories: Sequence[Trajectory], bonuses: Mapping[str, float] | None = None
    ) -> int:
        """Credit the uses of these trajectories with rewards; return the number of counted uses.

        The reward is the outcome of the episode (section 3.3), or with ``reward: relative`` its
        gain over the group's free members. A verdict of the actor adds its score (eq. 8), and
        ``bonuses`` adds the bonus of a use, by its id.
        """
        self._take_unwritten()
        if not self._settings.train:
            return 0
        played = [t for t in trajectories if t.error is None]
        if self._settings.reward == "relative":
            guided = [t.condition is Condition.GUIDED for t in played]
            groups = [t.group for t in played]
            bases = relative_rewards([outcome(t) for t in played], groups, guided).tolist()
        else:
            bases = [float(use_reward(bool(t.success))) for t in played]
        uses: list[tuple[Use, float]] = []
        for trajectory, base in zip(played, bases, strict=True):
            counted = counted_uses(trajectory)
            if math.isnan(base):
                self.uncredited += len(counted)
                continue
            for use in counted:
                bonus = (bonuses or {}).get(use.id, 0.0)
                uses.append((use, critic_reward(use.verdict, base) + bonus))
        # A bank behind a server takes a while, so a thread reads it. The buffer changes on the
        # event loop only, in the order of the trajectories: an update never meets half of it.
        written = await asyncio.to_thread(lambda: [list(self._written_by(use)) for use, _ in uses])
        for (_, reward), found in zip(uses, written, strict=True):
            for one in found:
                self.buffer.add_use(one.key, reward, one.generation, one.span, one.episode)
        return len(uses)

    async def step(self, step: int) -> None:
        """Start updating if a batch is ready and no update runs; never waits for one."""
        if self._running is not None and self._running.done():
            await self.finish()
        idle = self._settings.train and self._running is None
        if idle and self.buffer.next_batch(step, self._runtime.version):
            self._running = asyncio.create_task(self._update(step))

    async def finish(self) -> None:
        """Wait for the update under way, if any."""
        if self._running is not None:
            await self._running
            self._running = None

    async def close(self) -> None:
        """Cancel the update under way, if any."""
        if self._running is not None:
            await cancel_tasks([self._running])

    def warning(self) -> str | None:
        """Return the warning of cut answers once it is due; None before and after."""
        return self._warnings.popleft() if self._warnings else None

    def event(self) -> dict[str, Any]:
        """Return this track's part of a step's metrics."""
        return {
            "extractor_updates": self.updates,
            "extractor_loss": self.last.loss,
            "extractor_reward": self.mean_reward,
            "extractor_weight": self.weight,
            "staleness": self.staleness,
            "malformed": self.malformed,
            "silent": self.silent,
            "cut": self.cut,
            "uncredited": self.uncredited,
            "buffer": len(self.buffer),
        } | {f"extractor_{name}": value for name, value in self.last.metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        self._take_unwritten()
        buffer = self.buffer.state_dict()
        kept = ("updates", "malformed", "silent", "cut")
        return {"buffer": buffer, **{name: getattr(self, name) for name in kept}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a ``state_dict``."""
        self.buffer.load_state_dict(state["buffer"])
        self.updates, self.malformed = state["updates"], state["malformed"]
        self.silent, self.cut = state.get("silent", 0), state.get("cut", 0)

    def _note_length(self, *, is_cut: bool) -> None:
        """Count an answer that was cut, and warn of many.

        An extractor that repeats itself in training writes longer and longer answers, which earn as
        much as short ones until their limit cuts them.
        """
        self.cut += is_cut
        self._lately.append(is_cut)
        lately = sum(self._lately)
        if self._warned or len(self._lately) < CUT_AMONG or lately <= CUT_SHARE * CUT_AMONG:
            return
        self._warned = True
        self._warnings.append(
            f"{lately} of the extractor's last {CUT_AMONG} answers were cut at extractor.max_tokens"
            f" ({self._settings.max_tokens}); if they repeat themselves, set extractor.kl, such as"
            " 0.3, to keep it near its first weights, else raise the limit"
        )

    def _take_unwritten(self) -> None:
        """Move the answers that wrote nothing into the buffer."""
        while self._unwritten:
            made, episode, is_malformed = self._unwritten.popleft()
            self.malformed += is_malformed
            self.silent += not is_malformed
            if not self._settings.train:
                continue
            if is_malformed:
                self.buffer.add_malformed(made, self._settings.options.malformed_reward, episode)
            elif self._settings.reward == "relative":
                self.buffer.add_silent(made, 0.0, episode)

    def _written_by(self, use: Use) -> Iterator[_Writing]:
        """Yield the generations of the version, of its merged ancestors and of the refinement."""
        for key in self._bank.lineage(use.experience_id, use.experience_version):
            for entry in self._with_its_text(*key):
                name, origin = entry.provenance.generation, entry.provenance
                if name is not None and (found := self._bank.generation(name)):
                    about = origin.trajectory or found.id
                    yield _Writing((entry.id, entry.version), found, origin.span, about)
        if use.refinement is not None and (found := self._bank.generation(use.refinement)):
            yield _Writing((use.refinement, 0), found, None, found.id)

    def _with_its_text(self, id: str, version: int) -> Iterator[Experience]:
        """Yield a version and, among drafts, those before it with the same text: equal answers."""
        first = entry = self._bank.version(id, version)
        while first is not None and entry is not None and entry.text == first.text:
            yield entry
            drafted = self._settings.drafts > 1 and entry.version > 1
            entry = self._bank.version(id, entry.version - 1) if drafted else None

    async def _update(self, step: int) -> None:
        for _ in range(self._settings.updates_per_step):
            version = self._runtime.version
            batch = self.buffer.take(step, version)
            if not batch:
                continue
            samples: list[Sample] = []
            for item in batch:
                made, span = item.generation, item.span
                value = item.advantage * item.weight
                values = [value] * len(made.response_ids)
                if span is not None and made.text.count('"op"') > 1:
                    # Only tokens of the operation itself, whose characters overlap its span, and
                    # not the brackets and tags that all operations share.
                    start = 0
                    for i in range(len(values)):
                        part = made.response_ids[: i + 1]
                        end = len(self._runtime.tokenizer.decode(part, skip_special_tokens=True))
                        if start >= span[1] or end <= span[0]:
                            values[i] = math.nan
                        start = end
                if values:
                    samples.append(sample_from_generation(made, values))
            low, high = self._settings.options.eps_low, self._settings.options.eps_high
            loss = LossSettings(kind="cispo", low=low, high=high, kl=self._settings.kl, seed=step)
            self.last = await self._runtime.train(samples, loss)
            await self._runtime.sync()
            self.updates += self.last.updates
            self.mean_reward = sum(item.reward for item in batch) / len(batch)
            self.weight = sum(item.weight for item in batch) / len(batch)
            ages = [version - item.generation.policy_version for item in batch]
            self.staleness = sum(ages) / len(batch)


def counted_uses(trajectory: Trajectory) -> list[Use]:
    """Return the uses that earn credit: T_m of section 3.3 of Complementary RL.

    An entry that reached one episode several times counts once, by its first use; episodes that
    were free or failed for a technical reason have none.
    """
    if trajectory.error is not None or trajectory.condition is Condition.FREE:
        return []
    first: dict[tuple[str, int, str | None], Use] = {}
    for use in trajectory.uses:
        first.setdefault((use.experience_id, use.experience_version, use.refinement), use)
    return list(first.values())


Key = tuple[str, int]
"""An experience at one version: (experience id, version)."""
Span = tuple[int, int]
"""Characters of a response, from the first to behind the last."""
_MALFORMED, _SILENT = "malformed:", "silent:"  # begin the keys of responses that wrote no entry


class _Unwritten(NamedTuple):
    generation: Generation
    episode: str
    is_malformed: bool


class _Writing(NamedTuple):
    key: Key
    generation: Generation
    span: Span | None
    episode: str  # what it was written about, or the response itself


class BufferSample(Record):
    """Represent one sample of an extractor batch.

    Attributes:
        key: (experience id, version); None for a response that wrote no entry.
        generation: the response that wrote the entry.
        span: characters of the response that wrote this entry; None for the whole response.
        reward: mean reward over ``uses`` uses.
        advantage: reward minus the mean reward of the batch (eq. 3) or of what was written about
            the same episode, not yet weighted.
        weight: eq. 7; the loss takes ``weight * advantage``.
    """

    key: Key | None
    generation: Generation
    span: Span | None
    reward: float
    uses: int
    advantage: float
    weight: float


class _Waiting(Record):
    generation: Generation
    span: Span | None = None
    total: float  # of the rewards of ``uses`` uses
    uses: int = 1
    episode: str = ""


class Trained(Record):
    """Count how often a version was trained on, c_train of eq. 7; ``last`` is the last step."""

    count: int = Field(ge=1)
    last: int


class BufferCounters(Record, frozen=False):
    """Count samples ``evicted`` for lack of room, ``stale`` by age, and ``trained`` on."""

    evicted: int = 0
    stale: int = 0
    trained: int = 0


class _State(Record):
    waiting: tuple[tuple[Key, _Waiting], ...]
    beside: tuple[tuple[Key, _Waiting], ...] = ()
    history: tuple[tuple[Key, Trained], ...]
    counters: BufferCounters


class ExtractorBuffer:
    """Store extractor samples in a bounded, first-in first-out queue.

    A use of an entry that already waits adds to its mean. An entry that was taken and is used again
    waits again, with the weight that its training count leaves it (eq. 7); while it cools down it
    stays here and fills no batch. When full, the oldest sample gives way and is counted.

    Args:
        capacity: most samples kept.
        batch_size: samples per batch.
        max_staleness: extractor updates after which a generation is too old to train on.
        cooldown: delta of eq. 7, in training steps.
        decay: alpha of eq. 7.
        malformed_share: share of a batch that malformed responses may fill.
        by_episode: compare a reward with those of its batch about the same episode, so that it does
            not count what the episode showed. All that waits about an episode goes into one batch,
            which may thus be larger. A response that wrote no entry waits beside until one of its
            episode is used.

    Attributes:
        history: training of each version so far.

    >>> buffer = ExtractorBuffer(8, batch_size=2, max_staleness=4, cooldown=1, decay=0.5)
    >>> for name, reward in (("a", 1), ("b", -1), ("a", -1)):
    ...     buffer.add_use((name, 1), reward, Generation(id=name, text="..."), None)
    >>> [(s.key, s.reward, s.advantage) for s in buffer.take(step=0, version=0)]
    [(('a', 1), 0.0, 0.5), (('b', 1), -1.0, -0.5)]
    """

    def __init__(
        self,
        capacity: int,
        *,
        batch_size: int,
        max_staleness: int,
        cooldown: int,
        decay: float,
        malformed_share: float = 1.0,
        by_episode: bool = False,
    ) -> None:
        if not 1 <= batch_size <= capacity:
            raise ConfigError(
                f"Expected a batch size between 1 and the capacity {capacity}, got {batch_size}"
            )
        if min(max_staleness, cooldown, decay) < 0:
            raise ConfigError(
                f"Expected max_staleness, cooldown and decay of at least 0, got {max_staleness},"
                f" {cooldown}, {decay}"
            )
        if not 0 <= malformed_share <= 1:
            raise ConfigError(f"Expected malformed_share between 0 and 1, got {malformed_share}")
        self._most_malformed = int(malformed_share * batch_size)
        self.capacity, self.batch_size, self.max_staleness = capacity, batch_size, max_staleness
        self.cooldown, self.decay, self._by_episode = cooldown, decay, by_episode
        self.counters = BufferCounters()
        self._waiting: dict[Key, _Waiting] = {}
        self._beside: dict[str, dict[Key, _Waiting]] = {}  # by episode
        self.history: dict[Key, Trained] = {}

    def __len__(self) -> int:
        """Return the number of waiting samples, cooling ones included."""
        return len(self._waiting)

    def add_use(
        self,
        key: Key,
        reward: float,
        generation: Generation,
        span: Span | None,
        episode: str = "",
    ) -> None:
        """Credit the version ``key`` with the outcome of one use.

        ``generation[span]`` wrote it, about the episode of this id.
        """
        found = self._waiting.get(key)
        if found is None:
            self._wait(
                key,
                _Waiting(generation=generation, span=span, total=float(reward), episode=episode),
            )
        else:
            update = {"total": found.total + reward, "uses": found.uses + 1}
            self._waiting[key] = found.model_copy(update=update)
        for other, one in self._beside.get(episode, {}).items():
            if other not in self._waiting:
                self._wait(other, one)

    def add_malformed(self, generation: Generation, reward: float, episode: str = "") -> None:
        """Add a response of which no operation could be read; it is trained on as a whole."""
        key = f"{_MALFORMED}{generation.id}", 0
        if self._by_episode:
            self._put_beside(key, generation, reward, episode)
        else:
            self.add_use(key, reward, generation, None, episode)

    def add_silent(self, generation: Generation, reward: float, episode: str) -> None:
        """Add a draft that wrote nothing, to be compared with the others about its episode."""
        self._put_beside((f"{_SILENT}{generation.id}", 0), generation, reward, episode)

    def _wait(self, key: Key, one: _Waiting) -> None:
        self._waiting[key] = one
        if len(self._waiting) > self.capacity:
            del self._waiting[next(iter(self._waiting))]
            self.counters.evicted += 1

    def _put_beside(self, key: Key, generation: Generation, reward: float, episode: str) -> None:
        one = _Waiting(generation=generation, total=float(reward), episode=episode)
        self._beside.setdefault(episode, {})[key] = one
        if len(self._beside) > self.capacity:
            del self._beside[next(iter(self._beside))]

    def next_batch(self, step: int, version: int) -> dict[Key, float]:
        """Return what ``take`` would take, with its weights; nothing without a full batch."""
        oldest, waiting = version - self.max_staleness, self._waiting.items()
        keys = [key for key, one in waiting if one.generation.policy_version >= oldest]
        past = [self.history.get(key) for key in keys]
        last, counts = [p.last if p else 0 for p in past], [p.count if p else 0 for p in past]
        weights: list[float] = training_count_weights(
            step, last, counts, cooldown=self.cooldown, decay=self.decay
        ).tolist()
        eligible = {key: weight for key, weight in zip(keys, weights, strict=True) if weight > 0}
        malformed = [key for key in eligible if key[0].startswith(_MALFORMED)]
        for key in malformed[: max(0, len(malformed) - self._most_malformed)]:
            del eligible[key]  # the newest stay
        if len(eligible) < self.batch_size:
            return {}
        batch = dict(islice(eligible.items(), self.batch_size))
        if self._by_episode:
            about = {self._waiting[key].episode for key in batch}
            batch |= {
                key: weight
                for key, weight in eligible.items()
                if self._waiting[key].episode in about
            }
        return batch

    def take(self, step: int, version: int) -> list[BufferSample]:
        """Remove and return the oldest ``batch_size`` trainable samples; none if there are fewer.

        With ``by_episode`` the others about their episodes come, too.

        Of malformed responses the newest are taken, as many as the batch may hold. Samples older
        than ``max_staleness`` are dropped first: ``version`` counts the extractor's updates so far.
        Training counts and times are updated here; ``step`` is t of eq. 7.
        """
        oldest, samples = version - self.max_staleness, self._waiting.items()
        fresh = {key: one for key, one in samples if one.generation.policy_version >= oldest}
        self.counters.stale += len(self._waiting) - len(fresh)
        self._waiting = fresh
        self._beside = {
            episode: kept
            for episode, ones in self._beside.items()
            if (kept := {k: o for k, o in ones.items() if o.generation.policy_version >= oldest})
        }
        weights = self.next_batch(step, version)
        waiting = {key: self._waiting.pop(key) for key in weights}
        self.counters.trained += len(waiting)
        rewards = [sample.total / sample.uses for sample in waiting.values()]
        if self._by_episode:
            episodes = [sample.episode for sample in waiting.values()]
            alike = [False] * len(episodes)
            advantages = cell_advantages(rewards, episodes, alike, estimator="dr_grpo").tolist()
        else:
            advantages = batch_advantages(rewards).tolist()
        batch: list[BufferSample] = []
        for (key, sample), reward, advantage in zip(
            waiting.items(), rewards, advantages, strict=True
        ):
            is_entry = not key[0].startswith((_MALFORMED, _SILENT))
            if is_entry or self._by_episode:  # it may come again
                past = self.history.get(key)
                self.history[key] = Trained(count=past.count + 1 if past else 1, last=step)
            batch.append(
                BufferSample(
                    key=key if is_entry else None,
                    generation=sample.generation,
                    span=sample.span,
                    reward=reward,
                    uses=sample.uses,
                    advantage=advantage,
                    weight=weights[key],
                )
            )
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the state for ``load_state_dict`` as plain JSON values."""
        state = _State(
            waiting=tuple(self._waiting.items()),
            beside=tuple(item for ones in self._beside.values() for item in ones.items()),
            history=tuple(self.history.items()),
            counters=self.counters,
        )
        return state.model_dump(mode="json")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents by a ``state_dict``; raise CheckpointError if it is none."""
        try:
            read = _State.model_validate(state)
        except ValueError as error:
            raise CheckpointError(
                f"Expected the state of an extractor buffer, got {error}; choose another checkpoint"
            ) from error
        self.counters = read.counters
        self.history = dict(read.history)
        surplus = max(0, len(read.waiting) - self.capacity)
        self._waiting = dict(read.waiting[surplus:])
        self._beside = {}
        for key, one in read.beside:
            self._beside.setdefault(one.episode, {})[key] = one
        self.counters.evicted += surplus
