"""Iterations of recordings without marked steps: the passes in which the work repeats, where they are no layers."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import pass_evidence
from tracekit.ingest.readers.normalize.host_slices import Host, id_column
from tracekit.ingest.readers.normalize.pass_evidence import DECISIVE, ENOUGH, MODERATE, Passes, Recording
from tracekit.ingest.readers.normalize.steps import Steps
from tracekit.model import repetitions
from tracekit.model.nesting import Ints
from tracekit.model.repetitions import Repetition

_MIN_ALIKE_RATIO = 0.75
"""Share of all distinct kernels that recur in each pass, where the evidence is not decisive: on recordings of single
steps the best repetition has 0.6 or less, on recordings of several steps 0.8 or more."""
_MIN_ALIKE_OF_TWO = 0.9
_MIN_ALIKE_WITHIN = 0.9
_MARKED = ENOUGH + MODERATE
"""Weight of the evidence where passes that differ are iterations: what marks each, and an input or a result."""
_MIN_COVERED_RATIO = 0.5
_MIN_NAMES = 5
"""With fewer distinct kernels a repetition is the inside of an op."""
_MAX_MARKS = 16
_HOST = 0
"""The type of the host among those of devices that allocate memory."""


def with_iterations(
    host: Host, activities: pl.DataFrame, lanes: pl.DataFrame, memory: pl.DataFrame
) -> tuple[Host, pl.DataFrame]:
    """Return the host slices and activities of a recording without marked steps, in the iterations that are found.

    The work of the main lane, in order, is a sequence of kernel names; `activities` has column host_id, the slice that
    issued it, and `memory` at_ns and delta_bytes of each allocation. An iteration begins on the host with the outermost
    slice that issues its first kernel, and not the one before. Both are returned as they are if steps are marked or
    no iterations are found.
    """
    if len(host.steps.step):
        return host, activities
    work = _main_work(activities, lanes)
    if work.is_empty():
        return host, activities
    has_device = activities["lane"].is_in(lanes.filter(pl.col("device").is_not_null())["lane"].implode()).any()
    allocated = memory.filter((pl.col("device_type") != _HOST) if has_device else (pl.col("device_type") == _HOST))
    recording = Recording(host, work, activities, allocated)
    passes = [Passes(recording, repetition) for repetition in _candidates(recording)]
    loops = [candidate for candidate in passes if _is_loop(candidate)]
    if not loops:
        alike = [candidate for candidate in passes if candidate.repetition.alike_within_ratio >= _MIN_ALIKE_WITHIN]
        layers = max(alike, key=lambda candidate: candidate.repetition.alike_ratio, default=None)
        read_as = replace(host.steps, layers=layers.count, reason=layers.reason) if layers else host.steps
        return replace(host, steps=read_as), activities
    best = max(loops, key=lambda candidate: (candidate.weight, candidate.count))
    steps = _iteration_steps(best)
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


def _candidates(recording: Recording) -> Iterator[Repetition]:
    """Yield what may be passes: repetitions in the order of the work, and the work between marks of the program."""
    for repetition in repetitions.find_all(recording.codes, list(_marks(recording))):
        inside = recording.codes[repetition.starts[0] : repetition.end]
        if len(np.unique(inside)) >= _MIN_NAMES and len(inside) >= _MIN_COVERED_RATIO * len(recording.codes):
            yield repetition


def _marks(recording: Recording) -> Iterator[Ints]:
    """Yield the first work in each slice of a name, for annotations and modules that have most of the work."""
    host, spans = recording.host, recording.spans
    is_mark = recording.is_module[host.name_id] | host.is_kind("annotation")
    marks = spans.where(is_mark[spans.ids])
    names = pass_evidence.stems(host.names.name)
    names = pl.select(pl.when(pl.Series(recording.is_module)).then(host.names.name).otherwise(names)).to_series()
    table = pl.DataFrame(
        {"name": names.gather(host.name_id[marks.ids]), "first": marks.first, "end": marks.end, "id": marks.ids}
    ).sort("first", "id")
    apart = pl.col("first") >= pl.col("end").shift().over("name").fill_null(0)
    totals = table.group_by("name", maintain_order=True).agg(
        "first", apart.all().alias("is_apart"), (pl.col("end") - pl.col("first")).sum().alias("work"), pl.len()
    )
    is_most = pl.col("is_apart") & (pl.col("len") > 1) & (pl.col("work") >= _MIN_COVERED_RATIO * len(recording.codes))
    for first in totals.filter(is_most).sort("work", descending=True, maintain_order=True)["first"].head(_MAX_MARKS):
        yield first.to_numpy()


def _is_loop(passes: Passes) -> bool:
    """Return whether passes are iterations of a loop, rather than layers of one model or a coincidence.

    Nearly all that the recording has recurs in each pass; or what is in the passes does, and the evidence is decisive;
    or each has an annotation, or a call of the model, as a server's prefills and decodes, which have little in common.
    """
    repetition = passes.repetition
    is_alike = repetition.alike_ratio >= (_MIN_ALIKE_RATIO if repetition.count > 2 else _MIN_ALIKE_OF_TWO)
    if is_alike:
        return passes.weight >= ENOUGH
    if any(evidence.name in pass_evidence.IN_EACH for evidence in passes.evidence):
        return passes.weight >= _MARKED
    return repetition.alike_within_ratio >= _MIN_ALIKE_WITHIN and passes.weight >= DECISIVE


def _iteration_steps(passes: Passes) -> Steps:
    """Return the iterations, counted from 0: on the host if launches were recorded, else on the device."""
    repetition, host, work = passes.repetition, passes.recording.host, passes.recording.work
    starts, numbers = repetition.starts, np.arange(repetition.count)
    busy_ns = work["dur_ns"].to_numpy()
    covered = float(busy_ns[starts[0] : repetition.end].sum() / max(busy_ns.sum(), 1))
    ids = passes.recording.issuer_slices
    if ids is None:
        begin = work["start_ns"].to_numpy()
        after = begin[repetition.end] if repetition.end < len(begin) else (begin + busy_ns).max()
    else:
        # Start of the outermost slice that issued each piece of work, but began after the one before did.
        before = np.append(np.iinfo(np.int64).min, host.start_ns[ids[:-1]])
        outermost = ids.copy()
        while True:
            above = host.parent[outermost]
            climbs = (above >= 0) & (host.start_ns[np.maximum(above, 0)] > before)
            if not climbs.any():
                break
            outermost = np.where(climbs, above, outermost)
        begin = np.maximum.accumulate(host.start_ns[outermost])
        after = begin[repetition.end] if repetition.end < len(begin) else host.end_ns.max() + 1
    edges = np.append(begin[starts], after)
    return Steps(
        numbers, edges[:-1], edges[1:],
        alike_ratio=repetition.alike_ratio, covered_ratio=covered, on_device=ids is None, reason=passes.reason,
    )  # fmt: skip
