"""A run that loses a process goes on from its last checkpoint and ends as if it had lost none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from experiential.config import Experiment, OptimSettings
from experiential.errors import ConfigError, LostProcessError
from experiential.llm.transformers import TransformersLLM
from experiential.recipe import load_experiment
from experiential.training.local import InProcessRuntime, LocalRuntime
from experiential.training.runtime import LossSettings, Policies, Sample, TrainStats
from experiential.training.trainer import Trainer
from tests.llm_tiny import tiny_random_model

SETTINGS = (
    "runtime=tests.test_trainer_lost:FragileRuntime", "bank.embedder=hashing", "actor.kl=0.1",
    "bank.retrieval.floor=0", "model.prompts=brief", "actor.groups=1", "actor.group_size=2",
    "actor.max_tokens=8", "extractor.batch_size=2", "extractor.max_tokens=8", "run.drain=true",
    "run.steps=5", "run.checkpoint_every=2", "eval.worlds=2", "eval.visits=1",
    "env.train={split: train, worlds: 6}",
)  # fmt: skip


class Fragile(LocalRuntime):
    """A policy whose process is lost in the updates of the actor that are listed, from 1."""

    lost: ClassVar[set[int]] = set()
    calls: ClassVar[int] = 0
    writes: ClassVar[int | None] = None
    """The update in which the writing of a checkpoint ends."""
    slow: ClassVar[set[int]] = set()
    """Updates that last until a checkpoint was written."""
    written: ClassVar[bool] = False
    saves: ClassVar[int] = 0

    async def train(self, samples: Sequence[Sample], loss: LossSettings) -> TrainStats:
        """Count, and train or be lost."""
        if self.name == "actor":
            Fragile.calls += 1
            if Fragile.calls in self.lost:
                raise LostProcessError("Expected actor rank 1 to be alive, but it died")
            while Fragile.calls in self.slow and not Fragile.written:
                await asyncio.sleep(0.01)
        return await super().train(samples, loss)

    async def begin_save(self, folder: Path) -> Callable[[], Awaitable[None]]:
        """Save at once, and be done with it only when the test says so."""
        done = await super().begin_save(folder)

        async def written() -> None:
            Fragile.saves += 1
            while self.writes is not None and Fragile.calls < self.writes:
                await asyncio.sleep(0.01)
            await done()
            Fragile.written = True

        return written


class FragileRuntime(InProcessRuntime):
    """Builds the policies of one seed each time."""

    last: ClassVar[list[torch.Tensor]] = []
    opened: ClassVar[int] = 0
    closed: ClassVar[set[int]] = set()
    """Openings that fail, from 1."""

    def __init__(
        self, experiment: Experiment, policies: Policies | None = None, output: Path | None = None
    ) -> None:
        made, executor = list[LocalRuntime](), None
        FragileRuntime.opened += 1
        if FragileRuntime.opened in self.closed:
            raise ConfigError("Expected an answer of node two, got none")
        for name in ("actor", "extractor"):
            model, tokenizer = tiny_random_model()
            llm = TransformersLLM(model, tokenizer, executor=executor, name=name)
            executor = llm.executor
            made.append(Fragile(llm, OptimSettings(lr=1e-3), name=name, reference=True))
        super().__init__(experiment, policies or (made[0], made[1]), output)

    def close(self) -> None:
        """Keep the weights, and close the policies."""
        policies: Any = (self.actor, self.extractor)
        parts = [p.detach().flatten() for one in policies for p in one.llm.model.parameters()]
        FragileRuntime.last = [torch.cat(parts).clone()]
        for policy in policies:
            policy.close()


def run(folder: Path, lost: set[int], *further: str) -> tuple[list[dict[str, Any]], torch.Tensor]:
    Fragile.lost, Fragile.calls, FragileRuntime.opened = lost, 0, 0
    Fragile.written, Fragile.saves = False, 0
    events: list[dict[str, Any]] = []
    experiment = load_experiment("complementary", [*SETTINGS, *further])
    Trainer(experiment, folder, observer=events.append).run()
    return events, FragileRuntime.last[0]


@pytest.mark.parametrize("lost", [{1}, {4}, {4, 5}], ids=str)
def test_a_lost_process_changes_nothing_of_the_result(tmp_path: Path, lost: set[int]) -> None:
    whole, expected = run(tmp_path / "whole", set())
    events, weights = run(tmp_path / "lost", lost)
    assert FragileRuntime.opened == 1 + len(lost)
    assert torch.equal(weights, expected)
    said = [event["text"] for event in events if event["event"] == "warning"][-1]
    start = "its checkpoint of step 2" if 4 in lost else "its beginning"
    assert f"it died; the run goes on from {start}, restart {len(lost)} of 2" in said
    last = [[e for e in found if e["event"] == "step"][-1] for found in (whole, events)]
    for name in ("step", "reward", "entries", "actor_version", "extractor_updates"):
        assert last[0][name] == last[1][name], name
    ends = [event["reason"] for event in events if event["event"] == "end"]
    assert ends == ["steps"], "the trackers see one run"


def test_a_run_that_loses_a_process_again_and_again_ends_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(LostProcessError, match="actor rank 1"):
        run(tmp_path, {4, 5, 6}, "cluster.restarts=2")
    assert FragileRuntime.opened == 3
    with pytest.raises(LostProcessError, match="actor rank 1"):
        run(tmp_path / "none", {1}, "cluster.restarts=0")
    assert FragileRuntime.opened == 1


def test_a_start_that_fails_after_a_loss_is_tried_again_and_a_first_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FragileRuntime, "closed", {1})
    with pytest.raises(ConfigError, match="node two"):
        run(tmp_path / "first", set())
    assert FragileRuntime.opened == 1
    monkeypatch.setattr(FragileRuntime, "closed", {2})
    events, _ = run(tmp_path / "later", {4})
    assert FragileRuntime.opened == 3
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3, 3, 4, 5]
    said = [e["text"] for e in events if "the run goes on" in e.get("text", "")]
    assert ["actor rank 1" in said[0], "node two" in said[1]] == [True, True], "each reason is told"


BACKGROUND = ("cluster.background_checkpoints=true", "run.steps=6", "run.checkpoint_every=2")


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint of step 2 is written during the update of step 4."""
    monkeypatch.setattr(Fragile, "writes", 4)
    monkeypatch.setattr(Fragile, "slow", {4})


