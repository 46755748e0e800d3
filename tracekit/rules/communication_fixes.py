"""Fixes for exposed communication, by strategy, collective and backend."""

from tracekit.analysis.parallelism.strategy import DDP, FSDP1, FSDP2, YAFSDP

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
_ALL_TO_ALL = "Split the batch in two, so that the all-to-all of one half overlaps with the compute of the other."
_START_EARLIER = (
    "Start the {op} collectives in the evidence earlier (async_op=True, with wait() where the result is used), or give "
    "each rank more compute per byte."
)
_START_ANY_EARLIER = _START_EARLIER.replace("{op} ", "")
_MIN_OVERLAPPED_RATIO = 0.05  # below this share, no communication is overlapped


def fix_for(*, strategy: str | None, op: str | None, gloo: bool, overlapped_ratio: float) -> str:
    """Return the fix where collectives of kind `op` are most of the exposed time.

    `overlapped_ratio` is the share of communication that compute overlaps now.
    """
    if gloo and strategy in _GLOO_FIXES and op in (_GATHER, _REDUCE) and overlapped_ratio < _MIN_OVERLAPPED_RATIO:
        return _GLOO_FIXES[strategy]
    if (strategy, op) in _FIXES:
        return _FIXES[strategy or "", op or ""]
    if op == "all_to_all":
        return _ALL_TO_ALL
    return _START_EARLIER.format(op=op.replace("_", "-")) if op else _START_ANY_EARLIER
