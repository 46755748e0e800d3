"""Perfetto files to Traces: exports of tracekit as they were, others by the categories of PyTorch's profiler."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)
from tracekit.errors import BadTraceError
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.normalize import activities, numbers
from tracekit.ingest.readers.perfetto import events, packets, pytorch_slices
from tracekit.ingest.readers.perfetto import events as event_columns
from tracekit.ingest.readers.perfetto.events import Arguments, Events
from tracekit.ingest.readers.perfetto.wire import Ints
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model import environment, schema
from tracekit.model.trace import Trace

_OPS = ("cpu_op", "annotation", "runtime", "python", "overhead", "os_call")
_ACTIVITIES = ("compute", "communication", "memcpy", "memset")
_CHECKPOINT = "checkpoint"
_ID = "id"
_RUN_ISSUES = {
    "rank": pl.Int64(), "path": pl.String(), "kind": pl.String(), "message": pl.String(),
    "affected_ratio": pl.Float64(),
}  # fmt: skip
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "lanes": ("lane", "name"),
    "steps": ("start_ns", "end_ns"),
    "ops": ("id", "lane", "start_ns", "dur_ns"),
    "activities": ("id", "lane", "start_ns", "dur_ns"),
    "collectives": ("activity_id",),
    "groups": ("group", "ranks"),
    "allocations": ("at_ns", "delta_bytes"),
    "syncs": ("kind", "start_ns", "dur_ns"),
    "checkpoints": ("checkpoint", "operation", "stage"),
    "io_calls": ("name", "kind", "start_ns", "dur_ns"),
    "counters": ("at_ns", "name", "value"),
    "metrics": ("step", "name", "value"),
    "data_quality": ("kind", "message", "affected_ratio"),
}
_GRID = r"^\d{1,10}(x\d{1,10}){0,2}$"
_INT, _FLOAT = pl.Int64(), pl.Float64()
_MOST = 1 << 53
"""Of integers other than times: a double holds them exactly, and sums of a thousand fit an int64."""


@dataclass(frozen=True, eq=False)
class TraceFacts:
    """What a trace of an export states of itself: which it is, its clock, its header, and where its packets lie."""

    rank: int
    window: int
    sequence: int
    offset_ns: int
    step: int | None
    first_ns: int
    header: Mapping[str, Any]
    process: str | None
    part: tuple[int, int] | None


@dataclass(frozen=True, eq=False)
class RunFacts:
    """What an export states of the run: its manifest and its data quality, columns as RUN_DATA_QUALITY."""

    manifest: Mapping[str, Any]
    issues: tuple[Mapping[str, Any], ...]


def traces(path: str) -> Sequence[TraceInfo]:
    """Return the traces of a file: of an export with their ranks, else one for each rank. Raises BadTraceError."""
    trace_events = events.of_packets(packets.read(path))
    if not is_export(trace_events):
        return pytorch_slices.traces(path, trace_events)
    traces, run = facts(trace_events)
    infos = [_info(stated, shares_file=len(traces) > 1) for stated in traces]
    if not infos:
        raise BadTraceError(f"{path}: this Perfetto trace is damaged: no rank of the export can be read")
    first = infos[0]
    return [TraceInfo(**{**vars(first), "manifest": run.manifest or None, "run_issues": run.issues}), *infos[1:]]


def read(path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
    """Return the trace of a file, or of one rank of it. Raises BadTraceError if the rank is not in it any more."""
    trace_events = events.of_packets(packets.read(path, info.part))
    if not is_export(trace_events):
        return pytorch_slices.trace(path, trace_events, info, rank=rank, window=window)
    stated = next((s for s in facts(trace_events)[0] if (s.rank, s.window) == (info.rank, info.window)), None)
    if stated is None:
        raise BadTraceError(f"{path}: rank {rank} is no longer in this file; load it again")
    of_trace = trace_events.packets.of_sequence(stated.sequence)
    if len(of_trace.begin) < len(trace_events.packets.begin):
        trace_events = events.of_packets(of_trace)
    return trace(trace_events, stated, path, rank=rank, window=window)


def category(name: str) -> str:
    """Return the category of the rows of a table."""
    return F.ROW_PREFIX + name


def is_export(events: Events) -> bool:
    """Return whether a file is an export with the columns of tables: those of earlier versions lack them."""
    return category(F.TRACE_ROW) in events.categories


class Rows:
    """The rows of tables among events, by category."""

    def __init__(self, events: Events, categories: tuple[str, ...]) -> None:
        self.events = events
        codes = [events.categories.index(name) for name in categories if name in events.categories]
        selected = np.isin(events.category, codes) & (events.kind != F.END)
        self.arguments = event_columns.arguments(events, selected)

    def table(self, name: str, columns: Mapping[str, pl.DataType]) -> pl.DataFrame:
        """Return the rows of a table, in their order, with their sequence."""
        of_name = self._events(category(name))
        ordered = _table(self.arguments, of_name, {**columns, F.ROW: pl.Int64()}, len(self.events.kind))
        sequence = self.events.packets.sequence[self.events.packet[of_name]]
        with_sequence = ordered.with_columns(pl.Series("sequence", sequence))
        return with_sequence.sort(F.ROW, maintain_order=True).drop(F.ROW)

    def _events(self, name: str) -> Ints:
        if name not in self.events.categories:
            return np.empty(0, np.int64)
        return np.flatnonzero(
            (self.events.category == self.events.categories.index(name)) & (self.events.kind == F.INSTANT)
        )


def _table(arguments: Arguments, of_events: Ints, columns: Mapping[str, pl.DataType], event_count: int) -> pl.DataFrame:
    place = np.full(event_count, -1, np.int64)
    place[of_events] = np.arange(len(of_events))
    rows = np.flatnonzero(place[arguments.event] >= 0)
    rows = rows[np.argsort(arguments.name[rows], kind="stable")]
    names = arguments.name[rows]
    series = []
    for name, dtype in columns.items():
        code = arguments.names.index(name) if name in arguments.names else len(arguments.names)
        first, past = np.searchsorted(names, [code, code + 1])
        series.append(arguments.of_rows(name, dtype, rows[first:past], place, len(of_events)))
    return pl.DataFrame(series)


def facts(events: Events) -> tuple[list[TraceFacts], RunFacts]:
    """Facts that an export states of its traces and of the run."""
    rows = Rows(events, tuple(map(category, (F.TRACE_ROW, F.HEADER_ROWS, F.RUN_ROW, F.RUN_ISSUES, "lanes"))))
    int64 = pl.Int64()
    stated = rows.table(F.TRACE_ROW, {"rank": int64, "window": int64, "offset_ns": int64, "step": int64})
    header = rows.table(F.HEADER_ROWS, {"key": pl.String(), "value": pl.String()})
    lanes = rows.table("lanes", {"pid": pl.String(), "lane": int64})
    manifest = rows.table(F.RUN_ROW, {"manifest": pl.String()})["manifest"].to_list()
    issues = rows.table(F.RUN_ISSUES, _RUN_ISSUES).select(list(_RUN_ISSUES))
    first_at = {sequence: int(events.at_ns[i]) for sequence, i in _first_events(events).items()}
    parts = _parts(events)
    traces = [
        TraceFacts(
            rank=numbers.stated_rank(row["rank"], lowest=0) or 0,
            window=row["window"] or 0,
            sequence=row["sequence"],
            offset_ns=row["offset_ns"] or 0,
            step=row["step"],
            first_ns=first_at[row["sequence"]] - (row["offset_ns"] or 0),
            header=_parse_header(header.filter(pl.col("sequence") == row["sequence"])),
            process=next(iter(lanes.filter(pl.col("sequence") == row["sequence"])["pid"].drop_nulls()), None),
            part=parts[row["sequence"]],
        )
        for row in stated.unique("sequence", keep="first", maintain_order=True).iter_rows(named=True)
    ]
    text = manifest[0] if manifest else None
    parsed = None if text is None else _json(text)
    return traces, RunFacts(parsed if isinstance(parsed, dict) else {}, tuple(issues.iter_rows(named=True)))


def _first_events(events: Events) -> dict[int, int]:
    sequence = events.packets.sequence[events.packet]
    order = np.lexsort((events.at_ns, sequence))
    sequences, first = np.unique(sequence[order], return_index=True)
    return dict(zip(sequences.tolist(), order[first].tolist(), strict=True))


def _parts(events: Events) -> dict[int, tuple[int, int] | None]:
    """Return offset and size of the bytes that hold all packets of each sequence; None if they are compressed."""
    packets = events.packets
    begins = np.concatenate(([0], packets.end[:-1]))  # where the tag of a packet stands
    table = pl.DataFrame({"sequence": packets.sequence, "begin": begins, "end": packets.end})
    spans = table.group_by("sequence").agg(pl.col("begin").min(), pl.col("end").max())
    return {s: None if packets.was_packed else (b, e - b) for s, b, e in spans.iter_rows()}


def _parse_header(header: pl.DataFrame) -> dict[str, Any]:
    return {key: _json(value) for key, value in header.select("key", "value").drop_nulls().iter_rows()}


def _json(text: str) -> Any:
    try:
        return untrusted_json.parse(text)
    except (ValueError, json.JSONDecodeError):
        return None


# Tables --------------------------------------------------------------------------------------------------------------


def trace(events: Events, stated: TraceFacts, path: str, *, rank: int, window: int) -> Trace:
    """Return the trace of an export's sequence: its tables as they were exported."""
    tables_of_rows = tuple(category(name) for name in schema.TABLES)
    rows = Rows(events, (*_OPS, *_ACTIVITIES, _CHECKPOINT, *tables_of_rows))
    slices = event_columns.slices(events)
    tables = {name: rows.table(name, _types(name)) for name in schema.TABLES}
    ops = _slices(rows, slices, _OPS, _types("ops"), stated)
    works = _types("activities") | {f: d for f, d in _types("collectives").items() if f != "activity_id"}
    work = _slices(rows, slices, _ACTIVITIES, works, stated)
    tables["ops"], tables["activities"] = ops, work
    tables["collectives"] = work.filter(pl.col("kind") == "communication").with_columns(activity_id="id")
    saved = _slices(rows, slices, (_CHECKPOINT,), {**_types("checkpoints"), _ID: pl.Int64()}, stated)
    tables["checkpoints"] = pl.concat([saved, tables["checkpoints"]], how="diagonal_relaxed")
    conformed, incomplete = {}, 0
    for name, table in tables.items():
        conformed[name], left_out = _within(name, schema.TABLES[name].conform(table))
        incomplete += left_out
    conformed["lanes"] = _with_roles(conformed["lanes"], conformed["activities"])
    conformed["data_quality"] = pl.concat([conformed["data_quality"], _issues(events, slices, stated, incomplete)])
    return Trace(rank, window, path, header=stated.header, **_link(conformed))


