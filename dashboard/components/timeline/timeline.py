"""The timeline's JavaScript, HTML and CSS as a component of Streamlit: `timeline` puts it on the page."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import components

HERE = Path(__file__).parent
SCRIPTS = ("time.js", "layout.js", "tile.js", "paint.js", "input.js", "panel.js", "page.js", "timeline.js")
"""Joined in this order into one module: there is no build step."""


def _nothing() -> None:
    """Let Streamlit rerun the fragment, which reads the change from the state."""


def _joined() -> str:
    return "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)


_mount: Callable[..., Any] = st.components.v2.component(
    "tracekit_timeline",
    html=(HERE / "timeline.html").read_text(encoding="utf-8"),
    css=components.css(HERE / "timeline.css"),
    js=_joined(),
)


def timeline(data: bytes, *, key: str) -> Mapping[str, Any]:
    """Show the timeline and return what the browser sent: view, selected, search, finding. `data`: `message.pack`.

    The same mapping is at ``st.session_state[key]`` before the call, once the browser has sent anything.
    """
    state: Mapping[str, Any] = _mount(
        key=key,
        data=data,
        on_view_change=_nothing,
        on_selected_change=_nothing,
        on_search_change=_nothing,
        on_finding_change=_nothing,
    )
    return state
