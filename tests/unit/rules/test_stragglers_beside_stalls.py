"""A rank that is late in every step is a straggler, also where another one stalls once for longer than all of that."""

import pytest

from tests.support.gpu_hosts import GpuHost, all_reduce, common_step
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

RANKS, STEPS, BLOCKS, KERNELS, KERNEL_US = 4, 8, 8, 5, 100.0
SLOW, STALLING, LATER_US = 2, 0, 8.0


def job(folder, stall_us):
    """Return ranks that reduce after each block of kernels; those of one are slower, another one stalls in step 5."""
    hosts = [GpuHost(rank, RANKS) for rank in range(RANKS)]
    for step in range(STEPS):
        for host in hosts:
            host.wait()
        with common_step(hosts, step):
            hosts[STALLING].pause(stall_us * (step == 5))
            for _ in range(BLOCKS):
                for host in hosts:
                    for number in range(KERNELS):
                        host.kernel(f"gemm_{number}", KERNEL_US + LATER_US * (host.rank == SLOW))
                all_reduce(hosts, 30.0)
    for host in hosts:
        host.wait()
        host.write(folder)
    return load(folder, cache=False)


@pytest.mark.parametrize("stall_us", [0.0, 10_000.0])
def test_a_slow_device_is_a_straggler_whether_or_not_another_rank_stalls_once(stall_us, tmp_path):
    warnings = {
        finding.code: finding for finding in check(job(tmp_path, stall_us)).findings if finding.severity > Severity.INFO
    }
    assert warnings["RANK001"].ranks == (SLOW,)
    assert warnings["RANK001"].cost_ns == pytest.approx(1000 * BLOCKS * KERNELS * LATER_US, rel=0.1)
    assert "RANK003" not in warnings
    assert ("STEP001" in warnings) == (stall_us > 0)
