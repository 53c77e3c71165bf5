"""Define the tree of settings, read from YAML and `key=value` overrides.

Every unknown key is an error that names the nearest one.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

SAME_AS = {
    "extractor_model": "model",
    "extractor.optim": "actor.optim",
    "cluster.extractor": "cluster.actor",
}
"""Sections of the extractor that hold only what differs from a section of the actor."""

Arm = Literal["off", "on", "frozen", "shuffled", "placebo"]
"""One way to evaluate: which experience the actor is shown (docs/evaluation.md)."""
Advice = Literal["system", "observation"]
"""Place of the advice in the actor's prompt."""
Ratio = Literal["token", "sequence"]
"""What an importance ratio is taken over."""
BonusKind = Literal["relative", "tanh", "sigmoid", "asymmetric", "log"]
"""How an entropy reduction becomes a bonus: `rewards.entropy_bonus`."""


class Settings(BaseModel):
    """Provide the base of all settings: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Options(Settings):
    """Provide the base of the options of one part, which the reference lists apart."""


class WorldChange(Settings):
    """Change the training worlds from step ``step`` on.

    There are then ``worlds`` worlds, and the first ``changed`` of them use era ``era``.
    """

    step: int = Field(ge=0)
    worlds: int = Field(gt=0)
    changed: int = Field(default=0, ge=0)
    era: int = 1


class EnvSettings(Settings):
    """Choose the environment, and its tasks for training and for evaluation."""

    id: str = "experiential/Vault-v0"
    kwargs: dict[str, Any] = Field(
        default={}, description="passed to gymnasium.make, in training and evaluation"
    )
    train: dict[str, Any] = Field(
        default={"split": "train"}, description="added to kwargs in training"
    )
    eval: dict[str, Any] = Field(
        default={"split": "eval"}, description="added to kwargs in evaluation"
    )
    max_turns: int = Field(
        default=30, gt=0, description="turns after which an episode is truncated"
    )
    reward_range: tuple[float, float] | None = Field(
        default=None,
        description=(
            "rewards of a step outside it fail the episode, with the reason; None takes any"
            " finite one"
        ),
    )
    feedback: Literal["as_is", "shown", "hidden", "reflector"] = Field(
        default="as_is",
        description=(
            "the environment's comment on each move: as_is leaves it to the environment; shown puts"
            " it in every observation, hidden in none, for actor and reflector alike; reflector"
            " shows it to the reflector alone, as the ERL paper does: not a fair comparison"
        ),
    )
    visits: int = Field(
        default=1,
        gt=0,
        description="training steps in a row that meet the same worlds, if the env lists worlds",
    )
    changes: tuple[WorldChange, ...] = Field(
        default=(), description="worlds added or changed while training runs"
    )


class LoraSettings(Options):
    """Configure low-rank adapters over a frozen base."""

    rank: int = Field(default=8, gt=0)
    alpha: int = Field(default=16, gt=0)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="layers that adapters are put on",
    )


class ModelSettings(Settings):
    """Choose the weights, their device and their precision."""

    name: str = Field(
        default="tiny", description="tiny, smollm2, a folder in Hugging Face format, or a hub name"
    )
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = Field(default="auto", description="auto, cpu, cuda, cuda:1 ...")
    lora: LoraSettings | None = Field(
        default=None, description="low-rank adapters over frozen weights; None trains the weights"
    )
    prompts: str = Field(
        default="auto", description="template set: full, brief, or auto (brief for the tiny model)"
    )
    prefix_cache_tokens: int = Field(
        default=65536, ge=0, description="tokens of key-value cache kept for reuse"
    )
    threads: int = Field(default=0, ge=0, description="torch threads; 0 leaves torch's own choice")
    gradient_checkpointing: bool = Field(
        default=False, description="compute activations again going backward: less memory, slower"
    )


class OptimSettings(Options):
    """Configure AdamW with a constant rate (appendix C.2)."""

    lr: float = Field(default=1e-6, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0.0)
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    tokens_per_micro_batch: int = Field(
        default=16384, gt=0, description="gradient accumulation unit, padded tokens"
    )


class ActorOptions(Options):
    """Configure the prompts and the sampling of the acting agent."""

    history: int | None = Field(
        default=None, ge=0, description="past turns kept in the prompt; None keeps all"
    )
    keep_first: bool = Field(
        default=True, description="keep the first observation when history drops turns"
    )
    advice: Advice = Field(
        default="system", description="in the system message, or behind the first observation"
    )
    instruction: str = Field(
        default="",
        description="what the actor is told about the environment; not with the brief prompt set",
    )
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="nucleus sampling")


class ActorSettings(Settings):
    """Configure the acting policy and its learning (eq. 4 and 5)."""

    train: bool = True
    group_size: int = Field(default=8, gt=0, description="K: episodes per task and seed")
    groups: int = Field(default=8, gt=0, description="tasks per step; groups x group_size episodes")
    guided: Literal["half", "all", "none"] = Field(
        default="half", description="which members of a group may see the bank"
    )
    advantage: Literal["split", "pooled"] = Field(
        default="split",
        description="advantages within the halves of a group (eq. 5), or within all of it",
    )
    estimator: str = Field(
        default="grpo",
        description="grpo, dr_grpo, rloo, reinforce++, or one of yours: "
        "how rewards become advantages",
    )
    loss: str = Field(
        default="ppo", description="policy loss: ppo, cispo, or one of yours (docs/extending.md)"
    )
    aggregate: Literal["sequence", "token", "constant"] = Field(
        default="sequence",
        description=(
            "mean over the tokens of each trajectory; every token of the batch equally; sum over"
            " length_norm"
        ),
    )
    length_norm: int = Field(
        default=256,
        gt=0,
        description="tokens that a trajectory's sum is divided by, with aggregate: constant",
    )
    drop_constant: bool = Field(
        default=False,
        description="dynamic filtering: groups (or halves) with equal rewards take no weight",
    )
    credit: Literal["trajectory", "turn"] = Field(
        default="trajectory",
        description=(
            "one advantage for a whole trajectory, or one per turn from the rewards that still"
            " follow it"
        ),
    )
    discount: float = Field(
        default=1.0, gt=0.0, le=1.0, description="of later rewards, with credit: turn"
    )
    clip_low: float = Field(default=0.2, gt=0.0)
    clip_high: float = Field(default=0.2, gt=0.0)
    ratio: Ratio = "token"
    kl: float = Field(
        default=0.0, ge=0.0, description="weight of KL(policy || reference), k3 estimator"
    )
    epochs: int = Field(default=1, gt=0)
    mini_batches: int = Field(default=1, gt=0, description="optimiser steps per epoch")
    temperature: float = Field(default=1.0, gt=0.0)
    max_tokens: int = Field(default=64, gt=0)
    constrain: bool = Field(
        default=True,
        description="restrict answers to the admissible actions when the env names them",
    )
    search_and_ask: int = Field(
        default=0,
        ge=0,
        description="calls of search_and_ask per guided episode; 0 leaves the tool out",
    )
    search_experience: int = Field(
        default=0,
        ge=0,
        description=(
            "calls of EvolveR's action per guided episode, which is then the only way to the bank;"
            " 0 leaves it out"
        ),
    )
    warmup_steps: int = Field(default=0, ge=0, description="steps before the bank is used")
    optim: OptimSettings = Field(default=OptimSettings(lr=3e-4), description="options of AdamW")
    options: ActorOptions = Field(
        default=ActorOptions(), description="further options of ActorAgent"
    )


class ExtractorOptions(Options):
    """Configure the sampling of the extractor, its buffer of samples and its loss."""

    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="nucleus sampling")
    buffer_size: int = Field(default=512, gt=0, description="samples that may wait")
    cooldown: int = Field(default=1, description="delta of eq. 7, in training steps")
    decay: float = Field(default=0.5, description="alpha of eq. 7")
    malformed_share: float = Field(
        default=0.25, description="share of a batch that malformed responses may fill"
    )
    malformed_reward: float = Field(default=-1.0, description="reward of a malformed response")
    eps_low: float = Field(default=0.1, description="the importance ratio is at least 1 - eps_low")
    eps_high: float = Field(default=0.1, description="the importance ratio is at most 1 + eps_high")


class ExtractorSettings(Settings):
    """Configure the distilling policy and its learning (eq. 3 and 7)."""

    enabled: bool = True
    agent: str = Field(
        default="default",
        description=(
            "who distils: default, an entry point of experiential.extractors, or module:attribute"
        ),
    )
    train: bool = True
    distill: bool = Field(
        default=True,
        description="distil what is played; false keeps the bank as it was when training began",
    )
    shared: bool = Field(
        default=False, description="one set of weights, and one optimiser, for actor and extractor"
    )
    reward: Literal["direct", "relative"] = Field(
        default="direct",
        description=(
            "outcome of the episode that used an entry, or its gain over the mean of the group's"
            " free members"
        ),
    )
    batch_size: int = Field(default=64, gt=0, description="|B_phi|: samples per optimiser step")
    updates_per_step: int = Field(
        default=1,
        gt=0,
        description="optimiser steps per training step, at most: batches the buffer fills",
    )
    max_staleness: int = Field(
        default=64,
        ge=0,
        description="extractor updates after which a generation is too old to train on",
    )
    kl: float = Field(
        default=0.0,
        ge=0.0,
        description="weight of the KL divergence from the extractor's first weights",
    )
    max_lag: int = Field(
        default=2,
        ge=0,
        description="training steps that distillation may fall behind before rollouts wait for it",
    )
    max_operations: int = Field(default=3, gt=0)
    principles: bool = Field(
        default=False,
        description="distil guiding and cautionary principles with triples, as EvolveR does",
    )
    temperature: float = Field(default=1.0, gt=0.0)
    max_tokens: int = Field(default=96, gt=0)
    optim: OptimSettings = Field(default=OptimSettings(lr=3e-4), description="options of AdamW")
    options: ExtractorOptions = Field(
        default=ExtractorOptions(),
        description="further options of ExtractorTrack and ExtractorAgent",
    )


class RetrievalSettings(Settings):
    """Configure retrieval, from queries to hits (section 3.2.2, eq. 6)."""

    k: int = Field(default=1, gt=0)
    strategy: str = Field(
        default="diverse",
        description=(
            "diverse (eq. 6), nearest, utility, random, an entry point or module:attribute"
        ),
    )
    pool: int = Field(
        default=4, gt=0, description="N: candidate sets of size K that are oversampled"
    )
    diversity: float = Field(default=0.4, ge=0.0, description="lambda of eq. 6")
    floor: float = Field(
        default=0.3, ge=-1.0, le=1.0, description="cosine below which nothing is returned"
    )
    tie: float = Field(
        default=0.001,
        ge=0.0,
        description="cosines this close share a rank: eq. 6 then chooses by use",
    )


class BankSettings(Settings):
    """Configure the experience bank and its manager."""

    path: str | None = Field(
        default=None, description="an existing bank folder to start from; None starts empty"
    )
    namespace: str = "default"
    embedder: str | None = Field(
        default=None,
        description=(
            "'hashing', an entry point, module:attribute, a sentence-transformers name or folder;"
            " None is the default model"
        ),
    )
    store: str | None = Field(
        default=None,
        description=(
            "index of a large bank: 'chroma', address of a Chroma server, 'exact' (in memory), an"
            " entry point or module:attribute; None keeps it where it was, at first 'chroma'"
        ),
    )
    retrieval: RetrievalSettings = RetrievalSettings()
    text_limit: int = Field(
        default=2000, gt=0, description="characters that the text of an entry may have"
    )
    merge_every: int = Field(
        default=5, ge=0, description="actor updates between merges; 0 never merges"
    )
    dedupe_every: int = Field(
        default=0, ge=0, description="actor updates between two-level deduplications; 0 never does"
    )
    prune_every: int = Field(
        default=0, ge=0, description="actor updates between prunings by score; 0 never prunes"
    )
    trust_after: int = Field(
        default=0,
        ge=0,
        description=(
            "M: independent tasks on which an entry must have helped to be trusted; 0 trusts every"
            " entry"
        ),
    )
    options: dict[str, Any] = Field(
        default={},
        description="further options of the manager, as bank.options.cap=500; "
        "docs/bank.md lists them",
    )


class PolicyClusterSettings(Settings):
    """Configure one policy's share of a cluster: its DeepSpeed ranks and its vLLM engines."""

    nodes: int = Field(default=1, gt=0, description="nodes that train this policy")
    gpus_per_node: int = Field(
        default=1, gt=0, description="DeepSpeed ranks on each of them, one GPU each"
    )
    engines: int = Field(default=1, gt=0, description="vLLM engines that generate")
    tensor_parallel: int = Field(default=1, gt=0, description="GPUs of each engine")
    zero_stage: Literal[0, 1, 2, 3] = 2
    batch_size: int = Field(
        default=64,
        gt=0,
        description=(
            "sequences of one optimiser step; short ones are filled up with empty sequences"
        ),
    )
    micro_batch_size: int = Field(
        default=4, gt=0, description="sequences that one rank computes at once"
    )
    max_length: int = Field(
        default=4096, gt=0, description="tokens of prompt and response together"
    )
    gpu_memory: float = Field(
        default=0.85, gt=0.0, le=1.0, description="share of a GPU's memory that an engine takes"
    )
    attention: str = Field(
        default="flash_attention_2",
        description="transformers' attention in training: flash_attention_2, sdpa, eager",
    )
    gradient_checkpointing: bool = False
    offload_optimizer: bool = Field(
        default=False, description="keep the optimiser's state in the memory of the machine"
    )
    enforce_eager: bool = Field(
        default=False, description="no CUDA graphs in vLLM: slower, starts sooner"
    )


