"""The timeline of a run as a shared page, as a link of the dashboard shows it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tracekit.model import escaping
from tracekit.model.intervals import Window
from tracekit.model.run import Run
from tracekit.report import headlines, html_fragments, phrases, rank_rows, shared_view, timeline
from tracekit.report.shared_view import SharedView
from tracekit.report.timeline_view import embedding, message, range_tables
from tracekit.report.timeline_view.embedding import Embedded, PageState
from tracekit.report.timeline_view.link import Link
from tracekit.rules.rule import Report

PAGE = "Timeline"


def view(
    report: Report, run: Run, parameters: Mapping[str, str], max_bytes: int = shared_view.MAX_TIMELINE_BYTES
) -> SharedView:
    """Return the timeline of a checked run with the findings of its report; `parameters` are those of a link.

    Short slices are merged until the compressed slices take at most `max_bytes`.

    Raises InputError if the run has no traces of the link's window.
    """
    window = parameters.get("window", "")
    labels = rank_rows.drawn_ranks(run) if len(run.ranks) > rank_rows.MAX_DRAWN else None
    number = int(window) if window.isascii() and window.isdigit() else min(source.window for source in run.sources)
    scene = timeline.open_scene(run, number, ranks=tuple(labels) if labels else None)
    by_key = {f"{number}-{finding.id}": finding for number, finding in enumerate(report.findings)}
    finding_key = message.chosen_finding(by_key, parameters.get("finding", ""))
    headline = headlines.step(report, run)
    parts = [html_fragments.headline(headline.text, headline.about, headline.status)] if headline else []
    parts += [escaping.fragment("card", html_fragments.finding(by_key[finding_key]))] if finding_key else []

    def totals_of(part: Window) -> dict[str, Any]:
        totals = timeline.range_totals(scene, part)
        return range_tables.tables(
            scene, totals, timeline.range_rates(run, scene, part), is_reading=False, rank_name="rank {}".format
        )

    marks = message.findings(scene, number, by_key)
    timeline_part = embed_scene(
        scene, parameters, marks=marks, finding=finding_key, totals_of=totals_of, max_bytes=max_bytes
    )
    note = rank_rows.selection_note(run)
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
    max_bytes: int = shared_view.MAX_TIMELINE_BYTES,
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


def _around(evidence: Sequence[Mapping[str, Any]], span_ns: int) -> Window:
    """Return the longest mark with as much time on both sides."""
    longest = max(evidence, key=lambda mark: mark["end"] - mark["start"])
    length_ns = max(longest["end"] - longest["start"], message.MIN_CONTEXT_NS)
    return max(longest["start"] - length_ns, 0), min(longest["end"] + length_ns, span_ns)
