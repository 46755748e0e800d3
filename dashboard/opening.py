"""Opens a run for a page; while it is read and checked for the first time, shows what is known so far."""

from collections.abc import Callable

import streamlit as st

from dashboard import run_store, sharing, widgets
from dashboard.run_entry import RunEntry
from dashboard.run_store import OpenRun
from dashboard.run_store.first_opening import FirstOpening
from tracekit.model import escaping, units
from tracekit.report import charts

_SOON_S = 0.5
"""A run that opens within this time shows no progress."""
_POLL_S = 0.5
_MAX_WORD = 40
_OPENED = "opened_paths"
"""Key of the paths of the runs that this session has opened."""


def open_run(entry: RunEntry, heading: Callable[[str, str], None] = widgets.title) -> OpenRun | None:
    """Return the run, or show why it cannot be opened and return None.

    `heading` shows the name of the run, and what is known about it, above the progress of its first opening.
    """
    return widgets.try_reading(entry, lambda entry: open_with_progress(entry, heading))


def open_with_progress(entry: RunEntry, heading: Callable[[str, str], None] = widgets.title) -> OpenRun:
    """The run; until its first opening ends, its progress is shown. Raises TracekitError if it cannot be opened."""
    opened_paths: set[str] = st.session_state.setdefault(_OPENED, set())
    opening = run_store.start_opening(entry)
    # A page that follows a recording shows what it showed before until the new trace is read.
    is_followed = entry.is_live and entry.path in opened_paths
    if opening is not None and not is_followed and not opening.has_ended(_SOON_S):
        place = st.empty()
        with sharing.pause(), place.container():
            _show_progress(entry, opening, heading)
        place.empty()
    opened = run_store.open_run(entry) if opening is None else opening.result()
    opened_paths.add(entry.path)
    return opened


def _show_progress(entry: RunEntry, opening: FirstOpening[OpenRun], heading: Callable[[str, str], None]) -> None:
    """Show the progress, and where the time of the ranks read so far goes, until the run is open."""
    about = (entry.strategy, f"model {entry.model}" if entry.model else "", units.size(entry.size_bytes))
    heading(entry.name, " · ".join(escaping.inert(part, _MAX_WORD) for part in about if part))
    bar, claims, caption, figure = st.empty(), st.empty(), st.empty(), st.empty()
    drawn_traces = 0
    while not opening.has_ended(_POLL_S):
        read = opening.read_traces
        bar.progress(read / max(opening.traces, 1), _progress(entry, opening))
        if opening.first_claims:
            claims.markdown("\n".join(f"- {widgets.plain(claim)}" for claim in opening.first_claims))
        steps = opening.steps_by_rank
        if read > drawn_traces and steps is not None:
            ranks = units.count(steps["rank"].n_unique(), "rank")
            caption.caption(f"Where the time goes on the {ranks} read so far; findings follow")
            with figure.container():
                widgets.chart(charts.breakdown(steps), key=f"breakdown-{entry.name}-{read}", download=False)
            drawn_traces = read


def _progress(entry: RunEntry, opening: FirstOpening[OpenRun]) -> str:
    """Progress of the opening, in a sentence.

    >>> _progress(RunEntry("a", "a", files=8, size_bytes=1 << 20), FirstOpening())
    'Reading 8 files, 1 MiB'
    """
    remaining_s = opening.remaining_s
    if remaining_s is None:
        return f"Reading {units.count(entry.files, 'file')}, {units.size(entry.size_bytes)}"
    read = f"{opening.read_traces} of {units.count(opening.traces, 'trace')} read"
    if opening.read_traces < opening.traces:
        return f"{read}, about {_rough_time(remaining_s)} left"
    if opening.judged_rules == opening.rules:
        return f"{read}; {'pricing the findings by replays' if opening.rules else 'comparing the ranks'}"
    return f"{read}; {opening.judged_rules} of {units.count(opening.rules, 'rule')} applied"


def _rough_time(seconds: float) -> str:
    """Return a time as far as it can be known ahead.

    >>> _rough_time(0.2), _rough_time(43.4), _rough_time(200)
    ('1 s', '40 s', '3 min')
    """
    if seconds >= 90:
        return f"{seconds / 60:.0f} min"
    return f"{max(round(seconds), 1) if seconds < 10 else round(seconds, -1):.0f} s"
