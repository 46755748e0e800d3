"""The details of one slice: its origin in the program and its data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from tracekit.model import escaping, units
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.report.timeline import lookup
from tracekit.report.timeline.lookup import PEERS, peers
from tracekit.report.timeline.scene import Scene

_PYTHON, _CPU_OP, _MODULE = "python", "cpu_op", "nn.Module: "
_WHERE = ("step", "phase", "unit", "span")
_OF_COLLECTIVE = ("op", "group", "seq", "dtype", "sent_bytes", "received_bytes", "group_size", "peer")
_OF_CHECKPOINT = ("checkpoint", "step", "call", "worker", "blocking", "bytes", "files", "path", "durable")
_LABELS = {
    "span": "FSDP span",
    "op": "collective",
    "group_size": "ranks in group",
    "grid": "blocks",
    "block": "threads",
}


@dataclass(frozen=True)
class Detail:
    """One detail as text; if it refers to another slice of the scene, with that slice's track, id and times."""

    label: str
    value: str
    track: int | None = None
    id: int | None = None
    start_ns: int | None = None
    dur_ns: int | None = None


@dataclass(frozen=True, eq=False)
class Details:
    """The details of one slice; times are on the run's clock.

    `stack` holds the Python functions around it or its launch, the outermost first. `peers` holds the
    activities of all ranks in a collective: columns PEERS (rank, track, row, id, start_ns, dur_ns, wait_ns).
    """

    track: int
    row: int
    id: int
    name: str
    kind: str
    start_ns: int
    dur_ns: int
    facts: tuple[Detail, ...]
    stack: tuple[str, ...] = ()
    peers: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=PEERS))


def details(run: Run, scene: Scene, track: int, id: int) -> Details:  # noqa: A002
    """Return the details of a slice; reads its trace, and the run's collective calls for other ranks.

    Raises KeyError if the scene has no such slice, BadTraceError where its trace cannot be read.
    """
    place = lookup.slice_at(scene, track, id)
    track_row = scene.tracks.row(track, named=True)
    name, kind = scene.names.row(place["name_id"])
    trace = run.trace(track_row["rank"], scene.window)
    trace_details = _TraceDetails(scene, trace, track_row["rank"])
    facts = [
        Detail("rank", str(track_row["rank"])),
        Detail("on", f"{track_row['group']} · {track_row['label']}"),
        Detail("start", units.duration(place["start_ns"] - scene.span[0])),
        Detail("duration", units.duration(place["dur_ns"])),
    ]
    head = (track, place["row"], id, name, kind, place["start_ns"], place["dur_ns"])
    if track_row["source"] == "checkpoints":
        facts += _column_details(trace.checkpoints.row(id, named=True), _OF_CHECKPOINT)
        return Details(*head, tuple(facts))
    if track_row["source"] == "activities":
        activity = trace.activities.filter(pl.col("id") == id).row(0, named=True)
        around = trace_details.around(activity["launch_id"])
        facts += trace_details.of_activity(activity, around)
        return Details(*head, tuple(facts), _stack(around), peers(run, scene, track_row["rank"], id))
    around = trace_details.around(id)
    facts += trace_details.of_op(around)
    activity_id = trace_details.collective_of(around[0])
    if activity_id is None:
        return Details(*head, tuple(facts), _stack(around[1:]))
    facts += trace_details.of_collective(activity_id)
    return Details(*head, tuple(facts), _stack(around[1:]), peers(run, scene, track_row["rank"], activity_id))


