"""The runs recorded on a GPU: ranks that share it in turns, compiled kernels, CUDA graphs."""

from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.integration.raw import RawTrace, common, length, minus
from tracekit.analysis.compute import efficiency
from tracekit.analysis.time import breakdown
from tracekit.sync import collective_matching

SAMPLES = Path(__file__).parents[2] / "sample_traces" / "gpu"
MS = 1_000_000
SLICE_NS = 5 * MS
"""The ends of a collective differ by the time in which the other process has the GPU: 2.3 ms at most, twice."""


@pytest.fixture(scope="module")
def shared() -> tracekit.Run:
    return tracekit.load(SAMPLES / "slow-rank")


def traces() -> list[tuple[str, int]]:
    return [("slow-rank", 0), ("slow-rank", 1), ("compiled", 0), ("cuda-graphs", 0)]


@pytest.mark.parametrize(("name", "rank"), traces())
def test_the_breakdown_is_that_of_plain_sums(name: str, rank: int) -> None:
    raw = RawTrace(SAMPLES / name / f"rank{rank:05d}.pt.trace.json.gz")
    kernels, copies = raw.of("kernel"), [each.span for each in raw.of("gpu_memcpy", "gpu_memset")]
    talk = [each.span for each in kernels if each.name.startswith("nccl")]
    compute = [each.span for each in kernels if not each.name.startswith("nccl")]
    row = breakdown.by_rank(tracekit.load(SAMPLES / name).trace(rank)).row(0, named=True)
    assert row["compute_ns"] == length(compute)
    assert row["communication_ns"] == length(talk)
    assert row["overlapped_ns"] == length(common(compute, talk))
    assert row["exposed_communication_ns"] == length(minus(talk, compute))
    assert row["exposed_copy_ns"] == length(minus(copies, [*compute, *talk]))


def test_collectives_of_ranks_that_share_a_gpu_match_although_their_ends_scatter(shared: tracekit.Run) -> None:
    # Both ranks had one clock. Voting on ends alone finds an offset of three time slices, 6.8 ms.
    offsets = shared.offsets.sort("rank")
    assert offsets["offset_ns"].abs().max() < SLICE_NS  # type: ignore[operator]
    assert offsets["residual_ns"].max() < SLICE_NS  # type: ignore[operator]
    calls = shared.table(collective_matching.matched_calls)
    matched = calls.group_by("instance").agg(pl.len().alias("ranks"), pl.col("op").n_unique().alias("ops"))
    assert matched.filter(pl.col("ranks") == 2).height >= 0.95 * calls.height / 2
    assert matched["ops"].max() == 1


def test_the_slow_rank_and_the_size_of_its_fault_are_found(shared: tracekit.Run) -> None:
    (found,) = (each for each in tracekit.check(shared).findings if each.code == "RANK001")
    assert found.ranks == (1,)
    assert found.cost_ns == pytest.approx(20 * MS, rel=0.2)  # --fault slow-rank=1:20ms


def test_kernels_of_cuda_graphs_are_linked_to_the_launch_of_their_graph() -> None:
    run = tracekit.load(SAMPLES / "cuda-graphs")
    trace = run.trace(0)
    ops = trace.ops.select("id", launch="name")
    launched = trace.activities.join(ops, left_on="launch_id", right_on="id", how="inner")
    by_graph = launched.filter(pl.col("launch").str.starts_with("cudaGraphLaunch"))
    assert by_graph.height > 0.5 * trace.activities.height
    assert set(by_graph["step"].drop_nulls().unique()) <= {9, 10, 11}


def test_compiled_kernels_have_floating_point_operations_of_their_products() -> None:
    trace = tracekit.load(SAMPLES / "compiled").trace(0)
    steps = efficiency.by_step(trace)
    # 6 layers of 768 with heads of 64, feed-forward 2048, vocabulary 8192; backward is twice the forward.
    tokens, width = 8 * 512, 768
    products = 6 * (4 * width * width + 3 * width * 2048) + width * 8192
    attention = 6 * 2 * 512 * width / 2
    assert steps["flops"].drop_nulls().mean() == pytest.approx(3 * 2 * tokens * (products + attention), rel=0.1)
