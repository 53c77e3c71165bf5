"""Kill an actor of Ray for certain, and find the processes of vLLM below it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil

SECONDS = 60.0


def kill(ray: Any, handle: Any) -> None:
    """Kill an actor, and wait until no call reaches it any more: Ray kills it some time later."""
    ray.kill(handle)
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        try:
            ray.get(handle.__ray_ready__.remote(), timeout=SECONDS)
        except ray.exceptions.RayActorError:
            return
        time.sleep(0.01)
    raise AssertionError(f"Expected an actor that ends within {SECONDS} s of its kill")


def engine_cores(actor: psutil.Process) -> Iterator[psutil.Process]:
    """Yield vLLM's engines below an engine's actor.

    An engine gives itself the title VLLM::EngineCore. In some environments it cannot (where its
    first variable was set anew), and keeps the command line of a spawned process.
    """
    for child in actor.children():
        with suppress(psutil.Error):
            if re.search("spawn_main|VLLM::EngineCore", " ".join(child.cmdline())):
                yield child
