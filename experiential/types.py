"""Define the records that flow from an observation to a gradient.

Every type here is an immutable pydantic model, so that it can be journalled as JSON and checked at
each border. Nothing in this module imports another module of the package.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, TypedDict, TypeGuard

from pydantic import BaseModel, ConfigDict, Field


def new_id() -> str:
    """Return a fresh identifier: 32 hexadecimal characters."""
    return uuid.uuid4().hex


class Record(BaseModel):
    """Provide the base of all records: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Message(TypedDict):
    """Hold one chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


Prompt = Sequence[Message] | Sequence[int]
"""Chat messages, or the token ids of a conversation that the caller keeps as tokens."""


def is_token_prompt(prompt: Prompt) -> TypeGuard[Sequence[int]]:
    """Return whether ``prompt`` is a sequence of token ids."""
    return len(prompt) > 0 and isinstance(prompt[0], int)


class Condition(StrEnum):
    """Define whether an episode may see the bank at all."""

    GUIDED = "guided"
    FREE = "free"


class FinishReason(StrEnum):
    """Name the reason for the end of a generation."""

    STOP = "stop"
    LENGTH = "length"
    CHOICE = "choice"
    ERROR = "error"


class Usage(Record):
    """Count what replies of a hosted model took.

    Attributes:
        prompt_tokens: tokens read.
        completion_tokens: tokens written, reasoning included.
        cost: dollars; None where no price is known.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float | None = None

    def __add__(self, other: Usage) -> Usage:
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cost=sum(costs) if costs else None,
        )


class Generation(Record):
    """Record one response of a language model, with all inputs of off-policy training."""

    id: str = Field(default_factory=new_id)
    text: str
    prompt_ids: tuple[int, ...] = ()
    """Token ids of the prompt; empty for backends that do not expose tokens."""
    response_ids: tuple[int, ...] = ()
    """Sampled token ids, the end-of-turn token included when it was sampled."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each sampled token under the behaviour policy, in nats, of the
    distribution sampled from: temperature, truncation and constraint included."""
    allowed: tuple[tuple[int, ...], ...] | None = None
    """Per response token, the token ids that a constraint allowed, where an empty tuple means
    unconstrained; None when the whole response was unconstrained."""
    json_schema: str | None = None
    """Schema of the response; an empty tuple in ``allowed`` then means what it allows there."""
    policy: str = ""
    policy_version: int = 0
    """Optimiser steps the weights had seen."""
    finish_reason: FinishReason = FinishReason.STOP
    temperature: float = 1.0
    """Sampling temperature that ``logprobs`` were computed at."""
    usage: Usage | None = None
    """Tokens and cost as the server counts them; None for local backends."""


How = Literal["episode_start", "turn", "search_and_ask"]
"""By which way an entry reaches an actor."""
Verdict = Literal["accept", "refine", "reject"]
"""What the actor does with a retrieved entry (appendix B.1 of Complementary RL)."""


class Use(Record):
    """Record one retrieval that reached an actor."""

    id: str = Field(default_factory=new_id)
    experience_id: str
    experience_version: int
    rank: int = 0
    score: float = 0.0
    propensity: float = 1.0
    episode: str = ""
    turn: int = 0
    how: How = "episode_start"
    refinement: str | None = None
    """Id of the generation that refined the entry for this use."""
    provisional: bool = False
    """Whether the entry was not trusted yet; the propensity has the share as a factor."""
    admitted: bool | None = None
    """The draw whether the episode may see provisional entries; None: none made."""
    verdict: Verdict | None = None
    """What the actor said of the entry; rejected, it was not shown."""


class Turn(Record):
    """Record one step of an episode: observation, action and result."""

    observation: str
    action: str
    reward: float = 0.0
    feedback: str = ""
    """The observation that followed the action."""
    withheld: str = ""
    """What the environment said of the action, not shown to the actor, only to a reflector."""
    invalid: bool = False


class Trajectory(Record):
    """Record one finished episode."""

    id: str = Field(default_factory=new_id)
    task: str
    """What was asked, in words; the retrieval query."""
    task_id: str = ""
    """The world or task family member, stable over seeds."""
    instance: str = ""
    """World plus seed; entries made from it are hidden from evaluation on it."""
    group: str = ""
    """Identifier shared by the K episodes that started from one task and seed."""
    turns: tuple[Turn, ...] = ()
    reward: float = 0.0
    success: bool | None = None
    """Outcome R in {0, 1} of the paper; None: unknown, which counts as neither."""
    seed: int | None = None
    condition: Condition = Condition.GUIDED
    uses: tuple[Use, ...] = ()
    policy_version: int = 0
    error: str | None = None
    """A named reason when the episode failed for a technical cause."""


class Provenance(Record):
    """Record the origin of an experience."""

    author: str = "human"
    """'human' or 'extractor'."""
    cause: str = "add"
    """'add', 'update', 'merge', 'dedupe', 'import' or 'rollback'."""
    trajectory: str | None = None
    instance: str | None = None
    generation: str | None = None
    span: tuple[int, int] | None = None
    """Characters of the generation that wrote this text."""
    extractor_version: int | None = None
    parents: tuple[tuple[str, int], ...] = ()
    """(experience id, version) pairs."""
    commit: int | None = None


