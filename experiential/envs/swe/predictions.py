"""Predictions in SWE-bench's own format, for official scoring elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict


class Prediction(TypedDict):
    """What SWE-bench's harness scores: the change that a model made for an instance, as a diff in git's form."""

    instance_id: str
    model_name_or_path: str
    model_patch: str


def write_predictions(file: str | Path, predictions: Iterable[Prediction]) -> int:
    """Write predictions as JSON Lines, the last one of an instance and model, in the order in which they came first; how many.

    Such a file is what ``python -m swebench.harness.run_evaluation --predictions_path FILE`` takes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_predictions(f"{folder}/it.jsonl", [{"instance_id": "a-1", "model_name_or_path": "me", "model_patch": ""}])
    1
    """
    known = {(one["instance_id"], one["model_name_or_path"]): one for one in predictions}
    lines = [
        json.dumps({name: one[name] for name in Prediction.__annotations__})
        for one in known.values()
    ]
    Path(file).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return len(lines)
