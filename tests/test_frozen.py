"""No weights are trained: recipe `frozen`, and commands that are given a server in their place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import frozen_model
from experiential.bank.bank import ExperienceBank
from experiential.cli import main, train
from experiential.cli.errors import run_app
from experiential.errors import ConfigError
from experiential.evaluation.results import ResultStore
from experiential.llm.scripted import ScriptedLLM
from experiential.recipe import dump_experiment, load_experiment
from experiential.training.metrics import read_events
from experiential.types import Message
from tests.chat_server import Server, completion

KEY = "sk-no-file-may-hold-this"
SMALL = (
    "bank.embedder=hashing env.train.worlds=6 env.eval.worlds=6"
    " actor.groups=6 run.steps=3 eval.worlds=6 eval.visits=3 bank.options.free_share=0"
).split()
Run = Callable[..., tuple[int, str, str]]


class VaultServer(Server):
    """Plays Vault by its notes and distils the clerk's, for those with the key."""

    models = ("wise",)

    def reply_to(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str], float]:
        return (*self.decide(body), {}, 0.0)

    def decide(self, body: dict[str, Any]) -> tuple[int, Any]:
        given = self.headers[-1].get("Authorization")
        if given != f"Bearer {KEY}":
            return 401, {"error": {"message": f"Incorrect API key {given}"}}
        if body["model"] not in self.models:
            return 404, {"error": {"message": f"The model {body['model']} does not exist"}}
        system, last = (body["messages"][place]["content"] for place in (0, -1))
        if "You tidy" in system:
            return 200, completion('[{"op": "merge", "entries": [1, 2], "text": "One note."}]')
        if "You keep the experience bank" in system:
            vault = re.search(r"vault of ([\w ]+)\.", last)
            live = re.search(r"(\w+) was live|The (\w+) lever turns", last)
            text = f"{vault[1]}: pull {live[1] or live[2]}." if vault and live else "Try."
            return 200, completion(f"<answer>{json.dumps([{'op': 'add', 'text': text}])}</answer>")
        shown = "".join(message["content"] for message in body["messages"])
        noted = re.search(r"\d\. [\w ]+: pull (\w+)", shown)
        levers = re.findall(r"Levers: (\w+), (\w+)", shown)
        tried = "clicks" in last
        lever = noted[1] if noted else levers[-1][tried] if levers else "none"
        return 200, completion(f"<action>pull {lever}</action>")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[VaultServer]:
    monkeypatch.setenv("VAULT_KEY", KEY)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    server = VaultServer()
    yield server
    server.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command here: exit code, stdout and stderr, neither of which holds the key."""

    def command(*arguments: object) -> tuple[int, str, str]:
        name, *rest = map(str, arguments)
        app = train.app if name == "train" else main.app
        code = run_app(app, rest if name == "train" else [name, *rest])
        said = capsys.readouterr()
        assert KEY not in said.out + said.err
        return code, said.out, said.err

    return command


def test_a_hosted_model_learns_by_its_bank_alone_and_is_gone_on_with(
    server: VaultServer, run: Run, tmp_path: Path
) -> None:
    hosted = ("--actor-url", server.url, "--api-key-env", "VAULT_KEY", "--plain")
    folder = tmp_path / "run"
    code, out, error = run("train", "--recipe", "frozen", "--output", folder, *hosted, *SMALL)
    assert code == 0, error
    events = read_events(folder / "metrics.jsonl")
    steps = [event for event in events if event["event"] == "step"]
    assert steps[0]["success_guided"] < 0.6 and steps[-1]["success_guided"] == 1.0
    assert steps[-1]["entries"] >= 6
    arms = {event["arm"]: event for event in events if event["event"] == "eval"}
    later = {arm: [v["successes"] for v in arms[arm]["visits"][1:]] for arm in arms}
    assert min(later["on"]) == 6 and max(later["off"]) <= 3
    asked = [request["messages"] for request in server.requests]
    advised = [one for one in asked if "<experience>\n1. " in one[min(1, len(one) - 1)]["content"]]
    assert advised and "Levers" in advised[0][1]["content"].partition("<experience>")[0]
    # nothing of weights and no key is in any file
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert not [file for file in files if file.suffix in (".pt", ".safetensors")]
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    code, out, error = run("train", "--resume", "--output", folder, "--plain", "run.steps=4")
    assert code == 0, error
    resumed = [e["step"] for e in read_events(folder / "metrics.jsonl") if e["event"] == "step"]
    assert resumed == [1, 2, 3, 4]
    # the bank of a run in the hands of another model
    server.models = ("other",)
    code, out, error = run(
        "eval", folder, "--base-url", server.url, "--api-key-env", "VAULT_KEY", "--json",
        "--arms", "off,on", "--output", tmp_path / "card", "eval.visits=2",
    )  # fmt: skip
    assert code == 0, error
    assert [arm["arm"] for arm in json.loads(out)["recipes"][0]["arms"]] == ["off", "on"]
    assert server.requests[-1]["model"] == "other"


def test_a_share_of_the_episodes_plays_free_and_all_count_their_tokens(
    server: VaultServer, run: Run, tmp_path: Path
) -> None:
    hosted = ("--actor-url", server.url, "--api-key-env", "VAULT_KEY", "--plain")
    few = ("run.steps=2", "eval.after=false", "bank.options.free_share=1")
    code, _, error = run(
        "train", "--recipe", "frozen", "--output", tmp_path / "run", *hosted, *SMALL, *few,
        "model.server.options.price=[1, 1]",
    )  # fmt: skip
    assert code == 0, error
    *_, last = read_events(tmp_path / "run" / "episodes.jsonl")
    assert {row["condition"] for row in last["rows"]} == {"free"}
    step = [e for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "step"][-1]
    assert step["success_guided"] is None and step["success_free"] is not None
    turns = sum(row["turns"] for row in last["rows"])
    assert step["actor_prompt_tokens"] == 9 * turns and step["actor_completion_tokens"] == 2 * turns
    assert step["actor_cost"] == pytest.approx(11e-6 * turns)


def test_the_part_of_the_critic_is_told_apart(
    server: VaultServer, run: Run, tmp_path: Path
) -> None:
    hosted = ("--actor-url", server.url, "--api-key-env", "VAULT_KEY", "--plain")
    code, out, error = run(
        "train", "--recipe", "frozen", "--output", tmp_path / "run", *hosted, *SMALL,
        "run.steps=2", "run.drain=true", "eval.after=false", "methods.critic={}",
        "actor.options.advice=system",
        "bank.options.free_share=0", "model.server.options.price=[1, 1]",
    )  # fmt: skip
    assert code == 0, error
    steps = [e for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "step"]
    asked = sum(steps[-1]["verdicts"].values())
    assert asked and sum(step.get("critic_prompt_tokens", 0) for step in steps) == 9 * asked
    assert sum(step.get("critic_cost", 0) for step in steps) == pytest.approx(11e-6 * asked)
    assert steps[-1]["actor_cost"] > steps[-1]["critic_cost"]
    assert f"(of which critic {11 * asked:,} tokens, " in " ".join(out.split())


def test_a_server_needs_no_torch(server: VaultServer, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'peft'): sys.modules[name] = None\n"
        "from experiential.cli.train import main\n"
        "main()\n"
    )
    few = ("run.steps=1", "actor.groups=2", "eval.worlds=2", "eval.visits=2")
    command = [sys.executable, "-c", code, "--recipe", "frozen", "--actor-url", server.url]
    command += ["--api-key-env", "VAULT_KEY", "--output", str(tmp_path / "run"), *SMALL, *few]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "Held-out success" in done.stdout


def test_actor_and_extractor_may_be_two_servers(
    server: VaultServer, run: Run, tmp_path: Path
) -> None:
    second = VaultServer()
    second.models = ("scribe",)
    try:
        code, _, error = run(
            "train", "--recipe", "frozen", "--actor-url", server.url, "--extractor-url",
            second.url, "--api-key-env", "VAULT_KEY", "--plain", "--output", tmp_path / "run",
            *SMALL, "run.steps=1", "eval.after=false",
        )  # fmt: skip
    finally:
        second.close()
    assert code == 0, error
    assert {request["model"] for request in server.requests} == {"wise"}
    distilled = [r for r in second.requests if "You keep" in r["messages"][0]["content"]]
    assert len(distilled) == 6 and {request["model"] for request in second.requests} == {"scribe"}


def test_a_local_model_is_frozen_too(run: Run, tmp_path: Path) -> None:
    few = ("run.steps=1", "actor.groups=2", "eval.worlds=2", "eval.visits=2", "model.threads=1")
    code, _, error = run(
        "train", "--recipe", "frozen", "--plain", "--output", tmp_path / "run", *SMALL, *few
    )
    assert code == 0, error
    step = [e for e in read_events(tmp_path / "run" / "metrics.jsonl") if e["event"] == "step"][0]
    assert step["actor_prompt_tokens"] > 2 * 2 and "actor_cost" not in step
    saved = tmp_path / "run" / "checkpoints" / "step-000001"
    assert [file.name for file in (saved / "actor").iterdir()] == ["policy.json"]


def test_merge_and_bench_take_a_server(server: VaultServer, run: Run, tmp_path: Path) -> None:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        bank.add_many(["Pull the red lever.", "Pull the red lever now."])
    hosted = ("--base-url", server.url, "--api-key-env", "VAULT_KEY")
    code, out, error = run("bank", "merge", tmp_path / "bank", *hosted, "--json")
    assert code == 0 and "One note." in out, error
    code, out, error = run(
        "bench", "run", "--suite", "frozenlake", "--episodes", 2, *hosted,
        "--results", tmp_path / "bench.json",
    )  # fmt: skip
    assert code == 0, error
    assert KEY not in (tmp_path / "bench.json").read_text()


@pytest.mark.parametrize("command", ["train", "dry", "eval", "bench", "merge"])
@pytest.mark.parametrize("mistake", ["url", "key", "empty key", "model", "which model"])
def test_a_server_that_cannot_be_used_is_one_line(
    command: str,
    mistake: str,
    server: VaultServer,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, model, said = server.url, "wise", ""
    if mistake == "url":
        url, said = "http://127.0.0.1:9/v1", "127.0.0.1:9"
    elif mistake == "key":
        monkeypatch.setenv("VAULT_KEY", "sk-wrong")
        said = "401"
    elif mistake == "empty key":
        monkeypatch.delenv("VAULT_KEY")
        said = "in the environment variable VAULT_KEY, got none"
    elif mistake == "model":
        model, said = "wize", "The model wize does not exist"
    else:
        server.models, model, said = ("wise", "owl"), "", "wise, owl"
    named = ("--model", model) if model else ()
    hosted = ("--base-url", url, "--api-key-env", "VAULT_KEY", *named)
    if command in ("train", "dry"):
        named = ("--actor-model", model) if model else ()
        dry = ("--dry-run",) if command == "dry" else ("--output", tmp_path / "run")
        key = ("--api-key-env", "VAULT_KEY")
        arguments = ("train", "--recipe", "frozen", "--actor-url", url, *key, *named, *dry, *SMALL)
    elif command == "eval":
        folder = tmp_path / "run"
        folder.mkdir()
        experiment = load_experiment("complementary")
        (folder / "config.yaml").write_text(dump_experiment(experiment))
        arguments = ("eval", folder, *hosted)
    elif command == "bench":
        arguments = ("bench", "run", "--suite", "frozenlake", *hosted)
    else:
        ExperienceBank(tmp_path / "bank", embedder="hashing").close()
        arguments = ("bank", "merge", tmp_path / "bank", *hosted)
    code, out, error = run(*arguments)
    assert code == 2, (out, error)
    assert out == "" and error.startswith("error: Expected ") and error.count("\n") == 1
    assert said in error and "sk-wrong" not in error


def test_the_benchmark_of_a_frozen_model_learns_and_plays_no_cell_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reply(messages: list[Message]) -> str:
        if "You keep the experience bank" in messages[0]["content"]:
            live = re.search(r"(\w+) was live|The (\w+) lever turns", messages[-1]["content"])
            text = f"Pull {live[1] or live[2]}." if live else "Try."
            return f'<answer>[{{"op": "add", "text": "{text}"}}]</answer>'
        first = messages[1]["content"]
        noted = re.search(r"1\. Pull (\w+)", first) or re.search(r"Levers: (\w+)", first)
        return f"pull {noted[1] if noted else ''}"

    llm = ScriptedLLM(reply)
    options = SimpleNamespace(games=["vault"], arms=["random", "off", "on"], worlds=4, visits=3)
    vars(options).update(place="observation", wording="block", strategy="diverse", floor=0.5)
    options.dtype = "float32"
    store = ResultStore(tmp_path, frozen_model.Cell, about="a cell")
    frozen_model.run(options, llm, store)  # type: ignore[arg-type]
    cell = store.find("vault-on-diverse")
    assert cell is not None and all(all(world[1:]) for world in cell.outcomes)
    assert cell.shown == 1.0 and cell.examples[0].startswith("Pull ")
    asked = len(llm.calls)
    frozen_model.run(options, llm, store)  # type: ignore[arg-type]
    assert len(llm.calls) == asked
    capsys.readouterr()
    frozen_model.print_table(store)
    assert "| vault |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="Expected a cell of the same settings"):
        options.visits = 4
        frozen_model.run(options, llm, store)  # type: ignore[arg-type]


def test_a_key_in_the_settings_is_refused(run: Run) -> None:
    for setting in (
        "model.server={url: 'http://h/v1', options: {api_key: sk-1}}",
        "model.server={url: 'http://user:sk-1@h/v1'}",
    ):
        code, _, error = run("train", "--recipe", "frozen", "--dry-run", setting)
        assert code == 2 and "server.key_env" in error and "sk-1" not in error


def test_weights_of_a_server_cannot_be_trained(run: Run) -> None:
    code, _, error = run(
        "train", "--dry-run", "--actor-url", "http://127.0.0.1:9/v1", "--actor-model", "m"
    )
    assert code == 2 and "use --recipe frozen" in error
    code, _, error = run("train", "--recipe", "frozen", "--dry-run", "actor.train=true")
    assert code == 2 and "runtime=frozen" in error
