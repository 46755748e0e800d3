"""What fails a check with a baseline: new and worse findings and metrics, but neither known ones nor noise."""

import functools
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import sample_baselines, sample_report
from tests.support.wording import Wording
from tests.unit.simulate.jobs import job, written
from tracekit.errors import ConfigError, NotComparableError
from tracekit.ingest.loader import load
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.regression import baseline as baselines
from tracekit.regression import gate as checks
from tracekit.regression import root_cause
from tracekit.regression.baseline import Baseline, Recording
from tracekit.regression.gate import CheckResult, FindingStatus
from tracekit.regression.thresholds import Thresholds
from tracekit.rules.rule import Finding, Severity

WARNING, ERROR = Severity.WARNING, Severity.ERROR


@functools.cache
def the_run() -> Run:
    return sample_report.run()


def judged(*found: Finding, before: Baseline | None = None, bar: Severity | None = WARNING) -> CheckResult:
    """Return the gate of a run with these findings, compared with a baseline of the same run."""
    base = before or of_run()
    return checks.judge(sample_baselines.report(the_run(), *found), bar, baseline=base)


def of_run(*findings: baselines.KnownFinding, recordings: int = 1, created_ns: int | None = None) -> Baseline:
    """Return the baseline of the same run, with these findings in each recording."""
    made = baselines.of_reports([(sample_report.report(the_run(), found=()), the_run())])
    (own,) = made.recordings
    each = Recording(own.name, created_ns, own.samples, own.units, own.work, findings)
    return Baseline("main", made.fingerprint, (each,) * recordings)


def test_without_a_baseline_every_finding_is_new_and_fails_from_the_severity_on() -> None:
    run = sample_report.run()
    gate = checks.judge(
        sample_baselines.report(run, sample_baselines.finding("COMM001", ERROR), sample_baselines.finding("MEM001")),
        ERROR,
    )
    assert [(each.status, each.fails) for each in gate.findings] == [
        (FindingStatus.NEW, True),
        (FindingStatus.NEW, False),
    ]
    assert gate.failures == ("COMM001",)
    assert (gate.comparison, gate.baseline) == (None, "")


def test_a_known_finding_is_listed_and_does_not_fail() -> None:
    gate = judged(
        sample_baselines.finding("COMM001", impact=0.11), before=of_run(sample_baselines.known("COMM001", impact=0.10))
    )
    assert [(each.status, each.fails, each.impact_before) for each in gate.findings] == [
        (FindingStatus.KNOWN, False, 0.10)
    ]
    assert gate.failures == ()


def test_a_new_finding_fails_from_the_severity_on() -> None:
    found = sample_baselines.finding("COMM001"), sample_baselines.finding("MEM001", Severity.INFO)
    gate = judged(*found, before=of_run(sample_baselines.known("CKPT001")))
    assert [(each.finding.id, each.status.value, each.fails) for each in gate.findings] == [
        ("COMM001", "new", True),
        ("MEM001", "new", False),
    ]
    assert [gone.id for gone in gate.fixed] == ["CKPT001"]


@pytest.mark.parametrize(
    ("before", "after", "standing"),
    [
        (0.10, 0.12, "known"),  # less than 3% of the step
        (0.40, 0.45, "known"),  # less than a quarter of what it was
        (0.10, 0.14, "worse"),
        (0.40, 0.52, "worse"),
        (0.10, 0.05, "known"),
    ],
)
def test_a_finding_is_worse_only_by_a_relevant_amount(before: float, after: float, standing: str) -> None:
    gate = judged(
        sample_baselines.finding("COMM001", impact=after),
        before=of_run(sample_baselines.known("COMM001", impact=before)),
    )
    assert gate.findings[0].status == standing


def test_a_difference_within_the_spread_of_the_baseline_is_not_worse() -> None:
    base = of_run(sample_baselines.known("COMM001", impact=0.05))
    (own,) = base.recordings
    other = Recording(
        own.name, None, own.samples, own.units, own.work, (sample_baselines.known("COMM001", impact=0.15),)
    )
    noisy = Baseline("main", base.fingerprint, (own, other))
    assert (
        judged(sample_baselines.finding("COMM001", impact=0.20), before=noisy).findings[0].status == FindingStatus.KNOWN
    )
    assert (
        judged(sample_baselines.finding("COMM001", impact=0.27), before=noisy).findings[0].status == FindingStatus.WORSE
    )


