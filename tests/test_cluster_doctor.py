"""What the doctor says about a machine of a cluster, and the fix it names."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiential.cli import doctor
from experiential.cli.doctor import (
    about_flash_attention,
    about_gpus,
    about_port,
    about_ray,
    about_shared_memory,
    about_version,
    machine_gb,
)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port that this process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(autouse=True)
def no_ray_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where Ray would have written down its address."""
    monkeypatch.setattr(doctor, "_CURRENT", tmp_path / "ray_current_cluster")
    return tmp_path / "ray_current_cluster"


class TestVersions:
    def test_the_one_wanted_is_only_named(self) -> None:
        assert about_version("ray", "2.55.0", "2.55.0") == "2.55.0"

    def test_another_and_none_get_the_command(self) -> None:
        assert about_version("ray", "2.55.0", "2.60.0").startswith(
            "2.60.0, and the cluster engine wants 2.55.0: run pip install"
        )
        assert about_version("openrlhf", "0.11.2", "").startswith(
            "missing: run pip install --no-deps openrlhf==0.11.2"
        )

    def test_flash_attention_has_a_way_to_get_it_and_a_way_without(self) -> None:
        assert about_flash_attention("2.8.3") == "2.8.3"
        assert "--no-build-isolation" in about_flash_attention(
            ""
        ) and "attention=sdpa" in about_flash_attention("")


class TestGpus:
    def test_none_says_what_to_check(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        assert (
            about_gpus().startswith("none by nvidia-smi") and "CUDA_VISIBLE_DEVICES" in about_gpus()
        )


class TestPorts:
    def test_free(self, free_port: int) -> None:
        assert about_port(free_port, "Ray's dashboard") == "free (Ray's dashboard)"

    @pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="who listens is read from /proc")
    def test_taken_by_this_process(self, listener: int) -> None:
        said = about_port(listener, "Ray's dashboard")
        assert f"(process {os.getpid()})" in said and "--dashboard-port" in said

    def test_taken_by_somebody_who_may_not_be_seen(
        self, listener: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(doctor, "_listening", lambda port: iter(()))
        assert about_port(listener, "Ray's dashboard").startswith(
            "taken by a process of another user"
        )


class TestRay:
    def test_nothing_running(self) -> None:
        assert about_ray(None).startswith("none running here") and about_ray("auto").startswith(
            "none running here"
        )

    def test_an_address_that_answers_and_one_that_does_not(
        self, listener: int, free_port: int
    ) -> None:
        assert (
            about_ray(f"127.0.0.1:{listener}")
            == f"127.0.0.1:{listener} answers; join it with cluster.address=127.0.0.1:{listener}"
        )
        assert f"ray start --head --port={free_port}" in about_ray(f"127.0.0.1:{free_port}")

    def test_the_one_started_here_is_found(self, listener: int, no_ray_here: Path) -> None:
        no_ray_here.write_text(f"127.0.0.1:{listener}\n")
        assert (
            about_ray("auto") == f"127.0.0.1:{listener} answers; join it with cluster.address=auto"
        )

    def test_one_that_has_ended_is_none(self, free_port: int, no_ray_here: Path) -> None:
        no_ray_here.write_text(f"127.0.0.1:{free_port}\n")
        assert about_ray(None).startswith("none running here")

    @pytest.mark.parametrize("address", ["somewhere", "host:", ":6379", "host:port"])
    def test_an_address_that_cannot_be_read(self, address: str) -> None:
        assert about_ray(address).startswith(f"unreadable address '{address}'")


class TestSharedMemory:
    def test_enough(self, tmp_path: Path) -> None:
        assert "Ray wants 2.0: 30% of 1 GB, at least 2 and at most 10" in about_shared_memory(
            str(tmp_path), 1.0
        )

    def test_too_small_names_both_ways(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(doctor, "STORE_LEAST_GB", 1e6)
        said = about_shared_memory(str(tmp_path), 16.0)
        assert "mount -o remount,size=1000000G" in said and "--shm-size=1000000g" in said

    @pytest.mark.parametrize(("memory", "wanted"), [(1.0, "2.0"), (20.0, "6.0"), (1000.0, "10.0")])
    def test_the_rule(self, tmp_path: Path, memory: float, wanted: str) -> None:
        assert f"Ray wants {wanted}" in about_shared_memory(str(tmp_path), memory)

    def test_none(self, tmp_path: Path) -> None:
        assert about_shared_memory(str(tmp_path / "shm")).startswith("missing")

    def test_the_memory_of_this_machine_is_known(self) -> None:
        assert 0.1 < machine_gb() < 1e5
