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
        ConfigError: the method is unknown.
    """
    experiment, actor = run.experiment, run.experiment.actor
    name = experiment.method or ("evolver" if actor.format_reward > 0 else "policy_gradient")
    builtins: dict[str, str | Callable[[Run], Method]] = dict(METHODS)
    methods = [resolve("methods", name, builtins)(run)]
    if experiment.cold_start is not None:
        methods.append(ColdStart(run, experiment.cold_start))
    if experiment.bank.prepare_steps and run.manager is not None:
        methods.append(OfflineBank(run, run.manager))
    if actor.critic:
        methods.append(Critic(run))
    bonus = experiment.extractor.entropy_bonus
    if bonus is not None and run.bank is not None:
        methods.append(EntropyBonus(run.actor, run.roles.actor(), run.bank, bonus))
    if actor.self_distill is not None:
        methods.append(SelfDistillation(actor.self_distill, run.roles.actor))
    if experiment.reflection is not None:
        methods.append(Reflection(run, experiment.reflection))
    return methods
