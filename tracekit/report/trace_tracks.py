"""The slices, tracks, counters and flows of a trace: one source for the dashboard, the HTML report and Perfetto."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import polars as pl

from tracekit.model import schema
from tracekit.model.intervals import Window
from tracekit.model.trace import Trace
from tracekit.rules.rule import Finding

_NO_ARGUMENTS = ("id", "name", "kind", "start_ns", "dur_ns", "activity_id")
ARGUMENTS = {
    column.name: column.dtype
    for table in (schema.OPS, schema.ACTIVITIES, schema.COLLECTIVES, schema.CHECKPOINTS)
    for column in table.columns
    if column.name not in _NO_ARGUMENTS
} | schema.columns("code severity message fix", severity=pl.String, fix=pl.String)
SLICES = schema.columns("track track_name name category start_ns dur_ns source id", category=pl.String) | ARGUMENTS
COUNTERS = {"track": pl.Int64, "track_name": pl.String, "at_ns": pl.Int64, "value": pl.Int64}
FLOWS = {"launch_id": pl.Int64, "activity_id": pl.Int64}

# Tracks stand in this order; lanes of one section by their number.
_FINDINGS, _STEPS, _COMPUTE, _COMMUNICATION, _COPIES, CHECKPOINT_TRACK, _HOST, _MEMORY = range(0, 8 << 32, 1 << 32)
_PATH = _FINDINGS + 1
_SECTIONS = {"compute": _COMPUTE, "communication": _COMMUNICATION, "memcpy": _COPIES, "memset": _COPIES}


TRACKS = schema.columns("track track_name group label role source lane")
_ROLES = {"communication": "communication", "memcpy": "copy", "memset": "copy"}
_SLICE_COLUMNS = ("track", "source", "id", "name", "kind", "start_ns", "dur_ns")


@dataclass(frozen=True, eq=False)
class Timeline:
    """What a viewer shows of one trace, on the clock of the trace.

    `slices` has columns SLICES: track (its place among the tracks), track_name, name, category, start_ns, dur_ns,
    source and id (the table and its row), and ARGUMENTS, null where they don't apply. `counters` has COUNTERS, `flows`
    FLOWS: the launch (ops.id) and the activity that it launched (activities.id), both of them among the slices.
    """

    slices: pl.DataFrame
    counters: pl.DataFrame
    flows: pl.DataFrame


def timeline(
    trace: Trace, findings: Iterable[Finding] = (), *, step: int | None = None, path: pl.DataFrame | None = None
) -> Timeline:
    """Return the timeline of a trace: every row of its tables, or those of one step.

    Rows of a step overlap its time or were launched in it; a slice that extends beyond the step is not cut. The
    findings that concern this trace are shown at the times of their evidence, or over the whole trace. `path` has the
    parts of the critical path on this rank: columns kind, name, unit, phase, start_ns and dur_ns.
    """
    table = slices(trace, tuple(ARGUMENTS))
    names = tracks(trace, table).select("track", "track_name")
    named_slices = table.join(names, on="track", how="left", maintain_order="left").rename({"kind": "category"})
    rows = _concat([part for part in (_steps(trace), named_slices) if part.height], SLICES)
    rows = pl.concat([_findings(trace, findings, rows), *_path(path), rows])
    counters = _counters(trace)
    if step is not None:
        rows, counters = _only_step(trace, rows, counters, step)
    return Timeline(rows, counters, _flows(trace, rows))


def slices(trace: Trace, columns: Sequence[str] = (), *, window: Window | None = None) -> pl.DataFrame:
    """Return the slices of a trace: activities, checkpoint stages, host slices. All viewers draw these.

    Columns track, source (the table), id (its row), name, kind, start_ns, dur_ns and those of `columns` that the tables
    have; one row per slice. `window` selects the slices that touch it, in ns.
    """
    activities = trace.activities if window is None else touching(trace.activities, window)
    if set(columns) & set(trace.collectives.columns):
        collectives = trace.collectives.rename({"activity_id": "id"})
        activities = activities.join(collectives, on="id", how="left", maintain_order="left")
    checkpoints = trace.checkpoints.select(
        pl.lit(CHECKPOINT_TRACK, pl.Int64).alias("track"),
        pl.int_range(pl.len()).cast(pl.Int64).alias("id"),
        pl.format("{} · {}", "operation", "stage").alias("name"),
        pl.lit("checkpoint").alias("kind"),
        *(name for name in ("start_ns", "dur_ns", *columns) if name in trace.checkpoints.columns),
    ).drop_nulls(["start_ns", "dur_ns"])
    tables = {
        "activities": _with_track(activities, trace, "activities"),
        "checkpoints": checkpoints if window is None else touching(checkpoints, window),
        "ops": _with_track(trace.ops if window is None else touching(trace.ops, window), trace, "ops"),
    }
    parts = [
        table.with_columns(pl.lit(source).alias("source")).select(
            *_SLICE_COLUMNS, *(name for name in columns if name in table.columns)
        )
        for source, table in tables.items()
    ]
    return pl.concat(parts, how="diagonal" if columns else "vertical")


def touching(table: pl.DataFrame, window: Window) -> pl.DataFrame:
    """Return the rows with start_ns and dur_ns that touch a window."""
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    return table.filter(pl.col("start_ns") < window[1], (end_ns > window[0]) | (pl.col("start_ns") >= window[0]))


def tracks(trace: Trace, table: pl.DataFrame) -> pl.DataFrame:
    """Return the tracks of the slices in `table`, from the top. Columns TRACKS; one row per track.

    `track_name` names a track in a flat list, `group` and `label` in a tree; `role` is compute, communication, copy,
    checkpoint or host. A slice whose lane is missing from the trace's lanes has a track "lane N".
    """
    # Slices without a lane are on lane -1 of their section.
    lane = (pl.col("track") + 1) % (1 << 32) - 1
    device = pl.format("GPU {}", "device")
    of_host = pl.concat_str(pl.lit("host"), pl.format("pid {}", "pid"), separator=" ", ignore_nulls=True)
    # Kineto writes its own overhead as slices of process -1.
    process = pl.when(pl.col("pid").cast(pl.String) == "-1").then(pl.lit("profiler")).otherwise(of_host)
    group = _by_source("checkpoints", pl.coalesce(device, pl.lit("CPU work")), pl.coalesce(device, process))
    role = pl.col("role").replace_strict(_ROLES, default="compute", return_dtype=pl.String)
    section = pl.col("role").replace({"memcpy": "copies", "memset": "copies"})
    track_name = _by_source("checkpoint", pl.format("{} · {}", section, "name"), pl.format("host · {}", "name"))
    unnamed = pl.format("lane {}", "lane")
    return (
        table.select("track", "source")
        .unique()
        .sort("track")
        .with_columns(lane.alias("lane"))
        .join(trace.lanes, on="lane", how="left", maintain_order="left")
        .select(
            "track",
            track_name.fill_null(unnamed).alias("track_name"),
            group.alias("group"),
            _by_source("saves and loads", pl.col("name"), pl.col("name")).fill_null(unnamed).alias("label"),
            _by_source("checkpoint", role, pl.lit("host")).alias("role"),
            "source",
            pl.when(pl.col("source") != "checkpoints", pl.col("lane") >= 0).then("lane").alias("lane"),
        )
    )


def _by_source(save: str, work: pl.Expr, host: pl.Expr) -> pl.Expr:
    """Return the text of a track of checkpoints, of activities or of host slices."""
    is_save, is_work = pl.col("source") == "checkpoints", pl.col("source") == "activities"
    return pl.when(is_save).then(pl.lit(save)).when(is_work).then(work).otherwise(host)


def evidence_spans(findings: Iterable[Finding], *, rank: int, window: int) -> pl.DataFrame:
    """Return the evidence of findings in one trace: columns name (the rule's code), start_ns, dur_ns."""
    spans = [_evidence(rank, window, finding).with_columns(pl.lit(finding.code).alias("name")) for finding in findings]
    return _concat(spans, {"name": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64})


def _with_track(rows: pl.DataFrame, trace: Trace, source: str) -> pl.DataFrame:
    """Return rows of a table with the track of their lane. Tracks are numbered in the order in which they are shown."""
    lane = pl.col("lane").fill_null(-1)
    if source == "ops":
        return rows.with_columns((_HOST + lane).alias("track"))
    section = pl.col("role").replace_strict(_SECTIONS, default=_COMPUTE, return_dtype=pl.Int64)
    sections = trace.lanes.select("lane", section.alias("_section"))
    joined = rows.join(sections, on="lane", how="left", maintain_order="left")
    return joined.with_columns((pl.col("_section").fill_null(_COMPUTE) + lane).alias("track"))


def _concat(parts: Sequence[pl.DataFrame], types: schema.ColumnTypes) -> pl.DataFrame:
    empty = pl.DataFrame(schema=dict(types))
    if not parts:
        return empty
    return pl.concat([empty, *parts], how="diagonal_relaxed").pipe(schema.select, types)


def _steps(trace: Trace) -> pl.DataFrame:
    several = trace.steps["device"].n_unique() > 1
    name = pl.format("steps · device {}", "device") if several else pl.lit("steps")
    return step_spans(trace).select(
        (_STEPS + pl.col("device").fill_null(0)).alias("track"),
        name.alias("track_name"),
        "name",
        pl.lit("step").alias("category"),
        "start_ns",
        (pl.col("end_ns") - pl.col("start_ns")).alias("dur_ns"),
        pl.lit("steps").alias("source"),
        "step",
    )


def step_spans(trace: Trace) -> pl.DataFrame:
    """Return the trace's steps that have a device window: columns of `schema.STEPS`, and name."""
    name = pl.when(pl.col("step").is_null()).then(pl.lit("no steps marked")).otherwise(pl.format("step {}", "step"))
    return trace.steps.drop_nulls(["start_ns", "end_ns"]).with_columns(name.alias("name"))


def _path(parts: pl.DataFrame | None) -> Iterator[pl.DataFrame]:
    """Yield the critical path's parts on a rank as slices of a track below the findings."""
    if parts is None or parts.is_empty():
        return
    path_slices = parts.rename({"kind": "category"}).with_columns(
        pl.lit(_PATH).alias("track"),
        pl.lit("critical path").alias("track_name"),
        pl.lit("critical_path").alias("source"),
    )
    yield _concat([path_slices.select(name for name in SLICES if name in path_slices.columns)], SLICES)


def _findings(trace: Trace, findings: Iterable[Finding], slices: pl.DataFrame) -> pl.DataFrame:
    first_ns, past_ns = slices.select(
        pl.col("start_ns").min(), (pl.col("start_ns") + pl.col("dur_ns")).max().alias("past_ns")
    ).row(0)
    parts = []
    for finding in findings:
        if first_ns is None or (finding.ranks and trace.rank not in finding.ranks):
            continue
        spans = _evidence(trace.rank, trace.window, finding)
        if spans.is_empty():
            spans = pl.DataFrame({"start_ns": [first_ns], "dur_ns": [past_ns - first_ns]})
        parts.append(
            spans.with_columns(
                pl.lit(_FINDINGS).alias("track"),
                pl.lit("findings").alias("track_name"),
                pl.lit(f"{finding.code} {finding.sentence}").alias("name"),
                pl.lit("finding").alias("category"),
                pl.lit("findings").alias("source"),
                pl.lit(finding.id).alias("code"),
                pl.lit(finding.severity.label).alias("severity"),
                pl.lit(finding.message).alias("message"),
                pl.lit(finding.fix).alias("fix"),
            )
        )
    return _concat(parts, SLICES)


def _evidence(rank: int, window: int, finding: Finding) -> pl.DataFrame:
    """Return the times in one trace that the evidence names: columns start_ns, dur_ns, and step if known."""
    rows = finding.evidence
    if not {"rank", "start_ns", "dur_ns"} <= set(rows.columns):
        return pl.DataFrame(schema={"start_ns": pl.Int64, "dur_ns": pl.Int64})
    in_trace = pl.col("rank") == rank
    if "window" in rows.columns:
        in_trace &= pl.col("window").fill_null(0) == window
    columns = [name for name in ("start_ns", "dur_ns", "step") if name in rows.columns]
    return rows.filter(in_trace).select(columns).drop_nulls(["start_ns", "dur_ns"]).filter(pl.col("dur_ns") >= 0)


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
    counters = _concat([part for part in parts if part.height], COUNTERS)
    # Memory that no allocator reserves (the host's) reads 0 throughout: a track of nothing.
    says_something = (pl.col("value") != 0).any().over("track")
    return counters.filter(says_something).sort("track", "at_ns", maintain_order=True)


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
    activities = slices.filter(pl.col("source") == "activities").select(activity_id="id")
    launches = slices.filter(pl.col("source") == "ops").select(launch_id="id")
    issued = trace.ops.select(launch_id="id", launch_lane="lane")
    return (
        trace.activities.select("launch_id", "lane", activity_id="id")
        .drop_nulls()
        .join(issued, on="launch_id")
        .filter(pl.col("lane") != pl.col("launch_lane"))
        .join(activities, on="activity_id", how="semi")
        .join(launches, on="launch_id", how="semi")
        .sort("launch_id", "activity_id")
        .select(pl.col("launch_id").cast(pl.Int64), pl.col("activity_id").cast(pl.Int64))
    )