def _info(stated: TraceFacts, *, shares_file: bool) -> TraceInfo:
    info, header = numbers.distributed_info(stated.header), stated.header
    trace_id, job_id = header.get("trace_id"), header.get("tw_job")
    return TraceInfo(
        rank=stated.rank,
        window=stated.window,
        world_size=numbers.stated_rank(info.get("world_size"), lowest=1),
        job_id=job_id if isinstance(job_id, str) else None,
        start_ns=stated.first_ns,
        recording_id=None if trace_id is None else f"{trace_id} {stated.rank} {stated.window}",
        process_id=int(stated.process) if stated.process and stated.process.isdecimal() else None,
        environment=environment.environment(header),
        shares_file=shares_file,
        part=stated.part,
    )


def _with_roles(lanes: pl.DataFrame, work: pl.DataFrame) -> pl.DataFrame:
    """Return lanes with a role where the export lacks it, as damaged ones may: by the work on the lane."""
    if not lanes["role"].null_count():
        return lanes
    joined = lanes.join(activities.roles(work), on="lane", how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("role", "role_right", pl.lit("host")).alias("role")).drop("role_right")


def _types(name: str) -> dict[str, pl.DataType]:
    return {column.name: column.dtype for column in schema.TABLES[name].columns}


def _slices(
    rows: Rows,
    slices: event_columns.Slices,
    kinds: tuple[str, ...],
    types: Mapping[str, pl.DataType],
    stated: TraceFacts,
) -> pl.DataFrame:
    """Return the slices of these kinds that are rows of a table, in the order of their ids."""
    events = rows.events
    of_kinds = np.isin(events.category[slices.event], [i for i, c in enumerate(events.categories) if c in kinds])
    begun, dur_ns = slices.event[of_kinds], slices.dur_ns[of_kinds]
    extra = {"begin_ns": pl.Int64(), "length_ns": pl.Int64(), F.UNNAMED: pl.Boolean()}
    table = _table(rows.arguments, begun, {**types, **extra}, len(events.kind))
    place = pl.Series(events.name[begun], dtype=pl.Int64)
    names = pl.Series(events.names, dtype=pl.String).gather(place.set(place < 0, None)).fill_null("")
    start_ns = events.at_ns[begun] - stated.offset_ns
    slice_rows = (
        table.with_columns(
            pl.when(pl.col(F.UNNAMED).is_null()).then(names).when(~pl.col(F.UNNAMED)).then(pl.lit("")).alias("name"),
            pl.coalesce("begin_ns", pl.Series(start_ns)).alias("start_ns"),
            pl.coalesce("length_ns", pl.Series(dur_ns)).alias("dur_ns"),
            pl.Series("kind", events.categories, pl.String).gather(events.category[begun]),
        )
        if len(begun)
        else table
    )
    # The critical path and findings have no row in a table.
    return slice_rows.drop(list(extra)).filter(pl.col(_ID).is_not_null()).sort(_ID, maintain_order=True)


