"""Experience that learns, for any Gymnasium text environment.

    import experiential as xp

    bank = xp.ExperienceBank("bank")
    env = xp.ExperienceWrapper(gym.make("MyText-v0"), bank, extractor=xp.ExtractorAgent(llm))
    env = xp.SearchAndAskWrapper(env, max_calls=2)

Importing this package registers the bundled environments (`experiential/Vault-v0`, ...) with
Gymnasium. Everything else is imported on first use, so that neither torch nor Chroma is loaded
before it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from experiential.envs import register as _register

if TYPE_CHECKING:
    from experiential.agents.actor import ActorAgent
    from experiential.agents.extractor import ExtractorAgent
    from experiential.agents.operations import parse_operations
    from experiential.agents.reflection_memory import BankMemory, PrivateMemory, ReflectionMemory
    from experiential.agents.reflector import Reflection, Reflector, Retry
    from experiential.bank.bank import ExperienceBank
    from experiential.bank.index.embed import HashingEmbedder
    from experiential.bank.manager import ExperienceManager
    from experiential.config import Experiment
    from experiential.envs.check import check_text_env
    from experiential.errors import (
        BackendError,
        BankError,
        BankLockedError,
        CheckpointError,
        ConfigError,
        EnvError,
        ExperientialError,
        MissingExtraError,
        ModelNotFoundError,
        ReadOnlyBankError,
    )
    from experiential.llm.base import LLM, SamplingParams
    from experiential.llm.openai import OpenAILLM
    from experiential.llm.scripted import ScriptedLLM
    from experiential.llm.transformers import TransformersLLM
    from experiential.recipe import load_experiment
    from experiential.training.trainer import Trainer
    from experiential.types import (
        Add,
        Answer,
        Condition,
        Discard,
        Distillation,
        Experience,
        FinishReason,
        Generation,
        Hit,
        Keep,
        Merge,
        Message,
        Operation,
        ParsedOperations,
        Provenance,
        Refusal,
        Return,
        Statistics,
        Trajectory,
        Turn,
        Update,
        Use,
    )
    from experiential.wrappers.experience import ExperienceWrapper
    from experiential.wrappers.feedback import FeedbackWrapper
    from experiential.wrappers.reflection import ReflectionWrapper
    from experiential.wrappers.search_and_ask import SearchAndAskWrapper
    from experiential.wrappers.text_observation import TextObservation
    from experiential.wrappers.vector import ExperienceVectorWrapper

__version__ = "0.1.0"

_register()

__all__ = [
    "ActorAgent",
    "Add",
    "Answer",
    "BackendError",
    "BankError",
    "BankLockedError",
    "BankMemory",
    "CheckpointError",
    "Condition",
    "ConfigError",
    "Discard",
    "Distillation",
    "EnvError",
    "Experience",
    "ExperienceBank",
    "ExperienceManager",
    "ExperienceVectorWrapper",
    "ExperienceWrapper",
    "ExperientialError",
    "Experiment",
    "ExtractorAgent",
    "FeedbackWrapper",
    "FinishReason",
    "Generation",
    "HashingEmbedder",
    "Hit",
    "Keep",
    "LLM",
    "Merge",
    "Message",
    "MissingExtraError",
    "ModelNotFoundError",
    "OpenAILLM",
    "Operation",
    "ParsedOperations",
    "PrivateMemory",
    "Provenance",
    "ReadOnlyBankError",
    "Reflection",
    "ReflectionMemory",
    "ReflectionWrapper",
    "Reflector",
    "Refusal",
    "Retry",
    "Return",
    "SamplingParams",
    "ScriptedLLM",
    "SearchAndAskWrapper",
    "Statistics",
    "TextObservation",
    "Trainer",
    "Trajectory",
    "TransformersLLM",
    "Turn",
    "Update",
    "Use",
    "__version__",
    "check_text_env",
    "load_experiment",
    "parse_operations",
]

_MODULES: dict[str, str] = {
    "agents.actor": "ActorAgent",
    "agents.extractor": "ExtractorAgent",
    "agents.operations": "parse_operations",
    "agents.reflection_memory": "BankMemory PrivateMemory ReflectionMemory",
    "agents.reflector": "Reflection Reflector Retry",
    "bank.bank": "ExperienceBank",
    "bank.index.embed": "HashingEmbedder",
    "bank.manager": "ExperienceManager",
    "config": "Experiment",
    "envs.check": "check_text_env",
    "errors": (
        "BackendError BankError BankLockedError CheckpointError ConfigError EnvError"
        " ExperientialError MissingExtraError ModelNotFoundError ReadOnlyBankError"
    ),
    "llm.base": "LLM SamplingParams",
    "llm.openai": "OpenAILLM",
    "llm.scripted": "ScriptedLLM",
    "llm.transformers": "TransformersLLM",
    "recipe": "load_experiment",
    "training.trainer": "Trainer",
    "types": (
        "Add Answer Condition Discard Distillation Experience FinishReason Generation Hit Keep"
        " Merge Message Operation ParsedOperations Provenance Refusal Return Statistics Trajectory"
        " Turn Update Use"
    ),
    "wrappers.experience": "ExperienceWrapper",
    "wrappers.feedback": "FeedbackWrapper",
    "wrappers.reflection": "ReflectionWrapper",
    "wrappers.search_and_ask": "SearchAndAskWrapper",
    "wrappers.text_observation": "TextObservation",
    "wrappers.vector": "ExperienceVectorWrapper",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: Any = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
