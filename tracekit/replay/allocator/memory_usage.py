"""The memory of a run or of a snapshot, replayed under other allocator settings on request."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import polars as pl

from tracekit.analysis.memory import allocations, steady_state, usage
from tracekit.errors import InputError
from tracekit.model import schema, units
from tracekit.model.run import Run
from tracekit.model.trace import MemorySnapshot, Trace, TraceFact
from tracekit.replay.allocator import double_buffering, out_of_memory, playback, run_snapshots, snapshot_facts
from tracekit.replay.allocator.model import BlockState, SegmentEvent, SegmentState
from tracekit.replay.allocator.out_of_memory import OutOfMemoryEvent
from tracekit.replay.allocator.playback import History, ReplayResult
from tracekit.replay.allocator.settings import Settings
from tracekit.replay.allocator.snapshot_facts import CATEGORY_COLUMNS, categories_at_peak

FACTS: tuple[TraceFact, ...] = (
    allocations.at_peak, allocations.churn, allocations.peaks, double_buffering.alternating,
    usage.growth, steady_state.stalls,
)  # fmt: skip
AS_RECORDED = "default"
UNIT_BUFFERS = f"unit_buffers:{double_buffering.BUFFERS}"


class ReservedMemory(TypedDict):
    """Device memory that a history reserved, recorded or replayed."""

    segment_allocs: list[int]
    segment_frees: list[int]
    peak_reserved_bytes: int
    device_allocations: int
    retries: int


@dataclass(frozen=True, eq=False)
class MemoryUsage:
    """Peaks, live blocks at the peak, allocation churn, other tables by title, notes, and a replay."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    live_at_peak: pl.DataFrame
    churn: pl.DataFrame
    tables: Mapping[str, pl.DataFrame] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    recorded: ReservedMemory | None = None
    replayed: ReservedMemory | None = None
    out_of_memory: OutOfMemoryEvent | None = None
    rank: int | None = None
    """The rank that ran out of memory; of several snapshots, that of this usage."""
    settings: str = AS_RECORDED
    categories: pl.DataFrame = field(default_factory=lambda: schema.empty(CATEGORY_COLUMNS))
    """What the memory at the peak of a snapshot is for."""
    against: "MemoryUsage | None" = None
    """The memory that this is compared with."""


def of_run(run: Run) -> MemoryUsage:
    """Device memory of a run's traces; on a CPU run, the host memory.

    If the memory snapshots next to the traces have an out-of-memory, the first one is told.
    """
    tables = {fact: run.table(fact) for fact in FACTS}
    peaks = tables[allocations.peaks]
    on_device = bool(peaks["device"].is_not_null().any())
    is_shown = pl.col("device").is_not_null() if on_device else pl.col("device").is_null()
    peaks, live, churn = (
        tables[fact].filter(is_shown) for fact in (allocations.peaks, allocations.at_peak, allocations.churn)
    )
    notes = [] if on_device else ["Host memory is shown: the traces have no memory events of a device."]
    if peaks.is_empty():
        notes = ["The traces have no memory events: record with profile_memory=True."]
    growth = tables[usage.growth]
    more_tables = {
        "Peak allocated and reserved memory": peaks,
        "Unit buffers that double buffering could replace": tables[double_buffering.alternating]
        .filter(is_shown)
        .filter(pl.col("step") == pl.col("step").max().over("window", "rank")),  # all steps are alike
        "Growth per step": growth if growth["source"].n_unique() > 1 else growth.drop("source"),
        "Device allocations after the first step": _calls(tables[steady_state.stalls]),
    }
    allocated_bytes, reserved_bytes = peaks.select(pl.col("peak_allocated_bytes", "peak_reserved_bytes").max()).row(0)
    memory = MemoryUsage(allocated_bytes, reserved_bytes, live, churn, more_tables, tuple(notes))
    rank, oom = out_of_memory.first_out_of_memory(run)
    return replace(memory, out_of_memory=oom, rank=rank)


def of_snapshot(snapshot: MemorySnapshot, device: int) -> MemoryUsage:
    """Memory of one device from a memory snapshot."""
    history = playback.from_snapshot(snapshot, device)
    history, outcome = play_history(history)
    notes = []
    if history.not_replayable:
        notes.append(f"Values are those at the time of the snapshot, not at the peak: {history.not_replayable}.")
    elif history.start:
        notes.append(
            "Memory was already allocated when the history began; it was found by playing the history backwards."
        )
    if outcome.address_mismatches:
        notes.append(
            f"The allocator model differs from the recording at {outcome.address_mismatches:,} of "
            f"{int((history.action == 0).sum()):,} requests."
        )
    notes += _other_devices(snapshot, device)
    if missing := _missing_facts(snapshot):
        notes.append(f"The snapshot does not state {', '.join(missing)}.")
    return MemoryUsage(
        snapshot_facts.peak_allocated_bytes(history, outcome),
        history.peak_reserved_bytes,
        snapshot_facts.at_peak(snapshot, history, outcome),
        snapshot_facts.churn(snapshot, history, outcome),
        {"Free memory at the snapshot": run_snapshots.fragmentation(snapshot).filter(pl.col("device") == device)},
        tuple(notes),
        out_of_memory=out_of_memory.of_snapshot(snapshot, history),
        categories=categories_at_peak(snapshot, history, outcome),
    )


