"""Clocks of ranks that only send to each other: drawn messages with a known offset, and a recorded pipeline."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import drawn_traces
from tracekit.analysis.communication import collective_instances
from tracekit.ingest.loader import load
from tracekit.model.trace import Trace
from tracekit.sync import clock_groups, collective_matching

MS = 1_000_000
SAMPLES = Path(__file__).parents[3] / "sample_traces" / "parallelism"


def messages(*rows: tuple[int, int, int, int], behind: dict[int, int] | None = None, step: int = 0) -> pl.DataFrame:
    """Return both calls of each message (sender, receiver, sent, received); a clock is `behind` the true time."""
    behind, sides = behind or {}, []
    for sender, receiver, sent_ns, received_ns in rows:
        for rank in (sender, receiver):
            early = behind.get(rank, 0)
            pair = {"rank": rank, "members": f"{sender}>{receiver}", "step": step, "bytes": 64}
            sides.append(pair | {"start_ns": sent_ns - early, "end_ns": received_ns - early})
    return pl.DataFrame(sides)


def both_ways(*delays: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """Return messages of ranks 0 and 1 in turn, with the delay there and back of each."""
    there = [(0, 1, at * 100, at * 100 + delay) for at, (delay, _) in enumerate(delays)]
    return there + [(1, 0, at * 100 + 50, at * 100 + 50 + delay) for at, (_, delay) in enumerate(delays)]


def test_the_quickest_messages_of_both_directions_bound_the_offset():
    # Quickest there 4 ns, quickest back 10 ns: the offset lies within 10 ns below and 4 ns above the truth, 5000.
    rows = messages(*both_ways((4, 30), (9, 10), (7, 12)), behind={1: 5000})
    assert clock_groups.links(rows) == [clock_groups.Link(0, 1, -5003, 7)]


@pytest.mark.parametrize(
    "rows",
    [
        messages((0, 1, 0, 5), (0, 1, 10, 15), (0, 1, 20, 25), (0, 1, 30, 35)),
        messages(*both_ways((4, 4), (4, 4))),
        messages(*both_ways((4, -9), (4, 4), (4, 4))),
        messages(*both_ways((4, 4), (4, 4), (4, 4)))[1:],
    ],
    ids=["one direction", "too few", "received before it was sent", "a send is missing"],
)
def test_clocks_are_not_linked_without_evidence_of_both_directions(rows):
    assert clock_groups.links(rows) == []


def test_a_step_in_which_a_message_is_missing_is_left_out():
    whole = messages(*both_ways((4, 10), (9, 10), (7, 12)), step=1)
    cut = messages(*both_ways((1, 1), (1, 1), (1, 1)), step=2)[1:]
    back = cut.filter(pl.col("members") == "1>0")
    assert clock_groups.links(pl.concat([whole, cut])) == clock_groups.links(pl.concat([whole, back]))


@settings(deadline=None, max_examples=60)
@given(
    behind=st.integers(-(10**15), 10**15),
    delays=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=3, max_size=20),
)
def test_the_true_offset_is_within_the_error(behind, delays):
    (link,) = clock_groups.links(messages(*both_ways(*delays), behind={1: behind}))
    assert abs(link.offset_ns - -behind) <= link.error_ns
    assert link.error_ns <= max(max(pair) for pair in delays)


# Recorded ------------------------------------------------------------------------------------------------------------


def moved(trace: Trace, by_ns: int) -> Trace:
    """Return the trace as a clock that is ahead by `by_ns` would have recorded it."""
    tables = {
        name: getattr(trace, name).with_columns(pl.col("start_ns") + by_ns) for name in ("activities", "ops", "steps")
    }
    return trace.replace(**tables)


@pytest.mark.parametrize("name", ["pipeline-1f1b", "pipeline-interleaved", "pipeline-slow-stage"])
def test_a_recorded_pipeline_is_aligned_whatever_its_clocks_show(name):
    run, ahead = load(SAMPLES / name), {0: 0, 1: 40 * MS, 2: -7 * MS, 3: 3600_000 * MS}
    skewed = drawn_traces.run(*(moved(trace, ahead[trace.rank]) for trace in run.traces()), **run.manifest)
    found = skewed.offsets
    assert found["residual_ns"].null_count() == 0
    # The ranks ran on one machine, so their clocks agreed.
    wrong_ns = (pl.col("offset_ns") + pl.col("rank").replace_strict(ahead)).alias("wrong_ns")
    found = found.with_columns(wrong_ns)
    assert found.filter(pl.col("wrong_ns").abs() > pl.col("residual_ns").max()).is_empty()
    assert found["residual_ns"].max() < 10 * MS


def test_sends_of_a_pipeline_with_data_parallelism_are_matched_within_the_pipelines_groups():
    run = load(SAMPLES / "pipeline-interleaved")
    calls = run.table(collective_matching.matched_calls).filter(pl.col("op") == collective_matching.PAIRED)
    assert sorted(calls["members"].unique()) == ["0>2", "1>3", "2>0", "3>1"]
    assert calls.group_by("instance").len()["len"].unique().to_list() == [2]
    waits = run.table(collective_instances.waits).filter(pl.col("op") == collective_matching.PAIRED)
    assert waits.height == calls.height
    assert run.data_quality.filter(pl.col("kind") == "clock_unaligned").is_empty()
