"""Faults of the first hour on a real Ray: two nodes of one machine, of which the second sees less.

The second node is a raylet with another address in a mount namespace of its own.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiential.config import ClusterSettings
from experiential.errors import BackendError, ConfigError
from experiential.llm.models import resolve_model
from tests.cluster.experiments import cluster_experiment

pytest.importorskip("ray", reason="Ray is not installed; `make test-cluster` runs these tests")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SECONDS = 60.0
BIN = Path(sys.executable).parent


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    """A folder of which the second node sees nothing."""
    folder = tmp_path / "hidden"
    folder.mkdir()
    return folder


@pytest.fixture
def two_nodes(hidden: Path) -> Iterator[None]:
    """Two nodes with one GPU that is none each; the second does not see what is in ``hidden``."""
    import ray
    from ray.cluster_utils import Cluster

    spaces = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*spaces, "mount", "-t", "tmpfs", "none", hidden], check=False).returncode:
        pytest.skip("this machine allows no mount namespaces")
    store = 100 * 2**20
    head = {"num_cpus": 1, "num_gpus": 1, "include_dashboard": False, "object_store_memory": store}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    start = (
        f"mount -t tmpfs none {shlex.quote(str(hidden))} && exec {BIN}/ray start --block"
        f" --address={cluster.address} --node-ip-address=127.0.0.2 --num-cpus=1 --num-gpus=1"
        f" --object-store-memory={store}"
    )
    second = subprocess.Popen([*spaces, "sh", "-c", start], stdout=subprocess.DEVNULL)
    ray.init(address=cluster.address, log_to_driver=False)
    until = time.monotonic() + SECONDS
    while len([node for node in ray.nodes() if node["Alive"]]) < 2:
        assert time.monotonic() < until and second.poll() is None
        time.sleep(0.2)
    yield
    ray.shutdown()
    second.terminate()
    second.wait(30)
    cluster.shutdown()


def refused(output: Path | None, *models: Path) -> str:
    from experiential.training.openrlhf.nodes import check_nodes

    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        check_nodes(ClusterSettings(), output, models)
    assert time.monotonic() - began < SECONDS
    return str(caught.value)


def test_a_node_that_misses_the_output_or_the_model_is_named(
    two_nodes: None, hidden: Path, tmp_path: Path
) -> None:
    from experiential.training.openrlhf.nodes import check_nodes

    model = resolve_model("tiny")
    assert isinstance(model, Path)
    check_nodes(ClusterSettings(), tmp_path / "shared", [model])
    assert list((tmp_path / "shared").iterdir()) == [], "the nonce is removed"

    said = refused(hidden / "run", model)
    assert "(127.0.0.2) to see the files that the trainer writes" in said and "\n" not in said
    assert "got: No such file or directory; set --output" in said

    (hidden / "model").mkdir()
    (hidden / "model" / "config.json").write_text("{}")
    said = refused(tmp_path / "shared", hidden / "model")
    assert f"the model folder {hidden / 'model'} on node" in said and "(127.0.0.2), found" in said


def test_a_node_that_died_a_moment_ago_is_no_fault_of_the_settings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import ray
    from ray.cluster_utils import Cluster

    from experiential.training.openrlhf.nodes import check_nodes

    node = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 * 2**20}
    head = node | {"include_dashboard": False}
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    other = cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        [raylet] = other.all_processes["raylet"]
        raylet.process.kill()
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2, "Ray has not noticed"
        check_nodes(ClusterSettings(), tmp_path, ())
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert "died while it was looked at" in caplog.text


def test_a_port_that_another_program_has_taken_is_no_ray() -> None:
    from experiential.training.openrlhf.runtime import join

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(ConfigError, match=f"head node at cluster.address={address}, got no"):
            join(ClusterSettings(address=address), 2)
        assert time.monotonic() - began < SECONDS


@pytest.fixture
def own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Ray as a run starts it, ended after the test."""
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield ray
    ray.shutdown()


def test_another_ray_of_the_machine_is_left_alone(own_ray: Any) -> None:
    from ray.cluster_utils import Cluster

    from experiential.training.openrlhf.runtime import join

    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}
    other = Cluster(initialize_head=True, head_node_args=head)
    os.environ["RAY_ADDRESS"] = other.address  # as a shell after `ray start` may have it
    try:
        with pytest.raises(ConfigError, match="set cluster.address=auto"):
            join(ClusterSettings(gpus=2), 2)
        del os.environ["RAY_ADDRESS"]
        join(ClusterSettings(gpus=2), 2)
        assert own_ray.cluster_resources()["GPU"] == 2, "a Ray of its own"
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        own_ray.shutdown()
        other.shutdown()


def test_a_wrong_network_interface_is_refused(
    own_ray: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from experiential.training.openrlhf.runtime import build_runtimes

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "nosuch0")
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"NCCL_SOCKET_IFNAME on node .*, got nosuch0; set it"):
        build_runtimes(cluster_experiment("cluster.gpus=4"))
    assert time.monotonic() - began < SECONDS


def test_an_engine_that_cannot_start_says_why(own_ray: Any) -> None:
    from experiential.training.openrlhf.runtime import build_runtimes

    wrong = "cluster.actor.vllm={load_format: no such format}"
    with pytest.raises(BackendError, match=r"actor engine 0.*no such format") as caught:
        build_runtimes(cluster_experiment("cluster.gpus=4", wrong))
    notes = caught.value.__notes__
    assert notes[0].startswith("from the log ") and "worker-" in notes[0]
    assert any("no such format" in note for note in notes[1:])
