"""The dashboard's frame: the runs it was opened on, the choice of one, the pages.

`tracekit dashboard RUN…` runs this file under Streamlit; ``streamlit run dashboard/app.py -- RUN…`` does the same.
"""

import sys
from pathlib import Path
from typing import Any

import streamlit as st
from streamlit.navigation.page import StreamlitPage
from streamlit.runtime.scriptrunner import get_script_run_ctx

from dashboard import address, catalog, parts, uploads
from dashboard.views import (
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
)

# A file of ours: Streamlit fetches icons given by name from a network.
ICON = Path(__file__).with_name("icon.svg")

LISTING_LIVES_S = REFRESH_S = 3.0
_DROPPED = "dropped_stamp"


def main() -> None:
    """Show the chosen page for the chosen run."""
    st.set_page_config(page_title="tracekit", page_icon=str(ICON), layout="wide")
    st.logo(str(ICON), size="large")
    st.html(parts.STYLE)
    words = tuple(sys.argv[1:])
    paths = tuple(word for word in words if not word.startswith(catalog.HISTORY))
    listed = _listed(paths)
    past = catalog.history_file(words)
    if not listed:
        parts.nothing_opened()
        return
    # The pages speak of what is chosen below: the choice must know the page that it is made on.
    pages = {
        "runs": st.Page(lambda: runs.page(lambda: _listed(paths), _listed.clear), title="Runs", url_path="runs"),
        "overview": st.Page(lambda: overview.page(chosen), title="Overview", url_path="overview", default=True),
        "timeline": st.Page(lambda: timeline.page(chosen), title="Timeline", url_path="timeline"),
        "ranks": st.Page(lambda: ranks.page(chosen), title="Ranks", url_path="ranks"),
        "communication": st.Page(lambda: communication.page(chosen), title="Communication", url_path="communication"),
        "contention": st.Page(lambda: contention.page(chosen), title="Contention", url_path="contention"),
        "kernels": st.Page(lambda: kernels.page(chosen), title="Kernels", url_path="kernels"),
        "memory": st.Page(lambda: memory.page(chosen), title="Memory", url_path="memory"),
        "checkpoints": st.Page(lambda: checkpoints.page(chosen), title="Checkpoints", url_path="checkpoints"),
        "sql": st.Page(lambda: sql.page(chosen), title="SQL", url_path="sql"),
        "quality": st.Page(lambda: quality.page(chosen), title="Data quality", url_path="quality"),
        "compare": st.Page(lambda: compare.page((chosen, *others)), title="Compare", url_path="compare"),
        "plan": st.Page(lambda: plan.page(chosen), title="Plan", url_path="plan"),
    }
    if past is not None:
        pages["history"] = st.Page(lambda: history.page(past), title="History", url_path="history")
    st.session_state[parts.PAGES] = pages
    shown = st.navigation(_in_sections(pages), expanded=True)
    is_bare = parts.RUN not in st.query_params and parts.RUN not in st.session_state
    if is_bare and shown == pages["overview"] and len(listed) > 1:
        st.switch_page(pages["runs"])  # nobody said which run to open
    st.session_state[address.PAGE] = shown.url_path
    is_changing = shown == pages["runs"] and any(entry.is_live for entry in listed)
    with st.sidebar:
        _refresh(shown, every_s=REFRESH_S if is_changing else None)
    before = st.session_state.get(_DROPPED)
    chosen, others = _choose(listed)
    if chosen.is_private and st.session_state[_DROPPED] != before and shown == pages["runs"]:
        parts.go_to("overview")
    shown.run()


def _refresh(shown: StreamlitPage, *, every_s: float | None) -> None:
    """Make the page anew from time to time, where `every_s` says so.

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
            st.switch_page(shown, query_params=address.choices())
        elif every_s is not None:
            st.rerun(scope="app")

    st.fragment(tick, run_every=every_s)()


def _in_sections(pages: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the pages as the sidebar lists them: of all runs, of the chosen one, and beyond it."""
    beyond = [name for name in ("compare", "plan", "history") if name in pages]
    of_run = [name for name in pages if name not in ("runs", *beyond)]
    sections = {"": ["runs"], "The run": of_run, "Beyond it": beyond}
    return {title: [pages[name] for name in names] for title, names in sections.items()}


def _choose(listed: tuple[catalog.Entry, ...]) -> tuple[catalog.Entry, tuple[catalog.Entry, ...]]:
    with st.sidebar:
        place = st.container()
        dropped = uploads.choose()
        if dropped and st.session_state.get(_DROPPED) != dropped.stamp:
            st.session_state[parts.RUN] = dropped.name  # who drops a trace wants to see it
        st.session_state[_DROPPED] = dropped.stamp if dropped else None
        with place:
            return parts.choose((*listed, dropped) if dropped else listed)


@st.cache_resource(ttl=LISTING_LIVES_S, max_entries=4, show_spinner=False)
def _listed(paths: tuple[str, ...]) -> tuple[catalog.Entry, ...]:
    return catalog.entries(paths)


if __name__ == "__main__":
    main()