class _TraceDetails:
    """Details from the tables of one trace."""

    def __init__(self, scene: Scene, trace: Trace, rank: int) -> None:
        self._scene, self._trace, self._rank = scene, trace, rank

    def around(self, op_id: int | None) -> list[dict[str, Any]]:
        """Return a host slice and those that enclose it, the innermost first; nothing for None."""
        enclosing: list[dict[str, Any]] = []
        op = _row(self._trace.ops, op_id)
        while op is not None:
            enclosing.append(op)
            op = _row(self._trace.ops, op["parent_id"])
        return enclosing

    def collective_of(self, op: Mapping[str, Any]) -> int | None:
        """Return the collective that a host slice launched or, on a CPU run, is, by the id of its activity."""
        is_same = (pl.col("lane") == op["lane"]) & (pl.col("start_ns") == op["start_ns"])
        work = self._trace.activities.filter(
            pl.col("kind") == "communication",
            (pl.col("launch_id") == op["id"]) | (is_same & (pl.col("dur_ns") == op["dur_ns"])),
        )
        return min(work["id"], default=None)

    def of_activity(self, activity: Mapping[str, Any], around: list[dict[str, Any]]) -> Iterator[Detail]:
        yield from _column_details(activity, (*_WHERE, "bytes", "grid", "block"))
        if around:
            launch = around[0]
            if launch["lane"] != activity["lane"]:
                before_ns = activity["start_ns"] - launch["start_ns"]
                yield self._op("launched by", launch, f", {units.duration(before_ns)} before its start")
            yield from self._of_program(around)
        yield from self.of_collective(activity["id"])

    def of_collective(self, activity_id: int) -> Iterator[Detail]:
        calls = self._trace.collectives.filter(pl.col("activity_id") == activity_id)
        for row in calls.head(1).iter_rows(named=True):
            yield from _column_details(row, _OF_COLLECTIVE)

    def of_op(self, around: list[dict[str, Any]]) -> Iterator[Detail]:
        op = around[0]
        yield from _column_details(op, (*_WHERE, "shapes"))
        yield from self._of_program(around[1:])
        forward = _row(self._trace.ops, op["forward_id"])
        if forward is not None:
            yield self._op("gradient of", forward)
        work = self._trace.activities.filter(pl.col("launch_id") == op["id"])
        elsewhere = work.filter(pl.col("lane") != op["lane"])
        if elsewhere.height:
            description = f"{elsewhere['name'][0]}, {units.duration(elsewhere['dur_ns'][0])}"
            more = f" and {elsewhere.height - 1} more" if elsewhere.height > 1 else ""
            yield self._link("launched", description + more, "activities", elsewhere["id"][0])

    def _of_program(self, around: list[dict[str, Any]]) -> Iterator[Detail]:
        op = next((row for row in around if row["kind"] == _CPU_OP), None)
        if op is not None:
            yield self._op("op", op)
            yield from _column_details(op, ("shapes",))
        module = next((row for row in around if (row["name"] or "").startswith(_MODULE)), None)
        if module is not None:
            yield self._op("module", module, cut=len(_MODULE))

    def _op(self, label: str, op: Mapping[str, Any], more: str = "", cut: int = 0) -> Detail:
        return self._link(label, (op["name"] or "?")[cut:] + more, "ops", op["id"])

    def _link(self, label: str, value: str, source: str, id: int) -> Detail:  # noqa: A002
        target = lookup.slices_of(self._scene, self._rank, source, [id]).select("track", "id", "start_ns", "dur_ns")
        return Detail(label, value, *(target.row(0) if target.height else ()))


def _row(table: pl.DataFrame, id: int | None) -> dict[str, Any] | None:  # noqa: A002
    if id is None:
        return None
    # Readers number rows from 0, other tables may not.
    if 0 <= id < table.height and table["id"][id] == id:
        return table.row(id, named=True)
    rows = table.filter(pl.col("id") == id)
    return None if rows.is_empty() else rows.row(0, named=True)


def _stack(around: list[dict[str, Any]]) -> tuple[str, ...]:
    return tuple(row["name"] for row in reversed(around) if row["kind"] == _PYTHON)


def _column_details(row: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[Detail]:
    for name in names:
        value = row[name]
        if value is not None:
            text = "root" if name == "unit" and value == "" else escaping.cell(name, value)
            yield Detail(_LABELS.get(name, escaping.heading(name)), text)
