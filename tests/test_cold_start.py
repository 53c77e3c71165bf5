"""Supervised training on demonstrations: what is read, which tokens are learnt, that it learns, and
that a resumed run skips it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.demonstrations import demonstrations
from experiential.agents.actor import ActorAgent
from experiential.config import ColdStartSettings, LoraSettings, ModelSettings, OptimSettings
from experiential.errors import ConfigError
from experiential.llm.models import load_model
from experiential.recipe import load_experiment
from experiential.training.local import LocalRuntime, build_runtimes
from experiential.training.methods.cold_start import (
    ColdStart,
    Demonstration,
    cold_start,
    demonstration_samples,
    read_demonstrations,
)
from experiential.training.trainer import Trainer, build_methods

CHAT = [
    {"role": "system", "content": "Play. Answer with one action."},
    {"role": "user", "content": "A door."},
    {"role": "assistant", "content": "<search_experience>door</search_experience>"},
    {"role": "user", "content": "Nothing found."},
    {"role": "assistant", "content": "pull red"},
]


def chat(*roles: str) -> str:
    return json.dumps({"messages": [{"role": role, "content": "x"} for role in roles]})


def written(folder: Path, *lines: str) -> Path:
    path = folder / "demonstrations.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_model(ModelSettings())[1]


def test_chats_are_read_and_other_fields_and_blank_lines_do_not_matter(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        json.dumps({"messages": CHAT, "success": True}),
        "",
        chat("user", "assistant"),
        chat("tool", "assistant"),
    )
    assert [len(one.messages) for one in read_demonstrations(path)] == [5, 2, 2]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        ("{}", "messages"),
        (chat("user"), "messages"),
        (chat("user", "user"), "must take turns"),
        (chat("assistant", "user"), "must take turns"),
        (chat("system", "user", "assistant", "user"), "must be last"),
        (chat("user", "assistant", "system", "assistant"), "can only be the first"),
        (chat("robot", "assistant"), "messages.0.role"),
        (
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": ""},
                        {"role": "assistant", "content": "x"},
                    ]
                }
            ),
            "messages.0.content",
        ),
        (
            (
                '{"messages": [{"role": "user", "content": "x", "name": "y"}, {"role": "assistant",'
                ' "content": "x"}]}'
            ),
            "messages.0.name",
        ),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(ConfigError, match="in line 2 of") as caught:
        read_demonstrations(written(tmp_path, chat("user", "assistant"), line))
    assert told in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_or_empty_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cold_start\.demonstrations, got .*none\.jsonl"):
        read_demonstrations(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"benchmarks\.demonstrations"):
        read_demonstrations(written(tmp_path, ""))


def test_only_the_assistants_tokens_are_learnt_each_reply_with_its_end(tokenizer: Any) -> None:
    (sample,) = demonstration_samples(Demonstration.model_validate({"messages": CHAT}), tokenizer)
    learnt = tokenizer.decode([sample.tokens[p] for p in sample.positions])
    end = tokenizer.eos_token
    assert learnt == f"<search_experience>door</search_experience>{end}pull red{end}"
    assert tokenizer.decode(sample.tokens).startswith(
        tokenizer.apply_chat_template(CHAT[:2], tokenize=False)
    )


def test_the_prompts_are_those_that_an_actor_meets(tokenizer: Any) -> None:
    """Played by an actor, the same replies have the same tokens at the same places."""
    from experiential.llm.scripted import ScriptedLLM

    replies = [message["content"] for message in CHAT if message["role"] == "assistant"]
    agent = ActorAgent(ScriptedLLM(replies, tokenizer=tokenizer), prompts="brief")
    for message in CHAT:
        if message["role"] == "user":
            agent.act(message["content"])
    (sample,) = demonstration_samples(Demonstration.model_validate({"messages": CHAT}), tokenizer)
    (played,) = agent.dialogue.sequences()  # type: ignore[union-attr]
    assert list(sample.tokens) == played.tokens and [
        i for i, m in enumerate(played.mask) if m
    ] == list(sample.positions)


def runtime(tokenizer: Any, lora: LoraSettings | None = None) -> LocalRuntime:
    optim = OptimSettings(lr=2e-3 if lora is None else 2e-2)
    return build_runtimes(ModelSettings(lora=lora), None, (optim, optim), references=(True, False))[
        0
    ]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)], ids=["full", "lora"])
def test_demonstrations_become_likely_and_the_reference_follows(
    tmp_path: Path, tokenizer: Any, lora: LoraSettings | None
) -> None:
    path = written(tmp_path, *[json.dumps({"messages": CHAT})] * 8)
    policy, events = runtime(tokenizer, lora), list[dict[str, Any]]()
    (sample,) = demonstration_samples(Demonstration.model_validate({"messages": CHAT}), tokenizer)

    async def run() -> tuple[list[float], list[float]]:
        before = (await policy.score([sample]))[0]
        await cold_start(
            policy,
            ColdStartSettings(demonstrations=str(path), epochs=6, batch_size=4),
            0,
            events.append,
        )
        return list(before), list((await policy.score([sample]))[0])

    before, after = asyncio.run(run())
    (event,) = events
    assert (event["updates"], event["demonstrations"], event["tokens"]) == (
        12,
        8,
        6 * 8 * len(sample.positions),
    )
    assert sum(after) > sum(before) / 2 and event["loss"] < event["first_loss"]
    assert policy.version == 12
    if lora is None:
        assert policy._reference is not None  # pyright: ignore[reportPrivateUsage]
        pairs = zip(policy._reference, policy._parameters, strict=True)  # pyright: ignore[reportPrivateUsage]
        assert all(bool((a == b).all()) for a, b in pairs)


@pytest.mark.slow
def test_the_reference_survives_a_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    path = written(tmp_path, json.dumps({"messages": CHAT}))
    first, second = runtime(tokenizer), runtime(tokenizer)

    async def run() -> None:
        await cold_start(first, ColdStartSettings(demonstrations=str(path)), 0)
        await first.save(tmp_path / "policy")
        await second.load(tmp_path / "policy")

    asyncio.run(run())
    pairs = zip(first._reference or (), second._reference or (), strict=True)  # pyright: ignore[reportPrivateUsage]
    assert all(bool((a == b).all()) for a, b in pairs)


def test_a_run_begins_with_demonstrations_only_where_its_settings_name_some() -> None:
    def begins(*overrides: str) -> bool:
        run: Any = SimpleNamespace(experiment=load_experiment("grpo", overrides), actor=None)
        run.manager = run.bank = None
        return any(isinstance(method, ColdStart) for method in build_methods(run))

    assert not begins()
    assert begins("methods.cold_start.demonstrations=some.jsonl")


def test_demonstrations_of_vault_ask_and_follow(tmp_path: Path) -> None:
    experiment = load_experiment("evolver", ["bank.embedder=hashing", "bank.retrieval.floor=-1.0"])
    rows = list(demonstrations(experiment, 20, ask=1.0, follow=1.0, seed=1))
    assert len(read_demonstrations(written(tmp_path, *map(json.dumps, rows)))) == 20
    assert all(row["messages"][2]["content"].startswith("<search_experience>") for row in rows)
    calls = [row["messages"][2]["content"] for row in rows]
    worlds = [
        call.removeprefix("<search_experience>Open the vault of ").removesuffix(
            ".</search_experience>"
        )
        for call in calls
    ]
    noted = [
        row
        for row, world in zip(rows, worlds, strict=True)
        if world in row["messages"][3]["content"]
    ]
    assert 0 < len(noted) < 20 and all(
        row["success"] and len(row["messages"]) == 5 for row in noted
    )  # one pull, the right one
    silent = demonstrations(experiment, 3, ask=0.0, follow=1.0, seed=1)
    assert all("<search_experience>" not in json.dumps(row) for row in silent)


def test_demonstrations_of_hotpotqa_answer_rightly(tmp_path: Path) -> None:
    env = [
        "env.id=experiential/HotpotQA-v0",
        "env.kwargs={choices: true, style: tags}",
        "env.train={questions: 9}",
    ]
    rows = list(
        demonstrations(
            load_experiment("evolver", ["bank.embedder=hashing", *env]),
            4,
            ask=1.0,
            follow=1.0,
            seed=1,
        )
    )
    assert all(row["success"] for row in rows) and all(
        "<answer>" in row["messages"][-1]["content"] for row in rows
    )
    assert all("Nothing found." in row["messages"][3]["content"] for row in rows)


@pytest.mark.slow
def test_a_run_begins_with_it_and_a_resumed_one_does_not(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"messages": CHAT}))
    small = [
        "actor.groups=1",
        "actor.group_size=2",
        "eval.before=false",
        "eval.after=false",
        "bank.embedder=hashing",
    ]
    overrides = [*small, f"methods.cold_start={{demonstrations: {path}}}"]
    for steps, resume in ((1, False), (2, True)):
        Trainer(
            load_experiment("evolver", [*overrides, f"run.steps={steps}"]),
            tmp_path / "run",
            resume=resume,
        ).run()
    events = [
        json.loads(line)["event"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert (
        events.count("cold_start") == 1
        and events.count("step") == 2
        and events.index("cold_start") < events.index("step")
    )
