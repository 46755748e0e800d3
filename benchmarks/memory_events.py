"""How long 1.5 million allocator events take once they are read: facts on memory, and a replay under other settings.

    python -m benchmarks.memory_events

One rank of a **simulated** training that takes and frees memory on the model of the caching allocator, with a kernel a
step. Times are CPU seconds; memory is the largest resident size of the process.
"""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import tracekit
from tracekit import conventions
from tracekit.analysis.memory import steady_state as memory_facts
from tracekit.replay.allocator import memory_usage, playback
from tracekit.replay.allocator.blocks import Block
from tracekit.replay.allocator.model import Allocator
from tracekit.replay.allocator.settings import Settings
from tracekit.rules.registry import all_rules

_T = TypeVar("_T")
_STEPS, _LAYERS, _SIZES = 50, 50, 60
_BEGIN_US = 1_700_000_000_000_000
_SAVED = 4  # of five blocks of a layer, freed in backward


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a trace, read it, measure; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory_events", description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=1_500_000, help="about how many")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        count = _write(Path(folder) / conventions.rank_file(0, conventions.TRACE_SUFFIX), options.events)
        run, read_s = _time_call(lambda: tracekit.load(folder, cache=False))
        trace, more_s = _time_call(lambda: _read(run))
        read_mib = _peak_mib()
        _, facts_s = _time_call(lambda: run.measure(memory_usage.FACTS))
        facts = [fact for rule in all_rules() if rule.code.startswith("MEM") for fact in rule.facts]
        _, rules_s = _time_call(lambda: run.measure(facts))
        facts_mib = _peak_mib()
        history, built_s = _time_call(lambda: playback.from_trace(trace))
        _, played_s = _time_call(lambda: playback.predict(history, Settings.parse("expandable_segments:True")))
    print(f"{count:,} events: read in {read_s + more_s:.1f} s, {read_mib:.0f} MiB at most")
    print(f"facts of `tracekit memory`: {facts_s:.1f} s; facts of all memory rules: {rules_s:.1f} s")
    print(f"{facts_mib:.0f} MiB at most by then; {memory_facts.stalls(trace).height} steps with stalls")
    print(f"replay under other settings: {built_s + played_s:.1f} s; {_peak_mib():.0f} MiB at most in all")
    return 0


def _read(run: tracekit.Run) -> tracekit.Trace:
    trace = run.trace(0)
    _ = trace.tables
    return trace


def _time_call(work: Callable[[], _T]) -> tuple[_T, float]:
    began = time.process_time()
    return work(), time.process_time() - began


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _write(path: Path, events: int) -> int:
    """Write a trace with about so many allocator events and return how many it has."""
    draw, allocator = random.Random(1), Allocator()
    sizes = [512 * draw.randint(1, 1 << draw.randint(4, 15)) for _ in range(_SIZES)]
    per_layer = max(1, events // (2 * _STEPS * _LAYERS))
    count, now_us = 0, float(_BEGIN_US)
    with path.open("w", encoding="utf-8") as file:
        file.write(
            '{"schemaVersion":1,"baseTimeNanoseconds":0,"distributedInfo":{"rank":0,"world_size":1},"traceEvents":['
        )

        def on_event(address: int, delta: int) -> None:
            nonlocal count, now_us
            count, now_us = count + 1, now_us + 2
            args = {
                "Device Type": 1, "Device Id": 0, "Addr": address, "Bytes": delta,
                "Total Allocated": allocator.allocated_bytes, "Total Reserved": allocator.reserved_bytes,
            }  # fmt: skip
            file.write(json.dumps(_event("i", "cpu_instant_event", "[memory]", now_us, args, s="t")) + ",\n")

        for step in range(_STEPS):
            begin_us = now_us
            _train(allocator, draw, sizes, per_layer, on_event)
            dur_us = now_us - begin_us
            for event in _of_step(step, begin_us, dur_us):
                file.write(json.dumps(event) + ",\n")
        file.write(json.dumps(_event("M", "", "process_name", 0, {"name": "python"})) + "]}")
    return count


def _train(
    allocator: Allocator, draw: random.Random, sizes: Sequence[int], count: int, on_event: Callable[[int, int], None]
) -> None:
    """Allocate memory layer by layer, free a fifth of it at once, and the rest in backward."""
    alive: list[list[Block]] = []
    for _ in range(_LAYERS):
        blocks = []
        for number in range(count):
            block = allocator.malloc(draw.choice(sizes), 0)
            on_event(block.address, block.bytes)
            if number % (_SAVED + 1) == _SAVED:
                _free(allocator, block, on_event)
            else:
                blocks.append(block)
        alive.append(blocks)
        if len(alive) > 2:  # so that allocated memory fits into a device
            for block in alive.pop(0):
                _free(allocator, block, on_event)
    for blocks in reversed(alive):
        for block in blocks:
            _free(allocator, block, on_event)


def _free(allocator: Allocator, block: Block, on_event: Callable[[int, int], None]) -> None:
    address, size = block.address, block.bytes  # freeing merges it with its neighbours
    allocator.free(block)
    on_event(address, -size)


def _of_step(step: int, begin_us: float, dur_us: float) -> list[dict[str, object]]:
    launch = {"correlation": step + 1, "External id": step + 1}
    kernel = {"device": 0, "stream": 7, **launch}
    return [
        _event("X", "user_annotation", f"ProfilerStep#{step}", begin_us, {}, dur=dur_us),
        _event("X", "cuda_runtime", "cudaLaunchKernel", begin_us + 1, launch, dur=1),
        _event("X", "kernel", "gemm", begin_us + 3, kernel, dur=dur_us - 10) | {"pid": 0, "tid": 7},
    ]


def _event(phase: str, kind: str, name: str, ts: float, args: dict[str, object], **more: object) -> dict[str, object]:
    return {"ph": phase, "cat": kind, "name": name, "pid": 1, "tid": 1, "ts": ts, "args": args, **more}


if __name__ == "__main__":
    sys.exit(main())
