"""Read published layouts of text grids from Parquet or JSON Lines."""

from __future__ import annotations

import json
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from experiential.envs.arguments import checked, positive
from experiential.envs.names import NamedSplit
from experiential.errors import ConfigError

M = TypeVar("M", bound=BaseModel)
_WHERE = (
    "give the folder of a data set of github.com/microsoft/experiential_rl (rllm_data/datasets),"
    " and set ERL_DATA to rllm_data/datasets for the suites"
)


def read_layouts(
    data: str, split: NamedSplit, model: type[M], most: int | None, **drawn: Any
) -> tuple[M, ...]:
    """Return at most ``most`` rows of a file, or of the file of a split in a folder.

    In a folder ``test`` is read for ``eval`` and ``train`` for ``train``, as ``.parquet`` (which
    needs pyarrow) or ``.jsonl``. Variables such as ``$ERL_DATA`` are replaced. ``drawn`` are the
    arguments that only drawn layouts follow, None where they are not given.

    Raises:
        ConfigError: there is no such file, it cannot be read, or a row lacks a field; or an
            argument of drawn layouts is given.
    """
    positive(layouts=most)
    if given := [name for name, value in drawn.items() if value is not None]:
        raise ConfigError(
            f"Expected published layouts without {', '.join(given)}, got data={data!r} with it;"
            " leave one of them out"
        )
    path = Path(os.path.expandvars(data)).expanduser()
    if path.is_dir():
        stem = "test" if split == "eval" else "train"
        files = [path / f"{stem}{end}" for end in (".parquet", ".jsonl")]
        path = next((file for file in files if file.is_file()), files[0])
    if not path.is_file():
        raise ConfigError(f"Expected a file of published layouts, got {str(path)!r}; {_WHERE}")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError(f"Expected pyarrow to read {path}, got none; run pip install pyarrow")
    rows: list[Any] = []
    try:
        if path.suffix == ".parquet":
            rows = import_module("pyarrow.parquet").read_table(path).to_pylist()
        else:
            lines = path.read_text("utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError, RecursionError) as error:  # pyarrow's, of JSON and of UTF-8
        raise ConfigError(f"Expected a file of published layouts, got {path}: {error}") from error
    if not rows:
        raise ConfigError(f"Expected at least one layout in {path}, got none")
    expected = f"{', '.join(model.model_fields)} in each row of {path}"
    return tuple(checked(model, row, expected, f"row {n}") for n, row in enumerate(rows[:most], 1))
