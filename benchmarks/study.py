"""Compare the methods: environments x recipes x training seeds, each under every arm.

    python -m benchmarks.study run [--recipes ...] [--environments ...] [--seeds 5] [--jobs 2]
        [--minutes M]
    python -m benchmarks.study table

`run` may be stopped and started again: a finished cell is a small file below ``--results``, and is
not run again. Cells are taken seed by seed, so that a study that is stopped has complete seeds. A
cell trains in a scratch folder, which is deleted when the cell is written. While a run trains, a
part of the held-out worlds makes its learning curve; the trained pair then plays all of them under
each arm.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks import demonstrations, households, smollm2_reader
from benchmarks.orderings import ORDERINGS, Ordering, findings
from experiential.cli.errors import exit_code
from experiential.config import Arm
from experiential.envs import random_agent
from experiential.errors import ConfigError
from experiential.evaluation.card import (
    ARMS,
    DIFFERENCES,
    RecipeReport,
    by_arm,
    make_card,
    recipe_difference,
    used_arm,
)
from experiential.evaluation.cell import Cell, cell_of, settings_digest
from experiential.evaluation.intervals import RATE, Interval, clustered_mean, unpaired_difference
from experiential.evaluation.page import show_percent, show_points
from experiential.evaluation.picture import Point, evaluation_curve, mean_curve
from experiential.evaluation.results import ResultStore
from experiential.evaluation.visits import later
from experiential.llm.models import resolve_model
from experiential.recipe import load_experiment
from experiential.rollout import make_env, world_facts
from experiential.training.checkpoint import CheckpointStore
from experiential.training.run_evaluation import only_evaluation
from experiential.training.runtime import build_runtime
from experiential.training.trainer import Trainer
from experiential.types import Record

RECIPES = (
    "grpo",
    "offline",
    "static-online",
    "exp-only",
    "complementary",
    "complementary-self-distill",
    "evolver",
    "erl",
    "erl-no-memory",
    "erl-no-reflection",
)
"""The recipes compared; the others are paired with the first."""

_ALL_GUIDED = ("actor.guided=all", "actor.advantage=pooled")
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "complementary-cool": ("complementary", ("extractor.temperature=0.3",)),
    "complementary-diverse": ("complementary", ("bank.retrieval.strategy=diverse",)),
    "complementary-merge": ("complementary", ("bank.merge_every=5",)),
    "complementary-no-kl": ("complementary", ("extractor.kl=0.0",)),
    "complementary-no-kl-cool": (
        "complementary",
        ("extractor.kl=0.0", "extractor.temperature=0.3"),
    ),
    "complementary-no-weight": (
        "complementary",
        ("extractor.options.cooldown=0", "extractor.options.decay=0.0"),
    ),
    "complementary-per-group-2": ("complementary", ("extractor.per_group=2",)),
    "complementary-search-and-ask": ("complementary", ("actor.search_and_ask=1",)),
    "static-online-all-guided": ("static-online", _ALL_GUIDED),
    "static-online-cold": ("static-online", ("extractor.temperature=0.1",)),
    "static-online-cool": ("static-online", ("extractor.temperature=0.3",)),
    "static-online-home-rule": ("static-online", ("extractor.agent=benchmarks.earned_rules:home",)),
    "static-online-lake-rule": ("static-online", ("extractor.agent=benchmarks.earned_rules:lake",)),
    "static-online-recent": ("static-online", ("bank.retrieval.strategy=recent",)),
    "static-online-vault-rule": (
        "static-online",
        ("extractor.agent=benchmarks.earned_rules:vault",),
    ),
    "template-all-guided": ("template", _ALL_GUIDED),
}
"""Recipes with one setting changed, by the name that their cells have: (recipe, settings)."""
ABLATIONS = (
    "complementary-all-guided",
    "complementary-critic",
    "complementary-pooled",
    *(name for name, (recipe, _) in VARIANTS.items() if recipe == "complementary"),
)
"""Compared with ``complementary`` where it needs the bank of its training."""
RETRIEVALS = ("static-online-recent",)
"""Compared with ``static-online``: recipes that show other entries of an untrained extractor."""
COMPLEMENTARY = ("complementary", "complementary-all-guided")
"""What others are compared with: the first of these that was played."""
TRAINED = (
    COMPLEMENTARY,
    ("complementary-cool",),
    ("complementary-no-kl",),
    ("complementary-no-kl-cool",),
)
"""What recipes with another writer are compared with: of each, the first that was played."""


@dataclass(frozen=True)
class Setup:
    """Hold the settings that every recipe of an environment shares.

    Attributes:
        training: settings of all runs.
        curve: of the evaluations while training.
        final: of the evaluation at the end: of ``eval``, of retrieval, and the extractor's
            temperature.
        recipes: compared in this environment.
        arm: in which recipes with a bank are compared; None: with test-time writing (``on``).
        beside: environments with the same evaluation, whose recipes are compared with these, too.
        chance: success of blind play; None asks the environment, or measures it.
        profile: of the model; None: the bundled one.
        records: start each bank with a raw record of every training vault, so that an untrained
            actor has something to read.
        reader: the environment whose `static-online` (or its variant) is trained first, with the
            same seed; a run begins with its actor, which can read, and an untrained extractor.
    """

    training: tuple[str, ...]
    curve: tuple[str, ...]
    final: tuple[str, ...]
    recipes: tuple[str, ...] = RECIPES
    arm: Arm | None = None
    beside: tuple[str, ...] = ()
    chance: float | None = None
    profile: str | None = None
    records: bool = False
    reader: str | None = None


ENVIRONMENTS = {
    "vault": Setup(
        training=("run.steps=48",),
        curve=("eval.every=16", "eval.worlds=20", "eval.visits=3"),
        final=("eval.worlds=40", "eval.visits=4"),
        recipes=(*RECIPES, "history", "template"),
    ),
    "vault-law": Setup(
        training=(
            "run.steps=48", "env.kwargs.law=first", "env.train={split: train, worlds: 318}",
            "env.eval={split: eval, worlds: 120}", "env.visits=1", "bank.embedder=hashing",
            "bank.retrieval.floor=0.0", "bank.retrieval.tie=0.001",
            "bank.retrieval.strategy=evidence", "bank.options.retrieval.same_task=false",
        ),
        curve=("eval.every=12", "eval.worlds=60", "eval.visits=1", "eval.arms=[off, frozen]"),
        final=("eval.worlds=120", "eval.visits=2"),
        recipes=(
            "grpo", "static-online", "complementary", "complementary-no-kl", "template", "history",
        ),
        arm="frozen",
        beside=("vault-law-note",),
    ),
    "frozen-lake": Setup(
        training=(
            "env.id=experiential/FrozenLake-v0", "env.max_turns=8", "env.kwargs={sizes: [2, 4]}",
            "env.train={split: train, layouts: 10000}", "env.eval={split: eval, layouts: 40}",
            "actor.options={history: 0, keep_first: false}", "actor.groups=4", "run.steps=48",
            "bank.retrieval.floor=0.0",
            "env.visits=1",  # other layouts in every step, or the actor learns four by heart
        ),
        curve=("eval.every=16", "eval.worlds=40", "eval.visits=2"),
        final=("eval.worlds=40", "eval.visits=4"),
        # Of the layouts of the committed cells, some of which came twice. Today's are distinct, so
        # that a study played anew measures its own chance: None.
        chance=0.4472,
    ),
}  # fmt: skip
# With the system message that the bundled model is most skilled under (`benchmarks.baselines`).
ENVIRONMENTS["vault-law-note"] = replace(
    ENVIRONMENTS["vault-law"],
    training=(
        *ENVIRONMENTS["vault-law"].training, "actor.options.system=Do what the note says."
    ),
    recipes=(
        "static-online", "static-online-cool", "static-online-cold",
        "complementary", "template", "history", *ABLATIONS,
    ),
    beside=("vault-law",),
)  # fmt: skip
# Where memory must be earned, with a model that was taught these games by halves. Every recipe
# reads the entry written last about the very world, so that they differ in who writes it.
_EARNED = (
    "run.steps=48", "bank.embedder=hashing",
    "bank.retrieval.strategy=recent", "bank.retrieval.floor=-1.0",
    "bank.options.retrieval.same_task=true", "extractor.max_tokens=80",
)  # fmt: skip
EARNED_RECIPES = ("grpo", "static-online", "complementary", "template", "history")
ENVIRONMENTS["vault-blind"] = Setup(
    training=(
        *_EARNED, "model.name=benchmarks/models/earned", "model.prompts=brief",
        "env.kwargs.note=false", "env.visits=6",
        "env.train={split: train, worlds: 318}", "env.eval={split: eval, worlds: 40}",
        "actor.groups=16", "actor.group_size=4",
        "actor.optim.lr=5e-5",  # at 3e-4 the actor came to pull one lever whatever it read (on dev)
    ),
    curve=("eval.every=24", "eval.worlds=20", "eval.visits=6"),
    final=("eval.worlds=40", "eval.visits=6"),
    recipes=(
        *EARNED_RECIPES, "static-online-vault-rule",  # a rule that knows the game
        "static-online-cool", "complementary-cool",
    ),
)  # fmt: skip
ENVIRONMENTS["lake-words"] = Setup(
    training=(
        *_EARNED, "model.name=benchmarks/models/lakes", "model.prompts=opened",
        "env.id=experiential/FrozenLake-v0", "env.max_turns=8",
        "env.kwargs={preset: dialects, sizes: [4, 4], frozen: [0.85, 0.95], words_only: true}",
        "env.train={split: train, dialects: 120}", "env.eval={split: eval, dialects: 40}",
        "env.visits=4",
        "actor.optim.lr=5e-5",  # at 3e-4 the actor came to read less of what a rule wrote (on dev)
        "extractor.temperature=0.3",  # at 1 a lesson is seldom right and complete (on dev)
    ),
    curve=("eval.every=24", "eval.worlds=20", "eval.visits=4"),
    final=("eval.worlds=40", "eval.visits=4"),
    recipes=(*EARNED_RECIPES, "static-online-lake-rule", "erl", "erl-no-reflection"),
)  # fmt: skip
# Worlds that training met, on layouts that it did not, as in ALFWorld's split valid_seen: here the
# bank of the training knows something that weights could learn as well.
ENVIRONMENTS["lake-words-seen"] = replace(
    ENVIRONMENTS["lake-words"],
    training=(
        *ENVIRONMENTS["lake-words"].training, "env.train={split: train, dialects: 40}",
        "env.eval={split: train, dialects: 40}",
        "bank.retrieval.strategy=evidence",  # by the entry written last 33 %, by this 53 (on dev)
    ),
    curve=("eval.every=12", "eval.worlds=20", "eval.visits=4", "eval.arms=[off, frozen]"),
    recipes=(*ENVIRONMENTS["lake-words"].recipes, "static-online-recent"),
    arm="frozen",
)  # fmt: skip
# The actor of its `static-online`, now fixed, reads eight lessons that an extractor draws about one
# play. They are compared with each other, so that no play counts, only what is made of it.
ENVIRONMENTS["lake-words-drafts"] = replace(
    ENVIRONMENTS["lake-words"],
    training=(
        *ENVIRONMENTS["lake-words"].training, "env.train={split: train, dialects: 318}",
        "env.visits=2", "actor.groups=12", "bank.retrieval.strategy=diverse",
        "extractor.per_group=1", "extractor.drafts=8", "extractor.temperature=0.6",
        "extractor.batch_size=80", "extractor.optim.lr=1e-4", "extractor.kl=0.0", "run.steps=240",
    ),
    curve=("eval.every=120", "eval.worlds=20", "eval.visits=4"),
    final=(
        *ENVIRONMENTS["lake-words"].final, "bank.retrieval.strategy=recent",
        "extractor.temperature=0.3",  # as in lake-words
    ),
    recipes=("exp-only",),
    beside=("lake-words",),
    reader="lake-words",
)  # fmt: skip
# A model that nobody here made, with the settings of its quickstart.
ENVIRONMENTS["vault-smollm2"] = Setup(
    training=(
        "model.name=smollm2", "env.visits=2", "actor.groups=6", "actor.group_size=12",
        "actor.mini_batches=1", "extractor.per_group=1", "extractor.batch_size=12",
        "extractor.optim.lr=3e-4", "bank.retrieval.strategy=nearest", "run.steps=16",
    ),
    curve=("eval.every=8", "eval.worlds=20", "eval.visits=2", "eval.temperature=1.0"),
    final=("eval.worlds=40", "eval.visits=2"),
    recipes=(
        "grpo", "static-online-all-guided", "complementary-all-guided", "template-all-guided",
        "history", "erl",
    ),
    profile="small",
    records=True,
)  # fmt: skip
# As for dialects: the actor of its `static-online`, now fixed, and lessons about one play compared.
ENVIRONMENTS["vault-smollm2-drafts"] = replace(
    ENVIRONMENTS["vault-smollm2"],
    training=(
        *ENVIRONMENTS["vault-smollm2"].training, "actor.groups=12", "actor.group_size=16",
        "actor.guided=half", "extractor.reward=relative",  # a draft may add nothing, which gains 0
        "bank.retrieval.strategy=diverse", "bank.retrieval.floor=-1.0",
        "bank.options.retrieval.same_task=true", "extractor.drafts=8", "extractor.temperature=0.6",
        "extractor.batch_size=80", "extractor.kl=0.0",
        "run.steps=24",  # at 1e-3 one of three extractors lost its words after step 14
    ),
    curve=("eval.every=24", "eval.worlds=20", "eval.visits=2", "eval.temperature=1.0"),
    final=(
        *ENVIRONMENTS["vault-smollm2"].final, "bank.retrieval.strategy=recent",
        "extractor.temperature=0.1",  # as in vault-smollm2
    ),
    recipes=("exp-only",),
    records=False,
    reader="vault-smollm2",
)  # fmt: skip
# The law for that model: its recipe on Vault, and the bank and the worlds of the law.
ENVIRONMENTS["vault-law-smollm2"] = Setup(
    training=(
        *ENVIRONMENTS["vault-smollm2"].training, *ENVIRONMENTS["vault-law"].training,
        # With one visit each, nothing about the very vault was there to learn reading from.
        "env.visits=2", "extractor.per_group=2", "run.steps=32",
    ),
    curve=(
        "eval.every=16", "eval.worlds=30", "eval.visits=1", "eval.arms=[off, frozen]",
        "eval.temperature=1.0",
    ),
    final=("eval.worlds=120", "eval.visits=2"),
    recipes=(
        "grpo", "static-online-all-guided", "complementary-all-guided", "template-all-guided",
        "history", "erl",
    ),
    arm="frozen",
    profile="small",
)  # fmt: skip
# Vault without a clerk, for that model: its recipe on Vault, and the entry written last.
ENVIRONMENTS["vault-blind-smollm2"] = replace(
    ENVIRONMENTS["vault-smollm2"],
    training=(
        *ENVIRONMENTS["vault-smollm2"].training, "env.kwargs.note=false", "env.visits=4",
        "bank.retrieval.strategy=recent", "bank.retrieval.floor=-1.0",
        "bank.options.retrieval.same_task=true",
    ),
    curve=("eval.every=8", "eval.worlds=20", "eval.visits=4", "eval.temperature=1.0"),
    final=("eval.worlds=40", "eval.visits=6"),
)  # fmt: skip
# Households of ALFWorld, in which a kind of object is always kept in one place, for that model.
ENVIRONMENTS["alfworld-homes"] = Setup(
    training=(
        *households.SETTINGS, "env.kwargs.turns=8", "env.max_turns=8", "env.visits=4",
        "actor.groups=4", "actor.group_size=8", "actor.mini_batches=1", "actor.epochs=1",
        "actor.max_tokens=24",
        "actor.optim.lr=1e-4",  # at 1e-3 success fell by half in twelve steps
        "extractor.per_group=1", "extractor.batch_size=4", "extractor.optim.lr=3e-4",
        "extractor.max_tokens=128", "extractor.temperature=0.5", "bank.embedder=hashing",
        "bank.retrieval.strategy=recent", "bank.retrieval.floor=-1.0",
        "bank.options.retrieval.same_task=true", "run.steps=12",
    ),
    curve=("eval.every=12", "eval.worlds=12", "eval.visits=2", "eval.temperature=1.0"),
    final=("eval.worlds=30", "eval.visits=4"),
    recipes=(
        "grpo", "static-online", "complementary", "template", "history", "static-online-home-rule",
        "erl",
    ),
    chance=0.0,  # of 400 episodes of random moves, without ALFWorld at hand
    profile="small",
)  # fmt: skip
# Twelve households that training met, two visits at a time, with other goals, starts and objects.
ENVIRONMENTS["alfworld-homes-seen"] = replace(
    ENVIRONMENTS["alfworld-homes"],
    training=(
        *ENVIRONMENTS["alfworld-homes"].training, "env.visits=2",
        "env.train={split: train, households: 12}", "env.eval={split: train, households: 12}",
        "bank.retrieval.strategy=evidence",  # as in lake-words-seen
    ),
    curve=(
        "eval.every=6", "eval.worlds=12", "eval.visits=2", "eval.arms=[off, frozen]",
        "eval.temperature=1.0",
    ),
    final=("eval.worlds=12", "eval.visits=8"),
    arm="frozen",
)  # fmt: skip
# ALFWorld's own scenes, of which each game places most objects anew, after the same cold start.
# Rooms have more places, so there are more turns.
ENVIRONMENTS["alfworld-scenes"] = replace(
    ENVIRONMENTS["alfworld-homes"],
    training=(
        *ENVIRONMENTS["alfworld-homes"].training, "env.kwargs.data=$ALFWORLD_DATA",
        "env.train={split: train, households: 57}", "env.eval={split: eval, households: 23}",
        "env.kwargs.turns=12", "env.max_turns=12",
    ),
    final=("eval.worlds=23", "eval.visits=4"),
    recipes=("grpo", "static-online", "complementary", "template", "history", "erl"),
    chance=0.0,  # of 400 episodes of random moves, without the games at hand
)  # fmt: skip
# Above, the comment on each move is in every observation; here neither method reads it.
ENVIRONMENTS["frozen-lake-hidden"] = replace(
    ENVIRONMENTS["frozen-lake"],
    training=(*ENVIRONMENTS["frozen-lake"].training, "env.feedback=hidden"),
    recipes=("grpo", "erl", "erl-no-memory", "erl-no-reflection"),
)
SEEN = ("lake-words-seen", "alfworld-homes-seen")
"""Environments whose evaluation plays all worlds of the training, on other instances."""
ALL = (
    "run.checkpoint_every=0", "run.minutes=null", "run.drain=true", "eval.seed=10000",
    "model.threads=1", "extractor.per_group=0",  # as in the paper
)  # fmt: skip
"""Settings of every run; with run.drain the same cell twice gives the same outcomes."""
FUNCTIONS = ("template", "template-all-guided", "history")
"""Recipes whose entries a function writes that knows no game."""
RULES = ("static-online-home-rule", "static-online-lake-rule", "static-online-vault-rule")
"""Recipes whose entries a function writes that knows the game."""
WITHOUT_EXTRACTOR = (*FUNCTIONS, *RULES)
"""The baselines of an environment without others."""
UNTRAINED = (
    "static-online", "static-online-all-guided", "static-online-cool", "static-online-cold",
)  # fmt: skip
"""Recipes whose entries the model writes, untrained."""
WRITERS = (*UNTRAINED, *WITHOUT_EXTRACTOR)
"""Recipes that differ from ``complementary`` in who writes the entries."""
DEMONSTRATIONS = {"evolver": 300}
"""Recipes with a cold start, and how many demonstrations each is given."""
TARGETS = (0.5, 0.8)
RESULTS = Path("benchmarks/results/study")
BASELINES = Path("benchmarks/results/baselines.json")
"""Of `benchmarks.baselines`, on the worlds, visits and seeds of ``vault``."""


class StudyCell(Record):
    """Hold one run of the study: its learning curve, and the trained pair under each arm.

    Attributes:
        environment: name of its setup.
        recipe: name of the recipe.
        seed: training seed.
        commit: of the code; with ``+`` when it had changes that were not committed.
        settings: digest of the settings of the training, the seed excepted.
        overrides: settings changed from the recipe's.
        steps: training steps.
        episodes: training episodes, second attempts and those that filled a bank beforehand
            included.
        seconds: of the training with its evaluations, on one thread beside another run.
        tokens: that actor and extractor processed in training and its evaluations, prompts
            included; one figure where they share weights.
        curve: success on later visits while training, by arm.
        arms: a cell for each arm that could be played at the end.
        weights: digest of the weights that its environment begins with; None in cells made before
            this was recorded, and of a model from a hub.
    """

    environment: str
    recipe: str
    seed: int
    commit: str
    settings: str
    overrides: tuple[str, ...]
    steps: int
    episodes: int
    seconds: float
    tokens: dict[str, int]
    curve: dict[str, tuple[Point, ...]]
    arms: tuple[Cell, ...]
    weights: str | None = None


# One cell


def overrides_of(environment: str, recipe: str, seed: int) -> list[str]:
    """Return the settings of a training run of the study."""
    setup = ENVIRONMENTS[environment]
    return [
        *ALL,
        f"seed={seed}",
        *setup.training,
        *setup.curve,
        *recipe_of(recipe)[1],
    ]


def recipe_of(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the recipe that a name of the study stands for, and the settings changed in it."""
    return VARIANTS.get(name, (name, ()))


