"""Arrows of a file between slices: from calls to the device work that they launch."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import event_categories, numbers
from tracekit.ingest.readers.normalize.event_tables import Events
from tracekit.ingest.readers.normalize.numbers import Ints
from tracekit.model.nesting import Flags

FLOWS = {"arrow": pl.String, "is_head": pl.Boolean, "pid": pl.String, "tid": pl.String, "at_ns": pl.Int64}
"""Ends of arrows: the arrow's category and id, whether it is the head, and the thread and time of the end."""
_MOST_CLIMBS = 64
_LEAST_UNNUMBERED = 0.01
"""Share of device work without a call from which on the file's arrows are read, which takes as long as its events."""


def with_launches(events: Events, find_flows: Callable[[], pl.DataFrame]) -> Events:
    """Events in which device work has the number of the call that an arrow comes from, where either has none.

    `find_flows` returns the ends of arrows in the file, columns FLOWS. Profilers number calls and their work, and draw
    an arrow from one to the other: tools that rewrite a file may lose the numbers.
    """
    calls = events.host.filter(pl.col("kind") == event_categories.RUNTIME)
    is_launched = events.device["correlation"].is_in(calls["correlation"].unique().to_list())
    lacks = ((events.device["correlation"] == 0) | ~is_launched).to_numpy()
    may_have_call = lacks & ((events.device["correlation"] == 0).to_numpy() | (calls["correlation"] == 0).any())
    if not may_have_call.sum() > _LEAST_UNNUMBERED * len(lacks) or calls.is_empty():
        return events
    return _link(events, Arrows(events, find_flows()), may_have_call)


def _link(events: Events, arrows: "Arrows", lacks: Flags) -> Events:
    start_ns, lane = (events.device[name].to_numpy() for name in ("start_ns", "lane"))
    of_work, of_calls = (frame["correlation"].to_numpy().copy() for frame in (events.device, events.host))
    is_call = (events.host["kind"] == event_categories.RUNTIME).to_numpy()
    next_number = 1 + max(int(of_work.max(initial=0)), int(of_calls.max(initial=0)))
    around = HostSlices(events.host)
    for index in np.unique(lane[lacks]).tolist():
        incoming = arrows.to(index)
        work = np.flatnonzero(lacks & (lane == index))
        work = work[np.argsort(start_ns[work], kind="stable")]
        met, pieces = meeting(start_ns[work], incoming["at_ns"].to_numpy())
        issuers = around.at(*(incoming[name].to_numpy()[met] for name in ("lane_tail", "at_ns_tail")))
        for piece, call in zip(work[pieces].tolist(), issuers.tolist(), strict=True):
            if call < 0 or not is_call[call]:
                continue
            if not of_work[piece] and not of_calls[call]:
                of_work[piece] = next_number
                next_number += 1
            of_calls[call] = of_calls[call] or of_work[piece]
            of_work[piece] = of_work[piece] or of_calls[call]
    return replace(
        events,
        host=events.host.with_columns(pl.Series("correlation", of_calls)),
        device=events.device.with_columns(pl.Series("correlation", of_work)),
    )


def meeting(start_ns: Ints, at_ns: Ints) -> tuple[Flags, Ints]:
    """Which of some times are starts, which are sorted, and the place of the start of each of these."""
    place = np.searchsorted(start_ns, at_ns)
    meets = place < len(start_ns)
    meets[meets] = start_ns[place[meets]] == at_ns[meets]
    return meets, place[meets]


class Arrows:
    """Arrows between slices, each by the thread and time of its ends."""

    def __init__(self, events: Events, flows: pl.DataFrame) -> None:
        index = pl.DataFrame(
            {
                "pid": [pid for pid, _ in events.threads],
                "tid": [tid for _, tid in events.threads],
                "lane": np.arange(len(events.threads), dtype=np.int64),
            },
            schema_overrides={"pid": pl.String, "tid": pl.String},
        ).unique(["pid", "tid"], keep="first")
        ends = flows.filter(pl.col("at_ns") != numbers.BAD).join(index, on=["pid", "tid"])
        heads, tails = ends.filter("is_head"), ends.filter(~pl.col("is_head"))
        joined = heads.join(tails.unique("arrow"), on="arrow", suffix="_tail")
        self._table = joined.filter(pl.col("pid").ne_missing(pl.col("pid_tail")))

    def to(self, lane: int) -> pl.DataFrame:
        """Arrows to a thread from other processes, by the time of their heads."""
        return self._table.filter(pl.col("lane") == lane).sort("at_ns")

    def tails_of(self, lanes: set[int]) -> list[int]:
        """Threads that arrows to some threads come from."""
        return self._table.filter(pl.col("lane").is_in(list(lanes)))["lane_tail"].unique().to_list()


class HostSlices:
    """Host slices by thread and start."""

    def __init__(self, host: pl.DataFrame) -> None:
        self._lane, self._start_ns = host["lane"].to_numpy(), host["start_ns"].to_numpy()
        self._end_ns = self._start_ns + host["dur_ns"].to_numpy()
        self._order = np.lexsort((-self._end_ns, self._start_ns, self._lane))

    def at(self, lanes: Ints, at_ns: Ints) -> Ints:
        """Innermost slice on a thread at a time; -1 where there is none."""
        first = np.searchsorted(self._lane[self._order], lanes)
        last = np.searchsorted(self._lane[self._order], lanes, side="right")
        starts = self._start_ns[self._order]
        place = np.array(
            [begin + np.searchsorted(starts[begin:end], time, side="right") - 1
             for begin, end, time in zip(first.tolist(), last.tolist(), at_ns.tolist(), strict=True)], np.int64,
        )  # fmt: skip
        for _ in range(_MOST_CLIMBS):
            ended = (place >= first) & (self._end_ns[self._order][np.maximum(place, 0)] < at_ns)
            if not ended.any():
                break
            place = np.where(ended, place - 1, place)
        is_inside = (place >= first) & (self._end_ns[self._order][np.maximum(place, 0)] >= at_ns)
        return np.where(is_inside, self._order[np.maximum(place, 0)], -1) if len(self._order) else place
