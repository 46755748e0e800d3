"""Tables of a memory snapshot: fragmentation, owners at the peak, churn, usage over time, lifetimes, segment map."""

import numpy as np
import polars as pl

from tracekit.analysis.memory import allocations, usage
from tracekit.model import schema
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import MemorySnapshot
from tracekit.replay.allocator.playback import History, ReplayResult
from tracekit.replay.allocator.recorded_history import ALLOC, REQUEST, SEGMENT_ALLOCATIONS, SEGMENT_FREES, is_replayed

MAP_COLUMNS = {
    "device": pl.Int64, "pool": pl.String, "kind": pl.String, "stream": pl.Int64, "expandable": pl.Boolean,
    "segment_address": pl.Int64, "segment_bytes": pl.Int64, "address": pl.Int64, "bytes": pl.Int64, "state": pl.String,
    "op": pl.String,
}  # fmt: skip
_MOST_LETTERS = 80
_STEP = r"ProfilerStep#([0-9]{1,15})(?:\D|$)"
_OP = r"at::_ops::(\w+)::"
# Of torch's own Python files, and of the interpreter's: nobody asks for memory there.
_TORCH = r"/torch/|<frozen|<string>"
_NOT_THE_USERS = rf"site-packages|dist-packages|{_TORCH}"
_RECORDER = r"unwind|CapturedTraceback|gather_with_cpp|CachingAllocator"
_ENGINE = r"^torch::autograd::Engine::"
_NODE = r"(\w*Backward\w*)::apply\("

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, TEMPORARIES, COMMUNICATION = "activations", "temporaries", "communication"
WORKSPACE, UNKNOWN = "workspace", "unknown"
CATEGORY_COLUMNS = schema.columns(
    "device category count bytes peak_ratio evidence", category=pl.String, evidence=pl.String, count=pl.Int64
)

# Parts of a step by what a stack's frames are, "file:function" or the C++ function; the first that matches counts.
_PARTS = {
    "workspace": r"getNewWorkspace|getCUDABlas(?:Lt)?Workspace|getWorkspace|cudnn\w*::.*[Ww]orkspace",
    "communication": (
        r"\bc10d::|c10d_functional|ProcessGroup(?:NCCL|Gloo)|/torch/distributed/(?:distributed_c10d|_functional_coll"
        r"|fsdp/_fully_shard/_fsdp_coll|fsdp/_flat_param\.py:_?alloc|nn/functional)|/deep_ep/"
    ),
    "accumulation": r"AccumulateGrad",
    "optimizer": r"/torch/optim/|/optimizers?/|/optim/|/[^/:]*optim[^/:]*\.py:|deepspeed/ops/adam|Optimizer\.step#",
    "recomputation": r"/torch/utils/checkpoint\.py:(?:recompute|unpack_hook|_run_fn_with)|CheckpointFunctionBackward",
    "backward": r"torch::autograd::Engine|:_engine_run_backward$|/torch/autograd/__init__\.py:backward$",
    "parameters": (
        r"/torch/nn/init\.py|:reset_parameters$|/torch/nn/modules/module\.py:(?:_apply|to|cuda|convert|to_empty)$"
        r"|/torch/nn/parameter\.py|:load_state_dict$|:from_pretrained$|/torch/nn/modules/[^:]*:__init__$"
        r"|_fsdp_param\.py:(?:_init_sharded|reset_sharded|__init__)|/torch/nn/modules/module\.py:register_"
    ),
    "forward": r":forward$|:_call_impl$|:_wrapped_call_impl$|torch/nn/functional\.py|_loss$|:loss",
}
_EVIDENCE = {
    PARAMETERS: "requested where modules are made, moved or loaded",
    GRADIENTS: "requested in the backward pass, still allocated after it",
    OPTIMIZER: "requested in the optimizer, still allocated after its step",
    ACTIVATIONS: "requested in the forward pass or recomputed, still allocated in the backward pass",
    TEMPORARIES: "freed in the part of the step that requested it",
    COMMUNICATION: "requested by a collective or for its buffers",
    WORKSPACE: "scratch memory that cuBLAS or cuDNN caches",
    UNKNOWN: "no call stack, one that shows no part of a step, or a forward pass without a backward pass after it",
}


def peak_allocated_bytes(history: History, played: ReplayResult) -> int:
    """Return the peak of allocated bytes."""
    return int(allocated_over_time(history, played).max())


