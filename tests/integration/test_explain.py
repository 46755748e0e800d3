"""`tracekit explain`: rules, tables, causes, metrics and terms by their names."""

import json

import pytest

from tests.support.cli_runner import only_line, tracekit
from tracekit.report import explanations


def kinds(name: str, *options: str) -> list[str]:
    """Return what a name is said to be."""
    return [entry["kind"] for entry in json.loads(tracekit("explain", name, *options, "--format", "json").stdout)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("COMM001", ["rule"]),
        ("comm001-1a2b3c", ["rule"]),
        ("exposed-communication", ["rule"]),
        ("straggler", ["rule", "cause", "term"]),
        ("rate-limiter", ["cause"]),
        ("allocations", ["table", "metric"]),
        ("step_time", ["metric"]),
        ("step_time_ns", ["metric"]),
        ("Host-bound", ["term"]),
    ],
)
def test_a_name_is_explained_as_all_that_it_names(name, expected):
    assert kinds(name) == expected


def test_a_kind_leaves_out_the_others():
    assert kinds("straggler", "--kind", "cause") == ["cause"]
    refused = tracekit("explain", "straggler", "--kind", "table")
    assert refused.returncode == 2
    assert "straggler" in only_line(refused)


def test_without_a_name_every_kind_is_listed():
    entries = json.loads(tracekit("explain", "--format", "json").stdout)
    assert {entry["kind"] for entry in entries} == {"rule", "table", "cause", "metric", "term"}
    names = {entry["name"] for entry in entries}
    assert names >= {"COMM001", "ops", "late-launch", "step_time", "critical path"}
    assert all(entry["meaning"] for entry in entries)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("COM001", "COMM001"), ("comm01", "COMM001"), ("opps", "ops"), ("stp_time", "step_time"), ("slack", "")],
)
def test_an_unknown_name_leads_to_the_one_that_was_meant(name, meant):
    done = tracekit("explain", name)
    assert done.returncode == (2 if meant else 0)
    assert meant in done.stderr


def test_pages_are_written_as_markdown_and_html():
    assert tracekit("explain", "ops", "--kind", "table", "--format", "markdown").stdout.count("\n## ") == 1
    rules = tracekit("explain", "--kind", "rule", "--format", "markdown").stdout
    assert all(code in rules for code in ("COMM001", "HOST006", "DATA001"))
    assert "<title>COMM001  exposed-communication</title>" in tracekit("explain", "COMM001", "--format", "html").stdout


def test_terms_are_those_of_the_glossary():
    terms = {entry.name: entry.meaning for entry in explanations.terms()}
    assert len(terms) > 40
    assert terms["slack"].startswith("how much later")
    assert "term" not in terms
