"""What blocks of device memory are for: parameters, gradients, optimizer state, activations, temporaries, others.

The call stack of an allocation says in which part of a step it was requested; how long the block lives says the rest.
An activation is requested in the forward pass and still allocated when the backward pass allocates; a gradient is
requested in the backward pass and still allocated when other code allocates; what is freed sooner is temporary.
"""

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import MemorySnapshot
from tracekit.replay.allocator.facts import snapshot_facts
from tracekit.replay.allocator.playback import History, ReplayResult
from tracekit.replay.allocator.recorded_history import ALLOC, REQUEST

PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, TEMPORARIES, COMMUNICATION = "activations", "temporaries", "communication"
WORKSPACE, UNKNOWN = "workspace", "unknown"
COLUMNS = schema.columns(
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


def at_peak(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Memory by category at the peak of the history, as `by_category`."""
    peak = int(snapshot_facts.allocated_over_time(history, played).argmax()) - 1
    return by_category(snapshot, history, played, peak)


def are_known(table: pl.DataFrame) -> bool:
    """Return whether a table of `by_category` says what any memory is for."""
    return bool((table["category"] != UNKNOWN).any())


def by_category(snapshot: MemorySnapshot, history: History, played: ReplayResult, event: int) -> pl.DataFrame:
    """Memory by category after an event of the history. Columns COLUMNS; one row per category.

    `event` is -1 for the start of the history. Blocks older than the history have the stack that the snapshot states.
    """
    blocks = of_blocks(snapshot, history, played)
    alive = blocks.filter(pl.col("start") <= event, pl.col("end") > event)
    sums = alive.group_by("category").agg(count=pl.len(), bytes=pl.col("bytes").sum())
    total = max(int(sums["bytes"].sum()), 1)
    wide = sums.with_columns(
        device=pl.lit(history.device),
        peak_ratio=pl.col("bytes") / total,
        evidence=pl.col("category").replace_strict(_EVIDENCE, default=None, return_dtype=pl.String),
    )
    return schema.conform(wide.sort("bytes", "category", descending=[True, False]), COLUMNS)


def of_blocks(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the category of every block of the history: columns address, bytes, start, end, stack, category.

    start and end are events of the history, -1 for a block that is older, the number of events for one not freed.
    """
    return _blocks(snapshot, history, played).select("address", "bytes", "start", "end", "stack", "category")


def parts(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Return the part of a step in which each stack is: columns stack, part; null where its frames show none."""
    frame = pl.when(pl.col("file").str.ends_with(".py")).then(pl.format("{}:{}", "file", "name")).otherwise("name")
    frame_parts = snapshot.frames.select("frame", text=frame)
    for part, pattern in _PARTS.items():
        frame_parts = frame_parts.with_columns(pl.col("text").str.contains(pattern).alias(part))
    of_stack = snapshot.stacks.join(frame_parts, on="frame").group_by("stack").agg(pl.col(*_PARTS).any())
    first_part = pl.coalesce(pl.when(pl.col(part)).then(pl.lit(part)) for part in _PARTS)
    return of_stack.select("stack", part=first_part)


def _blocks(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the blocks of a history with their part and category."""
    count = len(history.at_ns)
    moves = pl.DataFrame(
        {"address": history.address, "moved": played.moved_bytes, "code": history.action, "stack": history.stack}
    ).with_row_index("event")
    moves = moves.with_columns(pl.col("event").cast(pl.Int64))
    moves = moves.filter(pl.col("code").is_in([ALLOC, REQUEST]), pl.col("moved") != 0)
    nexts = moves.with_columns(end=pl.col("event").shift(-1).over("address"))
    begun = nexts.filter(pl.col("code") == ALLOC).select(
        "address", "stack", "end", bytes="moved", start="event", earlier=pl.lit(value=False)
    )
    ends = moves.group_by("address").agg(end=pl.col("event").first())
    start = [(b.address, b.bytes) for s in history.start for b in s.blocks if b.state == "allocated"]
    stated = snapshot.blocks.filter(pl.col("device") == history.device).select("address", "stack")
    older = (
        pl.DataFrame(start, schema={"address": pl.Int64, "bytes": pl.Int64}, orient="row")
        .join(ends, on="address", how="left", maintain_order="left")
        .join(stated.unique("address"), on="address", how="left", maintain_order="left")
        # The snapshot's block is another one if this one was freed since.
        .with_columns(
            stack=pl.when(pl.col("end").is_null()).then("stack"), start=pl.lit(-1, pl.Int64), earlier=pl.lit(value=True)
        )
    )
    columns = ["address", "bytes", "stack", "start", "end", "earlier"]
    blocks = pl.concat([older.select(columns), begun.select(columns)], how="vertical_relaxed")
    blocks = blocks.with_columns(pl.col("end").fill_null(count)).join(
        parts(snapshot), on="stack", how="left", maintain_order="left"
    )
    of_event = moves.filter(pl.col("code") == ALLOC).join(
        parts(snapshot), on="stack", how="left", maintain_order="left"
    )
    return blocks.with_columns(category=_categories(blocks, of_event, count))


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
