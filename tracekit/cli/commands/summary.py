"""``tracekit summary``: where the time goes, in one table."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from tracekit.cli import output
from tracekit.cli.options import DocumentOptions, ExecutorOptions, RunOptions, expand_options

if TYPE_CHECKING:
    import polars as pl

    from tracekit.model.run import Run
    from tracekit.model.trace import TraceFact

    View: TypeAlias = tuple[Sequence[TraceFact], Callable[[Run], pl.DataFrame]]


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
    ROLE = "role"
    PLACE = "place"


@expand_options
def summary(
    *,
    by: Annotated[By, typer.Option(help="What a row stands for: see above.")] = By.RANK,
    source: RunOptions,
    executor: ExecutorOptions,
    table: DocumentOptions,
) -> None:
    """Show where the time goes: compute, communication, copies, their overlap and exposed parts, idle time.

    compute + exposed communication + exposed copy + idle = duration, exactly. --by chooses what a row shows:

    \b
    rank          one rank, from its first to its last activity
    step          one step of a rank, also: FLOPs and their share of the peak
                  (MFU, HFU), how much work they are known for, GPU counters
    collective    the wait of each rank for the last arrival, how often it
                  arrived last, and the transfer rate after that
    clock         the offset of a rank's clock and its error; smaller differences
                  between ranks are not significant
    contention    the slowdown of one kind of work while another kind runs
                  concurrently, with a 95% confidence interval
    stage         the bubble of a pipeline stage in a step, that of the schedule
                  without communication, and its causes
    axis          the communication of a rank along an axis of the mesh (pp, dp,
                  tp, …), and its exposed part
    expert        the tokens of a rank's experts, relative to the group's mean
    expert-pair   the tokens that one rank sends to the experts of another, and
                  the time of the transfer, the slowest pair first
    ring          the sends and receives of ring attention (context parallelism)
                  that compute hides
    stream        the work that is queued on a device stream, how late it starts
                  after its launch, and how much of it is short
    unknown-work  operators and kernels of unknown FLOPs or bytes, and why
    file          the calls, bytes and bandwidth of a file in an I/O log
                  (DFTracer), the longest first
    role          two roles of a job (trainer, rollout): how long the one is idle
                  while the other works
    place         a place of a rank that record --perturb delayed: how much of the
                  delay the job loses, by measurement and by the replay
    """  # noqa: D301 click keeps the lines of a paragraph after \b
    with executor.open([source.run]) as opened:
        from tracekit.report import summary_tables

        facts, rows_of = view(by)
        run = source.measure(facts, opened)
        rows = rows_of(run)
        missing = _MISSING[by](run) if by in _MISSING else None
    table.write_document(summary_tables.document(rows))
    if missing:
        output.notify(missing)


def _missing_compute(run: "Run") -> str | None:
    from tracekit.analysis.time import log_contents

    if log_contents.has_collectives_only(run):
        return "compute was not recorded: idle is all time outside collectives"
    if log_contents.has_spans_only(run):
        return "the log has spans of the host: compute is time in forward, backward and the optimizer"
    return None


def view(by: By) -> "View":
    """The facts that a table needs, and the function that makes it of the run."""
    return _VIEWS[by]()


def _missing_work(run: "Run") -> str | None:
    from tracekit.analysis.compute import efficiency

    return efficiency.note(run)


# Each imports only what it measures with.


def _by_rank() -> "View":
    from tracekit.analysis.time import breakdown, log_contents

    return [breakdown.by_rank, breakdown.by_step, log_contents.reading_issues], breakdown.slowest_device_in_steps


def _by_step() -> "View":
    from tracekit.analysis.compute import device_counters, efficiency
    from tracekit.analysis.time import breakdown

    facts: list[TraceFact] = [breakdown.by_step, efficiency.by_step, device_counters.device_counters]
    return [*facts, *efficiency.FACTS], efficiency.breakdown_by_step


def _by_collective() -> "View":
    from tracekit.analysis.communication import collective_instances
    from tracekit.sync import collective_matching

    return [collective_matching.calls], collective_instances.by_collective


def _by_clock() -> "View":
    from tracekit.analysis.time import breakdown
    from tracekit.sync import collective_matching

    return [collective_matching.calls], breakdown.by_clock


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
    from tracekit.analysis.parallelism import expert_load

    return expert_load.FACTS, expert_load.by_pair


def _by_ring() -> "View":
    from tracekit.analysis.parallelism import axis_communication

    return axis_communication.FACTS, lambda run: run.table(axis_communication.ring_overlap)


def _by_stream() -> "View":
    from tracekit.analysis.host import launch_delay

    return [launch_delay.launch_queues], launch_delay.by_stream


def _by_unknown_work() -> "View":
    from tracekit.analysis.compute import efficiency

    return efficiency.FACTS, efficiency.by_operator


def _by_file() -> "View":
    from tracekit.analysis.host import host_stalls

    return [host_stalls.io_calls], host_stalls.io_by_file


def _by_role() -> "View":
    from tracekit.analysis.parallelism import role_waits

    return role_waits.FACTS, lambda run: run.table(role_waits.role_waits)


def _by_place() -> "View":
    from tracekit.replay.graph import sensitivity

    return sensitivity.FACTS, lambda run: run.table(sensitivity.sensitivity)


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
    By.ROLE: _by_role,
    By.PLACE: _by_place,
}
_MISSING: dict[By, Callable[["Run"], str | None]] = {By.RANK: _missing_compute, By.STEP: _missing_work}
"""What a table leaves out, by table; None where that is nothing."""
