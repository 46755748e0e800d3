"""Drawn runs of pipelines, tensor and expert parallelism in which a rule fires, and in which it does not."""

from collections.abc import Callable

import polars as pl

from tests.support import drawn_pipelines, drawn_traces
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace

MIB = 1 << 20
# p = 2, m = 3
EVEN = """
    0 0  01..aa2bb.cc
    1 1  .0aa1bb2cc..
"""
# The second forward of rank 1 starts 4 late.
DELAYED = """
    0 0  01......aa2bb.cc
    1 1  .0aa....1bb2cc..
"""
# Stage 1 takes twice as long.
UNEVEN = """
    0 0  01.......aa2...bb....cc
    1 1  .00aaaa11bbbb22cccc....
"""
# p = 3, m = 2
FEW = """
    0 0  01......aa.bb
    1 1  .01...aa.bb..
    2 2  ..0aa1bb.....
"""
# p = 2, m = 2: weight gradients (in capitals) fill most of the bubble.
FEW_ZERO_BUBBLE = """
    0 0  01.aAbB
    1 1  .0a1bAB
"""
# p = 4, m = 1: results take 4 between stages 1 and 2, and 1 over the other links.
SLOW_LINK = """
    0 0  0.....................aa
    1 1  ..0................aa...
    2 2  .......0.....aa.........
    3 3  .........0aa............
"""
SAME_LINKS = """
    0 0  0...............aa
    1 1  ..0..........aa...
    2 2  ....0.....aa......
    3 3  ......0aa.........
"""


def delayed() -> Run:
    """Return a pipeline in which an action starts late although its input is complete."""
    return drawn_pipelines.run(DELAYED)


def even() -> Run:
    """Return a pipeline with equal stages and no delays."""
    return drawn_pipelines.run(EVEN)


def uneven() -> Run:
    """Return a pipeline whose second stage has four of six layers."""
    return drawn_pipelines.run(UNEVEN, pipeline={"stage_layers": [[0, 1], [2, 3, 4, 5]]})


def few() -> Run:
    """Return a pipeline of three ranks with two micro-batches."""
    return drawn_pipelines.run(FEW)


def linked(picture: str) -> Run:
    """Return a pipeline of four ranks."""
    return drawn_pipelines.run(picture)


def sharded(*, per_micro_batch: bool) -> Run:
    """Return EVEN with a reduce-scatter after each backward, or after the last one of each rank."""
    traces = []
    for trace in drawn_pipelines.traces(EVEN, scale_ns=1000):
        backwards = trace.ops.filter(pl.col("name").str.contains("B")).sort("start_ns")
        at = backwards["start_ns"] + backwards["dur_ns"] - 100
        traces.append(
            with_calls(trace, (at if per_micro_batch else at[-1:]).to_list(), 900, "reduce_scatter", "mesh_dp_shard")
        )
    return drawn_traces.run(*traces)


def with_calls(trace: Trace, starts_ns: list[int], dur_ns: int, op: str, description: str) -> Trace:
    """Return a trace with collectives of one group."""
    first = trace.activities.height
    rows = [
        {"id": first + n, "launch_id": None, "lane": 0, "name": f"gloo:{op}", "kind": "communication", "step": 0}
        | {"start_ns": start_ns, "dur_ns": dur_ns}
        for n, start_ns in enumerate(starts_ns)
    ]
    calls = [{"activity_id": row["id"], "op": op, "group": "7", "sent_bytes": MIB} for row in rows]
    group = [{"group": "7", "description": description, "ranks": [trace.rank, trace.rank + 8]}]
    return trace.replace(
        activities=pl.concat([trace.activities, schema.ACTIVITIES.conform(pl.DataFrame(rows))]),
        collectives=schema.COLLECTIVES.conform(pl.DataFrame(calls)),
        groups=schema.GROUPS.conform(pl.DataFrame(group)),
    )


def tensor_parallel(picture: str, *, gpus_per_node: int = 8) -> Run:
    """Return two ranks that run `picture` with all-reduces of a tensor-parallel group."""
    traces = [tensor_parallel_trace(picture, rank) for rank in (0, 1)]
    return drawn_traces.run(*traces, hardware={"gpus_per_node": gpus_per_node})


