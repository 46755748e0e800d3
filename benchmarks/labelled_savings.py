"""What-if answers compared with the ground truth: the saving without a fault, by replay and by simulation.

    python -m benchmarks.labelled_savings --runs 120 --out docs/lab/whatif_savings.md

Draws are fresh each time unless --seed repeats one. Each run is analyzed twice: with recorded event waits, and without
them, as in most real traces, where they are inferred. Costs below 3% of the run do not count.
"""

import argparse
import dataclasses
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tracekit
from tracekit.errors import InputError
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.model.trace import Trace
from tracekit.plan import hardware, models
from tracekit.replay.graph import savings
from tracekit.simulate import faults, memory, run
from tracekit.simulate.faults import Fault, FaultRequest
from tracekit.simulate.job import DDP, FSDP1, FSDP2, HSDP, YAFSDP, Job
from tracekit.sync import alignment

STRATEGIES = (DDP, FSDP1, FSDP2, HSDP, YAFSDP)
CAUSE_OF = {
    "slow-rank": "straggler",
    "straggler-from-step": "straggler",
    "slow-link": "slow-link",
    "late-launch": "late-launch",
    "host-sync": "blocking-sync",
    "dataloader-stall": "data-loading",
    "checkpoint-stall": "checkpoint",
    "allocator-retry": "allocator",
    "give-way": "give-way",
    "serialized-communicators": "shared-queue",
    "sm-contention": "slowed-compute",
    "starved-collectives": "slowed-collectives",
    "no-prefetch": "late-gathers",
    "small-collectives": "small-collectives",
    "reduce-every-microbatch": "micro-batch-reductions",
    "needless-recomputation": "recomputation",
    "slow-network": "communication",
}
"""The cause that the replay removes, by fault. slow-network is the cost of all communication: it is never requested."""
_DRAWN = [name for name in CAUSE_OF if name not in ("slow-network", "give-way")]
_MIN_RATIO = 0.03
_MAX_MEMORY_RATIO = 0.9
_CLOSE = 0.1


