"""The table of all rules on the page Diagnosis."""

import dataclasses

import polars as pl
import pytest

pytest.importorskip("streamlit")

from dashboard import findings
from tests.browser import recorded
from tests.support.dashboard_pages import html_of, page, runs
from tracekit.ingest import loader
from tracekit.rules import engine

_runs = runs


def test_an_upper_bound_is_neither_an_impact_nor_a_cost(runs):
    report = engine.check(loader.load(str(runs / recorded.GOOD)))
    found = next(each for each in report.findings if each.cost_ns)
    bound = dataclasses.replace(found, is_upper_bound=True, impact=0.9, cost_ns=10 * found.cost_ns, subject="other")

    def row(*shown):
        table = findings.rule_table(dataclasses.replace(report, findings=shown))
        return table.row(by_predicate=pl.col("code") == found.code, named=True)

    both = row(found, bound)
    assert (both["findings"], both["impact_ratio"], both["cost_ns"]) == (2, found.impact, found.cost_ns)
    assert (both["upper_bound_ratio"], both["upper_bound_ns"]) == (0.9, 10 * found.cost_ns)
    alone = row(bound)
    assert (alone["impact_ratio"], alone["cost_ns"], alone["upper_bound_ratio"]) == (None, None, 0.9)
    assert row(found)["upper_bound_ratio"] is None


def test_the_page_and_its_shared_file_show_the_same_texts(runs):
    shown = page("diagnosis", runs / recorded.GOOD, trust="True")
    assert not shown.exception
    recording = shown.session_state["shared_view"]
    assert recording.is_complete
    texts = [part for part in recording.parts if isinstance(part, str)]
    assert any(part in html_of(shown) for part in texts if "tk-headline" in part)
    for heading in shown.subheader:
        assert f"<h2>{heading.value}</h2>" in texts