@pytest.mark.usefixtures("slow_disk")
def test_a_run_trains_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """Step 3 is over before the checkpoint of step 2 is; the next one waits for it."""
    events, weights = run(tmp_path / "background", set(), *BACKGROUND)
    order = [(e["event"], e["step"]) for e in events if e["event"] in ("step", "checkpoint")]
    assert order.index(("step", 3)) < order.index(("checkpoint", 2)) < order.index(("step", 5))
    assert [step for event, step in order if event == "checkpoint"] == [2, 4, 6, 6]
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patched:
        patched.setattr(Fragile, "writes", None)
        patched.setattr(Fragile, "slow", set())
        _, expected = run(tmp_path / "at once", set(), *BACKGROUND[1:])
    assert torch.equal(weights, expected)


@pytest.mark.usefixtures("slow_disk")
def test_a_process_lost_while_a_checkpoint_is_written_leaves_the_former_as_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third update is lost, and with it the checkpoint of step 2, which was being written."""
    monkeypatch.setattr(Fragile, "slow", set())
    events, weights = run(tmp_path / "lost", {3}, *BACKGROUND)
    [said] = [e["text"] for e in events if "the run goes on" in e.get("text", "")]
    assert "from its beginning" in said
    names = {path.name for path in (tmp_path / "lost" / "checkpoints").iterdir()}
    assert names == {"step-000004", "step-000006"}, "no draft is left"
    monkeypatch.setattr(Fragile, "writes", None)
    _, expected = run(tmp_path / "whole", set(), *BACKGROUND[1:])
    assert torch.equal(weights, expected)
