"""The benchmark of the gate compares each recording with those right before it, and counts failures and causes."""

from benchmarks import gate
from benchmarks.gate import HEALTHY, Recorded
from tests.support import sample_baselines, sample_report
from tracekit.regression.baseline import Recording


def recorded(kind: str, flops: float = 1e9) -> Recorded:
    run = sample_report.run()
    own = Recording.of(run)
    more = sample_baselines.recording({"flops": [flops] * 6}, work=[("flops", "forward", "aten::mm", flops)])
    return Recorded(kind, sample_baselines.report(run), own if kind == HEALTHY else more)


def test_each_recording_is_compared_with_the_healthy_ones_before_it() -> None:
    kinds = [HEALTHY, HEALTHY, "compute", HEALTHY, "memory"]
    found = list(gate.check_all([recorded(kind) for kind in kinds], count=2))
    assert [each.kind for each in found] == ["compute", HEALTHY, "memory"]
    assert not any(each.has_failed for each in found)


def test_a_round_has_every_fault_once() -> None:
    planned = gate.schedule(20)
    assert [planned.count(fault.name) for fault in gate.FAULTS] == [20] * len(gate.FAULTS)
    assert planned.count(HEALTHY) == 60 + gate.BASELINE_RECORDINGS
