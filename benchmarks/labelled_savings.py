"""What-if answers against the truth: what a run would save without its fault, by replay and by simulating again.

    python -m benchmarks.labelled_savings --runs 120 --out docs/whatif_savings.md

Draws are fresh each time unless --seed repeats one. Each run is asked twice: with CUDA's waits of streams for events in
its traces, and without them, as most real traces are: then they are inferred. Costs below 3% of the run do not count.
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
from tracekit.model.run import Run, Source
from tracekit.model.trace import Trace
from tracekit.plan import models
from tracekit.replay.graph import savings
from tracekit.simulate import faults, hardware, memory, run
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
"""By fault: the cause that the replay takes away. slow-network is what all communication costs: it is not asked for."""
_ASKABLE = [name for name in CAUSE_OF if name not in ("slow-network", "give-way")]
_MATTERS = 0.03
_FULL = 0.9
_CLOSE = 0.1


@dataclass(frozen=True)
class Answer:
    """One fault of one run: what its steps cost by the truth, and saved by the replay, with and without known waits."""

    fault: str
    strategy: str
    share: float
    true_ns: int
    told_ns: float
    inferred_ns: float
    replay_error: float
    why_not: str

    def error(self, *, inferred: bool) -> float:
        """Return by what share of the truth the answer is off."""
        return (self.inferred_ns if inferred else self.told_ns) / self.true_ns - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, simulate, ask, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.labelled_savings", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=120, help="how many (default: 120)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    parser.add_argument("--fault", action="append", default=[], choices=_ASKABLE, help="draw only this; repeatable")
    parser.add_argument("--out", type=Path, default=None, help="write the table to this file besides")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    found: list[Answer] = []
    for each in answers(options.runs, seed, tuple(options.fault) or tuple(_ASKABLE)):
        found.append(each)
        sys.stderr.write(
            f"{each.fault:<24} {each.strategy:<7} costs {each.share:6.1%}: off by {each.error(inferred=False):+7.1%}, "
            f"{each.error(inferred=True):+7.1%} with inferred waits {each.why_not}\n"
        )
    text = document(found, options.runs, seed)
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def answers(count: int, seed: int, names: Sequence[str]) -> Iterator[Answer]:
    """Yield the faults that matter of runs drawn from a seed, each fault as often as the others."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            yield from _asked(draw, faults.FAULTS[names[number % len(names)]], Path(folder) / "run")


def document(found: Sequence[Answer], runs: int, seed: int) -> str:
    """Return the scores as Markdown: by fault, then over all. What got no answer is counted, and scored no further."""
    answered = [each for each in found if not each.why_not]
    silent = sorted({f"{each.fault} ({each.why_not})" for each in found if each.why_not})
    lines = [
        "# What-if answers on runs whose truth is known\n",
        f"    python -m benchmarks.labelled_savings --runs {runs} --out docs/whatif_savings.md\n",
        f"{runs} **simulated** runs drawn with seed {seed}. *Off by*: the saving that `tracekit whatif` predicts",
        "against the truth, which simulates again without the fault; only faults that cost 3% of the run or more.",
        "*Inferred*: the same runs with CUDA's waits of streams taken out of their traces. Replayed with nothing",
        "changed, the recorded step is off by "
        f"{max((each.replay_error for each in found), default=0.0):.2%} at most. "
        f"{len(found) - len(answered)} of {len(found)} questions got no answer. {' '.join(silent)}\n",
        "| fault | without | answers | off by, median | off by, most | within 10% | inferred: median | within 10% |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(CAUSE_OF):
        mine = [each for each in answered if each.fault == name]
        if mine:
            lines.append(f"| {name} | {CAUSE_OF[name]} | {_scores(mine)} |")
    lines.append(f"| all | | {_scores(answered)} |" if answered else "")
    return "\n".join(lines) + "\n"


def _scores(found: Sequence[Answer]) -> str:
    told, inferred = ([abs(each.error(inferred=which)) for each in found] for which in (False, True))
    close = [sum(error <= _CLOSE for error in errors) / len(errors) for errors in (told, inferred)]
    return (
        f"{len(found)} | {statistics.median(told):.1%} | {max(told):.1%} | {close[0]:.0%} | "
        f"{statistics.median(inferred):.1%} | {close[1]:.0%}"
    )


def _asked(draw: random.Random, fault: Fault, out: Path) -> Iterator[Answer]:
    while True:  # until a job is drawn that can have the fault, and fits into memory with some to spare
        job = drawn(draw, fault)
        asked = (FaultRequest(fault, ()),)
        try:
            if (
                max(memory.peak_bytes(each) for each in (job, faults.inject(job, asked)))
                <= _FULL * job.hardware.memory_bytes
            ):
                done = run.simulate(job, asked, out, arguments={"seed": job.seed}, force=True)
                break
        except InputError:
            continue
    loaded = tracekit.load(str(out), cache=False)
    bare = without_waits(loaded)
    for known in done.known:
        share = known.cost_ns * len(known.steps) / done.recording.total_ns
        if share < _MATTERS or (
            known.fault == "slow-network" and known.fault in {"slow-network", fault.name} and fault.code == "COMM001"
        ):
            continue
        told, inferred = (savings.saving(each, CAUSE_OF[known.fault]) for each in (loaded, bare))
        per = job.steps / len(known.steps)
        replayed = savings.replayed_steps(loaded)
        off = float((replayed["replayed_ns"] / replayed["duration_ns"] - 1).abs().max() or 0)  # type: ignore[arg-type]
        yield Answer(
            known.fault,
            job.strategy,
            share,
            known.cost_ns,
            told.saved_ns * per,
            inferred.saved_ns * per,
            off,
            told.unavailable_reason,
        )


def drawn(draw: random.Random, fault: Fault) -> Job:
    """Draw a job that can have the fault."""
    strategy = draw.choice([each for each in STRATEGIES if each in fault.strategies])
    model = models.find(draw.choice(("llama2-7b", "llama2-13b", "llama3-8b")), layers=draw.choice((3, 4, 6)))
    gpus = draw.choice((16, 32, 64) if strategy == HSDP else (8, 16, 32, 64))
    machine, seq = hardware.find(draw.choice(tuple(hardware.HARDWARE))), draw.choice((2048, 4096, 8192))
    job = Job(strategy, model, machine, gpus, seq, steps=4, seed=draw.randrange(1 << 20), ranks_written=3)
    return replace(job, micro_batches=draw.choice((1, 1, 2)))


def without_waits(loaded: Run) -> Run:
    """Return a run whose traces do not tell which streams wait for which events."""
    return Run(loaded.path, [_bare(each) for each in loaded.sources], manifest=loaded.manifest, align=alignment.offsets)


def _bare(source: Source) -> Source:
    def read() -> Trace:
        trace = source.read()
        tables = {**trace.tables, "syncs": schema.SYNCS.empty()}
        return Trace(trace.rank, trace.window, trace.path, header=trace.header, **tables)

    return dataclasses.replace(source, read=read)


if __name__ == "__main__":
    sys.exit(main())
