"""The distribution: what a pip user gets, and what the tests of the source distribution import."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tools import release

ROOT = Path(__file__).parents[1]
HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
RELEASE = ROOT / ".github" / "workflows" / "release.yml"
SUITES = "experiential/evaluation/suites.py"


def test_the_wheel_is_the_package_which_imports_nothing_that_stays_outside() -> None:
    assert HATCH["wheel"]["packages"] == ["experiential"] and (ROOT / SUITES).is_file()
    for path in (ROOT / "experiential").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"benchmarks", "tests", "tools"}


@pytest.mark.slow
def test_the_source_distribution_builds_and_tests_itself(tmp_path: Path) -> None:
    pytest.importorskip("hatch_fancy_pypi_readme", reason="needs the build's own packages")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(tmp_path)]
    subprocess.run([*build, "--target", "sdist"], cwd=ROOT, check=True)
    (packed,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path, filter="data")
    source = tmp_path / packed.name.removesuffix(".tar.gz")
    subprocess.run([*build, "--target", "wheel"], cwd=source, check=True)
    assert list(tmp_path.glob("*.whl"))
    tests = ["tests/test_layers.py", "tests/test_docs.py", "-k", "layers or results or every"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "not slow", *tests],
        cwd=source,
        env=os.environ | {"PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_the_page_of_an_index_has_no_link_into_the_repository() -> None:
    pytest.importorskip("hatch_fancy_pypi_readme", reason="needs the build's own packages")
    metadata = subprocess.run(
        [sys.executable, "-m", "hatchling", "metadata", "readme"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    text = metadata.stdout
    assert re.findall(r"\]\((?!https?:)[^)]*\)", text) == []
    assert "An outcome that nobody" in " ".join(text.split())  # the words of a link stay
    assert "| `complementary` |" in text and "Left: training" not in text


@pytest.mark.parametrize("address", ["https://forge.example/someone/experiential", "", "ftp://x"])
def test_a_build_names_the_repository_that_releases_it_and_no_other(
    address: str, tmp_path: Path
) -> None:
    pytest.importorskip("hatch_fancy_pypi_readme", reason="needs the build's own packages")
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"EXPERIENTIAL_REPOSITORY": address},
        capture_output=True,
        text=True,
        check=False,
    )
    if address.startswith("ftp"):
        assert built.returncode and "Expected an address that begins with https://" in built.stderr
        return
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    urls = re.findall(r"^Project-URL: (.*)$", text, flags=re.MULTILINE)
    assert urls == ([f"Repository, {address}", f"Issues, {address}/issues"] if address else [])


def test_the_release_workflow_builds_with_the_address_of_its_repository() -> None:
    workflow = yaml.safe_load(RELEASE.read_text())
    (step,) = (
        one for one in workflow["jobs"]["build"]["steps"] if "-m build" in one.get("run", "")
    )
    address = "${{ github.server_url }}/${{ github.repository }}"
    assert step["env"] == {"EXPERIENTIAL_REPOSITORY": address}


def test_one_command_makes_what_is_unreleased_a_version_that_the_workflow_takes(
    tmp_path: Path,
) -> None:
    (tmp_path / "experiential").mkdir()
    shutil.copy(ROOT / "experiential" / "__init__.py", tmp_path / "experiential")
    text = (ROOT / "CHANGELOG.md").read_text()
    before = text.replace(release.HEADING, f"{release.HEADING}\nA change.\n")
    (tmp_path / "CHANGELOG.md").write_text(before)
    release.prepare("99.2.0", tmp_path)
    steps = yaml.safe_load(RELEASE.read_text())["jobs"]["build"]["steps"]
    (check,) = (one["run"] for one in steps if one.get("name", "").startswith("The tag"))
    for tag, code in (("v99.2.0", 0), ("v99.2.1", 1)):
        env = os.environ | {"GITHUB_REF_NAME": tag}
        done = subprocess.run(["bash", "-e", "-c", check], cwd=tmp_path, env=env, check=False)
        assert done.returncode == code
    after = (tmp_path / "CHANGELOG.md").read_text()
    dated = re.search(r"^## \[Unreleased\]\n\n(## \[99\.2\.0\] - \d{4}-\d\d-\d\d)\n", after, re.M)
    assert dated and after.replace(f"\n{dated[1]}\n", "") == before
    for version, said in (("99.2.0", "not have"), ("99.3.0", "got none"), ("soon", "such as")):
        with pytest.raises(ValueError, match=said):
            release.prepare(version, tmp_path)


def test_a_version_has_one_list_of_each_kind() -> None:
    sections = re.split(r"^## \[", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    for section in sections:
        kinds = re.findall(r"^### (.*)$", section, flags=re.MULTILINE)
        assert kinds == [kind for kind in ("Added", "Changed", "Removed", "Fixed") if kind in kinds]


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
