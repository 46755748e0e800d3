"""Causes of communication gaps: each gap is split among causes, whose times sum to it exactly."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from tracekit.analysis.time import breakdown, device_stalls, gaps, host_state, launches
from tracekit.model import intervals, schema, sweep_line
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

    Columns COLUMNS: the first six as `gaps.communication_gaps`, activity_id and name of the preparation or the awaited
    compute (null where none); one row per piece. Causes: `host` (the next work had not been launched; detail: the
    host's state, `host_state.HOST_STATES`), `preparation` (kernels that prepare the collective) and `contention` (their
    slowdown by concurrent compute; detail no_sample_alone where the two cannot be separated), `compute`, `copy`
    (launched, but the awaited work still ran), `device_stall` (work was queued, but no device ran any: see
    `device_stalls`; evidence recurring), `unknown` (detail queued: the same, for an unknown reason). Another collective
    or a peer cannot cause such a gap: while they are awaited, a collective runs. Evidence: launch_time,
    adjacent (started within 20 µs of the end of the awaited work), lane_order, span, running (the work ran, and the
    collective reduces computed data).
    """
    found = gaps.communication_gaps(trace)
    parts = [
        _Splitter(trace, device, found.filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64)))).table()
        for device in breakdown.devices(trace)
    ]
    return pl.concat([pl.DataFrame(schema=COLUMNS), *parts])


def first_match(*rules: tuple[Flags, str, str]) -> tuple[Ints, Ints]:
    """Return cause and evidence of the first condition that holds, as indices into CAUSES, EVIDENCES; else unknown."""
    cause = np.full(len(rules[0][0]), CAUSES.index(UNKNOWN), np.int64)
    evidence = np.full(len(cause), EVIDENCES.index(NONE), np.int64)
    for holds, of, by in reversed(rules):
        cause[holds], evidence[holds] = CAUSES.index(of), EVIDENCES.index(by)
    return cause, evidence


def stall_changes(trace: Trace, device: int | None) -> Ints:
    """Return all times at which a stall of the device begins or ends."""
    both = (device_stalls.recurring_spans(trace, device), device_stalls.unexplained_spans(trace, device))
    return np.concatenate([spans.ravel() for spans in both])


def stalled_at(trace: Trace, device: int | None, at_ns: Ints) -> tuple[Flags, Flags]:
    """Return at which times the device did not run queued work: because of a stall, or for an unknown reason."""
    stalled = sweep_line.running(device_stalls.recurring_spans(trace, device), at_ns) >= 0
    return stalled, ~stalled & (sweep_line.running(device_stalls.unexplained_spans(trace, device), at_ns) >= 0)


def label_column(cause: Ints, of: tuple[str, ...], name: str) -> pl.Series:
    """Return indices into `of` as a text column, null where -1."""
    index = pl.Series(name, cause, pl.Int64)
    return pl.Series(name, of, pl.String).gather(index.set(index < 0, None))


def label_pieces(gaps: pl.DataFrame, pieces: Pieces, cause: Ints, detail: Ints, evidence: Ints) -> pl.DataFrame:
    """Return the pieces of `gaps` with their columns, cause, detail, evidence (from indices), start_ns and dur_ns."""
    return gaps[pieces.of].with_columns(
        label_column(cause, CAUSES, "cause"),
        label_column(detail, DETAILS, "detail"),
        label_column(evidence, EVIDENCES, "evidence"),
        pl.Series("start_ns", pieces.start_ns),
        pl.Series("dur_ns", pieces.end_ns - pieces.start_ns),
    )


def merge_adjacent(frame: pl.DataFrame, by: list[str]) -> pl.DataFrame:
    """Return pieces with adjacent ones merged that agree in `by`, with the confidence of their evidence."""
    run = pl.struct(by).rle_id().alias("_run")
    merged = frame.group_by(run, maintain_order=True).agg(pl.all().exclude("dur_ns").first(), pl.col("dur_ns").sum())
    sure = pl.col("evidence").replace_strict(CONFIDENCES, return_dtype=pl.Float64)
    return merged.drop("_run").with_columns(sure.alias("confidence"))


