"""Data quality: what to doubt, what each rank recorded, what is missing, and how to record it."""

import polars as pl
import streamlit as st

from dashboard import rule_families, run_facts, run_store, widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.quality import contents, trace_quality
from tracekit.analysis.time import summary
from tracekit.model import units
from tracekit.sync import collective_matching

FAMILY = "DATA"
FACTS = (collective_matching.calls, trace_quality.data_quality, *contents.FACTS)


def page(entry: RunEntry) -> None:
    """Say how far the numbers of a run can be trusted, and what would make them better."""
    held = widgets.begin(entry)
    if held is None:
        return
    with st.spinner("Measuring"):
        missing = run_facts.across(entry, contents.missing, FACTS)
    _doubts(held)
    _ranks(entry, held)
    _clocks(entry)
    _missing(missing)
    _judged(held)


def _doubts(held: run_store.OpenRun) -> None:
    st.subheader("What to doubt")
    found = rule_families.of_families(held.report.findings, (FAMILY,))
    for key, each in found.items():
        widgets.finding(each, held, key=key)
    if not found:
        st.success("Nothing in the files makes the numbers doubtful.", icon=":material/check:")


def _ranks(entry: RunEntry, held: run_store.OpenRun) -> None:
    st.subheader("What each rank recorded")
    files = pl.DataFrame(
        [(source.window, source.rank, source.size_bytes) for source in held.run.sources],
        schema={"window": pl.Int64, "rank": pl.Int64, "file_bytes": pl.Int64},
        orient="row",
    )
    held_by = run_facts.table(entry, contents.contents)
    reasons = (
        run_facts.table(entry, trace_quality.data_quality)
        .group_by("window", "rank")
        .agg(pl.len().cast(pl.Int64).alias("issues"))
    )
    place = ["window", "rank"]
    table = files.join(held_by, on=place, how="left", maintain_order="left")
    table = table.join(reasons, on=place, how="left", maintain_order="left").with_columns(pl.col("issues").fill_null(0))
    whole = files["window"].n_unique() == 1
    where = pl.when("on_device").then(pl.lit("device")).otherwise(pl.lit("CPU")).alias("work_on")
    shown = (table.drop("window") if whole else table).with_columns(where).drop("on_device")
    st.caption(
        "Rows of each table by rank. linked: device work whose launch is known; phased: launched in a known phase; "
        "shaped, stacked: ops with input shapes, Python frames; sized, grouped, sequenced: collectives of known size, "
        "group and number. Ranks that differ much in these recorded different things."
    )
    widgets.frame(
        shown.select("rank", "issues", "work_on", pl.all().exclude("rank", "issues", "work_on")), key="contents"
    )


def _clocks(entry: RunEntry) -> None:
    st.subheader("Clocks")
    table = run_facts.across(entry, summary.by_clock)
    known = table["residual_ns"].drop_nulls()
    if known.is_empty():
        st.caption(
            "The clocks of the ranks could not be compared: one rank only, or too few collectives in common. Nothing "
            "is told of who waits for whom."
        )
    else:
        st.caption(
            f"Each trace is moved by its offset, found from {int(table['pairs'].sum()):,} collectives that ranks "
            f"share; no difference between ranks below {units.duration(int(str(known.max())))} is told."
        )
    widgets.frame(table, key="clocks")


def _missing(missing: pl.DataFrame) -> None:
    st.subheader("What was not recorded, and how to record it")
    if missing.is_empty():
        st.caption("Everything that tracekit reads was recorded on every rank.")
        return
    rows = [
        (what, units.ranges(ranks), without_it, to_record) for what, ranks, without_it, to_record in missing.iter_rows()
    ]
    widgets.text_table(("missing", "on ranks", "without it", "next time"), rows, key="missing")


def _judged(held: run_store.OpenRun) -> None:
    st.subheader("What was judged")
    table = rule_families.judged(held.report)
    blind = table.drop_nulls("could not judge")
    st.caption(
        f"All {table.height} rules, those of plugins too, by family; {int((table['findings'] > 0).sum())} found "
        f"something, {blind.height} could not judge this run."
    )
    if blind.height:
        rows = blind.select(pl.format("{} {}", "code", "rule"), "could not judge").rows()
        widgets.text_table(("rule", "could not judge, for"), rows, key="blind-spots")
    with st.expander("All rules"):
        widgets.frame(table.drop("could not judge"), key="rules")
    others = [name for name in table["family"].unique(maintain_order=True) if name not in rule_families.WITH_A_PAGE]
    found = rule_families.of_families(held.report.findings, others)
    if found:
        st.subheader("What rules of plugins found")
    for key, each in found.items():
        widgets.finding(each, held, key=key)
