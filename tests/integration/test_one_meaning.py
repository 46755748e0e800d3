"""One name, one number: what check, summary, what-if, compare, the dashboard and reports say of the same run."""

import functools
import json
import re
from pathlib import Path

import polars as pl
import pytest

from dashboard.run_entry import RunEntry
from dashboard.run_store import OpenRun, tables
from dashboard.run_store import what_if as dashboard_what_if
from tests.support import dashboard_pages
from tests.support.selection import others_in_accuracy
from tests.unit.simulate.jobs import job, written
from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.time import breakdown
from tracekit.errors import TracekitError
from tracekit.ingest.loader import load
from tracekit.model import escaping, units
from tracekit.regression import comparison
from tracekit.regression.comparison import RunSamples
from tracekit.replay.graph import what_if
from tracekit.report import headlines, html_fragments, phrases, summary_tables, text
from tracekit.report import json as report_json
from tracekit.report import what_if as what_if_text
from tracekit.report.render import json as render_json
from tracekit.report.render import text as render_text
from tracekit.rules import engine, stated_savings
from tracekit.rules.report_entry import MAX_FIRST_FINDING, summarize
from tracekit.rules.rule import Severity, cost_order, is_data_quality

SAMPLES = Path(__file__).parents[2] / "sample_traces"
RUNS = sorted(str(path.parent.relative_to(SAMPLES)) for path in SAMPLES.rglob("run.json"))
# One of each kind: strategies; faults of one rank, the host, the disk and memory; pipelines, experts, GPUs.
EVERYDAY = {"faults/slow-rank", "faults/slow-disk", "faults/churn", "parallelism/pipeline-1f1b", "gpu/slow-rank"}
SELECTED = others_in_accuracy(RUNS, EVERYDAY)
SHARED = SAMPLES.parent.parent / "shared" / "traces"
PUBLIC = [
    pytest.param(str(folder), id=folder.name, marks=pytest.mark.accuracy)
    for folder in sorted(SHARED.glob("*"))
    if any(folder.glob("*.json*"))
]
PAGED = ("faults/slow-rank", "gpu/slow-rank", "parallelism/moe-ep2")
"""Samples of which whole pages are rendered: priced findings, measured ones with an upper bound, consequences."""
_QUOTED = re.compile(r"of (\S+ \S+) \([\d.]+%\) in step (\d+) of rank (\d+) \(the rank's median by this measure\)")


@functools.cache
def open_run(name):
    run = load(SAMPLES / name)
    return OpenRun(run, report=engine.check(run), entry=RunEntry(name, run.path))


@functools.cache
def document(name):
    """The JSON report, as a program reads it."""
    opened = open_run(name)
    return json.loads(report_json.render(opened.report, opened.run))


@functools.cache
def replayed(name):
    """The answers of what-if; None of a run that cannot be replayed."""
    try:
        return stated_savings.answer(open_run(name).report)
    except TracekitError:
        return None


def printed(name):
    """What check prints."""
    opened = open_run(name)
    return text.render(opened.report, opened.run, width=160, is_detailed=True)


def compared(name):
    """The medians of a run by metric, as compare shows them; {} where it has no steps."""
    own = RunSamples.of(open_run(name).run, "a"), report_json.comparison_side(document(name))
    try:
        found = comparison.compare(*own)
    except TracekitError:
        return {}
    return {change.metric: {"compare": change.reference, "saved report": change.candidate} for change in found.changes}


def test_samples_are_found():
    assert len(RUNS) >= 15


@pytest.mark.parametrize("name", SELECTED)
def test_step_time_is_the_median_over_steps_of_the_slowest_rank(name):
    opened = open_run(name)
    rows = [row for row in document(name)["summary"] if row["step"] is not None]
    slowest = pl.DataFrame(rows).group_by("window", "step").agg(pl.col("duration_ns").max())["duration_ns"]
    shown = compared(name)["step_time_ns"] | {
        "summary": slowest.median(),
        "dashboard": opened.result_of(breakdown.step_time_ns),
    }
    assert {units.duration(value) for value in shown.values()} == {units.duration(slowest.median())}, shown
    median = units.duration(opened.result_of(breakdown.step_time_ns))
    assert f"median step {median}," in printed(name)
    assert html_fragments.headline_numbers(opened.run)["step time, median"][0] == median