def play_cell(
    environment: str, recipe: str, seed: int, scratch: Path, more: Sequence[str] = ()
) -> StudyCell:
    """Train and evaluate one cell in a scratch folder.

    Args:
        environment: name of its setup.
        recipe: name of a recipe.
        seed: training seed.
        scratch: an empty folder.
        more: settings changed for all runs of the study, to try it small.
    """
    code = commit()  # before it can change under a run of hours
    overrides = [*overrides_of(environment, recipe, seed), *more]
    base = base_of(environment, recipe)
    named = load_experiment(base, overrides)
    begun = cold_start(environment, recipe, overrides, seed, scratch, more)
    experiment = load_experiment(base, [*overrides, *begun])
    begin = time.perf_counter()
    # The final arms play with the policies as trained, so these outlive the run.
    with closing(build_runtime(experiment)) as runtime:
        events: list[dict[str, Any]] = []
        trainer = Trainer(
            experiment,
            scratch / "run",
            observer=events.append,
            runtimes=(runtime.actor, runtime.extractor),
        )
        summary = trainer.run()
        seconds = time.perf_counter() - begin
        policies = {"actor": trainer.actor} | (
            {} if trainer.extractor is trainer.actor else {"extractor": trainer.extractor}
        )
        tokens = {name: policy.tokens_processed for name, policy in policies.items()}
        return StudyCell(
            environment=environment,
            recipe=recipe,
            seed=seed,
            commit=code,
            settings=settings_digest(named, seed=False),
            overrides=tuple(overrides),
            steps=summary["steps"],
            episodes=sum(
                event["episodes"] for event in events if event["event"] in ("step", "prepared")
            ),
            seconds=seconds,
            tokens=tokens,
            curve={
                arm: tuple(evaluation_curve(events, arm))
                for arm in ARMS
                if evaluation_curve(events, arm)
            },
            arms=tuple(
                final_cells(
                    trainer,
                    f"{environment}/{recipe}",
                    [*overrides, *ENVIRONMENTS[environment].final, *more],
                    scratch,
                )
            ),
            weights=weights_digest(str(named.model.name)),
        )


