"""Timelines drawn in ASCII, made into traces. What is drawn is what the test claims.

    trace = drawn.trace('''
        step     000001111.
        compute  aabb.cc...
        comm     .xxx......
        copy     ......mm..
    ''')

One character is one nanosecond (or `scale_ns`). A run of one letter is one activity of that name; '.' is idle. A
row's first word names the lane; its letters before any digit say the kind (compute, comm, copy, set). The row "step"
gives the step that each moment's work was launched in.
"""

from collections.abc import Mapping, Sequence

import polars as pl

from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.model.trace import Trace
from tracekit.sync import alignment

KINDS = {"compute": "compute", "comm": "communication", "copy": "memcpy", "set": "memset"}


def trace(
    picture: str,
    *,
    rank: int = 0,
    window: int = 0,
    scale_ns: int = 1,
    start_ns: int = 0,
    on_device: bool = True,
    columns: dict[str, dict[str, object]] | None = None,
    **tables: pl.DataFrame,
) -> Trace:
    """Return the trace that `picture` shows; `columns` sets more of an activity's columns by its name.

    `columns={"x": {"unit": "layers.0"}}`. Further tables go in by name: `allocations=…`; they are conformed.
    """
    rows = [line.split() for line in picture.strip().splitlines() if line.strip()]
    steps = next((cells for name, cells in rows if name == "step"), "")
    lanes, activities = [], []
    for name, cells in rows:
        if name == "step":
            continue
        kind = KINDS[name.rstrip("0123456789")]
        lane = len(lanes)
        lanes.append({"lane": lane, "device": 0 if on_device else None, "stream": lane, "name": name, "role": kind})
        for letter, first, past in letter_runs(cells):
            step = steps[first] if steps and steps[first] != "." else None
            number = len(activities)
            activity = {"id": number, "launch_id": number, "lane": lane, "name": letter, "kind": kind}
            activity |= {"start_ns": start_ns + first * scale_ns, "dur_ns": (past - first) * scale_ns}
            activity |= {"step": None if step is None else int(step)} | (columns or {}).get(letter, {})
            activities.append(activity)
    made = {
        "lanes": pl.DataFrame(lanes, infer_schema_length=None),
        "activities": pl.DataFrame(activities, infer_schema_length=None),
        "steps": _steps(steps, start_ns, scale_ns, 0 if on_device else None),
    } | tables
    conformed = {name: schema.TABLES[name].conform(frame) for name, frame in made.items()}
    return Trace(rank=rank, window=window, path=f"drawn-rank{rank}", **conformed)


def slowing(after: Mapping[str, int], *, concurrent: bool = False) -> Trace:
    """Return four steps of kernels abcdefgh, twice each, of 10 ns; in the last two as long as `after` says.

    With `concurrent`, a collective runs during these.
    """
    return paced(
        [[after.get(letter, 10) if step > 1 else 10 for letter in 2 * "abcdefgh"] for step in range(4)],
        concurrent=concurrent,
    )


def paced(lengths: Sequence[Sequence[int]], *, rank: int = 0, concurrent: bool = False) -> Trace:
    """Return steps of kernels abcdefgh, again and again, of these lengths in ns, by step and kernel.

    With `concurrent`, a collective runs from step 2 on.
    """
    rows = [
        (letter, length, step)
        for step, of_step in enumerate(lengths)
        for letter, length in zip(len(of_step) // 8 * "abcdefgh", of_step, strict=True)
    ]
    cells, steps = ("".join(text * length for text, length in part) for part in _letters(rows))
    comm = "".join(("x" if concurrent and step > 1 else ".") * length for _, length, step in rows)
    return trace(f"step {steps}\ncompute {cells}\ncomm {comm}", rank=rank)


def _letters(rows: list[tuple[str, int, int]]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    return [(letter, length) for letter, length, _ in rows], [(str(step), length) for _, length, step in rows]


def run(*traces: Trace, path: str = "drawn", **manifest: object) -> Run:
    """Return a run of drawn traces."""
    sources = [Source(t.rank, t.window, t.path, 0, lambda t=t: t) for t in traces]
    return Run(path, sources, manifest=manifest, align=alignment.offsets)


def letter_runs(cells: str) -> list[tuple[str, int, int]]:
    """Return each run of one letter: the letter, where it begins and where it ends."""
    edges = [i for i in range(1, len(cells)) if cells[i] != cells[i - 1]]
    starts, ends = [0, *edges], [*edges, len(cells)]
    if not cells:
        return []
    return [(cells[a], a, b) for a, b in zip(starts, ends, strict=True) if cells[a] != "."]


def _steps(cells: str, start_ns: int, scale_ns: int, device: int | None) -> pl.DataFrame:
    rows = []
    for letter, first, past in letter_runs(cells):
        start, end = start_ns + first * scale_ns, start_ns + past * scale_ns
        row = {"step": int(letter), "host_start_ns": start, "host_end_ns": end, "start_ns": start, "end_ns": end}
        rows.append(row | {"device": device})
    return pl.DataFrame(rows, infer_schema_length=None) if rows else schema.STEPS.empty()
