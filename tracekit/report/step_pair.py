"""Two steps, one of each of two runs: which ones are compared, and the difference of their breakdowns in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run

PARTS = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
"""The parts of the breakdown; they add up to duration_ns."""


@dataclass(frozen=True, eq=False)
class MarkedSteps:
    """The steps of a window that its traces mark; a step starts on the clock of its trace.

    `table` has the columns of `breakdown.by_step` and rank, one row per rank and step (of several devices the slowest),
    in this order. `rank` and `step` are those to look at first, as in the report: the slowest rank and the step nearest
    to its median. Both are None where no step is marked.
    """

    window: int
    table: pl.DataFrame
    rank: int | None = None
    step: int | None = None

    def steps(self, rank: int) -> list[int]:
        """Return the steps of a rank, in their order."""
        return self.table.filter(rank=rank)["step"].to_list()

    def row(self, rank: int, step: int) -> dict[str, Any]:
        """Return the breakdown of a step of a rank. Raises LookupError where it has no such step."""
        rows = self.table.filter(rank=rank, step=step)
        if rows.is_empty():
            raise LookupError(f"rank {rank} has no step {step}")
        return rows.row(0, named=True)


def marked_steps(run: Run, window: int | None = None) -> MarkedSteps:
    """Return the marked steps of a window, by default of the one with the run's representative step.

    Measures the breakdown of all traces if that was not done before.
    """
    run.measure(save_stages.FACTS)
    marked = run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0).drop_nulls("step")
    if window is not None:
        marked = marked.filter(window=window)
    typical = save_stages.representative_step(run, marked)
    if typical is None:
        return MarkedSteps(window or 0, marked)
    typical_window = int(typical["window"] or 0)
    table = breakdown.slowest_device(marked.filter(window=typical_window)).sort("rank", "step")
    return MarkedSteps(typical_window, table, typical["rank"], typical["step"])


def sentence(first: Mapping[str, Any], second: Mapping[str, Any], names: tuple[str, str] = ("A", "B")) -> str:
    """Sentence on how much longer the second step is than the first, and the parts of the breakdown that differ.

    Both are rows of a breakdown, with columns step, duration_ns and PARTS; the differences of the parts, the largest
    first, add up to that of the durations, which are not 0.
    """
    (a, b), more_ns = names, second["duration_ns"] - first["duration_ns"]
    takes = f"Step {second['step']} of {b} takes {units.duration(second['duration_ns'])}"
    other = f"step {first['step']} of {a}"
    changes = {part: second[part] - first[part] for part in PARTS}
    ordered = sorted((part for part in PARTS if changes[part]), key=lambda part: -abs(changes[part]))
    parts = ", ".join(_change(changes[part], _name(part)) for part in ordered)
    if not more_ns:
        return f"{takes}, as long as {other}" + (f": {parts}" if parts else "")
    longer = "longer" if more_ns > 0 else "shorter"
    share = units.share(abs(more_ns) / first["duration_ns"])
    return (
        f"{takes}, {units.duration(abs(more_ns))} ({share}) {longer} than {other} "
        f"({units.duration(first['duration_ns'])}): {parts}"
    )


def _change(change_ns: int, name: str) -> str:
    return f"{units.duration(abs(change_ns))} {'more' if change_ns > 0 else 'less'} {name}"


def _name(part: str) -> str:
    return "idle time" if part == "idle_ns" else part.removesuffix("_ns").replace("_", " ")
