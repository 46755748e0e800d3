"""Compare: several runs side by side, with verdicts as `tracekit compare` gives them and the causes of regressions."""

import contextlib
from collections.abc import Sequence

import polars as pl
import streamlit as st

from dashboard import downloads, opening, run_store, widgets
from dashboard.pages.page import Needs, Page
from dashboard.run_entry import RunEntry
from dashboard.run_store import regression
from dashboard.run_store.regression import Change, Comparison, ScalingComparison, Verdict
from dashboard.url_state import bind_flag
from tracekit.errors import NotComparableError
from tracekit.model import escaping
from tracekit.report import call_changes, charts, comparison, html_fragments, scaling, step_change, step_verdict
from tracekit.report.headlines import Headline

_WIDTHS = {"after": "as wide as after", "before": "as wide as before"}
MAX_DIFFERENCES = 5
"""Differences of device, software, model or work that are shown above the numbers."""
MAX_NAME = 40
"""Characters of a run's name above its column."""


def show(entries: Sequence[RunEntry]) -> None:
    """Show how each chosen run differs from the first, why, and the mean step of all."""
    widgets.title("Compare")
    if len(entries) < 2:
        widgets.info("Pick one or more runs under 'Compare with' in the sidebar, or select several on the page Runs.")
        return
    headline = st.empty()
    steps = [(entry, _read(entry)) for entry in entries]
    usable = [entry for entry, table in steps if table is not None]
    if len(usable) >= 2:
        by_size = _by_size(usable)
        with headline:
            widgets.headline(_scaling_headline(by_size) if by_size else _headline(usable[0], usable[1:]))
        if by_size:
            _scaling(by_size)
        _differences(usable[0], usable[1:], is_stated=not by_size and len(usable) == 2)
        widgets.subheader("What changed the step")
        by_name = {entry.name: entry for entry in usable[1:]}
        candidate = by_name[widgets.segments("Run", "changed_run", list(by_name))] if len(by_name) > 1 else usable[1]
        _call_changes(usable[0], candidate)
        _step_change(usable[0], candidate)
        _call_stacks(usable[0], candidate)
    breakdowns = {entry.name: table for entry, table in steps if table is not None and table.height}
    widgets.subheader("Mean step")
    if breakdowns:
        widgets.chart(charts.comparison(breakdowns), key="comparison")
    else:
        widgets.info(
            "None of these runs has a step to break down. Record with profiler.step() after each optimizer step."
        )


def _read(entry: RunEntry) -> pl.DataFrame | None:
    """Breakdown by step of a run, with all that comparisons read measured; None where it cannot be opened."""
    run = opening.open_run(entry, lambda name, about: st.caption(f"{widgets.plain(name)}: {widgets.plain(about)}"))
    if run is None:
        return None
    with widgets.measuring(f"Measuring {widgets.plain(entry.name)}"):
        run.measure_comparisons()
    return run_store.breakdown_by_step(entry)


def _headline(reference: RunEntry, candidates: Sequence[RunEntry]) -> Headline | None:
    """Sentence on how the step time of the candidate that changed most compares with the reference."""
    changes = []
    for entry in candidates:
        with contextlib.suppress(NotComparableError):  # shown below
            compared = regression.compare(reference, entry)
            changes += [(compared, compared.step)] if compared.step is not None else []
    if not changes:
        return None
    compared, change = max(changes, key=lambda pair: abs(pair[1].change or 0.0))
    text = comparison.with_minus_signs(step_verdict.headline(compared))
    return Headline(text, status=html_fragments.change_status(compared, change))


def _by_size(entries: Sequence[RunEntry]) -> ScalingComparison | None:
    """Return the comparison of runs of different size; None where their sizes, or the work of a step, do not say so."""
    with contextlib.suppress(NotComparableError):
        return regression.sizes(*entries)
    return None


def _scaling_headline(compared: ScalingComparison) -> Headline:
    """Sentence on the run with the most GPUs."""
    largest = max(compared.steps, key=lambda step: (step.run.gpus, step.run.step_work))
    text, losses = map(comparison.with_minus_signs, (scaling.headline(largest, compared), scaling.losses(largest)))
    return Headline(text, losses, status=scaling.status(largest))


def _scaling(compared: ScalingComparison) -> None:
    """Show throughput, efficiency and what each part of the step grew by."""
    widgets.subheader("Scaling")
    widgets.chart(charts.scaling(compared), key="scaling")
    for cells in (scaling.run_cells(compared), scaling.contribution_cells(compared)):
        widgets.text_table(cells)
    downloads.table(scaling.as_table(compared), key="scaling")
    widgets.caption(
        "Efficiency is throughput per GPU over that of the first run. The ideal step has its GPU time per token; what "
        "the parts take longer adds up to what the step does. Verdicts below compare steps of different work."
    )
    widgets.note("; ".join(compared.notes))


