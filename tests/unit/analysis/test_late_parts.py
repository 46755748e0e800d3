"""In which parts of a window most of the waiting is for one rank, whatever the ranks' clocks."""

from dataclasses import replace

import polars as pl
import pytest

from tests.support import drawn_traces
from tests.support.rule_examples import all_reduce_run
from tracekit.analysis.parallelism import stragglers

CALLS = 16


def with_clock(run, rank, behind_ns):
    """Return the run with the times of a rank on a clock that is behind."""
    traces = []
    for trace in run.traces():
        moved = {}
        if trace.rank == rank:
            for name in ("activities", "ops", "steps"):
                columns = [column for column in getattr(trace, name).columns if column.endswith(("start_ns", "end_ns"))]
                moved[name] = getattr(trace, name).with_columns(pl.col(columns) - behind_ns)
        traces.append(replace(trace, **moved))
    return drawn_traces.run(*traces)


@pytest.mark.parametrize("behind_ns", [0, 3_600 * 10**9, -(10**18)])
@pytest.mark.parametrize(
    ("late_rank", "led"),
    [
        (lambda call: call % 2, {}),
        (lambda call: call // (CALLS // 2), {0: 2, 1: 2}),
        (lambda call: 1, {1: 4}),
    ],
    ids=["by turns", "one after the other", "one"],
)
def test_parts_follow_each_other_in_time(late_rank, led, behind_ns):
    late = {(late_rank(call), call): 10 for call in range(CALLS)}
    run = with_clock(all_reduce_run(*[2] * CALLS, late=late), rank=1, behind_ns=behind_ns)
    parts = run.table(stragglers.late_parts)
    assert dict(parts.select("late_rank", "led").rows()) == led