@dataclass(frozen=True)
class ActivitySpans:
    """Activities of one kind of a device, by start, as arrays."""

    id: Ints
    spans: Spans
    launched_ns: Ints

    @classmethod
    def of(cls, work: pl.DataFrame) -> "ActivitySpans":
        """Return the work as arrays; an unknown launch is taken to be long ago."""
        return cls(
            work["id"].to_numpy().astype(np.int64),
            intervals.from_table(work),
            work["launched_ns"].fill_null(sweep_line.NEVER).to_numpy().astype(np.int64),
        )

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
    """The work that must run in order before a gap ends: preparation, then the collective. By gap and start.

    `producer_end_ns` is the end of the work that an item waited for, as far as is known; `near`: the item started right
    after it.
    """

    gap: Ints
    start_ns: Ints
    launched_ns: Ints
    producer_end_ns: Ints
    near: Flags
    reduces: Flags


class _Splitter:
    """The communication gaps of one device, and the data to find their causes."""

    def __init__(self, trace: Trace, device: int | None, found: pl.DataFrame) -> None:
        self.trace, self.device, self.found = trace, device, found
        self.gaps: Spans = intervals.from_table(found)
        self.work = launches.work(trace, device)
        end_ns = pl.col("start_ns") + pl.col("dur_ns")
        rows = found.select("collective_id", row=pl.int_range(pl.len()), gap_ns="start_ns", gap_end_ns=end_ns)
        self.prepared = (
            launches.preparation(trace, device)
            .join(rows, on="collective_id", maintain_order="left")
            .filter(end_ns > pl.col("gap_ns"), pl.col("start_ns") < pl.col("gap_end_ns"))
        )
        others = self.work.join(self.prepared.select("id"), on="id", how="anti")
        self.compute = ActivitySpans.of(others.filter(pl.col("kind") == "compute"))
        self.producers = ActivitySpans.of(others.filter(pl.col("kind") != "communication"))
        self.copies = ActivitySpans.of(others.filter(pl.col("kind").is_in(breakdown.COPY_KINDS)))

    def table(self) -> pl.DataFrame:
        if self.found.is_empty():
            return pl.DataFrame(schema=COLUMNS)
        items = self._items()
        prepared, inflated_ns = self._inflation()
        pieces = sweep_line.pieces(
            self.gaps, prepared.ravel(), inflated_ns, self.compute.spans.ravel(), self.copies.spans.ravel(),
            items.launched_ns, items.producer_end_ns, host_state.state_changes(self.trace),
            stall_changes(self.trace, self.device),
        )  # fmt: skip
        cause, detail, evidence, which = self._causes(pieces, items)
        self._prepare(pieces, prepared, inflated_ns, (cause, detail, evidence, which))
        return self._table(pieces, cause, detail, evidence, which)

    def _items(self) -> _Items:
        """Return the preparation and collectives that follow within each gap."""
        own = self.work.select("id", "launched_ns")
        closing = self.found.select(
            row=pl.int_range(pl.len()), id="collective_id", start_ns=pl.col("start_ns") + pl.col("dur_ns")
        ).join(own, on="id", how="left", maintain_order="left")
        steps = self.prepared.filter(pl.col("start_ns") >= pl.col("gap_ns"))
        both = pl.concat([closing, steps.select(closing.columns)]).sort("row", "start_ns", maintain_order=True)
        gap = both["row"].to_numpy().astype(np.int64)
        start = both["start_ns"].to_numpy().astype(np.int64)
        launched = both["launched_ns"].fill_null(sweep_line.NEVER).to_numpy().astype(np.int64)
        end = self._producer_end(start, launched)
        near = (end >= launched) & (start - end <= NEAR_NS)
        return _Items(gap, start, launched, end, near, self._reduces()[gap])

    def _producer_end(self, start: Ints, launched: Ints) -> Ints:
        """Return the end of the work that ended last before each start, if it had been launched before it."""
        row = self.producers.ended_until(start)
        before = sweep_line.at(self.producers.launched_ns, row, 0) <= launched
        return sweep_line.at(self.producers.spans[:, 1], np.where(before, row, -1), sweep_line.NEVER)

    def _reduces(self) -> Flags:
        op = self.found["op"].fill_null("")
        gathers = op.str.contains("gather|broadcast|scatter$") & ~op.str.contains("reduce")
        return (~gathers).to_numpy()

    def _causes(self, pieces: Pieces, items: _Items) -> tuple[Ints, Ints, Ints, Ints]:
        """Return cause, detail, evidence (indices) and the awaited compute of each piece, preparation excluded."""
        at = pieces.start_ns
        wide = int((self.gaps[:, 1] - self.gaps[:, 0]).max()) + 2
        first_ns = self.gaps[:, 0]
        keys = items.gap * wide + items.start_ns - first_ns[items.gap]
        nxt = np.searchsorted(keys, pieces.of * wide + at - first_ns[pieces.of], side="right")
        launched, end = items.launched_ns[nxt], items.producer_end_ns[nxt]
        computing, copying = sweep_line.running(self.compute.spans, at), sweep_line.running(self.copies.spans, at)
        state = host_state.state_at(self.trace, at)
        is_launched = at >= launched
        # On the CPU the computing thread also issues collectives, so it waits for all compute.
        waits = (at < end) & (items.near[nxt] | items.reduces[nxt])
        if self.device is None:
            waits |= ~is_launched
        is_known = launched != sweep_line.NEVER
        stalled, queued = stalled_at(self.trace, self.device, at)
        cause, evidence = first_match(
            (stalled, DEVICE_STALL, RECURRING),
            (queued, UNKNOWN, NONE),
            (waits & (computing >= 0), COMPUTE, ADJACENT),
            (waits & (copying >= 0), COPY, ADJACENT),
            (~is_launched, HOST, LAUNCH_TIME),
            (waits & is_known & self._next_is_late(at), HOST, LAUNCH_TIME),
        )
        weak = np.isin(cause, [CAUSES.index(COMPUTE), CAUSES.index(COPY)]) & ~items.near[nxt]
        evidence = np.where(weak, EVIDENCES.index(RUNNING), evidence)
        detail = np.where(queued, QUEUED, np.where(cause == CAUSES.index(HOST), state, -1))
        which = np.where(cause == CAUSES.index(COMPUTE), sweep_line.at(self.compute.id, computing, -1), -1)
        which = np.where(cause == CAUSES.index(COPY), sweep_line.at(self.copies.id, copying, -1), which)
        return cause, detail, evidence, which

    def _next_is_late(self, at: Ints) -> Flags:
        """Return at which times the next compute had not been launched."""
        following = np.searchsorted(self.compute.spans[:, 0], at, side="right")
        known = np.where(following < len(self.compute.id), following, -1)
        return sweep_line.at(self.compute.launched_ns, known, sweep_line.NEVER) > at

    def _inflation(self) -> tuple[Spans, Ints]:
        """Return the preparation spans, and the time in each at which its solo duration is exceeded."""
        spans = intervals.from_table(self.prepared)
        alone = pl.col("alone_ns")
        inflated = pl.when(pl.col("overlapped_ns") > 0).then((pl.col("dur_ns") - alone).clip(0)).fill_null(0)
        return spans, spans[:, 1] - self.prepared.select(inflated.alias("ns"))["ns"].to_numpy()

    def _prepare(self, pieces: Pieces, spans: Spans, inflated_ns: Ints, labels: tuple[Ints, Ints, Ints, Ints]) -> None:
        """Mark in `labels` the pieces that are preparation of the collective that ends their gap."""
        cause, detail, evidence, which = labels
        row = sweep_line.running(spans, pieces.start_ns)
        prepares = (row >= 0) & (sweep_line.at(self.prepared["row"].to_numpy().astype(np.int64), row, -1) == pieces.of)
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

    def _table(self, pieces: Pieces, cause: Ints, detail: Ints, evidence: Ints, which: Ints) -> pl.DataFrame:
        place = self.found.select("gap", "device", "step", "phase", "unit", "collective_id")
        names = self.work.select(pl.col("id").alias("activity_id"), "name").unique("activity_id")
        index = pl.Series("activity_id", which, pl.Int64)
        frame = label_pieces(place, pieces, cause, detail, evidence).with_columns(index.set(index < 0, None))
        merged = merge_adjacent(frame, ["gap", "cause", "detail", "evidence", "activity_id"])
        return merged.join(names, on="activity_id", how="left", maintain_order="left").pipe(schema.select, COLUMNS)


DETAILS = (*host_state.HOST_STATES, "no_sample_alone", "queued")
_NO_SAMPLE, QUEUED = DETAILS.index("no_sample_alone"), DETAILS.index("queued")
