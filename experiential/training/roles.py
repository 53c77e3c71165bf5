"""Who plays, distils and judges in a run: policies, and agents around them, as the experiment sets them."""

from __future__ import annotations

from experiential.agents.actor import ActorAgent
from experiential.agents.critic import CriticAgent
from experiential.agents.extractor import open_extractor
from experiential.agents.reflector import Reflector, Retry
from experiential.bank.extractor import Extractor
from experiential.config import Experiment, ModelSettings
from experiential.llm.base import LLM
from experiential.training.runtime import Policies

REFLECTION_TOKENS = 96
"""Tokens of a reflection."""


class Roles:
    """Builds agents around the policies of a run.

    Args:
        experiment: temperatures, lengths, prompts and seeds.
        policies: actor and extractor.
    """

    def __init__(self, experiment: Experiment, policies: Policies) -> None:
        self._experiment = experiment
        self._actor, self._extractor = policies

    def actor(self, temperature: float | None = None, llm: LLM | None = None) -> ActorAgent:
        """An agent that plays; at the temperature of training and with the actor's policy when none is given."""
        settings = self._experiment.actor
        return ActorAgent(
            llm or self._actor,
            prompts=prompt_set_name(self._experiment.model),
            instruction=settings.instruction,
            temperature=settings.temperature if temperature is None else temperature,
            max_tokens=settings.max_tokens,
            constrain=settings.constrain,
            history=settings.history,
            keep_first=settings.keep_first,
            advice=settings.advice,
        )

    def extractor(self, llm: LLM | None = None) -> Extractor:
        """Return the agent that distils; with the extractor's policy when none is given."""
        settings = self._experiment.extractor
        return open_extractor(
            settings.agent,
            llm or self._extractor,
            prompts=prompt_set_name(self._experiment.extractor_model or self._experiment.model),
            max_operations=settings.max_operations,
            principles=settings.principles,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            seed=self._experiment.seed,
        )

    def critic(self, llm: LLM | None = None) -> CriticAgent:
        """The actor as judge of what was retrieved for it; with the actor's policy when none is given."""
        settings = self._experiment.actor
        return CriticAgent(
            llm or self._actor,
            prompts=prompt_set_name(self._experiment.model),
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            seed=self._experiment.seed,
        )

    def reflector(self) -> Reflector | Retry:
        """The actor's own policy as reflector, or what stands in its place without reflection.

        Raises:
            ValueError: the experiment has no second attempts.
        """
        settings, actor = self._experiment.reflection, self._experiment.actor
        if settings is None:
            raise ValueError("Expected an experiment with reflection, got one without")
        prompts = prompt_set_name(self._experiment.model)
        if settings.mode == "retry":
            return Retry(prompts=prompts)
        return Reflector(
            self._actor,
            prompts=prompts,
            temperature=actor.temperature,
            max_tokens=REFLECTION_TOKENS,
        )


def prompt_set_name(settings: ModelSettings) -> str:
    """The template set of a model: what the settings name, or ``brief`` for the tiny model and ``full`` for others."""
    if settings.prompts != "auto":
        return settings.prompts
    return "brief" if settings.name == "tiny" else "full"
