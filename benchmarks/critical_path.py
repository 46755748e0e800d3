"""Critical paths of simulated runs compared with the true ones, which the simulator knows.

    python -m benchmarks.critical_path --runs 56 --out docs/lab/critical_path_accuracy.md

Draws are fresh each time unless --seed repeats one. Each run has a cause that decides its path. A time of the path is
right if the path has the true owner there: rank, kind, and kernel or host operator. The second number leaves event
waits of streams out of the traces, as most real traces do.
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

import polars as pl

import tracekit
from benchmarks import critical_path_truth
from benchmarks.critical_path_truth import HOST, IDLE, CausalEngine, Part
from benchmarks.labelled_savings import without_waits
from tracekit import conventions
from tracekit.errors import InputError
from tracekit.plan import hardware, models
from tracekit.replay.graph.critical_path import path
from tracekit.replay.graph.critical_path.path import CriticalPath
from tracekit.simulate import faults, kineto_writer, memory
from tracekit.simulate.job import FSDP2, YAFSDP, Job, laid_out
from tracekit.simulate.recording import Recording

KINDS = {
    "healthy": "",
    "slow rank": "slow-rank",
    "slow link": "slow-link:1:6:0",
    "host-bound": "late-launch",
    "data loading": "dataloader-stall",
    "reads by the host": "host-sync",
    "pipeline with a slow stage": "slow-stage",
}
"""What decides the path of a run, and the fault that makes it so."""
RIGHT_RATIO = 0.95
_FULL = 0.9


@dataclass(frozen=True)
class Judged:
    """One run: the share of its path's time with the true owner, with event waits recorded and inferred."""

    kind: str
    name: str
    right_ratio: float
    inferred_ratio: float
    owner: str
    """The rank and kind that own most of the path."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, simulate, compare, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.critical_path", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=56, help="how many (default: 56)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    parser.add_argument("--kind", action="append", default=[], choices=list(KINDS), help="draw only this; repeatable")
    parser.add_argument("--out", type=Path, default=None, help="also write the table to this file")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    results: list[Judged] = []
    for result in judged_runs(options.runs, seed, options.kind or list(KINDS)):
        results.append(result)
        ratios = f"{result.right_ratio:7.2%} {result.inferred_ratio:7.2%}"
        sys.stderr.write(f"{result.kind:<28} {result.name:<32} {ratios}  most: {result.owner}\n")
    text = document(results, seed)
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def judged_runs(count: int, seed: int, kinds: Sequence[str]) -> Iterator[Judged]:
    """Yield runs drawn from a seed, each kind equally often."""
    for number in range(count):
        yield judge_run(random.Random(seed + number), kinds[number % len(kinds)])


def judge_run(draw: random.Random, kind: str) -> Judged:
    """Draw a run of a kind, simulate it, and compare its path with the true one."""
    with tempfile.TemporaryDirectory() as folder:
        job, engine, recording = simulate_run(draw, kind, Path(folder))
        run = tracekit.load(folder, cache=False)
        critical = path.critical_path(run)
        assert critical.step is not None
        true = critical_path_truth.true_path(engine, recording, critical.rank, critical.step)
        inferred = right_ratio(path.critical_path(without_waits(run), critical.step), true)
    top = critical.shares_by("rank", "kind").row(0, named=True)
    name = f"{job.strategy}, {job.gpus} GPUs" if job.hybrid is None else f"pp={job.hybrid.layout.pp}, {job.gpus} GPUs"
    owner = f"rank {top['rank']} {top['kind']} {top['step_ratio']:.0%}"
    return Judged(kind, name, right_ratio(critical, true), inferred, owner)


def simulate_run(draw: random.Random, kind: str, folder: Path) -> tuple[Job, CausalEngine, Recording]:
    """Draw a run of a kind, simulate it, and write its traces."""
    job = _fitting(draw, kind)
    engine, recording = critical_path_truth.simulate(job)
    for rank in job.written_ranks:
        file = folder / conventions.rank_file(rank, kineto_writer.TRACE_SUFFIX)
        kineto_writer.write(file, job, recording.ranks[rank])
    return job, engine, recording


def right_ratio(critical: CriticalPath, true: Sequence[Part]) -> float:
    """Return the share of the step in which the path has the true owner."""
    answer = label_parts(critical)
    truth = pl.DataFrame(
        [(part.start_ns + kineto_writer.BASE_NS, part.ranks, part.kind, part.name) for part in true],
        schema={"start_ns": pl.Int64, "rank": pl.List(pl.Int64), "kind": pl.String, "name": pl.String},
        orient="row",
    )
    cuts = pl.concat([side.select(at_ns="start_ns") for side in (answer, truth)]).unique().sort("at_ns")
    until = pl.col("at_ns").shift(-1, fill_value=critical.start_ns + critical.step_ns)
    lasting = cuts.with_columns(dur_ns=until - pl.col("at_ns"))
    for table, suffix in ((answer, ""), (truth.sort("start_ns"), "_true")):
        owners = table.select(at_ns="start_ns", **{f"{name}{suffix}": name for name in ("rank", "kind", "name")})
        lasting = lasting.join_asof(owners, on="at_ns")
    same = pl.all_horizontal(pl.col(name) == pl.col(f"{name}_true") for name in ("kind", "name"))
    same &= pl.col("rank").is_in(pl.col("rank_true"))
    inside = (pl.col("at_ns") >= critical.start_ns) & (pl.col("dur_ns") > 0)
    right_ns = lasting.filter(same & inside)["dur_ns"].sum()
    return float(right_ns / critical.step_ns)


def label_parts(critical: CriticalPath) -> pl.DataFrame:
    """Return the parts with the names that the truth has: of hosts their operators, of idle times none."""
    label = (
        pl.when(pl.col("kind") == HOST)
        .then(pl.col("operator").fill_null(""))
        .when(pl.col("kind") == IDLE)
        .then(pl.lit(""))
        .otherwise("name")
    )
    return critical.parts.select("start_ns", "rank", "kind", label.alias("name"))


# Draws ---------------------------------------------------------------------------------------------------------------


def _fitting(draw: random.Random, kind: str) -> Job:
    while True:
        try:
            job = _draw_job(draw, kind)
            if memory.peak_bytes(job) <= _FULL * job.hardware.memory_bytes:
                return job
        except InputError:
            continue


def _draw_job(draw: random.Random, kind: str) -> Job:
    fault = KINDS[kind]
    requests = [faults.parse(fault)] if fault else []
    healthy = _pipeline(draw) if fault == "slow-stage" else _sharded_job(draw)
    return faults.inject(healthy, requests)


def _sharded_job(draw: random.Random) -> Job:
    strategy = draw.choice(("ddp", FSDP2, YAFSDP))
    model = models.find(draw.choice(("llama2-7b", "llama3-8b")), layers=draw.choice((3, 4, 6)))
    machine = hardware.find(draw.choice(("a100-80", "h100-80")))
    job = Job(
        strategy, model, machine, draw.choice((4, 8, 16)), draw.choice((2048, 4096)), seed=draw.randrange(1 << 20)
    )
    return replace(job, steps=4, ranks_written=4)


def _pipeline(draw: random.Random) -> Job:
    pp, data = draw.choice(((2, 2), (4, 1), (4, 2)))
    model = replace(models.find("llama2-70b", layers=pp), vocabulary=2048)
    layout = laid_out(gpus=pp * data, model=model, pp=pp, schedule=draw.choice(("1f1b", "gpipe")))
    machine = hardware.find(draw.choice(("a100-80", "h100-80")))
    job = Job("ddp", model, machine, pp * data, 2048, seed=draw.randrange(1 << 20), hybrid=layout)
    return replace(job, steps=3, micro_batches=2 * pp, ranks_written=pp * data)


# The table -----------------------------------------------------------------------------------------------------------


def document(runs: Sequence[Judged], seed: int) -> str:
    """Return the scores as Markdown, by kind, then overall."""
    lines = [
        "# Critical paths of simulated runs\n",
        f"    python -m benchmarks.critical_path --runs {len(runs)} --out docs/lab/critical_path_accuracy.md\n",
        f"{len(runs)} **simulated** runs drawn with seed {seed}. *Right*: the share of the step in which the path has",
        "the owner that the simulator knows (rank, kind, and kernel or host operator). *Inferred*: the same runs with",
        "event waits of streams removed from their traces.\n",
        f"| what decides the path | runs | right: mean | least | {RIGHT_RATIO:.0%} right | inferred: mean | least |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [result for result in runs if result.kind == kind]
        lines += [f"| {kind} | {_scores(of_kind)} |"] if of_kind else []
    lines.append(f"| all | {_scores(runs)} |")
    return "\n".join(lines) + "\n"


def _scores(results: Sequence[Judged]) -> str:
    right, inferred = ([getattr(result, name) for result in results] for name in ("right_ratio", "inferred_ratio"))
    enough = sum(ratio >= RIGHT_RATIO for ratio in right)
    return (
        f"{len(results)} | {statistics.mean(right):.2%} | {min(right):.2%} | {enough} | "
        f"{statistics.mean(inferred):.2%} | {min(inferred):.2%}"
    )


if __name__ == "__main__":
    sys.exit(main())
