"""Single collectives that take far longer than usual, on drawn timelines and in simulated runs."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import drawn_hosts, drawn_traces
from tests.support.drawn_hosts import UNIT_NS
from tests.support.gpu_hosts import GpuHost, all_reduce, common_step
from tests.support.rule_examples import all_reduce_run
from tests.unit.simulate.jobs import job, written
from tracekit.analysis.parallelism import stalled_collectives, stragglers
from tracekit.rules.engine import check
from tracekit.rules.outlier_steps import OutlierStep
from tracekit.rules.rule import Severity
from tracekit.rules.slow_collectives import SlowLink, StalledCollective
from tracekit.rules.stragglers import OccasionalStraggler, Straggler, UnevenRanks

EXCESS_NS = 58 * UNIT_NS
STALLED = (2, 2, 2, 2, 60, 2, 2)
STALL = range(19, 79)  # when the fifth all-reduce runs: 4 steps of 5 characters, less one, and 2 of compute


def judge(run, *rules):
    return check(run, rules or [StalledCollective()]).findings


def test_a_single_long_collective_names_step_group_and_cost(wording):
    # step     0    1 …  4                5
    # compute  aa..      aa               aa
    # comm       xx        xxxx…xxxx        xx    60 instead of 2, on both ranks
    (found,) = judge(all_reduce_run(*STALLED))
    assert (found.severity, found.ranks, found.steps, found.subject) == (Severity.WARNING, (0, 1), (4,), "")
    assert found.cost_ns == EXCESS_NS // 7
    wording(found.message)
    row = found.evidence.row(0, named=True)
    assert (row["step"], row["transfer_ns"], row["usual_ns"]) == (4, 60 * UNIT_NS, 2 * UNIT_NS)


def test_a_collective_that_waits_for_a_late_rank_does_not_stall():
    # compute  aa          aaaa…aaaa    rank 1 comes 58 later
    # comm       xxxx…xxxx         xx
    late = all_reduce_run(*[2] * 7, late={(1, 4): 58})
    assert judge(late) == ()
    assert late.table(stalled_collectives.stalled_calls).is_empty()


def lacking_last(run, rank, count):
    """Return the run without the last collectives of a rank, as where a profiler lost them."""
    traces = []
    for trace in run.traces():
        if trace.rank == rank:
            lost = trace.collectives["activity_id"].sort().tail(count).to_list()
            collectives = trace.collectives.filter(~pl.col("activity_id").is_in(lost))
            activities = trace.activities.filter(~pl.col("id").is_in(lost))
            trace = replace(trace, collectives=collectives, activities=activities)
        traces.append(trace)
    return drawn_traces.run(*traces)


@pytest.mark.parametrize("lost", [1, 2])
def test_collectives_that_a_late_rank_lacks_take_as_long_as_others_with_their_wait(lost):
    late = {(1, step): 58 for step in range(9)}
    run = lacking_last(all_reduce_run(*[2] * 9, late=late), rank=1, count=lost)
    assert run.table(stalled_collectives.stalled_calls).is_empty()
    (straggler,) = judge(run, Straggler(), OccasionalStraggler(), SlowLink())
    assert (straggler.code, straggler.ranks, straggler.cost_ns) == ("RANK001", (1,), 58 * UNIT_NS)
    costs = run.table(stragglers.straggler_costs).filter(pl.col("late_rank") == 1)
    assert costs["step"].to_list() == [*range(9 - lost)]


def test_a_collective_that_a_rank_lacks_stalls_if_it_takes_longer_than_others_with_their_wait():
    late = {(1, step): 58 for step in range(1, 6)}
    run = lacking_last(all_reduce_run(2, 2, 2, 2, 2, 2, 600, late=late), rank=1, count=1)
    assert run.table(stalled_collectives.stalled_calls)["ranks"].to_list() == [[0]]


def test_without_the_trace_of_a_member_it_is_unknown_whether_a_rank_came_late(wording):
    (found,) = judge(all_reduce_run(*STALLED, ranks=(0,)))
    assert (found.severity, found.subject, found.confidence) == (Severity.WARNING, "untraced ranks", 0.5)
    wording(found.message)
    assert found.cost_ns == EXCESS_NS // 7


def test_a_rank_whose_host_does_nothing_while_others_go_on_is_named(wording):
    busy = tuple((f"op{at}", "cpu_op", at, at + 4) for at in range(22, 82, 5))
    (found,) = judge(all_reduce_run(*STALLED, doing={0: busy}))
    assert (found.ranks, found.subject) == ((1,), "ranks 1")
    wording(found.message)
    wording(found.fix)
    (both,) = judge(all_reduce_run(*STALLED, doing={0: busy, 1: busy}))
    assert both.subject == ""


@pytest.mark.parametrize(
    ("took", "why"),
    [
        ((2, 2, 2, 2, 7, 2, 2), "three times as long, as by contention"),
        ((60, 2, 2, 2, 2, 2, 2), "the first one of the group may set up the communicator"),
        ((2, 60, 2, 60, 2, 60, 2), "one in two takes long"),
        ((2, 2, 60, 2, 2), "only four others"),
        ((20, 20, 20, 79, 20, 20, 20), "less than four times as long"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_stall(took, why):
    assert judge(all_reduce_run(*took)) == (), why


def reducing_job(folder: Path, *, large_us: float, stalls: bool):
    """A job of two ranks and three steps: in each, four large all-reduces and a small one, in step 1 of 6 ms longer."""
    hosts = [GpuHost(rank, 2) for rank in range(2)]
    for step in range(3):
        with common_step(hosts, step):
            for number in range(5):
                for host in hosts:
                    host.kernel(f"gemm_{number}", 100.0)
                is_small = number == 4
                long_us = 6000.0 if is_small and step == 1 and stalls else 0.0
                all_reduce(hosts, long_us + (40.0 if is_small else large_us), elements=512 if is_small else 1 << 20)
    for host in hosts:
        host.wait()
        host.write(folder)
    return tracekit.load(str(folder), cache=False), max(max(host.free_us.values()) for host in hosts)


def test_a_small_collective_of_each_step_stalls_if_it_takes_longer_than_the_large_ones(tmp_path: Path):
    folders = [tmp_path / name for name in ("stalled", "healthy")]
    for folder in folders:
        folder.mkdir()
    (stalled, end_us), (healthy, usual_end_us) = (
        reducing_job(folder, large_us=150.0, stalls=stalls)
        for folder, stalls in zip(folders, (True, False), strict=True)
    )
    (finding,) = [finding for finding in check(stalled).findings if finding.code == StalledCollective.code]
    assert (finding.severity, finding.ranks, finding.steps) == (Severity.WARNING, (0, 1), (1,))
    assert finding.cost_ns == pytest.approx(1000 * (end_us - usual_end_us) / 3, rel=0.02)
    assert judge(healthy) == ()


def test_a_small_collective_that_takes_as_long_as_large_ones_does_not_stall(tmp_path: Path):
    assert judge(reducing_job(tmp_path, large_us=2000.0, stalls=True)[0]) == ()


def test_a_hidden_stall_costs_nothing():
    assert judge(all_reduce_run(*STALLED, hidden=True)) == ()


def test_a_host_that_stalls_is_one_fault(tmp_path: Path):
    written(job("fsdp2", steps=8, gpus=4, ranks_written=4), tmp_path, "host-stall")
    rules = [StalledCollective(), OutlierStep(), UnevenRanks()]
    findings = check(tracekit.load(str(tmp_path), cache=False), rules).findings
    assert [(each.code, each.ranks, each.steps) for each in findings] == [("STEP001", (1,), (4,))]


@pytest.mark.parametrize(
    "strategy", ["fsdp2", *(pytest.param(other, marks=pytest.mark.accuracy) for other in ("ddp", "yafsdp"))]
)
def test_the_price_of_a_simulated_stall_is_what_truth_says(strategy: str, tmp_path: Path):
    known = written(job(strategy, steps=8, gpus=4, ranks_written=4), tmp_path, "stalled-collective").known_faults[0]
    report = check(tracekit.load(str(tmp_path), cache=False))
    (found,) = (each for each in report.findings if each.code == "STEP004")
    assert (found.severity, found.steps) == (Severity.WARNING, known.steps)
    assert 8 * found.cost_ns == pytest.approx(known.cost_ns, rel=0.02)
    assert next(each for each in report.findings if each.cost_ns) is found


def test_communication_is_priced_without_the_stall(tmp_path: Path):
    costs = []
    for fault in ((), ("stalled-collective",)):
        out = tmp_path / "".join(("run", *fault))
        written(job("fsdp2", steps=8, gpus=4, ranks_written=4, model="125m"), out, *fault)
        report = check(tracekit.load(str(out), cache=False))
        costs += [each.cost_ns for each in report.findings if each.code == "COMM001"]
    assert costs[1] == pytest.approx(costs[0], rel=0.02)


@pytest.mark.parametrize("strategy", [pytest.param("fsdp2", marks=pytest.mark.accuracy), "hsdp"])
def test_healthy_simulated_jobs_have_none(strategy: str, tmp_path: Path):
    written(job(strategy, steps=6, ranks_written=4), tmp_path)
    assert judge(tracekit.load(str(tmp_path), cache=False)) == ()


def unsized_run(*last: int, calls=None):
    """Ranks whose steps have three all-gathers of 2 and a last one, as after the logits, of the lengths given.

    No size is recorded. `calls` is how many short ones a step has.
    """
    # step     0                1
    # compute  aa..aa..aa..aa…  aa..
    # comm       xx  xx  xx  xxxx…
    groups = pl.DataFrame({"group": ["0"], "ranks": [[0, 1]]})
    parts = [("aa", "xx")] * 3
    traces = []
    for rank in (0, 1):
        pictures = {"step": "", "compute": "", "comm": ""}
        for step, length in enumerate(last):
            short = parts[: (calls or {}).get(step, 3)]
            for compute, comm in [*short, ("aa", "x" * length)]:
                pictures["compute"] += compute + "." * (len(comm) + 1)
                pictures["comm"] += ".." + comm + "."
                pictures["step"] += str(step) * (len(compute) + len(comm) + 1)
        picture = "\n".join(f"{name} {cells}" for name, cells in pictures.items())
        trace = drawn_hosts.trace(picture, {"a": 0}, rank=rank, groups=groups)
        sizes = pl.lit(None, pl.Int64)
        unsized = trace.collectives.with_columns(sent_bytes=sizes, received_bytes=sizes)
        traces.append(trace.replace(collectives=unsized))
    return drawn_traces.run(*traces)


@pytest.mark.parametrize(
    ("last", "calls"),
    [((60,), None), ((60, 60, 60, 60), None), ((60, 2, 60, 60), None), ((2, 60, 2, 2), {1: 2})],
    ids=["one step", "every step", "a short one", "another number of calls"],
)
def test_a_long_collective_of_unknown_size_is_no_stall(last, calls):
    assert judge(unsized_run(*last, calls=calls)) == ()


def test_of_unknown_sizes_one_that_takes_longer_than_at_its_place_of_other_steps_stalls():
    (found,) = judge(unsized_run(2, 2, 60, 2))
    assert found.steps == (2,)
    assert found.evidence["usual_ns"].unique().to_list() == [2 * UNIT_NS]


def test_steps_that_are_hardly_slower_than_those_before_are_no_slow_link() -> None:
    ratios = [1.4, 1.4, 1.4, 1.6, 1.6, 1.6]
    group = pl.DataFrame({"step": range(6), "ratio": ratios, "usual_ns": 100, "exposed_ns": 90}).with_columns(
        transfer_ns=(pl.col("ratio") * 100).cast(pl.Int64)
    )
    assert SlowLink()._slower_than_before(group) is None
    became_slow = group.with_columns(ratio=pl.Series([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]))
    assert (SlowLink()._slower_than_before(became_slow) or {})["since"] == 3
