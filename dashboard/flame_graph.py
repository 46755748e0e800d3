"""The flame graph below the timeline: host time of a part by call path, whose frames lead to their longest instance."""

import re
import secrets
from collections.abc import Mapping
from typing import Any

import polars as pl
import streamlit as st

from dashboard import widgets
from dashboard.components.timeline.timeline_store import OpenTimeline
from dashboard.url_state import bind, bind_text
from tracekit.errors import TracekitError
from tracekit.model import units
from tracekit.model.intervals import Window
from tracekit.report import charts, timeline

FLAME, RANK, THREAD, SEARCH = "flame", "flame_rank", "flame_thread", "flame_search"
"""The parameters of the address: the part in ns from the scene's start, the rank, the thread, the text to find."""
ALL_THREADS = "all threads"
_PART = re.compile(r"(\d{1,16})-(\d{1,16})")


def show(opened: OpenTimeline, part: Window, selected: Any, *, is_range: bool, key: str) -> None:
    """Offer the flame graph of a part, in ns from the scene's start, and show the one that a person opened.

    It stays the same while the timeline moves. `selected` is the slice that the browser selected: its thread is shown.
    """
    state, parameter = state_of(key), opened.prefix + FLAME
    if state not in st.session_state:
        st.session_state[state] = _linked_part(st.query_params.get(parameter, ""), opened)
    with st.container(horizontal=True):
        what = "the selected range" if is_range else "the part in view"
        st.button(f"Flame graph of {what}", on_click=_open, args=(opened, state, part, selected), key=f"flame-of-{key}")
        current: Window | None = st.session_state[state]
        if current is not None:
            st.button("Close the flame graph", on_click=_close, args=(state,), key=f"flame-close-{key}")
    text = "" if current is None else f"{current[0]}-{current[1]}"
    if text and st.query_params.get(parameter) != text:
        st.query_params[parameter] = text
    elif not text and parameter in st.query_params:
        del st.query_params[parameter]
    if current is not None:
        _show(opened, current, key)


def state_of(key: str) -> str:
    """Return the name of the state with the part whose flame graph is shown, None for none."""
    return f"flame-{key}"


def jump_message(key: str, after: str) -> dict[str, Any] | None:
    """Return the message that leads to the longest instance of the frame clicked last, since the jump `after`."""
    go: dict[str, Any] | None = st.session_state.get(f"flame-go-{key}")
    return go["message"] if go and go["after"] == after else None


def _linked_part(text: str, opened: OpenTimeline) -> Window | None:
    match = _PART.fullmatch(text)
    part = (int(match[1]), int(match[2])) if match else (0, 0)
    return part if part[0] < part[1] <= opened.scene.span[1] - opened.scene.span[0] else None


def _open(opened: OpenTimeline, state: str, part: Window, selected: Any) -> None:
    st.session_state[state] = part
    track = selected.get("track") if isinstance(selected, Mapping) else None
    if not isinstance(track, int) or not 0 <= track < opened.scene.tracks.height:
        return
    track_row = opened.scene.tracks.row(track, named=True)
    st.session_state[opened.prefix + RANK] = track_row["rank"]
    st.session_state[opened.prefix + THREAD] = track if track_row["source"] == "ops" else ALL_THREADS


def _close(state: str) -> None:
    st.session_state[state] = None


def _show(opened: OpenTimeline, part: Window, key: str) -> None:
    threads = opened.scene.tracks.filter(source="ops")
    if threads.is_empty():
        widgets.info("The traces contain no host slices: record with `ProfilerActivity.CPU`.")
        return
    rank_box, thread_box, search = st.columns(3)
    ranks = threads["rank"].unique(maintain_order=True).to_list()
    rank = rank_box.selectbox("Rank", ranks, key=bind(opened.prefix + RANK, ranks), format_func=opened.rank_name)
    labels = dict(threads.filter(rank=rank).select("track", "label").iter_rows())
    options = [ALL_THREADS, *labels]
    thread = thread_box.selectbox(
        "Thread", options, key=bind(opened.prefix + THREAD, options), format_func=lambda key: labels.get(key, key)
    )
    text = search.text_input("Search frames", key=bind_text(SEARCH), placeholder="part of a name, any case").strip()
    lane = None if thread == ALL_THREADS else int(threads.filter(track=thread)["lane"].item())
    begin_ns = opened.scene.span[0]
    try:
        with st.spinner("Adding up"):
            tree = opened.call_paths(rank, lane, (begin_ns + part[0], begin_ns + part[1]))
    except (TracekitError, KeyError) as error:
        widgets.problem(str(error))
        return
    if not tree["total_ns"].sum():
        widgets.info("No host slice of this thread is in this part of the timeline.")
        return
    widgets.caption(_about(opened, rank, part, tree, text))
    drawn_part, node = (opened.scene.key, rank, lane, part), None
    if st.session_state.get(_node_state(key), (None,))[0] == drawn_part:
        node = st.session_state[_node_state(key)][1]
    figure = charts.icicle(tree, f"host time, {opened.rank_name(rank)}", search=text, node=node)

    def on_click() -> None:
        clicked = _clicked_frame(tree, key)
        st.session_state[_node_state(key)] = (drawn_part, _opened_node(tree, clicked))
        _go_to_longest(opened, rank, clicked, key)

    widgets.chart(figure, key=_chart(key), on_select=on_click, selection_mode="points")


def _about(opened: OpenTimeline, rank: int, part: Window, tree: pl.DataFrame, text: str) -> str:
    whole_ns = int(tree.filter(parent=-1)["total_ns"].sum())
    caption = (
        f"Host time of {opened.rank_name(rank)} between {units.duration(part[0] - opened.zero_ns)} and "
        f"{units.duration(part[1] - opened.zero_ns)}, merged by call path: operators and, where stacks were recorded, "
        "Python frames. Hover shows the time of a frame itself; a click goes to its longest instance in the timeline."
    )
    if text:
        frames, found_ns = timeline.search_frames(tree, text)
        share = units.share(found_ns / whole_ns)
        caption += f" {frames:,} frames contain the text: {units.duration(found_ns)}, {share} of the time."
    return widgets.plain(caption)


def _chart(key: str) -> str:
    return f"flame-chart-{key}"


def _node_state(key: str) -> str:
    return f"flame-node-{key}"


def _clicked_frame(tree: pl.DataFrame, key: str) -> pl.DataFrame:
    """Return the row of the frame that was clicked; none for the root."""
    points = st.session_state[_chart(key)]["selection"]["points"]
    node = points[0].get("id") if points else None
    return tree.filter(node=int(node)) if isinstance(node, str) and node.isdecimal() else tree.clear()


def _opened_node(tree: pl.DataFrame, clicked: pl.DataFrame) -> int | None:
    """Return the frame to draw alone: the clicked one, or the one around it if it has none inside."""
    if clicked.is_empty():
        return None
    node, parent = clicked.select("node", "parent").row(0)
    return node if tree.filter(parent=node).height else parent


def _go_to_longest(opened: OpenTimeline, rank: int, clicked: pl.DataFrame, key: str) -> None:
    """Let the timeline go to the longest instance of the frame that was clicked."""
    op_id = clicked["longest_id"][0] if clicked.height else None
    place = None if op_id is None else opened.place_of_op(rank, op_id)
    if place is not None:
        message = {"slice": place, "nonce": secrets.token_hex(4)}
        st.session_state[f"flame-go-{key}"] = {"after": st.session_state[f"go-{key}"][1], "message": message}
