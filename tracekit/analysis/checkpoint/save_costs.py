"""What saves that a trace shows cost: how much longer their steps take than the others."""

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.time import breakdown
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run

COLUMNS = schema.columns("window saves blocked_ns lost_ns window_ns steps reference_ns")


@run_fact
def save_costs(run: Run) -> pl.DataFrame:
    """Costs of the saves of each window, by spans of the trace; use ``run.run_table``.

    Columns COLUMNS: saves and blocked_ns (of the rank that saves longest), lost_ns, window_ns and steps (of the
    profiled steps; a window without marked steps is one), reference_ns (a step without a save: the median over ranks
    and steps; null where unknown); one row per window with saves in its steps. On a device, lost_ns is what the steps
    of saves and those after them take longer than the others, at least the device's idle time inside the spans and at
    most blocked_ns: work that was queued runs on during a save. On a CPU run it is blocked_ns.
    """
    spans = run.table(save_stages.save_spans)
    rows = []
    for (window,), of_window in spans.group_by("window", maintain_order=True):
        lengths = _step_lengths(run, window)
        in_steps = of_window.filter(pl.col("step").is_not_null() | (None in lengths))
        if in_steps.is_empty() or not lengths:
            continue
        by_rank = in_steps.group_by("rank").agg(pl.len(), pl.col("dur_ns", "idle_ns").sum()).sort("dur_ns", "rank")
        _, saves, blocked_ns, idle_ns = by_rank.row(-1)
        saving = set(in_steps["step"].drop_nulls().to_list())
        reference_ns = _reference_ns(lengths, saving)
        lost_ns = blocked_ns
        if in_steps["idle_ns"].is_not_null().any():
            after = saving | {step + 1 for step in saving}
            longer = (max(0, ns - (reference_ns or ns)) for step, ns in lengths.items() if step in after)
            lost_ns = min(blocked_ns, max(sum(longer), idle_ns))
        rows.append((window, saves, blocked_ns, lost_ns, sum(lengths.values()), len(lengths), reference_ns))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def _step_lengths(run: Run, window: object) -> dict[int | None, int]:
    """Duration of each marked step, or of the window (step null) that has none: the median over ranks."""
    steps = run.table(breakdown.by_step).filter(pl.col("window") == window, pl.col("duration_ns") > 0)
    marked = steps.drop_nulls("step")
    of_rank = (marked if marked.height else steps).group_by("rank", "step").agg(pl.col("duration_ns").max())
    medians = of_rank.group_by("step").agg(pl.col("duration_ns").median().cast(pl.Int64)).sort("step")
    return dict(medians.iter_rows())


def _reference_ns(lengths: dict[int | None, int], saving: set[int]) -> int | None:
    """Return the median of the steps without saves, if possible without those after saves; never of the first step."""
    marked = {step: ns for step, ns in lengths.items() if step is not None}
    for left_out in (saving | {step + 1 for step in saving}, saving):
        plain_ns = sorted(ns for step, ns in marked.items() if step not in left_out and step != min(marked))
        if plain_ns:
            return plain_ns[(len(plain_ns) - 1) // 2]
    return None