def _other_devices(snapshot: MemorySnapshot, device: int) -> list[str]:
    """A sentence on the devices of a snapshot whose memory is not shown, or none."""
    sums = (
        snapshot.segments.filter(pl.col("device") != device)
        .group_by("device")
        .agg(pl.col("allocated_bytes", "total_bytes").sum())
        .sort("device")
    )
    if sums.is_empty():
        return []
    devices = "; ".join(
        f"device {other} has {units.size(allocated)} allocated and {units.size(reserved)} reserved at the snapshot"
        for other, allocated, reserved in sums.iter_rows()
    )
    return [f"These are values of device {device}: {devices} (--device shows another one)."]


def _missing_facts(snapshot: MemorySnapshot) -> list[str]:
    """What a snapshot does not state, and without which memory has no owner, or no time."""
    missing = []
    for what, rows in (("the history", snapshot.events), ("live blocks", snapshot.blocks)):
        frames = snapshot.frames.join(snapshot.stacks.join(rows, on="stack", how="semi"), on="frame", how="semi")
        fields = {"functions": frames["name"] != "", "files": frames["file"] != "", "lines": frames["line"] != 0}
        # A simulation, and some versions of torch, state the stacks of blocks in the history only.
        if frames.is_empty() and rows.height and (what == "the history" or snapshot.frames.is_empty()):
            missing.append(f"stacks of {what}")
        elif frames.height:
            missing += [f"{name} in stacks of {what}" for name, is_stated in fields.items() if not is_stated.any()]
    if snapshot.events.height and not snapshot.events["at_ns"].count():
        missing.append("times")
    return missing


def snapshot_tables(snapshot: MemorySnapshot, device: int | None = None) -> dict[str, pl.DataFrame]:
    """Tables of one device of a snapshot by name (None: the main one); `devices` lists all devices.

    over_time, lifetimes, segment_map, at_peak, categories and fragmentation are those of `snapshot_facts` and
    `run_snapshots`; categories is empty if none is known.
    """
    device = snapshot.main_device if device is None else device
    history, outcome = play_history(playback.from_snapshot(snapshot, device))
    categories = categories_at_peak(snapshot, history, outcome)
    return {
        "devices": pl.DataFrame({"device": list(snapshot.devices)}),
        "over_time": snapshot_facts.over_time(snapshot, history, outcome),
        "lifetimes": snapshot_facts.lifetimes(snapshot, history, outcome),
        "segment_map": snapshot_facts.segment_map(snapshot, device),
        "at_peak": snapshot_facts.at_peak(snapshot, history, outcome),
        "categories": categories if snapshot_facts.has_known_category(categories) else categories.clear(),
        "fragmentation": run_snapshots.fragmentation(snapshot).filter(device=device),
    }


def of_snapshots(snapshots: Sequence[tuple[int, MemorySnapshot]]) -> MemoryUsage:
    """Memory of the rank that ran out of memory first, else of that with the highest peak, and all ranks.

    `snapshots` has the rank of each snapshot, of which the main device counts: a rank uses one.
    """
    by_rank = [(rank, of_snapshot(snapshot, snapshot.main_device)) for rank, snapshot in snapshots]
    rows = [(rank, r.peak_allocated_bytes, r.peak_reserved_bytes, _requested_bytes(r)) for rank, r in by_rank]
    rank, worst = min(by_rank, key=_by_severity)
    columns = {
        "rank": pl.Int64, "peak_allocated_bytes": pl.Int64, "peak_reserved_bytes": pl.Int64, "oom_bytes": pl.Int64,
    }  # fmt: skip
    tables = {"Ranks": pl.DataFrame(rows, schema=columns, orient="row").sort("rank"), **worst.tables}
    return replace(worst, tables=tables, rank=rank)


def _by_severity(ranked: tuple[int, MemoryUsage]) -> tuple[bool, int, int]:
    oom, peak_bytes = ranked[1].out_of_memory, ranked[1].peak_allocated_bytes or 0
    return oom is None, (oom.at_ns or 0) if oom else 0, -peak_bytes


def _requested_bytes(memory: MemoryUsage) -> int | None:
    return None if memory.out_of_memory is None else memory.out_of_memory.requested_bytes


def play_history(history: History) -> tuple[History, ReplayResult]:
    """A history and its outcome; if it cannot be played, the state at its end."""
    if history.not_replayable is None:
        try:
            return history, playback.replay_as_recorded(history)
        except InputError as error:
            history = replace(history, not_replayable=str(error))
    history = history.without_events()
    return history, playback.replay_as_recorded(history)


