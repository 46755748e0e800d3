"""A form of allocator settings, and what the allocator model predicts under them next to what was recorded."""

from collections.abc import Callable

import streamlit as st

from dashboard import widgets
from tracekit.errors import TracekitError
from tracekit.report import charts
from tracekit.report import memory as memory_report
from tracekit.report.memory import MemoryReport

UNLIMITED, AS_RECORDED = "none", "as recorded"
SPLITS_MB = (UNLIMITED, 32, 64, 128, 256, 512, 1024)
THRESHOLDS = (UNLIMITED, 0.6, 0.7, 0.8, 0.9)
DIVISIONS = (AS_RECORDED, 2, 4, 8, 16)
COUNTS = {
    "device_allocations": "Device allocations",
    "retries": "Allocation retries (cudaMalloc failed, cache flushed)",
}


def show(key: str, replay: Callable[[str, float | None], MemoryReport]) -> None:
    """Show the form and, on request, the replay: `replay` takes the settings and the GiB of the device (None: any)."""
    st.subheader("Other allocator settings")
    st.caption(
        "Replays all recorded allocations and frees in order through a model of the CUDA caching allocator. The result "
        "is a prediction: run with these settings to confirm it."
    )
    settings, device_gib = _choose(key)
    st.code(f"PYTORCH_CUDA_ALLOC_CONF={settings}" if settings else "the recorded settings", language=None)
    if st.button("Replay", key=f"replay-{key}", type="primary"):
        st.session_state[f"replayed-{key}"] = (settings or memory_report.AS_RECORDED, device_gib)
    replayed = st.session_state.get(f"replayed-{key}")
    if replayed is None:
        return
    try:
        with st.spinner("Replaying the allocations"):
            memory = replay(*replayed)
    except TracekitError as error:
        widgets.problem(str(error))
        return
    _show_result(memory)


def _choose(key: str) -> tuple[str, float | None]:
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


def _show_result(memory: MemoryReport) -> None:
    recorded, replayed = memory.recorded, memory.replayed
    if recorded is None or replayed is None:
        return
    is_same = memory.settings == memory_report.AS_RECORDED
    label = "replayed with the recorded settings" if is_same else f"predicted: {memory.settings}"
    peaks = {
        "recorded": (recorded["peak_reserved_bytes"], False),
        label: (replayed["peak_reserved_bytes"], not is_same),
    }
    widgets.chart(
        charts.reserved_memory(peaks, peak_allocated_bytes=memory.peak_allocated_bytes), key=f"replay-chart-{label}"
    )
    for cell, (name, title) in zip(st.columns(4), COUNTS.items(), strict=False):
        change = replayed[name] - recorded[name]  # type: ignore[literal-required]
        cell.metric(title, f"{replayed[name]:,}", f"{change:+,}" if change else None, delta_color="inverse")  # type: ignore[literal-required]
    for note in memory.notes:
        st.caption(widgets.plain(note))
