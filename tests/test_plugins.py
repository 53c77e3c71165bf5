"""The door for parts from outside: built-in names, entry points, module:attribute."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiential.errors import ConfigError
from experiential.plugins import KINDS, known_names, resolve

BUILTINS = {"grpo": 1, "rloo": 2, "lazy": "math:pi"}


def install(folder: Path, entry_points: str, module: str = "") -> None:
    """Lay out what an installer leaves behind: a module and its distribution's metadata."""
    (folder / "foreign_part.py").write_text(module)
    info = folder / "foreign-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_a_builtin_name_wins_over_an_entry_point_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "[experiential.estimators]\ngrpo = foreign_part:value\n", "value = 9")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("estimators", "grpo", BUILTINS) == 1


def test_a_builtin_may_be_a_reference_that_is_imported_when_chosen() -> None:
    assert resolve("estimators", "lazy", BUILTINS) == pytest.approx(3.14159, abs=1e-4)


def test_an_entry_point_of_an_installed_package_is_found_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "[experiential.estimators]\nmine = foreign_part:value\n", "value = 7")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("estimators", "mine", BUILTINS) == 7
    assert known_names("estimators", BUILTINS) == ["grpo", "rloo", "lazy", "mine"]


def test_an_entry_point_of_another_kind_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "[experiential.losses]\nmine = foreign_part:value\n", "value = 7")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="Expected one of estimators"):
        resolve("estimators", "mine", BUILTINS)


def test_a_module_of_the_current_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here_and_now.py").write_text("class Parts:\n    best = 5\n")
    monkeypatch.chdir(tmp_path)
    assert resolve("estimators", "here_and_now:Parts.best", BUILTINS) == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grpoo", r"one of estimators \(grpo, rloo, lazy\).*did you mean 'grpo'\?"),
        ("no_such_module_x:f", "import 'no_such_module_x'.*ModuleNotFoundError"),
        ("math:sqr", "attribute 'sqr' in 'math'.*did you mean 'sqrt'"),
    ],
)
def test_a_wrong_name_is_one_sentence_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve("estimators", name, BUILTINS)
    assert "\n" not in str(caught.value)


def test_a_module_that_raises_while_it_is_imported_is_a_wrong_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_on_import.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        resolve("losses", "raises_on_import:f", {})


def test_a_broken_entry_point_names_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "[experiential.suites]\nbroken = foreign_part:absent\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="repair or uninstall foreign"):
        resolve("suites", "broken", {})


def test_every_kind_has_a_group_of_entry_points() -> None:
    assert len(set(KINDS)) == 13
    assert all(known_names(kind) == sorted(known_names(kind)) for kind in KINDS)
