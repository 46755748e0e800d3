"""How well a recording of few GPUs predicts the step of many: drawn jobs, simulated at both sizes.

    python -m benchmarks.larger_jobs [--jobs 40] [--seed 1] [--out docs/lab/larger_jobs.md]

A job is drawn (strategy, layers, batch, machine, network), simulated on a few nodes and written as traces, which
`tracekit whatif --gpus` reads. The truth is the simulation of the larger job with all its ranks, each with a jitter of
its own.
"""

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tracekit
from benchmarks.documents import put_between
from tracekit.plan import hardware, models
from tracekit.replay.graph import larger_jobs
from tracekit.replay.graph.larger_jobs import Network
from tracekit.simulate import engine, run
from tracekit.simulate.job import Job

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
        return replace(self.job, gpus=gpus, ranks_written=gpus)

    @property
    def states_network(self) -> bool:
        """Whether the prediction gets bandwidth and latency between nodes."""
        return self.job.gpus == self.job.hardware.gpus_per_node or self.job.seed % 2 == 0

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
    layout = f"{job.strategy}, {job.model.layers} layers, {job.seq} × {job.micro_batches} tokens, {job.hardware.name}"
    sizes = f"{job.gpus} → {drawn.larger.gpus} | {'given' if drawn.states_network else 'recorded'}"
    times = " | ".join(f"{ns / 1e6:.1f}" for ns in (result.recorded_ns, result.true_ns, result.predicted_ns))
    within = "yes" if result.is_within else "no"
    return f"| {layout} | {sizes} | {times} | {result.error_ratio:+.1%} | {within} |"


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
    parser.add_argument("--times", type=int, default=8, help="how many times as large the predicted job is")
    parser.add_argument("--seed", type=int, default=201)
    parser.add_argument("--out", type=Path, metavar="FILE", help="replace the table in FILE instead of printing it")
    options = parser.parse_args(arguments)
    results = []
    for seed in range(options.seed, options.seed + options.jobs):
        drawn = draw(seed, options.times)
        result = outcome(drawn)
        sys.stderr.write(row(result) + "\n")
        results.append(result)
    if options.out is None:
        sys.stdout.write(table(results))
    else:
        put_between(options.out, "benchmarks.larger_jobs", table(results).splitlines())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
