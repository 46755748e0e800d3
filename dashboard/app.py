"""The dashboard's frame: the runs it was opened on, the choice of one, the pages.

`tracekit dashboard RUN…` runs this file under Streamlit; ``streamlit run dashboard/app.py -- RUN…`` does the same.
"""

import sys
from pathlib import Path

import streamlit as st

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

LISTING_LIVES_S = 3


def main() -> None:
    """Show the chosen page for the chosen run."""
    st.set_page_config(page_title="tracekit", page_icon=str(ICON), layout="wide")
    st.html(parts.STYLE)
    words = tuple(sys.argv[1:])
    listed = _listed(tuple(word for word in words if not word.startswith(catalog.HISTORY)))
    past = catalog.history_file(words)
    if not listed:
        parts.nothing_opened()
        return
    dropped = uploads.choose()
    chosen, others = parts.choose((*listed, dropped) if dropped else listed)
    pages = {
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
        "runs": st.Page(lambda: runs.page(listed), title="Runs", url_path="runs"),
    }
    if past is not None:
        pages["history"] = st.Page(lambda: history.page(past), title="History", url_path="history")
    st.session_state[parts.PAGES] = pages
    shown = st.navigation(list(pages.values()), position="top")
    st.session_state[address.PAGE] = shown.url_path
    shown.run()


@st.cache_data(ttl=LISTING_LIVES_S, show_spinner=False)
def _listed(paths: tuple[str, ...]) -> tuple[catalog.Entry, ...]:
    return catalog.entries(paths)


if __name__ == "__main__":
    main()
