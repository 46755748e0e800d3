"""Sends and receives of real ranks, as a pipeline has them: who waits for whom, and that ranks still compute."""

import functools
import time
from pathlib import Path

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

import tracekit
from tests.integration.recorded import wait_until
from tests.support import process_group
from tracekit.analysis.communication import collective_instances
from tracekit.analysis.time import breakdown
from tracekit.model.run import Run

LATE_NS = 300_000_000  # much longer than a busy machine keeps a rank waiting for a core
STEPS = 3
# Where ranks share busy cores, they leave a collective tens of ms apart: a few ends do not align their clocks.
TIES = 8


def pipeline(folder: Path) -> None:
    """Record a stage that computes, dawdles and sends, and one that waits for it."""
    rank, (x, w) = dist.get_rank(), (torch.ones(1 << 18), torch.ones(200, 200))

    def write(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / f"rank{rank:05d}.pt.trace.json"))

    plan = schedule(wait=0, warmup=1, active=STEPS)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=write, record_shapes=True
    ) as recording:
        for step in range(STEPS + 1):
            for _ in range(20):
                torch.mm(w, w)
            arrived = folder / f"arrived-in-step-{step}"
            if rank == 0:
                wait_until(arrived.exists)  # on busy cores the receiver may come late itself
                time.sleep(LATE_NS / 1e9)
                dist.send(x, 1)
            else:
                arrived.touch()
                dist.recv(x, 0)
            for _ in range(TIES):
                dist.all_reduce(w.clone())  # aligns their clocks
            recording.step()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pipeline")
    process_group.run(2, functools.partial(pipeline, folder))
    return tracekit.load(str(folder), cache=False)


def test_a_receive_is_waiting_until_its_sender_comes_and_transfer_from_then_on(recorded: Run) -> None:
    waits = recorded.table(collective_instances.waits).filter(pl.col("op") == "send_recv")
    sent, received = (waits.filter(pl.col("rank") == rank).sort("step") for rank in (0, 1))
    assert sent.height == received.height == STEPS
    assert sent["instance"].to_list() == received["instance"].to_list()
    residual_ns = int(waits["residual_ns"].max() or 0)  # type: ignore[arg-type]
    assert (received["wait_ns"] > 0.5 * LATE_NS).all()
    assert (received["wait_ns"] <= received["dur_ns"]).all()
    assert (sent["wait_ns"] <= residual_ns).all()


def test_ends_of_sends_are_known_and_the_threads_that_send_compute(recorded: Run) -> None:
    for rank, (op, peer) in enumerate((("send", 1), ("recv", 0))):
        trace = recorded.trace(rank)
        calls = trace.collectives.filter(pl.col("op") == op)
        assert calls["peer"].to_list() == [peer] * STEPS
        assert trace.activities.filter(pl.col("kind") == "compute", pl.col("name") == "aten::mm").height == 20 * STEPS
    steps = recorded.table(breakdown.by_step)
    assert steps.height == 2 * STEPS
    assert (steps["compute_ns"] > 0).all()
    assert (steps.filter(pl.col("rank") == 1)["exposed_communication_ns"] > 0.5 * LATE_NS).all()
