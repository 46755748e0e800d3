"""Hosts with more computing threads than cores."""

from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.rule_examples import crowded_run
from tracekit.analysis.host import cpu_contention
from tracekit.model import schema
from tracekit.rules.engine import check
from tracekit.rules.host_processors import OversubscribedHost
from tracekit.rules.rule import Severity

CASE = Path(__file__).parents[3].parent / "shared" / "cases" / "oversub"
SLOW = f"step {'0' * 20}{'1' * 20}\ncompute a....{'aaaa.' * 7}"
"""The fastest call of a takes 1, the other seven 4."""


def findings(run):
    return check(run, [OversubscribedHost()]).findings


def test_the_excess_over_the_fastest_identical_op_is_the_loss(wording):
    (found,) = findings(crowded_run(SLOW))
    # In step 0, the lower median of two steps, three calls take 4 instead of 1.
    assert (found.cost_ns, found.confidence, found.steps) == (9, 0.9, (0, 1))
    assert "OMP_NUM_THREADS=1" in found.fix
    wording(found.message, found.sentence)


@pytest.mark.parametrize(
    "stated",
    [{"threads": 1}, {"cores": 64}, {"threads": 1, "ranks": 64}, {"quota_cores": 0, "cores": 32}, {"cores": 0}],
)
def test_ranks_within_their_cores_are_not_reported(stated):
    assert findings(crowded_run(SLOW, **stated)) == ()


def test_a_quota_counts_as_the_cores():
    assert findings(crowded_run(SLOW, cores=64, usable_cores=64, quota_cores=4))


def logged_run(cpu_ns, *, picture=SLOW, wait_ns=None, **manifest):
    """Return a run with the CPU time of its two steps, whose manifest by default states nothing."""
    logged = {"step_time_ns": 20, "cpu_time_ns": cpu_ns} | ({} if wait_ns is None else {"processor_wait_ns": wait_ns})
    rows = [{"step": step, "name": name, "value": float(value)} for step in (0, 1) for name, value in logged.items()]
    metrics = schema.METRICS.conform(pl.DataFrame(rows))
    return drawn_traces.run(drawn_traces.trace(picture, on_device=False, metrics=metrics), **manifest)


def test_ops_that_compute_for_longer_than_the_cpu_time_wait_for_processors():
    # Ops take 29 of 40: with 20 of CPU time, threads waited for 9; with 28, for less than 8% of the time.
    (found,) = findings(logged_run(10))
    assert (found.severity, found.confidence) == (Severity.INFO, 0.4)
    assert "OMP_NUM_THREADS" in found.fix
    assert findings(logged_run(14)) == ()


def test_other_processes_are_not_the_threads_of_a_run_that_states_few():
    assert findings(logged_run(10, processors={"cores": 2, "threads": 1, "ranks": 2})) == ()


PREEMPTED = f"step {'0' * 20}{'1' * 20}\ncompute {'a.' * 6}aaaaaaaa{'a.' * 6}aaaaaaaa"
"""Two of many calls are interrupted: the other rank has the only core meanwhile."""
ONE_CORE = {"cores": 2, "usable_cores": 1, "threads": 1, "ranks": 2}


@pytest.mark.parametrize(
    ("wait_ns", "threads", "ranks", "cost_ns"), [(9, 2, 2, 7), (9, 1, 2, None), (9, 4, 1, 7), (1, 2, 2, None)]
)
def test_threads_that_outnumber_the_cores_lose_what_few_calls_wait_for_a_core(wait_ns, threads, ranks, cost_ns):
    # In each step one call of seven takes 8 instead of 1: a barrier inside of it waited for a thread without a core.
    processors = {"cores": 2, "threads": threads, "ranks": ranks}
    found = findings(logged_run(10, wait_ns=wait_ns, picture=PREEMPTED, processors=processors))
    assert [finding.cost_ns for finding in found] == ([] if cost_ns is None else [cost_ns])


@pytest.mark.parametrize(
    ("waiting", "cost_ns"),
    [
        ({"cpu_ns": 8}, 8),  # of 20, another 8 are the other rank's, and 4 nobody's
        ({"cpu_ns": 10, "wait_ns": 9}, 10),
        ({"cpu_ns": 20, "wait_ns": 7}, 7),  # of the ops: both ranks compute all the time, each on a core
    ],
)
def test_ranks_that_share_a_core_lose_each_others_time_although_few_calls_are_slow(waiting, cost_ns):
    (finding,) = findings(logged_run(**waiting, picture=PREEMPTED, processors=ONE_CORE))
    assert (finding.severity, finding.cost_ns) == (Severity.WARNING, cost_ns)
    assert "OMP_NUM_THREADS" not in finding.fix


@pytest.mark.parametrize(
    ("waiting", "processors"),
    [
        ({"cpu_ns": 8, "wait_ns": 0}, ONE_CORE),  # each has a core of its own: nobody waits
        ({"cpu_ns": 8, "wait_ns": 7}, ONE_CORE | {"usable_cores": 2}),  # other programs have it
        ({"cpu_ns": 8, "wait_ns": 7}, ONE_CORE | {"ranks": 1}),
    ],
)
def test_ranks_that_wait_for_no_core_or_for_other_programs_are_not_reported(waiting, processors):
    assert findings(logged_run(**waiting, picture=PREEMPTED, processors=processors)) == ()


@pytest.mark.skipif(not CASE.is_dir(), reason="needs ../shared/cases, which is not part of the project")
def test_late_ranks_of_an_oversubscribed_host_are_its_consequence():
    run = tracekit.load(str(CASE))
    first, *others = check(run).findings
    assert (first.code, first.ranks) == ("HOST007", (0, 1))
    assert first.impact > 0.4
    assert all(finding.severity is Severity.INFO for finding in others)
    assert [finding.consequence_of for finding in others if finding.code == "RANK001"] == [first.id]
    assert first.severity >= Severity.WARNING
    assert run.table(cpu_contention.contended_ops)["rank"].unique().sort().to_list() == [0, 1]
