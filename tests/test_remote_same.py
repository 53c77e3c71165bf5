"""A bank behind a server does what a folder's bank does: each public method is told on both, and
all that they gave is compared.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest
from pydantic import BaseModel

import experiential as xp
from experiential.bank.folder import FolderBank
from experiential.bank.http import wire
from experiential.bank.http.client import RemoteBank, RemoteQueue, RemoteView
from experiential.bank.protocol import Bank, Queue, View
from experiential.bank.records import Asked
from experiential.bank.state import BankView
from experiential.bank.storage.tables import DistillationQueue
from experiential.errors import BankError
from experiential.types import Condition, Generation, ParsedOperations, Use
from tests.test_serve import serving

ID = re.compile(r"\b[0-9a-f]{32}\b")
NOT_OVER_HTTP = {
    "fork": "a journal is copied where it is; export() and import_() carry entries",
    "rebuild": "the index is the server's: experiential bank rebuild",
    "flush_index": "the index is the server's",
    "damage": "what was found when a folder was opened",
    "ids": "for the short ids of listings, which read a folder",
    "episodes": "for `experiential episodes` and `ui`, which read a folder",
    "used_in": "for `experiential episodes` and `ui`, which read a folder",
}
NOT_METHODS = {
    "RESIDENT_LIMIT": "a constant of the class, of the process that has the index",
    "MAPPED_FROM": "a constant of the class, of the process that writes the folder",
}
OF_A_FOLDER = {"nearest": "inside search", "counters": "inside search"} | NOT_METHODS


class World(NamedTuple):
    """A bank with a little history, and what a scenario needs to ask about it."""

    bank: Any
    folder: Path
    entries: list[xp.Experience]
    episodes: list[xp.Trajectory]

    @property
    def first(self) -> xp.Experience:
        return self.entries[0]


def episode(
    entry: xp.Experience | None, *, success: bool, group: str = "", task: str = "open the door"
) -> xp.Trajectory:
    uses = (
        ()
        if entry is None
        else (Use(experience_id=entry.id, experience_version=entry.version, score=0.5),)
    )
    return xp.Trajectory(
        task=task,
        task_id=task,
        instance=f"{task}#1",
        group=group,
        turns=(xp.Turn(observation="a door", action="pull"),),
        uses=uses,
        success=success,
        condition=Condition.FREE if entry is None else Condition.GUIDED,
    )


def distillation(*operations: Any) -> xp.Distillation:
    return xp.Distillation(
        parsed=ParsedOperations(operations=operations),
        generation=Generation(text="raw", policy_version=3),
    )


def world(bank: Any, folder: Path) -> World:
    entries = [
        bank.add(
            "use the brass key",
            task="open the door",
            kind="warning",
            metadata={"n": 1, "deep": {"x": [1, None]}},
        ),
        *bank.add_many(
            text for text in ("bake bread at noon", "push the lever down", "push the lever down!")
        ),
    ]
    bank.update(entries[1].id, "bake bread at night")
    episodes = [
        episode(entries[0], success=True, group="g1"),
        episode(None, success=False, group="g1"),
        episode(entries[0], success=True, group="g2", task="leave the house"),
        episode(None, success=True, group="g2", task="leave the house"),
        episode(entries[2], success=False),
    ]
    for one in episodes:
        bank.record(one)
    return World(bank, folder, entries, episodes)


# Told to both, by method. What a scenario gives is compared, and so is the bank that it leaves.


def _apply(w: World) -> Any:
    ended, told = (
        w.episodes[0],
        distillation(
            xp.Add(text="pull", span=(3, 9)),
            xp.Update(entry=1, text="oil the key"),
            xp.Update(entry=7, text="x"),
        ),
    )
    queued = w.bank.submit(ended)
    written = w.bank.apply(
        told, trajectory=ended, shown=[w.first], item=ended.id, extractor_version=9
    )
    again = w.bank.apply(told, trajectory=ended, shown=[w.first], item=ended.id)
    other = xp.Update(entry=1, text="leave the house by the window")
    moved = w.bank.apply(distillation(other), trajectory=w.episodes[2], shown=[w.first])
    return (
        queued,
        written,
        again,
        [(one.version, one.task) for one in moved] == [(3, "leave the house")],
        dict(w.bank.refused),
        w.bank.queue.state(ended.id),
        w.bank.generation(told.generation.id),
    )


def _consolidate(w: World) -> Any:
    told = distillation(
        xp.Merge(entries=(1, 2), text="key and lever", span=(0, 4)), xp.Discard(entry=3)
    )
    return w.bank.consolidate(
        told, shown=[w.entries[0], w.entries[2], w.entries[3]], extractor_version=2
    ), dict(w.bank.refused)


def _keep_generation(w: World) -> Any:
    w.bank.keep_generation(
        kept := Generation(text="refined", response_ids=(1, 2), logprobs=(-0.5, -0.25))
    )
    return w.bank.generation(kept.id) == kept


def _counted(w: World) -> Any:
    w.bank.note_retrievals([w.first.id, w.entries[2].id, w.first.id])
    w.bank.save_counters()
    return w.bank.get(w.first.id).statistics, w.bank.read(w.first)


def _backed_up(world: World) -> Any:
    copy = world.folder / f"copy of {type(world.bank).__name__}"
    world.bank.backup(copy)
    with FolderBank(copy, namespace=world.bank.namespace, read_only=True) as bank:
        assert len(bank) == len(world.entries)
        return list(bank)


def _moved(w: World) -> Any:
    written = [w.bank.export(w.folder / "out.jsonl"), w.bank.export(w.folder / "out.md")]
    w.bank.rollback(0)
    return [
        *written,
        w.bank.import_(w.folder / "out.jsonl"),
        w.bank.import_(w.folder / "out.md"),
        list(w.bank),
    ]


def _deduplicate(w: World) -> Any:
    asked: list[tuple[str, str]] = []

    def judge(older: xp.Experience, newer: xp.Experience) -> bool:
        asked.append((older.text, newer.text))
        return True

    planned = w.bank.deduplicate(0.9, dry_run=True)
    refused = w.bank.deduplicate(0.9, lambda older, newer: False)
    among = w.bank.deduplicate(0.9, among=(w.first.id,), across_tasks=True)
    return (
        planned,
        refused,
        among,
        w.bank.deduplicate(0.9, judge, dry_run=True),
        w.bank.deduplicate(0.9, judge),
        asked,
        list(w.bank),
    )


def _queue(w: World) -> Any:
    ended = w.episodes[0]
    queue = w.bank.queue
    submitted = [
        w.bank.submit(ended),
        w.bank.submit(ended),
        queue.waiting() == [ended.id],
        queue.state("nobody"),
    ]
    w.bank.submit(w.episodes[1], holder="a")
    leased = [
        queue.lease("b", 9, keep=[w.episodes[1].id]) == [ended.id],
        queue.lease("a", 9),
        queue.release("b"),
        queue.lease("a", 0),
        queue.lease("a", 1, seconds=5) == [ended.id],
        queue.counts(),
    ]
    failed = [
        queue.fail(ended.id, "timeout", last=False),
        queue.fail(ended.id, "again", last=True),
        queue.attempts(ended.id),
    ]
    return (
        submitted,
        leased,
        failed,
        queue.dead_letters(),
        queue.requeue("nobody"),
        queue.requeue(ended.id),
        queue.lease("b", 9) == [ended.id],  # nobody holds what was given up
        queue.state(ended.id),
    )


def _episode(w: World) -> Any:
    with w.bank.episode("open the door", k=2) as played:
        played.record("a door", "pull", 1.0)
        said = played.tool({"query": "open the door"})
        ended = played.finish(success=True)
    with pytest.raises(ZeroDivisionError), w.bank.episode("open the door") as broken:
        _ = 1 / 0
    assert w.bank.trajectory(broken.id) == broken.trajectory
    return (
        played.advice,
        said,
        [hit.model_dump(exclude={"experience"}) for hit in played.hits],
        ended.uses,
        w.bank.trajectory(ended.id) == ended,
        w.bank.queue.waiting() == [ended.id],
        w.bank.outcomes(w.first.id, w.first.version),
    )


def _standings(w: World) -> Any:
    late = w.bank.add("knock first", task="open the door")
    for _ in range(9):
        w.bank.record(episode(late, success=False))
        w.bank.record(episode(None, success=True))
    asked = [Asked(id=one.id, version=1) for one in (*w.entries, late)]
    near = [Asked(id=late.id, version=1, relevance=0.5), Asked(id=late.id, version=1, relevance=1)]
    return w.bank.standings(asked + near), w.bank.standings([]), w.bank.uplift(late.id)


def _standings_near(w: World) -> Any:
    for outcome in (True, False, None):
        w.bank.record(episode(w.first, success=outcome))
        w.bank.record(episode(None, success=True))
    found = w.bank.standings_near("open the door", [(one, 0.9) for one in w.entries])
    return [one.model_copy(update={"age": 0}) for one in found]


def _approve(w: World) -> Any:
    told = distillation(xp.Add(text="knock first"), xp.Update(entry=1, text="oil the key"))
    ended = w.episodes[0]
    new, other = w.bank.apply(told, trajectory=ended, shown=[w.first], review=True)
    hidden = [hit.experience.text for hit in w.bank.search("knock first oil the key", k=9)]
    approved = w.bank.approve(new.id), w.bank.approve(other.id)
    shown = [hit.experience.text for hit in w.bank.search("knock first oil the key", k=9)]
    with pytest.raises(BankError, match="Expected the id of a proposed entry"):
        w.bank.approve(new.id)
    return new.proposed, hidden, approved, shown, len(w.bank)


SCENARIOS: dict[str, Callable[[World], Any]] = {
    "add": lambda w: [
        w.bank.add("x"),
        w.bank.add("y", task="t", kind="k", metadata={"deep": {"x": [1, None]}}),
    ],
    "add_many": lambda w: [w.bank.add_many(("x", "y"), task="t"), w.bank.add_many([])],
    "update": lambda w: [
        w.bank.update(w.first.id, "use the silver key"),
        w.bank.version(w.first.id, 1),
        w.bank.get(w.first.id),
    ],
    "remove": lambda w: [
        w.bank.remove(w.first.id),
        w.bank.get(w.first.id),
        w.bank.version(w.first.id, 1),
    ],
    "get": lambda w: [w.bank.get(w.first.id), w.bank.get("nobody")],
    "entries": lambda w: [w.bank.entries(), list(w.bank), len(w.bank)],
    "version": lambda w: [w.bank.version(w.entries[1].id, 1), w.bank.version(w.entries[1].id, 9)],
    "read": lambda w: w.bank.read(w.entries[2]),
    "search": lambda w: [
        w.bank.search("brass key", k=2),
        w.bank.search(["lever", "key"], k=1),
        w.bank.search([]),
        w.bank.search(("lever",), exclude_instance="open the door#1"),
        w.bank.search("the brass lever", k=3, hybrid=0.5),
        w.bank.search(["lever", "key"], k=2, hybrid=1, where={"kind": "warning"}),
    ],
    "commits": lambda w: w.bank.commits(),
    "namespace": lambda w: len(w.bank.namespace),
    "read_only": lambda w: [w.bank.read_only, "writes"],
    "refused": lambda w: [dict(w.bank.refused), "since opening"],
    "head": lambda w: w.bank.head - w.bank.commits()[0].id,
    "at": lambda w: [
        view := w.bank.at(w.bank.commits()[1].id),
        len(view),
        view.get(w.first.id),
        view.search("key"),
        view.search("key", hybrid=0.5),
        w.bank.at(0),
    ],
    "snapshot": lambda w: [w.bank.snapshot(), w.bank.remove(w.first.id), len(w.bank)],
    "rollback": lambda w: [w.bank.rollback(w.bank.commits()[0].id), list(w.bank)],
    "generation": lambda w: w.bank.generation("nobody"),
    "trajectory": lambda w: [w.bank.trajectory(w.episodes[0].id), w.bank.trajectory("nobody")],
    "outcomes": lambda w: [w.bank.outcomes(w.first.id, 1), w.bank.outcomes("nobody", 1)],
    "record": lambda w: [
        w.bank.record(one := episode(w.first, success=True)),
        w.bank.record(one),
        w.bank.get(w.first.id),
    ],
    "conclude": lambda w: [
        w.bank.record(one := episode(w.first, success=True).model_copy(update={"success": None})),
        w.bank.conclude(one.id, False, judgement="it fell"),
        w.bank.conclude(one.id, True),
        w.bank.trajectory(one.id),
        w.bank.get(w.first.id),
    ],
    "submit": _queue,
    "episode": _episode,
    "queue": _queue,
    "text_limit": lambda w: [w.bank.text_limit, w.bank.namespace],
    "submit_many": lambda w: [
        w.bank.submit_many([w.episodes[0], w.episodes[0]]),
        w.bank.submit_many([w.episodes[1]], holder="a"),
        len(w.bank.queue.lease("b", 9)),
        w.bank.submit_many([episode(w.first, success=False)], distil=False),
        w.bank.queue.waiting(),
    ],
    "apply": _apply,
    "consolidate": _consolidate,
    "lineage": lambda w: [
        (new := _consolidate(w)[0][0]) and w.bank.lineage(new.id, 1),
        w.bank.lineage(w.first.id, 1),
    ],
    "keep_generation": _keep_generation,
    "note_retrievals": _counted,
    "save_counters": _counted,
    "backup": _backed_up,
    "export": _moved,
    "import_": _moved,
    "import_entries": lambda w: [
        w.bank.import_entries([xp.Experience(text="brought"), w.first], "a file"),
        list(w.bank),
    ],
    "uplift": lambda w: [w.bank.uplift(w.first.id), w.bank.uplift(w.entries[1].id, 1)],
    "why": lambda w: [
        w.bank.why(w.episodes[0]),
        w.bank.why(w.episodes[0].id),
        w.bank.why(w.episodes[4].id),
    ],
    "history": lambda w: [w.bank.history(), w.bank.history(w.entries[1].id)],
    "diff": lambda w: [
        w.bank.diff(0, w.bank.head),
        w.bank.diff(w.bank.head, w.bank.commits()[0].id),
        w.bank.diff(w.bank.head, w.bank.head),
    ],
    "prune": lambda w: [
        w.bank.prune(score=0.5, min_uses=1, dry_run=True),
        w.bank.prune(uplift_below=-0.5, min_uses=0),
        w.bank.prune(score=0.5, min_uses=1),
        list(w.bank),
    ],
    "evict": lambda w: (
        [
            w.bank.evict(1, policy, seed=0, dry_run=True)
            for policy in ("lru", "fifo", "utility", "subject")
        ]
        + [w.bank.evict(1, per_task=True, dry_run=True)]
        + [w.bank.evict(2, "utility", author="me"), w.bank.evict(2), len(w.bank)]
    ),
    "deduplicate": _deduplicate,
    "merge_duplicates": lambda w: [
        w.bank.merge_duplicates(w.bank.deduplicate(0.9, dry_run=True), "looked at"),
        w.bank.merge_duplicates([]),
    ],
    "standings": _standings,
    "standings_near": _standings_near,
    "approve": _approve,
    "embedder": lambda w: [w.bank.embedder.id, w.bank.embedder(["red door", "key"]).round(5)],
    "redacted": lambda w: [
        dict(w.bank.redacted),
        w.bank.add("the token is sk-" + "a1B2c3D4" * 5),
        dict(w.bank.redacted),
    ],
    "close": lambda w: [w.bank.close(), w.bank.close()],
    "closed": lambda w: [w.bank.closed, w.bank.close(), w.bank.closed],
}
ERRORS: dict[str, Callable[[World], Any]] = {
    "blank text": lambda w: w.bank.add(" "),
    "blank kind": lambda w: w.bank.add("x", kind=""),
    "one text for many": lambda w: w.bank.add_many("text"),
    "blank id": lambda w: w.bank.get(" "),
    "blank query": lambda w: w.bank.search(""),
    "no hits": lambda w: w.bank.search("x", k=0),
    "no weight": lambda w: w.bank.search("x", hybrid=1.5),
    "update nobody": lambda w: w.bank.update("nobody", "x"),
    "remove nobody": lambda w: w.bank.remove("nobody"),
    "at no commit": lambda w: w.bank.at("first"),
    "import what is not there": lambda w: w.bank.import_(w.folder / "missing.jsonl"),
    "uplift of nobody": lambda w: w.bank.uplift("nobody"),
    "uplift of no version": lambda w: w.bank.uplift(w.first.id, 7),
    "why of nothing": lambda w: w.bank.why("nobody"),
    "history of nobody": lambda w: w.bank.history("nobody"),
    "diff of no commit": lambda w: w.bank.diff(0, "last"),
    "prune by nothing": lambda w: w.bank.prune(),
    "prune by less than nothing": lambda w: w.bank.prune(score=0.1, min_uses=-1),
    "evict below nothing": lambda w: w.bank.evict(-1),
    "no threshold": lambda w: w.bank.deduplicate(0.0),
    "no threshold for a judge": lambda w: w.bank.deduplicate(0.0, lambda older, newer: True),
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("served"), embedder="hashing") as url:
        yield url


_names = count()


@pytest.fixture(params=["http", "process"])
def both(url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[World, World]]:
    """Two banks with the same little history: a folder's own, and one behind the server, or the
    handle that another process would have of a folder's.
    """
    name = f"namespace {next(_names)}"
    with ExitStack() as stack:
        options: dict[str, Any] = {"namespace": name, "embedder": "hashing"}
        local = stack.enter_context(xp.ExperienceBank(tmp_path / "local", **options))
        if request.param == "http":
            far = stack.enter_context(xp.ExperienceBank(url, namespace=name))
        else:
            owned = stack.enter_context(xp.ExperienceBank(tmp_path / "owned", **options))
            _, (line, (kind, arguments)) = owned.__reduce__()
            far = stack.enter_context(kind(line, **arguments))
        assert isinstance(far, RemoteBank) and isinstance(local, FolderBank)
        yield world(local, tmp_path), world(far, tmp_path)


def plain(value: Any) -> Any:
    """A result as JSON-like values; a view is its entries, a number is rounded, and times are left
    out.
    """
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items() if key != "time"}
    if isinstance(value, (BankView, RemoteView, Iterator)):
        return [plain(one) for one in (value if isinstance(value, Iterator) else value.entries())]
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return round(value, 5) if isinstance(value, float) else value


def told(w: World, scenario: Callable[[World], Any]) -> str:
    """What a scenario gives and what it leaves, with ids and commits renamed in the order in which
    they are met.
    """
    first = w.bank.commits()[0].id - 1
    result = plain(scenario(w))
    left = [] if w.bank.closed else [plain(list(w.bank)), plain(w.bank.history())]
    return _renamed(repr(_counted_from(first, [result, left])))


def _renamed(text: str) -> str:
    names: dict[str, str] = {}
    return ID.sub(lambda found: names.setdefault(found.group(), f"#{len(names)}"), text)


def _counted_from(first: int, value: Any) -> Any:
    """Commits numbered from the first of this bank: a journal of several namespaces numbers theirs
    together.
    """
    if isinstance(value, list):
        return [_counted_from(first, one) for one in value]
    if not isinstance(value, dict):
        return value
    is_commit = "cause" in value and "ref" in value
    if is_commit and value["cause"] == "rollback" and value["ref"] != "0":
        value = {**value, "ref": str(int(value["ref"]) - first)}
    return {
        key: (
            one - first
            if isinstance(one, int) and (key == "commit" or (key == "id" and is_commit))
            else _counted_from(first, one)
        )
        for key, one in value.items()
    }


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_served_bank_gives_what_a_folder_gives(name: str, both: tuple[World, World]) -> None:
    local, far = both
    expected = told(local, SCENARIOS[name])
    assert told(far, SCENARIOS[name]) == expected
    assert len(expected) > 10


@pytest.mark.parametrize("name", ERRORS)
def test_a_served_bank_refuses_what_a_folder_refuses_in_the_same_words(
    name: str, both: tuple[World, World]
) -> None:
    said: list[tuple[type[BaseException], str]] = []
    for one in both:
        with pytest.raises((BankError, ValueError)) as refused:
            ERRORS[name](one)
        said.append((refused.type, _renamed(str(refused.value))))
    local, far = (re.sub(r"0 to \d+", "0 to n", words) for _, words in said)
    assert said[0][0] is said[1][0] and local == far


# That nothing is left out


def public(kind: type) -> set[str]:
    """The public methods and properties of a class, and the attributes that it declares."""
    declared = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
    return {name for name in {*dir(kind), *declared} if not name.startswith("_")}


@pytest.mark.parametrize("query", ["key", ["key", "door"]])
def test_a_search_of_a_served_bank_is_one_request(
    query: Any, both: tuple[World, World], monkeypatch: pytest.MonkeyPatch
) -> None:
    far = both[1].bank
    assert isinstance(far, RemoteBank)
    sent: list[str] = []
    send = RemoteView.send
    monkeypatch.setattr(
        RemoteView,
        "send",
        lambda self, name, **values: (sent.append(name), send(self, name, **values))[1],
    )
    found = far.search(query, k=2, hybrid=0.5)
    assert found and sent == ["search"]


def test_a_view_knows_its_commit(both: tuple[World, World]) -> None:
    for one in both:
        assert one.bank.snapshot().commit == one.bank.commits()[-1].id  # type: ignore[attr-defined]


def test_an_item_is_queued_once(both: tuple[World, World]) -> None:
    local = both[0].bank
    assert isinstance(local, FolderBank)
    assert [local.queue.put("new"), local.queue.put("new")] == [True, False]


def test_every_public_method_is_told_or_is_excused() -> None:
    assert set(SCENARIOS) | set(OF_A_FOLDER) - set(NOT_METHODS) == public(Bank)
    assert public(RemoteBank) - {"send"} == public(Bank)
    assert public(FolderBank) == public(Bank) | set(NOT_OVER_HTTP) | set(NOT_METHODS)


def is_stub(method: Any) -> bool:
    """Whether a method, or the getter of a property, does nothing: ``...`` is all of its body."""

    def stub(self: Any) -> None:
        """Nothing."""
        ...

    function = method.fget if isinstance(method, property) else method
    return function.__code__.co_code == stub.__code__.co_code


CONTRACTS = [
    (FolderBank, Bank),
    (RemoteBank, Bank),
    (DistillationQueue, Queue),
    (RemoteQueue, Queue),
    (BankView, View),
    (RemoteView, View),
]


@pytest.mark.parametrize(("own", "contract"), CONTRACTS)
def test_every_method_of_the_contract_is_there_with_its_arguments(
    own: type, contract: type
) -> None:
    for name in public(contract) & set(dir(contract)):
        told, made = getattr(contract, name), getattr(own, name)
        assert made is not told or not is_stub(told), f"{name} is the stub of the protocol"
        if callable(told) and name != "search":
            assert inspect.signature(told).parameters == inspect.signature(made).parameters, name


def test_neither_bank_is_a_kind_of_the_other() -> None:
    assert not issubclass(RemoteBank, FolderBank) and not issubclass(FolderBank, RemoteBank)


METHODS = {
    operation.name: getattr(
        Queue if ".queue." in operation.path else Bank, operation.path.rpartition(".")[2]
    )
    for operation in wire.OPERATIONS.values()
    if operation.path.startswith("bank.")
}


@pytest.mark.parametrize("name", METHODS)
def test_an_operation_that_is_a_method_has_its_arguments_and_its_result(name: str) -> None:
    """A body that lacked an argument would answer as if nobody had passed it."""
    operation, method = wire.OPERATIONS[name], METHODS[name]
    parameters = {
        one.name: one.default
        for one in inspect.signature(method).parameters.values()
        if one.name not in ("self", "key")  # the key is a header
    }
    fields = {
        field: inspect.Parameter.empty if info.is_required() else info.default
        for field, info in operation.body.model_fields.items()
    }
    assert fields == parameters
    assert get_type_hints(method)["return"] == operation.type


def test_every_method_of_a_bank_has_an_operation_or_is_made_of_others() -> None:
    told = {operation.path.rpartition(".")[2] for operation in wire.OPERATIONS.values()}
    made = {
        "episode",
        "backup",
        "export",
        "import_",
        "snapshot",
        "submit_many",
        "counters",
        "standings_near",
        "close",
    }
    described = {"head", "text_limit", "embedder", "redacted", "closed", "queue"}  # by info
    described |= {"namespace", "read_only", "refused"}  # the client's own
    assert public(Bank) <= told | made | described