class ClusterSettings(Settings):
    """Configure the cluster engine: Ray, vLLM and DeepSpeed (`runtime: openrlhf`)."""

    address: str | None = Field(
        default=None, description="Ray cluster to join, e.g. auto; None starts Ray on this machine"
    )
    gpus: int | None = Field(
        default=None, ge=0, description="GPUs that a Ray started here offers; None counts them"
    )
    gpu_gb: float | None = Field(
        default=None,
        gt=0.0,
        description="memory of a GPU in 1e9 bytes, to check the placement by; None asks nvidia-smi",
    )
    share_gpus: bool = Field(
        default=False,
        description="policies and engines take turns on the same GPUs of one node, by sleeping",
    )
    actor: PolicyClusterSettings = PolicyClusterSettings()
    extractor: PolicyClusterSettings = PolicyClusterSettings()
    env_workers: int = Field(
        default=0,
        ge=0,
        description="Ray actors that hold the environments; 0 keeps them in the trainer",
    )
    remote_bank: bool = Field(
        default=False, description="the bank's one writer as a Ray actor, not inside the trainer"
    )
    start_timeout: float = Field(
        default=1800.0, gt=0.0, description="seconds that engines and ranks may take to start"
    )
    call_timeout: float = Field(
        default=900.0, gt=0.0, description="seconds that any remote call may take"
    )
    restarts: int = Field(
        default=2,
        ge=0,
        description="times that each engine, rank group and worker is started again",
    )


