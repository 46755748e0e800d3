"""What helps against exposed communication, by strategy, collective and backend."""

from tracekit.analysis.parallelism.strategy import DDP, FSDP1, FSDP2, YAFSDP

_GATHER, _REDUCE = "all_gather", "reduce_scatter"

_GLOO_FIXES = {
    FSDP1: (
        "FSDP1 on gloo waits for each collective where it issues it, so prefetching hides none of it: give each rank "
        "more tokens per step, or gather once instead of twice with sharding_strategy=ShardingStrategy.SHARD_GRAD_OP."
    ),
    FSDP2: (
        "By default FSDP2 on gloo waits for each collective where it issues it: gather the next module beside compute "
        "by unshard(async_op=True), set_modules_to_forward_prefetch and set_modules_to_backward_prefetch; reductions "
        "stay exposed, so give each rank more tokens per step."
    ),
}
_FIXES = {
    (FSDP1, _GATHER): (
        "Gather the next unit early: FullyShardedDataParallel(forward_prefetch=True, "
        "backward_prefetch=BackwardPrefetch.BACKWARD_PRE); if gathers still start late, limit_all_gathers=False takes "
        "off the cap on those in flight, for memory."
    ),
    (FSDP1, _REDUCE): (
        "Reduce fewer bytes, MixedPrecision(reduce_dtype=torch.bfloat16), or less often: accumulate gradients under "
        "no_sync(), for memory; or give each rank more tokens per step."
    ),
    (FSDP2, _GATHER): (
        "Gather further ahead: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch with the next two "
        "modules; or keep weights from forward to backward with fully_shard(reshard_after_forward=False), for memory."
    ),
    (FSDP2, _REDUCE): (
        "Let gathers pass reductions with set_separate_reduce_scatter_group, keep more reductions in flight with "
        "set_reduce_scatter_max_input_buffers(2), or reduce fewer bytes: MixedPrecisionPolicy(reduce_dtype="
        "torch.bfloat16)."
    ),
    (DDP, "all_reduce"): (
        "All-reduce less often or less: accumulate gradients under no_sync(), or register_comm_hook(None, "
        "default_hooks.bf16_compress_hook) to halve fp32 gradients; try another bucket_cap_mb so that the last bucket "
        "is small."
    ),
    (YAFSDP, _GATHER): (
        "YaFSDP gathers the next unit early as it is: send fewer bytes with MixedPrecisionPolicy(param_dtype="
        "torch.bfloat16), keep weights with fully_shard(reshard_after_forward=False), for memory, or give each rank "
        "more tokens per step."
    ),
    (YAFSDP, _REDUCE): (
        "YaFSDP reduces behind the next layer's backward as it is: send fewer bytes with "
        "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), or give each rank more tokens per step."
    ),
}
_ALL_TO_ALL = "Split the batch in two, so that the all-to-all of one half runs beside the compute of the other."
_START_EARLIER = (
    "Start the {op} collectives in the evidence earlier (async_op=True, and wait() only where the result is used), or "
    "give each rank more compute per byte."
)
_START_ANY_EARLIER = _START_EARLIER.replace("{op} ", "")
_MIN_HIDDEN_RATIO = 0.05  # of communication hidden: less than this is none


def fix_for(*, strategy: str | None, op: str | None, gloo: bool, hidden_ratio: float) -> str:
    """Return what to change where collectives of kind `op` are most of the exposed time.

    `hidden_ratio` is the share of communication that compute hides now.
    """
    if gloo and strategy in _GLOO_FIXES and op in (_GATHER, _REDUCE) and hidden_ratio < _MIN_HIDDEN_RATIO:
        return _GLOO_FIXES[strategy]
    if (strategy, op) in _FIXES:
        return _FIXES[strategy or "", op or ""]
    return (
        _ALL_TO_ALL
        if op == "all_to_all"
        else _START_EARLIER.format(op=op.replace("_", "-"))
        if op
        else _START_ANY_EARLIER
    )
