"""Name the environments of the study, their recipes, and the settings of each run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import dialects, households
from experiential.config import Arm

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

_BY_TASK = (
    "methods.reflection.memory=bank", "methods.reflection.same_task=true",
    "extractor.enabled=true", "extractor.distill=false",  # for the bank
    "methods.reflection.temperature=0.3",  # as lessons about dialects have
    "methods.reflection.weight=1.0",  # as in the paper
)  # fmt: skip
_IMITATE = "methods.self_distill.weight=1.0"
_ALL_GUIDED = ("actor.guided=all", "actor.advantage=pooled")
VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "complementary-cool": ("complementary", ("extractor.temperature=0.3",)),
    "complementary-diverse": ("complementary", ("bank.retrieval.strategy=diverse",)),
    "complementary-kl": ("complementary", ("extractor.kl=0.3",)),
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
    "complementary-self-distill-full": ("complementary-self-distill", (_IMITATE,)),
    "erl-by-task": ("erl", _BY_TASK),
    "erl-no-reflection-full": ("erl-no-reflection", ("methods.reflection.weight=1.0",)),
    "grpo-fast": ("grpo", ("actor.optim.lr=3e-4",)),
    "grpo-named": ("grpo", ("env.kwargs.named=true",)),
    "grpo-named-fast": ("grpo", ("env.kwargs.named=true", "actor.optim.lr=3e-4")),
    "history-self-distill-full": (
        "complementary-self-distill",  # since history has no free episodes to compare with
        (
            _IMITATE,
            "extractor.agent=transcript",
            "extractor.train=false",
            "extractor.shared=true",
            "bank.options.text_limit=6000",
        ),
    ),
    "history-5": ("history", ("bank.retrieval.k=5",)),
    "static-online-all-guided": ("static-online", _ALL_GUIDED),
    "static-online-cold": ("static-online", ("extractor.temperature=0.1",)),
    "static-online-dialect-rule": (
        "static-online",
        ("extractor.agent=benchmarks.earned_rules:dialect",),
    ),
    "static-online-cool": ("static-online", ("extractor.temperature=0.3",)),
    "static-online-home-rule": ("static-online", ("extractor.agent=benchmarks.earned_rules:home",)),
    "static-online-lake-rule": ("static-online", ("extractor.agent=benchmarks.earned_rules:lake",)),
    "static-online-recent": ("static-online", ("bank.retrieval.strategy=recent",)),
    "static-online-self-distill-full": (
        "complementary-self-distill",
        (_IMITATE, "extractor.train=false"),
    ),
    "static-online-sparing": ("static-online", ("extractor.agent=benchmarks.sparing:Sparing",)),
    "static-online-vault-rule": (
        "static-online",
        ("extractor.agent=benchmarks.earned_rules:vault",),
    ),
    "template-5": ("template", ("bank.retrieval.k=5",)),
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
UNTRAINED_VARIANTS = ("static-online-recent", "static-online-sparing")
"""Compared with ``static-online``: other ways to use an untrained extractor."""
COMPLEMENTARY = ("complementary", "complementary-all-guided")
"""What others are compared with: the first of these that was played."""
TRAINED = (
    COMPLEMENTARY,
    ("complementary-cool",),
    ("complementary-kl",),
    ("complementary-no-kl",),
    ("complementary-no-kl-cool",),
    ("complementary-self-distill-full",),
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
        by_seed: further settings of the runs with a training seed, such as worlds of its own.
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
    by_seed: Callable[[int], tuple[str, ...]] = lambda _: ()


_IMITATION = (
    "grpo", "complementary", "complementary-self-distill-full", "static-online-self-distill-full",
    "history-self-distill-full",
)  # fmt: skip
"""Compared without a bank, where weights can learn the worlds."""
_ANY_WORLD = (
    "env.visits=1", "bank.retrieval.floor=0.0", "bank.retrieval.tie=0.001",
    "bank.retrieval.strategy=evidence", "bank.options.retrieval.same_task=false",
)  # fmt: skip
"""Under a law an entry about any world may help: outcomes tell which."""
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
            "env.eval={split: eval, worlds: 120}", "bank.embedder=hashing", *_ANY_WORLD,
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
        "complementary", "template", "history",
        *(one for one in ABLATIONS if one != "complementary-kl"),  # this model has a penalty of 0.1
    ),
    beside=("vault-law",),
)  # fmt: skip
# So long that weights can learn the law: on dev, imitation of guided episodes began to help without
# the bank after 130 steps.
ENVIRONMENTS["vault-law-long"] = replace(
    ENVIRONMENTS["vault-law-note"],
    training=(*ENVIRONMENTS["vault-law-note"].training, "run.steps=240"),
    curve=(
        "eval.every=24", "eval.worlds=60", "eval.visits=1", "eval.arms=[off, frozen]",
    ),
    recipes=(
        *_IMITATION, "complementary-self-distill", "static-online", "static-online-cool", "history",
    ),
    beside=(),
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
# The same with a model that avoids what a list rules out and keeps such lists, and one lesson for
# each visit, as in the evaluation: of a group's plays one is distilled.
ENVIRONMENTS["vault-blind-lists"] = replace(
    ENVIRONMENTS["vault-blind"],
    training=(
        *ENVIRONMENTS["vault-blind"].training, "model.name=benchmarks/models/vaults",
        "extractor.per_group=1",
        # At the profile's rate lists soon ceased to grow; in 144 steps they ended (on dev).
        "extractor.batch_size=64", "extractor.optim.lr=2e-4",
    ),
    recipes=(
        *ENVIRONMENTS["vault-blind"].recipes,
        "history-5", "template-5",  # all visits before, so that nothing need be accumulated
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
    recipes=(
        *EARNED_RECIPES, "static-online-lake-rule", "static-online-sparing",
        "erl", "erl-no-reflection",
    ),
)  # fmt: skip
# The same with a model that reads well and mostly writes what is true of every lake. Of a group's
# plays one is distilled, so that a visit leaves one lesson, as in the evaluation.
ENVIRONMENTS["lake-words-habits"] = replace(
    ENVIRONMENTS["lake-words"],
    training=(
        *ENVIRONMENTS["lake-words"].training, "model.name=benchmarks/models/habits",
        "extractor.per_group=1", "run.steps=144",
        # With batches of 16, or at 4e-4, it learned to write pairs and forgot which (on dev).
        "extractor.batch_size=64", "extractor.optim.lr=2e-4",
    ),
    curve=("eval.every=72", "eval.worlds=20", "eval.visits=4"),
    recipes=(
        *EARNED_RECIPES, "static-online-cold", "static-online-sparing", "static-online-lake-rule",
    ),
)  # fmt: skip
# As in vault-law, the words follow from the first word of a dialect's name: here the bank of the
# training knows something about dialects that it never met.
ENVIRONMENTS["lake-words-law"] = replace(
    ENVIRONMENTS["lake-words"],
    training=(
        *ENVIRONMENTS["lake-words"].training, "env.kwargs.law=first",
        "env.train={split: train, dialects: 318}", "env.eval={split: eval, dialects: 120}",
        *_ANY_WORLD,
    ),
    curve=("eval.every=24", "eval.worlds=60", "eval.visits=1", "eval.arms=[off, frozen]"),
    final=("eval.worlds=120", "eval.visits=2"),
    recipes=(*EARNED_RECIPES, "grpo-named", "grpo-named-fast"),
    arm="frozen",
)  # fmt: skip


def _own(kind: str, number: int, seed: int) -> tuple[str, ...]:
    """Return the settings by which a run trains in a few worlds of its own and ends in them."""
    worlds = f"{{split: train, {kind}: {number}, skip: {number * seed}}}"
    return f"env.train={worlds}", f"env.eval={worlds}"


# A few dialects that training can learn by heart, each seed its own, as the observation names them.
# A win without knowing the words is rare, as in Experiential RL: five moves, and no lake that needs
# more.
ENVIRONMENTS["lake-words-few"] = replace(
    ENVIRONMENTS["lake-words"],
    training=(
        *ENVIRONMENTS["lake-words"].training, "env.kwargs.budget=5", "env.max_turns=5",
        "env.kwargs.named=true", "run.steps=96",
        "actor.optim.lr=1e-4",  # at 3e-4 one reflector of three came to repeat a word
        "bank.retrieval.strategy=evidence",  # as in lake-words-seen
    ),
    curve=("eval.every=12", "eval.worlds=4", "eval.visits=16", "eval.arms=[off, frozen]"),
    final=("eval.worlds=4", "eval.visits=32"),
    recipes=(
        "grpo", "grpo-fast", "erl", "erl-by-task", "erl-no-reflection", "erl-no-reflection-full",
        "complementary", "complementary-self-distill-full", "static-online",
        "static-online-self-distill-full",
    ),
    arm="frozen",
    by_seed=partial(_own, "dialects", 4),
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
    recipes=(
        *ENVIRONMENTS["lake-words"].recipes, "static-online-recent", "grpo-named",
        "grpo-named-fast",
    ),
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
# Both policies with drafts, from the model with a habit, whose actor can read from the start; as
# many episodes as in lake-words-habits.
ENVIRONMENTS["lake-words-habits-drafts"] = replace(
    ENVIRONMENTS["lake-words-drafts"],
    training=(
        *ENVIRONMENTS["lake-words-drafts"].training, "model.name=benchmarks/models/habits",
        "run.steps=96",
    ),
    curve=("eval.every=48", "eval.worlds=20", "eval.visits=4"),
    recipes=("complementary-all-guided", "exp-only", "static-online-all-guided"),
    beside=("lake-words-habits",),
    reader=None,
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
# Dialects for that model, told in sentences, after a cold start: it does not read a grid.
ENVIRONMENTS["lake-words-smollm2"] = Setup(
    training=(
        *dialects.SETTINGS, "env.visits=4", "actor.groups=8", "actor.group_size=8",
        "actor.mini_batches=1", "actor.epochs=1",
        "actor.optim.lr=1e-4",  # as in households
        "extractor.per_group=1", "extractor.batch_size=8", "extractor.optim.lr=3e-4",
        "extractor.max_tokens=80", "bank.embedder=hashing",
        "bank.retrieval.strategy=recent", "bank.retrieval.floor=-1.0",
        "bank.options.retrieval.same_task=true", "run.steps=24",
    ),
    curve=("eval.every=24", "eval.worlds=20", "eval.visits=4", "eval.temperature=1.0"),
    final=("eval.worlds=40", "eval.visits=4"),
    recipes=(
        "grpo", "static-online", "complementary", "template", "history",
        "static-online-dialect-rule", "erl", "erl-no-reflection",
    ),
    profile="small",
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
# Two households for each seed, its own, and longer training, so that weights can learn them.
ENVIRONMENTS["alfworld-homes-few"] = replace(
    ENVIRONMENTS["alfworld-homes-seen"],
    training=(
        *ENVIRONMENTS["alfworld-homes-seen"].training, "actor.optim.lr=3e-4", "run.steps=36",
    ),
    curve=(
        "eval.every=12", "eval.worlds=2", "eval.visits=12", "eval.arms=[off, frozen]",
        "eval.temperature=1.0",
    ),
    final=("eval.worlds=2", "eval.visits=32"),
    recipes=_IMITATION,
    by_seed=partial(_own, "households", 2),
)  # fmt: skip
# With fewer kinds of objects a list is soon complete, so that guided episodes are far ahead.
ENVIRONMENTS["alfworld-homes-few-objects"] = replace(
    ENVIRONMENTS["alfworld-homes-few"],
    training=(
        *ENVIRONMENTS["alfworld-homes-few"].training, "env.kwargs.objects=4", "run.steps=72",
        "actor.mini_batches=4",
    ),
    curve=(
        "eval.every=12", "eval.worlds=4", "eval.visits=8", "eval.arms=[off, frozen]",
        "eval.temperature=1.0",
    ),
    final=("eval.worlds=4", "eval.visits=32"),
    by_seed=partial(_own, "households", 4),
)  # fmt: skip
# As in vault-law, where things are follows from the first word of a household's name. More
# households are met, with fewer episodes in each.
ENVIRONMENTS["alfworld-homes-law"] = replace(
    ENVIRONMENTS["alfworld-homes"],
    training=(
        *ENVIRONMENTS["alfworld-homes"].training, "env.kwargs.law=first",
        "env.train={split: train, households: 200}", "env.eval={split: eval, households: 60}",
        "actor.groups=8", "actor.group_size=4", "run.steps=24", *_ANY_WORLD,
    ),
    curve=(
        "eval.every=24", "eval.worlds=30", "eval.visits=1", "eval.arms=[off, frozen]",
        "eval.temperature=1.0",
    ),
    final=("eval.worlds=60", "eval.visits=2"),
    arm="frozen",
)  # fmt: skip
# Houses of a street are alike, and names share nothing but the street. With four kinds of objects
# four visits find where all are, so that the bank of the training knows the street.
ENVIRONMENTS["alfworld-homes-street"] = replace(
    ENVIRONMENTS["alfworld-homes-law"],
    training=(
        *ENVIRONMENTS["alfworld-homes-law"].training, "env.kwargs.law=street",
        "env.kwargs.objects=4", "env.visits=4",
        "bank.retrieval.floor=0.79",  # entries about the street have .79 to .88, others .68 to .82
    ),
    recipes=(*ENVIRONMENTS["alfworld-homes-law"].recipes, "complementary-kl"),
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
FUNCTIONS = (
    "template", "template-5", "template-all-guided", "history", "history-5",
    "history-self-distill-full",
)  # fmt: skip
"""Recipes whose entries a function writes that knows no game."""
RULES = (
    "static-online-dialect-rule", "static-online-home-rule", "static-online-lake-rule",
    "static-online-vault-rule",
)  # fmt: skip
"""Recipes whose entries a function writes that knows the game."""
WITHOUT_EXTRACTOR = (*FUNCTIONS, *RULES)
"""The baselines of an environment without others."""
UNTRAINED = (
    "static-online", "static-online-all-guided", "static-online-cool", "static-online-cold",
    "static-online-self-distill-full", "static-online-sparing",
)  # fmt: skip
"""Recipes whose entries the model writes, untrained."""
WRITERS = (*UNTRAINED, *WITHOUT_EXTRACTOR)
"""Recipes that differ from ``complementary`` in who writes the entries."""
DEMONSTRATIONS = {"evolver": 300}
"""Recipes with a cold start, and how many demonstrations each is given."""


def overrides_of(environment: str, recipe: str, seed: int) -> list[str]:
    """Return the settings of a training run of the study."""
    setup = ENVIRONMENTS[environment]
    return [
        *ALL,
        f"seed={seed}",
        *setup.training,
        *setup.by_seed(seed),
        *setup.curve,
        *recipe_of(recipe)[1],
    ]


def recipe_of(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the recipe that a name of the study stands for, and the settings changed in it."""
    return VARIANTS.get(name, (name, ()))


def base_of(environment: str, recipe: str) -> str:
    """Return the recipe that a cell loads, with the model's profile of its environment."""
    profile = ENVIRONMENTS[environment].profile
    return recipe_of(recipe)[0] + (f"+{profile}" if profile else "")
