"""The options of a manager: the settings of a bank, and rarer ones that no recipe sets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from experiential.bank.records import LEASE_SECONDS, Policy
from experiential.bank.text import TEXT_LIMIT
from experiential.config import REMOVED, BankSettings, RetrievalSettings
from experiential.errors import ConfigError
from experiential.plugins import did_you_mean


class RetrievalOptions(RetrievalSettings):
    """Everything that decides how queries become hits."""

    strategy: str = "evidence"
    """as in a recipe, where it is diverse (eq. 6): that of the papers"""

    diversity: NonNegativeFloat = 0.4
    """lambda of eq. 6"""
    recency: NonNegativeInt = 8
    """window of the recency penalty, in retrievals; 0 turns it off"""
    hybrid: float = Field(default=0.0, ge=0.0, le=1.0)
    """weight of the words that query and entry share, beside their cosine; an entry then passes the
    floor by its share of words too"""
    same_task: bool = False
    """show only entries whose task equals the task asked for, word for word"""
    exploration: NonNegativeFloat = 0.0
    """temperature of the draw over eq. 6 scores; 0 takes the best"""
    batch_size: PositiveInt = 16
    """B: queries per micro-batch"""
    batch_wait: NonNegativeFloat = 0.001
    """t_max, in seconds"""
    workers: PositiveInt = 4
    """W: search workers"""
    timeout: PositiveFloat = 30.0
    """seconds after which a search fails; an episode then goes on without advice"""


class ManagerOptions(BankSettings):
    """Everything that an ``ExperienceManager`` can be asked for."""

    # The override is sound, since settings are frozen.
    retrieval: RetrievalOptions = Field(  # pyright: ignore[reportIncompatibleVariableOverride]
        default_factory=RetrievalOptions
    )
    text_limit: PositiveInt = TEXT_LIMIT
    """characters that the text of an entry may have"""
    merge_chunk: int = Field(default=5, gt=1)
    """entries merged in one request"""
    queue_size: PositiveInt = 1024
    """distillation requests accepted before submit waits"""
    distill_workers: PositiveInt = 64
    """simultaneous distillations"""
    distill_timeout: PositiveFloat = 120.0
    """seconds a request may take"""
    retries: NonNegativeInt = 2
    """retries of a failed distillation"""
    lease: PositiveFloat = LEASE_SECONDS
    """seconds after which the episodes of a silent distiller go to another"""
    cap: NonNegativeInt = 0
    """entries above which some are evicted after distillation; 0 never evicts"""
    eviction: Policy = "utility"
    """entry to evict: least recently used, oldest, any, that of the lowest Laplace score, or that
    whose text names its own task least"""
    dedupe_threshold: float = Field(default=0.85, gt=0.0, le=1.0)
    """cosine of two texts above which the extractor is asked whether they say the same"""
    dedupe_across_tasks: bool = False
    """compare entries of different tasks, too, when deduplicating"""
    prune_below: float = Field(default=0.3, gt=0.0, lt=1.0)
    """Laplace score (s + 1) / (u + 2) below which an entry is pruned"""
    review: bool = False
    """distilled entries wait for a person's approval: bank.approve, or experiential bank approve"""
    free_share: float = Field(default=0.1, ge=0.0, le=1.0)
    """share of the episodes that play free if the caller leaves the condition open, until outcomes
    settle whether entries help"""


def bank_settings(given: Mapping[str, Any]) -> ManagerOptions:
    """Return the checked options of an ``ExperienceManager``, given the fields of `ManagerOptions`.

    Those under ``options`` join the others, which is how ``bank.options`` of a run arrives here.

    Raises:
        ConfigError: an option is unknown or out of its range.
    """
    own = dict(given)
    further = dict(own.pop("options", None) or {})
    for name in sorted({*own, *further} - ManagerOptions.model_fields.keys()):
        if (replaced := REMOVED.get(f"bank.{name}")) is not None:
            raise ConfigError(f"Expected options of ExperienceManager, got {name!r}: {replaced}")
    known = sorted(ManagerOptions.model_fields.keys() - BankSettings.model_fields.keys())
    for name in further:
        if name not in (*known, "retrieval"):
            is_setting = name in BankSettings.model_fields
            hint = f"; set bank.{name}" if is_setting else did_you_mean(name, known)
            raise ConfigError(f"Expected bank.options among {', '.join(known)}, got {name!r}{hint}")
    rare = further.pop("retrieval", {})
    if not isinstance(rare, Mapping):
        raise ConfigError(
            "Expected bank.options.retrieval to be a mapping, as"
            f" bank.options.retrieval.hybrid=0.3, got {rare!r}"
        )
    names = sorted(RetrievalOptions.model_fields)
    for name in cast("Mapping[str, Any]", rare):
        if name not in names:
            raise ConfigError(
                f"Expected bank.options.retrieval among {', '.join(names)}, got"
                f" {name!r}{did_you_mean(name, names)}"
            )
    retrieval = own.get("retrieval")
    if isinstance(retrieval, RetrievalSettings):  # an instance of it has too few fields
        retrieval = retrieval.model_dump()
    if rare:
        own["retrieval"] = {**(retrieval or {}), **rare}
    elif "retrieval" in own:
        own["retrieval"] = {} if retrieval is None else retrieval
    try:
        return ManagerOptions(**{**further, **own})
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        known = ", ".join(sorted(ManagerOptions.model_fields))
        raise ConfigError(
            f"Expected options of ExperienceManager among: {known}; got {name}={first['input']!r}"
            f" ({first['msg']})"
        ) from error
