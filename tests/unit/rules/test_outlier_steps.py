"""Outlier steps and cold windows on drawn timelines: one host stalls once, or all do."""

import pytest

from tests.support.drawn_hosts import UNIT_NS
from tests.support.rule_examples import stalled_run
from tracekit.rules.data_quality import DoubtfulTrace
from tracekit.rules.engine import check
from tracekit.rules.outlier_steps import ColdStart, OutlierStep
from tracekit.rules.rule import Severity

MS = 1_000_000
STALL_NS = 39 * UNIT_NS  # until the launch


def judge(run, rule=OutlierStep, **thresholds):
    return check(run, [rule(**thresholds)]).findings


def subjects(run):
    return {found.subject for found in judge(run, DoubtfulTrace)}


def test_a_pause_of_one_rank_names_step_rank_and_cost():
    # step     0         1                      2
    # compute  aA.. aA.. b......B bbbb (rank 1: b, 40 of nothing, B)
    (found,) = judge(stalled_run("", "late", ""))
    assert (found.severity, found.ranks, found.steps) == (Severity.WARNING, (1,), (1,))
    assert found.cost_ns == STALL_NS // 3
    assert "Step 1 takes 2 ms longer than the others (2 ms)" in found.message
    assert "the host of rank 1 stalls for 1.95 ms, while it is in Python or not scheduled" in found.message
    assert "once in 3 profiled steps, so it may be rare" in found.message


def test_a_stop_of_all_ranks_names_no_rank():
    (found,) = judge(stalled_run("late", "late", "late"))
    assert found.ranks == ()
    assert "the host of every rank stalls" in found.message
    assert "as in a save, an evaluation or logging without a span" in found.message


@pytest.mark.parametrize(
    ("doing", "says"),
    [
        (
            (("cudaMalloc", "runtime", 0, 9), ("cudaFree", "runtime", 9, 19), ("cudaFree", "runtime", 19, 29),
             ("cudaMalloc", "runtime", 29, 39)),
            "an allocation retry",
        ),
        ((("cuModuleLoadData", "runtime", 0, 30),), "loads kernels at their first use"),
        ((("cudaFuncGetAttributes", "runtime", 0, 30),), "loads kernels at their first use"),
        ((("gc.py(10): collect", "python", 0, 39), ("<built-in function collect>", "python", 1, 38)), "garbage"),
        ((("cudaGraphLaunch", "runtime", 0, 39),), "is blocked in one launch (cudaGraphLaunch)"),
        ((("cudaDeviceSynchronize", "runtime", 0, 39),), "waits for the device, which is idle"),
        ((("torch/_inductor/compile_fx.py(9): compile_fx_inner", "python", 0, 39),), "while it compiles"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_cause_is_taken_from_the_calls_in_the_stall(doing, says):
    (found,) = judge(stalled_run("late", "", doing=doing))
    assert says in found.message


def test_what_only_the_profiler_does_is_information():
    (found,) = judge(stalled_run("late", "", doing=(("CUPTI Buffer Flush", "overhead", 0, 39),)))
    assert found.severity == Severity.INFO
    assert "profiler" in found.message


def test_a_stall_in_a_save_is_not_an_outlier():
    assert judge(stalled_run("late", "late", doing=(("dcp.save", "annotation", 0, 39),))) == ()


def test_a_first_use_in_the_first_step_is_warm_up_and_no_outlier():
    run = stalled_run("late", "late", doing=(("cudaMalloc", "runtime", 0, 39),), step=0)
    (found,) = judge(run, ColdStart)
    assert (found.severity, found.cost_ns, found.steps) == (Severity.INFO, 0, (0,))
    assert "The first profiled step (0) is warm-up" in found.message
    assert judge(run) == ()


def test_a_first_use_in_a_later_step_is_an_outlier():
    run = stalled_run("late", "late", doing=(("cudaMalloc", "runtime", 0, 39),))
    (found,) = judge(run)
    assert "allocates device memory" in found.message
    assert judge(run, ColdStart) == ()


def test_a_pause_in_the_first_step_is_an_outlier_and_no_warm_up():
    run = stalled_run("late", "", step=0)
    assert [found.ranks for found in judge(run)] == [(0,)]
    assert judge(run, ColdStart) == ()


def test_a_first_step_that_is_long_for_a_single_stall_does_not_look_like_warm_up():
    assert "warm_up_inside" not in subjects(stalled_run("late", "", step=0, late_by=80))
    allocates = (("cudaMalloc", "runtime", 0, 79),)
    assert "warm_up_inside" in subjects(stalled_run("late", "late", doing=allocates, step=0, late_by=80))


def test_a_stall_in_a_graph_launch_gets_a_fix_for_graphs():
    (found,) = judge(stalled_run("late", "", doing=(("cudaGraphLaunch", "runtime", 0, 39),)))
    assert "cudaGraphUpload" in found.fix
    (found,) = judge(stalled_run("late", "", doing=(("cudaLaunchKernel", "runtime", 0, 39),)))
    assert "Graph" not in found.fix
