"""The true pipeline bubbles of a simulation, from its own timeline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tracekit.conventions.pipeline_schedules import Action
from tracekit.conventions.strategies import PP
from tracekit.simulate.job import Job
from tracekit.simulate.recording import Recording


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


def _rank_bubbles(job: Job, recording: Recording) -> Iterator[Bubble]:
    assert job.hybrid is not None
    pipelines = job.hybrid.layout.groups(PP)
    for step, ranks in product(range(job.steps), pipelines):
        spans = {rank: _spans(recording.ranks[rank].actions, step) for rank in ranks}
        first = min(start for rank_spans in spans.values() for start, _ in rank_spans)
        last = max(end for rank_spans in spans.values() for _, end in rank_spans)
        for rank, rank_spans in spans.items():
            bubble_ns = last - first - _covered_ns(rank_spans)
            yield Bubble(rank, job.hybrid.stages_of(rank), step, bubble_ns, bubble_ns / (last - first))


def _spans(actions: dict[tuple[int, Action], tuple[int, int]], step: int) -> list[tuple[int, int]]:
    return sorted(span for (action_step, _), span in actions.items() if action_step == step)


def _covered_ns(spans: Sequence[tuple[int, int]]) -> int:
    covered, reached = 0, 0
    for start, end in spans:
        covered += max(0, end - max(start, reached))
        reached = max(reached, end)
    return covered