@dataclass(frozen=True)
class Answer:
    """One fault of one run: its true cost, and the predicted saving with recorded and with inferred waits."""

    fault: str
    strategy: str
    share: float
    true_ns: int
    predicted_ns: float
    inferred_ns: float
    replay_error: float
    unavailable_reason: str

    def error(self, *, inferred: bool) -> float:
        """Return the relative error of the answer."""
        return (self.inferred_ns if inferred else self.predicted_ns) / self.true_ns - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, simulate, predict, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.labelled_savings", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=120, help="how many (default: 120)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    parser.add_argument("--fault", action="append", default=[], choices=_DRAWN, help="draw only this; repeatable")
    parser.add_argument("--out", type=Path, default=None, help="also write the table to this file")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    cases: list[Answer] = []
    for case in answers(options.runs, seed, tuple(options.fault) or tuple(_DRAWN)):
        cases.append(case)
        sys.stderr.write(
            f"{case.fault:<24} {case.strategy:<7} costs {case.share:6.1%}: off by {case.error(inferred=False):+7.1%}, "
            f"{case.error(inferred=True):+7.1%} with inferred waits {case.unavailable_reason}\n"
        )
    text = document(cases, options.runs, seed)
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def answers(count: int, seed: int, names: Sequence[str]) -> Iterator[Answer]:
    """Yield the answers for significant faults of runs drawn from a seed, each fault equally often."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            yield from _answers(draw, faults.FAULTS[names[number % len(names)]], Path(folder) / "run")


def document(cases: Sequence[Answer], runs: int, seed: int) -> str:
    """Return the scores as Markdown: by fault, then overall. Faults without an answer are only counted."""
    answered = [case for case in cases if not case.unavailable_reason]
    unanswered = sorted({f"{case.fault} ({case.unavailable_reason})" for case in cases if case.unavailable_reason})
    lines = [
        "# What-if answers on simulated runs\n",
        f"    python -m benchmarks.labelled_savings --runs {runs} --out docs/lab/whatif_savings.md\n",
        f"{runs} **simulated** runs drawn with seed {seed}. *Error*: the saving that `tracekit whatif` predicts",
        "compared with a second simulation without the fault, for faults that cost at least 3% of the run.",
        "*Inferred*: the same runs with event waits of streams removed from their traces. The unchanged replay",
        "differs from the recorded step by "
        f"{max((case.replay_error for case in cases), default=0.0):.2%} at most. "
        f"{len(cases) - len(answered)} of {len(cases)} causes have no answer. {' '.join(unanswered)}\n",
        "| fault | without | answers | median error | largest error | within 10% | inferred: median | within 10% |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(CAUSE_OF):
        fault_answers = [case for case in answered if case.fault == name]
        if fault_answers:
            lines.append(f"| {name} | {CAUSE_OF[name]} | {_scores(fault_answers)} |")
    lines.append(f"| all | | {_scores(answered)} |" if answered else "")
    return "\n".join(lines) + "\n"


def _scores(cases: Sequence[Answer]) -> str:
    exact, inferred = ([abs(case.error(inferred=which)) for case in cases] for which in (False, True))
    close = [sum(error <= _CLOSE for error in errors) / len(errors) for errors in (exact, inferred)]
    return (
        f"{len(cases)} | {statistics.median(exact):.1%} | {max(exact):.1%} | {close[0]:.0%} | "
        f"{statistics.median(inferred):.1%} | {close[1]:.0%}"
    )


def _answers(draw: random.Random, fault: Fault, out: Path) -> Iterator[Answer]:
    while True:  # until a drawn job supports the fault and fits in memory
        job = draw_job(draw, fault)
        requests = (FaultRequest(fault, ()),)
        try:
            if (
                max(map(memory.peak_bytes, (job, faults.inject(job, requests))))
                <= _MAX_MEMORY_RATIO * job.hardware.memory_bytes
            ):
                done = run.simulate(job, requests, out, arguments={"seed": job.seed}, force=True)
                break
        except InputError:
            continue
    loaded = tracekit.load(str(out), cache=False)
    bare = without_waits(loaded)
    for entry in done.known_faults:
        share = entry.cost_ns * len(entry.steps) / done.recording.total_ns
        if share < _MIN_RATIO or (
            entry.fault == "slow-network" and entry.fault in {"slow-network", fault.name} and fault.code == "COMM001"
        ):
            continue
        recorded, inferred = (savings.saving(source, CAUSE_OF[entry.fault]) for source in (loaded, bare))
        per = job.steps / len(entry.steps)
        replayed = savings.replayed_steps(loaded)
        off = float((replayed["replayed_ns"] / replayed["duration_ns"] - 1).abs().max() or 0)  # type: ignore[arg-type]
        yield Answer(
            entry.fault,
            job.strategy,
            share,
            entry.cost_ns,
            recorded.saved_ns * per,
            inferred.saved_ns * per,
            off,
            recorded.unavailable_reason,
        )


def draw_job(draw: random.Random, fault: Fault) -> Job:
    """Draw a job that supports the fault."""
    strategy = draw.choice([name for name in STRATEGIES if name in fault.strategies])
    model = models.find(draw.choice(("llama2-7b", "llama2-13b", "llama3-8b")), layers=draw.choice((3, 4, 6)))
    gpus = draw.choice((16, 32, 64) if strategy == HSDP else (8, 16, 32, 64))
    machine, seq = hardware.find(draw.choice(tuple(hardware.HARDWARE))), draw.choice((2048, 4096, 8192))
    job = Job(strategy, model, machine, gpus, seq, steps=4, seed=draw.randrange(1 << 20), ranks_written=3)
    return replace(job, micro_batches=draw.choice((1, 1, 2)))


def without_waits(loaded: Run) -> Run:
    """Return a run whose traces lack the event waits of streams."""
    return Run(
        loaded.path,
        [_without_syncs(source) for source in loaded.sources],
        manifest=loaded.manifest,
        align=alignment.offsets,
    )


def _without_syncs(source: Source) -> Source:
    def read() -> Trace:
        trace = source.read()
        tables = {**trace.tables, "syncs": schema.SYNCS.empty()}
        return Trace(trace.rank, trace.window, trace.path, header=trace.header, **tables)

    return dataclasses.replace(source, read=read)


if __name__ == "__main__":
    sys.exit(main())
