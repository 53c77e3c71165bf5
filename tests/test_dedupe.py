"""Near-duplicates: block by block as a brute-force search finds them, and merged with everything
that belongs to them.
"""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from experiential.bank.bank import ExperienceBank
from experiential.bank.consolidation import dedupe
from experiential.bank.index.embed import normalise
from experiential.errors import ReadOnlyBankError
from experiential.types import (
    Add,
    Distillation,
    Experience,
    Generation,
    ParsedOperations,
    Trajectory,
    Use,
)

KEY = "Use the small brass key that hangs behind the kitchen stove to open the red door."
NEAR = "Use the small brass key that hangs behind the kitchen stove to open the red doors."
FAR = "Copper coins sink in the well."


@pytest.fixture
def bank(tmp_path):
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


def dump(bank):
    return [entry.model_dump_json() for entry in bank.entries()]


def use(bank, entry, *outcomes):
    for success in outcomes:
        uses = (Use(experience_id=entry.id, experience_version=entry.version),)
        bank.record(Trajectory(task="t", success=bool(success), uses=uses))


def brute_force(vectors, threshold, accept):
    """Each row in order joins the survivor most like it that is accepted, the whole matrix in
    memory.
    """
    cosines = vectors @ vectors.T
    joins = {}
    for i in range(len(vectors)):
        candidates = [j for j in range(i) if joins[j] == j and cosines[i, j] >= threshold]
        candidates.sort(key=lambda j: (-cosines[i, j], j))
        joins[i] = next((j for j in candidates if accept(j, i)), i)
    return joins


def answered(asking, accept):
    """The result of a search whose questions a function answers."""
    try:
        question = next(asking)
        while True:
            question = asking.send(accept(*question))
    except StopIteration as end:
        return end.value


