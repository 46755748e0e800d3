import dataclasses
import json
import math

import polars as pl
import pytest

from tests.support import drawn_traces, rule_examples, simulated_history
from tracekit.analysis.checkpoint import saves
from tracekit.analysis.time import breakdown
from tracekit.plan import memory
from tracekit.plan.checkpoint import Layout
from tracekit.regression.history import store, trends
from tracekit.regression.history.entry import history_entry
from tracekit.report import charts
from tracekit.report import json as json_report
from tracekit.report.charts import many_runs

HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">\u202egnp.exe'


@pytest.fixture
def run():
    picture = """
        step     000001111.
        compute  aabb.cc...
        comm     .xxx......
        copy     ......mm..
    """
    return drawn_traces.run(*(drawn_traces.trace(picture, rank=rank, scale_ns=1_000_000) for rank in (0, 1)))


def test_the_parts_of_a_bar_sum_to_the_duration(run):
    summary = run.table(breakdown.by_step)
    figure = charts.breakdown(summary)
    sums = [sum(bar.x[i] for bar in figure.data) for i in range(summary.height)]
    assert sums == pytest.approx((summary["duration_ns"] / 1e6).to_list())


def test_bars_are_labelled_by_what_distinguishes_them(run):
    by_step, by_rank = run.table(breakdown.by_step), run.table(breakdown.by_rank)
    assert charts.breakdown(by_rank).layout.yaxis.ticktext == ("rank 0", "rank 1")
    assert charts.breakdown(by_step).layout.yaxis.ticktext[0] == "rank 0 · step 0"
    assert charts.breakdown(by_step.filter(pl.col("rank") == 0)).layout.yaxis.ticktext == ("step 0", "step 1")


def test_marks_lie_where_the_curves_have_them() -> None:
    lost = {charts.SAVING: [0.2, 0.02], charts.LOST: [0.21, 0.12]}
    figure = charts.lost_time([60, 6000], lost, marks={"best": 600})
    assert list(figure.data[1].y) == pytest.approx([21, 12])
    assert figure.layout.shapes[0].x0 == 10
    assert (figure.layout.annotations[0].x, figure.layout.xaxis.range) == (1, (0, 2))


def test_the_loss_at_the_chosen_interval_is_drawn() -> None:
    lost = {charts.SAVING: [0.02, 0.02, 0.02], charts.LOST: [0.03, 0.02, 0.5]}
    figure = charts.lost_time([60, 600, 6000], lost, marks={"best": 600, "chosen": 6000})
    assert figure.layout.yaxis.range[1] > 50


def test_wide_frames_of_a_flame_graph_have_a_label_that_fits() -> None:
    names = ["aten::convolution_backward_overrideable", "aten::add", "aten::a_name_that_no_narrow_frame_can_hold"]
    ns = [500, 490, 10]
    tree = pl.DataFrame(
        {"node": [0, 1, 2], "parent": [-1, -1, -1], "name": names, "count": [1, 1, 1], "self_ns": ns, "total_ns": ns}
    )
    (drawn,) = charts.icicle(tree, "time").data
    assert drawn.text == ("time", "aten::convolution_backward_overrideable", "aten::add", names[2])
    narrow = tree.with_columns(total_ns=pl.Series([150, 840, 10]))
    (drawn,) = charts.icicle(narrow, "time").data
    assert drawn.text[1] == "aten::convolutio…"
    assert drawn.labels[1] == names[0]


def test_memory_is_stacked_by_what_it_goes_to() -> None:
    plans = {"DDP": memory.plan(2**30, Layout(dp=4)), "FSDP": memory.plan(2**30, Layout(dp=4, zero=3))}
    figure = charts.memory_by_strategy(plans, device_bytes=2**34)
    assert {bar.name: list(bar.x) for bar in figure.data if bar.type == "bar"} == {
        "weights": [2, 0.5],
        "gradients": [2, 0.5],
        "optimizer": [12, 3],
    }
    assert figure.layout.shapes[0].x0 == 16


