"""Durations in another unit than the times of their file, and times that are in no µs at all."""

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize.odd_durations import crossings
from tracekit.ingest.readers.normalize.odd_slices import KIND, OddValues, Slices, streams
from tracekit.model.nesting import Ints

_SCALES = (1e3, 1e-3)
"""Durations in ms, and in ns. In seconds, what is read as ns lacks its last six digits."""
_LEAST_SLICES, _LEAST_ACTIVITIES, _SAMPLE = 100, 20, 20_000
_LEAST_NESTED_RATIO, _FLAT_RATIO = 0.25, 0.1
"""Share of operators and annotations within others: above the former in recordings, below the latter if durations are
1,000 times too short."""
_MOST_CROSSING_RATIO, _WRONG_CROSSING_RATIO = 0.1, 0.2
"""Share of overlapping slices of a thread that cross: below the former if durations are right."""
_LEAST_OTHERS, _LEAST_COVERED_RATIO = 3, 0.5
_LEAST_KERNEL_NS = 300
"""No stream's median activity is shorter."""
_NEAR_NS = 3_000
"""Time between two kernels of a stream of which the second was queued; durations in ms lose half a µs."""
_LEAST_CALL_NS = 100
"""No operator's median call is shorter: dispatching takes longer."""
_LONG_QUANTILE, _LONG_CALL_NS = 0.99, 1_000
"""The longest operators take longer, also where times are whole µs and the median is 0."""


def with_durations_in_unit(slices: Slices, odd: OddValues) -> Slices:
    """Slices with the durations in the unit in which slices of threads nest, and kernels of streams follow each other.

    Both are certain: with another factor, slices cross each other everywhere, or nothing contains anything.
    """
    operators = _operators(slices.host).head(_SAMPLE)
    if operators.height < _LEAST_SLICES:
        return slices
    lane, start, dur = (operators[name].to_numpy().astype(np.int64) for name in ("lane", "start_ns", "dur_ns"))
    nested_ratio, crossing_ratio = _ratios(lane, start, dur)
    is_wrong = nested_ratio < _FLAT_RATIO or crossing_ratio > _WRONG_CROSSING_RATIO
    if is_wrong and _covers_the_rest(slices):
        odd.host_scale = next((scale for scale in _SCALES if _nests(lane, start, _durations_ns(dur, scale))), 1.0)
    odd.device_scale = _device_scale(slices.device.head(_SAMPLE), odd.host_scale)
    frames = zip((slices.host, slices.device), (odd.host_scale, odd.device_scale), strict=True)
    slices = Slices(*(with_scaled_durations(frame, scale) for frame, scale in frames))
    dur_ns = _durations_ns(dur, odd.host_scale)
    if 0 < np.median(dur_ns) < _LEAST_CALL_NS or np.quantile(dur_ns, _LONG_QUANTILE) < _LONG_CALL_NS:
        odd.call_ns = int(np.median(dur_ns))
    return slices


def with_scaled_durations(frame: pl.DataFrame, scale: float) -> pl.DataFrame:
    """Rows with durations multiplied by a factor."""
    if scale == 1.0:
        return frame
    return frame.with_columns((pl.col("dur_ns") * scale).round().cast(pl.Int64))


def _operators(host: pl.DataFrame) -> pl.DataFrame:
    return host.filter(pl.col("kind").is_in([KIND["cpu_op"], KIND["annotation"]]))


def _ratios(lane: Ints, start: Ints, dur: Ints) -> tuple[float, float]:
    """Share of the slices that begin within the one before, and share of these pairs that cross."""
    _, crosses, overlaps = crossings(lane, start, dur, 0.0, _NEAR_NS)
    return float(overlaps.mean()), float(crosses.sum() / max(int(overlaps.sum()), 1))


def _covers_the_rest(slices: Slices) -> bool:
    """Return whether operators begin throughout the time of all other slices: else their times are wrong."""
    is_operator = slices.host["kind"].to_numpy() == KIND["cpu_op"]
    operator_ns = slices.host["start_ns"].to_numpy()[is_operator]
    other_ns = np.concatenate([slices.host["start_ns"].to_numpy()[~is_operator], slices.device["start_ns"].to_numpy()])
    if not len(operator_ns) or len(other_ns) < _LEAST_OTHERS:
        return True
    first_ns, last_ns = np.quantile(other_ns, (0.1, 0.9))
    both_ns = min(last_ns, operator_ns.max()) - max(first_ns, operator_ns.min())
    return bool(both_ns >= _LEAST_COVERED_RATIO * (last_ns - first_ns))


def _nests(lane: Ints, start: Ints, dur: Ints) -> bool:
    nested_ratio, crossing_ratio = _ratios(lane, start, dur)
    return nested_ratio >= _LEAST_NESTED_RATIO and crossing_ratio <= _MOST_CROSSING_RATIO


def _device_scale(device: pl.DataFrame, host_scale: float) -> float:
    """Factor for the durations of a device's activities: that of the host, unless only another one fits its streams."""
    if device.height < _LEAST_ACTIVITIES:
        return host_scale if device.height else 1.0
    stream, start = streams(device), device["start_ns"].to_numpy().astype(np.int64)
    dur = device["dur_ns"].to_numpy().astype(np.int64)
    order = np.lexsort((start, stream))
    is_pair = stream[order[1:]] == stream[order[:-1]]
    distance_ns = np.diff(start[order])[is_pair]

    def follow_each_other(scale: float) -> tuple[float, float]:
        """Share of activities that end when the next one of their stream begins, and share that end later."""
        gap_ns = distance_ns - _durations_ns(dur, scale)[order[:-1]][is_pair]
        return float((np.abs(gap_ns) <= _NEAR_NS).mean()), float((gap_ns < -_NEAR_NS).mean())

    if not len(distance_ns):
        return host_scale
    near_ratio, late_ratio = follow_each_other(1.0)
    is_too_short = np.median(dur) < _LEAST_KERNEL_NS
    for scale in sorted(_SCALES, key=lambda scale: scale != host_scale):
        scaled_near_ratio, scaled_late_ratio = follow_each_other(scale)
        is_possible = scaled_late_ratio <= _MOST_CROSSING_RATIO and np.median(dur) * scale >= _LEAST_KERNEL_NS
        is_nearer = scaled_near_ratio >= near_ratio + _LEAST_NESTED_RATIO
        if is_possible and (is_nearer or is_too_short or (scale == host_scale and late_ratio > _WRONG_CROSSING_RATIO)):
            return scale
    return 1.0


def _durations_ns(dur: Ints, scale: float) -> Ints:
    return np.asarray(np.rint(dur * scale), np.int64)
