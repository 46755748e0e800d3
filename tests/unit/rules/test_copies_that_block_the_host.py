"""Copies from pageable memory, on which the host waits: what the wait costs is of the copy."""

import pytest

from tests.support.gpu_hosts import GpuHost
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

STEPS = 5
LONG, SHORT = (10, 100.0), (60, 1.0)  # kernels of a step and their duration in µs: the host leads, the device leads


def job(copy_us, copy=GpuHost.copy_to_device):
    """Return the host of a job that copies between the long and the short kernels of a step, for some time or never."""
    host = GpuHost()
    for step in range(STEPS):
        with host.step(step):
            for number in range(LONG[0]):
                host.kernel(f"gemm_{number}", LONG[1])
            if copy_us:
                copy(host, copy_us)
            for number in range(SHORT[0]):
                host.kernel(f"add_{number}", SHORT[1])
    return host


def findings_of(host, folder):
    host.wait()
    host.write(folder)
    return {finding.code: finding for finding in check(load(folder, cache=False)).findings}


@pytest.mark.parametrize("copy_us", [10.0, 60.0], ids=["of 0.7% of the step", "of 4% of it"])
def test_the_host_waits_for_a_copy_in_one_finding(copy_us, tmp_path):
    cost_us = (job(copy_us).free_us[7] - job(0).free_us[7]) / STEPS
    findings = findings_of(job(copy_us), tmp_path)
    warnings = {code for code, finding in findings.items() if finding.severity > Severity.INFO}
    assert "HOST004" in warnings
    assert warnings.isdisjoint(("HOST001", "HOST002"))
    assert findings["HOST004"].cost_ns == pytest.approx(1000 * cost_us, rel=0.1)


def test_a_copy_to_the_host_is_a_wait_for_the_device(tmp_path):
    findings = findings_of(job(10.0, GpuHost.copy_to_host), tmp_path)
    assert findings["HOST002"].severity is Severity.WARNING
    assert "HOST004" not in findings