def at_peak(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the owners of memory at the peak: columns and order as `allocations.at_peak`; an owner is a place in code.

    The place is the innermost frame in the program's own Python code, with the op that it called; otherwise the
    innermost known frame. It is null for blocks older than the history that were freed in it. Without a history
    the peak is the moment of the snapshot.
    """
    return after_event(snapshot, history, played, int(allocated_over_time(history, played).argmax()) - 1)


def after_event(snapshot: MemorySnapshot, history: History, played: ReplayResult, event: int) -> pl.DataFrame:
    """Return the owners of memory after an event of the history (-1: at its start), as `at_peak` those at the peak."""
    allocated = allocated_over_time(history, played)
    blocks = history_blocks(snapshot, history, played).filter(pl.col("start") <= event, pl.col("end") > event)
    described = blocks.join(owners(snapshot), on="stack", how="left")
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
    """Return the operator and the place in code of each stack: columns stack, operator (null if none), place.

    The operator is the outermost one, which the program called: what allocates for it is mostly aten::empty_strided.
    The place is the innermost frame in the user's own Python code; where there is none, in that of a framework in
    site-packages, then in torch; of torch's threads for the backward pass, that pass and the node of the graph; else
    the innermost C++ function.
    """
    frames = snapshot.stacks.join(snapshot.frames, on="frame").sort("stack", "depth")
    python = pl.col("file").str.ends_with(".py")
    is_user_code = python & ~pl.col("file").str.contains(_NOT_THE_USERS)
    of_framework = python & ~pl.col("file").str.contains(_TORCH)
    place = pl.format("{} ({}:{})", "name", pl.col("file").str.split("/").list.last(), "line")
    of_stack = frames.group_by("stack", maintain_order=True).agg(
        place=pl.coalesce(
            place.filter(is_user_code).first(), place.filter(of_framework).first(), place.filter(python).first()
        ),
        function=pl.col("name").filter(~pl.col("name").str.contains(_RECORDER)).first(),
        node=pl.col("name").str.extract(_NODE).drop_nulls().first(),
        is_backward=pl.col("name").str.contains(_ENGINE).any(),
        # Stacks have the innermost frame first.
        op=pl.col("name").str.extract(_OP).drop_nulls().last(),
    )
    functions = of_stack.filter(pl.col("place").is_null())["function"].drop_nulls().unique().to_list()
    names = pl.col("function").replace_strict(functions, [function_name(text) for text in functions], default=None)
    node = pl.when(pl.col("node").is_not_null()).then(pl.format(" ({})", "node")).otherwise(pl.lit(""))
    backward = pl.when("is_backward").then(pl.format("the backward pass{}", node))
    return of_stack.select(
        "stack",
        place=pl.coalesce("place", backward, names),
        operator=pl.format("aten::{}", "op"),
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


def history_blocks(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return every block of a history: columns address, bytes, stack, start, end.

    start and end are events of the history, -1 for a block that is older, the number of events for one not freed.
    """
    moves = _moves(history, played)
    nexts = moves.with_columns(end=pl.col("event").shift(-1).over("address"))
    begun = nexts.filter(pl.col("code") == ALLOC).select("address", "stack", "end", bytes="moved", start="event")
    ends = moves.group_by("address").agg(end=pl.col("event").first())
    stated = snapshot.blocks.filter(pl.col("device") == history.device).select("address", "stack")
    older = (
        pl.DataFrame(_allocated_at_start(history), schema={"address": pl.Int64, "bytes": pl.Int64}, orient="row")
        .join(ends, on="address", how="left", maintain_order="left")
        .join(stated.unique("address"), on="address", how="left", maintain_order="left")
        # The snapshot's block is another one if this one was freed since.
        .with_columns(stack=pl.when(pl.col("end").is_null()).then("stack"), start=pl.lit(-1, pl.Int64))
    )
    columns = ["address", "bytes", "stack", "start", "end"]
    blocks = pl.concat([older.select(columns), begun.select(columns)], how="vertical_relaxed")
    return blocks.with_columns(pl.col("end").fill_null(len(history.at_ns)))


def categories_at_peak(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Memory by category at the peak of the history, as `by_category`."""
    peak = int(allocated_over_time(history, played).argmax()) - 1
    return by_category(snapshot, history, played, peak)


def has_known_category(table: pl.DataFrame) -> bool:
    """Return whether a table of `by_category` says what any memory is for."""
    return bool((table["category"] != UNKNOWN).any())


def by_category(snapshot: MemorySnapshot, history: History, played: ReplayResult, event: int) -> pl.DataFrame:
    """Memory by category after an event of the history. Columns CATEGORY_COLUMNS; one row per category.

    `event` is -1 for the start of the history. Blocks older than the history have the stack that the snapshot states.
    """
    blocks = block_categories(snapshot, history, played)
    alive = blocks.filter(pl.col("start") <= event, pl.col("end") > event)
    sums = alive.group_by("category").agg(count=pl.len(), bytes=pl.col("bytes").sum())
    total = max(int(sums["bytes"].sum()), 1)
    wide = sums.with_columns(
        device=pl.lit(history.device),
        peak_ratio=pl.col("bytes") / total,
        evidence=pl.col("category").replace_strict(_EVIDENCE, default=None, return_dtype=pl.String),
    )
    return schema.conform(wide.sort("bytes", "category", descending=[True, False]), CATEGORY_COLUMNS)


def block_categories(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the category of every block of the history: columns address, bytes, start, end, stack, category.

    start and end are events of the history, -1 for a block that is older, the number of events for one not freed.
    """
    parts = stack_parts(snapshot)
    blocks = history_blocks(snapshot, history, played).join(parts, on="stack", how="left", maintain_order="left")
    allocated = _moves(history, played).filter(pl.col("code") == ALLOC)
    allocated = allocated.join(parts, on="stack", how="left", maintain_order="left")
    category = _categories(blocks, allocated, len(history.at_ns))
    return blocks.select("address", "bytes", "start", "end", "stack", category=category)


def stack_parts(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Return the part of a step in which each stack is: columns stack, part; null where its frames show none."""
    frame = pl.when(pl.col("file").str.ends_with(".py")).then(pl.format("{}:{}", "file", "name")).otherwise("name")
    frame_parts = snapshot.frames.select("frame", text=frame)
    for part, pattern in _PARTS.items():
        frame_parts = frame_parts.with_columns(pl.col("text").str.contains(pattern).alias(part))
    of_stack = snapshot.stacks.join(frame_parts, on="frame").group_by("stack").agg(pl.col(*_PARTS).any())
    first_part = pl.coalesce(pl.when(pl.col(part)).then(pl.lit(part)) for part in _PARTS)
    return of_stack.select("stack", part=first_part)


def _moves(history: History, played: ReplayResult) -> pl.DataFrame:
    """Return what each event of the history allocates or frees: columns event, address, moved, code, stack."""
    moves = pl.DataFrame(
        {"address": history.address, "moved": played.moved_bytes, "code": history.action, "stack": history.stack}
    ).with_row_index("event")
    moves = moves.with_columns(pl.col("event").cast(pl.Int64))
    return moves.filter(pl.col("code").is_in([ALLOC, REQUEST]), pl.col("moved") != 0)


def _allocated_at_start(history: History) -> list[tuple[int, int]]:
    """Return address and size of each block that is allocated before the first event."""
    blocks = (block for segment in history.start for block in segment.blocks)
    return [(block.address, block.bytes) for block in blocks if block.state == "allocated"]


def _categories(blocks: pl.DataFrame, allocated: pl.DataFrame, count: int) -> pl.Series:
    """Return the category of blocks by part and lifetime; `allocated` are all allocations with their part."""
    alloc_events, alloc_parts = allocated["event"].to_numpy(), allocated["part"].fill_null("")
    in_backward = alloc_parts.is_in(["backward", "accumulation", "recomputation"]).to_numpy()
    after_backward = alloc_parts.is_in(["optimizer", "forward", "parameters"]).to_numpy()
    outside_optimizer = alloc_parts.is_in(["backward", "accumulation", "recomputation", "forward"]).to_numpy()
    part = pl.col("part")
    never_freed = pl.col("end") >= count
    lived = blocks.with_columns(
        sees_backward=_sees(blocks, alloc_events[in_backward]),
        sees_others=_sees(blocks, alloc_events[after_backward]),
        outlives_optimizer=_sees(blocks, alloc_events[outside_optimizer]),
    )
    outlives = pl.col("outlives_optimizer") | never_freed
    return lived.select(
        pl.when(part.is_in([COMMUNICATION, WORKSPACE]))
        .then(part)
        .when(part == "accumulation")
        .then(pl.lit(GRADIENTS))
        .when(part == "optimizer")
        .then(pl.when(outlives).then(pl.lit(OPTIMIZER)).otherwise(pl.lit(TEMPORARIES)))
        .when(part == "recomputation")
        .then(pl.lit(ACTIVATIONS))
        .when(part == "backward")
        .then(pl.when(pl.col("sees_others") | never_freed).then(pl.lit(GRADIENTS)).otherwise(pl.lit(TEMPORARIES)))
        .when(part == "parameters")
        .then(pl.lit(PARAMETERS))
        .when(part == "forward")
        .then(
            pl.when("sees_backward")
            .then(pl.lit(ACTIVATIONS))
            .when(pl.lit(bool(in_backward.any())) & ~never_freed)
            .then(pl.lit(TEMPORARIES))
            .otherwise(pl.lit(UNKNOWN))
        )
        .otherwise(pl.lit(UNKNOWN))
        .alias("category")
    ).to_series()


def _sees(blocks: pl.DataFrame, events: Ints) -> Flags:
    """Mark the blocks that are allocated at one of these events after their own."""
    if not len(events):
        return np.zeros(blocks.height, np.bool_)
    after = np.searchsorted(events, blocks["start"].to_numpy(), side="right")
    following = events[np.minimum(after, len(events) - 1)]
    return (after < len(events)) & (following < blocks["end"].to_numpy())
