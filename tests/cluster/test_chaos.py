"""A run whose processes are killed, one after the other, ends with whole checkpoints.

The long form is `make chaos KILLS=50`.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
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


def test_ranks_that_wait_for_one_that_gave_up_a_broadcast_are_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.cluster.chaos import Chaos, Nodes

    hold = folder / "hold"  # while it is there, engines take no weights
    hold.mkdir()
    monkeypatch.setenv("LIGHT_HOLD", str(hold))
    nodes = Nodes(folder / "ray")
    chaos = Chaos(nodes, folder / "run", 0, 4, ["cluster.call_timeout=900"])
    try:
        chaos.start()
        begun = time.monotonic()
        while len(list(hold.iterdir())) < 2:  # both of the actor: its ranks are broadcasting
            log = (folder / "run.log").read_text()[-4000:]
            assert time.monotonic() - begun < 400.0, log
            assert chaos.tend() is None, log
            time.sleep(0.2)
        for core in hold.iterdir():
            os.kill(int(core.name), signal.SIGKILL)
        hold.rename(folder / "released")
        killed = time.monotonic()
        while (code := chaos.tend()) is None:
            assert time.monotonic() - killed < 400.0
            time.sleep(0.5)
    finally:
        chaos.close()
        nodes.close()
    assert (code, chaos.codes, chaos.went_back(), chaos.wrong) == (0, [0], 1, [])
