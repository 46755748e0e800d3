"""Memory and checkpoints: owners of memory over time, fragmentation, allocator replays; saves; goodput of the job."""

from collections.abc import Callable

import polars as pl
import streamlit as st

from dashboard import findings, widgets
from dashboard.pages.page import Page, Tab, lack_of
from dashboard.run_entry import RunEntry
from dashboard.run_store import OpenRun, goodput, memory, tables
from dashboard.run_store.memory import MemoryUsage, SnapshotFile
from dashboard.url_state import bind
from tracekit.errors import TracekitError
from tracekit.model import escaping, units
from tracekit.report import charts, headlines
from tracekit.report import goodput as goodput_report
from tracekit.report import memory as memory_report

TRACES = "the traces"
OWNERS = {"phase": "by phase", "unit": "by unit", "op": "by op"}
HOW_TO_RECORD = (
    "The traces contain no memory events, and the run has no memory snapshot: record with profile_memory=True, or dump "
    "a snapshot to RUN/rank00000.memory.pickle."
)
HOW_TO_RECORD_SAVES = (
    "The run has no checkpoint log, or it contains no save: record with tracekit record, or wrap a save in "
    "tracekit.capture.record_save."
)
HOW_TO_RECORD_ATTEMPTS = (
    "The run has no attempts log (attempts.jsonl): tracekit record, a Recorder and the instrumented trainers write one."
)
NUMBERS = {
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "slack_bytes": "reserved and not allocated at the peak",
    "headroom_bytes": "never reserved",
    "memory_bytes": "of the device",
}

UNLIMITED, AS_RECORDED = "none", "as recorded"
SPLITS_MB = (UNLIMITED, 32, 64, 128, 256, 512, 1024)
THRESHOLDS = (UNLIMITED, 0.6, 0.7, 0.8, 0.9)
DIVISIONS = (AS_RECORDED, 2, 4, 8, 16)
COUNTS = {
    "device_allocations": "Device allocations",
    "retries": "Allocation retries (cudaMalloc failed, cache flushed)",
}
_OOM_LABELS = {"peak_ratio": "share", "step_bytes": "per step"}


def show(run: OpenRun) -> None:
    """Let a person pick a rank or a memory snapshot, and draw its memory."""
    findings.show_families(run, "MEM")
    files = memory.snapshots(run)
    file = _choose_source(files)
    try:
        if file is None:
            _show_trace(run, has_snapshots=bool(files))
        else:
            _show_snapshot(run.entry, file)
    except TracekitError as error:
        widgets.problem(str(error))


_lack_of_saves = lack_of(tables.SAVES, HOW_TO_RECORD_SAVES)


def _lack_of_memory(run: OpenRun) -> str:
    """Why a run has no memory to show, '' where it has, or where nothing else on the page is recorded either."""
    if run.headline(headlines.memory) is not None or memory.snapshots(run):
        return ""
    return "" if _lack_of_saves(run) and _lack_of_attempts(run) else HOW_TO_RECORD


def show_snapshots(entry: RunEntry) -> None:
    """Let a person pick a memory snapshot of a run without traces, and draw it."""
    try:
        names = {_name(file): file for file in memory.snapshots_of_entry(entry)}
        source = st.selectbox("From", list(names), key=bind("source", list(names)), format_func=escaping.inert)
        if source is not None:
            _show_snapshot(entry, names[source])
    except (TracekitError, OSError) as error:
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
    if not has_snapshots and run.headline(headlines.memory) is None:
        widgets.info(HOW_TO_RECORD)
        return
    choices = st.container(horizontal=True)
    ranks = sorted({source.rank for source in run.run.sources})
    rank = choices.selectbox("Rank", ranks, key=bind("rank", ranks), width=160)
    windows = sorted(source.window for source in run.run.sources if source.rank == rank)
    window = widgets.choose_window(windows, choices)
    with widgets.measuring():
        parts = memory.trace_tables(run, rank, window)
    devices = parts["peaks"].sort("device", nulls_last=True)["device"].to_list()
    if not devices:
        widgets.info(
            "The traces contain no memory events; choose a snapshot above." if has_snapshots else HOW_TO_RECORD
        )
        return
    names = {"the host" if device is None else f"device {device}": device for device in devices}
    device = names[choices.selectbox("Memory", list(names), key=bind("device", list(names)), width=160)]
    of_device = pl.col("device").eq_missing(pl.lit(device, pl.Int64))
    parts = {name: table.filter(of_device) for name, table in parts.items()}
    peaks = parts["peaks"].row(0, named=True)
    widgets.numbers({label: units.size(peaks[name]) for name, label in NUMBERS.items() if peaks[name] is not None})
    widgets.subheader("Allocated over time")
    by = widgets.segments("Owners", "owners", OWNERS)
    widgets.chart(charts.memory_over_time(parts["over_time"].filter(owner_kind=by)), key="memory_held")
    widgets.subheader("Allocated at the peak")
    at_peak = parts["at_peak"].drop("device", "at_ns", "peak_bytes")
    widgets.frame(at_peak, key="memory-at-peak")
    _lifetimes(parts["lifetimes"])
    widgets.subheader("Allocations of each step")
    widgets.caption("Churn is what a step allocates in all, as a share of its peak: freed memory is allocated again.")
    widgets.frame(parts["churn"].drop("device"), key="memory-churn", labels={"churn_ratio": "churn"})
    if device is not None:
        _replay_form(
            f"{run.entry.name}-{rank}-{window}",
            lambda settings, gib: memory.replay_trace(run, rank, window, settings, gib),
        )


