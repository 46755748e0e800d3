"""What many ranks cost: CPU time and memory of commands on copies of one rank's trace, by executor.

    python -m benchmarks.scale --ranks 1 64 256 1000 --out results.md

Each command runs in a process of its own, once to parse the traces (cold) and again with their tables in the cache.
CPU times include all workers; the peak is that of the largest process. The executors are compared with one worker and
with two on one number of ranks, interleaved: the efficiency is the wall time with one over twice that with two.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks import cases, runner

QUERY = "SELECT kind, count(*) AS slices, sum(dur_ns) AS total_ns FROM activities GROUP BY kind ORDER BY kind"
COMMANDS: Mapping[str, tuple[str, ...]] = {"summary": (), "check": ("--fail-on", "never"), "query": (QUERY,)}
EXECUTORS = ("threads", "processes", "dask")
_MIB = 1 << 20


@dataclass(frozen=True)
class Cost:
    """What one command used: seconds, and the peak resident size of its largest process in MiB."""

    cpu_s: float
    wall_s: float
    peak_mib: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print the tables as Markdown."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as work:
        folder = options.work or Path(work)
        folder.mkdir(parents=True, exist_ok=True)
        text = f"{_by_ranks(options, folder)}\n{_by_executor(options, folder)}"
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 0


def _by_ranks(options: argparse.Namespace, work: Path) -> str:
    """Return the table of costs by command and number of ranks."""
    lines = ["| command | ranks | cache | CPU s | CPU s a rank | wall s | peak MiB |", "|---|---|---|---|---|---|---|"]
    for ranks in options.ranks:
        run = cases.copies_of_rank(options.trace, work, ranks)
        for command in options.commands:
            for state in ("cold", "warm"):
                cost = measure(command, run, _environment(work, run, command), ())
                lines.append(
                    f"| {command} | {ranks:,} | {state} | {cost.cpu_s:.2f} | {cost.cpu_s / ranks:.3f} "
                    f"| {cost.wall_s:.1f} | {cost.peak_mib:.0f} |"
                )
                _say(lines[-1])
    return "\n".join(lines) + "\n"


def _by_executor(options: argparse.Namespace, work: Path) -> str:
    """Return the table of executors with one worker and with two."""
    run = cases.copies_of_rank(options.trace, work, options.executor_ranks)
    available = [name for name in EXECUTORS if name != "dask" or find_spec("distributed")]
    costs: dict[tuple[str, int], list[Cost]] = {}
    for _ in range(options.rounds):
        for name in available:
            for workers in (1, 2):
                more = ("--executor", name, "--workers", str(workers), "--no-cache")
                cost = measure("check", run, _environment(work, run, "check"), more)
                costs.setdefault((name, workers), []).append(cost)
                _say(f"check, {options.executor_ranks} ranks, {name}, {workers} workers: {cost}")
    lines = ["| check, without the cache | CPU s, 1 worker | 2 workers | wall s, 1 worker | 2 workers | efficiency |"]
    lines.append("|---|---|---|---|---|---|")
    for name in available:
        single, double = costs[name, 1], costs[name, 2]
        efficiency = statistics.median(a.wall_s / (2 * b.wall_s) for a, b in zip(single, double, strict=True))
        numbers = [statistics.median(c.cpu_s for c in runs) for runs in (single, double)]
        numbers += [statistics.median(c.wall_s for c in runs) for runs in (single, double)]
        lines.append(f"| {name} | {' | '.join(f'{number:.1f}' for number in numbers)} | {efficiency:.2f} |")
    return "\n".join(lines) + "\n"


def measure(command: str, run: Path, environment: Mapping[str, str], more: Sequence[str]) -> Cost:
    """Cost of a command on a run. Raises SubjectFailedError if it fails."""
    words = ["-m", "tracekit", command, str(run), *COMMANDS[command], "--format", "json", *more]
    began_s = time.perf_counter()
    _, error, status, usage = runner.run_process([sys.executable, *words], environment)
    if status:
        raise runner.SubjectFailedError(f"{command} on {run.name}: exit code {status}: {error[-300:]}")
    wall_s = time.perf_counter() - began_s
    return Cost(usage.ru_utime + usage.ru_stime, wall_s, usage.ru_maxrss * 1024 / _MIB)


def _environment(work: Path, run: Path, command: str) -> Mapping[str, str]:
    # A cache for each command and run: the first command on a run parses it.
    return os.environ | {"TRACEKIT_CACHE_DIR": str(work / "cache" / f"{run.name}-{command}"), "OMP_NUM_THREADS": "1"}


def _say(line: str) -> None:
    sys.stderr.write(f"scale: {line}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__.split("\n")[0])
    traces = cases.default_traces_folder()
    public = sorted((traces / "torchrec_v100_4ranks").glob("*.gz"))
    sample = cases.ROOT / "sample_traces" / "demo-yafsdp" / "rank00000.pt.trace.json.gz"
    parser.add_argument("--trace", type=Path, default=public[0] if public else sample, help="the trace that is copied")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 64, 256, 1000], metavar="N")
    parser.add_argument("--commands", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    parser.add_argument("--executor-ranks", type=int, default=64, metavar="N", help="ranks for comparing executors")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times to measure each executor")
    parser.add_argument("--work", type=Path, metavar="FOLDER", help="folder for the copies and caches")
    parser.add_argument("--out", type=Path, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
