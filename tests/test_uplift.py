"""Uplift of entries against hand-worked numbers, and what an episode is said to have been shown."""

import math

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.evidence.uplift import estimate, t_quantile
from experiential.errors import BankError
from experiential.types import (
    Add,
    Condition,
    Distillation,
    Estimate,
    Generation,
    Merge,
    ParsedOperations,
    Trajectory,
    Uplift,
    Use,
)


@pytest.fixture
def bank(tmp_path):
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def episode(group, success, *entries, condition=Condition.GUIDED, **fields):
    uses = tuple(Use(experience_id=entry.id, experience_version=entry.version) for entry in entries)
    return Trajectory(
        task="open the door",
        group=group,
        success=bool(success),
        uses=uses,
        condition=condition,
        **fields,
    )


def play(bank, group, guided, free, *entries):
    for success in guided:
        bank.record(episode(group, success, *entries))
    for success in free:
        bank.record(episode(group, success, condition=Condition.FREE))


def merge(bank, *entries, text="merged text"):
    operation = Merge(entries=tuple(range(1, len(entries) + 1)), text=text)
    return bank.consolidate(
        Distillation(parsed=ParsedOperations(operations=(operation,))), shown=entries
    )[0]


# From the printed tables of Student's distribution, two-sided 95 %.
@pytest.mark.parametrize(
    ("df", "t"),
    [
        (1, 12.706),
        (2, 4.303),
        (3, 3.182),
        (9, 2.262),
        (30, 2.042),
        (31, 2.040),
        (60, 2.000),
        (1000, 1.962),
    ],
)
def test_the_t_quantile_is_that_of_the_tables(df, t):
    assert round(t_quantile(df), 3) == t


def test_the_t_quantile_falls_steadily_to_the_normal_one_where_the_method_changes():
    values = [t_quantile(df) for df in range(1, 200)]
    assert all(a > b > 1.959963 for a, b in zip(values, values[1:], strict=False))


def test_no_degree_of_freedom_is_refused():
    with pytest.raises(ValueError, match="Expected at least one degree"):
        t_quantile(0)


def test_the_interval_needs_two_groups():
    assert estimate([]) == Estimate()
    assert estimate([0.5]) == Estimate(groups=1, mean=0.5, interval=None)
    assert estimate([0.25, 0.25]) == Estimate(groups=2, mean=0.25, interval=(0.25, 0.25))


def test_uplift_is_the_mean_paired_difference_over_groups_with_a_t_interval(bank):
    """Differences 1 - 1/2, 1 - 0 and 0 - 0: mean 1/2, standard deviation 1/2, t(2) = 4.30265, half
    width 4.30265 * 0.5 / √3.
    """
    entry, other = bank.add("use the brass key"), bank.add("look under the mat")
    play(bank, "a", [1, 1], [0, 1], entry)
    play(bank, "b", [1], [0], entry)
    play(
        bank, "b", [0], [], other
    )  # a guided member that did not use it is no part of its difference
    play(bank, "c", [0], [0, 0], entry)
    found = bank.uplift(entry.id)
    half = 4.30265273 * 0.5 / math.sqrt(3)
    assert (found.groups, found.mean) == (3, 0.5)
    assert found.interval == pytest.approx((0.5 - half, 0.5 + half), abs=1e-7)
    assert (found.uses, found.outcomes, found.successes) == (4, 4, 3)
    assert found.score == 4 / 6
    assert found.lineage == Estimate(groups=3, mean=found.mean, interval=found.interval)


def test_groups_without_a_pair_and_episodes_without_an_outcome_do_not_count(bank):
    entry = bank.add("use the brass key")
    play(bank, "paired", [1], [0], entry)
    play(bank, "only guided", [0, 0], [], entry)
    play(bank, "", [0], [1], entry)
    bank.record(episode("paired", 0, entry, error="backend"))
    bank.record(episode("paired", 1, condition=Condition.FREE, error="backend"))
    bank.record(episode("only broken free", 0, entry))
    bank.record(episode("only broken free", 1, condition=Condition.FREE, error="env"))
    found = bank.uplift(entry.id)
    assert (found.groups, found.mean, found.interval) == (1, 1.0, None)
    assert (found.uses, found.outcomes, found.successes) == (6, 5, 1)


