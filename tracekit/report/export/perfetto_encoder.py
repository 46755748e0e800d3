"""The timeline of one trace -> the packets of one process in a Perfetto trace."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import polars as pl

from tracekit.report import track_nesting
from tracekit.report.export import perfetto_packets
from tracekit.report.export.perfetto_packets import InternedTexts, PacketTemplates
from tracekit.report.export.protobuf_wire import Ints
from tracekit.report.trace_tracks import ARGUMENTS, Timeline

_TRACKS_PER_TRACE = 1 << 20
_FLOWS_PER_TRACE = 1 << 32
_TRACK = ("track", "layer", "track_name")
_SAME = ("uuid", "name", "category", *ARGUMENTS, "flows", "last_flows")


@dataclass(frozen=True)
class ExportCounts:
    """What was written. `own_tracks` counts extra tracks for slices that overlap without nesting."""

    traces: int = 0
    slices: int = 0
    counter_values: int = 0
    flows: int = 0
    own_tracks: int = 0

    def __add__(self, other: "ExportCounts") -> "ExportCounts":
        return ExportCounts(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


def write_trace(
    file: BinaryIO, timeline: Timeline, *, number: int, name: str, to_run_clock: Callable[[Ints], Ints]
) -> ExportCounts:
    """Write a trace as process `name`; `number`, from 1, is unique in the file; `to_run_clock` converts its times."""
    process = number * _TRACKS_PER_TRACE
    layers = track_nesting.layers(*(timeline.slices[name].to_numpy() for name in ("track", "start_ns", "dur_ns")))
    slices = _with_flows(timeline.slices.with_columns(pl.Series("layer", layers)), timeline.flows)
    slices, tracks = _with_uuids(slices, process + 1)
    counters, counter_tracks = _with_uuids(timeline.counters.with_columns(layer=pl.lit(0)), process + 1 + tracks.height)
    texts, templates = InternedTexts(), PacketTemplates(number)
    events = _slice_events(slices, timeline.flows, number, texts, templates, to_run_clock)
    values = _counter_events(counters, PacketTemplates(number), to_run_clock)
    file.write(perfetto_packets.process(process, number, name))
    for place, (uuid, label) in enumerate(tracks.select("uuid", "label").iter_rows()):
        file.write(perfetto_packets.track(uuid, process, label, place))
    for place, (uuid, label) in enumerate(counter_tracks.select("uuid", "label").iter_rows(), tracks.height):
        file.write(perfetto_packets.track(uuid, process, label, place, counts_bytes=True))
    file.writelines((texts.packet(number), events, values))
    own = tracks.filter(pl.col("layer") > 0).height
    return ExportCounts(1, slices.height, counters.height, timeline.flows.height, own)


def _with_flows(slices: pl.DataFrame, flows: pl.DataFrame) -> pl.DataFrame:
    """Add how many flows leave a slice, and how many end at it."""
    leaving = flows.group_by(id="launch_id").agg(source=pl.lit("ops"), flows=pl.len().cast(pl.Int64))
    ending = flows.select(id="activity_id").unique()
    ending = ending.with_columns(source=pl.lit("activities"), last_flows=pl.lit(1, pl.Int64))
    with_leaving = slices.join(leaving, on=["source", "id"], how="left", maintain_order="left")
    return with_leaving.join(ending, on=["source", "id"], how="left", maintain_order="left")


def _with_uuids(rows: pl.DataFrame, first: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the rows with the uuid of their track, and the tracks in order: columns _TRACK, uuid, label."""
    numbered = rows.select(_TRACK).unique().sort("track", "layer").with_row_index("uuid", offset=first)
    label = pl.when(pl.col("layer") > 0).then(pl.format("{} ({})", "track_name", pl.col("layer") + 1))
    tracks = numbered.with_columns(pl.col("uuid").cast(pl.Int64), label.otherwise("track_name").alias("label"))
    return rows.join(tracks.select("track", "layer", "uuid"), on=["track", "layer"], maintain_order="left"), tracks


def _slice_events(
    slices: pl.DataFrame,
    flows: pl.DataFrame,
    number: int,
    texts: InternedTexts,
    templates: PacketTemplates,
    moved: Callable[[Ints], Ints],
) -> bytes:
    kinds = slices.select(name for name in _SAME if name == "uuid" or slices[name].null_count() < slices.height)
    same = kinds.unique(maintain_order=True).with_row_index("template")
    which = kinds.join(same, on=kinds.columns, nulls_equal=True, maintain_order="left")["template"].to_numpy()
    for row in same.iter_rows(named=True):
        arguments = {key: row[key] for key in ARGUMENTS if key in row}
        event = perfetto_packets.begin(row["uuid"], row["name"] or "?", row["category"] or "?", arguments, texts)
        templates.add(event, flows=row.get("flows") or 0, last_flows=row.get("last_flows") or 0)
    first = int(slices["uuid"].min() or 0)  # type: ignore[arg-type]  # of integers
    for uuid in range(first, int(slices["uuid"].max() or -1) + 1):  # type: ignore[arg-type]
        templates.add(perfetto_packets.end(uuid))
    uuids = slices["uuid"].to_numpy()
    rows, ends, at_ns = track_nesting.events(uuids, slices["start_ns"].to_numpy(), slices["dur_ns"].to_numpy())
    begins = ends == track_nesting.BEGIN
    of_event = np.where(begins, which[rows].astype(np.int64), same.height + uuids[rows] - first)
    begin_of = np.zeros(slices.height, np.int64)
    begin_of[rows[begins]] = np.flatnonzero(begins)
    arrows = _arrows(slices.with_columns(pl.Series("event", begin_of)), flows, number)
    return templates.fill(of_event, moved(at_ns), flows=arrows)


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
