"""A drawn run and a report on it, for tests of report formats. Findings are hand-written, numbers are measured."""

import polars as pl

from tests.support import drawn_traces
from tracekit.model.run import Run
from tracekit.rules.rule import Finding, IgnoredFinding, Input, Report, Severity

MANIFEST = {
    "schema": "tracekit.run/1",
    "strategy": "fsdp2",
    "world_size": 2,
    "model": {"name": "tiny", "layers": 2},
    "arguments": {"batch": 4},
    "device": "cuda",
    "device_name": "Drawn GPU",
    "host": "secret-host",
    "command": ["train.py", "--user", "alice"],
    "created_ns": 1_790_000_000_000_000_000,
}
PICTURE = """
    step     00000000001111111111222222222233333333334444444444
    compute  aaaaaa....aaaaaa....aaaaaa....aaaaaa....aaaaaa....
    comm     ....xxxx......xxxx......xxxx......xxxx......xxxx..
    copy     ........m.........m.........m.........m.........m.
"""


def run(path: str = "runs/today", **manifest: object) -> Run:
    """Return a run of two ranks, five steps of 10 ms each: 6 ms of compute, 2 hidden and 2 exposed of communication."""
    ranks = (drawn_traces.trace(PICTURE, rank=rank, scale_ns=1_000_000) for rank in (0, 1))
    return drawn_traces.run(*ranks, path=path, **MANIFEST | manifest)


def findings() -> tuple[Finding, ...]:
    """Return one finding of each severity, the first with more evidence than a page holds."""
    rows = 150
    evidence = pl.DataFrame(
        {
            "window": [0] * rows,
            "rank": [number % 2 for number in range(rows)],
            "step": [number % 5 for number in range(rows)],
            "name": ["ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"] * rows,
            "start_ns": [6_000_000 + 1_000 * number for number in range(rows)],
            "dur_ns": [2_000_000] * rows,
            "exposed_ratio": [0.5] * rows,
        }
    )
    exposed = Finding(
        "COMM001",
        Severity.ERROR,
        "20.0% of step time is communication that no compute hides: 2 ms of 10 ms a step on rank 0.",
        "Prefetch the next layer's weights: module.set_modules_to_forward_prefetch([...]).",
        impact=0.2,
        cost_ns=2_000_000,
        confidence=0.9,
        ranks=(0, 1),
        steps=(0, 1, 2, 3, 4),
        evidence=evidence,
    )
    churn = Finding(
        "MEM001",
        Severity.WARNING,
        "64 MiB of unit buffers come and go every step.",
        "Keep them: fully_shard(reshard_after_forward=False).",
        cost_bytes=64 << 20,
        ranks=(1,),
        subject="layers.0",
    )
    doubt = Finding(
        "DATA001", Severity.INFO, "Rank 1's clock has a resolution of 0.25 µs.", "", subject="rank 1", ranks=(1,)
    )
    return exposed, churn, doubt


def report(of: Run, *, found: tuple[Finding, ...] | None = None, ignored: tuple[IgnoredFinding, ...] = ()) -> Report:
    """Return a report on a run with the findings above, or those given."""
    return Report(
        run=of,
        findings=findings() if found is None else found,
        notes=("STREAM001 could not judge: it needs device lanes.",),
        inputs=(Input("rank00000.pt.trace.json.gz", 1234, "ab" * 32),),
        tool_version="0.1.0",
        ignored=ignored,
    )
