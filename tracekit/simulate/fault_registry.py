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
