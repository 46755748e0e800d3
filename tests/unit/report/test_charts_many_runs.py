"""Many runs in one figure: every sample is drawn once, in the colour of its group."""

from statistics import median

import pytest

from tracekit.regression.metrics import BYTES, NS, SHARE
from tracekit.report import charts
from tracekit.report.charts import Axis, ChartedRun

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">'
RUNS = [
    ChartedRun("a", "ddp", (10e6, 30e6, 20e6)),
    ChartedRun("b", "ddp", (40e6,)),
    ChartedRun("c", "fsdp2", (5e6, 7e6)),
]
GROUPS = ["ddp", "fsdp2"]


def drawn(figure, axis):
    """The points of the runs on the left (x) or on the right (x2): name -> values."""
    points = {}
    for trace in figure.data:
        if (trace.xaxis or "x") == axis and trace.customdata is not None:
            for value, (name, *_) in zip(trace.y, trace.customdata, strict=True):
                if value is not None:
                    points.setdefault(name, []).append(value)
    return points


def test_each_sample_is_drawn_over_its_step_and_each_median_by_its_group():
    figure = charts.metric_of_runs(RUNS, GROUPS, label="step time", unit=NS)
    assert figure.layout.yaxis.ticksuffix == " ms"
    assert drawn(figure, "x") == {run.name: [value / 1e6 for value in run.values] for run in RUNS}
    assert drawn(figure, "x2") == {"a": [20.0], "b": [40.0], "c": [6.0]}
    bars = [trace for trace in figure.data if trace.xaxis == "x2" and trace.mode == "lines"]
    assert [bar.y[0] for bar in bars] == [median([20.0, 40.0]), 6.0]
    assert list(figure.layout.xaxis2.ticktext) == GROUPS


def test_a_group_keeps_its_colour_where_another_has_no_such_metric():
    figures = [charts.metric_of_runs(runs, GROUPS, label="", unit=NS) for runs in (RUNS, RUNS[2:])]
    colours = [
        {trace.line.color for trace in figure.data if trace.name == "fsdp2" and trace.line.color} for figure in figures
    ]
    assert colours[0] == colours[1]
    assert len(colours[0]) == 1


@pytest.mark.parametrize(("unit", "is_log"), [(NS, True), (BYTES, True), (SHARE, False)])
def test_values_over_orders_of_magnitude_have_a_logarithmic_axis(unit, is_log):
    runs = [ChartedRun("a", "x", (0.001,)), ChartedRun("b", "x", (0.9,))]
    figure = charts.metric_of_runs(runs, ["x"], label="", unit=unit)
    assert (figure.layout.yaxis.type == "log") is is_log


def test_the_rarest_of_many_groups_are_one():
    values = ["often"] * 3 + [str(number) for number in range(20)]
    groups = charts.in_groups(values)
    assert len(set(groups)) == 8
    assert groups[:3] == ["often"] * 3
    assert charts.sorted_values(groups)[-1] == "other values"
    assert charts.in_groups(list("abcdefgh")) == list("abcdefgh")


def test_numbers_come_by_size_and_before_texts():
    assert charts.sorted_values(["16", "2", "fsdp2", "4", "ddp"]) == ["2", "4", "16", "ddp", "fsdp2"]


def test_a_run_crosses_each_axis_of_parallel_coordinates_at_its_value():
    axes = [Axis("batch", ("2", "4", "8")), Axis("step time", ("10e6", "20e6", "30e6"), NS)]
    figure = charts.parallel_coordinates(["a", "b", "c"], ["x", "x", "y"], axes)
    lines = {}
    for trace in figure.data:
        for x, y, (name, _) in zip(trace.x, trace.y, trace.customdata, strict=True):
            if x is not None:
                lines.setdefault(name, []).append((x, y))
    assert lines == {
        "a": [(0, pytest.approx(0.0)), (1, 0.0)],
        "b": [(0, pytest.approx(0.5)), (1, 0.5)],
        "c": [(0, pytest.approx(1.0)), (1, 1.0)],
    }
    labels = {(note.x, note.y): note.text for note in figure.layout.annotations}
    assert labels[0, 0.5] == "4"
    assert (labels[1, 0.0], labels[1, 1.0]) == ("10 ms", "30 ms")


def test_a_run_without_a_value_crosses_below_the_known_ones_and_lines_through_one_value_are_apart():
    figure = charts.parallel_coordinates(
        ["a", "b", "c"], ["x"] * 3, [Axis("tp", ("1", "1", None)), Axis("n", ("1",) * 3)]
    )
    (trace,) = figure.data
    first = [y for x, y in zip(trace.x, trace.y, strict=True) if x == 0]
    assert first[2] < 0 < first[0] < first[1]
    assert "not known" in {note.text for note in figure.layout.annotations}


def test_names_settings_and_groups_are_text():
    runs = [ChartedRun(HOSTILE, HOSTILE, (1e6, 2e6))]
    axes = [Axis(HOSTILE, (HOSTILE,)), Axis("step time", ("1e6",), NS)]
    for figure in (
        charts.metric_of_runs(runs, [HOSTILE], label=HOSTILE, unit=NS),
        charts.parallel_coordinates([HOSTILE], [HOSTILE], axes),
    ):
        shown = figure.to_plotly_json()
        for trace in shown["data"]:
            trace["customdata"] = [row[1:] for row in trace.get("customdata") or ()]  # the name itself is data
        assert "<script" not in str(shown)
        assert "<img" not in str(shown)