def _differences(reference: RunEntry, candidates: Sequence[RunEntry], *, is_stated: bool) -> None:
    """Show what differs; `is_stated` says that the headline of the page has the sentence on the only candidate."""
    widgets.subheader(f"Compared with {widgets.plain(reference.name)}")
    comparisons: list[Comparison] = []
    for entry in candidates:
        try:
            comparisons.append(regression.compare(reference, entry))
        except NotComparableError as error:
            widgets.problem(str(error))
        else:
            heading = entry.name if is_stated and comparisons[-1].step is not None else ""
            gate = regression.check(reference, entry)
            widgets.html(html_fragments.comparison_verdict(comparisons[-1], gate, heading=heading))
    differences = list(dict.fromkeys(note for compared in comparisons for note in compared.differences))
    widgets.note("; ".join(differences[:MAX_DIFFERENCES]))
    if comparisons:
        is_filtered = st.toggle("Only significant changes", key=bind_flag("changed"))
        header, rows, classes = _table(comparisons, only_significant=is_filtered)
        right = [False, *(True for _ in header[1:])]
        if rows:
            widgets.html(escaping.html_table(header, rows, right=right, classes=classes))
            downloads.cells(header, rows, key="comparison")
        else:
            widgets.info("No metric changed significantly.")
    widgets.caption(
        "Medians over steps. Changes have 99% confidence intervals, which include how much recordings of one program "
        "usually differ."
    )
    of_ranks = list(dict.fromkeys(note for compared in comparisons for note in compared.rank_notes))
    widgets.note("; ".join(of_ranks))
    shown_notes = {*of_ranks, *differences[:MAX_DIFFERENCES]}
    notes = [*dict.fromkeys(note for compared in comparisons for note in compared.notes if note not in shown_notes)]
    if notes:
        with st.expander(f"Other differences between these runs ({len(notes)})"):
            for note in notes:
                st.markdown("- " + widgets.plain(note))


def _call_changes(reference: RunEntry, candidate: RunEntry) -> None:
    """Show whether calls are extra, larger, slower or late; where runs cannot be compared, the next table says it."""
    with st.spinner("Comparing calls"), contextlib.suppress(NotComparableError):
        cells = call_changes.cells(regression.compare_calls(reference, candidate))
        if cells is not None:
            widgets.text_table(cells, key="call_changes")
            widgets.caption(
                "What the calls of the median step changed by: those that only one run has, the same ones with other "
                "shapes, slower or late ones. They add up to the change of the step; calls is their number in a step."
            )


def _call_stacks(reference: RunEntry, candidate: RunEntry) -> None:
    """Draw the time of both runs by call stack, coloured by change."""
    widgets.subheader("Call stacks that changed")
    with widgets.measuring("Adding up the calls"):
        trees = regression.call_tree_difference(reference, candidate)
    if not trees:
        widgets.info("The two runs have no work of the device or of the host in common.")
        return
    kinds = [kind for kind in regression.CALL_TREE_KINDS if kind in trees]
    work = widgets.segments("Time of", "changed_time_of", kinds[::-1])
    side = widgets.segments("Width", "changed_width", _WIDTHS)
    figure = charts.difference_icicle(trees[work], f"{work} time, {candidate.name}", is_before=side == "before")
    widgets.chart(figure, key="comparison-stacks")
    widgets.caption(
        "Time per step and rank. Red frames take longer than before, blue ones less, full colour from half as long "
        "again; stacks that are gone show with the width before. Click a frame to see it alone."
    )


def _step_change(reference: RunEntry, candidate: RunEntry) -> None:
    """Show which operators or kernels changed the step of one candidate."""
    key = widgets.segments("By", "changed_by", regression.STEP_KEYS)
    try:
        with st.spinner(f"Comparing the steps of {widgets.plain(candidate.name)}"):
            changed = regression.step_changes(reference, candidate)[key]
    except NotComparableError as error:
        widgets.info(widgets.plain(str(error)))
        return
    cells = step_change.cells(changed, step_change.DEFAULT_TOP)
    verdicts = changed.rows["verdict"].head(len(cells.rows)).to_list()
    colours = [step_verdict.colour_verdict(changed.compared, Verdict(verdict)) for verdict in verdicts]
    widgets.text_table(cells, classes=[[*("" for _ in cells.header[1:]), colour.value] for colour in colours])
    downloads.table(changed.rows, key="step_change")
    widgets.caption(
        "Time of the median step, each moment charged once: to the operator whose kernel runs, or to the cause "
        f"of idle time. The changes of all {changed.rows.height:,} rows add up to that of the step; the download has "
        "them all."
    )


def _table(
    comparisons: Sequence[Comparison], *, only_significant: bool
) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Return header, rows and the class of each cell: one row per metric that any two runs share."""
    by_metric = [{change.metric: change for change in compared.changes} for compared in comparisons]
    metrics = dict.fromkeys(metric for changes in by_metric for metric in changes)
    names = ("metric", comparisons[0].reference, *(compared.candidate for compared in comparisons))
    rows, classes = [], []
    for metric in metrics:
        changes = [by_name.get(metric) for by_name in by_metric]
        if only_significant and not any(change and html_fragments.is_conclusive(change) for change in changes):
            continue
        reference = regression.metric_text(metric, next(change.reference for change in changes if change))
        rows.append([comparison.label(metric), reference, *(_cell(change, reference) for change in changes)])
        colours = [
            "" if change is None else step_verdict.colour_verdict(compared, change.verdict).value.replace(" ", "-")
            for compared, change in zip(comparisons, changes, strict=True)
        ]
        classes.append(["", "", *colours])
    return [escaping.inert(name, MAX_NAME) for name in names], rows, classes


def _cell(change: Change | None, reference: str) -> str:
    """Return a value and its change; also what it is compared with, where that is not the `reference` of the row.

    Two candidates with different ranks are each compared on the ranks that they share with the reference.
    """
    if change is None:
        return widgets.MISSING
    base = regression.metric_text(change.metric, change.reference)
    against = "" if base == reference else f" against {base}"
    value = f"{regression.metric_text(change.metric, change.candidate)}{against} · {comparison.change_text(change)}"
    return comparison.with_minus_signs(f"{value}: {step_verdict.VERDICTS[change.verdict]}")


PAGE = Page.described_by(__doc__, "compare", show, Needs.SEVERAL)
