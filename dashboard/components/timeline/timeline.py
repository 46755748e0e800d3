"""The timeline's JavaScript, HTML and CSS as a component of Streamlit: `timeline` puts it on the page."""

from collections.abc import Mapping
from typing import Any

from dashboard import components
from tracekit.report.timeline_view import embedding

_mount = components.mount("timeline", html=embedding.html(), css=embedding.css(), js=embedding.script())


def _nothing() -> None:
    """Let Streamlit rerun the fragment, which reads the change from the state."""


def timeline(data: bytes, *, key: str) -> Mapping[str, Any]:
    """Show the timeline and return what the browser sent: view, selected, search, finding, range, step.

    `data` is made by `message.pack`.

    The same mapping is at ``st.session_state[key]`` before the call, once the browser has sent anything.
    """
    changes = {f"on_{name}_change": _nothing for name in ("view", "selected", "search", "finding", "range", "step")}
    state: Mapping[str, Any] = _mount(key=key, data=data, **changes)
    return state