class ColdStartSettings(Options):
    """Configure supervised training on demonstrations before reinforcement learning (EvolveR)."""

    demonstrations: str = Field(
        description=(
            "JSON Lines of chats: {messages: [{role, content}, ...]}; loss on what the assistant"
            " says"
        )
    )
    epochs: int = Field(default=1, gt=0)
    batch_size: int = Field(default=16, gt=0, description="chats per optimiser step")


class PrepareSettings(Options):
    """Fill the bank before training begins, by the weights of then."""

    steps: int = Field(default=16, ge=0, description="steps played and distilled; 0 does nothing")


class CriticSettings(Options):
    """Let the actor accept, refine or reject what is retrieved (appendix B.1)."""


class EntropyBonusSettings(Options):
    """Configure a bonus for entries that lower the actor's entropy over the task (appendix B.2)."""

    kind: BonusKind = "relative"
    weight: float = Field(default=0.5, gt=0.0, description="w")


class SelfDistillSettings(Options):
    """Imitate guided episodes that beat the free ones (section 4.3).

    The imitating policy does not see the experience that guided them.
    """

    weight: float = Field(
        default=0.1, gt=0.0, description="of the imitation loss beside the actor's own"
    )
    every: int = Field(default=1, gt=0, description="training steps between imitations")
    guard: float = Field(
        default=0.1,
        gt=0.0,
        le=1.0,
        description=(
            "pause while the running success of free episodes is this far below its best: collapse"
        ),
    )