@pytest.mark.parametrize(("after", "standing"), [(104 << 20, "known"), (120 << 20, "worse")])
def test_a_finding_about_memory_is_worse_by_its_bytes(after: int, standing: str) -> None:
    base = of_run(sample_baselines.known("MEM001", impact=0.0, cost_bytes=100 << 20))
    gate = judged(sample_baselines.finding("MEM001", impact=0.0, cost_bytes=after), before=base)
    assert gate.findings[0].status == standing


def test_a_run_compared_with_itself_passes() -> None:
    gate = judged(
        *sample_report.findings(),
        before=of_run(*map(baselines.KnownFinding.of, sample_report.findings()), recordings=5),
    )
    assert gate.failures == ()
    assert gate.comparison is not None
    verdicts = {change.metric: change.verdict.value for change in gate.comparison.changes}
    assert set(verdicts.values()) <= {"same", "inconclusive"}
    assert verdicts["step_time_ns"] == verdicts["compute_ns"] == "same"
    assert gate.causes == ()
    assert gate.baseline == "main (5 recordings)"


def test_a_run_of_another_training_is_refused_unless_allowed(wording: Wording) -> None:
    run = sample_report.run(world_size=4)
    with wording.raises(NotComparableError):
        checks.judge(sample_baselines.report(run), ERROR, baseline=of_run())
    gate = checks.judge(sample_baselines.report(run), ERROR, baseline=of_run(), allow_different=True)
    assert gate.comparison is not None
    assert "world_size differs" in gate.comparison.notes[0]


# Metrics -------------------------------------------------------------------------------------------------------------


def compared(before: dict[str, float], after: dict[str, float], **work: object) -> tuple[str, ...]:
    """Return the metrics that are worse than in five recordings that differ by 1%."""
    base = sample_baselines.baseline(
        *(
            sample_baselines.recording({m: sample_baselines.steps(v, seed=n) for m, v in before.items()})
            for n in range(5)
        )
    )
    candidate = sample_baselines.recording(
        {metric: sample_baselines.steps(value, seed=9) for metric, value in after.items()}
    )
    found = checks.compare(base, [candidate])
    return tuple(change.metric for change in found.changes if change.verdict.value == "worse")


def test_a_significantly_worse_metric_is_reported() -> None:
    before = {"step_time_ns": 100e6, "cpu_time_ns": 80e6, "sent_bytes": 1e6}
    assert compared(before, before) == ()
    assert compared(before, before | {"cpu_time_ns": 92e6}) == ("cpu_time_ns",)
    assert compared(before, before | {"sent_bytes": 2e6}) == ("sent_bytes",)


def test_only_common_ranks_are_compared_with_a_note(wording: Wording) -> None:
    base = sample_baselines.baseline(sample_baselines.recording({"step_time_ns": [10.0] * 6}, ranks=(0, 1, 2)))
    found = checks.compare(
        base,
        [sample_baselines.recording({"step_time_ns": [10.0] * 6}, ranks=(1, 2))],
    )
    wording(*found.notes)


def test_without_a_common_metric_there_is_no_verdict(wording: Wording) -> None:
    base = sample_baselines.baseline(sample_baselines.recording({"step_time_ns": [10.0] * 6}))
    with wording.raises(NotComparableError):
        checks.compare(base, [sample_baselines.recording({"sent_bytes": [10.0] * 6})])


# Causes --------------------------------------------------------------------------------------------------------------

WORK = (
    ("compute", "forward", "aten::mm", 30e6),
    ("compute", "backward", "aten::mm", 40e6),
    ("compute", "forward", "aten::clone", 1e6),
    ("communication", "forward", "gloo:all_gather", 10e6),
    ("flops", "forward", "aten::mm", 1e9),
    ("sent", "forward", "all_gather", 1e6),
    ("allocated", "forward", "", 50e6),
    ("save", None, "write", 50e6),
    ("save", None, "serialize", 20e6),
)
BEFORE = {
    "step_time_ns": 100e6, "cpu_time_ns": 80e6, "flops": 3e9, "transfer_ns": 10e6, "sent_bytes": 1e6,
    "allocated_bytes": 50e6, "peak_allocated_bytes": 20e6, "checkpoint_blocked_ns": 70e6, "checkpoint_cpu_ns": 60e6,
}  # fmt: skip


