"""Stalls and waits summed by cause: against the gaps themselves, and as charts."""

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces, rule_examples
from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.parallelism import rank_timelines
from tracekit.analysis.time import launched_work
from tracekit.report import charts, figures

UNIT = drawn_hosts.UNIT_NS
MEETING = rule_examples.straggler_run(0, 3)


def by(table: pl.DataFrame, *names: str) -> list[tuple[object, ...]]:
    return table.select(names).rows()


def test_the_causes_of_a_ranks_gaps_sum_to_the_gaps():
    for run in (MEETING, rule_examples.give_way_run(rule_examples.GIVE_WAY)):
        sums = run.table(compute_gap_causes.stalls_by_rank).group_by("rank", "gap_kind").agg(pl.col("dur_ns").sum())
        totals = {(rank, of): ns for rank, of, ns in sums.iter_rows()}
        for trace in run.traces():
            idle, quiet = launched_work.compute_gaps(trace), launched_work.communication_gaps(trace)
            assert totals[trace.rank, compute_gap_causes.COMPUTE] == idle["dur_ns"].sum() > 0
            assert totals.get((trace.rank, compute_gap_causes.COMMUNICATION), 0) == quiet["dur_ns"].sum()


def test_idle_compute_counts_for_the_late_rank_until_it_arrives_then_for_the_collective():
    # rank 0   a a x x x x x .      x waits 3 for rank 1, then moves for 2; twelve times
    # rank 1   a a a a a x x .
    rows = MEETING.table(compute_gap_causes.stalls_by_rank).filter(pl.col("gap_kind") == compute_gap_causes.COMPUTE)
    peer = rows.filter(pl.col("cause") == "peer")
    assert by(peer, "rank", "dur_ns") == [(0, 12 * 3 * UNIT)]
    moves = rows.filter(pl.col("cause") == "collective")
    assert by(moves, "rank", "dur_ns") == [(0, 12 * 2 * UNIT), (1, 12 * 2 * UNIT)]


def test_idle_by_rank_equals_the_compute_part_of_by_rank():
    whole = MEETING.table(compute_gap_causes.stalls_by_rank).filter(pl.col("gap_kind") == compute_gap_causes.COMPUTE)
    assert MEETING.table(compute_gap_causes.idle_by_rank).drop("pieces").equals(whole.drop("pieces"))


def test_the_report_has_communication_charts_only_with_communication():
    def drawn(run):
        return [name for name in ("communication", "idle_causes", "waits") if figures.FIGURES[name](run)]

    assert drawn(MEETING) == ["communication", "idle_causes", "waits"]
    assert drawn(drawn_traces.run(drawn_traces.trace(rule_examples.EXPOSED))) == ["communication", "idle_causes"]
    assert drawn(drawn_traces.run(drawn_traces.trace("step 0\ncompute a"))) == []


def test_the_bar_of_causes_is_as_long_as_the_gaps_with_a_colour_per_cause():
    rows = MEETING.table(compute_gap_causes.stalls_by_rank).filter(pl.col("gap_kind") == compute_gap_causes.COMPUTE)
    figure = charts.stall_causes(rows)
    label, colour = charts.CAUSES["peer"]
    waits = next(bar for bar in figure.data if bar.name == label)
    assert waits.marker.color == colour == charts.COLOURS["waiting"]
    assert list(waits.x) == pytest.approx([36 * UNIT / 1e6, 0])
    of_first = sum(bar.x[0] for bar in figure.data)
    assert of_first == pytest.approx(rows.filter(pl.col("rank") == 0)["dur_ns"].sum() / 1e6)


def test_the_wait_matrix_shows_how_long_each_rank_waited_for_each_other():
    waited = MEETING.table(rank_timelines.wait_times)
    assert by(waited, "rank", "peer_rank", "waited_ns") == [(0, 1, 36 * UNIT)]
    cells = charts.wait_matrix(waited, [0, 1]).data[0]
    assert [list(line) for line in cells.z] == [[pytest.approx(36 * UNIT / 1e6)], [None]]
    assert cells.customdata[0][0] == "rank 0 waits 1.8 ms for rank 1"


def test_the_wait_matrix_has_a_column_for_unknown_late_ranks():
    waited = pl.DataFrame(
        {"rank": [0], "peer_rank": [None], "waited_ns": [5]}, schema_overrides={"peer_rank": pl.Int64}
    )
    figure = charts.wait_matrix(waited, [0, 1])
    assert figure.layout.xaxis.ticktext == ("for unknown rank",)
    assert figure.data[0].z[0][0] == pytest.approx(0.005)  # in µs


