"""Injected faults: each changes what it should, and costs what truth.json says."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.wording import Wording
from tests.unit.simulate.jobs import job, written
from tracekit.errors import InputError
from tracekit.rules.registry import RULES
from tracekit.simulate import engine, faults
from tracekit.simulate.job import FSDP1, FSDP2, HSDP, YAFSDP, Job
from tracekit.simulate.recording import Recording
from tracekit.simulate.truth import known_faults


def _job(name: str, **changes: int) -> Job:
    strategy = {"give-way": YAFSDP, "slow-link": HSDP}.get(name, FSDP2)
    return job(strategy, layers=2, steps=2, **changes)


def _spans(recording: Recording, name: str, rank: int = 0) -> int:
    return sum(s.end_ns - s.start_ns for s in recording.ranks[rank].slices if s.name == name)


def _kernels(recording: Recording, part: str, rank: int = 0) -> int:
    return sum(a.end_ns - a.start_ns for a in recording.ranks[rank].activities if part in a.kernel.name)


# By fault: a number that it changes, as (with it, without it).
MARKS: dict[str, Callable[[Recording], float]] = {
    "slow-rank": lambda r: _kernels(r, "gemm", 1),
    "throttled-gpu": lambda r: _kernels(r, "gemm", 1),
    "straggler-from-step": lambda r: _kernels(r, "gemm", 1),
    "slow-link": lambda r: _kernels(r, "AllReduce", 1),
    "late-launch": lambda r: _spans(r, "tracekit::forward"),
    "host-sync": lambda r: sum(s.name == "cudaStreamSynchronize" for s in r.ranks[0].slices),
    "dataloader-stall": lambda r: _spans(r, "tracekit::data"),
    "host-stall": lambda r: r.total_ns,
    "stalled-collective": lambda r: _kernels(r, "AllGather"),
    "checkpoint-stall": lambda r: _spans(r, "tracekit::checkpoint"),
    "allocator-retry": lambda r: sum(s.name == "cudaMalloc" for s in r.ranks[0].slices),
    "give-way": lambda r: _kernels(r, "DivFunctor"),
    "serialized-communicators": lambda r: r.ranks[0].account.terms[1]["exposed_communication"],
    "sm-contention": lambda r: _kernels(r, "gemm"),
    "starved-collectives": lambda r: _kernels(r, "AllGather"),
    "no-prefetch": lambda r: r.ranks[0].account.terms[1]["exposed_communication"],
    "slow-network": lambda r: _kernels(r, "AllGather"),
    "small-collectives": lambda r: sum("AllGather" in a.kernel.name for a in r.ranks[0].activities),
    "reduce-every-microbatch": lambda r: sum("ReduceScatter" in a.kernel.name for a in r.ranks[0].activities),
    "needless-recomputation": lambda r: _kernels(r, "flash_fwd"),
}


@pytest.mark.parametrize("name", [name for name, fault in faults.FAULTS.items() if fault.plain])
def test_a_fault_changes_its_number_and_costs_what_truth_says(name: str) -> None:
    healthy, requests = _job(name), [faults.parse(name)]
    faulty = faults.inject(healthy, requests)
    recording, healthy_recording = (
        engine.simulate(faulty),
        engine.simulate(faults.without(healthy, requests, requests[0])),
    )
    assert MARKS[name](recording) > 1.05 * MARKS[name](healthy_recording)
    known = known_faults(healthy, requests, faulty, recording)[0]
    assert (known.fault, known.code) == (name, requests[0].fault.code)
    assert known.cost_ns == (recording.total_ns - healthy_recording.total_ns) // len(known.steps)
    assert known.cost_ns * len(known.steps) > 0.01 * recording.total_ns
    assert known.start_ns < known.end_ns
    assert set(known.steps) <= set(range(healthy.steps))


def test_codes_are_those_of_rules() -> None:
    codes = {fault.code for fault in faults.FAULTS.values()}
    assert codes <= {rule.code for rule in RULES}
    assert all(code in faults.listing() for code in codes)


def test_the_inherent_cost_of_fsdp1_is_in_truth_json(tmp_path: Path) -> None:
    found = written(job(FSDP1, seq=2048, model="llama2-70b", layers=3, gpus=64, ranks_written=1, steps=2), tmp_path)
    truth = json.loads((tmp_path / "truth.json").read_text())
    own = {each["fault"]: each for each in truth["faults"]}
    assert own["give-way"]["code"] == "STREAM001"
    assert own["give-way"]["cost_ns"] * 2 > 0.05 * found.recording.total_ns
    keys = ["fault", "code", "ranks", "steps", "start_ns", "end_ns", "cost_ns"]
    assert all(list(each) == keys for each in truth["faults"])
    assert set(truth) == {"simulated", "arguments", "faults"}


def test_each_of_two_faults_is_removed_alone() -> None:
    healthy = _job("slow-rank")
    requests = [faults.parse("slow-rank:1:1.5"), faults.parse("sm-contention:2")]
    without_first = faults.without(healthy, requests, requests[0])
    assert not without_first.impairments.slow_ranks
    assert without_first.hardware.collective_slows_compute == 1.0
    assert faults.without(healthy, requests, requests[1]).impairments.slow_ranks == {1: (1.5, 0)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slow-rnk", "did you mean slow-rank"),
        ("slow-rank:99", "'99' is not a rank of 16; usage: slow-rank"),
        ("slow-rank:1:0.5", "not a factor above 1"),
        ("late-launch:fast", "not a duration such as 20ms"),
        ("straggler-from-step:7", "'7' is not a step of 2"),
        ("no-prefetch:1", "takes no arguments"),
        ("give-way:1", "takes no arguments"),
    ],
)
def test_invalid_faults_are_rejected_with_an_explanation(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        faults.inject(_job("slow-rank"), [faults.parse(text)])


def test_a_fault_that_a_strategy_cannot_have_is_rejected(wording: Wording) -> None:
    with wording.raises(InputError):
        faults.inject(job(YAFSDP), [faults.parse("reduce-every-microbatch")])
