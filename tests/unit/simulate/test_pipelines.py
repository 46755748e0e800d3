"""Pipeline schedules: their orders, and the bubbles of simulated runs against the published formulas."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from tests.unit.simulate.jobs import pipelined
from tracekit.analysis.parallelism import pipeline_actions, pipeline_stages
from tracekit.conventions import pipeline_schedules
from tracekit.conventions.pipeline_schedules import (
    DUALPIPEV,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SPLIT_BACKWARD,
    V_SHAPED,
    ZB_H1,
    Action,
    Shape,
    order,
    refusal,
    stages_at,
)
from tracekit.simulate import engine
from tracekit.simulate.job import Impairments, Job
from tracekit.simulate.run import bubbles

EQUAL = 0.004  # embedding and head take a microsecond a kernel


def _ideal(schedule: str, ranks: int, stages: int, micro_batches: int) -> Job:
    """Return a job whose stages are equal, whose links and host take no time."""
    of = pipelined(
        ranks, pp=ranks, layers=ranks * stages, schedule=schedule, stages=stages, micro_batches=micro_batches
    )
    return replace(
        of,
        model=replace(of.model, vocabulary=1),
        hardware=replace(of.hardware, collective_slows_compute=0.0),
        impairments=Impairments(ideal_links=True, ideal_host=True),
        steps=1,
    )


@pytest.mark.parametrize(
    ("schedule", "p", "v", "m", "expected"),
    [
        (GPIPE, 4, 1, 8, 0.273),
        (ONE_F_ONE_B, 4, 1, 8, 0.273),
        (ONE_F_ONE_B, 2, 1, 3, 1 / 4),
        (INTERLEAVED, 4, 2, 8, 3 / 19),
        (INTERLEAVED, 2, 3, 4, 1 / 13),
    ],
)
def test_the_bubble_of_equal_stages_is_that_of_the_formula(
    schedule: str, p: int, v: int, m: int, expected: float
) -> None:
    assert expected == pytest.approx((p - 1) / (v * m + p - 1), abs=5e-4)
    job = _ideal(schedule, p, v, m)
    found = bubbles(job, engine.simulate(job))
    assert [each.rank for each in found] == list(range(p))
    for each in found:
        assert each.bubble_ratio == pytest.approx(expected, abs=EQUAL)


def test_the_bubble_of_zb_h1_is_a_third_of_that_of_1f1b() -> None:
    job = _ideal(ZB_H1, 4, 1, 8)
    recording = engine.simulate(job)
    mean_ns = {
        kind: sum(
            end - start for (_, action), (start, end) in recording.ranks[1].actions.items() if action.kind == kind
        )
        / job.micro_batches
        for kind in "FIW"
    }
    # (p − 1)(f + i − w), of arXiv 2401.10241: a third of (p − 1)(f + b) where the three are equal.
    expected_ns = 3 * (mean_ns["F"] + mean_ns["I"] - mean_ns["W"])
    ideal_ns = job.micro_batches * sum(mean_ns.values())
    for each in bubbles(job, recording):
        assert each.bubble_ns / ideal_ns == pytest.approx(expected_ns / ideal_ns, abs=EQUAL)
        assert each.bubble_ns / ideal_ns == pytest.approx(3 / (3 * 8), abs=0.05)


@pytest.mark.parametrize("schedule", V_SHAPED)
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 11)])
def test_the_bubble_of_a_v_shaped_schedule_is_that_of_its_actions_without_links(
    schedule: str, ranks: int, micro_batches: int
) -> None:
    job = _ideal(schedule, ranks, 2, micro_batches)
    recording = engine.simulate(job)
    timed = [
        (start, rank, action, end - start)
        for rank, own in recording.ranks.items()
        for (_, action), (start, end) in own.actions.items()
    ]
    names = dict(zip("FBIW", pipeline_actions.COMPUTE_ACTIONS, strict=True))
    found = sorted(timed)
    graph = pipeline_stages.schedule_graph(
        tuple((rank, of.stage, of.micro_batch, names[of.kind]) for _, rank, of, _ in found)
    )
    assert graph is not None
    durations = np.array([[ns] for *_, ns in found], float)
    whole_ns = pipeline_stages.end_times(graph, durations).max()
    for each in bubbles(job, recording):
        busy_ns = sum(ns for _, rank, _, ns in found if rank == each.rank)
        assert each.bubble_ratio == pytest.approx(1 - busy_ns / whole_ns, abs=EQUAL)


@pytest.mark.parametrize("schedule", pipeline_schedules.SCHEDULES)
@pytest.mark.parametrize("shape", [Shape(2, 2, 4), Shape(4, 2, 8), Shape(4, 3, 4)], ids=str)
def test_every_stage_runs_every_micro_batch_once_forward_first(schedule: str, shape: Shape) -> None:
    if schedule != INTERLEAVED:
        shape = shape._replace(virtual_stages=2 if schedule in V_SHAPED else 1)
    if schedule in V_SHAPED and shape.micro_batches < 2 * shape.ranks:
        assert "micro-batches or more" in str(refusal(schedule, shape))
        return
    assert refusal(schedule, shape) is None
    for rank in range(shape.ranks):
        actions = order(schedule, shape, rank)
        stages = stages_at(schedule, shape.ranks * shape.virtual_stages, shape.ranks, rank)
        assert {action.stage for action in actions} == set(stages)
        place = {action: index for index, action in enumerate(actions)}
        assert len(place) == len(actions)
        for stage, each in product(stages, range(shape.micro_batches)):
            whole = Action(stage, "B", each) in place
            passes = [place.pop(Action(stage, kind, each)) for kind in ("FB" if whole else "FIW")]
            assert whole == (schedule not in SPLIT_BACKWARD) or schedule == DUALPIPEV
            assert all(before < after for before, after in pairwise(passes))
        assert not place


def test_1f1b_holds_as_many_micro_batches_as_stages_are_left() -> None:
    for schedule in (ONE_F_ONE_B, ZB_H1):
        for rank in range(4):
            held = most = 0
            for action in order(schedule, Shape(4, 1, 8), rank):
                held += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
                most = max(most, held)
            assert most == (4 if schedule == ZB_H1 else 4 - rank)
