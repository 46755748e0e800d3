"""Whether a run trains or infers, by its host ops and kernels."""

import polars as pl

from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.trace import Trace

COLUMNS = schema.columns("host_ops training_marks", host_ops=pl.Int64, training_marks=pl.Int64)
# Autograd nodes, optimizers, dropout that drops; and kernels of gradients, since a CUDA graph leaves only kernels.
_TRAINING = (
    r"(?i)autograd::|backward|optimizer|bwd|dgrad|wgrad|adam|lamb_|multi_tensor|_foreach_|"
    r"grad_?accum|native_dropout|bernoulli"
)


def marks(trace: Trace) -> pl.DataFrame:
    """Return how many dispatcher ops the host ran, and how many slices and kernels only training has.

    Columns COLUMNS; one row.
    """
    ops, work = trace.ops, trace.activities
    names = pl.concat([ops.get_column("name"), work.get_column("name")]).unique()
    trains = names.filter(names.str.contains(_TRAINING)).implode()
    in_phase = int(ops["phase"].is_in(["backward", "optimizer"]).sum())
    named = sum(int(table["name"].is_in(trains).sum()) for table in (ops, work))
    reduced = int((trace.collectives["op"] == "reduce_scatter").sum())
    row = (int((ops["kind"] == "cpu_op").sum()), in_phase + named + reduced)
    return pl.DataFrame([row], schema=COLUMNS, orient="row")


def is_inference(run: Run) -> bool:
    """Return whether a run infers: its host ops were recorded, and nothing in it belongs to training."""
    totals = run.table(marks).sum()
    return bool(not run.manifest and totals["host_ops"].item() and not totals["training_marks"].item())
