"""Whatever is done to a bank, it holds, remembers and finds what a plain dictionary does.

`EXPLORE=1` draws other, longer and many more sequences in every run.
"""

import hashlib
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.index.embed import HashingEmbedder
from experiential.errors import BankError, ReadOnlyBankError
from experiential.types import (
    Add,
    Condition,
    Discard,
    Distillation,
    Merge,
    ParsedOperations,
    Trajectory,
    Update,
    Use,
)

EXPLORE = "EXPLORE" in os.environ
TEXTS = st.sampled_from(
    [
        "open the red door",
        "open the red doors",
        "brass key",
        "bake bread in the oven",
        "walk north",
        "ünï çode",
        "two\nlines",
        "well",
    ]
)
QUERIES = st.sampled_from(
    ["open the red door", "key", "oven bread", "north", "ünï", "castle", "house with a door"]
)
TASKS = st.sampled_from([None, "house with a door", "castle"])
KINDS = st.sampled_from(["lesson", "warning"])
WORLDS = st.sampled_from(["", "world 1", "world 2"])
PLACES = st.integers(0, 20)
"""Names one of what there is, by its place modulo their number."""
FIRST = [
    ("brass key", "castle", "warning"),
    ("well", "castle", "warning"),
    ("walk north", None, "lesson"),
    ("brass key", None, "lesson"),
]
"""What each bank starts with, so that the first step has something to change."""
_EMBED = HashingEmbedder()


@dataclass(frozen=True)
class Item:
    """What the model knows of one entry version."""

    text: str
    task: str | None
    kind: str
    version: int
    origins: frozenset[str] = frozenset()


def vector(text, task):
    """As docs/decisions/008 says: the text, and its task with twice the weight."""
    both = _EMBED([text])[0].astype(np.float64) + 2.0 * _EMBED([task or text])[0]
    return both / np.linalg.norm(both)


def cosines(query, items, hidden, kind):
    """Brute force: the cosine of every entry that the query may find."""
    asked = _EMBED([query])[0].astype(np.float64)
    return {
        id: float(asked @ vector(item.text, item.task))
        for id, item in items.items()
        if hidden not in item.origins and kind in (None, item.kind)
    }


def common(values, otherwise):
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else otherwise


