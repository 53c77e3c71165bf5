"""A budget that is spent ends commands with what was done, one sentence and exit code 1."""

# ruff: noqa: F811  (fixtures are imported)

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from experiential.bank.bank import ExperienceBank
from experiential.llm.metered import Spent
from experiential.training.metrics import read_events
from tests.test_frozen import SMALL, Run, VaultServer, run, server  # noqa: F401  (fixtures)


def hosted(server: VaultServer, **options: Any) -> list[str]:
    table = {"url": server.url, "key_env": "VAULT_KEY", "options": options}
    return ["runtime=frozen", "model.name=wise", f"model.server={json.dumps(table)}"]


def test_training_stops_with_a_checkpoint_reports_what_it_took_and_goes_on(
    server: VaultServer,
    run: Run,
    tmp_path: Path,
) -> None:
    folder, price = tmp_path / "run", [1000.0, 10_000.0]
    first = hosted(server, max_total_tokens=250, price=price)  # 11 tokens, 2.9 cents a reply
    plain = ("--recipe", "frozen", "--output", folder, "--plain")
    code, out, error = run("train", *plain, *SMALL, *first, "run.checkpoint_every=0")
    assert code == 1 and error.count("\n") == 1, error
    assert (
        "max_total_tokens=250 of 'wise', got 2" in error
        and "go on with: experiential-train --resume" in error
    )
    assert "Spent in steps and evaluations: actor " in out
    (saved,) = (folder / "checkpoints").glob("step-*")
    played = [e for e in read_events(folder / "metrics.jsonl") if e["event"] == "step"]
    assert saved.name == f"step-{len(played):06d}" and 0 < len(played) < 3
    end = read_events(folder / "metrics.jsonl")[-1]
    assert (end["event"], end["step"], end["reason"]) == ("end", len(played), "budget")
    step = played[0]
    for role in ("actor", "extractor"):
        replies = step[f"{role}_prompt_tokens"] / 9
        assert replies >= 6 and step[f"{role}_completion_tokens"] == 2 * replies
        assert step[f"{role}_cost"] == pytest.approx(0.029 * replies)
        assert f"{role}_unreported" not in step
    usage = step["manager"]["usage"]["extractor"]
    assert usage["prompt_tokens"] >= step["extractor_prompt_tokens"]
    more = hosted(server, max_cost=100, price=price)
    code, out, error = run("train", "--resume", "--output", folder, "--plain", *more)
    assert code == 0, error
    events = read_events(folder / "metrics.jsonl")
    assert [e["step"] for e in events if e["event"] == "step"] == [1, 2, 3]
    arms = [e for e in events if e["event"] == "eval"]
    total = sum(e.get(f"{role}_cost", 0.0) for e in events for role in ("actor", "extractor"))
    total += sum(e["cost"][role]["cost"] or 0.0 for e in arms for role in ("actor", "extractor"))
    said = " ".join(out.partition("Spent in steps")[2].split())
    dollars = [float(one) for one in re.findall(r"\$(\d+\.\d\d)", said)]
    assert len(dollars) == 2
    assert sum(dollars) == pytest.approx(total, abs=0.011)


def test_an_evaluation_keeps_the_arms_that_were_finished_and_goes_on(
    server: VaultServer,
    run: Run,
    tmp_path: Path,
) -> None:
    folder, card = tmp_path / "run", tmp_path / "card"
    few = ("run.steps=1", "actor.groups=2", "eval.worlds=2", "eval.visits=3", "eval.after=false")
    code, _, error = run(
        "train", "--recipe", "frozen", "--output", folder, "--plain", *SMALL, *few, *hosted(server)
    )
    assert code == 0, error

    def evaluate(**options: Any) -> tuple[int, str, str]:
        table = hosted(server, **options)
        return run("eval", folder, "--arms", "off,on", "--output", card, "--json", *table)

    code, out, error = evaluate(max_total_tokens=11)
    assert code == 1 and "max_total_tokens=11" in error and not (card / "card.json").exists()
    limit = 140  # the first arm has at most 12 replies of 11 tokens
    code, out, error = evaluate(max_total_tokens=limit)
    assert code == 1 and error.count("error: ") == 1 and f"max_total_tokens={limit}" in error
    assert [arm["arm"] for arm in json.loads(out)["recipes"][0]["arms"]] == ["off"]
    before = len(server.requests)
    code, out, error = evaluate(price=[1000.0, 0.0])
    off, on = json.loads(out)["recipes"][0]["arms"]
    assert code == 0 and off["actor"]["cost"] is None  # not played again
    assert on["actor"]["cost"] == pytest.approx(0.001 * on["actor"]["prompt_tokens"])
    assert on["extractor"]["requests"] > 0 and on["per_success"]["extractor_cost"] > 0
    assert len(server.requests) - before <= on["actor"]["requests"] + 20
    code, out, _ = run("eval", folder, "--arms", "off,on", "--output", card, *hosted(server))
    assert code == 0 and re.search(r"frozen, on: actor \$\d\.\d{4}, extractor \$\d", out)


