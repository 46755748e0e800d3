"""Times of packets on the main clock of a Perfetto trace.

A packet states the clock of its timestamp, or its sequence does. Clocks of a sequence (64 to 127) may count from the
packet before; clock snapshots relate clocks to each other. See Perfetto's docs/concepts/clock-sync.md.
"""

from itertools import pairwise

import numpy as np

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)
from tracekit.ingest.readers.perfetto import wire
from tracekit.ingest.readers.perfetto.wire import LENGTH, Ints

_MAIN = 6  # BUILTIN_CLOCK_BOOTTIME
_FIRST_OWN, _PAST_OWN = 64, 128
_CLOCKS, _PRIMARY = 1, 2  # of ClockSnapshot
_ID, _TIME, _IS_INCREMENTAL, _UNIT = 1, 2, 3, 4  # of ClockSnapshot.Clock
_MOST_UNIT = 10**9


def on_main_clock(
    data: bytes,
    at_ns: Ints,
    clock: Ints,
    *,
    sequence: Ints,
    generation: Ints,
    defaults: tuple[Ints, Ints],
    snapshots: tuple[Ints, Ints],
) -> Ints:
    """Return the times of packets on the main clock. Without a snapshot, all clocks are taken as equal."""
    clock = np.where(clock == 0, _default_clocks(data, generation, defaults), clock)
    rows = np.flatnonzero(snapshots[1] > snapshots[0])
    if not len(rows):
        return at_ns
    readings = _Snapshots(data, rows, *snapshots, sequence)
    at_ns = at_ns.copy()
    scoped = np.flatnonzero((clock >= _FIRST_OWN) & (clock < _PAST_OWN))
    key = _key(clock[scoped], sequence[scoped])
    order = scoped[np.argsort(key, kind="stable")]
    edges = np.flatnonzero(np.diff(np.sort(key), prepend=-1, append=-1))
    for first, past in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        packets = order[first:past]
        at_ns[packets] = readings.own_times(at_ns[packets], packets, int(clock[packets[0]]), int(sequence[packets[0]]))
    is_global = (clock > 0) & (clock < _FIRST_OWN)
    for number in np.unique(clock[is_global]).tolist():
        at_ns[clock == number] += readings.offset(number)
    return at_ns


def _key(clock: Ints, sequence: Ints) -> Ints:
    return clock * (1 << 32) + np.clip(sequence, 0, (1 << 32) - 1)


def _default_clocks(data: bytes, generation: Ints, defaults: tuple[Ints, Ints]) -> Ints:
    """Return the clock that the sequence of each packet states as its default; 0 for none."""
    rows = np.flatnonzero(defaults[1] > defaults[0])
    stated = wire.fields(data, defaults[0][rows], defaults[1][rows]).column(F.CLOCK_ID)
    by_generation = np.zeros(int(generation.max(initial=0)) + 1, np.int64)
    by_generation[generation[rows]] = stated
    return by_generation[generation]


class _Snapshots:
    """Clock readings in file order: snapshot, clock, time, unit, and whether times count from the packet before."""

    def __init__(self, data: bytes, rows: Ints, begin: Ints, end: Ints, sequence: Ints) -> None:
        outer = wire.fields(data, begin[rows], end[rows])
        entries = outer.where(_CLOCKS, LENGTH)
        entries = entries[np.argsort(outer.owner[entries], kind="stable")]
        inner = wire.fields(data, outer.value[entries], outer.value[entries] + outer.size[entries])
        self.snapshot = outer.owner[entries]
        self.packet = rows[self.snapshot]
        self.clock = inner.column(_ID)
        self.is_incremental = inner.column(_IS_INCREMENTAL) != 0
        unit = inner.column(_UNIT)
        self.unit_ns = np.where((unit > 0) & (unit <= _MOST_UNIT), unit, 1)
        self.at_ns = inner.column(_TIME) * self.unit_ns
        primary = outer.column(_PRIMARY)
        self.main = int(primary[primary > 0][0]) if (primary > 0).any() else _MAIN
        key = _key(np.clip(self.clock, 0, _PAST_OWN), sequence[self.packet])
        self._by_key = np.argsort(key, kind="stable")
        self._keys = key[self._by_key]
        self._offsets: dict[int, int] = {}

    def offset(self, clock: int) -> int:
        """The offset to add to times of a clock: by the first snapshot that has it and the main one, else 0."""
        if clock not in self._offsets:
            snapshots = self.snapshot[self.clock == clock]
            main = self.snapshot[self.clock == self.main]
            both = np.intersect1d(snapshots, main)
            readings = (self._reading(int(both[0]), number) for number in (self.main, clock)) if len(both) else (0, 0)
            main_ns, own_ns = readings
            self._offsets[clock] = main_ns - own_ns
        return self._offsets[clock]

    def own_times(self, stated: Ints, packets: Ints, clock: int, sequence: int) -> Ints:
        """Return the times of a sequence's packets on the main clock, from times on a clock of its own.

        Without a snapshot of that clock, they are taken as times on the main clock.
        """
        times = stated.copy()
        key = _key(np.array([clock]), np.array([sequence]))[0]
        first, past = np.searchsorted(self._keys, [key, key + 1])
        readings = self._by_key[first:past]
        readings = readings[np.diff(self.snapshot[readings], append=-1) != 0]  # one of each snapshot
        edges = [*np.searchsorted(packets, self.packet[readings]).tolist(), len(packets)]
        for reading, (begin, end) in zip(readings.tolist(), pairwise(edges), strict=True):
            part = stated[begin:end] * self.unit_ns[reading]
            if self.is_incremental[reading]:
                part = np.cumsum(part) + self.at_ns[reading]
            times[begin:end] = part + self._to_main(reading)
        return times

    def _to_main(self, reading: int) -> int:
        """The offset to add to a clock of a sequence: by the clocks that the same snapshot relates it to."""
        clocks = self.clock[slice(*self._range(int(self.snapshot[reading])))]
        references = [self.main, *clocks[(clocks > 0) & (clocks < _FIRST_OWN)][:_FIRST_OWN].tolist()]
        for clock in references:
            if clock in clocks:
                at_ns = self._reading(int(self.snapshot[reading]), clock)
                return at_ns - int(self.at_ns[reading]) + self.offset(clock)
        return 0

    def _reading(self, snapshot: int, clock: int) -> int:
        first, past = self._range(snapshot)
        return int(self.at_ns[first:past][self.clock[first:past] == clock][0])

    def _range(self, snapshot: int) -> tuple[int, int]:
        first, past = np.searchsorted(self.snapshot, [snapshot, snapshot + 1]).tolist()
        return first, past
