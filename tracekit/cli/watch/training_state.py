"""What is known of a watched training at one moment, as numbers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


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
    RETRIES = "alloc_retries"
    DEVICE_ALLOCS = "device_allocs"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class StepEvent:
    """Something that happened in a step that is out of line."""

    kind: EventKind
    dur_ns: float | None = None
    rank: int | None = None
    count: int | None = None
    name: str | None = None


@dataclass(frozen=True)
class OutlierStep:
    """A step out of line with those before it, or several on end; of several, the worst is told."""

    symptom: Symptom
    step: int
    last_step: int
    step_time_ns: float | None
    median_ns: float | None
    """Median step time before it."""
    loss: float | None
    median_loss: float | None
    ranks: tuple[int, ...]
    """Ranks that were late, or whose loss is not finite."""
    rank_count: int
    """Ranks that told of this step."""
    events: tuple[StepEvent, ...] = ()


@dataclass(frozen=True)
class Save:
    """A checkpoint saved: the longest time for which a rank waited, and for which one worked in the background."""

    checkpoint: str
    step: int | None
    blocked_ns: int
    background_ns: int
    bytes: int


@dataclass(frozen=True)
class ProfiledWindow:
    """A profiled window that is on disk."""

    window: int
    first_step: int
    steps: int


@dataclass(frozen=True)
class TrainingState:
    """A training at one moment. Numbers that no rank logged are None."""

    name: str
    strategy: str | None
    world_size: int | None
    is_over: bool
    quiet_s: float | None
    """Seconds since any rank wrote to its log; None where there is no log."""
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
    # Memory: of the rank that has most
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
    """Ranks whose log has stood still, and for how many seconds."""
    missing_ranks: tuple[int, ...]
    # What was recorded
    saves: int
    last_save: Save | None
    windows: tuple[ProfiledWindow, ...]
    # What was out of line
    outlier_count: int
    outliers: tuple[OutlierStep, ...]
    """The last of them, the newest last."""
    bad_lines: int
