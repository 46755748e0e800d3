"""Options of ``tracekit plan``: models, layouts, storage, clusters, speed and money."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tracekit.errors import ConfigError

if TYPE_CHECKING:
    from tracekit.analysis.checkpoint.saves import PlanningInputs
    from tracekit.plan.checkpoint import Layout, Storage
    from tracekit.plan.hardware import Hardware
    from tracekit.plan.models import Model

_EXAMPLES = {
    "--params or --model": "--model 405b",
    "--write-bandwidth": "--write-bandwidth 273e9",
    "--interval": "--interval 4h",
}
_ZERO_OF_STRATEGY = {"ddp": 0, "zero1": 1}

ModelName = Annotated[str | None, typer.Option(metavar="NAME", help="A model by name, such as llama3-70b or 405b.")]
Tp = Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks.")]
ModelSequence = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Tokens per sequence.  [default: the model's]")
]
ModelBatch = Annotated[int | None, typer.Option(metavar="N", min=1, help="Sequences per step.  [default: the model's]")]
Sequence = Annotated[int | None, typer.Option(metavar="N", min=1, help="Tokens per sequence.")]
Batch = Annotated[int, typer.Option(metavar="N", help="Sequences per micro-batch.")]


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """The size of the model, as a number or by its name."""

    params: Annotated[float | None, typer.Option(metavar="N", help="Parameters of the model, such as 1.008e12.")] = None
    model: ModelName = None

    def parameters(self) -> float | None:
        """Return the number of parameters; None if no option states it."""
        model = None if self.params is not None else optional_model(self.model)
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

        dp = first_known(self.dp, recorded and recorded.world_size, 1)
        zero = first_known(self.zero, recorded and _ZERO_OF_STRATEGY.get(recorded.strategy, 3), 0)
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
    storage: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The JSON of tracekit plan storage: what a node writes at most."),
    ] = None
    topology: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A topology file (TOML), whose [storage] has these bandwidths.")
    ] = None

    def bandwidths(self, measured_write: float | None) -> "Storage":
        """Bandwidths: as stated, else those of the topology, else the measured one. Raises ConfigError without any."""
        from tracekit.plan import topology
        from tracekit.plan.checkpoint import Storage
        from tracekit.report import storage_probe

        node_limit = (
            None if self.storage is None else storage_probe.read_limits(self.storage).node_write_bytes_per_second
        )
        rates = topology.StorageRates() if self.topology is None else topology.read(self.topology).storage
        return Storage(
            require("--write-bandwidth", self.write_bandwidth, rates.write_bytes_per_s, measured_write),
            first_known(self.read_bandwidth, rates.read_bytes_per_s),
            first_known(self.node_write_limit, node_limit, rates.node_write_bytes_per_s),
            self.burst_buffer,
        )


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """GPUs and what connects them: a device by name, or a topology file."""

    gpus: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="GPUs in all.  [default: those of --topology]")
    ] = None
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="A device, such as h100-80, b200 or mi300x.  [default: a100-80]")
    ] = None
    topology: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A topology file (TOML): device, GPUs per node, links, rails.")
    ] = None

    def read(self) -> "tuple[Hardware, int, int]":
        """Machine, number of GPUs, and how many of them links connect. Raises ConfigError and InputError."""
        from tracekit.plan import hardware, topology

        if self.topology is None:
            machine = hardware.find(self.device or "a100-80")
            return machine, require_whole("--gpus", self.gpus), machine.gpus_per_node
        if self.device is not None:
            raise ConfigError("--topology states the device: leave --device out")
        cluster = topology.read(self.topology)
        gpus = self.gpus if self.gpus is not None else cluster.gpus
        return cluster.hardware, require_whole("--gpus", gpus), cluster.domain_gpus


@dataclass(frozen=True, kw_only=True)
class SpeedOptions:
    """How fast a step is; without any of these, the fastest layout that fits is taken."""

    mfu: Annotated[float | None, typer.Option(metavar="RATIO", help="MFU, 0 to 1.")] = None
    tokens_per_second: Annotated[
        float | None, typer.Option(metavar="N", help="Instead: tokens per second of all GPUs.")
    ] = None
    measured: Annotated[str | None, typer.Option(metavar="RUN", help="Instead: the MFU of a recorded run.")] = None
    peak_flops: Annotated[
        float | None, typer.Option(metavar="N", help="Peak of a GPU in FLOP/s, of a device that is not listed.")
    ] = None
    tp: Annotated[int | None, typer.Option(metavar="N", help="Only layouts with N tensor-parallel ranks.")] = None
    pp: Annotated[int | None, typer.Option(metavar="N", help="Only layouts with N pipeline stages.")] = None
    zero: Annotated[int | None, typer.Option(metavar="N", help="Only layouts with this ZeRO stage: 1, or 3.")] = None


@dataclass(frozen=True, kw_only=True)
class MoneyOptions:
    """What GPUs cost and draw, and what another strategy would save."""

    gpu_hour_price: Annotated[float | None, typer.Option(metavar="PRICE", help="Price of a GPU-hour.")] = None
    power: Annotated[
        float | None, typer.Option(metavar="W", help="Power of a GPU.  [default: the most of its datasheet]")
    ] = None
    pue: Annotated[float, typer.Option(metavar="RATIO", help="Power of the data center over that of GPUs.")] = 1.0
    goodput: Annotated[float, typer.Option(metavar="RATIO", help="Share of the time that trains, 0 to 1.")] = 1.0
    speedup: Annotated[
        float | None, typer.Option(metavar="RATIO", help="Throughput of another strategy, relative to this one.")
    ] = None
    against: Annotated[
        str | None, typer.Option(metavar="RUN", help="Instead: a recorded run, compared with that of --measured.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class OffloadOptions:
    """The optimizer on the host."""

    offload: Annotated[bool, typer.Option("--offload", help="The optimizer runs on the host (ZeRO-Offload).")] = False
    host_bandwidth: Annotated[
        float, typer.Option(metavar="B", help="Host memory bandwidth for each GPU, in bytes/s.")
    ] = 25e9
    pcie_bandwidth: Annotated[
        float, typer.Option(metavar="B", help="PCIe bandwidth of a GPU in one direction, in bytes/s.")
    ] = 25e9


def optional_model(name: str | None) -> "Model | None":
    """Model of this name, or None without a name. Raises InputError if there is no such model."""
    return None if name is None else find_model(name)


def find_model(name: str) -> "Model":
    """Return the model of this name, or that a path to a config.json describes."""
    from tracekit.plan import models

    path = Path(name)
    is_path = name.endswith(".json") or (name not in models.NAMES and path.is_dir())
    return models.read(path) if is_path else models.find(name)


def first_known(*values: Any) -> Any:
    """First of the values that is not None; None if there is none."""
    return next((value for value in values if value is not None), None)


def require(option: str, *values: float | None) -> float:
    """First of the values that is known. Raises ConfigError, naming the option, without one."""
    stated: float | None = first_known(*values)
    if stated is None:
        recorded = "; or take it from a recorded run by --measured RUN" if len(values) > 1 else ""
        raise ConfigError(f"{option} is needed, such as {_EXAMPLES[option]}{recorded}")
    return stated


def require_whole(option: str, value: int | None) -> int:
    """Value of an option for which no run has one. Raises ConfigError, naming the option, without it."""
    if value is None:
        raise ConfigError(f"{option} is needed, such as {option} 1024")
    return value
