"""Every fenced block of the README and of `docs` runs in a fresh folder of its page.

The blocks of a page run in their order, and share folder, names and environment variables, as
with a reader who types them one after the other. Comments before a block, which no reader sees,
say what differs:

    <!-- skip: next "REASON" -->         the block is not run; REASONS lists the few reasons
    <!-- run: save as FILE -->           the block is the content of a file
    <!-- run: with WORDS -->             WORDS are added to each `experiential-train`
    <!-- run: SHOWN => RUN -->           RUN stands for the text SHOWN, which must be there
    <!-- invisible-code-block: python    what the reader has already; the code ends with -->

WORDS and RUN may name the environment variables of `VARIABLES`, $CHAT, the address of a chat server
of this test, and $PORT, a free port. The shell has one function more: `background TEXT COMMAND`
leaves a server running as soon as it has printed TEXT.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import SkipTest

import pytest
from sybil import Document, Example, Region
from sybil.evaluators.skip import Skipper
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

from tests.chat_server import Server, completion

ROOT = Path(__file__).parent.parent
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if page.parent.name != "decisions" and "```" in page.read_text("utf-8")
]
REASONS = {
    "installs packages",
    "needs a cluster or a GPU",
    "needs a package that `make install` leaves out",
    "measures for minutes or hours",
}
VARIABLES = {
    # One step of a training that otherwise takes minutes.
    "SMALL": "bank.embedder=hashing run.steps=1 actor.groups=2 actor.group_size=2 eval.worlds=2"
    " actor.max_tokens=16 eval.visits=2 eval.before=false run.preflight=false run.trackers=[]",
    "OPENAI_API_KEY": "none",
    "EXPERIENTIAL_TOKEN": "secret",  # in place of the random one that a server prints
    "HF_HUB_OFFLINE": "1",
    "HTTPS_PROXY": "http://127.0.0.1:9",  # whoever asks another host is refused at once
    "PYTHONPATH": str(ROOT),
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "COLUMNS": "100",
}
SHELL = """
set -euo pipefail
experiential() { python -m experiential.cli.main "$@"; }
experiential-train() { python -m experiential.cli.train "$@" ${MORE-}; }
background() {
    "${@:2}" > server.log 2>&1 &
    until grep -q "$1" server.log; do kill -0 $! || { cat server.log; return 1; }; sleep 0.1; done
}
"""


class Page:
    """The blocks of a page, and what they share."""

    def __init__(self, path: Path) -> None:
        parsers = [
            CodeBlockParser("python", self._python),
            CodeBlockParser("bash", self._bash),
            CodeBlockParser("console", self._console),
            CodeBlockParser("yaml", self._settings),
            CodeBlockParser("toml", lambda example: void(tomllib.loads(example.parsed))),
            CodeBlockParser("json", lambda example: void(json.loads(example.parsed))),
            SkipParser(),
            self._directives,
        ]
        self.document = Document.parse(str(path), *parsers)
        self.module = ModuleType("__main__")
        self.document.namespace = self.module.__dict__
        self.document.namespace["installed"] = find_spec
        self.groups = list[int]()
        self.told = list[str]()

    def run(self) -> None:
        """Run the blocks; a page of which none can run is skipped with their reasons."""
        ran, skipped = 0, set[str]()
        for example in self.document:
            try:
                example.evaluate()
            except SkipTest as reason:
                skipped.add(str(reason))
            else:
                ran += not isinstance(example.region.evaluator, Skipper)
        assert not self.told, f"no block after {self.told}"
        if skipped and not ran:
            pytest.skip("; ".join(sorted(skipped)))

    def close(self) -> None:
        for value in reversed(list(self.module.__dict__.values())):
            if callable(getattr(value, "close", None)) and not isinstance(value, type | ModuleType):
                value.close()
        for group in self.groups:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def _directives(self, document: Document) -> Iterable[Region]:
        for region in DirectiveInHTMLCommentLexer("run")(document):
            yield Region(region.start, region.end, region.lexemes["arguments"], self._tell)

    def _tell(self, example: Example) -> None:
        self.told.append(example.parsed)

    def _changed(self, text: str) -> str | None:
        """Return the block as its directives have it; None if it was saved as a file."""
        told, self.told = self.told, []
        for words in told:
            kind, _, rest = words.partition(" ")
            shown, arrow, run = words.partition(" => ")
            if arrow:
                assert shown in text, f"{shown!r} is not in the block"
                text = text.replace(shown, os.path.expandvars(run))
            elif kind == "with":
                assert "experiential-train " in text, "no training in the block"
                text = f"MORE={shlex.quote(os.path.expandvars(rest))}\n{text}"
            else:
                assert words.startswith("save as "), f"no such directive: {words}"
                Path(words.removeprefix("save as ")).write_text(text, "utf-8")
                return None
        return text

    def _python(self, example: Example) -> None:
        if (text := self._changed(example.parsed)) is not None:
            lines = "\n" * (example.line + example.parsed.line_offset)
            exec(compile(lines + text, example.path, "exec"), self.module.__dict__)

    def _console(self, example: Example) -> None:
        typed = re.findall(r"^\$ (.*)$", example.parsed, re.MULTILINE)
        assert typed, "no command in the block"
        self._shell(example, "\n".join(typed))

    def _bash(self, example: Example) -> None:
        self._shell(example, example.parsed)

    def _shell(self, example: Example, text: str) -> None:
        changed = self._changed(text)
        if changed is None:
            return
        with Path("output.log").open("w+", encoding="utf-8") as output:
            process = subprocess.Popen(
                ["bash", "-c", SHELL + changed],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.groups.append(process.pid)
            code = process.wait(580)
            output.seek(0)
            said = output.read()
        assert code == 0, f"{example.path}:{example.line}: exit code {code}\n{changed}\n{said}"

    def _settings(self, example: Example) -> None:
        assert self._changed(example.parsed) is None, "a recipe is saved as a file and trained"


def void(value: object) -> None:
    """Return None, which tells Sybil that a block is fine."""


class Chat(Server):
    """Takes the first choice that a request allows, or goes north."""

    def reply_to(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str], float]:
        choices = body.get("structured_outputs", {}).get("choice", ["north"])
        return 200, completion(choices[0]), {}, 0.0


@pytest.fixture(scope="module")
def chat() -> Iterator[Server]:
    server = Chat()
    yield server
    server.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chat: Server
) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OPENAI_BASE_URL", chat.url)
    monkeypatch.setenv("CHAT", chat.url)
    monkeypatch.delenv("EXPERIENTIAL_DATA", raising=False)
    monkeypatch.setenv("PORT", str(free_port()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    page = Page(path)
    monkeypatch.setitem(sys.modules, page.module.__name__, page.module)
    before = set(sys.modules)
    try:
        page.run()
    finally:
        page.close()
        for name in sys.modules.keys() - before:  # a file of this page is none of the next
            if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_block_has_a_language_and_each_skip_a_reason(path: Path) -> None:
    document = Document(path.read_text("utf-8"), str(path))
    fences = RawFencedCodeBlockLexer(re.compile(r"(?P<language>.*)$\n", re.MULTILINE))(document)
    languages = {"python", "bash", "console", "yaml", "toml", "json", "text"}
    assert {fence.lexemes["language"] for fence in fences} <= languages
    said = re.findall(r"<!-- *skip: (.*?) *-->", document.text)
    reasons = [re.fullmatch(r'next (?:if\(.*, reason=)?"(.*)"\)?', words) for words in said]
    assert {reason and reason[1] for reason in reasons} <= REASONS
