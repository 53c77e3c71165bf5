"""Write joint checkpoints: both policies, buffer, bank and step in one folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiential.errors import CheckpointError

_MANIFEST = "manifest.json"


@dataclass
class CheckpointStore:
    """Keep the checkpoints of one run, in numbered folders.

    A checkpoint becomes visible by one rename, after everything in it was flushed to disk, and
    leaves by one before anything in it is removed: whatever a kill leaves visible is whole.
    """

    folder: Path
    keep: int = 2

    def begin(self, step: int) -> Path:
        """Create an empty folder for the parts of the checkpoint of ``step``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for gone in self.folder.glob(".gone-*"):  # a kill came in between
            shutil.rmtree(gone, ignore_errors=True)
        draft = self.folder / f".draft-{step:06d}"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        return draft

    def commit(self, draft: Path, step: int, manifest: dict[str, Any]) -> Path:
        """Rename the draft to the checkpoint of ``step``; remove all but the last ``keep``."""
        text = json.dumps({"step": step} | manifest, indent=1)
        (draft / _MANIFEST).write_text(text, encoding="utf-8")
        for path in (*sorted(draft.rglob("*")), draft):
            _flush(path)
        final = self.folder / f"step-{step:06d}"
        earlier = [_hide(final)] if final.exists() else []
        os.replace(draft, final)
        earlier += map(_hide, self.all()[: -self.keep])
        _flush(self.folder)
        for gone in earlier:
            shutil.rmtree(gone, ignore_errors=True)
        return final

    def all(self) -> Sequence[Path]:
        """Return the complete checkpoints, oldest first."""
        return sorted(p for p in self.folder.glob("step-*") if (p / _MANIFEST).is_file())

    def latest(self) -> tuple[Path, dict[str, Any]]:
        """Return the newest checkpoint and its manifest, or raise CheckpointError."""
        found = self.all()
        if not found:
            raise CheckpointError(
                f"Expected a checkpoint under {self.folder}, found none; train until there is one,"
                " see run.checkpoint_every"
            )
        try:
            return found[-1], json.loads((found[-1] / _MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"Expected a readable manifest in {found[-1]}, got: {error}"
            ) from error


def _hide(path: Path) -> Path:
    """Rename a checkpoint that will be removed; return where it is then."""
    gone = path.with_name(f".gone-{path.name}")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(path, gone)
    return gone


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
