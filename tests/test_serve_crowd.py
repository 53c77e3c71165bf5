"""A crowd of clients, 8 processes of 8 threads, at one served bank: nothing lost, nothing twice,
every entry linearizable.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import experiential as xp
from tests.test_serve import serve_command

CLIENT = """
import json, random, sys, threading, time
import httpx
import experiential as xp

url, process = sys.argv[1], int(sys.argv[2])
shared, keys = sys.argv[3].split(","), sys.argv[4].split(",")
bank = xp.ExperienceBank(url)
told = {"wrong": [], "written": [], "steps": [], "keyed": []}

def work(thread):
    draw = random.Random(process * 8 + thread)
    with httpx.Client(base_url=url, timeout=60) as plain:
        for i in range(3):
            name = f"{process}.{thread}.{i}"
            add(name)
            for id in draw.sample(shared, 2):
                step("write", id, lambda: bank.update(id, f"{name} wrote {id}"))
                step("read", id, lambda: bank.get(id))
        for key in draw.sample(keys, len(keys)):
            body = {"text": f"written under {key}"}
            answer = plain.post("/v1/add", json=body, headers={"Idempotency-Key": key})
            told["keyed"].append([key, answer.status_code, answer.json().get("id")])

def add(name):
    texts = [f"{name}.{part}" for part in range(3)]
    told["written"].extend(entry.id for entry in bank.add_many(texts))
    if f"{name}.1" not in [hit.experience.text for hit in bank.search(f"{name}.1", k=20)]:
        told["wrong"].append(f"{name} not found")
    whole(hit.experience.text for hit in bank.search("entry", k=10_000))
    whole(entry.text for entry in bank.entries())

def step(kind, id, call):
    began = time.monotonic()
    entry = call()
    told["steps"].append([kind, id, began, time.monotonic(), entry.version, entry.text])

def whole(texts):
    parts = {}
    for text in texts:
        name, _, part = text.rpartition(".")
        if name and " " not in text:
            parts.setdefault(name, set()).add(part)
    halves = {name: found for name, found in parts.items() if len(found) != 3}
    told["wrong"].extend(f"half of {name}: {sorted(found)}" for name, found in halves.items())

threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(told))
"""
pytestmark = pytest.mark.slow  # about 15 s on two free cores
KEYS = [f"key-{n}" for n in range(4)]


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all clients saw, together, and what the bank holds afterwards, opened anew from its
    folder.
    """
    folder: Path = tmp_path_factory.mktemp("crowd") / "bank"
    with serve_command(folder) as (_, url):
        with xp.ExperienceBank(url) as bank:
            shared = [entry.id for entry in bank.add_many([f"shared entry {n}" for n in range(4)])]
        arguments = [",".join(shared), ",".join(KEYS)]
        clients = [
            subprocess.Popen(
                [sys.executable, "-c", CLIENT, url, str(n), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for n in range(8)
        ]
        said = [client.communicate(timeout=240) for client in clients]
        errors = [error for _, error in said if error]  # of threads, too
        assert [client.returncode for client in clients] == [0] * 8 and not errors, errors
    told: dict[str, Any] = defaultdict(list)
    for out, _ in said:
        for name, values in json.loads(out).items():
            told[name].extend(values)
    with xp.ExperienceBank(folder) as bank:
        history = {
            (id, version): bank.version(id, version)
            for id in shared
            for version in range(1, 64 * 6 + 2)
        }
        return {
            **told,
            "shared": shared,
            "entries": list(bank),
            "commits": bank.commits(),
            "history": history,
        }


def test_nothing_is_lost_or_seen_in_part(crowd: dict[str, Any]) -> None:
    assert crowd["wrong"] == []
    assert len(crowd["written"]) == 64 * 3 * 3 == len(set(crowd["written"]))
    rest = {entry.id for entry in crowd["entries"]} - set(crowd["written"]) - set(crowd["shared"])
    assert len(rest) == len(KEYS) and len(crowd["entries"]) == 64 * 3 * 3 + 4 + len(KEYS)
    assert len(crowd["commits"]) == 1 + 64 * 3 + 64 * 6 + len(KEYS)


def test_one_key_is_one_write_whoever_sends_it(crowd: dict[str, Any]) -> None:
    assert len(crowd["keyed"]) == 64 * len(KEYS) and {
        status for _, status, _ in crowd["keyed"]
    } == {200}
    by_key = {key: {id for other, _, id in crowd["keyed"] if other == key} for key in KEYS}
    assert all(len(ids) == 1 for ids in by_key.values()) and len(
        set().union(*by_key.values())
    ) == len(KEYS)
    texts = [entry.text for entry in crowd["entries"] if entry.text.startswith("written under")]
    assert sorted(texts) == [f"written under {key}" for key in KEYS]


def test_every_entry_is_linearizable(crowd: dict[str, Any]) -> None:
    """An entry is a register whose versions are its order of writing: whatever ended before
    something began is not after it.
    """
    for id in crowd["shared"]:
        steps = [step for step in crowd["steps"] if step[1] == id]
        writes = [step for step in steps if step[0] == "write"]
        assert sorted(step[4] for step in writes) == list(range(2, len(writes) + 2))
        assert all(
            crowd["history"][id, version].text == text for _, _, _, _, version, text in steps
        )
        assert _disorder(steps) == []
    assert sum(step[0] == "write" for step in crowd["steps"]) == 64 * 6


def test_the_order_that_is_checked_can_be_broken() -> None:
    write, stale, twin = (
        ["write", "a", 0.0, 1.0, 2, ""],
        ["read", "a", 1.5, 2.0, 1, ""],
        ["write", "a", 1.5, 2.0, 2, ""],
    )
    assert _disorder([write, ["read", "a", 0.5, 0.6, 1, ""], ["read", "a", 1.5, 2.0, 2, ""]]) == []
    assert _disorder([write, stale]) == [stale] and _disorder([write, twin]) == [twin]


def _disorder(steps: list[list[Any]]) -> list[list[Any]]:
    """Steps that gave an earlier version than one that had ended when they began; for a write the
    same version is too early.
    """
    ended = sorted(steps, key=lambda step: step[3])
    wrong, newest, place = [], 0, 0
    for step in sorted(steps, key=lambda step: step[2]):
        while place < len(ended) and ended[place][3] < step[2]:
            newest = max(newest, ended[place][4])
            place += 1
        if step[4] < newest + (step[0] == "write"):
            wrong.append(step)
    return wrong
