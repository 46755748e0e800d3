"""Constant troubles: trainings that lose time in every step, and whether `tracekit check` names why, and how much.

    python -m benchmarks.constant_troubles --pairs 3 --out docs/lab/constant_troubles.md

Small changes of one training (`benchmarks.constant_trainings`), at three sizes, each recorded right after a
healthy twin on two CPU ranks. The pairs show whether the first finding names the cause, whether the twin has no
warning, and whether the cost is within 20% of the difference between the median steps of both. Twins differ by
several milliseconds, so that a small cost takes several pairs (`--pairs`).
"""

import argparse
import itertools
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

import tracekit
from benchmarks import constant_trainings, results
from benchmarks.constant_trainings import HEALTHY, RANKS, SIZES, TROUBLES
from tracekit.analysis.checkpoint import save_stages
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.rules.engine import check
from tracekit.rules.rule import Finding, Severity

_SCRIPT = Path(constant_trainings.__file__)
_LEAST_RATIO = 0.03
"""A trouble that costs less than this share of the step need not be reported."""
_TOLERANCE = 0.2
NAMED_BY: Mapping[str, tuple[str, ...]] = {
    "recompile": ("HOST005", "HOST001", "STEP001", "STEP002"),
    "gc_one_rank": ("HOST006", "RANK001", "HOST001"), "gc_all_ranks": ("HOST006", "HOST001"),
    "threads": ("HOST007",), "logging_every_step": ("HOST001", "HOST002"), "cpu_copies": ("HOST001", "HOST002"),
    "one_core": ("HOST007",), "tiny_all_reduces": ("COMM002",), "parameter_loop": ("HOST001", "COMP008"),
    "loader_without_workers": ("HOST003",), "barriers": ("COMM001", "COMM002"), "checkpoints": ("CKPT001", "HOST001"),
    "profiler_hooks": ("HOST001",), "anomaly_mode": ("HOST001", "COMP009"), "deterministic": ("COMP010",),
    "slow_disk_log": ("HOST001",),
    "denormals": ("COMP006",), "tokenize": ("HOST001", "HOST003"), "item_per_parameter": ("HOST001", "HOST002"),
    "dtype_casts": ("COMP007",), "evaluation": ("COMP011",), "histograms": ("COMP011", "HOST002"),
    "copied_weights": ("COMP011",), "background_saves": ("HOST008",),
}  # fmt: skip
"""The rules that may name each trouble, fixed before the first recording was judged.

COMP006 to COMP011 and HOST008 were written later, after recordings of troubles that no rule was about.
"""


@dataclass(frozen=True)
class Pair:
    """What `check` says of one recording with a trouble and of its healthy twin."""

    healthy_ns: int
    troubled_ns: int
    first: Finding | None
    twin_warnings: tuple[str, ...]

    @property
    def cost_ns(self) -> int:
        """How much longer the median step takes with the trouble."""
        return self.troubled_ns - self.healthy_ns


@dataclass(frozen=True)
class Verdict:
    """What the pairs of one trouble at one size show together."""

    trouble: str
    size: str
    pairs: tuple[Pair, ...]

    @property
    def healthy_ns(self) -> float:
        """Mean of the twins' median steps."""
        return statistics.fmean(pair.healthy_ns for pair in self.pairs)

    @property
    def cost_ns(self) -> float:
        """Mean of the differences."""
        return statistics.fmean(pair.cost_ns for pair in self.pairs)

    @property
    def cost_error_ns(self) -> float | None:
        """Two standard errors of `cost_ns`; None of one pair."""
        if len(self.pairs) < 2:
            return None
        return 2 * statistics.stdev(pair.cost_ns for pair in self.pairs) / math.sqrt(len(self.pairs))

    @property
    def is_costly(self) -> bool:
        """Whether the trouble costs enough to be reported."""
        return self.cost_ns >= _LEAST_RATIO * (self.healthy_ns + self.cost_ns)

    @property
    def naming(self) -> tuple[Finding, ...]:
        """The first findings that are of a rule about this trouble, at most one of each pair."""
        return tuple(p.first for p in self.pairs if p.first is not None and p.first.code in NAMED_BY[self.trouble])

    @property
    def is_named(self) -> bool:
        """Whether the first finding names the trouble in more than half of the pairs."""
        return len(self.naming) > len(self.pairs) / 2

    @property
    def stated_ns(self) -> float:
        """Mean of the costs that the findings state; 0 without any."""
        return statistics.fmean(finding.cost_ns for finding in self.naming) if self.naming else 0.0

    @property
    def is_priced(self) -> bool:
        """Whether the stated cost is within the tolerance."""
        return self.is_named and abs(self.stated_ns - self.cost_ns) <= _TOLERANCE * self.cost_ns

    @property
    def is_certain(self) -> bool:
        """Whether the difference is known more precisely than the tolerance."""
        return self.cost_error_ns is not None and self.cost_error_ns <= _TOLERANCE * self.cost_ns


