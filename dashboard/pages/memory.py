"""Memory: what is allocated over time and by whom, lifetimes of blocks, and fragmentation of the device's memory."""

import polars as pl
import streamlit as st

from dashboard import findings, memory_store, widgets
from dashboard.components import allocator_replay
from dashboard.pages.page import Page
from dashboard.run_store import OpenRun
from dashboard.url_state import bind
from tracekit.analysis.memory import snapshot_files
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.errors import TracekitError
from tracekit.model import escaping, units
from tracekit.report import charts, html_fragments

TRACES = "the traces"
OWNERS = {"phase": "by phase", "unit": "by unit", "op": "by op"}
HOW_TO_RECORD = (
    "The traces contain no memory events, and the run has no memory snapshot: record with profile_memory=True, or dump "
    "a snapshot to RUN/rank00000.memory.pickle."
)
NUMBERS = {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "slack_bytes": "reserved and not allocated at the peak",
    "headroom_bytes": "never reserved",
    "memory_bytes": "of the device",
}


def show(run: OpenRun) -> None:
    """Let a person pick a rank or a memory snapshot, and draw its memory."""
    findings.show_families(run, "MEM")
    files = snapshot_files.files(run.run)
    file = _choose_source(files)
    try:
        if file is None:
            _show_trace(run, has_snapshots=bool(files))
        else:
            _show_snapshot(run, file)
    except TracekitError as error:
        widgets.problem(str(error))


def _choose_source(files: tuple[SnapshotFile, ...]) -> SnapshotFile | None:
    if not files:
        return None
    names = {_name(file): file for file in files}
    options = [TRACES, *names]
    return names.get(st.selectbox("From", options, key=bind("source", options), format_func=escaping.inert))


def _name(file: SnapshotFile) -> str:
    window = f", window {file.window}" if file.window else ""
    return f"memory snapshot of rank {file.rank}{window} ({units.size(file.size_bytes)})"


def _show_trace(run: OpenRun, *, has_snapshots: bool) -> None:
    choices = st.container(horizontal=True)
    ranks = sorted({source.rank for source in run.run.sources})
    rank = choices.selectbox("Rank", ranks, key=bind("rank", ranks), width=160)
    windows = sorted(source.window for source in run.run.sources if source.rank == rank)
    window = windows[0]
    if windows[1:]:
        window = choices.selectbox("Window", windows, key=bind("window", windows), width=160)
    with st.spinner("Measuring"):
        tables = memory_store.trace_tables(run, rank, window)
    devices = tables["peaks"].sort("device", nulls_last=True)["device"].to_list()
    if not devices:
        st.info("The traces contain no memory events; choose a snapshot above." if has_snapshots else HOW_TO_RECORD)
        return
    names = {"the host" if device is None else f"device {device}": device for device in devices}
    device = names[choices.selectbox("Memory", list(names), key=bind("device", list(names)), width=160)]
    of_device = pl.col("device").eq_missing(pl.lit(device, pl.Int64))
    tables = {name: table.filter(of_device) for name, table in tables.items()}
    st.html(html_fragments.numbers(_numbers(tables["peaks"])))
    st.subheader("Allocated over time")
    by = st.segmented_control(
        "Owners", list(OWNERS), format_func=OWNERS.get, key=bind("owners", list(OWNERS)), required=True
    )
    widgets.chart(charts.memory_over_time(tables["over_time"].filter(owner_kind=by)), key="memory_held")
    _lifetimes(tables["lifetimes"])
    st.subheader("Allocated at the peak")
    at_peak = tables["at_peak"].drop("device", "at_ns", "peak_bytes")
    known = [name for name in at_peak.columns if at_peak[name].null_count() < at_peak.height]
    widgets.frame(at_peak.select(known), key="memory-at-peak")
    st.subheader("Allocations of each step")
    widgets.frame(tables["churn"].drop("device"), key="memory-churn")
    if device is not None:
        allocator_replay.show(
            f"{run.entry.name}-{rank}-{window}",
            lambda settings, gib: memory_store.replay_trace(run, rank, window, settings, gib),
        )


def _show_snapshot(run: OpenRun, file: SnapshotFile) -> None:
    key = f"memory-snapshot-device-{run.entry.name}-{file.path}"
    with st.spinner("Reading the snapshot"):
        tables = memory_store.snapshot_tables(file, st.session_state.get(key))
    devices = tables["devices"]["device"].to_list()
    if devices[1:]:
        st.selectbox("Device", devices, key=key)
    if tables["over_time"].height:
        st.subheader("Allocated over time")
        widgets.chart(charts.memory_over_time(tables["over_time"]), key="snapshot_held")
    st.subheader("Memory map at the snapshot")
    st.caption("Addresses from left to right, each pool on its own lines; a tick ends a segment. Hover over a block.")
    widgets.chart(charts.segment_map(tables["segment_map"]), key="snapshot_map")
    widgets.frame(tables["fragmentation"].drop("device"))
    if tables["lifetimes"].height:
        _lifetimes(tables["lifetimes"])
    st.subheader("Allocated at the peak")
    widgets.frame(tables["at_peak"].select("op", "count", "bytes", "peak_ratio"), key="snapshot-at-peak")
    device = tables["fragmentation"]["device"].first() or 0
    allocator_replay.show(
        f"{run.entry.name}-{file.path}-{device}",
        lambda settings, gib: memory_store.replay_snapshot(run, file, device, settings, gib),
    )


def _lifetimes(table: pl.DataFrame) -> None:
    st.subheader("Sizes and lifetimes")
    st.caption("Each cell is the blocks of one size and lifetime; darker cells allocated more bytes.")
    widgets.chart(charts.block_lifetimes(table), key="memory_lifetimes")


def _numbers(peaks: pl.DataFrame) -> dict[str, tuple[str, str]]:
    row = peaks.row(0, named=True)
    return {label: (units.size(row[name]), "") for name, label in NUMBERS.items() if row[name] is not None}


PAGE = Page(
    "Memory",
    "memory",
    "allocated memory over time and its owners, block lifetimes, fragmentation, and replays of the allocator under "
    "other settings",
    show,
)
