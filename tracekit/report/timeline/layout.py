"""Where each slice of a trace is drawn: its track, the row in it, its time on the clock of the run.

A track is a lane of the trace, as in the Perfetto export (`report.export.trace_tracks`): first the work of streams
(compute, communication, copies), or of host threads on a CPU run; then checkpoint stages; then the slices of host
threads. In a track, a slice lies one row below the slice that encloses it. Slices that overlap without nesting go to
separate layers (`report.export.track_nesting`), and the rows of a layer lie below those of the layer before it. So the
slices of one row never overlap.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.model.nesting import Ints
from tracekit.model.trace import Trace
from tracekit.report.export import trace_tracks, track_nesting

TRACKS = {
    "group": pl.String, "label": pl.String, "role": pl.String, "source": pl.String, "lane": pl.Int64, "rows": pl.Int64,
}  # fmt: skip
BANDS = {
    "rank": pl.Int64, "kind": pl.String, "name": pl.String, "start_ns": pl.Int64, "end_ns": pl.Int64,
}  # fmt: skip
STEP, UNIT = "step", "unit"
"""Kinds of bands."""
_ROLES = {"communication": "communication", "memcpy": "copy", "memset": "copy"}

ToRunClock = Callable[[Ints], Ints]


@dataclass(frozen=True, eq=False)
class TraceLayout:
    """The slices of one trace, sorted by track, row and start, on the clock of the run.

    `tracks` has columns TRACKS, one row per track, from the top; `track` is an index into it. `named` (columns name,
    kind) holds what slices are called, `name` is an index into it. `id` is that of the row of the table `source` (for
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
    """Lay out a trace; `moved` takes times of the trace to the clock of the run and lets none overtake another."""
    slices = pl.concat([_work(trace), _checkpoints(trace), _host(trace)])
    start_ns, dur_ns = _moved(slices, to_run_clock)
    tracks = _tracks(trace, slices)
    named, name = _named(slices)
    track = np.searchsorted(tracks["order"].to_numpy(), slices["order"].to_numpy())
    ids = slices["id"].to_numpy()
    del slices
    row = track_nesting.rows(track, start_ns, dur_ns)
    rows = np.zeros(tracks.height, np.int64)
    np.maximum.at(rows, track, row + 1)
    sequence = np.lexsort((start_ns, row, track))
    return TraceLayout(
        tracks.with_columns(pl.Series("rows", rows, pl.Int64)).select(list(TRACKS)),
        named,
        pl.concat([_steps(trace, to_run_clock), _units(trace, to_run_clock)]),
        *(each[sequence] for each in (track, row, start_ns, dur_ns, name, ids)),
    )


# Slices --------------------------------------------------------------------------------------------------------------


def _work(trace: Trace) -> pl.DataFrame:
    return _placed(trace_tracks.with_tracks(_few(trace.activities), trace, "activities"), "activities")


def _host(trace: Trace) -> pl.DataFrame:
    return _placed(trace_tracks.with_tracks(_few(trace.ops), trace, "ops"), "ops")


def _few(table: pl.DataFrame) -> pl.DataFrame:
    return table.select("lane", "id", "name", "kind", "start_ns", "dur_ns")


def _checkpoints(trace: Trace) -> pl.DataFrame:
    stages = trace.checkpoints.select(
        pl.lit(trace_tracks.CHECKPOINT_TRACK).alias("track"),
        pl.int_range(pl.len()).cast(pl.Int64).alias("id"),
        pl.format("{} · {}", "operation", "stage").alias("name"),
        pl.lit("checkpoint").alias("kind"),
        "start_ns",
        "dur_ns",
    )
    return _placed(stages, "checkpoints")


def _placed(rows: pl.DataFrame, source: str) -> pl.DataFrame:
    return rows.select(
        pl.col("track").cast(pl.Int64).alias("order"),
        pl.lit(source).alias("source"),
        "id",
        pl.col("name").fill_null("?"),
        pl.col("kind").fill_null("?"),
        "start_ns",
        pl.col("dur_ns").clip(0),
    ).drop_nulls(["start_ns", "dur_ns"])


def _moved(rows: pl.DataFrame, moved: ToRunClock) -> tuple[Ints, Ints]:
    start_ns = moved(rows["start_ns"].to_numpy())
    return start_ns, moved((rows["start_ns"] + rows["dur_ns"]).to_numpy()) - start_ns


def _named(slices: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    """Return the distinct names with their kinds, in the order in which they come, and which of them each slice has."""
    name, kind = (slices[column].cast(pl.Categorical).to_physical().to_numpy() for column in ("name", "kind"))
    key = name.astype(np.int64) * (int(kind.max(initial=0)) + 1) + kind
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)  # codes differ from process to process
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return slices.select("name", "kind")[first[order]], place[which]


# Tracks --------------------------------------------------------------------------------------------------------------


def _tracks(trace: Trace, slices: pl.DataFrame) -> pl.DataFrame:
    # What is on no lane is on lane -1 of its section.
    lane = (pl.col("order") + 1) % (1 << 32) - 1
    found = slices.select("order", "source").unique().sort("order")
    is_work, is_save = pl.col("source") == "activities", pl.col("source") == "checkpoints"
    process = pl.concat_str(pl.lit("host"), pl.format("pid {}", "pid"), separator=" ", ignore_nulls=True)
    group = (
        pl.when(is_save)
        .then(pl.lit("checkpoints"))
        .when(pl.col("device").is_not_null())
        .then(pl.format("GPU {}", "device"))
        .when(is_work)
        .then(pl.lit("CPU work"))
        .otherwise(process)
    )
    of_work = pl.col("role").replace_strict(_ROLES, default="compute", return_dtype=pl.String)
    role = pl.when(is_save).then(pl.lit("checkpoint")).when(is_work).then(of_work).otherwise(pl.lit("host"))
    label = pl.when(is_save).then(pl.lit("saves and loads")).otherwise("name")
    return (
        found.with_columns(lane.alias("lane"))
        .join(trace.lanes, on="lane", how="left", maintain_order="left")
        .select(
            "order",
            "source",
            group.alias("group"),
            label.fill_null(pl.format("lane {}", "lane")).alias("label"),
            role.alias("role"),
            pl.when(~is_save & (pl.col("lane") >= 0)).then("lane").alias("lane"),
        )
    )


# Bands ---------------------------------------------------------------------------------------------------------------


def _steps(trace: Trace, moved: ToRunClock) -> pl.DataFrame:
    steps = trace.steps.drop_nulls(["start_ns", "end_ns"])
    name = pl.when(pl.col("step").is_null()).then(pl.lit("no steps marked")).otherwise(pl.format("step {}", "step"))
    return _banded(trace, STEP, steps.select(name.alias("name"), "start_ns", "end_ns"), moved)


def _units(trace: Trace, moved: ToRunClock) -> pl.DataFrame:
    """Return when the compute lane of each device was at which FSDP unit: stretches of work that has no other."""
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
    return _banded(trace, UNIT, stretches.sort("stretch").select("name", "start_ns", "end_ns"), moved)


def _banded(trace: Trace, kind: str, rows: pl.DataFrame, moved: ToRunClock) -> pl.DataFrame:
    times = [pl.Series(name, moved(rows[name].to_numpy()), pl.Int64) for name in ("start_ns", "end_ns")]
    told = rows.with_columns(*times, pl.lit(trace.rank, pl.Int64).alias("rank"), pl.lit(kind).alias("kind"))
    return told.select(pl.col(name).cast(dtype) for name, dtype in BANDS.items()).sort("start_ns", "end_ns")
