"""Tables of a memory snapshot: fragmentation, owners at the peak, churn, usage over time, lifetimes, segment map."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.analysis.memory import allocations, snapshot_files, usage
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.errors import TracekitError
from tracekit.ingest.readers import memory_snapshots
from tracekit.model import schema
from tracekit.model.fact import RANK_COLUMNS, Fact, run_fact
from tracekit.model.memoize import memoize
from tracekit.model.run import RUN_DATA_QUALITY, Run
from tracekit.model.schema import Table
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import MemorySnapshot
from tracekit.replay.allocator import playback
from tracekit.replay.allocator.playback import History, ReplayResult
from tracekit.replay.allocator.recorded_history import (
    ALLOC,
    REQUEST,
    SEGMENT_ALLOCATIONS,
    SEGMENT_FREES,
    is_replayed,
)
from tracekit.replay.allocator.settings import SMALL_BYTES

FRAGMENTATION_COLUMNS = schema.columns(
    "device pool kind stream segments total_bytes allocated_bytes free_bytes largest_free_bytes", pool=pl.String
)
MAP_COLUMNS = {
    "device": pl.Int64, "pool": pl.String, "kind": pl.String, "stream": pl.Int64, "expandable": pl.Boolean,
    "segment_address": pl.Int64, "segment_bytes": pl.Int64, "address": pl.Int64, "bytes": pl.Int64, "state": pl.String,
    "op": pl.String,
}  # fmt: skip
_MOST_LETTERS = 80
_STEP = r"ProfilerStep#(\d{1,15})(?:\D|$)"
_OP = r"at::_ops::(\w+)::"
# Of torch's own Python files, and of the interpreter's: nobody asks for memory there.
_TORCH = r"/torch/|<frozen|<string>"
_NOT_THE_USERS = rf"site-packages|dist-packages|{_TORCH}"
_RECORDER = r"unwind|CapturedTraceback|gather_with_cpp|CachingAllocator"
_ENGINE = r"^torch::autograd::Engine::"
_NODE = r"(\w*Backward\w*)::apply\("
POOL_COLUMNS = {
    "window": pl.Int64, "rank": pl.Int64, **FRAGMENTATION_COLUMNS, "waiting_bytes": pl.Int64,
    "largest_request_bytes": pl.Int64,
}  # fmt: skip
HISTORY_COLUMNS = schema.columns("window rank device events retries device_allocations path")


def fragmentation(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Free memory of each pool at the snapshot, and its largest piece.

    Columns device, pool, kind, stream, segments, total_bytes, allocated_bytes, free_bytes, largest_free_bytes; one row
    per pool of free blocks: what is free in one serves no other.
    """
    key = ["device", "pool", "kind", "stream"]
    of_segment = snapshot.segments.select("device", "address", *key[1:], "total_bytes", "allocated_bytes")
    totals = of_segment.group_by(key).agg(
        segments=pl.len(), total_bytes=pl.col("total_bytes").sum(), allocated_bytes=pl.col("allocated_bytes").sum()
    )
    free = snapshot.blocks.filter(pl.col("state") == "inactive").join(
        of_segment, left_on=["device", "segment_address"], right_on=["device", "address"]
    )
    pieces = free.group_by(key).agg(free_bytes=pl.col("bytes").sum(), largest_free_bytes=pl.col("bytes").max())
    wide = totals.join(pieces, on=key, how="left").with_columns(pl.col("free_bytes", "largest_free_bytes").fill_null(0))
    ordered = wide.sort("total_bytes", *key, descending=[True, *[False] * 4])
    return schema.select(ordered, FRAGMENTATION_COLUMNS)


def peak_allocated_bytes(history: History, played: ReplayResult) -> int:
    """Return the peak of allocated bytes."""
    return int(allocated_over_time(history, played).max())