class Statistics(Record):
    """Count the uses of one experience, over all its versions."""

    retrievals: int = 0
    uses: int = 0
    successes: int = 0

    @property
    def score(self) -> float:
        """Return the Laplace estimate of usefulness, (s + 1) / (u + 2) (EvolveR)."""
        return (self.successes + 1) / (self.uses + 2)


class Estimate(Record):
    """Estimate the lead in success rate of guided episodes over the free ones of their group."""

    groups: int = 0
    """Groups that have guided members with the entry and free members."""
    mean: float | None = None
    """Mean over groups of the difference of success rates, in [-1, 1]; None without a group."""
    interval: tuple[float, float] | None = None
    """95 % t-interval of the mean over groups; None for fewer than two groups."""


class Uplift(Estimate):
    """Record the effect of one entry version on the episodes that used it."""

    id: str
    version: int
    uses: int = 0
    """Times it reached an actor."""
    outcomes: int = 0
    """Those whose episode ended properly."""
    successes: int = 0
    """Those whose episode succeeded."""
    lineage: Estimate = Estimate()
    """The same with the uses of all versions that it was merged from, or that came of it."""

    @property
    def score(self) -> float:
        """Return the Laplace estimate of usefulness over the uses with an outcome."""
        return (self.successes + 1) / (self.outcomes + 2)


class Experience(Record):
    """Hold one entry of the bank, at one version."""

    id: str = Field(default_factory=new_id)
    version: int = 1
    text: str
    kind: str = "lesson"
    task: str | None = None
    metadata: dict[str, Any] = {}
    provenance: Provenance = Provenance()
    statistics: Statistics = Statistics()


class Hit(Record):
    """Hold one retrieved experience: cosine, final rank (0-based), probability of the choice."""

    experience: Experience
    score: float
    """The cosine; with ``bank.options.retrieval.hybrid`` its mean with the share of words."""
    rank: int = 0
    propensity: float = 1.0
    """Of a provisional entry, with the probability that its episode was admitted to such; of a
    trusted one, given how that draw ended."""
    provisional: bool = False
    """Whether the entry was not trusted yet (see ``bank.trust_after``)."""
    admitted: bool | None = None
    """The draw whether the episode may see provisional entries; None when none was made."""

    def use(
        self, how: How, *, episode: str = "", turn: int = 0, refinement: str | None = None
    ) -> Use:
        """Return the record of this hit reaching an actor."""
        shown = self.model_dump(include={"rank", "score", "propensity", "provisional", "admitted"})
        entry = {"experience_id": self.experience.id, "experience_version": self.experience.version}
        return Use(**entry, **shown, how=how, episode=episode, turn=turn, refinement=refinement)


class Answer(Record):
    """Hold an answer of ``search_and_ask``: refined text, source entry and use to credit.

    ``text`` is None when nothing fits; ``generation`` is None when the entry was not refined by a
    model.
    """

    text: str | None = None
    hit: Hit | None = None
    generation: Generation | None = None
    use: Use | None = None


class _Op(Record):
    span: tuple[int, int] | None = Field(default=None, exclude=True)
    """Characters of the response."""


class Add(_Op):
    """Write a new experience."""

    op: Literal["add"] = "add"
    text: str = Field(min_length=1)
    kind: str = "lesson"
    triples: tuple[tuple[str, str, str], ...] = ()
    """The same in subject, predicate and object (EvolveR)."""


class Update(_Op):
    """Rewrite the ``entry``-th experience shown (1-based)."""

    op: Literal["update"] = "update"
    entry: int = Field(ge=1)
    text: str = Field(min_length=1)


class Return(_Op):
    """Write nothing."""

    op: Literal["return"] = "return"


class Keep(_Op):
    """Keep entry ``entry`` (1-based) unchanged in a consolidation."""

    op: Literal["keep"] = "keep"
    entry: int = Field(ge=1)


class Merge(_Op):
    """Replace several entries (1-based) by one text in a consolidation."""

    op: Literal["merge"] = "merge"
    entries: tuple[int, ...] = Field(min_length=1)
    text: str = Field(min_length=1)


class Discard(_Op):
    """Drop entry ``entry`` (1-based) in a consolidation."""

    op: Literal["discard"] = "discard"
    entry: int = Field(ge=1)


Operation = Annotated[Add | Update | Return | Keep | Merge | Discard, Field(discriminator="op")]


class Refusal(Record):
    """Hold a refused part of an extractor's answer, and the reason."""

    reason: str
    text: str = ""


class ParsedOperations(Record):
    """Hold the accepted operations of a response and every refusal."""

    operations: tuple[Operation, ...] = ()
    refused: tuple[Refusal, ...] = ()


class Distillation(Record):
    """Hold the extractor's answer about one trajectory (or one chunk of a merge)."""

    parsed: ParsedOperations = ParsedOperations()
    generation: Generation | None = None
