"""Search for a shortest way through states, breadth first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

S = TypeVar("S", bound=Hashable)
M = TypeVar("M")


def shortest_path(
    start: S,
    neighbours: Callable[[S], Iterable[tuple[M, S]]],
    done: Callable[[S], bool],
    limit: int | None = None,
) -> list[M] | None:
    """Return the moves of a shortest path to a state where ``done``, or None beyond ``limit``.

    ``neighbours`` gives the moves in a state and the state after each; it is called once for a
    state. ``limit`` is the most moves; None allows any number.
    """
    parents: dict[S, tuple[S, M] | None] = {start: None}
    frontier = deque([(start, 0)])
    while frontier:
        state, depth = frontier.popleft()
        if done(state):
            moves: list[M] = []
            while (link := parents[state]) is not None:
                state, move = link
                moves.append(move)
            return moves[::-1]
        if depth == limit:
            continue
        for move, after in neighbours(state):
            if after not in parents:
                parents[after] = (state, move)
                frontier.append((after, depth + 1))
    return None
