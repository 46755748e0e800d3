"""A gloo job whose ranks are stopped during an all-reduce, recorded as by a user; and recordings without one."""

from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.integration.recorded import command, do, launched, load
from tests.support.selection import others_in_accuracy
from tracekit.analysis.parallelism import outlier_steps
from tracekit.analysis.time import breakdown
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity
from tracekit.rules.slow_collectives import StalledCollective

RECORDING = Path(__file__).parents[1] / "recordings" / "stopped_in_collective"
SAMPLES = Path(__file__).parents[2] / "sample_traces"
TRACES = Path(__file__).parents[3] / "shared" / "traces"
STOP_NS = 3_000_000_000
PROFILED = 11
COMPUTING, WAITING, SLEEPING, LAST = 5, 7, 9, 12
"""Steps in which ranks stop or pause; of 13, from 0."""


@pytest.fixture(scope="module", params=["recorded before", pytest.param("now", marks=pytest.mark.accuracy)])
def report(request, tmp_path_factory):
    """Return the report on three ranks: rank 1 is stopped while it computes, rank 2 while it waits, rank 0 pauses."""
    if request.param == "recorded before":
        return check(load(RECORDING))
    for _ in range(4):
        found = recorded(tmp_path_factory.mktemp("stopped"))
        if not was_disturbed(found.run):
            break
    return found


def was_disturbed(run):
    """Return whether other work on the machine stopped ranks, too: then other steps are long, or the stops longer."""
    steps = run.table(breakdown.by_step).drop_nulls("step")
    is_stopped = pl.col("step").is_in([COMPUTING, WAITING])
    is_other = ~pl.col("step").is_in([COMPUTING, WAITING, SLEEPING, SLEEPING + 1, LAST])
    longest_ns = [steps.filter(which)["duration_ns"].max() for which in (is_stopped, is_other)]
    return longest_ns[0] > 1.15 * STOP_NS or longest_ns[1] > 0.2 * STOP_NS


def recorded(folder):
    stops = ("--stop", f"1:{COMPUTING + 1}:computing", f"2:{WAITING + 1}:waiting")
    sleeps = ("--sleep", f"0:{SLEEPING + 1}", f"0:{LAST + 1}")
    training = launched(3, "stopped_in_collective.py", "--steps", str(LAST + 1), *stops, *sleeps)
    done = do(command("--quiet", "--out", "run", "--steps", f"2:{LAST + 1}", "--", *training), folder)
    assert done.code == 0, done.err
    return check(load(folder / "run"))


@pytest.fixture(scope="module")
def findings(report):
    return report.findings


def stalls(findings):
    return {each.steps: each for each in findings if each.code == "STEP004"}


def test_a_rank_that_is_stopped_while_it_computes_is_named(findings):
    found = stalls(findings)[(COMPUTING,)]
    assert (found.severity, found.ranks) == (Severity.WARNING, (1,))
    assert "one all-reduce of 18 MiB of the group 0 takes " in found.message
    assert "Meanwhile the host of rank 1 does nothing, inside aten::mm: its process was stopped" in found.message
    assert (
        0.6 * STOP_NS < PROFILED * found.cost_ns < 1.2 * STOP_NS
    )  # the other ranks may arrive later on a loaded machine


def test_a_rank_that_is_stopped_while_all_wait_looks_like_the_network(findings):
    found = stalls(findings)[(WAITING,)]
    assert (found.severity, found.ranks) == (Severity.WARNING, (0, 1, 2))
    assert "Either the network or one of the ranks stalled; the traces do not show which" in found.message
    assert (
        0.6 * STOP_NS < PROFILED * found.cost_ns < 1.2 * STOP_NS
    )  # the other ranks may arrive later on a loaded machine


def test_no_other_finding_contains_the_stops(findings):
    # What a loaded machine adds to these steps is part of other findings.
    others = [each for each in findings if each.code != "STEP004"]
    stalls_of_hosts = [each.evidence for each in others if each.code == "STEP001"]
    assert stalls_of_hosts
    for stalls_of_host in stalls_of_hosts:
        in_stops = stalls_of_host.filter(pl.col("step").is_in([COMPUTING, WAITING]))
        assert all(dur_ns < 0.3 * STOP_NS for dur_ns in in_stops["dur_ns"])
    # Of the transfers, that of a stopped step is as long as its stop.
    assert all(PROFILED * each.cost_ns < 0.3 * STOP_NS for each in others if each.code == "COMM001")


def test_a_pause_costs_as_much_in_the_last_step_as_in_a_middle_one(report):
    steps = report.run.table(outlier_steps.outlier_steps).filter(pl.col("ranks") == [0])
    lost_ns = dict(steps.group_by("gap_step").agg(pl.col("lost_ns").max()).iter_rows())
    assert lost_ns[SLEEPING] == pytest.approx(STOP_NS, rel=0.3)
    assert lost_ns[LAST] == pytest.approx(STOP_NS, rel=0.3)
    (found,) = (each for each in report.findings if each.code == "STEP001" and LAST in each.steps)
    assert found.ranks == (0,)


PUBLIC = (
    "megatron_tp8_a100_8ranks",
    "nanogpt_h100_8ranks",
    "torchrec_v100_4ranks",
    "merged_ddp_mi300_4ranks",
    "hta_ddp_v100_memory",
    "hta_cpu_gloo",
    "hta_pair_of_128",
)


@pytest.mark.parametrize("name", others_in_accuracy(PUBLIC, ["torchrec_v100_4ranks", "hta_cpu_gloo"]))
def test_public_recordings_have_no_stalled_collective(name):
    if not (TRACES / name).is_dir():
        pytest.skip("the downloaded traces are not in ../shared")
    assert list(StalledCollective().check(tracekit.load(str(TRACES / name)))) == []


RUNS = [
    *SAMPLES.glob("demo-*"),
    *(path for path in (SAMPLES / "faults").iterdir() if path.is_dir()),
    *(SAMPLES / "parallelism").iterdir(),
    *(path for path in (SAMPLES / "ci").iterdir() if path.is_dir()),
]
EVERYDAY = [
    SAMPLES / name for name in ("demo-fsdp2", "faults/slow-rank", "faults/slow-disk", "parallelism/pipeline-1f1b")
]


@pytest.mark.parametrize("folder", others_in_accuracy(RUNS, EVERYDAY), ids=lambda folder: folder.name)
def test_samples_have_no_stalled_collective(folder):
    assert list(StalledCollective().check(tracekit.load(str(folder)))) == []
