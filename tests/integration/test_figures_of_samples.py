"""Figures and report of runs that were really recorded."""

import gzip
from pathlib import Path

import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.rule_examples import program_on_streams, run_with_snapshots
from tests.support.selection import others_in_accuracy
from tracekit.analysis.time import breakdown
from tracekit.ingest.readers import memory_snapshots
from tracekit.model import escaping
from tracekit.replay.allocator import memory_usage
from tracekit.report import charts, figures, headlines, html, phrases

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "traces"
SAMPLES = ("demo-fsdp2", "demo-yafsdp")


def _of_memory(run):
    names = ("memory", "lifetimes", "snapshot", "memory_categories", "segments")
    return {name: drawn for name in names if (drawn := figures.FIGURES[name](run)) is not None}


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_recorded_step_is_drawn_with_phases_work_and_host(sample):
    run = tracekit.load(ROOT / "sample_traces" / sample)
    row = breakdown.representative_step(run.table(breakdown.by_step))
    window = (row["start_ns"], row["start_ns"] + row["duration_ns"])
    figure = charts.timeline(run.trace(row["rank"]), window)
    tracks = figure.layout.yaxis.ticktext
    assert tracks[0] == "phases"
    assert [track.split(" · ")[0] for track in tracks[1:3]] == ["compute", "communication"]
    phases = next(bar for bar in figure.data if bar.name == charts.KIND_LABELS["phase"])
    assert {"forward", "backward", "optimizer"} <= {name for name, _ in phases.customdata}
    assert sum(len(bar.x) for bar in figure.data) <= charts.MAX_SLICES


@pytest.mark.parametrize("sample", others_in_accuracy(SAMPLES, SAMPLES[:1]))
def test_the_report_of_a_recorded_run_lists_its_findings_and_inputs(sample):
    run = tracekit.load(ROOT / "sample_traces" / sample)
    report = tracekit.check(run)
    page = html.render(report, run)
    for found in report.findings:
        assert f'id="{found.id}"' in page
    for entry in report.inputs:
        assert entry.sha256 in page
    moments = [finding for finding in report.findings if phrases.has_moment(finding)]
    assert moments
    assert page.count('<div class="tk-moment">') == len(moments)
    verdict = headlines.verdict(report, run)
    assert f"<b>{escaping.escape(verdict.text)}</b><span>{verdict.about}</span>" in page
    assert page.index('class="tk-trust') < page.index('class="tk-numbers')
    assert figures.FIGURES["breakdown"](run).caption.startswith("Sums over steps ")
    assert page.count('<script type="text/plain" id="plotly">') == 1
    assert 'id="figure-memory"' in page
    assert 'id="figure-lifetimes"' in page
    assert len(page) < 4_000_000


def test_a_snapshot_next_to_the_traces_is_in_the_report_and_an_unreadable_one_is_left_out(tmp_path):
    run = run_with_snapshots(program_on_streams((0, 90), (7, 50)))
    pictures = _of_memory(run)
    assert list(pictures) == ["segments"]
    assert "rank 0" in pictures["segments"].caption
    (Path(run.path) / "rank00000.memory.pickle").write_bytes(b"no pickle")
    assert _of_memory(drawn_traces.run(drawn_traces.trace("compute a"), path=run.path)) == {}


def test_the_categories_of_memory_at_the_peak_of_a_snapshot_are_in_the_report(tmp_path):
    packed = ROOT / "tests" / "recordings" / "out_of_memory" / "leak" / "rank00000.memory.pickle.gz"
    (tmp_path / "rank00000.memory.pickle").write_bytes(gzip.decompress(packed.read_bytes()))
    run = drawn_traces.run(drawn_traces.trace("compute a"), path=str(tmp_path))
    pictures = _of_memory(run)
    assert list(pictures) == ["snapshot", "memory_categories", "segments"]
    snapshot = memory_snapshots.read(str(tmp_path / "rank00000.memory.pickle"))
    expected = memory_usage.of_snapshot(snapshot, snapshot.main_device).categories
    drawn = pictures["memory_categories"].figure
    assert list(drawn.layout.yaxis.ticktext) == expected["category"].to_list()
    assert {"parameters", "gradients"} <= set(expected["category"])


def test_eight_gpus_are_drawn_one_bar_each():
    folder = SHARED / "nanogpt_h100_8ranks"
    if not folder.exists():
        pytest.skip("needs ../shared/traces/nanogpt_h100_8ranks, which is not part of the project")
    run = tracekit.load(folder)
    summary = run.table(breakdown.by_rank)
    figure = charts.breakdown(summary)
    assert figure.layout.yaxis.ticktext == tuple(f"rank {rank}" for rank in range(8))
    for row, duration_ns in enumerate(summary["duration_ns"]):
        assert sum(bar.x[row] for bar in figure.data) == pytest.approx(duration_ns / 1e6)
