"""Pruning and eviction: what goes, what must stay, and that rollback brings everything back."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiential.bank.bank import ExperienceBank
from experiential.bank.manager import ExperienceManager
from experiential.errors import ConfigError, ReadOnlyBankError
from experiential.types import Add, Condition, Distillation, ParsedOperations, Trajectory, Use

FEW = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def bank(tmp_path):
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def use(bank, entry, *outcomes, group=""):
    for success in outcomes:
        uses = (Use(experience_id=entry.id, experience_version=entry.version),)
        bank.record(Trajectory(task="t", success=bool(success), uses=uses, group=group))


def free(bank, group, *outcomes):
    for success in outcomes:
        bank.record(
            Trajectory(task="t", success=bool(success), group=group, condition=Condition.FREE)
        )


def dump(bank):
    return [entry.model_dump_json() for entry in bank.entries()]


def ids(entries):
    return [entry.id for entry in entries]


def test_prune_by_score_takes_tried_failures_only(bank):
    good, bad, untried, barely = bank.add_many(["good", "bad", "untried", "barely tried"])
    use(bank, good, 1, 1, 1)
    use(bank, bad, 0, 0, 0, 0, 1)
    use(bank, barely, 0)
    assert ids(bank.prune(score=0.4, min_uses=3, dry_run=True)) == [bad.id] and len(bank) == 4
    head = bank.head
    gone = bank.prune(score=0.4, min_uses=3)
    assert ids(gone) == [bad.id] and gone[0].statistics.score == 2 / 7
    assert ids(bank) == [good.id, untried.id, barely.id]
    commit = bank.commits()[-1]
    assert (commit.id, commit.cause, commit.author, commit.ref) == (
        head + 1,
        "prune",
        "human",
        "score < 0.4, uses >= 3",
    )


def test_the_score_bound_itself_stays(bank):
    entry = bank.add("even")
    use(bank, entry, 1, 0)
    assert bank.prune(score=0.5, min_uses=0) == []
    assert ids(bank.prune(score=0.5001, min_uses=0)) == [entry.id]


def test_prune_by_uplift_looks_at_the_upper_end(bank):
    harmful, unsure, lonely = bank.add_many(["harmful", "unsure", "one group only"])
    for group in range(4):
        use(bank, harmful, 0, group=f"{group}")
        free(bank, f"{group}", 1, 1, 0 if group == 3 else 1)
    for group, outcome in enumerate([0, 0, 1]):
        use(bank, unsure, outcome, 0, group=f"u{group}")
        free(bank, f"u{group}", 1, 0)
    use(bank, lonely, 0, 0, 0, 0, group="l")
    free(bank, "l", 1)
    assert bank.uplift(harmful.id).interval[1] < 0 < bank.uplift(unsure.id).interval[1]
    assert ids(bank.prune(uplift_below=0.0, min_uses=3)) == [harmful.id]
    assert "uplift < 0" in bank.commits()[-1].ref


def test_either_bound_prunes(bank):
    failing, harmful = bank.add_many(["failing", "harmful"])
    use(bank, failing, 0, 0, 0)
    for group in range(3):
        use(bank, harmful, 0, 1, group=f"{group}")
        free(bank, f"{group}", 1)
    assert set(ids(bank.prune(score=0.3, uplift_below=-0.1, min_uses=1))) == {
        failing.id,
        harmful.id,
    }


def test_nothing_to_prune_makes_no_commit(bank):
    bank.add("untried")
    head = bank.head
    assert bank.prune(score=1.0) == [] and bank.evict(5) == [] and bank.head == head


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda bank: bank.prune(), "Expected score= or uplift_below="),
        (lambda bank: bank.prune(score=0.5, min_uses=-1), "Expected min_uses"),
        (lambda bank: bank.evict(-1), "Expected cap"),
        (
            lambda bank: bank.evict(1, "oldest"),
            "Expected policy to be one of lru, fifo, random, utility",
        ),
    ],
)
def test_wrong_arguments_are_refused(bank, call, message):
    with pytest.raises(ValueError, match=message):
        call(bank)


def test_a_read_only_bank_only_reports(bank):
    entry = bank.add("bad")
    use(bank, entry, 0, 0, 0, 0, 0)
    with ExperienceBank(bank.path, read_only=True) as copy:
        assert (
            ids(copy.prune(score=0.5, dry_run=True))
            == [entry.id]
            == ids(copy.evict(0, dry_run=True))
        )
        for call in (lambda: copy.prune(score=0.5), lambda: copy.evict(0)):
            with pytest.raises(ReadOnlyBankError, match="dry_run=True"):
                call()


def test_fifo_takes_the_oldest_whatever_it_did(bank):
    entries = bank.add_many(["a", "b", "c"])
    use(bank, entries[0], 1, 1, 1)
    bank.update(entries[0].id, "a again")
    assert ids(bank.evict(2, "fifo")) == [entries[0].id]
    assert (bank.commits()[-1].cause, bank.commits()[-1].ref) == ("evict", "fifo to 2")


def test_lru_takes_what_was_not_used_or_written_for_longest(bank):
    a, b, c, d = (bank.add(text) for text in "abcd")
    use(bank, c, 1)
    use(bank, a, 0)
    use(bank, c, 0)
    bank.update(b.id, "b again")
    assert ids(bank.evict(3, "lru", dry_run=True)) == [d.id]
    assert set(ids(bank.evict(2, "lru", dry_run=True))) == {d.id, a.id}
    assert set(ids(bank.evict(1, "lru"))) == {d.id, a.id, c.id}


def test_utility_takes_the_lowest_score_then_the_oldest(bank):
    a, b, c, d = bank.add_many(list("abcd"))
    use(bank, c, 0)
    use(bank, d, 1)
    assert ids(bank.evict(3, "utility", dry_run=True)) == [c.id]
    assert ids(bank.evict(2, "utility", dry_run=True)) == [a.id, c.id]  # in the order of the bank
    assert ids(bank.evict(1)) == [a.id, b.id, c.id]


def test_per_task_leaves_the_best_of_each_task(bank):
    texts = [("a", "home"), ("b", "home"), ("c", "home"), ("d", "away"), ("e", None), ("f", None)]
    a, b, c, d, e, f = (bank.add(text, task=task) for text, task in texts)
    use(bank, a, 1)
    use(bank, c, 0)
    assert ids(bank.evict(2, per_task=True, dry_run=True)) == [c.id]
    assert set(ids(bank.evict(1, per_task=True))) == {b.id, c.id, e.id}
    assert {entry.id for entry in bank} == {a.id, d.id, f.id}
    assert bank.evict(1, per_task=True) == []
    with pytest.raises(ValueError, match="Expected cap"):
        bank.evict(-1, per_task=True)


def test_subject_leaves_entries_that_name_their_own_task(bank):
    ann, bob = "Open the vault of Grey Ann.", "Open the vault of Old Bob."
    texts = ["Grey Tom: red.", "Grey Ann: red.", "Ann, the grey one: red.", "Pull once."]
    grey_tom, first, second, once = (bank.add(text, task=ann) for text in texts)
    other = bank.add("Open the vault: jade.", task=bob)
    use(bank, grey_tom, 1)  # a better score does not make it one of Ann's
    use(bank, second, 0)
    assert ids(bank.evict(3, "subject", per_task=True, dry_run=True)) == [once.id]
    assert set(ids(bank.evict(2, "subject", per_task=True, dry_run=True))) == {grey_tom.id, once.id}
    assert set(ids(bank.evict(1, "subject", per_task=True))) == {grey_tom.id, once.id, second.id}
    assert {entry.id for entry in bank} == {first.id, other.id}


def test_subject_goes_by_score_where_tasks_cannot_be_told_apart(bank):
    a, b = bank.add("Grey Ann: red.", task="Play."), bank.add("Play.", task="Play.")
    use(bank, b, 0)
    assert ids(bank.evict(1, "subject", dry_run=True)) == [b.id]
    none = bank.add("It belongs to all.")
    assert ids(bank.evict(2, "subject")) == [b.id]
    assert {entry.id for entry in bank} == {a.id, none.id}


def test_subject_puts_texts_that_name_no_other_task_first(bank):
    task, other = "Open the vault of Grey Ann.", "Open the vault of Old Bob."
    both = bank.add("Grey Bob: red.", task=task)
    half = bank.add("Grey: red.", task=task)
    bank.add("Old Bob: jade.", task=other)
    use(bank, both, 1)
    assert ids(bank.evict(1, "subject", per_task=True, dry_run=True)) == [both.id]
    assert half.id in ids(bank)


def test_random_is_repeatable_and_depends_on_seed_and_commit(bank):
    bank.add_many([f"text {i}" for i in range(40)])
    first = ids(bank.evict(20, "random", seed=1, dry_run=True))
    assert first == ids(bank.evict(20, "random", seed=1, dry_run=True)) and len(first) == 20
    assert first != ids(bank.evict(20, "random", seed=2, dry_run=True))
    bank.record(Trajectory(task="t"))
    assert first != ids(bank.evict(20, "random", seed=1, dry_run=True))


@given(data=st.data())
@FEW
def test_prune_and_evict_keep_what_they_should_and_rollback_restores_every_byte(
    tmp_path_factory, data
):
    """Random banks: the doomed are exactly those that a plain reading of the rule names, and
    rollback undoes it to the byte.
    """
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    score, min_uses = (
        data.draw(st.sampled_from([0.2, 0.35, 0.5, 0.8])),
        data.draw(st.integers(0, 4)),
    )
    cap, policy = (
        data.draw(st.integers(0, 12)),
        data.draw(st.sampled_from(["lru", "fifo", "random", "utility", "subject"])),
    )
    with ExperienceBank(tmp_path_factory.mktemp("forget") / "bank", embedder="hashing") as bank:
        entries = bank.add_many([f"text {i}" for i in range(10)])
        for _ in range(25):
            use(bank, bank.get(rng.choice(entries).id), rng.random() < 0.4)
        bank.update(entries[3].id, "rewritten")
        before, head = dump(bank), bank.head
        expected = {
            e.id
            for e in bank.entries()
            if e.statistics.uses >= min_uses and e.statistics.score < score
        }
        assert set(ids(bank.prune(score=score, min_uses=min_uses))) == expected
        assert set(ids(bank)) == {e.id for e in entries} - expected
        assert bank.head == head + bool(expected)
        bank.rollback(head)
        assert dump(bank) == before
        gone = bank.evict(cap, policy, seed=3)
        assert len(bank) == min(cap, 10) and len(gone) == max(0, 10 - cap)
        if policy == "utility" and gone and len(bank):
            assert max(e.statistics.score for e in gone) <= min(e.statistics.score for e in bank)
        if policy == "fifo":
            assert ids(gone) == ids(entries)[: len(gone)]
        bank.rollback(head)
        assert dump(bank) == before
    with ExperienceBank(bank.path, read_only=True) as again:
        assert dump(again) == before


class Teacher:
    """An extractor that writes two numbered lessons for each trajectory."""

    version = 0

    def __init__(self):
        self.count = 0

    async def adistill(self, trajectory, shown):
        self.count += 2
        texts = (f"lesson {self.count}", f"lesson {self.count + 1}")
        return Distillation(
            parsed=ParsedOperations(operations=tuple(Add(text=text) for text in texts))
        )

    async def arefine(self, query, experience):
        return experience.text, None

    async def amerge(self, experiences):
        return Distillation()


def test_the_manager_holds_the_cap_after_distillation(bank):
    with ExperienceManager(bank, Teacher(), cap=5, eviction="fifo", distill_workers=1) as manager:
        for _ in range(6):
            manager.submit(Trajectory(task="t"))
        manager.drain(timeout=30)
        assert len(bank) == 5
        assert manager.stats()["evicted"] == 7
    assert [entry.text for entry in bank] == [f"lesson {i}" for i in range(9, 14)]
    evictions = [commit for commit in bank.commits() if commit.cause == "evict"]
    assert len(evictions) == 4 and {commit.author for commit in evictions} == {"run"}


def test_without_a_cap_nothing_is_evicted(bank):
    with ExperienceManager(bank, Teacher()) as manager:
        for _ in range(4):
            manager.submit(Trajectory(task="t"))
        manager.drain(timeout=30)
        assert len(bank) == 8 and manager.stats()["evicted"] == 0


def test_a_failing_eviction_is_counted_and_ends_nothing(bank, monkeypatch):
    def broken(*arguments, **options):
        raise OSError("disk full")

    monkeypatch.setattr(bank, "evict", broken)
    with ExperienceManager(bank, Teacher(), cap=1) as manager:
        manager.submit(Trajectory(task="t"))
        manager.drain(timeout=30)
        assert (
            manager.stats()["failures"] == {"evict: OSError": 1}
            and manager.stats()["distilled"] == 1
        )


@pytest.mark.parametrize("options", [{"cap": -1}, {"eviction": "oldest"}])
def test_wrong_settings_are_refused(bank, options):
    with pytest.raises(ConfigError, match="Expected options of ExperienceManager"):
        ExperienceManager(bank, **options)
