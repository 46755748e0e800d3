"""Outlier steps and cold windows on drawn timelines: one host stalls once, or all do."""

from dataclasses import replace

import polars as pl
import pytest

from tests.support import drawn_traces
from tests.support.drawn_hosts import UNIT_NS
from tests.support.rule_examples import phase_run, stalled_run
from tracekit.model import schema
from tracekit.model.trace import Trace
from tracekit.rules import outlier_steps
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


def test_a_pause_of_one_rank_names_step_rank_and_cost(wording):
    # step     0         1                      2
    # compute  aA.. aA.. b......B bbbb (rank 1: b, 40 of nothing, B)
    (found,) = judge(stalled_run("", "late", ""))
    assert (found.severity, found.ranks, found.steps) == (Severity.WARNING, (1,), (1,))
    assert found.cost_ns == STALL_NS // 3
    wording(found.message)


def test_a_stop_of_all_ranks_names_no_rank(wording):
    (found,) = judge(stalled_run("late", "late", "late"))
    assert found.ranks == ()
    wording(found.message)


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


def test_a_finding_keeps_its_stalls_whatever_its_subject_says():
    run = stalled_run("", "late", "")
    (finding,) = judge(run)
    stalls = [outlier_steps.removal(run, found).stalls for found in (finding, replace(finding, subject="rank 1"))]
    assert stalls[0] == stalls[1] != ()


def test_what_only_the_profiler_does_is_information():
    (found,) = judge(stalled_run("late", "", doing=(("CUPTI Buffer Flush", "overhead", 0, 39),)))
    assert found.severity == Severity.INFO
    assert "profiler" in found.message


def test_a_stall_in_a_save_is_not_an_outlier():
    assert judge(stalled_run("late", "late", doing=(("dcp.save", "annotation", 0, 39),))) == ()


def test_a_first_use_in_the_first_step_is_warm_up_and_no_outlier(wording):
    run = stalled_run("late", "late", doing=(("cudaMalloc", "runtime", 0, 39),), step=0)
    (found,) = judge(run, ColdStart)
    assert (found.severity, found.cost_ns, found.steps) == (Severity.INFO, 0, (0,))
    wording(found.message)
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


# Stalls in the last step of a window ----------------------------------------------------------------------------------


def cpu_run(step, where, pause, ranks=3, steps=8):
    """Return ranks on a CPU, of which rank 1 pauses in a step, before its last op or after it; times in UNIT_NS.

    # op    aaaa  bb.aaaa  bb.     others wait for rank 1 in the all-reduce of the next step, if there is one
    # comm      xx.      xx.
    """
    rows = {rank: [] for rank in range(ranks)}
    at = dict.fromkeys(rows, 0)
    for number in range(steps):
        begin, arrived = dict(at), {rank: at[rank] + 40 for rank in rows}
        end = max(arrived.values()) + 20
        for rank in rows:
            stalls = (rank, number) == (1, step)
            late, after = (pause if stalls and where == each else 0 for each in ("before", "after"))
            rows[rank] += [("a", begin[rank], arrived[rank], number), ("x", arrived[rank], end, number)]
            rows[rank] += [("b", end + late, end + late + 20, number)]
            at[rank] = end + late + 20 + after + 5
            rows[rank] += [("step", begin[rank], at[rank] - 1, number)]
    return drawn_traces.run(*(_cpu_trace(rank, rows[rank]) for rank in rows))


def _cpu_trace(rank, rows):
    slices = [(name, start * UNIT_NS, (end - start) * UNIT_NS, step) for name, start, end, step in rows]
    work = [each for each in slices if each[0] != "step"]
    activities = pl.DataFrame(work, schema=["name", "start_ns", "dur_ns", "step"], orient="row").with_columns(
        pl.when(pl.col("name") == "x").then(pl.lit("communication")).otherwise(pl.lit("compute")).alias("kind"),
        pl.when(pl.col("name") == "x").then(1).otherwise(0).alias("lane"),
        pl.int_range(pl.len()).alias("id"), pl.int_range(pl.len()).alias("launch_id"),
    )  # fmt: skip
    ops = activities.select("id", "lane", "name", "start_ns", "dur_ns", "step", kind=pl.lit("cpu_op"))
    calls = activities.filter(pl.col("name") == "x").select(activity_id="id", op=pl.lit("all_reduce"), sent_bytes=1024)
    first = {step: start for name, start, _, step in work if name == "a"}
    last = max(start + dur for _, start, dur, _ in work)
    marks = [
        {"step": step, "host_start_ns": start, "host_end_ns": start + dur, "start_ns": first[step],
         "end_ns": first.get(step + 1, last)}
        for name, start, dur, step in slices if name == "step"
    ]  # fmt: skip
    lanes = pl.DataFrame({"lane": [0, 1], "name": ["main", "gloo"], "role": ["compute", "communication"]})
    groups = pl.DataFrame({"group": ["0"], "ranks": [[0, 1, 2]]})
    tables = {
        "lanes": lanes, "activities": activities, "ops": ops, "collectives": calls, "groups": groups,
        "steps": pl.DataFrame(marks),
    }  # fmt: skip
    conformed = {name: schema.TABLES[name].conform(table) for name, table in tables.items()}
    return Trace(rank=rank, window=0, path=f"drawn-rank{rank}", **conformed)


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_stall_costs_as_much_in_the_last_step_as_in_a_middle_one(where):
    pause = 400
    (middle,), (last,) = (judge(cpu_run(step, where, pause)) for step in (4, 7))
    assert middle.ranks == last.ranks == (1,)
    assert (last.severity, last.steps) == (Severity.WARNING, (7,))
    assert middle.cost_ns == pytest.approx(pause * UNIT_NS / 8, rel=0.05)
    assert last.cost_ns == pytest.approx(middle.cost_ns, rel=0.05)
    assert last.impact == pytest.approx(middle.impact, rel=0.05)


def test_a_window_that_ends_as_its_steps_do_has_no_stall_at_its_end():
    assert judge(cpu_run(7, "after", 0)) == ()


@pytest.mark.parametrize(
    "doing",
    [
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "annotation"),
        ("cudaDeviceSynchronize", "runtime"),
        ("cudaMalloc", "runtime"),
        ("metrics.py(12): log", "python"),
    ],
)
@pytest.mark.parametrize("affected", [(1, 3), (1, 3, 5)])
def test_stalls_of_data_waits_allocation_and_python_that_recur_warn_with_their_cost_over_the_window(doing, affected):
    run = phase_run(affected, affected, steps=6, phase=doing)
    (finding,) = check(run, [OutlierStep()]).findings
    assert (finding.severity, finding.steps) == (Severity.WARNING, affected)
    # A stall is 39 units long.
    assert finding.cost_ns == len(affected) * 39 * UNIT_NS // 6