def base_of(environment: str, recipe: str) -> str:
    """Return the recipe that a cell loads, with the model's profile of its environment."""
    profile = ENVIRONMENTS[environment].profile
    return recipe_of(recipe)[0] + (f"+{profile}" if profile else "")


def cold_start(
    environment: str,
    recipe: str,
    overrides: Sequence[str],
    seed: int,
    scratch: Path,
    more: Sequence[str] = (),
) -> list[str]:
    """Make what a cell begins with: demonstrations, a bank of records, an actor that can read.

    Returns:
        the settings that name it.
    """
    setup = ENVIRONMENTS[environment]
    experiment = load_experiment(base_of(environment, recipe), overrides)
    if setup.reader is not None:
        return reader(setup.reader, seed, scratch, more)
    if setup.records and experiment.extractor.enabled:
        smollm2_reader.write_bank(scratch / "records")
        return [f"bank.path={scratch / 'records'}"]
    if recipe not in DEMONSTRATIONS:
        return []
    file = scratch / "demonstrations.jsonl"
    chats = demonstrations.demonstrations(
        experiment, DEMONSTRATIONS[recipe], ask=0.8, follow=0.8, seed=seed
    )
    file.write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    return [f"methods.cold_start={{demonstrations: {file}}}"]


def reader(environment: str, seed: int, scratch: Path, more: Sequence[str]) -> list[str]:
    """Train the actor of an environment's `static-online`, as its study does.

    Returns:
        the settings by which a run begins with that actor and a fresh extractor.
    """
    recipe = next(one for one in ENVIRONMENTS[environment].recipes if one.startswith("static-on"))
    overrides = [*overrides_of(environment, recipe, seed), *more]
    begun = cold_start(environment, recipe, overrides, seed, scratch, more)
    experiment = load_experiment(base_of(environment, recipe), [*overrides, *begun])
    quiet = experiment.eval.model_copy(update={"before": False, "every": 0, "after": False})
    output = scratch / "reader"
    Trainer(experiment.model_copy(update={"eval": quiet}), output).run()
    first = experiment.model
    second = first.model_dump(mode="json", exclude_unset=True) | {"name": str(first.name)}
    return [f"model.name={output / 'actor'}", f"extractor_model={json.dumps(second)}"]


