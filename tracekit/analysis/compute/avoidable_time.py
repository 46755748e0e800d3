"""Kernel time that a known change of the program would save, by cause: the replay removes it."""

import polars as pl

from tracekit.analysis.compute import elementwise_chains, optimizer_kernels, product_kernels, wave_quantization
from tracekit.model import schema
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace, TraceFact

COLUMNS = schema.columns("activity_id cause saved_ns")
_FACTS: tuple[TraceFact, ...] = (
    product_kernels.misaligned_kernels,
    product_kernels.without_tensor_cores,
    optimizer_kernels.unfused_kernels,
    elementwise_chains.chains,
    wave_quantization.partial_waves,
)
MISALIGNED, NO_TENSOR_CORES, UNFUSED_OPTIMIZER, UNFUSED_CHAIN, PARTIAL_WAVE = range(1, len(_FACTS) + 1)


@memoize
def avoidable(trace: Trace) -> pl.DataFrame:
    """Return the kernels that would take less time, each by its first cause.

    Columns COLUMNS: cause (MISALIGNED, NO_TENSOR_CORES, UNFUSED_OPTIMIZER, UNFUSED_CHAIN, PARTIAL_WAVE); one row per
    kernel.
    """
    parts = [
        kernels.select("activity_id", "saved_ns", cause=pl.lit(cause, pl.Int64))
        for cause, fact in enumerate(_FACTS, MISALIGNED)
        if (kernels := fact(trace)).height
    ]
    if not parts:
        return schema.empty(COLUMNS)
    kernels = pl.concat(parts).filter(pl.col("saved_ns") > 0)
    return schema.select(kernels.unique("activity_id", keep="first", maintain_order=True), COLUMNS)
