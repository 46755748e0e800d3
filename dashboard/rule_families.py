"""Rules by family: the letters of their codes, as the registry lists them, those of plugins among them."""

import re
from collections.abc import Sequence

import polars as pl
import streamlit as st

from dashboard import run_store, widgets
from dashboard.run_catalog import RunEntry
from tracekit.rules import all_rules
from tracekit.rules.rule import Finding, Report

WITH_A_PAGE = ("COMM", "RANK", "STREAM", "HOST", "MEM", "CKPT", "DATA")
"""Families that a page of their own tells of."""
COLUMNS = {
    "family": pl.String, "code": pl.String, "rule": pl.String, "findings": pl.Int64, "impact_ratio": pl.Float64,
    "cost_ns": pl.Int64, "could not judge": pl.String,
}  # fmt: skip


def family(code: str) -> str:
    """Return the letters before a code's number.

    >>> family("COMM001")
    'COMM'
    """
    return re.sub(r"\d+$", "", code)


def judged(report: Report) -> pl.DataFrame:
    """Return each rule of the registry with what it found: columns COLUMNS; one row per rule that was asked."""
    rows = []
    for rule in all_rules():
        if report.rules and rule.code not in report.rules:
            continue
        own = [found for found in report.findings if found.code == rule.code]
        worst = max((found.impact for found in own), default=None)
        cost_ns = max((found.cost_ns for found in own), default=None)
        blind = report.blind_spots.get(rule.code)
        rows.append((family(rule.code), rule.code, rule.name(), len(own), worst, cost_ns, blind))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def of_families(findings: Sequence[Finding], families: Sequence[str]) -> dict[str, Finding]:
    """Return the findings of some families by their keys on the overview."""
    return {key: found for key, found in widgets.finding_keys(findings).items() if family(found.code) in families}


def show(held: run_store.OpenRun, *families: str) -> None:
    """Show the findings of some families, folded: what they cost stands on the overview too."""
    found = of_families(held.report.findings, families)
    if not found:
        return
    codes = ", ".join(dict.fromkeys(each.code for each in found.values()))
    with st.expander(f"{len(found)} finding{'s' * (len(found) > 1)}: {widgets.plain(codes)}"):
        for key, each in found.items():
            widgets.finding(each, held, key=key)


def begin(entry: RunEntry) -> run_store.OpenRun | None:
    """Begin a page about the work in a run as `parts.begin` does; None, and said, where the traces hold none."""
    held = widgets.begin(entry)
    if held is None or run_store.by_rank(entry).height:
        return held
    st.info("The traces hold no work: no kernels, and no operators on a CPU run. Data quality says what is missing.")
    return None
