"""Name the public surface: the only list of it, which editors and `__init__.py` both read."""

# ruff: noqa: I001  (import sorting would split every renamed import off)

from experiential.agents.actor import ActorAgent as ActorAgent
from experiential.agents.extractor import ExtractorAgent as ExtractorAgent
from experiential.agents.judge import Judge as Judge
from experiential.agents.operations import parse_operations as parse_operations
from experiential.agents.reflector import (
    BankMemory as BankMemory,
    PrivateMemory as PrivateMemory,
    ReflectionMemory as ReflectionMemory,
    Reflection as Reflection,
    Reflector as Reflector,
    Retry as Retry,
)
from experiential.bank.bank import ExperienceBank as ExperienceBank
from experiential.bank.episode import Episode as Episode
from experiential.bank.index.embed import HashingEmbedder as HashingEmbedder
from experiential.bank.index.hosted import HostedEmbedder as HostedEmbedder
from experiential.bank.protocol import Bank as Bank
from experiential.bank.manager import ExperienceManager as ExperienceManager
from experiential.config import Experiment as Experiment
from experiential.envs.check import check_text_env as check_text_env
from experiential.errors import (
    BackendError as BackendError,
    BankError as BankError,
    BankLockedError as BankLockedError,
    BudgetError as BudgetError,
    CheckpointError as CheckpointError,
    ConfigError as ConfigError,
    ContextError as ContextError,
    EnvError as EnvError,
    ExperientialError as ExperientialError,
    MissingExtraError as MissingExtraError,
    ModelNotFoundError as ModelNotFoundError,
    NoAnswerError as NoAnswerError,
    ReadOnlyBankError as ReadOnlyBankError,
)
from experiential.llm.base import LLM as LLM, SamplingParams as SamplingParams
from experiential.llm.openai import OpenAILLM as OpenAILLM
from experiential.llm.scripted import ScriptedLLM as ScriptedLLM
from experiential.llm.transformers import TransformersLLM as TransformersLLM
from experiential.llm.vllm import VLLM as VLLM
from experiential.recipe import load_experiment as load_experiment
from experiential.trained import load_agent as load_agent
from experiential.training.trainer import Trainer as Trainer
from experiential.types import (
    Add as Add,
    Answer as Answer,
    Condition as Condition,
    Discard as Discard,
    Distillation as Distillation,
    Experience as Experience,
    FinishReason as FinishReason,
    Generation as Generation,
    Hit as Hit,
    Keep as Keep,
    Merge as Merge,
    Message as Message,
    Operation as Operation,
    ParsedOperations as ParsedOperations,
    Provenance as Provenance,
    Refusal as Refusal,
    Return as Return,
    Statistics as Statistics,
    Trajectory as Trajectory,
    Turn as Turn,
    Update as Update,
    Use as Use,
)
from experiential.wrappers.experience import ExperienceWrapper as ExperienceWrapper
from experiential.wrappers.feedback import FeedbackWrapper as FeedbackWrapper
from experiential.wrappers.reflection import ReflectionWrapper as ReflectionWrapper
from experiential.wrappers.search_and_ask import SearchAndAskWrapper as SearchAndAskWrapper
from experiential.wrappers.text_observation import TextObservation as TextObservation
from experiential.wrappers.vector import ExperienceVectorWrapper as ExperienceVectorWrapper

__version__: str
