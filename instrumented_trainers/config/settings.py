"""The settings of a training run."""

from dataclasses import dataclass
from pathlib import Path

from tracekit.conventions import strategies
from tracekit.conventions.strategies import DP_REPLICATE, DP_SHARD, Layout

STRATEGIES = ("ddp", "zero1", "fsdp1", "fsdp2", "yafsdp")
"""The keys of `parallelism.STRATEGIES`, which imports torch."""
PRECISIONS = ("fp32", "bf16", "fp64")
RECOMPUTATIONS = FULL, SELECTIVE = ("full", "selective")
OPTIMIZERS = ("adamw", "adam", "sgd", "lion", "muon")
LR_SCHEDULES = ("constant", "cosine", "linear", "wsd")
SCHEDULES = ONE_FORWARD_ONE_BACKWARD, INTERLEAVED, GPIPE, ZB_H1, ZBV, DUALPIPEV = (
    "1f1b",
    "interleaved",
    "gpipe",
    "zb-h1",
    "zbv",
    "dualpipev",
)
"""Of a pipeline. In the last two, a rank's two stages lie on the way down and on the way up of a V."""
CP_METHODS = GATHER, RING = ("gather", "ring")
"""The keys of `parallelism.context.ATTENTION`, which imports torch."""
MOST_HELD_OUT_RATIO = 0.5
NEWEST = "newest"
SMALLEST_VOCABULARY = 257
"""The tokens that any text can be written in: the bytes, and one that ends a document."""
MEMORY_STEP = 2
"""The step of a training, counted from its first, whose memory is reported: before any that the profiler records."""

# What may change when a training is resumed. Its model and its text may not.
OVERRIDABLE = (
    "steps",
    "learning_rate",
    "warmup_steps",
    "lr_schedule",
    "decay_steps",
    "final_learning_rate_ratio",
    "weight_decay",
    "beta1",
    "beta2",
    "momentum",
    "max_norm",
    "dropout",
    "batch",
    "micro_batches",
)


@dataclass(frozen=True)
class TrainingConfig:
    """One training run. Every field is the option of that name, whose help explains it."""

    strategy: str
    out: Path
    overwrite: bool = False
    world_size: int = 2
    device: str = "cpu"
    share_gpus: bool = False
    timeout_s: float = 300.0
    model: str = "tiny"
    experts: int | None = None
    active_experts: int = 2
    balance_loss: float = 0.01
    capacity: float | None = None
    init_from: Path | None = None
    data: tuple[Path, ...] = ()
    text_field: str = "text"
    stream: bool = False
    tokenizer: Path | None = None
    train_tokenizer: int | None = None
    separator: str | None = None
    steps: int = 20
    batch: int = 4
    tokens: int = 128
    micro_batches: int = 1
    precision: str = "fp32"
    checkpoint_layers: int = 0
    recompute: str = RECOMPUTATIONS[0]
    reentrant: bool = False
    keep_gathered: bool = False
    reshard_to: int | None = None
    prefetch: int | None = None
    replicate: int = 1
    pp: int = 1
    schedule: str = ONE_FORWARD_ONE_BACKWARD
    virtual_stages: int | None = None
    tp: int = 1
    sequence_parallel: bool = False
    loss_parallel: bool = False
    cp: int = 1
    cp_method: str = GATHER
    ep: int = 1
    offload: bool = False
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    lr_schedule: str = "cosine"
    warmup_steps: int = 5
    decay_steps: int | None = None
    final_learning_rate_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    max_norm: float = 1.0
    dropout: float = 0.0
    seed: int = 0
    profile_wait: int = 3
    profile_warmup: int = 2
    profile_active: int = 5
    stacks: bool = False
    modules: bool = False
    checksums: bool = False
    device_metrics: bool = False
    memory: bool = True
    checkpoint_every: int = 0
    keep: int = 2
    background_save: bool = False
    resume: str | None = None
    override: tuple[str, ...] = ()
    fault: tuple[str, ...] = ()
    memory_report: bool = False
    log_every: int = 5
    peak_flops: float | None = None
    tensorboard: bool = False
    wandb: str | None = None
    wandb_project: str = "instrumented-trainers"
    eval_every: int = 0
    eval_steps: int = 10
    eval_data: tuple[Path, ...] = ()
    eval_split: float = 0.0

    @property
    def model_name(self) -> str:
        """Return the name of the preset, or of the folder that the weights come from."""
        return self.model if self.init_from is None else self.init_from.resolve().name

    @property
    def checkpoints(self) -> Path:
        """Return the folder of the run's checkpoints."""
        return self.out / "checkpoints"

    @property
    def layout(self) -> Layout:
        """Layout of the ranks. What pp, cp and tp leave is replicas times shards, or replicas only."""
        data_ranks = self.world_size // (self.pp * self.cp * self.tp)
        shards = data_ranks // self.replicate if self._has_shards else 1
        return Layout(
            pp=self.pp, dp_replicate=data_ranks // shards, dp_shard=shards, cp=self.cp, ep=self.ep, tp=self.tp
        )

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Return the axes of the mesh that the data strategy needs, also where there is one rank along them."""
        if self.replicate > 1:
            return DP_REPLICATE, DP_SHARD
        return (DP_SHARD if self._has_shards else DP_REPLICATE,)

    @property
    def _has_shards(self) -> bool:
        """Return whether data-parallel ranks have shards of weights; under ddp and zero1 those of experts at most."""
        return strategies.STRATEGIES[self.strategy].shards_parameters or self.ep > 1

    @property
    def stages_per_rank(self) -> int:
        """Number of stages of the pipeline on a rank."""
        return self.virtual_stages or (2 if self.schedule in (INTERLEAVED, ZBV, DUALPIPEV) and self.pp > 1 else 1)

    @property
    def stages(self) -> int:
        """Number of stages that the model is divided into; 1 without a pipeline."""
        return self.pp * self.stages_per_rank

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens that all ranks together train on in one optimizer step."""
        return self.layout.data_ranks * self.batch * self.tokens * self.micro_batches


class InvalidConfigError(ValueError):
    """The run cannot be done as configured. The message says why and what to change, on one line."""


class TrainingFailedError(RuntimeError):
    """The run failed for an external reason. The message says why and what can be recovered, on one line."""
