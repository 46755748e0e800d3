"""The part in view and the finding in the address, so that a link opens the same moment."""

import streamlit as st

from dashboard.components.timeline.timeline_store import OpenTimeline
from tracekit.model.intervals import Window
from tracekit.report.timeline_view.message import View

FROM, TO, FINDING = "from", "to", "finding"


def linked_part(opened: OpenTimeline) -> Window | None:
    """Return the part that the address names, in ns from the scene's start; None without one."""
    try:
        start_ns, end_ns = (int(st.query_params[opened.prefix + name]) for name in (FROM, TO))
    except (KeyError, ValueError):
        return None
    span_ns = opened.scene.span[1] - opened.scene.span[0]
    return (start_ns, end_ns) if 0 <= start_ns < end_ns <= span_ns else None


def write(opened: OpenTimeline | None = None, view: View | None = None, *, finding: str | None = None) -> None:
    """Write the view of a timeline, if there is one, and the finding; None removes the finding."""
    parameters = {}
    if opened is not None and view is not None:
        parameters = {opened.prefix + FROM: str(view.start_ns), opened.prefix + TO: str(view.end_ns)}
    if finding is not None:
        parameters[FINDING] = finding
    elif FINDING in st.query_params:
        del st.query_params[FINDING]
    if any(st.query_params.get(name) != text for name, text in parameters.items()):
        st.query_params.update(parameters)
