"""The counter tracks of a Perfetto file, as the counters table of a trace."""

import numpy as np
import polars as pl

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)
from tracekit.ingest.readers.perfetto import packets as packet_columns
from tracekit.ingest.readers.perfetto import wire
from tracekit.ingest.readers.perfetto.events import Events
from tracekit.ingest.readers.perfetto.packets import Packets
from tracekit.ingest.readers.perfetto.tracks import Tracks
from tracekit.ingest.readers.perfetto.wire import FIXED64, VARINT, Flags
from tracekit.model import schema

_MOST_NAME = 200


def table(events: Events, tracks: Tracks, selected: Flags) -> pl.DataFrame:
    """Return the values of the chosen events that are of counters, columns as COUNTERS; by name and time.

    A counter is named after its track, with the unit that the track states. Values that count up from the one before
    are added up from 0.
    """
    rows = np.flatnonzero(selected & (events.kind == F.COUNTER))
    stated = events.fields.column(F.VALUE, VARINT)[rows].astype(np.float64)
    in_doubles = np.zeros(len(events.kind), np.bool_)
    in_doubles[events.fields.owner[events.fields.where(F.DOUBLE_VALUE, FIXED64)]] = True
    doubles = events.fields.column(F.DOUBLE_VALUE, FIXED64)[rows].view(np.float64)
    value = np.where(in_doubles[rows], doubles, stated)
    kinds = _kinds(events.packets)
    parts = []
    for uuid in np.unique(events.track[rows]).tolist():
        track_rows = rows[events.track[rows] == uuid]
        order = np.argsort(events.at_ns[track_rows], kind="stable")
        unit, factor, is_incremental = kinds.get(uuid, ("", 1, False))
        values = value[events.track[rows] == uuid][order] * factor
        name = (tracks[uuid].name or "counter")[:_MOST_NAME] + (f" [{unit}]" if unit else "")
        columns = {"at_ns": events.at_ns[track_rows][order], "value": np.cumsum(values) if is_incremental else values}
        parts.append(pl.DataFrame(columns).with_columns(name=pl.lit(name)).filter(pl.col("value").is_finite()))
    return schema.COUNTERS.conform(pl.concat(parts).sort("name", "at_ns")) if parts else schema.COUNTERS.empty()


def _kinds(packets: Packets) -> dict[int, tuple[str, int, bool]]:
    """Return unit, factor of the values, and whether they count up from the one before, of each counter by track."""
    rows = np.flatnonzero(packets.descriptor[1] > packets.descriptor[0])
    tracks = wire.fields(packets.data, packets.descriptor[0][rows], packets.descriptor[1][rows])
    begin, end = tracks.spans(F.COUNTER_KIND)
    described = np.flatnonzero(end > begin)
    fields = wire.fields(packets.data, begin[described], end[described])
    names = packet_columns.strings(packets.data, *fields.spans(F.UNIT_NAME))
    columns = (
        tracks.column(F.UUID)[described].tolist(),
        fields.column(F.UNIT).tolist(),
        fields.column(F.UNIT_FACTOR).tolist(),
        fields.column(F.IS_INCREMENTAL).tolist(),
    )
    return {
        uuid: (name[:_MOST_NAME] or F.UNITS.get(unit, ""), factor or 1, bool(incremental))
        for uuid, unit, factor, incremental, name in zip(*columns, names, strict=True)
    }