class ReflectionSettings(Options):
    """Configure second attempts, with a reflection, at tasks that the first did not solve.

    This is algorithm 2 of Experiential RL.
    """

    mode: Literal["reflect", "retry"] = Field(
        default="reflect",
        description=(
            "reflect: the actor's own reflection; retry: the raw first attempt and an instruction"
            " to do better"
        ),
    )
    threshold: float = Field(
        default=1.0,
        description="tau: lower returns are tried again; reflections that reach it are remembered",
    )
    memory: Literal["none", "private", "bank"] = Field(
        default="private",
        description=(
            "where reflections that passed are kept: nowhere; in one string, which the last"
            " overwrites; the bank"
        ),
    )
    internalise: Literal["sft", "reverse_kl", "none"] = Field(
        default="sft",
        description=(
            "second attempts with a reward: imitated without the reflection; or taught to the first"
            " attempt's tokens"
        ),
    )
    weight: float = Field(
        default=1.0, gt=0.0, description="of the internalisation beside the policy losses"
    )


FormatPart = Literal["think", "search_experience", "search_knowledge", "answer"]
"""What the format reward looks for in an episode's responses."""


class EvolverSettings(Options):
    """Reward the form of an episode's responses beside its outcome, as EvolveR does."""

    format_reward: float = Field(
        default=0.1,
        ge=0.0,
        description="weight of EvolveR's format reward, where the outcome's is 1; 0: none",
    )
    format_parts: tuple[FormatPart, ...] = Field(
        default=("think", "search_experience", "search_knowledge", "answer"),
        min_length=1,
        description=(
            "what a complete episode can hold here; leave out what the environment has no use for"
        ),
    )


