"""Define the tree of settings, read from YAML and `key=value` overrides.

Every unknown key is an error that names the nearest one.
"""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

SAME_AS = {
    "extractor_model": "model",
    "extractor.optim": "actor.optim",
    "cluster.extractor": "cluster.actor",
}
"""Sections of the extractor that hold only what differs from a section of the actor."""

BankArm = Literal["off", "on", "frozen", "shuffled", "placebo"]
"""One way to evaluate: which experience of its bank the actor is shown (docs/evaluation.md)."""
Baseline = Literal[
    "random",
    "history-1",
    "history-2",
    "history-3",
    "template",
    "best-of-2",
    "best-of-4",
    "best-of-8",
]
"""A baseline that any actor can be evaluated with, with a bank or without."""
Arm = Literal[BankArm, Baseline]
"""One way to evaluate."""
Advice = Literal["system", "observation"]
"""Place of the advice in the actor's prompt."""
Ratio = Literal["token", "sequence", "sequence_mean"]
"""What an importance ratio is taken over: a token, the product or the geometric mean of many."""
Correction = Literal["none", "token", "sequence"]
"""What an importance weight is taken over."""
BonusKind = Literal["relative", "tanh", "sigmoid", "asymmetric", "log"]
"""How an entropy reduction becomes a bonus: `rewards.entropy_bonus`."""


_EVIDENCE = "evidence decides what is shown, with nothing to set; leave it out (docs/bank.md)"
_STATES = "prefix_cache_gb says how much memory, by default a tenth of what is free; leave it out"
REMOVED = {
    "bank.trust_after": _EVIDENCE,
    "bank.provisional_share": _EVIDENCE,
    "bank.chroma": "it is bank.store now",
    "bank.text_limit": "it is bank.options.text_limit now",
    "bank.retrieval.diversity": "it is bank.options.retrieval.diversity now",
    "actor.length_norm": "it is actor.options.length_norm now",
    "actor.discount": "it is actor.options.discount now",
    "actor.correction_cap": "it is actor.options.correction_cap now",
    "extractor.principles": "it is extractor.options.principles now",
    "cluster.actor.enforce_eager": "it is cluster.actor.vllm.enforce_eager now",
    "cluster.extractor.enforce_eager": "it is cluster.extractor.vllm.enforce_eager now",
    "model.prefix_cache_tokens": _STATES,
    "extractor_model.prefix_cache_tokens": _STATES,
}
"""What replaced settings that are gone, in words."""


class Settings(BaseModel):
    """Provide the base of all settings: immutable, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Options(Settings):
    """Provide the base of the options of one part, which the reference lists apart."""


class WorldChange(Settings):
    """Change the training worlds from step ``step`` on.

    There are then ``worlds`` worlds, and the first ``changed`` of them use era ``era``.
    """

    step: NonNegativeInt
    worlds: PositiveInt
    changed: NonNegativeInt = 0
    era: int = 1


class TextSettings(Options):
    """Wrap an environment whose observations or actions are not text in `TextObservation`."""

    instruction: str = ""
    """the task in words; empty takes the environment's own, or its id"""
    actions: list[str] | dict[str, Any] | None = None
    """names for the actions of a Discrete space, or names with the action that each stands for"""
    render: str | None = None
    """module:attribute of a function of observation and info that returns text; None shows the
    values, or what render_mode: ansi (in env.kwargs) renders"""
    success: float | str | None = None
    """return from which on an episode is a success, or module:attribute of a function of its
    Trajectory; None leaves that to the environment"""


class EnvSettings(Settings):
    """Choose the environment, and its tasks for training and for evaluation."""

    id: str = "experiential/Vault-v0"
    """a recipe file must set it, or extend an environment profile that does"""
    kwargs: dict[str, Any] = {}
    """passed to gymnasium.make, in training and evaluation"""
    train: dict[str, Any] = {}
    """added to kwargs in training"""
    eval: dict[str, Any] = {}
    """added to kwargs in evaluation"""
    max_turns: PositiveInt = 30
    """turns after which an episode is truncated"""
    text: TextSettings | None = None
    """wrapper of an environment without text; {} shows its values and numbers its actions"""
    reward_range: tuple[float, float] | None = None
    """rewards of a step outside it fail the episode, with the reason; None takes any finite one"""
    feedback: Literal["as_is", "shown", "hidden", "reflector"] = "as_is"
    """the comment on each move: as_is leaves it to the environment; shown puts it in every
    observation, hidden in none; reflector shows it to the reflector alone (no fair comparison)"""
    visits: PositiveInt = 1
    """training steps in a row that meet the same worlds, if the env lists worlds"""
    changes: tuple[WorldChange, ...] = ()
    """worlds added or changed while training runs"""


