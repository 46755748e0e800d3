"""The pictures of communication in a report: what is hidden, why nothing computes, and who waits for whom."""

from collections.abc import Iterator

import polars as pl

from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.compute import stall_attribution
from tracekit.analysis.parallelism import rank_timelines
from tracekit.model.run import Run
from tracekit.report import charts
from tracekit.report.memory_figures import ReportFigure


def of_run(run: Run) -> Iterator[ReportFigure]:
    """Yield how much communication is hidden, why nothing computes, who waits for whom; nothing where none is known."""
    by_rank = run.run_table(exposed_communication.by_rank)
    if int(by_rank["communication_ns"].sum()):
        told = "Communication in steps: beside compute, moving while nothing computes, or waiting for a rank."
        yield ReportFigure(
            "communication", "How much communication is hidden", told, charts.communication_parts(by_rank)
        )
    idle = run.run_table(stall_attribution.idle_by_rank)
    if idle.height:
        told = "Time in steps in which nothing computes, split by cause: the parts of a bar sum to it, exactly."
        yield ReportFigure("standing", "Why nothing computes", told, charts.stall_causes(idle))
    waited = run.run_table(rank_timelines.wait_times)
    if waited.filter(pl.col("peer_rank").is_not_null()).height and len(run.ranks) <= _MOST_RANKS:
        told = "Time in which a rank computes nothing and waits in a collective for a rank that has not come."
        yield ReportFigure("waits", "Who waits for whom", told, charts.wait_matrix(waited, run.ranks))


_MOST_RANKS = 64
