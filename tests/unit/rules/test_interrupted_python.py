"""Python that other threads interrupt: pauses at changing places of every step, against what looks alike."""

import dataclasses

import numpy as np
import polars as pl
import pytest

from tests.support import drawn_cpu_ops
from tests.support.drawn_cpu_ops import US, Op
from tests.support.rule_examples import interrupted_run
from tracekit.analysis.compute import interrupted_python
from tracekit.model import schema
from tracekit.replay.graph.causes.device_time import INTERRUPTED_PYTHON
from tracekit.rules.host_processors import InterruptedPython

OPS = [Op(f"aten::op{number}", 100) for number in range(50)]
STEPS = 8


def _pauses(pause_us, ops=OPS, steps=STEPS):
    return interrupted_python.interrupted_python(drawn_cpu_ops.trace(ops, steps, pause_us))


def _is_interrupted(step, number):
    return (number + 3 * step) % 10 == 0


def _interrupted_us(step, number):
    return 5000 if _is_interrupted(step, number) else 5


def test_pauses_at_changing_places_are_counted_beyond_the_fastest_of_their_place():
    rows = _pauses(_interrupted_us)
    assert sorted(set(rows["saved_ns"])) == [0, 4995 * US]
    of_steps = rows.group_by("step").agg(pl.col("saved_ns").sum())
    assert sorted(of_steps["saved_ns"]) == [5 * 4995 * US] * STEPS


@pytest.mark.parametrize(
    "pause_us",
    [
        lambda step, number: 5000 if number % 10 == 0 else 5,  # at one place of every step: HOST001
        lambda step, number: 5000 if _is_interrupted(step, number) and step != 3 else 5,  # one step is calm
        lambda step, number: 70 if _is_interrupted(step, number) else 5,  # 6% of the step
    ],
)
def test_other_pauses_are_no_interruptions(pause_us):
    assert _pauses(pause_us).is_empty()


def test_a_few_steps_do_not_show_the_fastest():
    assert _pauses(_interrupted_us, steps=3).is_empty()


def test_where_ops_are_slower_too_the_thread_lacks_a_core():
    """Each second op of a name takes 1 ms more: as much as Python's pauses."""
    ops = [Op("aten::mm", 100 if number % 2 else 1100) for number in range(50)]
    assert _pauses(_interrupted_us, ops).is_empty()


def test_what_strikes_python_and_ops_as_often_as_they_run_is_another_program():
    """Python takes two thirds of the fastest step, and has two thirds of what interrupts."""
    ops = [Op("aten::mm", 2505 if number % 10 == 5 else 5) for number in range(50)]
    assert _pauses(lambda step, number: 5000 if _is_interrupted(step, number) else 10, ops).is_empty()
    calm_ops = [Op("aten::mm", 5)] * 50
    assert _pauses(lambda step, number: 5000 if _is_interrupted(step, number) else 10, calm_ops).height


def _with_log(trace, *, cpu_us, wait_us):
    """The trace with a metrics log that states the same CPU time, and wait for a processor, for each step."""
    rows = []
    for step, began_ns, ended_ns in trace.steps.select("step", "start_ns", "end_ns").iter_rows():
        values = {"step_time_ns": ended_ns - began_ns, "cpu_time_ns": cpu_us * US, "processor_wait_ns": wait_us * US}
        rows += [{"step": step, "name": name, "value": float(value)} for name, value in values.items()]
    return dataclasses.replace(trace, metrics=schema.TABLES["metrics"].conform(pl.DataFrame(rows)))


# Half of the ops take 1 ms more: 25 ms of the step, as its pauses do. It takes 55 ms without waits.
SLOWER = [Op("aten::mm", 1100 if number % 2 else 100) for number in range(50)]


@pytest.mark.parametrize(
    ("cpu_us", "wait_us", "waited_us"),
    [
        (65_000, 25_000, 25_000),  # other threads used 60 ms and more
        (65_000, 10_000, 10_000),  # the thread waited for 10 ms
        (20_000, 25_000, 14_755),  # other threads used that
        (65_000, 40_000, 25_000),  # ops are slower by 25 ms
    ],
)
def test_ops_wait_for_a_processor_that_other_threads_use(cpu_us, wait_us, waited_us):
    trace = _with_log(drawn_cpu_ops.trace(SLOWER, STEPS, _interrupted_us), cpu_us=cpu_us, wait_us=wait_us)
    rows = interrupted_python.interrupted_python(trace)
    of_steps = rows.group_by("step").agg(pl.col("waited_ns", "saved_ns").sum())
    assert of_steps["waited_ns"].to_numpy() / US == pytest.approx(np.full(STEPS, waited_us), rel=0.01)
    pauses_ns = of_steps["saved_ns"] - of_steps["waited_ns"]
    assert set(pauses_ns) == {5 * 4995 * US}
    assert rows["activity_id"].is_unique().all()


def test_ops_that_wait_while_no_other_thread_works_are_another_programs():
    trace = _with_log(drawn_cpu_ops.trace(SLOWER, STEPS, _interrupted_us), cpu_us=5_000, wait_us=25_000)
    assert interrupted_python.interrupted_python(trace).is_empty()


@pytest.mark.parametrize(
    ("cpu_us", "calm_steps", "is_told"), [(70_000, 2, True), (70_000, 3, False), (5_500, 2, False)]
)
def test_some_steps_are_calm_where_other_threads_are_seen_at_work(cpu_us, calm_steps, is_told):
    def pause_us(step, number):
        return 5000 if _is_interrupted(step, number) and step >= calm_steps else 5

    trace = _with_log(drawn_cpu_ops.trace(OPS, STEPS, pause_us), cpu_us=cpu_us, wait_us=0)
    assert interrupted_python.interrupted_python(trace).height == (50 * STEPS if is_told else 0)


def test_the_finding_has_its_cost_and_cause():
    [finding] = InterruptedPython().check(interrupted_run())
    assert finding.cost_ns == 5 * 4995 * US
    assert finding.what_if.cause is INTERRUPTED_PYTHON
    assert finding.evidence.height == 5
