"""What a bank server and its clients say to each other: for each operation the body asked with and the type answered.

An operation is ``POST /v1/NAME?namespace=...`` with a JSON body. A write may carry an ``Idempotency-Key``.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from experiential.bank.history import Commit
from experiential.bank.queue import DeadLetter
from experiential.errors import BankError, BankLockedError, ReadOnlyBankError
from experiential.types import Distillation, Experience, Generation, Hit, Statistics, Trajectory

PREFIX = "/v1/"
KEY_HEADER = "Idempotency-Key"
LONGEST_PAGE = 1000
"""Entries of one page of a listing, at most."""
ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (BankError, BankLockedError, ReadOnlyBankError, ValueError, TypeError, TimeoutError)
}
"""Errors that a client raises as the server named them; any other is a ``BankError`` there."""


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


class Listed(Reading):
    """One page of a listing: the first without ``cursor``, the next with the cursor that came with the one before."""

    cursor: str | None = None
    limit: int = Field(default=LONGEST_PAGE, ge=1, le=LONGEST_PAGE)


class Page(Body):
    """Entries in order, and the cursor of the page after, None at the end. All pages of a listing show one moment."""

    entries: list[Experience]
    cursor: str | None


class Searched(Reading):
    """Queries, how many hits for each, and a task instance to leave out."""

    queries: list[str]
    k: int = 1
    exclude_instance: str | None = None


class Compared(Reading):
    """Queries, how many entries for each, and one task instance (or None) to leave out per query."""

    queries: list[str]
    n: int
    exclude: list[str | None]


class Texts(Body):
    """Texts to embed."""

    texts: list[str]


class Added(Body):
    """A new entry."""

    text: str
    task: str | None = None
    kind: str = "lesson"
    metadata: dict[str, Any] | None = None


class ManyAdded(Body):
    """Several new entries of one task."""

    texts: list[str]
    task: str | None = None
    kind: str = "lesson"
    metadata: dict[str, Any] | None = None


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


B = TypeVar("B", bound=Body)
R = TypeVar("R")


class Operation(Generic[B, R]):
    """One operation: its name, its body, the type of its result, whether it writes, and what it is for."""

    def __init__(self, name: str, body: type[B], result: Any, about: str, *, writes: bool = False) -> None:
        self.name = name
        self.body = body
        self.type = result
        self.result: TypeAdapter[R] = TypeAdapter(result)
        self.about = about
        self.writes = writes


INFO: Operation[Reading, Info] = Operation("info", Reading, Info, "How much the bank holds, and by what it is searched.")
GET: Operation[Named, Experience | None] = Operation("get", Named, Experience | None, "One entry, or null.")
READ: Operation[Identified, Statistics] = Operation("read", Identified, Statistics, "The counters of one entry.")
ENTRIES: Operation[Listed, Page] = Operation("entries", Listed, Page, "Entries, oldest first, in pages of one moment.")
VERSION: Operation[Versioned, Experience | None] = Operation("version", Versioned, Experience | None, "One version of one entry.")
SEARCH: Operation[Searched, list[list[Hit]]] = Operation("search", Searched, list[list[Hit]], "Hits of each query.")
NEAREST: Operation[Compared, list[list[Hit]]] = Operation("nearest", Compared, list[list[Hit]], "Nearest entries of each query.")
EMBED: Operation[Texts, list[list[float]]] = Operation("embed", Texts, list[list[float]], "The vector of each text.")
COMMITS: Operation[Nothing, list[Commit]] = Operation("commits", Nothing, list[Commit], "Every commit, oldest first.")
AT: Operation[Committed, At] = Operation("at", Committed, At, "What to send as `at` to read the bank as it stood after a commit.")
GENERATION: Operation[Identified, Generation | None] = Operation("generation", Identified, Generation | None, "One generation.")
TRAJECTORY: Operation[Identified, Trajectory | None] = Operation("trajectory", Identified, Trajectory | None, "One trajectory.")
OUTCOMES: Operation[Versioned, list[int]] = Operation("outcomes", Versioned, list[int], "1 or 0 for every use of a version.")
LINEAGE: Operation[Versioned, list[tuple[str, int]]] = Operation(
    "lineage", Versioned, list[tuple[str, int]], "Every version that earns the outcome of this one."
)
QUEUE_STATE: Operation[Identified, str | None] = Operation("queue_state", Identified, str | None, "The state of a queue item.")
QUEUE_WAITING: Operation[Nothing, list[str]] = Operation("queue_waiting", Nothing, list[str], "Items to be distilled, oldest first.")
QUEUE_ATTEMPTS: Operation[Identified, int] = Operation("queue_attempts", Identified, int, "Failed attempts at an item.")
QUEUE_DEAD: Operation[Nothing, list[DeadLetter]] = Operation("queue_dead", Nothing, list[DeadLetter], "Items that were given up.")

ADD: Operation[Added, Experience] = Operation("add", Added, Experience, "Write a new entry.", writes=True)
ADD_MANY: Operation[ManyAdded, list[Experience]] = Operation(
    "add_many", ManyAdded, list[Experience], "Write several entries in one commit.", writes=True
)
UPDATE: Operation[Updated, Experience] = Operation("update", Updated, Experience, "Write the next version of an entry.", writes=True)
REMOVE: Operation[Identified, None] = Operation("remove", Identified, None, "Take an entry out.", writes=True)
ROLLBACK: Operation[Committed, Commit] = Operation("rollback", Committed, Commit, "Stand as after an earlier commit.", writes=True)
IMPORT: Operation[Imported, int] = Operation("import", Imported, int, "Add entries of an exported file.", writes=True)
RECORD: Operation[Episode, bool] = Operation("record", Episode, bool, "Journal a trajectory and its uses.", writes=True)
SUBMIT: Operation[Episode, bool] = Operation("submit", Episode, bool, "Record a trajectory and queue it.", writes=True)
APPLY: Operation[Distilled, Written] = Operation("apply", Distilled, Written, "Write what was distilled.", writes=True)
CONSOLIDATE: Operation[Distilled, Written] = Operation("consolidate", Distilled, Written, "Write what was merged.", writes=True)
KEEP_GENERATION: Operation[Generated, None] = Operation("keep_generation", Generated, None, "Journal a generation.", writes=True)
NOTE_RETRIEVALS: Operation[Retrieved, None] = Operation("note_retrievals", Retrieved, None, "Count retrievals.", writes=True)
SAVE_COUNTERS: Operation[Nothing, None] = Operation("save_counters", Nothing, None, "Journal the retrieval counts.", writes=True)
QUEUE_FAIL: Operation[Failed, int] = Operation("queue_fail", Failed, int, "Count a failed attempt at an item.", writes=True)
QUEUE_REQUEUE: Operation[Identified, bool] = Operation("queue_requeue", Identified, bool, "Give a dead letter a new life.", writes=True)