def causes(after: dict[str, float], work: dict[tuple[str, str], float], *, slower: float = 1.0) -> list[str]:
    """Return the causes of a run with other metrics and other work, by name, on a machine slower by a factor."""
    work_after = [
        (kind, phase, name, work.get((kind, name), amount) * (slower if kind in ("compute", "communication") else 1))
        for kind, phase, name, amount in WORK
    ]
    work_after += [
        (kind, "forward", name, value) for (kind, name), value in work.items() if (kind, name) not in known_work()
    ]
    base = [sample_baselines.recording({m: [v] * 6 for m, v in BEFORE.items()}, work=WORK) for _ in range(5)]
    candidate = sample_baselines.recording({m: [v] * 6 for m, v in (BEFORE | after).items()}, work=work_after)
    found = checks.compare(sample_baselines.baseline(*base), [candidate])
    worse = [change for change in found.changes if change.verdict.value == "worse"]
    by_name = {change.metric: change for change in found.changes}
    return [cause.name for cause in root_cause.causes(worse, by_name, base, [candidate])]


def known_work() -> set[tuple[str, str]]:
    return {(kind, name) for kind, _, name, _ in WORK}


def test_without_a_regression_there_is_no_cause() -> None:
    assert causes({}, {}) == []


def test_more_arithmetic_is_compute() -> None:
    after = {"step_time_ns": 125e6, "cpu_time_ns": 105e6, "flops": 5e9}
    assert causes(after, {("compute", "aten::mm"): 45e6, ("flops", "aten::mm"): 3e9}) == ["compute"]


def test_slower_arithmetic_is_compute_too() -> None:
    after = {"step_time_ns": 140e6, "cpu_time_ns": 120e6}
    assert causes(after, {("compute", "aten::mm"): 50e6}) == ["compute", root_cause.UNEXPLAINED]  # 10 of 40 ms


def test_more_bytes_sent_are_communication_even_if_other_work_got_slower() -> None:
    after = {"sent_bytes": 3e6, "transfer_ns": 16e6, "step_time_ns": 150e6, "cpu_time_ns": 100e6}
    found = causes(after, {("sent", "all_reduce"): 2e6}, slower=1.4)
    assert found[0] == "communication"


def test_slower_transfers_alone_are_communication() -> None:
    assert causes({"transfer_ns": 25e6}, {("communication", "gloo:all_gather"): 25e6}) == ["communication"]


def test_more_allocated_bytes_are_memory_if_the_time_goes_to_moving_them() -> None:
    after = {"allocated_bytes": 110e6, "peak_allocated_bytes": 80e6, "step_time_ns": 130e6, "cpu_time_ns": 110e6}
    assert causes(after, {("allocated", ""): 110e6, ("compute", "aten::clone"): 30e6})[0] == "memory"


def test_temporaries_of_more_arithmetic_are_not_the_first_cause() -> None:
    after = {"allocated_bytes": 60e6, "step_time_ns": 140e6, "cpu_time_ns": 120e6, "flops": 5e9}
    work = {("allocated", ""): 60e6, ("compute", "aten::mm"): 55e6, ("flops", "aten::mm"): 3e9}
    assert causes(after, work)[0] == "compute"


def test_slower_saves_are_checkpointing_and_name_the_stage() -> None:
    after = {"checkpoint_blocked_ns": 170e6, "checkpoint_cpu_ns": 160e6}
    assert causes(after, {("save", "serialize"): 120e6}) == ["checkpointing"]


PARTS = {"compute": "compute_ns", "communication": "exposed_transfer_ns", "host": "idle_ns"}


@settings(max_examples=25)
@given(st.tuples(*[st.integers(0, 15)] * len(PARTS)))
def test_a_cause_explains_a_fifth_of_a_longer_step_and_the_rest_is_unexplained(drawn_ms: tuple[int, ...]) -> None:
    before = dict(zip(PARTS.values(), (60e6, 25e6, 15e6), strict=True))
    base = sample_baselines.recording({m: [v] * 6 for m, v in ({"step_time_ns": 100e6} | before).items()}, work=WORK)
    growths_ms = {name: 3 * drawn for name, drawn in zip(PARTS, drawn_ms, strict=True)}  # none is a fifth of 50 exactly
    after = {"step_time_ns": 150e6} | {PARTS[name]: before[PARTS[name]] + 1e6 * ms for name, ms in growths_ms.items()}
    candidate = sample_baselines.recording({metric: [value] * 6 for metric, value in after.items()}, work=WORK)
    changes = checks.compare(sample_baselines.baseline(base, base, base), [candidate]).changes
    step = [change for change in changes if change.metric == "step_time_ns"]
    causes = root_cause.causes(step, {change.metric: change for change in changes}, [base], [candidate])
    explained = {name for name, ms in growths_ms.items() if ms > 10}
    is_rest = 50 - sum(growths_ms[name] for name in explained) > 10
    assert {cause.name for cause in causes} == explained | ({root_cause.UNEXPLAINED} if is_rest else set())
    stated = [growths_ms.get(cause.name, -1) for cause in causes]
    assert stated == sorted(stated, reverse=True)


