"""A shortest way through states, by breadth."""

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
    """Moves of a shortest path from ``start`` to a state where ``done``; None if there is none within ``limit`` moves.

    Args:
        start: a state.
        neighbours: moves that can be made in a state, and the state after each; asked once of a
            state, in the order of the search.
        done: whether a state is looked for.
        limit: most moves; None for any number.
    """
    parents: dict[S, tuple[S, M] | None] = {start: None}
    frontier = deque([(start, 0)])
    while frontier:
        state, depth = frontier.popleft()
        if done(state):
            return _walk_back(parents, state)
        if depth == limit:
            continue
        for move, after in neighbours(state):
            if after not in parents:
                parents[after] = (state, move)
                frontier.append((after, depth + 1))
    return None


def _walk_back(parents: dict[S, tuple[S, M] | None], state: S) -> list[M]:
    moves: list[M] = []
    while (link := parents[state]) is not None:
        state, move = link
        moves.append(move)
    return moves[::-1]
