"""Timeline: all ranks on one clock, at any zoom, with findings as a track of their own."""

import hashlib
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
import streamlit as st

from dashboard import run_store, timeline_store, widgets
from dashboard.components.timeline import message
from dashboard.components.timeline.message import View
from dashboard.components.timeline.timeline import timeline
from dashboard.pages import perfetto_export
from dashboard.run_catalog import RunEntry
from tracekit.errors import RuleError, TracekitError
from tracekit.model import escaping, units
from tracekit.model.intervals import Window
from tracekit.report import phrases
from tracekit.report import timeline as tiles
from tracekit.rules.rule import Finding

FROM, TO, FINDING = "from", "to", "finding"
ONCE = ("tracks", "kinds", "unit_ranks")
"""What is told of a scene only once, because of many ranks it is long."""
NO_FINDING = "none: all of them are marked on the track on top"
FIRST_PIXELS = 1200
MAX_PIXELS = 8000
MAX_ROWS = 200
CHECKED_AT_ONCE_BYTES = 24 << 20
_CONTEXT_RATIO = 1.5  # of a finding's moment, shown at least on both sides
_CONTEXT_NS = 2_000
_CONTEXT_OF_STEPS = 0.03
_SMALL_RATIO = 0.5


@dataclass(frozen=True)
class Jump:
    """Where the timeline is sent: a part of the run in ns from its start, a track to have in view, a finding."""

    start_ns: int
    end_ns: int
    track: int | None = None
    finding: str | None = None

    def told(self, nonce: str) -> dict[str, Any]:
        """Return the message to the browser; a `nonce` is obeyed once."""
        return {
            "start": self.start_ns,
            "end": self.end_ns,
            "track": self.track,
            "finding": self.finding,
            "nonce": nonce,
        }


def page(entry: RunEntry) -> None:
    """Draw all ranks of the run, or say why that cannot be."""
    if entry.problem:
        widgets.problem(entry.problem)
        return
    try:
        drawn = _opened(entry)
    except TracekitError as error:
        widgets.problem(f"{entry.name}: {error}")
        return
    widgets.heading(entry, drawn)
    if drawn.scene.tracks.is_empty():
        st.info("The traces hold no work to draw: no kernels, and no operators on a CPU run.")
        return
    found = _findings(entry)
    key = _key(entry, drawn.window)
    chosen = _choose_finding(found, key)
    go = _wanted(entry, drawn, found, chosen, key)
    marks = message.findings(drawn.scene, drawn.window, found)
    _canvas(drawn, marks, go, key)
    if chosen in found:
        widgets.finding(found[chosen], run_store.open_run(entry), key=f"{entry.name}-timeline")
    perfetto_export.offer(entry, drawn, list(found.values()))


def _key(entry: RunEntry, window: int) -> str:
    # Hashed: Streamlit refuses a component whose key holds two underscores.
    told = f"{entry.name}\0{run_store.stamp_seen(entry)}\0{window}"
    return f"timeline-{hashlib.sha256(told.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


def _opened(entry: RunEntry) -> timeline_store.OpenTimeline:
    run = timeline_store.run_of(entry)
    windows = sorted({source.window for source in run.sources})
    window = (
        st.selectbox("Window", windows, key=widgets.bind("window", windows), width=160) if windows[1:] else windows[0]
    )
    many = sum(source.window == window for source in run.sources)
    place = st.empty()

    def step_on(done: int, total: int) -> None:
        place.progress(min(done / total, 1.0), f"Laying out the timeline, once for this run: {done} of {total} traces")

    with place, st.spinner(f"Opening the timeline of {many} rank{'s' * (many > 1)}"):
        drawn = timeline_store.open_timeline(entry, window, step_on)
    place.empty()
    return drawn


