"""Contention summed by phase, its costliest calls, and the charts; kernels and ops as bars."""

import json

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces, rule_examples
from tests.unit.report.test_charts import HOSTILE
from tracekit.analysis.compute import collective_contention, contention, kernels
from tracekit.analysis.host import ops
from tracekit.report import charts

UNIT = drawn_hosts.UNIT_NS
# p takes 2 alone, 6 during a.
GIVING_WAY = rule_examples.give_way_run(rule_examples.GIVE_WAY)


def test_the_costliest_call_has_the_largest_excess_over_its_solo_duration():
    row = (
        GIVING_WAY.table(collective_contention.costliest_calls)
        .filter(pl.col("kind") == "preparation")
        .row(0, named=True)
    )
    assert (row["name"], row["concurrent_kind"], row["rank"], row["start_ns"]) == ("p", "compute", 0, 0)
    assert (row["dur_ns"], row["alone_ns"], row["lost_ns"]) == (6 * UNIT, 2 * UNIT, 4 * UNIT)


def test_overlapped_time_is_summed_by_phase_and_pair():
    # compute  a a a a a a a a .        overlaps p for 6 and x for 2
    # comm     p p p p p p x x x
    rows = GIVING_WAY.table(collective_contention.contention_by_phase)
    together = {
        (kind, concurrent_kind): ns
        for kind, concurrent_kind, ns in rows.select("kind", "concurrent_kind", "overlapped_ns").iter_rows()
    }
    assert together["compute", "preparation"] == together["preparation", "compute"] == 6 * UNIT
    assert together["compute", "communication"] == 2 * UNIT
    bars = {bar.name: bar for bar in charts.concurrent_time(rows).data}
    assert list(bars["during preparation"].x) == pytest.approx([6 * UNIT / 1e3])  # the axis has µs
    assert list(bars["during communication"].x) == pytest.approx([2 * UNIT / 1e3])
    assert bars["during communication"].marker.color == charts.COLOURS["communication"]


def test_preparation_is_drawn_at_its_actual_over_its_solo_duration():
    figure = charts.delayed_preparation(GIVING_WAY.table(contention.preparation))
    points = {trace.name: list(zip(trace.x, trace.y, strict=True)) for trace in figure.data}
    assert points["during compute"] == [(2 * UNIT, 6 * UNIT)]
    assert points["alone"] == [(2 * UNIT, 2 * UNIT)]


def test_slowdown_chart_has_a_mark_with_interval_per_rank_and_a_line_at_one():
    pairs = pl.DataFrame(
        [
            (0, 0, "compute", "communication", 10, 10, 2, 1.25, 1.2, 1.3, None, None),
            (1, 0, "compute", "communication", 10, 10, 0, 1.0, None, None, None, None),
            (0, 0, "copy", "compute", 10, 0, 0, None, None, None, "no sample alone", "…"),
        ],
        schema=contention.PAIR_COLUMNS,
        orient="row",
    )
    figure = charts.slowdowns(pairs)
    marks = figure.data[0]
    assert figure.layout.yaxis.ticktext == ("compute during communication",)
    assert list(marks.x) == [1.25, 1.0]
    assert list(marks.error_x.array) == pytest.approx([0.05, 0])
    assert list(marks.error_x.arrayminus) == pytest.approx([0.05, 0])
    assert figure.layout.shapes[0].x0 == 1
    low, high = figure.layout.xaxis.range
    assert 0.9 < low < 1 < 1.3 < high < 1.4
    assert not charts.slowdowns(GIVING_WAY.table(collective_contention.all_pairs).clear()).data


def test_launch_delay_starts_at_the_end_of_the_launching_call():
    # launches   a b
    # compute    . . . a a a b b
    trace = drawn_hosts.trace("step 00000000\ncompute ...aaabb", {"a": 0, "b": 1})
    table = kernels.launch_delays(drawn_traces.run(trace))
    assert table.select("name", "launched", "delay_p50_ns", "delay_p95_ns").rows() == [
        ("a", 1, 3 * UNIT, 3 * UNIT),
        ("b", 1, 5 * UNIT, 5 * UNIT),
    ]
    assert kernels.launch_delays(drawn_traces.run(drawn_hosts.trace("compute aaa", on_device=False))).is_empty()


def test_the_longest_kernel_is_drawn_first_in_the_colour_of_its_kind_and_as_text():
    picture = "compute aabbbb..\ncomm ......xx"
    trace = drawn_traces.trace(picture, columns={"b": {"name": HOSTILE}}, scale_ns=1_000_000)
    figure = charts.top_bars(kernels.kernels(drawn_traces.run(trace)), ["name"], max_rows=2)
    compute = next(bar for bar in figure.data if bar.name == "compute")
    assert list(compute.y) == [0, 1]
    assert list(compute.x) == [4, 2]
    assert compute.marker.color == charts.COLOURS["compute"]
    assert len(figure.data) == 1
    text = json.dumps(figure.to_dict(), ensure_ascii=False, default=str)
    assert "&lt;" in text
    assert "<script" not in text


def test_rows_with_several_keys_are_labelled_with_all_of_them():
    trace = drawn_traces.trace("compute aabb", columns={"a": {"phase": "forward", "unit": ""}})
    figure = charts.top_bars(
        kernels.kernels(drawn_traces.run(trace), ["name", "unit", "phase"]), ["name", "unit", "phase"]
    )
    assert figure.layout.yaxis.ticktext == ("a · root · forward", "b · unknown · unknown")


def test_ops_are_drawn_by_self_time():
    trace = drawn_hosts.trace("compute aaaa", doing=(("aten::mm", "cpu_op", 0, 3), ("aten::t", "cpu_op", 4, 5)))
    figure = charts.top_bars(ops.ops(drawn_traces.run(trace)), ["name"], measure="self_ns")
    assert list(figure.layout.yaxis.ticktext) == ["aten::mm", "aten::t"]
    assert list(figure.data[0].x) == pytest.approx([3 * UNIT / 1e3, UNIT / 1e3])


def test_predicted_bars_differ_from_recorded_ones_and_allocated_memory_is_marked():
    figure = charts.reserved_memory(
        {"recorded": (3 << 30, False), "predicted": (2 << 30, True)}, peak_allocated_bytes=1 << 30
    )
    assert list(figure.data[0].x) == [3, 2]
    assert figure.data[0].marker.pattern.shape == ("", "/")
    assert figure.layout.shapes[0].x0 == 1


def test_of_many_ranks_the_smallest_the_largest_and_some_between_are_drawn():
    row = {"device": 0, "kind": "compute", "concurrent_kind": "communication", "overlapped_ns": 5, "lost_ns": 1}
    row |= {"low": None, "high": None}
    pairs = pl.DataFrame([row | {"rank": rank, "slowdown": 1 + rank / 1000} for rank in range(1000)])
    (markers,) = charts.slowdowns(pairs).data
    assert len(markers.x) == charts.MAX_SLOWED_RANKS
    assert (markers.x[0], markers.x[-1]) == (1.0, 1.999)
    assert 1.49 < markers.x[len(markers.x) // 2] < 1.52
    (few,) = charts.slowdowns(pairs.head(charts.MAX_SLOWED_RANKS)).data
    assert len(few.x) == charts.MAX_SLOWED_RANKS
