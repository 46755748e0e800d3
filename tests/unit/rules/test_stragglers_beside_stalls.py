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


PAUSE_US, STALL_US, STALLED_STEP = 300.0, 20_000.0, 5


def launch_bound_job(pause_us, stall_us, stalling=(SLOW,)):
    """Return ranks whose hosts limit them; that of one pauses in each step, and some stall in one of them."""
    hosts = [GpuHost(rank, RANKS) for rank in range(RANKS)]
    for step in range(STEPS):
        with common_step(hosts, step):
            for block in range(BLOCKS):
                hosts[SLOW].pause(pause_us / BLOCKS)
                if (step, block) == (STALLED_STEP, BLOCKS // 2):
                    for rank in stalling:
                        hosts[rank].pause(stall_us)
                for host in hosts:
                    for number in range(10 * KERNELS):
                        host.kernel(f"add_{number}", 4.0)
                all_reduce(hosts, 30.0)
    return hosts


def test_a_stall_of_a_straggler_is_not_in_its_price(tmp_path):
    """A rank that takes no time of its own is so far ahead that its stall is hidden, too: that is no lateness of it."""
    ended_us = [
        max(max(host.free_us.values()) for host in launch_bound_job(*pauses_us))
        for pauses_us in ((0, 0), (PAUSE_US, 0), (PAUSE_US, STALL_US))
    ]
    pauses_ns, stall_ns = (1000 * (ended_us[n + 1] - ended_us[n]) / STEPS for n in range(2))
    hosts = launch_bound_job(PAUSE_US, STALL_US)
    for host in hosts:
        host.wait()
        host.write(tmp_path)
    findings = {finding.code: finding for finding in check(load(tmp_path, cache=False)).findings}
    assert findings["STEP001"].severity is Severity.WARNING
    assert findings["STEP001"].cost_ns == pytest.approx(stall_ns, rel=0.1)
    assert findings["RANK001"].ranks == (SLOW,)
    assert findings["RANK001"].cost_ns == pytest.approx(pauses_ns, rel=0.2)


def test_a_straggler_keeps_its_price_beside_a_stall_of_all_ranks(tmp_path):
    hosts = launch_bound_job(PAUSE_US, 0)
    pauses_ns = 1000 * (max(hosts[0].free_us.values()) - max(launch_bound_job(0, 0)[0].free_us.values())) / STEPS
    stalled = launch_bound_job(PAUSE_US, STALL_US, stalling=range(RANKS))
    for host in stalled:
        host.wait()
        host.write(tmp_path)
    findings = {finding.code: finding for finding in check(load(tmp_path, cache=False)).findings}
    assert (findings["STEP001"].severity, findings["STEP001"].ranks) == (Severity.WARNING, ())
    assert findings["RANK001"].cost_ns == pytest.approx(pauses_ns, rel=0.2)


def queued_job(folder, pauses_us):
    """Return ranks whose devices limit them; the host of one pauses in each step, which only an empty queue shows.

    Also returns when the last device has ended.
    """
    hosts = [GpuHost(rank, RANKS) for rank in range(RANKS)]
    for step, pause_us in enumerate(pauses_us):
        with common_step(hosts, step):
            for block in range(2):
                hosts[SLOW].pause(pause_us * block)
                for host in hosts:
                    for number in range(50):
                        host.kernel(f"gemm_{number}", KERNEL_US)
                all_reduce(hosts, 30.0)
    for host in hosts:
        host.wait()
        host.write(folder)
    return load(folder, cache=False), max(max(host.free_us.values()) for host in hosts)


def test_a_pause_of_each_step_that_delays_the_device_in_the_first_one_only_is_a_warning_on_its_rank(tmp_path):
    folders = [tmp_path / name for name in ("pauses", "none")]
    for folder in folders:
        folder.mkdir()
    (run, end_us), (_, usual_end_us) = queued_job(folders[0], (9000.0,) * 3), queued_job(folders[1], (0.0,) * 3)
    findings = {finding.code: finding for finding in check(run).findings}
    assert (findings["RANK003"].severity, findings["RANK003"].ranks) == (Severity.WARNING, (SLOW,))
    assert findings["RANK003"].cost_ns == pytest.approx(1000 * (end_us - usual_end_us) / 3, rel=0.1)
    assert findings["STEP001"].severity is Severity.INFO


def test_a_single_pause_of_the_first_step_is_a_stall_and_no_warning_on_its_rank(tmp_path):
    findings = {finding.code: finding for finding in check(queued_job(tmp_path, (9000.0, 0.0, 0.0))[0]).findings}
    assert findings["STEP001"].severity is Severity.WARNING
    assert "RANK003" not in findings or findings["RANK003"].severity is Severity.INFO
