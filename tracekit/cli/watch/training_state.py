"""The state of a watched training at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from tracekit.model.manifest import ProfiledWindow


class Symptom(StrEnum):
    """How a step is an outlier."""

    SLOW = "slow"
    LOSS_SPIKE = "loss_spike"
    LOSS_NOT_FINITE = "loss_not_finite"


class EventKind(StrEnum):
    """What was recorded during an outlier step."""

    SAVE = "save"
    BACKGROUND_SAVE = "background_save"
    PROFILED = "profiled"
    TRACE_WRITTEN = "trace_written"
    DATA_WAIT = "data_wait"
    LATE_RANK = "late_rank"
    RETRIES = "alloc_retries"
    DEVICE_ALLOCS = "device_allocs"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class StepEvent:
    """An event during an outlier step."""

    kind: EventKind
    dur_ns: float | None = None
    rank: int | None = None
    count: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class OutlierStep:
    """An outlier step, or a stretch of consecutive ones; values are those of the worst step."""

    symptom: Symptom
    step: int
    last_step: int
    step_time_ns: float | None
    median_ns: float | None
    """Median time of the steps before it."""
    loss: float | None
    median_loss: float | None
    ranks: tuple[int, ...]
    """The stragglers, or the ranks whose loss is not finite."""
    rank_count: int
    """Ranks that logged this step."""
    events: tuple[StepEvent, ...] = ()


@dataclass(frozen=True)
class Save:
    """A checkpoint save: the longest blocking time of a rank, and the longest background time."""

    checkpoint: str
    step: int | None
    blocked_ns: int
    background_ns: int
    bytes: int


@dataclass(frozen=True)
class TrainingState:
    """A training at one moment. Values that no rank logged are None."""

    name: str
    strategy: str | None
    world_size: int | None
    is_over: bool
    quiet_s: float | None
    """Seconds since a rank wrote to its log; None without a log."""
    # Steps; of step times, the median over ranks
    steps_done: int
    first_step_read: int | None
    step_time_ns: float | None
    median_step_ns: float | None
    spread_ratio: float | None
    tokens_per_s: float | None
    loss: float | None
    loss_curve: tuple[float, ...] = field(repr=False)
    data_wait_ratio: float | None
    skipped_updates: int
    custom_metrics: Mapping[str, float]
    # Memory: of the rank with the most
    allocated_bytes: float | None
    reserved_bytes: float | None
    retries: int | None
    device_allocs: int | None
    # Ranks
    ranks_logging: int
    ranks_closed: int
    slowest_rank: int | None
    lag_steps: int
    stalled_ranks: Mapping[int, float]
    """Ranks whose log has stalled, and for how many seconds."""
    missing_ranks: tuple[int, ...]
    # Saves and windows
    saves: int
    last_save: Save | None
    windows: tuple[ProfiledWindow, ...]
    # Outliers
    outlier_count: int
    outliers: tuple[OutlierStep, ...]
    """The last ones, the newest last."""
    bad_lines: int
