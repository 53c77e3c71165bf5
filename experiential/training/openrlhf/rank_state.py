"""Save weights and optimiser of a DeepSpeed engine so that any number of ranks can resume.

DeepSpeed's own checkpoints hold one file per rank and fit that number of ranks only. Here every
tensor is gathered from its parts, one after the other, and one of the ranks writes it, so that all
write at once; each rank takes its part when it is read again.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch

from experiential.errors import CheckpointError

INDEX = "state.json"
_KEYS = ("weight", "exp_avg", "exp_avg_sq")
_SHARD_BYTES = 2 << 30


def save_state(engine: Any, folder: Path, *, rank: int, ranks: int) -> dict[str, Any]:
    """Gather weights and AdamW's moments in float32, and write those that fall to this rank.

    All ranks must call it. The state is whole once `write_index` has their results.

    Args:
        engine: a DeepSpeed engine with ZeRO stage 1, 2 or 3.
        folder: seen by all ranks; created.
        rank: number of this rank.
        ranks: number of all ranks; each writes about as many bytes, in files of at most 2 GB or
            one tensor.

    Returns:
        this rank's part of the index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for file, shard in _shards(engine, rank=rank, ranks=ranks):
        _write(shard, folder / file)
        places |= dict.fromkeys(shard, file)
    return {"places": places, "steps": _steps(engine)}


class BackgroundWriter:
    """Write the states of a rank in a thread, one after the other, while it trains on.

    A copy of what falls to this rank stays in the machine's memory until it is written.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread()
        self._part: dict[str, Any] = {}
        self._error: Exception | None = None

    def begin(self, engine: Any, folder: Path, *, rank: int, ranks: int) -> None:
        """Copy what `save_state` would write, and begin to write it; all ranks must call it."""
        if self._thread.is_alive():  # of a run that did not wait for it
            self._thread.join()
        shards = [
            (file, {name: value.clone() for name, value in shard.items()})
            for file, shard in _shards(engine, rank=rank, ranks=ranks)
        ]
        self._part, self._error, steps = {}, None, _steps(engine)

        def write() -> None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                places: dict[str, str] = {}
                while shards:
                    file, shard = shards.pop(0)
                    _write(shard, folder / file)
                    places |= dict.fromkeys(shard, file)
                self._part = {"places": places, "steps": steps}
            except Exception as error:  # noqa: BLE001  (raised by `part`)
                self._error = error

        self._thread = threading.Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()

    def part(self) -> dict[str, Any] | None:
        """Return this rank's part of the index once all is written, until then None.

        Raises:
            Exception: it could not be written.
        """
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._part


def _shards(engine: Any, *, rank: int, ranks: int) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Gather every tensor on all ranks, and yield those of this rank on the CPU, by file."""
    fragments: Any = import_module("deepspeed.utils")
    _link_moments(engine)
    shard: dict[str, torch.Tensor] = {}
    files = count()

    def full() -> tuple[str, dict[str, torch.Tensor]]:
        return f"state-{rank:05d}-{next(files):05d}.safetensors", dict(shard)

    sizes = [0] * ranks  # dealt out evenly from the start: ranks that write hold up the others
    for name, parameter in engine.module.named_parameters():
        for key in _KEYS if parameter.requires_grad else ():
            if key == "weight":
                value = fragments.safe_get_full_fp32_param(parameter)
            else:
                value = fragments.safe_get_full_optimizer_state(parameter, key)
            writer = sizes.index(min(sizes))
            sizes[writer] += value.nbytes
            if writer != rank:
                continue
            if shard and sum(t.nbytes for t in shard.values()) + value.nbytes > _SHARD_BYTES:
                yield full()
                shard.clear()
            shard[f"{name}:{key}"] = value.cpu().contiguous()
    if shard:
        yield full()


def _write(shard: dict[str, torch.Tensor], file: Path) -> None:
    import_module("safetensors.torch").save_file(shard, file)


def _steps(engine: Any) -> int:
    """Return the updates that AdamW has counted, for its bias correction."""
    states = engine.optimizer.optimizer.state.values()
    return max((int(state["step"]) for state in states if "step" in state), default=0)


