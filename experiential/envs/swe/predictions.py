"""Write predictions in SWE-bench's format, for official scoring elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict


class Prediction(TypedDict):
    """Hold a model's change for an instance, as SWE-bench's harness scores it."""

    instance_id: str
    model_name_or_path: str
    model_patch: str


def write_predictions(file: str | Path, predictions: Iterable[Prediction]) -> int:
    """Write predictions as JSON Lines, the last of each instance and model; return their number.

    Such a file is what ``python -m swebench.harness.run_evaluation --predictions_path FILE`` takes.

    >>> import tempfile
    >>> made = {"instance_id": "a-1", "model_name_or_path": "me", "model_patch": ""}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_predictions(f"{folder}/it.jsonl", [made])
    1
    """
    known = {(one["instance_id"], one["model_name_or_path"]): one for one in predictions}
    lines = [
        json.dumps({name: one[name] for name in Prediction.__annotations__})
        for one in known.values()
    ]
    Path(file).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return len(lines)
