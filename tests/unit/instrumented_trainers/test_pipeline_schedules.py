"""What the schedules cost where each forward, and each half of a backward, takes as long as any other."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.stage import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from instrumented_trainers.parallelism.pipeline import PipelinePlan
from instrumented_trainers.parallelism.pipeline.schedules import make_schedule
from tracekit.conventions import pipeline_schedules

# time      0 1 2 3 4 5 6 7 8      1F1B of 2 stages and 2 micro-batches; I and W are a backward
# stage 0   F F . . . I W I W      bubble 3 of 6, as (p - 1) / m
# stage 1   . F I W F I W . .
BUBBLES = [
    ("1f1b", 2, 2, 1, 3 / 6),
    ("1f1b", 4, 8, 1, 3 / 8),
    ("gpipe", 4, 8, 1, 3 / 8),
    ("interleaved", 4, 8, 2, 3 / (2 * 8)),
    ("zb-h1", 4, 8, 1, 3 / (3 * 8)),
    ("zb-h1", 2, 4, 1, 1 / (3 * 4)),
    ("zbv", 4, 12, 2, 0.0),
]
IN_FLIGHT = [("1f1b", 4), ("gpipe", 8), ("zb-h1", 4)]


@pytest.fixture(autouse=True)
def _ranks() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def order(schedule: str, ranks: int, micro_batches: int, per_rank: int) -> dict[int, list[Any]]:
    """Return the actions of every rank."""
    plan = PipelinePlan(schedule, ranks, per_rank, layers=ranks * per_rank, micro_batches=micro_batches)
    group = dist.new_group(list(range(ranks)))
    stages = [
        PipelineStage(nn.Identity(), stage, plan.stages, torch.device("cpu"), group=group)
        for stage in plan.stages_on(0)
    ]
    made: Any = make_schedule(schedule, stages, micro_batches, hooks=None)
    return {
        rank: [each for action in actions if action is not None for each in action.sub_actions or (action,)]
        for rank, actions in made.pipeline_order.items()
    }


def duration(actions: dict[int, list[Any]], stages: int) -> int:
    """Return when the last rank ends: each runs its actions in their order, as soon as what they need is there."""
    ends: dict[tuple[int, str, int], int] = {}
    free = dict.fromkeys(actions, 0)
    left = {rank: list(of_rank) for rank, of_rank in actions.items()}
    while any(left.values()):
        before = len(ends)
        for rank, waiting in left.items():
            while waiting and (begin := _begin(waiting[0], ends, stages)) is not None:
                action = waiting.pop(0)
                kind = action.computation_type.value
                free[rank] = max(free[rank], begin) + (2 if kind == "B" else 1)
                ends[action.stage_index, "I" if kind == "B" else kind, action.microbatch_index] = free[rank]
        assert len(ends) > before, "the schedule waits for itself"
    return max(free.values())


def _begin(action: Any, ends: dict[tuple[int, str, int], int], stages: int) -> int | None:
    stage, kind, number = action.stage_index, action.computation_type.value, action.microbatch_index
    needed = {
        "F": [(stage - 1, "F", number)] if stage else [],
        "W": [(stage, "I", number)],
    }.get(kind, [(stage, "F", number), *([(stage + 1, "I", number)] if stage < stages - 1 else [])])
    return max((ends[each] for each in needed), default=0) if all(each in ends for each in needed) else None


@pytest.mark.parametrize(("schedule", "ranks", "micro_batches", "per_rank", "expected"), BUBBLES)
def test_the_bubble_is_that_of_the_schedules_formula(
    schedule: str, ranks: int, micro_batches: int, per_rank: int, expected: float
) -> None:
    work = 3 * micro_batches * per_rank
    ends = duration(order(schedule, ranks, micro_batches, per_rank), ranks * per_rank)
    # ZBV begins on the last rank only when the first micro-batch is there.
    fill = ranks - 1 if schedule == "zbv" else 0
    assert (ends - fill - work) / work == pytest.approx(expected)


@pytest.mark.parametrize(
    ("schedule", "ranks", "micro_batches", "per_rank"),
    [
        *[(schedule, ranks, count, 1) for schedule in ("gpipe", "1f1b", "zb-h1") for ranks, count in ((2, 4), (4, 8))],
        *[("interleaved", *shape) for shape in ((2, 4, 2), (4, 8, 2), (4, 8, 3))],
        *[("zbv", *shape) for shape in ((1, 1, 2), (2, 3, 2), (3, 7, 2), (4, 12, 2))],
        *[("dualpipev", *shape) for shape in ((1, 2, 2), (2, 4, 2), (3, 7, 2), (4, 8, 2), (4, 13, 2))],
    ],
)
def test_the_simulator_runs_actions_in_the_order_of_torch(
    schedule: str, ranks: int, micro_batches: int, per_rank: int
) -> None:
    shape = pipeline_schedules.Shape(ranks, per_rank, micro_batches)
    for rank, actions in order(schedule, ranks, micro_batches, per_rank).items():
        expected = [(each.stage_index, each.computation_type.value, each.microbatch_index) for each in actions]
        assert pipeline_schedules.order(schedule, shape, rank) == expected


@pytest.mark.parametrize(("schedule", "expected"), IN_FLIGHT)
def test_so_many_micro_batches_wait_for_their_backward_on_the_first_rank(schedule: str, expected: int) -> None:
    most = waiting = 0
    for action in order(schedule, 4, 8, 1)[0]:
        waiting += {"F": 1, "B": -1, "W": -1}.get(action.computation_type.value, 0)
        most = max(most, waiting)
    assert most == expected


def test_left_over_layers_go_to_stages_without_embedding_or_head() -> None:
    sizes = {
        layers: [len(PipelinePlan("1f1b", 4, 1, layers, 8).layers_of(stage)) for stage in range(4)]
        for layers in range(4, 9)
    }
    assert sizes == {4: [1, 1, 1, 1], 5: [1, 2, 1, 1], 6: [1, 2, 2, 1], 7: [2, 2, 2, 1], 8: [2, 2, 2, 2]}
