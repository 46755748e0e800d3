"""Causes of communication gaps: each gap is split among causes, whose times sum to it exactly."""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.time import breakdown, device_stalls, host_state, launched_work
from tracekit.model import columns, intervals, schema, sweep_line
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints, Pieces
from tracekit.model.trace import Trace

HOST, PREPARATION, CONTENTION, COMPUTE, COPY, COLLECTIVE, PEER, DEVICE_STALL, UNKNOWN = CAUSES = (
    "host", "preparation", "contention", "compute", "copy", "collective", "peer", "device_stall", "unknown"
)  # fmt: skip
LAUNCH_TIME, EVENT, ADJACENT, LANE_ORDER, SPAN, RUNNING, INSTANCES, RECURRING, NONE = EVIDENCES = (
    "launch_time", "event", "adjacent", "lane_order", "span", "running", "instances", "recurring", "none"
)  # fmt: skip
CONFIDENCES = {
    LAUNCH_TIME: 0.9, EVENT: 0.95, ADJACENT: 0.8, LANE_ORDER: 0.8, SPAN: 0.9, RUNNING: 0.6, INSTANCES: 0.9,
    RECURRING: 0.9, NONE: 0.0,
}  # fmt: skip
"""Confidence of a cause by its evidence; a convention, not a measured frequency."""

COLUMNS = schema.columns(
    "gap device step phase unit collective_id cause detail activity_id name evidence confidence start_ns dur_ns"
)
NEAR_NS = 20_000
"""Work that starts within this time after other work is taken to have waited for it; an event wait is faster."""


@memoize
def gap_causes(trace: Trace) -> pl.DataFrame:
    """Return the pieces of each communication gap with their causes; the pieces of a gap sum to it.

    Columns COLUMNS: the first six as `communication_gaps`, activity_id and name of the preparation or the awaited
    compute (null where none); one row per piece. Causes: `host` (the next work had not been launched; detail: the
    host's state, `host_state.HOST_STATES`), `preparation` (kernels that prepare the collective) and `contention` (their
    slowdown by concurrent compute; detail no_sample_alone where the two cannot be separated), `compute`, `copy`
    (launched, but the awaited work still ran), `device_stall` (work was queued, but no device ran any: see
    `device_stalls`; evidence recurring), `unknown` (detail queued: the same, for an unknown reason). Another collective
    or a peer cannot cause such a gap: while they are awaited, a collective runs. Evidence: launch_time,
    adjacent (started within 20 µs of the end of the awaited work), lane_order, span, running (the work ran, and the
    collective reduces computed data).
    """
    gap_rows = launched_work.communication_gaps(trace)
    parts = [
        _Splitter(trace, device, launched_work.on_device(trace, gap_rows, device)).table()
        for device in breakdown.devices(trace)
    ]
    return schema.concat(parts, COLUMNS)


def first_match(*rules: tuple[Flags, str, str]) -> tuple[Ints, Ints]:
    """Return cause and evidence of the first condition that holds, as indices into CAUSES, EVIDENCES; else unknown."""
    cause = np.full(len(rules[0][0]), CAUSES.index(UNKNOWN), np.int64)
    evidence = np.full(len(cause), EVIDENCES.index(NONE), np.int64)
    for holds, cause_name, evidence_name in reversed(rules):
        cause[holds], evidence[holds] = CAUSES.index(cause_name), EVIDENCES.index(evidence_name)
    return cause, evidence


def stall_changes(trace: Trace, device: int | None) -> Ints:
    """Return all times at which a stall of the device begins or ends."""
    both = (device_stalls.recurring_spans(trace, device), device_stalls.unexplained_spans(trace, device))
    return np.concatenate([spans.ravel() for spans in both])


def stalled_at(trace: Trace, device: int | None, at_ns: Ints) -> tuple[Flags, Flags]:
    """Return at which times the device did not run queued work: because of a stall, or for an unknown reason."""
    stalled = sweep_line.running(device_stalls.recurring_spans(trace, device), at_ns) >= 0
    return stalled, ~stalled & (sweep_line.running(device_stalls.unexplained_spans(trace, device), at_ns) >= 0)


