"""Engines that are lost, on a real Ray: the process inside OpenRLHF's actor is a stub."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil
import pytest

from experiential.config import ClusterSettings, PolicyClusterSettings
from experiential.training.openrlhf import parts
from experiential.training.openrlhf.engines import Engine, Engines
from experiential.training.openrlhf.reservation import reserve
from experiential.training.openrlhf.supervisor import LostActorError

pytest.importorskip("ray", reason="Ray is not installed; `make test-cluster` runs these tests")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

SECONDS = 120.0
"""Far more than anything here takes, and far less than the time-outs of `CLUSTER`."""
CLUSTER = ClusterSettings(start_timeout=3000.0, call_timeout=3000.0)


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Any]:
    """Two nodes with three GPUs that are none each."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 3, "num_gpus": 3, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(autouse=True)
def stub_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from tests.cluster.stub_engine import stub_module

    monkeypatch.setitem(sys.modules, "openrlhf.trainer.ray.vllm_engine", stub_module(ray))


class Pool:
    """Engines whose weights are only a call."""

    def __init__(self, count: int) -> None:
        self.reservation = reserve([1] * count, "pool")
        begin = partial(
            parts.start_engine, "model", PolicyClusterSettings(), self.reservation.group
        )
        named = [(f"engine {i}", partial(begin, i, seed=i)) for i in range(count)]
        self.engines = Engines([Engine(*one, CLUSTER) for one in named], self.send)

    def close(self) -> None:
        self.engines.close()
        self.reservation.leave("pool")

    async def send(self) -> None:
        actors = await self.engines.pause()
        self.engines.note_weights(actors)
        await self.engines.resume()

    async def pids(self, number: int) -> tuple[int, int, int]:
        """Of the actor, of the process that computes, and of its worker."""
        engine = self.engines.engines[number]
        return await engine.ask(engine.current, "pids")

    async def generate(self, count: int) -> None:
        calls = (self.engines.generate([i], None) for i in range(count))
        assert await asyncio.wait_for(asyncio.gather(*calls), SECONDS) == [
            [i] for i in range(count)
        ]


@pytest.fixture
async def pool(two_nodes: Any) -> Any:
    pool = Pool(2)
    await pool.engines.start()
    yield pool
    pool.close()


async def test_held_requests_leave_a_place_for_the_call_that_ends_the_hold(pool: Pool) -> None:
    await pool.engines.pause()
    requests = asyncio.create_task(pool.generate(3000))
    while sum(engine.running for engine in pool.engines.engines) < 3000:
        await asyncio.sleep(0)
    await asyncio.wait_for(pool.engines.resume(), SECONDS)
    await requests


@pytest.mark.parametrize("which", ["actor", "process that computes"])
async def test_a_killed_process_costs_no_request_and_no_update(pool: Pool, which: str) -> None:
    """Kill before weights are sent, when nobody asks the engine, as `restarts` allows it."""
    for number in (0, 1, 0):
        killed = [psutil.Process(pid) for pid in await pool.pids(number)]
        killed[which != "actor"].kill()
        await asyncio.wait_for(pool.send(), SECONDS)
        await pool.generate(50)
        _, left = await asyncio.to_thread(psutil.wait_procs, killed, timeout=SECONDS)
        assert not left, "they would hold the memory that the next ones need"
    await asyncio.wait_for(asyncio.gather(*pool.engines.returning), SECONDS)
    assert [engine.restarts for engine in pool.engines.engines] == [2, 1]
    assert all(engine.serving for engine in pool.engines.engines)


async def test_a_call_under_way_fails_when_the_process_that_computes_dies(pool: Pool) -> None:
    engine = pool.engines.engines[0]
    (_, core, _), actor = await pool.pids(0), engine.current
    call = asyncio.create_task(engine.ask(actor, "update_weight"))
    await asyncio.sleep(0)
    psutil.Process(core).kill()
    with pytest.raises(LostActorError, match="died: EngineDeadError"):
        await asyncio.wait_for(call, SECONDS)


START = """
import asyncio, sys, ray
from tests.cluster.stub_engine import stub_module
from tests.cluster.test_lost_engines import Pool
ray.init(address=sys.argv[1], log_to_driver=False)
sys.modules["openrlhf.trainer.ray.vllm_engine"] = stub_module(ray)

async def main():
    pool = Pool(3)
    await pool.engines.start()
    await pool.generate(30)

asyncio.run(main())
"""


def test_two_runs_start_at_once_on_one_ray(two_nodes: Any) -> None:
    command = [sys.executable, "-c", START, two_nodes.address]
    runs = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for run in runs:
        _, said = run.communicate(timeout=SECONDS)
        assert run.returncode == 0, said


async def test_a_lost_node_leaves_the_engines_of_the_others(two_nodes: Any) -> None:
    """Last, because the node does not come back."""
    pool = Pool(6)
    await pool.engines.start()
    requests = asyncio.create_task(pool.generate(2000))
    lost = await asyncio.to_thread(two_nodes.remove_node, two_nodes.list_all_nodes()[-1])
    del lost
    await requests
    await pool.generate(100)
    await asyncio.wait_for(pool.send(), SECONDS)
    serving = [engine for engine in pool.engines.engines if engine.serving]
    assert len(serving) == 3, "the others find no GPU"
    pool.close()
