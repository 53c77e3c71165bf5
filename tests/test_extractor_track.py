"""Credit of the extractor: whose generations a use pays, the same for a folder and a served bank,
beside a running event loop.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

import experiential as xp
from experiential.config import ExtractorOptions, ExtractorSettings, OptimSettings
from experiential.llm.transformers import TransformersLLM
from experiential.training.extractor_track import ExtractorTrack
from experiential.training.local import LocalRuntime
from experiential.types import (
    Condition,
    FinishReason,
    Generation,
    ParsedOperations,
    Provenance,
    Use,
)
from tests.llm_tiny import tiny_random_model
from tests.test_serve import serving


class Story(NamedTuple):
    """A bank with two entries merged into one and a refinement, and the generations that wrote
    them.
    """

    bank: Any
    merged: xp.Experience
    generations: dict[str, Generation]


def distillation(name: str, *operations: Any) -> xp.Distillation:
    return xp.Distillation(
        parsed=ParsedOperations(operations=operations),
        generation=Generation(id=name, text=name, response_ids=(1, 2), logprobs=(-1.0, -1.0)),
    )


def story(bank: Any) -> Story:
    trajectory = xp.Trajectory(task="leave", task_id="leave", instance="leave#1")
    told = {
        name: distillation(name, xp.Add(text=f"lesson of {name}", span=(1, 5)))
        for name in ("one", "two")
    }
    entries = [bank.apply(told[name], trajectory=trajectory, shown=[])[0] for name in told]
    told["merge"] = distillation(
        "merge", xp.Merge(entries=(1, 2), text="both lessons", span=(2, 7))
    )
    (merged,) = bank.consolidate(told["merge"], shown=entries)
    told["refine"] = distillation("refine")
    bank.keep_generation(told["refine"].generation)
    return Story(
        bank, merged, {name: cast("Generation", one.generation) for name, one in told.items()}
    )


def episode(
    *used: xp.Experience,
    success: bool = True,
    refinement: str | None = None,
    error: str | None = None,
) -> xp.Trajectory:
    uses = tuple(
        Use(experience_id=one.id, experience_version=one.version, score=0.5, refinement=refinement)
        for one in used
    )
    return xp.Trajectory(
        task="leave", uses=uses, success=success, condition=Condition.GUIDED, error=error
    )


def track_of(bank: Any, **settings: Any) -> ExtractorTrack:
    return ExtractorTrack(
        cast("Any", None), bank, ExtractorSettings(**settings)
    )  # no update is asked for, so no policy


@pytest.fixture(params=["folder", "served"])
def told(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Story]:
    if request.param == "folder":
        with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
            yield story(bank)
    else:
        with serving(tmp_path / "bank", embedder="hashing") as url, xp.ExperienceBank(url) as bank:
            yield story(bank)


def rewards(track: ExtractorTrack) -> dict[str, tuple[float, int, Any]]:
    """Total reward, uses and span of what waits, by the generation that wrote it."""
    waiting = track.buffer.state_dict()["waiting"]
    return {one["generation"]["id"]: (one["total"], one["uses"], one["span"]) for _, one in waiting}


async def test_a_use_pays_the_version_its_ancestors_and_the_refinement(told: Story) -> None:
    track = track_of(told.bank)
    twice = episode(told.merged, told.merged, success=False)
    failed = episode(told.merged, error="env: OSError: x")
    counted = await track.credit(
        [episode(told.merged, refinement="refine"), episode(told.merged), twice, failed]
    )
    assert counted == 3
    lineage = (1.0, 3, [2, 7]), (1.0, 3, [1, 5])
    assert rewards(track) == {
        "merge": lineage[0],
        "one": lineage[1],
        "two": lineage[1],
        "refine": (1.0, 1, None),
    }


async def test_the_order_of_the_samples_is_that_of_the_trajectories(told: Story) -> None:
    loose = told.bank.apply(
        distillation("late", xp.Add(text="a late lesson", span=(0, 4))),
        trajectory=xp.Trajectory(task="leave"),
        shown=[],
    )
    track = track_of(told.bank)
    await track.credit([episode(loose[0]), episode(told.merged)])
    order = list(rewards(track))
    assert order[0] == "late" and set(order[1:]) == {"merge", "one", "two"}


def draft(bank: Any, name: str, text: str, about: xp.Trajectory) -> xp.Experience:
    """The entry that a draft about an episode writes."""
    told = distillation(name, xp.Add(text=text))
    return bank.apply(told, trajectory=about, shown=[])[0]


async def test_drafts_are_told_by_the_episode_that_they_are_about(told: Story) -> None:
    bank, played = told.bank, [xp.Trajectory(task="leave") for _ in range(2)]
    drafts = [
        draft(bank, f"{kind} {number}", f"{kind} lesson {number}", one)
        for number, one in enumerate(played)
        for kind in ("good", "bad")
    ]
    track = track_of(bank, drafts=2, batch_size=5, options={"malformed_share": 0.5})
    track.on_distillation(played[0], distillation("malformed"), ())
    track.on_distillation(xp.Trajectory(task="leave"), distillation("lone"), ())
    await track.credit([episode(one, success=not number % 2) for number, one in enumerate(drafts)])
    taken = {one.generation.id: one.advantage for one in track.buffer.take(0, 0)}
    # 1, -1 and -1 about the first, 1 and -1 about the second; nothing to compare the lone one with
    assert taken == pytest.approx(
        {"good 0": 4 / 3, "bad 0": -2 / 3, "malformed": -2 / 3, "good 1": 1, "bad 1": -1}
    )


async def test_drafts_with_one_text_earn_alike(told: Story) -> None:
    about, other = xp.Trajectory(task="leave"), xp.Trajectory(task="leave")
    earlier = draft(told.bank, "earlier", "the same lesson", other)
    bad = draft(told.bank, "bad", "a bad lesson", about)
    same = [draft(told.bank, name, "the same lesson", about) for name in ("first", "second")]
    assert {one.id for one in same} == {earlier.id}
    for drafts, paid in ((2, ["bad", "earlier", "first", "second"]), (1, ["bad", "second"])):
        track = track_of(told.bank, drafts=drafts)
        await track.credit([episode(same[-1]), episode(bad, success=False)])
        found = rewards(track)
        assert sorted(found) == paid
        assert {found[name][:2] for name in paid if name != "bad"} == {(1.0, 1)}
        assert found["bad"][0] == -1.0


async def test_a_draft_that_adds_nothing_gains_what_play_without_advice_does(told: Story) -> None:
    about = xp.Trajectory(task="leave")
    wrong = draft(told.bank, "wrong", "a wrong lesson", about)
    right = draft(told.bank, "right", "a right lesson", about)
    group = [
        episode(right).model_copy(update={"group": "g"}),
        episode(wrong, success=False).model_copy(update={"group": "g"}),
        *(
            xp.Trajectory(task="leave", group="g", condition=Condition.FREE, success=won)
            for won in (True, False, False, False)
        ),
    ]
    for reward, expected in (
        ("relative", {"right": 0.75, "wrong": -0.25, "nothing": 0.0}),
        ("direct", {"right": 1.0, "wrong": -1.0}),
    ):
        track = track_of(told.bank, drafts=3, reward=reward)
        track.on_distillation(about, distillation("nothing", xp.Return()), ())
        await track.credit(group)
        assert {name: found[0] for name, found in rewards(track).items()} == expected
        assert track.silent == track.event()["silent"] == 1 and track.malformed == 0
    track = track_of(told.bank)  # eq. 3: no drafts, no comparison
    track.on_distillation(about, distillation("nothing", xp.Return()), ())
    await track.credit(group)
    assert "nothing" not in rewards(track) and track.silent == 0


async def test_answers_that_their_limit_cuts_are_counted_and_told_of_once(told: Story) -> None:
    about, track = xp.Trajectory(task="leave"), track_of(told.bank, max_tokens=48)
    whole = distillation("whole", xp.Return())
    made = cast("Generation", whole.generation).model_copy(
        update={"finish_reason": FinishReason.LENGTH}
    )
    cut = whole.model_copy(update={"generation": made})
    for one in [cut] * 8 + [whole] * 24:
        track.on_distillation(about, one, ())
        assert track.warning() is None, "fewer than 32 answers, or a quarter of them"
    for one in [cut] * 9:  # which push the first eight out
        track.on_distillation(about, one, ())
    assert (text := track.warning()) is not None
    assert text.startswith("9 of the extractor's last 32 answers were cut") and "(48)" in text
    assert track.warning() is None
    resumed = track_of(told.bank)
    resumed.load_state_dict(json.loads(json.dumps(track.state_dict())))
    assert track.event()["cut"] == resumed.event()["cut"] == 17


async def test_a_checkpoint_holds_the_answers_that_wrote_nothing_so_far(told: Story) -> None:
    about = xp.Trajectory(task="leave")
    entry = draft(told.bank, "written", "a lesson", about)
    options: dict[str, Any] = {"drafts": 3, "reward": "relative"}
    track, resumed = track_of(told.bank, **options), track_of(told.bank, **options)
    track.on_distillation(about, distillation("malformed"), ())
    track.on_distillation(about, distillation("nothing", xp.Return()), ())
    resumed.load_state_dict(json.loads(json.dumps(track.state_dict())))
    free = xp.Trajectory(task="leave", group="g", condition=Condition.FREE, success=False)
    await resumed.credit([episode(entry).model_copy(update={"group": "g"}), free])
    assert set(rewards(resumed)) == {"written", "malformed", "nothing"}
    assert (resumed.malformed, resumed.silent) == (1, 1)


async def test_an_extractor_that_is_not_trained_is_credited_nothing(told: Story) -> None:
    track = track_of(told.bank, train=False)
    assert await track.credit([episode(told.merged)]) == 0
    assert len(track.buffer) == 0


class WaitingBank:
    """Answers after the event loop has gone on, or fails; notes who asked."""

    def __init__(self) -> None:
        self.went_on = threading.Event()
        self.asked_by: set[int] = set()

    def lineage(self, id: str, version: int) -> Sequence[tuple[str, int]]:
        self.asked_by.add(threading.get_ident())
        if not self.went_on.wait(30):
            raise TimeoutError("the event loop stood still while the bank was asked")
        return [(id, version)]

    def version(self, id: str, version: int) -> xp.Experience:
        return xp.Experience(id=id, text="x", provenance=Provenance(generation=id))

    def generation(self, id: str) -> Generation:
        return Generation(id=id, text="x", response_ids=(1,), logprobs=(-1.0,))


async def test_the_event_loop_goes_on_while_the_bank_works_and_the_buffer_changes_at_once() -> None:
    bank, entries = WaitingBank(), [xp.Experience(text="a"), xp.Experience(text="b")]
    track = track_of(bank)
    crediting = asyncio.create_task(track.credit([episode(*entries)]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(track.buffer) == 0  # an update that takes its batch here meets nothing of it
    bank.went_on.set()
    assert await crediting == 2
    assert list(rewards(track)) == [entry.id for entry in entries]
    assert threading.get_ident() not in bank.asked_by


def member(
    used: xp.Experience | None, success: bool, group: str, verdict: str | None = None
) -> xp.Trajectory:
    """A member of a group: guided with an entry, else free."""
    uses = (
        ()
        if used is None
        else (
            Use(
                id=f"{group}{success}",
                experience_id=used.id,
                experience_version=used.version,
                verdict=verdict,
            ),
        )
    )  # type: ignore[arg-type]
    condition = Condition.FREE if used is None else Condition.GUIDED
    return xp.Trajectory(task="leave", group=group, uses=uses, success=success, condition=condition)


async def test_relative_rewards_are_gains_over_the_free_members_and_others_are_counted(
    told: Story,
) -> None:
    track = track_of(told.bank, reward="relative")
    free = [member(None, won, "a") for won in (True, False, False, False)]
    failed = episode(told.merged, error="env: gone")
    counted = await track.credit(
        [
            *free,
            member(told.merged, True, "a"),
            member(told.merged, False, "a"),
            member(told.merged, True, "b"),
            failed,
        ]
    )
    assert counted == 2 and track.uncredited == 1, "group b has nobody to compare with"
    assert rewards(track)["merge"][:2] == (pytest.approx(0.75 - 0.25), 2)


async def test_verdicts_and_bonuses_add_to_the_outcome(told: Story) -> None:
    track = track_of(told.bank)
    members = [
        member(told.merged, True, "a", "refine"),
        member(told.merged, False, "a", "accept"),
        member(told.merged, False, "b", "reject"),
    ]
    await track.credit(members, {"aTrue": 0.25, "other": 9.0})
    assert rewards(track)["merge"][:2] == (pytest.approx((1 + 0.5 + 0.25) + (-1 + 1) + (-1 + 0)), 3)


async def test_an_entry_that_is_used_again_is_trained_on_again_after_its_cooldown_with_less_weight(
    tmp_path: Path,
) -> None:
    model, tokenizer = tiny_random_model()
    policy = LocalRuntime(TransformersLLM(model, tokenizer), OptimSettings())
    written = distillation("one", xp.Add(text="a lesson", span=None))
    generation = Generation(
        id="one", text="x", prompt_ids=(1, 2), response_ids=(3, 4), logprobs=(-1.0, -1.0)
    )
    with xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        told = xp.Trajectory(task="leave")
        (entry,) = bank.apply(
            written.model_copy(update={"generation": generation}), trajectory=told, shown=[]
        )
        options = ExtractorOptions(cooldown=2, decay=1.0)
        track = ExtractorTrack(policy, bank, ExtractorSettings(batch_size=1, options=options))
        weights: list[float] = []
        for step in range(5):
            await track.credit([episode(entry)])
            before = track.updates
            await track.step(step)
            await track.finish()
            weights.append(track.weight if track.updates > before else 0.0)
    assert weights == pytest.approx([1, 0, 1 / 2, 0, 1 / 3]), (
        "eq. 7 with a cooldown of 2 and a decay of 1"
    )
