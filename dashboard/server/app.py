"""The dashboard's frame: the runs it was opened on, the choice of one, the pages.

`tracekit dashboard RUN…` runs this file under Streamlit, and so does
``streamlit run dashboard/server/app.py -- RUN…``.
"""

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.navigation.page import StreamlitPage
from streamlit.runtime.scriptrunner import get_script_run_ctx

from dashboard import run_catalog, run_store, uploads, url_state, widgets
from dashboard.pages import (
    checkpoints,
    communication,
    compare,
    contention,
    history,
    kernels,
    memory,
    overview,
    plan,
    quality,
    ranks,
    runs,
    sql,
    timeline,
    whatif,
)
from tracekit.errors import TracekitError

# A file of ours: Streamlit fetches icons given by name from a network.
ICON = Path(__file__).with_name("icon.svg")

# How often a page looks for news: where a run is being recorded, and where none is.
REFRESH_S, CALM_REFRESH_S = 3.0, 10.0
_DROPPED = "dropped_stamp"


def main() -> None:
    """Show the chosen page for the chosen run."""
    st.set_page_config(page_title="tracekit", page_icon=str(ICON), layout="wide")
    st.logo(str(ICON), size="large")
    st.html(widgets.STYLE)
    words = tuple(sys.argv[1:])
    paths = tuple(word for word in words if not word.startswith(run_catalog.HISTORY))
    known = _catalog(paths)
    listed = known.listing().entries
    past = run_catalog.history_file(words)
    if not listed:
        widgets.nothing_opened()
        return
    # The pages speak of what is chosen below: the choice must know the page that it is made on.
    pages = {
        "runs": st.Page(lambda: runs.page(known.listing, known.forget), title="Runs", url_path="runs"),
        "overview": st.Page(lambda: overview.page(chosen), title="Overview", url_path="root", default=True),
        "timeline": st.Page(lambda: timeline.page(chosen), title="Timeline", url_path="timeline"),
        "ranks": st.Page(lambda: ranks.page(chosen), title="Ranks", url_path="ranks"),
        "communication": st.Page(lambda: communication.page(chosen), title="Communication", url_path="communication"),
        "contention": st.Page(lambda: contention.page(chosen), title="Contention", url_path="contention"),
        "kernels": st.Page(lambda: kernels.page(chosen), title="Kernels", url_path="kernels"),
        "memory": st.Page(lambda: memory.page(chosen), title="Memory", url_path="memory"),
        "checkpoints": st.Page(lambda: checkpoints.page(chosen), title="Checkpoints", url_path="checkpoints"),
        "whatif": st.Page(lambda: whatif.page(chosen), title="What if", url_path="whatif"),
        "sql": st.Page(lambda: sql.page(chosen), title="SQL", url_path="sql"),
        "quality": st.Page(lambda: quality.page(chosen), title="Data quality", url_path="quality"),
        "compare": st.Page(lambda: compare.page((chosen, *others)), title="Compare", url_path="compare"),
        "plan": st.Page(lambda: plan.page(chosen), title="Plan", url_path="plan"),
    }
    if past is not None:
        pages["history"] = st.Page(lambda: history.page(past), title="History", url_path="history")
    st.session_state[widgets.PAGES] = pages
    named = st.Page(lambda: None, title="Overview by its name", url_path="overview", visibility="hidden")
    sections = _in_sections(pages)
    shown = st.navigation({**sections, "": [*sections[""], named]}, expanded=True)
    if shown == named:  # the default page has no address but the root
        st.switch_page(pages["overview"], query_params=url_state.parameters())
    is_bare = widgets.RUN not in st.query_params and widgets.RUN not in st.session_state
    if is_bare and shown == pages["overview"] and len(listed) > 1:
        st.switch_page(pages["runs"])  # nobody said which run to open
    st.session_state[url_state.PAGE] = shown.url_path
    before = st.session_state.get(_DROPPED)
    chosen, others = _choose(listed)
    if chosen.is_private and st.session_state[_DROPPED] != before and shown == pages["runs"]:
        widgets.go_to("overview")
    with st.sidebar:
        if shown == pages["runs"]:
            is_live = any(entry.is_live for entry in listed)
            _refresh(shown, lambda: known.listing().entries != listed, REFRESH_S if is_live else CALM_REFRESH_S)
        elif shown == pages["overview"]:
            is_live = chosen.is_live or bool(chosen.problem)
            _refresh(shown, lambda: _is_other(chosen, known), REFRESH_S if is_live else CALM_REFRESH_S)
        else:
            _refresh(shown)
    try:
        shown.run()
    except TracekitError as error:
        _say(error, chosen, known)


def _say(error: TracekitError, chosen: run_catalog.RunEntry, known: run_catalog.Catalog) -> None:
    """Show what went wrong while a page was made, such as files that changed under it, and the way on."""
    widgets.problem(f"{chosen.name}: {error}")
    if st.button("Read again", key="read_after_error"):
        run_store.read_again(chosen)
        known.forget()
        st.rerun()


def _is_other(seen: run_catalog.RunEntry, known: run_catalog.Catalog) -> bool:
    """Return whether a run has other traces than when it was seen, can be opened by now, or is recorded no more."""
    what = operator.attrgetter("traces_stamp", "problem", "is_live")
    return any(what(entry) != what(seen) for entry in known.listing().entries if entry.path == seen.path)


def _refresh(shown: StreamlitPage, is_old: Callable[[], bool] = lambda: False, every_s: float | None = None) -> None:
    """Make the page anew where it is old: that is asked every so many seconds.

    On every page, for a browser that has just turned to another may still ask once for the page before: to that page
    there must be an answer, and it is to show the one that the person turned to.
    """
    page_hash = get_script_run_ctx().page_script_hash
    is_made = False

    def tick() -> None:
        nonlocal is_made
        if not is_made:
            is_made = True  # the first call belongs to the page itself
        elif get_script_run_ctx().page_script_hash != page_hash:
            st.switch_page(shown, query_params=url_state.parameters())
        elif is_old():
            st.rerun(scope="app")

    st.fragment(tick, run_every=every_s)()


def _in_sections(pages: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the pages as the sidebar lists them: of all runs, of the chosen one, and beyond it."""
    beyond = [name for name in ("compare", "plan", "history") if name in pages]
    of_run = [name for name in pages if name not in ("runs", *beyond)]
    sections = {"": ["runs"], "The run": of_run, "Beyond it": beyond}
    return {title: [pages[name] for name in names] for title, names in sections.items()}


def _choose(listed: tuple[run_catalog.RunEntry, ...]) -> tuple[run_catalog.RunEntry, tuple[run_catalog.RunEntry, ...]]:
    with st.sidebar:
        place = st.container()
        dropped = uploads.choose()
        if dropped and st.session_state.get(_DROPPED) != dropped.stamp:
            st.session_state[widgets.RUN] = dropped.name  # who drops a trace wants to see it
        st.session_state[_DROPPED] = dropped.stamp if dropped else None
        with place:
            return widgets.choose((*listed, dropped) if dropped else listed)


@st.cache_resource(max_entries=4, show_spinner=False)
def _catalog(paths: tuple[str, ...]) -> run_catalog.Catalog:
    return run_catalog.Catalog(paths)


if __name__ == "__main__":
    main()