def at_peak(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the owners of memory at the peak: columns and order as `allocations.at_peak`; an owner is a place in code.

    The place is the innermost frame in the program's own Python code, with the op that it called; otherwise the
    innermost known frame. It is null for blocks older than the history that are not in the snapshot. Without a history
    the peak is the moment of the snapshot.
    """
    return after_event(snapshot, history, played, int(allocated_over_time(history, played).argmax()) - 1)


def after_event(snapshot: MemorySnapshot, history: History, played: ReplayResult, event: int) -> pl.DataFrame:
    """Return the owners of memory after an event of the history (-1: at its start), as `at_peak` those at the peak."""
    allocated = allocated_over_time(history, played)
    blocks = alive(history, played, event).drop("event")
    stacks = snapshot.blocks.filter(pl.col("device") == history.device).select("address", last="stack")
    described = blocks.join(stacks, on="address", how="left").with_columns(
        stack=pl.when("earlier").then("last").otherwise("stack")
    )
    described = described.join(owners(snapshot), on="stack", how="left")
    by = described.group_by("op").agg(count=pl.len(), bytes=pl.col("bytes").sum())
    at_ns = int(history.at_ns[event]) if event >= 0 else None
    wide = by.with_columns(
        device=pl.lit(history.device), at_ns=pl.lit(at_ns), peak_bytes=pl.lit(int(allocated[event + 1]))
    ).with_columns(peak_ratio=pl.col("bytes") / pl.col("peak_bytes"))
    return schema.conform(wide.sort("bytes", "op", descending=[True, False]), allocations.PEAK_COLUMNS)


def churn(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the allocation churn, columns as `allocations.churn`.

    One row per step, where the profiler marked steps in the snapshot, else one for the whole history.
    """
    allocated = allocated_over_time(history, played)[1:]
    events = pl.DataFrame({"at_ns": history.at_ns, "moved": played.moved_bytes, "allocated_bytes": allocated})
    marks = snapshot.annotations.filter(pl.col("stage") == "START", pl.col("device") == history.device)
    marks = marks.with_columns(step=pl.col("name").str.extract(_STEP).cast(pl.Int64)).drop_nulls("step").sort("at_ns")
    step = pl.lit(None, pl.Int64)
    if marks.height:
        place = np.searchsorted(marks["at_ns"].to_numpy(), history.at_ns, side="right") - 1
        mark_steps = marks["step"].gather(np.maximum(place, 0).astype(np.uint32))
        step = pl.when(pl.Series(place >= 0)).then(mark_steps)
    sizes = pl.col("moved").filter(pl.col("moved") > 0)
    sums = (
        events.with_columns(step=step)
        .group_by("step")
        .agg(
            count=sizes.len(),
            bytes=sizes.sum(),
            peak_bytes=pl.col("allocated_bytes").max(),
            distinct_sizes=sizes.n_unique(),
        )
    )
    wide = sums.with_columns(
        device=pl.lit(history.device),
        churn_ratio=pl.when(pl.col("peak_bytes") > 0).then(pl.col("bytes") / pl.col("peak_bytes")),
    )
    return schema.select(wide, allocations.CHURN_COLUMNS).sort("step")


def allocated_over_time(history: History, played: ReplayResult) -> Ints:
    """Return the allocated bytes at the start and after each event."""
    begun_bytes = sum(size for _, size in _allocated_at_start(history))
    return np.cumsum(np.concatenate(([begun_bytes], played.moved_bytes)), dtype=np.int64)


def owners(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Return the place in code that represents each stack: columns stack, op."""
    with_operator = pl.when(pl.col("operator").is_not_null()).then(pl.format("{} in {}", "operator", "place"))
    return places(snapshot).select("stack", op=with_operator.otherwise("place"))


def places(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Return the operator and the place in code of each stack: columns stack, operator, caller (null if none), place.

    The operator is the innermost one, which allocated, the caller the outermost one. The place is the innermost frame
    in the user's own Python code; where there is none, in that of a framework in site-packages, then in torch; of
    torch's threads for the backward pass, that pass and the node of the graph; else the innermost C++ function.
    """
    frames = snapshot.stacks.join(snapshot.frames, on="frame").sort("stack", "depth")
    python = pl.col("file").str.ends_with(".py")
    is_user_code = python & ~pl.col("file").str.contains(_NOT_THE_USERS)
    of_framework = python & ~pl.col("file").str.contains(_TORCH)
    place = pl.format("{} ({}:{})", "name", pl.col("file").str.split("/").list.last(), "line")
    of_stack = frames.group_by("stack", maintain_order=True).agg(
        place=pl.coalesce(
            place.filter(is_user_code).first(),
            place.filter(of_framework).first(),
            place.filter(python).first(),
        ),
        function=pl.col("name").filter(~pl.col("name").str.contains(_RECORDER)).first(),
        node=pl.col("name").str.extract(_NODE).drop_nulls().first(),
        is_backward=pl.col("name").str.contains(_ENGINE).any(),
        # Stacks have the innermost frame first, so the first op is the one that allocated.
        op=pl.col("name").str.extract(_OP).drop_nulls().first(),
        outermost=pl.col("name").str.extract(_OP).drop_nulls().last(),
    )
    functions = of_stack.filter(pl.col("place").is_null())["function"].drop_nulls().unique().to_list()
    names = pl.col("function").replace_strict(functions, [function_name(text) for text in functions], default=None)
    node = pl.when(pl.col("node").is_not_null()).then(pl.format(" ({})", "node")).otherwise(pl.lit(""))
    backward = pl.when("is_backward").then(pl.format("the backward pass{}", node))
    return of_stack.select(
        "stack",
        place=pl.coalesce("place", backward, names),
        operator=pl.format("aten::{}", "op"),
        caller=pl.format("aten::{}", "outermost"),
    )


def function_name(signature: str) -> str:
    """Return the name of a C++ function without types, arguments and templates.

    >>> function_name("void at::native::gpu_reduce_kernel<float, func<float (float)>, 4>(at::TensorIterator&, long)")
    'at::native::gpu_reduce_kernel'
    >>> function_name("at::(anonymous namespace)::wrapper_CUDA_mm(at::Tensor const&) [clone .isra.0]")
    'at::wrapper_CUDA_mm'
    """
    depth, letters = 0, []
    for letter in signature.replace("(anonymous namespace)::", ""):
        if letter == "(" and not depth:
            break
        depth += (letter == "<") - (letter == ">")
        if not depth and letter != ">":
            letters.append(letter)
    name = "".join(letters).strip().rpartition(" ")[2]
    return name or signature[:_MOST_LETTERS]


def over_time(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the memory usage over the history by op with its place in code: columns as `usage.usage_by_owner`.

    Empty if the snapshot has no history, or one without times.
    """
    if not len(history.at_ns) or not history.at_ns.any():
        return schema.empty(usage.OWNER_COLUMNS)
    return usage.usage_by_owner(blocks(snapshot, history, played), live(snapshot, history, played), by=("op",))


def blocks(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the blocks in the history, columns as `allocations.blocks`."""
    events = pl.DataFrame(
        {"at_ns": history.at_ns, "address": history.address, "delta_bytes": played.moved_bytes, "op_id": history.stack}
    ).with_row_index("event")
    moves = events.filter(pl.col("delta_bytes") != 0).with_columns(
        device=pl.lit(history.device, pl.Int64), step=pl.lit(None, pl.Int64)
    )
    rows = allocations.match_blocks(moves).join(owners(snapshot), left_on="op_id", right_on="stack", how="left")
    return schema.conform(rows, allocations.BLOCK_COLUMNS).sort("start_event", nulls_last=False, maintain_order=True)


def live(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return memory usage after each event: columns device, event, at_ns, live_bytes, reserved_bytes."""
    events = snapshot.events.filter(pl.col("device") == history.device)
    action = pl.col("action")
    grows, shrinks = action.is_in(SEGMENT_ALLOCATIONS), action.is_in(SEGMENT_FREES)
    change = pl.when(grows).then("bytes").when(shrinks).then(-pl.col("bytes")).otherwise(0)
    begun_bytes = sum(segment.bytes for segment in history.start)
    changed = events.with_columns(reserved_bytes=change.cum_sum() + begun_bytes)
    reserved = changed.filter(is_replayed())["reserved_bytes"]
    usage_table = pl.DataFrame({"at_ns": history.at_ns, "live_bytes": allocated_over_time(history, played)[1:]})
    return usage_table.with_row_index("event").with_columns(
        device=pl.lit(history.device, pl.Int64), reserved_bytes=reserved
    )


def segment_map(snapshot: MemorySnapshot, device: int) -> pl.DataFrame:
    """Return all memory that the allocator holds of a device, block by block.

    Columns device, pool, kind, stream, expandable, segment_address, segment_bytes, address, bytes, state, op (who
    requested it); one row per block, those of one pool together, the largest pools and segments first.
    """
    key = ["pool", "kind", "stream"]
    segments = snapshot.segments.filter(pl.col("device") == device).select(
        "device", *key, "expandable", segment_address="address", segment_bytes="total_bytes"
    )
    listed = snapshot.blocks.filter(pl.col("device") == device).select(
        "segment_address", "address", "bytes", "state", "stack"
    )
    described = listed.join(segments, on="segment_address").join(owners(snapshot), on="stack", how="left")
    pool_bytes = pl.col("bytes").sum().over(key)
    ordered = described.with_columns(pool_bytes=pool_bytes).sort(
        "pool_bytes", *key, "segment_bytes", "address", descending=[True, False, False, False, True, False]
    )
    return schema.select(ordered, MAP_COLUMNS)


def lifetimes(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return block lifetimes by size: columns as `usage.lifetimes`."""
    if not np.any(history.at_ns):
        return schema.empty(usage.LIFETIME_COLUMNS)
    return usage.lifetime_histogram(blocks(snapshot, history, played))


def alive(history: History, played: ReplayResult, peak: int) -> pl.DataFrame:
    """Return the blocks allocated after event `peak`.

    Columns address, bytes, stack, earlier (than the history), event (that allocated it; null for an earlier one).
    """
    events = pl.DataFrame(
        {"address": history.address, "moved": played.moved_bytes, "code": history.action, "stack": history.stack}
    ).with_row_index("event")
    earlier = pl.DataFrame(_allocated_at_start(history), schema={"address": pl.Int64, "bytes": pl.Int64}, orient="row")
    moves = events.filter(pl.col("code").is_in([ALLOC, REQUEST]), pl.col("event") <= peak, pl.col("moved") != 0)
    last = moves.group_by("address").agg(pl.all().sort_by("event").last())
    allocated = last.filter(pl.col("code") == ALLOC)
    from_history = allocated.select(
        "address",
        pl.col("moved").alias("bytes"),
        "stack",
        earlier=pl.lit(value=False),
        event=pl.col("event").cast(pl.Int64),
    )
    untouched = earlier.join(last, on="address", how="anti").select(
        "address",
        "bytes",
        pl.lit(-1, pl.Int64).alias("stack"),
        earlier=pl.lit(value=True),
        event=pl.lit(None, pl.Int64),
    )
    return pl.concat([from_history, untouched])


@run_fact
def pools(run: Run) -> pl.DataFrame:
    """Return the fragmentation of free memory at the end of each memory snapshot of a run.

    Columns window, rank and those of `snapshots.fragmentation`, waiting_bytes (freed, but another stream uses it) and
    largest_request_bytes (of the history, on the pool's stream and of its kind); one row per snapshot and pool. Only
    the first 128 MiB of snapshots are read, and those that cannot be read are left to `data_quality`.
    """
    return _snapshot_tables(run)[0]


@run_fact
def histories(run: Run) -> pl.DataFrame:
    """Return the allocator activity in the history of each memory snapshot of a run.

    Columns window, rank, device, events, retries, device_allocations, path; one row per snapshot and device, of the
    same snapshots as `pools`.
    """
    return _snapshot_tables(run)[1]


def data_quality(run: Run) -> pl.DataFrame:
    """Return a row for each memory snapshot of a run that cannot be read: columns as RUN_DATA_QUALITY."""
    return _snapshot_tables(run)[2]


_POOL = ["device", "pool", "kind", "stream"]


def _allocated_at_start(history: History) -> list[tuple[int, int]]:
    """Return address and size of each block that is allocated before the first event."""
    blocks = (block for segment in history.start for block in segment.blocks)
    return [(block.address, block.bytes) for block in blocks if block.state == "allocated"]


def _snapshot_table(table: Table) -> Fact[Run]:
    """Fact of one table of all snapshots of a run: columns window, rank and those of `table`."""
    published = replace(table, name=f"snapshot_{table.name}", columns=(*RANK_COLUMNS, *table.columns))

    @run_fact(table=published, is_cached=False)  # a history may have millions of events
    def rows(run: Run) -> pl.DataFrame:
        parts = [published.empty()]
        for file in snapshot_files.files(run):
            part: pl.DataFrame = memory_snapshots.read(file.path).tables[table.name]
            place = (pl.lit(file.window, pl.Int64).alias("window"), pl.lit(file.rank, pl.Int64).alias("rank"))
            parts.append(part.select(*place, pl.all()))
        return pl.concat(parts)

    return rows


@memoize
def _snapshot_tables(run: Run) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return pools, histories and data-quality issues: each snapshot is read once for all."""
    pool_tables: list[pl.DataFrame] = [schema.empty(POOL_COLUMNS)]
    rows: list[tuple[object, ...]] = []
    bad = snapshot_files.unreadable(run)
    for file in snapshot_files.first_files(run):
        try:
            snapshot = memory_snapshots.read(file.path)
        except TracekitError as error:
            bad.append((file.rank, file.path, "unreadable_snapshot", str(error), 0.0))
            continue
        pool_tables.append(_pools(snapshot, file))
        for device in snapshot.devices:
            history = playback.from_snapshot(snapshot, device)
            counts = (len(history.action), history.retries, len(history.segment_allocations))
            rows.append((file.window, file.rank, device, *counts, file.path))
    histories = pl.DataFrame(rows, schema=HISTORY_COLUMNS, orient="row")
    return pl.concat(pool_tables), histories, pl.DataFrame(bad, schema=RUN_DATA_QUALITY.schema, orient="row")


def _pools(snapshot: MemorySnapshot, place: SnapshotFile) -> pl.DataFrame:
    rows = fragmentation(snapshot).join(_waiting(snapshot), on=_POOL, how="left")
    rows = rows.join(_requests(snapshot), on=["device", "stream", "kind"], how="left").with_columns(
        pl.col("waiting_bytes").fill_null(0), window=pl.lit(place.window), rank=pl.lit(place.rank)
    )
    return schema.select(rows, POOL_COLUMNS)


def _waiting(snapshot: MemorySnapshot) -> pl.DataFrame:
    pending = snapshot.blocks.filter(~pl.col("state").is_in(["active_allocated", "inactive"]))
    segments = snapshot.segments.select("device", *_POOL[1:], segment_address="address")
    in_segments = pending.join(segments, on=["device", "segment_address"])
    return in_segments.group_by(_POOL).agg(waiting_bytes=pl.col("bytes").sum())


def _requests(snapshot: MemorySnapshot) -> pl.DataFrame:
    kind = pl.when(pl.col("bytes") <= SMALL_BYTES).then(pl.lit("small")).otherwise(pl.lit("large"))
    requests = snapshot.events.filter(pl.col("action") == "alloc").group_by("device", "stream", kind=kind)
    return requests.agg(largest_request_bytes=pl.col("bytes").max())


TABLES: tuple[Fact[Run], ...] = tuple(map(_snapshot_table, schema.SNAPSHOT_TABLES.values()))
"""The tables of a snapshot, of all snapshots of a run: snapshot_segments, snapshot_blocks, …."""
