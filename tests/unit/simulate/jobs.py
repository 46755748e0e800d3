"""Small jobs to simulate: few layers of a large model, so that compute and communication are of real proportions."""

from dataclasses import replace
from pathlib import Path

from tracekit.plan import hardware, models
from tracekit.simulate import faults, run
from tracekit.simulate.job import Job, laid_out
from tracekit.simulate.run import Simulated


def job(
    strategy: str = "fsdp2", *, model: str = "llama2-7b", machine: str = "a100-80", layers: int = 4, **changes: int
) -> Job:
    """Return a healthy job without jitter."""
    machine_of = replace(hardware.find(machine), jitter_ratio=0.0)
    given = {"gpus": 16, "seq": 2048, "steps": 3, "ranks_written": 2, **changes}
    return Job(strategy, models.find(model, layers=layers), machine_of, **given)  # type: ignore[arg-type]


def pipelined(
    gpus: int,
    *,
    pp: int = 1,
    tp: int = 1,
    ep: int = 1,
    layers: int = 4,
    schedule: str = "1f1b",
    stages: int = 1,
    micro_batches: int = 4,
    steps: int = 2,
    strategy: str = "ddp",
    shards_data: bool = False,
) -> Job:
    """Return a healthy job with a layout, without jitter."""
    machine = replace(hardware.find("a100-80"), jitter_ratio=0.0)
    model = models.find("llama2-7b", layers=layers)
    sizes = {"pp": pp, "tp": tp, "ep": ep, "virtual_stages": stages}
    layout = laid_out(gpus=gpus, model=model, schedule=schedule, shards_data=shards_data, **sizes)
    given = {"micro_batches": micro_batches, "steps": steps, "ranks_written": gpus}
    return Job(strategy, model, machine, gpus, 2048, hybrid=layout, **given)  # type: ignore[arg-type]


def written(of: Job, out: Path, *requests: str, force: bool = False) -> Simulated:
    """Simulate a job with the requested faults, and write it."""
    return run.simulate(of, [faults.parse(text) for text in requests], out, arguments={"seed": of.seed}, force=force)
