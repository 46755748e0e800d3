"""Changes of communication: when weights are gathered and resharded, and how gradients are bundled."""

from collections.abc import Mapping, Sequence
from typing import Any

from tracekit.conventions import strategies
from tracekit.replay.graph import strategies as replayed
from tracekit.replay.graph.causes.collectives import COMMUNICATION, LATE_GATHERS, SMALL_COLLECTIVES
from tracekit.replay.graph.strategies import Prediction
from tracekit.tune.changes.change import ON, CallKeyword, Change, Risk, TunedRun, unknown_memory

_FSDP2, _YAFSDP = "fsdp2", "yafsdp"
_DEEPEST_PREFETCH = 2
"""Layers ahead: a third one occupies memory, and transfers are hidden by then or bound by bandwidth."""


def _shards_weights(run: TunedRun) -> bool:
    """Whether ranks have shards of the weights, as far as the recording shows its strategy."""
    strategy: Any = strategies.STRATEGIES.get(run.strategy or "")
    return strategy is not None and strategy.shards_parameters


def _prefetch_depths(run: TunedRun) -> Sequence[str]:
    if run.strategy != _FSDP2 or run.options.get("keep_gathered") is True:
        return ()
    current = run.number("prefetch", 0)
    return tuple(str(depth) for depth in range(current + 1, _DEEPEST_PREFETCH + 1))


def _prefetched_bytes(run: TunedRun, value: str) -> int | None:
    model = run.run.manifest.get("model")
    weights, layers = run.weight_bytes(), model.get("layers") if isinstance(model, Mapping) else None
    return weights // layers * int(value) if weights and isinstance(layers, int) and layers > 0 else None


def _keep_gathered(run: TunedRun) -> Sequence[str]:
    is_resharded = run.options.get("keep_gathered") is not True and run.options.get("reshard_to") is None
    return (ON,) if _shards_weights(run) and is_resharded else ()


def _yafsdp(run: TunedRun) -> Sequence[str]:
    options = run.options
    has_other_options = any(options.get(name) is not None for name in ("prefetch", "reshard_to"))
    return (_YAFSDP,) if options and run.strategy in ("fsdp1", _FSDP2) and not has_other_options else ()


def _predicted_strategy(run: TunedRun, value: str) -> Prediction:
    return replayed.predict_strategy(run.run, value)


FSDP_PREFETCH = Change(
    name="fsdp-prefetch",
    summary="each layer starts the all-gathers of the layers that run after it",
    risk=Risk.MEMORY,
    causes=(LATE_GATHERS, COMMUNICATION),
    codes=("COMM001",),
    values=_prefetch_depths,
    option="--prefetch {value}",
    added_bytes=_prefetched_bytes,
)
KEEP_GATHERED = Change(
    name="keep-gathered",
    summary="weights stay gathered from forward to backward (reshard_after_forward=False)",
    risk=Risk.MEMORY,
    causes=(COMMUNICATION,),
    codes=("COMM001",),
    is_partial=True,  # the all-gathers of backward are one of three passes
    values=_keep_gathered,
    option="--keep-gathered",
    keyword=CallKeyword(("fully_shard",), "reshard_after_forward=False"),
    added_bytes=lambda run, _value: run.weight_bytes(),
)
BUCKET_SIZE = Change(
    name="bucket-size",
    summary="DDP reduces gradients in larger buckets (the default is 25 MiB)",
    risk=Risk.ROUNDING,
    causes=(SMALL_COLLECTIVES,),
    codes=("COMM002",),
    values=lambda run: ("100",) if run.strategy == "ddp" and not run.is_of_trainers else (),
    keyword=CallKeyword(("DistributedDataParallel", "DDP"), "bucket_cap_mb={value}"),
)
YAFSDP = Change(
    name="strategy",
    summary="shards and buffers of YaFSDP: no allocator calls and no copies around collectives",
    risk=Risk.ROUNDING,
    codes=("COMM004", "MEM001"),
    values=_yafsdp,
    option="--strategy {value}",
    predict=_predicted_strategy,
    added_bytes=unknown_memory,
)
