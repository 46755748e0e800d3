"""The memory of a run or of a snapshot -> text or JSON."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypedDict

import polars as pl

from tracekit.analysis.memory import allocations, steady_state, usage
from tracekit.errors import InputError
from tracekit.model import schema, units
from tracekit.model.run import Run
from tracekit.model.trace import MemorySnapshot, TraceFact
from tracekit.replay.allocator import SegmentEvent, Settings, playback
from tracekit.replay.allocator.facts import categories, double_buffering, out_of_memory, snapshot_facts
from tracekit.replay.allocator.facts.out_of_memory import OutOfMemoryEvent
from tracekit.replay.allocator.playback import History, ReplayResult
from tracekit.report import memory_difference

FACTS: tuple[TraceFact, ...] = (
    allocations.at_peak, allocations.churn, allocations.peaks, double_buffering.alternating,
    usage.growth, steady_state.stalls,
)  # fmt: skip
AS_RECORDED = "default"
UNIT_BUFFERS = f"unit_buffers:{double_buffering.BUFFERS}"
_MOST_ROWS = 15
_EARLIER = "(allocated earlier, or without a stack)"
_CATEGORIES = "What the memory at the peak is for"


class ReservedMemory(TypedDict):
    """Device memory that a history reserved, recorded or replayed."""

    segment_allocs: list[int]
    segment_frees: list[int]
    peak_reserved_bytes: int
    device_allocations: int
    retries: int


@dataclass(frozen=True, eq=False)
class MemoryReport:
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
    """The rank that ran out of memory; of several snapshots, that of the report."""
    settings: str = AS_RECORDED
    categories: pl.DataFrame = field(default_factory=lambda: schema.empty(categories.COLUMNS))
    """What the memory at the peak of a snapshot is for."""
    against: "MemoryReport | None" = None
    """The memory that this is compared with."""


def of_run(run: Run) -> MemoryReport:
    """Return the device memory of a run's traces; on a CPU run, the host memory.

    If the memory snapshots next to the traces have an out-of-memory, the first one is in the report.
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
    more_tables = {
        "Peak allocated and reserved memory": peaks,
        "Unit buffers that double buffering could replace": tables[double_buffering.alternating]
        .filter(is_shown)
        .filter(pl.col("step") == pl.col("step").max().over("window", "rank")),  # all steps are alike
        "Growth per step": _growth_per_step(tables[usage.growth]),
        "Device allocations after the first step": _calls(tables[steady_state.stalls]),
    }
    allocated_bytes, reserved_bytes = peaks.select(pl.col("peak_allocated_bytes", "peak_reserved_bytes").max()).row(0)
    report = MemoryReport(allocated_bytes, reserved_bytes, live, churn, more_tables, tuple(notes))
    rank, oom = out_of_memory.first_out_of_memory(run)
    return replace(report, out_of_memory=oom, rank=rank)


def of_snapshot(snapshot: MemorySnapshot, device: int) -> MemoryReport:
    """Return the memory of one device from a memory snapshot."""
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
    return MemoryReport(
        snapshot_facts.peak_allocated_bytes(history, outcome),
        history.peak_reserved_bytes,
        snapshot_facts.at_peak(snapshot, history, outcome),
        snapshot_facts.churn(snapshot, history, outcome),
        {"Free memory at the snapshot": snapshot_facts.fragmentation(snapshot).filter(pl.col("device") == device)},
        tuple(notes),
        out_of_memory=out_of_memory.of_snapshot(snapshot, history),
        categories=categories.at_peak(snapshot, history, outcome),
    )


def of_snapshots(snapshots: Sequence[tuple[int, MemorySnapshot]]) -> MemoryReport:
    """Return the memory of the rank that ran out of memory first, else of that with the highest peak, and all ranks.

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


def _by_severity(ranked: tuple[int, MemoryReport]) -> tuple[bool, int, int]:
    oom, peak_bytes = ranked[1].out_of_memory, ranked[1].peak_allocated_bytes or 0
    return oom is None, (oom.at_ns or 0) if oom else 0, -peak_bytes


def _requested_bytes(report: MemoryReport) -> int | None:
    return None if report.out_of_memory is None else report.out_of_memory.requested_bytes


def play_history(history: History) -> tuple[History, ReplayResult]:
    """Return a history and its outcome; if it cannot be played, the state at its end."""
    if history.not_replayable is None:
        try:
            return history, playback.replay_as_recorded(history)
        except InputError as error:
            history = replace(history, not_replayable=str(error))
    history = history.without_events()
    return history, playback.replay_as_recorded(history)


def with_replay(
    report: MemoryReport, history: History, text: str, *, capacity_bytes: int | None = None
) -> MemoryReport:
    """Return `report` with the history as recorded and as replayed under the settings in `text`.

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
        report,
        recorded=_reserved_memory(history.segment_allocations, history.segment_frees, history),
        replayed=_reserved_memory(played.segment_allocations, played.segment_frees, played),
        notes=(
            *report.notes,
            *_replay_notes(history, played, as_recorded=as_recorded),
            *_limit_notes(settings, capacity_bytes),
        ),
        settings=text.strip(),
    )


