"""Pipeline bubbles: arXiv 2104.04473 (plain, interleaved) and 2401.10241 (zero-bubble)."""

from dataclasses import dataclass

from tracekit.errors import ConfigError


@dataclass(frozen=True)
class Bubble:
    """Idle time of a pipeline, relative to the ideal time of a step, and as a share of the whole."""

    bubble_to_ideal_ratio: float
    bubble_ratio: float


def bubble(stages: int, micro_batches: int, *, chunks: int = 1) -> Bubble:
    """Return the bubble (p − 1) / (v m) of `chunks` model chunks per rank; 1 is not interleaved."""
    if min(stages, micro_batches, chunks) < 1:
        raise ConfigError("stages, micro-batches and chunks must be 1 or more")
    return _of((stages - 1) / (chunks * micro_batches))


def zb_h1_bubble(stages: int, micro_batches: int) -> Bubble:
    """Return the bubble (p − 1) / 3 m of the schedule ZB-H1."""
    return _of(bubble(stages, micro_batches).bubble_to_ideal_ratio / 3)


def _of(to_ideal: float) -> Bubble:
    return Bubble(to_ideal, to_ideal / (1 + to_ideal))
