"""Store extractor samples: one per experience version, its rewards averaged over uses."""

from __future__ import annotations

from itertools import islice
from typing import Any

from pydantic import Field

from experiential.errors import CheckpointError, ConfigError
from experiential.training.advantages import batch_advantages, training_count_weights
from experiential.training.rewards import Key
from experiential.types import Generation, Record

Span = tuple[int, int]
_MALFORMED = "malformed:"  # begins the keys of responses that wrote no entry


class BufferSample(Record):
    """Represent one sample of an extractor batch.

    Attributes:
        key: (experience id, version); None for a malformed response.
        generation: the response that wrote the entry.
        span: characters of the response that wrote this entry; None for the whole response.
        reward: mean reward over ``uses`` uses.
        advantage: reward minus the batch's mean reward (eq. 3), not yet weighted.
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


class _History(Record):
    count: int = Field(ge=1)
    last: int


class BufferCounters(Record, frozen=False):
    """Count samples ``evicted`` for lack of room, ``stale`` by age, and ``trained`` on."""

    evicted: int = 0
    stale: int = 0
    trained: int = 0


class _State(Record):
    waiting: tuple[tuple[Key, _Waiting], ...]
    history: tuple[tuple[Key, _History], ...]
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
        self.cooldown, self.decay = cooldown, decay
        self.counters = BufferCounters()
        self._waiting: dict[Key, _Waiting] = {}
        self._history: dict[Key, _History] = {}

    def __len__(self) -> int:
        """Return the number of waiting samples, cooling ones included."""
        return len(self._waiting)

    def add_use(self, key: Key, reward: float, generation: Generation, span: Span | None) -> None:
        """Credit the version ``key`` with the outcome of one use; ``generation[span]`` wrote it."""
        found = self._waiting.get(key)
        if found is None:
            self._put(key, _Waiting(generation=generation, span=span, total=float(reward)))
        else:
            update = {"total": found.total + reward, "uses": found.uses + 1}
            self._waiting[key] = found.model_copy(update=update)

    def add_malformed(self, generation: Generation, reward: float) -> None:
        """Add a response of which no operation could be read; it is trained on as a whole."""
        key = (f"{_MALFORMED}{generation.id}", 0)
        self._put(key, _Waiting(generation=generation, total=float(reward)))

    def train_count(self, key: Key) -> int:
        """Return the number of times this version was trained on: c_train of eq. 7."""
        return self._history[key].count if key in self._history else 0

    def ready(self, step: int, version: int) -> bool:
        """Return whether ``take`` would return a batch."""
        return len(self._chosen(step, version)) == self.batch_size

    def take(self, step: int, version: int) -> list[BufferSample]:
        """Remove and return the oldest ``batch_size`` trainable samples; none if there are fewer.

        Of malformed responses the newest are taken, as many as the batch may hold. Samples older
        than ``max_staleness`` are dropped first: ``version`` counts the extractor's updates so far.
        Training counts and times are updated here; ``step`` is t of eq. 7.
        """
        oldest, samples = version - self.max_staleness, self._waiting.items()
        fresh = {key: one for key, one in samples if one.generation.policy_version >= oldest}
        self.counters.stale += len(self._waiting) - len(fresh)
        self._waiting = fresh
        weights = self._chosen(step, version)
        if len(weights) < self.batch_size:
            return []
        waiting = {key: self._waiting.pop(key) for key in weights}
        self.counters.trained += len(waiting)
        rewards = [sample.total / sample.uses for sample in waiting.values()]
        advantages = batch_advantages(rewards).tolist()
        batch: list[BufferSample] = []
        for (key, sample), reward, advantage in zip(
            waiting.items(), rewards, advantages, strict=True
        ):
            malformed = key[0].startswith(_MALFORMED)
            if not malformed:
                self._history[key] = _History(count=self.train_count(key) + 1, last=step)
            batch.append(
                BufferSample(
                    key=None if malformed else key,
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
            history=tuple(self._history.items()),
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
        self._history = dict(read.history)
        self._waiting = {}
        for key, sample in read.waiting:
            self._put(key, sample)

    def _put(self, key: Key, sample: _Waiting) -> None:
        if key not in self._waiting and len(self._waiting) >= self.capacity:
            del self._waiting[next(iter(self._waiting))]
            self.counters.evicted += 1
        self._waiting[key] = sample

    def _chosen(self, step: int, version: int) -> dict[Key, float]:
        """Return the next batch with its weights; fewer samples if there is no full batch."""
        oldest, waiting = version - self.max_staleness, self._waiting.items()
        keys = [key for key, one in waiting if one.generation.policy_version >= oldest]
        past = [self._history.get(key) for key in keys]
        last, counts = [p.last if p else 0 for p in past], [p.count if p else 0 for p in past]
        weights: list[float] = training_count_weights(
            step, last, counts, cooldown=self.cooldown, decay=self.decay
        ).tolist()
        eligible = {key: weight for key, weight in zip(keys, weights, strict=True) if weight > 0}
        malformed = [key for key in eligible if key[0].startswith(_MALFORMED)]
        for key in malformed[: max(0, len(malformed) - self._most_malformed)]:
            del eligible[key]  # the newest stay
        return dict(islice(eligible.items(), self.batch_size))
