"""``tracekit plan``: sizing, before anything runs."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from tracekit import units
from tracekit.cli import output
from tracekit.cli.output import Format, Output, TextOrJson
from tracekit.errors import ConfigError

plan = typer.Typer(help="Size checkpoints, memory and pipelines before anything runs.", no_args_is_help=True)
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


@plan.callback()
def _plans() -> None:
    """Size checkpoints, memory and pipelines before anything runs."""


@plan.command(short_help="Size, bandwidth, overhead and best interval of checkpoints.")
def checkpoint(
    *,
    params: Annotated[float, typer.Option("--params", help="Parameters of the model, such as 1.008e12.")],
    bytes_per_param: Annotated[float, typer.Option(help="Saved per parameter; 14 is mixed-precision Adam.")] = 14.0,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    dp: Annotated[int, typer.Option(help="Data-parallel ranks.")] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO stage; 3 for FSDP.")] = 0,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of a node.")] = 8,
    write_bandwidth: Annotated[float, typer.Option(help="Of storage, bytes/s, such as 273e9.")],
    read_bandwidth: Annotated[float | None, typer.Option(help="Of storage, bytes/s.")] = None,
    node_write_limit: Annotated[float | None, typer.Option(help="Most that one node writes, bytes/s.")] = None,
    interval: Annotated[str, typer.Option(help="Time between checkpoints: 4h, 30m, 900s.")],
    mtbf: Annotated[str | None, typer.Option(help="Mean time between failures: 3.093h.")] = None,
    table_format: TextOrJson = Format.TEXT,
    out: Output = None,
) -> None:
    """Say how large a checkpoint is, what writing and restoring it cost, and how often to write one.

    Restore time needs --read-bandwidth, the best interval --mtbf, goodput both; without them they are null.
    """
    import dataclasses

    from tracekit.plan import checkpoint as planned

    result = planned.checkpoint(
        params,
        planned.Layout(tp, pp, dp, zero, gpus_per_node),
        planned.Storage(write_bandwidth, read_bandwidth, node_write_limit),
        interval_s=_seconds("--interval", interval),
        mtbf_s=None if mtbf is None else _seconds("--mtbf", mtbf),
        bytes_per_param=bytes_per_param,
    )
    _emit(dataclasses.asdict(result), table_format, out)


@plan.command(short_help="Weights, gradients and optimizer of one rank.")
def memory(
    *,
    params: Annotated[float, typer.Option("--params", help="Parameters of the model.")],
    dp: Annotated[int, typer.Option(help="Ranks that share the state.")] = 1,
    zero: Annotated[int, typer.Option(help="ZeRO stage; 0 for DDP, 3 for FSDP.")] = 0,
    table_format: TextOrJson = Format.TEXT,
    out: Output = None,
) -> None:
    """Say what weights, gradients and mixed-precision Adam take on each rank, without activations and buffers."""
    import dataclasses

    from tracekit.plan import memory as planned

    _emit(dataclasses.asdict(planned.state(params, ranks=dp, zero=zero)), table_format, out)


@plan.command(short_help="Idle time of a pipeline.")
def pipeline(
    *,
    stages: Annotated[int, typer.Option(help="Pipeline stages.")],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")],
    chunks: Annotated[int, typer.Option(help="Model chunks per rank; above 1 is interleaved.")] = 1,
    table_format: TextOrJson = Format.TEXT,
    out: Output = None,
) -> None:
    """Say how long a pipeline stands idle, relative to its ideal time and as a share of the whole."""
    import dataclasses

    from tracekit.plan import pipeline as planned

    _emit(dataclasses.asdict(planned.bubble(stages, micro_batches, chunks=chunks)), table_format, out)


def _emit(values: Mapping[str, float | None], table_format: Format, out: Path | None) -> None:
    import json

    if table_format is Format.JSON:
        output.emit(json.dumps(values, indent=2) + "\n", out)
    else:
        output.emit("".join(f"{name:<32}  {_told(name, value)}\n" for name, value in values.items()), out)


def _seconds(option: str, text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*([smhd]?)", text.strip())
    if not found:
        raise ConfigError(f"{option}: {text!r} is not a time: write 4h, 30m or 900s")
    return float(found[1]) * _UNITS_S[found[2]]


def _told(name: str, value: float | None) -> str:
    if value is None:
        return "not known: needs --read-bandwidth, --mtbf, or both"
    if "bytes_per_second" in name:
        return units.rate(value)
    if name.endswith("_bytes"):
        return f"{value / 1e12:.4g} TB ({units.size(value)})"
    if name.endswith("_seconds"):
        return f"{value:.2f} s"
    return f"{100 * value:.3f}%" if name.endswith("_ratio") else f"{value:.4g}"