def _findings(entry: RunEntry) -> dict[str, Finding]:
    """Return what was found in the run, by key. A large run is checked only where somebody asks for it."""
    asked = f"checked-{entry.name}-{run_store.stamp_seen(entry)}"
    wants = widgets.SHOWN_FINDING in st.session_state or FINDING in st.query_params
    if wants or entry.summary is not None or entry.size_bytes <= CHECKED_AT_ONCE_BYTES:
        st.session_state[asked] = True
    if not st.session_state.get(asked) and st.button("Check this run and mark what is found", key=f"button-{asked}"):
        st.session_state[asked] = True
    if not st.session_state.get(asked):
        return {}
    try:
        with st.spinner(f"Checking {widgets.plain(entry.name)} for findings"):
            report = run_store.open_run(entry).report
    except (TracekitError, RuleError) as error:
        st.caption(widgets.plain(f"The findings are not shown: {error}"))
        return {}
    return {key: found for key, found in widgets.finding_keys(report.findings).items() if widgets.can_be_shown(found)}


def _choose_finding(found: Mapping[str, Finding], key: str) -> str:
    """Return the key of the finding to look at: chosen here, sent from another page, or named by the address."""
    state = f"finding-{key}"
    wanted = st.session_state.pop(widgets.SHOWN_FINDING, None)
    if wanted is None and state not in st.session_state:
        wanted = st.query_params.get(FINDING)
    wanted = next((each for each, of in found.items() if wanted in (each, of.id)), None)
    if wanted is not None:
        st.session_state[state] = wanted
        st.session_state[f"seen-{key}"] = ""
    if not found:
        return NO_FINDING
    options = [NO_FINDING, *found]
    if st.session_state.get(state) not in options:
        st.session_state[state] = NO_FINDING
    chosen: str = st.selectbox(
        "Finding",
        options,
        key=state,
        format_func=lambda each: _label(found[each]) if each in found else each,
    )
    _tell_address(finding=chosen if chosen in found else None)
    return chosen


def _label(found: Finding) -> str:
    return escaping.inert(f"{found.id}  {phrases.cost(found)}  {found.message}", 120)


def _wanted(
    entry: RunEntry, drawn: timeline_store.OpenTimeline, found: Mapping[str, Finding], chosen: str, key: str
) -> Jump | None:
    """Return where to go now: a row chosen on another page, the finding just chosen, the part that a link names."""
    shown = st.session_state.pop(widgets.SHOWN_MOMENT, None)
    if shown and shown["run"] == entry.name and shown["window"] == drawn.window:
        row = pl.DataFrame([{name: shown[name] for name in ("window", "rank", "start_ns", "dur_ns")}])
        return _at(drawn, message.aligned_spans(drawn.scene, drawn.window, row))
    linked = _linked(drawn)
    is_new = linked is not None and (linked.start_ns, linked.end_ns) != st.session_state.get(f"address-{key}")
    if chosen in found and st.session_state.get(f"seen-{key}") != chosen:
        st.session_state[f"seen-{key}"] = st.session_state[f"marked-{key}"] = chosen
        first_time = f"address-{key}" not in st.session_state
        # A link that names both was sent by somebody who looked closer.
        return linked if linked and is_new and first_time else _moment(drawn, chosen, found[chosen])
    if chosen not in found and st.session_state.pop(f"seen-{key}", None):
        st.session_state[f"marked-{key}"] = NO_FINDING
    return linked if is_new else None


def _linked(drawn: timeline_store.OpenTimeline) -> Jump | None:
    try:
        start_ns, end_ns = int(st.query_params[FROM]), int(st.query_params[TO])
    except (KeyError, ValueError):
        return None
    span_ns = drawn.scene.span[1] - drawn.scene.span[0]
    return Jump(start_ns, end_ns) if 0 <= start_ns < end_ns <= span_ns else None


def _moment(drawn: timeline_store.OpenTimeline, key: str, found: Finding) -> Jump | None:
    """Return the longest moment of a finding's evidence, with its rank and lane."""
    go = _at(drawn, message.evidence_spans(drawn.scene, drawn.window, found), key)
    if go is None:
        st.caption(f"None of its evidence lies in window {drawn.window}.")
    return go