def test_a_kind_of_work_has_one_colour_in_every_figure(run):
    bars = {bar.name: bar.marker.color for bar in charts.breakdown(run.table(breakdown.by_rank)).data}
    slices = {bar.name: bar.marker.color for bar in charts.timeline(run.trace(0), (0, 9_000_000)).data}
    assert bars["compute"] == slices["compute"]
    assert bars["exposed communication"] == slices["communication"]
    assert bars["exposed copy"] == slices["copy"]


def test_the_timeline_draws_each_slice_where_it_lies(run):
    figure = charts.timeline(run.trace(0), (0, 9_000_000))
    compute = next(bar for bar in figure.data if bar.name == "compute")
    assert list(zip(compute.base, compute.x, strict=True)) == [(0, 2), (2, 2), (5, 2)]
    assert figure.layout.xaxis.range == (0, 9)


def test_the_timeline_clips_slices_to_the_window_and_counts_from_the_origin(run):
    figure = charts.timeline(run.trace(0), (1_000_000, 3_000_000), origin_ns=500_000)
    compute = next(bar for bar in figure.data if bar.name == "compute")
    assert list(zip(compute.base, compute.x, strict=True)) == [(0.5, 1), (1.5, 1)]
    assert figure.layout.xaxis.range == (0.5, 2.5)


def test_evidence_has_a_track_on_top_and_a_band_through_all_lanes(run):
    evidence = pl.DataFrame(
        {"name": ["here", "elsewhere"], "start_ns": [1_000_000, 90_000_000], "dur_ns": [2_000_000, 1]}
    )
    figure = charts.timeline(run.trace(0), (0, 9_000_000), evidence=evidence)
    track = next(bar for bar in figure.data if bar.name == "finding")
    assert (track.base, track.x, track.y) == ((1,), (2,), (0,))
    assert figure.layout.yaxis.ticktext[figure.layout.yaxis.tickvals.index(0)] == "findings"
    assert [(band.x0, band.x1) for band in figure.layout.shapes if band.type == "rect"] == [(1, 3)]


def test_the_timeline_says_when_it_draws_fewer_slices_than_there_are():
    trace = drawn_traces.trace("compute  " + "a." * 4000)
    figure = charts.timeline(trace, (0, 8000), max_slices=500)
    assert sum(len(bar.x) for bar in figure.data) <= 500
    assert "4,000 slices drawn as" in figure.layout.xaxis.title.text
    assert not charts.timeline(trace, (0, 8000)).layout.xaxis.title.text


def test_names_from_a_trace_reach_a_figure_as_text_only():
    trace = drawn_traces.trace(
        "compute  aaaa", columns={"a": {"name": HOSTILE, "unit": HOSTILE, "phase": HOSTILE}}, scale_ns=1_000_000
    )
    evidence = pl.DataFrame({"name": [HOSTILE], "start_ns": [0], "dur_ns": [1_000_000]})
    summary = drawn_traces.run(trace).table(breakdown.by_rank)
    figures = [charts.timeline(trace, (0, 4_000_000), evidence=evidence), charts.comparison({HOSTILE: summary})]
    for figure in figures:
        text = json.dumps(figure.to_dict(), ensure_ascii=False, default=str)
        assert "&lt;" in text
        assert "<script" not in text
        assert "<img" not in text
        assert "\u202e" not in text


def test_step_times_have_a_line_per_rank(run):
    figure = charts.step_times(run.table(breakdown.by_step))
    assert [line.name for line in figure.data] == ["rank 0", "rank 1"]
    assert list(figure.data[0].x) == [0, 1]
    assert list(figure.data[0].y) == [5, 4]


def test_a_comparison_averages_each_run_over_ranks_and_steps(run):
    figure = charts.comparison({"a": run.table(breakdown.by_step), "b": run.table(breakdown.by_step).head(1)})
    assert figure.layout.yaxis.ticktext == ("a", "b")
    assert [sum(bar.x[i] for bar in figure.data) for i in (0, 1)] == pytest.approx([4.5, 5])


def test_no_figure_offers_to_send_itself_to_a_server():
    buttons = [button for group in charts.CONFIG["modeBarButtons"] for button in group]
    assert not [button for button in buttons if "cloud" in button.lower() or "send" in button.lower()]


