"""Compare YaFSDP with FSDP2: overlap and allocations in recorded trainings, and step times.

    python -m benchmarks.yafsdp --rounds 10 --out runs/yafsdp-benchmark

Overlap and allocations come from the traces of trainings recorded one after the other. Step times come from both
strategies training in the same processes, in short stints that take turns, unrecorded: other load of the machine then
affects both equally.
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

from benchmarks import yafsdp_stints
from benchmarks.yafsdp_measures import LARGE_BYTES, MAKERS, Measured, measure, median_with_interval
from benchmarks.yafsdp_stints import Setting
from tracekit.model import units

BASE, CANDIDATE = STRATEGIES = ("fsdp2", "yafsdp")
RESULT_FILE = "result.json"
_WINDOW = ("--steps", "10", "--profile-wait", "4", "--profile-warmup", "1", "--profile-active", "5")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, print its table, write its result; return the exit code: 1 if a training failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.yafsdp", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs and result.json")
    parser.add_argument("--rounds", type=int, default=10, help="stints of each strategy (default: 10)")
    parser.add_argument("--stint-steps", type=int, default=3, help="steps of a stint (default: 3)")
    parser.add_argument("--recorded", type=int, default=5, help="recorded trainings of each strategy (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--model", default="tiny", help="a size that the trainers know (default: tiny)")
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank (default: 8)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens in a sequence (default: 256)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--share-gpus", action="store_true", help="allow more ranks than GPUs")
    options = parser.parse_args(arguments)
    names = ("device", "world_size", "model", "batch", "tokens", "precision", "share_gpus")
    setting = Setting(**{name: getattr(options, name) for name in names})
    options.out.mkdir(parents=True, exist_ok=True)
    recorded = _record_all(options.out, setting, options.recorded)
    if recorded is None:
        return 1
    stints = yafsdp_stints.run(STRATEGIES, setting, rounds=options.rounds, steps=options.stint_steps)
    result = {"setting": asdict(setting), "machine": _machine(), "summary": summary(recorded, stints)}
    result["recorded"] = {name: [asdict(run) for run in runs] for name, runs in recorded.items()}
    result["step_times_ns"] = [dict(stint) for stint in stints]
    (options.out / RESULT_FILE).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(result["summary"]))
    return 0


def summary(recorded: Mapping[str, Sequence[Measured]], stints: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Summary of the measurements: per strategy, and the ratio of step times over rounds with its interval.

    A round's ratio is that of its two stints, which lie next to each other in time.
    """
    ratios = [stint[CANDIDATE] / stint[BASE] for stint in stints]
    median, low, high = median_with_interval(ratios)
    return {
        "rounds": len(ratios),
        "step_time_ratio": {
            "median": median,
            "low": low,
            "high": high,
            "smallest": min(ratios),
            "largest": max(ratios),
        },
        **{
            name: {**_of_recorded(recorded[name]), "step_time_ns": statistics.median(stint[name] for stint in stints)}
            for name in STRATEGIES
        },
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


def _record_all(out: Path, setting: Setting, count: int) -> dict[str, list[Measured]] | None:
    """Record trainings in turn and return what they show, by strategy; None if one failed."""
    measured: dict[str, list[Measured]] = {name: [] for name in STRATEGIES}
    for number in range(count):
        for strategy in STRATEGIES:
            run = out / f"{strategy}-{number}"
            command = ("-m", "instrumented_trainers", "--strategy", strategy, "--out", str(run), "--overwrite")
            words = [sys.executable, *command, *setting.arguments, *_WINDOW]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"{strategy} failed with exit code {done.returncode}\n{done.stderr}", file=sys.stderr)
                return None
            measured[strategy].append(measure(run))
            print(f"{run.name}: {units.share(measured[strategy][-1].overlap_ratio)} overlapped", flush=True)
    return measured


def _of_recorded(runs: Sequence[Measured]) -> dict[str, Any]:
    overlaps = [run.overlap_ratio for run in runs]
    return {
        "overlap_ratio": statistics.median(overlaps),
        "overlap_ratios": [min(overlaps), max(overlaps)],
        "communication_ns": statistics.median(run.communication_ns for run in runs),
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


def _range(ends: Sequence[float]) -> str:
    return f"{units.share(ends[0])} to {units.share(ends[1])}"


if __name__ == "__main__":
    sys.exit(main())
