"""The one store of finished results: whole files, found again under the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiential.errors import ConfigError
from experiential.evaluation.results import ResultStore, write_whole
from experiential.types import Record


class Made(Record):
    """A result with its settings."""

    settings: dict[str, Any]
    value: int = 0


def store(folder: Path, **options: Any) -> ResultStore[Made]:
    """A store that says how to get on."""
    return ResultStore(folder, Made, about="a result", remedy="use --overwrite", **options)


def test_a_result_is_found_by_its_name_and_settings(tmp_path: Path) -> None:
    settings = {"seed": 0, "arms": ("on", "off")}  # a tuple comes back as a list, and is the same
    path = store(tmp_path).keep("a/b", Made(settings=settings, value=3))
    assert path == tmp_path / "a" / "b.json" and path.read_text().endswith("}\n")
    found = store(tmp_path).find("a/b", settings)
    assert found is not None and found.value == 3
    assert store(tmp_path).find("a/c", settings) is None
    assert store(tmp_path, overwrite=True).find("a/b", settings) is None
    assert [made.value for made in store(tmp_path).all()] == [3]


def test_other_settings_are_named_with_the_way_out(tmp_path: Path) -> None:
    store(tmp_path).keep("a", Made(settings={"seed": 0, "tasks": [1]}))
    with pytest.raises(ConfigError, match=r"got seed 0 and not 1; use --overwrite"):
        store(tmp_path).find("a", {"seed": 1, "tasks": [2]})
    with pytest.raises(ConfigError, match=r"got tasks; use --overwrite"):
        store(tmp_path).find("a", {"seed": 0, "tasks": [2]})


@pytest.mark.parametrize("text", ["", "{}", '{"settings": {}, "more": 1}', "\xff"])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"Expected a result in .*a\.json.*use --overwrite"):
        store(tmp_path).find("a")


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: Any) -> None:
    path = write_whole(tmp_path / "a.json", "old")

    def fails(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiential.evaluation.results.os.replace", fails)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old" and list(tmp_path.glob("*.json")) == [path]


def test_a_file_that_cannot_be_written_is_one_error_and_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ConfigError, match=r"Expected to write .*a\.json, got"):
        write_whole(tmp_path / "a.json", "new")
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
