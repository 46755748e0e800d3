"""Properties of every rule."""

import dataclasses
import re

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import drawn_traces
from tests.support.rule_examples import EXAMPLES
from tracekit.rules import documents
from tracekit.rules.engine import check
from tracekit.rules.registry import RULES
from tracekit.rules.rule import Finding, Severity

SECTIONS = ("What it does", "Why it costs", "How it is measured", "How to fix", "Blind spots")
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)


def findings(run, rule=None):
    return check(run, [with_thresholds(rule)] if rule else None).findings


def with_thresholds(rule):
    return rule(**EXAMPLES[rule.code].thresholds)


@every_rule
def test_a_rule_is_documented_in_five_sections_in_order(rule):
    found = re.findall(r"^    (\w[\w ]+): ", rule.__doc__, flags=re.M)
    assert [section for section in found if section in SECTIONS] == list(SECTIONS)


@every_rule
def test_every_threshold_is_typed_and_documented(rule):
    for field in dataclasses.fields(rule):
        assert f"`{field.name}`" in rule.__doc__
        assert field.type in (int, float, bool, str)
        assert isinstance(field.default, field.type)


def test_the_file_of_documents_is_what_the_rules_say_now():
    assert documents.FILE.read_text(encoding="utf-8") == documents.as_json(), (
        "write it again: python -m tracekit.rules.documents"
    )
    assert documents.all_documents() == tuple(map(documents.RuleDocument.of, RULES))


def test_codes_and_names_are_unique():
    codes, names = [rule.code for rule in RULES], [rule.name() for rule in RULES]
    assert len(set(codes)) == len(codes)
    assert len(set(names)) == len(names)


@every_rule
def test_a_code_consists_of_family_and_number(rule):
    assert re.fullmatch(r"[A-Z]+\d{3}", rule.code)


def test_every_rule_has_a_run_that_fires_it_and_one_that_does_not():
    assert set(EXAMPLES) == {rule.code for rule in RULES}


@every_rule
def test_a_rule_reports_its_example_with_the_fault(rule):
    found = findings(EXAMPLES[rule.code].fires(), rule)
    assert {finding.code for finding in found} == {rule.code}
    for finding in found:
        is_well_formed(finding)


@every_rule
def test_a_rule_does_not_report_its_example_without_the_fault(rule):
    # By the rule alone: for a run without findings, a check also replays it without each cause that no rule names.
    assert list(with_thresholds(rule).check(EXAMPLES[rule.code].silent())) == []


@every_rule
def test_all_facts_that_a_rule_reads_are_declared(rule):
    run = EXAMPLES[rule.code].fires()
    run.measure((*rule.facts, *rule.finding_facts))
    run._loaded.traces.clear()
    run.sources = tuple(dataclasses.replace(source, read=fail_to_read) for source in run.sources)
    assert run.table(rule.facts[0]).height >= 0
    assert list(with_thresholds(rule).check(run))


def fail_to_read():
    raise AssertionError("a fact that the rule does not declare was measured on its own")


def is_well_formed(finding: Finding) -> None:
    assert 0 <= finding.impact <= 1
    assert 0 < finding.confidence <= 1
    assert finding.cost_ns >= 0
    assert finding.cost_bytes >= 0
    assert finding.severity in Severity
    assert finding.fix
    assert finding.message.endswith(".")
    assert re.search(r"\d", finding.message) or finding.code.startswith("DATA")
    assert finding.evidence.height
    if "start_ns" in finding.evidence.columns:
        assert {"window", "rank", "dur_ns"} <= set(finding.evidence.columns)
        assert finding.evidence["start_ns"].is_not_null().any()
        assert (finding.evidence["dur_ns"].drop_nulls() >= 0).all()


cells = st.lists(st.sampled_from("ab.x"), min_size=12, max_size=12).map("".join)


@settings(max_examples=4, deadline=None)
@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=3))
def test_findings_on_any_timeline_are_well_formed(ranks):
    traces = [
        drawn_traces.trace(
            f"step 000011112222\ncompute {compute}\ncomm {communication}\ncopy {copies}",
            rank=rank,
            scale_ns=1000,
            columns={"b": {"kind": "compute"}},
        )
        for rank, (compute, communication, copies) in enumerate(ranks)
    ]
    for finding in findings(drawn_traces.run(*traces)):
        is_well_formed(finding)
        assert set(finding.ranks) <= set(range(len(ranks)))


@settings(max_examples=4, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=3), st.integers(0, 3))
def test_a_run_with_overlapped_communication_has_no_findings(lengths, overlapped):
    # Steps of similar lengths without idle time, with a collective that compute overlaps.
    lengths = [9 + length for length in lengths]
    steps = "".join(str(step) * length for step, length in enumerate(lengths))
    compute = "".join("ab"[step % 2] * length for step, length in enumerate(lengths))
    run = drawn_traces.run(
        drawn_traces.trace(f"step {steps}\ncompute {compute}\ncomm {('x' * overlapped).ljust(len(steps), '.')}"),
        strategy="ddp",
    )
    report = check(run)
    assert report.findings == ()
    assert report.notes == ()


def test_findings_are_sorted_by_severity_then_impact():
    run = drawn_traces.run(drawn_traces.trace("step 0000000000\ncompute aaaaaa....\ncomm .....xxxx."), strategy="ddp")
    run._data_quality = pl.concat([run.data_quality, EXAMPLES["DATA001"].fires().data_quality])
    found = findings(run)
    assert [finding.code for finding in found] == ["COMM001", "DATA001"]
    assert found[0].severity >= found[1].severity
