"""Pauses of a CPU run's host between two steps: data without a DataLoader, logging, schedules."""

import pytest

from tests.support import kineto_files
from tracekit.analysis.checkpoint import save_stages
from tracekit.ingest.loader import load
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes.host import LATE_LAUNCH
from tracekit.replay.graph.causes.stalls import SINGLE_STALL, Removal
from tracekit.replay.graph.nodes import HostSpan
from tracekit.rules.engine import check
from tracekit.rules.host import LateLaunch
from tracekit.rules.rule import Severity

STEP_US, OP_US = 30_000.0, 5_000.0


def recorded(folder, pause_ms, *, at_end=False, pause_name=""):
    """Return a CPU run: each step pauses for `pause_ms` of its number, then computes in two ops for 10 ms.

    step    |0----------|1----------|2--...
    op        ..  a  b    ..  a  b           . pauses: the one before step 1 is in the device window of step 0

    The pauses are after the ops if they are `at_end`, and recorded as a span if they have a name.
    """
    events, at_us = [], 0.0
    for step, pause in enumerate(pause_ms):
        begin_us = at_us
        for is_pause in (False, False, True) if at_end else (True, False, False):
            name, dur_us = (pause_name, 1000 * pause) if is_pause else ("aten::mm", OP_US)
            if name:
                events.append(kineto_files.slice_("cpu_op", name, at_us, dur_us, tid=1))
            at_us += dur_us + (0 if is_pause else 10)
        events.append(kineto_files.slice_("user_annotation", f"ProfilerStep#{step}", begin_us, at_us - begin_us, tid=1))
    content = kineto_files.trace(None, steps=0) | {"traceEvents": events}
    kineto_files.write(folder / "rank0.pt.trace.json", content)
    return load(folder, cache=False)


def test_a_pause_before_each_step_is_found_although_the_last_steps_window_has_none(tmp_path, wording):
    run = recorded(tmp_path, [20, 20, 20, 20, 20])
    (found,) = check(run, [LateLaunch()]).findings
    assert found.severity is Severity.WARNING
    wording(found.message)
    # Four of the five pauses are in the window: the first, before the first op, is as long.
    assert savings.saving(run, "late-launch").saved_ns == pytest.approx(20_000_000, rel=0.01)


@pytest.mark.parametrize(("name", "cause"), [("", "late-launch"), ("gc: full collection", "garbage-collection")])
def test_a_pause_at_the_end_of_each_step_is_in_the_last_step_too(tmp_path, name, cause):
    run = recorded(tmp_path, [20] * 5, at_end=True, pause_name=name)
    assert (save_stages.steps(run)["duration_ns"] / 1e6).to_list() == pytest.approx([30.02] * 5, abs=0.05)
    assert savings.saving(run, cause).saved_ns == pytest.approx(20_000_000, rel=0.01)


def test_a_long_pause_before_most_steps_is_found(tmp_path):
    run = recorded(tmp_path, [20, 20, 0, 20, 20])
    (found,) = check(run, [LateLaunch()]).findings
    assert found.severity is Severity.WARNING
    assert savings.saving(run, "late-launch").saved_ns == pytest.approx(4 * 20_000_000 / 5, rel=0.01)


def test_a_longer_pause_of_one_step_leaves_that_of_every_step_to_be_priced(tmp_path):
    pauses_ms = [3, 3, 3, 40, 3, 3, 3, 3]
    run = recorded(tmp_path, pauses_ms)
    begin_ms = sum(pauses_ms[:3]) + 3 * 2 * (OP_US + 10) / 1000
    trace = next(iter(run.traces()))
    begin_ns = trace.ops["start_ns"].min() + round(begin_ms * 1e6)
    stall = HostSpan(window=0, rank=0, start_ns=begin_ns, end_ns=begin_ns + 40_000_000)
    without_pauses = savings.saving_of(run, [Removal(LATE_LAUNCH, stalls=(stall,))])
    assert without_pauses.saved_ns == pytest.approx(3_000_000, rel=0.02)
    without_stall = savings.saving_of(run, [Removal(SINGLE_STALL, stalls=(stall,))])
    assert without_stall.saved_ns == pytest.approx(37_000_000 / 8, rel=0.02)


