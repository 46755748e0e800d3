"""Ranks whose hosts are late leave gathers exposed that compute hides on the others: that is no slow link of theirs."""

import pytest

from tests.support.gpu_hosts import GpuHost, all_reduce, common_step
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

RANKS, STEPS, BLOCKS, KERNELS, KERNEL_US, GATHER_US = 4, 6, 6, 5, 200.0, 2500.0


def gather(hosts):
    """Let all ranks gather weights on a stream of its own, which compute does not wait for."""
    ranks = [host.rank for host in hosts]
    args = {"Collective name": "_allgather_base", "In msg nelems": 1 << 18, "Out msg nelems": 1 << 20}
    args |= {"dtype": "Float", "Group size": RANKS, "Process Group Name": "1", "Process Group Ranks": str(ranks)}
    starts_us = [max(host.host_us + 10, *(host.free_us[stream] for stream in (7, 30))) for host in hosts]
    end_us = max(starts_us) + GATHER_US
    for host, start_us in zip(hosts, starts_us, strict=True):
        host.free_us[30] = start_us
        name = "ncclDevKernel_AllGather_RING_LL"
        host.kernel(name, end_us - start_us, stream=30, after_us=start_us, **args)


def job(folder, late, pause_us):
    """Return a job whose ranks gather weights for the next step after each one; some hosts pause before a step."""
    hosts = [GpuHost(rank, RANKS) for rank in range(RANKS)]
    for step in range(STEPS):
        with common_step(hosts, step):
            for host in hosts:
                host.pause(pause_us if host.rank in late else 0)
            for _ in range(BLOCKS):
                for host in hosts:
                    for number in range(KERNELS):
                        host.kernel(f"gemm_{number}", KERNEL_US)
                all_reduce(hosts, 30.0)
            for host in hosts:
                host.wait()
            gather(hosts)
    for host in hosts:
        host.wait()
        host.write(folder)
    return load(folder, cache=False)


@pytest.mark.parametrize("late", [(1,), (0, 2)])
def test_late_hosts_are_named_although_gathers_are_exposed_on_them(late, tmp_path):
    pause_us = 2000.0  # while their gathers run, which last longer
    warnings = [
        finding for finding in check(job(tmp_path, late, pause_us)).findings
        if finding.severity > Severity.INFO and finding.code in ("RANK001", "RANK004")
    ]  # fmt: skip
    (found,) = warnings
    assert found.ranks == late
    assert found.cost_ns == pytest.approx(1000 * pause_us, rel=0.1)