class LoraSettings(Options):
    """Configure low-rank adapters over a frozen base."""

    rank: PositiveInt = 8
    alpha: PositiveInt = 16
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
    )
    """layers that adapters are put on"""


class ServerSettings(Options):
    """Let a server answer, or another backend, in place of weights that are loaded here."""

    backend: str = "openai"
    """openai, local, vllm, an entry point of experiential.llms, or module:attribute"""
    url: str | None = None
    """address of the server, mostly ending in /v1; None leaves it to the backend"""
    key_env: str | None = None
    """environment variable that holds the key; None leaves it to the backend (OPENAI_API_KEY)"""
    options: dict[str, Any] = {}
    """passed to the backend, as options.timeout=20"""

    @model_validator(mode="after")
    def _holds_no_secret(self) -> ServerSettings:
        """Refuse a key, which would stand in the files of a run."""
        if "api_key" in self.options or "@" in (self.url or "").partition("://")[2].split("/")[0]:
            raise ValueError(
                "Expected the key of a server in an environment variable that server.key_env"
                " names, got it in the settings, which are written to files"
            )
        return self


class ModelSettings(Settings):
    """Choose the weights, their device and their precision."""

    name: str = "tiny"
    """tiny, smollm2, a folder in Hugging Face format (weights, or a LoRA adapter to be added to
    its base), a hub name, or the name at the server; a recipe file must say it, or extend a model
    profile that does"""
    server: ServerSettings | None = None
    """server that answers in place of weights loaded here; needs runtime: frozen"""
    generator: Literal["engine", "vllm"] = "engine"
    """generates from weights loaded here: this package's engine, or vLLM in the same process"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """precision of generating and frozen weights; auto: bfloat16 if it is faster; trained
    weights keep a float32 master copy"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1 ..."""
    lora: LoraSettings | None = None
    """low-rank adapters over frozen weights; None trains the weights"""
    prompts: str = "auto"
    """template set: full, brief, short (brief with answers under a schema), opened (brief with the
    first observation in each record, for grids), or auto (of a model in the folder of the run that
    trained it that run's, brief for the tiny model, else full)"""
    prefix_cache_gb: float | None = Field(default=None, ge=0)
    """memory for key-value states kept for reuse; None takes a tenth of the free memory"""
    threads: NonNegativeInt = 0
    """torch threads; 0 leaves torch's own choice"""
    gradient_checkpointing: bool = False
    """compute activations again going backward: less memory, slower"""


class OptimSettings(Options):
    """Configure AdamW with a constant rate (appendix C.2)."""

    lr: PositiveFloat = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0
    tokens_per_micro_batch: PositiveInt | None = None
    """gradient accumulation unit; None takes what a share of the free memory holds"""


class ActorOptions(Options):
    """Configure the prompts and the sampling of the acting agent, and rare parts of its loss."""

    history: int | None = Field(default=None, ge=0)
    """past turns kept in the prompt; None keeps all"""
    keep_first: bool = True
    """keep the first observation when history drops turns"""
    advice: Advice = "system"
    """in the system message, or after the first observation"""
    instruction: str = ""
    """text about the environment for the actor; not with the brief prompt set"""
    system: str | None = None
    """system message in place of the prompt set's; None keeps that"""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """nucleus sampling"""
    length_norm: PositiveInt = 256
    """tokens that a trajectory's sum is divided by, with aggregate: constant"""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """discount of later rewards, with credit: turn"""
    correction_cap: PositiveFloat = 2.0
    """greatest weight of a correction"""


