"""Memory rules against the truth: simulated programs drawn at random, each with a fault or none.

    python -m benchmarks.memory_faults --runs 200

Draws are fresh each time unless --seed repeats one. A rule must fire on the programs with its fault and on no other,
but one: what leaks, what changes its size and what another stream caches cuts up memory too, so of those MEM008 may
speak, and need not.
"""

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.memory_programs import CHURN, FAULTS, FRAGMENTATION, LEAK, RETRY, run_of
from tracekit.rules.allocator import AllocatorRetry, FragmentedMemory
from tracekit.rules.engine import check
from tracekit.rules.memory_footprint import GrowingMemory
from tracekit.rules.memory_reuse import ChangingSizes
from tracekit.rules.rule import Rule

RULES: dict[str, type[Rule]] = {
    LEAK: GrowingMemory,
    CHURN: ChangingSizes,
    FRAGMENTATION: FragmentedMemory,
    RETRY: AllocatorRetry,
}
_ALSO = {FRAGMENTATION: (LEAK, CHURN, RETRY)}
"""Faults that another one brings along: the rules of the others may report too."""
_HEALTHY = 0.3


@dataclass(frozen=True)
class Judged:
    """One program: the fault that it has, and those that the rules reported."""

    fault: str | None
    reported: frozenset[str]


@dataclass(frozen=True)
class Score:
    """How a rule did."""

    fault: str
    right: int
    wrong: int
    missed: int

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
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_faults", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="how many (default: 200)")
    parser.add_argument("--seed", type=int, default=None, help="of the draws (default: the time)")
    options = parser.parse_args(arguments)
    seed = time.time_ns() % 1_000_000 if options.seed is None else options.seed
    results = list(judge_programs(options.runs, seed))
    healthy = [result for result in results if result.fault is None]
    alarms = sum(bool(result.reported) for result in healthy)
    sys.stdout.write(
        f"{len(results)} simulated programs, --seed {seed}; {len(healthy)} healthy, {alarms} with false alarms\n\n"
    )
    sys.stdout.write(table(results))
    return 0


def judge_programs(count: int, seed: int) -> Iterator[Judged]:
    """Yield programs drawn from a seed, run and judged."""
    draw = random.Random(seed)
    for _ in range(count):
        fault = None if draw.random() < _HEALTHY else draw.choice(FAULTS)
        run = run_of(draw, fault)
        findings = check(run, [rule() for rule in RULES.values()]).findings
        codes = {finding.code for finding in findings}
        yield Judged(fault, frozenset(name for name, rule in RULES.items() if rule.code in codes))


def score(results: Sequence[Judged], fault: str) -> Score:
    """Score of the rule of a fault."""
    right = sum(result.fault == fault and fault in result.reported for result in results)
    other = [result for result in results if result.fault != fault and result.fault not in _ALSO.get(fault, ())]
    missed = sum(result.fault == fault and fault not in result.reported for result in results)
    return Score(fault, right, sum(fault in result.reported for result in other), missed)


def table(results: Sequence[Judged]) -> str:
    """Return the scores of the rules as Markdown."""
    lines = ["| fault | rule | right | wrong | missed | precision | recall |", f"|{'---|' * 7}"]
    for row in (score(results, fault) for fault in FAULTS):
        shares = " | ".join("" if share is None else f"{share:.1%}" for share in (row.precision, row.recall))
        lines.append(f"| {row.fault} | {RULES[row.fault].code} | {row.right} | {row.wrong} | {row.missed} | {shares} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