_LINKS = (
    ("ops", "parent_id", "ops"), ("ops", "forward_id", "ops"), ("activities", "launch_id", "ops"),
    ("allocations", "op_id", "ops"), ("syncs", "call_id", "ops"), ("syncs", "record_id", "ops"),
)  # fmt: skip


def _link(tables: dict[str, pl.DataFrame]) -> dict[str, pl.DataFrame]:
    """Return tables whose ids count from 0 and that refer to no row that an export of a part left out."""
    numbers = {}
    for name in ("ops", "activities"):
        tables[name] = tables[name].unique(_ID, keep="first", maintain_order=True)
        old = tables[name][_ID]
        numbers[name] = pl.DataFrame({"old": old, "new": np.arange(len(old))})
        tables[name] = tables[name].with_columns(numbers[name]["new"].alias(_ID))
    for name, column, target in _LINKS:
        tables[name] = _renumber(tables[name], column, numbers[target])
    collectives = _renumber(tables["collectives"], "activity_id", numbers["activities"])
    tables["collectives"] = collectives.filter(pl.col("activity_id").is_not_null())
    return tables


def _renumber(table: pl.DataFrame, column: str, numbers: pl.DataFrame) -> pl.DataFrame:
    joined = table.select(column).join(numbers, left_on=column, right_on="old", how="left", maintain_order="left")
    return table.with_columns(joined["new"].alias(column))


