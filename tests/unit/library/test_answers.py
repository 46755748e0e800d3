"""What a run answers shows itself in a notebook, becomes a table, and is saved by the suffix of a file."""

import html
import json
from pathlib import Path

import plotly.graph_objects as go
import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.unit.simulate import jobs as simulated_jobs
from tracekit.errors import InputError
from tracekit.library import answers as library_answers
from tracekit.library.answers import COLUMNS, Answer
from tracekit.library.comparison import SizeComparison
from tracekit.library.run import Run
from tracekit.report import comparison, figures, step_verdict
from tracekit.report import json as json_report
from tracekit.report.render import text as render_text
from tracekit.rules import engine, stated_savings
from tracekit.rules.rule import Finding, Report, Severity

SAMPLES = Path(__file__).parents[3] / "sample_traces"


@pytest.fixture(scope="module")
def run() -> Run:
    return tracekit.load(SAMPLES / "demo-yafsdp")


@pytest.fixture(scope="module")
def answers(run: Run) -> dict[str, Answer]:
    other = SAMPLES / "demo-fsdp2"
    return {
        "report": run.check(),
        "comparison": run.compare(other),
        "by operator": run.compare(other, by="operator"),
        "what if": run.what_if(),
        "timeline": run.timeline(max_bytes=50_000),
    }


@pytest.mark.parametrize("name", ["report", "comparison", "by operator", "what if", "timeline"])
def test_an_answer_is_shown_and_saved_in_each_of_its_formats(answers, name, tmp_path, wording):
    answer = answers[name]
    assert "demo-yafsdp" in repr(answer)
    assert len(repr(answer)) < 100
    assert answer._repr_html_().startswith(("<style>", "<iframe"))
    for suffix in answer.formats():
        saved = answer.save(tmp_path / f"answer{suffix}")
        assert saved.stat().st_size > 500, suffix
    with wording.raises(InputError):
        answer.save(tmp_path / "answer.pdf")
    with pytest.raises(InputError, match="cannot be written"):
        answer.save(tmp_path / "nowhere" / "answer.html")


def test_a_run_of_another_size_is_compared_by_efficiency(tmp_path):
    for gpus in (8, 16):
        simulated_jobs.written(simulated_jobs.job(gpus=gpus, layers=2), tmp_path / f"gpus{gpus}")
    answer = tracekit.load(tmp_path / "gpus16").compare(tmp_path / "gpus8")
    assert isinstance(answer, SizeComparison)
    frame = answer.to_frame()
    assert frame["gpus"].to_list() == [8, 16]
    assert frame["efficiency"].to_list() == [1.0, answer.compared.steps[0].efficiency]
    figure = answer.plot()
    assert {trace.name for trace in figure.data} >= {"compute", "exposed communication", "throughput"}
    page = answer.save(tmp_path / "answer.html").read_text()
    assert "on 2 times the GPUs" in page
    for suffix in answer.formats():
        assert answer.save(tmp_path / f"answer{suffix}").stat().st_size > 500, suffix
    assert answer._repr_html_().startswith("<style>")


def test_a_report_is_that_of_the_engine_and_as_saved(run, answers, tmp_path):
    plain = engine.check(run)
    assert [finding.id for finding in answers["report"].findings] == [finding.id for finding in plain.findings]
    assert answers["report"] is run.check()
    saved = answers["report"].save(tmp_path / "report.json")
    assert saved.read_text() == json_report.render(plain, run)
    shown = answers["report"]._repr_html_()
    for finding in plain.findings:
        assert html.escape(finding.message)[:40] in shown
        assert finding.id in shown
    assert answers["report"].findings[0].sentence in " ".join(str(answers["report"]).split())


def test_findings_are_a_typed_table_also_without_any(run):
    table = run.check().to_frame()
    assert table["code"].to_list() == [finding.code for finding in run.check().findings]
    assert table["ranks"].to_list() == [list(finding.ranks) for finding in run.check().findings]
    empty = run.check(rules=[]).to_frame()
    assert empty.is_empty()
    assert dict(empty.schema) == dict(table.schema) == dict(COLUMNS)


