"""Locks of torch's builds: those of dead processes go, others stay."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiential.training.openrlhf import build_locks
from experiential.training.openrlhf.build_locks import LONGEST_S, clear_build_locks
from experiential.training.openrlhf.nodes import look_around

BUILD = """
import os, sys, time
os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)  # as torch's FileBaton does
print("building", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "fused_adam").mkdir()
    return tmp_path / "fused_adam" / "lock"


def test_a_lock_goes_when_its_owner_was_killed_and_not_before(lock: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "building\n"
        assert clear_build_locks() == ([], []) and lock.exists()
        owner.kill()
    assert lock.exists(), "a killed process removes nothing"
    facts = look_around("here", None, [], 0.0)
    assert facts.removed == (str(lock),) and not lock.exists()
    assert clear_build_locks() == ([], [])


def test_a_lock_that_another_node_may_hold_stays_and_is_named_once_it_is_old(
    lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_locks, "_shared", lambda _: True)
    lock.touch()
    assert clear_build_locks() == ([], [])
    old = time.time() - LONGEST_S - 1
    os.utime(lock, (old, old))
    assert clear_build_locks() == ([], [str(lock)]) and lock.exists()


def test_locks_are_found_in_the_cache_of_each_python_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lock = tmp_path / "torch_extensions" / "py311_cu128" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert clear_build_locks() == ([str(lock)], [])


def test_the_kind_of_a_file_system_is_read_from_the_mounts() -> None:
    assert not build_locks._shared(Path("/proc/self/status"))
