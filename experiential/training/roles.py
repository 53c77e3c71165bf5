"""Build the agents that play, distil and judge in a run, around its policies."""

from __future__ import annotations

from pathlib import Path

from experiential.agents.actor import ActorAgent
from experiential.agents.critic import CriticAgent
from experiential.agents.extractor import open_extractor
from experiential.agents.reflector import Reflector, Retry
from experiential.bank.extractor import Extractor
from experiential.config import Experiment, ModelSettings
from experiential.llm.base import IN_PROCESS, LLM
from experiential.llm.metered import Meter, Metered, Spent
from experiential.llm.rounds import Rounds
from experiential.recipe import load_experiment

CONFIG = "config.yaml"
"""Settings in the folder of a run, or of an export."""


class Roles:
    """Build agents around a run's actor and extractor, which answer unless another LLM is given."""

    def __init__(self, experiment: Experiment, policies: tuple[LLM, LLM]) -> None:
        self._experiment, self._prompts = experiment, prompt_set_name(experiment.model)
        self._actor, self._extractor = policies
        self._meters = {"critic": Meter(), "reflector": Meter()}
        self._told = dict.fromkeys(self._meters, Spent())

    def spent(self) -> dict[str, float]:
        """Return the tokens and cost of critic and reflector since the last call.

        They are part of the actor's, whose model answers for both.
        """
        told: dict[str, float] = {}
        for role, meter in self._meters.items():
            now = meter.spent()
            since, self._told[role] = now - self._told[role], now
            if since.requests:
                told |= {f"{role}_{name}": value for name, value in since.reported().items()}
        return told

    def actor(self, temperature: float | None = None, llm: LLM | None = None) -> ActorAgent:
        """Return an agent that plays, at the temperature of training by default."""
        settings = self._experiment.actor
        return ActorAgent(
            llm or self._actor,
            prompts=self._prompts,
            temperature=settings.temperature if temperature is None else temperature,
            max_tokens=settings.max_tokens,
            constrain=settings.constrain and self._actor.supports_choices,
            **settings.options.model_dump(exclude={"length_norm", "discount", "correction_cap"}),
        )

    def extractor(self, llm: LLM | None = None) -> Extractor:
        """Return the agent that distils."""
        settings = self._experiment.extractor
        return open_extractor(
            settings.agent,
            llm or self._extractor,
            prompts=prompt_set_name(self._experiment.extractor_model or self._experiment.model),
            max_operations=settings.max_operations,
            principles=settings.options.principles,
            temperature=settings.temperature,
            top_p=settings.options.top_p,
            max_tokens=settings.max_tokens,
            seed=self._experiment.seed,
        )

    def critic(self, llm: LLM | None = None) -> CriticAgent:
        """Return the judge of retrieved experience."""
        settings = self._experiment.actor
        answering: LLM = llm or Metered(self._actor, self._meters["critic"])
        return CriticAgent(
            Rounds(answering) if self._experiment.repeatable else answering,
            prompts=self._prompts,
            temperature=settings.temperature,
            max_tokens=settings.max_tokens,
            seed=self._experiment.seed,
        )

    def reflector(self) -> Reflector | Retry:
        """Return the actor's own policy as reflector, or its substitute without reflection."""
        settings, actor = self._experiment.methods.reflection, self._experiment.actor
        if settings is None:
            raise ValueError("Expected an experiment with reflection, got one without")
        if settings.mode == "retry":
            return Retry(prompts=self._prompts)
        answering: LLM = Metered(self._actor, self._meters["reflector"])
        return Reflector(
            Rounds(answering) if self._experiment.repeatable else answering,
            prompts=self._prompts,
            temperature=settings.temperature or actor.temperature,
            max_tokens=settings.max_tokens,
        )


def prompt_set_name(settings: ModelSettings) -> str:
    """Return the name of a model's template set.

    ``auto`` is what a model was trained with where it lies in the folder of its run. Of others it
    is ``brief`` for the tiny model and ``full`` for the rest.
    """
    if settings.prompts != "auto":
        return settings.prompts
    origin = run_that_trained(settings)
    if origin is not None:
        second = origin.extractor_model if Path(settings.name).name == "extractor" else None
        return prompt_set_name(second or origin.model)
    return "brief" if settings.name == "tiny" and _is_here(settings) else "full"


def trained_extractor(settings: ModelSettings, llm: LLM) -> Extractor | None:
    """Return the extractor of the run that trained this model as one, asked as it was there.

    None for every other model.
    """
    origin = run_that_trained(settings)
    if origin is None or not origin.extractor.enabled:
        return None
    role = "actor" if origin.extractor.shared else "extractor"
    if Path(settings.name).name != role:
        return None
    return Roles(origin, (llm, llm)).extractor()


def run_that_trained(settings: ModelSettings) -> Experiment | None:
    """Return the settings of the run or export in whose folder the weights of a model lie."""
    folder = Path(settings.name).expanduser()
    config = folder.parent / CONFIG
    known = folder.name in ("actor", "extractor") and folder.is_dir() and config.is_file()
    return load_experiment(config) if known and _is_here(settings) else None


def _is_here(settings: ModelSettings) -> bool:
    return settings.server is None or settings.server.backend in IN_PROCESS