@pytest.mark.parametrize("name", SELECTED)
def test_mean_step_of_what_if_is_that_of_the_slowest_rank(name):
    answers = replayed(name)
    if answers is None:
        pytest.skip("no step can be replayed")
    opened = open_run(name)
    rows = pl.DataFrame([row for row in document(name)["summary"] if row["step"] is not None])
    assert answers.step_ns == pytest.approx(
        rows.group_by("rank").agg(pl.col("duration_ns").mean())["duration_ns"].max(), abs=1
    )
    assert dashboard_what_if.without(opened).step_ns == answers.step_ns
    told = what_if_text.document(answers, (), run=name)
    said = render_text.render(told, width=100)
    assert f"{name}: mean step {units.duration(answers.step_ns)};" in said
    assert "step time" not in said
    saved = json.loads(render_json.render(told))
    assert saved["step_ns"] == answers.step_ns
    replayed_causes = {answer.name for answer in answers.answers if answer.finding is None}
    for line in saved["without"]:
        assert line["without_ns"] == answers.step_ns - line["saved_ns"]
        if line["cause"] in replayed_causes:  # what rules measure is a share of the step that they quote
            assert line["saved_ratio"] == pytest.approx(line["saved_ns"] / answers.step_ns, abs=1e-6)


@pytest.mark.parametrize("name", SELECTED)
def test_breakdowns_are_the_same_in_summary_report_and_dashboard(name):
    opened = open_run(name)
    by_rank = json.loads(render_json.render(summary_tables.document(breakdown.slowest_device_in_steps(opened.run))))
    by_step = json.loads(render_json.render(summary_tables.document(breakdown.slowest_device_by_step(opened.run))))
    assert [row for row in document(name)["summary"] if row["step"] is None] == by_rank
    assert [row for row in document(name)["summary"] if row["step"] is not None] == by_step
    for table, rows in ((tables.STEPS_BY_RANK, by_rank), (tables.BREAKDOWN_BY_STEP, by_step)):
        key = ("rank", "step") if rows is by_step else ("rank",)
        shown = {tuple(row[k] for k in key): row for row in opened.table(table).to_dicts()}
        for row in rows:
            drawn = shown[tuple(row[k] for k in key)]
            assert {name: drawn[name] for name in row if name != "window"} == {
                k: v for k, v in row.items() if k != "window"
            }
    for row in breakdown.slowest_device_in_steps(opened.run).to_dicts():
        table = printed(name).split("Where the time goes")[1].splitlines()[2:]
        line = next(line for line in table if line.split()[:1] == [str(row["rank"])])
        assert units.duration(row["duration_ns"]) in line
        assert units.share(row["exposed_communication_ns"] / row["duration_ns"]) in line


@pytest.mark.parametrize("name", SELECTED)
def test_shares_of_the_report_are_those_of_all_ranks_and_steps(name):
    opened = open_run(name)
    rows = pl.DataFrame([row for row in document(name)["summary"] if row["step"] is not None])
    total_ns = rows["duration_ns"].sum()
    headline = html_fragments.headline_numbers(opened.run)
    assert headline["exposed communication"][0] == units.share(rows["exposed_communication_ns"].sum() / total_ns)
    assert headline["compute"][0] == units.share(rows["compute_ns"].sum() / total_ns)
    listed = breakdown.exposed_communication_ratio(opened.run)  # in the dashboard's list of runs
    assert headline["exposed communication"][0] == units.share(listed)


@pytest.mark.parametrize("name", SELECTED)
def test_the_headline_of_communication_names_the_collective_with_most_transfer(name):
    opened = open_run(name)
    found = headlines.communication(opened.report, opened.run)
    named = re.search(r"mostly transfer in the ([\w-]+)", found.text if found else "")
    if named is None:
        pytest.skip("most of it is not transfer")
    if named[1] in ("send", "recv"):
        pytest.skip("a send and the receive that runs concurrently share their time")
    calls = opened.run.table(exposed_communication.exposed_transfers).filter(pl.col("step").is_not_null())
    by_op = dict(calls.group_by("op").agg(pl.col("exposed_ns").sum()).iter_rows())
    assert by_op[named[1].replace("-", "_")] == max(by_op.values())