class ActorSettings(Settings):
    """Configure the acting policy and its learning (eq. 4 and 5)."""

    train: bool = True
    group_size: PositiveInt = 8
    """K: episodes per task and seed"""
    groups: PositiveInt = 8
    """tasks per step; groups x group_size episodes"""
    guided: Literal["half", "all", "none", "auto"] = "half"
    """which members of a group may see the bank; auto: all but the manager's free share"""
    advantage: Literal["split", "pooled"] = "split"
    """advantages within the halves of a group (eq. 5), or within all of it"""
    estimator: str = "grpo"
    """grpo, dr_grpo, rloo, reinforce++, or one of yours: how rewards become advantages"""
    loss: str = "ppo"
    """policy loss: ppo, cispo, or one of yours (docs/extending.md)"""
    aggregate: Literal["sequence", "token", "constant"] = "sequence"
    """mean over each trajectory's tokens; all tokens equally; sum over options.length_norm"""
    drop_constant: bool = False
    """dynamic filtering: groups (or halves) with equal rewards take no weight"""
    credit: Literal["trajectory", "turn"] = "trajectory"
    """one advantage for a trajectory, or one per turn from the rewards that still follow it"""
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    ratio: Ratio = "token"
    """ratio that is clipped: of each token; of the sequence (eq. 4), a product; or its geometric
    mean (GSPO), which keeps its size at any length and wants clips of about 3e-4"""
    correction: Correction = "none"
    """truncated importance weights from the sampler to the trainer (docs/methods.md)"""
    kl: NonNegativeFloat = 0.0
    """weight of KL(policy || reference), k3 estimator"""
    epochs: PositiveInt = 1
    mini_batches: PositiveInt = 1
    """optimiser steps per epoch"""
    temperature: PositiveFloat = 1.0
    max_tokens: PositiveInt = 64
    constrain: bool = True
    """restrict answers to the admissible actions when env names them and backend can"""
    search_and_ask: NonNegativeInt = 0
    """calls of search_and_ask per guided episode; 0 leaves the tool out"""
    search_experience: NonNegativeInt = 0
    """calls of EvolveR's action per guided episode, then the only way to the bank; 0: none"""
    warmup_steps: NonNegativeInt = 0
    """steps before the bank is used"""
    optim: OptimSettings = OptimSettings(lr=3e-4)
    """options of AdamW"""
    options: ActorOptions = ActorOptions()
    """further options of ActorAgent and of the loss"""


class ExtractorOptions(Options):
    """Configure the sampling of the extractor, its buffer of samples and its loss."""

    model_config = ConfigDict(strict=True)

    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """nucleus sampling"""
    buffer_size: PositiveInt = 512
    """samples that may wait"""
    cooldown: int = 1
    """delta of eq. 7, in training steps"""
    decay: float = 0.5
    """alpha of eq. 7"""
    malformed_share: float = 0.25
    """share of a batch that malformed responses may fill"""
    malformed_reward: float = -1.0
    """reward of a malformed response"""
    eps_low: float = 0.1
    """the importance ratio is at least 1 - eps_low"""
    eps_high: float = 0.1
    """the importance ratio is at most 1 + eps_high"""
    principles: bool = False
    """distil guiding and cautionary principles with triples, as EvolveR does"""


class ExtractorSettings(Settings):
    """Configure the distilling policy and its learning (eq. 3 and 7)."""

    enabled: bool = True
    agent: str = "default"
    """distiller: default (the model), template or transcript (functions, without a model), an
    entry point of experiential.extractors, or module:attribute"""
    train: bool = True
    distill: bool = True
    """distil the episodes played; false keeps the bank unchanged during training"""
    per_group: NonNegativeInt = 0
    """episodes of each group that are distilled at most, the first and then those of the other
    outcome in turn, no play twice; 0: all"""
    drafts: PositiveInt = 1
    """answers drawn about each distilled episode, in training; of several, none is shown an entry,
    and their entries are compared with each other and not with the whole batch"""
    shared: bool = False
    """one set of weights, and one optimiser, for actor and extractor"""
    reward: Literal["direct", "relative"] = "direct"
    """outcome of the episode that used an entry, or its gain over the group's free members"""
    batch_size: PositiveInt = 64
    """|B_phi|: samples per optimiser step"""
    updates_per_step: PositiveInt = 1
    """optimiser steps per training step, at most: batches the buffer fills"""
    max_staleness: NonNegativeInt = 64
    """extractor updates after which a generation is too old to train on"""
    kl: NonNegativeFloat = 0.0
    """weight of the KL divergence from the extractor's first weights"""
    max_lag: NonNegativeInt = 2
    """training steps that distillation may fall behind before rollouts wait for it"""
    max_operations: PositiveInt = 3
    temperature: PositiveFloat = 1.0
    max_tokens: PositiveInt = 96
    optim: OptimSettings = OptimSettings(lr=3e-4)
    """options of AdamW"""
    options: ExtractorOptions = ExtractorOptions()
    """further options of ExtractorTrack and ExtractorAgent"""


