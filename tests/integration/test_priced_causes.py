"""`check` is never silent where what-if prices a cause: each one at 3% of the step or more has a finding that names it.

A replay that does not reproduce the recording (`is_reproduced`) prices nothing.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

import tracekit
from tests.recordings.evaluation import record_evaluation
from tests.support.selection import others_in_accuracy
from tests.unit.simulate.jobs import job, pipelined, written
from tracekit.errors import InputError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.plan import hardware, models
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes.device_time import SIDE_WORK
from tracekit.rules import cost_attribution, engine, stated_savings, unreported_causes
from tracekit.rules.collective_batching import SmallCollectives
from tracekit.rules.communication import ExposedCommunication
from tracekit.rules.rule import Report, Rule, Severity
from tracekit.rules.side_work import SideWork
from tracekit.simulate.faults import FAULTS
from tracekit.simulate.job import FSDP2, HSDP, YAFSDP, Job, laid_out

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"
SAMPLES = sorted(str(path.parent.relative_to(ROOT)) for path in (ROOT / "sample_traces").rglob("run.json"))
RECORDINGS = [
    "tests/recordings/deepspeed_pipeline",
    "tests/recordings/dtensor_tp",
    "tests/recordings/dtensor_tp_fsdp2",
    "tests/recordings/execution_traces",
    "tests/recordings/megatron_interleaved",
    "tests/recordings/megatron_tp2_pp2",
    "tests/recordings/nsight",
    "tests/recordings/stopped_in_collective",
    "tests/recordings/torchtitan_1f1b_tp2",
    "tests/recordings/torchtitan_interleaved",
    "tests/recordings/uneven_batches",
]
EVERYDAY = [
    "sample_traces/ci/green",
    "sample_traces/gpu/cuda-graphs",
    "sample_traces/faults/late-launch",
    "sample_traces/faults/healthy-ddp",
    "tests/recordings/dtensor_tp",
    "tests/recordings/deepspeed_pipeline",
]
DAILY_FAULTS = ["small-collectives", "serialized-communicators", "slow-stage"]
_STAGES = (
    "slow-pipeline-link", "slow-pipeline-links", "slow-stage", "unbalanced-stages", "few-micro-batches",
    "read-each-action",
)  # fmt: skip


def unnamed(report: Report) -> dict[str, float]:
    """The causes that what-if prices at 3% or more and no finding names, with their share."""
    try:
        answers = stated_savings.answer(report)
    except InputError:
        return {}  # no step can be replayed
    if not answers.is_reproduced or not cost_attribution.can_be_replayed(report.run):
        return {}
    causes = {finding.what_if.cause for finding in report.findings if finding.what_if is not None}
    codes = {finding.code for finding in report.findings}
    return {
        answer.name: answer.saved_ratio
        for answer in answers.answers
        if answer.saved_ratio >= unreported_causes.MIN_SAVED_RATIO and answer.causes
        if answer.causes[0] not in causes and not codes & set(answer.causes[0].codes)
    }


@pytest.mark.parametrize("name", others_in_accuracy(SAMPLES + RECORDINGS, EVERYDAY))
def test_each_priced_cause_of_a_recording_has_a_finding(name: str) -> None:
    assert unnamed(engine.check(tracekit.load(ROOT / name))) == {}


@pytest.mark.accuracy
@pytest.mark.skipif(not SHARED.is_dir(), reason="the downloaded traces are not in ../shared")
@pytest.mark.parametrize("name", sorted(path.name for path in SHARED.glob("*") if any(path.glob("*.json.gz"))))
def test_each_priced_cause_of_a_public_trace_has_a_finding(name: str) -> None:
    assert unnamed(engine.check(tracekit.load(SHARED / name))) == {}


def simulated(fault: str, out: Path) -> Run:
    """A small job with a fault."""
    if FAULTS[fault].plain:
        strategy = {"give-way": YAFSDP, "slow-link": HSDP}.get(fault, FSDP2)
        written(job(strategy, layers=2, steps=4), out, fault)
    elif fault == "sharded-micro-batches":
        written(pipelined(8, pp=2, strategy=FSDP2, shards_data=True), out, fault)
    elif fault in _STAGES:
        written(pipelined(4, pp=4, layers=8, micro_batches=8), out, fault)
    elif fault == "hot-expert":
        model = models.find("mixtral-8x7b", layers=2)
        layout = laid_out(gpus=8, model=model, ep=8)
        machine = hardware.find("a100-80")
        written(Job("ddp", model, machine, 8, 2048, steps=3, ranks_written=8, hybrid=layout), out, fault)
    else:
        written(pipelined(16, tp=8 if fault == "tp-across-nodes" else 2, micro_batches=1), out, fault)
    return tracekit.load(out)


@pytest.mark.parametrize("fault", others_in_accuracy(FAULTS, DAILY_FAULTS))
def test_each_priced_cause_of_a_simulated_fault_has_a_finding(fault: str, tmp_path: Path) -> None:
    assert unnamed(engine.check(simulated(fault, tmp_path))) == {}


def test_a_cause_below_the_threshold_of_its_rule_is_information_with_the_saving_of_what_if() -> None:
    run = tracekit.load(ROOT / "sample_traces/ci/green")
    report = engine.check(run)
    (spread,) = (finding for finding in report.findings if finding.code == "COMM001")
    (answer,) = (answer for answer in stated_savings.answer(report).answers if answer.name == "communication")
    assert (spread.severity, spread.is_priced) == (Severity.INFO, True)
    assert spread.cost_ns == answer.saved_ns > unreported_causes.MIN_SAVED_RATIO * answer.step_ns
    assert spread.fix
    assert spread.evidence["saved_ns"].max() > 0


def test_what_ends_with_the_cause_of_a_warning_is_its_consequence() -> None:
    report = engine.check(tracekit.load(ROOT / "sample_traces/gpu/cuda-graphs"))
    by_code = {finding.code: finding for finding in report.findings}
    assert by_code["HOST001"].consequence_of == by_code["HOST002"].consequence_of == by_code["HOST004"].id
    assert by_code["HOST001"].cost_ns < by_code["HOST004"].cost_ns


def test_only_rules_that_run_report_causes() -> None:
    run = tracekit.load(ROOT / "sample_traces/ci/green")
    assert {finding.code for finding in engine.check(run, [ExposedCommunication()]).findings} == {"COMM001"}


@dataclass(frozen=True)
class LenientBatching(SmallCollectives):
    """A rule whose thresholds a loss that is spread over the run does not reach."""

    min_lost_ratio: float = 1.0


@dataclass(frozen=True)
class LenientExposure(ExposedCommunication):
    """The same for a cause of which a part always remains."""

    max_exposed_ratio: float = 1.0


@pytest.mark.parametrize(
    ("rule", "is_warning"),
    [
        (LenientBatching(), True),
        (SmallCollectives(min_lost_ratio=1.0), False),  # by the user's choice
        (LenientExposure(), False),
    ],
    ids=["a fix saves it", "the user set the threshold", "an ideal"],
)
def test_severity_follows_the_price_where_a_fix_saves_it(rule: Rule, is_warning: bool, tmp_path: Path) -> None:
    report = engine.check(simulated("small-collectives", tmp_path), [rule])
    (finding,) = (finding for finding in report.findings if finding.is_priced)
    assert finding.subject == unreported_causes.SUBJECT
    assert cost_attribution.grade(finding.impact, finding.confidence) > Severity.INFO
    assert (finding.severity > Severity.INFO) == is_warning


def test_what_only_one_step_does_is_said_to_be_in_that_step_and_is_no_error() -> None:
    run = tracekit.load(ROOT / "tests" / "recordings" / "evaluation")
    report = engine.check(run, [SideWork()])
    (finding,) = (finding for finding in report.findings if finding.subject == unreported_causes.SUBJECT)
    saved = savings.saving(run, SIDE_WORK.name).steps
    longest = saved.sort("saved_ns").row(-1, named=True)
    assert longest["step"] == record_evaluation.EVALUATED
    assert longest["saved_ns"] >= 0.9 * saved["saved_ns"].sum()
    assert f"in step {longest['step']} ({units.duration(longest['saved_ns'])})" in finding.message
    assert cost_attribution.grade(finding.impact, finding.confidence) is Severity.ERROR
    assert finding.severity is Severity.WARNING
