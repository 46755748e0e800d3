"""``tracekit plan``: estimates before a training runs."""

import dataclasses
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.options import DocumentOptions, RoleName, UseCache, expand_options
from tracekit.cli.plan_options import (
    Batch,
    ClusterOptions,
    LayoutOptions,
    ModelBatch,
    ModelName,
    ModelSequence,
    MoneyOptions,
    OffloadOptions,
    Sequence,
    SizeOptions,
    SpeedOptions,
    StorageOptions,
    Tp,
    find_model,
    first_known,
    optional_model,
    require,
)
from tracekit.errors import ConfigError
from tracekit.model import units

if TYPE_CHECKING:
    from tracekit.plan.layouts import LayoutPlan
    from tracekit.report.document import Section

plan = typer.Typer(help="Estimate checkpoints, memory and pipelines before a training runs.", no_args_is_help=True)
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}


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
    role: RoleName = None,
    table: DocumentOptions,
) -> None:
    """Estimate the size of a checkpoint, the cost to write and restore it, and the best interval.

    Restore time needs --read-bandwidth, the best interval needs --mtbf, goodput needs both; otherwise they are null.
    """
    from tracekit.analysis.checkpoint.saves import planning_inputs
    from tracekit.plan import checkpoint as planned
    from tracekit.report import checkpoint_plan

    recorded = None if measured is None else planning_inputs(run_loading.open_run(measured, cache=cache, role=role))
    constants = {} if recorded is None else dataclasses.asdict(recorded)
    params = require("--params or --model", size.parameters(), constants.get("params"))
    ranks = layout.layout(recorded)
    stored = storage.bandwidths(constants.get("write_bytes_per_second"))
    interval_s = require("--interval", _seconds("--interval", interval), constants.get("interval_seconds"))
    mtbf_s = _job_mtbf_s(mtbf, node_mtbf, planned.node_count(ranks))
    per_param = first_known(bytes_per_param, constants.get("bytes_per_param"), planned.ADAM_BYTES_PER_PARAM)
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


@plan.command(short_help="Measured write and read bandwidth of a path.")
@expand_options
def storage(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A folder on the storage that checkpoints go to.")],
    *,
    threads: Annotated[
        str, typer.Option(metavar="N,…", help="Numbers of threads, each with a file of its own.")
    ] = "1,2,4,8",
    load_bytes: Annotated[
        float, typer.Option("--bytes", metavar="N", help="Bytes of all files of a number of threads.")
    ] = 1 << 30,
    seconds: Annotated[float, typer.Option(metavar="S", min=0.1, help="Time for all measurements.")] = 60.0,
    table: DocumentOptions,
) -> None:
    """Measure what this node writes to and reads from a path, against threads and fsync, as sharded savers do.

    Files lie in a new folder in PATH, which is removed at the end. The JSON output is input of 'tracekit plan
    checkpoint --storage FILE'. Run it on an idle node; on storage that others use, several times.
    """
    from tracekit.plan import storage as measured
    from tracekit.report import storage_probe

    names = output.split_names(threads)
    if not names or not all(name.isascii() and name.isdigit() and len(name) < 6 for name in names):
        raise ConfigError(f"--threads {threads!r}: expected numbers, such as 1,2,4,8")
    if not 1 <= load_bytes < 1 << 50:
        raise ConfigError(f"--bytes {load_bytes:g} is not possible: from 1 to 2**50")
    counts = sorted({int(name) for name in names})
    results = measured.measure(path, measured.loads(counts, int(load_bytes)), seconds=seconds)
    table.write_document(storage_probe.document(path, results))


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
        require("--params or --model", size.parameters()),
        Layout(tp, pp, dp, zero),
        model=optional_model(size.model),
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
    cluster: ClusterOptions,
    gpus_per_node: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="GPUs per node.  [default: 8, or those of --topology]")
    ] = None,
    sequence: ModelSequence = None,
    batch: ModelBatch = None,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Layouts to show.")] = 10,
    table: DocumentOptions,
) -> None:
    """Compare layouts over pipeline, data, tensor, context and expert parallelism by predicted MFU.

    Each is the best of its micro-batches, interleaved schedules and ways of recomputation that fit into memory.
    """
    from tracekit.plan import layouts
    from tracekit.report import layouts as layout_report

    machine, gpus, domain_gpus = cluster.read()
    node_gpus = domain_gpus if gpus_per_node is None else gpus_per_node
    job = layouts.Job.of(find_model(model), machine, gpus=gpus, gpus_per_node=node_gpus, sequence=sequence, batch=batch)
    table.write_document(layout_report.document(job, layouts.plan(job, count=count)))


