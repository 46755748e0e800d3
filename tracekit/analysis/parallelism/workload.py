"""Whether a run trains or infers, and whether it compiles and launches graphs, by its host ops and kernels."""

import polars as pl

from tracekit.model import schema
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


def marks(trace: Trace) -> pl.DataFrame:
    """Return how many dispatcher ops the host ran, and how many slices and kernels only training has.

    Columns COLUMNS: also how many slices and kernels are of torch.compile (compiled_kernels), and how many graphs were
    launched; one row.
    """
    ops, work = trace.ops, trace.activities
    names = pl.concat([ops.get_column("name"), work.get_column("name")]).unique()
    trains = names.filter(names.str.contains(_TRAINING)).implode()
    in_phase = int(ops["phase"].is_in(["backward", "optimizer"]).sum())
    named = sum(int(table["name"].is_in(trains).sum()) for table in (ops, work))
    reduced = int((trace.collectives["op"] == "reduce_scatter").sum())
    compiled = sum(int(table["name"].str.contains(_COMPILED).sum()) for table in (ops, work))
    graphs = int(ops["name"].str.contains(_GRAPH_LAUNCH).sum())
    row = (int((ops["kind"] == "cpu_op").sum()), in_phase + named + reduced, compiled, graphs)
    return pl.DataFrame([row], schema=COLUMNS, orient="row")


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