class RetrievalSettings(Settings):
    """Configure retrieval, from queries to hits (section 3.2.2, eq. 6)."""

    k: PositiveInt = 1
    strategy: str = "diverse"
    """diverse (eq. 6), evidence, nearest, random, recent, an entry point or module:attribute"""
    pool: PositiveInt = 4
    """N: candidate sets of size K that are oversampled"""
    floor: float = Field(default=0.3, ge=-1.0, le=1.0)
    """cosine below which nothing is returned"""
    tie: NonNegativeFloat = 0.001
    """cosines this close share a rank: eq. 6 then chooses by use"""


class BankSettings(Settings):
    """Configure the experience bank and its manager."""

    path: str | None = None
    """an existing bank folder to start from; None starts empty"""
    namespace: str = "default"
    embedder: str | None = None
    """'hashing', 'openai:MODEL' or 'openai:MODEL@URL' of a server, an entry point,
    module:attribute, a sentence-transformers name or folder; None is the default model"""
    store: str | None = None
    """index of a large bank: 'chroma', address of a Chroma server, 'faiss', 'exact' (in memory), an
    entry point or module:attribute; None keeps it where it was, at first 'chroma'"""
    retrieval: RetrievalSettings = RetrievalSettings()
    merge_every: NonNegativeInt = 5
    """actor updates between merges; 0 never merges"""
    dedupe_every: NonNegativeInt = 0
    """actor updates between two-level deduplications; 0 never does"""
    prune_every: NonNegativeInt = 0
    """actor updates between prunings by score; 0 never prunes"""
    keep: NonNegativeInt = 0
    """entries of each task that stay when training ends: those that name it, then those with the
    best scores; 0: all"""
    options: dict[str, Any] = {}
    """further options of the manager, as bank.options.cap=500"""


class PolicyClusterSettings(Settings):
    """Configure one policy's share of a cluster: its DeepSpeed ranks and its vLLM engines."""

    nodes: PositiveInt = 1
    """nodes that train this policy"""
    gpus_per_node: PositiveInt = 1
    """DeepSpeed ranks on each of them, one GPU each"""
    engines: PositiveInt = 1
    """vLLM engines that generate"""
    tensor_parallel: PositiveInt = 1
    """GPUs of each engine"""
    zero_stage: Literal[0, 1, 2, 3] = 2
    batch_size: PositiveInt = 64
    """sequences of one optimiser step at most"""
    micro_batch_size: PositiveInt = 4
    """times max_length: the tokens that one rank computes at once, packed from several sequences"""
    max_length: PositiveInt = 4096
    """tokens of prompt and response together"""
    gpu_memory: float = Field(default=0.85, gt=0.0, le=1.0)
    """share of a GPU's memory that an engine takes"""
    attention: str = "flash_attention_2"
    """transformers' attention where rows cannot branch: flash_attention_2, sdpa, eager"""
    gradient_checkpointing: bool = False
    offload_optimizer: bool = False
    """keep the optimiser's state in the memory of the machine"""
    vllm: dict[str, Any] = {}
    """further arguments of vLLM's engine, e.g. {max_num_seqs: 64, enforce_eager: true}"""


