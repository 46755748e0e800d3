"""Where stalls of some steps cost time, waits of the host that would hide them are a consequence, no second trouble."""

import pytest

from tests.support.gpu_hosts import GpuHost
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.outlier_steps import OutlierStep
from tracekit.rules.rule import Severity

STEPS, KERNELS, KERNEL_US, PAUSE_US = 8, 30, 200, 6000


def waiting_run(folder, pauses_us, *, saves=()):
    """Return a run whose host waits for the device at the end of each step, and pauses in some before its kernels.

    In the steps in `saves` it copies three tensors to the host after the kernels, before it pauses and reads the loss.
    """
    host = GpuHost()
    for step in range(STEPS):
        with host.step(step):
            if step not in saves:
                host.pause(pauses_us.get(step, 0))
            for number in range(KERNELS):
                host.kernel(f"gemm_{number}", KERNEL_US)
            if step in saves:
                for _ in range(3):
                    host.copy_to_host(20)
                host.pause(pauses_us.get(step, 0))
            host.copy_to_host(2)
    host.write(folder)
    return load(folder, cache=False)


def test_waits_that_would_hide_a_stall_are_its_consequence(tmp_path):
    report = check(waiting_run(tmp_path, {2: PAUSE_US, 5: PAUSE_US}))
    findings = {finding.code: finding for finding in report.findings}
    stall, waits = findings["STEP001"], findings["HOST002"]
    assert stall.severity is Severity.WARNING
    assert stall.cost_ns == pytest.approx(2 * PAUSE_US * 1000 / STEPS, rel=0.03)
    assert (waits.severity, waits.consequence_of) == (Severity.INFO, stall.id)


def test_a_pause_after_copies_that_few_steps_have_is_a_stall_of_these(tmp_path):
    """The read of the loss is the fourth copy of a step that saves, and the first one of the others."""
    run = waiting_run(tmp_path, dict.fromkeys((2, 4, 6), PAUSE_US), saves=(2, 4, 6))
    (stall,) = check(run, [OutlierStep()]).findings
    assert stall.severity is Severity.WARNING
    assert stall.cost_ns == pytest.approx(3 * PAUSE_US * 1000 / STEPS, rel=0.03)
