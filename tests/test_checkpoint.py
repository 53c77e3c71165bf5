"""A checkpoint is visible whole or not at all, whenever the process that writes it is killed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from experiential.training.checkpoint import CheckpointStore

PARTS = ("actor.bin", "extractor.bin", "bank.bin")


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


def commit(store: CheckpointStore, step: int) -> Path:
    draft = store.begin(step)
    for part in PARTS:
        (draft / part).write_text(str(step))
    return store.commit(draft, step, {})


def visible(store: CheckpointStore) -> list[str]:
    """Names of the checkpoints, each of which must have all parts."""
    for path in store.all():
        assert {one.name for one in path.iterdir()} == {*PARTS, "manifest.json"}
    return [path.name for path in store.all()]


@pytest.mark.parametrize("step", [3, 2], ids=["the oldest goes", "written again after a resume"])
def test_a_kill_while_a_checkpoint_is_removed_leaves_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    commit(store, 1), commit(store, 2)

    def killed(folder: Path, **_: Any) -> None:
        for path in sorted(Path(folder).glob("*.bin"))[:1]:
            path.unlink()
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shutil, "rmtree", killed)
        commit(store, step)
    assert visible(store)[-1] == f"step-{step:06d}"
    commit(store, 4)  # the next run removes what was left
    assert visible(store) == [f"step-{step:06d}", "step-000004"]
    assert sorted(path.name for path in store.folder.iterdir()) == visible(store)
