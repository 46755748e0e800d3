"""Time of all rules on a loaded run: 8 simulated ranks of about 30,000 events, and twice as many.

    python -m benchmarks.rules --rounds 5

Healthy runs need no replay; runs with faults include the replays for the costs. Rounds interleave the runs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import tracekit
from tracekit.model.run import Run
from tracekit.plan import hardware, models
from tracekit.rules.engine import check
from tracekit.simulate import faults, run
from tracekit.simulate.job import FSDP2, Job

_RANKS, _STEPS = 8, 6
_CASES = {
    "healthy": ((), 1),
    "healthy, twice as long": ((), 2),
    "with a slow rank and blocking syncs": (("slow-rank", "host-sync"), 1),
    "the same, twice as long": (("slow-rank", "host-sync"), 2),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, load and check runs, and print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rules", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="number of times each run is checked")
    options = parser.parse_args(arguments)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in _CASES}
    with tempfile.TemporaryDirectory() as folder:
        events = {name: _simulate(Path(folder) / name, *case) for name, case in _CASES.items()}
        for _ in range(options.rounds):
            for name in _CASES:
                times[name].append(_check_seconds(Path(folder) / name))
    print("| run of 8 ranks | events a rank | wall s, median (range) | CPU s, median |\n|---|---|---|---|")
    for name, pairs in times.items():
        wall, cpu = zip(*pairs, strict=True)
        middle, low, high = (f(wall) for f in (statistics.median, min, max))
        print(
            f"| {name} | {events[name]:,} | {middle:.1f} ({low:.1f} to {high:.1f}) | {statistics.median(cpu):.1f} |",
            flush=True,
        )
    return 0


def _simulate(out: Path, names: Sequence[str], times: int) -> int:
    """Write a run and return the number of events of its rank 0."""
    machine = hardware.find("a100-80")
    job = Job(
        FSDP2, models.find("llama2-7b"), machine, _RANKS, 2048, steps=_STEPS * times, seed=5, ranks_written=_RANKS
    )
    run.simulate(job, tuple(faults.parse(name) for name in names), out, arguments={}, force=True)
    trace = tracekit.load(str(out), cache=False).trace(0)
    return len(trace.ops) + len(trace.activities)


def _check_seconds(path: Path) -> tuple[float, float]:
    """Load a run with all its tables and return the wall and CPU time of its check, in s."""
    loaded = tracekit.load(str(path), cache=False)
    traces = list(loaded.traces())
    for trace in traces:
        _ = trace.tables
    loaded.cache_traces(dict(zip(loaded.sources, traces, strict=True)))
    return _time_check(loaded)


def _time_check(loaded: Run) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    check(loaded)
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    sys.exit(main())
