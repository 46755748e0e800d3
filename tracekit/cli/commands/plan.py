"""``tracekit plan``: estimates before a training runs."""

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekit.cli import run_loading
from tracekit.cli.options import DocumentOptions, UseCache, expand_options
from tracekit.errors import ConfigError
from tracekit.model import units

if TYPE_CHECKING:
    from tracekit.analysis.checkpoint.saves import PlanningInputs
    from tracekit.plan.checkpoint import Layout
    from tracekit.plan.models import Model
    from tracekit.report.document import Section

plan = typer.Typer(help="Estimate checkpoints, memory and pipelines before a training runs.", no_args_is_help=True)
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_EXAMPLES = {
    "--params or --model": "--model 405b",
    "--write-bandwidth": "--write-bandwidth 273e9",
    "--interval": "--interval 4h",
}
_ZERO_OF_STRATEGY = {"ddp": 0, "zero1": 1}

ModelName = Annotated[str | None, typer.Option(metavar="NAME", help="A model by name, such as llama3-70b or 405b.")]
Tp = Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks.")]
Sequence = Annotated[int | None, typer.Option(metavar="N", min=1, help="Tokens per sequence.")]
Batch = Annotated[int, typer.Option(metavar="N", help="Sequences per micro-batch.")]


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """The size of the model, as a number or by its name."""

    params: Annotated[float | None, typer.Option(metavar="N", help="Parameters of the model, such as 1.008e12.")] = None
    model: ModelName = None

    def parameters(self) -> float | None:
        """Return the number of parameters; None if no option states it."""
        model = None if self.params is not None else _model(self.model)
        return self.params if model is None else float(model.parameters)


@dataclass(frozen=True, kw_only=True)
class LayoutOptions:
    """How the training is distributed; a recorded run has the values that no option states."""

    tp: Tp = 1
    pp: Annotated[int, typer.Option(metavar="N", help="Pipeline stages.")] = 1
    dp: Annotated[int | None, typer.Option(metavar="N", help="Data-parallel ranks.  [default: 1]")] = None
    zero: Annotated[int | None, typer.Option(metavar="N", help="ZeRO stage; 3 for FSDP.  [default: 0]")] = None
    gpus_per_node: Annotated[int, typer.Option(metavar="N", help="GPUs per node.")] = 8

    def layout(self, recorded: "PlanningInputs | None") -> "Layout":
        """Return the layout; its default is one data-parallel rank without ZeRO."""
        from tracekit.plan.checkpoint import Layout

        dp = _first_known(self.dp, recorded and recorded.world_size, 1)
        zero = _first_known(self.zero, recorded and _ZERO_OF_STRATEGY.get(recorded.strategy, 3), 0)
        return Layout(self.tp, self.pp, dp, zero, self.gpus_per_node)


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """The bandwidths of the storage that checkpoints are written to, in bytes/s."""

    write_bandwidth: Annotated[
        float | None, typer.Option(metavar="B", help="Write bandwidth of storage in bytes/s, such as 273e9.")
    ] = None
    read_bandwidth: Annotated[float | None, typer.Option(metavar="B", help="Read bandwidth of storage in bytes/s.")] = (
        None
    )
    node_write_limit: Annotated[
        float | None, typer.Option(metavar="B", help="Maximum write bandwidth of one node, in bytes/s.")
    ] = None
    burst_buffer: Annotated[
        float | None,
        typer.Option(
            metavar="B", help="Bandwidth in bytes/s of a faster tier: saves block for it, and it drains to storage."
        ),
    ] = None


@plan.callback()
def _plans() -> None:
    """Estimate checkpoints, memory and pipelines before a training runs."""


