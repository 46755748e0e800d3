"""Odd values in a recording: events that a few wrong numbers put at impossible times, or that were written twice.

Each is left out and counted, so that the rest is judged as if it were not there. Every check is one that recordings of
PyTorch, HTA, Megatron and Nsight Systems pass without a single event: values that could be right stay.
"""

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import odd_durations, odd_times, odd_units
from tracekit.ingest.readers.normalize.odd_slices import KIND, OddValues, Slices
from tracekit.model.nesting import Flags


def without_odd_values(slices: Slices, names: pl.Series, odd: OddValues, recorded_until_ns: int | None) -> Slices:
    """Return the slices without odd ones, which are counted in `odd`; the profiler stopped at `recorded_until_ns`."""
    slices = odd_units.with_durations_in_unit(slices, odd)
    slices = _without_repeated(slices, odd)
    slices = odd_times.without_distant(slices, odd)
    slices = odd_times.without_shifted_kinds(slices, odd)
    slices = odd_durations.without_instants(slices, odd)
    slices = odd_durations.without_absurd(slices, names, odd)
    slices = odd_durations.without_outlasting(slices, names, odd, recorded_until_ns)
    slices = odd_durations.without_crossing_calls(slices, names, odd)
    slices = odd_times.in_launch_order(slices, odd)
    slices = odd_durations.without_overlong_work(slices, names, odd)
    return odd_durations.without_unawaited_work(slices, names, odd)


def _without_repeated(slices: Slices, odd: OddValues) -> Slices:
    host_flags = _is_repetition(slices.host) | _aliases(slices.host)
    device_flags = _is_repetition(slices.device)
    odd.duplicates += int(host_flags.sum()) + int(device_flags.sum())
    return slices.without(host_flags, device_flags)


def _is_repetition(frame: pl.DataFrame) -> Flags:
    """Flag slices with the identity and times of an earlier one. Those without ids count only if others are repeated.

    Equal calls of Python at one instant may be a recursion, unless all of a file is repeated.
    """
    if not frame["start_ns"].is_duplicated().any():
        return np.zeros(frame.height, bool)
    identity = ["name", "kind", "lane", "start_ns", "dur_ns", "correlation", "external_id"]
    identity += [name for name in ("device", "stream", "sequence", "rank") if name in frame.columns]
    is_again = frame.select(~pl.struct(identity).is_first_distinct()).to_series().to_numpy()
    has_id = frame.select((pl.col("correlation") > 0) | (pl.col("external_id") > 0)).to_series().to_numpy()
    if not (is_again & has_id).any():
        return np.zeros(frame.height, bool)
    return np.asarray(is_again & (has_id | (frame["dur_ns"].to_numpy() > 0)))


def _aliases(host: pl.DataFrame) -> Flags:
    """Flag calls of the device's runtime within another one of the same number: one call under two names.

    Nsight Systems exports cudaMemcpy and cudaMemcpy_v3020 of one call.
    """
    flags = np.zeros(host.height, bool)
    places = np.flatnonzero((host["kind"].to_numpy() == KIND["runtime"]) & (host["correlation"].to_numpy() > 0))
    number = host["correlation"].to_numpy()[places]
    if len(np.unique(number)) == len(number):
        return flags
    start, lane = host["start_ns"].to_numpy()[places], host["lane"].to_numpy()[places].astype(np.int64)
    end = start + host["dur_ns"].to_numpy()[places]
    # In a file of several ranks, each has numbers of its own.
    rank = host["rank"].fill_null(-1).to_numpy()[places] if "rank" in host.columns else np.zeros(len(places), np.int64)
    order = np.lexsort((-end, start, lane, rank, number))
    keys = np.stack([number, rank, lane])[:, order]
    start, end = start[order], end[order]
    is_inside = (keys[:, 1:] == keys[:, :-1]).all(axis=0) & (start[1:] <= end[:-1])
    flags[places[order[1:][is_inside]]] = True
    return flags