def _show_snapshot(entry: RunEntry, file: SnapshotFile) -> None:
    key = f"memory-snapshot-device-{entry.name}-{file.path}"
    with st.spinner("Reading the snapshot"):
        parts = memory.snapshot_tables(entry, file, st.session_state.get(key))
        report = memory.snapshot_report(entry, file, st.session_state.get(key))
    devices = parts["devices"]["device"].to_list()
    if devices[1:]:
        st.selectbox("Device", devices, key=key)
    widgets.headline(headlines.snapshot(report, file.rank))
    for title, rows in memory_report.oom_tables(report.out_of_memory).items():
        if rows.height:
            widgets.subheader(title)
            display = rows.drop("device", "at_ns", "peak_bytes", strict=False)
            widgets.frame(display, key=f"snapshot-{title}", labels=_OOM_LABELS)
    if parts["over_time"].height:
        widgets.subheader("Allocated over time")
        widgets.chart(charts.memory_over_time(parts["over_time"]), key="snapshot_held")
    widgets.subheader("Allocated at the peak")
    if parts["categories"].height:
        widgets.chart(charts.memory_categories(parts["categories"]), key="snapshot_categories")
    widgets.frame(parts["at_peak"].select("op", "count", "bytes", "peak_ratio"), key="snapshot-at-peak")
    widgets.subheader("Memory map at the snapshot")
    widgets.caption(
        "Addresses from left to right, each pool on its own lines; a tick ends a segment. Hover over a block."
    )
    widgets.chart(charts.segment_map(parts["segment_map"]), key="snapshot_map")
    widgets.frame(parts["fragmentation"].drop("device"))
    if parts["lifetimes"].height:
        _lifetimes(parts["lifetimes"])
    device = next(iter(parts["fragmentation"]["device"].drop_nulls().to_list()), 0)
    _replay_form(
        f"{entry.name}-{file.path}-{device}",
        lambda settings, gib: memory.replay_snapshot(entry, file, device, settings, gib),
    )


def _lifetimes(table: pl.DataFrame) -> None:
    widgets.subheader("Sizes and lifetimes")
    widgets.caption("Each cell is the blocks of one size and lifetime; a stronger blue is more bytes allocated.")
    widgets.chart(charts.block_lifetimes(table), key="memory_lifetimes")


def _replay_form(key: str, replay: Callable[[str, float | None], MemoryUsage]) -> None:
    """Show the form and, on request, the replay: `replay` takes the settings and the GiB of the device (None: any)."""
    widgets.subheader("Other allocator settings")
    widgets.caption(
        "Replays all recorded allocations and frees in order through a model of the CUDA caching allocator. The result "
        "is a prediction: run with these settings to confirm it."
    )
    settings, device_gib = _choose_settings(key)
    st.code(f"PYTORCH_CUDA_ALLOC_CONF={settings}" if settings else "the recorded settings", language=None)
    if st.button("Replay", key=f"replay-{key}", type="primary"):
        st.session_state[f"replayed-{key}"] = (settings or memory.AS_RECORDED, device_gib)
    replayed = st.session_state.get(f"replayed-{key}")
    if replayed is None:
        return
    try:
        with st.spinner("Replaying the allocations"):
            report = replay(*replayed)
    except TracekitError as error:
        widgets.problem(str(error))
        return
    _show_replay(report)


def _choose_settings(key: str) -> tuple[str, float | None]:
    first, second, third, fourth, fifth = st.columns(5)
    expandable = first.toggle("Expandable segments", key=f"expandable-{key}")
    split = second.selectbox("max_split_size_mb", SPLITS_MB, key=f"split-{key}")
    rounding = third.selectbox("roundup_power2_divisions", DIVISIONS, key=f"roundup-{key}")
    threshold = fourth.selectbox(
        "garbage_collection_threshold", THRESHOLDS, key=f"threshold-{key}",
        help="A share of the memory available to the process, so it needs the size of the device's memory",
    )  # fmt: skip
    device_gib = fifth.number_input("Device memory, GiB", 0.0, 1024.0, 0.0, 8.0, key=f"gib-{key}")
    pairs = ["expandable_segments:True"] if expandable else []
    pairs += [f"max_split_size_mb:{split}"] if split != UNLIMITED else []
    pairs += [f"roundup_power2_divisions:{rounding}"] if rounding != AS_RECORDED else []
    if threshold != UNLIMITED:
        pairs += [f"garbage_collection_threshold:{threshold}", "per_process_memory_fraction:1.0"]
    return ",".join(pairs), device_gib or None


