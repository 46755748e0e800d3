"""Iterations of a recording without step marks: found where its work repeats."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize.host_slices import Host, id_column
from tracekit.ingest.readers.normalize.steps import Steps
from tracekit.model import repetitions
from tracekit.model.nesting import Ints
from tracekit.model.repetitions import Repetition

_MIN_ALIKE_RATIO = 0.75
"""Share of all distinct kernels that recur in each pass. In a stack of layers those before and after it do not recur:
on recordings of single steps the best repetition has 0.6 or less, on recordings of several steps 0.8 or more."""
_MIN_ALIKE_OF_TWO = 0.9
_MIN_ALIKE_WITHIN = 0.9
_MIN_COVERED_RATIO = 0.5
_MIN_NAMES = 5
"""With fewer distinct kernels a repetition is the inside of an op."""
_FROM_OR_TO_HOST = r"(?i)memcpy.*(dtoh|htod|devicetohost|hosttodevice)"


def with_iterations(host: Host, activities: pl.DataFrame, lanes: pl.DataFrame) -> tuple[Host, pl.DataFrame]:
    """Return the host slices and activities of a recording without marked steps, in the iterations that are found.

    The work of the main lane, in order, is a sequence of kernel names; `activities` has column host_id, the slice that
    issued it. An iteration begins on the host with the outermost slice that issues its first kernel, and not the one
    before. Both are returned as they are if steps are marked or no iterations are found.
    """
    if len(host.steps.step):
        return host, activities
    work = _main_work(activities, lanes)
    name_codes = work["name"].rank("dense").cast(pl.Int64).to_numpy()
    repetition = repetitions.find(name_codes) if work.height else None
    if repetition is None or not _is_loop(work, repetition):
        return host, activities
    steps = _steps(host, work, repetition)
    if steps.on_device:
        step = steps.at(activities["start_ns"].to_numpy())
    else:
        host = replace(host, steps=steps, step=steps.at(host.start_ns))
        step = host.step_of(activities["host_id"])
    return replace(host, steps=steps), activities.with_columns(id_column(step, "step"))


def _main_work(activities: pl.DataFrame, lanes: pl.DataFrame) -> pl.DataFrame:
    """Return the work whose order is the program's: of the stream that computes most; of a CPU run all compute.

    Work that was launched before the recording is left out, if launches were recorded.
    """
    computing = activities.filter(pl.col("kind") == "compute")
    streams = lanes.filter(pl.col("device").is_not_null()).select("lane")
    on_streams = computing.join(streams, on="lane", how="semi")
    work = computing
    if on_streams.height:
        busy = on_streams.group_by("lane").agg(pl.col("dur_ns").sum()).sort("dur_ns", "lane", descending=[True, False])
        work = activities.filter(pl.col("lane") == busy["lane"][0])
    launched = work.filter(pl.col("host_id").is_not_null())
    return (launched if launched.height else work).sort("start_ns", "id")


def _is_loop(work: pl.DataFrame, repetition: Repetition) -> bool:
    """Return whether passes are iterations of a loop, rather than layers of one model or a coincidence.

    Nearly all that the recording has recurs in each pass; or what is in the passes does, and each copies from or to the
    host, as an iteration takes its input or returns its result.
    """
    first = int(repetition.starts[0])
    inside = work[first : repetition.end]
    if inside["name"].n_unique() < _MIN_NAMES or inside.height < _MIN_COVERED_RATIO * work.height:
        return False
    if repetition.alike_ratio >= (_MIN_ALIKE_RATIO if repetition.count > 2 else _MIN_ALIKE_OF_TWO):
        return True
    copies = np.flatnonzero(work["name"].str.contains(_FROM_OR_TO_HOST).to_numpy())
    edges = np.append(repetition.starts, repetition.end)
    copying = np.diff(np.searchsorted(copies, edges)) > 0
    return repetition.alike_within_ratio >= _MIN_ALIKE_WITHIN and bool(copying.all())


def _steps(host: Host, work: pl.DataFrame, repetition: Repetition) -> Steps:
    """Return the iterations, counted from 0: on the host if launches were recorded, else on the device."""
    starts, numbers = repetition.starts, np.arange(repetition.count)
    busy_ns = work["dur_ns"].to_numpy()
    covered = float(busy_ns[starts[0] : repetition.end].sum() / max(busy_ns.sum(), 1))
    issued = work["host_id"]
    if issued.null_count():
        begin = work["start_ns"].to_numpy()
        after = begin[repetition.end] if repetition.end < len(begin) else (begin + busy_ns).max()
        on_device = True
    else:
        ids = issued.to_numpy()
        begin = _begins(host, ids)
        after = begin[repetition.end] if repetition.end < len(begin) else host.end_ns.max() + 1
        on_device = False
    edges = np.append(begin[starts], after)
    return Steps(
        numbers, edges[:-1], edges[1:],
        alike_ratio=repetition.alike_ratio, covered_ratio=covered, on_device=on_device,
    )  # fmt: skip


def _begins(host: Host, issued: Ints) -> Ints:
    """Return the start of the outermost slice that issued each piece of work, but began after the one before did."""
    before = np.append(np.iinfo(np.int64).min, host.start_ns[issued[:-1]])
    outermost = issued.copy()
    while True:
        above = host.parent[outermost]
        climbs = (above >= 0) & (host.start_ns[np.maximum(above, 0)] > before)
        if not climbs.any():
            break
        outermost = np.where(climbs, above, outermost)
    begins: Ints = np.maximum.accumulate(host.start_ns[outermost])
    return begins
