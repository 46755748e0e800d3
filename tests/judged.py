"""For each rule a run on which it fires and one on which it stays silent. A rule without both fails the tests."""

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from tests import drawn
from tracekit.trace import RUN_DOUBTS, Run

MS = 1_000_000


@dataclass(frozen=True)
class Case:
    """Two runs that differ in what the rule is about, and a number that the message on the first must hold."""

    fires: Callable[[], Run]
    silent: Callable[[], Run]
    told: str


def _communication(picture: str) -> Run:
    return drawn.run(drawn.trace(picture, scale_ns=MS))


def _exposed() -> Run:
    return _communication("""
        step     0000000000
        compute  aaaa..aa..
        comm     ..xxxxxxx.
    """)


def _hidden() -> Run:
    return _communication("""
        step     0000000000
        compute  aaaaaaaa..
        comm     ..xxxxxx..
    """)


def give_way(picture: str, *, on_device: bool = True) -> Run:
    """Return a run in which activities named p and q on communication lanes are preparatory kernels."""
    kinds = {"p": {"kind": "compute"}, "q": {"kind": "compute"}}
    return drawn.run(drawn.trace(picture, scale_ns=MS, columns=kinds, on_device=on_device))


def _crawling() -> Run:
    return give_way("""
        step     0000000000000000000000000000
        compute  ....aaaaaaaa....bbbb........
        comm     pp..pppppp..xxxx............
    """)


def _not_crawling() -> Run:
    return give_way("""
        step     0000000000000000000000000000
        compute  ....aaaaaaaa....bbbb........
        comm     pp..pp......xxxx............
    """)


STEPS = """
    step     0000000011111111222222223333333344444444
    compute  aaaaaaa.aaaaaaa.aaaaaaa.aaa..aa.aaa..aa.
"""


def with_calls(*calls: tuple[str, int, int, int], picture: str = STEPS) -> Run:
    """Return a run with runtime calls: each a name, a step, a start in ms and a duration in ms."""
    rows = [
        {"id": i, "lane": 9, "name": name, "kind": "runtime", "step": step, "start_ns": at * MS, "dur_ns": dur * MS}
        for i, (name, step, at, dur) in enumerate(calls)
    ]
    ops = pl.DataFrame(rows) if rows else pl.DataFrame(schema={"id": pl.Int64})
    return drawn.run(drawn.trace(picture, scale_ns=MS, ops=ops))


def saved(*stages: tuple[int, str, int], step_ms: int = 100, saves: int = 2) -> Run:
    """Return a run of 10 steps between saves; stages are rank, stage and duration in ms, the same in every save."""
    traces = []
    for rank in sorted({rank for rank, _, _ in stages}):
        rows = [
            {
                "checkpoint": f"step-{10 * (n + 1)}", "operation": "save", "step": 10 * (n + 1), "stage": stage,
                "start_ns": n * 1000 * MS, "dur_ns": dur * MS, "blocking": True,
            }
            for n in range(saves)
            for of_rank, stage, dur in stages
            if of_rank == rank
        ]  # fmt: skip
        metrics = [{"step": n, "name": "step_time_ns", "value": float(step_ms * MS)} for n in range(10 * saves)]
        tables = {"checkpoints": pl.DataFrame(rows), "metrics": pl.DataFrame(metrics)}
        traces.append(drawn.trace("compute aaa", rank=rank, on_device=False, **tables))
    return drawn.run(*traces, strategy="fsdp2")


def _slow_save() -> Run:
    return saved((0, "write", 200), (0, "total", 200), (1, "write", 60), (1, "wait", 140), (1, "total", 200))


def _fast_save() -> Run:
    return drawn.run(drawn.trace("compute aaa", on_device=False), strategy="fsdp2")


def _doubtful() -> Run:
    run = _hidden()
    rows = [{"kind": "missing_ranks", "message": "6 of 8 ranks have a trace.", "doubtful_ratio": 0.25}]
    return Run(run.path, run.sources, doubts=RUN_DOUBTS.conform(pl.DataFrame(rows)))


CASES = {
    "COMM001": Case(_exposed, _hidden, "30.0%"),
    "STREAM001": Case(_crawling, _not_crawling, "3.0 times"),
    "MEM001": Case(
        lambda: with_calls(("cudaFree", 3, 27, 2), ("cudaMalloc", 4, 35, 2)),
        lambda: with_calls(("cudaMalloc", 0, 2, 3), ("cudaMallocAsync", 3, 27, 2)),
        "1.33 ms",
    ),
    "CKPT001": Case(_slow_save, _fast_save, "200 ms"),
    "DATA001": Case(_doubtful, _hidden, "6 of 8"),
}
