"""The critical path on the page Timeline, and its figure."""

import polars as pl
import pytest

from tests.browser import recorded
from tests.support.dashboard_pages import page
from tracekit.ingest.loader import load
from tracekit.replay.graph.critical_path.path import critical_path
from tracekit.report import charts, timeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    recorded.write_run(folder, kernel="gemm")
    return folder


def test_the_page_shows_the_path_of_the_chosen_step(folder):
    shown = page("timeline", folder, path="True")
    assert not shown.exception
    assert [each.value for each in shown.subheader] == ["Path, first to last", "Owners of the path", "Not on the path"]
    step = next(box for box in shown.selectbox if box.label == "Step")
    other = next(option for option in step.options if option != str(step.value))
    assert not step.select(int(other)).run().exception


def test_a_figure_has_the_time_of_every_part_and_the_moment_of_each_bar(folder):
    found = critical_path(load(folder))
    parts = found.compact.with_columns(trace_start_ns=pl.col("start_ns") + 5)
    figure = charts.critical_path(parts, found.start_ns)
    bars = [bar for bar in figure.data if bar.type == "bar"]
    assert sum(x for bar in bars for x in bar.x) == pytest.approx(found.step_ns / 1e6)
    moments = {tuple(moment[:3]) for bar in bars for moment in bar.customdata}
    assert moments == set(parts.select("rank", "trace_start_ns", "dur_ns").rows())


def test_long_paths_are_drawn_with_fewer_parts_of_the_same_length(folder):
    found = critical_path(load(folder))
    few = charts.path_parts(found.parts, found.start_ns, max_parts=found.parts.height - 1)
    assert few.height < found.parts.height
    assert few["from_ns"].min() == 0


def test_the_timeline_has_the_path_as_marks_in_the_colours_of_their_kinds(folder):
    message = pytest.importorskip("tracekit.report.timeline_view.message")
    run = load(folder)
    scene, found = timeline.open_scene(run), critical_path(run)
    marks = message.path_marks(scene, found.compact)
    assert sum(mark["end"] - mark["start"] for mark in marks) == found.step_ns
    assert {mark["key"] for mark in marks} == {message.PATH}
    assert {mark["colour"] for mark in marks} == {charts.PATH_COLOURS[kind] for kind in found.compact["kind"].unique()}
    shown = page("timeline", folder)
    assert not shown.exception
    assert not shown.toggle[0].set_value(True).run().exception