def uses_unit_buffers(text: str) -> bool:
    """Return whether a replay's settings contain unit buffers that are allocated once."""
    return UNIT_BUFFERS in _pairs(text)


def _pairs(text: str) -> list[str]:
    return re.sub(r"\s", "", text).split(",")


def as_json(report: MemoryReport) -> str:
    """Return peaks, live blocks at the peak, churn, and the replay if there is one, as a JSON object."""
    document: dict[str, object] = {
        "peak_allocated_bytes": report.peak_allocated_bytes,
        "peak_reserved_bytes": report.peak_reserved_bytes,
        "live_at_peak": report.live_at_peak.to_dicts(),
        "churn": report.churn.to_dicts(),
        "categories": report.categories.to_dicts(),
        "oom": _oom_as_json(report),
    }
    if report.against is not None:
        tables = _change(report, report.against).values()
        document["against"] = {
            "peak_allocated_bytes": report.against.peak_allocated_bytes,
            "peak_reserved_bytes": report.against.peak_reserved_bytes,
            **dict(zip(("by_category", "by_owner"), (rows.to_dicts() for rows in tables), strict=True)),
        }
    if report.recorded is not None:
        document |= {"recorded": report.recorded, "replayed": report.replayed}
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def as_text(report: MemoryReport, *, width: int, color: bool = False) -> str:
    """Return the report in readable units, with all tables and notes."""
    from tracekit.report import text_layout  # loads rich in a tenth of a second; JSON does not need it

    parts: list[object] = []
    if report.out_of_memory is not None:
        parts += [text_layout.line(sentence) for sentence in oom_sentences(report.out_of_memory, report.rank)]
    parts.append(text_layout.line(_headline(report)))
    if report.recorded is not None and report.replayed is not None:
        parts.append(text_layout.line(replay_line(report.settings, report.recorded, report.replayed)))
    parts += [text_layout.line(note) for note in report.notes]
    if report.against is not None:
        parts.append(
            text_layout.line(
                memory_difference.headline(report.peak_allocated_bytes, report.against.peak_allocated_bytes)
            )
        )
    tables = dict(oom_tables(report.out_of_memory))
    tables |= {} if report.against is None else _change(report, report.against)
    tables |= {_CATEGORIES: report.categories.drop("device"), "Allocated at the peak": report.live_at_peak}
    tables |= {"Allocations": report.churn, **report.tables}
    for title, rows in tables.items():
        columns = text_layout.without_empty_columns(rows)
        if columns.is_empty():
            continue
        parts += ["", text_layout.title(title), text_layout.frame(_for_people(columns).head(_MOST_ROWS))]
        if columns.height > _MOST_ROWS:
            parts.append(text_layout.line(f"and {columns.height - _MOST_ROWS:,} more: use --format json to see all"))
    return text_layout.print_to_string(parts, width=width, color=color)  # type: ignore[arg-type]


def _change(report: MemoryReport, against: MemoryReport) -> dict[str, pl.DataFrame]:
    return memory_difference.tables(
        report.categories,
        report.live_at_peak,
        other_categories=against.categories,
        other_owners=against.live_at_peak,
    )


def oom_sentences(oom: OutOfMemoryEvent, rank: int | None = None) -> list[str]:
    """Sentences on the request, who made it, why it failed, and what would have served it."""
    by = " in ".join(filter(None, (oom.operator, oom.location))) or "code that is not in the snapshot"
    where = f"device {oom.device}" + ("" if rank is None else f" of rank {rank}")
    sentences = [f"Out of memory: {by} requested {units.size(oom.requested_bytes)} on {where}."]
    if oom.segment_bytes != oom.requested_bytes:
        sentences.append(f"PyTorch tried to allocate {units.size(oom.segment_bytes)} of the device for it.")
    if oom.free_bytes is not None:
        sentences.append(f"{units.size(oom.free_bytes)} of the device was free{_limit(oom)}.")
    if oom.reserved_unallocated_bytes:
        sentences.append(
            f"{units.size(oom.reserved_unallocated_bytes)} was reserved by PyTorch but unallocated; the largest block "
            f"that could serve the request has {units.size(oom.largest_free_block_bytes or 0)}."
        )
    return [*sentences, *_growth(oom), *_oom_advice(oom), *oom.notes]


def _limit(oom: OutOfMemoryEvent) -> str:
    """Return a clause on the limit that refused a request for which the device had enough free memory."""
    if not oom.is_process_limit or oom.reserved_bytes is None or oom.peak_reserved_bytes is None:
        return ""
    upper = units.size(oom.reserved_bytes + oom.segment_bytes)
    return (
        f": a limit of this process refused the request, which is between {units.size(oom.peak_reserved_bytes)} "
        f"and {upper} of reserved memory (see torch.cuda.set_per_process_memory_fraction)"
    )


