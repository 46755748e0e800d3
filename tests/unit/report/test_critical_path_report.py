"""The critical path as text and JSON."""

import json
from pathlib import Path

import polars as pl
import pytest

from tests.support import cli_runner
from tracekit.ingest.loader import load
from tracekit.replay.graph.critical_path.path import critical_path
from tracekit.report import what_if
from tracekit.report.export import perfetto
from tracekit.report.render import json as render_json
from tracekit.report.render import text as render_text
from tracekit.report.trace_tracks import timeline
from tracekit.sync.alignment import on_run_clock

ROOT = Path(__file__).parents[3]
RUN = ROOT / "sample_traces" / "demo-fsdp2"


@pytest.fixture(scope="module")
def path():
    return critical_path(load(RUN))


def test_json_has_the_step_and_parts_that_tile_it(path):
    found = json.loads(render_json.render(what_if.path_document(path, run="demo", top=5)))
    assert found["step"] == path.step
    for name in ("parts", "compact"):
        parts = found[name]
        assert {"rank", "kind", "name", "start_ns", "dur_ns"} <= set(parts[0])
        assert sum(part["dur_ns"] for part in parts) == found["step_ns"]
        assert [a["start_ns"] + a["dur_ns"] for a in parts[:-1]] == [part["start_ns"] for part in parts[1:]]
    assert sum(owner["dur_ns"] for owner in found["owners"]) == found["step_ns"]
    assert all(row["slack_ns"] >= 0 for row in found["slack"])


def test_text_names_the_step_its_owners_and_what_has_slack(path, wording):
    text = render_text.render(what_if.path_document(path, run="demo", top=5), width=120)
    wording(text)
    for title in ("By rank and kind", "Owners of the path", "Not on the path, least slack first", "more owners"):
        assert title in text
    assert max(map(len, text.splitlines())) <= 120


def test_perfetto_shows_the_path_as_a_track_of_each_rank_on_the_clock_of_its_trace(path):
    run = load(RUN)
    found = []
    for source in run.sources:
        own = perfetto._path_on(run, source, path)
        shown = timeline(run.trace(source.rank), path=own).slices.filter(track_name="critical path")
        assert shown["dur_ns"].sum() == path.shares_by("rank").filter(rank=source.rank)["dur_ns"].sum()
        assert shown["category"].to_list() == path.compact.filter(rank=source.rank)["kind"].to_list()
        moved = shown.with_columns(window=pl.lit(0, pl.Int64), rank=pl.lit(source.rank, pl.Int64))
        found.append(on_run_clock(moved, run.offsets, ("start_ns",)))
    starts = pl.concat(found).sort("start_ns")["start_ns"]
    assert ((starts - path.compact["start_ns"]).abs() <= 1).all()


def test_the_command_explains_a_step_of_a_run():
    shown = cli_runner.tracekit("whatif", "--critical-path", RUN, "--step", "22", "--format", "json", cwd=ROOT)
    found = json.loads(shown.stdout)
    assert (shown.returncode, found["step"]) == (0, 22)
    assert sum(part["dur_ns"] for part in found["parts"]) == found["step_ns"]


def test_the_command_refuses_a_step_that_the_run_does_not_have(wording):
    refused = cli_runner.tracekit("whatif", "--critical-path", RUN, "--step", "7", cwd=ROOT)
    assert refused.returncode == 2
    wording(refused.stderr)
