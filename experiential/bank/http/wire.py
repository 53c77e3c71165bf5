"""What a bank server and its clients say to each other: for each operation the body asked with and the type answered.

An operation is ``POST /v1/NAME?namespace=...`` with a JSON body. A write may carry an
``Idempotency-Key``. Most operations are one method of a bank: the fields of the body are its
arguments, by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter

from experiential.bank.records import (
    Commit,
    DeadLetter,
    Difference,
    Duplicates,
    Explanation,
    LogEntry,
    Policy,
    Standing,
)
from experiential.errors import BankError, BankLockedError, ReadOnlyBankError
from experiential.types import (
    Distillation,
    Experience,
    Generation,
    Hit,
    Statistics,
    Trajectory,
    Uplift,
)

PREFIX = "/v1/"
KEY_HEADER = "Idempotency-Key"
LONGEST_PAGE = 1000
"""Entries of one page of a listing, at most."""
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (BankError, BankLockedError, ReadOnlyBankError, ValueError, TypeError, TimeoutError)
}
"""Errors that a client raises as the server named them; any other is a ``BankError`` there."""


def _listed(value: object) -> object:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ValueError(f"Expected texts to be a list of texts, got {value!r}")
    return list(value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]  (elements are checked next)


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


Listed = Annotated[list[str], BeforeValidator(_listed)]
"""Texts; a client may pass any iterable of them."""
Metadata = Annotated[dict[str, Any] | None, BeforeValidator(_plain)]
"""Facts about an entry; a client may pass any mapping."""


class Body(BaseModel):
    """Base of all request bodies: immutable, unknown fields and other types refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class At(Body):
    """Which picture of the bank to read: as it stood after ``commit``, with the counters known at commit ``seen``."""

    commit: int
    seen: int


class Nothing(Body):
    """No arguments."""


class Reading(Body):
    """Base of reads that can be asked of an earlier state, too; None reads the present."""

    at: At | None = None


class Info(Body):
    """What a bank is, how much it holds, and the secrets taken out of what was written since the server opened it, by kind."""

    entries: int
    head: int
    embedder: str
    redacted: dict[str, int]
    text_limit: int


class Named(Reading):
    """One entry."""

    id: str


class Versioned(Body):
    """One version of one entry."""

    id: str
    version: int


class Identified(Body):
    """One trajectory, generation or queue item."""

    id: str


class Committed(Body):
    """One commit."""

    commit: int


class Paged(Reading):
    """One page of a listing: the first without ``cursor``, the next with the cursor that came with the one before."""

    cursor: str | None = None
    limit: int = Field(default=LONGEST_PAGE, ge=1, le=LONGEST_PAGE)


class Page(Body):
    """Entries in order, and the cursor of the page after, None at the end. All pages of a listing show one moment."""

    entries: list[Experience]
    cursor: str | None


class Searched(Reading):
    """Queries, how many hits for each, the weight of words, a task instance to leave out, what entries must be (values by field)."""

    queries: list[str]
    k: int = 1
    hybrid: float = 0.0
    exclude_instance: str | None = None
    where: dict[str, Any] | None = None


class Compared(Reading):
    """Queries, how many entries for each, per query a task instance (or None) to leave out and what entries must be (or None).

    An empty ``where`` filters nothing; ``words`` asks for entries that share words with the query,
    too.
    """

    queries: list[str]
    n: int
    exclude: list[str | None]
    where: list[dict[str, Any] | None] = []
    words: bool = False


class Near(Hit):
    """An entry near a query, and the share of the query's words that it has, where words were asked for."""

    words: float = 0.0


class Texts(Body):
    """Texts to embed."""

    texts: list[str]


class Added(Body):
    """A new entry."""

    text: str
    task: str | None = None
    kind: str = "lesson"
    metadata: Metadata = None


class ManyAdded(Body):
    """Several new entries of one task."""

    texts: Listed
    task: str | None = None
    kind: str = "lesson"
    metadata: Metadata = None


class Updated(Body):
    """A new text of an entry."""

    id: str
    text: str


class Imported(Body):
    """Entries of an exported file and the file's name."""

    entries: list[Experience]
    ref: str


class Episode(Body):
    """A finished trajectory."""

    trajectory: Trajectory


class Distilled(Body):
    """An extractor's answer; ``spans`` are those of its operations, which their own JSON leaves out."""

    distillation: Distillation
    spans: list[list[int] | None]
    shown: list[Experience]
    trajectory: Trajectory | None = None
    item: str | None = None
    extractor_version: int | None = None


class Written(Body):
    """Entries that a distillation wrote, and what of it was refused, by reason."""

    entries: list[Experience]
    refused: dict[str, int]


class Generated(Body):
    """A generation to keep."""

    generation: Generation


class Retrieved(Body):
    """Ids of entries retrieved, once for each time."""

    ids: list[str]


