"""Each example learns a lesson in its first run; in its second it is shown the lesson, and credits
it. A real model answers behind a real server: llama.cpp and SmolLM2. Nothing is asserted of what
the model says. `make test-examples` has the packages; elsewhere these tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

import experiential as xp
from experiential.bank.folder import FolderBank

pytest.importorskip("xllamacpp")
EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
LESSON = "Vault of Alder: pull brass."
SHAPE = "Answer in the form that is asked for."
PATIENCE = 500  # seconds, less than pytest's own limit, on a machine with other work
FRAMEWORKS = (
    "openai_client",
    "smolagents_agent",
    "langgraph_agent",
    "openai_agents_sdk",
    "pydantic_ai_agent",
)


class Proxy:
    """Passes requests on to a server and keeps their bodies."""

    def __init__(self, target: str) -> None:
        self.bodies: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.bodies.append(body.decode())
                headers = {"content-type": "application/json"}
                got = httpx.post(
                    target + self.path, content=body, headers=headers, timeout=PATIENCE
                )
                self.send_response(got.status_code)
                for name in ("content-type", "content-length"):
                    self.send_header(name, got.headers.get(name, str(len(got.content))))
                self.end_headers()
                self.wfile.write(got.content)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = [sys.executable, "-P", str(Path(__file__).with_name("server.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None and process.stdin is not None
        try:
            lines = iter(process.stdout.readline, "")
            yield next(line.strip() for line in lines if line.startswith("http://"))
        finally:
            process.stdin.close()
            process.kill()


@pytest.fixture
def proxy(address: str) -> Iterator[Proxy]:
    proxy = Proxy(address)
    yield proxy
    proxy.http.shutdown()
    proxy.http.server_close()


def run(name: str, folder: Path, proxy: Proxy) -> str:
    """Run an example to its end; return what it printed."""
    environment = {**os.environ, "OPENAI_BASE_URL": proxy.url, "OPENAI_API_KEY": "none"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), str(folder)],
        env=environment | {"OPENAI_MODEL": "smollm2", "TMPDIR": str(folder.parent)},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def learnt(bank: FolderBank, text: str) -> xp.Experience:
    """The first entry with this text."""
    return next(entry for entry in bank.entries() if entry.text == text)


def user_lines(name: str) -> int:
    return (EXAMPLES / f"{name}.py").read_text().count("# experiential:")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_framework_is_shown_in_run_2_what_run_1_taught(
    name: str, tmp_path: Path, proxy: Proxy
) -> None:
    assert 1 <= user_lines(name) <= 5
    printed = run(name, tmp_path / "bank", proxy)
    first, second = printed.split("advice:")[1:]
    assert first.strip().startswith("none yet") and LESSON in second
    with FolderBank(tmp_path / "bank") as bank:
        entry = learnt(bank, LESSON)
        source = bank.trajectory(str(entry.provenance.trajectory))
        assert source is not None and not source.uses, "run 1 taught it"
        assert any("which lever" in turn.observation.lower() for turn in source.turns)
        assert any(turn.action for turn in source.turns), "the model's own words are recorded"
        assert len(bank.outcomes(entry.id, 1)) == 1, "run 2 is its evidence"
        assert bank.queue.dead_letters() == []
    assert LESSON not in proxy.bodies[0]
    assert any(LESSON in body for body in proxy.bodies[1:]), "the model behind the server saw it"


@pytest.mark.parametrize("name", ["gem_game", "textarena_game"])
def test_a_game_is_advised_by_its_last_game(name: str, tmp_path: Path, proxy: Proxy) -> None:
    run(name, tmp_path / "bank", proxy)
    with FolderBank(tmp_path / "bank") as bank:
        entry = learnt(bank, SHAPE)
        source = bank.trajectory(str(entry.provenance.trajectory))
        assert source is not None and source.success is not None and not source.uses
        assert len(bank.outcomes(entry.id, 1)) == 1
    assert SHAPE not in proxy.bodies[0] and any(SHAPE in body for body in proxy.bodies[1:])


def test_rollouts_of_trl_are_advised_by_the_step_before(tmp_path: Path, proxy: Proxy) -> None:
    run("trl_grpo", tmp_path / "bank", proxy)
    with FolderBank(tmp_path / "bank") as bank:
        entries = list(bank.entries())
        assert {entry.text for entry in entries} == {SHAPE}
        assert sum(len(bank.outcomes(entry.id, entry.version)) for entry in entries) == 2


def test_an_mcp_agent_records_and_a_distiller_teaches_its_next_run(
    tmp_path: Path, proxy: Proxy
) -> None:
    sys.path.insert(0, str(EXAMPLES))
    folder, argv = tmp_path / "bank", sys.argv
    assert "none yet" in run("mcp_client", folder, proxy)
    sys.argv = [*argv[:1], str(folder)]
    try:
        import setting

        with setting.manager() as distiller:
            distiller.drain()
            distiller.bank.close()
    finally:
        sys.argv = argv
        sys.path.remove(str(EXAMPLES))
    assert LESSON in run("mcp_client", folder, proxy)
    with FolderBank(folder) as bank:
        assert len(bank.outcomes(learnt(bank, LESSON).id, 1)) == 1
    assert LESSON in json.loads(proxy.bodies[-1])["messages"][0]["content"]


def test_the_server_itself_can_be_the_extractor(tmp_path: Path, proxy: Proxy) -> None:
    llm = xp.OpenAILLM("smollm2", base_url=proxy.url, timeout=PATIENCE)
    extractor = xp.ExtractorAgent(llm, max_tokens=48)  # a busy machine may write one in a second
    with (
        xp.ExperienceBank(tmp_path / "bank", embedder="hashing") as bank,
        xp.ExperienceManager(bank, extractor, distill_timeout=PATIENCE) as manager,
    ):
        with manager.episode("Open the vault of Alder.") as ep:
            ep.record("Three levers: copper, iron, brass.", "pull iron")
            ep.finish(success=False, feedback="The brass lever was live.")
        manager.drain()
        stats = manager.stats()
        assert stats["distilled"] == 1 and stats["failures"] == {}
        assert bank.queue.state(ep.id) == "done"
