"""Figures of hybrid parallelism."""

import plotly.graph_objects as go
import polars as pl
import pytest

from tests.support import drawn_pipelines
from tracekit.analysis.parallelism import pipeline_bubbles, pipeline_stages
from tracekit.report import charts
from tracekit.report.charts import style

PIPELINE = """
    0 0  01..aabb
    1 1  .0aa1bb.
"""


def bars(figure, name):
    (trace,) = [trace for trace in figure.data if trace.name == name]
    return list(zip(trace.y, trace.base, trace.x, strict=True))


def test_a_step_shows_each_action_with_its_micro_batch_and_the_bubbles_between():
    run = drawn_pipelines.run(PIPELINE, scale_ns=1_000_000)
    figure = charts.pipeline_step(run.table(pipeline_stages.staged_actions), run.table(pipeline_bubbles.idle_gaps))
    assert figure.layout.yaxis.ticktext == ("stage 0 · rank 0", "stage 1 · rank 1")
    assert sorted(bars(figure, "forward")) == [(0, 0, 1), (0, 1, 1), (1, 1, 1), (1, 4, 1)]
    assert sorted(bars(figure, "backward")) == [(0, 4, 2), (0, 6, 2), (1, 2, 2), (1, 5, 2)]
    assert sorted(bars(figure, "bubble")) == [(0, 2, 2), (1, 0, 1), (1, 7, 1)]
    forward = next(trace for trace in figure.data if trace.name == "forward")
    assert sorted(forward.text) == ["0", "0", "1", "1"]
    assert next(trace for trace in figure.data if trace.name == "bubble").marker.pattern.shape == "/"


def test_stages_are_compared_by_their_forwards_backwards_and_bubbles():
    run = drawn_pipelines.run(PIPELINE, scale_ns=1_000_000)
    figure = charts.stage_balance(run.table(pipeline_bubbles.pipeline_bubbles))
    assert {trace.name: trace.x.tolist() for trace in figure.data} == {
        "forward": [2, 2], "backward": [4, 4], "bubble": [2, 2],
    }  # fmt: skip
    assert figure.layout.yaxis.ticktext == ("stage 0", "stage 1")


def test_the_mesh_has_a_row_for_each_axis_and_one_colour_for_each_group():
    """Pairs that send and receive join to the pipeline that they are part of."""
    rows = [("tp", [0, 1]), ("tp", [2, 3]), ("pp", [0, 2]), ("pp", [2, 4]), ("pp", [1, 3]), ("world", [0, 1, 2, 3])]
    groups = pl.DataFrame(rows, {"axis": pl.String, "ranks": pl.List(pl.Int64)}, orient="row")
    figure = charts.mesh_map(groups)
    assert figure.layout.yaxis.ticktext == ("pp", "tp")
    cells = {(trace.y[0], tuple(round(base + 0.47) for base in trace.base)) for trace in figure.data}
    assert cells == {(0, (0, 2, 4)), (0, (1, 3)), (1, (0, 1)), (1, (2, 3))}
    assert len({trace.marker.color for trace in figure.data if trace.y[0] == 0}) == 2


def test_the_mesh_of_a_thousand_ranks_is_one_heatmap_whose_hover_names_rank_and_group():
    rows = [("tp", list(range(first, first + 4))) for first in range(0, 1000, 4)]
    rows += [("dp", list(range(first, 1000, 4))) for first in range(4)]
    figure = charts.mesh_map(pl.DataFrame(rows, {"axis": pl.String, "ranks": pl.List(pl.Int64)}, orient="row"))
    (cells,) = figure.data
    assert figure.layout.yaxis.ticktext == ("dp", "tp")
    assert cells.customdata[1][701] == "rank 701: <b>tp group 175</b><br>ranks 700–703"
    assert cells.customdata[0][701].startswith("rank 701: <b>dp group 1</b>")
    assert len({tuple(row[700:704]) for row in cells.z}) == 2


def test_of_many_experts_those_with_the_most_uneven_load_are_drawn():
    rows = [(rank, layer, 10, 3.0 if rank == 700 else 1.0) for rank in range(1000) for layer in range(3)]
    load = pl.DataFrame(rows, ["rank", "layer", "load_bytes", "load_ratio"], orient="row")
    figure = charts.expert_heatmap(load)
    assert len(figure.data[0].z) == 64 * 3
    assert "rank 700" in figure.layout.yaxis.ticktext


