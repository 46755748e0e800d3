"""A figure of a run in a notebook: as Plotly shows it, and as a page that draws it in exports of the notebook."""

import os
from collections.abc import Callable
from html import escape
from typing import Any

import plotly.graph_objects as go

from tracekit.report import shared_view

HTML = "text/html"
_HEADER_PX = 130
"""Height of the page above and below its figure."""
_DEFAULT_HEIGHT_PX = 450
"""Plotly's, for figures that state none."""
_RENDERER_VARIABLE = "PLOTLY_RENDERER"
_PLOTLY = "application/vnd.plotly.v1+json"


class NotebookFigure(go.Figure):  # type: ignore[misc]  # Plotly has no types
    """A Plotly figure whose output in a notebook also holds a page of 0.6 MB that draws it without a network.

    Plotly 7 writes only its MIME type in Jupyter, for which nbconvert draws nothing. Where another renderer, or the
    variable PLOTLY_RENDERER, was set, the output is that of the renderer.
    """

    _run_name, _heading = "", ""

    @classmethod
    def of(cls, figure: go.Figure, run_name: str, heading: str) -> "NotebookFigure":
        """Return a figure of a run with its heading."""
        shown = cls(figure)
        shown._run_name, shown._heading = run_name, heading
        return shown

    def as_html(self) -> str:
        """The page in a frame. Its scripts cannot reach the notebook."""
        parts = [shared_view.Figure("figure", go.Figure(self))]
        page = shared_view.render(shared_view.SharedView(self._run_name, self._heading, "", parts))
        style = f"width:100%;height:{(self.layout.height or _DEFAULT_HEIGHT_PX) + _HEADER_PX}px;border:0"
        return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{escape(page)}"></iframe>'

    def _repr_mimebundle_(self, *arguments: Any, **options: Any) -> dict[str, Any]:
        bundle: dict[str, Any] = super()._repr_mimebundle_(*arguments, **options)
        return bundle | {HTML: self.as_html()} if _needs_page(bundle) else bundle

    @property
    def _ipython_display_(self) -> Callable[[], None] | None:
        # IPython asks this before `_repr_mimebundle_`, and Plotly's method writes only its MIME type.
        return None if _needs_page(super()._repr_mimebundle_()) else super()._ipython_display_


def _needs_page(bundle: dict[str, Any]) -> bool:
    """Whether an output has only Plotly's MIME type, which nobody has asked for."""
    return set(bundle) == {_PLOTLY} and _RENDERER_VARIABLE not in os.environ
