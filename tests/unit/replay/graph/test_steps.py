"""Steps with and without a cause, added up by rank; and the figures of them."""

import polars as pl
import pytest

from tracekit.replay.graph import savings
from tracekit.replay.graph.causes import device_time
from tracekit.report import charts
from tracekit.report import what_if as what_if_report

MS = 1_000_000


def _steps(*rows):
    """Return steps of window 0: rank, step, device, then ms as recorded, replayed, and replayed without the cause."""
    cells = [
        (0, rank, step, device, *(ms * MS for ms in (*times, times[1] - times[2])))
        for rank, step, device, *times in rows
    ]
    return pl.DataFrame(cells, schema=savings.STEP_COLUMNS, orient="row")


def test_the_step_time_of_a_rank_is_the_mean_over_its_steps_on_its_slowest_device():
    table = _steps((0, 1, 0, 10, 10, 8), (0, 2, 0, 14, 12, 8), (1, 1, 0, 9, 9, 9), (1, 1, 1, 20, 20, 5))
    assert savings.step_times_by_rank(table).rows() == [
        (0, 12 * MS, 11 * MS, 8 * MS, 3 * MS),
        (1, 20 * MS, 20 * MS, 9 * MS, 11 * MS),
    ]


def test_the_largest_error_of_a_step_is_found_where_errors_cancel_in_the_sum():
    table = _steps((0, 1, 0, 10, 12, 8), (0, 2, 0, 10, 8, 8))
    assert savings.worst_error_ratio(table) == pytest.approx(0.2)
    assert savings.worst_error_ratio(table.clear()) == 0


@pytest.mark.parametrize(
    ("peers_ms", "late_ms"),
    [
        # All show a delay of 4 ms a step in the second step: they were ahead in the first.
        (((0, 8), (0, 8), (0, 8)), (0, 8)),
        # Some show it in the first step, others in the second: the medians of the steps, 0 and 2 ms, are not all of it.
        (((0, 8), (0, 8), (0, 2), (8, 0), (8, 0)), (3, 5)),
    ],
)
def test_late_ranks_are_as_much_faster_as_the_others_over_the_window_too(peers_ms, late_ms):
    peers = [(rank, step, 0, 20, 20, 20 - ms) for rank, row in enumerate(peers_ms, 1) for step, ms in enumerate(row)]
    own = [(0, step, 0, 20, 20, 20) for step in (0, 1)]
    late = device_time.with_late_ranks(_steps(*own, *peers), (0,)).filter(rank=0).sort("step")
    assert late["saved_ns"].to_list() == [ms * MS for ms in late_ms]
    assert late["without_ns"].to_list() == [(20 - ms) * MS for ms in late_ms]


def test_savings_are_drawn_in_table_order_and_paler_where_less_certain():
    rows = [
        {"cause": "late-gathers", "code": "COMM001", "saved_ns": 3 * MS, "saved_ratio": 0.3, "confidence": 0.5},
        {"cause": "straggler", "code": "RANK001", "saved_ns": 2 * MS, "saved_ratio": 0.2, "confidence": 1.0},
        {"cause": "communication", "code": "COMM001", "saved_ns": MS, "saved_ratio": 0.1, "confidence": 1.0},
    ]
    empty = {"without_ns": 0, "gpu_hours_per_day": None, "money_per_day": None}
    texts = {"summary": "", "basis": "", "caveat": "<b>"}
    figure = charts.potential_savings(
        pl.DataFrame([row | empty | texts for row in rows], schema=what_if_report.COLUMNS)
    )
    assert figure.layout.yaxis.ticktext == ("late-gathers", "straggler", "communication")
    first, second = figure.data
    assert first.width == second.width
    drawn = [list(values) for values in (first.y, first.x, second.y, second.x)]
    assert drawn == [[0, 2], [3, 1], [1], [2]]
    assert first.marker.opacity[0] < first.marker.opacity[1]
    assert first.text[0] == "3 ms · 30.0%"
    assert "&lt;b&gt;" in first.customdata[0][0]


def test_remaining_and_saved_time_sum_to_the_replayed_step():
    figure = charts.savings_by_rank(
        savings.step_times_by_rank(_steps((0, 1, 0, 10, 10, 8), (1, 1, 0, 9, 9, 10))), "communication"
    )
    left, saved = figure.data
    assert [a + b for a, b in zip(left.x, saved.x, strict=True)] == [10, 9]
    assert figure.layout.yaxis.ticktext == ("rank 0", "rank 1")