def test_the_cause_of_waiting_for_one_slow_rank_is_its_compute(tmp_path: Path) -> None:
    simulated = job(strategy="fsdp2", machine="v100-32", layers=2, steps=4, ranks_written=16)
    for fault in ("", "slow-rank:5:1.5"):
        written(simulated, tmp_path / (fault or "healthy"), *([fault] if fault else []))
    before, after = (load(tmp_path / name) for name in ("healthy", "slow-rank:5:1.5"))
    base = baselines.of_reports([(sample_baselines.report(before), before)])
    gate = checks.judge(sample_baselines.report(after), None, baseline=base)
    assert "step_time_ns" in {change.metric for change in gate.regressions}
    assert [cause.name for cause in gate.causes] == ["compute"]
    assert gate.comparison is not None
    changes = {change.metric: change for change in gate.comparison.changes}
    assert units.duration(changes["compute_ns"].difference) in gate.causes[0].message


def test_a_cause_names_the_work_and_its_phase(wording: Wording) -> None:
    base = [sample_baselines.recording({"flops": [1e9] * 6}, work=[("flops", "forward", "aten::mm", 1e9)])]
    after = sample_baselines.recording({"flops": [1.5e9] * 6}, work=[("flops", "forward", "aten::mm", 1.5e9)])
    found = checks.compare(sample_baselines.baseline(*base), [after])
    (cause,) = root_cause.causes(found.changes, {c.metric: c for c in found.changes}, base, [after])
    wording(cause.message)
    assert cause.metrics == ("flops",)


def test_slower_communication_names_the_unit_in_which_it_is_exposed(wording: Wording) -> None:
    def side(exposed_ns: float) -> Recording:
        made = sample_baselines.recording({"transfer_ns": [10e6 + exposed_ns] * 6}, work=WORK)
        rows = [(0, unit, step, "exposed_communication_ns", value)
                for unit, value in (("layers.0", 1e6), ("layers.1", exposed_ns)) for step in range(6)]  # fmt: skip
        table = pl.DataFrame(rows, schema=baselines.UNIT_COLUMNS, orient="row")
        return Recording(made.name, None, made.samples, table, made.work, ())

    before, after = side(1e6), side(9e6)
    found = checks.compare(sample_baselines.baseline(before), [after])
    (cause,) = root_cause.causes(found.changes, {c.metric: c for c in found.changes}, [before], [after])
    wording(cause.message)


# Renewing ------------------------------------------------------------------------------------------------------------


def test_regressions_must_be_accepted_by_name(wording: Wording) -> None:
    gate = judged(sample_baselines.finding("COMM001"), sample_baselines.finding("MEM001"), before=of_run())
    assert checks.not_accepted(gate, []) == ("COMM001", "MEM001")
    assert checks.not_accepted(gate, ["COMM001"]) == ("MEM001",)
    assert checks.not_accepted(gate, ["COMM001", "MEM001"]) == ()
    with wording.raises(ConfigError):
        checks.not_accepted(gate, ["CKPT001"])


def test_a_baseline_collects_five_recordings_and_then_does_not_change() -> None:
    baseline, sizes = of_run(created_ns=1), []
    for night in range(2, 8):
        fresh = of_run(created_ns=night)
        gate = judged(before=baseline)
        baseline, _ = checks.update(baseline, fresh, gate, thresholds=Thresholds())
        sizes.append(len(baseline.recordings))
    assert sizes == [2, 3, 4, 5, 5, 5]


