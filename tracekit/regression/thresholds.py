"""What fails a check against a baseline: which metrics count, and the least change that counts."""

from dataclasses import dataclass

FAILING_METRICS = (
    "step_time_ns",
    "tokens_per_second",
    "cpu_time_ns",
    "flops",
    "exposed_transfer_ns",
    "transfer_ns",
    "sent_bytes",
    "allocated_bytes",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "checkpoint_blocked_ns",
    "checkpoint_cpu_ns",
    "checkpoint_written_bytes",
    "checkpoint_calls",
)
"""The metrics that fail a check where they are worse than the baseline's, unless settings say otherwise.

What somebody pays for (time, arithmetic, memory, traffic, saves), and not what such time is made of: compute and idle
time shift from one to the other without anybody losing.
"""
MIN_CHANGE_RATIO = 0.03


@dataclass(frozen=True)
class Thresholds:
    """How a run is held against a baseline: which metrics fail it where worse, and from which change on."""

    metrics: tuple[str, ...] = FAILING_METRICS
    min_change_ratio: float = MIN_CHANGE_RATIO