def final_cells(
    trainer: Trainer, family: str, overrides: Sequence[str], scratch: Path
) -> Iterator[Cell]:
    """Play the trained pair under every arm that it can play, without loading its weights.

    Args:
        trainer: that ran.
        family: environment/recipe, by the names of the study.
        overrides: settings of the training, and after them those of this evaluation.
        scratch: a folder for it.
    """
    final = load_experiment(trainer.experiment.recipe, overrides)
    trained = trainer.experiment
    bank = trained.bank.model_copy(update={"retrieval": final.bank.retrieval})
    cooled = {"temperature": final.extractor.temperature}
    extractor = trained.extractor.model_copy(update=cooled)
    experiment = trained.model_copy(
        update={"eval": final.eval, "bank": bank, "extractor": extractor}
    )
    checkpoint, manifest = CheckpointStore(trainer.output / "checkpoints").latest()
    evaluation = Trainer(
        only_evaluation(experiment, ARMS),
        scratch / "evaluation",
        runtimes=(trainer.actor, trainer.extractor),
    )
    environment, recipe = family.split("/")
    seed = experiment.seed
    for event in asyncio.run(evaluation.aevaluate(checkpoint, manifest)):
        made = cell_of(event, f"{recipe}-{seed}", experiment, checkpoint="")
        yield made.model_copy(
            update={
                "family": family,
                "settings": f"{family}/{seed}",
                "environment": environment,
                "recipe": recipe,
            }
        )