class BankAgainstDict(RuleBasedStateMachine):
    """A bank in a folder beside a dictionary of items, one of counters, and one of what stood after
    each commit.
    """

    make = FolderBank

    @initialize()
    def start(self):
        self.folder = tempfile.TemporaryDirectory()
        self.bank = self.make(self.folder.name, embedder="hashing")
        self.items = {}  # id -> Item, of the entries that stand
        self.counts = {}  # id -> [uses, successes], of every entry that was ever used or merged
        self.born = {}  # id -> place in the order of first writing
        self.last = {}  # id -> highest version ever
        self.past = {0: {}}  # commit -> items after it
        self.seen = []  # experiences as they were read at some time: some are stale by now
        for text, task, kind in FIRST:
            self.add(text, task, kind)
        self.record([0, 2], success=True, free=False, stale=False)

    # What the model does

    def put(self, id, item):
        self.born.setdefault(id, len(self.born))
        self.last[id] = item.version
        self.items[id] = item

    def committed(self):
        """The last write made exactly one commit: remember what stands after it."""
        assert self.bank.head > max(self.past)
        self.past[self.bank.head] = dict(self.items)

    def pick(self, place):
        return sorted(self.items, key=self.born.__getitem__)[place % len(self.items)]

    def shown(self, places, stale):
        """Different entries as they stand, or as they were read at some time."""
        if not self.items or (stale and not self.seen):
            return []
        read = [
            self.seen[place % len(self.seen)] if stale else self.bank.get(self.pick(place))
            for place in places
        ]
        return list({entry.id: entry for entry in read}.values())

    def is_stale(self, entry):
        item = self.items.get(entry.id)
        return item is None or item.version != entry.version

    def inherit(self, id, parents):
        known = [self.counts.get(parent, [0, 0]) for parent in dict.fromkeys(parents)]
        self.counts[id] = [sum(count[0] for count in known), sum(count[1] for count in known)]

    # What is done to both

    @rule(text=TEXTS, task=TASKS, kind=KINDS)
    def add(self, text, task, kind):
        self.put(self.bank.add(text, task=task, kind=kind).id, Item(text, task, kind, 1))
        self.committed()

    @rule(texts=st.lists(TEXTS, min_size=2, max_size=4), task=TASKS)
    def add_many(self, texts, task):
        for entry, text in zip(self.bank.add_many(texts, task=task), texts, strict=True):
            self.put(entry.id, Item(text, task, "lesson", 1))
        self.committed()

    @precondition(lambda self: self.items)
    @rule(place=PLACES, text=TEXTS)
    def update(self, place, text):
        id = self.pick(place)
        entry = self.bank.update(id, text)
        self.put(id, replace(self.items[id], text=text, version=self.last[id] + 1))
        assert entry.version == self.last[id]
        self.committed()

    @precondition(lambda self: self.items)
    @rule(place=PLACES)
    def remove(self, place):
        id = self.pick(place)
        self.bank.remove(id)
        del self.items[id]
        self.committed()

    @precondition(lambda self: len(self.last) > len(self.items))
    @rule(place=PLACES)
    def change_what_is_gone(self, place):
        gone = sorted(set(self.last) - set(self.items), key=self.born.__getitem__)
        for attempt in (
            lambda id: self.bank.remove(id),
            lambda id: self.bank.update(id, "brass key"),
        ):
            with pytest.raises(BankError, match="Expected the id of a live entry"):
                attempt(gone[place % len(gone)])

    @precondition(lambda self: self.items)
    @rule(place=PLACES)
    def read(self, place):
        self.seen.append(self.bank.get(self.pick(place)))

    @rule(
        text=TEXTS,
        task=TASKS,
        world=WORLDS,
        place=PLACES,
        rewrite=st.booleans(),
        stale=st.booleans(),
    )
    def distil(self, text, task, world, place, rewrite, stale):
        shown = self.shown([place], stale)
        operation = Update(entry=1, text=text) if rewrite else Add(text=text)
        made = Distillation(parsed=ParsedOperations(operations=(operation,)))
        written = self.bank.apply(
            made, trajectory=Trajectory(task=task or "", instance=world), shown=shown
        )
        origins = frozenset({world} if world else ())
        if rewrite and not (shown and shown[0].id in self.items):
            assert written == []
        elif rewrite:
            # The only text that is about another of these tasks than its entry: it names the door.
            moved = task == "house with a door" and text == "open the red door"
            own = self.items[shown[0].id].task
            self.rewrite(shown[0].id, text, origins, task if moved and own else own)
        else:
            twins = {
                id
                for id, item in self.items.items()
                if (item.text, item.task, item.kind) == (text, task, "lesson")
            }
            assert written[0].id in twins or not twins and written[0].id not in self.last
            if twins:
                self.rewrite(written[0].id, text, origins, task)
            else:
                self.put(written[0].id, Item(text, task, "lesson", 1, origins))
        self.committed()

    def rewrite(self, id, text, origins, task):
        item, version = self.items[id], self.last[id] + 1
        origins |= item.origins
        self.put(id, replace(item, text=text, task=task, version=version, origins=origins))

    @precondition(lambda self: len(self.items) > 2)
    @rule(place=PLACES, text=TEXTS)
    def merge(self, place, text):
        self.consolidate(self.shown(range(place, place + 3), stale=False), text)

    @precondition(lambda self: len({entry.id for entry in self.seen}) > 1)
    @rule(places=st.lists(PLACES, min_size=3, max_size=4), text=TEXTS)
    def merge_what_was_read(self, places, text):
        """Some of it may have changed since."""
        self.consolidate(self.shown(places, stale=True), text)

    def consolidate(self, shown, text):
        """Merge all but the last, and discard that in the same commit."""
        if len(shown) < 2:
            return
        *parents, doomed = shown
        operations = (
            Merge(entries=tuple(range(1, len(parents) + 1)), text=text),
            Discard(entry=len(shown)),
        )
        written = self.bank.consolidate(
            Distillation(parsed=ParsedOperations(operations=operations)), shown=shown
        )
        if not any(map(self.is_stale, parents)):
            items = [self.items.pop(parent.id) for parent in parents]
            task, kind = (
                common((item.task for item in items), None),
                common((item.kind for item in items), "lesson"),
            )
            self.put(
                written[0].id,
                Item(text, task, kind, 1, frozenset().union(*(item.origins for item in items))),
            )
            self.inherit(written[0].id, [parent.id for parent in parents])
            assert set(written[0].provenance.parents) == {
                (parent.id, parent.version) for parent in parents
            }
        else:
            assert written == []
        if not self.is_stale(doomed):
            del self.items[doomed.id]
        self.committed()

    @precondition(
        lambda self: (
            len({(item.text, item.task, item.kind) for item in self.items.values()})
            < len(self.items)
        )
    )
    @rule()
    def deduplicate(self):
        groups = {}
        for id in sorted(self.items, key=self.born.__getitem__):
            item = self.items[id]
            groups.setdefault((item.text, item.task, item.kind), []).append(id)
        same = [ids for ids in groups.values() if len(ids) > 1]
        found = self.bank.deduplicate(1.0)
        assert {(group.survivor.id, *(one.id for one in group.merged)) for group in found} == {
            tuple(ids) for ids in same
        }
        for survivor, *merged in same:
            self.inherit(survivor, [survivor, *merged])
            self.rewrite(
                survivor,
                self.items[survivor].text,
                frozenset().union(*(self.items.pop(id).origins for id in merged)),
                self.items[survivor].task,
            )
        if same:
            self.committed()

    @rule(
        places=st.lists(PLACES, max_size=3),
        success=st.booleans(),
        free=st.booleans(),
        stale=st.booleans(),
    )
    def record(self, places, success, free, stale):
        """An episode ends that used entries, some perhaps rewritten or gone by now."""
        used = self.shown(places, stale)
        uses = tuple(
            Use(experience_id=entry.id, experience_version=entry.version) for entry in used
        )
        trajectory = Trajectory(
            task="castle",
            success=success,
            uses=uses,
            condition=Condition.FREE if free else Condition.GUIDED,
        )
        assert self.bank.record(trajectory) and not self.bank.record(trajectory)
        for entry in () if free else used:
            count = self.counts.setdefault(entry.id, [0, 0])
            count[0], count[1] = count[0] + 1, count[1] + success
        self.committed()

    @rule(place=PLACES)
    def rollback(self, place):
        commits = sorted(self.past)
        commit = commits[place % len(commits)]
        assert self.bank.rollback(commit).ref == str(commit)
        self.items = dict(self.past[commit])
        self.committed()

    @rule()
    def reopen(self):
        self.bank.close()
        self.bank = self.make(self.folder.name)

    # What both are asked

    @rule(
        query=QUERIES,
        k=st.integers(1, 6),
        hidden=st.sampled_from([None, "world 1", "world 2"]),
        kind=st.sampled_from([None, "warning"]),
    )
    def search(self, query, k, hidden, kind):
        self.check_search(self.bank, self.items, query, k, hidden, kind)

    def check_search(self, reader, items, query, k, hidden, kind):
        where = {} if kind is None else {"where": {"kind": kind}}
        found = reader.search(query, k=k, exclude_instance=hidden, **where)
        wanted = cosines(query, items, hidden, kind)
        assert [hit.score for hit in found] == pytest.approx(
            sorted(wanted.values(), reverse=True)[:k], abs=1e-5
        )
        assert [hit.rank for hit in found] == list(range(len(found)))
        assert len({hit.experience.id for hit in found}) == len(found)
        for hit in found:
            assert hit.score == pytest.approx(wanted[hit.experience.id], abs=1e-5)
            self.check_entry(hit.experience, items[hit.experience.id])

    @staticmethod
    def check_entry(entry, item):
        assert (entry.text, entry.task, entry.kind, entry.version) == (
            item.text,
            item.task,
            item.kind,
            item.version,
        )

    @precondition(lambda self: len(self.past) > 1)
    @rule(place=PLACES, query=QUERIES)
    def look_back(self, place, query):
        commits = sorted(self.past)
        commit = commits[place % len(commits)]
        self.check_picture(self.bank.at(commit), self.past[commit], query)

    def check_picture(self, reader, items, query):
        assert [entry.id for entry in reader.entries()] == sorted(items, key=self.born.__getitem__)
        for id, item in items.items():
            self.check_entry(reader.get(id), item)
        self.check_search(reader, items, query, 3, "world 1", None)

    @rule(query=QUERIES)
    def read_only(self, query):
        """Beside the writer, which goes on; what the reader has is fixed."""
        with ExperienceBank(self.folder.name, read_only=True) as reader:
            self.check_picture(reader, self.items, query)
            for write in (
                lambda: reader.add("well"),
                lambda: reader.rollback(0),
                lambda: reader.deduplicate(1.0),
            ):
                with pytest.raises(ReadOnlyBankError):
                    write()
            self.add("brass key", None, "lesson")
            assert len(reader) == len(self.items) - 1

    @rule(query=QUERIES)
    def read_only_while_closed(self, query):
        """With no writer open, not one byte of the folder changes."""
        self.bank.close()
        before = self.digest()
        with ExperienceBank(self.folder.name, read_only=True) as reader:
            self.check_picture(reader, self.items, query)
        assert self.digest() == before
        self.bank = self.make(self.folder.name)

    def digest(self):
        files = sorted(file for file in Path(self.folder.name).rglob("*") if file.is_file())
        return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}

    @invariant()
    def same(self):
        if not hasattr(self, "bank"):
            return
        assert [entry.id for entry in self.bank] == sorted(
            self.items, key=self.born.__getitem__
        ) and len(self.bank) == len(self.items)
        for world in ("world 1", "world 2"):
            found = {
                hit.experience.id
                for hit in self.bank.search("castle", k=100, exclude_instance=world)
            }
            assert found == {id for id, item in self.items.items() if world not in item.origins}
        for entry in self.bank:
            self.check_entry(entry, self.items[entry.id])
            assert [entry.statistics.uses, entry.statistics.successes] == self.counts.get(
                entry.id, [0, 0]
            )

    def teardown(self):
        if hasattr(self, "bank"):
            self.bank.close()
            self.folder.cleanup()


