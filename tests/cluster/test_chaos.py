"""A run whose processes are killed, one after the other, ends with whole checkpoints.

The long form is `make chaos KILLS=50`.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed; `make test-cluster` runs these tests")
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(3600)]

VARIABLES = ("RAY_gcs_rpc_server_reconnect_timeout_s", "RAY_worker_niceness")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a short name, for Ray's sockets; variables are restored after the test."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "15")
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)


def test_a_run_survives_the_death_of_a_rank_an_engine_and_its_driver(folder: Path) -> None:
    from tests.cluster.chaos import Chaos, Nodes, play

    kinds = ["rank", "engine core", "driver"]
    nodes = Nodes(folder / "ray")
    chaos = Chaos(nodes, folder / "run", 0, 8)
    try:
        found = play(chaos, kinds, random.Random(1), patience=900.0)
    finally:
        chaos.close()
        nodes.close()
    assert (found["code"], found["wrong"], found["not_killed"]) == (0, [], [])
    outcomes = {kill["kind"]: kill["outcome"] for kill in found["kills"]}
    assert outcomes["driver"] == "command started again"
    assert outcomes["rank"] == "went back to its checkpoint"
    assert outcomes["engine core"] != "command started again"
    assert found["checkpoints"] >= 4
