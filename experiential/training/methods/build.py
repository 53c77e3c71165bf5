"""Choose the methods of a run by its settings."""

from __future__ import annotations

from collections.abc import Callable

from experiential.plugins import resolve
from experiential.training.methods.cold_start import ColdStart
from experiential.training.methods.critic import Critic
from experiential.training.methods.entropy_bonus import EntropyBonus
from experiential.training.methods.internalise import SelfDistillation
from experiential.training.methods.method import Method, Run
from experiential.training.methods.prepare import OfflineBank
from experiential.training.methods.reflection import Reflection
from experiential.training.runtime import METHODS

ADDITIONS: tuple[Callable[[Run], Method | None], ...] = (
    ColdStart.of,
    OfflineBank.of,
    Critic.of,
    EntropyBonus.of,
    SelfDistillation.of,
    Reflection.of,
)
"""Each returns None unless the settings ask for it."""


def build_methods(run: Run) -> list[Method]:
    """Build the main method, and then the additions that the settings ask for.

    Raises:
        ConfigError: the method is unknown.
    """
    shaped = run.experiment.actor.format_reward > 0
    name = run.experiment.method or ("evolver" if shaped else "policy_gradient")
    builtins: dict[str, str | Callable[[Run], Method]] = dict(METHODS)
    main = resolve("methods", name, builtins)(run)
    return [main, *(method for of in ADDITIONS if (method := of(run)) is not None)]