class ClusterSettings(Settings):
    """Configure the cluster engine: Ray, vLLM and DeepSpeed (`runtime: openrlhf`)."""

    address: str | None = None
    """Ray cluster to join, e.g. auto; None starts Ray on this machine"""
    gpus: int | None = Field(default=None, ge=0)
    """GPUs that a Ray started here offers; None counts them"""
    gpu_gb: float | None = Field(default=None, gt=0.0)
    """memory of a GPU in 1e9 bytes, to check the placement by; None asks nvidia-smi"""
    share_gpus: bool = False
    """policies and engines take turns on the same GPUs of one node, by sleeping"""
    actor: PolicyClusterSettings = PolicyClusterSettings()
    extractor: PolicyClusterSettings = PolicyClusterSettings()
    env_workers: NonNegativeInt = 0
    """Ray actors that hold the environments; 0 keeps them in the trainer"""
    remote_bank: bool = False
    """the bank's one writer as a Ray actor, not inside the trainer"""
    start_timeout: PositiveFloat = 1800.0
    """seconds that engines and ranks may take to start"""
    call_timeout: PositiveFloat = 900.0
    """seconds that any remote call may take"""
    restarts: NonNegativeInt = 2
    """times that each engine and worker is started again, and the run from the same checkpoint"""
    background_checkpoints: bool = False
    """ranks copy their state to the machine's memory and train on while they write it"""


class ColdStartSettings(Options):
    """Configure supervised training on demonstrations before reinforcement learning (EvolveR)."""

    demonstrations: str
    """JSON Lines of chats: {messages: [{role, content}, ...]}; loss on the assistant's text"""
    epochs: PositiveInt = 1
    batch_size: PositiveInt = 16
    """chats per optimiser step"""


class PrepareSettings(Options):
    """Fill the bank before training begins, by the weights of then."""

    steps: NonNegativeInt = 16
    """steps played and distilled; 0 does nothing"""


class CriticSettings(Options):
    """Let the actor accept, refine or reject what is retrieved (appendix B.1)."""


class EntropyBonusSettings(Options):
    """Configure a bonus for entries that lower the actor's entropy over the task (appendix B.2)."""

    kind: BonusKind = "relative"
    weight: PositiveFloat = 0.5
    """w"""
    low: float = -1.0
    """the least bonus over w, with relative; the least gain counted, with asymmetric"""
    high: float = 1.0
    """the largest bonus over w, with relative; the largest gain counted, with asymmetric"""
    temperature: PositiveFloat = 1.0
    """tau, with sigmoid"""


class SelfDistillSettings(Options):
    """Imitate guided episodes that beat the free ones (section 4.3).

    The imitating policy does not see the experience that guided them.
    """

    weight: PositiveFloat = 0.1
    """weight of the imitation loss beside the actor's own"""
    every: PositiveInt = 1
    """training steps between imitations"""
    guard: float = Field(default=0.1, gt=0.0, le=1.0)
    """pause while the running success of free episodes is this far below its best: collapse"""
    memory: float = Field(default=0.9, ge=0.0, lt=1.0)
    """weight of the earlier steps in the running success"""


class ReflectionSettings(Options):
    """Configure second attempts, with a reflection, at tasks that the first did not solve.

    This is algorithm 2 of Experiential RL.
    """

    mode: Literal["reflect", "retry"] = "reflect"
    """the actor's own reflection, or the raw first attempt and an instruction to do better"""
    threshold: float = 1.0
    """tau: lower returns are tried again; reflections that reach it are remembered"""
    memory: Literal["none", "private", "bank"] = "private"
    """where reflections that passed are kept: nowhere, in one string (the last), in the bank"""
    recall: PositiveInt = 1
    """reflections of the bank shown to the reflector, with memory: bank"""
    same_task: bool = False
    """show only those on the very task, with memory: bank"""
    max_tokens: PositiveInt = 96
    """most tokens of a reflection"""
    temperature: PositiveFloat | None = None
    """temperature of the draws of reflections; the actor's if not given"""
    internalise: Literal["sft", "reverse_kl", "full_reverse_kl", "full_forward_kl", "none"] = "sft"
    """use of rewarded second attempts: sft imitates them without the reflection; the KL divergences
    teach the first attempt's tokens, the full ones over the whole vocabulary (local runtime)"""
    weight: PositiveFloat = 1.0
    """weight of the internalisation beside the policy losses"""


FormatPart = Literal["think", "search_experience", "search_knowledge", "answer"]
"""What the format reward looks for in an episode's responses."""


