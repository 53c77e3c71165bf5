"""Reserve GPUs of a Ray cluster for a whole run: all of them at once, or none."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from experiential.errors import BackendError

PLACED_S = 60.0
"""Time in which Ray must find places for GPUs of which enough are free."""


class Reservation:
    """Hold a placement group for several users; the last one that leaves frees its GPUs.

    Args:
        group: Ray's placement group.
        user: the first one.
    """

    def __init__(self, group: Any, user: str) -> None:
        self.group, self.users = group, {user}

    def leave(self, user: str) -> None:
        """Note that a user needs the GPUs no more; safe to call twice."""
        if user in self.users:
            self.users.remove(user)
            if not self.users:
                import_module("ray.util.placement_group").remove_placement_group(self.group)


def reserve(bundles: Sequence[int], user: str, *, one_node: bool = False) -> Reservation:
    """Reserve a placement group; Ray gives all of its bundles at once, or none.

    A bundle is never divided among nodes, so processes that must be on one node get one bundle
    together. Ray places large bundles first, and takes as few nodes as it finds.

    Args:
        bundles: GPUs of each bundle, which has as many CPUs.
        user: holds the reservation until it leaves.
        one_node: all bundles must be on one node.

    Raises:
        BackendError: no nodes had so many GPUs and CPUs free within `PLACED_S`.
    """
    groups: Any = import_module("ray.util.placement_group")
    wanted = [{"GPU": count, "CPU": count} for count in bundles]
    group = groups.placement_group(wanted, strategy="STRICT_PACK" if one_node else "PACK")
    reservation = Reservation(group, user)
    if not group.wait(PLACED_S):
        reservation.leave(user)
        state: Any = import_module("ray._private.state")
        free = [node.get("GPU", 0.0) for node in state.available_resources_per_node().values()]
        sizes = [sum(bundles)] if one_node else sorted(bundles, reverse=True)
        raise BackendError(
            f"Expected room for groups of {', '.join(map(str, sizes))} GPUs, each on one node with"
            f" as many free CPUs, within {PLACED_S:g} s, got nodes with"
            f" {', '.join(f'{count:g}' for count in sorted(free, reverse=True))} free GPUs; end"
            " what else runs there, or change cluster.*.gpus_per_node, nodes and tensor_parallel"
        )
    return reservation
