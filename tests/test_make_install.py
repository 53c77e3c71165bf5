"""`make install` mends an environment that an earlier one left half made."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("make") is None, reason="needs make"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with our Makefile and a whole environment, which installs nothing into it."""
    folder = tmp_path_factory.mktemp("my project")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    install(folder)
    return folder


def install(folder: Path) -> None:
    (folder / ".venv" / ".installed").unlink(missing_ok=True)
    subprocess.run(["make", "install", "PIP=true"], cwd=folder, check=True, timeout=300)
    python = folder / ".venv" / "bin" / "python"
    prefix = "import sys; from pip._internal.cli.main import main; print(sys.prefix)"
    done = subprocess.run([python, "-c", prefix], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == folder / ".venv"


def test_a_whole_environment_stays(project: Path) -> None:
    (project / ".venv" / "mine").touch()
    install(project)
    assert (project / ".venv" / "mine").exists()


def test_an_environment_without_its_configuration_is_mended(project: Path) -> None:
    (project / ".venv" / "pyvenv.cfg").unlink()
    install(project)


def test_a_package_without_its_record_is_installed_again(project: Path) -> None:
    """The state that a kill leaves in the middle of pip's own installation, and of any other."""
    [record] = (project / ".venv").glob("lib/*/site-packages/pip-*.dist-info/RECORD")
    record.unlink()
    install(project)


def test_without_pip_it_is_made_again(project: Path) -> None:
    [pip] = (project / ".venv").glob("lib/*/site-packages/pip")
    shutil.rmtree(pip.parent)
    install(project)


@pytest.mark.parametrize("seconds", [0.3, 1.0])
def test_killed_while_it_makes_the_environment(project: Path, seconds: float) -> None:
    shutil.rmtree(project / ".venv")
    making = subprocess.Popen(["make", "install", "PIP=true"], cwd=project, start_new_session=True)
    time.sleep(seconds)
    os.killpg(making.pid, signal.SIGKILL)  # with the processes it started
    making.wait()
    install(project)
