"""Timeline: all ranks on one clock at any zoom, with search, details, arrows, findings and the critical path."""

import hashlib
import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import polars as pl
import streamlit as st

from dashboard import (
    crashes,
    findings,
    flame_graph,
    moments,
    opening,
    rank_choice,
    run_store,
    sharing,
    step_comparison,
    widgets,
)
from dashboard.components.perfetto import export
from dashboard.components.timeline import address, timeline_store
from dashboard.components.timeline.timeline import timeline
from dashboard.components.timeline.timeline_store import OpenTimeline
from dashboard.findings import Findings
from dashboard.pages.page import SNAPSHOTS_ONLY, Needs, Page, Selection
from dashboard.run_entry import RunEntry
from dashboard.run_store import LoadedRun, OpenRun, job_roles, tables
from dashboard.sections import critical_path
from dashboard.url_state import bind_flag
from tracekit.errors import RuleError, TracekitError
from tracekit.model import escaping, units
from tracekit.model.intervals import Window
from tracekit.report import headlines, phrases, quoted_moment, shared_view
from tracekit.report import timeline as tiles
from tracekit.report.timeline_view import message
from tracekit.report.timeline_view.embedding import Embedded
from tracekit.report.timeline_view.message import View

SENT_ONCE = ("tracks", "kinds", "unit_ranks", "places", "steps", "overview", "pair")
"""Parts of a scene that are sent to the browser only once: with many ranks they are long."""
PATH = "path"
"""The parameter of the address that shows the critical path."""
ROLES = "roles"
"""The parameter of the address that draws the other roles of the job too."""
NO_FINDING = "none (the top track marks all of them)"
FIRST_PIXELS = 1200
MAX_PIXELS = 8000
MAX_ROWS = 200
_ALIKE_RATIO = 0.5
"""The least share of time that a slice and the moment that it is selected for have in common."""
SHORT_NAMES = {"dp_replicate": "repl", "dp_shard": "shard", "dp_shard_of_experts": "shard_e"}


@dataclass(frozen=True)
class Jump:
    """Where the timeline goes: a part of the run in ns from its start, a track to scroll to, a finding.

    `ranks` are placed at the top, in this order. Several are folded, so that they can be compared; of one, the track is
    opened. `selected` is the slice to select.
    """

    start_ns: int
    end_ns: int
    track: int | None = None
    finding: str | None = None
    ranks: tuple[int, ...] = ()
    selected: Mapping[str, Any] | None = None

    def message(self, nonce: str) -> dict[str, Any]:
        """Return the message to the browser, which obeys each `nonce` once."""
        span = {"start": self.start_ns, "end": self.end_ns}
        place = {"track": self.track, "finding": self.finding, "ranks": self.ranks, "selected": self.selected}
        return {**span, **place, "nonce": nonce}


RankCoordinates: TypeAlias = Mapping[int, Mapping[str, tuple[int, int]]]
"""Of each rank and axis of the mesh the number of its group, and its place there: see `tables.mesh_coordinates`."""


