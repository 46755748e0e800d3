"""How well a recording of few GPUs predicts the step of many: drawn jobs, simulated at both sizes.

    python -m benchmarks.larger_jobs [--jobs 40] [--seed 1] [--out docs/lab/larger_jobs.md]
    python -m benchmarks.larger_jobs --varied --times 8 16 --jobs 30 --seed 6001

With --varied, 8 ranks of drawn topologies are recorded: nodes of 4, 8 or 16, any bandwidth and latency inside nodes and
between them, 1 to 10% of jitter, tensor, pipeline and expert parallelism, accumulated gradients, one straggler.

A job is drawn (strategy, layers, batch, machine, network), simulated on a few nodes and written as traces, which
`tracekit whatif --gpus` reads. The truth is the simulation of the larger job with all its ranks, each with a jitter of
its own.
"""

import argparse
import itertools
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tracekit
from benchmarks.documents import put_between
from tracekit.errors import InputError
from tracekit.plan import hardware, models
from tracekit.plan.hardware import Hardware
from tracekit.replay.graph import larger_jobs
from tracekit.replay.graph.larger_jobs import Network
from tracekit.simulate import engine, run
from tracekit.simulate.job import Impairments, Job, laid_out

CLOSE = 0.05
_STRATEGIES = ("ddp", "fsdp1", "fsdp2", "yafsdp", "hsdp")
_STEPS = 3


@dataclass(frozen=True)
class Drawn:
    """A job at its recorded size, how many times as large the predicted one is, and whether it grows out of a node."""

    job: Job
    times: int

    @property
    def larger(self) -> Job:
        """The job to predict, all of whose ranks are simulated."""
        gpus = self.job.gpus * self.times
        larger = replace(self.job.impairments, slow_ranks=self._slow_ranks(gpus))
        if self.job.hybrid is None:
            return replace(self.job, gpus=gpus, ranks_written=gpus, impairments=larger)
        layout = self.job.hybrid.layout
        shards, replicas = (self.times if size > 1 else 1 for size in (layout.dp_shard, layout.dp_replicate))
        grown = replace(layout, dp_shard=layout.dp_shard * shards, dp_replicate=layout.dp_replicate * replicas)
        hybrid = replace(self.job.hybrid, layout=grown)
        return replace(self.job, gpus=gpus, ranks_written=gpus, hybrid=hybrid, impairments=larger)

    def _slow_ranks(self, gpus: int) -> dict[int, tuple[float, int]]:
        """Slow ranks at the same places of the larger mesh: pipeline stages are further apart."""
        stages = 1 if self.job.hybrid is None else self.job.hybrid.layout.pp
        inner = self.job.gpus // stages
        return {
            rank // inner * (gpus // stages) + rank % inner: slow
            for rank, slow in self.job.impairments.slow_ranks.items()
        }

    @property
    def states_network(self) -> bool:
        """Whether the prediction gets bandwidth and latency between nodes."""
        return self.job.gpus <= self.job.hardware.gpus_per_node or self.job.seed % 2 == 0

    @property
    def network(self) -> Network:
        """What nccl-tests would show of the machine; nothing for half of the jobs whose recording has two nodes."""
        machine = self.job.hardware
        if not self.states_network:
            return Network(machine.gpus_per_node)
        return Network(machine.gpus_per_node, machine.network_bytes_per_s, machine.network_hop_s * 1e9)


@dataclass(frozen=True)
class Outcome:
    """A job's recorded step, its predicted and its true one at the larger size, in ns."""

    drawn: Drawn
    recorded_ns: float
    predicted_ns: float
    range_ns: tuple[int, int]
    true_ns: float

    @property
    def error_ratio(self) -> float:
        """Difference of the prediction from the truth, as a share of it."""
        return self.predicted_ns / self.true_ns - 1

    @property
    def is_within(self) -> bool:
        """Whether the truth is in the stated range."""
        return self.range_ns[0] <= self.true_ns <= self.range_ns[1]


