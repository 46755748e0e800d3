"""The button that opens a trace in a tab of ui.perfetto.dev, in the person's own browser and on a click only."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import streamlit as st

from dashboard import components

HERE = Path(__file__).parent

_mount: Callable[..., Any] = st.components.v2.component(
    "tracekit_perfetto",
    html=(HERE / "perfetto.html").read_text(encoding="utf-8"),
    css=components.css(HERE / "perfetto.css"),
    js=(HERE / "perfetto.js").read_text(encoding="utf-8"),
)


def open_in_perfetto(trace: bytes, *, name: str, key: str) -> None:
    """Show the button. `trace` goes to the browser now, and from there to the tab when the button is clicked."""
    # Bytes travel as they are, so the name goes before them.
    head = name.encode()
    _mount(key=key, data=len(head).to_bytes(2, "little") + head + trace)
