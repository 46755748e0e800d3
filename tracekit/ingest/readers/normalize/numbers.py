"""Numbers in trace files: µs to exact ns, integers that may be text, null or invalid, and ranks."""

import math
import struct
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model.manifest import MAX_RANKS

Ints = npt.NDArray[np.int64]

BAD = -(1 << 62)
"""Marks a time that is not a number; used only inside the reader."""

MISSING = -(1 << 63)
"""Marks a missing integer; null in tables."""

MOST_NS = 3 << 60
"""Larger times are damage. A time, its clock and a duration of MOST_DUR_NS add up to less than int64."""

MOST_DUR_NS = 1 << 60

MOST_BYTES = 1 << 53

_MOST_EXPONENT = 18
_EXACT_US = 1 << 43  # a double of µs below this is off by less than half a ns
_WHOLE_US = 1 << 52  # whole µs below this fit a double, and their ns an int64
_THREE_DECIMALS = r"\.\d{3}"


class Clock:
    """Converts times in µs to ns exactly, and records the resolution of the file."""

    def __init__(self) -> None:
        self.times = 0
        self.fractions = False
        """Whether any time has a fraction of a µs."""
        self.epoch = False
        """Whether times are since 1970 or otherwise too large for float64 to represent to the ns."""
        self.thousandths = False
        """Whether a large time has three decimals, so that it is exact to the ns."""

    def ns(self, values: list[Any], *, missing: int = BAD) -> Ints | None:
        """Return `values` in ns; BAD for invalid times, `missing` for absent ones.

        None if some numbers are too large to have kept their fraction in parsing: parse them again as text.
        """
        self.times += len(values)
        if values and isinstance(values[0], msgspec.Raw):
            return self._from_raw(values, missing)
        return self._from_numbers(values, missing)

    def _from_numbers(self, values: list[Any], missing: int) -> Ints | None:
        if values and type(values[0]) is int and (us := plain(values)) is not None:
            largest = _largest(us)
            self.epoch |= largest >= _EXACT_US
            return us * 1000 if largest < MOST_NS // 1000 else self._one_by_one(values, missing)
        try:
            floats = np.frombuffer(struct.pack(f"{len(values)}d", *values), np.float64)
        except (struct.error, OverflowError):
            return self._one_by_one(values, missing)
        largest = _largest(floats)
        if largest < _EXACT_US:
            return self._from_floats(floats)
        return None if largest < _WHOLE_US else self._one_by_one(values, missing)  # also if NaN

    def one(self, value: Any) -> int | None:
        """Return one time in ns; None if it is absent or invalid."""
        ns = self._ns(value, BAD)
        return None if ns == BAD else ns

    def _from_floats(self, us: npt.NDArray[np.float64]) -> Ints:
        whole_us = np.floor(us)
        fraction = us - whole_us
        self.fractions = self.fractions or bool(fraction.any())
        return whole_us.astype(np.int64) * 1000 + np.rint(fraction * 1000).astype(np.int64)

    def _from_raw(self, values: list[Any], missing: int) -> Ints:
        if not all(isinstance(value, msgspec.Raw) for value in values):
            return self._one_by_one(values, missing)
        texts = pl.Series([bytes(value).decode("utf-8", "replace") for value in values], dtype=pl.String)
        self.thousandths = self.thousandths or bool(texts.str.contains(_THREE_DECIMALS).any())
        parsed = texts.cast(pl.Decimal(38, 3), strict=False).to_physical().cast(pl.Int64, strict=False)
        if parsed.null_count():
            return self._one_by_one(values, missing)
        ns = parsed.to_numpy()
        self.fractions |= bool((ns % 1000).any())
        size = np.abs(ns)
        self.epoch |= bool((size >= _EXACT_US * 1000).any())
        return ns if (size < MOST_NS).all() else self._one_by_one(values, missing)

    def _one_by_one(self, values: list[Any], missing: int) -> Ints:
        return np.array([self._ns(value, missing) for value in values], np.int64)

    def _ns(self, value: Any, missing: int) -> int:
        if isinstance(value, msgspec.Raw):
            value = bytes(value).decode("utf-8", "replace").strip('"')
            value = None if value in ("", "null") else value
        if value is None:
            return missing
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            return BAD
        if isinstance(value, float) and not math.isfinite(value):
            return BAD
        try:
            us = Decimal(value) if not isinstance(value, float) else Decimal(repr(value))
            if us.adjusted() > _MOST_EXPONENT:  # rounding 1e999990 to an integer takes minutes
                return BAD
            ns = round(us * 1000)
        except (ArithmeticError, ValueError):
            return BAD
        self.epoch |= abs(us) >= _EXACT_US
        self.fractions |= us != us.to_integral_value()
        self.thousandths |= us.as_tuple().exponent == -3
        return ns if abs(ns) < MOST_NS else BAD


