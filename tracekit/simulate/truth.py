"""The known faults of a simulated run and their costs, measured by simulating again without each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tracekit.conventions.strategies import PP
from tracekit.simulate import engine, faults
from tracekit.simulate.fault_registry import FaultRequest
from tracekit.simulate.job import FSDP1, Job
from tracekit.simulate.kineto_writer import BASE_NS
from tracekit.simulate.recording import Recording

_LEAST_RATIO = 0.01  # inherent costs are listed from this share of the run on


@dataclass(frozen=True)
class KnownFault:
    """One fault of a run: the ranks and steps in which it acts, and the time it costs in each of these steps."""

    fault: str
    code: str
    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    start_ns: int
    end_ns: int
    cost_ns: int


def known_faults(healthy: Job, requests: Sequence[FaultRequest], job: Job, recording: Recording) -> list[KnownFault]:
    """Return the faults of `job`, which is `healthy` with the requested faults; `recording` is its simulation.

    Without a layout, inherent costs of the setting follow: give-way under fsdp1, communication that no compute hides
    (`slow-network`: found by links that take no time) and a host that is too slow (`late-launch`: by one that takes
    none), where that is at least 1% of the run. The cost is the time the run takes longer, over the fault's steps.
    """
    result = [_known(request, job, recording, faults.without(healthy, requests, request)) for request in requests]
    codes = {request.fault.code for request in requests}
    if job.hybrid is not None:  # its layout decides what communication costs
        return result
    for name, without in _inherent_faults(job):
        fault = faults.FAULTS[name]
        if fault.code not in codes:
            inherent = _known(FaultRequest(replace(fault, steps=_every_step), ()), job, recording, without(job))
            if inherent.cost_ns * job.steps >= _LEAST_RATIO * recording.total_ns:
                result.append(inherent)
    return result


def document(entry: KnownFault, job: Job, requests: Sequence[FaultRequest]) -> dict[str, object]:
    """Return the fields of truth.json about a fault: in a job with a layout its axis and stages, too."""
    stated = dict(vars(entry))
    if job.hybrid is not None:
        fault = next(request.fault for request in requests if request.fault.name == entry.fault)
        stated |= {"axis": fault.axis, "stages": fault.stages(job)}
    return stated


@dataclass(frozen=True)
class Bubble:
    """The time of one step in which a rank runs no action of its stages.

    The step lasts from the first to the last action of the rank's pipeline (the ranks of its group on the pp axis); an
    action from its first kernel to its last, tensor-parallel collectives included, sends, receives, gathers of
    weights and the reduction of gradients left out.
    """

    rank: int
    stages: tuple[int, ...]
    step: int
    bubble_ns: int
    bubble_ratio: float
    """Share of the step's pipeline duration."""


def bubbles(job: Job, recording: Recording) -> list[Bubble]:
    """Return the bubbles of all ranks and steps; none without a pipeline."""
    if job.hybrid is None or job.hybrid.layout.pp == 1:
        return []
    return list(_rank_bubbles(job, recording))


def _known(request: FaultRequest, job: Job, recording: Recording, without: Job) -> KnownFault:
    fault = request.fault
    steps = fault.steps(job)
    saved_ns = recording.total_ns - engine.total_ns(without)
    first = min(record.host_steps[steps[0]][0] for record in recording.ranks.values())
    return KnownFault(
        fault.name,
        fault.code,
        fault.ranks(job),
        steps,
        BASE_NS + min(first, recording.start_ns(steps[0])),
        BASE_NS + recording.end_ns(steps[-1]),
        saved_ns // len(steps),
    )


def _inherent_faults(job: Job) -> Iterator[tuple[str, Callable[[Job], Job]]]:
    if job.strategy == FSDP1:
        yield "give-way", faults.without_give_way
    yield "slow-network", lambda j: replace(j, impairments=replace(j.impairments, ideal_links=True))
    yield "late-launch", lambda j: replace(j, impairments=replace(j.impairments, ideal_host=True))


def _every_step(job: Job) -> tuple[int, ...]:
    return tuple(range(job.steps))


def _rank_bubbles(job: Job, recording: Recording) -> Iterator[Bubble]:
    pipelines = job.mesh.layout.groups(PP)
    for step, ranks in product(range(job.steps), pipelines):
        spans = {
            rank: sorted(span for (acted, _), span in recording.ranks[rank].actions.items() if acted == step)
            for rank in ranks
        }
        first = min(start for rank_spans in spans.values() for start, _ in rank_spans)
        last = max(end for rank_spans in spans.values() for _, end in rank_spans)
        for rank, rank_spans in spans.items():
            bubble_ns = last - first - _covered_ns(rank_spans)
            yield Bubble(rank, job.mesh.stages_of(rank), step, bubble_ns, bubble_ns / (last - first))


def _covered_ns(spans: Sequence[tuple[int, int]]) -> int:
    covered, reached = 0, 0
    for start, end in spans:
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered
