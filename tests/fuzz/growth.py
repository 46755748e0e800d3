"""Measure whether time and memory of commands grow linearly with their input. Not a test.

Each dimension is a way in which an input can be large: many threads, deep nesting, many groups. Its input is made at
sizes n, 2n, 4n and 8n, and each command reads it. A line states CPU time and memory of each size, and how many times as
much the last doubling cost as the one before:

    python -m tests.fuzz.growth --dimension threads --command check
"""

import argparse
import itertools
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import growing
from tests.support import cli_runner

FOLDER = "{folder}"
LIMIT_S = 24
_JSON = ("--format", "json", "--no-cache")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "check": ("check", FOLDER, *_JSON, "--fail-on", "never"),
    "check text": ("check", FOLDER, "--no-cache", "--fail-on", "never"),
    "check html": ("check", FOLDER, "--no-cache", "--format", "html", "-o", f"{FOLDER}.html", "--fail-on", "never"),
    "summary": ("summary", FOLDER, *_JSON),
    "steps": ("summary", FOLDER, "--by", "step", *_JSON),
    "collectives": ("summary", FOLDER, "--by", "collective", *_JSON),
    "contention": ("summary", FOLDER, "--by", "contention", *_JSON),
    "stages": ("summary", FOLDER, "--by", "stage", *_JSON),
    "axes": ("summary", FOLDER, "--by", "axis", *_JSON),
    "streams": ("summary", FOLDER, "--by", "stream", *_JSON),
    "clock": ("summary", FOLDER, "--by", "clock", *_JSON),
    "experts": ("summary", FOLDER, "--by", "expert-pair", *_JSON),
    "kernels": ("kernels", FOLDER, "--by", "name,op,shapes,module,unit,phase", *_JSON),
    "ops": ("kernels", FOLDER, "--of", "host", "--by", "name,shapes,module,unit,phase,span", *_JSON),
    "what-if": ("whatif", FOLDER, *_JSON),
    "critical path": ("whatif", "--critical-path", FOLDER, *_JSON),
    "flame graph": ("kernels", "--by", "stack", FOLDER, "-o", f"{FOLDER}.speedscope.json", "--no-cache"),
    "host flame graph": ("kernels", "--by", "stack", FOLDER, "--of", "host", "-o", f"{FOLDER}.folded", "--no-cache"),
    "Perfetto export": ("export", FOLDER, "-o", f"{FOLDER}.pftrace", "--no-cache"),
    "page": ("export", FOLDER, "--format", "html", "-o", f"{FOLDER}.page.html", "--no-cache"),
    "memory": ("memory", FOLDER, *_JSON),
    "comparison": ("compare", FOLDER, FOLDER, *_JSON),
    "comparison by operator": ("compare", FOLDER, FOLDER, "--by", "operator,path", *_JSON),
    "query": ("query", FOLDER, "select count(*) from ops", *_JSON),
    "baseline": ("baseline", "save", FOLDER, "--out", f"{FOLDER}.baseline.json", "--no-cache"),
    "scrub": ("scrub", FOLDER, f"{FOLDER}.scrubbed"),
    "hang": ("hang", FOLDER, "--format", "json"),
    "verify": ("checkpoint", "verify", FOLDER),
    "watch": ("watch", FOLDER, "--once", "--format", "json"),
    "history add": ("history", "add", FOLDER, "--db", f"{FOLDER}.new.duckdb"),
    "history show": ("history", "show", "--db", f"{FOLDER}/runs.duckdb", "--format", "json"),
    "history text": ("history", "show", "--db", f"{FOLDER}/runs.duckdb"),
    "hang text": ("hang", FOLDER),
    "memory text": ("memory", FOLDER),
    "replay": ("memory", FOLDER, "--replay", "expandable_segments:True", "--format", "json"),
    "memory difference": ("memory", FOLDER, "--against", FOLDER, "--format", "json"),
    "prometheus": ("export", FOLDER, "--format", "prometheus", "-o", f"{FOLDER}.prom", "--no-cache"),
    "otlp": ("export", FOLDER, "--format", "otlp", "-o", f"{FOLDER}.otlp.json", "--no-cache"),
    "sarif": ("check", FOLDER, "--no-cache", "--format", "sarif", "--fail-on", "never"),
    "markdown": ("check", FOLDER, "--no-cache", "--format", "markdown", "--fail-on", "never"),
}


@dataclass(frozen=True)
class Row:
    """What an input of a size cost, and the message of a command that did not read it."""

    size: int
    cpu_s: float
    grown_bytes: int
    error: str


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.growth", description=__doc__)
    parser.add_argument("--dimension", action="append", choices=growing.DIMENSIONS)
    parser.add_argument("--command", action="append", choices=COMMANDS)
    parser.add_argument("--doublings", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="times the dimension's own first size")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for dimension in options.dimension or growing.DIMENSIONS:
        commands = options.command or list(growing.DIMENSIONS[dimension].commands)
        if options.measure:
            _measure(dimension, commands, options.doublings, options.scale)
            continue
        given = [word for command in commands for word in ("--command", command)]
        sizes = ("--doublings", str(options.doublings), "--scale", str(options.scale))
        words = ("--dimension", dimension, *given, *sizes, "--measure")
        subprocess.run([sys.executable, "-m", "tests.fuzz.growth", *words], check=False)


def _measure(dimension: str, commands: list[str], doublings: int, scale: float) -> None:
    cli_runner.tracekit("check", "--sample", "--format", "json")  # imports do not count
    first, make = growing.DIMENSIONS[dimension].first, growing.DIMENSIONS[dimension].make
    rows: dict[str, list[Row]] = {command: [] for command in commands}
    for doubling in range(doublings + 1):
        size = int(first * scale) << doubling
        with tempfile.TemporaryDirectory(prefix="tracekit-growth-") as folder:
            place = Path(folder, "run")
            place.mkdir()
            make(place, size)
            for command in commands:
                if rows[command] and rows[command][-1].cpu_s > LIMIT_S / 4:
                    continue
                words = [part.replace(FOLDER, str(place)) for part in COMMANDS[command]]
                cpu_s, grown_bytes, done = _cost(words)
                print(dimension, command, size, f"{cpu_s:.2f} s {grown_bytes >> 20} MiB", flush=True, file=sys.stderr)
                error = "" if done.returncode in (0, 1) else done.stderr[-200:].replace(str(place), "RUN").strip()
                rows[command].append(Row(size, cpu_s, grown_bytes, error))
    for command in commands:
        print(_line(dimension, command, rows[command]), flush=True)


def _cost(words: list[str]) -> tuple[float, int, "subprocess.CompletedProcess[str]"]:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # peak memory from here
    before_s, before_bytes = _cpu_s(), _status("VmRSS")
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + LIMIT_S, resource.RLIM_INFINITY))
    done = cli_runner.tracekit(*words)
    return _cpu_s() - before_s, max(0, _status("VmHWM") - before_bytes), done


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _line(dimension: str, command: str, rows: list[Row]) -> str:
    times = " ".join(f"{row.cpu_s:.2f}" for row in rows)
    memory = " ".join(f"{row.grown_bytes >> 20}" for row in rows)
    slower = [after.cpu_s - before.cpu_s for before, after in itertools.pairwise(rows)]
    ratio = slower[-1] / max(slower[-2], 0.05) if len(slower) > 1 else 0
    larger = [after.grown_bytes - before.grown_bytes for before, after in itertools.pairwise(rows)]
    memory_ratio = larger[-1] / max(larger[-2], 20 << 20) if len(larger) > 1 else 0
    flag = (" TIME!" if ratio > 2.7 and rows[-1].cpu_s > 1 else "") + (" MEMORY!" if memory_ratio > 2.7 else "")
    cost = f"{times} s x{ratio:.1f} | {memory} MiB x{memory_ratio:.1f}"
    return f"{dimension} | {command} | {rows[0].size} .. {rows[-1].size} | {cost} | {rows[-1].error}{flag}"


if __name__ == "__main__":
    main()
