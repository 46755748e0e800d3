"""Rules against the truth: simulated runs drawn at random, each with a fault or none, judged by all rules there are.

    python -m benchmarks.labelled_runs --runs 200

Draws are fresh each time unless --seed repeats one. A rule must fire where the truth holds its code and the cost
matters, and stay silent where the truth doesn't hold it; costs below that count neither way. What a setting costs by
itself must be found where nothing else is wrong: beside another fault it may be that fault's doing.
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
from tracekit.checking import check
from tracekit.errors import InputError
from tracekit.rule import Finding, Severity
from tracekit.rules import all_rules
from tracekit.simulate import faults, hardware, models, run
from tracekit.simulate.faults import Asked
from tracekit.simulate.job import DDP, FSDP1, FSDP2, HSDP, YAFSDP, Job
from tracekit.simulate.truth import Known

_STRATEGIES = (DDP, FSDP1, FSDP2, HSDP, YAFSDP)
_HEALTHY = 0.25  # share of the runs that get no fault
_MATTERS = 0.03  # share of the run from which on a fault must be found
_MATTERS_OF = {"COMM001": 0.25}  # reports from 20% of the step on
_DATA = "DATA"
_TRUTH_OF = {"MEM007": "MEM001"}
"""The code under which the truth holds what a rule is about: the simulated retries, by the calls that they make."""


@dataclass(frozen=True)
class Judged:
    """One run: what was asked of it, what is known of it, what the rules said (warnings and errors)."""

    job: Job
    asked: tuple[Asked, ...]
    known: tuple[Known, ...]
    total_ns: int
    findings: tuple[Finding, ...]

    def share(self, code: str) -> float:
        """Return which share of the run the faults of a code cost; 0 where there is none."""
        truth = _TRUTH_OF.get(code, code)
        return sum(each.cost_ns * len(each.steps) for each in self.known if each.code == truth) / self.total_ns

    def must_be_found(self, code: str) -> bool:
        """Whether the rule of a code is to fire."""
        asked = {each.fault.code for each in self.asked}
        return (not asked or _TRUTH_OF.get(code, code) in asked) and self.share(code) >= _MATTERS_OF.get(code, _MATTERS)

    def found(self, code: str) -> list[Finding]:
        """Return the findings of a code."""
        return [finding for finding in self.findings if finding.code == code]


@dataclass(frozen=True)
class Score:
    """How a rule did: right and wrong alarms, misses, and how far its costs are off at the median (None: no cost)."""

    code: str
    right: int
    wrong: int
    missed: int
    cost_error: float | None

    @property
    def precision(self) -> float | None:
        """Return the share of alarms that are right; None without any."""
        return self.right / (self.right + self.wrong) if self.right + self.wrong else None

    @property
    def recall(self) -> float | None:
        """Return the share of faults that are found; None without any."""
        return self.right / (self.right + self.missed) if self.right + self.missed else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw, simulate, judge, print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.labelled_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    runs = list(judged(options.runs, seed))
    sys.stdout.write(f"{len(runs)} simulated runs, --seed {seed}\n\n{table(runs)}")
    return 0


def judged(count: int, seed: int) -> Iterator[Judged]:
    """Yield runs drawn from a seed, simulated, written, loaded and judged."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            yield _judged(draw, Path(folder) / str(number))


def score(runs: Sequence[Judged], code: str) -> Score:
    """Return how the rule of a code did on the runs."""
    right = [each for each in runs if each.found(code) and each.must_be_found(code)]
    wrong = sum(bool(each.found(code)) and each.share(code) <= 0 for each in runs)
    missed = sum(not each.found(code) and each.must_be_found(code) for each in runs)
    return Score(code, len(right), wrong, missed, _cost_error(right, code))


def table(runs: Sequence[Judged]) -> str:
    """Return the scores of all rules as Markdown, and which faults have no rule yet."""
    codes = sorted({rule.code for rule in all_rules() if not rule.code.startswith(_DATA)})
    lines = ["| rule | right | wrong | missed | precision | recall | cost off by |", f"|{'---|' * 7}"]
    for found in (score(runs, code) for code in codes):
        shares = (found.precision, found.recall, found.cost_error)
        told = " | ".join("" if share is None else f"{share:.0%}" for share in shares)
        lines.append(f"| {found.code} | {found.right} | {found.wrong} | {found.missed} | {told} |")
    without = sorted({fault.code for fault in faults.FAULTS.values()} - set(codes))
    unjudged = f"\nNo rule yet for {', '.join(without)}.\n" if without else ""
    return "\n".join(lines) + "\n" + unjudged


def _judged(draw: random.Random, out: Path) -> Judged:
    while True:  # until a job is drawn that fits into memory
        job, asked = _drawn(draw)
        try:
            done = run.simulate(job, asked, out, arguments={"seed": job.seed}, force=True)
        except InputError:
            continue
        loaded = tracekit.load(str(out), cache=False)
        findings = tuple(f for f in check(loaded).findings if f.severity >= Severity.WARNING)
        return Judged(done.job, asked, tuple(done.known), done.recording.total_ns, findings)


def _drawn(draw: random.Random) -> tuple[Job, tuple[Asked, ...]]:
    strategy = draw.choice(_STRATEGIES)
    model = models.find(draw.choice(("llama2-7b", "llama2-13b", "llama3-8b")), layers=draw.choice((3, 4, 6)))
    gpus = draw.choice((16, 32, 64) if strategy == HSDP else (8, 16, 32, 64))
    machine, seq = hardware.find(draw.choice(tuple(hardware.HARDWARE))), draw.choice((2048, 4096, 8192))
    job = Job(strategy, model, machine, gpus, seq, steps=4, seed=draw.randrange(1 << 20), ranks_written=3)
    possible = [fault for fault in faults.FAULTS.values() if strategy in fault.strategies]
    if draw.random() < _HEALTHY:
        return job, ()
    return replace(job, micro_batches=draw.choice((1, 1, 2))), (Asked(draw.choice(possible), ()),)


def _cost_error(right: Sequence[Judged], code: str) -> float | None:
    errors = []
    for each in right:
        told_ns = max(finding.cost_ns for finding in each.found(code))
        true_ns = sum(known.cost_ns for known in each.known if known.code == _TRUTH_OF.get(code, code))
        if told_ns:
            errors.append(abs(told_ns / true_ns - 1))
    return statistics.median(errors) if errors else None


if __name__ == "__main__":
    sys.exit(main())
