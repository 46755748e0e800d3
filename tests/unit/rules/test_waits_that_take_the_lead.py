"""Waits that take the host's lead: after them, the device waits for one launch after the other."""

import json
from dataclasses import dataclass, field

import pytest

from tests.support.kineto_files import slice_
from tracekit.ingest.loader import load
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes.host import BLOCKING_SYNC
from tracekit.rules.engine import check
from tracekit.rules.host import BlockingSync, LateLaunch
from tracekit.rules.rule import Severity

STEPS, LAUNCH_US, CALL_US, GAP_US, OP_US = 4, 11, 2, 1, 3000
LONG, SHORT = (20, 100), (60, 5)  # kernels of a step and their duration in µs: the host leads, the device leads


@dataclass
class Job:
    """A drawn host and device: `reads` waits for the device in the short kernels of each step."""

    reads: int
    op_us: float = OP_US
    gap_us: float = GAP_US  # between kernels that are queued
    events: list[dict] = field(default_factory=list)
    host_us: float = 0.0
    device_us: float = 0.0
    number: int = 0

    def launch(self, kernel_us: float) -> None:
        """Launch a kernel, which starts after the one before it."""
        self.number += 1
        call = slice_("cuda_runtime", "cudaLaunchKernel", self.host_us + 3, 5, tid=1, correlation=self.number)
        op = slice_("cpu_op", "aten::mm", self.host_us, LAUNCH_US - 1, tid=1, **{"External id": self.number})
        start_us = max(self.host_us + LAUNCH_US, self.device_us + self.gap_us)
        where = {"device": 0, "stream": 7, "correlation": self.number}
        self.events += [op, call, slice_("kernel", "gemm", start_us, kernel_us, tid=7, **where)]
        self.device_us, self.host_us = start_us + kernel_us, self.host_us + LAUNCH_US

    def read(self) -> None:
        """Wait until the device has done all that was launched."""
        self.number += 1
        waited_us = max(self.device_us - self.host_us, 0) + CALL_US
        call = slice_("cuda_runtime", "cudaStreamSynchronize", self.host_us, waited_us, tid=1, correlation=self.number)
        self.events.append(call)
        self.host_us += waited_us

    def step(self, number: int) -> None:
        """Launch the kernels of a step, with reads in equal parts of the short ones; in step 1, an op is long."""
        began_us = self.host_us
        for _ in range(LONG[0]):
            self.launch(LONG[1])
        for kernel in range(SHORT[0]):
            if self.reads and kernel % (SHORT[0] // self.reads) == 0:
                self.read()
            if (number, kernel) == (1, 0):
                self.events.append(slice_("cpu_op", "aten::sort", self.host_us, self.op_us, tid=1))
                self.host_us += self.op_us
            self.launch(SHORT[1])
        self.events.append(
            slice_("user_annotation", f"ProfilerStep#{number}", began_us, self.host_us - began_us, tid=1)
        )


def drawn(reads: int, op_us: float = OP_US, gap_us: float = GAP_US) -> Job:
    job = Job(reads, op_us, gap_us)
    for number in range(STEPS):
        job.step(number)
    return job


def loaded(job: Job, folder):
    document = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H100"}], "traceEvents": job.events}
    (folder / "trace.json").write_text(json.dumps(document))
    return load(folder, cache=False)


@pytest.mark.parametrize("reads", [1, 3])  # of three, the later ones wait only where the first one does not
def test_a_read_costs_what_the_device_idles_until_the_host_leads_again(reads, tmp_path):
    run = loaded(drawn(reads), tmp_path)
    saved_us = (drawn(reads).device_us - drawn(0).device_us) / STEPS
    assert savings.saving(run, BLOCKING_SYNC.name).saved_ns == pytest.approx(1000 * saved_us, rel=0.1)
    (finding,) = check(run, [BlockingSync()]).findings
    assert finding.severity is Severity.WARNING
    assert finding.cost_ns == pytest.approx(1000 * saved_us, rel=0.1)


@pytest.mark.parametrize("reads", [0, 3])
def test_a_replay_keeps_the_gaps_between_queued_kernels(reads, tmp_path):
    """A device that needs 7 µs between kernels loses no more to reads than one that needs 1 µs."""
    run = loaded(drawn(reads, gap_us=7), tmp_path)
    steps = savings.replayed_steps(run)
    launched_us = 4 * reads * STEPS  # from a launch after a read to its kernel, which a replay leaves out
    assert steps["replayed_ns"].sum() == pytest.approx(steps["duration_ns"].sum(), abs=1000 * (1 + launched_us))
    saved_us = (drawn(reads, gap_us=7).device_us - drawn(0, gap_us=7).device_us) / STEPS
    assert savings.saving(run, BLOCKING_SYNC.name).saved_ns == pytest.approx(1000 * saved_us, rel=0.05, abs=1000)


def test_launches_that_are_late_after_reads_are_their_consequence(tmp_path):
    """The rule of late launches sees short gaps before many kernels, that of waits one long gap in one step."""
    run = loaded(drawn(1, op_us=0), tmp_path)
    saved_us = (drawn(1, op_us=0).device_us - drawn(0, op_us=0).device_us) / STEPS
    findings = {finding.code: finding for finding in check(run, [BlockingSync(), LateLaunch()]).findings}
    assert findings["HOST002"].severity is Severity.WARNING
    assert findings["HOST002"].cost_ns == pytest.approx(1000 * saved_us, rel=0.1)
    assert findings["HOST001"].consequence_of == findings["HOST002"].id


def test_reads_of_a_host_without_a_lead_cost_only_their_calls(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.unit.rules.test_waits_that_take_the_lead.LONG", (20, 5))
    run = loaded(drawn(3), tmp_path)
    saved_us = (drawn(3).device_us - drawn(0).device_us) / STEPS
    assert savings.saving(run, BLOCKING_SYNC.name).saved_ns <= 1100 * saved_us
    assert not [finding for finding in check(run, [BlockingSync()]).findings if finding.severity is Severity.WARNING]
