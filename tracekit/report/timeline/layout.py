"""Where each slice of a trace is drawn: its track, its row, its time on the clock of the run.

A track is a lane of the trace, as in the Perfetto export (`report.trace_tracks`): first the work of streams
(compute, communication, copies), or of host threads on a CPU run; then checkpoint stages; then the slices of host
threads. In a track, a slice lies one row below the slice that encloses it. Slices that overlap without nesting go to
separate layers (`report.track_nesting`), and the rows of a layer lie below those of the layer before it. So the
slices of one row never overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.nesting import Ints
from tracekit.model.trace import Trace
from tracekit.report import trace_tracks, track_nesting

TRACKS = schema.columns("group label role source lane rows")
BANDS = schema.columns("rank kind name start_ns end_ns")
STEP, UNIT = "step", "unit"
"""Kinds of bands."""

ToRunClock = Callable[[Ints], Ints]


@dataclass(frozen=True, eq=False)
class TraceLayout:
    """The slices of one trace, sorted by track, row and start, on the clock of the run.

    `tracks` has columns TRACKS, one row per track, from the top; `track` is an index into it. `named` (columns name,
    kind) holds the distinct names, `name` is an index into it. `id` is that of the row of the table `source` (for
    checkpoints its place in the table). `bands` has columns BANDS.
    """

    tracks: pl.DataFrame
    names: pl.DataFrame
    bands: pl.DataFrame
    track: Ints
    row: Ints
    start_ns: Ints
    dur_ns: Ints
    name: Ints
    id: Ints


def lay_out(trace: Trace, to_run_clock: ToRunClock) -> TraceLayout:
    """Lay out a trace; `to_run_clock` converts times of the trace to the clock of the run and keeps their order."""
    slices = (
        trace_tracks.slices(trace)
        .with_columns(pl.col("name", "kind").fill_null("?"), pl.col("dur_ns").clip(0))
        .drop_nulls(["start_ns", "dur_ns"])
    )
    start_ns = to_run_clock(slices["start_ns"].to_numpy())
    dur_ns = to_run_clock((slices["start_ns"] + slices["dur_ns"]).to_numpy()) - start_ns
    tracks = trace_tracks.tracks(trace, slices)
    names, name = _distinct_names(slices)
    track = np.searchsorted(tracks["track"].to_numpy(), slices["track"].to_numpy())
    ids = slices["id"].to_numpy()
    del slices
    row = track_nesting.rows(track, start_ns, dur_ns)
    rows = np.zeros(tracks.height, np.int64)
    np.maximum.at(rows, track, row + 1)
    sequence = np.lexsort((start_ns, row, track))
    return TraceLayout(
        tracks.with_columns(pl.Series("rows", rows, pl.Int64)).select(list(TRACKS)),
        names,
        pl.concat(
            [
                _bands(trace, STEP, trace_tracks.step_spans(trace), to_run_clock),
                _bands(trace, UNIT, _unit_spans(trace), to_run_clock),
            ]
        ),
        *(values[sequence] for values in (track, row, start_ns, dur_ns, name, ids)),
    )


def _distinct_names(slices: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    """Return the distinct names with their kinds, in the order in which they come, and which of them each slice has."""
    name, kind = (slices[column].cast(pl.Categorical).to_physical().to_numpy() for column in ("name", "kind"))
    key = name.astype(np.int64) * (int(kind.max(initial=0)) + 1) + kind
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)  # codes differ from process to process
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return slices.select("name", "kind")[first[order]], place[which]


# Bands ---------------------------------------------------------------------------------------------------------------


def _unit_spans(trace: Trace) -> pl.DataFrame:
    """Spans in which the compute lane of each device works on one FSDP unit without interruption."""
    compute = trace.activities.filter(pl.col("kind") == "compute").drop_nulls("unit")
    devices = trace.lanes.select("lane", "device")
    busy = compute.group_by("lane").agg(pl.col("dur_ns").sum()).join(devices, on="lane", how="left")
    main = busy.sort("dur_ns", "lane", descending=[True, False]).unique("device", keep="first")
    work = compute.join(main.select("lane"), on="lane", how="semi").sort("lane", "start_ns", "id")
    unit = pl.when(pl.col("unit") == "").then(pl.lit("root")).otherwise("unit")
    name = pl.concat_str(unit, "phase", separator=" · ", ignore_nulls=True)
    stretches = work.group_by(pl.struct("lane", "step", "phase", "unit").rle_id().alias("stretch")).agg(
        name.first().alias("name"),
        pl.col("start_ns").min(),
        (pl.col("start_ns") + pl.col("dur_ns")).max().alias("end_ns"),
    )
    return stretches.sort("stretch")


def _bands(trace: Trace, kind: str, rows: pl.DataFrame, to_run_clock: ToRunClock) -> pl.DataFrame:
    times = [pl.Series(name, to_run_clock(rows[name].to_numpy()), pl.Int64) for name in ("start_ns", "end_ns")]
    spans = rows.with_columns(*times, pl.lit(trace.rank, pl.Int64).alias("rank"), pl.lit(kind).alias("kind"))
    return schema.select(spans, BANDS).sort("start_ns", "end_ns")