@dataclass(frozen=True)
class RankOrder:
    """The order of ranks from the top: by number, or the groups of an axis one after another."""

    axis: str | None = None
    coordinates: RankCoordinates = field(default_factory=dict)
    about: Mapping[int, str] = field(default_factory=dict)
    """What a rank is, such as "typical"."""

    def sort_tracks(self, tracks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the tracks in this order; ranks outside the mesh come last."""
        last = (len(self.coordinates), 0)
        return sorted(tracks, key=lambda track: self.coordinates.get(track["rank"], {}).get(self.axis or "", last))

    def places(self) -> dict[int, str]:
        """Role and place along the axes of each rank, such as "pp 1 · tp 0", with short names of axes."""
        texts = {rank: [text] for rank, text in self.about.items() if text}
        for rank, axes in self.coordinates.items():
            texts.setdefault(rank, []).extend(f"{SHORT_NAMES.get(axis, axis)} {n}" for axis, (_, n) in axes.items())
        return {rank: escaping.inert(" · ".join(parts), message.MAX_NAME) for rank, parts in texts.items()}


def show(selection: Selection) -> None:
    """Draw all ranks of the run, or one of it and one of another run, or show why that is impossible."""
    entry = selection.runs[0]
    if moments.SHOWN in st.session_state or findings.SHOWN_FINDING in st.session_state:
        step_comparison.leave()
    if entry.snapshots:
        widgets.title(entry.name, SNAPSHOTS_ONLY)
        widgets.snapshots_only(entry)
        return
    listed = (*selection.runs[1:], *selection.catalog.listing().entries)
    is_alone = all(other.name == entry.name for other in listed)
    # Above the choice of ranks, which opening a large run shows; the title of a single run has the whole width.
    head, right = (st.container(), st.container()) if is_alone else st.columns([2, 1])
    with right:
        other = step_comparison.choose_run(entry, listed)
    roles = job_roles.other_roles(entry, listed)
    if roles and st.toggle(f"With {', '.join(dict.fromkeys(other.role for other in roles))}", key=bind_flag(ROLES)):
        opened = widgets.try_reading(entry, lambda entry: _open_roles(entry, roles), "Opening the timeline of")
    else:
        opened = widgets.try_reading(entry, _open_run, "Opening the timeline of")
    if opened is None:
        return
    with head:
        widgets.heading(entry, opened)
    if opened.scene.tracks.is_empty():
        widgets.info("The traces contain no work to draw: no kernels, and no operators on a CPU run.")
        return
    if other is not None:
        key = f"{_key(entry, opened.window)}-{_key(other, 0)[-16:]}"

        def draw(pair: OpenTimeline) -> None:
            sharing.timeline(_shared_part(pair, RankOrder(), [], {}))
            _canvas(pair, RankOrder(), [], None, key)

        if step_comparison.compare(entry, opened, other, draw, key):
            return
    _show_run(entry, opened)


def _show_run(entry: RunEntry, opened: OpenTimeline) -> None:
    headline = st.empty()
    by_key = _findings(entry)
    if by_key:
        with headline:
            widgets.headline(run_store.open_run(entry).headline(headlines.step))
    key = _key(entry, opened.window)
    finding_key = _choose_finding(by_key, key)
    order = replace(_choose_order(_coordinates(entry, opened, by_key), key), about=opened.about)
    # The browser gets the tracks of a component once.
    key = f"{key}-{order.axis}" if order.axis else key
    key = f"{key}-{opened.scene.key[:8]}" if opened.about else key
    jump = _jump(entry, opened, by_key, finding_key, key)
    path = critical_path.choose(entry) if st.toggle("Critical path of a step", key=bind_flag(PATH)) else None
    marks = message.path_marks(opened.scene, path.compact) if path and path.window == opened.window else []
    marks += message.findings(opened.scene, opened.window, by_key)
    sharing.timeline(_shared_part(opened, order, marks, by_key))
    st.fragment(crashes.guard(_canvas, "the timeline", "The rest of the page is shown."))(
        opened, order, marks, jump, key
    )
    if finding_key in by_key:
        findings.show(by_key[finding_key], run_store.open_run(entry), key=finding_key)
    if path is not None:
        critical_path.show(run_store.open_run(entry), path)
    with st.expander("Perfetto and offline use"):
        export.show(entry.name, opened, list(by_key.values()))


def _shared_part(
    opened: OpenTimeline, order: RankOrder, marks: list[dict[str, Any]], by_key: Findings
) -> sharing.TimelinePart:
    """Function that makes the timeline of a shared page, as the address shows it."""

    def make(parameters: sharing.Parameters) -> Embedded:
        return shared_view.embed_scene(
            opened.scene,
            parameters,
            marks=marks,
            finding=message.chosen_finding(by_key, parameters.get(address.FINDING, "")),
            totals_of=lambda window: opened.range_tables(window, timeout_s=None),
            header=_header(opened, order),
            initial_part=opened.initial_part,
            prefix=opened.prefix,
        )

    return make


def _header(opened: OpenTimeline, order: RankOrder) -> dict[str, Any]:
    return opened.header | {"tracks": order.sort_tracks(opened.header["tracks"]), "places": order.places()}


def _coordinates(entry: RunEntry, opened: OpenTimeline, by_key: Findings) -> RankCoordinates:
    """Return the places of ranks in the mesh that the manifest states; else, of a checked run, as its traces say."""
    groups = tables.mesh_groups(opened.run.manifest)
    if not groups and by_key:
        group_axes = run_store.open_run(entry).table(tables.GROUP_AXES).drop_nulls(["axis", "ranks"])
        for axis, ranks in group_axes.select("axis", "ranks").unique(maintain_order=True).iter_rows():
            groups.setdefault(axis, []).append(ranks)
    # Along a single group of all ranks, the place of a rank is its number.
    places = tables.mesh_coordinates(groups) if any(len(listed) > 1 for listed in groups.values()) else {}
    return {rank: place for rank, place in places.items() if not opened.about or rank in opened.about}


def _choose_order(coordinates: RankCoordinates, key: str) -> RankOrder:
    """Let a person group the ranks by an axis of the mesh."""
    axes = list(dict.fromkeys(axis for place in coordinates.values() for axis in place))
    if not axes:
        return RankOrder()
    choice = st.selectbox(
        "Order of ranks", ["by number", *(f"by groups of {axis}" for axis in axes)], key=f"order-{key}"
    )
    return RankOrder(choice.removeprefix("by groups of ") if choice != "by number" else None, coordinates)


def _key(entry: RunEntry, window: int) -> str:
    # Hashed: Streamlit refuses a component whose key contains two underscores.
    text = f"{entry.name}\0{run_store.stamp_seen(entry)}\0{window}"
    return f"timeline-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


def _open_roles(entry: RunEntry, roles: Sequence[RunEntry]) -> OpenTimeline:
    """The timeline of a run with those of other roles of its job below it."""
    loaded = job_roles.load_roles(entry, *roles)
    window = widgets.choose_window(sorted({source.window for source in loaded.run.sources}))
    opened = _lay_out(entry, window, loaded, tuple(loaded.labels))
    return replace(opened, about=loaded.labels)


def _open_run(entry: RunEntry) -> OpenTimeline:
    # Of a run with many ranks the report says which to draw, and has the clocks of all of them.
    is_large = entry.summary is not None and rank_choice.is_needed(entry.summary.ranks)
    loaded: LoadedRun = opening.open_with_progress(entry) if is_large else run_store.load(entry)
    if not isinstance(loaded, OpenRun) and rank_choice.is_needed(len(loaded.run.ranks)):
        loaded = opening.open_with_progress(entry)
    window = widgets.choose_window(sorted({source.window for source in loaded.run.sources}))
    about = rank_choice.choose(loaded, _wanted_ranks(entry, loaded, window)) if isinstance(loaded, OpenRun) else None
    opened = _lay_out(entry, window, loaded, tuple(about) if about else None)
    return replace(opened, about=about) if about else opened


def _lay_out(entry: RunEntry, window: int, loaded: LoadedRun, ranks: tuple[int, ...] | None) -> OpenTimeline:
    bar = st.empty()

    def on_progress(done: int, total: int) -> None:
        bar.progress(min(done / total, 1.0), f"Laying out the timeline, once for this run: {done} of {total} traces")

    opened = timeline_store.open_timeline(entry, window, on_progress, open_run=loaded, ranks=ranks)
    bar.empty()
    return opened


def _wanted_ranks(entry: RunEntry, run: OpenRun, window: int) -> list[int]:
    """Return the ranks that another page or a choice of a finding opens, once."""
    moment, ranks = st.session_state.get(moments.SHOWN), []
    if moment and moment["run"] == entry.name:
        ranks += [int(moment["rank"]), *moment.get("ranks", ())]
    state, seen = f"finding-{_key(entry, window)}", f"ranks-of-{entry.name}"
    name = (
        st.session_state.get(findings.SHOWN_FINDING)
        or st.session_state.get(state)
        or st.query_params.get(address.FINDING)
    )
    if name == st.session_state.get(seen):
        return ranks
    st.session_state[seen] = name
    for key, finding in findings.by_key(run.report.findings).items():
        row = quoted_moment.quoted_row(finding)
        if name in (key, finding.id) and row is not None:
            ranks += [int(row["rank"]), *quoted_moment.leading_ranks(finding.evidence, row)]
    return ranks


def _findings(entry: RunEntry) -> Findings:
    """Return the findings of the run by key. A large run is checked on request only."""
    key = f"checked-{entry.name}-{run_store.stamp_seen(entry)}"
    is_linked = findings.SHOWN_FINDING in st.session_state or address.FINDING in st.query_params
    if is_linked or run_store.is_checked_soon(entry):
        st.session_state[key] = True
    if not st.session_state.get(key) and st.button("Check this run and mark its findings", key=f"button-{key}"):
        st.session_state[key] = True
    if not st.session_state.get(key):
        return {}
    try:
        with st.spinner(f"Checking {widgets.plain(entry.name)}"):
            report = run_store.open_run(entry).report
    except (TracekitError, RuleError) as error:
        widgets.caption(widgets.plain(f"The findings are not shown: {error}"))
        return {}
    all_findings = findings.by_key(report.findings)
    return {key: finding for key, finding in all_findings.items() if phrases.has_moment(finding)}


def _choose_finding(by_key: Findings, key: str) -> str:
    """Return the key of the finding to show: chosen here, on another page, or named by the address."""
    state = f"finding-{key}"
    requested = st.session_state.pop(findings.SHOWN_FINDING, None)
    if requested is None and state not in st.session_state:
        requested = st.query_params.get(address.FINDING)
    requested = next((name for name, finding in by_key.items() if requested in (name, finding.id)), None)
    if requested is not None:
        st.session_state[state] = requested
        st.session_state[f"seen-{key}"] = ""
    if not by_key:
        return NO_FINDING
    options = [NO_FINDING, *by_key]
    if st.session_state.get(state) not in options:
        st.session_state[state] = NO_FINDING
    choice: str = st.selectbox(
        "Finding",
        options,
        key=state,
        format_func=lambda option: findings.label(by_key[option]) if option in by_key else option,
    )
    address.write(finding=choice if choice in by_key else None)
    return choice


def _jump(entry: RunEntry, opened: OpenTimeline, by_key: Findings, finding_key: str, key: str) -> Jump | None:
    """Part to go to now: of a row chosen on another page, of the finding just chosen, or the one that a link names."""
    moment = st.session_state.pop(moments.SHOWN, None)
    if moment and moment["run"] == entry.name and moment["window"] == opened.window:
        row = pl.DataFrame([{name: moment[name] for name in ("window", "rank", "start_ns", "dur_ns")}])
        is_of_host = finding_key in by_key and findings.is_of_host(by_key[finding_key])
        if finding_key in by_key:  # the finding that the row is evidence of
            st.session_state[f"seen-{key}"] = st.session_state[f"marked-{key}"] = finding_key
        return _at(opened, row, moment.get("ranks", ()), key=finding_key, is_of_host=is_of_host)
    part = address.linked_part(opened)
    linked = Jump(*part) if part else None
    is_new = linked is not None and (linked.start_ns, linked.end_ns) != st.session_state.get(f"address-{key}")
    if finding_key in by_key and st.session_state.get(f"seen-{key}") != finding_key:
        st.session_state[f"seen-{key}"] = st.session_state[f"marked-{key}"] = finding_key
        first_time = f"address-{key}" not in st.session_state
        # A link that names both shows a part of the finding.
        return linked if linked and is_new and first_time else _moment(opened, by_key, finding_key)
    if finding_key not in by_key and st.session_state.pop(f"seen-{key}", None):
        st.session_state[f"marked-{key}"] = NO_FINDING
    return linked if is_new else None


def _moment(opened: OpenTimeline, by_key: Findings, key: str) -> Jump | None:
    """Return the way to the moment that a finding quotes, else to that of the first evidence in this window."""
    evidence = by_key[key].evidence
    in_window = evidence.filter(pl.col("window") == opened.window) if "window" in evidence.columns else evidence
    row = quoted_moment.quoted_row(replace(by_key[key], evidence=in_window))
    if row is None:
        widgets.caption(f"The evidence of this finding is outside of window {opened.window}.")
        return None
    ranks, is_of_host = quoted_moment.leading_ranks(evidence, row), findings.is_of_host(by_key[key])
    return _at(opened, pl.DataFrame([row]), ranks, key=key, is_of_host=is_of_host)


def _at(opened: OpenTimeline, row: pl.DataFrame, ranks: tuple[int, ...], *, key: str, is_of_host: bool) -> Jump | None:
    """Return the way to a row of evidence, on the clock of its trace, with these ranks at the top."""
    spans = message.aligned_spans(opened.scene, opened.window, row)
    if spans.is_empty():
        return None
    rank, begin_ns, last_ns, lane = spans.select("rank", "start_ns", "end_ns", "lane").row(0)
    around_ns = quoted_moment.context_ns(last_ns - begin_ns)
    origin_ns, end_ns = opened.scene.span
    start_ns, past_ns = max(begin_ns - around_ns, origin_ns), min(last_ns + around_ns, end_ns)
    track = _host_track(opened, rank, (begin_ns, last_ns)) if is_of_host else None
    tracks = opened.scene.tracks.filter(pl.col("rank") == rank)
    of_lane = tracks.filter(pl.col("lane") == pl.lit(lane, pl.Int64))
    selected = _slice_of_moment(opened, (of_lane if of_lane.height else tracks)["track"].to_list(), (begin_ns, last_ns))
    if track is None and not ranks[1:]:  # several are folded
        track = next(iter((of_lane if of_lane.height else tracks)["track"].to_list()), None)
    return Jump(start_ns - origin_ns, past_ns - origin_ns, track, key, ranks, selected)


def _slice_of_moment(opened: OpenTimeline, tracks: Sequence[int], span: Window) -> Mapping[str, Any] | None:
    """Slice whose time is most like a span, as the browser selects it; None where none shares half of its time."""
    begin_ns, end_ns = span
    end_of_slice_ns = pl.col("start_ns") + pl.col("dur_ns")
    shared_ns = pl.min_horizontal(end_of_slice_ns, end_ns) - pl.max_horizontal("start_ns", begin_ns)
    all_ns = pl.max_horizontal(end_of_slice_ns, end_ns) - pl.min_horizontal("start_ns", begin_ns)
    slices = tiles.view(opened.scene, span, FIRST_PIXELS, tracks).drop_nulls("id")
    alike = slices.with_columns(ratio=shared_ns / all_ns).filter(pl.col("ratio") >= _ALIKE_RATIO)
    if alike.is_empty():
        return None
    track, slice_id = alike.sort("ratio", descending=True).select("track", "id").row(0)
    return message.slice_place(opened.scene, int(track), int(slice_id))


def _host_track(opened: OpenTimeline, rank: int, span: Window) -> int | None:
    """Track of the host thread of a rank that is busiest in a span; None where the rank has none."""
    hosts = opened.scene.tracks.filter(pl.col("rank") == rank, pl.col("role") == "host")["track"].to_list()
    slices = tiles.view(opened.scene, span, FIRST_PIXELS, hosts)
    by_track = slices.group_by("track").agg(pl.col("busy_ns").sum()).sort("busy_ns", "track", descending=[True, False])
    return next(iter(by_track["track"].to_list() or hosts), None)


def _canvas(opened: OpenTimeline, order: RankOrder, marks: list[dict[str, Any]], jump: Jump | None, key: str) -> None:
    """Show the timeline and answer the browser's requests: a fragment, as zooming reruns only this."""
    state: Mapping[str, Any] = st.session_state.get(key) or {}
    nonce = _nonce(jump, key)
    view = _view(opened, state.get("view"), jump, key)
    finding = _highlighted_finding(state.get("finding"), marks, key)
    obeyed = (state.get("view") or {}).get("lastJump")
    go = flame_graph.jump_message(key, nonce) or (jump.message(nonce) if jump else None)
    has_scene = bool(view.seq)  # a browser that reports a view has received the scene
    header = _header(opened, order)
    data = {name: value for name, value in header.items() if name not in SENT_ONCE or not has_scene} | {
        "view": {"from": view.start_ns, "to": view.end_ns},
        "findings": marks,
        "finding": finding,
        "tile": message.tile(opened.scene, view),
        "matches": _matches(opened, state.get("search")),
        "range": _range(opened, state.get("range")),
        "go": go if go and go["nonce"] != obeyed else None,
    }
    timeline(message.pack(data | _selected_slice(opened, state.get("selected"))), key=key)
    if view.seq:
        st.session_state[f"address-{key}"] = (view.start_ns, view.end_ns)
        address.write(opened, view, finding=finding if finding != NO_FINDING else None)
    selected_range = _selected_range(opened, state.get("range"))
    part = selected_range or (view.start_ns, view.end_ns)
    with sharing.fragment("below the timeline"):
        flame_graph.show(opened, part, state.get("selected"), is_range=selected_range is not None, key=key)
        if st.toggle("Show what is in view as a table", key=f"table-{key}"):
            _table(opened, view)


def _highlighted_finding(clicked: Any, marks: list[dict[str, Any]], key: str) -> str:
    """Return the highlighted finding: clicked on the track or chosen above it, whichever came last."""
    if clicked != st.session_state.get(f"clicked-{key}"):
        st.session_state[f"clicked-{key}"] = clicked
        if any(mark["key"] == clicked for mark in marks):
            st.session_state[f"marked-{key}"] = clicked
    marked: str = st.session_state.get(f"marked-{key}", NO_FINDING)
    return marked


def _nonce(jump: Jump | None, key: str) -> str:
    """Return the name of a jump, which stays the same until the page is rerun."""
    state = st.session_state.get(f"go-{key}")
    if state is None or state[0] is not jump:
        state = (jump, secrets.token_hex(4))
        st.session_state[f"go-{key}"] = state
    return state[1]


def _view(opened: OpenTimeline, reported: Any, jump: Jump | None, key: str) -> View:
    """View that the browser reports, else the part to jump to, else the view in which the page was last left."""
    span_ns = opened.scene.span[1] - opened.scene.span[0]
    if isinstance(reported, Mapping) and reported.get("scene") == opened.scene.key:
        numbers = [reported.get(name) for name in ("seq", "start", "end", "pixels")]
        if all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            seq, start_ns, end_ns, pixels = map(int, numbers)  # type: ignore[arg-type]
            start_ns = min(max(start_ns, 0), max(span_ns - 1, 0))
            end_ns = min(max(end_ns, start_ns + 1), span_ns)
            tracks = reported.get("tracks")
            valid = tuple(track for track in tracks if isinstance(track, int)) if isinstance(tracks, list) else ()
            return View(seq, start_ns, end_ns, min(max(pixels, 1), MAX_PIXELS), valid)
    left: Window | None = st.session_state.get(f"address-{key}")
    start_ns, end_ns = (jump.start_ns, jump.end_ns) if jump else left or opened.initial_part
    return View(0, start_ns, end_ns, FIRST_PIXELS, message.initial_tracks(opened.scene))


def _range(opened: OpenTimeline, selection: Any) -> dict[str, Any] | None:
    """Content of the range that a browser selected; None for none."""
    part, origin_ns = _selected_range(opened, selection), opened.scene.span[0]
    return opened.range_tables((origin_ns + part[0], origin_ns + part[1])) if part else None


def _selected_range(opened: OpenTimeline, selection: Any) -> Window | None:
    """Return the range that a browser selected, in ns from the scene's start; None for none."""
    if not isinstance(selection, Mapping) or selection.get("scene") != opened.scene.key:
        return None
    start_ns, end_ns = selection.get("start"), selection.get("end")
    if not isinstance(start_ns, int) or not isinstance(end_ns, int):
        return None
    start_ns, end_ns = max(start_ns, 0), min(end_ns, opened.scene.span[1] - opened.scene.span[0])
    return (start_ns, end_ns) if start_ns < end_ns else None


def _matches(opened: OpenTimeline, search: Any) -> dict[str, Any] | None:
    text = search.get("text") if isinstance(search, Mapping) else None
    if not isinstance(text, str) or not text.strip():
        return None
    return message.matches(opened.scene, text, opened.find(text.strip()))


def _selected_slice(opened: OpenTimeline, selected: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {"selected": None, "details": None, "arrows": []}
    if not isinstance(selected, Mapping):
        return nothing
    track, row, slice_id = (selected.get(name) for name in ("track", "row", "id"))
    if not all(isinstance(number, int) for number in (track, row, slice_id)):
        return nothing
    echo = {"track": track, "row": row, "id": slice_id, "number": selected.get("number")}
    try:
        details = opened.details(track, slice_id)  # type: ignore[arg-type]  # whole numbers, as was just checked
    except (TracekitError, LookupError) as error:
        rows = [{"label": "unknown", "value": escaping.inert(str(error)), "slice": None}]
        return {"selected": echo, "details": rows, "arrows": []}
    return nothing | {"selected": echo} | (details or {})


def _table(opened: OpenTimeline, view: View) -> None:
    """Show the content of the canvas as a table: the longest slices in view, and how many there are."""
    origin_ns = opened.scene.span[0]
    part = (origin_ns + view.start_ns, origin_ns + view.end_ns)
    table = tiles.view(opened.scene, part, view.pixels, view.tracks)
    longest = table.sort("dur_ns", descending=True).head(MAX_ROWS)
    widgets.caption(
        f"{int(table['count'].sum()):,} slices from {units.duration(view.start_ns)} to {units.duration(view.end_ns)} "
        f"after the start. The table lists the {longest.height:,} longest rows; rows join neighbours too short to draw."
    )
    tracks = pl.DataFrame(opened.header["tracks"])
    rank = pl.Series("rank", [opened.rank_of(rank) for rank in tracks["rank"]], pl.Int64)
    tracks = tracks.select(rank, pl.col("track").cast(longest["track"].dtype), of="group", lane="label")
    names = [escaping.inert(name) for name in tiles.names(opened.scene, longest["name_id"])]
    rows = longest.with_columns(pl.Series("name", names), from_start_ns=pl.col("start_ns") - origin_ns, slices="count")
    cells = rows.join(tracks, on="track", how="left").sort("from_start_ns")
    widgets.frame(cells.select("rank", "of", "lane", "name", "from_start_ns", "dur_ns", "slices"))


PAGE = Page.described_by(__doc__, "timeline", show, Needs.SELECTION)
