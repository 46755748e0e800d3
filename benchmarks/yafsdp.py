"""YaFSDP beside FSDP2: the same training under both, recorded in turn, measured from what was recorded.

    python -m benchmarks.yafsdp --rounds 10 --out runs/yafsdp-benchmark

Each round trains once under each strategy, in processes of their own; which goes first changes from round to round. All
numbers come from the runs' files. What stands after ``--`` goes to the trainers: ``-- --model small --tokens 128``.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.yafsdp_measures import LARGE_BYTES, MAKERS, Measured, measure, median_with_interval
from tracekit import units

BASE, CANDIDATE = STRATEGIES = ("fsdp2", "yafsdp")
RESULT_FILE = "result.json"

# Steps 9 to 13 are profiled. Of those before, the first two (buffers, caches) and the last (the profiler starts) do not
# count for the time of a step.
_WINDOW = ("--steps", "14", "--profile-wait", "8", "--profile-warmup", "1", "--profile-active", "5")
_TIMED_STEPS = range(2, 8)
_DEFAULTS = ("--device", "cpu", "--world-size", "2", "--model", "tiny", "--batch", "4", "--tokens", "256")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its table, write its result; return the exit code: 1 if a training failed."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    ours, trainers = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    parser = argparse.ArgumentParser(prog="python -m benchmarks.yafsdp", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="trainings under each strategy (default: 10)")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and result.json")
    options = parser.parse_args(ours)
    settings = (*_DEFAULTS, *_WINDOW, *trainers)
    rounds: list[dict[str, Measured]] = []
    for number in range(options.rounds):
        measured = _round(options.out / f"round{number:02d}", settings, backwards=number % 2 == 1)
        if measured is None:
            return 1
        rounds.append(measured)
        print(_line(number, measured), flush=True)
    result = {"settings": list(settings), "machine": _machine(), "summary": summary(rounds)}
    result["rounds"] = [{name: asdict(run) for name, run in measured.items()} for measured in rounds]
    (options.out / RESULT_FILE).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(result["summary"]))
    return 0


def summary(rounds: Sequence[Mapping[str, Measured]]) -> dict[str, Any]:
    """Return what the rounds come to: per strategy medians over rounds, and the ratio of step times with its interval.

    A round's ratio is that of its two trainings, which lie next to each other in time.
    """
    ratios = [measured[CANDIDATE].step_time_ns / measured[BASE].step_time_ns for measured in rounds]
    median, low, high = median_with_interval(ratios)
    return {
        "rounds": len(rounds),
        "step_time_ratio": {
            "median": median,
            "low": low,
            "high": high,
            "smallest": min(ratios),
            "largest": max(ratios),
        },
        **{name: _of_strategy([measured[name] for measured in rounds]) for name in STRATEGIES},
    }


def table(result: Mapping[str, Any]) -> str:
    """Return the summary as text, aligned."""
    base, candidate = result[BASE], result[CANDIDATE]
    rows = [("", BASE, CANDIDATE)]
    overlaps = [f"{units.share(r['overlap_ratio'])} ({_range(r['overlap_ratios'])})" for r in (base, candidate)]
    rows.append(("communication overlapped (smallest to largest)", *overlaps))
    for maker in MAKERS:
        cells = [
            f"{r['large_allocations'][maker]:.1f}, {units.size(r['large_bytes'][maker])}" for r in (base, candidate)
        ]
        rows.append((f"allocations over {LARGE_BYTES / 1e6:g} MB a step: {maker}", *cells))
    rows.append(("step time", *(units.duration(int(r["step_time_ns"])) for r in (base, candidate))))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]
    ratio = result["step_time_ratio"]
    interval = f"; 95% interval {ratio['low']:.3f} to {ratio['high']:.3f}" if ratio["low"] is not None else ""
    lines.append(
        f"step time {CANDIDATE} / {BASE}: median of {result['rounds']} rounds {ratio['median']:.3f}{interval}; "
        f"all rounds {ratio['smallest']:.3f} to {ratio['largest']:.3f}"
    )
    return "\n".join(lines)


def _round(folder: Path, settings: Sequence[str], *, backwards: bool) -> dict[str, Measured] | None:
    measured = {}
    for strategy in reversed(STRATEGIES) if backwards else STRATEGIES:
        run = folder / strategy
        command = ("-m", "instrumented_trainers", "--strategy", strategy, "--out", str(run), "--overwrite", *settings)
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{strategy} failed with exit code {done.returncode}\n{done.stderr}", file=sys.stderr)
            return None
        measured[strategy] = measure(run, timed_steps=_TIMED_STEPS)
    return measured


def _of_strategy(runs: Sequence[Measured]) -> dict[str, Any]:
    overlaps = [run.overlap_ratio for run in runs]
    return {
        "overlap_ratio": statistics.median(overlaps),
        "overlap_ratios": [min(overlaps), max(overlaps)],
        "communication_ns": statistics.median(run.communication_ns for run in runs),
        "step_time_ns": statistics.median(run.step_time_ns for run in runs),
        # The largest of all runs: where it is 0, there was none in any.
        "large_allocations": {maker: max(run.large_allocations[maker] for run in runs) for maker in MAKERS},
        "large_bytes": {maker: max(run.large_bytes[maker] for run in runs) for maker in MAKERS},
    }


def _machine() -> dict[str, Any]:
    return {
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": [round(value, 1) for value in os.getloadavg()],
        "system": platform.system(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _line(number: int, measured: Mapping[str, Measured]) -> str:
    words = [
        f"{name} {run.step_time_ns / 1e6:.0f} ms a step, {units.share(run.overlap_ratio)} overlapped"
        for name, run in measured.items()
    ]
    return f"round {number}: " + "; ".join(words)


def _range(ends: Sequence[float]) -> str:
    return f"{units.share(ends[0])} to {units.share(ends[1])}"


if __name__ == "__main__":
    sys.exit(main())
