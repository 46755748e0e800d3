"""A replay of the allocator under settings that a person chooses: what the model predicts beside what was recorded."""

import streamlit as st

from dashboard import run_facts, widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.errors import TracekitError
from tracekit.report import charts
from tracekit.report import memory as memory_report
from tracekit.report.memory import MemoryReport

NO_LIMIT, AS_IS = "none", "as they are"
SPLITS_MB = (NO_LIMIT, 32, 64, 128, 256, 512, 1024)
THRESHOLDS = (NO_LIMIT, 0.6, 0.7, 0.8, 0.9)
DIVISIONS = (AS_IS, 2, 4, 8, 16)


def of_trace(entry: RunEntry, rank: int, window: int) -> None:
    """Replay what a trace tells of the allocator: what was cached at its start is inferred."""
    _section(
        f"{entry.name}-{rank}-{window}", lambda text, gib: run_facts.replay_of_trace(entry, rank, window, text, gib)
    )


def of_snapshot(entry: RunEntry, found: SnapshotFile, device: int) -> None:
    """Replay the history in a memory snapshot."""
    _section(
        f"{entry.name}-{found.path}-{device}",
        lambda text, gib: run_facts.replay_of_snapshot(entry, found, device, text, gib),
    )


def _section(key: str, play: "run_facts.Play") -> None:
    st.subheader("Other allocator settings")
    st.caption(
        "A prediction: every request and free of the record, in order, through a model of the CUDA caching allocator. "
        "Run with these settings to confirm it."
    )
    settings, device_gib = _choose(key)
    st.code(f"PYTORCH_CUDA_ALLOC_CONF={settings}" if settings else "the settings of the record", language=None)
    asked = (settings or memory_report.AS_RECORDED, device_gib)
    if st.button("Replay", key=f"replay-{key}", type="primary"):
        st.session_state[f"replayed-{key}"] = asked
    last = st.session_state.get(f"replayed-{key}")
    if last is None:
        return
    try:
        with st.spinner("Playing the history"):
            told = play(*last)
    except TracekitError as error:
        widgets.problem(str(error))
        return
    _shown(told)


def _choose(key: str) -> tuple[str, float | None]:
    first, second, third, fourth, fifth = st.columns(5)
    with first:
        expandable = st.toggle("Expandable segments", key=f"expandable-{key}")
    with second:
        split = st.selectbox("max_split_size_mb", SPLITS_MB, key=f"split-{key}")
    with third:
        rounding = st.selectbox("roundup_power2_divisions", DIVISIONS, key=f"roundup-{key}")
    with fourth:
        threshold = st.selectbox(
            "garbage_collection_threshold", THRESHOLDS, key=f"threshold-{key}",
            help="Of the memory that the process may take, so it needs the memory of the device",
        )  # fmt: skip
    with fifth:
        device_gib = st.number_input("Memory of the device, GiB", 0.0, 1024.0, 0.0, 8.0, key=f"gib-{key}")
    pairs = ["expandable_segments:True"] if expandable else []
    pairs += [f"max_split_size_mb:{split}"] if split != NO_LIMIT else []
    pairs += [f"roundup_power2_divisions:{rounding}"] if rounding != AS_IS else []
    if threshold != NO_LIMIT:
        pairs += [f"garbage_collection_threshold:{threshold}", "per_process_memory_fraction:1.0"]
    return ",".join(pairs), device_gib or None


def _shown(told: MemoryReport) -> None:
    recorded, replayed = told.recorded, told.replayed
    if recorded is None or replayed is None:
        return
    same = told.settings == memory_report.AS_RECORDED
    predicted = "replayed under its own settings" if same else f"predicted: {told.settings}"
    peaks = {
        "recorded": (recorded["peak_reserved_bytes"], False),
        predicted: (replayed["peak_reserved_bytes"], not same),
    }
    widgets.chart(
        charts.reserved_memory(peaks, peak_allocated_bytes=told.peak_allocated_bytes), key=f"replay-chart-{predicted}"
    )
    numbers = {
        "Device allocations": "device_allocations",
        "Retries for want of memory": "retries",
    }
    cells = st.columns(4)
    for cell, (label, name) in zip(cells, numbers.items(), strict=False):
        change = replayed[name] - recorded[name]  # type: ignore[literal-required]
        cell.metric(label, f"{replayed[name]:,}", f"{change:+,}" if change else None, delta_color="inverse")  # type: ignore[literal-required]
    for note in told.notes:
        st.caption(widgets.plain(note))
