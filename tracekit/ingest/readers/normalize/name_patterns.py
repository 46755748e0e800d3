"""What names of slices and kernels mean. Each distinct name is classified once."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions

Flags = npt.NDArray[np.bool_]

_STEP = r"^ProfilerStep#([0-9]{1,15})$"
_COLLECTIVE_WORDS = (
    "all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|send|recv|reduce|gather|scatter|barrier"
)
_COLLECTIVE_SPAN = rf"(?i)^([a-z]\w*):_?(?:{_COLLECTIVE_WORDS})\w*$"
MPI = "MPI_"
# Calls that block until the communication is done on this rank; MPI_Isend and the like only start it.
_MPI_CALL = (
    rf"^{MPI}(?:[BSR]?[Ss]end|M?[Rr]ecv|Sendrecv(?:_replace)?|Barrier|Bcast|(?:All)?[Gg]atherv?|Scatterv?|Alltoall[vw]?|"
    r"(?:All)?[Rr]educe(?:_scatter(?:_block)?)?|(?:Ex)?[Ss]can|Wait(?:all|any|some)?)$"
)
_COMMUNICATION_OP = (
    r"(?i)^(?:c10d|_c10d_functional|symm_mem)::|^record_param_comms|"
    r"^\w+::\w*(?:all_?(?:reduce|gather|to_?all)|reduce_?scatter|(?:latency|moe|ep)_(?:dispatch|combine))"
)
_DISPATCHER_OP = r"^\w+::"
# FSDP unit spans, which FSDP1, FSDP2 and YaFSDP write around the work of one unit. FSDP2 and YaFSDP:
# ``FSDP::all_gather (layers.0)``, ``FSDP::pre_forward (layers.0)``; prefetch: ``FSDP::backward_prefetch for layers.1``;
# the root unit has no name. FSDP1: ``FullyShardedDataParallel.forward``, without a unit.
_FSDP_SPAN = r"^(?:FSDP|YaFSDP)::(\w+)"
_FSDP_UNIT = r"^(?:FSDP|YaFSDP)::\w+ (?:\((.*)\)|for (.*))$"
_FSDP1 = "FullyShardedDataParallel."
_NOT_COMPUTE = r"^(autograd|torch|c10d|_c10d_functional|gloo|mpi|ucc)::"
COMPILER = (
    r"\(dynamo_timed\)|^(entire_frame_compile|_compile\.|compile_attempt_\d|create_aot_dispatcher_function)|"
    r"(?i)\bcompile_fx\w*(\.<locals>|\s|$)|\bcompile_inner\b|\bbackend_compile\b|_compile_to_module|async_compile|"
    r"\buser_compiler\b|torch[/._]+_dynamo[/._]+convert_frame|"
    r"torch/_inductor/compile_fx\.py\(\d+\): \w*(compile|codegen)|"
    r"TorchDynamo Cache Lookup Miss|triton/runtime/jit\.py\(\d+\): _do_compile|"
    r"triton_heuristics\.py\(\d+\): _?precompile|"
    r"triton/compiler/\w+\.py\(\d+\): (compile|make_\w+|ast_to_ttir)$|^triton[._ ](jit[._ ])?compile|"
    r"torch/utils/cpp_extension\.py\(\d+\): (load|_jit_compile)|\bnvrtc|hiprtc|^cuLink"
)
"""Slices of a compiler: of torch.compile (`dynamo_timed` in torch/_dynamo/utils.py, Python functions of its stages in
traces with stacks), of Triton, C++ extensions and the driver's run-time compilers."""


@dataclass(frozen=True)
class HostNames:
    """For each distinct name of a host slice: the step it marks, its FSDP span and unit, and what kind of slice it is.

    `step`, `span`, `unit` and `phase` are null where the name has none.
    """

    name: pl.Series
    step: pl.Series
    span: pl.Series
    unit: pl.Series
    phase: pl.Series
    backward: Flags
    optimizer: Flags
    issues_collective: Flags
    """c10d ops: they issue a collective."""
    is_collective_op: Flags
    """c10d ops, functional ones included, and MPI's calls: time inside them is not compute."""
    is_communication_op: Flags
    """Ops that communicate, of any library: a kernel that one launched communicates if its name hints at it."""
    runs_collective: Flags
    """Slices that run a collective on the host, such as gloo:all_reduce or MPI_Allreduce."""
    is_compute_op: Flags
    """Dispatcher ops that compute."""
    is_compiler: Flags
    """Slices of a compiler, which traces the program with operators that compute nothing for it."""
    is_module: Flags
    """Calls of modules."""


def host_names(names: pl.Series) -> HostNames:
    """Classify the distinct names of host slices."""
    name = pl.col("name")
    backend = name.str.extract(_COLLECTIVE_SPAN).str.to_lowercase()
    is_mpi = name.str.contains(_MPI_CALL)
    fsdp1 = pl.when(name.str.starts_with(_FSDP1)).then(name.str.strip_prefix(_FSDP1))
    root = pl.when(name.str.contains(_FSDP_SPAN)).then(pl.lit(""))
    table = pl.DataFrame({"name": names}).select(
        "name",
        name.str.extract(_STEP).cast(pl.Int64, strict=False).alias("step"),
        pl.coalesce(name.str.extract(_FSDP_SPAN), fsdp1).alias("span"),
        pl.coalesce(name.str.extract(_FSDP_UNIT, 1), name.str.extract(_FSDP_UNIT, 2), root).alias("unit"),
        name.str.extract(rf"^{conventions.SPAN_PREFIX}({'|'.join(conventions.PHASES)})$").alias("phase"),
        name.str.starts_with("autograd::engine::").alias("backward"),
        name.str.starts_with("Optimizer.step#").alias("optimizer"),
        (name.str.starts_with("c10d::") & ~name.str.contains("barrier|monitored")).alias("issues_collective"),
        (name.str.contains(r"^(c10d|_c10d_functional)::") | is_mpi).alias("is_collective_op"),
        name.str.contains(_COMMUNICATION_OP).alias("is_communication_op"),
        (backend.is_not_null() & ~backend.is_in(["nccl", "rccl"]) | is_mpi).alias("runs_collective"),
        (name.str.contains(_DISPATCHER_OP) & ~name.str.contains(_NOT_COMPUTE)).alias("is_compute_op"),
        name.str.contains(COMPILER).alias("is_compiler"),
        name.str.starts_with(conventions.MODULE_PREFIX).alias("is_module"),
    )
    return HostNames(
        **{key: table[key] for key in ("name", "step", "span", "unit", "phase")},  # type: ignore[arg-type]
        **{key: table[key].to_numpy() for key in _FLAGS},  # type: ignore[arg-type]
    )


_FLAGS = (
    "backward",
    "optimizer",
    "issues_collective",
    "is_collective_op",
    "is_communication_op",
    "runs_collective",
    "is_compute_op",
    "is_compiler",
    "is_module",
)