def test_communication_is_split_into_hidden_transfer_and_waiting():
    # compute  a a a a a a . . . .
    # comm     . . . . . x x x x .      hidden 1, moving 3
    table = drawn_traces.run(drawn_traces.trace(rule_examples.EXPOSED)).table(exposed_communication.by_rank)
    assert by(table, "communication_ns", "hidden_ns", "exposed_ns", "waited_ns") == [(4, 1, 3, 0)]
    late_run = MEETING.table(exposed_communication.by_rank)
    parts = pl.sum_horizontal("hidden_ns", "exposed_ns", "waited_ns")
    assert late_run.select(parts - pl.col("communication_ns")).to_series().to_list() == [0, 0]
    assert late_run["waited_ns"].to_list() == [36 * UNIT, 0]
    bars = charts.communication_parts(late_run).data
    assert [bar.x[0] for bar in bars] == pytest.approx([0, 24 * UNIT / 1e6, 36 * UNIT / 1e6])


def test_each_rank_is_compared_with_the_median_rank_of_the_step():
    # step 0 takes 6 on rank 0 and 4 on rank 1: the median is 5
    first = drawn_traces.trace("step 0000001111\ncompute aaaa..bbbb", rank=0)
    table = drawn_traces.run(first, drawn_traces.trace("step 0000111111\ncompute aaaabbbbbb", rank=1)).table(
        exposed_communication.spread
    )
    assert by(table, "step", "rank", "duration_ns", "median_ns", "longer_ratio") == [
        (0, 0, 6, 5, pytest.approx(0.2)),
        (0, 1, 4, 5, pytest.approx(-0.2)),
        (1, 0, 4, 5, pytest.approx(-0.2)),
        (1, 1, 6, 5, pytest.approx(0.2)),
    ]


def test_the_heatmap_has_a_labelled_cell_per_rank_and_step():
    table = MEETING.table(exposed_communication.spread)
    bars = charts.step_heatmap(table, "waited_ratio").data[0]
    assert [tuple(cell[:2]) for cell in bars.customdata] == by(table, "rank", "step")
    assert list(bars.marker.color) == table["waited_ratio"].to_list()
    assert bars.y[0] == 0
    assert bars.base[0] == pytest.approx(-0.48)


def test_of_a_thousand_ranks_a_cell_shows_the_slowest_of_its_neighbours():
    rows = [
        {"window": 0, "step": step, "rank": rank, "start_ns": 0, "duration_ns": 10, "median_ns": 10}
        | {"longer_ratio": {700: 0.5, 701: -0.9}.get(rank, 0.0), "exposed_ratio": 0.0, "waited_ratio": 0.0}
        for step in range(100)
        for rank in range(1000)
    ]
    bars = charts.step_heatmap(pl.DataFrame(rows)).data[0]
    assert len(bars.x) <= 4000
    slow = [cell for cell, value in zip(bars.customdata, bars.marker.color, strict=True) if value == 0.5]
    assert [cell[:2] for cell in slow] == [[700, step] for step in range(0, 100, 2)]
    assert "<b>rank 700, step 0</b>" in slow[0][2]
    assert slow[0][2].endswith("highest of ranks 688–703, steps 0–1")
    assert {value for value in bars.marker.color if value != 0.5} == {0.0}


def test_of_a_thousand_ranks_one_that_others_lose_time_to_has_a_row_of_its_own_at_the_top():
    rows = [
        {"window": 0, "step": step, "rank": rank, "duration_ns": 10, "median_ns": 10, "longer_ratio": 0.0}
        | {"exposed_ratio": 0.0, "waited_ratio": 0.0, "lost_ns": int(rank == 617), "lost_ratio": 0.1 * (rank == 617)}
        for step in range(2)
        for rank in range(1000)
    ]
    for measure in charts.measures(pl.DataFrame(rows)):
        figure = charts.step_heatmap(pl.DataFrame(rows), measure)
        (bars,) = figure.data
        top = [cell for cell, row in zip(bars.customdata, bars.y, strict=True) if row == 0]
        assert [cell[:2] for cell in top] == [[617, 0], [617, 1]]
        assert "highest of" not in top[0][2]
        assert len(set(bars.y)) <= 64
        assert figure.layout.yaxis.ticktext[0] == "617"


def test_a_collective_whose_peers_are_not_known_transfers_for_its_whole_duration():
    calls = pl.DataFrame({"start_ns": [5, 20], "dur_ns": [3, 10], "waited_ns": [None, 4]})
    assert exposed_communication.transfer_spans(calls).tolist() == [[5, 8], [24, 30]]