class Failed(Body):
    """A failed attempt at a queue item."""

    id: str
    reason: str
    last: bool


class Measured(Body):
    """One version of one entry; None is the one that stands now."""

    id: str
    version: int | None = None


class Explained(Body):
    """An episode, or the id of a recorded one."""

    trajectory: Trajectory | str


class Chosen(Body):
    """One entry, or None for all."""

    id: str | None = None


class Between(Body):
    """Two commits."""

    a: int
    b: int


class Pruned(Body):
    """By what bounds to take entries out."""

    score: float | None = None
    uplift_below: float | None = None
    min_uses: int = 5
    dry_run: bool = False
    author: str = "human"


class Evicted(Body):
    """How many entries may stay, and who goes."""

    cap: int
    policy: Policy = "utility"
    seed: int = 0
    dry_run: bool = False
    author: str = "human"


class Compacted(Body):
    """What counts as a near-duplicate."""

    threshold: float = 0.95
    across_tasks: bool = False
    among: Listed | None = None
    dry_run: bool = False


class Judged(Body):
    """Near-duplicates found by the client: per group the survivor, then those merged into it."""

    groups: list[list[Versioned]]
    ref: str
    author: str = "human"


class Standings(Body):
    """An entry, and on how many tasks it must have helped; None asks what the bank asks."""

    id: str
    after: int | None = None


class Trusted(Body):
    """On how many tasks entries must have helped (None: what the bank asks), and by which commit (None: by now)."""

    after: int | None = None
    at: int | None = None


class After(Body):
    """Tasks on which an entry must have helped."""

    after: int


B = TypeVar("B", bound=Body)
R = TypeVar("R")


class Operation(Generic[B, R]):
    """One operation of a bank server.

    Args:
        name: in the address.
        body: what is asked.
        result: the type of what is answered.
        about: what it is for.
        writes: whether it may change the bank.
        method: what of a bank carries it out, such as "queue.state"; "" is the method called as the
            operation.
    """

    def __init__(
        self,
        name: str,
        body: type[B],
        result: Any,
        about: str,
        *,
        writes: bool = False,
        method: str = "",
    ) -> None:
        self.name = name
        self.body = body
        self.type = result
        self.result: TypeAdapter[R] = TypeAdapter(result)
        self.about = about
        self.writes = writes
        self.method = method or name


INFO: Operation[Reading, Info] = Operation(
    "info", Reading, Info, "How much the bank holds, and by what it is searched."
)
GET: Operation[Named, Experience | None] = Operation(
    "get", Named, Experience | None, "One entry, or null."
)
READ: Operation[Identified, Statistics] = Operation(
    "read", Identified, Statistics, "The counters of one entry."
)
ENTRIES: Operation[Paged, Page] = Operation(
    "entries", Paged, Page, "Entries, oldest first, in pages of one moment."
)
VERSION: Operation[Versioned, Experience | None] = Operation(
    "version", Versioned, Experience | None, "One version of one entry."
)
SEARCH: Operation[Searched, list[list[Hit]]] = Operation(
    "search", Searched, list[list[Hit]], "Hits of each query."
)
NEAREST: Operation[Compared, list[list[Near]]] = Operation(
    "nearest", Compared, list[list[Near]], "Nearest entries of each query."
)
EMBED: Operation[Texts, list[list[float]]] = Operation(
    "embed", Texts, list[list[float]], "The vector of each text."
)
COMMITS: Operation[Nothing, list[Commit]] = Operation(
    "commits", Nothing, list[Commit], "Every commit, oldest first."
)
AT: Operation[Committed, At] = Operation(
    "at", Committed, At, "What to send as `at` to read the bank as it stood after a commit."
)
GENERATION: Operation[Identified, Generation | None] = Operation(
    "generation", Identified, Generation | None, "One generation."
)
TRAJECTORY: Operation[Identified, Trajectory | None] = Operation(
    "trajectory", Identified, Trajectory | None, "One trajectory."
)
OUTCOMES: Operation[Versioned, list[int]] = Operation(
    "outcomes", Versioned, list[int], "1 or 0 for every use of a version."
)
LINEAGE: Operation[Versioned, list[tuple[str, int]]] = Operation(
    "lineage", Versioned, list[tuple[str, int]], "Every version that earns the outcome of this one."
)
QUEUE_STATE: Operation[Identified, str | None] = Operation(
    "queue_state", Identified, str | None, "The state of a queue item.", method="queue.state"
)
QUEUE_WAITING: Operation[Nothing, list[str]] = Operation(
    "queue_waiting",
    Nothing,
    list[str],
    "Items to be distilled, oldest first.",
    method="queue.waiting",
)
QUEUE_ATTEMPTS: Operation[Identified, int] = Operation(
    "queue_attempts", Identified, int, "Failed attempts at an item.", method="queue.attempts"
)
QUEUE_DEAD: Operation[Nothing, list[DeadLetter]] = Operation(
    "queue_dead",
    Nothing,
    list[DeadLetter],
    "Items that were given up.",
    method="queue.dead_letters",
)
UPLIFT: Operation[Measured, Uplift] = Operation(
    "uplift", Measured, Uplift, "How one entry version did."
)
WHY: Operation[Explained, Explanation] = Operation(
    "why", Explained, Explanation, "What an episode was shown, and what came of it."
)
HISTORY: Operation[Chosen, list[LogEntry]] = Operation(
    "history", Chosen, list[LogEntry], "Commits with what each changed."
)
DIFF: Operation[Between, Difference] = Operation(
    "diff", Between, Difference, "What differs between two commits."
)
STANDING: Operation[Standings, Standing] = Operation(
    "standing", Standings, Standing, "How far an entry is trusted."
)
TRUSTED: Operation[Trusted, list[Experience]] = Operation(
    "trusted", Trusted, list[Experience], "The entries that are trusted."
)
TRUSTED_VERSIONS: Operation[After, list[tuple[str, int]]] = Operation(
    "trusted_versions",
    After,
    list[tuple[str, int]],
    "Every entry version that is trusted, whether it stands now or not.",
)
TRUST_AFTER: Operation[Nothing, int] = Operation(
    "trust_after", Nothing, int, "On how many tasks entries must have helped; 0 trusts all."
)

