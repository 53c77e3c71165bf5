"""Counters and lineage: who earns the outcome of a use."""

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.evidence.credit import lineage
from experiential.types import Condition, Distillation, Merge, ParsedOperations, Trajectory, Use


@pytest.fixture
def bank(tmp_path):
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def used(*entries, success=True, **fields):
    uses = tuple(Use(experience_id=e.id, experience_version=e.version) for e in entries)
    return Trajectory(task="open the door", success=success, uses=uses, **fields)


def merge(bank, *entries, text="merged text"):
    operation = Merge(entries=tuple(range(1, len(entries) + 1)), text=text)
    return bank.consolidate(
        Distillation(parsed=ParsedOperations(operations=(operation,))), shown=entries
    )[0]


def test_record_counts_each_use_and_its_outcome(bank):
    entry = bank.add("a")
    bank.record(used(entry))
    bank.record(used(entry, success=False))
    known = bank.get(entry.id).statistics
    assert (known.uses, known.successes, known.score) == (2, 1, 0.5)
    assert bank.outcomes(entry.id, 1) == [1, 0]


def test_recording_a_trajectory_twice_counts_once(bank):
    entry = bank.add("a")
    trajectory = used(entry)
    assert bank.record(trajectory) and not bank.record(trajectory)
    assert bank.get(entry.id).statistics.uses == 1


def test_a_free_episode_and_a_technical_failure_count_nothing(bank):
    entry = bank.add("a")
    bank.record(used(entry, condition=Condition.FREE))
    bank.record(used(entry, error="backend"))
    assert bank.get(entry.id).statistics.uses == 0
    assert bank.outcomes(entry.id, 1) == []


def test_uses_are_kept_by_version(bank):
    first = bank.add("a")
    bank.record(used(first))
    second = bank.update(first.id, "b")
    bank.record(used(second, success=False))
    assert (bank.outcomes(first.id, 1), bank.outcomes(first.id, 2)) == ([1], [0])
    assert bank.get(first.id).statistics.uses == 2


def test_a_merged_entry_starts_from_the_sum_of_its_parents(bank):
    a, b = bank.add("a"), bank.add("b")
    bank.record(used(a, b))
    bank.record(used(a, success=False))
    bank.note_retrievals([a.id, a.id, b.id])
    child = merge(bank, bank.get(a.id), bank.get(b.id))
    assert child.statistics.model_dump() == {"retrievals": 3, "uses": 3, "successes": 2}
    assert bank.get(a.id) is None


def test_lineage_reaches_every_ancestor_through_two_merges_and_survives_reopening(bank):
    a, b, c = bank.add("a"), bank.add("b"), bank.add("c")
    b = bank.update(b.id, "b two")
    first = merge(bank, a, b)
    second = merge(bank, first, c, text="again")
    expected = [(second.id, 1), (first.id, 1), (c.id, 1), (a.id, 1), (b.id, 2)]
    assert bank.lineage(second.id, 1) == expected
    bank.close()
    with ExperienceBank(bank.path) as again:
        assert again.lineage(second.id, 1) == expected


def test_lineage_visits_a_shared_ancestor_once():
    family = {("d", 1): [("b", 1), ("c", 1)], ("b", 1): [("a", 1)], ("c", 1): [("a", 1)]}
    assert lineage("d", 1, lambda id, version: family.get((id, version), [])) == [
        ("d", 1),
        ("b", 1),
        ("c", 1),
        ("a", 1),
    ]