def saved_run():
    stages = {"plan": 5, "write": 60, "fsync": 10, "wait": 25, "total": 100}
    columns = {"write": {"bytes": 7 * 10**6}, "total": {"bytes": 7 * 10**6}}
    return rule_examples.save_run(stages, stages, columns=columns, every={"checkpoint": HOSTILE})


def test_the_bar_of_a_save_is_as_long_as_the_save_and_its_stages_do_not_overlap():
    figure = charts.save_stages(saved_run().table(saves.stages))
    spans = sorted((bar.base[0], bar.base[0] + bar.x[0]) for bar in figure.data)
    assert spans == [(0, 5), (5, 65), (65, 75), (75, 100)]
    assert figure.layout.yaxis.ticktext == ("rank 0", "rank 1")


def test_saves_have_a_blocked_and_a_written_bar_and_harmless_names():
    figure = charts.save_clocks(saved_run().table(saves.by_save))
    assert [bar.y for bar in figure.data] == [(100.0,), (100.0,)]
    assert figure.layout.yaxis.ticksuffix == " ms"
    assert "<script" not in figure.to_json()


def test_the_rate_of_storage_is_drawn_for_each_rank():
    figure = charts.save_bandwidth(saved_run().table(saves.by_rank))
    assert figure.data[0].x == (0, 1)
    assert figure.data[0].y == pytest.approx([100, 100])
    assert figure.layout.yaxis.ticksuffix == " MB/s"


def test_without_saves_the_figures_are_empty():
    run = drawn_traces.run(drawn_traces.trace("step 01\ncompute ab"))
    assert len(charts.save_stages(run.table(saves.stages)).data) == 0
    charts.save_clocks(run.table(saves.by_save))
    charts.save_bandwidth(run.table(saves.by_rank))


@pytest.fixture
def history(tmp_path):
    """Return the history of the step time over 20 runs, slower from run 12 on."""
    reports = simulated_history.slower_from(12, 20)
    store.add(tmp_path / "h.duckdb", [history_entry(each, json_report.comparison_side(each)) for each in reports])
    (group,) = trends.groups(store.read(tmp_path / "h.duckdb"), metrics=["step_time_ns"])
    return group


def test_a_history_draws_medians_intervals_levels_and_changes_where_they_are(history):
    figure = many_runs.of_series(history, history.series[0])
    *levels, medians = figure.data
    assert [tuple(level.x) for level in levels] == [(0.5, 12.5), (12.5, 20.5)]
    assert list(medians.y) == pytest.approx((history.series[0].values / 1e6).tolist())
    assert [number for number, _ in medians.customdata] == list(range(20))
    assert min(medians.error_y.array) >= 0
    assert min(medians.error_y.arrayminus) >= 0
    assert figure.layout.shapes[0].x0 == 12.5
    assert "%" in figure.layout.annotations[0].text


def test_names_of_a_history_are_text_in_its_figure(history):
    hostile = pl.lit(HOSTILE)
    runs = history.runs.with_columns(
        hostile.alias("name"), hostile.alias("commit"), hostile.alias("commit_text"), passed=False,
        failures=pl.concat_list(hostile),
    )  # fmt: skip
    values = history.series[0].values.copy()
    values[3] = math.nan
    series = dataclasses.replace(history.series[0], values=values)
    figure = many_runs.of_series(dataclasses.replace(history, runs=runs), series)
    written = figure.to_json()
    assert "<script" not in written
    assert "<img" not in written
    assert len(figure.data[-1].x) == 19


@pytest.mark.parametrize(("largest_ratio", "marks"), [(0.004, ".1%"), (0.049, ".1%"), (0.05, ".0%"), (0.4, ".0%")])
def test_the_scale_of_a_heatmap_repeats_no_mark(largest_ratio, marks):
    table = pl.DataFrame(
        [
            {"rank": rank, "step": 0, "duration_ns": 100, "median_ns": 100.0, "longer_ratio": 0.0, "exposed_ratio": 0.0}
            | {"waited_ratio": rank * largest_ratio}
            for rank in (0, 1)
        ]
    )
    (bars,) = charts.step_heatmap(table, "waited_ratio").data
    assert bars.marker.colorbar.tickformat == marks