def test_checkpoints_state_the_median_of_the_saves_that_comparisons_state():
    opened = open_run("demo-fsdp2")
    assert opened.table(tables.SAVES).height == 2
    blocked_ns = compared("demo-fsdp2")["checkpoint_blocked_ns"]["compare"]
    shown = headlines.checkpoints(opened.report, opened.run)
    assert f"each blocks training for {units.duration(blocked_ns)} (median)" in shown.text
    (finding,) = (finding for finding in opened.report.findings if finding.code == "CKPT001")
    assert f"blocks training for {units.duration(blocked_ns)}, " in finding.message


@pytest.mark.parametrize("name", SELECTED)
def test_metrics_of_the_breakdown_are_those_of_its_slowest_ranks(name):
    rows = pl.DataFrame([row for row in document(name)["summary"] if row["step"] is not None])
    for metric in ("compute_ns", "communication_ns", "exposed_communication_ns", "idle_ns"):
        worst = rows.group_by("window", "step").agg(pl.col(metric).max())[metric].median()
        shown = compared(name)[metric]
        assert {units.duration(value) for value in shown.values()} == {units.duration(worst)}, metric


@pytest.mark.parametrize("name", SELECTED + PUBLIC)
def test_findings_cost_the_same_in_text_json_html_what_if_and_dashboard(name):
    opened, answers = open_run(name), replayed(name)
    text_in_detail = " ".join(printed(name).split())
    for found in opened.report.findings:
        (saved,) = (each for each in document(name)["findings"] if each["id"] == found.id)
        assert (saved["cost_ns"], saved["impact"], saved["message"]) == (found.cost_ns, found.impact, found.message)
        assert saved["sentence"] == found.sentence
        if found.impact and found.cost_ns:
            number = f"{units.duration(found.cost_ns)}"
            assert number in found.sentence
            assert f"({units.share(found.impact)}" in found.sentence
            assert ("; fixing it saves " in found.sentence) == found.is_priced
        assert f"{found.sentence}." in text_in_detail
        assert escaping.escape(found.sentence, 500) in html_fragments.finding(found)
        if found.is_priced and found.measured_ns and answers is not None:
            differs = abs(found.cost_ns - found.measured_ns) > 0.1 * found.measured_ns
            assert differs == ("Removing it saves" in found.message)


@pytest.mark.parametrize("name", others_in_accuracy(PAGED, ["faults/slow-rank"]))
def test_pages_of_the_dashboard_show_the_numbers_of_the_report(name):
    html = dashboard_pages.html_of(dashboard_pages.page("diagnosis", SAMPLES / name, savings="True", trust="True"))
    findings = document(name)["findings"]
    assert any(found["impact"] for found in findings)
    for found in findings:
        assert escaping.escape(found["sentence"], 500) in html
        if found["impact"] and found["cost_ns"] and not is_data_quality(found["code"]):
            assert f"({units.share(found['impact'])}" in found["sentence"]
            assert units.duration(found["cost_ns"]) in found["sentence"]
    answers = replayed(name).answers
    assert answers
    for answer in answers:
        numbers = (units.duration(answer.saved_ns), units.share(answer.saved_ratio))
        assert "".join(f'<td class="number">{number}</td>' for number in numbers) in html


@pytest.mark.parametrize("name", SELECTED + PUBLIC)
def test_what_if_lists_the_causes_of_findings_first_with_their_numbers(name):
    answers = replayed(name)
    if answers is None:
        pytest.skip("no step can be replayed")
    opened = open_run(name)
    costly = [
        found
        for found in opened.report.findings
        if found.cost_ns and found.impact and not found.is_upper_bound and not is_data_quality(found.code)
    ]
    stated = [answer for answer in answers.answers if answer.finding is not None]
    assert list(answers.answers[: len(stated)]) == stated
    assert {answer.code for answer in stated} >= {found.code for found in costly if not found.is_priced}
    for answer in stated:
        alike = [
            found
            for found in costly
            if found.code == answer.code and (not answer.causes or found.what_if.cause is answer.causes[0])
        ]
        assert answer.saved_ns in (sum(found.cost_ns for found in alike), *(found.cost_ns for found in alike))
    shown = dashboard_what_if.without(opened).answers
    assert [(a.name, a.saved_ns) for a in shown] == [(a.name, a.saved_ns) for a in answers.answers]