def _growth(oom: OutOfMemoryEvent) -> list[str]:
    """Return a sentence on what grows from step to step."""
    return [
        f"Memory grows by {units.size(row['step_bytes'])} a step: {row['op']} requested it in each of the last "
        f"{row['steps']} steps, and it was not freed; that is {units.size(row['bytes'])}."
        for row in oom.growth.head(1).iter_rows(named=True)
    ]


def _oom_advice(oom: OutOfMemoryEvent) -> list[str]:
    serving = oom.tried.filter("fits")["settings"].to_list()
    if serving:
        return [
            f"Set PYTORCH_CUDA_ALLOC_CONF={serving[0]}: the allocator's history, replayed with it on the same device, "
            f"serves the request{', but not those of later steps, as memory grows' if oom.growth.height else ''}."
        ]
    tried = f" None of {', '.join(oom.tried['settings'])} would have served it." if oom.tried.height else ""
    if oom.is_fragmentation:
        return [f"The memory is fragmented: enough was free, but in smaller blocks.{tried}"]
    if oom.allocated_bytes is None or oom.free_bytes is None or oom.reserved_bytes is None:
        return []
    missing_bytes = oom.requested_bytes - oom.room_bytes - (oom.reserved_bytes - oom.allocated_bytes)
    how = "about" if oom.is_process_limit else "at least"
    return [
        f"{units.size(oom.allocated_bytes)} was allocated: {how} {units.size(missing_bytes)} less must be."
        f"{tried or ' No allocator setting can serve the request.'} See the owners below."
    ]


def oom_tables(oom: OutOfMemoryEvent | None) -> dict[str, pl.DataFrame]:
    """Return the tables that explain an out-of-memory by their titles: owners, growth, free blocks, other settings."""
    if oom is None:
        return {}
    return {
        "Allocated when memory ran out": oom.allocated_by,
        "Memory that grows from step to step": oom.growth,
        "Free blocks when memory ran out": oom.free_blocks,
        "Other settings, replayed": oom.tried,
    }


def _oom_as_json(report: MemoryReport) -> dict[str, object] | None:
    oom = report.out_of_memory
    if oom is None:
        return None
    return {
        "rank": report.rank,
        "device": oom.device,
        "at_ns": oom.at_ns,
        "count": oom.count,
        "requested_bytes": oom.requested_bytes,
        "segment_bytes": oom.segment_bytes,
        "free_bytes": oom.free_bytes,
        "is_process_limit": oom.is_process_limit,
        "peak_reserved_bytes": oom.peak_reserved_bytes,
        "reserved_bytes": oom.reserved_bytes,
        "allocated_bytes": oom.allocated_bytes,
        "reserved_unallocated_bytes": oom.reserved_unallocated_bytes,
        "largest_free_block_bytes": oom.largest_free_block_bytes,
        "operator": oom.operator,
        "location": oom.location,
        "is_fragmentation": oom.is_fragmentation,
        "allocated_by": oom.allocated_by.to_dicts(),
        "free_blocks": oom.free_blocks.to_dicts(),
        "growth": oom.growth.to_dicts(),
        "tried": oom.tried.to_dicts(),
    }


def replay_line(settings: str, recorded: ReservedMemory, replayed: ReservedMemory) -> str:
    """Return a replay in one line."""
    return (
        f"{settings}: reserved {units.size(recorded['peak_reserved_bytes'])} → "
        f"{units.size(replayed['peak_reserved_bytes'])}, "
        f"{recorded['device_allocations']:,} → {replayed['device_allocations']:,} device allocations, "
        f"{recorded['retries']:,} → {replayed['retries']:,} retries"
    )


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


def _headline(report: MemoryReport) -> str:
    if report.peak_allocated_bytes is None:
        return "The memory is not known."
    reserved = f", {units.size(report.peak_reserved_bytes)} reserved" if report.peak_reserved_bytes else ""
    return f"{units.size(report.peak_allocated_bytes)} allocated at the peak{reserved}"


def _for_people(rows: pl.DataFrame) -> pl.DataFrame:
    if "peak_ratio" not in rows.columns or "category" in rows.columns:
        return rows
    owners = pl.col("op").fill_null(_EARLIER) if "op" in rows.columns else pl.lit(_EARLIER).alias("op")
    return rows.drop("at_ns", "peak_bytes", strict=False).with_columns(owners)


def _growth_per_step(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the growth, with its source only where there are several."""
    return rows if rows["source"].n_unique() > 1 else rows.drop("source")


def _calls(stalls: pl.DataFrame) -> pl.DataFrame:
    """Return, by trace and device, the calls that took or returned device memory after the first step."""
    key = ["window", "rank", "device"]
    later = stalls.filter((pl.col("step") > pl.col("step").min().over(key)) | pl.col("step").is_null())
    sums = later.group_by(key, maintain_order=True).agg(
        pl.len().alias("steps"), pl.col("calls", "host_ns", "stalled_ns").sum()
    )
    return sums.filter(pl.col("calls") > 0)
