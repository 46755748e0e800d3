"""Findings on pages: cards with their moment and evidence, and rules by family, those of plug-ins included.

A rule's family is the letters of its code: COMM of COMM001.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import polars as pl
import streamlit as st

from dashboard import downloads, moments, sharing, widgets
from dashboard.run_store import OpenRun, tables
from tracekit.model import escaping, units
from tracekit.replay.graph.causes.cause import Kind
from tracekit.report import html_fragments, phrases, quoted_moment
from tracekit.rules.registry import all_rules
from tracekit.rules.rule import Finding, Report

Findings: TypeAlias = dict[str, Finding]
"""Findings by a key that is unique even where one rule reports the same thing twice."""

SHOWN_FINDING = "shown_finding"
MAX_EVIDENCE_ROWS, SHARED_ROWS = 1000, 8
COLUMNS = {
    "family": pl.String, "code": pl.String, "rule": pl.String, "findings": pl.Int64, "impact_ratio": pl.Float64,
    "cost_ns": pl.Int64, "upper_bound_ratio": pl.Float64, "upper_bound_ns": pl.Int64, "could not judge": pl.String,
}  # fmt: skip


def show(finding: Finding, run: OpenRun, *, key: str, tick: Callable[[str, str], None] | None = None) -> None:
    """Show a finding with a button that opens the timeline at its moment, and its evidence.

    `tick` draws the box that removes its cause, of this name and the finding's key, from a prediction.
    """
    with st.container(border=True):
        card, picture = html_fragments.finding(finding), ""
        st.html(card)
        head, selection = finding.evidence.head(MAX_EVIDENCE_ROWS), None
        with st.container(key=f"moment-{key}", gap="xxsmall"):  # a click on the picture is one on its button
            if phrases.has_moment(finding):
                steps, clock = run.table(tables.BREAKDOWN_BY_STEP), run.table(tables.RUN_CLOCK)
                picture = quoted_moment.picture(finding, steps, clock)
                st.html(picture)
            with st.container(horizontal=True, vertical_alignment="center"):
                if phrases.has_moment(finding):
                    selection = f"evidence-{run.entry.name}-{key}"
                    _show_in_timeline(finding, run, moments.selected_row(head, selection), key=key)
                if tick is not None and finding.what_if is not None:
                    tick(finding.what_if.cause.name, key)
        sharing.html(escaping.fragment("card", card + picture))
        rows = finding.evidence.height
        if not rows:
            return
        with st.expander(f"Evidence, {units.count(rows, 'row')}"):
            widgets.frame(
                phrases.from_run_start(head, run.table(tables.RUN_CLOCK)), selection=selection, shared_rows=SHARED_ROWS
            )
            if rows > MAX_EVIDENCE_ROWS:
                widgets.caption(f"The first {MAX_EVIDENCE_ROWS:,} of {rows:,} rows; the download contains all.")
            downloads.table(finding.evidence, key=f"{finding.id}-evidence-{key}")


def _show_in_timeline(finding: Finding, run: OpenRun, row: Mapping[str, Any] | None, *, key: str) -> None:
    """Offer to show the selected row of the evidence, else the one that the finding quotes."""
    label = "Show in the timeline" if row is None else f"Show {moments.name(row)} in the timeline"
    if not st.button(label, key=f"show-{key}", help="Select a row of the evidence to show that one"):
        return
    st.session_state[SHOWN_FINDING] = key
    row = row or quoted_moment.quoted_row(finding)
    if row is not None:
        moments.show(run.entry, row, ranks=quoted_moment.leading_ranks(finding.evidence, row), finding=key)


def show_all(findings: Findings, run: OpenRun, tick: Callable[[str, str], None] | None = None) -> None:
    """Show findings one below the other."""
    for key, finding in findings.items():
        show(finding, run, key=key, tick=tick)


def show_families(run: OpenRun, *families: str) -> None:
    """Show the findings of some families, folded: the page Diagnosis shows all."""
    findings = of_families(run.report.findings, families)
    if not findings:
        return
    codes = ", ".join(dict.fromkeys(finding.code for finding in findings.values()))
    with st.expander(f"{units.count(len(findings), 'finding')}: {widgets.plain(codes)}"):
        show_all(findings, run)


def label(finding: Finding) -> str:
    """Return a finding in one line, for a list to choose from."""
    return escaping.inert(f"{finding.id}  {finding.sentence}", 120)


def by_key(findings: Sequence[Finding]) -> Findings:
    """Return findings by their keys."""
    return {f"{number}-{finding.id}": finding for number, finding in enumerate(findings)}


def is_of_host(finding: Finding) -> bool:
    """Whether the cause of a finding is on the host, so that its threads show why."""
    return family(finding.code) == "HOST" or (finding.what_if is not None and finding.what_if.cause.kind is Kind.HOST)


def of_families(findings: Sequence[Finding], families: Sequence[str]) -> Findings:
    """Return the findings of some families by their keys among all findings."""
    return {key: finding for key, finding in by_key(findings).items() if family(finding.code) in families}


def family(code: str) -> str:
    """Return the letters before a code's number.

    >>> family("COMM001")
    'COMM'
    """
    return re.sub(r"\d+$", "", code)


def rule_table(report: Report) -> pl.DataFrame:
    """Return each rule of the registry with its findings: columns COLUMNS; one row per rule that ran.

    Impact and cost are those of the costliest finding; what is only an upper bound has columns of its own.
    """
    rows = []
    for rule in all_rules():
        if report.rules and rule.code not in report.rules:
            continue
        findings = [finding for finding in report.findings if finding.code == rule.code]
        costs = _largest([finding for finding in findings if not finding.is_upper_bound])
        bounds = _largest([finding for finding in findings if finding.is_upper_bound])
        blind_spot = report.blind_spots.get(rule.code)
        rows.append((family(rule.code), rule.code, rule.name(), len(findings), *costs, *bounds, blind_spot))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def _largest(findings: Sequence[Finding]) -> tuple[float | None, int | None]:
    """Return the largest impact and the largest cost of findings; None without any."""
    impact = max((finding.impact for finding in findings), default=None)
    return impact, max((finding.cost_ns for finding in findings), default=None)
