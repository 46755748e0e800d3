"""What-if answers for two causes at once, compared with the ground truth of a second simulation.

    python -m benchmarks.labelled_together --runs 40 --out docs/lab/whatif_together.md

Draws are fresh each time unless --seed repeats one. The ground truth is a second simulation without both faults.
Each answer is listed with the sum of the two separate savings. A fault that costs less than 3% of the run does not
count.
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
_MIN_RATIO, _MAX_MEMORY_RATIO, _CLOSE = 0.03, 0.9, 0.1


@dataclass(frozen=True)
class Answer:
    """One run with two faults: its true saving, the predicted one, and the sum of two separate predictions."""

    pair: tuple[str, str]
    strategy: str
    true_ratio: float
    predicted_ratio: float
    sum_ratio: float
    unavailable_reason: str
    caveat: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, simulate, predict, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.labelled_together", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=40, help="how many (default: 40)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    parser.add_argument("--out", type=Path, default=None, help="also write the table to this file")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    cases = []
    for case in answers(options.runs, seed):
        cases.append(case)
        sys.stderr.write(
            f"{' + '.join(case.pair):<48} {case.strategy:<7} costs {case.true_ratio:6.1%}: "
            f"predicted {case.predicted_ratio:6.1%}, the sum {case.sum_ratio:6.1%} {case.unavailable_reason}\n"
        )
    text = document(cases, seed)
    sys.stdout.write(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def answers(count: int, seed: int) -> Iterator[Answer]:
    """Yield answers for `count` runs with two significant faults, drawn from a seed."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        while count:
            first, second = (FAULTS[name] for name in draw.sample(_NAMES, 2))
            answer = _answer(draw, first, second, Path(folder) / "run") if _can_combine(first, second) else None
            if answer is not None:
                count -= 1
                yield answer


def document(cases: Sequence[Answer], seed: int) -> str:
    """Return the scores as Markdown: over all, then each run."""
    answered = [case for case in cases if not case.unavailable_reason]
    unanswered = "; ".join(
        f"{' + '.join(case.pair)}: {case.unavailable_reason}" for case in cases if case.unavailable_reason
    )
    lines = [
        "# What-if answers for two causes at once\n",
        f"    python -m benchmarks.labelled_together --runs {len(cases)} --out docs/lab/whatif_together.md\n",
        f"{len(cases)} **simulated** runs with two faults each, drawn with seed {seed}. *Saved*: share of the step,",
        "from a second simulation without both, as `tracekit whatif --together` predicts it, and the sum of separate",
        f"predictions. {len(cases) - len(answered)} of {len(cases)} have no answer. {unanswered}\n",
        "| | runs | median error | largest error | within 10% |",
        "|---|---|---|---|---|",
        f"| together | {_scores([case.predicted_ratio / case.true_ratio - 1 for case in answered])} |",
        f"| sum of separate savings | {_scores([case.sum_ratio / case.true_ratio - 1 for case in answered])} |\n",
        "| faults | strategy | saved | together | sum | note |",
        "|---|---|---|---|---|---|",
    ]
    for case in sorted(answered, key=lambda case: -abs(case.predicted_ratio / case.true_ratio - 1)):
        ratios = " | ".join(f"{ratio:.1%}" for ratio in (case.true_ratio, case.predicted_ratio, case.sum_ratio))
        lines.append(
            f"| {', '.join(case.pair)} | {case.strategy} | {ratios} | {'lower confidence' if case.caveat else ''} |"
        )
    return "\n".join(lines) + "\n"


def _scores(errors: Sequence[float]) -> str:
    off = [abs(error) for error in errors]
    close = sum(error <= _CLOSE for error in off) / len(off)
    return f"{len(off)} | {statistics.median(off):.1%} | {max(off):.1%} | {close:.0%}"


def _can_combine(first: Fault, second: Fault) -> bool:
    return bool(set(first.strategies) & set(second.strategies)) and CAUSE_OF[first.name] != CAUSE_OF[second.name]


def _answer(draw: random.Random, first: Fault, second: Fault, out: Path) -> Answer | None:
    requests = (FaultRequest(first, ()), FaultRequest(second, ()))
    try:
        job = second.prepare(first.prepare(labelled_savings.draw_job(draw, first)))
        if not _fits(job, requests):
            return None
        healthy = run.simulate(job, (), out, arguments={"seed": job.seed}, force=True)
        done = run.simulate(job, requests, out, arguments={"seed": job.seed}, force=True)
    except InputError:
        return None
    whole_ns = done.recording.total_ns
    cost_ns = {fault.fault: fault.cost_ns * len(fault.steps) for fault in done.known_faults}
    if min(cost_ns.get(fault.name, 0) for fault in (first, second)) < _MIN_RATIO * whole_ns:
        return None
    loaded = tracekit.load(str(out), cache=False)
    causes = [CAUSE_OF[fault.name] for fault in (first, second)]
    together = savings.combined_saving(loaded, causes)
    sum_ratio = sum(savings.saving(loaded, cause).saved_ratio for cause in causes)
    true_ratio = 1 - healthy.recording.total_ns / whole_ns
    pair = (first.name, second.name)
    return Answer(
        pair, job.strategy, true_ratio, together.saved_ratio, sum_ratio, together.unavailable_reason, together.caveat
    )


def _fits(job: Job, requests: Sequence[FaultRequest]) -> bool:
    peak_bytes = max(map(memory.peak_bytes, (job, faults.inject(job, requests))))
    return peak_bytes <= _MAX_MEMORY_RATIO * job.hardware.memory_bytes


if __name__ == "__main__":
    sys.exit(main())
