"""The arguments of faults, as text; every function raises ValueError for what is invalid."""

from collections.abc import Callable, Sequence

from tracekit.simulate.job import Job


def argument(arguments: Sequence[str], index: int, default: object) -> str:
    """Return the text at a place, or the default where it is absent or empty."""
    return arguments[index] if len(arguments) > index and arguments[index] else str(default)


def rank(job: Job, arguments: Sequence[str], index: int) -> int:
    """Return a rank of the job; by default not rank 0, with which the others are compared."""
    text = argument(arguments, index, 1 + job.seed % (min(job.ranks_written, job.gpus) - 1 or 1))
    if not text.isdecimal() or int(text) >= job.gpus:
        raise ValueError(f"{text!r} is not a rank of {job.gpus}")
    return int(text)


def factor(arguments: Sequence[str], index: int, default: float) -> float:
    """Return a factor above 1."""
    text = argument(arguments, index, default)
    if not 1 < float(text) < 1000:
        raise ValueError(f"{text} is not a factor above 1")
    return float(text)


def step(job: Job, arguments: Sequence[str], index: int, default: int) -> int:
    """Return one of the recorded steps."""
    text = argument(arguments, index, default)
    if not text.isdecimal() or int(text) >= job.steps:
        raise ValueError(f"{text!r} is not a step of {job.steps}")
    return int(text)


def count(arguments: Sequence[str], default: Callable[[], int]) -> int:
    """Return a positive integer."""
    if not arguments:
        return default()
    if not arguments[0].isdecimal() or int(arguments[0]) < 1:
        raise ValueError(f"{arguments[0]!r} is not a positive integer")
    return int(arguments[0])


def duration(arguments: Sequence[str], default: Callable[[], int]) -> int:
    """Return a duration such as 20ms, in ns."""
    if not arguments or not arguments[0]:
        return default()
    for unit, ns in (("us", 1e3), ("ms", 1e6), ("s", 1e9)):
        number = arguments[0].removesuffix(unit)
        if number != arguments[0] and number.replace(".", "", 1).isdecimal():
            return round(float(number) * ns)
    raise ValueError(f"{arguments[0]!r} is not a duration such as 20ms")