def test_names_of_findings_are_text_in_a_notebook(run):
    finding = Finding("COMM001", Severity.ERROR, "<script>alert(1)</script>", "<b>fix</b>")
    shown = library_answers.Report(run, (finding,), ("<i>note</i>",), (), "1")._repr_html_()
    assert not any(tag in shown for tag in ("<script", "<b>fix", "<i>note"))


def test_a_comparison_is_that_of_the_command_with_the_other_run_as_reference(run, answers):
    compared = answers["comparison"]
    assert (compared.compared.reference, compared.compared.candidate) == ("demo-fsdp2", "demo-yafsdp")
    frame = compared.to_frame()
    assert frame["metric"].to_list() == [change.metric for change in compared.compared.changes]
    assert frame.filter(metric="step_time_ns")["candidate"].item() == compared.compared.changes[0].candidate
    assert render_text.render(comparison.document(compared.compared), width=100) == compared.formats()[".txt"]()
    changed = answers["by operator"]
    assert changed.to_frame()["change_ns"].sum() == pytest.approx(changed.changed.step.difference, abs=1)
    assert html.escape(step_verdict.headline(changed.changed.compared)) in changed._repr_html_()


def test_a_run_is_compared_with_a_run_a_path_and_a_saved_report(run, tmp_path, wording):
    other = tracekit.load(SAMPLES / "demo-fsdp2")
    saved = other.check().save(tmp_path / "main.json")
    by_run, by_path, by_report = (run.compare(side) for side in (other, str(SAMPLES / "demo-fsdp2"), saved))
    assert by_run.to_frame().equals(by_path.to_frame())
    assert by_report.to_frame()["reference"].to_list() == pytest.approx(by_run.to_frame()["reference"].to_list())
    with wording.raises(InputError):
        run.compare(saved, by="kernel")
    with wording.raises(InputError):
        run.compare(other, by="nothing")


def test_one_cause_or_all_are_removed_by_replay(run, answers):
    table = answers["what if"].to_frame()
    assert table["cause"].to_list() == [answer.name for answer in stated_savings.answer(run.check()).answers]
    assert "communication" in answers["what if"]._repr_html_()
    one = run.what_if("communication").to_frame()
    assert one["saved_ns"].item() == table.filter(cause="communication")["saved_ns"].item()
    with pytest.raises(InputError, match="communication"):
        run.what_if("comunication")


WITHOUT_DATA = {
    "snapshot", "memory_categories", "segments", "roofline", "contention", "pipeline", "stages", "experts",
}  # fmt: skip
"""Of a run on CPUs without a pipeline, experts and memory snapshots."""


@pytest.mark.parametrize("name", [name for name in figures.FIGURES if name not in WITHOUT_DATA])
def test_a_figure_is_drawn_by_name(run, name):
    figure = run.plot(name)
    assert isinstance(figure, go.Figure)
    assert figure.data
    assert figure.layout.title.text.startswith("demo-yafsdp · ")


@pytest.mark.parametrize("name", sorted(WITHOUT_DATA))
def test_a_figure_without_data_says_so(run, name, wording):
    with wording.raises(InputError):
        run.plot(name)


def test_a_wrong_figure_lists_similar_ones_and_all(run, wording):
    with wording.raises(InputError):
        run.plot("brekdown")


def test_the_report_draws_figures_of_the_registry():
    drawn = drawn_traces.run(drawn_traces.trace("step 0011\ncompute aabb"))
    names = [name for name, _ in figures.of_report(Report(drawn, (), (), (), ""), drawn)]
    assert names
    assert names == [name for name in figures.REPORTED if figures.REPORTED[name](drawn)]


def test_the_timeline_is_a_frame_that_cannot_reach_the_notebook(answers):
    frame = answers["timeline"]._repr_html_()
    assert frame.startswith('<iframe sandbox="allow-scripts"')
    assert html.unescape(frame.partition('srcdoc="')[2].removesuffix('"></iframe>')) == answers["timeline"].page
    assert len(frame) < 400_000


def test_a_json_report_has_the_findings_of_the_table(run, tmp_path):
    document = json.loads(run.check().save(tmp_path / "report.json").read_text())
    table = run.check().to_frame()
    assert [finding["cost_ns"] for finding in document["findings"]] == table["cost_ns"].to_list()
    assert pl.Series([finding["impact"] for finding in document["findings"]]).equals(table["cost_ratio"])
