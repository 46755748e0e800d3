"""An out-of-memory in a memory snapshot: what was requested, what was free, and what would have served the request.

torch records an event `oom` when a request failed even after all cached memory was released; the error itself states
the same numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from tracekit.analysis.memory import allocations, snapshot_files
from tracekit.errors import InputError, TracekitError
from tracekit.ingest.readers import memory_snapshots
from tracekit.ingest.readers.memory_snapshots import OUT_OF_MEMORY
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import MemorySnapshot
from tracekit.replay.allocator import playback, snapshot_facts
from tracekit.replay.allocator.model import SegmentState
from tracekit.replay.allocator.playback import History, ReplayResult
from tracekit.replay.allocator.recorded_history import SEGMENT_ALLOCATIONS, SEGMENT_FREES, is_replayed
from tracekit.replay.allocator.settings import SMALL_BYTES, Settings, segment_bytes

CANDIDATES = (
    "expandable_segments:True",
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
)
"""Settings that are tried against fragmentation."""
MAX_REPLAYED_EVENTS = 1_000_000
"""In a longer history no settings are tried: each takes seconds for a million events."""
FREE_COLUMNS = schema.columns("kind stream blocks free_bytes largest_free_bytes")
TRIED_COLUMNS = schema.columns("settings fits peak_reserved_bytes", settings=pl.String, fits=pl.Boolean)
GROWTH_COLUMNS = schema.columns("device op steps count bytes step_bytes")
LEAST_STEPS = 5
_OPEN_STEPS = 2
"""The step in progress and the one before it, whose gradients and outputs may still be in use."""
_MARKS = r"^ProfilerStep#\d+|^Optimizer\.step#"


@dataclass(frozen=True, eq=False)
class OutOfMemoryEvent:
    """The last out-of-memory of one device in a snapshot. Sizes that cannot be known are None."""

    device: int
    at_ns: int | None
    count: int
    """Requests of this device that failed in the history, this one included."""
    requested_bytes: int
    """After rounding."""
    segment_bytes: int
    """What torch tried to allocate of the device for it, as its error says."""
    free_bytes: int | None
    """Free memory of the device, as the driver states it: other processes use what is missing to its size."""
    peak_reserved_bytes: int | None
    """The most that was reserved until then: the process may reserve at least that much."""
    reserved_bytes: int | None
    allocated_bytes: int | None
    largest_free_block_bytes: int | None
    """The largest free block that could serve the request: of its kind (small or large) and stream."""
    operator: str | None
    location: str | None
    allocated_by: pl.DataFrame
    """Owners of the allocated memory at that time, columns as `snapshot_facts.at_peak`."""
    free_blocks: pl.DataFrame
    """Free memory at that time, columns FREE_COLUMNS."""
    tried: pl.DataFrame
    """Whether the request would have been served under other settings, columns TRIED_COLUMNS; only if enough was free
    in smaller blocks, or a limit of the process refused the request."""
    growth: pl.DataFrame
    """Memory that each step requested and nobody freed, columns GROWTH_COLUMNS."""
    notes: tuple[str, ...] = field(default=())

    @property
    def reserved_unallocated_bytes(self) -> int | None:
        """Return the memory that the allocator had reserved and that was in no allocated block."""
        if self.reserved_bytes is None or self.allocated_bytes is None:
            return None
        return self.reserved_bytes - self.allocated_bytes

    @property
    def is_process_limit(self) -> bool:
        """Return whether a limit of the process refused the request: the device had enough free memory for it."""
        return self.free_bytes is not None and self.free_bytes >= self.segment_bytes

    @property
    def room_bytes(self) -> int:
        """Memory that the process could still reserve: of a process with a limit, what it had reserved before."""
        if not self.is_process_limit:
            return self.free_bytes or 0
        return max((self.peak_reserved_bytes or 0) - (self.reserved_bytes or 0), 0)

    @property
    def is_fragmentation(self) -> bool:
        """Return whether enough memory was free, in smaller pieces."""
        unallocated_bytes = self.reserved_unallocated_bytes
        return unallocated_bytes is not None and self.room_bytes + unallocated_bytes >= self.requested_bytes


def of_snapshot(
    snapshot: MemorySnapshot, history: History, *, candidates: Sequence[str] = CANDIDATES
) -> OutOfMemoryEvent | None:
    """Return the last out-of-memory of the history's device; None if there is none."""
    events = snapshot.events.filter(pl.col("device") == history.device).with_row_index("index")
    failed = events.filter(pl.col("action") == OUT_OF_MEMORY, pl.col("bytes") > 0)
    if failed.is_empty():
        return None
    last = failed.row(-1, named=True)
    before = events.select(pl.col("index"), is_replayed().alias("is_replayed")).filter(
        pl.col("is_replayed"), pl.col("index") < last["index"]
    )
    at_failure = history.until(before.height)
    played, note = _state(at_failure)
    place = snapshot_facts.places(snapshot).filter(pl.col("stack").eq_missing(pl.lit(last["stack"])))
    operator, location = place.select("operator", "place").row(0) if place.height else (None, None)
    # Without a replay the segments are those of the snapshot, if it was taken at the out-of-memory.
    final = history.final if last["index"] == events.height - 1 else ()
    segments = played.final if played else final
    free = _free_blocks(segments)
    kind = "small" if last["bytes"] <= SMALL_BYTES else "large"
    is_eligible = (pl.col("kind") == kind) & (pl.col("stream") == (last["stream"] or 0))
    owners = schema.empty(allocations.PEAK_COLUMNS)
    if played:
        owners = snapshot_facts.after_event(snapshot, at_failure, played, len(at_failure.action) - 1)
    oom = OutOfMemoryEvent(
        device=history.device,
        at_ns=last["at_ns"],
        count=failed.height,
        requested_bytes=last["bytes"],
        segment_bytes=segment_bytes(last["bytes"]),
        peak_reserved_bytes=_peak_reserved(events, last["index"], history) if segments else None,
        free_bytes=last["free_bytes"],
        reserved_bytes=_reserved_bytes(segments) if segments else None,
        allocated_bytes=_allocated_bytes(segments) if segments else None,
        largest_free_block_bytes=(free.filter(is_eligible)["largest_free_bytes"].max() or 0) if segments else None,  # type: ignore[arg-type]
        operator=operator,
        location=location,
        allocated_by=owners,
        free_blocks=free,
        tried=schema.empty(TRIED_COLUMNS),
        growth=schema.empty(GROWTH_COLUMNS),
        notes=(note,) if note else (),
    )
    if played is None:
        return oom
    oom = replace(oom, growth=step_growth(snapshot, at_failure, played))
    if not oom.is_fragmentation and not oom.is_process_limit:
        return oom
    tried, replay_note = _trial(at_failure, oom, last["stream"] or 0, candidates)
    return replace(oom, tried=tried, notes=(replay_note,) if replay_note else ())


