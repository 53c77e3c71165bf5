"""What outcomes are worth: to a trajectory (eq. 5) and to the experience that guided it (section 3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from experiential.types import Condition, Trajectory, Use

Key = tuple[str, int]
"""An experience at one version: (experience id, version)."""


def outcome(trajectory: Trajectory) -> float:
    """R of eq. 1: 1.0 for a success, else 0.0; a fractional environment reward does not count."""
    return float(trajectory.success)


def use_reward(success: bool) -> int:
    """r(m) of section 2.3: +1 when the episode that used the entry succeeded, else -1."""
    return 1 if success else -1


def use_outcomes(trajectories: Iterable[Trajectory]) -> Iterator[tuple[Use, bool]]:
    """Every use that earns credit, with its episode's success.

    Episodes that failed for a technical reason and experience-free episodes give none.
    """
    for trajectory in trajectories:
        if trajectory.error is None and trajectory.condition is Condition.GUIDED:
            for use in trajectory.uses:
                yield use, trajectory.success


def entry_rewards(uses: Iterable[tuple[Use, bool]]) -> dict[Key, float]:
    """Mean reward of each experience version: r(m) = 1/|T_m| * sum over tau in T_m of r(m, tau), section 3.3.

    T_m is a set of episodes, so an entry that reached one episode several times counts once for it; uses that name no
    episode count each.

    Args:
        uses: uses with the success of their episode, as ``use_outcomes`` gives them.

    Returns:
        (experience id, version) to a mean in [-1, 1].
    """
    seen: set[tuple[Key, str]] = set()
    totals: dict[Key, list[int]] = {}
    for use, success in uses:
        key = (use.experience_id, use.experience_version)
        if use.episode and (key, use.episode) in seen:
            continue
        seen.add((key, use.episode))
        totals.setdefault(key, []).append(use_reward(success))
    return {key: sum(rewards) / len(rewards) for key, rewards in totals.items()}
