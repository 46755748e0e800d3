"""``tracekit summary``: where the time goes, in one table."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output
from tracekit.cli.options import ExecutorOptions, RunOptions, TableOptions, expand_options

if TYPE_CHECKING:
    import polars as pl

    from tracekit.model.run import Run
    from tracekit.model.trace import Fact


class By(StrEnum):
    """What a row of the summary stands for."""

    RANK = "rank"
    STEP = "step"
    COLLECTIVE = "collective"
    CLOCK = "clock"
    CONTENTION = "contention"
    STAGE = "stage"
    AXIS = "axis"
    EXPERT = "expert"
    EXPERT_PAIR = "expert-pair"
    RING = "ring"
    STREAM = "stream"
    UNKNOWN_WORK = "unknown-work"
    FILE = "file"


@expand_options
def summary(
    *,
    by: Annotated[By, typer.Option(help="What a row stands for: see above.")] = By.RANK,
    source: RunOptions,
    executor: ExecutorOptions,
    table: TableOptions,
) -> None:
    """Show where the time goes: compute, communication, copies, their overlap and exposed parts, idle time.

    compute + exposed communication + exposed copy + idle = duration, exactly. By rank, a row is the rank's device
    window from first to last activity; by step, that of each step, with its floating-point operations, the share of the
    compute time for which they, or the bytes moved, are known, and their share of the device's peak (MFU without
    recomputation, HFU with it), and, where they were recorded (record --device-metrics), clocks, power, temperature and
    throttle reasons of its GPU. By collective: how long each rank waited for the last arrival, how often it arrived
    last, and the transfer rate after that. By clock: the offset of each rank's clock and its residual error;
    smaller differences between ranks are not significant. By contention: the slowdown of each kind of work while
    another kind runs, relative to running alone, with a 95% confidence interval. By stage: the bubble of each rank,
    stage and step of a pipeline, beside that of the schedule without communication, and its causes. By axis: the
    communication of each rank along each axis of the mesh (pp, dp, tp, …), and its exposed part. By expert: the tokens
    that each rank's experts get in an expert-parallel run, relative to the mean of the group. By expert-pair: the
    tokens that each rank sends to the experts of each, and how long they travel, the slowest pair first. By ring: how
    much of the sends and receives of ring attention (context parallelism) compute hides, by rank and step. By stream:
    how much work waits on each device stream, how late it starts after its launch, and how much of it is short. By
    unknown-work: the operators and kernels whose operations or bytes are not known, and why they are not. By file: the
    file system calls of an I/O log (DFTracer), with bytes and bandwidth, the longest first.
    """
    with executor.open([source.run]) as opened:
        from tracekit.analysis.compute import unknown_work
        from tracekit.report import summary_tables

        facts, rows_of = _measurements(by)
        run = source.measure(facts, opened)
        rows = rows_of(run)
        missing = unknown_work.note(run) if by is By.STEP else None
    table.write(summary_tables, rows)
    if missing:
        output.notify(missing)


def _measurements(by: By) -> "tuple[Sequence[Fact], Callable[[Run], pl.DataFrame]]":
    """Return the facts that a table needs, and the function that makes it of the run."""
    from tracekit.analysis.communication import collective_instances
    from tracekit.analysis.compute import collective_contention, contention, device_counters, efficiency, unknown_work
    from tracekit.analysis.host import io_calls, launch_queues
    from tracekit.analysis.parallelism import (
        axis_communication,
        expert_load,
        expert_pairs,
        pipeline_bubbles,
        ring_overlap,
    )
    from tracekit.analysis.time import breakdown
    from tracekit.analysis.time import summary as analysis
    from tracekit.sync import collective_matching

    facts: dict[By, Sequence[Fact]] = {
        By.COLLECTIVE: [collective_matching.calls],
        By.CLOCK: [collective_matching.calls],
        By.STEP: [breakdown.by_step, efficiency.by_step, device_counters.device_counters, *unknown_work.FACTS],
        By.CONTENTION: [collective_matching.calls, contention.by_step, collective_contention.calls],
        By.STAGE: [*pipeline_bubbles.FACTS],
        By.AXIS: [*axis_communication.FACTS],
        By.EXPERT: [*expert_load.FACTS],
        By.EXPERT_PAIR: [*expert_load.FACTS],
        By.RING: [*axis_communication.FACTS],
        By.STREAM: [launch_queues.launch_queues],
        By.UNKNOWN_WORK: [*unknown_work.FACTS],
        By.FILE: [io_calls.calls],
    }
    tables = {
        By.RANK: analysis.by_rank,
        By.STEP: efficiency.breakdown_by_step,
        By.COLLECTIVE: collective_instances.by_collective,
        By.CLOCK: analysis.by_clock,
        By.CONTENTION: collective_contention.all_pairs,
        By.STAGE: pipeline_bubbles.by_stage,
        By.AXIS: axis_communication.by_axis,
        By.EXPERT: expert_load.by_rank,
        By.EXPERT_PAIR: expert_pairs.by_pair,
        By.RING: lambda run: run.run_table(ring_overlap.ring_overlap),
        By.STREAM: launch_queues.by_stream,
        By.UNKNOWN_WORK: unknown_work.by_operator,
        By.FILE: io_calls.by_file,
    }
    return facts.get(by, [breakdown.by_rank, breakdown.by_step]), tables[by]
