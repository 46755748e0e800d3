"""What the spans of `record --modules` cost inside a recorded window.

    python -m benchmarks.module_spans [--pairs 200] [--windows 5] [--device cuda]

One process trains a small Llama-style model. Within each profiled window, steps with and without the spans take turns:
of each pair, which one is first changes. Compared is the time of the training thread, on a GPU the wall time, of the
two steps of a pair. Printed are the median of the ratios with its 95% interval, the calls of modules in a step, and
what one call costs.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import recording_training
from benchmarks.yafsdp_measures import median_with_interval
from tracekit.capture.profiler_session import ModuleSpans, ProfilerSession, ProfilingOptions

WARMUP_STEPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the result, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.module_spans", description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=40, help="pairs of steps in each window (default: 40)")
    parser.add_argument("--windows", type=int, default=5, help="profiled windows (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    step = training_step(options.device)
    for _ in range(WARMUP_STEPS):
        step()
    pairs = [pair for _ in range(options.windows) for pair in window(step, options.device, options.pairs)]
    ratios = [with_ns / without_ns for with_ns, without_ns in pairs]
    added_ns = statistics.median(with_ns - without_ns for with_ns, without_ns in pairs)
    ratio, low, high = median_with_interval(ratios)
    calls = module_calls(step)
    print(
        f"{ratio - 1:+.2%} ({low - 1:+.2%} to {high - 1:+.2%}) in {len(pairs)} pairs on the {options.device}; "
        f"{calls} calls of modules in a step of {statistics.median(pair[1] for pair in pairs) / 1e6:.1f} ms, "
        f"{added_ns / calls / 1e3:+.1f} µs a call"
    )
    return 0


def training_step(device: str) -> Callable[[], object]:
    """Return a function that trains for one step, on a GPU until it has been done."""
    if device == "cpu":
        return recording_training.model_step()
    with torch.device("cuda"):
        step = recording_training.model_step()

    def on_device() -> None:
        step()
        torch.cuda.synchronize()

    return on_device


def window(step: Callable[[], object], device: str, pairs: int) -> list[tuple[int, int]]:
    """Return the time of each pair of steps in one window, in ns: with the spans, and without."""
    clock = time.thread_time_ns if device == "cpu" else time.perf_counter_ns
    options = ProfilingOptions(
        device, memory=False, stacks=False, shapes=device == "cpu", snapshot=False, warmup=1, scratch=None
    )
    session = ProfilerSession(options)
    session.start()
    times_ns = []
    for number in range(pairs + 1):
        took_ns = {}
        for has_spans in (True, False) if number % 2 else (False, True):
            spans = ModuleSpans()
            if has_spans:
                spans.open()
            step()  # the first step of a window looks up the names of modules
            began_ns = clock()
            step()
            took_ns[has_spans] = clock() - began_ns
            spans.close()
        times_ns.append((took_ns[True], took_ns[False]))
    session.stop()
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "trace.json")  # it frees the events
    return times_ns[1:]


def module_calls(step: Callable[[], object]) -> int:
    """Number of forward calls of modules in a step."""
    calls = []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: calls.append(module) and None)
    step()
    hook.remove()
    return len(calls)


if __name__ == "__main__":
    sys.exit(main())
