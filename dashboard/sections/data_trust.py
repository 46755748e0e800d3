"""How far the numbers of a run can be trusted: data-quality issues, recorded and missing data, clocks, all rules."""

import polars as pl
import streamlit as st

from dashboard import findings, widgets
from dashboard.run_store import OpenRun, tables
from tracekit.model import units
from tracekit.report.document import Cells

_CONTENTS = {
    "linked": "with launch",
    "phased": "with phase",
    "shaped": "with shapes",
    "stacked": "with stacks",
    "sized": "with size",
    "grouped": "with group",
    "sequenced": "with sequence number",
    "totals": "with allocated bytes",
    "step_times": "with step time",
}
"""The headings of what a rank recorded."""


def show(run: OpenRun) -> None:
    """Show how far the numbers of a run can be trusted, and what would improve them."""
    with widgets.measuring():
        missing = run.table(tables.MISSING_DATA)
    widgets.subheader("Data-quality issues")
    issues = findings.of_families(run.report.findings, ("DATA",))
    findings.show_all(issues, run)
    if not issues:
        widgets.caption("The files have no data-quality issue.")
    _contents(run)
    _clocks(run)
    _missing(missing)
    _rules(run)


def _contents(run: OpenRun) -> None:
    widgets.subheader("Recorded data by rank")
    files = pl.DataFrame(
        [(source.window, source.rank, source.size_bytes) for source in run.run.sources],
        schema={"window": pl.Int64, "rank": pl.Int64, "file_bytes": pl.Int64},
        orient="row",
    )
    keys = ["window", "rank"]
    issues = run.table(tables.QUALITY_ISSUES).group_by(keys).agg(pl.len().cast(pl.Int64).alias("issues"))
    table = files.join(run.table(tables.CONTENTS), on=keys, how="left", maintain_order="left")
    table = table.join(issues, on=keys, how="left", maintain_order="left").with_columns(pl.col("issues").fill_null(0))
    work_on = pl.when("on_device").then(pl.lit("device")).otherwise(pl.lit("CPU")).alias("work_on")
    if files["window"].n_unique() == 1:
        table = table.drop("window")
    widgets.caption(
        "Rows of each table by rank: device activities, and how many have a known launch and phase; ops, and how many "
        "have input shapes and Python stacks; collectives, and how many have a known size, group and sequence number. "
        "Large differences between ranks mean that they recorded different things."
    )
    first = ("rank", "issues", "work_on")
    contents = table.with_columns(work_on).drop("on_device")
    widgets.frame(contents.select(*first, pl.all().exclude(first)), key="contents", labels=_CONTENTS)


def _clocks(run: OpenRun) -> None:
    widgets.subheader("Clocks")
    table = run.table(tables.CLOCKS)
    residuals = table["residual_ns"].drop_nulls()
    if residuals.is_empty():
        widgets.caption(
            "The clocks of the ranks could not be aligned: there is only one rank, or the ranks share too few "
            "collectives. Stragglers and waiting time are not measured."
        )
    else:
        widgets.caption(
            f"Each trace is shifted by its offset, estimated from {int(table['pairs'].sum()):,} collectives that ranks "
            f"share. Differences below {units.duration(int(str(residuals.max())))} are within clock error."
        )
    widgets.frame(table, key="clocks")


def _missing(missing: pl.DataFrame) -> None:
    widgets.subheader("Missing data, and how to record it")
    if missing.is_empty():
        widgets.caption("Every rank recorded everything that tracekit reads.")
        return
    rows = tuple((name, units.ranges(ranks), effect, fix) for name, ranks, effect, fix in missing.iter_rows())
    widgets.text_table(Cells(("missing", "on ranks", "effect", "how to record it"), rows), key="missing")


def _rules(run: OpenRun) -> None:
    widgets.subheader("Rules that ran")
    table = findings.rule_table(run.report)
    blind = table.drop_nulls("could not judge")
    widgets.caption(
        f"All {table.height} rules, those of plug-ins included: {int((table['findings'] > 0).sum())} reported findings "
        f"and {blind.height} could not judge this run."
    )
    if blind.height:
        rows = tuple(blind.select(pl.format("{} {}", "code", "rule"), "could not judge").iter_rows())
        widgets.text_table(Cells(("rule", "reason why it could not judge"), rows), key="blind-spots")
    with st.expander("All rules"):
        widgets.frame(table.drop("could not judge"), key="rules")