def mark_ns(start_ns: Ints, values: list[Any]) -> Ints:
    """Return times with MOST_NS + ns for those of `values` that are too large for µs, and not for ns since 1970.

    Only `category_units` knows whether they are in ns; to all others they are BAD.
    """
    marked = start_ns.copy()
    for row in np.flatnonzero(start_ns == BAD).tolist():
        value = values[row]
        text = bytes(value).decode("utf-8", "replace").strip('"') if isinstance(value, msgspec.Raw) else str(value)
        try:
            number = Decimal(text)
        except ArithmeticError:
            continue
        if number.is_finite() and MOST_NS // 1000 <= number < MOST_NS:
            marked[row] = MOST_NS + int(number)
    return marked


def _largest(array: npt.NDArray[Any]) -> float:
    """Return the largest absolute value; NaN if any value is NaN, 0 if there are none."""
    return max(array.max().item(), -array.min().item()) if len(array) else 0


def ints(values: list[Any], *, missing: int = MISSING) -> Ints:
    """Return integers, also from text; `missing` where a value is not an integer or does not fit."""
    integers = plain(values)
    if integers is None:
        integers = plain([missing if value is None else value for value in values])
    return np.array([_int(value, missing) for value in values], np.int64) if integers is None else integers


def sizes(values: list[Any]) -> Ints:
    """Return sizes in bytes; MISSING also where one is beyond MOST_BYTES, as sums of sizes must fit an int64."""
    integers = ints(values)
    too_large = (integers > MOST_BYTES) | (integers < -MOST_BYTES)
    return np.where(too_large, MISSING, integers) if too_large.any() else integers


def moved_bytes(values: list[Any]) -> Ints:
    """Return bytes that work moves, as `sizes`; MISSING also where they are negative."""
    integers = sizes(values)
    return np.where(integers < 0, MISSING, integers)


def plain(values: list[Any]) -> Ints | None:
    """Return integers if all values are int64; otherwise None."""
    try:
        return np.frombuffer(struct.pack(f"{len(values)}q", *values), np.int64)
    except struct.error:
        return None


def ids(values: list[Any]) -> Ints:
    """Return `values` as identifiers; 0 for missing or invalid ones (profilers count from 1)."""
    return ints(values, missing=0)


def distributed_info(header: Mapping[str, Any]) -> Mapping[str, Any]:
    """The distributed job as a header states it; empty if it states none."""
    info = header.get("distributedInfo")
    return info if isinstance(info, dict) else {}


def stated_rank(value: object, *, lowest: int) -> int | None:
    """Return a rank, or a number of ranks, that a header states, also as text; None if it is not plausible."""
    number = _int(value, MISSING)
    is_whole = not isinstance(value, float) or value == number
    return number if is_whole and lowest <= number < MAX_RANKS + lowest else None


def _int(value: Any, missing: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return missing
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return missing
    return number if -(1 << 63) <= number < 1 << 63 else missing