@plan.command(short_help="Days, GPU-hours, money and energy of a training.")
@expand_options
def train(
    *,
    size: SizeOptions,
    tokens: Annotated[float, typer.Option(metavar="N", help="Tokens to train on, such as 15e12.")],
    cluster: ClusterOptions,
    sequence: ModelSequence = None,
    batch: ModelBatch = None,
    speed: SpeedOptions,
    host: OffloadOptions,
    money: MoneyOptions,
    cache: UseCache = True,
    role: RoleName = None,
    table: DocumentOptions,
) -> None:
    """Estimate how long a training takes, and what it costs: tokens, model, GPUs and MFU.

    The MFU is given, measured by a run, or predicted: for the fastest layout that fits, whose step is shown by parts.
    --speedup, or two recorded runs, state how many GPUs of a faster strategy have the same throughput.
    """
    from tracekit.plan import hardware, layouts
    from tracekit.plan import train as planned
    from tracekit.report import train_plan as report

    machine, gpus, domain_gpus = cluster.read()
    spec = None if size.params is not None else optional_model(size.model)
    params = require("--params or --model", size.parameters())
    length = sequence or (spec.sequence if spec else 4096)
    sequences = batch or (layouts.default_batch(spec, length, gpus) if spec else max(1, (1 << 22) // length))
    work = planned.Work(
        6 * params if spec is None else layouts.flops_per_token(spec, length),
        length * sequences, gpus, speed.peak_flops or machine.peak_flops_per_s,
    )  # fmt: skip
    mfu_ratio, speedup = _rates_of_runs(speed.measured, money, cache=cache, role=role)
    subject = f"{spec.name if spec else f'{params / 1e9:,.4g} B parameters'}, {tokens:,.4g} tokens on {gpus:,} "
    subject += "GPUs" if speed.peak_flops else machine.name
    layout = ""
    given_ratio = speed.mfu
    if speed.tokens_per_second is not None:
        given_ratio = speed.tokens_per_second * work.flops_per_token / (gpus * work.peak_flops_per_s)
    if given_ratio is not None:
        step = planned.step_at_mfu(work, given_ratio, planned.GIVEN)
    elif mfu_ratio is not None:
        step = planned.step_at_mfu(work, mfu_ratio, planned.MEASURED)
    elif spec is None or speed.peak_flops is not None:
        raise ConfigError("a layout is predicted with --model and --device; else give --mfu or --tokens-per-second")
    else:
        job = layouts.Job(spec, machine, gpus, domain_gpus, length, sequences)
        best = layouts.best(job, tp=speed.tp, pp=speed.pp, zero=speed.zero)
        step, layout = planned.step_of_layout(job, best), _layout_text(best)
    if host.offload:
        step = planned.with_offload(step, planned.Offload(params / gpus, host.host_bandwidth, host.pcie_bandwidth))
    power_w = money.power if money.power is not None or speed.peak_flops else hardware.power_w(machine)
    prices = planned.Prices(money.gpu_hour_price, power_w, money.pue)
    result = planned.plan(work, step, tokens, prices=prices, goodput_ratio=money.goodput)
    equal = None if speedup is None else planned.equal_throughput(gpus, speedup, money.gpu_hour_price)
    table.write_document(report.document(subject, work, step, result, equal=equal, layout=layout))


def _rates_of_runs(
    measured: str | None, money: MoneyOptions, *, cache: bool, role: str | None
) -> tuple[float | None, float | None]:
    """MFU of a recorded run, and the speedup that is stated or that of another run. Raises ConfigError."""
    from tracekit.analysis.compute import training_rate

    if money.against is not None and (money.speedup is not None or measured is None):
        raise ConfigError("--against compares a run with that of --measured: give both, and no --speedup")
    if measured is None:
        return None, money.speedup
    opened = partial(run_loading.open_measured, facts=training_rate.FACTS, cache=cache, role=role)
    run = opened(measured)
    rate = training_rate.training_rate(run)
    if money.against is None:
        if rate.mfu_ratio is None:
            raise ConfigError(f"{measured}: its MFU is not known (device or operations); give --mfu")
        return rate.mfu_ratio, money.speedup
    other = training_rate.training_rate(opened(money.against))
    if rate.tokens_per_second_per_gpu is None or other.tokens_per_second_per_gpu is None:
        raise ConfigError("--against: both runs need tokens per second in their metrics log (docs/record.md)")
    return rate.mfu_ratio, other.tokens_per_second_per_gpu / rate.tokens_per_second_per_gpu


def _layout_text(layout: "LayoutPlan") -> str:
    axes = [f"{axis.upper()} {getattr(layout, axis)}" for axis in ("pp", "dp", "tp", "cp", "ep")]
    batches = f"{layout.micro_batches} micro-batches of {layout.micro_batch}, recomputation {layout.recompute}"
    return f"{' × '.join(axes[:3])}, {', '.join(axes[3:])}, ZeRO-{layout.zero}, {batches}"


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

    spec = optional_model(model)
    across = width or (spec.width if spec else None)
    sizes = None
    if sequence and across:
        sizes = planned.Sizes(batch, sequence, across, layers or (spec.layers if spec else None), tp, scatter_gather)
    result = planned.plan(stages, micro_batches, chunks=chunks, schedule=schedule, sizes=sizes)
    _emit(dataclasses.asdict(result), table)


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
