"""The headline of a page: a sentence with the numbers of the tables; doubtful data is never called good."""

from dataclasses import replace

import polars as pl
import pytest

from tests.support import drawn_traces, rule_examples
from tracekit.analysis.host import call_trees
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.report import headlines, phrases
from tracekit.rules import engine
from tracekit.rules.rule import Finding, Report, Severity


def _report(run, *findings):
    return Report(run, findings, (), (), "1.0")


def _issue(ratio, severity=Severity.WARNING):
    evidence = pl.DataFrame({"affected_ratio": [ratio]})
    return Finding("DATA001", severity, "126 of 128 ranks have no trace.", "", evidence=evidence)


def test_a_straggler_is_named_with_the_numbers_of_its_finding(wording):
    run = rule_examples.straggler_run(0, 3)
    report = engine.check(run)
    (straggler,) = [found for found in report.findings if found.code == "RANK001"]
    shown = headlines.ranks(report, run)
    assert shown.text == straggler.sentence
    wording(shown.text)
    assert shown.status == straggler.severity.label


def test_a_straggler_that_is_a_consequence_has_the_saving_of_its_cause():
    run = rule_examples.straggler_run(0, 3)
    report = engine.check(run)
    (straggler,) = [finding for finding in report.findings if finding.code == "RANK001"]
    cause = replace(straggler, code="HOST001", claim="The host is late", severity=Severity.ERROR, subject="")
    straggler = replace(straggler, consequence_of=cause.id, severity=Severity.INFO, measured_ns=10_700_000)
    shown = headlines.ranks(replace(report, findings=(cause, straggler)), run)
    assert shown.text.startswith(straggler.claim)
    assert "10.7 ms" in shown.text
    assert "HOST001" in shown.text
    assert (shown.about, shown.status) == (cause.sentence, "error")
    shown = headlines.communication(replace(report, findings=(cause, straggler)), run)
    assert (shown.about, shown.status) == (cause.sentence, "error")


def test_without_a_finding_the_ranks_page_names_the_rank_that_is_waited_for_longest(wording):
    run = rule_examples.straggler_run(0, 3)
    shown = headlines.ranks(_report(run), run)
    wording(shown.text)


def test_waits_outside_of_the_marked_steps_are_not_part_of_a_step(wording):
    run = rule_examples.straggler_run(0, 3)
    traces = {trace.rank: trace for trace in run.traces()}
    marked = [
        replace(
            source, read=lambda trace=traces[source.rank]: trace.replace(steps=trace.steps.filter(pl.col("step") < 2))
        )
        for source in run.sources
    ]
    shortened = Run(run.path, marked, align=lambda _: run.offsets)
    shown = headlines.ranks(_report(shortened), shortened)
    wording(shown.text)


def test_communication_names_the_rank_that_most_of_it_waits_for(wording):
    run = rule_examples.straggler_run(0, 4)
    shown = headlines.communication(_report(run), run)
    wording(shown.text)


def test_a_run_without_a_finding_is_good_unless_most_of_its_data_is_doubtful(wording):
    run = Run("/runs/demo", [])
    assert headlines.verdict(_report(run), run) == headlines.Headline(
        "No problems found", "No rule fired", "good", is_verdict=True
    )
    small = headlines.verdict(_report(run, _issue(0.02)), run)
    assert (small.text, small.status) == ("No problems found", "good")
    most = headlines.verdict(_report(run, _issue(0.98)), run)
    wording(most.text)
    assert most.status == "error"
    unusable = headlines.verdict(_report(run, _issue(0.0, Severity.ERROR)), run)
    assert unusable.status == "error"


def test_a_problem_that_was_found_is_the_verdict_although_data_is_doubtful(wording):
    run = Run("/runs/demo", [])
    found = Finding("HOST001", Severity.WARNING, "The step is launch-bound.", "", impact=0.2)
    report = _report(run, _issue(0.98), found)
    assert phrases.cannot_judge(report) is None
    wording(headlines.verdict(report, run).text)


@pytest.mark.parametrize("make", [headlines.memory, headlines.checkpoints])
def test_without_its_data_a_page_has_no_headline(make):
    run = drawn_traces.run(drawn_traces.trace(rule_examples.EXPOSED))
    assert make(_report(run), run) is None


def test_each_view_of_the_kernels_has_its_own_answer(wording):
    report = _report(Run("/runs/demo", []))
    modules = pl.DataFrame({"module": ["a", "a.b", None], "compute_ns": [1_000_000, 3_000_000, 4_000_000]})
    shown = headlines.modules(report, modules, "compute_ns", "compute time", units.duration)
    wording(shown.text)
    tree = pl.DataFrame(
        {
            "node": [0, 1, 2, 3],
            "parent": [-1, 0, 0, 2],
            "name": ["python", "aten::mm", "aten::linear", "aten::mm"],
            "self_ns": [1_000_000, 1_000_000, 0, 2_000_000],
        }
    )
    shown = headlines.call_stacks(report, tree, "host")
    wording(shown.text)
    calls = pl.DataFrame(
        {
            "name": ["aten::add", "aten::mm"],
            "shapes": [None, "[[8, 8]]"],
            "above_ns": [1_000_000, 2_000_000],
            "work_ns": [4_000_000, 3_000_000],
            "roofline_ratio": [0.75, 1 / 3],
        }
    )
    shown = headlines.roofline(report, calls)
    wording(shown.text)
    assert shown.about == "Input shapes: [[8, 8]]"


def test_views_of_the_kernels_without_data_have_no_answer():
    report = _report(Run("/runs/demo", []))
    none = pl.DataFrame({"module": [None], "compute_ns": [4]}, schema={"module": pl.String, "compute_ns": pl.Int64})
    assert headlines.modules(report, none, "compute_ns", "compute time", units.duration) is None
    assert headlines.call_stacks(report, pl.DataFrame(schema=call_trees.TREE), "host") is None
    assert headlines.roofline(report, pl.DataFrame(schema={"above_ns": pl.Int64})) is None
