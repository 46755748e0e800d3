"""What-if answers compared with recorded pairs: trainings with and without a fault, alternating on this machine.

    python -m benchmarks.recorded_savings --pairs 8 --out docs/lab/whatif_recorded.md

Each pair is a training without the fault and, right after it, the same with it. The cost of the fault is the difference
of the median profiled steps, by median over the pairs; `tracekit whatif` predicts it from the faulty recording alone.
Other load on the machine disturbs the comparison: the spread over the pairs shows how much.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

import tracekit
from benchmarks.yafsdp_measures import median_with_interval
from tracekit.replay.graph import savings

_ALL = (
    "--device cpu --model micro --max-norm 0 --keep 1 --no-memory --profile-wait 4 --profile-warmup 2 "
    "--profile-active 10 --steps 17"
)
_TWO_RANKS = f"{_ALL} --batch 8 --tokens 128 --strategy fsdp2 --world-size 2 --prefetch 1"
_ONE_RANK = f"{_ALL} --batch 2 --tokens 32 --strategy ddp --world-size 1"


@dataclass(frozen=True)
class Case:
    """A fault of the trainers, the cause that a replay removes, and the options of both trainings."""

    fault: str
    cause: str
    options: str


CASES = (
    Case("slow-rank=1:20ms", "straggler", _TWO_RANKS),
    Case("late-launch=10ms", "late-launch", _ONE_RANK),
    Case("dataloader=50ms", "data-loading", _ONE_RANK),
)


@dataclass(frozen=True)
class Pair:
    """Step times of one pair, and the saving that the faulty recording predicts, in ns."""

    healthy_ns: int
    faulty_ns: int
    predicted_ns: int

    @property
    def cost_ns(self) -> int:
        """Cost of the fault in this pair."""
        return self.faulty_ns - self.healthy_ns


def measure_pairs(case: Case, pairs: int, folder: Path) -> list[Pair]:
    """Record `pairs` pairs in alternation. Raises CalledProcessError if a training fails."""
    recorded = []
    for number in range(pairs):
        healthy, faulty = folder / f"{number}-healthy", folder / f"{number}-faulty"
        _train(case.options, healthy)
        _train(f"{case.options} --fault {case.fault}", faulty)
        healthy_ns, _ = _medians(healthy, case.cause)
        faulty_ns, predicted_ns = _medians(faulty, case.cause)
        recorded.append(Pair(healthy_ns, faulty_ns, predicted_ns))
    return recorded


def row(case: Case, pairs: Sequence[Pair]) -> str:
    """Return the table row of one case."""
    costs, predictions = [pair.cost_ns / 1e6 for pair in pairs], [pair.predicted_ns / 1e6 for pair in pairs]
    step_ms = statistics.median(pair.faulty_ns for pair in pairs) / 1e6
    off = statistics.median(predictions) / statistics.median(costs) - 1
    cost, predicted = _interval(costs), _interval(predictions)
    return f"| {case.fault} | {case.cause} | {step_ms:.1f} ms | {cost} | {predicted} | {off:+.0%} |"


def _interval(values_ms: Sequence[float]) -> str:
    middle, low, high = median_with_interval(values_ms)
    return f"{middle:.1f} ms" + ("" if low is None else f" ({low:.1f} to {high:.1f})")


def _train(options: str, out: Path) -> None:
    command = [sys.executable, "-m", "instrumented_trainers", *options.split(), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def _medians(path: Path, cause: str) -> tuple[int, int]:
    """Return the step time of the slowest rank and its potential saving, ns, each by median over the steps.

    The median ignores steps that other processes delayed.
    """
    step_table = savings.saving(tracekit.load(str(path), cache=False), cause).steps
    by_step = step_table.group_by("window", "step").agg(pl.col("duration_ns", "replayed_ns", "without_ns").max())
    saved = (by_step["replayed_ns"] - by_step["without_ns"]).median()
    return int(by_step["duration_ns"].median() or 0), int(saved or 0)  # type: ignore[arg-type]


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, compare and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recorded_savings", description=__doc__)
    parser.add_argument("--pairs", type=int, default=8, help="pairs of each fault")
    names = [case.fault.partition("=")[0] for case in CASES]
    parser.add_argument("--fault", action="append", choices=names, help="only this; repeatable")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    lines = [
        "# What-if answers on recorded pairs",
        "",
        f"    python -m benchmarks.recorded_savings --pairs {options.pairs}",
        "",
        f"{options.pairs} pairs of trainings per fault, without and with it in alternation, on CPU ranks over gloo.",
        "Medians and 95% intervals. *Cost*: how much longer the median step takes with the fault. *Predicted*: the",
        "saving from a replay of the faulty recording without the cause.",
        "",
        "| fault | removed cause | step with the fault | cost | predicted | error |",
        "|---|---|---|---|---|---|",
    ]
    for case in [case for case in CASES if case.fault.partition("=")[0] in (options.fault or names)]:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(row(case, measure_pairs(case, options.pairs, Path(folder))))
        print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    print(f"took {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
