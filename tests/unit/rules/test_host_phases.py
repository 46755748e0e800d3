"""Compilation and garbage collection in every step, in some and in the first ones: drawn, recorded, and healthy."""

from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import drawn_hosts, drawn_traces
from tests.support.drawn_hosts import UNIT_NS
from tests.support.rule_examples import COLLECTS, COMPILES, PHASE_LENGTH, phase_run
from tracekit.analysis.host import host_phases
from tracekit.analysis.time import breakdown
from tracekit.model.run import Run
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes.host import COMPILATION, GARBAGE_COLLECTION
from tracekit.replay.graph.causes.stalls import Removal
from tracekit.rules import engine
from tracekit.rules.rule import Severity

RECORDINGS = Path(__file__).parents[2] / "recordings" / "host_phases"
CASES = Path(__file__).parents[3].parent / "shared" / "cases"


def findings_of(run: Run, *codes: str) -> list[engine.Finding]:
    return [finding for finding in engine.check(run).findings if finding.code in codes]


@pytest.mark.parametrize(("phase", "code"), [(COMPILES, "HOST005"), (COLLECTS, "HOST006")], ids=["compile", "gc"])
@pytest.mark.parametrize("affected", [(0, 1, 2, 3, 4, 5), (1, 3, 5), (2, 5), (0, 2, 4)], ids=str)
def test_a_phase_that_recurs_is_priced_over_all_steps(phase, code, affected):
    run = phase_run(affected, steps=6, phase=phase)
    (finding,) = findings_of(run, code)
    assert (finding.severity, finding.steps, finding.ranks) == (Severity.WARNING, affected, (0,))
    lost_ns = len(affected) * (PHASE_LENGTH - 1) * UNIT_NS // 6
    assert finding.cost_ns == pytest.approx(lost_ns, rel=0.1)
    assert findings_of(run, "STEP001", "STEP002", "HOST001") == []


def test_the_ranks_that_collect_are_named_and_no_other(wording):
    run = phase_run((), (1, 3), (), steps=6, phase=COLLECTS)
    (finding,) = findings_of(run, "HOST006")
    assert (finding.severity, finding.ranks, finding.steps) == (Severity.WARNING, (1,), (1, 3))
    wording(finding.message)


@pytest.mark.parametrize("affected", [(0,), (0, 1), (0, 1, 2)], ids=str)
def test_compiling_in_the_first_steps_is_warm_up(affected):
    report = engine.check(phase_run(affected, steps=6, phase=COMPILES))
    compiling = [finding for finding in report.findings if finding.code in ("HOST005", "STEP001", "STEP002")]
    assert [(finding.severity, finding.cost_ns) for finding in compiling] == [(Severity.INFO, 0)]


def test_a_single_phase_is_a_single_stall():
    run = phase_run((3,), steps=6, phase=COLLECTS)
    assert findings_of(run, "HOST006") == []
    (finding,) = findings_of(run, "STEP001")
    assert (finding.stall, finding.steps) == ("garbage_collection", (3,))


def test_a_window_of_one_step_cannot_show_that_it_recurs():
    (finding,) = findings_of(phase_run((0,), steps=1, phase=COMPILES), "HOST005")
    assert finding.severity is Severity.INFO


def test_short_collections_are_no_finding():
    picture = "step 000000000011111111112222222222\ncompute aaaaaaaaa.bbbbbbbbb.ccccccccc."
    spans = tuple(("gc", "annotation", 10 * step + 9, 10 * step + 9) for step in range(3))
    run = drawn_traces.run(drawn_hosts.trace(picture, doing=spans))
    assert findings_of(run, "HOST006") == []


def test_garbage_of_data_loading_is_its_own_phase_and_a_compilation_has_its_id():
    doing = (
        (*COMPILES, 1, 6),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "annotation", 11, 18), (*COLLECTS, 12, 17),
        ("Torch-Compiled Region: 0/7", "cpu_op", 7, 8),
    )  # fmt: skip
    run = drawn_traces.run(drawn_hosts.trace("step 00000000001111111111\ncompute a.......bbb.......ccc", doing=doing))
    phases = run.table(host_phases.host_phases)
    assert phases.select("step", "phase", "compile_id").rows() == [
        (0, "compile", "0/7"),
        (1, "garbage_collection", None),
    ]


