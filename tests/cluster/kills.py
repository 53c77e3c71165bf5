"""Kill an actor of Ray for certain."""

from __future__ import annotations

import time
from typing import Any

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