def test_a_baseline_is_replaced_if_a_regression_was_accepted_or_a_finding_fixed() -> None:
    many = of_run(sample_baselines.known("CKPT001"), recordings=5)
    fresh = of_run()
    mended = judged(before=many)
    assert checks.update(many, fresh, mended, thresholds=Thresholds()) == (fresh, "replaced, because CKPT001 changed")
    worse = judged(sample_baselines.finding("COMM001"), before=of_run(recordings=5))
    assert checks.update(of_run(recordings=5), fresh, worse, thresholds=Thresholds())[0] is fresh


def test_a_slow_drift_is_detected_because_the_baseline_does_not_change() -> None:
    base = sample_baselines.baseline(*(sample_baselines.recording({"flops": np.full(6, 1e9)}) for _ in range(5)))
    nights = []
    for night in range(1, 6):
        candidate = sample_baselines.recording({"flops": np.full(6, 1e9 * 1.01**night)})
        (change,) = checks.compare(base, [candidate]).changes
        nights.append(change.verdict.value)
    assert nights == ["same", "same", "worse", "worse", "worse"]


def starved(
    *,
    step: float,
    compute: float,
    ran: float,
    recordings: int = 5,
    stretch: float = 1.0,
    thresholds: Thresholds | None = None,
    **fingerprint: object,
) -> dict[str, str]:
    """Return the verdicts if step time, compute and CPU time change by these factors."""
    steps = [sample_baselines.steps(100e6, seed=seed) for seed in range(6)]
    made = []
    for number, time in enumerate(steps):
        by = (step, compute, ran) if number == 5 else (1.0, 1.0, 1.0)
        times = {
            "step_time_ns": by[0] * time,
            "compute_ns": by[1] * stretch * 0.6 * time,
            "cpu_time_ns": by[2] * 0.9 * time,
        }
        made.append(sample_baselines.recording({**times, "sent_bytes": [1000.0 + 500 * (number == 5)] * 20}))
    before = sample_baselines.baseline(*made[:recordings], fingerprint=sample_baselines.FINGERPRINT | fingerprint)
    comparison = checks.compare(before, made[5:], thresholds=thresholds)
    verdicts = {change.metric: change.verdict.value for change in comparison.changes}
    return verdicts | {"explained": f"{comparison.disturbance.candidate_ratio:.2f}"}


def test_times_of_a_starved_recording_are_inconclusive_and_counters_are_not() -> None:
    verdicts = starved(step=2.0, compute=2.0, ran=1.0)
    assert (verdicts["step_time_ns"], verdicts["compute_ns"], verdicts["sent_bytes"]) == (
        "inconclusive",
        "inconclusive",
        "worse",
    )
    assert verdicts["explained"] == "0.50"


@pytest.mark.parametrize("recordings", [1, 2, 3])
@pytest.mark.parametrize(("grown", "few"), [(2.0, "worse"), (1.3, "inconclusive")])
def test_few_recordings_on_shared_processors_decide_what_other_programs_cannot_explain(
    recordings: int, grown: float, few: str
) -> None:
    # Compute takes 1.33 times its CPU time on both sides: a quarter of it may be other programs'.
    verdicts = starved(step=grown, compute=grown, ran=grown, recordings=recordings, stretch=2.0)
    assert verdicts["step_time_ns"] == (few if recordings < 3 else "worse")
    assert (float(verdicts["explained"]) > 0) is (recordings < 3)
    assert verdicts["sent_bytes"] == "worse"


def test_the_limits_of_a_starved_recording_are_settings() -> None:
    few = Thresholds(min_cpu_recordings=1)
    assert starved(step=2.0, compute=2.0, ran=2.0, recordings=1, stretch=2.0, thresholds=few)["cpu_time_ns"] == "worse"
    stretched = Thresholds(max_cpu_stretch=2.5)
    assert starved(step=2.0, compute=2.0, ran=1.0, thresholds=stretched)["step_time_ns"] == "worse"


def test_times_of_a_training_that_waits_or_computes_more_are_judged() -> None:
    assert starved(step=2.0, compute=1.0, ran=1.0)["step_time_ns"] == "worse"
    assert starved(step=2.0, compute=2.0, ran=1.9)["step_time_ns"] == "worse"
    assert starved(step=3.0, compute=1.3, ran=1.0)["step_time_ns"] == "worse"  # by more than computing is stretched


def test_on_a_gpu_the_cpu_time_of_the_host_does_not_affect_verdicts_on_times() -> None:
    assert starved(step=2.0, compute=2.0, ran=1.0, device="cuda")["step_time_ns"] == "worse"