def record(size: str, folder: Path, troubles: Sequence[str]) -> None:
    """Record each trouble and its twin. Raises CalledProcessError if a rank fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ, "PYTHONPATH": str(_SCRIPT.parents[1]), "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": str(RANKS),
    }  # fmt: skip
    commands = [
        [sys.executable, str(_SCRIPT), str(rank), str(port), size, str(folder), *troubles] for rank in range(RANKS)
    ]
    ranks = [subprocess.Popen(command, env=environment) for command in commands]
    for command, process in zip(commands, ranks, strict=True):
        if process.wait():
            raise subprocess.CalledProcessError(process.returncode, command)


def judge(folder: Path) -> Pair:
    """Check a training with a trouble and its healthy twin."""
    troubled, healthy = (tracekit.load(str(folder / kind)) for kind in ("trouble", HEALTHY))
    findings = check(troubled).findings
    first = next((finding for finding in findings if finding.severity > Severity.INFO), None)
    warnings = tuple(finding.code for finding in check(healthy).findings if finding.severity > Severity.INFO)
    return Pair(_median_step_ns(healthy), _median_step_ns(troubled), first, warnings)


def _median_step_ns(run: Run) -> int:
    steps = save_stages.steps(run).group_by("window", "step").agg(pl.col("duration_ns").max())
    return int(statistics.median(steps["duration_ns"]))


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the verdicts as Markdown, with the shares above."""
    pairs = [pair for verdict in verdicts for pair in verdict.pairs]
    costly = [verdict for verdict in verdicts if verdict.is_costly]
    named = [verdict for verdict in costly if verdict.is_named]
    certain = [verdict for verdict in named if verdict.is_certain]
    tolerance = units.share(_TOLERANCE)
    lines = [
        f"- {len(verdicts)} troubles by size, {len(pairs)} pairs; {len(costly)} cost {units.share(_LEAST_RATIO)} of "
        "the step or more, on average.",
        f"- The first warning names the cause in {len(named)} of these, in more than half of their pairs.",
        f"- The healthy twin has no warning in {sum(not pair.twin_warnings for pair in pairs)} of {len(pairs)}.",
        f"- The cost is within {tolerance} of the difference (both are means of the pairs) in "
        f"{sum(v.is_priced for v in named)} of {len(named)} that are named.",
        f"- Of {len(certain)} whose difference is known to {tolerance} (two standard errors): in "
        f"{sum(v.is_priced for v in certain)}.",
        "",
        "| trouble | size | twin | difference | first warning | states | named | twins' warnings |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for verdict in verdicts:
        first = next(iter(verdict.naming), verdict.pairs[0].first)
        error_ns = verdict.cost_error_ns
        twin_warnings = Counter(code for pair in verdict.pairs for code in pair.twin_warnings)
        cells = (
            verdict.trouble, verdict.size, units.duration(verdict.healthy_ns),
            units.duration(verdict.cost_ns) + (f" ± {units.duration(error_ns)}" if error_ns is not None else ""),
            f"{first.code}: {first.claim}" if first else "—",
            units.duration(verdict.stated_ns) if verdict.naming else "—",
            f"{len(verdict.naming)} of {len(verdict.pairs)}" if verdict.is_costly else "too small",
            ", ".join(f"{code} {count}" for code, count in twin_warnings.most_common()) or "—",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Record, judge and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.constant_troubles", description=__doc__.splitlines()[0])
    parser.add_argument("--trouble", action="append", choices=list(TROUBLES), help="only this; repeatable")
    parser.add_argument("--size", action="append", choices=list(SIZES), help="only this; repeatable")
    parser.add_argument("--pairs", type=int, default=1, help="pairs of each trouble at each size (default: 1)")
    parser.add_argument("--recordings", type=Path, help="folder of recordings: those that are there are used again")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    options = parser.parse_args(arguments)
    troubles, sizes = options.trouble or list(TROUBLES), options.size or list(SIZES)
    verdicts = []
    with tempfile.TemporaryDirectory() as temporary:
        pairs = [Path(options.recordings or temporary, f"pair-{number}") for number in range(options.pairs)]
        for pair, size in itertools.product(pairs, sizes):  # one pair of each before the next: load changes slowly
            missing = [name for name in troubles if not (pair / size / name / "trouble" / "run.json").exists()]
            if missing:
                record(size, pair / size, missing)
        for size, name in itertools.product(sizes, troubles):
            verdicts.append(Verdict(name, size, tuple(judge(pair / size / name) for pair in pairs)))
    lines = ["# Constant troubles", "", *__doc__.splitlines()[4:], "", results.machine_description(), *table(verdicts)]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
