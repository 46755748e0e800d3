"""The timeline's JavaScript, HTML and CSS as a component of Streamlit: `timeline` puts it on the page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import components

HERE = Path(__file__).parent
SCRIPTS = ("time.js", "layout.js", "tile.js", "paint.js", "input.js", "panel.js", "page.js", "timeline.js")
"""One module in this order: without a build step there is nothing else that would join them."""


def _nothing() -> None:
    """Let Streamlit run the fragment again: what changed is read from the state."""


def _joined() -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)


_mount: Callable[..., Any] = st.components.v2.component(
    "tracekit_timeline",
    html=(HERE / "timeline.html").read_text(encoding="utf-8"),
    css=components.css(HERE / "timeline.css"),
    js=_joined(),
)


def timeline(data: bytes, *, key: str) -> Mapping[str, Any]:
    """Show the timeline and return what the browser told: view, picked, search, finding. `data`: `message.packed`.

    The same mapping is at ``st.session_state[key]`` before the call, once the browser has told anything.
    """
    told: Mapping[str, Any] = _mount(
        key=key,
        data=data,
        on_view_change=_nothing,
        on_picked_change=_nothing,
        on_search_change=_nothing,
        on_finding_change=_nothing,
    )
    return told