def test_a_bank_that_was_never_written_keeps_its_embedder_until_another_is_named(tmp_path):
    """Found by the machine: reopened without a name, an empty bank took the default model."""
    ExperienceBank(tmp_path, embedder="hashing").close()
    with ExperienceBank(tmp_path) as bank:
        assert bank.embedder.id == "hashing-256"
    with ExperienceBank(tmp_path, embedder=HashingEmbedder(32)) as bank:
        assert bank.embedder.id == "hashing-32" and bank.add("well").version == 1
    with pytest.raises(BankError, match="hashing-32"):
        ExperienceBank(tmp_path, embedder="hashing")


class LargeBank(FolderBank):
    """A bank that hands over to Chroma early."""

    RESIDENT_LIMIT = 3


class LargeBankAgainstDict(BankAgainstDict):
    """The same of a bank that Chroma searches."""

    make = LargeBank

    @rule()
    def settle(self):
        """What is written from here on is the tail."""
        self.bank.flush_index()


TestBankAgainstDict = BankAgainstDict.TestCase
TestBankAgainstDict.settings = settings(
    max_examples=300 if EXPLORE else 20, stateful_step_count=60 if EXPLORE else 25, deadline=None
)
TestLargeBankAgainstDict = LargeBankAgainstDict.TestCase
TestLargeBankAgainstDict.settings = settings(
    max_examples=60 if EXPLORE else 5, stateful_step_count=60 if EXPLORE else 25, deadline=None
)