class EvolverSettings(Options):
    """Reward the form of an episode's responses beside its outcome, as EvolveR does."""

    format_reward: NonNegativeFloat = 0.1
    """weight of EvolveR's format reward, where the outcome's is 1; 0: none"""
    format_parts: tuple[FormatPart, ...] = Field(
        default=("think", "search_experience", "search_knowledge", "answer"), min_length=1
    )
    """parts of a complete episode; leave out those that the environment does not support"""


class MethodSettings(Options):
    """Name the methods of a run that its settings ask for, each with its options.

    Further names are methods of yours, which read their options in `Run.experiment`.
    """

    model_config = ConfigDict(extra="allow")

    cold_start: ColdStartSettings | None = None
    """supervised training before the first step"""
    prepare: PrepareSettings | None = None
    """a bank that is filled before training"""
    critic: CriticSettings | None = None
    """the actor judges what is retrieved (appendix B.1)"""
    entropy_bonus: EntropyBonusSettings | None = None
    """a reward for entries that lower the actor's entropy"""
    self_distill: SelfDistillSettings | None = None
    """imitation of guided episodes that beat the free ones"""
    reflection: ReflectionSettings | None = None
    """second attempts with a reflection"""
    evolver: EvolverSettings | None = None
    """a reward for the form of responses"""

    def outside(self) -> dict[str, Any]:
        """Return the options of methods from outside, by name."""
        return self.model_extra or {}


class EvalSettings(Settings):
    """Configure evaluation by visit on held-out worlds, weights frozen."""

    worlds: PositiveInt = 40
    visits: PositiveInt = 6
    every: NonNegativeInt = 0
    """training steps between evaluations; 0 evaluates before and after only"""
    before: bool = True
    after: bool = True
    temperature: NonNegativeFloat = 1.0
    seed: int = 10_000
    arms: tuple[Arm, ...] = Field(default=("off", "on"), min_length=1)
    """arms to play: off, on, frozen, shuffled, placebo, and baselines: random, history-1 to -3,
    template, best-of-2, -4 or -8"""

    @field_validator("arms", mode="before")
    @classmethod
    def _on_and_off_are_names(cls, arms: Any) -> Any:
        if isinstance(arms, str | bool):  # one arm alone
            arms = [arms]
        if not isinstance(arms, list | tuple):
            return arms
        # YAML reads on and off as true and false.
        names = {True: "on", False: "off"}
        return [names[arm] if isinstance(arm, bool) else arm for arm in cast("list[Any]", arms)]


class RunSettings(Settings):
    """Configure the length of the training and the files it writes."""

    steps: NonNegativeInt = 40
    minutes: float | None = Field(default=None, gt=0.0)
    """stop training after this many minutes"""
    preflight: bool = True
    """play one episode at random before training, and warn of settings that do not fit"""
    checkpoint_every: NonNegativeInt = 10
    """steps between checkpoints; 0 keeps only the last"""
    ahead: NonNegativeInt = 0
    """steps that rollouts may run ahead of updates; more than 0 keeps both of a cluster busy"""
    drain: bool = False
    """do all background work between two steps; with runtime=local on a CPU, equal runs then give
    equal results, bit for bit"""
    trackers: tuple[str, ...] = ("tensorboard",)
    """receivers of the run's events: tensorboard (if it is installed), wandb, mlflow, an entry
    point of experiential.trackers, or module:attribute"""