def _at(drawn: timeline_store.OpenTimeline, moments: pl.DataFrame, finding: str | None = None) -> Jump | None:
    """Return the way to the longest of moments on the clock of the run."""
    if moments.is_empty():
        return None
    length_ns = pl.col("end_ns") - pl.col("start_ns")
    row = moments.sort(length_ns, "start_ns", descending=[True, False]).row(0, named=True)
    around_ns = max(int((row["end_ns"] - row["start_ns"]) * _CONTEXT_RATIO), _CONTEXT_NS)
    origin_ns, end_ns = drawn.scene.span
    start_ns, past_ns = max(row["start_ns"] - around_ns, origin_ns), min(row["end_ns"] + around_ns, end_ns)
    tracks = drawn.scene.tracks.filter(pl.col("rank") == row["rank"])
    of_lane = tracks.filter(pl.col("lane") == pl.lit(row["lane"], pl.Int64))
    track = (of_lane if of_lane.height else tracks)["track"].head(1).to_list()
    return Jump(start_ns - origin_ns, past_ns - origin_ns, track[0] if track else None, finding)


@st.fragment
def _canvas(drawn: timeline_store.OpenTimeline, marks: list[dict[str, Any]], go: Jump | None, key: str) -> None:
    """Show the timeline and answer what the browser asks. Only this is run again when somebody zooms."""
    told: Mapping[str, Any] = st.session_state.get(key) or {}
    nonce = _nonce(go, key)
    view = _view(drawn, told.get("view"), go, key)
    finding = _marked(told.get("finding"), marks, key)
    went = (told.get("view") or {}).get("went")
    knows = bool(view.seq)  # who tells what it shows of the scene was told of it
    data = {name: value for name, value in drawn.about.items() if name not in ONCE or not knows} | {
        "view": {"from": view.start_ns, "to": view.end_ns},
        "findings": marks,
        "finding": finding,
        "tile": message.tile(drawn.scene, view),
        "matches": _matches(drawn, told.get("search")),
        "go": go.told(nonce) if go and nonce != went else None,
    }
    timeline(message.packed(data | _picked(drawn, told.get("picked"))), key=key)
    if view.seq:
        st.session_state[f"address-{key}"] = (view.start_ns, view.end_ns)
        _tell_address(view=view, finding=finding if finding != NO_FINDING else None)
    if st.toggle("Show what is in view as a table", key=f"table-{key}"):
        _table(drawn, view)


def _marked(clicked: Any, marks: list[dict[str, Any]], key: str) -> str:
    """Return the finding to stand out: the one clicked on the track or the one chosen above it, whichever came last."""
    if clicked != st.session_state.get(f"clicked-{key}"):
        st.session_state[f"clicked-{key}"] = clicked
        if any(mark["key"] == clicked for mark in marks):
            st.session_state[f"marked-{key}"] = clicked
    marked: str = st.session_state.get(f"marked-{key}", NO_FINDING)
    return marked


def _nonce(go: Jump | None, key: str) -> str:
    """Return the name of this going: the same for as long as the page is not made anew."""
    state = st.session_state.get(f"go-{key}")
    if state is None or state[0] is not go:
        state = (go, secrets.token_hex(4))
        st.session_state[f"go-{key}"] = state
    return state[1]


def _view(drawn: timeline_store.OpenTimeline, told: Any, go: Jump | None, key: str) -> View:
    """Return what the browser says it shows, else what it showed when the page was last left, else where to go."""
    span_ns = drawn.scene.span[1] - drawn.scene.span[0]
    if isinstance(told, Mapping) and told.get("scene") == drawn.scene.key:
        numbers = [told.get(name) for name in ("seq", "start", "end", "pixels")]
        if all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
            seq, start_ns, end_ns, pixels = map(int, numbers)  # type: ignore[arg-type]
            start_ns = min(max(start_ns, 0), max(span_ns - 1, 0))
            end_ns = min(max(end_ns, start_ns + 1), span_ns)
            return View(seq, start_ns, end_ns, min(max(pixels, 1), MAX_PIXELS), _tracks(told.get("tracks")))
    part = (go.start_ns, go.end_ns) if go else st.session_state.get(f"address-{key}") or _first_look(drawn.scene)
    return View(0, *part, FIRST_PIXELS, message.tracks_at_first(drawn.scene))