def draw(seed: int, times: int = 8) -> Drawn:
    """Return the job of a seed."""
    draws = random.Random(seed)
    machine = hardware.find(draws.choice(("a100-80", "h100-80", "mi300x")))
    machine = replace(
        machine,
        network_bytes_per_s=machine.network_bytes_per_s * draws.choice((0.25, 0.5, 1.0)),
        jitter_ratio=draws.choice((0.01, 0.03)),
    )
    strategy = draws.choice(_STRATEGIES)
    model = models.find("llama2-7b", layers=draws.choice((2, 3, 4)))
    gpus = machine.gpus_per_node * (2 if strategy == "hsdp" else draws.choice((1, 2)))
    job = Job(
        strategy, model, machine, gpus, draws.choice((1024, 2048, 4096)), micro_batches=draws.choice((1, 1, 2)),
        steps=_STEPS, seed=seed, ranks_written=gpus,
    )  # fmt: skip
    return Drawn(job, times)


_RECORDED_GPUS = 8
_LAYOUTS = (
    *((1, tp, 1) for tp in (2, 4)), *((pp, tp, 1) for pp, tp in ((2, 1), (2, 2), (4, 1))),
    *((1, 1, ep) for ep in (2, 4)), (1, 2, 2), (2, 1, 2),
)  # fmt: skip
"""Ranks of pipeline, tensor and expert parallelism."""


def draw_varied(seed: int, times: int) -> Drawn:
    """Return the varied job of a seed, whatever `times` is. Raises InputError where it cannot be simulated."""
    draws = random.Random(seed)
    machine = _drawn_machine(draws)
    micro_batches, seq = draws.choice((1, 1, 2, 4)), draws.choice((512, 1024, 2048, 4096))
    straggler = {draws.randrange(_RECORDED_GPUS): (draws.uniform(1.05, 1.4), 0)} if draws.random() < 0.35 else {}
    hybrid = None
    if draws.random() < 0.5:
        strategy = draws.choice(_STRATEGIES[: 5 if machine.gpus_per_node == 4 else 4])
        model = models.find(draws.choice(("llama2-7b", "llama3-8b")), layers=draws.choice((2, 3, 5)))
    else:
        pp, tp, ep = draws.choice(_LAYOUTS)
        strategy = draws.choice(("ddp", "zero1", "zero1-scattered", "zero2", "fsdp2"))
        name = draws.choice(("llama2-7b", "llama3-8b")) if ep == 1 else "mixtral-8x7b"
        model = models.find(name, layers=4 if pp > 1 or ep == 1 else 2)
        micro_batches = pp * draws.choice((1, 2)) if pp > 1 else micro_batches
        hybrid = laid_out(
            gpus=_RECORDED_GPUS, model=model, pp=pp, tp=tp, ep=ep, shards_data=strategy in ("zero2", "fsdp2"),
            sequence_parallel=tp > 1 and draws.random() < 0.5,
        )  # fmt: skip
    job = Job(
        strategy, model, machine, _RECORDED_GPUS, seq, micro_batches=micro_batches, steps=_STEPS, seed=seed,
        ranks_written=_RECORDED_GPUS, hybrid=hybrid, impairments=Impairments(slow_ranks=straggler),
    )  # fmt: skip
    return Drawn(job, times)


def _drawn_machine(draws: random.Random) -> Hardware:
    machine = hardware.find(draws.choice(("a100-80", "h100-80", "b200", "mi300x")))

    def scaled(value: float, low: float, high: float) -> float:
        return value * math.exp(draws.uniform(math.log(low), math.log(high)))

    return replace(
        machine,
        gpus_per_node=draws.choice((4, 8, 16)),
        node_bytes_per_s=scaled(machine.node_bytes_per_s, 0.3, 1.5),
        network_bytes_per_s=scaled(machine.network_bytes_per_s, 0.1, 1.5),
        node_hop_s=scaled(machine.node_hop_s, 0.5, 4),
        network_hop_s=scaled(machine.network_hop_s, 0.3, 5),
        compute_slows_collective=draws.choice((0.0, 0.0, 0.1, 0.3)),
        collective_slows_compute=draws.choice((0.0, 0.03, 0.1)),
        jitter_ratio=scaled(1, 0.01, 0.1),
    )


def varied_outcomes(seed: int, jobs: int, times: Sequence[int]) -> Iterator[Outcome]:
    """Yield the outcomes of so many varied jobs from a seed on, without those that cannot be simulated or predicted."""
    possible = 0
    for number in itertools.count(seed):
        if possible == jobs:
            return
        try:
            results = [outcome(draw_varied(number, factor)) for factor in times]
        except InputError as error:  # it does not fit, or its groups leave nodes whose network is not stated
            sys.stderr.write(f"{number}: {error}\n")
            continue
        possible += 1
        yield from results


