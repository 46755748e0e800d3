"""Compare: several runs side by side, judged as `tracekit compare` judges them, with the cause of what is worse."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import streamlit as st

from dashboard import downloads, run_store, widgets
from dashboard.run_catalog import RunEntry
from tracekit.errors import NotComparableError, RuleError, TracekitError
from tracekit.model import escaping
from tracekit.model.run import Run
from tracekit.regression import baseline as baselines
from tracekit.regression import judgement
from tracekit.regression.change import Change
from tracekit.regression.comparison import Comparison, RunSamples, compare
from tracekit.regression.gate import CheckResult
from tracekit.report import charts, comparison, html_fragments

_T = TypeVar("_T")

MAX_NAME = 40
"""Characters of a run's name above its column."""


def page(chosen: Sequence[RunEntry]) -> None:
    """Show how each chosen run differs from the first, why, and the mean step of all."""
    st.html('<div class="tk-title"><b>Compare</b></div>')
    if len(chosen) < 2:
        st.info("Pick one or more runs under 'Compare with' in the sidebar, or select several on the page Runs.")
        return
    usable = [entry for entry in chosen if _opens(entry)]
    if len(usable) >= 2:
        _differences(usable)
    steps = {entry.name: run_store.by_step(entry) for entry in usable}
    drawn = {name: table for name, table in steps.items() if table.height}
    st.subheader("The mean step")
    if drawn:
        widgets.chart(charts.comparison(drawn), key="comparison")
    else:
        st.info("None of these runs has a step to break down. Record with profiler.step() after each optimizer step.")


def _differences(usable: Sequence[RunEntry]) -> None:
    reference = usable[0]
    st.subheader(f"Against {widgets.plain(reference.name)}")
    found = [(entry, each) for entry in usable[1:] if (each := _compared(reference, entry))]
    for entry, each in found:
        gate = _judged(reference, entry)
        st.html(html_fragments.comparison_verdict(each, gate))
    if found:
        only = st.toggle("Only what changed for certain", key=widgets.bind_flag("changed"))
        header, rows, classes = _table([each for _, each in found], only_changed=only)
        right = [False, *(True for _ in header[1:])]
        if rows:
            st.html(escaping.html_table(header, rows, right=right, classes=classes))
            downloads.cells(header, rows, key="comparison")
        else:
            st.info("No metric changed for certain.")
    st.caption(
        "Medians over steps; the interval holds 95% of the changes that other steps of the same runs would have shown. "
        "Another run of the same program may differ by more."
    )
    notes = list(dict.fromkeys(note for _, each in found for note in each.notes))
    if notes:
        with st.expander(f"What else differs between these runs ({len(notes)})"):
            for note in notes:
                st.markdown("- " + widgets.plain(note))


def _opens(entry: RunEntry) -> bool:
    if entry.problem:
        widgets.problem(entry.problem)
        return False
    try:
        with st.spinner(f"Reading {widgets.plain(entry.name)}"):
            run_store.by_step(entry)
    except (TracekitError, RuleError) as error:
        widgets.problem(f"{entry.name}: {error}")
        return False
    return True


def _compared(reference: RunEntry, candidate: RunEntry) -> Comparison | None:
    """Return the comparison; runs of different kind are compared too, with a word on it."""
    try:
        return _comparison(reference, candidate)
    except NotComparableError as error:
        widgets.problem(str(error))
        return None


def _judged(reference: RunEntry, candidate: RunEntry) -> CheckResult | None:
    """Return what a check of one run against the other comes to, for its causes; None where it cannot be made."""
    try:
        return _gate(reference, candidate)
    except TracekitError:  # said by the comparison already
        return None


def _kept(made: Callable[[RunEntry, RunEntry, str], _T]) -> Callable[[RunEntry, RunEntry], _T]:
    """Return `made` with what it makes kept for all who look; of dropped runs, only while their page is open."""
    for_all = st.cache_resource(made, max_entries=64, show_spinner=False)
    for_session = st.cache_resource(made, max_entries=64, show_spinner=False, scope="session")

    def of(reference: RunEntry, candidate: RunEntry) -> _T:
        both = " ".join((reference.name, reference.stamp, candidate.name, candidate.stamp))
        is_private = reference.is_private or candidate.is_private
        return (for_session if is_private else for_all)(reference, candidate, both)

    return of


@_kept
def _comparison(_reference: RunEntry, _candidate: RunEntry, both: str) -> Comparison:  # noqa: ARG001  # the cache's key
    return compare(_side(_reference), _side(_candidate), allow_different=True)


@_kept
def _gate(_reference: RunEntry, _candidate: RunEntry, both: str) -> CheckResult:  # noqa: ARG001  # the cache's key
    a, b = run_store.open_run(_reference), run_store.open_run(_candidate)
    with a.lock:
        held = baselines.of_reports([(a.report, a.run)])
    with b.lock:
        gate = judgement.judge(b.report, None, baseline=held, allow_different=True)
    # What is kept must not hold a run, and with it its traces.
    return replace(gate, report=replace(gate.report, run=Run(b.run.path, ())))


def _side(entry: RunEntry) -> RunSamples:
    return RunSamples(entry.name, run_store.open_run(entry).run.manifest, run_store.measured(entry))


def _table(found: Sequence[Comparison], *, only_changed: bool) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Return header, rows and the class of each cell: one row per metric that any two runs share."""
    by_metric = [{change.metric: change for change in each.changes} for each in found]
    metrics = dict.fromkeys(change.metric for each in found for change in each.changes)
    header = [
        escaping.inert(name, MAX_NAME) for name in ("metric", found[0].reference, *(each.candidate for each in found))
    ]
    rows, classes = [], []
    for metric in metrics:
        changes = [of_run.get(metric) for of_run in by_metric]
        if only_changed and not any(change and html_fragments.is_conclusive(change) for change in changes):
            continue
        reference = next(change.reference for change in changes if change)
        rows.append(
            [comparison.label(metric), escaping.cell(metric, reference), *(_cell(change) for change in changes)]
        )
        classes.append(["", "", *(change.verdict.value.replace(" ", "-") if change else "" for change in changes)])
    return header, rows, classes


def _cell(change: Change | None) -> str:
    if change is None:
        return widgets.MISSING
    told = f"{escaping.cell(change.metric, change.candidate)} · {comparison.change_text(change)}"
    return f"{told}: {change.verdict.value}".replace("-", "−")