@pytest.mark.parametrize("name", SELECTED)
def test_the_finding_to_read_first_is_the_same_everywhere(name):
    opened = open_run(name)
    judged = [found for found in opened.report.findings if not is_data_quality(found.code)]
    first = max(judged, key=lambda finding: (finding.severity, *cost_order(finding)), default=None)
    listed = summarize(opened.report)
    assert listed.impact == (first.impact if first and not first.is_upper_bound else 0.0)
    if first is None:
        return
    # An information may cost more than a warning, at less confidence: what a person reads first is the warning.
    assert phrases.headline(judged) == first.sentence
    assert listed.first_finding == escaping.inert(f"{first.code}: {first.sentence}", MAX_FIRST_FINDING)
    assert first.sentence in " ".join(printed(name).split())
    if phrases.cannot_judge(opened.report) is None:
        assert headlines.verdict(opened.report, opened.run).text == phrases.headline(opened.report.findings)


def test_an_upper_bound_is_shown_as_one():
    opened = open_run("gpu/slow-rank")
    (bound,) = (found for found in opened.report.findings if found.is_upper_bound)
    largest = max(found.impact for found in opened.report.findings)
    assert (bound.code, bound.impact) == ("STREAM002", largest), "the sample has a bound above all measured costs"
    cost, mean = units.duration(bound.cost_ns), units.duration(breakdown.mean_step_ns(opened.run) or 0)
    assert f"it costs up to {cost} of {mean} a step ({units.share(bound.impact)})" in bound.sentence
    answers = what_if.answer(opened.run)
    saved = headlines.savings(opened.report, answers)
    assert saved is not None
    assert "serialized-streams" not in saved.text
    most = answers.answers[0]
    assert f"{units.duration(most.saved_ns)} shorter: {units.share(most.saved_ratio)} of " in saved.text
    assert saved.text.endswith(f" of {units.duration(most.step_ns)}")
    by_id = {each["id"]: each["is_upper_bound"] for each in document("gpu/slow-rank")["findings"]}
    assert [name for name, is_bound in by_id.items() if is_bound] == [bound.id]


@pytest.mark.parametrize("name", SELECTED)
def test_findings_quote_the_duration_of_their_step(name):
    by_step = {(row["step"], row["rank"]): row for row in document(name)["summary"]}
    for found in open_run(name).report.findings:
        for duration, step, rank in _QUOTED.findall(found.message):
            assert duration == units.duration(by_step[int(step), int(rank)]["duration_ns"]), found.message


@pytest.mark.parametrize("name", SELECTED)
def test_a_cause_costs_in_check_what_the_what_if_saves(name):
    # All samples were recorded on CPUs; runs on GPUs are simulated below.
    opened = open_run(name)
    assert_same_costs(opened.report, what_if.answer(opened.run) if replayed(name) else None)


def test_a_cause_costs_the_same_in_check_and_what_if_on_gpus(tmp_path):
    written(job("fsdp2", steps=4, ranks_written=3), tmp_path, "slow-rank:1:1.5")
    run = load(tmp_path, cache=False)
    report = engine.check(run)
    assert "RANK001" in {each.code for each in report.findings if each.severity > Severity.INFO}
    assert_same_costs(report, what_if.answer(run))


def assert_same_costs(report, replay):
    if replay and not replay.is_reproduced:
        # what-if says so, and calls its answers hints: no finding quotes them.
        assert not any(found.is_priced for found in report.findings)
        return
    answers = {each.name: each for each in (replay.answers if replay else ())}
    unavailable = {each.name for each in (replay.unavailable if replay else ())}
    for found in report.findings:
        # A price after other causes is that of what remains without them.
        is_priced = found.what_if and found.severity > Severity.INFO and len(found.removals) < 2
        if is_priced and not found.what_if.is_partial and found.what_if.cause.name not in unavailable:
            assert found.is_priced, f"{found.code} has another price than in what-if"
            assert found.cost_ns == pytest.approx(answers[found.what_if.cause.name].saved_ns, rel=0.01)
