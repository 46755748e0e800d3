"""Displayed times: on the clock of the run, from its beginning, whatever the clock of each trace."""

import polars as pl

from tests.support import drawn_traces
from tests.support.simulated_runs import MS, Job
from tracekit.analysis.time import breakdown
from tracekit.model.run import Run
from tracekit.report import phrases
from tracekit.sync import collective_matching

BEHIND = {0: 0, 1: 3_000 * MS, 2: -40 * MS, 3: 123_456}


def simulated() -> Run:
    job = Job({"world": range(4)}).steps(4, [("world", "all_gather", 4096), ("world", "reduce_scatter", 8192)])
    return drawn_traces.run(*(job.trace(rank, behind_ns=BEHIND[rank]) for rank in job.ranks))


def test_calls_of_one_collective_end_at_the_same_displayed_time() -> None:
    run = simulated()
    calls = run.table(collective_matching.matched_calls).drop_nulls("instance")
    ends = calls.with_columns(start_ns="end_ns")
    assert spread_ns(ends).min() >= MS  # type: ignore[operator]
    shown = spread_ns(phrases.from_run_start(ends, breakdown.run_clock(run)))
    assert len(shown) == 8
    assert shown.max() <= 2 * run.offsets["residual_ns"].max() + 10_000  # type: ignore[operator]


def spread_ns(calls: pl.DataFrame) -> pl.Series:
    """Return how much later the last rank's call is than the first one's, by collective."""
    times = pl.col("start_ns")
    return calls.group_by("instance").agg(spread_ns=times.max() - times.min())["spread_ns"]


def test_the_first_event_of_the_run_is_at_zero_and_none_before() -> None:
    run = simulated()
    starts = run.table(breakdown.extent).select("window", "rank", start_ns="first_ns")
    assert phrases.from_run_start(starts, breakdown.run_clock(run))["start_ns"].min() == 0


def test_a_trace_that_was_not_aligned_counts_from_its_own_beginning() -> None:
    job = Job({"a": [0], "b": [1]}).steps(4, [("a", "all_gather", 4096), ("b", "all_gather", 4096)])
    run = drawn_traces.run(*(job.trace(rank, behind_ns=BEHIND[rank]) for rank in job.ranks))
    starts = run.table(breakdown.extent).select("window", "rank", start_ns="first_ns")
    assert phrases.from_run_start(starts, breakdown.run_clock(run))["start_ns"].to_list() == [0, 0]


def test_all_times_of_a_row_are_on_one_clock_and_durations_stay() -> None:
    run = simulated()
    calls = run.table(collective_matching.matched_calls).with_columns(
        ready_ns=pl.col("start_ns") - 5, dur_ns=pl.col("end_ns") - pl.col("start_ns")
    )
    shown = phrases.from_run_start(calls, breakdown.run_clock(run))
    assert shown.select((pl.col("start_ns") - pl.col("ready_ns") == 5).all()).item()
    assert shown.select((pl.col("end_ns") - pl.col("start_ns") == pl.col("dur_ns")).all()).item()
    assert shown["dur_ns"].equals(calls["dur_ns"])


def test_a_time_of_an_unknown_rank_has_no_place() -> None:
    rows = pl.DataFrame({"rank": [None, 9, 0], "start_ns": [1, 2, 3]}, schema={"rank": pl.Int64, "start_ns": pl.Int64})
    shown = phrases.from_run_start(rows, breakdown.run_clock(simulated()))
    assert shown["start_ns"].is_null().to_list() == [True, True, False]