class Labels(NamedTuple):
    """Cause, detail and evidence of pieces, as indices into CAUSES, DETAILS (-1 for none) and EVIDENCES."""

    cause: Ints
    detail: Ints
    evidence: Ints


def merge_adjacent(pieces: Pieces, *keys: Ints) -> tuple[Ints, Pieces]:
    """Return pieces with adjacent ones of a gap merged that agree in all keys, and the first row of each.

    A merged piece starts with its first one and lasts as long as all of them together.
    """
    differs = pieces.span[1:] != pieces.span[:-1]
    for key in keys:
        differs |= key[1:] != key[:-1]
    first = np.flatnonzero(np.concatenate((np.ones(min(len(pieces.span), 1), np.bool_), differs)))
    start = pieces.start_ns[first]
    lengths = np.add.reduceat(pieces.end_ns - pieces.start_ns, first) if len(first) else start
    return first, Pieces(pieces.span[first], start, start + lengths)


def label_pieces(gaps: pl.DataFrame, pieces: Pieces, labels: Labels) -> pl.DataFrame:
    """Return the pieces of `gaps` with their columns, cause, detail, evidence, confidence, start_ns and dur_ns."""
    return gaps[pieces.span].hstack(
        [
            _CAUSES[labels.cause].alias("cause"),
            _DETAILS[np.where(labels.detail < 0, len(DETAILS), labels.detail)].alias("detail"),
            _EVIDENCES[labels.evidence].alias("evidence"),
            pl.Series("confidence", _CONFIDENCES[labels.evidence]),
            pl.Series("start_ns", pieces.start_ns),
            pl.Series("dur_ns", pieces.end_ns - pieces.start_ns),
        ]
    )


@dataclass(frozen=True)
class ActivitySpans:
    """Activities of one kind of a device, by start, as arrays."""

    id: Ints
    spans: Spans
    launched_ns: Ints

    @classmethod
    def of(cls, work: launched_work.WorkColumns, which: Flags) -> "ActivitySpans":
        """Return these rows of the work; an unknown launch is taken to be long ago."""
        return cls(work.id[which], work.spans[which], work.launched_ns[which])

    @cached_property
    def by_end(self) -> Ints:
        """Return the rows by their end."""
        return np.argsort(self.spans[:, 1], kind="stable").astype(np.int64)

    def ended_until(self, at_ns: Ints) -> Ints:
        """Return the row that ended last at or before each time; -1 for none."""
        last = sweep_line.last_until(self.spans[self.by_end, 1], at_ns)
        return sweep_line.at(self.by_end, last, -1)


@dataclass(frozen=True)
class _Items:
    """The work that must run in order before a gap ends: preparation, then the collective. By start.

    `producer_end_ns` is the end of the work that an item waited for, as far as is known; `near`: the item started right
    after it.
    """

    start_ns: Ints
    launched_ns: Ints
    producer_end_ns: Ints
    near: Flags
    reduces: Flags


