"""Times of a whole category of events in another unit than those of all others, as kernels in ns among calls in µs."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import numbers
from tracekit.ingest.readers.normalize.event_categories import DEVICE_KINDS, HOST_KINDS
from tracekit.model.nesting import Flags, Ints


@dataclass(frozen=True)
class _Unit:
    """A unit of time, and by which numbers its times, read as µs, are multiplied and divided."""

    name: str
    factor: int = 1
    divisor: int = 1

    def to_us(self, times: Ints) -> Ints:
        """Times of this unit that were read as if in µs; `numbers.BAD` where they are too large."""
        is_marked = times >= numbers.MOST_NS
        in_ns = times - numbers.MOST_NS if self.divisor == _PER_UNIT else np.full(len(times), numbers.BAD)
        fits = ~is_marked & (np.abs(times) < numbers.MOST_NS // self.factor)
        converted = np.where(fits, times, 0) * self.factor // self.divisor
        return np.where(is_marked, in_ns, np.where(fits, converted, numbers.BAD))


_PER_UNIT = 1000
_UNITS = (_Unit("ns", divisor=_PER_UNIT), _Unit("ms", factor=_PER_UNIT))
"""In seconds, what was read as ns lacks its last six digits."""
_LEAST_ROWS = 3
"""Fewer times are single wrong ones, which are left out."""
_NEARLY_ALL_RATIO = 0.9
_LEAST_DISTANCE_SPANS = 10
"""Length of the recording, by which its times are from zero at least: nearer ones do not show a factor of 1,000."""
_NEAR_SPANS = 1
"""Length of the recording by which a category may lie before or after the rest, as work that was queued before does."""
_SAMPLE = 2_000

_Issue = tuple[str, str, float]


def in_one_unit(host: pl.DataFrame, device: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, tuple[_Issue, ...]]:
    """Host slices and device work with all times in µs, and an issue that names the categories that were converted.

    A category is converted if nearly all of its times lie at those of the rest in another unit, and far away from them
    in µs. Times that `numbers.mark_ns` marks are wrong in all other categories. Both frames are those of
    `event_tables.Events`, before the file's base time is added.
    """
    host_start_ns, device_start_ns = host["start_ns"].to_numpy(), device["start_ns"].to_numpy()
    times_in_us = host_start_ns[host_start_ns < numbers.MOST_NS]
    # The host has several kinds, which show by each other which of them is wrong, and the device's work lies at theirs.
    in_ns_only = (host_start_ns >= numbers.MOST_NS).all()
    host, host_units = _in_microseconds(
        host, HOST_KINDS, host_start_ns, device_start_ns if in_ns_only else host_start_ns[:0]
    )
    device, device_units = _in_microseconds(device, DEVICE_KINDS, device_start_ns, times_in_us)
    units = host_units | device_units
    if not units:
        return host, device, ()
    named = ", ".join(f"of {category} events in {unit}" for category, (unit, _) in units.items())
    count = sum(row_count for _, row_count in units.values())
    message = f"Times {named}, unlike all others in µs: they were converted."
    issue = ("category_unit", message, count / (host.height + device.height))
    return host, device, (issue,)


def _in_microseconds(
    frame: pl.DataFrame, kinds: tuple[str, ...], start_ns: Ints, reference_ns: Ints
) -> tuple[pl.DataFrame, dict[str, tuple[str, int]]]:
    """A frame with the times of each kind in µs, and the unit and number of the rows of each kind that was converted.

    The rest of the recording lies at `reference_ns`, or, where these are few, at the frame's other kinds.
    """
    kind = frame["kind"].to_numpy()
    converted_ns, dur_ns = np.where(start_ns >= numbers.MOST_NS, numbers.BAD, start_ns), frame["dur_ns"].to_numpy()
    units: dict[str, tuple[str, int]] = {}
    for code in np.unique(kind).tolist():
        is_kind = (kind == code) & (start_ns != numbers.BAD)
        rest_ns = reference_ns if len(reference_ns) >= _LEAST_ROWS else start_ns[kind != code]
        unit = _unit(_sample(start_ns[is_kind]), _sample(rest_ns[rest_ns < numbers.MOST_NS]))
        if unit is None:
            continue
        converted_ns[is_kind] = unit.to_us(start_ns[is_kind])
        dur_ns = np.where(is_kind, dur_ns * unit.factor // unit.divisor, dur_ns)
        units[kinds[code]] = (unit.name, int(is_kind.sum()))
    is_changed = bool(units) or bool((start_ns >= numbers.MOST_NS).any())
    columns = [pl.Series("start_ns", converted_ns), pl.Series("dur_ns", dur_ns)]
    return frame.with_columns(columns) if is_changed else frame, units


def _unit(start_ns: Ints, rest_ns: Ints) -> _Unit | None:
    """Unit other than µs in which nearly all times lie at those of the rest; None where there is none."""
    if min(len(start_ns), len(rest_ns)) < _LEAST_ROWS:
        return None
    first_ns, last_ns = np.quantile(rest_ns, (0.05, 0.95)).tolist()
    span_ns = max(last_ns - first_ns, 1)
    if min(abs(first_ns), abs(last_ns)) < _LEAST_DISTANCE_SPANS * span_ns:
        return None

    def is_near(times: Ints) -> Flags:
        return np.asarray((times >= first_ns - _NEAR_SPANS * span_ns) & (times <= last_ns + _NEAR_SPANS * span_ns))

    return next((unit for unit in _UNITS if is_near(unit.to_us(start_ns)).mean() >= _NEARLY_ALL_RATIO), None)


def _sample(start_ns: Ints) -> Ints:
    """Usable times of a frame, evenly chosen: a unit is wrong for nearly all of a category or for none."""
    usable = start_ns[start_ns != numbers.BAD]
    return np.asarray(usable[:: 1 + len(usable) // _SAMPLE], np.int64)
