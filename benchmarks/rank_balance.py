"""Count what ranks of a cluster compute together, over what one device would, divided by them.

    python -m benchmarks.rank_balance

Ranks wait for each other at every row, so an update takes as long as the sum of the longest rows.
That is compared with the tokens that the local runtime forwards for the same samples, divided by
the ranks: 1.00 is ideal. Three ways to deal: ``blocks`` as before this was balanced (in the given
order, one sequence a row, filled up to 128 with empty ones), ``robin`` (one sequence a row, one
after the other), and ``deal``. ``tokens`` are all tokens of ``deal`` over the local ones, and
``worst`` is the worst of its batches.

Lengths are made up: log-normal (sigma 0.75) with a mean of 4,000 tokens, at most 16,384.
``episodes`` are conversations in groups of eight with one beginning, ``turns`` single turns that
begin with the same instructions (a mean of 1,000), ``alone`` sequences that share nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from experiential.training.packing import deal, pack
from experiential.training.runtime import Sample

LONGEST, FULL, GROUP, BATCHES = 16_384, 128, 8, 5
KINDS = ("episodes", "turns", "alone")


def batch(kind: str, count: int, seed: int) -> list[Sample]:
    """Make samples, each trained on its last token, in random order."""
    random = np.random.default_rng(seed)
    system = list(range(150)) if kind != "alone" else []
    mean = 1_000 if kind == "turns" else 4_000
    samples: list[Sample] = []
    for i in range(count):
        if i % GROUP == 0 or kind != "episodes":
            own = random.integers(300, 1_500) if kind == "episodes" else 1
            prompt = [*system, 1_000 + i, *random.integers(1_000, size=own)]
        length = max(20, random.lognormal(np.log(mean) - 0.75**2 / 2, 0.75))
        rest = random.integers(1_000, size=min(int(length), LONGEST - len(prompt) - 1))
        tokens = tuple(map(int, [*prompt, 5_000 + i, *rest]))
        samples.append(Sample(tokens, (len(tokens) - 1,), (0.0,), (1.0,)))
    return [samples[i] for i in random.permutation(count)]


def together(rows: Sequence[Sequence[int]]) -> int:
    """Add up the longest rows; ``rows`` are the lengths of each rank's."""
    return sum(max(each) for each in zip_longest(*rows, fillvalue=0))


def compare(samples: Sequence[Sample], ranks: int) -> dict[str, float]:
    """Return the cost of each way to deal, ideal being 1."""
    lengths = [len(s.tokens) - 1 for s in samples]
    filled = [*lengths, *[1] * (FULL - len(lengths))]
    part = FULL // ranks
    random = np.random.default_rng(0)  # each rank drew the order of its own
    blocks = [random.permutation(filled[i * part : (i + 1) * part]).tolist() for i in range(ranks)]
    one, many = (
        [[len(pack(samples, row).tokens) if row else 0 for row in each] for each in found]
        for found in (deal(samples, n, limit=LONGEST) for n in (1, ranks))
    )
    local = sum(map(sum, one))
    costs = {
        "blocks": together(blocks),
        "robin": together([lengths[i::ranks] for i in range(ranks)]),
        "deal": sum(map(max, many)),
    }
    found = {name: cost * ranks / local for name, cost in costs.items()}
    return found | {"tokens": sum(map(sum, many)) / local}


def main() -> None:
    """Print a table: a line for each kind of sample, number of samples and of ranks."""
    print(
        "| samples | ranks | blocks | robin | deal | worst | tokens |", "|---" * 7 + "|", sep="\n"
    )
    for kind in KINDS:
        for count in (128, 70, 40):
            for ranks in (2, 4, 8):
                found = [compare(batch(kind, count, seed), ranks) for seed in range(BATCHES)]
                means = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
                cells = [f"{means[name]:.2f}" for name in ("blocks", "robin", "deal")]
                cells += [f"{max(one['deal'] for one in found):.2f}", f"{means['tokens']:.2f}"]
                print(f"| {count} {kind} | {ranks} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
