"""Memory: what is held over time and by whom, how long blocks live, and how the device's memory is cut up."""

import polars as pl
import streamlit as st

from dashboard import allocator_replay, rule_families, run_facts, run_store, widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.memory import snapshot_files
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.errors import TracekitError
from tracekit.model import escaping, units
from tracekit.report import charts, html_fragments

TRACES = "the traces"
BY = {"phase": "by phase", "unit": "by unit", "op": "by op"}
HOW_TO_RECORD = (
    "The traces have no memory events, and no memory snapshot lies beside them: record with profile_memory=True, or "
    "dump a snapshot to RUN/rank00000.memory.pickle."
)


def page(entry: RunEntry) -> None:
    """Let a person pick a rank, or a memory snapshot, and draw its memory."""
    held = widgets.begin(entry)
    if held is None:
        return
    rule_families.show(held, "MEM")
    found = snapshot_files.files(held.run)
    source = _choose_source(found)
    try:
        if source is None:
            _of_traces(entry, held, has_snapshots=bool(found))
        else:
            _of_snapshot(entry, source)
    except TracekitError as error:
        widgets.problem(str(error))


def _choose_source(found: tuple[SnapshotFile, ...]) -> SnapshotFile | None:
    if not found:
        return None
    names = {_name(each): each for each in found}
    choices = [TRACES, *names]
    chosen = st.selectbox("From", choices, key=widgets.bind("source", choices), format_func=escaping.inert)
    return names.get(chosen)


def _name(found: SnapshotFile) -> str:
    window = f", window {found.window}" if found.window else ""
    return f"memory snapshot of rank {found.rank}{window} ({units.size(found.size_bytes)})"


def _of_traces(entry: RunEntry, held: run_store.OpenRun, *, has_snapshots: bool) -> None:
    sources = {(source.rank, source.window): source for source in held.run.sources}
    choices = st.container(horizontal=True)
    ranks = sorted({rank for rank, _ in sources})
    rank = choices.selectbox("Rank", ranks, key=widgets.bind("rank", ranks), width=160)
    windows = sorted(window for of_rank, window in sources if of_rank == rank)
    window = windows[0]
    if windows[1:]:
        window = choices.selectbox("Window", windows, key=widgets.bind("window", windows), width=160)
    with st.spinner("Measuring"):
        tables = run_facts.memory(entry, rank, window)
    devices = tables["peaks"].sort("device", nulls_last=True)["device"].to_list()
    if not devices:
        st.info("The traces have no memory events; a snapshot can be chosen above." if has_snapshots else HOW_TO_RECORD)
        return
    named = {_device(each): each for each in devices}
    device = named[choices.selectbox("Memory", list(named), key=widgets.bind("device", list(named)), width=160)]
    mine = {name: table.filter(_of(device)) for name, table in tables.items()}
    st.html(html_fragments.numbers(_numbers(mine["peaks"])))
    st.subheader("Held over time")
    owners = list(BY)
    choice = st.segmented_control(
        "Owners", owners, format_func=BY.get, key=widgets.bind("owners", owners), required=True
    )
    widgets.chart(charts.memory_over_time(mine["over_time"].filter(pl.col("owner_kind") == choice)), key="memory_held")
    _lifetimes(mine["lifetimes"])
    st.subheader("Who holds the peak")
    widgets.frame(_known(mine["at_peak"].drop("device", "at_ns", "peak_bytes")), key="memory-at-peak")
    st.subheader("What each step takes")
    widgets.frame(mine["churn"].drop("device"), key="memory-churn")
    if device is not None:
        allocator_replay.of_trace(entry, rank, window)


def _of_snapshot(entry: RunEntry, found: SnapshotFile) -> None:
    key = f"memory-snapshot-device-{entry.name}-{found.path}"
    with st.spinner("Reading the snapshot"):
        tables = run_store.memory_of_snapshot(found, st.session_state.get(key))
    devices = tables["devices"]["device"].to_list()
    if devices[1:]:
        st.selectbox("Device", devices, key=key)
    if tables["over_time"].height:
        st.subheader("Held over time")
        widgets.chart(charts.memory_over_time(tables["over_time"]), key="snapshot_held")
    st.subheader("The device's memory at the snapshot")
    st.caption("End to end, each pool on lines of its own; a tick is the end of a segment. Point at a block for more.")
    widgets.chart(charts.segment_map(tables["segment_map"]), key="snapshot_map")
    widgets.frame(tables["fragmentation"].drop("device"))
    if tables["lifetimes"].height:
        _lifetimes(tables["lifetimes"])
    st.subheader("Who holds the peak")
    widgets.frame(tables["at_peak"].select("op", "count", "bytes", "peak_ratio"), key="snapshot-at-peak")
    allocator_replay.of_snapshot(entry, found, tables["fragmentation"]["device"].first() or 0)


def _lifetimes(table: pl.DataFrame) -> None:
    st.subheader("Sizes and lifetimes")
    st.caption("Each cell is the blocks of one size and lifetime; the darker, the more bytes were taken in them.")
    widgets.chart(charts.block_lifetimes(table), key="memory_lifetimes")


def _numbers(peaks: pl.DataFrame) -> dict[str, tuple[str, str]]:
    labels = {
        "peak_allocated_bytes": "held at most",
        "peak_reserved_bytes": "reserved at most",
        "slack_bytes": "reserved and idle at the peak",
        "headroom_bytes": "never reserved",
        "memory_bytes": "of the device",
    }
    row = peaks.row(0, named=True)
    return {label: (units.size(row[name]), "") for name, label in labels.items() if row[name] is not None}


def _known(table: pl.DataFrame) -> pl.DataFrame:
    return table.select(name for name in table.columns if table[name].null_count() < table.height)


def _device(device: int | None) -> str:
    return "the host" if device is None else f"device {device}"


def _of(device: int | None) -> pl.Expr:
    return pl.col("device").eq_missing(pl.lit(device, pl.Int64))
