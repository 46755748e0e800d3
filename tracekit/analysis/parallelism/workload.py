"""Whether a run trains or infers, and whether it compiles and launches graphs, by its host ops and kernels."""

import polars as pl

from tracekit.analysis.time import trace_columns
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace

COLUMNS = schema.columns("host_ops training_marks compiled_kernels graph_launches")
# Autograd nodes, optimizers, dropout that drops; and kernels of gradients, since a CUDA graph leaves only kernels.
_TRAINING = (
    r"(?i)autograd::|backward|optimizer|bwd|dgrad|wgrad|adam|lamb_|multi_tensor|_foreach_|"
    r"native_dropout|bernoulli"
)


_COMPILED = (
    r"^triton_(poi|red|per|tem|mm|for|spl)_fused|^triton_(poi|red|per)_|^## Call CompiledFxGraph|^Torch-Compiled"
)
_GRAPH_LAUNCH = r"^(cuda|hip|cu)GraphLaunch"


@trace_fact
def marks(trace: Trace) -> pl.DataFrame:
    """Number of dispatcher ops on the host, and of slices and kernels that only training has.

    Columns COLUMNS: also how many slices and kernels are of torch.compile (compiled_kernels), and how many graphs were
    launched; one row.
    """
    in_phase = int(sum(trace_columns.is_phase(trace, phase).sum() for phase in ("backward", "optimizer")))
    reduced = int((trace.collectives["op"] == "reduce_scatter").sum())
    training, compiled = (_count_matches(trace, pattern) for pattern in (_TRAINING, _COMPILED))
    graphs = int(trace_columns.is_named(trace, _GRAPH_LAUNCH).sum())
    row = (int(trace_columns.is_kind(trace, "cpu_op").sum()), in_phase + training + reduced, compiled, graphs)
    return pl.DataFrame([row], schema=COLUMNS, orient="row")


def _count_matches(trace: Trace, pattern: str) -> int:
    """Number of slices and kernels whose name a pattern matches."""
    return int(trace_columns.is_named(trace, pattern).sum() + trace_columns.is_activity_named(trace, pattern).sum())


def is_compiled(run: Run) -> bool:
    """Return whether torch.compile made some of a run's kernels."""
    return bool(run.table(marks)["compiled_kernels"].sum())


def launches_graphs(run: Run) -> bool:
    """Return whether a run launches CUDA or HIP graphs."""
    return bool(run.table(marks)["graph_launches"].sum())


def is_inference(run: Run) -> bool:
    """Return whether a run infers: its host ops were recorded, and nothing in it belongs to training."""
    totals = run.table(marks).sum()
    return bool(not run.manifest and totals["host_ops"].item() and not totals["training_marks"].item())