@plan.command(short_help="Size, bandwidth, overhead and best interval of checkpoints.")
@expand_options
def checkpoint(
    *,
    size: SizeOptions,
    bytes_per_param: Annotated[
        float | None, typer.Option(metavar="N", help="Bytes saved per parameter.  [default: 14, mixed-precision Adam]")
    ] = None,
    layout: LayoutOptions,
    storage: StorageOptions,
    interval: Annotated[
        str | None, typer.Option(metavar="TIME", help="Time between checkpoints: 4h, 30m, 900s.")
    ] = None,
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures of the job: 3.093h.")
    ] = None,
    node_mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Instead: mean time between failures of one node.")
    ] = None,
    measured: Annotated[
        str | None, typer.Option(metavar="RUN", help="Take missing values from the saves of a recorded run.")
    ] = None,
    cache: UseCache = True,
    table: DocumentOptions,
) -> None:
    """Estimate the size of a checkpoint, the cost to write and restore it, and the best interval.

    Restore time needs --read-bandwidth, the best interval needs --mtbf, goodput needs both; otherwise they are null.
    """
    from tracekit.analysis.checkpoint.saves import planning_inputs
    from tracekit.plan import checkpoint as planned
    from tracekit.report import checkpoint_plan

    recorded = None if measured is None else planning_inputs(run_loading.open_run(measured, cache=cache))
    constants = {} if recorded is None else dataclasses.asdict(recorded)
    params = _require("--params or --model", size.parameters(), constants.get("params"))
    ranks = layout.layout(recorded)
    stored = planned.Storage(
        _require("--write-bandwidth", storage.write_bandwidth, constants.get("write_bytes_per_second")),
        storage.read_bandwidth,
        storage.node_write_limit,
        storage.burst_buffer,
    )
    interval_s = _require("--interval", _seconds("--interval", interval), constants.get("interval_seconds"))
    mtbf_s = _job_mtbf_s(mtbf, node_mtbf, planned.node_count(ranks))
    per_param = _first_known(bytes_per_param, constants.get("bytes_per_param"), planned.ADAM_BYTES_PER_PARAM)
    result = planned.checkpoint(params, ranks, stored, interval_s=interval_s, mtbf_s=mtbf_s, bytes_per_param=per_param)
    scales: tuple[planned.Scale, ...] = ()
    if mtbf_s is not None:
        sizes = planned.over_nodes(
            params, ranks, stored, interval_s=interval_s, mtbf_s=mtbf_s, bytes_per_param=per_param
        )
        scales = tuple(sizes)
    values = dataclasses.asdict(result) | {"mtbf_seconds": mtbf_s}
    by_nodes = [
        {"nodes": scale.nodes, "mtbf_seconds": scale.mtbf_seconds}
        | {name: getattr(scale.plan, name) for name in ("goodput_ratio", "best_interval_seconds", "best_goodput_ratio")}
        for scale in scales
    ]
    _emit(
        values, table, measured=constants or None, headline=checkpoint_plan.advice(result, interval_s, mtbf_s),
        more={"by_nodes": by_nodes}, parts=(checkpoint_plan.scales(scales),) if scales else (),
    )  # fmt: skip


def _job_mtbf_s(job: str | None, node: str | None, nodes: int) -> float | None:
    """Mean time between failures of a job, in s: as stated, or that of one node over their number."""
    if job is not None and node is not None:
        raise ConfigError("--mtbf is of the job and --node-mtbf of one node: give one of them")
    node_s = _seconds("--node-mtbf", node)
    return _seconds("--mtbf", job) if node_s is None else node_s / nodes


@plan.command(short_help="Weights, gradients, optimizer state and activations of one rank.")
@expand_options
def memory(
    *,
    size: SizeOptions,
    tp: Tp = 1,
    pp: Annotated[int, typer.Option(metavar="N", help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(metavar="N", help="Ranks that shard the state.")] = 1,
    zero: Annotated[int, typer.Option(metavar="N", help="ZeRO stage; 0 for DDP, 3 for FSDP.")] = 0,
    yafsdp: Annotated[bool, typer.Option("--yafsdp", help="YaFSDP instead of a ZeRO stage.")] = False,
    largest_layer: Annotated[
        float | None, typer.Option(metavar="N", help="Parameters of the largest layer, for YaFSDP's buffers.")
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help="Optimizer, and shards of weights and gradients, in host memory.")
    ] = False,
    sequence: Sequence = None,
    batch: Batch = 1,
    micro_batches: Annotated[
        int, typer.Option(metavar="N", help="Micro-batches per step; a pipeline has several in flight.")
    ] = 1,
    recomputation: Annotated[
        str, typer.Option(metavar="NAME", help="Activation recomputation: none, selective or full.")
    ] = "none",
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Sequence parallelism in addition to --tp.")
    ] = False,
    table: DocumentOptions,
) -> None:
    """Estimate memory of weights, gradients, mixed-precision Adam and activations per rank, and its communication.

    Activations need --model and --sequence; the estimate assumes flash attention and 2-byte activations.
    """
    from tracekit.plan import memory as planned
    from tracekit.plan.checkpoint import Layout

    work = planned.Workload(sequence, batch, micro_batches, recomputation, sequence_parallel) if sequence else None
    result = planned.plan(
        _require("--params or --model", size.parameters()),
        Layout(tp, pp, dp, zero),
        model=_model(size.model),
        work=work,
        micro_batches=micro_batches,
        with_yafsdp=yafsdp,
        largest_layer=largest_layer,
        offload=offload,
    )
    _emit(dataclasses.asdict(result), table)


@plan.command(short_help="Layouts over GPUs that fit, the fastest first.")
@expand_options
def layout(
    *,
    model: Annotated[str, typer.Option(metavar="NAME", help="A model by name, or a Hugging Face config.json.")],
    gpus: Annotated[int, typer.Option(metavar="N", min=1, help="GPUs in all.")],
    gpus_per_node: Annotated[int, typer.Option(metavar="N", min=1, help="GPUs per node.")] = 8,
    device: Annotated[str, typer.Option(metavar="NAME", help="a100-80, h100-80 or v100-32.")] = "a100-80",
    sequence: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens per sequence.  [default: the model's]")
    ] = None,
    batch: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Sequences per step.  [default: the model's]")
    ] = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Layouts to show.")] = 10,
    table: DocumentOptions,
) -> None:
    """Compare layouts over pipeline, data, tensor, context and expert parallelism by predicted MFU.

    Each is the best of its micro-batches, interleaved schedules and ways of recomputation that fit into memory.
    """
    from tracekit.plan import hardware, layouts
    from tracekit.report import layouts as layout_report

    job = layouts.Job.of(
        _found(model), hardware.find(device), gpus=gpus, gpus_per_node=gpus_per_node, sequence=sequence, batch=batch
    )
    table.write_document(layout_report.document(job, layouts.plan(job, count=count)))


