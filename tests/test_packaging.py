"""The distribution: what a pip user gets, and what the tests of the source distribution import."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
SUITES = "experiential/evaluation/suites.py"


def test_the_wheel_is_the_package_which_imports_nothing_that_stays_outside() -> None:
    assert HATCH["wheel"]["packages"] == ["experiential"] and (ROOT / SUITES).is_file()
    for path in (ROOT / "experiential").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"benchmarks", "tests", "tools"}


def test_the_source_distribution_holds_what_its_tests_import() -> None:
    assert {"experiential", "tests", "tools", "benchmarks/*.py"} <= set(HATCH["sdist"]["include"])


@pytest.mark.slow
def test_the_built_wheel_holds_the_suites_and_their_command(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling, which builds the wheel")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {SUITES, "experiential/cli/bench.py"} <= names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {
        "experiential",
        "experiential_verifiers.py",
    }
