"""Pipelines drawn in ASCII, made into traces with the spans of torch.distributed.pipelining.

    run = drawn_pipelines.run('''
        0 0  01...aabb
        1 1  .01aabb..
    ''')

A line is a rank, a stage and its cells: a digit is a forward of that micro-batch, a letter a backward (a is micro-batch
0), an upper-case letter a weight gradient; '.' is idle. A character is `scale_ns`. Several lines of one rank are its
stages.
"""

import polars as pl

from tests.support import drawn_traces
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace


def run(picture: str, *, scale_ns: int = 1000, on_device: bool = False, **manifest: object) -> Run:
    """Return a run of one step of the pipeline that is drawn."""
    return drawn_traces.run(*traces(picture, scale_ns=scale_ns, on_device=on_device), **manifest)


def traces(picture: str, *, scale_ns: int = 1000, on_device: bool = False, spans: str = "PP") -> list[Trace]:
    """Return the trace of each rank; with spans="loop", spans are `Forward i` and `Backward i`, without the stage."""
    lines = [line.split() for line in picture.strip().splitlines() if line.strip()]
    ranks = sorted({int(rank) for rank, _, _ in lines})
    return [
        _trace(rank, [(int(s), cells) for r, s, cells in lines if int(r) == rank], scale_ns, on_device, spans)
        for rank in ranks
    ]


def _trace(rank: int, lines: list[tuple[int, str]], scale_ns: int, on_device: bool, spans: str) -> Trace:
    rows = [
        (_name(letter, stage, spans), first * scale_ns, (past - first) * scale_ns)
        for stage, cells in lines
        for letter, first, past in drawn_traces.letter_runs(cells)
    ]
    ops, activities = [], []
    for at, (name, start_ns, dur_ns) in enumerate(sorted(rows, key=lambda row: row[1])):
        # On a device the host runs ahead: its spans say nothing about when the kernels run.
        host_ns, host_dur_ns = (at * 10, 5) if on_device else (start_ns, dur_ns)
        span = {"id": 2 * at, "lane": 0, "name": name, "kind": "annotation", "start_ns": host_ns, "dur_ns": host_dur_ns}
        issued = ("cudaLaunchKernel", "runtime") if on_device else ("aten::mm", "cpu_op")
        launch = {"id": 2 * at + 1, "lane": 0, "name": issued[0], "kind": issued[1]}
        ops += [span | {"step": 0}, launch | {"start_ns": host_ns + 1, "dur_ns": 1, "step": 0}]
        activity = {"id": at, "launch_id": 2 * at + 1, "lane": 1 if on_device else 0, "name": "gemm", "kind": "compute"}
        activities.append(activity | {"start_ns": start_ns, "dur_ns": dur_ns, "step": 0})
    end_ns = max(start_ns + dur_ns for _, start_ns, dur_ns in rows)
    lanes = [{"lane": 0, "role": "host", "name": "thread"}]
    lanes += [{"lane": 1, "device": 0, "stream": 7, "role": "compute", "name": "stream 7"}] if on_device else []
    step = {"step": 0, "host_start_ns": 0, "host_end_ns": end_ns, "start_ns": 0, "end_ns": end_ns}
    tables = {"ops": ops, "activities": activities, "lanes": lanes, "steps": [step]}
    frames = {name: pl.DataFrame(rows, infer_schema_length=None) for name, rows in tables.items()}
    conformed = {name: schema.TABLES[name].conform(frame) for name, frame in frames.items()}
    return Trace(rank=rank, window=0, path=f"drawn-rank{rank}", **conformed)


def _name(letter: str, stage: int, spans: str) -> str:
    code = "F" if letter.isdigit() else "B" if letter.islower() else "W"
    micro_batch = int(letter) if letter.isdigit() else ord(letter.lower()) - ord("a")
    if spans == "loop":
        return f"{'Forward' if code == 'F' else 'Backward'} {micro_batch}"
    return f"PP:{stage}{code}{micro_batch}"
