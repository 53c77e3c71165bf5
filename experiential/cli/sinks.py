"""Where metrics go besides `metrics.jsonl`: TensorBoard, when it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class TensorBoardSink:
    """Writes the numbers of step and evaluation events as scalars; does nothing when TensorBoard is missing.

    A resumed run plays the steps after its checkpoint again: the start event says which, and they
    replace the old ones.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None
        self._installed = bool(find_spec("tensorboard") and find_spec("torch"))

    def handle(self, event: Event) -> None:
        """Write one event of the trainer."""
        if not self._installed:
            return
        if self._writer is None:
            self._open(event.get("step", 0))
        if event["event"] == "step":
            self._write_step(event)
        elif event["event"] == "eval":
            self._write_evaluation(event)

    def _open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1 if step else None)

    def _write_step(self, event: Event) -> None:
        for name, value in event.items():
            if (
                name not in ("step", "time")
                and isinstance(value, (int, float))
                and not isinstance(value, bool)
            ):
                self._writer.add_scalar(f"train/{name}", value, event["step"])

    def _write_evaluation(self, event: Event) -> None:
        for visit in event["visits"]:
            name = f"eval/{event['arm']}/visit_{visit['visit']}"
            self._writer.add_scalar(
                name, visit["successes"] / max(1, visit["episodes"]), event["step"]
            )

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is not None:
            self._writer.close()
