"""Fixes for exposed communication, by strategy, collective and backend."""

from tracekit.analysis.parallelism import pipeline_actions
from tracekit.analysis.parallelism.workload import DDP, FSDP1, FSDP2, YAFSDP

_GATHER, _REDUCE = "all_gather", "reduce_scatter"

_GLOO_FIXES = {
    FSDP1: (
        "FSDP1 on gloo blocks on each collective, so prefetching overlaps none of it: give each rank more tokens per "
        "step, or all-gather once instead of twice with sharding_strategy=ShardingStrategy.SHARD_GRAD_OP."
    ),
    FSDP2: (
        "FSDP2 on gloo blocks on each collective by default: overlap the next all-gather with compute by "
        "unshard(async_op=True), set_modules_to_forward_prefetch and set_modules_to_backward_prefetch. Reduce-scatters "
        "stay exposed, so give each rank more tokens per step."
    ),
}
_FIXES = {
    (FSDP1, _GATHER): (
        "Prefetch the next unit: FullyShardedDataParallel(forward_prefetch=True, "
        "backward_prefetch=BackwardPrefetch.BACKWARD_PRE). If all-gathers still start late, limit_all_gathers=False "
        "removes the limit on those in flight, at the cost of memory."
    ),
    (FSDP1, _REDUCE): (
        "Reduce fewer bytes: MixedPrecision(reduce_dtype=torch.bfloat16). Or reduce less often: accumulate gradients "
        "under no_sync(), at the cost of memory, or give each rank more tokens per step."
    ),
    (FSDP2, _GATHER): (
        "Prefetch further ahead: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch with the next "
        "two modules. Or keep weights unsharded until backward with fully_shard(reshard_after_forward=False), at the "
        "cost of memory."
    ),
    (FSDP2, _REDUCE): (
        "Let all-gathers overtake reduce-scatters with set_separate_reduce_scatter_group, allow more reduce-scatters "
        "in flight with set_reduce_scatter_max_input_buffers(2), or reduce fewer bytes: "
        "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)."
    ),
    (DDP, "all_reduce"): (
        "All-reduce less often: accumulate gradients under no_sync(). Or reduce fewer bytes: register_comm_hook(None, "
        "default_hooks.bf16_compress_hook) halves fp32 gradients, and another bucket_cap_mb can make the last bucket "
        "small."
    ),
    (YAFSDP, _GATHER): (
        "YaFSDP already prefetches the next unit: send fewer bytes with "
        "MixedPrecisionPolicy(param_dtype=torch.bfloat16), keep weights unsharded with "
        "fully_shard(reshard_after_forward=False), at the cost of memory, or give each rank more tokens per step."
    ),
    (YAFSDP, _REDUCE): (
        "YaFSDP already overlaps the reduce-scatter with the next layer's backward: send fewer bytes with "
        "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), or give each rank more tokens per step."
    ),
}
# Those that advise fewer bits, for messages of 16 bits or less.
_SHORT_FIXES = {
    (FSDP1, _REDUCE): (
        "Reduce less often: accumulate gradients under no_sync(), at the cost of memory, or give each rank more tokens "
        "per step. Gradients are reduced in 16 bits already."
    ),
    (FSDP2, _REDUCE): (
        "Let all-gathers overtake reduce-scatters with set_separate_reduce_scatter_group, or allow more "
        "reduce-scatters in flight with set_reduce_scatter_max_input_buffers(2). Gradients are reduced in 16 bits "
        "already."
    ),
    (DDP, "all_reduce"): (
        "All-reduce less often: accumulate gradients under no_sync(), or choose bucket_cap_mb so that the last bucket "
        "is small. Gradients are reduced in 16 bits already."
    ),
    (YAFSDP, _GATHER): (
        "YaFSDP already prefetches the next unit, in 16 bits: keep weights unsharded with "
        "fully_shard(reshard_after_forward=False), at the cost of memory, or give each rank more tokens per step."
    ),
    (YAFSDP, _REDUCE): (
        "YaFSDP already overlaps the reduce-scatter with the next layer's backward, in 16 bits: give each rank more "
        "tokens per step."
    ),
}
_TENSOR_PARALLEL = (
    "The result of an all-reduce of activations (tensor parallelism) is needed at once, so it cannot start earlier: "
    "split the batch in two, so that the all-reduce of one half overlaps with the compute of the other; keep the "
    "tensor-parallel group inside one node and as small as memory allows; or overlap it with its matrix product "
    "(sequence parallelism with async tensor parallelism{more})."
)
_IN_TRAINING, _IN_INFERENCE = ", userbuffers", ", one-shot all-reduce over symmetric memory"
_UNKNOWN_ALL_REDUCE = (
    "If these all-reduces reduce gradients, overlap them with backward (DistributedDataParallel, async_op=True) or "
    "accumulate gradients. If they reduce activations (tensor parallelism), they cannot start earlier: split the batch "
    "in two to overlap them, or use a smaller tensor-parallel group inside one node."
)
_ALL_TO_ALL = "Split the batch in two, so that the all-to-all of one half overlaps with the compute of the other."
_MESSAGES = (
    "Post the sends and receives in the evidence before the compute that does not need their data (isend, irecv or "
    "batch_isend_irecv), and wait() where the data is used."
)
_START_EARLIER = (
    "Start the {op} collectives in the evidence earlier (async_op=True, with wait() where the result is used), or give "
    "each rank more compute per byte."
)
_START_ANY_EARLIER = _START_EARLIER.replace("{op} ", "")
_MIN_OVERLAPPED_RATIO = 0.05  # below this share, no communication is overlapped


def fix_for(
    *,
    strategy: str | None,
    op: str | None,
    gloo: bool,
    overlapped_ratio: float,
    is_short: bool = False,
    in_backward: bool | None = None,
    infers: bool = False,
) -> str:
    """Return the fix where collectives of kind `op` are most of the exposed time.

    `overlapped_ratio` is the share of communication that compute overlaps now, `is_short` whether messages have 16 bits
    or less, `in_backward` whether most of those collectives are in backward (None where phases are unknown), `infers`
    whether the run does not train.
    """
    if op == "all_reduce" and not gloo and strategy in (None, DDP) and (infers or in_backward is False):
        return _TENSOR_PARALLEL.format(more=_IN_INFERENCE if infers else _IN_TRAINING)
    if op == "all_reduce" and strategy is None and in_backward is None:
        return _UNKNOWN_ALL_REDUCE
    if infers:
        strategy = None
    if is_short and (strategy, op) in _SHORT_FIXES:
        return _SHORT_FIXES[strategy or "", op or ""]
    if gloo and strategy in _GLOO_FIXES and op in (_GATHER, _REDUCE) and overlapped_ratio < _MIN_OVERLAPPED_RATIO:
        return _GLOO_FIXES[strategy]
    if (strategy, op) in _FIXES:
        return _FIXES[strategy or "", op or ""]
    if op == "all_to_all":
        return _ALL_TO_ALL
    if op in pipeline_actions.POINT_TO_POINT:
        return _MESSAGES
    return _START_EARLIER.format(op=op.replace("_", "-")) if op else _START_ANY_EARLIER
