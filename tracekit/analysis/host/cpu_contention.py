"""Ops of a CPU run whose threads lack processors: more threads than cores, or identical ops that are mostly slow."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.time import cpu_times, trace_columns
from tracekit.model import columns, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

OP_COLUMNS = schema.columns("step device activity_id name start_ns dur_ns excess_ns regular_ns")
_MIN_CALLS = 4  # of fewer identical ops, the fastest may be slow too
_MIN_REGULAR_RATIO = 0.3
"""Where other processes interrupt, few calls have most of the excess: 0.02 to 0.16 of it in the median call, over 40
recordings on a busy host. Where the threads of ops compete, every call has some: 0.43 to 0.85."""
_MIN_EXCESS_RATIO = 0.3  # caches and frequencies make identical ops differ by less
_MIN_FACTOR, _QUANTILE = 2.0, 0.9
"""Times vary where a tenth of the work or more takes twice as long as the fastest identical op. In healthy recordings
it takes 1.0 to 2.0 times as long, by caches, frequencies and other processes (sample_traces/faults)."""
_MOST_ERRORS = 3.0
"""Standard errors up to which chance explains a difference: the rank compared is the latest of several, in one of
several steps, so that two (one in twenty) are expected."""
_MIN_WAITING_RATIO = 0.08  # of the step, for which the thread was not scheduled


@trace_fact
def op_excess(trace: Trace) -> pl.DataFrame:
    """Ops of a CPU run against the fastest identical op of the trace: the same name and input shapes.

    Columns OP_COLUMNS: device (null), excess_ns (beyond the fastest), regular_ns (what their median call has of it;
    both 0 where there are few identical ops); one row per op that computes. Empty where a device was recorded.
    """
    if trace.on_device:
        return schema.empty(OP_COLUMNS)
    shapes = columns.rows_or_nulls(trace.ops.select("shapes"), trace_columns.launch_rows(trace))["shapes"]
    ops = trace.activities.with_columns(shapes).filter(pl.col("kind") == "compute", trace.in_steps)
    same = ("name", "shapes")
    fastest_ns, median_ns = pl.col("dur_ns").min().over(same), pl.col("dur_ns").median().over(same)
    is_counted = pl.len().over(same) >= _MIN_CALLS
    return schema.conform(
        ops.with_columns(
            activity_id="id",
            excess_ns=pl.when(is_counted).then(pl.col("dur_ns") - fastest_ns).otherwise(0),
            regular_ns=pl.when(is_counted).then(median_ns - fastest_ns).otherwise(0).cast(pl.Int64),
        ),
        OP_COLUMNS,
    )


FACTS: tuple[TraceFact, ...] = (op_excess, cpu_times.cpu_times)


@dataclass(frozen=True)
class Processors:
    """Threads that compute at the same time on the host of a run, and the cores that they may use."""

    threads: int
    ranks: int
    cores: float

    @property
    def is_oversubscribed(self) -> bool:
        """Whether ops use several threads, and all ranks together more than there are cores."""
        return self.threads > 1 and self.threads * self.ranks > self.cores

    @property
    def has_fewer_cores_than_ranks(self) -> bool:
        """Whether a rank may use fewer cores than there are ranks: all share these, or each has some of its own."""
        return self.ranks > self.cores


def processors(run: Run) -> Processors | None:
    """What the manifest states of threads and cores; None where it does not.

    Where it does not state the ranks of its host, those with a trace count.
    """
    stated = Manifest.of(run.manifest).processors
    limits = [cores for cores in (stated.cores, stated.usable_cores, stated.quota_cores) if cores]
    if not limits or not stated.threads:
        return None
    return Processors(stated.threads, stated.ranks or len(run.ranks), min(limits))


@run_fact
def contended_ops(run: Run) -> pl.DataFrame:
    """Ops that take longer because threads lack processors; use ``run.table(contended_ops)``.

    Columns window, rank, those of OP_COLUMNS; one row per op with an excess, of ranks most of whose identical ops are
    slow: a third of the excess or more is in the median call. Also, threads of all ranks outnumber the cores. Where the
    manifest does not state that, ops compute for longer than the process had CPU time: its threads were not running.
    Where ranks, or the threads of all ranks, outnumber the cores, those may take turns of milliseconds, so that few
    calls have all of the excess: it is enough that the threads were not running.
    """
    ops = run.table(op_excess)
    of_rank = ("window", "rank")
    times = run.table(cpu_times.cpu_times)
    logged = ops.join(times.select(*of_rank, "step"), on=[*of_rank, "step"], how="semi")
    computed = logged.group_by(of_rank).agg(pl.col("dur_ns").sum().alias("logged_ns"))
    waited_ns = pl.when(pl.col("processor_wait_ns").null_count() == 0).then(pl.col("processor_wait_ns").sum())
    used = times.group_by(of_rank).agg(pl.col("wall_ns", "cpu_ns").sum(), waited_ns).join(computed, on=of_rank)
    ranks = ops.group_by(of_rank).agg(pl.col("dur_ns", "excess_ns", "regular_ns").sum())
    ranks = ranks.join(used, on=of_rank, how="left")
    stated = processors(run)
    waiting_ns = pl.coalesce("processor_wait_ns", pl.col("logged_ns") - pl.col("cpu_ns"))
    is_waiting = (waiting_ns >= _MIN_WAITING_RATIO * pl.col("wall_ns")).fill_null(value=False)
    is_stated = pl.lit(stated is not None and stated.is_oversubscribed)
    is_shared = is_waiting & pl.lit(
        stated is not None and (stated.has_fewer_cores_than_ranks or stated.is_oversubscribed)
    )
    is_short = is_waiting if stated is None else is_stated
    is_regular = pl.col("regular_ns") >= _MIN_REGULAR_RATIO * pl.col("excess_ns")
    # Where threads are stated to outnumber the cores, even the fastest op lacks them.
    is_slow = is_stated | (pl.col("excess_ns") >= _MIN_EXCESS_RATIO * pl.col("dur_ns"))
    contended = ranks.filter((is_shared | (is_short & is_regular & is_slow)) & (pl.col("excess_ns") > 0))
    return ops.filter(pl.col("excess_ns") > 0).join(contended, on=of_rank, how="semi", maintain_order="left")


def varying_factor(run: Run, ranks: Sequence[int], steps: pl.DataFrame) -> float | None:
    """Factor by which times of identical ops vary on every rank, where that alone may make `ranks` compute longer.

    The time of all ops of a rank in `steps` (columns window and step) has the variance of identical ops, those of one
    name and input shapes, over all steps. None where `ranks` take longer than the others by more than chance explains,
    where times vary little, where `contended_ops` shows why, and where a device computes.
    """
    ops = run.table(op_excess).with_columns(fastest_ns=pl.col("dur_ns") - pl.col("excess_ns"))
    if ops.is_empty() or run.table(contended_ops).height:
        return None
    same = ["window", "rank", "name", "fastest_ns"]
    with_spread = ops.with_columns(variance=pl.col("dur_ns").var().over(same).fill_null(0.0))
    in_steps = with_spread.join(steps, on=["window", "step"], how="semi", nulls_equal=True)
    totals = in_steps.group_by("rank").agg(pl.col("dur_ns", "variance").sum())
    is_late = pl.col("rank").is_in(list(ranks))
    sides = [totals.filter(is_late), totals.filter(~is_late)]
    if any(side.is_empty() for side in sides):
        return None
    means = [float(side["dur_ns"].sum()) / side.height for side in sides]
    error_ns = math.sqrt(sum(float(side["variance"].sum()) / side.height**2 for side in sides))
    # Of the calls by their time on idle cores, as one long op takes longer than many short ones.
    factors = [
        _weighted_quantile(
            (rank_ops["dur_ns"] / rank_ops["fastest_ns"].clip(1)).to_numpy(), rank_ops["fastest_ns"].to_numpy()
        )
        for _, rank_ops in ops.group_by("rank")
    ]
    factor = min(factors)
    return factor if factor >= _MIN_FACTOR and means[0] - means[1] <= _MOST_ERRORS * error_ns else None


def _weighted_quantile(values: npt.NDArray[np.float64], weights: npt.NDArray[np.int64]) -> float:
    order = np.argsort(values)
    until = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(until, _QUANTILE * until[-1])])


def turns(run: Run, stated: Processors) -> pl.DataFrame:
    """Time that ranks of few cores lose while others have these: columns window, rank, step, turns_ns.

    With cores of its own, a step takes the CPU time of its busiest rank, and what none of the cores was used for. Ranks
    without a trace compute as long as the others do on average. Empty without CPU times.
    """
    step = ["window", "step"]
    used_ns = pl.col("cpu_ns").mean() * stated.ranks
    needs = (
        run.table(cpu_times.cpu_times)
        .group_by(step)
        .agg(pl.col("cpu_ns").max().alias("busiest_ns"), used_ns.alias("used_ns"), pl.col("wall_ns").median())
    )
    unused_ns = (pl.col("wall_ns") - pl.col("used_ns") / stated.cores).clip(0)
    lost_ns = (pl.col("wall_ns") - pl.col("busiest_ns") - unused_ns).clip(0).cast(pl.Int64)
    return run.table(cpu_times.cpu_times).select("rank", *step).join(needs.select(*step, turns_ns=lost_ns), on=step)
