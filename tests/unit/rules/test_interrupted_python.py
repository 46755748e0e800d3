"""Python that other threads interrupt: pauses at changing places of every step, against what looks alike."""

import polars as pl
import pytest

from tests.support import drawn_cpu_ops
from tests.support.drawn_cpu_ops import US, Op
from tests.support.rule_examples import interrupted_run
from tracekit.analysis.compute import interrupted_python
from tracekit.replay.graph.causes.device_time import INTERRUPTED_PYTHON
from tracekit.rules.host_processors import InterruptedPython

OPS = [Op(f"aten::op{number}", 100) for number in range(50)]
STEPS = 8


def _pauses(pause_us, ops=OPS, steps=STEPS):
    return interrupted_python.interrupted_python(drawn_cpu_ops.trace(ops, steps, pause_us))


def _is_interrupted(step, number):
    return (number + 3 * step) % 10 == 0


def test_pauses_at_changing_places_are_counted_beyond_the_fastest_of_their_place():
    rows = _pauses(lambda step, number: 5000 if _is_interrupted(step, number) else 5)
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
    assert _pauses(lambda step, number: 5000 if _is_interrupted(step, number) else 5, steps=3).is_empty()


def test_where_ops_are_slower_too_the_thread_lacks_a_core():
    """Each second op of a name takes 1 ms more: as much as Python's pauses."""
    ops = [Op("aten::mm", 100 if number % 2 else 1100) for number in range(50)]
    assert _pauses(lambda step, number: 5000 if _is_interrupted(step, number) else 5, ops).is_empty()


def test_what_strikes_python_and_ops_as_often_as_they_run_is_another_program():
    """Python takes two thirds of the fastest step, and has two thirds of what interrupts."""
    ops = [Op("aten::mm", 2505 if number % 10 == 5 else 5) for number in range(50)]
    assert _pauses(lambda step, number: 5000 if _is_interrupted(step, number) else 10, ops).is_empty()
    calm_ops = [Op("aten::mm", 5)] * 50
    assert _pauses(lambda step, number: 5000 if _is_interrupted(step, number) else 10, calm_ops).height


def test_the_finding_has_its_cost_and_cause():
    [finding] = InterruptedPython().check(interrupted_run())
    assert finding.cost_ns == 5 * 4995 * US
    assert finding.what_if.cause is INTERRUPTED_PYTHON
    assert finding.evidence.height == 5
