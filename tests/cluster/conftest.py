"""Ray on this machine for the tests of one module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """The ``ray`` package, with a small cluster of this machine that is shut down after the
    module's tests.
    """
    ray = pytest.importorskip(
        "ray", reason="Ray is not installed; `make test-cluster` runs these tests"
    )
    ray.init(
        address="local",  # whatever else runs on this machine
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
    )
    yield ray
    ray.shutdown()