RECORDED = {  # affected steps, ranks and recurrence as recorded; the script is beside the recordings
    "compiles_in_every_step": ("HOST005", (0,), (1, 2, 3, 4, 5, 6)),
    "compiles_in_every_third_step": ("HOST005", (0,), (1, 4)),
    "collects_on_one_rank": ("HOST006", (1,), (2, 5)),
    "collects_on_all_ranks": ("HOST006", (0, 1), (1, 2, 3, 4, 5, 6)),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_phases_are_the_first_finding_and_cost_what_they_take(name):
    code, ranks, steps = RECORDED[name]
    run = tracekit.load(RECORDINGS / name)
    finding = engine.check(run).findings[0]
    assert (finding.code, finding.ranks, finding.steps) == (code, ranks, steps)
    assert finding.severity > Severity.INFO
    began = run.table(breakdown.by_step).group_by("rank").agg(began_ns=pl.col("start_ns").min())
    within = run.table(host_phases.host_phases).join(began, on="rank").filter(pl.col("start_ns") >= pl.col("began_ns"))
    # In each step ranks wait for the one whose host takes longest.
    longest = within.group_by("rank", "step").agg(pl.col("dur_ns").sum()).group_by("step").agg(pl.col("dur_ns").max())
    assert finding.cost_ns == pytest.approx(longest["dur_ns"].sum() / 6, rel=0.05)


def test_recorded_compilation_of_the_first_steps_is_warm_up():
    report = engine.check(tracekit.load(RECORDINGS / "compiles_in_first_steps"))
    (finding,) = [finding for finding in report.findings if finding.code == "HOST005"]
    assert (finding.severity, finding.steps) == (Severity.INFO, (1, 2, 3))


@pytest.mark.parametrize("name", ["compiles_never", "collects_never"])
def test_healthy_recordings_have_no_such_finding(name):
    run = tracekit.load(RECORDINGS / name)
    assert findings_of(run, "HOST005", "HOST006", "DATA001") == []
    saved = [savings.saving_of(run, [Removal(cause)]).saved_ns for cause in (COMPILATION, GARBAGE_COLLECTION)]
    assert saved == [0, 0]


def test_operators_of_a_compiler_are_no_compute():
    run = tracekit.load(RECORDINGS / "compiles_in_every_step")
    healthy = tracekit.load(RECORDINGS / "compiles_never")
    computed_ns, usual_ns = (traced.table(breakdown.by_step)["compute_ns"].median() for traced in (run, healthy))
    assert computed_ns < 4 * usual_ns
    phases = run.table(host_phases.host_phases)
    assert phases["compile_id"].drop_nulls().n_unique() == 6
    assert phases["phase"].unique().to_list() == ["compile"]  # torch.compile collects garbage, too


@pytest.mark.skipif(not CASES.exists(), reason="needs the shared cases")
def test_the_case_that_compiles_in_every_step():
    finding, *others = engine.check(tracekit.load(CASES / "recompile")).findings
    assert (finding.code, finding.steps) == ("HOST005", (10, 11, 12, 13, 14))
    assert finding.impact == pytest.approx(0.95, abs=0.02)
    assert "0/2" in finding.message
    assert {finding.code for finding in others} & {"STEP001", "STEP002", "DATA001"} == set()


@pytest.mark.skipif(not CASES.exists(), reason="needs the shared cases")
def test_the_case_in_which_one_rank_collects_in_every_second_step():
    report = engine.check(tracekit.load(CASES / "gcstraggler"))
    finding = report.findings[0]
    assert (finding.code, finding.ranks, finding.severity) == ("RANK005", (1,), Severity.ERROR)
    # Its pauses take 683, 619 and 678 ms of 2,104 ms.
    assert finding.impact == pytest.approx(0.94, abs=0.03)
    assert {"STEP002", "DATA001"} & {finding.code for finding in report.findings} == set()
