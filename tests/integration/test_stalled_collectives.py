"""A gloo job whose ranks are stopped during an all-reduce, recorded as by a user; and recordings without one."""

from pathlib import Path

import pytest

from tests.integration.recorded import command, do, launched, load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity
from tracekit.rules.stalled_collectives import StalledCollective

SAMPLES = Path(__file__).parents[2] / "sample_traces"
TRACES = Path(__file__).parents[3] / "shared" / "traces"
STOP_NS = 3_000_000_000
COMPUTING, WAITING = 5, 9  # steps of the log, from 0


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """Return the findings on three ranks, of which rank 1 is stopped while it computes, and rank 2 while it waits."""
    folder = tmp_path_factory.mktemp("stopped")
    stops = ("--stop", f"1:{COMPUTING + 1}:computing", f"2:{WAITING + 1}:waiting")
    training = launched(3, "stopped_in_collective.py", "--steps", "12", *stops)
    done = do(command("--quiet", "--out", "run", "--steps", "2:12", "--", *training), folder)
    assert done.code == 0, done.err
    return check(load(folder / "run")).findings


def stalls(findings):
    return {each.steps: each for each in findings if each.code == "STEP004"}


def test_a_rank_that_is_stopped_while_it_computes_is_named(findings):
    found = stalls(findings)[(COMPUTING,)]
    assert (found.severity, found.ranks) == (Severity.WARNING, (1,))
    assert "one all-reduce of 18 MiB of the group 0 takes " in found.message
    assert "Meanwhile the host of rank 1 does nothing, inside aten::mm: its process was stopped" in found.message
    assert 0.6 * STOP_NS < 10 * found.cost_ns < 1.2 * STOP_NS  # the other ranks may arrive later on a loaded machine


def test_a_rank_that_is_stopped_while_all_wait_looks_like_the_network(findings):
    found = stalls(findings)[(WAITING,)]
    assert (found.severity, found.ranks) == (Severity.WARNING, (0, 1, 2))
    assert "the network or a member stood still, and the traces do not show which" in found.message
    assert 0.6 * STOP_NS < 10 * found.cost_ns < 1.2 * STOP_NS  # the other ranks may arrive later on a loaded machine


def test_no_other_finding_contains_the_stops(findings):
    # What a loaded machine adds is part of other findings.
    others = [each for each in findings if each.code != "STEP004"]
    assert all(not {COMPUTING, WAITING}.intersection(each.steps) for each in others if each.code == "STEP001")
    assert all("after STEP004" in each.message for each in others if each.code == "COMM001")


@pytest.mark.parametrize(
    "name",
    [
        "megatron_tp8_a100_8ranks",
        "nanogpt_h100_8ranks",
        "torchrec_v100_4ranks",
        "merged_ddp_mi300_4ranks",
        "hta_ddp_v100_memory",
        "hta_cpu_gloo",
        "hta_pair_of_128",
    ],
)
def test_public_recordings_have_no_stalled_collective(name):
    if not (TRACES / name).is_dir():
        pytest.skip("the downloaded traces are not in ../shared")
    assert list(StalledCollective().check(load(TRACES / name))) == []


def test_samples_have_no_stalled_collective():
    runs = [
        *SAMPLES.glob("demo-*"),
        *(path for path in (SAMPLES / "faults").iterdir() if path.is_dir()),
        *(SAMPLES / "parallelism").iterdir(),
        *(path for path in (SAMPLES / "ci").iterdir() if path.is_dir()),
    ]
    assert len(runs) > 15
    assert {path.name: list(StalledCollective().check(load(path))) for path in runs} == {path.name: [] for path in runs}