def write_index(folder: Path, parts: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]) -> None:
    """Join the results of `save_state` of all ranks; a folder with an index is whole.

    ``facts`` is JSON to keep beside them.
    """
    places = {name: file for part in parts for name, file in part["places"].items()}
    index = {"places": places, "steps": parts[0]["steps"], **facts}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def load_state(engine: Any, folder: Path) -> dict[str, Any]:
    """Restore a state written by `save_state`, on all ranks; return its index.

    Raises:
        CheckpointError: the folder holds no state, or that of another model.
    """
    fragments: Any = import_module("deepspeed.utils")
    zero: Any = import_module("deepspeed").zero
    safe_open: Any = import_module("safetensors").safe_open
    index = read_index(folder)
    places: dict[str, str] = index["places"]
    parameters = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    names = {f"{name}:{key}" for name in parameters for key in _KEYS}
    if names != set(places):
        raise CheckpointError(
            f"Expected weights of this model in {folder}, got other names; resume with the model"
            " that was trained"
        )
    _link_moments(engine)
    for name, parameter in parameters.items():
        found: dict[str, torch.Tensor] = {}
        for key in _KEYS:
            with safe_open(folder / places[f"{name}:{key}"], framework="pt") as file:
                found[key] = file.get_tensor(f"{name}:{key}").to(parameter.device)
        # The bfloat16 weights of the forward pass, of which ZeRO 3 keeps a part on each rank.
        divided = hasattr(parameter, "ds_id")
        with torch.no_grad(), zero.GatheredParameters([parameter], 0, enabled=divided):
            parameter.data.copy_(found["weight"].to(parameter.dtype))
        fragments.safe_set_full_fp32_param(parameter, found["weight"])
        for key in _KEYS[1:]:
            fragments.safe_set_full_optimizer_state(parameter, found[key], key)
    steps, optimizer = index["steps"], engine.optimizer.optimizer
    for state in (*optimizer.state.values(), *optimizer.param_groups):
        if "step" in state:
            counted = state["step"]
            state["step"] = torch.full_like(counted, steps) if torch.is_tensor(counted) else steps
    return index


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a saved state.

    Raises:
        CheckpointError: there is none.
    """
    if not (folder / INDEX).is_file():
        raise CheckpointError(
            f"Expected a policy state in {folder}, found no {INDEX}; choose another checkpoint"
        )
    return json.loads((folder / INDEX).read_text(encoding="utf-8"))


def await_files(folder: Path, parts: Sequence[Mapping[str, Any]], seconds: float) -> None:
    """Wait until this process sees all files of `save_state`; ranks may be on other nodes.

    Raises:
        CheckpointError: it does not within ``seconds``.
    """
    until = time.monotonic() + seconds
    files = {file for part in parts for file in part["places"].values()}
    while missing := sorted(file for file in files if not (folder / file).is_file()):
        if time.monotonic() >= until:
            raise CheckpointError(
                f"Expected what the ranks wrote in {folder}, found no {missing[0]}; set --output to"
                " a folder that all nodes with GPUs share, at the same path"
            )
        time.sleep(0.2)


def _link_moments(engine: Any) -> None:
    """Make DeepSpeed know the moments of every parameter.

    AdamW makes them at its first step, and DeepSpeed's ZeRO 1 and 2 looks for those of all groups
    after the first step of the first group: those of later groups are never found.
    """
    zero = engine.optimizer
    # Under ZeRO 3 the optimiser knows its parameters only while it steps; these are always known.
    flats = getattr(zero, "fp32_partitioned_groups_flat", None)
    for flat in flats or [p for group in zero.optimizer.param_groups for p in group["params"]]:
        if not zero.optimizer.state[flat]:
            moments = {key: torch.zeros_like(flat.data) for key in _KEYS[1:]}
            # torch counts steps by a tensor, DeepSpeed's own optimisers by a number
            is_torch = isinstance(zero.optimizer, torch.optim.Adam)
            zero.optimizer.state[flat].update(step=torch.zeros(()) if is_torch else 0, **moments)
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()