class MethodSettings(Options):
    """Name the methods of a run that its settings ask for, each with its options.

    Further names are methods of yours, which read their options in `Run.experiment`.
    """

    model_config = ConfigDict(extra="allow")

    cold_start: ColdStartSettings | None = Field(
        default=None, description="supervised training before the first step"
    )
    prepare: PrepareSettings | None = Field(
        default=None, description="a bank that is filled before training"
    )
    critic: CriticSettings | None = Field(
        default=None, description="the actor judges what is retrieved (appendix B.1)"
    )
    entropy_bonus: EntropyBonusSettings | None = Field(
        default=None, description="a reward for entries that lower the actor's entropy"
    )
    self_distill: SelfDistillSettings | None = Field(
        default=None, description="imitation of guided episodes that beat the free ones"
    )
    reflection: ReflectionSettings | None = Field(
        default=None, description="second attempts with a reflection"
    )
    evolver: EvolverSettings | None = Field(
        default=None, description="a reward for the form of responses"
    )

    def outside(self) -> dict[str, Any]:
        """Return the options of methods from outside, by name."""
        return self.model_extra or {}


class EvalSettings(Settings):
    """Configure evaluation by visit on held-out worlds, weights frozen."""

    worlds: int = Field(default=40, gt=0)
    visits: int = Field(default=6, gt=0)
    every: int = Field(
        default=0,
        ge=0,
        description="training steps between evaluations; 0 evaluates before and after only",
    )
    before: bool = True
    after: bool = True
    temperature: float = Field(default=1.0, ge=0.0)
    seed: int = 10_000
    arms: tuple[Arm, ...] = Field(
        default=("off", "on"),
        min_length=1,
        description="what is played: off, on, frozen, shuffled, placebo",
    )

    @field_validator("arms", mode="before")
    @classmethod
    def _on_and_off_are_names(cls, arms: Any) -> Any:
        """Restore on and off, which YAML reads as true and false."""
        if not isinstance(arms, list | tuple):
            return arms
        names = {True: "on", False: "off"}
        return [names[arm] if isinstance(arm, bool) else arm for arm in cast("list[Any]", arms)]


