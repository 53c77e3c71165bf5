"""Banks as files: exact round trips in both formats, damage is noticed, pages written by hand are
read.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.bank.bank import ExperienceBank
from experiential.bank.folder import FolderBank
from experiential.bank.storage import bundle
from experiential.errors import BankError
from experiential.types import (
    Add,
    Distillation,
    Experience,
    Generation,
    ParsedOperations,
    Provenance,
    Statistics,
    Trajectory,
    Use,
)

SUFFIXES = (".jsonl", ".md")
AWKWARD = (
    "-->", "<!--", "<!-- {} -->", '  <!-- {"id": "x"} -->', "&amp;", "&#32;", "&#10;", "&lt;", "&",
    "#", "## ", "# x", "- ", "* ",
    "\n", "\n\n", "\n- x", "\n## t", "\n---\n", "---", "\r", "\r\n", "\t", " ", "  ", "\u2028",
    "\x85", "\x00", "\ufeff", "\u200b",
    "\u00a0", "(any task)", "\\", "`", "```", '"', "{", "}", "\U0001f600", "e\u0301", "format", ":",
)  # fmt: skip
ANY = st.lists(st.one_of(st.text(max_size=5), st.sampled_from(AWKWARD)), max_size=6).map("".join)
TEXT = ANY.filter(lambda text: bool(text.strip()))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | ANY,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ANY, inner, max_size=2),
    max_leaves=4,
)
ENTRY = st.builds(
    Experience,
    text=TEXT,
    task=st.none() | ANY | st.just("(any task)"),
    kind=st.just("lesson") | TEXT,
    version=st.integers(1, 9),
    metadata=st.dictionaries(ANY, JSON, max_size=2),
    provenance=st.just(Provenance())
    | st.builds(
        Provenance,
        author=ANY,
        trajectory=st.none() | ANY,
        span=st.none() | st.just((1, 2)),
        parents=st.just((("a", 1),)),
        commit=st.none() | st.integers(0, 9),
    ),
    statistics=st.builds(
        Statistics,
        retrievals=st.integers(0, 9),
        uses=st.integers(0, 9),
        successes=st.integers(0, 9),
    ),
)


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[FolderBank]:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        yield bank


@pytest.fixture(params=SUFFIXES)
def suffix(request: Any) -> str:
    return request.param


def filled(bank: FolderBank) -> FolderBank:
    """A bank with an entry of two versions that was used, one of another task, one of none, and one
    that an extractor wrote.
    """
    a = bank.add("Pull the red lever.", task="Open the vault", metadata={"x": [1, {"y": None}]})
    bank.add(
        "Knead the dough.\n\n  Then wait:\n- an hour\n- or two", task="Bake bread", kind="recipe"
    )
    bank.update(a.id, "Pull the red lever twice.")
    bank.add("Look first.")
    use = Use(experience_id=a.id, experience_version=2)
    play = Trajectory(task="Open the vault", instance="vault-7", uses=(use,), success=True)
    bank.record(play)
    made = Distillation(
        parsed=ParsedOperations(operations=(Add(text="The clerk lies.", span=(2, 8)),)),
        generation=Generation(text="raw"),
    )
    bank.apply(made, trajectory=play, shown=[])
    return bank


def opened(folder: Path) -> FolderBank:
    return ExperienceBank(folder, embedder="hashing")


def plain(bank: FolderBank) -> list[dict[str, Any]]:
    """The entries but for the commit in which they were written here, and their counters."""
    own = {"provenance": {"commit"}, "statistics": True}
    return [entry.model_dump(exclude=own) for entry in bank]


@settings(max_examples=150, deadline=None)
@given(
    entries=st.lists(ENTRY, max_size=5),
    namespace=TEXT,
    embedder=ANY,
    suffix=st.sampled_from(SUFFIXES),
)
def test_a_round_trip_is_exact_for_any_characters(
    entries: list[Experience], namespace: str, embedder: str, suffix: str
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"bank{suffix}"
        assert bundle.write(file, entries, namespace, embedder) == len(entries)
        assert bundle.read(file) == entries
        first = file.read_bytes()
        bundle.write(file, bundle.read(file), namespace, embedder)
        assert file.read_bytes() == first


@settings(max_examples=60, deadline=None)
@given(entries=st.lists(ENTRY, min_size=1, max_size=4))
def test_markdown_survives_an_editor_that_strips_line_ends_and_writes_crlf(
    entries: list[Experience],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bank.md"
        bundle.write(file, entries, "default", "hashing-256")
        lines = [line.rstrip() for line in file.read_text("utf-8").split("\n")]
        file.write_bytes(("\ufeff" + "\r\n".join(lines) + "\r\n\r\n").encode())
        assert bundle.read(file) == entries


def test_a_bank_goes_through_a_file_whole(bank: FolderBank, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / "out" / f"bank{suffix}"
    assert filled(bank).export(file) == 4
    with opened(tmp_path / "second") as second:
        assert second.import_(file) == 4 and plain(second) == plain(bank)
        assert [entry.statistics.uses for entry in second] == [0, 0, 0, 0]
        assert (
            second.search("The clerk lies.", exclude_instance="vault-7")[0].experience.text
            != "The clerk lies."
        )
        assert second.import_(file) == 0, "what is known is not imported again"
        assert second.export(tmp_path / f"again{suffix}") == 4


def test_import_merges_by_content_into_a_bank_that_holds_something(
    bank: FolderBank, tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"bank{suffix}"
    filled(bank).export(file)
    with opened(tmp_path / "second") as second:
        own = second.add("Look first.")
        other = second.add("Look first.", task="Bake bread")
        assert second.import_(file) == 3
        assert [one.id for one in second][:2] == [own.id, other.id] and len(second) == 5
        assert len(second.commits()) == 3
    bank.update(next(iter(bank)).id, "Something else now.")
    assert bank.import_(file) == 1, "an id that is taken does not keep the earlier text out"
    assert len({entry.id for entry in bank}) == len(bank) == 5


def test_the_header_says_what_is_inside(bank: FolderBank, tmp_path: Path) -> None:
    filled(bank)
    bank.export(tmp_path / "bank.jsonl")
    bank.export(tmp_path / "bank.md")
    header = json.loads((tmp_path / "bank.jsonl").read_text("utf-8").split("\n")[0])
    assert header.pop("sha256") in (tmp_path / "bank.md").read_text("utf-8"), (
        "both formats have the same hash"
    )
    assert header == {
        "format": "experiential-bank",
        "version": 1,
        "namespace": "default",
        "embedder": "hashing-256",
        "entries": 4,
    }


def test_markdown_reads_as_a_page(tmp_path: Path) -> None:
    entries = [
        Experience(id="a1", text="Pull the red lever.", task="Open the vault"),
        Experience(
            id="b2",
            text="Knead the dough.\n\nThen wait <b>long</b>.",
            task="Bake bread",
            statistics=Statistics(uses=2, successes=1),
        ),
        Experience(id="c3", text="Look first."),
        Experience(id="d4", text="Ask the clerk.", task="Open the vault"),
    ]
    bundle.write(tmp_path / "bank.md", entries, "default", "hashing-256")
    page = (tmp_path / "bank.md").read_text("utf-8")
    assert page.startswith('---\nformat: "experiential-bank"\nversion: 1\nnamespace: "default"\n')
    checks = [bundle.digest(entry)[:16] for entry in entries]
    assert page[page.index("## ") :] == (
        "## Open the vault\n\n- Pull the red lever.\n"
        f'  <!-- {{"n": 1, "id": "a1", "check": "{checks[0]}"}} -->\n\n- Ask the clerk.\n'
        f'  <!-- {{"n": 4, "id": "d4", "check": "{checks[3]}"}} -->\n\n'
        "## Bake bread\n\n- Knead the dough.\n\n  Then wait <b>long</b>.\n"
        '  <!-- {"n": 2, "id": "b2", "statistics": {"uses": 2, "successes": 1}, "check":'
        f' "{checks[1]}"}} -->\n\n'
        f'## (any task)\n\n- Look first.\n  <!-- {{"n": 3, "id": "c3", "check": "{checks[2]}"}}'
        " -->\n"
    )


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("Look first.", "Look twice.", r"line \d+ was changed"),
        ('"uses": 1', '"uses": 100', r"line \d+ was changed"),
        ("vault-7", "vault-8", r"line \d+ was changed"),
        ("entries", "entrees", "it should hold None entries and holds 4"),
    ],
)
def test_a_changed_file_is_refused_with_what_differs(
    bank: FolderBank, tmp_path: Path, suffix: str, old: str, new: str, what: str
) -> None:
    file = tmp_path / f"bank{suffix}"
    filled(bank).export(file)
    text = file.read_text("utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), "utf-8")
    with opened(tmp_path / "second") as second:
        with pytest.raises(
            BankError, match=f"differs from its hash: {what}; nothing was imported.*edited=True"
        ):
            second.import_(file)
        assert len(second) == 0 and second.head == 0
        assert second.import_(file, edited=True) == 4


def test_missing_added_and_reordered_entries_are_noticed(bank: FolderBank, tmp_path: Path) -> None:
    file = tmp_path / "bank.jsonl"
    filled(bank).export(file)
    header, *lines = file.read_text("utf-8").rstrip("\n").split("\n")
    cases = {
        "it should hold 4 entries and holds 3": [header, *lines[:3]],
        "line 6 was added; it should hold 4 entries and holds 5": [
            header,
            *lines,
            '{"text": "mine"}',
        ],
        "its entries or its header are not those that were written": [header, *reversed(lines)],
        "its header is missing": lines,
        "it should hold 4 entries and holds 8": [header, *lines, header, *lines],
    }
    for what, kept in cases.items():
        file.write_text("\n".join(kept) + "\n", "utf-8")
        with pytest.raises(BankError, match=what):
            bundle.read(file)
    many = [line.replace('"text": "', '"text": "x') for line in lines]
    file.write_text("\n".join([header, *many, *many]) + "\n", "utf-8")
    with pytest.raises(BankError, match="line 6 was changed and 4 more; nothing was imported"):
        bundle.read(file)


def test_a_cut_file_is_refused_wherever_it_was_cut(
    bank: FolderBank, tmp_path: Path, suffix: str
) -> None:
    """But for the white space at its end."""
    file = tmp_path / f"bank{suffix}"
    filled(bank).export(file)
    whole = file.read_bytes()
    for end in range(1, len(whole.rstrip()), 7):
        file.write_bytes(whole[:end])
        try:
            read = bundle.read(file)
        except BankError:
            continue
        assert read == [], f"cut at {end}"
        assert suffix == ".md" and b"\n---\n" not in whole[4:end], (
            "only a page without its front matter's end is no bank at all"
        )


def test_a_page_edited_by_hand_is_taken_as_edited(bank: FolderBank, tmp_path: Path) -> None:
    file = tmp_path / "bank.md"
    filled(bank).export(file)
    text = file.read_text("utf-8")
    text = text.replace("- The clerk lies.", "- The clerk always lies.\n  Ask her twice.")
    text = text.replace(
        "## Bake bread\n", "## Bake bread\n\n* Heat the oven\n  before you begin.\n\n- Buy flour.\n"
    ).replace("- Look first.", "- Look first!")
    file.write_text(text, "utf-8")
    with pytest.raises(BankError, match="was changed"):
        bank.import_(file)
    with opened(tmp_path / "second") as second:
        assert second.import_(file, edited=True) == 6
        found = {entry.text: entry for entry in second}
        clerk, oven = (
            found["The clerk always lies.\nAsk her twice."],
            found["Heat the oven\nbefore you begin."],
        )
        assert (
            clerk.provenance.author,
            clerk.provenance.generation,
            clerk.provenance.instance,
        ) == ("human", None, "vault-7")
        assert (oven.task, oven.kind, oven.provenance.author) == ("Bake bread", "lesson", "human")
        assert found["Look first!"].task is None


def test_a_file_without_a_hash_still_works(bank: FolderBank, tmp_path: Path) -> None:
    old = Experience(
        id="e" * 32, text="From an older version.", task="t", statistics=Statistics(uses=3)
    )
    header = {
        "format": "experiential-bank",
        "version": 1,
        "namespace": "default",
        "embedder": "hashing-256",
        "entries": 1,
    }
    (tmp_path / "old.jsonl").write_text(json.dumps(header) + "\n" + old.model_dump_json() + "\n")
    (tmp_path / "plain.jsonl").write_text(
        '{"text": "Plain."}\n\n{"text": "With a task.", "task": "t"}\n'
    )
    (tmp_path / "plain.md").write_text(
        "My notes\n\n- First.\n-   Second,\n\n  longer.\n\n## Open the vault\n- Pull.\n"
    )
    assert bank.import_(tmp_path / "old.jsonl") == 1 and bank.get(old.id).statistics.uses == 0  # type: ignore[union-attr]
    assert bank.import_(tmp_path / "plain.jsonl") == 2
    assert bank.import_(tmp_path / "plain.md") == 3
    expected = [
        ("Plain.", None),
        ("With a task.", "t"),
        ("First.", None),
        ("Second,\n\nlonger.", None),
        ("Pull.", "Open the vault"),
    ]
    assert [(entry.text, entry.task) for entry in bank][1:] == expected


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.jsonl", '{"text": "fine"}\n{"txt": "typo"}\n', r"line 2 of a\.jsonl"),
        ("a.jsonl", '{"text": "fine"}\n[1]\n', r"line 2 of a\.jsonl"),
        ("a.jsonl", '{"text": " "}\n', r"line 1 of a\.jsonl"),
        ("a.jsonl", '{"text": "\\ud800"}\n', r"line 1 of a\.jsonl"),
        ("a.jsonl", "[" * 100_000, r"line 1 of a\.jsonl"),
        (
            "a.jsonl",
            '{"format": "experiential-bank", "version": 9}\n',
            "version 1 in a.jsonl, got 'experiential-bank' version 9",
        ),
        ("a.md", "---\nformat: other\n---\n- x\n", "'other' version None"),
        ("a.md", "---\nformat: other\n", "front matter"),
        (
            "a.md",
            "## t\n- x\nlost words\n",
            r"indented by two spaces in line 3 of a\.md, got 'lost words'",
        ),
        ("a.md", "## t\n-\n", r"line 2 of a\.md"),
        ("a.md", '- x\n  <!-- {"id": } -->\n', r"JSON in the comment in line 2 of a\.md"),
        ("a.md", '- x\n  <!-- {"id": 5} -->\n', r"line 1 of a\.md"),
        ("a.md", '- x\n  <!-- {"n": "5"} -->\n', "whole number, got '5'"),
    ],
)
def test_what_is_no_entry_is_refused_with_its_place(
    bank: FolderBank, tmp_path: Path, name: str, text: str, what: str
) -> None:
    (tmp_path / name).write_text(text)
    for edited in (False, True):
        with pytest.raises(BankError, match=what):
            bank.import_(tmp_path / name, edited=edited)
    assert len(bank) == 0


def test_unreadable_files_are_an_error(bank: FolderBank, tmp_path: Path) -> None:
    (tmp_path / "latin.md").write_bytes(b"- caf\xe9\n")
    for name in ("missing.md", "missing.jsonl", "latin.md"):
        with pytest.raises(BankError, match="readable export file"):
            bank.import_(tmp_path / name)


def test_a_failed_export_leaves_the_old_file(
    bank: FolderBank, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / f"bank{suffix}"
    filled(bank).export(file)
    before = file.read_bytes()
    bank.add("one more")
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        bundle.write(file, list(bank), "default", "hashing-256")
    assert file.read_bytes() == before and [
        path.name for path in tmp_path.iterdir() if path.is_file()
    ] == [file.name]
