"""A recording of one step whose hosts limit it: a rank that the others wait for is priced apart from late launches."""

import pytest

from tests.support.gpu_hosts import GpuHost, all_reduce, common_step
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

RANKS, BLOCKS, KERNELS = 4, 24, 30
LATE, PAUSE_US = 2, 1500.0


def job(pause_us):
    """Return ranks whose hosts pause before blocks in turn, and that of one rank for longer before one of them."""
    hosts = [GpuHost(rank, RANKS) for rank in range(RANKS)]
    with common_step(hosts, 0):
        for block in range(BLOCKS):
            hosts[block % RANKS].pause(40.0)
            hosts[LATE].pause(pause_us * (block == BLOCKS // 2))
            for host in hosts:
                for number in range(KERNELS):
                    host.kernel(f"add_{number}", 4.0)
            all_reduce(hosts, 30.0)
    return hosts


def checked(hosts, folder):
    folder.mkdir()
    for host in hosts:
        host.wait()
        host.write(folder)
    return {finding.code: finding for finding in check(load(folder, cache=False)).findings}


def test_the_latest_rank_of_one_step_is_no_consequence_of_late_launches(tmp_path):
    ended_us = [max(max(host.free_us.values()) for host in job(pause_us)) for pause_us in (PAUSE_US, 0)]
    findings, usual = checked(job(PAUSE_US), tmp_path / "late"), checked(job(0), tmp_path / "usual")
    late = findings["RANK003"]
    assert (late.severity, late.ranks, late.consequence_of) == (Severity.WARNING, (LATE,), "")
    assert late.cost_ns == pytest.approx(1000 * (ended_us[0] - ended_us[1]), rel=0.15)
    # The pause is in one price.
    assert findings["HOST001"].cost_ns == pytest.approx(usual["HOST001"].cost_ns, rel=0.1)
