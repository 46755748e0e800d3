"""What-if answers to two causes at once against the truth: what a run with two faults would save without both.

    python -m benchmarks.labelled_together --runs 40 --out docs/whatif_together.md

Draws are fresh each time unless --seed repeats one. The truth simulates again without both faults. Beside each answer
stands the sum of what the two save alone, which is what a reader would take without it. A fault that costs less than 3%
of the run does not count.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tracekit
from benchmarks import labelled_savings
from benchmarks.labelled_savings import CAUSE_OF
from tracekit.errors import InputError
from tracekit.replay.graph import savings
from tracekit.simulate import faults, memory, run
from tracekit.simulate.faults import FAULTS, Fault, FaultRequest
from tracekit.simulate.job import Job

_NAMES = tuple(name for name in CAUSE_OF if name != "slow-network")
_MATTERS, _FULL, _CLOSE = 0.03, 0.9, 0.1


@dataclass(frozen=True)
class Answer:
    """One run with two faults: what its step costs by the truth, saved by the replay, and by the sum of two replays."""

    pair: tuple[str, str]
    strategy: str
    true_ratio: float
    told_ratio: float
    sum_ratio: float
    why_not: str
    caveat: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, simulate, ask, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.labelled_together", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    parser.add_argument("--out", type=Path, default=None, help="write the table to this file besides")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    found = []
    for each in answers(options.runs, seed):
        found.append(each)
        sys.stderr.write(
            f"{' + '.join(each.pair):<48} {each.strategy:<7} costs {each.true_ratio:6.1%}: "
            f"told {each.told_ratio:6.1%}, the sum {each.sum_ratio:6.1%} {each.why_not}\n"
        )
    text = document(found, seed)
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def answers(count: int, seed: int) -> Iterator[Answer]:
    """Yield as many runs with two faults that both matter, drawn from a seed."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        while count:
            one, other = (FAULTS[name] for name in draw.sample(_NAMES, 2))
            answer = _asked(draw, one, other, Path(folder) / "run") if _can_meet(one, other) else None
            if answer is not None:
                count -= 1
                yield answer


def document(found: Sequence[Answer], seed: int) -> str:
    """Return the scores as Markdown: over all, then each run."""
    told = [each for each in found if not each.why_not]
    silent = "; ".join(f"{' + '.join(each.pair)}: {each.why_not}" for each in found if each.why_not)
    lines = [
        "# What-if answers to two causes at once\n",
        f"    python -m benchmarks.labelled_together --runs {len(found)} --out docs/whatif_together.md\n",
        f"{len(found)} **simulated** runs with two faults each, drawn with seed {seed}. *Saved*: of the step, as",
        "simulating again without both has it, as `tracekit whatif --together` predicts it, and the sum of what it",
        f"predicts for each alone. {len(found) - len(told)} of {len(found)} got no answer. {silent}\n",
        "| | runs | off by, median | off by, most | within 10% |",
        "|---|---|---|---|---|",
        f"| together | {_scores([each.told_ratio / each.true_ratio - 1 for each in told])} |",
        f"| the sum of each alone | {_scores([each.sum_ratio / each.true_ratio - 1 for each in told])} |\n",
        "| faults | strategy | saved | together | the sum | said besides |",
        "|---|---|---|---|---|---|",
    ]
    for each in sorted(told, key=lambda one: -abs(one.told_ratio / one.true_ratio - 1)):
        ratios = " | ".join(f"{ratio:.1%}" for ratio in (each.true_ratio, each.told_ratio, each.sum_ratio))
        lines.append(f"| {', '.join(each.pair)} | {each.strategy} | {ratios} | {'less sure' if each.caveat else ''} |")
    return "\n".join(lines) + "\n"


def _scores(errors: Sequence[float]) -> str:
    off = [abs(error) for error in errors]
    close = sum(error <= _CLOSE for error in off) / len(off)
    return f"{len(off)} | {statistics.median(off):.1%} | {max(off):.1%} | {close:.0%}"


def _can_meet(one: Fault, other: Fault) -> bool:
    return bool(set(one.strategies) & set(other.strategies)) and CAUSE_OF[one.name] != CAUSE_OF[other.name]


def _asked(draw: random.Random, one: Fault, other: Fault, out: Path) -> Answer | None:
    asked = (FaultRequest(one, ()), FaultRequest(other, ()))
    try:
        job = other.prepare(one.prepare(labelled_savings.drawn(draw, one)))
        if not _fits(job, asked):
            return None
        healthy = run.simulate(job, (), out, arguments={"seed": job.seed}, force=True)
        done = run.simulate(job, asked, out, arguments={"seed": job.seed}, force=True)
    except InputError:
        return None
    whole_ns = done.recording.total_ns
    cost_ns = {known.fault: known.cost_ns * len(known.steps) for known in done.known}
    if min(cost_ns.get(fault.name, 0) for fault in (one, other)) < _MATTERS * whole_ns:
        return None
    loaded = tracekit.load(str(out), cache=False)
    causes = [CAUSE_OF[fault.name] for fault in (one, other)]
    together = savings.combined_saving(loaded, causes)
    alone = sum(savings.saving(loaded, cause).saved_ratio for cause in causes)
    true_ratio = 1 - healthy.recording.total_ns / whole_ns
    pair = (one.name, other.name)
    return Answer(
        pair, job.strategy, true_ratio, together.saved_ratio, alone, together.unavailable_reason, together.caveat
    )


def _fits(job: Job, asked: Sequence[FaultRequest]) -> bool:
    most = max(memory.peak_bytes(each) for each in (job, faults.inject(job, asked)))
    return most <= _FULL * job.hardware.memory_bytes


if __name__ == "__main__":
    sys.exit(main())
