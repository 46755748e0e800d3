"""Faulty configurations of the trainers with known best options: what `tracekit tune` keeps, and what that saves.

    python -m benchmarks.tune_trials --out runs/tune --budget 20 [NAME…]

records each configuration on two CPU ranks, lets `tune` try its proposals, and prints a row for each trial as Markdown.
With the default budget all ten take up to 200 minutes. Other programs on the machine make trials undecided.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracekit.conventions import python_child

_RANKS = "--device cpu --world-size 2 --model micro --max-norm 0 --no-memory"
_STEPS = "--steps 12 --profile-wait 3 --profile-warmup 1 --profile-active 8 --batch 4 --tokens 64"
_SAVES = "--steps 6 --profile-wait 2 --profile-warmup 1 --profile-active 3 --checkpoint-every 3 --batch 2 --tokens 32"
_MICRO_BATCHES = f"{_STEPS} --batch 1 --micro-batches 8"
_PIPELINE = f"{_STEPS} --pp 2 --micro-batches 2 --batch 8"
_HEADER = (
    "| configuration | best | change | answers | predicted | measured | 99% interval | recordings | result |\n"
    "|---|---|---|---|---:|---:|---:|---:|---|"
)


@dataclass(frozen=True)
class Configuration:
    """A faulty configuration: options of the trainers, variables, and the change that mends it."""

    options: str
    best: str
    variables: str = ""


CONFIGURATIONS = {
    "slow disk": Configuration(f"--strategy ddp {_SAVES} --fault slow-disk=4MB/s", "background-save"),
    "slow fsync": Configuration(f"--strategy ddp {_SAVES} --fault slow-fsync=500ms", "background-save"),
    "micro-batches, fsdp2": Configuration(f"--strategy fsdp2 {_MICRO_BATCHES}", "fewer-micro-batches"),
    "micro-batches, yafsdp": Configuration(f"--strategy yafsdp {_MICRO_BATCHES}", "fewer-micro-batches"),
    "micro-batches, fsdp1": Configuration(f"--strategy fsdp1 {_MICRO_BATCHES}", "fewer-micro-batches"),
    "gathers on demand": Configuration(f"--strategy fsdp2 {_STEPS}", "fsdp-prefetch"),
    "too many threads": Configuration(f"--strategy ddp {_STEPS}", "threads-per-rank", "OMP_NUM_THREADS=16"),
    "recomputation, ddp": Configuration(f"--strategy ddp {_STEPS} --checkpoint-layers 2", "recomputed-layers"),
    "recomputation, fsdp2": Configuration(f"--strategy fsdp2 {_STEPS} --checkpoint-layers 2", "recomputed-layers"),
    "pipeline bubble": Configuration(f"--strategy ddp {_PIPELINE}", "more-micro-batches"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Record and tune all configurations, or those named; return 1 if one could not be tuned."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune_trials", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for recordings and reports")
    parser.add_argument("--budget", default="20", metavar="MINUTES", help="of each configuration (default: 20)")
    parser.add_argument("--pairs", default="4", metavar="N", help="most recordings of each side (default: 4)")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"out of {', '.join(CONFIGURATIONS)}")
    options = parser.parse_args(arguments)
    is_complete = True
    print(_HEADER, flush=True)
    for name, configuration in CONFIGURATIONS.items():
        if options.names and name not in options.names:
            continue
        limits = ("--budget", options.budget, "--pairs", options.pairs)
        result = tune_report(configuration, options.out / name.replace(" ", "-").replace(",", ""), limits)
        is_complete &= result is not None
        for row in rows(name, configuration, result):
            print(row, flush=True)
    print(f"\nLoad of the machine at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")
    return int(not is_complete)


def tune_report(configuration: Configuration, folder: Path, limits: Sequence[str]) -> dict[str, Any] | None:
    """What `tracekit tune` reports of a configuration; None where recording or tuning failed."""
    words = [sys.executable, "-m", "instrumented_trainers", *shlex.split(f"{_RANKS} {configuration.options}")]
    variables = dict(word.split("=") for word in configuration.variables.split())
    environment = {**os.environ, **variables}
    folder.mkdir(parents=True, exist_ok=True)
    if _call([*words, "--out", str(folder / "run"), "--overwrite"], environment) is None:
        return None
    tune = ["tune", str(folder / "run"), "--run", "--format", "json", "--out", str(folder / "trials"), *limits]
    text = _call(python_child.module_command("tracekit", *tune, "--", *words), environment)
    return None if text is None else json.loads(text)


def rows(name: str, configuration: Configuration, result: dict[str, Any] | None) -> Iterator[str]:
    """A row for each trial; one that says so where there is none."""
    start = f"| {name} | `{configuration.best}` |"
    trials = [] if result is None else result["trials"]
    if not trials:
        yield f"{start} — | | | | | | {'failed' if result is None else 'nothing proposed'} |"
    for trial in trials:
        measured = "—" if trial["measured_ratio"] is None else f"{trial['measured_ratio']:.1%}"
        interval = "—" if trial["interval"] is None else " to ".join(f"{ratio:.1%}" for ratio in trial["interval"])
        count = len(trial["reference_runs"]) + len(trial["candidate_runs"])
        predicted = f"{'≤ ' if trial['is_upper_bound'] else ''}{trial['saved_ratio']:.1%}"
        yield (
            f"{start} `{trial['text']}` | {trial['code'] or 'replay'} | {predicted} | {measured} | {interval} | "
            f"{count} | {trial['outcome']} |"
        )


def _call(command: Sequence[str], environment: dict[str, str]) -> str | None:
    """Output of a command; None where it fails, whose messages go to stderr."""
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
