"""Searches by rounded vectors find what comparing everything finds, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import experiential as xp
from experiential.bank.index import coarse, nearest
from experiential.bank.index.embed import Vector
from experiential.types import Add, Distillation, Generation, ParsedOperations, Trajectory

ENTRIES, QUERIES = coarse.FEWEST + 700, 40

pytestmark = pytest.mark.skipif(
    coarse.int8_product() is None, reason="needs onnxruntime, with an exact product"
)


def clusters(width: int) -> Vector:
    """Points around centres, as lessons of many tasks are."""
    rng = np.random.default_rng(width)
    centres = rng.standard_normal((90, width))
    return centres[rng.integers(90, size=ENTRIES + QUERIES)] + 0.5 * rng.standard_normal(
        (ENTRIES + QUERIES, width)
    )


def sparse(width: int) -> Vector:
    """Few components each, as words hashed to places are: many equal vectors, many zeros."""
    rng = np.random.default_rng(width)
    points = np.zeros((ENTRIES + QUERIES, width))
    for _ in range(4):
        points[np.arange(len(points)), rng.zipf(1.3, len(points)) % width] += 1.0
    return points


def uneven(width: int) -> Vector:
    """One component far larger than all others, as embedders of texts have it."""
    points = np.random.default_rng(width).standard_normal((ENTRIES + QUERIES, width))
    points[:, 0] = 6 + 0.1 * points[:, 0]
    return points


class Counted(coarse.Codes):
    """Count the searches that rounding answered."""

    answered = 0

    def candidates(self, *args):  # noqa: D102
        found = super().candidates(*args)
        Counted.answered += found is not None
        return found


@pytest.mark.parametrize("bits", [8, 7])
@pytest.mark.parametrize(
    "points",
    [clusters(384), clusters(5), sparse(512), uneven(768)],
    ids=["clusters", "few numbers", "sparse", "uneven"],
)
def test_hits_are_those_of_comparing_everything(
    points: Vector, bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bits == 8 and coarse.largest_code() < 255:
        pytest.skip("needs a processor that multiplies eight bits exactly")
    monkeypatch.setattr(coarse, "largest_code", lambda: 2**bits - 1)

    def embed(texts: Sequence[str]) -> Vector:
        return points[[int(text.split()[-1]) for text in texts]].astype(np.float32)

    monkeypatch.setattr(nearest, "Codes", Counted)
    monkeypatch.setattr(Counted, "answered", 0)
    asked = [str(ENTRIES + i) for i in range(QUERIES)]
    with xp.ExperienceBank(tmp_path, embedder=embed, store="exact") as bank:
        added = bank.add_many([str(i) for i in range(ENTRIES)])

        made = Distillation(
            parsed=ParsedOperations(operations=(Add(text=str(ENTRIES + 1)),)),
            generation=Generation(text="raw", policy_version=0),
        )
        [own] = bank.apply(made, trajectory=Trajectory(task=asked[1], instance="i1"), shown=[])
        assert own.id in {hit.experience.id for hit in bank.search(asked, k=16)[1]}

        def search() -> list[list[tuple[str, float]]]:
            rows = [bank.search(asked, k=k, exclude_instance="i1") for k in (1, 10, 16)]
            return [[(hit.experience.id, hit.score) for hit in row] for one in rows for row in one]

        def compare() -> None:
            quick = search()
            with monkeypatch.context() as patch:
                patch.setattr(coarse, "int8_product", lambda: None)
                exact = search()
            for row, other in zip(quick, exact, strict=True):
                assert np.allclose([s for _, s in row], [s for _, s in other], atol=5e-6)
                # the order may differ only where float32 cannot tell two scores apart
                differ = [abs(a[1] - b[1]) for a, b in zip(row, other, strict=True) if a[0] != b[0]]
                assert max(differ, default=0.0) < 5e-6

        compare()
        best = {row[0][0] for row in search()}
        for id in best:  # the best are rewritten, or gone: dead rows
            bank.remove(id)
        bank.update(added[0].id, f"again {ENTRIES}")
        bank.add_many([f"later {i}" for i in range(100, 300)])
        compare()
        assert not {own.id, *best} & {id for row in search() for id, _ in row}
    assert Counted.answered or points.shape[1] == 5 or (points == 0).any()
