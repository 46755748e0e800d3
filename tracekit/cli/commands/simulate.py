"""``tracekit simulate``: traces of a simulated training with known faults."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output
from tracekit.cli.options import expand_options
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.plan.models import Model
    from tracekit.simulate.job import Hybrid, Job
    from tracekit.simulate.run import Simulated

_STRATEGY, _PIPELINED_STRATEGY, _RANKS_WRITTEN = "fsdp2", "zero1", 8
_LAYOUT = ("pp", "tp", "ep", "schedule", "virtual_stages", "sequence_parallel")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The training to simulate; run.json lists them as its arguments."""

    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="ddp, fsdp1, fsdp2, hsdp, yafsdp or yafsdp-v1; with a layout ddp, zero1, zero1-scattered, zero2 "
            "or fsdp2.  "
            "[default: fsdp2; with a layout zero1]",
        ),
    ] = None
    model: Annotated[str, typer.Option(metavar="NAME", help="Such as llama2-7b, llama3-70b, 125m.")] = "llama2-7b"
    layers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Simulate only N of the model's layers.")] = (
        None
    )
    gpus: Annotated[int, typer.Option(metavar="N", help="Ranks of the job.")] = 64
    seq: Annotated[int, typer.Option(metavar="N", help="Tokens per sequence.")] = 2048
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences per GPU and micro-batch.")] = 1
    micro_batches: Annotated[int, typer.Option(metavar="N", help="Micro-batches per step.")] = 1
    checkpoint_layers: Annotated[int, typer.Option(metavar="N", help="Layers that recompute their activations.")] = 0
    hardware: Annotated[str, typer.Option(metavar="NAME", help="A device, such as a100-80, h100-80 or b200.")] = (
        "a100-80"
    )
    ranks_written: Annotated[
        int | None,
        typer.Option(metavar="N", help="Write traces of the first N ranks.  [default: 8; with a layout all]"),
    ] = None
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:ARG…]", help="Add this fault; --list-faults shows all. Repeatable."),
    ] = None
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to record.")] = 4
    seed: Annotated[
        int, typer.Option(metavar="N", help="Random seed of the jitter; the same seed gives the same bytes.")
    ] = 0

    device_metrics: Annotated[
        bool, typer.Option("--device-metrics", help="Write clocks, power and temperature of the GPUs to the metrics.")
    ] = False

    pp: Annotated[int, typer.Option(metavar="N", help="Ranks along the pipeline axis.")] = 1
    tp: Annotated[int, typer.Option(metavar="N", help="Ranks of tensor parallelism.")] = 1
    ep: Annotated[int, typer.Option(metavar="N", help="Ranks that share a layer's experts.")] = 1
    schedule: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="gpipe, 1f1b, interleaved, zb-h1, zbv or dualpipev.  [default: 1f1b]"),
    ] = None
    virtual_stages: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Stages per rank.  [default: 2 if interleaved, zbv or dualpipev, else 1]",
            show_default=False,
        ),
    ] = 0
    sequence_parallel: Annotated[
        bool, typer.Option("--sequence-parallel", help="Divide norms along the sequence, among the ranks of --tp.")
    ] = False

    def has_layout(self) -> bool:
        """Return whether there is more than data parallelism."""
        return max(self.pp, self.tp, self.ep, self.virtual_stages) > 1 or self.schedule is not None

    def arguments(self, job: "Job") -> dict[str, object]:
        """Return the arguments that run.json states."""
        stated = dataclasses.asdict(self)
        if job.hybrid is None:
            stated = {name: value for name, value in stated.items() if name not in _LAYOUT}
        else:
            stated["virtual_stages"] = job.hybrid.virtual_stages
        if not self.device_metrics:
            del stated["device_metrics"]
        return stated | {
            "layers": job.model.layers,
            "fault": self.fault or [],
            "ranks_written": job.ranks_written,
            "strategy": job.strategy,
        }

    def job(self) -> "Job":
        """Return the job. Raises InputError if it is not possible."""
        from tracekit.plan import hardware, models
        from tracekit.simulate.job import Job

        model = models.find(self.model, layers=self.layers)
        return Job(
            self.strategy or (_PIPELINED_STRATEGY if self.has_layout() else _STRATEGY),
            model,
            hardware.find(self.hardware),
            self.gpus,
            self.seq,
            batch=self.batch,
            micro_batches=self.micro_batches,
            checkpoint_layers=self.checkpoint_layers,
            steps=self.steps,
            seed=self.seed,
            device_metrics=self.device_metrics,
            ranks_written=self.ranks_written or (self.gpus if self.has_layout() else _RANKS_WRITTEN),
            hybrid=self._layout(model) if self.has_layout() else None,
        )

    def _layout(self, model: "Model") -> "Hybrid":
        from tracekit.conventions import pipeline_schedules, strategies
        from tracekit.simulate import job

        return job.laid_out(
            gpus=self.gpus,
            model=model,
            pp=self.pp,
            tp=self.tp,
            ep=self.ep,
            shards_data=self.strategy in (strategies.ZERO2.name, strategies.FSDP2.name),
            schedule=self.schedule or pipeline_schedules.ONE_F_ONE_B,
            virtual_stages=self.virtual_stages,
            sequence_parallel=self.sequence_parallel,
        )


@expand_options
def simulate(
    *,
    options: JobOptions,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="RUN", help="Folder to write the run to.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing simulated run.")] = False,
    list_faults: Annotated[bool, typer.Option("--list-faults", help="List the faults, one per line.")] = False,
) -> None:
    """Simulate a sharded training step on many GPUs; write its traces and the known faults.

    The files are ordinary Kineto traces. File names, headers and run.json mark them as simulated. truth.json lists for
    each fault the rule that should find it, its ranks and steps, and its cost: the difference to a simulation without
    it.
    """
    from tracekit.simulate import faults
    from tracekit.simulate import run as simulation

    if list_faults:
        output.emit(faults.listing() + "\n")
        return
    if out is None:
        raise InputError("no output folder given: tracekit simulate … --out RUN")
    parsed = [faults.parse(text) for text in options.fault or []]
    job = options.job()
    output.emit(_as_text(simulation.simulate(job, parsed, out, arguments=options.arguments(job), force=force), out))


def _as_text(simulated: "Simulated", out: Path) -> str:
    from tracekit.model import units

    job, recording = simulated.job, simulated.recording
    trained = f"{job.model.name} with {job.model.layers} layers on {job.gpus} {job.hardware.name}"
    what = f"{_layout_text(job)}{job.strategy}, {trained}"
    step = units.duration(recording.total_ns // job.steps)
    lines = [f"Simulated: {what}; {job.steps} steps of {step}, {len(job.written_ranks)} traces in {out}"]
    for fault in simulated.known_faults:
        ranks, steps = (units.numbers(what, ids) for what, ids in (("rank", fault.ranks), ("step", fault.steps)))
        lines.append(f"  {fault.code:<9}  {fault.fault}: {units.duration(fault.cost_ns)} per step, {ranks}, {steps}")
    return "\n".join(lines) + "\n"


def _layout_text(job: "Job") -> str:
    if job.hybrid is None:
        return ""
    sizes = [f"{axis} {size}" for axis, size in dataclasses.asdict(job.hybrid.layout).items() if size > 1]
    schedule = [f"{job.hybrid.schedule} with {job.micro_batches} micro-batches"] if job.hybrid.layout.pp > 1 else []
    return ", ".join([" × ".join(sizes), *schedule, ""])
