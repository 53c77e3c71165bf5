"""PrefixCache: the longest known beginning is found, rows go on in place, memory is bounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiential.llm.states import PrefixCache, Row, free_memory

Ids = st.lists(st.integers(0, 2), min_size=8, max_size=30)
TOKEN = 2 * 4  # bytes of a token's states: keys and values of one layer, one head of one float32


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def forward(row: Row, ids: np.ndarray) -> None:
    """Write the ids themselves as states of what the row does not hold, as a forward would."""
    data = row.slab.states(torch.zeros(1, 1, 1, 1))
    assert data[0, row.slot, 0, : row.length, 0].tolist() == ids[: row.length].tolist()
    data[:, row.slot, 0, row.length : len(ids), 0] = torch.as_tensor(ids[row.length :]).float()
    row.length = len(ids)


def put(cache: PrefixCache, ids: list[int], room: int = 0) -> Row:
    """Open a prompt, forward what is new, and leave the row idle."""
    row = cache.open(array(ids), room)
    forward(row, array(ids))
    cache.release(row, array(ids))
    return row


def small(tokens: int) -> PrefixCache:
    """Return a cache with room for so many; it knows the size of one after its first forward."""
    cache = PrefixCache(1, max_gb=tokens * TOKEN / 1e9)
    put(cache, [9] * 8)
    cache.clear()
    return cache


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@settings(max_examples=100, deadline=None)
@given(st.lists(Ids, max_size=25), Ids)
def test_match_equals_brute_force(entries: list[list[int]], query: list[int]):
    """With room for all, the match is the longest beginning of everything ever stored, and each
    row holds the states of its own tokens.
    """
    cache = PrefixCache(1, max_gb=1)
    for ids in entries:
        put(cache, ids)
    expected = max((common(ids, query[:-1]) for ids in entries), default=0)
    found, row = cache.match(array(query))
    assert found == (expected if expected >= 8 else 0)
    assert (row is None) == (found == 0)
    put(cache, query)


@settings(max_examples=60, deadline=None)
@given(st.lists(Ids, max_size=40), st.integers(1, 6))
def test_room_never_exceeds_the_bound(entries: list[list[int]], rows: int):
    cache = small(rows * 64)
    for ids in entries:
        put(cache, ids)
        assert cache.tokens <= rows * 64 and len(cache) <= rows
        assert cache.match(array([*ids, 0]))[0] == len(ids)


def test_least_recently_used_goes_first():
    cache = small(2 * 64)
    for first in (1, 2):
        put(cache, [first] * 40)
    put(cache, [1] * 40)
    put(cache, [3] * 40)
    assert cache.match(array([1] * 40))[0] == 39
    assert cache.match(array([2] * 40)) == (0, None)


def test_a_conversation_goes_on_in_its_row_and_a_branch_copies_its_beginning():
    cache = PrefixCache(1, max_gb=1)
    talk = [*range(100)]
    row = put(cache, talk, room=100)
    assert put(cache, [*talk, 7, 8], room=10) is row
    assert (len(cache), row.length) == (1, 102)
    branch = cache.open(array([*range(60), 5, 5]), 0)
    assert branch is not row and branch.length == 60
    forward(branch, array([*range(60), 5, 5]))
    assert cache.match(array([*talk, 7, 8, 9]))[0] == 102


def test_a_row_that_outgrows_its_slot_keeps_its_states():
    cache = PrefixCache(1, max_gb=1)
    row = put(cache, [*range(60)])
    before = row.slab.capacity
    longer = [*range(60), *range(200)]
    assert put(cache, longer) is row and row.slab.capacity > before
    assert cache.match(array([*longer, 1])) == (260, row)


def test_nothing_is_kept_without_memory_and_nothing_is_found_after_clear():
    cache = PrefixCache(1, max_gb=0)
    put(cache, [*range(50)])
    assert (len(cache), cache.tokens, cache.match(array([*range(50)]))) == (0, 0, (0, None))
    cache = PrefixCache(1, max_gb=1)
    used = cache.open(array([*range(50)]), 0)
    forward(used, array([*range(50)]))
    cache.record(used, array([*range(50)]))
    put(cache, [*range(20, 60)])
    cache.clear()
    assert cache.match(array([*range(50)])) == cache.match(array([*range(20, 60)])) == (0, None)
    cache.release(used)
    assert cache.tokens == 0
    with pytest.raises(ValueError, match="at least 0 GB"):
        PrefixCache(1, max_gb=-1)


def test_thrashing_is_said_once_with_what_to_do():
    """Twelve conversations in the room of eight: each turn is forwarded from its beginning."""
    cache = small(8 * 512)
    talks = [[talk] * 300 for talk in range(12)]
    with pytest.warns(RuntimeWarning, match="set model.prefix_cache_gb to") as said:
        for turn in range(6):
            for talk in talks:
                talk += [100 + turn] * 10
                put(cache, talk)
    assert len(said) == 1


@pytest.mark.filterwarnings("error")
def test_room_for_all_conversations_is_no_thrashing():
    cache = small(13 * 512)
    talks = [[talk] * 300 for talk in range(12)]
    for turn in range(6):
        for talk in talks:
            talk += [100 + turn] * 10
            put(cache, talk)
    assert len(cache) == 12


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        ({"meminfo": "MemTotal: 9 kB\nMemFree: 8 kB\n"}, None),  # WSL 1 and old kernels
        ({"meminfo": "MemTotal: 9 kB\nMemAvailable: 7 kB\n"}, 7 * 1024),
        ({"meminfo": "MemAvailable: 7 kB\n", "memory.max": "max\n"}, 7 * 1024),
        ({"meminfo": "MemAvailable: 7 kB\n", "memory.max": "5000\n"}, 7 * 1024),
        (
            {
                "meminfo": "MemAvailable: 7 kB\n",
                "memory.max": "5000\n",
                "memory.current": "3000\n",
                "memory.stat": "active_file 100\ninactive_file 20\n",
            },
            2120,
        ),
    ],
)
def test_free_memory_is_known_as_far_as_the_system_tells(
    files: dict[str, str], free: int | None, monkeypatch: pytest.MonkeyPatch
):
    def read(path: Path) -> str:
        if path.name not in files:
            raise FileNotFoundError(path)
        return files[path.name]

    monkeypatch.setattr(Path, "exists", lambda path: path.name in files)
    monkeypatch.setattr(Path, "read_text", read)
    found = free_memory(torch.device("cpu"))
    assert found == free if free is not None else found > 1e8


def test_rows_that_become_idle_leave_no_more_memory_taken_than_the_limit():
    cache = small(256)
    prompts = [[i % 7 + 1] * 10 + [i] * 40 for i in range(12)]
    rows = [cache.open(array(ids), 14) for ids in prompts]  # 64 tokens each, all in use
    assert cache.tokens > 256
    for row, ids in zip(rows, prompts, strict=True):
        forward(row, array(ids))
        cache.release(row, array(ids))
    assert len(cache) == 4
    assert cache.match(array([*prompts[-1], 1]))[0] == 50  # the newest are kept
    assert cache.match(array([*prompts[0], 1]))[0] < 50


def test_rows_in_use_beyond_the_limit_lie_side_by_side():
    cache = small(0)  # keeps no idle row, so that every row in use is beyond the limit
    rows = [cache.open(array([i] * 50), 14) for i in range(1, 33)]
    assert len({row.slab.order for row in rows}) == 1, "each slab is attended to by itself"
