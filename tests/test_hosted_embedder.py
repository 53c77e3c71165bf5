"""Embeddings of a server: what is sent, what a bank records, and every way it can fail."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.index.embed import HashingEmbedder, recorded_embedder, resolve_embedder
from experiential.bank.index.hosted import HostedEmbedder
from experiential.errors import BackendError, BudgetError, ConfigError, ContextError
from experiential.types import Usage
from tests.chat_server import Server


class EmbeddingServer(Server):
    """Embeds by hashing, times 3 and in turned order, until ``replies`` are given."""

    def __init__(self) -> None:
        super().__init__()
        self.replies = []

    def reply_to(self, body: dict[str, Any]) -> tuple[int, Any, dict[str, str], float]:
        if self.replies:
            return super().reply_to(body)
        vectors = HashingEmbedder(body.get("dimensions", 64))(body["input"]) * 3
        rows = [{"index": i, "embedding": v} for i, v in enumerate(vectors.tolist())]
        usage = {"prompt_tokens": len(rows), "total_tokens": len(rows)}
        return 200, {"data": rows[::-1], "usage": usage}, {}, 0.0


@pytest.fixture
def server():
    server = EmbeddingServer()
    yield server
    server.close()


def row(index: int = 0, embedding: Any = (1.0, 0.0)) -> dict[str, Any]:
    return {"index": index, "embedding": embedding}


def test_unit_vectors_come_back_in_order_batched_and_counted(server: EmbeddingServer) -> None:
    texts = [f"door number {i}" for i in range(10)] + [" "]
    embedder = HostedEmbedder("m", base_url=server.url, api_key="k", batch=4, price=2.0)
    vectors = embedder(texts)
    assert vectors.dtype == np.float32 and vectors.shape == (11, 64)
    assert np.allclose(vectors[:10], HashingEmbedder(64)(texts[:10]), atol=1e-6)
    assert sorted(len(one["input"]) for one in server.requests) == [3, 4, 4]
    assert server.requests[0]["path"] == "/v1/embeddings"
    assert {one["Authorization"] for one in server.headers} == {"Bearer k"}
    spent = embedder.spent
    assert spent == Usage(prompt_tokens=11, cost=spent.cost)
    assert spent.cost == pytest.approx(22e-6)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda text: embedder([text])[0], texts[:10]))
    assert np.allclose(found, vectors[:10])


def test_long_texts_are_cut_and_dimensions_asked_for(server: EmbeddingServer) -> None:
    embedder = HostedEmbedder("m", base_url=server.url, dimensions=16, max_chars=5)
    assert embedder(["a very long text"]).shape == (1, 16) and embedder.id == "openai:m#16"
    assert server.requests[0] == {
        "path": "/v1/embeddings",
        "model": "m",
        "input": ["a ver"],
        "dimensions": 16,
    }


@pytest.mark.parametrize("by_name", [False, True])
def test_a_bank_records_it_without_the_key_and_re_opens_with_it(
    server: EmbeddingServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_name: bool
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    given = f"openai:m@{server.url}" if by_name else HostedEmbedder("m", base_url=server.url)
    with ExperienceBank(tmp_path / "bank", embedder=given) as bank:
        entry = bank.add("The red door needs the brass key.")
    with ExperienceBank(tmp_path / "bank") as bank:
        assert bank.embedder.id == "openai:m"
        assert bank.search("which key opens the red door?")[0].experience.id == entry.id
    assert all(b"sk-secret" not in one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())
    with ExperienceBank(tmp_path / "bank", read_only=True) as bank:
        bank.search("another question")
    assert server.headers[-1]["Authorization"] == "Bearer sk-secret"  # of this machine


def test_a_recorded_address_of_somebody_else_gets_no_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)

    def sent(name: str, *, recorded: bool) -> Any:
        found = recorded_embedder("openai:m", name) if recorded else resolve_embedder(name)
        assert isinstance(found, HostedEmbedder)
        return found._client._headers.get("Authorization")  # pyright: ignore[reportPrivateUsage]

    evil = "openai:m@http://evil.example/v1"
    assert sent(evil, recorded=True) is None and "without a key" in caplog.text
    assert sent("openai:m@http://127.0.0.1.evil.example/v1", recorded=True) is None
    assert sent(evil, recorded=False) == sent("openai:m", recorded=True) == "Bearer sk-secret"
    assert sent("openai:m@http://localhost:1/v1", recorded=True) == "Bearer sk-secret"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://evil.example/v1/")
    assert sent(evil, recorded=True) == "Bearer sk-secret"


def test_names_hold_model_dimensions_and_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    for name in ("openai:m", "openai:@cf/bge:latest#8@http://h/v1", "openai:a/b@https://h:8/v1"):
        assert HostedEmbedder.named(name).recorded == name
    monkeypatch.setenv("OPENAI_BASE_URL", "http://h/v1")
    assert HostedEmbedder.named("openai:m").recorded == "openai:m@http://h/v1"
    assert HostedEmbedder.named("openai:m", trusted=False).recorded == "openai:m"
    for wrong in ("openai", "openai:", "openai:m@http://user:pass@h/v1"):
        with pytest.raises(ConfigError):
            resolve_embedder(wrong)
    with pytest.raises(ValueError, match="batch to be positive"):
        HostedEmbedder("m", batch=0)


FAULTS: list[tuple[str, list[tuple[int, Any]], type[BackendError] | None, str]] = [
    ("429, then vectors", [(429, "slow"), (200, {"data": [row()]})], None, ""),
    ("5xx for ever", [(503, "busy")], BackendError, "503: busy"),
    ("wrong key", [(401, "Incorrect API key")], BackendError, "Incorrect API key"),
    ("no such model", [(404, "no model m")], BackendError, "no model m"),
    ("quota spent", [(429, {"error": {"code": "insufficient_quota"}})], BudgetError, "quota"),
    ("too long", [(400, "maximum context length is 512")], ContextError, "context length"),
    ("no JSON", [(200, "oops")], BackendError, "Expected 1 embeddings"),
    ("an error in a 200", [(200, {"error": "loading"})], BackendError, "loading"),
    ("no vectors", [(200, {"data": []})], BackendError, "Expected 1 embeddings"),
    ("too many", [(200, {"data": [row(), row(1)]})], BackendError, "Expected 1 embeddings"),
    ("words for numbers", [(200, {"data": [row(0, ["a"])]})], BackendError, "Expected 1"),
    ("base64", [(200, {"data": [row(0, "AACAPw==")]})], BackendError, "Expected 1 embeddings"),
    ("not a number", [(200, '{"data": [{"index": 0, "embedding": [NaN]}]}')], BackendError, "NaN"),
    ("zeros", [(200, {"data": [row(0, [0.0, 0.0])]})], BackendError, "Expected 1 embeddings"),
    ("an empty vector", [(200, {"data": [row(0, [])]})], BackendError, "Expected 1 embeddings"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_a_fault_ends_in_vectors_or_a_named_error(server: EmbeddingServer, fault: Any) -> None:
    _, replies, error, words = fault
    server.replies = [(status, body, {}, 0.0) for status, body in replies]
    embedder = HostedEmbedder("m", base_url=server.url, backoff=0.001)
    if error is None:
        assert embedder(["door"]).tolist() == [[1.0, 0.0]]
        return
    with pytest.raises(BackendError) as caught:
        embedder(["door"])
    assert type(caught.value) is error and words in str(caught.value)


def test_vectors_of_another_length_are_refused(server: EmbeddingServer) -> None:
    embedder = HostedEmbedder("m", base_url=server.url)
    embedder(["door"])
    server.replies = [(200, {"data": [row()]}, {}, 0.0)]
    with pytest.raises(BackendError, match="embeddings of 64 numbers from 'm', got 2"):
        embedder(["window"])


def test_a_budget_stops_requests(server: EmbeddingServer) -> None:
    embedder = HostedEmbedder("m", base_url=server.url, max_total_tokens=2)
    embedder(["a", "b"])
    with pytest.raises(BudgetError, match="max_total_tokens=2"):
        embedder(["c"])
    assert json.dumps(server.requests).count('"input"') == 1