ADD: Operation[Added, Experience] = Operation(
    "add", Added, Experience, "Write a new entry.", writes=True
)
ADD_MANY: Operation[ManyAdded, list[Experience]] = Operation(
    "add_many", ManyAdded, list[Experience], "Write several entries in one commit.", writes=True
)
UPDATE: Operation[Updated, Experience] = Operation(
    "update", Updated, Experience, "Write the next version of an entry.", writes=True
)
REMOVE: Operation[Identified, None] = Operation(
    "remove", Identified, None, "Take an entry out.", writes=True
)
ROLLBACK: Operation[Committed, Commit] = Operation(
    "rollback", Committed, Commit, "Stand as after an earlier commit.", writes=True
)
IMPORT: Operation[Imported, int] = Operation(
    "import",
    Imported,
    int,
    "Add entries of an exported file.",
    writes=True,
    method="import_entries",
)
RECORD: Operation[Episode, bool] = Operation(
    "record", Episode, bool, "Journal a trajectory and its uses.", writes=True
)
SUBMIT: Operation[Episode, bool] = Operation(
    "submit", Episode, bool, "Record a trajectory and queue it.", writes=True
)
APPLY: Operation[Distilled, Written] = Operation(
    "apply", Distilled, Written, "Write what was distilled.", writes=True
)
CONSOLIDATE: Operation[Distilled, Written] = Operation(
    "consolidate", Distilled, Written, "Write what was merged.", writes=True
)
KEEP_GENERATION: Operation[Generated, None] = Operation(
    "keep_generation", Generated, None, "Journal a generation.", writes=True
)
NOTE_RETRIEVALS: Operation[Retrieved, None] = Operation(
    "note_retrievals", Retrieved, None, "Count retrievals.", writes=True
)
SAVE_COUNTERS: Operation[Nothing, None] = Operation(
    "save_counters", Nothing, None, "Journal the retrieval counts.", writes=True
)
QUEUE_FAIL: Operation[Failed, int] = Operation(
    "queue_fail",
    Failed,
    int,
    "Count a failed attempt at an item.",
    writes=True,
    method="queue.fail",
)
QUEUE_REQUEUE: Operation[Identified, bool] = Operation(
    "queue_requeue",
    Identified,
    bool,
    "Give a dead letter a new life.",
    writes=True,
    method="queue.requeue",
)
PRUNE: Operation[Pruned, list[Experience]] = Operation(
    "prune", Pruned, list[Experience], "Take out entries that did not help.", writes=True
)
EVICT: Operation[Evicted, list[Experience]] = Operation(
    "evict", Evicted, list[Experience], "Take out what is above a cap.", writes=True
)
DEDUPLICATE: Operation[Compacted, list[Duplicates]] = Operation(
    "deduplicate", Compacted, list[Duplicates], "Merge near-duplicates.", writes=True
)
MERGE_DUPLICATES: Operation[Judged, list[Duplicates]] = Operation(
    "merge_duplicates",
    Judged,
    list[Duplicates],
    "Merge the groups that a client found.",
    writes=True,
)
SET_TRUST_AFTER: Operation[After, None] = Operation(
    "set_trust_after", After, None, "Note on how many tasks.", writes=True
)
OPERATIONS: list[Operation[Any, Any]] = [
    value for value in list(vars().values()) if isinstance(value, Operation)
]
"""All of them."""
