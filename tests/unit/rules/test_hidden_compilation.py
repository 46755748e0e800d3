"""Compilation in every step of a run whose device has work queued meanwhile costs only what the device is idle."""

import pytest

from tests.support.gpu_hosts import GpuHost
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.host_phases import Recompilation
from tracekit.rules.rule import Severity

STEPS, KERNELS, KERNEL_US, COMPILE_US = 6, 30, 300.0, 3000.0


def compiling_run(folder, *, queued_us):
    """Return a run that compiles before the kernels of each step and never waits; the device starts with queued work.

    device   |queued----|0-------|1-------…
    host     |compile 0 | compile 1 | …
    """
    host = GpuHost()
    if queued_us:
        host.queued("gemm_before", queued_us)
    for step in range(STEPS):
        with host.step(step):
            with host.span("entire_frame_compile"):
                host.pause(COMPILE_US)
            for number in range(KERNELS):
                host.kernel(f"gemm_{number}", KERNEL_US)
    host.wait()
    host.write(folder)
    return load(folder, cache=False)


def test_compilation_that_queued_work_hides_costs_nothing(tmp_path):
    report = check(compiling_run(tmp_path, queued_us=2 * COMPILE_US), [Recompilation()])
    warnings = [finding for finding in report.findings if finding.severity > Severity.INFO]
    assert warnings == []


def test_compilation_before_the_first_work_of_an_idle_device_costs_its_time(tmp_path):
    (found,) = check(compiling_run(tmp_path, queued_us=0.0), [Recompilation()]).findings
    # The device is idle for the first compilation alone: later ones run while it has a step's kernels queued.
    assert found.cost_ns == pytest.approx(1000 * COMPILE_US / STEPS, rel=0.05)
