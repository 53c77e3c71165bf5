"""Reserve whole groups of GPUs on three Ray nodes of eight: what the dry run prints is what Ray
gives.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from experiential.config import PolicyClusterSettings
from experiential.errors import BackendError
from experiential.training.openrlhf import parts
from experiential.training.openrlhf import reservation as reservations
from experiential.training.openrlhf.placement import node_bundles
from experiential.training.openrlhf.reservation import reserve

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
TRIALS = 100


def sizes(ranks: int, engines: int, width: int = 1, nodes: int = 1) -> PolicyClusterSettings:
    return PolicyClusterSettings(
        nodes=nodes, gpus_per_node=ranks, engines=engines, tensor_parallel=width, batch_size=64
    )


LAYOUTS = [
    (sizes(8, 8), sizes(4, 4)),  # slurm.sh, all 24 GPUs
    (sizes(8, 2, width=4), sizes(4, 1, width=4)),
    (sizes(4, 3, width=2, nodes=2), sizes(6, 4)),
    (sizes(8, 1), sizes(4, 4)),  # seven are left to another job
]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="`make test-cluster` runs these tests")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 8, "num_gpus": 8, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(2):
        cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield ray
    ray.shutdown()
    cluster.shutdown()


class Recorder:
    """An actor class that notes with which strategy each process would start."""

    def __init__(self, ray: Any) -> None:
        self.strategies: list[Any] = []
        told = SimpleNamespace(remote=lambda: ray.put(("127.0.0.1", 1)))
        self._handle = SimpleNamespace(
            get_master_addr_port=told,
            get_num_unfinished_requests=SimpleNamespace(remote=lambda: None),
        )

    def options(self, *, scheduling_strategy: Any, **_: Any) -> Any:
        self.strategies.append(scheduling_strategy)
        return SimpleNamespace(remote=lambda *_, **__: self._handle)

    def nodes(self) -> list[str]:
        """Return the node of each process in order, and forget them."""
        from ray.util.placement_group import placement_group_table

        found = [
            placement_group_table(one.placement_group)["bundles_to_node_id"][
                one.placement_group_bundle_index
            ]
            for one in self.strategies
        ]
        self.strategies.clear()
        return found


@pytest.fixture
def recorder(ray: Any, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(ray)
    monkeypatch.setattr(parts, "_engine_actor", lambda: recorder)
    monkeypatch.setattr(parts, "_rank_actor", lambda: recorder)
    return recorder


def start_ranks(settings: PolicyClusterSettings, group: Any, first: int) -> Any:
    return parts.start_ranks(settings, group, first, shared=False, name="actor", seconds=60)


def test_the_ranks_of_a_node_and_the_gpus_of_an_engine_are_on_one_node_each_time(
    recorder: Recorder,
) -> None:
    draw = random.Random(0)
    divided: list[int] = []
    for trial in range(TRIALS):
        layout = draw.choice(LAYOUTS)
        bundles = [count for settings in layout for count in node_bundles(settings)]
        other = reserve([24 - sum(bundles)], "another job") if sum(bundles) < 24 else None
        reservation = reserve(bundles, "test")
        first = 0
        for settings in layout:
            start_ranks(settings, reservation.group, first)
            at = recorder.nodes()
            size = settings.gpus_per_node
            groups = [at[i : i + size] for i in range(0, len(at), size)]
            assert len(groups) == settings.nodes
            divided += [trial for group in groups if len(set(group)) != 1]
            for i in range(settings.engines):
                bundle = first + settings.nodes + i
                parts.start_engine("model", settings, reservation.group, bundle, seed=0)
            assert len(recorder.nodes()) == settings.engines
            first += len(node_bundles(settings))
        assert first == len(bundles), "each process group has a bundle"
        for held in (reservation, other):
            if held is not None:
                held.leave("test")
                held.leave("another job")
    assert not divided, f"{len(divided)} groups on several nodes in {TRIALS} trials"


def test_processes_stand_where_their_bundles_are(ray: Any, monkeypatch: Any) -> None:
    class Rank:
        def __init__(self, *_: Any) -> None:
            pass

        def get_master_addr_port(self) -> tuple[str, int]:
            return "127.0.0.1", 1

        def node(self) -> str:
            import ray

            return ray.get_runtime_context().get_node_id()

    monkeypatch.setattr(parts, "_rank_actor", lambda: ray.remote(Rank))
    reservation = reserve([8, 2, 2], "test")
    ranks = [
        rank
        for settings, first in ((sizes(8, 1), 0), (sizes(2, 1, nodes=2), 1))
        for rank in parts.handles(start_ranks(settings, reservation.group, first))
    ]
    nodes = ray.get([rank.node.remote() for rank in ranks], timeout=900)
    assert len(set(nodes[:8])) == len(set(nodes[8:10])) == len(set(nodes[10:])) == 1
    assert nodes[8] != nodes[0]
    for rank in ranks:
        ray.kill(rank)
    reservation.leave("test")


def test_groups_that_find_no_room_are_refused_whole_and_named(
    ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reservations, "PLACED_S", 3.0)
    other = reserve([3, 3, 3], "another job")  # five are free at least somewhere, but not eight
    with pytest.raises(BackendError, match=r"groups of 9 GPUs, each on one node .* got nodes"):
        reserve([1] * 9, "test", one_node=True)
    with pytest.raises(BackendError, match=r"groups of 8, 8, 1 GPUs, each on one node .* free"):
        reserve([8, 1, 8], "test")
    other.leave("another job")
    reserve([8, 8, 8], "test").leave("test")
