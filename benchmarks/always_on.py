"""What the recorder costs outside of windows: CPU time and bytes of a step.

    python -m benchmarks.always_on --out always_on.md

One process on one thread trains the small model of `benchmarks.recording_training`. Stretches of steps with and without
the recorder alternate, the first of each pair drawn, so that load of the machine falls on both alike; the interval of
the ratio of their CPU times is by bootstrap over pairs. The CPU time of its calls is measured too.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import recording_training, results
from tracekit import conventions
from tracekit.capture import Recorder

_RESAMPLES = 2000
_STRETCH_STEPS = 10


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table as Markdown and write it; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.always_on", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=100, help="pairs of stretches (default: 100)")
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="always-on-") as folder:
        plain_ns, recorded_ns, calls_ns = measure(Path(folder), options.pairs)
        step_bytes = bytes_per_step(Path(folder))
    lines = [results.machine_description(), *table(plain_ns, recorded_ns, calls_ns, step_bytes)]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    return 0


def measure(folder: Path, pairs: int, *, steps: int = _STRETCH_STEPS) -> tuple[list[int], list[int], list[int]]:
    """CPU times in ns of stretches of steps without and with the recorder, pair by pair, and of each of its calls."""
    step = recording_training.model_step()
    draw = random.Random(0)
    plain_ns, recorded_ns, calls_ns = [], [], []
    with Recorder(folder, steps=None, on_outlier=4, device="cpu") as recorder:

        def recorded_step() -> None:
            loss = step().detach()  # the graph of the step is freed here, as without the recorder
            began_ns = time.thread_time_ns()
            recorder.step({"loss": lambda: loss.item()}, tokens=128)
            calls_ns.append(time.thread_time_ns() - began_ns)

        def stretch_with_recorder() -> int:
            recorder._begin_step()  # the steps before were not the recorder's
            return _cpu_time_ns(recorded_step, steps)

        stretch_with_recorder()
        calls_ns.clear()
        for _ in range(pairs):
            if draw.random() < 0.5:  # half of the pairs begin without the recorder
                plain_ns.append(_cpu_time_ns(step, steps))
                recorded_ns.append(stretch_with_recorder())
            else:
                recorded_ns.append(stretch_with_recorder())
                plain_ns.append(_cpu_time_ns(step, steps))
    return plain_ns, recorded_ns, calls_ns


def _cpu_time_ns(step: Callable[[], object], count: int) -> int:
    began_ns = time.process_time_ns()
    for _ in range(count):
        step()
    return time.process_time_ns() - began_ns


def bytes_per_step(run: Path) -> float:
    """Bytes on disk for each step, of a run without traces."""
    log = run / conventions.rank_file(0, conventions.METRICS_SUFFIX)
    steps = len(log.read_bytes().splitlines())
    return sum(path.stat().st_size for path in (log, run / conventions.ATTEMPTS_FILE)) / steps


def table(plain_ns: Sequence[int], recorded_ns: Sequence[int], calls_ns: Sequence[int], step_bytes: float) -> list[str]:
    """Rows of the Markdown table: step, ratio with its interval, CPU time of the calls, bytes."""
    low, high = bootstrap_interval(plain_ns, recorded_ns)
    step_ns, call_ns = statistics.median(plain_ns) / _STRETCH_STEPS, statistics.median(calls_ns)
    return [
        "| | |",
        "|---|---|",
        f"| stretches of {_STRETCH_STEPS} steps | {len(plain_ns):,} pairs |",
        f"| CPU time of a step without the recorder, median | {step_ns / 1e6:.1f} ms |",
        f"| with the recorder, ratio of sums | {_percent(_ratio(plain_ns, recorded_ns))} "
        f"({_percent(low)} to {_percent(high)}) |",
        f"| CPU time of the recorder's calls, median | {call_ns / 1e3:.0f} µs ({call_ns / step_ns:.2%} of a step) |",
        f"| the same, mean | {statistics.fmean(calls_ns) / 1e3:.0f} µs "
        f"({sum(calls_ns) / sum(plain_ns):.2%} of the steps) |",
        f"| bytes on disk, metrics and attempts | {step_bytes:.0f} a step |",
    ]


def bootstrap_interval(plain_ns: Sequence[int], recorded_ns: Sequence[int]) -> tuple[float, float]:
    """95% interval of the ratio of sums, less one, over resampled pairs (percentiles; Efron 1979)."""
    draw = random.Random(1)
    pairs = list(zip(plain_ns, recorded_ns, strict=True))
    ratios = []
    for _ in range(_RESAMPLES):
        sample = draw.choices(pairs, k=len(pairs))
        ratios.append(_ratio([plain for plain, _ in sample], [recorded for _, recorded in sample]))
    ratios.sort()
    return ratios[round(0.025 * _RESAMPLES)], ratios[round(0.975 * _RESAMPLES) - 1]


def _ratio(plain_ns: Sequence[int], recorded_ns: Sequence[int]) -> float:
    return sum(recorded_ns) / sum(plain_ns) - 1


def _percent(ratio: float) -> str:
    return f"{100 * ratio:+.2f}%"


if __name__ == "__main__":
    sys.exit(main())