def test_communication_of_an_axis_is_divided_into_exposed_and_hidden_time_of_a_step():
    rows = pl.DataFrame(
        {
            "rank": [0, 1],
            "axis": ["tp", "tp"],
            "steps": [2, 2],
            "communication_ns": [8_000_000, 4_000_000],
            "exposed_communication_ns": [4_000_000, 0],
        }
    )
    figure = charts.axis_communication(rows)
    assert {trace.name: trace.x for trace in figure.data} == {"exposed": (1.0,), "overlapped with compute": (2.0,)}


def test_experts_that_get_more_tokens_than_the_mean_stand_out():
    rows = [(0, 0, 1.5, 30), (1, 0, 0.5, 10), (0, 1, 1.0, 20), (1, 1, 1.0, 20)]
    load = pl.DataFrame(rows, ["rank", "layer", "load_ratio", "load_bytes"], orient="row")
    (heatmap,) = charts.expert_heatmap(load).data
    assert list(zip(heatmap.x, heatmap.y, heatmap.z, strict=True)) == [
        (0, 0, 1.5), (1, 0, 1.0), (0, 1, 0.5), (1, 1, 1.0),
    ]  # fmt: skip
    assert (heatmap.zmin, heatmap.zmax) == (0.5, 1.5)


def test_pairs_of_ranks_that_send_more_than_the_mean_stand_out():
    rows = [(0, 4, 1.5, 30), (0, 6, 0.5, 10), (2, 4, 1.0, 20), (2, 6, 1.0, 20)]
    pairs = pl.DataFrame(rows, ["rank", "peer", "load_ratio", "bytes"], orient="row")
    figure = charts.expert_pair_heatmap(pairs)
    (heatmap,) = figure.data
    assert list(zip(heatmap.x, heatmap.y, heatmap.z, strict=True)) == [
        (0, 0, 1.5), (1, 0, 0.5), (0, 1, 1.0), (1, 1, 1.0),
    ]  # fmt: skip
    assert list(heatmap.customdata[0]) == ["rank 0 to rank 4", "30 B"]
    assert figure.layout.xaxis.ticktext == ("4", "6")
    assert not charts.expert_pair_heatmap(pairs.clear()).data


def test_without_groups_and_actions_there_are_empty_figures():
    run = drawn_pipelines.run(PIPELINE)
    actions, gaps, bubbles = (
        run.table(fact).clear()
        for fact in (pipeline_stages.staged_actions, pipeline_bubbles.idle_gaps, pipeline_bubbles.pipeline_bubbles)
    )
    groups = pl.DataFrame(schema={"axis": pl.String, "ranks": pl.List(pl.Int64)})
    assert not charts.pipeline_step(actions, gaps).data
    assert not charts.stage_balance(bubbles).data
    empty = charts.mesh_map(groups)
    assert not empty.data
    assert [note.text for note in empty.layout.annotations] == ["no data"]
    assert empty.layout.xaxis.visible is False


@pytest.mark.parametrize(
    ("lengths_ms", "unit", "drawn"),
    [([12_000.0, 700.0], " s", (12.0, 0.7)), ([700.0, 700.0], " s", (0.7, 0.7)), ([0.02, 0.3], " µs", (20.0, 300.0))],
)
def test_times_have_the_unit_of_the_longest_stack(lengths_ms, unit, drawn):
    figure = go.Figure([go.Bar(x=[length], y=[0], base=None, orientation="h") for length in lengths_ms])
    style.with_labelled_rows(figure, ["stage 0"])
    axis = figure.layout.xaxis
    assert (axis.ticksuffix, axis.exponentformat, axis.separatethousands) == (unit, "none", True)
    assert tuple(bar.x[0] for bar in figure.data) == drawn


def test_bases_ranges_and_annotations_get_the_unit_of_the_axis():
    figure = go.Figure(go.Bar(x=[500.0], base=[2_500.0], y=[0], orientation="h"))
    figure.add_annotation(x=2_600.0, text="here")
    figure.update_layout(barmode="overlay", xaxis_range=[2_000.0, 3_000.0])
    style.scale_times(figure)
    bar, layout = figure.data[0], figure.layout
    assert (bar.x, bar.base, layout.annotations[0].x, layout.xaxis.range) == ((0.5,), (2.5,), 2.6, (2.0, 3.0))