@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 60),
    block=st.integers(1, 17),
    columns=st.integers(1, 13),
    judged=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_blocks_of_any_size_find_what_brute_force_finds(seed, n, block, columns, judged):
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(max(1, n // 5), 8))
    vectors = normalise(centres[rng.integers(len(centres), size=n)] + 0.3 * rng.normal(size=(n, 8)))
    verdicts = rng.random((n, n)) < 0.5

    def accept(older, newer):
        return not judged or bool(verdicts[older, newer])

    threshold = 0.9
    cosines = (vectors @ vectors.T)[np.triu_indices(n, 1)]
    ties = np.any(np.abs(cosines - threshold) < 1e-5) or np.any(np.diff(np.sort(cosines)) < 1e-7)
    assume(not ties)  # they may fall on either side by rounding
    before = dedupe.BLOCK, dedupe._COLUMNS
    dedupe.BLOCK, dedupe._COLUMNS = block, columns
    try:
        found = answered(dedupe.leaders(vectors, threshold, range(n)), accept)
        assert found == brute_force(vectors, threshold, accept)
    finally:
        dedupe.BLOCK, dedupe._COLUMNS = before


def test_no_array_grows_with_the_square_of_the_entries(monkeypatch):
    """The largest product made is one block of rows by one block of columns."""
    import tracemalloc

    monkeypatch.setattr(dedupe, "BLOCK", 64)
    monkeypatch.setattr(dedupe, "_COLUMNS", 64)
    vectors = normalise(np.random.default_rng(0).normal(size=(6000, 16)))
    tracemalloc.start()
    try:
        joins = answered(
            dedupe.leaders(vectors, 0.999, range(len(vectors))), lambda older, newer: True
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(joins) == 6000
    assert peak < 6000 * 6000 * 4 / 20


def test_near_duplicates_are_merged_into_the_oldest_with_all_that_is_known(bank):
    old, far, new = (bank.add(text, task="house") for text in (KEY, FAR, NEAR))
    use(bank, old, 1, 1, 0)
    use(bank, new, 0, 1)
    bank.note_retrievals([old.id, old.id, new.id])
    head = bank.head
    (found,) = bank.deduplicate(0.9)
    survivor = bank.get(old.id)
    assert found.survivor.id == old.id and [entry.id for entry in found.merged] == [new.id]
    assert (survivor.text, survivor.task, survivor.version) == (KEY, "house", 2)
    assert (
        survivor.provenance.parents == ((old.id, 1), (new.id, 1))
        and survivor.provenance.cause == "dedupe"
    )
    assert (
        survivor.statistics.retrievals,
        survivor.statistics.uses,
        survivor.statistics.successes,
    ) == (3, 5, 3)
    assert bank.get(new.id) is None and [entry.id for entry in bank] == [old.id, far.id]
    assert bank.lineage(old.id, 2) == [(old.id, 2), (old.id, 1), (new.id, 1)]
    assert (bank.head, bank.commits()[-1].cause) == (head + 1, "dedupe")
    assert bank.search(KEY)[0].experience.id == old.id
    with ExperienceBank(bank.path, read_only=True) as again:
        assert again.get(old.id).statistics.uses == 5 and len(again) == 2
    bank.rollback(head)
    assert [(entry.id, entry.version, entry.text) for entry in bank] == [
        (e.id, 1, e.text) for e in (old, far, new)
    ]


def test_uplift_of_the_survivor_reaches_what_was_merged_into_it(bank):
    a, b = bank.add(KEY), bank.add(NEAR)
    for group, entry in (("a", a), ("b", b)):
        uses = (Use(experience_id=entry.id, experience_version=1),)
        bank.record(Trajectory(task="t", group=group, success=True, uses=uses))
        bank.record(Trajectory(task="t", group=group, success=False, condition="free"))
    bank.deduplicate(0.9)
    assert bank.uplift(a.id).baseline == "tasks"
    assert (bank.uplift(a.id).lineage.groups, bank.uplift(a.id).lineage.mean) == (2, 1.0)


def test_credit_of_the_survivor_goes_to_each_generation_once(bank):
    """The survivor names no generation: those of its parents earn what it earns, by lineage."""
    for text in (KEY, NEAR):
        distilled = Distillation(
            parsed=ParsedOperations(operations=(Add(text=text),)), generation=Generation(text=text)
        )
        bank.apply(
            distilled, trajectory=Trajectory(task="house", instance=f"world-{len(bank)}"), shown=[]
        )
    (found,) = bank.deduplicate(0.9)
    versions = [
        bank.version(*one) for one in bank.lineage(found.survivor.id, found.survivor.version)
    ]
    generations = [entry.provenance.generation for entry in versions]
    assert generations[0] is None and len(set(generations[1:])) == 2 and None not in generations[1:]
    assert found.survivor.provenance.instance is None
    for instance in ("world-0", "world-1"):  # made from both task instances: hidden from both
        assert bank.search(KEY, exclude_instance=instance) == []


def test_a_dry_run_changes_nothing(bank):
    bank.add_many([KEY, NEAR])
    before, head = dump(bank), bank.head
    assert len(bank.deduplicate(0.9, dry_run=True)) == 1
    assert dump(bank) == before and bank.head == head
    with ExperienceBank(bank.path, read_only=True) as copy:
        assert len(copy.deduplicate(0.9, dry_run=True)) == 1
        with pytest.raises(ReadOnlyBankError):
            copy.deduplicate(0.9)


def test_nothing_alike_makes_no_commit(bank):
    bank.add_many([KEY, FAR])
    head = bank.head
    assert bank.deduplicate() == [] and bank.head == head


def test_one_task_does_not_make_different_texts_alike(bank):
    """Entries are found by task and text together; only texts are compared here."""
    task = "Escape from the house with the red door, the garden and the well before midnight."
    a, b = bank.add(KEY, task=task), bank.add(FAR, task=task)
    vectors = [bank._history.stored(entry.id, 1).vector for entry in (a, b)]
    text_cosine = float(np.dot(*bank.embedder([KEY, FAR])))
    assert float(vectors[0] @ vectors[1]) > 0.75 > text_cosine
    assert bank.deduplicate(0.75) == []


def test_tasks_are_apart_unless_asked_for(bank):
    a, b = bank.add(KEY, task="house"), bank.add(KEY, task="castle")
    assert bank.deduplicate(0.9) == []
    (found,) = bank.deduplicate(0.9, across_tasks=True)
    assert (found.survivor.id, found.survivor.task, found.merged[0].id) == (a.id, None, b.id)
    assert bank.search(KEY)[0].score == pytest.approx(1.0, abs=1e-5)  # found by its text alone now


def test_kinds_are_never_mixed(bank):
    bank.add(KEY, kind="lesson")
    bank.add(KEY, kind="warning")
    assert bank.deduplicate(0.5, across_tasks=True) == []


def test_equal_texts_are_duplicates_at_the_highest_threshold(bank):
    bank.add_many([KEY, KEY, FAR, KEY])
    (found,) = bank.deduplicate(1.0)
    assert len(found.merged) == 2 and len(bank) == 2


def test_the_judge_has_the_last_word_and_sees_the_older_first(bank):
    a, b, c = bank.add(KEY), bank.add(NEAR), bank.add(KEY)
    asked = []

    def no(older, newer):
        asked.append((older.id, newer.id))
        return False

    (found,) = bank.deduplicate(0.9, judge=no)
    assert asked == [(a.id, b.id)]  # equal texts need no judgement
    assert found.survivor.id == a.id and [entry.id for entry in found.merged] == [c.id]
    assert [entry.id for entry in bank] == [a.id, b.id]
    (found,) = bank.deduplicate(0.9, judge=lambda older, newer: True)
    assert [entry.id for entry in found.merged] == [b.id]


def test_an_extractor_judges(bank):
    import experiential as xp

    bank.add_many([KEY, NEAR])
    assert bank.deduplicate(0.9, judge=xp.ExtractorAgent(xp.ScriptedLLM(["No."])).judge) == []
    assert len(bank.deduplicate(0.9, judge=xp.ExtractorAgent(xp.ScriptedLLM(["Yes."])).judge)) == 1


def test_a_batch_is_compared_within_itself_first_then_with_older_entries(bank):
    old = bank.add(KEY)
    other_old = bank.add(KEY + " ")
    first, second, alone = bank.add_many([NEAR, NEAR, FAR])
    assert other_old.text == old.text
    asked = []

    def yes(older, newer):
        asked.append((older.id, newer.id))
        return True

    (found,) = bank.deduplicate(0.9, judge=yes, among=[first.id, second.id, alone.id])
    assert found.survivor.id == old.id
    assert [entry.id for entry in found.merged] == [first.id, second.id]
    assert asked == [(old.id, first.id)]  # the second had joined the first already
    assert (
        bank.get(other_old.id) is not None
    )  # the bank's own entries are not compared with each other
    assert bank.get(alone.id) is not None


def test_an_entry_rewritten_while_the_judge_thought_stays(bank):
    bank.add(KEY)
    b = bank.add(NEAR)

    def slow(older, newer):
        bank.update(b.id, "Something else by now.")
        return True

    assert bank.deduplicate(0.9, judge=slow) == []
    assert bank.get(b.id).text == "Something else by now." and len(bank) == 2


@pytest.mark.parametrize("threshold", [0, -1, 1.01])
def test_a_threshold_out_of_range_is_refused(bank, threshold):
    with pytest.raises(ValueError, match="Expected a threshold"):
        bank.deduplicate(threshold)


def test_texts_are_embedded_a_batch_at_a_time_and_equal_ones_once(monkeypatch):
    monkeypatch.setattr(dedupe, "_TEXTS_AT_ONCE", 4)
    calls = []

    def embed(texts):
        calls.append(list(texts))
        return normalise(np.random.default_rng(len(calls)).normal(size=(len(texts), 8)))

    entries = [Experience(text=f"text {i % 10}") for i in range(30)]
    found = dedupe.find(entries, embed, 0.999)
    assert [len(call) for call in calls] == [4, 4, 2]
    assert len(found) == 10 and all(len(group.merged) == 2 for group in found)
