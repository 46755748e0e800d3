"""Runs that were opened: loaded and checked once, then kept for every page and every person looking.

A run is read again when its files change. What a page draws is kept apart from the traces: tables are small, traces
are not.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import streamlit as st

from dashboard.catalog import Entry
from tracekit import checking, loading
from tracekit.analysis import breakdown, samples
from tracekit.rule import Report
from tracekit.trace import Run

MAX_OPEN_RUNS = 3
_FACTS = (breakdown.by_step, breakdown.by_rank, samples.samples)


@dataclass(frozen=True, eq=False)
class Opened:
    """A run and its report. `lock` is held around whatever reads traces: a Run itself serves one thread."""

    run: Run
    report: Report
    lock: Any = field(default_factory=threading.RLock)


def opened(entry: Entry) -> Opened:
    """Return the run, loaded and checked. Raises TracekitError where that cannot be."""
    return _open(entry.path, entry.stamp)


def by_step(entry: Entry) -> pl.DataFrame:
    """Return the run's breakdown by step. Raises TracekitError."""
    return _tables(entry.path, entry.stamp)["by_step"]


def by_rank(entry: Entry) -> pl.DataFrame:
    """Return the run's breakdown by rank. Raises TracekitError."""
    return _tables(entry.path, entry.stamp)["by_rank"]


def measured(entry: Entry) -> pl.DataFrame:
    """Return the run's per-step samples. Raises TracekitError."""
    return _tables(entry.path, entry.stamp)["samples"]


@st.cache_resource(max_entries=MAX_OPEN_RUNS, show_spinner=False)
def _open(path: str, stamp: str) -> Opened:  # noqa: ARG001  # the stamp is part of the cache's key
    run = loading.load(path)
    run.measure(_FACTS)
    return Opened(run, checking.check(run))


@st.cache_resource(max_entries=200, show_spinner=False)
def _tables(path: str, stamp: str) -> dict[str, pl.DataFrame]:
    run = _open(path, stamp).run  # its facts are measured: no lock is needed to read them
    return {fact.__name__: run.table(fact) for fact in _FACTS}