def weights_digest(model: str) -> str | None:
    """Return a digest of a model's weights; None of one from a hub."""
    files = sorted(Path(resolve_model(model)).glob("*.safetensors"))
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()[:16] if files else None


def commit() -> str:
    """Return the commit of the code that runs, with ``+`` when it was changed since.

    Outside a repository it is ``unknown``.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "experiential", "benchmarks/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# The study


def cells_of(results: Path) -> ResultStore[StudyCell]:
    """Return the store of the study's finished cells."""
    return ResultStore(
        results / "cells",
        StudyCell,
        about="a cell of the study",
        remedy="remove it and run again",
        indent=None,
    )


def cell_path(results: Path, environment: str, recipe: str, seed: int) -> Path:
    """Return the file of a finished cell."""
    return cells_of(results).path(f"{environment}/{recipe}-{seed}")


def order(
    environments: Sequence[str], recipes: Sequence[str] | None, seeds: int
) -> list[tuple[str, str, int]]:
    """Return all cells, seed by seed, of these recipes or else of each environment's own.

    Raises:
        ConfigError: an environment does not exist.
    """
    for environment in environments:
        if environment not in ENVIRONMENTS:
            raise ConfigError(
                f"Expected an environment among {', '.join(ENVIRONMENTS)}, got {environment!r}"
            )
    return [
        (environment, recipe, seed)
        for seed in range(seeds)
        for environment in environments
        for recipe in recipes or ENVIRONMENTS[environment].recipes
    ]


def check(cells: Sequence[tuple[str, str, int]], more: Sequence[str]) -> None:
    """Refuse a study one of whose cells cannot be run.

    Raises:
        ConfigError: a recipe or a setting does not exist.
    """
    for environment, recipe, seed in cells:
        load_experiment(
            base_of(environment, recipe), [*overrides_of(environment, recipe, seed), *more]
        )


def run(
    results: Path,
    cells: Sequence[tuple[str, str, int]],
    jobs: int,
    minutes: float | None,
    more: Sequence[str] = (),
    keep: Path | None = None,
) -> int:
    """Run the cells that are not finished, ``jobs`` at a time; return how many failed.

    Args:
        results: folder of the study.
        cells: environment, recipe and seed of each, in the order to run them.
        jobs: processes at once.
        minutes: after which no further cell is started; None has no end.
        more: settings changed for all cells.
        keep: folder in which the files of each training stay; None keeps none.
    """
    check(cells, more)
    left = [cell for cell in cells if not cell_path(results, *cell).exists()]
    say(f"{len(cells) - len(left)} of {len(cells)} cells are finished")
    end = time.monotonic() + 60 * minutes if minutes is not None else float("inf")
    failed: list[tuple[str, str, int]] = []
    interrupted = threading.Event()

    def one(cell: tuple[str, str, int]) -> None:
        if (
            time.monotonic() < end
            and not interrupted.is_set()
            and not run_process(results, cell, more, keep)
        ):
            failed.append(cell)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(one, left))
        except KeyboardInterrupt:
            interrupted.set()  # what waits in the pool starts nothing
            raise
    done = sum(cell_path(results, *cell).exists() for cell in cells)
    say(f"{done} of {len(cells)} cells are finished, {len(failed)} failed")
    return len(failed)


def run_process(
    results: Path, cell: tuple[str, str, int], more: Sequence[str], keep: Path | None
) -> bool:
    """Run one cell in a process of its own; return whether it finished.

    The output of a failed cell is shown. Each process has one thread.
    """
    begin = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "benchmarks.study",
        "cell",
        *map(str, cell),
        *more,
        "--results",
        str(results),
        *([] if keep is None else ["--keep", str(keep)]),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    minutes = (time.monotonic() - begin) / 60
    name = "/".join(map(str, cell))
    if done.returncode:
        say(f"{name}: exit code {done.returncode} after {minutes:.1f} min\n{done.stderr[-2000:]}")
        return False
    say(f"{name}: {minutes:.1f} min; {done.stdout.strip().splitlines()[-1]}")
    return True


_TALKING = threading.Lock()


def say(text: str) -> None:
    """Write a line at once."""
    with _TALKING:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def finish_cell(
    results: Path,
    environment: str,
    recipe: str,
    seed: int,
    more: Sequence[str],
    keep: Path | None = None,
) -> None:
    """Run one cell here and store it."""
    name = f"{environment}/{recipe}-{seed}"
    with TemporaryDirectory(prefix="experiential-study-") as scratch:
        folder = Path(scratch) if keep is None else keep.resolve() / name
        shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was ended
        folder.mkdir(parents=True)
        cell = play_cell(environment, recipe, seed, folder, more)
    cells_of(results).keep(name, cell)
    say(f"later visits: {', '.join(f'{arm.arm} {arm.later().mean():.2f}' for arm in cell.arms)}")


# The tables


def read_cells(results: Path) -> list[StudyCell]:
    """Return all finished cells, by environment, recipe and seed.

    Raises:
        ConfigError: a file is damaged, or there are none.
    """
    found = list(cells_of(results).all())
    if not found:
        raise ConfigError(
            f"Expected finished cells in {results / 'cells'}, found none; run the study first"
        )
    place = {recipe: number for number, recipe in enumerate(RECIPES)}
    return sorted(
        found,
        key=lambda cell: (
            cell.environment,
            place.get(cell.recipe, len(place)),
            cell.recipe,
            cell.seed,
        ),
    )


def episodes_to_target(points: Sequence[Point], target: float) -> int | None:
    """Return the training episodes at the first evaluation that reached the target."""
    return next((point.episodes for point in points if point.success >= target), None)


def baselines(file: Path = BASELINES) -> dict[str, np.ndarray]:
    """Return success on later visits of each baseline and arm, shape (seeds, worlds).

    Without a file there are none.
    """
    kept = json.loads(file.read_text("utf-8"))["rows"] if file.exists() else []
    found: dict[str, list[np.ndarray]] = {}
    for row in kept:
        table = [[int(digit) for digit in world] for world in row["outcomes"]]
        name = row["name"] if row["name"] == row["arm"] else f"{row['name']}, {row['arm']}"
        found.setdefault(name, []).append(later(table))
    return {name: np.array(seeds) for name, seeds in found.items()}


