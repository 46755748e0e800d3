"""Links between two ranks of an expert-parallel group: both leave its all-to-alls late."""

import pytest

from tests.support.gpu_hosts import STREAM, GpuHost, all_reduce, common_step
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.slow_collectives import SlowLink

RANKS, STEPS, LAYERS, TRANSFER_US, TOKENS, WIDTH = 4, 3, 4, 200.0, 256, 1024


def exchange(hosts, tokens, ends_us):
    """Let ranks exchange tokens (a row of splits for each): each leaves its all-to-all at its own end."""
    starts_us = [max(host.host_us + 10, host.free_us[STREAM]) for host in hosts]
    for host, start_us in zip(hosts, starts_us, strict=True):
        sent, received = tokens[host.rank], [row[host.rank] for row in tokens]
        args = {"Collective name": "all_to_allv", "dtype": "BFloat16", "Group size": RANKS, "Process Group Name": "ep"}
        args |= {"Process Group Ranks": str(list(range(RANKS))), "Process Group Description": "mesh_ep"}
        args |= {"In split size": str(sent), "Out split size": str(received)}
        args |= {"In msg nelems": sum(sent) * WIDTH, "Out msg nelems": sum(received) * WIDTH}
        host.free_us[30] = start_us
        end_us = max(starts_us) + ends_us[host.rank]
        host.kernel("ncclDevKernel_SendRecv", end_us - start_us, stream=30, after_us=start_us, **args)
        host.free_us[STREAM] = end_us + 1


def job(folder, ends_us, tokens=None):
    """Return a job of experts whose ranks leave each all-to-all `ends_us` after the last one has begun it."""
    tokens = tokens or [[TOKENS] * RANKS for _ in range(RANKS)]
    returned = [list(column) for column in zip(*tokens, strict=True)]
    hosts = [GpuHost(rank, RANKS) for rank in range(RANKS)]
    for step in range(STEPS):
        begin_us = max(host.host_us for host in hosts)
        for host in hosts:
            host.host_us = begin_us
        with common_step(hosts, step):
            for layer in range(LAYERS):
                for host in hosts:
                    host.kernel(f"attention_{layer}", 100.0)
                exchange(hosts, tokens, ends_us)
                for host in hosts:
                    host.kernel(f"experts_{layer}", 100.0)
                exchange(hosts, returned, ends_us)
                all_reduce(hosts, 20.0)  # its ends show the ranks' clocks
            for host in hosts:
                host.wait()
    groups = [{"pg_name": "ep", "pg_desc": "mesh_ep", "pg_size": RANKS, "ranks": list(range(RANKS))}]
    for host in hosts:
        host.write(folder, groups)
    return load(folder, cache=False)


@pytest.mark.parametrize(("slow", "factor"), [((1, 3), 1.8), ((0, 1), 3.0)])
def test_the_two_ranks_of_a_slow_link_are_named_with_what_it_takes_longer(slow, factor, tmp_path):
    ends_us = [TRANSFER_US * (factor if rank in slow else 1.0) for rank in range(RANKS)]
    (found,) = check(job(tmp_path, ends_us), [SlowLink()]).findings
    assert found.ranks == slow
    assert found.cost_ns == pytest.approx(1000 * 2 * LAYERS * TRANSFER_US * (factor - 1), rel=0.05)


@pytest.mark.parametrize("late", [(), (2,), (0, 1, 2, 3)])
def test_a_rank_that_leaves_late_alone_or_all_of_them_show_no_slow_link(late, tmp_path):
    ends_us = [TRANSFER_US * (2.0 if rank in late else 1.0) for rank in range(RANKS)]
    assert check(job(tmp_path, ends_us), [SlowLink()]).findings == ()


def test_links_of_overloaded_experts_are_no_slow_links(tmp_path):
    tokens = [[TOKENS * (4 if peer in (1, 3) else 1) for peer in range(RANKS)] for _ in range(RANKS)]
    # A rank leaves when it has sent and received all: 16 parts by the overloaded ones, 10 by the others.
    ends_us = [TRANSFER_US * (1.6 if rank in (1, 3) else 1.0) for rank in range(RANKS)]
    assert check(job(tmp_path, ends_us, tokens), [SlowLink()]).findings == ()
