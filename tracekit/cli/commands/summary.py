"""``tracekit summary``: where the time goes, in one table."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from tracekit.cli import output
from tracekit.cli.options import ExecutorOptions, RunOptions, TableOptions, expand_options

if TYPE_CHECKING:
    import polars as pl

    from tracekit.model.run import Run
    from tracekit.model.trace import Fact

    View: TypeAlias = tuple[Sequence[Fact], Callable[[Run], pl.DataFrame]]


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
    stage and step of a pipeline, that of the schedule without communication, and its causes. By axis: the
    communication of each rank along each axis of the mesh (pp, dp, tp, …), and its exposed part. By expert: the tokens
    that each rank's experts get in an expert-parallel run, relative to the mean of the group. By expert-pair: the
    tokens that each rank sends to the experts of each, and how long they travel, the slowest pair first. By ring: how
    much of the sends and receives of ring attention (context parallelism) compute hides, by rank and step. By stream:
    how much work waits on each device stream, how late it starts after its launch, and how much of it is short. By
    unknown-work: the operators and kernels whose operations or bytes are not known, and why they are not. By file: the
    file system calls of an I/O log (DFTracer), with bytes and bandwidth, the longest first.
    """
    with executor.open([source.run]) as opened:
        from tracekit.report import summary_tables

        facts, rows_of = _VIEWS[by]()
        run = source.measure(facts, opened)
        rows = rows_of(run)
        missing = _missing_work(run) if by is By.STEP else None
    table.write(summary_tables, rows)
    if missing:
        output.notify(missing)


def _missing_work(run: "Run") -> str | None:
    from tracekit.analysis.compute import unknown_work

    return unknown_work.note(run)


# The facts that a table needs, and the function that makes it of the run. Each imports only what it measures with.


def _by_rank() -> "View":
    from tracekit.analysis.time import breakdown
    from tracekit.analysis.time import summary as analysis

    return [breakdown.by_rank, breakdown.by_step], analysis.by_rank


def _by_step() -> "View":
    from tracekit.analysis.compute import device_counters, efficiency, unknown_work
    from tracekit.analysis.time import breakdown

    facts = [breakdown.by_step, efficiency.by_step, device_counters.device_counters, *unknown_work.FACTS]
    return facts, efficiency.breakdown_by_step


def _by_collective() -> "View":
    from tracekit.analysis.communication import collective_instances
    from tracekit.sync import collective_matching

    return [collective_matching.calls], collective_instances.by_collective


def _by_clock() -> "View":
    from tracekit.analysis.time import summary as analysis
    from tracekit.sync import collective_matching

    return [collective_matching.calls], analysis.by_clock


def _by_contention() -> "View":
    from tracekit.analysis.compute import collective_contention, contention
    from tracekit.sync import collective_matching

    return [collective_matching.calls, contention.by_step, collective_contention.calls], collective_contention.all_pairs


def _by_stage() -> "View":
    from tracekit.analysis.parallelism import pipeline_bubbles

    return pipeline_bubbles.FACTS, pipeline_bubbles.by_stage


def _by_axis() -> "View":
    from tracekit.analysis.parallelism import axis_communication

    return axis_communication.FACTS, axis_communication.by_axis


def _by_expert() -> "View":
    from tracekit.analysis.parallelism import expert_load

    return expert_load.FACTS, expert_load.by_rank


def _by_expert_pair() -> "View":
    from tracekit.analysis.parallelism import expert_load, expert_pairs

    return expert_load.FACTS, expert_pairs.by_pair


def _by_ring() -> "View":
    from tracekit.analysis.parallelism import axis_communication, ring_overlap

    return axis_communication.FACTS, lambda run: run.run_table(ring_overlap.ring_overlap)


def _by_stream() -> "View":
    from tracekit.analysis.host import launch_queues

    return [launch_queues.launch_queues], launch_queues.by_stream


def _by_unknown_work() -> "View":
    from tracekit.analysis.compute import unknown_work

    return unknown_work.FACTS, unknown_work.by_operator


def _by_file() -> "View":
    from tracekit.analysis.host import io_calls

    return [io_calls.calls], io_calls.by_file


_VIEWS: dict[By, Callable[[], "View"]] = {
    By.RANK: _by_rank,
    By.STEP: _by_step,
    By.COLLECTIVE: _by_collective,
    By.CLOCK: _by_clock,
    By.CONTENTION: _by_contention,
    By.STAGE: _by_stage,
    By.AXIS: _by_axis,
    By.EXPERT: _by_expert,
    By.EXPERT_PAIR: _by_expert_pair,
    By.RING: _by_ring,
    By.STREAM: _by_stream,
    By.UNKNOWN_WORK: _by_unknown_work,
    By.FILE: _by_file,
}