def rows(
    cells: Sequence[StudyCell], known: Mapping[str, Mapping[str, np.ndarray]] | None = None
) -> list[dict[str, Any]]:
    """Return a row for each environment and recipe.

    Args:
        cells: finished cells.
        known: the baselines of each environment, as `baselines` returns them.
    """
    found: list[dict[str, Any]] = []
    for environment in dict.fromkeys(cell.environment for cell in cells):
        mine = [cell for cell in cells if cell.environment == environment]
        card = make_card([arm for cell in mine for arm in cell.arms])
        blind = chance(environment)
        beside = (environment, *ENVIRONMENTS[environment].beside)
        all_there = [cell for cell in cells if cell.environment in beside]
        base = [arm for cell in all_there if cell.recipe == RECIPES[0] for arm in cell.arms]
        rivals = trained_baselines(all_there)
        for recipe in card.recipes:
            played = [cell for cell in mine if cell.recipe == recipe.recipe]
            row = _row(recipe, played, base) | {"chance": round(blind, 4)}
            used = [arm for cell in played for arm in cell.arms if arm.arm == row["used_arm"]]
            found.append(row | against(used, (known or {}).get(environment, {}), rivals))
    return found


def compared_arm(environment: str, cells: Sequence[Cell]) -> Arm:
    """Return the arm in which a recipe is compared: the environment's, where it was played."""
    arm = ENVIRONMENTS[environment].arm
    if arm is None or all(cell.arm != arm for cell in cells):
        return used_arm(cells)
    return arm


