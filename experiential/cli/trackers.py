"""Send a run's events to the trackers of ``run.trackers``, beside ``metrics.jsonl``."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

import yaml

from experiential.errors import ConfigError, MissingExtraError
from experiential.plugins import resolve
from experiential.training.metrics import is_result

Event = dict[str, Any]


class Tracker(Protocol):
    """Receive the events of a run: ``start``, ``step``, ``eval``, ``checkpoint``, ``end``, ..."""

    def handle(self, event: Event) -> None:
        """Take in one event; ``event["event"]`` is its kind. Called on the trainer's thread."""
        ...

    def close(self) -> None:
        """Write what is left; called once, also when the run fails."""
        ...


def scalars(event: Event) -> dict[str, float]:
    """Return the numbers of a step or evaluation event by name; none of any other event.

    >>> scalars({"event": "step", "step": 3, "time": 1.0, "reward": 0.5, "failures": {}})
    {'train/reward': 0.5}
    """
    if event["event"] == "step":
        numbers = {
            f"train/{name}": value
            for name, value in event.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        return {k: v for k, v in numbers.items() if k not in ("train/step", "train/time")}
    if event["event"] == "eval":
        return {
            f"eval/{event['arm']}/visit_{visit['visit']}": visit["successes"]
            / max(1, visit["episodes"])
            for visit in event["visits"]
        }
    return {}


class TensorBoardTracker:
    """Write the numbers of step and evaluation events as scalars; do nothing without TensorBoard.

    A resumed run plays the steps after its checkpoint again. The start event says which, and the
    new scalars replace the old ones.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "tensorboard"
        self._writer: Any = None
        self._installed = bool(find_spec("tensorboard") and find_spec("torch"))

    def handle(self, event: Event) -> None:
        """Write one event of the trainer."""
        if not self._installed:
            return
        if self._writer is None:
            # opened by the first event, which knows the step from which a resumed run goes on
            from torch.utils.tensorboard import SummaryWriter

            step = event.get("step", 0)
            purge = step + 1 if step else None
            self._writer = SummaryWriter(str(self._folder), purge_step=purge)
        for name, value in scalars(event).items():
            self._writer.add_scalar(name, value, event["step"])

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """Log the numbers of step and evaluation events to Weights & Biases.

    Project, mode and key are those of its environment variables (``WANDB_PROJECT``, by default
    "experiential"; ``WANDB_MODE=offline`` keeps all in the folder). A resumed run is another run of
    the same group, since numbers that were logged cannot be replaced.
    """

    def __init__(self, folder: Path) -> None:
        try:
            wandb: Any = import_module("wandb")
        except ImportError:
            raise MissingExtraError("wandb", "wandb") from None
        name = folder.resolve().name
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "experiential"),
                dir=str(folder),
                name=name,
                group=name,
                config=settings_of(folder),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"Expected to log in to Weights & Biases, got: {error}; run `wandb login`, or set"
                " WANDB_MODE=offline"
            ) from error
        # its own count of calls only rises, and evaluations come at the step of training
        self._run.define_metric("*", step_metric="step")
        self._exit_code = 1

    def handle(self, event: Event) -> None:
        """Log one event of the trainer."""
        if found := scalars(event):
            self._run.log({"step": event["step"], **found})
        if is_result(event):
            self._exit_code = 0

    def close(self) -> None:
        """Send what is left, and mark the run as finished or failed."""
        self._run.finish(exit_code=self._exit_code)


class MLflowTracker:
    """Log the numbers of step and evaluation events to MLflow.

    They go to ``MLFLOW_TRACKING_URI``, by default to ``mlflow.db`` in the run's folder, and to the
    experiment ``MLFLOW_EXPERIMENT_NAME``, by default "experiential". A resumed run is another run
    of the same name.
    """

    def __init__(self, folder: Path) -> None:
        try:
            mlflow: Any = import_module("mlflow")
            import_module("sqlalchemy")  # of its store in a file
        except ImportError:
            raise MissingExtraError("mlflow", "mlflow") from None
        self._metric: Any = mlflow.entities.Metric
        place = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
        address = os.environ.get("MLFLOW_TRACKING_URI", place)
        self._client: Any = mlflow.MlflowClient(tracking_uri=address)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "experiential")
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        made = self._client.create_run(experiment, run_name=folder.resolve().name)
        self._id: str = made.info.run_id
        params = [mlflow.entities.Param(*pair) for pair in flattened(settings_of(folder))]
        for start in range(0, len(params), 100):  # it takes no more at once
            self._client.log_batch(self._id, params=params[start : start + 100])
        self._state = "FAILED"

    def handle(self, event: Event) -> None:
        """Log one event of the trainer."""
        now = int(time.time() * 1000)
        numbers = scalars(event).items()
        if found := [self._metric(*number, now, event["step"]) for number in numbers]:
            self._client.log_batch(self._id, metrics=found)
        if is_result(event):
            self._state = "FINISHED"

    def close(self) -> None:
        """Mark the run as finished or failed."""
        self._client.set_terminated(self._id, status=self._state)


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings that the run's folder holds; empty before they are written."""
    file = folder / "config.yaml"
    return yaml.safe_load(file.read_text("utf-8")) if file.is_file() else {}


def flattened(settings: dict[str, Any], above: str = "") -> list[tuple[str, str]]:
    """Return nested settings as keys with dots and values in words.

    >>> flattened({"seed": 0, "run": {"steps": 2}})
    [('seed', '0'), ('run.steps', '2')]
    """
    found: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, dict):
            found += flattened(cast("dict[str, Any]", value), f"{above}{name}.")
        else:
            found.append((f"{above}{name}", str(value)[:500]))
    return found


TRACKERS: dict[str, Callable[[Path], Tracker] | str] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MLflowTracker,
}


def open_trackers(names: Sequence[str], folder: Path) -> list[Tracker]:
    """Make the trackers of a run; each chooses its own place in the run's folder."""
    trackers = [resolve("trackers", name, TRACKERS)(folder) for name in names]
    for name, tracker in zip(names, trackers, strict=True):
        for method in ("handle", "close"):
            if not hasattr(tracker, method):
                raise ConfigError(
                    f"Expected the tracker {name!r} to have a method {method}, got"
                    f" {type(tracker).__name__} without one"
                )
    return trackers
