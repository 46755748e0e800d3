"""The interactive timeline of a run, as `Run.timeline` returns it."""

from collections.abc import Callable, Mapping
from functools import cached_property
from html import escape

from tracekit.library.answer import Answer
from tracekit.library.report import Report
from tracekit.report import shared_view

_HEIGHT_PX = 720


class Timeline(Answer):
    """Every slice of a run, with the evidence of its findings: the timeline of the dashboard in one HTML page."""

    def __init__(self, report: Report, max_bytes: int) -> None:
        """Show the run of a report; its compressed slices take at most `max_bytes`."""
        self.report = report
        self.max_bytes = max_bytes

    @cached_property
    def page(self) -> str:
        """The page: it holds its scripts and its data, needs no server and makes no request."""
        return shared_view.render(shared_view.timeline_view(self.report, self.report.run, {}, self.max_bytes))

    def as_html(self) -> str:
        """The page in a frame. Its scripts cannot reach the notebook, nor the notebook's style sheet the timeline."""
        style = f"width:100%;height:{_HEIGHT_PX}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(self.page)}"></iframe>'

    def _repr_html_(self) -> str:
        return self.as_html()

    def formats(self) -> Mapping[str, Callable[[], str]]:
        """HTML."""
        return {".html": lambda: self.page}

    def __repr__(self) -> str:
        return f"<Timeline of {self.report.run.name}>"