def trained_baselines(cells: Sequence[StudyCell]) -> dict[str, list[Cell]]:
    """Return the cells of the recipes without a model as extractor, by recipe and environment."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        if cell.recipe in WITHOUT_EXTRACTOR:
            arm = compared_arm(cell.environment, cell.arms)
            found.setdefault(f"{cell.recipe}, {arm} ({cell.environment})", []).extend(
                played for played in cell.arms if played.arm == arm
            )
    return found


def against(
    cells: Sequence[Cell],
    known: Mapping[str, np.ndarray],
    rivals: Mapping[str, Sequence[Cell]],
) -> dict[str, Any]:
    """Return the columns that compare a recipe, as it is compared, with the best baseline.

    The best one is chosen on the very worlds on which it is compared, which favours it. Worlds are
    resampled together; training seeds are paired with those of ``rivals``, and resampled apart for
    ``known``.
    """
    mine = np.array([cell.later() for cell in cells])
    rates = {name: np.array([cell.later() for cell in made]) for name, made in rivals.items()}
    rates |= {name: rate for name, rate in known.items() if rate.shape[1] == mine.shape[1]}
    best = max(rates, key=lambda name: rates[name].mean(), default=None)
    interval, difference = None, None
    if best is not None:
        interval = clustered_mean(rates[best], bounds=RATE)
        paired = recipe_difference(cells, rivals[best]) if best in rivals else None
        difference = paired["interval"] if paired else unpaired_difference(mine, rates[best])
    return (
        {"best_baseline": best}
        | _columns("best_baseline_success", interval)
        | _columns("minus_best_baseline", difference)
    )


@lru_cache
def chance(environment: str) -> float:
    """Return the success of blind play on the evaluation worlds.

    It is written down here, stated by the environment, or else measured with random moves.
    """
    setup = ENVIRONMENTS[environment]
    if setup.chance is not None:
        return setup.chance
    settings = load_experiment("grpo", [*setup.training, *setup.final]).env
    _, stated = world_facts(settings.id, settings.kwargs | settings.eval)
    return random_success(environment) if stated is None else stated


def random_success(environment: str, repeats: int = 100) -> float:
    """Return the share of episodes won by random moves.

    Every evaluation world is played ``repeats`` times.
    """
    setup = ENVIRONMENTS[environment]
    settings = load_experiment("grpo", [*setup.training, *setup.final])
    env = make_env(settings.env, settings.env.eval)
    won = 0
    for repeat in range(repeats):
        agent = random_agent(env, seed=repeat)
        for world in range(settings.eval.worlds):
            options = {"world": world}
            observation, info = env.reset(seed=repeat, options=options)
            done = False
            while not done:
                observation, _, terminated, truncated, info = env.step(agent(observation, info))
                done = terminated or truncated
            won += bool(info["success"])
    env.close()
    return won / (repeats * settings.eval.worlds)


def _row(recipe: RecipeReport, cells: Sequence[StudyCell], base: Sequence[Cell]) -> dict[str, Any]:
    arms = [arm for cell in cells for arm in cell.arms]
    used = compared_arm(cells[0].environment, arms)
    report = recipe.arm(used)
    assert report is not None
    gain = None
    if base and cells[0].recipe != RECIPES[0]:
        gain = recipe_difference(by_arm(arms)[used], by_arm(base)[used_arm(base)])
    row: dict[str, Any] = {
        "environment": cells[0].environment,
        "recipe": recipe.recipe,
        "seeds": len(cells),
        "used_arm": used,
    }
    for arm in ARMS:
        row |= _columns(arm, None if (played := recipe.arm(arm)) is None else played.later)
    row |= _columns(f"minus_{RECIPES[0]}", gain["interval"] if gain and gain["seeds"] else None)
    for first, second in DIFFERENCES:
        interval = next(
            (d.interval for d in recipe.differences if (d.first, d.second) == (first, second)), None
        )
        row |= _columns(f"{first}_minus_{second}", interval)
    for name in ("episodes", "seconds", "actor_tokens", "extractor_tokens"):
        row[f"{name}_per_success"] = (
            round(getattr(report.per_success, name), 2) if report.per_success else None
        )
    for target in TARGETS:
        hit = [
            n
            for n in (episodes_to_target(cell.curve.get(used, ()), target) for cell in cells)
            if n is not None
        ]
        row |= {
            f"reached_{100 * target:.0f}": len(hit),
            f"episodes_to_{100 * target:.0f}": float(np.median(hit)) if hit else None,
        }
    row |= {
        "train_episodes": round(float(np.mean([cell.episodes for cell in cells]))),
        "train_minutes": round(float(np.mean([cell.seconds for cell in cells])) / 60, 1),
        "commits": " ".join(sorted({c.commit for c in cells})),
    }
    return row


def _columns(name: str, interval: Interval | None) -> dict[str, float | None]:
    values = (
        (None, None, None) if interval is None else (interval.mean, interval.low, interval.high)
    )
    keys = (name, f"{name}_low", f"{name}_high")
    return {
        key: None if value is None else round(value, 4)
        for key, value in zip(keys, values, strict=True)
    }


def markdown(found: Sequence[dict[str, Any]]) -> str:
    """Lay out the rows as two tables for each environment.

    The first has success and its speed, the second the worth and the cost of the bank.
    """
    parts: list[str] = []
    targets = [f"{100 * target:.0f}" for target in TARGETS]
    for environment in dict.fromkeys(row["environment"] for row in found):
        mine = [row for row in found if row["environment"] == environment]
        reach = [f"episodes to {target} % (seeds)" for target in targets]
        head = [
            "recipe",
            "seeds",
            "training episodes",
            "chance",
            "off",
            "frozen",
            "on (with test-time writing)",
            "frozen minus off, points",
            f"as used minus {RECIPES[0]}, points",
            "as used minus best baseline, points",
            *reach,
        ]
        body = [
            [
                row["recipe"],
                str(row["seeds"]),
                _number(row["train_episodes"]),
                f"{100 * row['chance']:.1f} %",
                _rate(row, "off"),
                _rate(row, "frozen"),
                _rate(row, "on"),
                _points(row, "frozen_minus_off"),
                _points(row, f"minus_{RECIPES[0]}"),
                _points(row, "minus_best_baseline"),
            ]
            + [
                f"{_number(row[f'episodes_to_{t}'])} ({row[f'reached_{t}']} of {row['seeds']})"
                for t in targets
            ]
            for row in mine
        ]
        pairs = ("on_minus_off", "on_minus_shuffled", "on_minus_placebo", "on_minus_frozen")
        costs = ("episodes_per_success", "actor_tokens_per_success", "extractor_tokens_per_success")
        second = [
            "recipe",
            *(pair.replace("_", " ") for pair in pairs),
            *(cost.replace("_", " ") for cost in costs),
        ]
        more = [
            [
                row["recipe"],
                *(_points(row, pair) for pair in pairs),
                *(_number(row[cost]) for cost in costs),
            ]
            for row in mine
        ]
        parts += [
            f"## {environment}",
            "Success on later visits, and how fast it came:",
            markdown_table(head, body),
            *([f"Best baseline: {named}"] if (named := _best(mine[0])) else []),
        ]
        parts += [
            "What the bank was good for, in points, and what a success cost as the recipe is used:",
            markdown_table(second, more),
        ]
    return "\n\n".join(parts) + "\n"


def orderings(cells: Sequence[StudyCell]) -> str:
    """Lay out the orderings of the papers, and whether each environment agrees."""
    places = dict.fromkeys(cell.environment for cell in cells)
    found: dict[Ordering, dict[str, str]] = {}
    for place in places:
        mine = [cell for cell in cells if cell.environment == place]
        names = dict.fromkeys(cell.recipe for cell in mine)
        for finding in findings(
            {
                name: [arm for cell in mine if cell.recipe == name for arm in cell.arms]
                for name in names
            },
            chance(place),
        ):
            text = f"{finding.verdict}: {show_points(finding.interval)}"
            if finding.over_chance is not None:
                text += (
                    "; the second is below chance, the first minus chance"
                    f" {show_points(finding.over_chance)}"
                )
            found.setdefault(finding.ordering, {})[place] = text
    body = [
        [
            f"`{o.first}` over `{o.second}`",
            o.protocol,
            o.source,
            *(found[o].get(place, "–") for place in places),
        ]
        for o in ORDERINGS
        if o in found
    ]
    return (
        "## Orderings of the papers\n\n"
        + markdown_table(["ordering", "evaluated", "source", *places], body)
        + "\n"
    )


def ablations(cells: Sequence[StudyCell]) -> str:
    """Lay out what a recipe loses or gains by each change to it; empty where none was made."""
    head = ["environment", "recipe", "arm", "success", "unchanged", "minus it, points", "seeds"]
    body = [
        [place, f"`{name}`", arm, show_percent(rate(mine)), f"`{main}`", *difference(mine, base)]
        for changed, whole in ((ABLATIONS, COMPLEMENTARY), (RETRIEVALS, ("static-online",)))
        for place, name, arm, mine, main, base in beside_trained(cells, changed, whole)
    ]
    return f"## Ablations\n\n{markdown_table(head, body)}\n" if body else ""


def by_seed(cells: Sequence[StudyCell]) -> str:
    """Lay out success of each recipe as it is used, by visit and by training seed."""
    head = ["environment", "recipe", "arm", "by visit, percent", "later visits", "each seed"]
    body: list[list[str]] = []
    for place, name in dict.fromkeys((cell.environment, cell.recipe) for cell in cells):
        made = [
            one
            for cell in sorted(cells, key=lambda cell: cell.seed)
            if (cell.environment, cell.recipe) == (place, name)
            for one in cell.arms
        ]
        arm = compared_arm(place, made)
        mine = [one for one in made if one.arm == arm]
        each = ", ".join(f"{100 * one.later().mean():.0f}" for one in mine)
        body.append([place, f"`{name}`", arm, visits(mine), show_percent(rate(mine)), each])
    return f"## By visit and by seed\n\n{markdown_table(head, body)}\n"


def writers(cells: Sequence[StudyCell]) -> str:
    """Lay out what trained extractors have over recipes whose entries somebody else writes."""
    head = ["environment", "recipe", "arm", "by visit, percent", "later visits"]
    head += ["trained", "trained minus it, points", "seeds"]
    body = [
        [place, f"`{name}`", arm, visits(mine), show_percent(rate(mine)), f"`{main}`"]
        + difference(base, mine)
        for trained in TRAINED
        for place, name, arm, mine, main, base in beside_trained(cells, WRITERS, trained)
    ]
    return f"## Who writes the entries\n\n{markdown_table(head, body)}\n" if body else ""


def beside_trained(
    cells: Sequence[StudyCell], recipes: Sequence[str], trained: Sequence[str]
) -> Iterator[tuple[str, str, Arm, list[Cell], str, list[Cell]]]:
    """Yield environment, recipe, arm, its cells, the first of ``trained`` there, and its cells.

    Cells are those of that arm.
    """
    played = dict.fromkeys((cell.environment, cell.recipe) for cell in cells)
    for place, name in played:
        main = next((one for one in trained if (place, one) in played), None)
        if name not in recipes or main is None or main == name:
            continue
        made, base = (
            [one for cell in cells if (cell.environment, cell.recipe) == (place, recipe)
             for one in cell.arms]
            for recipe in (name, main)
        )  # fmt: skip
        arm = compared_arm(place, made)
        mine, theirs = ([one for one in some if one.arm == arm] for some in (made, base))
        yield place, name, arm, mine, main, theirs


def rate(cells: Sequence[Cell]) -> Interval:
    """Return success on later visits, over training seeds and worlds, to four digits as in rows."""
    found = clustered_mean(np.array([cell.later() for cell in cells]), bounds=RATE)
    return Interval(**{name: round(value, 4) for name, value in found.model_dump().items()})


def visits(cells: Sequence[Cell]) -> str:
    """Return success by visit in percent, the mean over training seeds and worlds."""
    won = np.array([[[int(one) for one in world] for world in cell.outcomes] for cell in cells])
    return ", ".join(f"{100 * share:.0f}" for share in won.mean((0, 1)))


def difference(first: Sequence[Cell], second: Sequence[Cell]) -> list[str]:
    """Return success of the first minus the second on common seeds, and how many those are."""
    found = recipe_difference(first, second)
    return [show_points(found["interval"]), str(found["seeds"])] if found else ["–", "0"]


def _interval(row: dict[str, Any], name: str) -> Interval | None:
    return (
        None
        if row[name] is None
        else Interval(mean=row[name], low=row[f"{name}_low"], high=row[f"{name}_high"])
    )


def _rate(row: dict[str, Any], name: str) -> str:
    return "–" if (interval := _interval(row, name)) is None else show_percent(interval)


def _points(row: dict[str, Any], name: str) -> str:
    return "–" if (interval := _interval(row, name)) is None else show_points(interval)


def _best(row: dict[str, Any]) -> str:
    """Describe the best baseline of an environment; empty where none was played."""
    if row["best_baseline"] is None:
        return ""
    return f"{row['best_baseline']}, {_rate(row, 'best_baseline_success')}."


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"


def markdown_table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Lay out rows as a table in Markdown."""
    lines = [
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
        *(f"| {' | '.join(row)} |" for row in body),
    ]
    return "\n".join(lines)