@plan.command(short_help="Bubble and communication of a pipeline.")
@expand_options
def pipeline(
    *,
    stages: Annotated[int, typer.Option(metavar="N", help="Pipeline stages.")],
    micro_batches: Annotated[int, typer.Option(metavar="N", help="Micro-batches per step.")],
    chunks: Annotated[int, typer.Option(metavar="N", help="Model chunks per rank; above 1 is interleaved.")] = 1,
    schedule: Annotated[str, typer.Option(metavar="NAME", help="1f1b, interleaved, zb-h1 or zb-h2.")] = "1f1b",
    model: ModelName = None,
    width: Annotated[int | None, typer.Option(metavar="N", help="Hidden size, if --model is not given.")] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Number of layers, if --model is not given.")] = None,
    sequence: Sequence = None,
    batch: Batch = 1,
    tp: Tp = 1,
    scatter_gather: Annotated[
        bool, typer.Option("--scatter-gather", help="Each tensor-parallel rank sends only its shard.")
    ] = False,
    table: DocumentOptions,
) -> None:
    """Estimate the bubble of a pipeline, relative to its ideal time and as a share of the step.

    Communication needs --sequence, and either --model or --width and --layers.
    """
    from tracekit.plan import pipeline as planned

    spec = _model(model)
    across = width or (spec.width if spec else None)
    sizes = None
    if sequence and across:
        sizes = planned.Sizes(batch, sequence, across, layers or (spec.layers if spec else None), tp, scatter_gather)
    result = planned.plan(stages, micro_batches, chunks=chunks, schedule=schedule, sizes=sizes)
    _emit(dataclasses.asdict(result), table)


def _model(name: str | None) -> "Model | None":
    return None if name is None else _found(name)


def _found(name: str) -> "Model":
    """Return the model of this name, or that a path to a config.json describes."""
    from tracekit.plan import models

    path = Path(name)
    is_path = name.endswith(".json") or (name not in models.NAMES and path.is_dir())
    return models.read(path) if is_path else models.find(name)


def _first_known(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _require(option: str, *values: float | None) -> float:
    stated: float | None = _first_known(*values)
    if stated is None:
        recorded = "; or take it from a recorded run by --measured RUN" if len(values) > 1 else ""
        raise ConfigError(f"{option} is needed, such as {_EXAMPLES[option]}{recorded}")
    return stated


def _emit(
    values: Mapping[str, Any],
    table: DocumentOptions,
    *,
    measured: Mapping[str, Any] | None = None,
    headline: str = "",
    more: Mapping[str, Any] | None = None,
    parts: "Section" = (),
) -> None:
    """Write the values as lines after a headline, and parts after them; for programs with `more`."""
    from tracekit.report.document import Definitions, Document, line

    rows = list(values.items()) + [(f"measured {name}", value) for name, value in (measured or {}).items()]
    lines = tuple((line(name), line(_value_text(name, value))) for name, value in rows)
    document = {**values, **(more or {})} | ({} if measured is None else {"measured": measured})
    first: tuple[Section, ...] = ([line(headline)],) if headline else ()
    sections = (*first, [Definitions(lines)], *([part] for part in parts))
    table.write_document(Document(sections, values=document))


def _seconds(option: str, text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([smhd]?)", text.strip())
    if not match:
        raise ConfigError(f"{option}: {text!r} is not a time; write 4h, 30m or 900s")
    return float(match[1]) * _UNITS_S[match[2]]


_MISSING_OPTIONS = {
    "drain": "--burst-buffer",
    "restore_seconds": "--read-bandwidth",
    "goodput": "--read-bandwidth and --mtbf",
    "young": "--mtbf",
    "daly": "--mtbf",
    "best_goodput": "--read-bandwidth and --mtbf",
    "best_interval": "--mtbf",
    "mtbf": "--mtbf or --node-mtbf",
    "buffer": "--yafsdp",
    "activation": "--sequence, with --model",
    "stage": "--sequence, and --model or --width",
    "tensor": "--sequence, and --model or --width and --layers",
}


def _value_text(name: str, value: float | str | bool | None) -> str:
    if value is None:
        needs = (option for key, option in _MISSING_OPTIONS.items() if key in name)
        return f"unknown: needs {next(needs, 'more data in the run')}"
    if isinstance(value, bool | str):
        return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else value
    if "bytes_per_second" in name:
        return units.rate(value)
    if name.endswith(("_bytes", "_bytes_per_step", "_bytes_per_micro_batch")):
        return f"{units.rate(value).removesuffix('/s')} ({units.size(value)})"
    if name.endswith("_seconds"):
        return units.long_duration(value)
    if name in ("activation_ratio", "writer_skew_ratio"):
        return f"{value:.3g} ×"
    return f"{100 * value:.3f}%" if name.endswith("_ratio") else f"{value:.4g}"