class _Splitter:
    """The communication gaps of one device, and the data to find their causes."""

    def __init__(self, trace: Trace, device: int | None, gap_rows: pl.DataFrame) -> None:
        self.trace, self.device, self.gap_rows = trace, device, gap_rows
        self.gaps: Spans = intervals.from_table(gap_rows)
        self.closing_id: Ints = gap_rows["collective_id"].to_numpy()
        self.work = launched_work.work_columns(trace, device)
        self.prepared = self._preparation()
        is_other = ~np.isin(self.work.id, self.prepared["id"].to_numpy())
        self.compute = ActivitySpans.of(self.work, is_other & self.work.computes)
        self.producers = ActivitySpans.of(self.work, is_other & ~self.work.communicates)
        self.copies = ActivitySpans.of(self.work, is_other & self.work.copies)

    def _preparation(self) -> pl.DataFrame:
        """Return the preparation within each gap, with the gap's row."""
        prepared = launched_work.preparation(self.trace, self.device)
        row = columns.rows_of(self.closing_id, prepared["collective_id"].to_numpy())
        spans, gap = intervals.from_table(prepared), self.gaps[np.maximum(row, 0)] if len(self.gaps) else _NO_GAP
        inside = (row >= 0) & (spans[:, 1] > gap[:, 0]) & (spans[:, 0] < gap[:, 1])
        return prepared.hstack([pl.Series("row", row)]).filter(pl.Series(inside))

    def table(self) -> pl.DataFrame:
        if self.gap_rows.is_empty():
            return schema.empty(COLUMNS)
        items = self._items()
        # The preparation spans, and the time in each at which its solo duration is exceeded.
        prepared = intervals.from_table(self.prepared)
        slowed_ns = (pl.col("dur_ns") - pl.col("alone_ns")).clip(0)
        inflated = pl.when(pl.col("overlapped_ns") > 0).then(slowed_ns).fill_null(0)
        inflated_ns = prepared[:, 1] - self.prepared.select(inflated.alias("ns"))["ns"].to_numpy()
        pieces = sweep_line.pieces(
            self.gaps, prepared.ravel(), inflated_ns, self.compute.spans.ravel(), self.copies.spans.ravel(),
            items.launched_ns, items.producer_end_ns, host_state.state_changes(self.trace),
            stall_changes(self.trace, self.device),
        )  # fmt: skip
        labels, which = self._causes(pieces, items)
        if len(prepared):
            self._prepare(pieces, prepared, inflated_ns, (*labels, which))
        first, merged = merge_adjacent(pieces, *labels, which)
        place = self.gap_rows.select("gap", "device", "step", "phase", "unit", "collective_id")
        frame = label_pieces(place, merged, Labels(*(label[first] for label in labels)))
        row = columns.rows_of(self.work.id, which[first])
        names = launched_work.work(self.trace, self.device).select("name", activity_id="id")
        return schema.select(frame.hstack(columns.rows_or_nulls(names, row)), COLUMNS)

    def _items(self) -> _Items:
        """Return the preparation and collectives that follow within each gap."""
        closing = columns.rows_of(self.work.id, self.closing_id)
        closing_launched_ns = sweep_line.at(self.work.launched_ns, closing, sweep_line.NEVER)
        row, starts = self.prepared["row"].to_numpy(), self.prepared["start_ns"].to_numpy()
        inside = starts >= self.gaps[row, 0]
        gap = np.concatenate((np.arange(len(self.gaps)), row[inside]))
        start = np.concatenate((self.gaps[:, 1], starts[inside]))
        launched_ns = columns.to_ints(self.prepared["launched_ns"], sweep_line.NEVER)[inside]
        launched = np.concatenate((closing_launched_ns, launched_ns))
        order = np.lexsort((start, gap))
        gap, start, launched = gap[order], start[order], launched[order]
        # The work that ended last before each start, if it had been launched before it.
        producer = self.producers.ended_until(start)
        before = sweep_line.at(self.producers.launched_ns, producer, 0) <= launched
        end = sweep_line.at(self.producers.spans[:, 1], np.where(before, producer, -1), sweep_line.NEVER)
        near = (end >= launched) & (start - end <= NEAR_NS)
        ops = self.gap_rows["op"].to_list()
        gathers = {op: op is not None and bool(_GATHERS.search(op)) and "reduce" not in op for op in set(ops)}
        return _Items(start, launched, end, near, np.array([not gathers[op] for op in ops], np.bool_)[gap])

    def _causes(self, pieces: Pieces, items: _Items) -> tuple[Labels, Ints]:
        """Return the labels and the id of the awaited work of each piece, preparation excluded."""
        at_ns = pieces.start_ns
        nxt = np.searchsorted(items.start_ns, at_ns, side="right")  # gaps are disjoint, and each ends with an item
        launched, end = items.launched_ns[nxt], items.producer_end_ns[nxt]
        computing, copying = sweep_line.running(self.compute.spans, at_ns), sweep_line.running(self.copies.spans, at_ns)
        state = host_state.state_at(self.trace, at_ns)
        is_launched = at_ns >= launched
        # On the CPU the computing thread also issues collectives, so it waits for all compute.
        waits = (at_ns < end) & (items.near[nxt] | items.reduces[nxt])
        if self.device is None:
            waits |= ~is_launched
        is_known = launched != sweep_line.NEVER
        following = np.searchsorted(self.compute.spans[:, 0], at_ns, side="right")
        next_compute = np.where(following < len(self.compute.id), following, -1)
        next_is_late = sweep_line.at(self.compute.launched_ns, next_compute, sweep_line.NEVER) > at_ns
        stalled, queued = stalled_at(self.trace, self.device, at_ns)
        cause, evidence = first_match(
            (stalled, DEVICE_STALL, RECURRING),
            (queued, UNKNOWN, NONE),
            (waits & (computing >= 0), COMPUTE, ADJACENT),
            (waits & (copying >= 0), COPY, ADJACENT),
            (~is_launched, HOST, LAUNCH_TIME),
            (waits & is_known & next_is_late, HOST, LAUNCH_TIME),
        )
        weak = np.isin(cause, [CAUSES.index(COMPUTE), CAUSES.index(COPY)]) & ~items.near[nxt]
        evidence = np.where(weak, EVIDENCES.index(RUNNING), evidence)
        detail = np.where(queued, QUEUED, np.where(cause == CAUSES.index(HOST), state, -1))
        which = np.where(cause == CAUSES.index(COMPUTE), sweep_line.at(self.compute.id, computing, -1), -1)
        which = np.where(cause == CAUSES.index(COPY), sweep_line.at(self.copies.id, copying, -1), which)
        return Labels(cause, detail, evidence), which

    def _prepare(self, pieces: Pieces, spans: Spans, inflated_ns: Ints, labels: tuple[Ints, Ints, Ints, Ints]) -> None:
        """Mark in `labels` the pieces that are preparation of the collective that ends their gap."""
        cause, detail, evidence, which = labels
        row = sweep_line.running(spans, pieces.start_ns)
        gap_of = self.prepared["row"].to_numpy().astype(np.int64)
        prepares = (row >= 0) & (sweep_line.at(gap_of, row, -1) == pieces.span)
        inflated = prepares & (pieces.start_ns >= sweep_line.at(inflated_ns, row, 0))
        cause[prepares] = CAUSES.index(PREPARATION)
        cause[inflated] = CAUSES.index(CONTENTION)
        by_span = (self.prepared["evidence"] == "span").to_numpy().astype(np.int64)
        evidence[prepares] = np.where(
            sweep_line.at(by_span, row, 0)[prepares] > 0, EVIDENCES.index(SPAN), EVIDENCES.index(LANE_ORDER)
        )
        unsampled = self.prepared.select((pl.col("overlapped_ns") > 0) & pl.col("alone_ns").is_null()).to_series()
        no_sample = sweep_line.at(unsampled.to_numpy().astype(np.int64), row, 0) > 0
        detail[prepares] = np.where(no_sample, _NO_SAMPLE, -1)[prepares]
        which[prepares] = sweep_line.at(self.prepared["id"].to_numpy().astype(np.int64), row, -1)[prepares]


DETAILS = (*host_state.HOST_STATES, "no_sample_alone", "queued")
_NO_SAMPLE, QUEUED = DETAILS.index("no_sample_alone"), DETAILS.index("queued")
_CAUSES, _EVIDENCES = pl.Series(CAUSES), pl.Series(EVIDENCES)
_DETAILS = pl.Series((*DETAILS, None), dtype=pl.String)
_CONFIDENCES = np.array([CONFIDENCES[evidence] for evidence in EVIDENCES])
_GATHERS = re.compile("gather|broadcast|scatter$")
_NO_GAP: Spans = np.zeros((1, 2), np.int64)
