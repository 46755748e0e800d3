"""Simulated jobs at two sizes: efficiency and contributions of `tracekit compare` against the simulator's account.

    python -m benchmarks.scaling --pairs 40 --out docs/lab/scaling_accuracy.md

Draws are fresh each time unless --seed repeats one. Errors are in points of the larger job's step (of its efficiency,
or of what a part adds to the step); the largest contribution is right if the part that truly grew most is first.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tracekit
from tests.support.simulated_parts import parts_of_steps
from tracekit.errors import InputError
from tracekit.plan import hardware, models
from tracekit.plan.hardware import Hardware
from tracekit.regression import scaling
from tracekit.regression.scaling import ScalingSide
from tracekit.simulate import faults, run
from tracekit.simulate.job import Job, laid_out
from tracekit.simulate.run import Simulated

KINDS = {
    "same batch per GPU": "",
    "same batch of the job": "",
    "more replicas of a pipeline": "",
    "longer pipeline": "",
    "more tensor parallelism": "",
    "slow rank in the larger job": "slow-rank",
    "late host in the larger job": "late-launch",
    "data stalls in the larger job": "dataloader-stall",
}
"""How the job grows, and the fault of the larger one."""
WITHIN = 0.03
_LARGER = {
    "more replicas of a pipeline": (8, 2, 1),
    "longer pipeline": (8, 4, 1),
    "more tensor parallelism": (8, 2, 2),
}
"""GPUs, pipeline stages and tensor-parallel ranks of the larger job; the smaller one has 4 GPUs in 2 stages."""
_HOST_PARTS = ("launch", "data", "idle")


@dataclass(frozen=True)
class Judged:
    """A pair of runs: errors of the efficiency and of the worst contribution, and whether the largest one is right."""

    kind: str
    name: str
    efficiency: float
    efficiency_error: float
    contribution_error: float
    is_named: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, simulate, compare, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    parser.add_argument("--out", type=Path, default=None, help="also write the table to this file")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    pairs: list[Judged] = []
    for pair in judged_pairs(options.pairs, seed):
        pairs.append(pair)
        errors = f"efficiency {pair.efficiency:.1%} {pair.efficiency_error:+.2%}, parts {pair.contribution_error:.2%}"
        sys.stderr.write(f"{pair.kind:<30} {pair.name:<34} {errors}, largest {'right' if pair.is_named else 'WRONG'}\n")
    text = document(pairs, seed)
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def judged_pairs(count: int, seed: int) -> Iterator[Judged]:
    """Yield pairs drawn from a seed, each kind equally often."""
    kinds = list(KINDS)
    for number in range(count):
        draw = random.Random(seed + number)
        while True:
            try:
                yield judge_pair(draw, kinds[number % len(kinds)])
                break
            except InputError:  # the job does not fit into memory
                continue


def judge_pair(draw: random.Random, kind: str) -> Judged:
    """Draw a job at two sizes, simulate both, and compare them."""
    smaller, larger = _draw_jobs(draw, kind)
    requests = [faults.parse(KINDS[kind])] if KINDS[kind] else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        simulated = [
            run.simulate(job, of_job, folder / str(job.gpus), arguments={})
            for job, of_job in ((smaller, []), (larger, requests))
        ]
        loaded = [tracekit.load(str(folder / str(job.gpus)), cache=False) for job in (smaller, larger)]
        (step,) = scaling.compare_sizes([ScalingSide.of(one) for one in loaded]).steps
    before, after = (_gpu_ns_per_token(one) for one in simulated)
    whole = sum(after.values())
    parts = before.keys() | after.keys()
    true = {part: (after.get(part, 0.0) - before.get(part, 0.0)) / whole for part in parts}
    measured = {part.part: part.lost_ratio for part in step.contributions}
    measured["idle"] = sum(measured.pop(part, 0.0) for part in _HOST_PARTS)
    efficiency = sum(before.values()) / whole
    name = f"{larger.strategy}, {larger.model.name}, {smaller.gpus} → {larger.gpus} GPUs"
    return Judged(
        kind,
        name,
        efficiency,
        step.efficiency - efficiency,
        max(abs(measured.get(part, 0.0) - true.get(part, 0.0)) for part in measured.keys() | true.keys()),
        max(measured, key=lambda part: measured[part]) == max(true, key=lambda part: true[part]),
    )


def document(pairs: Sequence[Judged], seed: int) -> str:
    """Return the errors as Markdown, by kind, then overall."""
    lines = [
        "# Scaling of simulated jobs\n",
        f"    python -m benchmarks.scaling --pairs {len(pairs)} --out docs/lab/scaling_accuracy.md\n",
        f"{len(pairs)} pairs of **simulated** runs of one job at two sizes (4 to 32 GPUs), drawn with seed {seed}. The",
        "truth is an account of what the simulator's engine did in each moment, and shares no code with the analysis.",
        "Errors are in points of the larger job's step: of its efficiency, and of the worst of the contributions",
        "(compute, exposed communication, waiting for ranks, pipeline bubbles, copies, idle time). *Largest right*:",
        "the part that truly grew most is named first.\n",
        f"| how the job grows | pairs | efficiency | error: median | worst | contribution: worst | within {WITHIN:.0%} "
        "| largest right |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [pair for pair in pairs if pair.kind == kind]
        if of_kind:
            lines.append(_row(kind, of_kind))
    return "\n".join([*lines, _row("all", pairs), ""])


def _row(name: str, pairs: Sequence[Judged]) -> str:
    efficiencies = [pair.efficiency for pair in pairs]
    errors = [abs(pair.efficiency_error) for pair in pairs]
    contributions = [pair.contribution_error for pair in pairs]
    within = sum(max(pair) <= WITHIN for pair in zip(errors, contributions, strict=True))
    cells = (
        name,
        len(pairs),
        f"{min(efficiencies):.0%} to {max(efficiencies):.0%}",
        f"{statistics.median(errors):.2%}",
        f"{max(errors):.2%}",
        f"{max(contributions):.2%}",
        within,
        sum(pair.is_named for pair in pairs),
    )
    return f"| {' | '.join(map(str, cells))} |"


def _gpu_ns_per_token(of: Simulated) -> dict[str, float]:
    parts = parts_of_steps(of.job, of.recording)
    return {part: of.job.gpus * time_ns / of.job.step_tokens for part, time_ns in parts.items()}


# Draws ---------------------------------------------------------------------------------------------------------------


def _draw_jobs(draw: random.Random, kind: str) -> tuple[Job, Job]:
    """Draw a job at two sizes, of which the second is the larger one."""
    machine = hardware.find(draw.choice(("a100-80", "h100-80")))
    seed, growth = draw.randrange(1 << 20), draw.choice((2, 2, 4))
    if "pipeline" in kind or "tensor" in kind:
        return _hybrid_jobs(draw, kind, machine, seed)
    strategy = draw.choice(("ddp", "fsdp1", "fsdp2", "yafsdp"))
    model = models.find(draw.choice(("llama2-7b", "llama3-8b")), layers=draw.choice((3, 4, 6)))
    job = Job(strategy, model, machine, 8, draw.choice((2048, 4096)), seed=seed, steps=5, ranks_written=4)
    if kind == "same batch of the job":
        return replace(job, batch=growth), replace(job, gpus=8 * growth)
    return job, replace(job, gpus=8 * growth)


def _hybrid_jobs(draw: random.Random, kind: str, machine: Hardware, seed: int) -> tuple[Job, Job]:
    schedule, micro_batches = draw.choice(("1f1b", "gpipe", "interleaved", "zb-h1")), draw.choice((8, 16))
    gpus, pp, tp = _LARGER[kind]
    model = models.find("llama2-7b", layers=8)
    first, second = (
        Job(
            "zero1", model, machine, count, 2048, micro_batches=micro_batches, steps=4, seed=seed, ranks_written=count,
            hybrid=laid_out(gpus=count, model=model, pp=stages, tp=tensor, schedule=schedule),
        )
        for count, stages, tensor in ((4, 2, 1), (gpus, pp, tp))
    )  # fmt: skip
    return first, second


if __name__ == "__main__":
    sys.exit(main())
