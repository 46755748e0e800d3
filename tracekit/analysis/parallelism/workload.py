"""Workload of a run by its host ops and kernels: training or inference, compiled, CUDA graphs, sharding strategy."""

from enum import StrEnum

import numpy as np
import polars as pl

from tracekit.analysis.time import trace_columns
from tracekit.conventions import strategies
from tracekit.model import environment, kernel_names, schema
from tracekit.model.fact import trace_fact
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import Trace


class Program(StrEnum):
    """What was recorded: PyTorch that trains or infers, or a program without PyTorch."""

    TRAINING = "training"
    INFERENCE = "inference"
    OTHER = "other"


class Vendor(StrEnum):
    """Whose devices ran the work, by the calls that launched it; NVIDIA where that is not known."""

    NVIDIA = "NVIDIA"
    AMD = "AMD"
    ASCEND = "Ascend"


COLUMNS = schema.columns(
    "host_ops training_marks compiled_kernels graph_launches torch_marks gpu_launches hip_calls cann_calls"
)
# Autograd nodes, optimizers, dropout that drops; and kernels of gradients, since a CUDA graph leaves only kernels.
_TRAINING = (
    r"(?i)autograd::|backward|optimizer|bwd|dgrad|wgrad|adam|lamb_|multi_tensor|_foreach_|"
    r"native_dropout|bernoulli"
)

_ANY_PROGRAM = (environment.RECORDS_ANY_PROGRAM, "nsight_systems_version")
"""Keys of headers of recorders of any program; other traces are PyTorch's."""
_GRAPH_LAUNCH = r"^(cuda|hip|cu)GraphLaunch"
_GPU_LAUNCH = r"^(cuda|hip|cu)([A-Z]\w*)?Launch"
"""Launches by the runtimes that have graphs; those of NPUs and other accelerators have names of their own."""
_HIP_CALL, _CANN_CALL = r"^hip[A-Z]", r"^(aclrt|aclnn|acl)[A-Z]|^hcom_|^AscendCL@"

DDP, FSDP1, FSDP2, YAFSDP = (
    strategy.name for strategy in (strategies.DDP, strategies.FSDP1, strategies.FSDP2, strategies.YAFSDP)
)
_PREFIXES = {
    strategy.name: strategy.span_prefix
    for strategy in tuple(strategies.STRATEGIES.values())[::-1]
    if strategy.span_prefix
}
STRATEGY_COLUMNS = {"strategy": pl.String, "marks": pl.Int64}


@trace_fact
def marks(trace: Trace) -> pl.DataFrame:
    """Number of dispatcher ops on the host, and of slices and kernels that only training has.

    Columns COLUMNS: also how many slices and kernels are of torch.compile (compiled_kernels) or of PyTorch at all
    (torch_marks, at least 1 unless the recorder records any program), how many graphs were launched, how many launches
    CUDA or HIP did, and how many calls are HIP's (AMD) or CANN's (Ascend); one row.
    """
    in_phase = int(sum(trace_columns.is_phase(trace, phase).sum() for phase in ("backward", "optimizer")))
    reduced = int((trace.collectives["op"] == "reduce_scatter").sum())
    training, compiled, of_torch = (  # slices and kernels
        int(trace_columns.is_named(trace, pattern).sum() + trace_columns.is_activity_named(trace, pattern).sum())
        for pattern in (_TRAINING, kernel_names.COMPILED, kernel_names.OF_PYTORCH)
    )
    is_of_pytorch = int(not any(key in trace.header for key in _ANY_PROGRAM))
    graphs = int(trace_columns.is_named(trace, _GRAPH_LAUNCH).sum())
    hip_calls, cann_calls = (int(trace_columns.is_named(trace, pattern).sum()) for pattern in (_HIP_CALL, _CANN_CALL))
    row = (
        int(trace_columns.is_kind(trace, "cpu_op").sum()),
        in_phase + training + reduced,
        compiled,
        graphs,
        of_torch + is_of_pytorch,
        int(trace_columns.is_named(trace, _GPU_LAUNCH).sum()),
        hip_calls,
        cann_calls,
    )
    return pl.DataFrame([row], schema=COLUMNS, orient="row")


def is_compiled(run: Run) -> bool:
    """Return whether torch.compile made some of a run's kernels."""
    return bool(run.table(marks)["compiled_kernels"].sum())


def launches_graphs(run: Run) -> bool:
    """Return whether a run launches CUDA or HIP graphs."""
    return bool(run.table(marks)["graph_launches"].sum())


def can_use_graphs(run: Run) -> bool:
    """Return whether a run launches kernels by CUDA or HIP, which have graphs."""
    return bool(run.table(marks)["gpu_launches"].sum())


def vendor(run: Run) -> Vendor:
    """Vendor of the devices of a run."""
    totals = run.table(marks).sum()
    if totals["hip_calls"].item():
        return Vendor.AMD
    return Vendor.ASCEND if totals["cann_calls"].item() else Vendor.NVIDIA


def is_inference(run: Run) -> bool:
    """Return whether a run infers: its host ops were recorded, and nothing in it belongs to training."""
    totals = run.table(marks).sum()
    return bool(not run.manifest and totals["host_ops"].item() and not totals["training_marks"].item())


def program(run: Run) -> Program:
    """Program that was recorded: a run with a manifest or with work that only training has trains."""
    if is_inference(run):
        return Program.INFERENCE if run.table(marks)["torch_marks"].sum() else Program.OTHER
    is_torch = bool(run.manifest) or bool(run.table(marks)["torch_marks"].sum())
    return Program.TRAINING if is_torch else Program.OTHER


@trace_fact
def strategy_marks(trace: Trace) -> pl.DataFrame:
    """Number of annotations that each wrapper left in the trace.

    Columns strategy (ddp, fsdp1, fsdp2, yafsdp), marks; one row per wrapper that left any.
    """
    names, code = trace_columns.op_names(trace)
    counts = np.bincount(code[trace_columns.is_kind(trace, "annotation")], minlength=len(names)).tolist()
    rows = [
        (strategy, sum(count for name, count in zip(names, counts, strict=True) if name.startswith(prefix)))
        for strategy, prefix in _PREFIXES.items()
    ]
    return pl.DataFrame([row for row in rows if row[1]], schema=STRATEGY_COLUMNS, orient="row")


def run_strategy(run: Run) -> str | None:
    """Return the strategy in the manifest, else the one whose wrapper left most annotations; None where neither."""
    stated = Manifest.of(run.manifest).strategy
    if stated in _PREFIXES:
        return str(stated)
    totals = run.table(strategy_marks).group_by("strategy").agg(pl.col("marks").sum())
    ranking = totals.sort("marks", "strategy", descending=[True, False])
    return None if ranking.is_empty() else str(ranking["strategy"][0])
