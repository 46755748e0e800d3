"""Reports as JSON: strict, as the published schema says, and read back for a comparison."""

import json
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import jsonschema
import polars as pl
import pytest

from tests.support import drawn_traces, sample_report
from tracekit.cli.commands.check import ReportFormat, ReportOptions
from tracekit.errors import InputError
from tracekit.ingest import loader
from tracekit.model.source import LoadedTraces, Measured, Source, Threads
from tracekit.model.trace import TraceFact
from tracekit.regression import contributions
from tracekit.regression.comparison import RunSamples, compare
from tracekit.regression.samples import samples
from tracekit.report import json as report_json
from tracekit.rules import engine
from tracekit.rules.rule import Finding, IgnoredFinding, Severity

SAMPLES = Path(__file__).parents[3] / "sample_traces"

SUMMARY_COLUMNS = [
    "rank",
    "window",
    "step",
    "duration_ns",
    "compute_ns",
    "communication_ns",
    "copy_ns",
    "overlapped_ns",
    "exposed_communication_ns",
    "exposed_copy_ns",
    "idle_ns",
]


def validate(text: str) -> dict:
    """Return the document after validating it against the schema; NaN and infinity are not JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(text, parse_constant=refuse)
    schema = json.loads(report_json.schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(document)
    return document


def test_a_report_obeys_the_published_schema() -> None:
    run = sample_report.run()
    document = validate(report_json.render(sample_report.report(run), run))
    assert document["schema"] == "tracekit.report/2"
    assert [found["id"] for found in document["findings"]] == [found.id for found in sample_report.findings()]
    assert document["findings"][0]["severity"] == "error"


def test_several_reports_obey_it_too() -> None:
    run = sample_report.run()
    document = validate(report_json.render_several([(sample_report.report(run), run)] * 2))
    assert document["schema"] == "tracekit.reports/1"
    assert len(document["reports"]) == 2


def test_the_schema_can_fail() -> None:
    run = sample_report.run()
    document = json.loads(report_json.render(sample_report.report(run), run))
    for spoil in ({"findings": [{"code": "COMM001"}]}, {"summary": [{"rank": 0}]}, {"schema": "tracekit.report/3"}):
        with pytest.raises(jsonschema.ValidationError):
            validate(json.dumps(document | spoil))


def test_summary_rows_are_by_step_and_then_by_rank_and_sum_exactly() -> None:
    run = sample_report.run()
    rows = json.loads(report_json.render(sample_report.report(run), run))["summary"]
    assert [list(row) for row in rows] == [SUMMARY_COLUMNS] * 12
    places = [(row["rank"], row["window"], row["step"]) for row in rows[-3:]]
    assert places == [(1, 0, 4), (0, None, None), (1, None, None)]
    for row in rows:
        parts = ("compute_ns", "exposed_communication_ns", "exposed_copy_ns", "idle_ns")
        assert sum(row[part] for part in parts) == row["duration_ns"]
    assert rows[-1]["duration_ns"] == sum(row["duration_ns"] for row in rows[:-2] if row["rank"] == 1)


def test_a_run_without_steps_has_rows_by_rank_only() -> None:
    run = drawn_traces.run(drawn_traces.trace("compute aa.bb\ncomm ..x.."), path="stepless")
    document = validate(report_json.render(sample_report.report(run), run))
    assert [(row["rank"], row["step"], row["duration_ns"]) for row in document["summary"]] == [(0, None, 5)]


def test_evidence_is_capped_and_the_rest_counted() -> None:
    run = sample_report.run()
    found = json.loads(report_json.render(sample_report.report(run), run))["findings"][0]
    assert len(found["evidence"]) == report_json.MAX_EVIDENCE_ROWS
    assert found["evidence_rows_left_out"] == 50
    assert found["evidence"][1]["start_ns"] == 6_001_000


def test_what_is_no_number_is_null() -> None:
    evidence = pl.DataFrame({"rate": [float("nan"), float("inf"), 1.5], "ranks": [[0, 1], None, [2]]})
    found = Finding("DATA001", Severity.INFO, "odd", "", evidence=evidence)
    run = sample_report.run(model={"scale": float("nan")})
    document = validate(report_json.render(sample_report.report(run, found=(found,)), run))
    assert [row["rate"] for row in document["findings"][0]["evidence"]] == [None, None, 1.5]
    assert document["run"]["model"] == {"scale": None}


def test_ignored_findings_have_their_reason() -> None:
    run = sample_report.run()
    aside = IgnoredFinding(sample_report.findings()[0], "known", date(2027, 1, 31))
    document = validate(report_json.render(sample_report.report(run, found=(), ignored=(aside,)), run))
    assert document["findings"] == []
    assert document["ignored"][0]["until"] == "2027-01-31"
    assert document["ignored"][0]["finding"]["id"] == "COMM001"


def test_host_and_command_are_left_out() -> None:
    run = sample_report.run()
    text = report_json.render(sample_report.report(run), run)
    assert "secret-host" not in text
    assert "alice" not in text


def test_a_saved_report_compares_as_its_run_does(tmp_path: Path) -> None:
    before, after = sample_report.run("runs/before"), sample_report.run("runs/after", strategy="yafsdp")
    path = tmp_path / "before.json"
    path.write_text(report_json.render(sample_report.report(before), before))
    assert report_json.is_report(path)
    assert compare(report_json.read(path), RunSamples.of(after)) == compare(RunSamples.of(before), RunSamples.of(after))


def test_one_report_among_several_compares_too(tmp_path: Path) -> None:
    run = sample_report.run()
    path = tmp_path / "reports.json"
    path.write_text(report_json.render_several([(sample_report.report(run), run)]))
    assert report_json.read(path).name == run.name
    path.write_text(report_json.render_several([(sample_report.report(run), run)] * 2))
    with pytest.raises(InputError, match="holds several reports"):
        report_json.read(path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not a report of schema"),
        ('{"schema": "tracekit.report/2", "samples": ' + "[" * 3000 + "]" * 3000 + "}", "is not valid JSON"),
        ('{"schema": "tracekit.report/3"}', "is not a report of schema"),
        ('{"schema": "tracekit.report/2"}', "is not a complete report"),
        ('{"schema": "tracekit.report/2", "run": {"name": "a"}, "samples": [{"rank": 0}]}', "is not a complete report"),
        (
            '{"schema": "tracekit.report/2", "run": {"name": "a"}, '
            '"samples": [{"rank": 0, "metric": "idle_ns", "steps": [1], "values": ["x"]}]}',
            "is not a complete report",
        ),
    ],
)
def test_a_file_that_is_no_report_is_named(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "saved.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        report_json.read(path)
    assert expected in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_report_is_distinguished_from_a_trace_also_when_its_keys_were_sorted(tmp_path: Path) -> None:
    run = sample_report.run()
    document = json.loads(report_json.render(sample_report.report(run), run))
    (tmp_path / "sorted.json").write_text(json.dumps(document, sort_keys=True))
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"name": "x"}], "note": "tracekit.report/2"}')
    assert report_json.is_report(tmp_path / "sorted.json")
    assert not report_json.is_report(tmp_path / "trace.json")
    assert not report_json.is_report(tmp_path)


def test_a_report_of_the_previous_schema_is_read_for_a_comparison(tmp_path: Path) -> None:
    run = sample_report.run()
    text = report_json.render(sample_report.report(run), run)
    (tmp_path / "new.json").write_text(text)
    (tmp_path / "old.json").write_text(text.replace("tracekit.report/2", "tracekit.report/1"))
    new, old = (report_json.read(tmp_path / name) for name in ("new.json", "old.json"))
    assert old.samples.equals(new.samples)


def test_a_report_measures_nothing_after_the_check() -> None:
    measured: list[TraceFact] = []

    class RecordingThreads(Threads):
        def measure(
            self, sources: Sequence[Source], facts: Sequence[TraceFact], loaded: LoadedTraces
        ) -> Iterator[Measured]:
            measured.extend(facts)
            return super().measure(sources, facts, loaded)

    run = loader.load(SAMPLES / "demo-yafsdp", executor=RecordingThreads(1))
    report = engine.check(run, facts=ReportOptions(report_format=ReportFormat.JSON).facts())
    assert samples in measured
    measured.clear()
    validate(report_json.render(report, run))
    assert measured == []


def test_the_schema_lists_every_kind_of_contribution() -> None:
    definition = json.loads(report_json.schema())["$defs"]["contribution"]
    assert set(definition["properties"]["kind"]["enum"]) == set(contributions.LABELS)
