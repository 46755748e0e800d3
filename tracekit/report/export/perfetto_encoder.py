"""The timeline and the table rows of one trace -> the packets of one process in a Perfetto trace."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import polars as pl

from tracekit.conventions import perfetto as conventions
from tracekit.conventions.perfetto import INSTANT, ROW, ROW_PREFIX, UNNAMED
from tracekit.model import environment
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.report import track_nesting
from tracekit.report.export import perfetto_packets
from tracekit.report.export import protobuf_wire as wire
from tracekit.report.export.perfetto_packets import Filling, InternedTexts, PacketTemplates, Placeholder
from tracekit.report.export.protobuf_wire import Ints
from tracekit.report.trace_tracks import Timeline

_SLICES = ("ops", "activities", "collectives", "checkpoints")
_TIMES = ("at_ns", "start_ns", "host_start_ns")
_UNDATED = ("lanes", "groups", "metrics", "data_quality", conventions.TRACE_ROW)


@dataclass(frozen=True, eq=False)
class TableRows:
    """Rows of a table, with the time at which each is shown, on the clock of the trace."""

    name: str
    rows: pl.DataFrame
    at_ns: Ints


_TRACKS_PER_TRACE = 1 << 20
_FLOWS_PER_TRACE = 1 << 32
_TRACK = ("track", "layer", "track_name")
_OF_EVENTS = (
    "uuid",
    "name",
    "category",
    "track",
    "track_name",
    "layer",
    "start_ns",
    "dur_ns",
    "source",
    "flows",
    "last_flows",
)
"""Columns of slices that are no arguments."""


@dataclass(frozen=True)
class ExportCounts:
    """What was written. `own_tracks` counts tracks for slices that overlap without nesting, `rows` those of tables."""

    traces: int = 0
    slices: int = 0
    counter_values: int = 0
    flows: int = 0
    own_tracks: int = 0
    rows: int = 0

    def __add__(self, other: "ExportCounts") -> "ExportCounts":
        return ExportCounts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def write_trace(
    file: BinaryIO,
    timeline: Timeline,
    *,
    number: int,
    name: str,
    to_run_clock: Callable[[Ints], Ints],
    rows: Sequence[TableRows] = (),
) -> ExportCounts:
    """Write a trace as process `name`; `number`, from 1, is unique in the file; `to_run_clock` converts its times.

    `rows` of tables become instant events, on a track for each table.
    """
    process = number * _TRACKS_PER_TRACE
    layers = track_nesting.layers(*(timeline.slices[name].to_numpy() for name in ("track", "start_ns", "dur_ns")))
    slices = _with_flows(timeline.slices.with_columns(pl.Series("layer", layers)), timeline.flows)
    slices, tracks = _with_uuids(slices, process + 1)
    counters, counter_tracks = _with_uuids(timeline.counters.with_columns(layer=pl.lit(0)), process + 1 + tracks.height)
    texts, templates = InternedTexts(), PacketTemplates(number)
    events = _slice_events(slices, timeline.flows, number, texts, templates, to_run_clock)
    values = _counter_events(counters, PacketTemplates(number), to_run_clock)
    first_row_track = process + 1 + tracks.height + counter_tracks.height
    row_events = [
        _row_events(table, uuid, texts, PacketTemplates(number), to_run_clock)
        for uuid, table in enumerate(rows, first_row_track)
    ]
    file.write(perfetto_packets.process(process, number, name))
    for place, (uuid, label) in enumerate(tracks.select("uuid", "label").iter_rows()):
        file.write(perfetto_packets.track(uuid, process, label, place))
    for place, (uuid, label) in enumerate(counter_tracks.select("uuid", "label").iter_rows(), tracks.height):
        file.write(perfetto_packets.track(uuid, process, label, place, counts_bytes=True))
    for uuid, table in enumerate(rows, first_row_track):
        file.write(perfetto_packets.track(uuid, process, f"table · {table.name}", uuid - process))
    file.writelines((texts.packet(number), *row_events, events, values))  # a truncated file keeps its rows
    extra_tracks = tracks.filter(pl.col("layer") > 0).height
    row_count = sum(table.rows.height for table in rows)
    return ExportCounts(1, slices.height, counters.height, timeline.flows.height, extra_tracks, row_count)


def of_trace(trace: Trace, first_ns: int, *, step: int | None = None) -> list[TableRows]:
    """Return the rows of a trace's tables that are no slices, or those of one step; tables without rows are left out.

    A row without a time is shown at `first_ns`. Checkpoint stages without a time are rows, the others are slices.
    """
    tables = {name: table for name, table in trace.tables.items() if name not in _SLICES}
    tables["checkpoints"] = trace.checkpoints.filter(pl.any_horizontal(pl.col("start_ns", "dur_ns").is_null()))
    if step is not None:
        tables = {name: _of_step(table, step) for name, table in tables.items()}
    header = [(key, json.dumps(value)) for key, value in trace.header.items() if key != environment.DEVICE_OVERRIDES]
    tables[conventions.HEADER_ROWS] = pl.DataFrame(header, {"key": pl.String, "value": pl.String}, orient="row")
    return [_at_their_times(name, table, first_ns) for name, table in tables.items() if table.height]


def of_run(run: Run, first_ns: int) -> list[TableRows]:
    """Return the run's manifest, and what is wrong with its files; both are written once."""
    manifest = pl.DataFrame({"manifest": [json.dumps(run.manifest)]})
    issues = run.data_quality
    tables = {conventions.RUN_ROW: manifest, conventions.RUN_ISSUES: issues}
    return [_at_their_times(name, table, first_ns) for name, table in tables.items() if table.height]


