"""A view of the dashboard as one HTML page for a pull request or a chat: it needs no server and makes no request."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import urlencode

import plotly.graph_objects as go

from tracekit import conventions
from tracekit.model import escaping, units
from tracekit.model.intervals import Window
from tracekit.model.run import Run
from tracekit.report import headlines, html, html_fragments, phrases, rank_selection, timeline
from tracekit.report.timeline_view import embedding, message, range_tables
from tracekit.report.timeline_view.embedding import Embedded, PageState
from tracekit.rules.rule import Report

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


MAX_NOTE = 200
_RANGE = re.compile(r"(\d{1,16})-(\d{1,16})\Z")
_PINS = re.compile(r"\d{1,6}(-\d{1,6})*\Z")


@dataclass(frozen=True)
class Link:
    """A link's parameters; times are in ns from the start of the scene. What makes no sense is left out."""

    part: Window | None = None
    range: Window | None = None
    note: str = ""
    pins: str = ""
    finding: str = ""
    prefix: str = ""

    @classmethod
    def of(cls, parameters: Mapping[str, str], span_ns: int, prefix: str = "") -> "Link":
        """Return the link of the parameters of an address, to a scene of this length.

        The names of its parameters begin with `prefix`, except for the finding.
        """
        of_view = {name: parameters.get(prefix + name, "") for name in ("from", "to", "range", "note", "pins")}
        selected, pins = _RANGE.match(of_view["range"]), of_view["pins"]
        return cls(
            _window(of_view["from"], of_view["to"], span_ns),
            _window(selected[1], selected[2], span_ns) if selected else None,
            of_view["note"][:MAX_NOTE],
            pins if _PINS.match(pins) else "",
            parameters.get("finding", ""),
            prefix,
        )

    @property
    def address(self) -> str:
        """The parameters that the browser reads, as the query of an address."""
        parameters = {"range": f"{self.range[0]}-{self.range[1]}" if self.range else "", "note": self.note}
        return urlencode(
            {self.prefix + name: text for name, text in {**parameters, "pins": self.pins}.items() if text}, safe="-"
        )


def _window(start: str, end: str, span_ns: int) -> Window | None:
    if not (start.isascii() and start.isdigit() and end.isascii() and end.isdigit()):
        return None
    if max(len(start), len(end)) > 16:
        return None
    start_ns, end_ns = int(start), min(int(end), span_ns)
    return (start_ns, end_ns) if start_ns < end_ns else None


PAGE = "Timeline"


def render(view: SharedView) -> str:
    """Return the view as an HTML page of at most MAX_BYTES: figures that are too large are left out and named."""
    parts, left_out = _fitting(view.parts)
    figures = {part.name: part.figure for part in parts if isinstance(part, Figure)}
    timelines = [part for part in parts if isinstance(part, Embedded)]
    return html.page(
        "shared_view.html.j2",
        title=f"{view.page} · {view.run} · tracekit",
        figures=figures,
        modules=[embedding.embedded_script()] if timelines else [],
        packed={"timeline-data": timelines[0].data} if timelines else {},
        styles=["shared_view.css"],
        version=conventions.VERSION,
        run=view.run,
        page=view.page,
        subtitle=view.subtitle,
        parts=[(_kind(part), part) for part in parts],
        notes=[*view.notes, *left_out, *map(embedded_note, timelines)],
        timeline_html=embedding.html() if timelines else "",
        timeline_style=embedding.css() if timelines else "",
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


def timeline_view(
    report: Report, run: Run, parameters: Mapping[str, str], max_bytes: int = MAX_TIMELINE_BYTES
) -> SharedView:
    """Return the timeline of a checked run with the findings of its report; `parameters` are those of a link.

    Ranks of other roles of its job come below those of the run. Short slices are merged until the compressed slices
    take at most `max_bytes`.

    Raises InputError if the run has no traces of the link's window.
    """
    window = parameters.get("window", "")
    labels = rank_selection.drawn_ranks(run) if len(run.ranks) > rank_selection.MAX_DRAWN else None
    joined = timeline.join_roles(run)
    if len(joined.labels) > rank_selection.MAX_DRAWN:
        joined = timeline.JoinedRoles(run, {})
    number = int(window) if window.isascii() and window.isdigit() else min(source.window for source in run.sources)
    scene = timeline.open_scene(joined.run, number, ranks=tuple(labels) if labels else None)
    by_key = {f"{number}-{finding.id}": finding for number, finding in enumerate(report.findings)}
    finding_key = message.chosen_finding(by_key, parameters.get("finding", ""))
    headline = headlines.step(report, run)
    parts = [html_fragments.headline(headline.text, headline.about, headline.status)] if headline else []
    parts += [escaping.fragment("card", html_fragments.finding(by_key[finding_key]))] if finding_key else []

    def totals_of(part: Window) -> dict[str, Any]:
        totals = timeline.range_totals(scene, part)
        return range_tables.tables(
            scene, totals, timeline.range_rates(joined.run, scene, part), is_reading=False, rank_name="rank {}".format
        )

    marks = message.findings(scene, number, by_key)
    header = {**message.scene(scene), "places": joined.labels} if joined.labels else None
    timeline_part = embed_scene(
        scene, parameters, marks=marks, finding=finding_key, totals_of=totals_of, header=header, max_bytes=max_bytes
    )
    note = rank_selection.selection_note(run)
    return SharedView(run.name, PAGE, phrases.subtitle(run), [*parts, timeline_part], [note] if note else [])


def embed_scene(
    scene: timeline.Scene,
    parameters: Mapping[str, str],
    *,
    marks: Sequence[Mapping[str, Any]],
    finding: str | None,
    totals_of: Callable[[Window], Mapping[str, Any]],
    header: Mapping[str, Any] | None = None,
    initial_part: Window | None = None,
    prefix: str = "",
    max_bytes: int = MAX_TIMELINE_BYTES,
) -> Embedded:
    """Return a scene as the page that has these parameters in its address shows it.

    `totals_of` returns the tables of a range of the run's clock; `header` replaces `message.scene`, `initial_part`
    that of the scene; the names of the link's parameters begin with `prefix`.
    """
    origin_ns, end_ns = scene.span
    link = Link.of(parameters, end_ns - origin_ns, prefix)
    evidence = [mark for mark in marks if finding and mark["key"] == finding]
    initial = initial_part or message.initial_part(scene)
    part = link.part or (_around(evidence, end_ns - origin_ns) if evidence else initial)
    totals = totals_of((origin_ns + link.range[0], origin_ns + link.range[1])) if link.range else None
    page_state = PageState(part, link.address, marks, finding, header, totals)
    return embedding.embed(scene, page_state, max_bytes)


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


def _around(evidence: Sequence[Mapping[str, Any]], span_ns: int) -> Window:
    """Return the longest mark with as much time on both sides."""
    longest = max(evidence, key=lambda mark: mark["end"] - mark["start"])
    length_ns = max(longest["end"] - longest["start"], message.MIN_CONTEXT_NS)
    return max(longest["start"] - length_ns, 0), min(longest["end"] + length_ns, span_ns)