class Experiment(Settings):
    """Define a run, with all its settings."""

    recipe: str = "complementary"
    seed: int = 0
    env: EnvSettings = EnvSettings()
    model: ModelSettings = ModelSettings()
    extractor_model: ModelSettings | None = None
    """None starts from the actor's weights, trained separately"""
    actor: ActorSettings = ActorSettings()
    extractor: ExtractorSettings = ExtractorSettings()
    bank: BankSettings = BankSettings()
    eval: EvalSettings = EvalSettings()
    run: RunSettings = RunSettings()
    method: str | None = None
    """policy_gradient, evolver or one of yours; None: evolver if methods.evolver, else the first"""
    methods: MethodSettings = MethodSettings()
    """additions to the main method: names with options; null leaves one out"""
    runtime: str = "local"
    """local: torch in this process; openrlhf: a Ray cluster; frozen: no weights are trained, so
    that servers can answer; or one of yours"""
    cluster: ClusterSettings = ClusterSettings()

    @property
    def repeatable(self) -> bool:
        """Return whether the order of all work is fixed, as far as it happens in this process."""
        return self.run.drain and self.runtime == "local"

    @model_validator(mode="after")
    def _settings_fit_together(self) -> Experiment:
        """Refuse combinations that cannot work, or would silently do nothing."""
        actor, extractor, methods = self.actor, self.extractor, self.methods
        if actor.guided == "half" and actor.group_size < 2:
            raise ValueError(
                "Expected actor.group_size of at least 2 when actor.guided is half, got"
                f" {actor.group_size}"
            )
        if methods.reflection is not None and actor.guided != "none":
            raise ValueError(
                "Expected actor.guided=none with reflection, whose advice takes the bank's place,"
                f" got {actor.guided!r}"
            )
        if methods.reflection and methods.reflection.memory == "bank" and not extractor.enabled:
            raise ValueError(
                "Expected a bank with methods.reflection.memory=bank, got none; set"
                " extractor.enabled=true, extractor.distill=false"
            )
        for name, compares in (
            ("methods.self_distill", methods.self_distill is not None),
            ("extractor.reward=relative", extractor.reward == "relative"),
        ):
            if compares and actor.guided != "half":
                raise ValueError(
                    f"Expected actor.guided=half with {name}, which compares with a group's free"
                    f" members, got {actor.guided!r}"
                )
        if actor.search_and_ask and actor.search_experience:
            raise ValueError(
                "Expected actor.search_and_ask or actor.search_experience, got both; set one of"
                " them to 0"
            )
        if self.repeatable and self.run.ahead:
            raise ValueError(
                "Expected run.ahead=0 with run.drain, which plays a step only when the one before"
                f" is over, got {self.run.ahead}"
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
        engines = self.runtime == "openrlhf" or self.model.generator == "vllm"
        if engines and actor.ratio == "sequence":
            raise ValueError(
                "Expected actor.ratio=token or sequence_mean with runtime=openrlhf or"
                " model.generator=vllm, whose engines round otherwise than what is trained, so that"
                " a product over a long response leaves the clip range unlearnt, got sequence"
            )
        if actor.correction == "token" and actor.ratio != "token":
            raise ValueError(
                "Expected actor.correction=none or sequence with a ratio of sequences"
                f" (actor.ratio={actor.ratio}), got token"
            )
        served = [m for m in (self.model, self.extractor_model) if m is not None and m.server]
        if served and self.runtime in ("local", "openrlhf"):
            raise ValueError(
                "Expected runtime=frozen with model.server, since the weights of"
                f" {served[0].name!r} cannot be trained from here, got {self.runtime!r}; use"
                " --recipe frozen"
            )
        if self.runtime == "frozen" and (
            actor.train
            or extractor.train
            or methods.cold_start is not None
            or methods.self_distill is not None
            or methods.entropy_bonus is not None
        ):
            raise ValueError(
                "Expected actor.train=false, extractor.train=false and no method that learns with"
                " runtime=frozen, which trains no weights, got one; use --recipe frozen"
            )
        second = self.extractor_model or self.model
        for role, settings, model in (
            ("actor", actor, self.model),
            ("extractor", extractor, second),
        ):
            if model.generator == "vllm" and settings.train and settings.options.top_p < 1:
                raise ValueError(
                    f"Expected {role}.options.top_p to be 1 with model.generator=vllm, which does"
                    f" not say which tokens it kept, got {settings.options.top_p}"
                )
        kind = methods.reflection.internalise if methods.reflection else "none"
        if self.runtime == "openrlhf" and kind.startswith("full_"):
            raise ValueError(
                "Expected methods.reflection.internalise among sft, reverse_kl and none with"
                f" runtime=openrlhf, whose learners hold no second distribution, got {kind!r}"
            )
        if self.runtime == "openrlhf" and (extractor.shared or methods.entropy_bonus is not None):
            raise ValueError(
                "Expected runtime=local with extractor.shared or methods.entropy_bonus, which"
                " clusters lack, got openrlhf"
            )
        return self
