"""A view of the dashboard as one HTML page for a pull request or a chat: it needs no server and makes no request."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import plotly.graph_objects as go

from tracekit import conventions
from tracekit.model import units
from tracekit.report import html
from tracekit.report.timeline_view import assets
from tracekit.report.timeline_view.embedding import Embedded

MAX_BYTES = 5_000_000
MAX_TIMELINE_BYTES = 3_400_000
"""Of the compressed timeline: base64 adds a third."""
_FIXED_BYTES = 60_000
_PLOTLY_BYTES = 2_000_000


@dataclass(frozen=True, eq=False)
class Figure:
    """A figure with its name, which is unique on the page."""

    name: str
    figure: go.Figure


Part: TypeAlias = str | Figure | Embedded
"""HTML that a template made, a figure, or the timeline."""


@dataclass(frozen=True, eq=False)
class SharedView:
    """What a page of the dashboard shows of a run, from top to bottom."""

    run: str
    page: str
    subtitle: str
    parts: Sequence[Part]
    notes: Sequence[str] = field(default=())


def render(view: SharedView) -> str:
    """Return the view as an HTML page of at most MAX_BYTES: figures that are too large are left out and named."""
    parts, left_out = _fitting(view.parts)
    figures = {part.name: part.figure for part in parts if isinstance(part, Figure)}
    timelines = [part for part in parts if isinstance(part, Embedded)]
    return html.page(
        "shared_view.html.j2",
        title=f"{view.page} · {view.run} · tracekit",
        figures=figures,
        modules=[assets.embedded_script()] if timelines else [],
        packed={"timeline-data": timelines[0].data} if timelines else {},
        styles=["shared_view.css"],
        version=conventions.VERSION,
        run=view.run,
        page=view.page,
        subtitle=view.subtitle,
        parts=[(_kind(part), part) for part in parts],
        notes=[*view.notes, *left_out, *map(embedded_note, timelines)],
        timeline_html=assets.html() if timelines else "",
        timeline_style=assets.css() if timelines else "",
    )


def embedded_note(timeline: Embedded) -> str:
    """Note on the part of the run that a timeline holds."""
    cut = timeline.cut
    if cut.is_whole:
        return f"The timeline holds every slice of the ranks drawn ({timeline.items:,} with merged ones)."
    outside = units.duration(2**cut.outside / 2)
    elsewhere = f"slices shorter than {outside} are merged where they lie close, and search does not find them"
    if cut.inside == 0:
        return f"The timeline holds every slice of the part that was shared. Elsewhere {elsewhere}."
    inside = units.duration(2**cut.inside / 2)
    return (
        f"The part that was shared has too many slices: those shorter than {inside} are merged. Elsewhere {elsewhere}."
    )


def _fitting(parts: Sequence[Part]) -> tuple[list[Part], list[str]]:
    """Return the parts without the largest figures beyond the limit, and a note on each that is left out."""
    figures = [part for part in parts if isinstance(part, Figure)]
    sizes = dict(zip((part.name for part in figures), html.figure_bytes(part.figure for part in figures), strict=True))
    rest = sum(_size(part) for part in parts) + _FIXED_BYTES + _PLOTLY_BYTES * bool(figures)
    left_out = list(_too_large(sizes, MAX_BYTES - rest))
    fitting = [part for part in parts if not (isinstance(part, Figure) and part.name in left_out)]
    notes = [f"The figure {name} is left out: it takes {units.size(sizes[name])}." for name in left_out]
    return fitting, notes


def _too_large(sizes: dict[str, int], limit: int) -> Iterator[str]:
    total = sum(sizes.values())
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if total <= limit:
            return
        total -= size
        yield name


def _size(part: Part) -> int:
    if isinstance(part, Embedded):
        return len(part.data) * 4 // 3
    return len(part.encode()) if isinstance(part, str) else 0


def _kind(part: Part) -> str:
    return {Figure: "figure", Embedded: "timeline"}.get(type(part), "html")
