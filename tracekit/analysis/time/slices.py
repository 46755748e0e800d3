"""What a timeline shows of one trace in one window: slices in tracks, and fewer of them where there are too many."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.model.intervals import Window
from tracekit.model.trace import Trace

PHASE_TRACK = "phases"
HOST_KINDS = ("cpu_op", "annotation", "runtime", "overhead")
_ROLE_ORDER = ("phase", "compute", "communication", "memcpy", "memset", "host")

COLUMNS = {
    "track": pl.Int64,
    "track_name": pl.String,
    "lane": pl.Int64,
    "role": pl.String,
    "depth": pl.Int64,
    "kind": pl.String,
    "name": pl.String,
    "start_ns": pl.Int64,
    "dur_ns": pl.Int64,
    "step": pl.Int64,
    "phase": pl.String,
    "unit": pl.String,
    "bytes": pl.Int64,
    "count": pl.Int64,
}


def slices(trace: Trace, window: Window, *, max_depth: int = 7, max_host_tracks: int = 3) -> pl.DataFrame:
    """Return the slices that touch `window`, each with the track it is drawn on.

    Columns track, track_name, lane (null for phases), role, depth, kind, name, start_ns, dur_ns, step, phase, unit,
    bytes, count (1); one row per slice. Tracks are numbered from the top: phases of the step, then lanes with work
    (compute, communication, copies), then the `max_host_tracks` busiest host threads that are no communication lanes.
    Slices that run at once on one track lie at different depths; those deeper than `max_depth` are left out. Python
    frames are left out.
    """
    parts = (_phases(trace, window), _work(trace, window), _host(trace, window, max_host_tracks))
    found = pl.concat([pl.DataFrame(schema=COLUMNS), *(_conform(part) for part in parts if part.height)])
    return _numbered(_with_depth(found)).filter(pl.col("depth") < max_depth)


def merge_short_slices(table: pl.DataFrame, window: Window, *, max_slices: int) -> tuple[pl.DataFrame, int]:
    """Return at most about `max_slices` slices, and the duration in ns below which neighbours were merged (0: none).

    Slices of one track, depth and kind that are shorter than a share of the window too narrow to see become one, from
    the first start to the last end, with their number in `count`. The share doubles until the rest fits.
    """
    if table.height <= max_slices:
        return table, 0
    quantum_ns = max((window[1] - window[0]) // 20_000, 1)
    merged = _merge(table, quantum_ns)
    while merged.height > max_slices and quantum_ns < window[1] - window[0]:
        quantum_ns *= 2
        merged = _merge(table, quantum_ns)
    return merged, quantum_ns


def representative_step(steps: pl.DataFrame) -> dict[str, int | None] | None:
    """Return the row to look at first: of the slowest rank, the step nearest to its median.

    `steps` is a run's breakdown by step, with the columns of `analysis.breakdown` after window and rank. None where it
    has no rows.
    """
    if steps.is_empty():
        return None
    means = (
        steps.group_by("rank").agg(pl.col("duration_ns").mean()).sort("duration_ns", "rank", descending=[True, False])
    )
    of_rank = steps.filter(pl.col("rank") == means["rank"][0])
    distance_ns = (pl.col("duration_ns") - pl.col("duration_ns").median()).abs()
    return of_rank.sort(distance_ns, "window", "start_ns").row(0, named=True)


def _conform(part: pl.DataFrame) -> pl.DataFrame:
    present = set(part.columns)
    return part.select(
        (pl.col(name) if name in present else pl.lit(None)).cast(dtype).alias(name) for name, dtype in COLUMNS.items()
    )


def _inside(table: pl.DataFrame, window: Window) -> pl.DataFrame:
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    return table.filter(pl.col("start_ns") < window[1], (end_ns > window[0]) | (pl.col("start_ns") >= window[0]))


def _phases(trace: Trace, window: Window) -> pl.DataFrame:
    phase = pl.col("name").str.strip_prefix(conventions.SPAN_PREFIX)
    spans = trace.ops.filter(pl.col("kind") == "annotation", phase.is_in(conventions.PHASES), phase != pl.col("name"))
    return _inside(spans, window).with_columns(
        phase.alias("name"), kind=pl.lit("phase"), track_name=pl.lit(PHASE_TRACK), role=pl.lit("phase"), count=pl.lit(1)
    )


def _work(trace: Trace, window: Window) -> pl.DataFrame:
    role = pl.col("role").replace({"memcpy": "copies", "memset": "copies"})
    lanes = trace.lanes.select("lane", "role", pl.format("{} · {}", role, "name").alias("track_name"))
    return _inside(trace.activities, window).join(lanes, on="lane").with_columns(count=pl.lit(1))


def _host(trace: Trace, window: Window, max_tracks: int) -> pl.DataFrame:
    # What a thread of collectives runs on the host is part of the collective, which has its own track.
    others = trace.lanes.filter(pl.col("role").ne_missing("communication")).select("lane")
    ops = _inside(trace.ops.filter(pl.col("kind").is_in(HOST_KINDS)).join(others, on="lane", how="semi"), window)
    busiest = ops.group_by("lane").len().sort("len", "lane", descending=[True, False]).head(max_tracks)
    named = busiest.join(trace.lanes, on="lane").select(
        "lane", pl.format("host · {}", "name").alias("track_name"), pl.lit("host").alias("role")
    )
    return ops.join(named, on="lane").with_columns(count=pl.lit(1))


def _with_depth(table: pl.DataFrame) -> pl.DataFrame:
    ordered = table.sort("lane", "role", "start_ns", -pl.col("dur_ns"), maintain_order=True)
    parts = [_depth_of_track(part) for part in ordered.partition_by("lane", "role", maintain_order=True)]
    return pl.concat(parts) if parts else table


def _depth_of_track(track: pl.DataFrame) -> pl.DataFrame:
    # Slices that began before, less those that ended by then: how many are still open, without walking a stack.
    start_ns = track.get_column("start_ns").to_numpy()
    end_ns = np.maximum(start_ns + track.get_column("dur_ns").to_numpy(), start_ns + 1)
    open_before = np.arange(len(start_ns)) - np.searchsorted(np.sort(end_ns), start_ns, side="right")
    return track.with_columns(pl.Series("depth", np.maximum(open_before, 0)))


def _numbered(table: pl.DataFrame) -> pl.DataFrame:
    order = {role: index for index, role in enumerate(_ROLE_ORDER)}
    rank = pl.col("role").replace_strict(order, default=len(order), return_dtype=pl.Int64)
    busy = table.group_by("lane", "role").agg(pl.col("dur_ns").sum().alias("busy_ns"))
    tracks = busy.sort(rank, -pl.col("busy_ns"), "lane").with_row_index("number")
    numbered = table.join(tracks.drop("busy_ns"), on=["lane", "role"], nulls_equal=True)
    return (
        numbered.with_columns(pl.col("number").cast(pl.Int64).alias("track"))
        .select(*COLUMNS)
        .sort("track", "start_ns", "depth")
    )


def _merge(table: pl.DataFrame, quantum_ns: int) -> pl.DataFrame:
    short = pl.col("dur_ns") < quantum_ns
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    same = ("track", "track_name", "lane", "role", "depth", "kind")
    merged = (
        table.filter(short)
        .with_columns((pl.col("start_ns") // quantum_ns).alias("bin"), end_ns.alias("end_ns"))
        .group_by(*same, "bin")
        .agg(
            pl.col("name", "step", "phase", "unit").first(),
            pl.col("bytes", "count").sum(),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
        )
        .with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("dur_ns"))
    )
    return pl.concat([table.filter(~short), _conform(merged)]).sort("track", "start_ns", "depth")
