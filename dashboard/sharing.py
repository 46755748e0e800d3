"""Sharing: what a page shows is recorded while it is drawn, and offered as one HTML file.

Pages draw by the functions of `dashboard.widgets`, which record. Controls are not part of a shared page.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import plotly.graph_objects as go
import polars as pl
import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from dashboard import downloads
from tracekit.model import escaping
from tracekit.report.shared_view import Figure, Part, SharedView
from tracekit.report.timeline_view.embedding import Embedded

MAX_ROWS = 200
"""Of a table; the dashboard has its download."""
_RECORDING = "shared_view"
_NOT_CHOICES = ("run", "compare", "from", "to", "range", "note", "pins", "finding")
"""Parameters of an address that a shared page shows in other ways."""
_MARKDOWN = re.compile(r"\\([!-/:-@\[-`{-~])|`([^`]*)`|\*\*(.+?)\*\*")

Parameters: TypeAlias = Mapping[str, str]
TimelinePart: TypeAlias = Callable[[Parameters], Embedded]
"""Makes the timeline for the parameters of the address at the moment of the click."""


@dataclass(eq=False)
class Recording:
    """What a page has drawn so far."""

    page: str
    run: str = ""
    subtitle: str = ""
    heading: str = ""
    parts: list[Part | TimelinePart | list[Part | TimelinePart]] = field(default_factory=list)
    place: DeltaGenerator | None = None
    is_complete: bool = False
    fragments: dict[str, list[Part | TimelinePart]] = field(default_factory=dict)
    """The parts of each fragment, which replace those from before when it is drawn again."""
    drawn_fragment: list[Part | TimelinePart] | None = None

    @property
    def has_timeline(self) -> bool:
        """Whether the timeline is one of the parts."""
        return any(callable(part) for part in self._flat())

    def view(self, parameters: Parameters) -> SharedView:
        """Return the page as a view. Raises TracekitError where the timeline cannot be made."""
        parts = [part(parameters) if callable(part) else part for part in self._flat()]
        choices = ", ".join(f"{name}={text}" for name, text in parameters.items() if not _is_shown_otherwise(name))
        return SharedView(self.run, self.page, self.subtitle, parts, [f"Choices: {choices}."] if choices else [])

    def _flat(self) -> list[Part | TimelinePart]:
        nested = [part if isinstance(part, list) else [part] for part in self.parts]
        return [part for parts in nested for part in parts]


def begin(page: str | None) -> None:
    """Record what is drawn from now on as the page of this title; nothing for None."""
    st.session_state[_RECORDING] = None if page is None else Recording(page)


@contextlib.contextmanager
def fragment(name: str) -> Iterator[None]:
    """Record what a fragment draws; when it is drawn again, in place of what it drew before."""
    recording: Recording | None = st.session_state.get(_RECORDING)
    if recording is None or recording.drawn_fragment is not None:  # a part of another fragment is drawn with it
        yield
        return
    if name not in recording.fragments:
        recording.fragments[name] = []
        recording.parts.append(recording.fragments[name])
    recording.drawn_fragment = recording.fragments[name]
    recording.drawn_fragment.clear()
    try:
        yield
    finally:
        recording.drawn_fragment = None


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Record nothing of what is drawn in a with block, such as what is replaced soon."""
    recording = st.session_state.get(_RECORDING)
    st.session_state[_RECORDING] = None
    try:
        yield
    finally:
        st.session_state[_RECORDING] = recording


def title(run: str, subtitle: str) -> None:
    """Record the title of the page, and place the control here."""
    recording = _current()
    if recording is None or recording.place is not None:
        return
    recording.run, recording.subtitle = run, subtitle
    with st.popover("Share", key="share", icon=":material/share:"):
        recording.place = st.container()


def html(fragment: str) -> None:
    """Record a fragment of HTML that a template made."""
    _add(fragment)


def text(kind: str, markdown: str) -> None:
    """Record text: `kind` is a macro of fragments.html.j2, such as heading or caption."""
    recording, plain = _current(), plain_text(markdown)
    if recording is not None and kind == "heading":
        recording.heading = plain
    _add(escaping.fragment(kind, plain))


def figure_title() -> str:
    """Title of a figure that is drawn now: the run, the page and the heading above it."""
    recording: Recording | None = st.session_state.get(_RECORDING)
    parts = (recording.run, recording.page, recording.heading) if recording is not None else ()
    return " · ".join(part for part in parts if part)


def figure(figure: go.Figure, *, key: str) -> None:
    """Record a figure."""
    recording = _current()
    if recording is not None:
        _add(Figure(f"{downloads.file_name(key)}-{len(recording.parts)}-{len(recording.drawn_fragment or ())}", figure))


def table(rows: pl.DataFrame, max_rows: int = MAX_ROWS) -> None:
    """Record the first `max_rows` rows of a table."""
    if _current() is None or not rows.width:
        return
    _add(escaping.frame(rows.head(max_rows)))
    if rows.height > max_rows:
        text("caption", f"The first {max_rows} of {rows.height:,} rows.")


def timeline(make: TimelinePart) -> None:
    """Record the timeline, which is made when somebody shares the page."""
    _add(make)


def finish() -> Recording | None:
    """Return the recording of the page, and record nothing more; None where the page cannot be shared."""
    recording = _current()
    if recording is None or recording.place is None:
        return None
    recording.is_complete = True
    return recording


def plain_text(markdown: str) -> str:
    r"""Return the text that Streamlit's Markdown shows.

    >>> plain_text(r"a\_b of `tracekit scrub` is **new**")
    'a_b of tracekit scrub is new'
    """
    return _MARKDOWN.sub(lambda match: next(part for part in match.groups() if part is not None), markdown)


def _current() -> Recording | None:
    """Return the recording of the page that is being drawn; None in a fragment that does not record."""
    recording: Recording | None = st.session_state.get(_RECORDING)
    is_over = recording is None or (recording.is_complete and recording.drawn_fragment is None)
    return None if is_over else recording


def _add(part: Part | TimelinePart) -> None:
    recording = _current()
    if recording is not None:
        open_parts = recording.drawn_fragment
        (recording.parts if open_parts is None else open_parts).append(part)


def _is_shown_otherwise(name: str) -> bool:
    return name.removeprefix("pair_") in _NOT_CHOICES
