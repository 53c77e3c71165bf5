"""Define the records that flow from an observation to a gradient.

Every type here is an immutable pydantic model, so that it can be journalled as JSON and checked at
each border. Nothing in this module imports another module of the package.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeGuard, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)


def new_id() -> str:
    """Return a fresh identifier: 32 hexadecimal characters."""
    return uuid.uuid4().hex


def whole(text: str) -> str:
    r"""Return text that UTF-8 can hold: half of a character, as models write it, becomes U+FFFD.

    >>> whole("cut \ud83d") == "cut \ufffd"
    True
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


Text = Annotated[str, AfterValidator(whole)]
"""Text that can be journalled, whatever a model or an environment wrote."""


class Record(BaseModel):
    """Provide the base of all records: immutable, unknown fields refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


R = TypeVar("R", bound=Record)


def read_record(kind: type[R], data: str) -> R:
    """Return a record from its JSON, without the fields that a later version added.

    >>> read_record(Usage, '{"cost": 0.5, "carbon": {"grams": 3}}').cost
    0.5

    Raises:
        ValueError: the JSON is not a record of this kind.
    """
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)
        if any(problem["type"] != "extra_forbidden" for problem in problems):
            raise
        kept: Any = json.loads(data)
        for problem in problems:
            *path, field = problem["loc"]
            place = kept
            for part in path:
                place = place[part]
            del place[field]
        return kind.model_validate_json(json.dumps(kept))


class Message(TypedDict):
    """Hold one chat message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    tool_calls: NotRequired[list[dict[str, Any]]]
    """Of an assistant: the calls that it made, as OpenAI writes them."""
    tool_call_id: NotRequired[str]
    """Of a tool: the call that it answers."""


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
    """Count what replies of a hosted model took; None is unknown: nobody reported it.

    Attributes:
        prompt_tokens: tokens read.
        completion_tokens: tokens written, reasoning included.
        cost: dollars.
    """

    prompt_tokens: int | None = Field(default=None, ge=0)
    completion_tokens: int | None = Field(default=None, ge=0)
    cost: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    def __add__(self, other: Usage) -> Usage:
        """Add up what is known of the two."""
        pairs = {name: (value, getattr(other, name)) for name, value in self}
        known = {name: [v for v in pair if v is not None] for name, pair in pairs.items()}
        return Usage(**{name: sum(found) if found else None for name, found in known.items()})


class Action(str):
    """Hold the text of an action, and what the reply took that chose it: a `str` for all others."""

    usage: Usage | None = None


class ToolCall(Record):
    """Hold one call of a tool that a model asks for."""

    id: str
    """By which the answer refers to it."""
    name: str
    arguments: str
    """JSON as the model wrote it, which may be damaged."""

    def action(self) -> str:
        """Return the call as JSON text, the form that wrappers read."""
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = self.arguments
        return json.dumps({"name": self.name, "arguments": arguments}, ensure_ascii=False)


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
    """Per response token, the token ids that it was drawn from, after constraint, top-k and top-p;
    an empty tuple means the whole vocabulary. None when nothing was excluded from any."""
    json_schema: str | None = None
    """Schema of the response; an empty tuple in ``allowed`` then means what it allows there."""
    policy: str = ""
    policy_version: int = 0
    """Optimiser steps the weights had seen."""
    finish_reason: FinishReason = FinishReason.STOP
    temperature: float = 1.0
    """Sampling temperature that ``logprobs`` were computed at."""
    usage: Usage | None = None
    """Tokens and cost as the server counts them; None where it does not, and for local backends."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of the tools that were offered, in order; the text may then be empty."""


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
    verdict: Verdict | None = None
    """What the actor said of the entry; rejected, it was not shown."""

    @model_validator(mode="before")
    @classmethod
    def _without_trust(cls, data: Any) -> Any:
        """Drop the fields that journals had while entries were on probation."""
        if isinstance(data, dict):
            known = cast("dict[str, Any]", data)
            return {k: v for k, v in known.items() if k not in ("provisional", "admitted")}
        return data


class Turn(Record):
    """Record one step of an episode: observation, action and result."""

    observation: Text
    action: Text
    reward: float = 0.0
    feedback: Text = ""
    """The observation that followed the action."""
    withheld: Text = ""
    """What the environment said of the action, not shown to the actor, only to a reflector."""
    invalid: bool = False


class Trajectory(Record):
    """Record one finished episode."""

    id: str = Field(default_factory=new_id)
    task: Text
    """What was asked, in words; the retrieval query."""
    task_id: Text = ""
    """The world or task family member, stable over seeds."""
    instance: Text = ""
    """World plus seed; entries made from it are hidden from evaluation on it."""
    group: str = ""
    """Identifier shared by the K episodes that started from one task and seed."""
    turns: tuple[Turn, ...] = ()
    reward: float = 0.0
    success: bool | None = None
    """Outcome R in {0, 1} of the paper; None: unknown, which counts as neither."""
    score: float | None = None
    """How good it was: what the caller or ``score=`` said, else the return; None: nobody said."""
    baseline: float | None = None
    """Mean score of the episodes of this task that the bank had recorded before; None: of none."""
    relative: bool = False
    """Whether ``success`` is what ``better`` says, by the caller's choice; the bank fills it in."""
    rubric: str = ""
    """What a judge goes by to say ``success`` after the episode; empty: no judge is asked."""
    judgement: str = ""
    """What the judge said, in words."""
    seed: int | None = None
    condition: Condition = Condition.GUIDED
    uses: tuple[Use, ...] = ()
    policy_version: int = 0
    usage: dict[str, Usage] = {}
    """Tokens and cost during the episode by role, ``actor`` or ``extractor``; a role is missing
    where nothing was reported."""
    error: Text | None = None
    """A named reason when the episode failed for a technical cause."""

    @property
    def better(self) -> bool | None:
        """Return whether the score was above the baseline; None if equal, or if one is missing."""
        if self.score is None or self.baseline is None or self.score == self.baseline:
            return None
        return self.score > self.baseline


class Provenance(Record):
    """Record the origin of an experience."""

    author: str = "human"
    """'human' or 'extractor'."""
    cause: str = "add"
    """'add', 'update', 'merge', 'dedupe', 'approve', 'import' or 'rollback'."""
    trajectory: str | None = None
    instance: str | None = None
    generation: str | None = None
    span: tuple[int, int] | None = None
    """Characters of the generation that wrote this text."""
    extractor_version: int | None = None
    parents: tuple[tuple[str, int], ...] = ()
    """(experience id, version) pairs."""
    commit: int | None = None
    said: int = 1
    """Times that extractors wrote exactly this text, from one episode each."""


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
    baseline: Literal["groups", "tasks"] = "groups"
    """Against free members of groups, or without any, against all episodes of the same tasks that
    saw no entry; ``groups`` counts such tasks then."""

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
    proposed: bool = False
    """Whether it waits for approval by a person (``bank.approve``); no search finds it."""
    provenance: Provenance = Provenance()
    statistics: Statistics = Statistics()


class Hit(Record):
    """Hold one retrieved experience: cosine, final rank (0-based), probability of the choice."""

    experience: Experience
    score: float
    """The cosine; with ``bank.options.retrieval.hybrid`` its mean with the share of words."""
    rank: int = 0
    propensity: float = 1.0

    def use(
        self, how: How, *, episode: str = "", turn: int = 0, refinement: str | None = None
    ) -> Use:
        """Return the record of this hit reaching an actor."""
        shown = self.model_dump(include={"rank", "score", "propensity"})
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