def _show_replay(report: MemoryUsage) -> None:
    recorded, replayed = report.recorded, report.replayed
    if recorded is None or replayed is None:
        return
    is_same = report.settings == memory.AS_RECORDED
    label = "replayed with the recorded settings" if is_same else f"predicted: {report.settings}"
    peaks = {
        "recorded": (recorded["peak_reserved_bytes"], False),
        label: (replayed["peak_reserved_bytes"], not is_same),
    }
    widgets.chart(
        charts.reserved_memory(peaks, peak_allocated_bytes=report.peak_allocated_bytes), key=f"replay-chart-{label}"
    )
    for cell, (name, title) in zip(st.columns(4), COUNTS.items(), strict=False):
        change = replayed[name] - recorded[name]  # type: ignore[literal-required]
        cell.metric(title, f"{replayed[name]:,}", f"{change:+,}" if change else None, delta_color="inverse")  # type: ignore[literal-required]
    for note in report.notes:
        widgets.caption(widgets.plain(note))


def show_checkpoints(run: OpenRun) -> None:
    """Draw all saves of a run, and the stages of the one that a person picks."""
    by_save = run.table(tables.SAVES)
    findings.show_all(findings.of_families(run.report.findings, ("CKPT",)), run)
    _save_totals(by_save, run.table(tables.SAVES_BY_RANK))
    widgets.subheader("Stages of one save")
    longest = int(str(by_save["written_ns"].arg_max()))
    names = by_save["save"].to_list()
    save = st.selectbox("Save", names, key=bind("save", names, names[longest]), format_func=escaping.inert, width=340)
    widgets.chart(charts.save_stages(run.table(tables.SAVE_STAGES).filter(save=save)), key="save_stages")
    widgets.caption(
        "Stages alternate tensor by tensor: a bar adds up the time of each, in the order of their first entry."
    )
    widgets.subheader("Critical path of the save")
    widgets.caption("By clock (training blocked, or until all data was written): the stages that all ranks wait for.")
    columns = ("clock", "kind", "rank", "stage", "dur_ns", pl.col("ratio").alias("time_ratio"))
    parts = run.table(tables.SAVE_CRITICAL_PATH).filter(save=save).select(columns)
    widgets.frame(parts, key="save-parts")
    if st.button("Plan the checkpoint interval with these numbers", key="checkpoints-plan"):
        widgets.go_to("plan", **{"plan-measured": True})


def _save_totals(by_save: pl.DataFrame, clocks: pl.DataFrame) -> None:
    clocks_column, rates_column = st.columns(2)
    with clocks_column:
        widgets.subheader("Training blocked, and all data written")
        widgets.chart(charts.save_clocks(by_save), key="save_clocks")
    with rates_column:
        widgets.subheader("Durable write rate by rank")
        if clocks["storage_bytes_per_s"].is_not_null().any():
            widgets.chart(charts.save_bandwidth(clocks), key="save_bandwidth")
        else:
            widgets.caption("No save synced its files, so the write rate of the storage is unknown.")


def show_goodput(run: OpenRun) -> None:
    """Draw what the time of the run's job went to, over all attempts, and list them."""
    job = goodput.job(run)
    widgets.subheader("Goodput over time")
    widgets.chart(charts.goodput_over_time(goodput.over_time(run)), key="goodput")
    widgets.caption("The share of each class in each part of the job's time, as tracekit goodput counts it.")
    for title, cells in {
        "Time": goodput_report.class_table(job),
        "Attempts": goodput_report.attempt_table(job),
    }.items():
        widgets.subheader(title)
        widgets.text_table(cells, key=f"goodput-{title.lower()}")


def _lack_of_attempts(run: OpenRun) -> str:
    if not goodput.has_attempts(run):
        return HOW_TO_RECORD_ATTEMPTS
    try:
        goodput.job(run)
    except TracekitError as error:
        return str(error)
    return ""


PAGE = Page.described_by(
    __doc__,
    "memory",
    families=("MEM", "CKPT"),
    tabs=(
        Tab("memory", show, headlines.memory, _lack_of_memory),
        Tab("checkpoints", show_checkpoints, headlines.checkpoints, _lack_of_saves),
        Tab("goodput", show_goodput, headlines.goodput, _lack_of_attempts),
    ),
    show_snapshots=show_snapshots,
)
