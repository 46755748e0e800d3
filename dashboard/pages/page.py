"""What a page of the dashboard is: navigation, addresses, screenshots, browser tests and docs derive from it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self

import streamlit as st

from dashboard import crashes, findings, opening, run_store, sharing, widgets
from dashboard.components.share import control
from dashboard.run_catalog import Catalog
from dashboard.run_entry import RunEntry
from dashboard.run_store import OpenRun, tables
from dashboard.run_store.tables import Table
from dashboard.url_state import bind
from tracekit.report.headlines import Headline

ALL_RUNS, ONE_RUN, TOOLS = "", "Run", "Tools"
"""Sections of the sidebar, in their order."""
_REST = "The rest of the page is shown."
SNAPSHOTS_ONLY = "memory snapshots without traces"
NO_WORK = "The traces contain no kernels, and no operators on a CPU run. The page Diagnosis shows what is missing."
TAB = "tab"
"""The tab's parameter in the address."""


class Needs(Enum):
    """What must be there for a page, and what its `show` is called with."""

    CATALOG = "any run"
    """Called with the Selection."""
    ENTRY = "a run"
    """Called with the RunEntry, which is not opened."""
    SELECTION = "a run, and another to compare it with if you like"
    """Called with the Selection, whose first run is not opened."""
    RUN = "a run that opens"
    """Called with the OpenRun, under its heading."""
    WORK = "a run with kernels or operators"
    """The same, where the traces contain work."""
    SEVERAL = "several runs"
    """Called with the RunEntry objects, the reference first."""


@dataclass(frozen=True)
class Selection:
    """What pages can show: the runs, those chosen in the sidebar (the first is the run), and the history file."""

    catalog: Catalog
    runs: tuple[RunEntry, ...]
    history: Path | None = None


@dataclass(frozen=True)
class Tab:
    """A part of a page, which a person chooses by its name; `headline` is shown above the tabs."""

    name: str
    show: Callable[[OpenRun], None]
    headline: Callable[..., Headline | None]
    """A headline of `tracekit.report.headlines`."""
    lack: Callable[[OpenRun], str] = lambda _: ""
    """Returns why a run cannot show it, or ''. The page then has the reason instead of the tab."""


def lack_of(table: Table, reason: str) -> Callable[[OpenRun], str]:
    """Lack of a tab whose run has no rows in a table."""
    return lambda run: reason if run.table(table).is_empty() else ""


@dataclass(frozen=True)
class Page:
    """One page: `show` draws it, `address` is its path in the URL, `summary` its sentence in the documentation."""

    title: str
    address: str
    summary: str
    show: Callable[[Any], None] = lambda _: None
    needs: Needs = Needs.RUN
    section: str = ONE_RUN
    follows_recording: bool = False
    """Whether the page refreshes itself while the run is being recorded."""
    show_snapshots: Callable[[RunEntry], None] | None = None
    """Draws a run that has memory snapshots and no traces; other pages show the entry's problem."""
    families: tuple[str, ...] = ()
    """Rules whose findings it shows, by the letters of their codes: the menu has the cost of the costliest one."""
    headline: Callable[[Any], Headline | None] | None = None
    """Returns the sentence that answers the page's question, of what `show` is called with.

    It is shown above what `show` draws; a page that draws its own title calls `widgets.headline` below it.
    """
    tabs: tuple[Tab, ...] = ()
    """The parts of a page of one run, in place of `show` and `headline`."""

    @classmethod
    def described_by(cls, doc: str | None, address: str, *more: Any, **options: Any) -> Self:
        """Return the page whose title and summary are the docstring of its module: "Title: summary."."""
        title, _, summary = " ".join((doc or "").split()).rstrip(".").partition(": ")
        return cls(title, address, summary, *more, **options)

    def cost_ratio(self, entry: RunEntry) -> float:
        """Cost of the costliest warning on this page, as a share of the step; 0 where the run was not checked.

        In a run without warnings, that of the costliest information.
        """
        impacts = entry.summary.impacts if entry.summary else {}
        return max((impact for code, impact in impacts.items() if findings.family(code) in self.families), default=0.0)

    def lack(self, entry: RunEntry, listed_runs: int) -> str:
        """Return in few words why a run has nothing for this page, as far as that is known before it is opened."""
        if self.needs is Needs.SEVERAL:
            return "" if listed_runs > 1 else "one run"
        if self.needs in (Needs.CATALOG, Needs.ENTRY):
            return ""
        if entry.snapshots:
            return "" if self.show_snapshots else "no trace"
        if entry.problem:
            return "no trace"
        if self.needs is Needs.WORK and entry.summary and not entry.summary.has_work:
            return "no work"
        if self.show_snapshots and entry.summary and not entry.summary.has_memory and not entry.has_snapshots:
            return "no data"
        return ""

    def open(self, selection: Selection) -> None:
        """Show the page, or say why the selection cannot be shown, and offer to share it. Raises TracekitError."""
        sharing.begin(None if self.needs is Needs.CATALOG else self.title)
        if self.needs in (Needs.RUN, Needs.WORK):
            self._open_run(selection.runs[0])
        else:
            arguments = {Needs.ENTRY: selection.runs[0], Needs.SEVERAL: selection.runs}
            self._show(self.show, self.headline, arguments.get(self.needs, selection))
        control.offer()

    def _show_run(self, run: OpenRun) -> None:
        if not self.tabs:
            self._show(self.show, self.headline, run)
            return
        lacks = {tab.name: tab.lack(run) for tab in self.tabs}
        tabs = {tab.name: tab for tab in self.tabs if not lacks[tab.name]}
        requested = st.query_params.get_all(TAB)
        available = [name for name in requested if name in tabs]
        if requested[1:] and available:  # an old address names all that have its content, the best first
            st.query_params[TAB] = available[0]
        chosen = tabs[st.session_state[bind(TAB, list(tabs))]]

        def show(run: OpenRun) -> None:
            if len(tabs) > 1:
                widgets.segments("Tab", TAB, list(tabs))
            missing = {name: lack for name, lack in lacks.items() if lack}
            if missing:
                with st.expander(f"Not in this run: {', '.join(missing)}", expanded=not available and bool(requested)):
                    for name, lack in missing.items():
                        widgets.caption(f"**{name}** {widgets.plain(lack)}")
            chosen.show(run)

        self._show(show, lambda run: run.headline(chosen.headline), run)

    def _show(self, show: Callable[[Any], None], headline: Callable[[Any], Headline | None] | None, shown: Any) -> None:
        if headline is not None:
            with widgets.measuring():
                crashes.guard(
                    lambda of: widgets.headline(headline(of)),
                    f"the headline of the page {self.title}", _REST, headline.__module__,
                )(shown)  # fmt: skip
        show(shown)

    def _open_run(self, entry: RunEntry) -> None:
        if self.follows_recording:
            run_store.follow(entry)
        if entry.snapshots:
            widgets.title(entry.name, SNAPSHOTS_ONLY)
            (self.show_snapshots or widgets.snapshots_only)(entry)
            return
        if entry.problem:
            widgets.title(entry.name)
        run = opening.open_run(entry)
        if run is None:
            return
        widgets.heading(entry, run)
        for code, error in run.crashed_rules.items():
            crashes.show(crashes.describe_rule(code, error), "The findings of the other rules are shown.")
        if self.needs is Needs.WORK and run.table(tables.BREAKDOWN_BY_RANK).is_empty():
            widgets.info(NO_WORK)
        else:
            self._show_run(run)