def linked_by(device: str, bytes_per_s: float) -> Run:
    """Return two ranks of a kind of device with short all-reduces of 16 MiB at this bus bandwidth."""
    size_bytes = 16 * MIB
    cell_ns = round(size_bytes / bytes_per_s * 1e9)
    traces = [tensor_parallel_trace(LINKED_TP, rank, size_bytes=size_bytes, cell_ns=cell_ns) for rank in (0, 1)]
    header = {"deviceProperties": [{"id": 0, "name": device}]}
    return drawn_traces.run(*(trace.replace(header=header) for trace in traces), hardware={"gpus_per_node": 8})


def tensor_parallel_trace(picture: str, rank: int, *, size_bytes: int = 8 * MIB, cell_ns: int = 1000) -> Trace:
    """Return a rank's trace of `picture` with all-reduces in a group of two."""
    trace = drawn_traces.trace(picture, rank=rank, scale_ns=cell_ns)
    calls = trace.activities.filter(pl.col("kind") == "communication").select(activity_id="id")
    described = calls.with_columns(op=pl.lit("all_reduce"), group=pl.lit("1"), sent_bytes=pl.lit(size_bytes))
    groups = pl.DataFrame([{"group": "1", "description": "mesh_tp", "ranks": [0, 1]}])
    return trace.replace(collectives=schema.COLLECTIVES.conform(described), groups=schema.GROUPS.conform(groups))


def experts(*tokens: int) -> Run:
    """Return ranks whose experts get these MiB of tokens: dispatch, compute as long as the tokens are many, combine."""
    traces = []
    longest, mean = max(tokens), sum(tokens) // len(tokens)
    for rank, load in enumerate(tokens):
        cells = "a" * load + "." * (longest - load)
        picture = (
            f"step {'0' * (longest + 6)}\ncompute aa..{cells}..\ncomm ..xx{'.' * load}{'y' * (longest - load + 2)}"
        )
        trace = drawn_traces.trace(picture, rank=rank, scale_ns=1000)
        ids = dict(trace.activities.filter(pl.col("kind") == "communication").select("name", "id").iter_rows())
        sizes = ((ids["x"], mean, load), (ids["y"], load, mean))
        calls = [
            {"activity_id": at, "op": "all_to_all", "group": "1", "sent_bytes": sent * MIB, "received_bytes": got * MIB}
            for at, sent, got in sizes
        ]
        groups = pl.DataFrame([{"group": "1", "description": "mesh_ep", "ranks": list(range(len(tokens)))}])
        traces.append(
            trace.replace(
                collectives=schema.COLLECTIVES.conform(pl.DataFrame(calls)), groups=schema.GROUPS.conform(groups)
            )
        )
    return drawn_traces.run(*traces)


EXPOSED_TP = """
    step     00000000000000000000
    compute  aaaa....aaaa....aaaa
    comm     ....xxxx....xxxx....
"""
SHORT_TP = """
    step     00000000000000000000
    compute  aaaaaaaaa.aaaaaaaaaa
    comm     .........x..........
"""
LINKED_TP = """
    step     0000000000000000000000000000000000000000
    compute  aaaaaaaaa.aaaaaaaaa.aaaaaaaaa.aaaaaaaaa.
    comm     .........x.........x.........x.........x
"""

EXAMPLES: dict[str, tuple[Callable[[], Run], Callable[[], Run]]] = {
    "PIPE001": (delayed, even),
    "PIPE002": (uneven, even),
    "PIPE003": (few, even),
    "PIPE004": (lambda: sharded(per_micro_batch=True), lambda: sharded(per_micro_batch=False)),
    "PIPE005": (lambda: linked(SLOW_LINK), lambda: linked(SAME_LINKS)),
    "TP001": (lambda: tensor_parallel(EXPOSED_TP, gpus_per_node=1), lambda: tensor_parallel(EXPOSED_TP)),
    "TP002": (lambda: tensor_parallel(EXPOSED_TP), lambda: tensor_parallel(SHORT_TP)),
    "EP001": (lambda: experts(18, 6, 6, 6), lambda: experts(9, 9, 9, 9)),
}
"""For each rule a run in which it fires, and one in which it does not."""
