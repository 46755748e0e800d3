"""What a fault is, and how one is registered."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tracekit.simulate.job import STRATEGIES, Job

Inject: TypeAlias = Callable[[Job, Sequence[str]], Job]


@dataclass(frozen=True)
class Fault:
    """One fault: its name, the code of the rule that should find it, and how it is injected into a job.

    `usage` shows its arguments. `inject` raises ValueError for invalid arguments. `prepare` returns a job in which the
    fault is possible but absent, `inject` adds it. Where a machine has some of it by itself, `remove` removes all of
    it; else the prepared job is the one without.
    """

    name: str
    code: str
    usage: str
    summary: str
    inject: Inject
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    prepare: Callable[[Job], Job] = lambda job: job
    steps: Callable[[Job], tuple[int, ...]] = lambda job: tuple(range(job.steps))
    ranks: Callable[[Job], tuple[int, ...]] = lambda job: job.simulated_ranks
    remove: Callable[[Job], Job] | None = None
    axis: str = ""
    """The mesh axis along which it acts, if one."""
    stages: Callable[[Job], tuple[int, ...]] = lambda job: ()  # noqa: ARG005 most concern no stage
    plain: bool = True
    """Whether it is possible with data parallelism only."""
    hybrid: bool = False
    """Whether it is possible in a job with a layout."""
    traces_of: str = ""
    """The fault that has the same traces: only the metrics log differs."""


@dataclass(frozen=True)
class FaultRequest:
    """A requested fault with its arguments."""

    fault: Fault
    arguments: tuple[str, ...]


def register(
    into: dict[str, Fault], name: str, code: str, arguments: str, summary: str, **fields: Any
) -> Callable[[Inject], Inject]:
    """Let the decorated function inject a fault of this name; `fields` are further fields of `Fault`."""

    def add(inject: Inject) -> Inject:
        into[name] = Fault(name, code, name + arguments, summary, inject, **fields)
        return inject

    return add


def switch(**changes: bool) -> Inject:
    """Return an injector of a fault without arguments: it sets these fields of `Impairments`."""

    def inject(job: Job, args: Sequence[str]) -> Job:
        if args:
            raise ValueError("it takes no arguments")
        return impair(job, **changes)

    return inject


def impair(job: Job, **changes: object) -> Job:
    """Return the job with these fields of its impairments changed."""
    return replace(job, impairments=replace(job.impairments, **changes))  # type: ignore[arg-type]


def on_hardware(job: Job, **changes: float) -> Job:
    """Return the job on a machine with these fields changed."""
    return replace(job, hardware=replace(job.hardware, **changes))  # type: ignore[arg-type]


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