def step_growth(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the memory that grows until the last event of a history.

    Columns device, op (with its place in code), steps (the last steps that all requested some that is still allocated),
    count and bytes (of blocks), step_bytes (the median of a step); one row per op, the largest first. Steps begin where
    the profiler or an optimizer marks one; of fewer than 5 steps with such memory there is no row.
    """
    begins = _begins(snapshot, history.device)
    if len(begins) < LEAST_STEPS + _OPEN_STEPS or not len(history.at_ns):
        return schema.empty(GROWTH_COLUMNS)
    blocks = snapshot_facts.history_blocks(snapshot, history, played)
    alive = blocks.filter(pl.col("start") >= 0, pl.col("end") == len(history.at_ns))
    at_ns = history.at_ns[alive["start"].to_numpy()]
    alive = alive.with_columns(step=pl.Series(np.searchsorted(begins, at_ns, side="right"), dtype=pl.Int64))
    described = alive.join(snapshot_facts.owners(snapshot), on="stack", how="left").drop_nulls("op")
    last = len(begins) - _OPEN_STEPS
    # What was requested before the first mark is of no step: that time may be a part of one, or many.
    in_steps = described.filter(pl.col("step").is_between(1, last))
    of_step = in_steps.group_by("op", "step").agg(pl.len(), pl.col("bytes").sum())
    # Steps in a row that end with the last closed one have one value of step + rank from the end.
    ordered = of_step.sort("op", "step").with_columns(
        run=pl.col("step") + pl.col("step").rank("ordinal", descending=True).over("op")
    )
    recent = ordered.filter(pl.col("run") == last + 1)
    grown = recent.group_by("op").agg(
        steps=pl.len(), count=pl.col("len").sum(), bytes=pl.col("bytes").sum(), step_bytes=pl.col("bytes").median()
    )
    wide = grown.filter(pl.col("steps") >= LEAST_STEPS).with_columns(device=pl.lit(history.device))
    return schema.conform(wide.sort("bytes", "op", descending=[True, False]), GROWTH_COLUMNS)


def first_out_of_memory(run: Run) -> tuple[int | None, OutOfMemoryEvent | None]:
    """Return the rank that ran out of memory first and the event, by the same snapshots as `pools`; else None, None."""
    failed = []
    for file in snapshot_files.first_files(run):
        try:
            snapshot = memory_snapshots.read(file.path)
        except TracekitError:  # `data_quality` reports it
            continue
        for device in (
            snapshot.events.filter(pl.col("action") == memory_snapshots.OUT_OF_MEMORY)["device"].unique().sort()
        ):
            oom = of_snapshot(snapshot, playback.from_snapshot(snapshot, device))
            if oom is not None:
                failed.append((file.rank, oom))
    return min(failed, key=lambda failure: failure[1].at_ns or 0, default=(None, None))


def _peak_reserved(events: pl.DataFrame, last: int, history: History) -> int:
    """Return the most that was reserved before an event."""
    grows, shrinks = pl.col("action").is_in(SEGMENT_ALLOCATIONS), pl.col("action").is_in(SEGMENT_FREES)
    change = pl.when(grows).then("bytes").when(shrinks).then(-pl.col("bytes")).otherwise(0).cum_sum()
    grown_bytes = events.filter(pl.col("index") < last).select(change.max()).item()
    return _reserved_bytes(history.start) + max(grown_bytes or 0, 0)


def _state(history: History) -> tuple[ReplayResult | None, str]:
    """Return the state after a history, None if the model does not reproduce it, and why."""
    if history.not_replayable:
        return None, f"The state at the out-of-memory is not known: {history.not_replayable}."
    try:
        played = playback.replay_as_recorded(history)
    except InputError as error:
        return None, f"The state at the out-of-memory is not known: {error}."
    if played.address_mismatches:
        return None, "The state at the out-of-memory is not known: the allocator model differs from the recording."
    return played, ""


def _trial(history: History, oom: OutOfMemoryEvent, stream: int, candidates: Sequence[str]) -> tuple[pl.DataFrame, str]:
    """Settings that would have served the request, replayed from the same start in the same memory.

    A process with a limit gets what it had reserved at its peak: then all recorded requests are served, as they were.
    """
    nothing = schema.empty(TRIED_COLUMNS)
    if oom.free_bytes is None or oom.reserved_bytes is None:
        return nothing, ""
    if len(history.action) > MAX_REPLAYED_EVENTS:
        return nothing, f"No other settings were tried: the history has more than {MAX_REPLAYED_EVENTS:,} events."
    extended = history.with_request(oom.requested_bytes, stream)
    capacity_bytes = oom.reserved_bytes + oom.room_bytes

    def replay(settings: Settings) -> tuple[bool, int]:
        played = playback.predict(extended, settings, capacity_bytes=capacity_bytes)
        return bool(played.moved_bytes[-1] > 0 and not played.out_of_memory), played.peak_reserved_bytes

    if replay(history.settings)[0]:
        return nothing, (
            "No other settings were tried: under the recorded settings, the replay serves the request, so it says "
            "nothing about others."
        )
    rows = [(text, *replay(Settings.parse(text))) for text in candidates if Settings.parse(text) != history.settings]
    return pl.DataFrame(rows, schema=TRIED_COLUMNS, orient="row"), ""


def _free_blocks(segments: Sequence[SegmentState]) -> pl.DataFrame:
    rows = [
        ("small" if segment.small else "large", segment.stream, block.bytes)
        for segment in segments
        for block in segment.blocks
        if block.state == "free"
    ]
    blocks = pl.DataFrame(rows, schema=schema.columns("kind stream bytes", kind=pl.String), orient="row")
    pieces = blocks.group_by("kind", "stream").agg(
        blocks=pl.len(), free_bytes=pl.col("bytes").sum(), largest_free_bytes=pl.col("bytes").max()
    )
    return schema.conform(pieces.sort("free_bytes", descending=True), {**FREE_COLUMNS, "kind": pl.String})


def _reserved_bytes(segments: Sequence[SegmentState]) -> int:
    return sum(segment.bytes for segment in segments)


def _allocated_bytes(segments: Sequence[SegmentState]) -> int:
    return sum(block.bytes for segment in segments for block in segment.blocks if block.state == "allocated")


def _begins(snapshot: MemorySnapshot, device: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Begins of steps, in ns: by the marks of the profiler, else by those of optimizers."""
    marks = snapshot.annotations.filter(
        pl.col("stage") == "START", pl.col("device") == device, pl.col("name").str.contains(_MARKS)
    )
    of_profiler = marks.filter(pl.col("name").str.starts_with("ProfilerStep"))
    if of_profiler.is_empty() and marks.height:
        marks = marks.filter(pl.col("name") == marks["name"].min())  # of several optimizers one
    step_marks = of_profiler if of_profiler.height else marks
    return np.sort(step_marks["at_ns"].drop_nulls().to_numpy().astype(np.int64))
