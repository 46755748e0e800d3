"""Parse durations and rates."""

import re

_DURATION = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>us|ms|s)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[KMG]i?B)/s")
_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def duration_ns(text: str) -> int:
    """Return a duration in ns.

    >>> duration_ns("20ms"), duration_ns("1.5s")
    (20000000, 1500000000)

    Raises ValueError for anything else.
    """
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a duration such as 20ms, 500us or 1.5s")
    return round(float(match["number"]) * _SECONDS[match["unit"]] * 1e9)


def bytes_per_second(text: str) -> int:
    """Return a rate in bytes per second.

    >>> bytes_per_second("40MB/s"), bytes_per_second("1GiB/s")
    (40000000, 1073741824)

    Raises ValueError for anything else, and for a rate of 0.
    """
    match = _RATE.fullmatch(text)
    rate = round(float(match["number"]) * _BYTES[match["unit"]]) if match else 0
    if rate == 0:
        raise ValueError(f"{text!r} is not a rate such as 40MB/s or 1GiB/s")
    return rate
