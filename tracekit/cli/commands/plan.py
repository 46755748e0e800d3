"""``tracekit plan``: estimates before a training runs."""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekit.cli import run_loading
from tracekit.cli.options import TableOptions, UseCache, expand_options
from tracekit.errors import ConfigError
from tracekit.model import units

if TYPE_CHECKING:
    from tracekit.analysis.checkpoint.planning_inputs import PlanningInputs
    from tracekit.plan.models import Model

plan = typer.Typer(help="Estimate checkpoints, memory and pipelines before a training runs.", no_args_is_help=True)
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_EXAMPLES = {
    "--params or --model": "--model 405b",
    "--write-bandwidth": "--write-bandwidth 273e9",
    "--interval": "--interval 4h",
}
_ZERO_OF_STRATEGY = {"ddp": 0, "zero1": 1}

Params = Annotated[float | None, typer.Option("--params", help="Parameters of the model, such as 1.008e12.")]
ModelName = Annotated[str | None, typer.Option("--model", help="A model by name, such as llama3-70b or 405b.")]
Tp = Annotated[int, typer.Option("--tp", help="Tensor-parallel ranks.")]
Pp = Annotated[int, typer.Option("--pp", help="Pipeline stages.")]
GpusPerNode = Annotated[int, typer.Option("--gpus-per-node", help="GPUs per node.")]
Sequence = Annotated[int | None, typer.Option("--sequence", min=1, help="Tokens per sequence.")]
Batch = Annotated[int, typer.Option("--batch", help="Sequences per micro-batch.")]


@plan.callback()
def _plans() -> None:
    """Estimate checkpoints, memory and pipelines before a training runs."""


@plan.command(short_help="Size, bandwidth, overhead and best interval of checkpoints.")
@expand_options
def checkpoint(
    *,
    params: Params = None,
    model: ModelName = None,
    bytes_per_param: Annotated[
        float | None, typer.Option(help="Bytes saved per parameter.  [default: 14, mixed-precision Adam]")
    ] = None,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Annotated[int | None, typer.Option(help="Data-parallel ranks.  [default: 1]")] = None,
    zero: Annotated[int | None, typer.Option(help="ZeRO stage; 3 for FSDP.  [default: 0]")] = None,
    gpus_per_node: GpusPerNode = 8,
    write_bandwidth: Annotated[
        float | None, typer.Option(help="Write bandwidth of storage in bytes/s, such as 273e9.")
    ] = None,
    read_bandwidth: Annotated[float | None, typer.Option(help="Read bandwidth of storage in bytes/s.")] = None,
    node_write_limit: Annotated[
        float | None, typer.Option(help="Maximum write bandwidth of one node, in bytes/s.")
    ] = None,
    burst_buffer: Annotated[
        float | None,
        typer.Option(help="Bandwidth in bytes/s of a faster tier: saves block for it, and it drains to storage."),
    ] = None,
    interval: Annotated[str | None, typer.Option(help="Time between checkpoints: 4h, 30m, 900s.")] = None,
    mtbf: Annotated[str | None, typer.Option(help="Mean time between failures: 3.093h.")] = None,
    measured: Annotated[
        str | None, typer.Option(metavar="RUN", help="Take missing values from the saves of a recorded run.")
    ] = None,
    cache: UseCache = True,
    table: TableOptions,
) -> None:
    """Estimate the size of a checkpoint, the cost to write and restore it, and the best interval.

    Restore time needs --read-bandwidth, the best interval needs --mtbf, goodput needs both; otherwise they are null.
    """
    from tracekit.plan import checkpoint as planned

    recorded = _measured(measured, cache=cache)
    constants = {} if recorded is None else dataclasses.asdict(recorded)
    given_params = None if params is None and model is None else _parameters(params, model)
    result = planned.checkpoint(
        _required("--params or --model", given_params, constants.get("params")),
        planned.Layout(
            tp,
            pp,
            _first_known(dp, constants.get("world_size"), 1),
            _first_known(zero, recorded and _ZERO_OF_STRATEGY.get(recorded.strategy, 3), 0),
            gpus_per_node,
        ),
        planned.Storage(
            _required("--write-bandwidth", write_bandwidth, constants.get("write_bytes_per_second")),
            read_bandwidth,
            node_write_limit,
            burst_buffer,
        ),
        interval_s=_required(
            "--interval",
            None if interval is None else _seconds("--interval", interval),
            constants.get("interval_seconds"),
        ),
        mtbf_s=None if mtbf is None else _seconds("--mtbf", mtbf),
        bytes_per_param=_first_known(bytes_per_param, constants.get("bytes_per_param"), planned.ADAM_BYTES_PER_PARAM),
    )
    _emit(dataclasses.asdict(result), table, measured=constants or None)


