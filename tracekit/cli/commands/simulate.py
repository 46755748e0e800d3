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
    from tracekit.simulate.job import Job
    from tracekit.simulate.run import Simulated


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The training to simulate; run.json lists them as its arguments."""

    strategy: Annotated[str, typer.Option(metavar="NAME", help="ddp, fsdp1, fsdp2, hsdp, yafsdp or yafsdp-v1.")] = (
        "fsdp2"
    )
    model: Annotated[str, typer.Option(metavar="NAME", help="Such as llama2-7b, llama3-70b, 125m.")] = "llama2-7b"
    layers: Annotated[int | None, typer.Option(metavar="N", min=1, help="Simulate only N of the model's layers.")] = (
        None
    )
    gpus: Annotated[int, typer.Option(metavar="N", help="Ranks of the job.")] = 64
    seq: Annotated[int, typer.Option(metavar="N", help="Tokens per sequence.")] = 2048
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences per GPU and micro-batch.")] = 1
    micro_batches: Annotated[int, typer.Option(metavar="N", help="Micro-batches per step.")] = 1
    checkpoint_layers: Annotated[int, typer.Option(metavar="N", help="Layers that recompute their activations.")] = 0
    hardware: Annotated[str, typer.Option(metavar="NAME", help="a100-80, h100-80 or v100-32.")] = "a100-80"
    ranks_written: Annotated[int, typer.Option(metavar="N", help="Write traces of the first N ranks.")] = 8
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[:ARG…]", help="Add this fault; --list-faults shows all. Repeatable."),
    ] = None
    steps: Annotated[int, typer.Option(metavar="N", help="Steps to record.")] = 4
    seed: Annotated[
        int, typer.Option(metavar="N", help="Random seed of the jitter; the same seed gives the same bytes.")
    ] = 0

    def job(self) -> "Job":
        """Return the job. Raises ConfigError if the model or the hardware is not known."""
        from tracekit.plan import hardware, models
        from tracekit.simulate.job import Job

        return Job(
            self.strategy,
            models.find(self.model, layers=self.layers),
            hardware.find(self.hardware),
            self.gpus,
            self.seq,
            batch=self.batch,
            micro_batches=self.micro_batches,
            checkpoint_layers=self.checkpoint_layers,
            steps=self.steps,
            seed=self.seed,
            ranks_written=self.ranks_written,
        )


@expand_options
def simulate(
    *,
    options: JobOptions,
    out: Annotated[Path | None, typer.Option(metavar="RUN", help="Folder to write the run to.")] = None,
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
    arguments = dataclasses.asdict(options) | {"layers": job.model.layers, "fault": options.fault or []}
    output.emit(_as_text(simulation.simulate(job, parsed, out, arguments=arguments, force=force), out))


def _as_text(simulated: "Simulated", out: Path) -> str:
    from tracekit.model import units

    job, recording = simulated.job, simulated.recording
    what = f"{job.strategy}, {job.model.name} with {job.model.layers} layers on {job.gpus} {job.hardware.name}"
    step = units.duration(recording.total_ns // job.steps)
    lines = [f"Simulated: {what}; {job.steps} steps of {step}, {len(recording.ranks)} traces in {out}"]
    for known in simulated.known:
        ranks, steps = (
            f"{what}{'s' * (len(of) > 1)} {units.ranges(of)}"
            for what, of in (("rank", known.ranks), ("step", known.steps))
        )
        lines.append(f"  {known.code:<9}  {known.fault}: {units.duration(known.cost_ns)} per step, {ranks}, {steps}")
    return "\n".join(lines) + "\n"
