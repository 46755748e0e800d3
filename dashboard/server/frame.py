"""The dashboard's frame: the runs it was opened on, the choice of one, the navigation.

Streamlit runs this file for each answer (`dashboard.server.app`).
"""

import operator
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import streamlit as st
from streamlit.navigation.page import StreamlitPage
from streamlit.runtime.scriptrunner import get_script_run_ctx

from dashboard import crashes, downloads, run_catalog, run_store, uploads, url_state, widgets
from dashboard.pages import DEFAULT, MOVED, all_pages
from dashboard.pages.page import ALL_RUNS, ONE_RUN, TOOLS, Needs, Page, Selection
from dashboard.run_catalog import Catalog
from dashboard.run_entry import RunEntry
from tracekit.errors import TracekitError, similar_names
from tracekit.model import escaping, units

# A local file: Streamlit would fetch icons given by name from a network.
ICON, _SCRIPT = (Path(__file__).with_name(name) for name in ("icon.svg", "page.js"))
_PLOTLY = next(Path(st.__file__).parent.glob("static/static/js/PlotlyChart.*.js"), None)
"""Streamlit's script of figures, which `page.js` loads before a page needs it; None where there is no such file."""

# How often a page checks for changes: while a run is being recorded, and otherwise.
LIVE_REFRESH_S, REFRESH_S = 3.0, 10.0
CHECK_REFRESH_S = 2.0
"""The same while listed runs are checked."""
_UPLOADED = "uploaded_stamp"
MAX_NAME = 120


def main() -> None:
    """Show the chosen page for the chosen run."""
    st.set_page_config(page_title="tracekit", page_icon=str(ICON), layout="wide")
    st.logo(str(ICON), size="large")
    arguments = tuple(sys.argv[1:])
    catalog = _catalog(tuple(word for word in arguments if not word.startswith("--")))
    entries = catalog.listing().entries
    history = run_catalog.history_file(arguments)
    if not entries:
        st.title("tracekit")
        st.info("No run was given. Open the dashboard on a run, or on a folder of runs:")
        st.code("tracekit dashboard runs/", language=None)
        return
    listed = {page.address: page for page in all_pages()}
    selection: Selection
    # A page shows the selection that is made below: the sidebar's widgets must know the page that they are on.
    links = {
        address: st.Page(
            lambda page=page: page.open(selection),
            title=page.title,
            url_path="root" if page is DEFAULT else address,
            default=page is DEFAULT,
        )
        for address, page in listed.items()
    }
    current = _navigate(listed, links)
    page = next(page for address, page in listed.items() if links[address] == current)
    is_bare = widgets.RUN not in st.query_params and widgets.RUN not in st.session_state
    if is_bare and page is DEFAULT and len(entries) > 1:
        st.switch_page(links["runs"])  # nobody named the run to open
    st.session_state[url_state.PAGE] = current.url_path
    requested = st.query_params.get(widgets.RUN, "")
    uploaded_before = st.session_state.get(_UPLOADED)
    runs = _choose_runs(entries)
    selection = Selection(catalog, runs, history)
    unknown = _unknown_run(requested, runs[0], entries)
    if runs[0].is_private and st.session_state[_UPLOADED] != uploaded_before and page.needs is Needs.CATALOG:
        widgets.go_to(DEFAULT.address)
    is_of_run = page.needs in (Needs.ENTRY, Needs.SELECTION, Needs.RUN, Needs.WORK)
    names = [page.title, *([runs[0].name] if is_of_run else []), "tracekit"]
    st.set_page_config(page_title=" · ".join(escaping.inert(name, MAX_NAME) for name in names))
    downloads.name_files_by(runs[0].name if is_of_run else "")
    with st.sidebar:
        st.html(_menu_notes(listed.values(), runs[0], len(entries)))
        _refresh_page(page, current, entries, selection)
        plotly = f"window.tracekitPlotly ??= './static/js/{_PLOTLY.name}';" if _PLOTLY else ""
        st.html(f"<script>{plotly}{_SCRIPT.read_text(encoding='utf-8')}</script>", unsafe_allow_javascript=True)
    if unknown and page.needs is not Needs.CATALOG:
        _say_unknown(unknown, entries)
        return
    try:
        current.run()
    except TracekitError as error:
        _explain(error, selection)
    except Exception as error:  # noqa: BLE001 whatever a page raises, such as one of a plug-in
        what = f"the page {page.title}"
        crashes.show(crashes.describe(what, error, page.show.__module__), "The other pages work.")


def _navigate(pages: dict[str, Page], links: dict[str, StreamlitPage]) -> StreamlitPage:
    """Show the navigation and return the page that was chosen."""
    st.session_state[widgets.PAGES] = links
    sections = {
        title: [links[address] for address, page in pages.items() if page.section == title]
        for title in (ALL_RUNS, ONE_RUN, TOOLS)
    }
    sections[ALL_RUNS] += [
        st.Page(lambda: None, title=pages[target].title, url_path=address, visibility="hidden")
        for address, (target, _) in MOVED.items()
    ]
    current = st.navigation(sections, expanded=True)
    if current.url_path in MOVED:
        target, parameters = MOVED[current.url_path]
        url_state.open_address(links[target], {**parameters, **url_state.parameters()})
    return current