def outcome(drawn: Drawn) -> Outcome:
    """Simulate a job at both sizes, and predict the larger one from traces of the smaller one."""
    with tempfile.TemporaryDirectory() as folder:
        small = run.simulate(drawn.job, [], Path(folder) / "run", arguments={})
        recorded = tracekit.load(str(Path(folder) / "run"), cache=False)
        prediction = larger_jobs.predict(recorded, drawn.larger.gpus, drawn.network)
    true_ns = engine.simulate(drawn.larger).total_ns / _STEPS
    assert prediction.range_ns is not None
    # The traces end with the last kernel, and steps begin with the first: as the simulator counts them.
    return Outcome(drawn, small.recording.total_ns / _STEPS, prediction.predicted_ns, prediction.range_ns, true_ns)


def row(result: Outcome) -> str:
    """Row of the table."""
    drawn = result.drawn
    job = drawn.job
    layout = f"{job.strategy}{_mesh_text(job)}, {job.model.layers} layers, {job.seq} × {job.micro_batches} tokens, "
    layout += job.hardware.name
    layout += f" with {job.hardware.gpus_per_node} GPUs a node" if job.gpus == _RECORDED_GPUS else ""
    sizes = f"{job.gpus} → {drawn.larger.gpus} | {'given' if drawn.states_network else 'recorded'}"
    times = " | ".join(f"{ns / 1e6:.1f}" for ns in (result.recorded_ns, result.true_ns, result.predicted_ns))
    within = "yes" if result.is_within else "no"
    return f"| {layout} | {sizes} | {times} | {result.error_ratio:+.1%} | {within} |"


def _mesh_text(job: Job) -> str:
    """Axes other than data parallelism, such as " pp2 tp2"."""
    sizes = {} if job.hybrid is None else job.hybrid.layout.sizes | {"ep": job.hybrid.layout.ep}
    return "".join(f" {axis}{size}" for axis, size in sizes.items() if axis in ("pp", "tp", "ep") and size > 1)


def table(results: Sequence[Outcome]) -> str:
    """Summaries, and rows of all jobs."""
    kinds = {"given": True, "recorded": False}
    by_kind = {
        kind: [result for result in results if result.drawn.states_network is states] for kind, states in kinds.items()
    }
    summaries = [_summary(kind, outcomes) for kind, outcomes in by_kind.items() if outcomes]
    names = "| job | GPUs | network | recorded, ms | true, ms | predicted, ms | error | in range |"
    rule = "|---|---|---|---:|---:|---:|---:|---|"
    return "\n".join((*summaries, "", names, rule, *(row(result) for result in results), ""))


def _summary(network: str, results: Sequence[Outcome]) -> str:
    errors = [abs(result.error_ratio) for result in results]
    close = sum(error <= CLOSE for error in errors)
    within = sum(result.is_within for result in results)
    return (
        f"- Network {network}: {close} of {len(results)} predictions are within {CLOSE:.0%} of the truth (median "
        f"{statistics.median(errors):.1%}, worst {max(errors):.1%}); in {within} the truth is within the stated range."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, predict, and print or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.larger_jobs", description=__doc__)
    parser.add_argument("--jobs", type=int, default=40)
    parser.add_argument("--varied", action="store_true", help="draw topologies and meshes, too")
    parser.add_argument(
        "--times", type=int, nargs="+", default=[8], help="how many times as large the predicted job is"
    )
    parser.add_argument("--seed", type=int, default=201)
    parser.add_argument("--out", type=Path, metavar="FILE", help="replace the table in FILE instead of printing it")
    options = parser.parse_args(arguments)
    if options.varied:
        drawn_outcomes = varied_outcomes(options.seed, options.jobs, options.times)
    else:
        seeds = range(options.seed, options.seed + options.jobs)
        drawn_outcomes = (outcome(draw(seed, factor)) for seed in seeds for factor in options.times)
    results = []
    for result in drawn_outcomes:
        sys.stderr.write(row(result) + "\n")
        results.append(result)
    if options.out is None:
        sys.stdout.write(table(results))
    else:
        name = "benchmarks.larger_jobs --varied" if options.varied else "benchmarks.larger_jobs"
        put_between(options.out, name, table(results).splitlines())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
