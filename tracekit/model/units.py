"""Numbers with units for people, such as "12.4 ms". All output formats its numbers here."""

from collections.abc import Iterable


def duration(ns: float) -> str:
    """Return a time in ns with its best unit and three digits.

    >>> duration(12_400_000), duration(999_600)
    ('12.4 ms', '1000 µs')
    """
    return _scaled_text(ns, ((1e9, "s"), (1e6, "ms"), (1e3, "µs")), "ns")


def long_duration(seconds: float) -> str:
    """Return a time in seconds in the unit in which people plan: up to days.

    >>> long_duration(50.55), long_duration(900), long_duration(11134.8)
    ('50.5 s', '15 min', '3.09 h')
    """
    if seconds < 120:
        return duration(seconds * 1e9)
    if seconds < 3600:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h" if seconds < 48 * 3600 else f"{seconds / 86400:.3g} days"


def size(n: float) -> str:
    """Return a number of bytes with its best binary unit and three digits.

    >>> size(3 << 20)
    '3 MiB'
    """
    return _scaled_text(n, ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")), "B")


def rate(bytes_per_s: float) -> str:
    """Return a bandwidth with its best unit and three digits: decimal units, as for NCCL and network cards.

    >>> rate(312.4e9)
    '312 GB/s'
    """
    return _scaled_text(bytes_per_s, ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")), "B/s")


def operations(n: float) -> str:
    """Return a number of floating-point operations with its best decimal unit and three digits.

    >>> operations(9.999e9)
    '10 GFLOP'
    """
    return _scaled_text(n, ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")), "FLOP")


def share(ratio: float) -> str:
    """Return a ratio as a percentage with one decimal.

    >>> share(0.234)
    '23.4%'
    """
    return f"{100 * ratio:.1f}%"


def ranges(numbers: Iterable[int]) -> str:
    """Return whole numbers as ranges.

    >>> ranges([0, 1, 2, 5])
    '0–2, 5'
    """
    present = set(numbers)
    starts = sorted(n for n in present if n - 1 not in present)
    ends = sorted(n for n in present if n + 1 not in present)
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True)) or "none"


def numbers(noun: str, numbers: Iterable[int]) -> str:
    """Return a noun and its numbers as ranges, in the plural where there are several.

    >>> numbers("rank", [3]), numbers("step", [0, 1, 2, 5])
    ('rank 3', 'steps 0–2, 5')
    """
    distinct = set(numbers)
    return f"{noun}{'' if len(distinct) == 1 else 's'} {ranges(distinct)}"


def count(number: int, noun: str) -> str:
    """Return a number of things, with commas between thousands.

    >>> count(1, "rank"), count(12000, "rank")
    ('1 rank', '12,000 ranks')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _scaled_text(value: float, scales: tuple[tuple[float, str], ...], base: str) -> str:
    for scale, unit in scales:
        if abs(value) >= scale:
            scaled = value / scale
            return f"{scaled:.0f} {unit}" if abs(scaled) >= 999.5 else f"{scaled:.3g} {unit}"
    return f"{value:.0f} {base}"