def _menu_notes(pages: Iterable[Page], entry: RunEntry, listed_runs: int) -> str:
    """Style of the menu: what the findings of a page cost, or, in grey, why the run has nothing for it."""
    rules = []
    for page in pages:
        lack, cost_ratio = page.lack(entry, listed_runs), page.cost_ratio(entry)
        note = lack or (units.share(cost_ratio) if cost_ratio else "")
        path = "/" if page is DEFAULT else f"/{page.address}"
        if note:
            link = f'[data-testid="stSidebarNavLink"]:is([href$="{path}"], [href*="{path}?"])'
            rules.append(f'{link}::after {{content: "{note}"}}')
            others = f'{link}:not([aria-current="page"])'  # on its colour, grey is hard to read
            rules += [f"{others} :is(span, p) {{color: light-dark(#5c6573, #a3adba)}}"] if lack else []
    return f"<style>{' '.join(rules)}</style>"


def _unknown_run(requested: str, current: RunEntry, entries: Sequence[RunEntry]) -> str:
    """Return the run that the address named and that is not listed, until somebody chooses one; '' where there is none.

    The address then has the run that the sidebar shows.
    """
    is_listed = requested.startswith(uploads.NAME_BEGINS) or any(requested == entry.name for entry in entries)
    if requested and not is_listed:
        st.session_state[widgets.UNKNOWN_RUN] = (requested, current.name)
    name, shown_then = st.session_state.get(widgets.UNKNOWN_RUN, ("", ""))
    if current.name != shown_then:
        st.session_state.pop(widgets.UNKNOWN_RUN, None)
        return ""
    return str(name)


def _say_unknown(name: str, entries: Sequence[RunEntry]) -> None:
    """Say that no run has the name that the address had, and offer those with similar names."""
    widgets.problem(f"There is no run named {escaping.inert(name, MAX_NAME)} here; it may have been moved or renamed.")
    names = [entry.name for entry in entries]
    with st.container(horizontal=True):
        for similar in similar_names(name, names, limit=4) or names[:1]:
            if st.button(f"Open {widgets.plain(similar)}", key=f"open-{similar}"):
                widgets.go_to(DEFAULT.address, run=similar)
        if st.button("List all runs"):
            widgets.go_to("runs")


def _explain(error: TracekitError, selection: Selection) -> None:
    """Show an error that a page raised, such as files that changed meanwhile, and a button to read them again."""
    entry = selection.runs[0]
    widgets.problem(f"{entry.name}: {error}")
    if st.button("Read again", key="read_after_error"):
        run_store.read_again(entry)
        selection.catalog.forget()
        st.rerun()


def _refresh_page(page: Page, current: StreamlitPage, entries: Sequence[RunEntry], selection: Selection) -> None:
    catalog, entry = selection.catalog, selection.runs[0]
    if page.needs is Needs.CATALOG:
        is_live, is_due = any(listed.is_live for listed in entries), any(map(catalog.checks.is_due, entries))
        every_s = CHECK_REFRESH_S if is_due else LIVE_REFRESH_S if is_live else REFRESH_S
        _refresh(current, lambda: _has_listing_changed(catalog, entries), every_s)
    elif page.follows_recording:
        is_live = entry.is_live or bool(entry.problem)
        _refresh(current, lambda: _has_changed(entry, catalog), LIVE_REFRESH_S if is_live else REFRESH_S)
    else:
        _refresh(current)


def _has_listing_changed(catalog: Catalog, shown: Sequence[RunEntry]) -> bool:
    """Whether other runs or other results are listed than those shown; runs are checked while a page asks this."""
    entries = catalog.listing().entries
    catalog.checks.watch(entries)
    return entries != shown


def _has_changed(seen: RunEntry, catalog: Catalog) -> bool:
    """Return whether a run has other traces than when it was seen, can be opened now, or is no longer recorded."""
    state = operator.attrgetter("traces_stamp", "problem", "is_live")
    return any(state(entry) != state(seen) for entry in catalog.listing().entries if entry.path == seen.path)


def _refresh(current: StreamlitPage, is_old: Callable[[], bool] = lambda: False, every_s: float | None = None) -> None:
    """Rerun the page when it is out of date, which is checked every so many seconds.

    Needed on every page: a browser that has just opened another page may still ask once for the previous one. That
    request must be answered, with the page that the person opened.
    """
    page_hash = get_script_run_ctx().page_script_hash
    is_first_call = True

    def tick() -> None:
        nonlocal is_first_call
        if is_first_call:  # it belongs to the page itself
            is_first_call = False
        elif get_script_run_ctx().page_script_hash != page_hash:
            st.switch_page(current, query_params=url_state.parameters())
        elif is_old():
            st.rerun(scope="app")

    st.fragment(tick, run_every=every_s)()


def _choose_runs(entries: tuple[RunEntry, ...]) -> tuple[RunEntry, ...]:
    with st.sidebar:
        choice = st.container()
        uploaded = uploads.choose()
        if uploaded and st.session_state.get(_UPLOADED) != uploaded.stamp:
            st.session_state[widgets.RUN] = uploaded.name  # whoever uploads a trace wants to see it
        st.session_state[_UPLOADED] = uploaded.stamp if uploaded else None
        with choice:
            return widgets.choose_runs((*entries, uploaded) if uploaded else entries)


@st.cache_resource(max_entries=4, show_spinner=False)
def _catalog(paths: tuple[str, ...]) -> Catalog:
    return Catalog(paths)


if __name__ == "__main__":
    main()