def _issues(events: Events, slices: event_columns.Slices, stated: TraceFacts, incomplete: int) -> pl.DataFrame:
    rows = list(event_columns.issues(events, slices))
    if incomplete:
        message = f"{incomplete:,} rows of the Perfetto file lack their lane, time or value and were left out."
        rows.append(("damaged_events", message, incomplete / max(len(events.kind), 1)))
    if stated.step is not None:
        message = f"The Perfetto file was exported with step {stated.step} only; the rest of the trace is not in it."
        rows.append(("part_of_run", message, 0.0))
    return pl.DataFrame(rows, schema.DATA_QUALITY.schema, orient="row")


def _within(name: str, table: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Return the rows of a table that state what each row must, and how many do not.

    A number counts as missing if it is not one, a duration also if it is negative, times and other integers also beyond
    what other readers accept; so does a text in place of a grid or block.
    """
    stated = (column for column, dtype in table.schema.items() if dtype in (_INT, _FLOAT) and column != "address")
    grids = (_grid(column) for column in ("grid", "block") if column in table.columns)
    bounded = table.with_columns(*map(_within_bounds, stated), *grids)
    rows = bounded.drop_nulls(_REQUIRED[name])
    return rows, table.height - rows.height


def _within_bounds(column: str) -> pl.Expr:
    lowest, highest = _bounds(column)
    value = pl.col(column)
    return pl.when(value.is_between(lowest, highest) & value.is_not_nan()).then(value).alias(column)


def _bounds(column: str) -> tuple[float, float]:
    if column == "dur_ns":
        return 0, numbers.MOST_DUR_NS
    if column.endswith(("at_ns", "start_ns", "end_ns")):
        return -numbers.MOST_NS, numbers.MOST_NS
    if column in ("value", "affected_ratio"):
        return -math.inf, math.inf
    return -_MOST, _MOST


def _grid(column: str) -> pl.Expr:
    return pl.when(pl.col(column).str.contains(_GRID)).then(column).alias(column)