def test_an_episode_that_used_an_entry_twice_counts_once_in_its_group(bank):
    entry = bank.add("use the brass key")
    bank.record(episode("a", 1, entry, entry, entry))
    bank.record(episode("a", 0, entry))
    play(bank, "a", [], [0])
    found = bank.uplift(entry.id)
    assert found.mean == 0.5 and found.uses == 4


def test_versions_are_told_apart(bank):
    first = bank.add("use the brass key")
    play(bank, "a", [0], [1], first)
    second = bank.update(first.id, "use the iron key")
    play(bank, "b", [1], [0], second)
    assert bank.uplift(first.id, 1).mean == -1.0
    assert bank.uplift(first.id).mean == bank.uplift(first.id, 2).mean == 1.0
    assert (
        bank.uplift(first.id).lineage.groups == 1
    )  # the text was rewritten: what the old one did says nothing of it
    assert bank.uplift(first.id).version == 2


def test_lineage_reaches_through_merges_in_both_directions(bank):
    a, b, c = bank.add("use the brass key"), bank.add("take the brass key"), bank.add("bake bread")
    play(bank, "a", [1], [0], a)
    play(bank, "b", [0], [1], b)
    play(bank, "c", [1], [0], c)
    merged = merge(bank, a, b)
    play(bank, "d", [1], [0], merged)
    found = bank.uplift(merged.id)
    assert (found.groups, found.mean) == (1, 1.0)
    assert (found.lineage.groups, found.lineage.mean) == (3, pytest.approx(1 / 3))
    parent = bank.uplift(a.id)
    assert (parent.groups, parent.lineage.groups, parent.lineage.mean) == (
        1,
        2,
        1.0,
    )  # its own use and that of the merged entry, not b's
    assert bank.uplift(c.id).lineage.groups == 1


def test_a_merge_counts_that_was_made_after_an_uplift_was_asked_for(bank):
    a, b = bank.add("use the brass key"), bank.add("take the brass key")
    play(bank, "a", [1], [0], a)
    assert bank.uplift(a.id).lineage.groups == 1
    play(bank, "b", [0], [1], merge(bank, a, b))
    assert bank.uplift(a.id).lineage.groups == 2


def test_an_episode_that_used_two_of_a_family_counts_once(bank):
    a, b = bank.add("use the brass key"), bank.add("take the brass key")
    bank.record(episode("g", 1, a, b))
    bank.record(episode("g", 0, a))
    play(bank, "g", [], [0])
    assert bank.uplift(merge(bank, a, b).id).lineage.mean == 0.5


def test_an_entry_never_used_has_no_estimate(bank):
    entry = bank.add("use the brass key")
    assert bank.uplift(entry.id) == Uplift(id=entry.id, version=1)
    assert bank.uplift(entry.id).score == 0.5


def test_a_removed_entry_still_has_its_uplift_and_an_unknown_one_is_refused(bank):
    entry = bank.add("use the brass key")
    play(bank, "a", [1], [0], entry)
    bank.remove(entry.id)
    assert bank.uplift(entry.id).mean == 1.0
    for id, version in (("nobody", None), (entry.id, 2), (entry.id, 0)):
        with pytest.raises(BankError, match="Expected an entry version"):
            bank.uplift(id, version)


