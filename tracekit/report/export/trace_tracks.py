"""A trace as a viewer shows it: slices and counters on named tracks, with what is known of each as arguments."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from tracekit.model.trace import Trace
from tracekit.rules.rule import Finding

ARGUMENTS = {
    "step": pl.Int64,
    "phase": pl.String,
    "unit": pl.String,
    "span": pl.String,
    "shapes": pl.String,
    "bytes": pl.Int64,
    "op": pl.String,
    "group": pl.String,
    "seq": pl.Int64,
    "dtype": pl.String,
    "sent_bytes": pl.Int64,
    "received_bytes": pl.Int64,
    "group_size": pl.Int64,
    "checkpoint": pl.String,
    "path": pl.String,
    "files": pl.Int64,
    "blocking": pl.Boolean,
    "code": pl.String,
    "severity": pl.String,
    "message": pl.String,
    "fix": pl.String,
}
SLICES = {
    "track": pl.Int64,
    "track_name": pl.String,
    "name": pl.String,
    "category": pl.String,
    "start_ns": pl.Int64,
    "dur_ns": pl.Int64,
    "source": pl.String,
    "id": pl.Int64,
    **ARGUMENTS,
}
COUNTERS = {"track": pl.Int64, "track_name": pl.String, "at_ns": pl.Int64, "value": pl.Int64}
FLOWS = {"launch_id": pl.Int64, "activity_id": pl.Int64}

# Tracks stand in this order; lanes of one section by their number.
_FINDINGS, _STEPS, _COMPUTE, _COMMUNICATION, _COPIES, CHECKPOINT_TRACK, _HOST, _MEMORY = range(0, 8 << 32, 1 << 32)
_SECTIONS = {"compute": _COMPUTE, "communication": _COMMUNICATION, "memcpy": _COPIES, "memset": _COPIES}


@dataclass(frozen=True, eq=False)
class Timeline:
    """What one trace puts on the screen, on its own clock.

    `slices` has columns SLICES: track (its place among the tracks), track_name, name, category, start_ns, dur_ns,
    source and id (table and row that it is), and ARGUMENTS, null where they don't apply. `counters` has COUNTERS,
    `flows` FLOWS: the launch (ops.id) and what it launched (activities.id), both of them among the slices.
    """

    slices: pl.DataFrame
    counters: pl.DataFrame
    flows: pl.DataFrame


def timeline(trace: Trace, findings: Iterable[Finding] = (), *, step: int | None = None) -> Timeline:
    """Return the timeline of a trace: every row of its tables, or what touches one step's time or was launched in it.

    A slice that reaches beyond the step stays whole. `findings` are those of the run; those of this trace are shown
    where their evidence lies, else over the whole of it.
    """
    parts = (_steps(trace), _work(trace), _checkpoints(trace), _host(trace))
    slices = _stacked([part for part in parts if part.height], SLICES)
    slices = pl.concat([_findings(trace, findings, slices), slices])
    counters = _counters(trace)
    if step is not None:
        slices, counters = _only_step(trace, slices, counters, step)
    return Timeline(slices, counters, _flows(trace, slices))


def with_tracks(rows: pl.DataFrame, trace: Trace, source: str) -> pl.DataFrame:
    """Return rows of a trace's table `source` (activities or ops) with columns track and track_name, by their lane.

    Tracks are numbered in the order in which they stand. A lane that no table lists still is one: nothing may fall out
    of the picture for want of a name.
    """
    lane = pl.col("lane").fill_null(-1)
    known = trace.lanes.select("lane", "role", "name")
    used = rows.select(lane).unique().join(known, on="lane", how="left")
    role = pl.col("role").replace({"memcpy": "copies", "memset": "copies"})
    section, name = pl.lit(_HOST), pl.format("host · {}", "name")
    if source == "activities":
        section = pl.col("role").replace_strict(_SECTIONS, default=_COMPUTE, return_dtype=pl.Int64)
        name = pl.format("{} · {}", role, "name")
    tracks = used.select(
        pl.col("lane").alias("_lane"),
        (section + pl.col("lane")).alias("track"),
        name.fill_null(pl.format("lane {}", "lane")).alias("track_name"),
    )
    keyed = rows.with_columns(lane.alias("_lane"))
    return keyed.join(tracks, on="_lane", how="left", maintain_order="left").drop("_lane")


def _stacked(parts: Sequence[pl.DataFrame], types: dict[str, type[pl.DataType]]) -> pl.DataFrame:
    empty = pl.DataFrame(schema=types)
    if not parts:
        return empty
    return pl.concat([empty, *parts], how="diagonal_relaxed").select(pl.col(name).cast(t) for name, t in types.items())


def _steps(trace: Trace) -> pl.DataFrame:
    several = trace.steps["device"].n_unique() > 1
    name = pl.format("steps · device {}", "device") if several else pl.lit("steps")
    return trace.steps.drop_nulls(["start_ns", "end_ns"]).select(
        (_STEPS + pl.col("device").fill_null(0)).alias("track"),
        name.alias("track_name"),
        pl.when(pl.col("step").is_null())
        .then(pl.lit("no steps marked"))
        .otherwise(pl.format("step {}", "step"))
        .alias("name"),
        pl.lit("step").alias("category"),
        "start_ns",
        (pl.col("end_ns") - pl.col("start_ns")).alias("dur_ns"),
        pl.lit("steps").alias("source"),
        "step",
    )


def _work(trace: Trace) -> pl.DataFrame:
    known = trace.collectives.rename({"activity_id": "id"})
    return (
        with_tracks(trace.activities, trace, "activities")
        .join(known, on="id", how="left", maintain_order="left")
        .with_columns(pl.col("kind").alias("category"), pl.lit("activities").alias("source"))
    )


def _checkpoints(trace: Trace) -> pl.DataFrame:
    return trace.checkpoints.select(
        pl.lit(CHECKPOINT_TRACK).alias("track"),
        pl.lit("checkpoint").alias("track_name"),
        pl.format("{} · {}", "operation", "stage").alias("name"),
        pl.lit("checkpoint").alias("category"),
        "start_ns",
        "dur_ns",
        pl.lit("checkpoints").alias("source"),
        "step",
        "bytes",
        "checkpoint",
        "path",
        "files",
        "blocking",
    ).drop_nulls(["start_ns", "dur_ns"])


def _host(trace: Trace) -> pl.DataFrame:
    return with_tracks(trace.ops, trace, "ops").with_columns(
        pl.col("kind").alias("category"), pl.lit("ops").alias("source")
    )


def _findings(trace: Trace, findings: Iterable[Finding], slices: pl.DataFrame) -> pl.DataFrame:
    first_ns, past_ns = slices.select(
        pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("dur_ns")).max().alias("past_ns")
    ).row(0)
    parts = []
    for found in findings:
        if first_ns is None or (found.ranks and trace.rank not in found.ranks):
            continue
        spans = _evidence(trace, found)
        if spans.is_empty():
            spans = pl.DataFrame({"start_ns": [first_ns], "dur_ns": [past_ns - first_ns]})
        parts.append(
            spans.with_columns(
                pl.lit(_FINDINGS).alias("track"),
                pl.lit("findings").alias("track_name"),
                pl.lit(f"{found.code} {found.message}").alias("name"),
                pl.lit("finding").alias("category"),
                pl.lit("findings").alias("source"),
                pl.lit(found.id).alias("code"),
                pl.lit(found.severity.label).alias("severity"),
                pl.lit(found.message).alias("message"),
                pl.lit(found.fix).alias("fix"),
            )
        )
    return _stacked(parts, SLICES)


def _evidence(trace: Trace, found: Finding) -> pl.DataFrame:
    """Return the moments in this trace that the evidence names: columns start_ns, dur_ns and maybe step."""
    rows = found.evidence
    if not {"rank", "start_ns", "dur_ns"} <= set(rows.columns):
        return pl.DataFrame(schema={"start_ns": pl.Int64, "dur_ns": pl.Int64})
    here = pl.col("rank") == trace.rank
    if "window" in rows.columns:
        here &= pl.col("window") == trace.window
    kept = [name for name in ("start_ns", "dur_ns", "step") if name in rows.columns]
    return rows.filter(here).select(kept).drop_nulls(["start_ns", "dur_ns"]).filter(pl.col("dur_ns") >= 0)


def _counters(trace: Trace) -> pl.DataFrame:
    place = pl.col("device").fill_null(-1) + 1
    where = pl.when(pl.col("device").is_null()).then(pl.lit("host")).otherwise(pl.format("device {}", "device"))
    parts = [
        trace.allocations.drop_nulls(column).select(
            (_MEMORY + 2 * place + number).alias("track"),
            pl.format("{} · {}", pl.lit(column.removesuffix("_bytes") + " memory"), where).alias("track_name"),
            "at_ns",
            pl.col(column).alias("value"),
        )
        for number, column in enumerate(("allocated_bytes", "reserved_bytes"))
    ]
    found = _stacked([part for part in parts if part.height], COUNTERS)
    # Memory that no allocator reserves (the host's) reads 0 throughout: a track of nothing.
    says_something = (pl.col("value") != 0).any().over("track")
    return found.filter(says_something).sort("track", "at_ns", maintain_order=True)


def _only_step(
    trace: Trace, slices: pl.DataFrame, counters: pl.DataFrame, step: int
) -> tuple[pl.DataFrame, pl.DataFrame]:
    edges = trace.steps.filter(pl.col("step") == step).select(
        pl.min_horizontal("host_start_ns", "start_ns").min().alias("first_ns"),
        pl.max_horizontal("host_end_ns", "end_ns").max().alias("past_ns"),
    )
    first_ns, past_ns = edges.row(0)
    if first_ns is None or past_ns is None:
        return slices.clear(), counters.clear()
    start_ns, end_ns = pl.col("start_ns"), pl.col("start_ns") + pl.col("dur_ns")
    touches = (start_ns < past_ns) & ((end_ns > first_ns) | (start_ns >= first_ns))
    launched = (pl.col("source") == "activities") & (pl.col("step") == step)
    return (
        slices.filter(touches | launched.fill_null(value=False)),
        counters.filter(pl.col("at_ns").is_between(first_ns, past_ns, closed="left")),
    )


def _flows(trace: Trace, slices: pl.DataFrame) -> pl.DataFrame:
    """Return the launches of other lanes: on a CPU run most activities are the op itself, which needs no arrow."""
    shown = slices.filter(pl.col("source") == "activities").select(pl.col("id").alias("activity_id"))
    launches = slices.filter(pl.col("source") == "ops").select(pl.col("id").alias("launch_id"))
    issued = trace.ops.select(pl.col("id").alias("launch_id"), pl.col("lane").alias("launch_lane"))
    return (
        trace.activities.select("launch_id", pl.col("id").alias("activity_id"), "lane")
        .drop_nulls()
        .join(issued, on="launch_id")
        .filter(pl.col("lane") != pl.col("launch_lane"))
        .join(shown, on="activity_id", how="semi")
        .join(launches, on="launch_id", how="semi")
        .sort("launch_id", "activity_id")
        .select(pl.col("launch_id").cast(pl.Int64), pl.col("activity_id").cast(pl.Int64))
    )
