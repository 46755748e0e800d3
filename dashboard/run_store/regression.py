"""Comparisons of runs, and histories of checked runs, as `tracekit compare` and `tracekit history` judge them."""

import contextlib
from dataclasses import replace
from pathlib import Path

import polars as pl
import streamlit as st

from dashboard import run_store
from dashboard.run_entry import RunEntry
from dashboard.run_store import OpenRun, cached_per_run
from tracekit.analysis.host import call_trees
from tracekit.errors import InputError, TracekitError
from tracekit.model.run import Run
from tracekit.regression import baseline as baselines
from tracekit.regression import comparison, gate, scaling, step_change
from tracekit.regression.comparison import Comparison, RunSamples
from tracekit.regression.gate import CheckResult
from tracekit.regression.history import store, trends
from tracekit.regression.history.trends import Group, Series
from tracekit.regression.metrics import metric_of
from tracekit.regression.scaling import RunSize, ScalingComparison, ScalingSide
from tracekit.regression.step_change import RunSteps, StepChange
from tracekit.regression.thresholds import Change, Verdict

__all__ = ["Change", "Comparison", "Group", "ScalingComparison", "Series", "StepChange", "Verdict"]
CALL_TREE_KINDS = call_trees.KINDS
STEP_KEYS = ("operator", "kernel", "module")
"""What the change of a step is explained by."""
MAX_COMPARISONS = 64


@cached_per_run(max_entries=MAX_COMPARISONS, max_private=MAX_COMPARISONS)
def compare(reference: RunEntry, candidate: RunEntry) -> Comparison:
    """Return the comparison; runs that differ in kind are compared too, with a note. Raises NotComparableError."""
    return comparison.compare(_samples(reference), _samples(candidate), allow_different=True)


@cached_per_run(max_entries=MAX_COMPARISONS, max_private=MAX_COMPARISONS)
def compare_calls(reference: RunEntry, candidate: RunEntry) -> Comparison:
    """Return the comparison with what the calls of the step changed by. Raises NotComparableError."""
    a, b = _open(reference), _open(candidate)
    # In one order, so that two sessions do not wait for each other.
    first, second = sorted((a, b), key=lambda opened: opened.run.path)
    with first.lock, second.lock:
        return comparison.compare_runs(a.run, b.run, allow_different=True)


@cached_per_run(max_entries=MAX_COMPARISONS, max_private=MAX_COMPARISONS)
def sizes(*entries: RunEntry) -> ScalingComparison | None:
    """Return the comparison of runs of different size with the first one; None where their sizes do not differ.

    Raises NotComparableError.
    """
    first, *others = (_open(entry).result_of(RunSize.of) for entry in entries)
    if not any(size.differs(first) for size in others):
        return None
    sides = [replace(_open(entry).result_of(ScalingSide.of), name=entry.name) for entry in entries]
    return scaling.compare_sizes(sides, allow_different=True)


@cached_per_run(max_entries=MAX_COMPARISONS, max_private=MAX_COMPARISONS)
def step_changes(reference: RunEntry, candidate: RunEntry) -> dict[str, StepChange]:
    """Change of the step, by each of STEP_KEYS. Raises NotComparableError."""
    a, b = _run_steps(reference), _run_steps(candidate)
    return {key: step_change.step_change(a, b, (key,), allow_different=True) for key in STEP_KEYS}


@cached_per_run(max_entries=MAX_COMPARISONS, max_private=MAX_COMPARISONS)
def check(reference: RunEntry, candidate: RunEntry) -> CheckResult | None:
    """Return a check of the candidate against the reference, for the root causes; None where it is impossible."""
    a, b = _open(reference), _open(candidate)
    try:
        baseline = a.compute(lambda run: baselines.of_reports([(a.report, run)]))
        result = b.compute(lambda _: gate.judge(b.report, None, baseline=baseline, allow_different=True))
    except TracekitError:  # the comparison has reported it
        return None
    # A cached result must not keep a run, and with it its traces, in memory.
    return replace(result, report=replace(result.report, run=Run(b.run.path, ())))


def call_tree_difference(reference: RunEntry, candidate: RunEntry) -> dict[str, pl.DataFrame]:
    """Return the time by call stack of both runs per step and rank, by kind: the kinds of which both have work."""
    runs = a, b = _open(reference), _open(candidate)
    step_shares = 1 / a.result_of(call_trees.steps), 1 / b.result_of(call_trees.steps)
    differences = {}
    for kind in call_trees.KINDS:
        with contextlib.suppress(InputError):  # no work of this kind
            before, after = (run.cached_table(call_trees.call_tree, kind) for run in runs)
            differences[kind] = call_trees.difference(before, after, step_shares)
    return differences


def history(path: Path) -> tuple[Group, ...]:
    """Return the runs of a history file by kind, read again when the file changes. Raises TracekitError."""
    files = (path, path.with_name(path.name + ".wal"))
    return _history(str(path), "-".join(f"{f.stat().st_mtime_ns} {f.stat().st_size}" for f in files if f.exists()))


def metric_text(metric: str, value: float | None) -> str:
    """Return a value of a metric in a readable unit."""
    return metric_of(metric).text(value)


@st.cache_resource(max_entries=4, show_spinner="Reading the history")
def _history(path: str, stamp: str) -> tuple[Group, ...]:  # noqa: ARG001  # the stamp is part of the cache's key
    return trends.groups(store.read(Path(path)))


def _open(entry: RunEntry) -> OpenRun:
    """Return an open run with all that comparisons read, measured in one pass."""
    opened = run_store.open_run(entry)
    opened.measure_comparisons()
    return opened


def _samples(entry: RunEntry) -> RunSamples:
    return _open(entry).compute(lambda run: RunSamples.of(run, entry.name))


def _run_steps(entry: RunEntry) -> RunSteps:
    return _open(entry).compute(lambda run: RunSteps.of(run, entry.name))