def test_namespaces_and_read_only_banks(bank, tmp_path):
    entry = bank.add("use the brass key")
    play(bank, "a", [1], [0], entry)
    with ExperienceBank(bank.path, namespace="other", embedder="hashing") as other:
        play(other, "a", [], [1])
        with pytest.raises(BankError):
            other.uplift(entry.id)
    with ExperienceBank(bank.path, read_only=True) as copy:
        assert copy.uplift(entry.id) == bank.uplift(entry.id)
        assert copy.uplift(entry.id).mean == 1.0


def test_why_says_what_was_shown_how_it_ended_and_what_was_written(bank):
    entry = bank.add("use the brass key")
    refinement = Generation(text="Use the brass key on the red door.")
    bank.keep_generation(refinement)
    uses = (
        Use(experience_id=entry.id, experience_version=1, rank=1, score=0.75, propensity=0.5),
        Use(
            experience_id=entry.id,
            experience_version=1,
            how="search_and_ask",
            turn=3,
            refinement=refinement.id,
        ),
        Use(experience_id="elsewhere", experience_version=7),
    )
    trajectory = Trajectory(task="open the door", group="g", success=True, reward=2.0, uses=uses)
    bank.submit(trajectory)
    play(bank, "g", [], [0])
    bank.update(entry.id, "use the iron key")
    parsed = ParsedOperations(
        operations=(Add(text="doors stick in the rain"), Add(text="knock first"))
    )
    bank.apply(Distillation(parsed=parsed), trajectory=trajectory, shown=[], item=trajectory.id)
    bank.add("written by hand")
    found = bank.why(trajectory.id)
    assert (found.trajectory, found.task, found.success, found.reward, found.error) == (
        trajectory.id,
        "open the door",
        True,
        2.0,
        None,
    )
    first, asked, stranger = found.shown
    assert (first.id, first.version, first.text, first.refined) == (
        entry.id,
        1,
        "use the brass key",
        None,
    )
    assert (first.rank, first.score, first.propensity, first.how, first.turn) == (
        1,
        0.75,
        0.5,
        "episode_start",
        0,
    )
    assert (asked.how, asked.turn, asked.refined) == (
        "search_and_ask",
        3,
        "Use the brass key on the red door.",
    )
    assert first.uplift == bank.uplift(entry.id, 1) and first.uplift.mean == 1.0
    assert first.statistics == bank.get(entry.id).statistics and first.statistics.uses == 2
    assert (stranger.text, stranger.uplift.uses) == (None, 1)
    assert [one.text for one in found.written] == ["doors stick in the rain", "knock first"]
    assert bank.why(trajectory) == found


def test_why_of_an_episode_that_was_not_recorded(bank):
    entry = bank.add("use the brass key")
    found = bank.why(episode("g", 1, entry))
    assert [one.text for one in found.shown] == ["use the brass key"] and found.written == ()
    with pytest.raises(BankError, match="Expected the id of a recorded trajectory"):
        bank.why("nobody")


def test_history_and_diff(bank):
    a, b = bank.add_many(["one", "two"])
    bank.update(a.id, "uno")
    bank.remove(b.id)
    c = bank.add("three")
    log = bank.history()
    assert [(commit.cause, commit.changes) for commit in log] == [
        ("add", 2),
        ("update", 1),
        ("remove", 1),
        ("add", 1),
    ]
    assert [commit.id for commit in log] == [commit.id for commit in bank.commits()]
    assert [(commit.cause, commit.version) for commit in bank.history(b.id)] == [
        ("add", 1),
        ("remove", None),
    ]
    with pytest.raises(BankError, match="ever had"):
        bank.history("nobody")
    found = bank.diff(log[0].id, bank.head)
    assert [entry.id for entry in found.added] == [c.id]
    assert [entry.text for entry in found.removed] == ["two"]
    assert [(pair.old.text, pair.new.text) for pair in found.changed] == [("one", "uno")]
    back = bank.diff(bank.head, log[0].id)
    assert (back.added, back.removed) == (found.removed, found.added)
    same = bank.diff(bank.head, bank.head)
    assert same.added == same.removed == same.changed == ()
