"""Measure what a forward pass keeps in memory for its backward pass, and give memory back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor


def saved_bytes(forward: Callable[[], object], model: torch.nn.Module) -> int:
    """Count the bytes that ``forward`` keeps for its backward pass, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        kept = forward()
    del kept
    return sum(sizes.values())


def give_back() -> None:
    """Return freed memory to the system, which glibc's allocator keeps for its thread otherwise."""
    with suppress(AttributeError, OSError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