@pytest.mark.parametrize(
    "pauses_ms",
    [[7, 12, 5, 3, 6, 11, 4, 9],  # a lock that another thread holds again and again
     [6, 6, 0, 6, 6, 6, 0, 6]],  # a queue that is empty in six of eight steps
)  # fmt: skip
def test_a_pause_of_varying_length_costs_its_mean(tmp_path, pauses_ms):
    run = recorded(tmp_path, pauses_ms)
    (finding,) = check(run, [LateLaunch()]).findings
    assert finding.severity is Severity.WARNING
    mean_ns = 1e6 * sum(pauses_ms) / len(pauses_ms)
    assert savings.saving(run, "late-launch").saved_ns == pytest.approx(mean_ns, rel=0.05)


@pytest.mark.parametrize("pauses", [[20, 20, 0, 0, 0], [0, 0, 0, 0, 20], [20, 20]])
def test_a_pause_that_most_steps_lack_is_not(tmp_path, pauses):
    run = recorded(tmp_path, pauses)
    assert check(run, [LateLaunch()]).findings == ()
    assert savings.saving(run, "late-launch").saved_ns == 0


def test_short_pauses_of_every_step_cost_their_median(tmp_path):
    run = recorded(tmp_path, [0.8, 0.8, 0.8, 5, 0.8, 0.8])
    (finding,) = check(run, [LateLaunch()]).findings
    assert finding.severity is Severity.WARNING
    assert savings.saving(run, "late-launch").saved_ns == pytest.approx(810_000, rel=0.02)


def test_pauses_that_ops_need_between_them_are_not_counted(tmp_path):
    run = recorded(tmp_path, [0.15] * 6)
    assert savings.saving(run, "late-launch").saved_ns == 0


def recorded_loop(folder, pauses_us, names=("aten::detach",), compute_us=OP_US):
    """Return a CPU run: each of five steps calls aten::mm, then ops of these names in turn after each pause."""
    events, at_us = [], 0.0
    pauses = [(names[place % len(names)], pause_us, 10.0) for place, pause_us in enumerate(pauses_us)]
    for step in range(5):
        begin_us = at_us
        for name, pause_us, op_us in [("aten::mm", 0, compute_us), *pauses]:
            at_us += pause_us
            events.append(kineto_files.slice_("cpu_op", name, at_us, op_us, tid=1))
            at_us += op_us
        events.append(kineto_files.slice_("user_annotation", f"ProfilerStep#{step}", begin_us, at_us - begin_us, tid=1))
    content = kineto_files.trace(None, steps=0) | {"traceEvents": events}
    kineto_files.write(folder / "rank0.pt.trace.json", content)
    return load(folder, cache=False)


def test_shorter_pauses_of_a_loop_count_where_one_of_them_is_long(tmp_path, wording):
    run = recorded_loop(tmp_path, [600, 120, 20, 120])  # 20 µs are those of any op
    (finding,) = check(run, [LateLaunch()]).findings
    assert finding.cost_ns == 840_000
    wording(finding.message)


def test_pauses_of_a_loop_without_a_long_one_are_those_of_its_ops(tmp_path):
    run = recorded_loop(tmp_path, [190, 120, 120, 120])
    assert check(run, [LateLaunch()]).findings == ()
    assert savings.saving(run, "late-launch").saved_ns == 0


@pytest.mark.parametrize(
    ("pauses_us", "names", "compute_us", "count"),
    [([230], ["aten::detach"], 5_000, 1), ([205, 60], ["aten::detach"], 7_500, 1),  # 4.4%; 3.4% in one loop
     ([205, 210], ["aten::a", "aten::b"], 10_000, 0), ([205], ["aten::detach"], 10_000, 0)],  # 2% at each place
)  # fmt: skip
def test_a_pause_of_every_step_at_one_place_is_found_from_three_percent_on(
    tmp_path, pauses_us, names, compute_us, count
):
    run = recorded_loop(tmp_path, pauses_us, names, compute_us)
    assert len(check(run, [LateLaunch()]).findings) == count