def _tracks(told: Any) -> tuple[int, ...]:
    return tuple(track for track in told if isinstance(track, int)) if isinstance(told, list) else ()


def _first_look(scene: tiles.Scene) -> Window:
    """Return the part to see first: the steps, where a save long after them would make them small, else all."""
    span_ns = scene.span[1] - scene.span[0]
    steps = scene.bands.filter(pl.col("kind") == "step")
    if steps.is_empty():
        return 0, span_ns
    first_ns, past_ns = (int(edge) - scene.span[0] for edge in (steps["start_ns"].min(), steps["end_ns"].max()))
    around_ns = int((past_ns - first_ns) * _CONTEXT_OF_STEPS)
    part = max(first_ns - around_ns, 0), min(past_ns + around_ns, span_ns)
    return part if part[1] - part[0] < span_ns * _SMALL_RATIO else (0, span_ns)


def _matches(drawn: timeline_store.OpenTimeline, told: Any) -> dict[str, Any] | None:
    text = told.get("text") if isinstance(told, Mapping) else None
    if not isinstance(text, str) or not text.strip():
        return None
    return message.matches(drawn.scene, text, drawn.find(text.strip()))


def _picked(drawn: timeline_store.OpenTimeline, told: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {"picked": None, "details": None, "arrows": []}
    if not isinstance(told, Mapping):
        return nothing
    place = [told.get(name) for name in ("track", "row", "id")]
    if not all(isinstance(n, int) for n in place):
        return nothing
    track, row, slice_id = place
    picked = {"track": track, "row": row, "id": slice_id, "number": told.get("number")}
    try:
        read = drawn.details(track, slice_id)
    except (TracekitError, LookupError) as error:
        rows = [{"label": "not known", "value": escaping.inert(str(error)), "slice": None}]
        return {"picked": picked, "details": rows, "arrows": []}
    return nothing | {"picked": picked} | (read or {})


def _tell_address(*, view: View | None = None, finding: str | None = None) -> None:
    wanted = {FROM: str(view.start_ns), TO: str(view.end_ns)} if view else {}
    if finding is not None:
        wanted[FINDING] = finding
    elif FINDING in st.query_params:
        del st.query_params[FINDING]
    if any(st.query_params.get(name) != text for name, text in wanted.items()):
        st.query_params.update(wanted)


def _table(drawn: timeline_store.OpenTimeline, view: View) -> None:
    """Say in words and numbers what the canvas shows: the longest slices in view, and how many more there are."""
    origin_ns = drawn.scene.span[0]
    part = (origin_ns + view.start_ns, origin_ns + view.end_ns)
    table = tiles.view(drawn.scene, part, view.pixels, view.tracks)
    longest = table.sort("dur_ns", descending=True).head(MAX_ROWS)
    named = longest.with_columns(
        name=pl.Series([escaping.inert(n) for n in tiles.names(drawn.scene, longest["name_id"])])
    )
    shown = named.join(drawn.scene.tracks.select("track", "rank", "group", "label"), on="track", how="left")
    many = int(table["count"].sum())
    st.caption(
        f"{many:,} slices are in view from {units.duration(view.start_ns)} to {units.duration(view.end_ns)} after the "
        f"start; the {shown.height:,} longest rows are listed, slices too short to see apart as one row."
    )
    columns = shown.select(
        "rank",
        pl.col("group").map_elements(escaping.inert, return_dtype=pl.String).alias("of"),
        pl.col("label").map_elements(escaping.inert, return_dtype=pl.String).alias("lane"),
        "name",
        (pl.col("start_ns") - origin_ns).alias("from_start_ns"),
        "dur_ns",
        pl.col("count").alias("slices"),
    )
    widgets.frame(columns.sort("from_start_ns"))