def with_replay(memory: MemoryUsage, history: History, text: str, *, capacity_bytes: int | None = None) -> MemoryUsage:
    """The usage with the history as recorded and as replayed under the settings in `text`.

    "default" replays it under the recorded settings; "unit_buffers:2" is already contained in `history`. Raises
    InputError if the history cannot be played or the settings are invalid.
    """
    if history.not_replayable:
        raise InputError(f"no history to replay: {history.not_replayable}")
    as_recorded = text.strip() == AS_RECORDED
    own_settings = ",".join(pair for pair in _pairs(text) if pair != UNIT_BUFFERS) if uses_unit_buffers(text) else text
    settings = history.settings if as_recorded else Settings.parse(own_settings)
    played = (
        playback.replay_as_recorded(history)
        if as_recorded
        else playback.predict(history, settings, capacity_bytes=capacity_bytes)
    )
    return replace(
        memory,
        recorded=_reserved_memory(history.segment_allocations, history.segment_frees, history),
        replayed=_reserved_memory(played.segment_allocations, played.segment_frees, played),
        notes=(
            *memory.notes,
            *_replay_notes(history, played, as_recorded=as_recorded),
            *_limit_notes(settings, capacity_bytes),
        ),
        settings=text.strip(),
    )


def uses_unit_buffers(text: str) -> bool:
    """Whether a replay's settings contain unit buffers that are allocated once."""
    return UNIT_BUFFERS in _pairs(text)


def history_with_buffers(trace: Trace) -> History:
    """Return the trace's history as if two buffers of each kind had served all units from the start.

    The blocks that `double_buffering.alternating` counts are removed, and the buffers stay allocated. Recorded peaks
    do not change. Raises InputError if no unit allocates and frees blocks.
    """
    recorded = playback.from_trace(trace)
    served, per_step = double_buffering.unit_blocks(trace), double_buffering.alternating(trace)
    if per_step.is_empty():
        raise InputError(
            "no FSDP unit allocates and frees buffers in this trace: double buffering would change nothing"
        )
    served = served.join(per_step, on=["step", "device", "kind"], how="semi", nulls_equal=True)
    gone = pl.concat([served["start_event"], served["end_event"]])
    remaining = trace.allocations.with_row_index("event").filter(~pl.col("event").is_in(gone.implode()))
    history = playback.from_trace(replace(trace, allocations=remaining.drop("event")))
    sizes = per_step.group_by("kind").agg(pl.col("buffer_bytes").max()).sort("kind")["buffer_bytes"].to_list()
    buffers = []
    for number, size in enumerate(sizes * double_buffering.BUFFERS, 1):
        address = -(number << 40)  # not a real address: the block is allocated again
        block = BlockState(address, size, "allocated", size)
        buffers.append(SegmentState(address, size, 0, small=False, pool=0, expandable=False, blocks=(block,)))
    return replace(recorded, **{name: getattr(history, name) for name in _PLAYED}, start=(*buffers, *history.start))


_PLAYED = ("action", "address", "bytes", "stream", "pool", "at_ns", "stack", "releases")


def _pairs(text: str) -> list[str]:
    return re.sub(r"\s", "", text).split(",")


def _replay_notes(history: History, played: ReplayResult, *, as_recorded: bool) -> list[str]:
    notes = []
    if as_recorded and not history.inferred:
        equal = _sizes(played.segment_allocations) == _sizes(history.segment_allocations) and _sizes(
            played.segment_frees
        ) == _sizes(history.segment_frees)
        notes.append(
            "The replay reserves and frees the recorded segments"
            + (", all of them in order." if equal else " only in part: the model is not valid for this recording.")
        )
    elif not as_recorded:
        notes.append("This is a prediction of the allocator model: run with these settings to confirm it.")
    if history.inferred:
        notes.append(
            "The cached memory at the start is inferred from the addresses in the trace, and one stream is assumed: "
            "a memory snapshot gives exact values."
        )
    if played.out_of_memory:
        notes.append(f"{played.out_of_memory:,} requests run out of memory: the run would have failed there.")
    return notes


def _limit_notes(settings: Settings, capacity_bytes: int | None) -> list[str]:
    if settings.memory_fraction is not None and capacity_bytes is None:
        return ["per_process_memory_fraction is a share of --device-memory-gib: without that option there is no limit."]
    if settings.gc_threshold and settings.memory_fraction is None:
        return ["garbage_collection_threshold does nothing without per_process_memory_fraction, in torch too."]
    return []


def _reserved_memory(
    allocs: Sequence[SegmentEvent], frees: Sequence[SegmentEvent], history: History | ReplayResult
) -> ReservedMemory:
    return {
        "segment_allocs": _sizes(allocs),
        "segment_frees": _sizes(frees),
        "peak_reserved_bytes": history.peak_reserved_bytes,
        "device_allocations": len(allocs),
        "retries": history.retries,
    }


def _sizes(events: Sequence[SegmentEvent]) -> list[int]:
    return [event.bytes for event in events]


def _calls(stalls: pl.DataFrame) -> pl.DataFrame:
    """By trace and device, the calls that took or returned device memory after the first step."""
    key = ["window", "rank", "device"]
    later = stalls.filter((pl.col("step") > pl.col("step").min().over(key)) | pl.col("step").is_null())
    sums = later.group_by(key, maintain_order=True).agg(
        pl.len().alias("steps"), pl.col("calls", "host_ns", "stalled_ns").sum()
    )
    return sums.filter(pl.col("calls") > 0)
