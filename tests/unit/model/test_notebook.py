"""Notebook output of runs and findings."""

import subprocess
import sys

import polars as pl

from tests.support import drawn_traces
from tracekit.rules.rule import Finding, Severity

MARKUP = "<img src=x onerror=alert(1)>"


def test_a_run_shows_its_traces_without_reading_them():
    run = drawn_traces.run(*(drawn_traces.trace("compute  aa", rank=rank) for rank in range(20)), path="folder/<b>run")
    html = run._repr_html_()
    assert "<b>run" not in html.replace("<b>&lt;", "")
    assert "drawn-rank15" in html
    assert "and 4 more" in html
    assert not len(run._loaded.traces)


def test_a_finding_shows_message_fix_and_evidence_as_text():
    evidence = pl.DataFrame({"name": [MARKUP] * 12, "start_ns": [10**18 + i for i in range(12)], "dur_ns": [1500] * 12})
    found = Finding("COMM001", Severity.WARNING, f"a {MARKUP}", f"b {MARKUP}", evidence=evidence)
    html = found._repr_html_()
    assert "<img" not in html
    assert "1.5 µs" in html
    assert "9 ns" in html
    assert "and 2 more rows" in html


def test_a_finding_without_evidence_shows_itself():
    assert "<table" not in Finding("DATA001", Severity.INFO, "no steps", "")._repr_html_()


def test_notebook_output_needs_no_plotting_library():
    code = (
        "import sys, tracekit.rules.rule; sys.exit(bool({'plotly', 'streamlit', 'pandas', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