def test_a_bench_run_that_was_stopped_by_its_budget_goes_on_and_counts_all_it_spent(
    server: VaultServer,
    run: Run,
    tmp_path: Path,
) -> None:
    results = tmp_path / "bench.json"

    def bench(*options: str) -> tuple[int, str, str]:
        more = [part for one in options for part in ("--backend-option", one)]
        named = ("--base-url", server.url, "--api-key-env", "VAULT_KEY", "--model", "wise")
        size = ("--episodes", 2, "--slots", 1, "--results", results)
        return run("bench", "run", "--suite", "frozenlake", *size, *named, *more)

    code, _, error = bench("max_total_tokens=22")
    assert code == 1 and "max_total_tokens=22" in error and not results.exists()
    code, out, error = bench("price=[1000, 0]", "max_cost=50")
    assert code == 0, error
    [cell] = json.loads(results.read_text())["cells"]
    spent = Spent(**cell["actor"])
    tokens = sum(e["prompt_tokens"] + e["response_tokens"] for e in cell["episodes"])
    assert tokens > 0 and tokens % 11 == 0
    assert spent.tokens == tokens + 22, "the episode that the budget cut short was paid for"
    assert spent.cost == pytest.approx(0.009 * tokens / 11), "the first run named no price"
    assert f"spent: actor {spent.describe()}" in " ".join(out.split())
    # what is finished is not played again, and the limit is no other setting
    code, out, error = bench("max_total_tokens=11")
    assert code == 0 and "success" in out, error
    assert json.loads(results.read_text())["cells"] == [cell]


def test_what_a_server_does_not_report_is_unknown(
    server: VaultServer, run: Run, tmp_path: Path
) -> None:
    decide = server.decide

    def silent(body: dict[str, Any]) -> tuple[int, Any]:
        status, reply = decide(body)
        return status, {**reply, "usage": None}

    server.decide = silent  # type: ignore[method-assign]
    folder = tmp_path / "run"
    few = ("run.steps=1", "actor.groups=2", "eval.worlds=2", "eval.visits=2")
    plain = ("--recipe", "frozen", "--output", folder, "--plain")
    code, _, error = run("train", *plain, *SMALL, *few, *hosted(server))
    assert code == 0, error
    (step,) = [e for e in read_events(folder / "metrics.jsonl") if e["event"] == "step"]
    assert step["actor_unreported"] >= 2
    assert not {"actor_prompt_tokens", "actor_cost"} & step.keys()
    limited = hosted(server, max_cost=5)
    code, _, error = run("train", *plain, "--overwrite", *SMALL, *few, *limited)
    assert code == 1 and "report what each reply takes, to keep a limit" in error


def test_a_merge_keeps_what_was_merged_and_goes_on(
    server: VaultServer, run: Run, tmp_path: Path
) -> None:
    with ExperienceBank(tmp_path / "bank", embedder="hashing") as bank:
        for door in ("red", "blue", "green"):
            bank.add_many([f"Pull the {door} lever.", f"Pull the {door} lever now."], task=door)
    hosted = ("--base-url", server.url, "--api-key-env", "VAULT_KEY", "--json", "--model", "wise")
    limit = ("--backend-option", "max_total_tokens=11")
    code, out, error = run("bank", "merge", tmp_path / "bank", *hosted, *limit)
    assert code == 1 and error.count("\n") == 1 and "max_total_tokens=11" in error
    assert out.count("One note.") == 1
    code, out, error = run("bank", "merge", tmp_path / "bank", *hosted)
    assert code == 0 and out.count("One note.") >= 2, error