def of_clock(fields: Mapping[str, Any], first_ns: int) -> TableRows:
    """Return the row that states which trace it is, and its clock."""
    stated = {name: [value] for name, value in fields.items() if value is not None}
    return _at_their_times(conventions.TRACE_ROW, pl.DataFrame(stated), first_ns)


def _with_flows(slices: pl.DataFrame, flows: pl.DataFrame) -> pl.DataFrame:
    """Add how many flows leave a slice, and how many end at it."""
    leaving = flows.group_by(id="launch_id").agg(source=pl.lit("ops"), flows=pl.len().cast(pl.Int64))
    ending = flows.select(id="activity_id").unique()
    ending = ending.with_columns(source=pl.lit("activities"), last_flows=pl.lit(1, pl.Int64))
    with_leaving = slices.join(leaving, on=["source", "id"], how="left", maintain_order="left")
    return with_leaving.join(ending, on=["source", "id"], how="left", maintain_order="left")


def _with_uuids(rows: pl.DataFrame, first: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows with the uuid of their track, and the tracks in order: columns _TRACK, uuid, label."""
    with_uuid = rows.select(_TRACK).unique().sort("track", "layer").with_row_index("uuid", offset=first)
    label = pl.when(pl.col("layer") > 0).then(pl.format("{} ({})", "track_name", pl.col("layer") + 1))
    tracks = with_uuid.with_columns(pl.col("uuid").cast(pl.Int64), label.otherwise("track_name").alias("label"))
    return rows.join(tracks.select("track", "layer", "uuid"), on=["track", "layer"], maintain_order="left"), tracks


def _slice_events(
    slices: pl.DataFrame,
    flows: pl.DataFrame,
    number: int,
    texts: InternedTexts,
    templates: PacketTemplates,
    moved: Callable[[Ints], Ints],
) -> bytes:
    names = [name for name in slices.columns if name not in _OF_EVENTS]
    which, same_count, fillings = _add_templates(slices, slices.select(names), texts, templates)
    first = int(slices["uuid"].min() or 0)  # type: ignore[arg-type]  # of integers
    for uuid in range(first, int(slices["uuid"].max() or -1) + 1):  # type: ignore[arg-type]
        templates.add(perfetto_packets.end(uuid))
    uuids = slices["uuid"].to_numpy()
    rows, ends, at_ns = track_nesting.events(uuids, slices["start_ns"].to_numpy(), slices["dur_ns"].to_numpy())
    begins = ends == track_nesting.BEGIN
    of_event = np.where(begins, which[rows], same_count + uuids[rows] - first)
    begin_of = np.zeros(slices.height, np.int64)
    begin_of[rows[begins]] = np.flatnonzero(begins)
    arrows = _arrows(slices.with_columns(pl.Series("event", begin_of)), flows, number)
    arguments = (Filling(f.argument, begin_of[f.copies], f.content) for f in fillings)
    return templates.fill(of_event, moved(at_ns), flows=arrows, arguments=arguments)


def _row_events(
    table: TableRows, uuid: int, texts: InternedTexts, templates: PacketTemplates, moved: Callable[[Ints], Ints]
) -> bytes:
    arguments = table.rows.with_columns(pl.Series(ROW, np.arange(table.rows.height)))
    labels = {"uuid": uuid, "name": table.name, "category": ROW_PREFIX + table.name}
    events = pl.DataFrame({name: [value] for name, value in labels.items()}).join(arguments.select(ROW), how="cross")
    which, _, fillings = _add_templates(events, arguments, texts, templates, kind=INSTANT)
    return templates.fill(which, moved(table.at_ns), arguments=fillings)


def _add_templates(
    events: pl.DataFrame,
    arguments: pl.DataFrame,
    texts: InternedTexts,
    templates: PacketTemplates,
    *,
    kind: int = track_nesting.BEGIN,
) -> tuple[Ints, int, list[Filling]]:
    """Add a template for each kind of event: return that of each row, how many there are, and the numbers to fill in.

    `events` has columns uuid, name, category and flows, `arguments` a column for each argument. Numbers are filled in,
    everything else is of the template.
    """
    columns = _with_lists_as_text(arguments)
    stated = [name for name in columns.columns if columns[name].null_count() < columns.height]
    numbers = {name: _placeholder(columns[name]) for name in stated if columns[name].dtype.is_numeric()}
    fixed = [name for name in stated if name not in numbers]
    flows = [name for name in ("flows", "last_flows") if name in events.columns]
    of_kind = ("uuid", "name", "category", *flows)
    has_number = (pl.col(name).is_not_null().alias(f"{name} is stated") for name in numbers)
    labels = events.select(pl.col(name).alias(f"of {name}") for name in of_kind)
    kinds = pl.concat([labels, columns.select(*fixed, *has_number)], how="horizontal")
    same = kinds.unique(maintain_order=True).with_row_index("template")
    which = kinds.join(same, on=kinds.columns, nulls_equal=True, maintain_order="left")["template"].to_numpy()
    for row in same.iter_rows(named=True):
        uuid, name, category = (row[f"of {column}"] for column in of_kind[:3])
        texts_of = {key: row[key] for key in fixed} | ({} if name else {UNNAMED: name is None})
        gaps = {key: placeholder for key, placeholder in numbers.items() if row[f"{key} is stated"]}
        event = perfetto_packets.begin(uuid, name or "?", category or "?", texts_of | gaps, texts, kind=kind)
        after = _bytes_after(gaps, texts)
        counts = (row.get(f"of {column}") or 0 for column in ("flows", "last_flows"))
        templates.add(event, arguments=after, **dict(zip(("flows", "last_flows"), counts, strict=True)))
    fillings = []
    for key, placeholder in numbers.items():
        rows = np.flatnonzero(columns[key].is_not_null().to_numpy())
        fillings.append(Filling(key, rows, placeholder.encode(columns[key].drop_nulls().to_numpy())))
    return which.astype(np.int64), same.height, fillings


def _placeholder(numbers: pl.Series) -> Placeholder:
    if numbers.dtype.is_float():
        return Placeholder(wire.FIXED, is_double=True)
    smallest, largest = numbers.min(), numbers.max()
    fits = smallest >= 0 and largest < wire.NARROW_LIMIT  # type: ignore[operator]  # of integers
    return Placeholder(wire.NARROW if fits else wire.WIDE)


def _bytes_after(gaps: Mapping[str, Placeholder], texts: InternedTexts) -> dict[str, int]:
    """Number of bytes of an event after each of its placeholders, which are its last arguments."""
    after, byte_counts = 0, {}
    for key, placeholder in reversed(list(gaps.items())):
        byte_counts[key] = after
        after += len(perfetto_packets.argument(key, placeholder, texts))
    return byte_counts


def _with_lists_as_text(events: pl.DataFrame) -> pl.DataFrame:
    """Return events with lists of numbers as JSON arrays."""
    lists = [name for name, dtype in events.schema.items() if dtype == pl.List]
    texts = (pl.col(name).cast(pl.List(pl.String)).list.join(",").alias(name) for name in lists)
    return events.with_columns(texts).with_columns(pl.format("[{}]", name).alias(name) for name in lists)


def _arrows(slices: pl.DataFrame, flows: pl.DataFrame, number: int) -> tuple[Ints, Ints, Ints]:
    """Return, for both ends of every flow, the event, how many flows of that event come after it, and its number."""
    events = slices.select("source", "id", "event")
    flow = (number * _FLOWS_PER_TRACE + pl.col("activity_id")).alias("flow")
    leaving = flows.select(
        pl.col("launch_id").alias("id"), pl.col("activity_id").cum_count(reverse=True).over("launch_id") - 1, flow
    )
    leaving = leaving.rename({"activity_id": "after"}).with_columns(source=pl.lit("ops"))
    ending = flows.select(pl.col("activity_id").alias("id"), pl.lit(0, pl.UInt32).alias("after"), flow)
    ends = pl.concat([leaving, ending.with_columns(source=pl.lit("activities"))], how="vertical_relaxed")
    ends_with_events = ends.join(events, on=["source", "id"], maintain_order="left")
    return tuple(ends_with_events[name].to_numpy().astype(np.int64) for name in ("event", "after", "flow"))  # type: ignore[return-value]


def _counter_events(counters: pl.DataFrame, templates: PacketTemplates, moved: Callable[[Ints], Ints]) -> bytes:
    uuids = counters["uuid"].unique().sort()
    for uuid in uuids:
        templates.add(perfetto_packets.value(uuid))
    which = uuids.search_sorted(counters["uuid"]).to_numpy().astype(np.int64)
    return templates.fill(which, moved(counters["at_ns"].to_numpy()), values=counters["value"].to_numpy())


def _of_step(table: pl.DataFrame, step: int) -> pl.DataFrame:
    return table.filter(pl.col("step") == step) if "step" in table.columns else table


def _at_their_times(name: str, table: pl.DataFrame, first_ns: int) -> TableRows:
    time = next((column for column in _TIMES if column in table.columns), None)
    if time is None or name in _UNDATED:
        return TableRows(name, table, np.full(table.height, first_ns, np.int64))
    return TableRows(name, table, table[time].fill_null(first_ns).to_numpy())
