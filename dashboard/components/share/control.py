"""The control that shares a page: what the file contains, and the button that makes and downloads it."""

import streamlit as st

from dashboard import downloads, sharing
from dashboard.components.share import share
from dashboard.components.share.share import Answer, Request
from dashboard.sharing import Recording
from tracekit.errors import TracekitError
from tracekit.model import escaping, units
from tracekit.report import shared_view

ABOUT = (
    "One HTML file of this page for a pull request or a chat, at most 5 MB. It works without a network and sends "
    "nothing. It contains what the page shows: names of the run, of kernels, operators and modules, and paths and "
    "hosts where the page has them"
)
ABOUT_TIMELINE = "; the timeline has the names of all slices of the ranks drawn, also outside of the part in view"
SCRUB = ". `tracekit scrub` removes users, hosts and paths from a run before you share it."


def offer() -> None:
    """Offer the page that has been drawn, in the place next to its title."""
    recording = sharing.finish()
    if recording is not None and recording.place is not None:
        with recording.place:
            st.fragment(_control)(recording, f"share-{downloads.file_name(recording.page)}")


def _control(recording: Recording, key: str) -> None:
    # No caption: its colour follows the theme of the page's root, which a popover is not a part of.
    st.markdown(ABOUT + ABOUT_TIMELINE * recording.has_timeline + SCRUB)
    request, seen = share.request(key), f"answered-{key}"
    answer = Answer()
    if request is not None and st.session_state.get(seen) != request.number:
        st.session_state[seen] = request.number
        answer = _answer(recording, request)
    share.button(answer, key=key)


def _answer(recording: Recording, request: Request) -> Answer:
    try:
        content = shared_view.render(recording.view(request.parameters)).encode()
    except TracekitError as error:
        return Answer(request.number, escaping.inert(f"The file cannot be made: {error}", 300))
    name = f"{downloads.name_of(recording.page.lower())}.html"
    return Answer(request.number, f"{name}, {units.size(len(content))}", name, content)
