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


def build_methods(run: Run) -> list[Method]:
    """Build the main method, and then the additions that the settings ask for.

    Raises:
        ConfigError: a method is unknown.
    """
    asked = run.experiment.methods
    name = run.experiment.method or ("policy_gradient" if asked.evolver is None else "evolver")
    builtins: dict[str, str | Callable[[Run], Method]] = dict(METHODS)
    methods = [resolve("methods", name, builtins)(run)]
    if asked.cold_start is not None:
        methods.append(ColdStart(run, asked.cold_start))
    if asked.prepare is not None and asked.prepare.steps and run.manager is not None:
        methods.append(OfflineBank(run, run.manager, asked.prepare.steps))
    if asked.critic is not None:
        methods.append(Critic(run))
    if asked.entropy_bonus is not None and run.bank is not None:
        methods.append(EntropyBonus(run.actor, run.roles.actor(), run.bank, asked.entropy_bonus))
    if asked.self_distill is not None:
        methods.append(SelfDistillation(asked.self_distill, run.roles.actor))
    if asked.reflection is not None:
        methods.append(Reflection(run, asked.reflection))
    outside = (other for other, options in asked.outside().items() if options is not None)
    methods += [resolve("methods", other, builtins)(run) for other in outside if other != name]
    return methods
