"""What `record --device-metrics` costs the training.

    python -m benchmarks.device_metrics [--turns 60] [--turn-s 1.0] [--device cuda]

One process trains a small Llama-style model, with and without the sampling of the GPU's counters in turns of a second;
of each pair of turns, which one is first changes. Compared is the mean step of the two: CPU time of the training
thread and wall time. A step that is Python only shows what the sampling thread takes of the interpreter lock. Then the
line of a step is timed in a loop, with and without counters. Without a GPU, the counters come from a stand-in in
Python, whose reads hold the interpreter lock, unless --library names a folder with another pynvml.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.module_spans import training_step
from benchmarks.yafsdp_measures import median_with_interval
from tracekit.capture.device_metrics import DeviceMetrics
from tracekit.capture.metrics import MetricsLog
from tracekit.capture.rank_info import DeviceIdentity, this_device

STAND_IN = Path(__file__).parents[1] / "tests" / "support" / "stand_ins" / "nvml"
UUID = "00000000-0000-0000-0000-000000000000"
LINES = 20_000
PYTHON_LOOPS = 20_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the results, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device_metrics", description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=60, help="pairs of turns (default: 60)")
    parser.add_argument("--turn-s", type=float, default=1.0, help="length of a turn in s (default: 1)")
    parser.add_argument("--library", type=Path, default=STAND_IN, help="folder of pynvml without a GPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    identify = this_device if options.device == "cuda" else stand_in(options.library)
    for name, step in (("model", training_step(options.device)), ("Python only", python_step)):
        step()
        pairs = [pair(step, options.turn_s, identify, is_first=bool(turn % 2)) for turn in range(options.turns)]
        for clock, number in (("CPU of the training thread", 0), ("wall", 1)):
            ratio, low, high = median_with_interval([on[number] / off[number] for on, off in pairs])
            base_ms = statistics.median(off[number] for _, off in pairs) / 1e6
            print(f"{name}, {clock}: {ratio - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%}) of {base_ms:.2f} ms")
    with_us, without_us = (line_us(identify, has_counters=has) for has in (True, False))
    print(f"line of a step: {with_us:.1f} µs with counters, {without_us:.1f} µs without")
    return 0


def stand_in(folder: Path) -> Callable[[], DeviceIdentity]:
    """Let ``import pynvml`` find that in the folder, and return what identifies its GPU."""
    sys.path.insert(0, str(folder))
    import pynvml

    if hasattr(pynvml, "GPUS"):
        pynvml.GPUS.append(pynvml.Gpu(f"GPU-{UUID}"))
    return lambda: DeviceIdentity(UUID, None)


def python_step() -> None:
    """Compute in Python alone."""
    total = 0
    for number in range(PYTHON_LOOPS):
        total += number


def pair(
    step: Callable[[], object], turn_s: float, identify: Callable[[], DeviceIdentity], *, is_first: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the mean step of a turn with counters and of one without: CPU time of the thread and wall time, in ns."""
    step_ns = {}
    for has_counters in (is_first, not is_first):
        metrics = DeviceMetrics(0, device=identify)
        if has_counters:
            metrics.take()
        step_ns[has_counters] = turn(step, turn_s)
        metrics.close()
    return step_ns[True], step_ns[False]


def turn(step: Callable[[], object], turn_s: float) -> tuple[float, float]:
    """Return the mean step of a turn: CPU time of the thread and wall time, in ns."""
    steps, cpu_ns, began_ns = 0, time.thread_time_ns(), time.perf_counter_ns()
    while time.perf_counter_ns() - began_ns < turn_s * 1e9:
        step()
        steps += 1
    return (time.thread_time_ns() - cpu_ns) / steps, (time.perf_counter_ns() - began_ns) / steps


def line_us(identify: Callable[[], DeviceIdentity], *, has_counters: bool) -> float:
    """Time of the training thread for the line of a step, with its share of the writing, in µs."""
    metrics = DeviceMetrics(0, device=identify)
    with tempfile.TemporaryDirectory() as folder:
        log = MetricsLog(Path(folder) / "metrics.jsonl")
        metrics.take()
        began_ns = time.thread_time_ns()
        for number in range(LINES):
            log.add({"step": number, "step_time_ns": number, **(metrics.take() if has_counters else {})})
        log.close()
        took_ns = time.thread_time_ns() - began_ns
    metrics.close()
    return took_ns / LINES / 1e3


if __name__ == "__main__":
    sys.exit(main())