def plot(cells: Sequence[StudyCell], target: Path) -> None:
    """Plot held-out success on later visits against training episodes, mean and range.

    Above each recipe is as it is used, below without the bank.
    """
    from matplotlib.figure import Figure

    environments = list(dict.fromkeys(cell.environment for cell in cells))
    figure = Figure(figsize=(7 * len(environments), 8), layout="constrained")
    grid = figure.subplots(2, len(environments), squeeze=False)
    for column, environment in enumerate(environments):
        mine = [cell for cell in cells if cell.environment == environment]
        for row, title in enumerate(("as the recipe is used", "without the bank")):
            for number, recipe in enumerate(dict.fromkeys(cell.recipe for cell in mine)):
                runs = [cell for cell in mine if cell.recipe == recipe]
                played = [one for cell in runs for one in cell.arms]
                arm = "off" if row else compared_arm(environment, played)
                curves = [
                    [(point.episodes, point.success) for point in cell.curve.get(arm, ())]
                    for cell in runs
                ]
                _draw(grid[row, column], curves, f"C{number % 10}", f"{recipe} ({arm})")
            grid[row, column].set(
                title=f"{environment}, {title}",
                xlabel="training episodes",
                ylabel="later visits",
                ylim=(0, 1),
            )
            grid[row, column].legend(fontsize=7, frameon=False)
    figure.savefig(str(target), dpi=120)


def _draw(
    axes: Any, curves: Sequence[Sequence[tuple[int, float]]], colour: str, label: str
) -> None:
    found = mean_curve(curves)
    if found:
        xs, means, lows, highs = (list(column) for column in zip(*found, strict=True))
        axes.plot(xs, means, marker=".", color=colour, label=label)
        axes.fill_between(xs, lows, highs, color=colour, alpha=0.1)


def table(results: Path) -> None:
    """Write the rows as CSV and Markdown, and the picture."""
    cells = read_cells(results)
    found = rows(cells, {"vault": baselines()})
    with (results / "table.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    parts = markdown(found), orderings(cells), ablations(cells), writers(cells), by_seed(cells)
    text = "\n".join(filter(None, parts))
    (results / "table.md").write_text(text, encoding="utf-8")
    plot(cells, results / "curves.png")
    say(text)
    for note in mixed_cells(cells):
        say(f"note: {note}")


def mixed_cells(cells: Sequence[StudyCell]) -> Iterator[str]:
    """Name the recipes whose cells are not of one kind, by what differs.

    Overrides that only some cells have change what is compared, unless they state what was the
    default before. Where overrides are equal, later code had further settings or other defaults.
    A model that was made anew, e.g. by `make homes-model` elsewhere, may have other weights.
    """
    for environment in dict.fromkeys(cell.environment for cell in cells):
        begun: dict[str, list[str]] = {}
        for cell in cells:
            if cell.environment == environment and cell.weights is not None:
                begun.setdefault(cell.weights, []).append(f"{cell.recipe}-{cell.seed}")
        if len(begun) > 1:
            told = "; ".join(f"{weights}: {', '.join(names)}" for weights, names in begun.items())
            yield f"the cells of {environment} begin with different weights ({told})"
    for environment, recipe in dict.fromkeys((cell.environment, cell.recipe) for cell in cells):
        mine = [cell for cell in cells if (cell.environment, cell.recipe) == (environment, recipe)]
        if len({cell.settings for cell in mine}) == 1:
            continue
        name = f"the cells of {environment}/{recipe}"
        given = [{o for o in cell.overrides if not o.startswith("seed=")} for cell in mine]
        if some := sorted(set[str]().union(*given) - set[str].intersection(*given)):
            yield (
                f"{name} were made with different settings ({', '.join(some)} in some); remove the"
                " older ones and run again if that changed them"
            )
        else:
            commits = ", ".join(dict.fromkeys(cell.commit for cell in mine))
            yield f"{name} have equal overrides, by code with other settings: {commits}"


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    chosen = commands.add_parser("run", help="run what is not finished")
    chosen.add_argument(
        "--recipes", nargs="+", help="as each environment compares them, if not given"
    )
    chosen.add_argument("--environments", nargs="+", default=list(ENVIRONMENTS))
    chosen.add_argument("--seeds", type=int, default=5)
    chosen.add_argument("--jobs", type=int, default=2)
    chosen.add_argument("--minutes", type=float, help="start no further cell after so many minutes")
    chosen.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="key=value",
        help="settings changed for all cells, to try the study small",
    )
    folder = "folder in which the files of each training stay"
    chosen.add_argument("--keep", type=Path, help=folder)
    one = commands.add_parser("cell", help="run one cell here")
    one.add_argument("environment", choices=list(ENVIRONMENTS))
    one.add_argument("recipe")
    one.add_argument("seed", type=int)
    one.add_argument("overrides", nargs="*", metavar="key=value")
    one.add_argument("--keep", type=Path, help=folder)
    shown = commands.add_parser("table", help="write the tables and the picture")
    for command in (chosen, one, shown):
        command.add_argument("--results", type=Path, default=RESULTS)
    return parser


def main() -> int:
    """Run the command line and return the exit code."""
    return exit_code(
        partial(execute, arguments().parse_args()), "interrupted; the same command goes on"
    )


def execute(options: argparse.Namespace) -> int:
    """Execute the command line; return 1 where a cell failed.

    Raises:
        ConfigError: an environment, a recipe or a setting does not exist, or a cell is damaged.
    """
    if options.command == "run":
        cells = order(options.environments, options.recipes, options.seeds)
        failed = run(
            options.results, cells, options.jobs, options.minutes, options.set, options.keep
        )
        return int(failed > 0)
    if options.command == "cell":
        finish_cell(
            options.results,
            options.environment,
            options.recipe,
            options.seed,
            options.overrides,
            options.keep,
        )
    else:
        table(options.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