class RunSettings(Settings):
    """Configure the length of the training and the files it writes."""

    steps: int = Field(default=40, ge=0)
    minutes: float | None = Field(
        default=None, gt=0.0, description="stop training after this many minutes"
    )
    checkpoint_every: int = Field(
        default=10, ge=0, description="steps between checkpoints; 0 keeps only the last"
    )
    ahead: int = Field(
        default=0,
        ge=0,
        description=(
            "steps that rollouts may run ahead of the actor's updates; more than 0 on a cluster"
            " keeps both busy"
        ),
    )
    drain: bool = Field(
        default=False,
        description=(
            "wait for the distillation queue at the end of each step; runs still differ a little"
        ),
    )
    trackers: tuple[str, ...] = Field(
        default=("tensorboard",),
        description=(
            "receivers of the run's events: tensorboard (if it is installed), an entry point of"
            " experiential.trackers, or module:attribute"
        ),
    )


class Experiment(Settings):
    """Define a run, with all its settings."""

    recipe: str = "complementary"
    seed: int = 0
    env: EnvSettings = EnvSettings()
    model: ModelSettings = ModelSettings()
    extractor_model: ModelSettings | None = Field(
        default=None, description="None starts from the actor's weights, trained apart"
    )
    actor: ActorSettings = ActorSettings()
    extractor: ExtractorSettings = ExtractorSettings()
    bank: BankSettings = BankSettings()
    eval: EvalSettings = EvalSettings()
    run: RunSettings = RunSettings()
    method: str | None = Field(
        default=None,
        description=(
            "policy_gradient, evolver, or one of yours; None is evolver if methods.evolver is"
            " there, else policy_gradient"
        ),
    )
    methods: MethodSettings = Field(
        default=MethodSettings(),
        description=(
            "what a run does beside its main method, by name, each with its options; null leaves"
            " one out"
        ),
    )
    runtime: str = Field(
        default="local",
        description="local: torch in this process; openrlhf: a Ray cluster; or one of yours",
    )
    cluster: ClusterSettings = ClusterSettings()

    @model_validator(mode="after")
    def _groups_can_be_split(self) -> Experiment:
        if self.actor.guided == "half" and self.actor.group_size < 2:
            raise ValueError(
                "Expected actor.group_size of at least 2 when actor.guided is half, got"
                f" {self.actor.group_size}"
            )
        return self

    @model_validator(mode="after")
    def _reflection_fits(self) -> Experiment:
        reflection = self.methods.reflection
        if reflection is None:
            return self
        if self.actor.guided != "none":
            raise ValueError(
                "Expected actor.guided=none with reflection, whose advice takes the bank's place,"
                f" got {self.actor.guided!r}"
            )
        if reflection.memory == "bank" and not self.extractor.enabled:
            raise ValueError(
                "Expected a bank with methods.reflection.memory=bank, got none; set"
                " extractor.enabled=true, extractor.distill=false"
            )
        return self

    @model_validator(mode="after")
    def _methods_fit_together(self) -> Experiment:
        """Refuse combinations that would silently do nothing."""
        actor, extractor, methods = self.actor, self.extractor, self.methods
        comparing = {
            "methods.self_distill": methods.self_distill is not None,
            "extractor.reward=relative": extractor.reward == "relative",
        }
        for name in (
            name for name, wanted in comparing.items() if wanted and actor.guided != "half"
        ):
            raise ValueError(
                f"Expected actor.guided=half with {name}, which compares with a group's free"
                f" members, got {actor.guided!r}"
            )
        if actor.search_and_ask and actor.search_experience:
            raise ValueError(
                "Expected actor.search_and_ask or actor.search_experience, got both; set one of"
                " them to 0"
            )
        if methods.critic is not None and not extractor.enabled:
            raise ValueError(
                "Expected extractor.enabled with methods.critic, which judges what the bank gives,"
                " got no bank"
            )
        if extractor.shared and self.extractor_model is not None:
            raise ValueError(
                "Expected extractor_model to be left out with extractor.shared, got both; they"
                " would be two models"
            )
        if extractor.train and not extractor.distill:
            raise ValueError(
                "Expected extractor.train=false with extractor.distill=false, which writes nothing"
                " that could be learnt from"
            )
        if self.runtime == "openrlhf" and (extractor.shared or methods.entropy_bonus is not None):
            raise ValueError(
                "Expected runtime=local with extractor.shared or methods.entropy_bonus, which"
                " clusters lack, got openrlhf"
            )
        return self
