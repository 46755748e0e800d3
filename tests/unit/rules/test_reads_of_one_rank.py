"""Values that some ranks alone read from the device: their hosts lose their lead, and the other ranks wait for them."""

import pytest

from tests.support.gpu_hosts import GpuHost, all_reduce, common_step
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

RANKS, STEPS, BLOCKS = 4, 5, 2
LONG, SHORT = (10, 100.0), (60, 1.0)  # kernels of a block and their duration in µs: the host leads, the device leads


def job(readers, slow=(), slower_by=1.0):
    """Return the hosts of a job of which some ranks read a value between the long and the short kernels of a block."""
    hosts = [GpuHost(rank, RANKS) for rank in range(RANKS)]
    for step in range(STEPS):
        with common_step(hosts, step):
            for _ in range(BLOCKS):
                for host in hosts:
                    for number in range(LONG[0]):
                        host.kernel(f"gemm_{number}", LONG[1] * (slower_by if host.rank in slow else 1))
                    if host.rank in readers:
                        host.copy_to_host(1.0)
                    for number in range(SHORT[0]):
                        host.kernel(f"add_{number}", SHORT[1])
                all_reduce(hosts, 30.0)
    return hosts


def loaded(hosts, folder):
    for host in hosts:
        host.wait()
        host.write(folder)
    return load(folder, cache=False)


def end_us(hosts):
    return max(max(host.free_us.values()) for host in hosts)


@pytest.mark.parametrize("readers", [(1,), (0, 2)])
def test_ranks_that_read_values_are_late_because_they_wait_for_their_devices(readers, tmp_path):
    cost_us = (end_us(job(readers)) - end_us(job(()))) / STEPS
    findings = {finding.code: finding for finding in check(loaded(job(readers), tmp_path)).findings}
    waiting, late = findings["HOST002"], findings["RANK004" if len(readers) > 1 else "RANK001"]
    assert (waiting.severity, waiting.ranks) == (Severity.WARNING, readers)
    assert waiting.cost_ns == pytest.approx(1000 * cost_us, rel=0.15)
    assert (late.severity, late.ranks, late.consequence_of) == (Severity.INFO, readers, waiting.id)
    assert findings["HOST001"].severity is Severity.INFO


def test_reads_of_all_ranks_make_no_slow_device_their_consequence(tmp_path):
    everyone = tuple(range(RANKS))
    findings = {finding.code: finding for finding in check(loaded(job(everyone, (1,), 1.5), tmp_path)).findings}
    late = findings["RANK001"]
    assert (late.severity, late.ranks, late.consequence_of) == (Severity.WARNING, (1,), "")