@plan.command(short_help="Weights, gradients, optimizer state and activations of one rank.")
@expand_options
def memory(
    *,
    params: Params = None,
    model: ModelName = None,
    tp: Tp = 1,
    pp: Pp = 1,
    dp: Annotated[int, typer.Option(help="Ranks that shard the state.")] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO stage; 0 for DDP, 3 for FSDP.")] = 0,
    yafsdp: Annotated[bool, typer.Option("--yafsdp", help="YaFSDP instead of a ZeRO stage.")] = False,
    largest_layer: Annotated[
        float | None, typer.Option(help="Parameters of the largest layer, for YaFSDP's buffers.")
    ] = None,
    sequence: Sequence = None,
    batch: Batch = 1,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step; a pipeline has several in flight.")] = 1,
    recomputation: Annotated[str, typer.Option(help="Activation recomputation: none, selective or full.")] = "none",
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Sequence parallelism in addition to --tp.")
    ] = False,
    table: TableOptions,
) -> None:
    """Estimate memory of weights, gradients, mixed-precision Adam and activations per rank, and its communication.

    Activations need --model and --sequence; the estimate assumes flash attention and 2-byte activations.
    """
    from tracekit.plan import memory as planned
    from tracekit.plan.checkpoint import Layout

    of = _model(model)
    work = planned.Workload(sequence, batch, micro_batches, recomputation, sequence_parallel) if sequence else None
    result = planned.plan(
        _required("--params or --model", _parameters(params, model)),
        Layout(tp, pp, dp, zero),
        model=of,
        work=work,
        with_yafsdp=yafsdp,
        largest_layer=largest_layer,
    )
    _emit(dataclasses.asdict(result), table)


@plan.command(short_help="Bubble and communication of a pipeline.")
@expand_options
def pipeline(
    *,
    stages: Annotated[int, typer.Option(help="Pipeline stages.")],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches per step.")],
    chunks: Annotated[int, typer.Option(help="Model chunks per rank; above 1 is interleaved.")] = 1,
    schedule: Annotated[str, typer.Option(help="1f1b, interleaved, zb-h1 or zb-h2.")] = "1f1b",
    model: ModelName = None,
    width: Annotated[int | None, typer.Option(help="Hidden size, if --model is not given.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers, if --model is not given.")] = None,
    sequence: Sequence = None,
    batch: Batch = 1,
    tp: Tp = 1,
    scatter_gather: Annotated[
        bool, typer.Option("--scatter-gather", help="Each tensor-parallel rank sends only its shard.")
    ] = False,
    table: TableOptions,
) -> None:
    """Estimate the bubble of a pipeline, relative to its ideal time and as a share of the step.

    Communication needs --sequence, and either --model or --width and --layers.
    """
    from tracekit.plan import pipeline as planned

    of = _model(model)
    across = width or (of.width if of else None)
    sizes = None
    if sequence and across:
        sizes = planned.Sizes(batch, sequence, across, layers or (of.layers if of else None), tp, scatter_gather)
    result = planned.plan(stages, micro_batches, chunks=chunks, schedule=schedule, sizes=sizes)
    _emit(dataclasses.asdict(result), table)


def _measured(run: str | None, *, cache: bool) -> "PlanningInputs | None":
    if run is None:
        return None
    from tracekit.analysis.checkpoint.planning_inputs import planning_inputs

    return planning_inputs(run_loading.open_run(run, cache=cache))


def _model(name: str | None) -> "Model | None":
    from tracekit.plan import models

    return None if name is None else models.find(name)


def _parameters(params: float | None, model: str | None) -> float | None:
    if params is not None:
        return params
    known = _model(model)
    return None if known is None else float(known.parameters)


def _first_known(given: Any, measured: Any, otherwise: Any) -> Any:
    return next(value for value in (given, measured, otherwise) if value is not None)


def _required(option: str, *values: float | None) -> float:
    known = next((value for value in values if value is not None), None)
    if known is None:
        recorded = "; or take it from a recorded run by --measured RUN" if len(values) > 1 else ""
        raise ConfigError(f"{option} is needed, such as {_EXAMPLES[option]}{recorded}")
    return known


def _emit(values: Mapping[str, Any], table: TableOptions, *, measured: Mapping[str, Any] | None = None) -> None:
    import json

    if table.is_json:
        document = dict(values) if measured is None else {**values, "measured": measured}
        table.emit(json.dumps(document, indent=2) + "\n")
        return
    rows = list(values.items()) + [(f"measured {name}", value) for name, value in (measured or {}).items()]
    width = max(len(name) for name, _ in rows)
    table.emit("".join(f"{name:<{width}}  {_value_text(name, value)}\n" for name, value in rows))


def _seconds(option: str, text: str) -> float:
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
        return f"{_decimal(value)} ({units.size(value)})"
    if name.endswith("_seconds"):
        return f"{value:.2f} s"
    if name in ("activation_ratio", "writer_skew_ratio"):
        return f"{value:.3g} ×"
    return f"{100 * value:.3f}%" if name.endswith("_ratio") else f"{value:.4g}"


def _decimal(size: float) -> str:
    return units.rate(size).removesuffix("/s")
