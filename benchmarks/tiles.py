"""How fast the timeline's data is: 8 ranks of 1.5 million events laid out once, then seen at every zoom and searched.

    python -m benchmarks.tiles
    python -m benchmarks.tiles --out runs/large      keeps the traces, and measures on them again

The run is **made here**, not recorded: Kineto files of ranks that train side by side, with Python frames, nested ops,
launches, kernels on three streams and all-gathers that all ranks share. Times are CPU seconds of one process on one
core, taken after the traces were parsed into the cache; memory is the largest resident size of a process.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from isal import igzip

from tracekit import conventions
from tracekit.ingest import disk_cache
from tracekit.report import timeline

_BEGIN_US = 1_700_000_000_000_000
_LAYERS, _OPS = 32, 14
_PIXELS = 1400
_VIEWS = 30
_TEXTS = ("gemm", "aten::add", "ncclDevKernel", "train.py", "e", "nothing is called so")
_OP_NAMES = ("aten::linear", "aten::layer_norm", "aten::add", "aten::mul", "aten::gelu", "aten::softmax", "aten::copy_")
_KERNELS = (
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
    "vectorized_elementwise_kernel<4, add>",
    "void at::native::reduce_kernel<512, 1, float>",
    "layer_norm_grad_input_kernel",
    "softmax_warp_forward",
)
_CALLERS = 14  # Python functions around a step
_LAYER_NS = 270_000  # what a layer takes on the device


def main(arguments: Sequence[str] | None = None) -> int:
    """Make a run, measure, print the tables; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiles", description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--events", type=int, default=1_500_000, help="about how many a rank has")
    parser.add_argument("--out", type=Path, help="folder for the traces and their cache; default: a temporary folder")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        os.environ[disk_cache.DIRECTORY_VARIABLE] = str(folder / "cache")
        run = folder / "run"
        if not run.is_dir():
            _write(run, options.ranks, options.events)
        read = _alone(_read, run)
        print(f"{read['events']:,} events on {options.ranks} ranks; parsed by {read['cpu_s']:.0f} s of CPU")
        disk_cache.DiskCache.of_user("timelines").clear()
        built = _alone(_build, run)
        print(f"laid out by {built['cpu_s']:.1f} s of CPU, {built['peak_mib']:.0f} MiB at most; file of "
              f"{built['size_mib']:.0f} MiB")  # fmt: skip
        _print_seen(_alone(_see, run))
    return 0


def _alone(work: Callable[[str], dict[str, Any]], path: Path) -> dict[str, Any]:
    """Result of `work` in a process of its own, with its peak memory in MiB."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, work, str(path)).result()


def _measure(work: Callable[[str], dict[str, Any]], path: str) -> dict[str, Any]:
    began = time.process_time()
    result = work(path)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_s": time.process_time() - began, "peak_mib": peak_mib} | result


def _read(path: str) -> dict[str, Any]:
    import tracekit

    run = tracekit.load(path)
    return {"events": sum(trace.ops.height + trace.activities.height for trace in run.traces())}


def _build(path: str) -> dict[str, Any]:
    import tracekit

    run = tracekit.load(path)
    _ = run.offsets
    began = time.process_time()
    timeline.open_scene(run)
    return {
        "cpu_s": time.process_time() - began,
        "size_mib": disk_cache.DiskCache.of_user("timelines").size_bytes() / 2**20,
    }


def _see(path: str) -> dict[str, Any]:
    import tracekit

    run = tracekit.load(path)
    began = time.process_time()
    scene = timeline.open_scene(run)
    opened_s = time.process_time() - began
    rows = int(scene.tracks["rows"].sum())
    draw, (begin_ns, end_ns) = random.Random(2), scene.span
    seen: dict[str, Any] = {"opened_s": opened_s, "tracks": scene.tracks.height, "rows": rows, "views": {}, "finds": {}}
    length_ns, zoom = end_ns - begin_ns, 1
    while length_ns // zoom > 100:
        times, rectangles = [], []
        for _ in range(_VIEWS):
            first_ns = begin_ns + draw.randrange(max(1, length_ns - length_ns // zoom))
            began = time.process_time()
            view = timeline.view(scene, (first_ns, first_ns + length_ns // zoom), _PIXELS)
            times.append(time.process_time() - began)
            rectangles.append(view.height)
        seen["views"][zoom] = (times, rectangles)
        zoom *= 10
    for text in _TEXTS:
        times = []
        for _ in range(5):
            began = time.process_time()
            matches = timeline.find_by_name(scene, text)
            times.append(time.process_time() - began)
        seen["finds"][text] = (times, matches.count)
    return seen


def _print_seen(seen: dict[str, Any]) -> None:
    print(f"opened by {seen['opened_s']:.2f} s of CPU; {seen['peak_mib']:.0f} MiB at most with all that follows\n")
    print(f"All {seen['tracks']} tracks ({seen['rows']} rows) on {_PIXELS} pixels, at {_VIEWS} places each:\n")
    print(
        "| part of the run | ms of CPU, median | 95th percentile | rectangles, median | most |\n|---|---|---|---|---|"
    )
    for zoom, (times, rectangles) in seen["views"].items():
        p95_s = sorted(times)[int(0.95 * (len(times) - 1) + 0.5)]
        print(f"| 1/{zoom:,} | {1e3 * statistics.median(times):.1f} | {1e3 * p95_s:.1f} | "
              f"{statistics.median(rectangles):,.0f} | {max(rectangles):,} |")  # fmt: skip
    print("\n| searched for | found | ms of CPU, median |\n|---|---|---|")
    for text, (times, total) in seen["finds"].items():
        print(f"| {text} | {total:,} | {1e3 * statistics.median(times):.1f} |")


# The run -------------------------------------------------------------------------------------------------------------


def _write(folder: Path, ranks: int, events: int) -> None:
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    workers = min(ranks, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in [pool.submit(_write_rank, partial, rank, ranks, events) for rank in range(ranks)]:
            done.result()
    partial.rename(folder)


def _write_rank(folder: Path, rank: int, ranks: int, events: int) -> None:
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": ranks, "ranks": list(range(ranks))}
    head = {
        "schemaVersion": 1,
        "simulated": True,
        "baseTimeNanoseconds": 0,
        "deviceProperties": [{"id": rank, "name": "made for a benchmark"}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": ranks, "pg_count": 1, "pg_config": [group]},
    }
    path = folder / conventions.rank_file(rank, conventions.TRACE_SUFFIX)
    with igzip.open(path, "wt", compresslevel=1, encoding="utf-8") as file:
        file.write(json.dumps(head)[:-1] + ',"traceEvents":[\n')
        lines = _Training(rank, ranks).events()
        for _ in range(0, events, 100_000):
            file.write("".join(line + ",\n" for line, _ in zip(lines, range(100_000), strict=False)))
        file.write('{"ph":"M","name":"process_name","pid":1,"tid":0,"ts":0,"args":{"name":"python"}}]}\n')


class _Training:
    """The events of one rank: steps of forward and backward, layer by layer. Times are whole ns, written in µs."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self._own, self._shared = random.Random(rank), random.Random(0)
        self._number, self._gathers, self._host_ns = 1, 0, 0
        self._free_ns = {7: 0, 11: 0, 20: 0}

    def events(self) -> Iterator[str]:
        step = 0
        while True:
            began_ns = self._host_ns
            for phase in ("forward", "backward"):
                for layer in range(_LAYERS):
                    yield from self._layer(phase, layer)
            dur_ns = self._host_ns - began_ns
            yield self._slice("user_annotation", f"ProfilerStep#{step}", 1, 1, began_ns, dur_ns)
            for depth in range(_CALLERS):
                yield self._slice("python_function", f"src/loop.py({depth}): called", 1, 1, began_ns, dur_ns)
            # All ranks begin the next step together, when the slowest of them is sure to be done.
            self._host_ns = max(self._host_ns, (step + 1) * 2 * _LAYERS * _LAYER_NS)
            step += 1

    def _layer(self, phase: str, layer: int) -> Iterator[str]:
        began_ns, thread = self._host_ns, 1 if phase == "forward" else 2
        self._host_ns += 2_000
        yield from self._gather(thread)
        for number in range(_OPS):
            yield from self._op(thread, _OP_NAMES[(layer + number) % len(_OP_NAMES)], f"{phase}_{number}")
        dur_ns = self._host_ns - began_ns
        yield self._slice("user_annotation", f"FSDP::{phase} (layers.{layer})", 1, thread, began_ns, dur_ns)
        yield self._slice("python_function", f"nn.Module: Block_{layer}", 1, thread, began_ns + 100, dur_ns - 200)
        yield self._slice(
            "python_function", f"src/train.py({40 + layer}): {phase}", 1, thread, began_ns + 200, dur_ns - 400
        )
        self._host_ns += 500

    def _op(self, thread: int, name: str, place: str) -> Iterator[str]:
        began_ns, spent_ns = self._host_ns, self._own.randrange(6_000, 22_000)
        launched_ns, number = began_ns + spent_ns // 2, self._next()
        yield self._slice("python_function", f"src/model.py({number % 97}): {place}", 1, thread, began_ns, spent_ns)
        yield self._slice("cpu_op", name, 1, thread, began_ns + 200, spent_ns - 400, f'"External id":{number}')
        yield self._slice(
            "cpu_op", name + "_inner", 1, thread, began_ns + 400, spent_ns - 800, f'"External id":{number}'
        )
        correlated = f'"correlation":{number},"External id":{number}'
        yield self._slice("cuda_runtime", "cudaLaunchKernel", 1, thread, launched_ns, spent_ns // 4, correlated)
        copies = number % 16 == 0
        stream = 11 if copies else 7
        takes_ns = self._own.randrange(1_500, 20_000)
        at_ns = max(launched_ns + 5_000, self._free_ns[stream])
        self._free_ns[stream] = at_ns + takes_ns + 300
        where = f'"device":{self._rank},"stream":{stream},{correlated}'
        kernel = "Memcpy HtoD (Pinned -> Device)" if copies else _KERNELS[number % len(_KERNELS)]
        category = "gpu_memcpy" if copies else "kernel"
        yield self._slice(category, kernel, self._rank, stream, at_ns, takes_ns, where)
        self._host_ns += spent_ns + 300

    def _gather(self, thread: int) -> Iterator[str]:
        number, count = self._next(), self._gathers
        self._gathers += 1
        correlated = f'"correlation":{number},"External id":{number}'
        yield self._slice(
            "cpu_op", "c10d::_allgather_base_", 1, thread, self._host_ns, 9_000, f'"External id":{number}'
        )
        yield self._slice("cuda_runtime", "cudaLaunchKernelExC", 1, thread, self._host_ns + 2_000, 5_000, correlated)
        # It ends on all ranks at once; who comes when is a rank's own.
        end_ns = (count + 1) * _LAYER_NS + self._shared.randrange(50_000)
        takes_ns = 80_000 + self._own.randrange(40_000)
        collective = f'"Collective name":"_allgather_base","dtype":"BFloat16","In msg nelems":{1 << 20},' \
               f'"Out msg nelems":{self._ranks << 20},"Seq":{count},"Group size":{self._ranks},' \
               f'"Process Group Name":"0","Process Group Ranks":"{list(range(self._ranks))}"'  # fmt: skip
        where = f'"device":{self._rank},"stream":20,{correlated},{collective}'
        name = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        yield self._slice("kernel", name, self._rank, 20, end_ns - takes_ns, takes_ns, where)
        self._host_ns += 9_500

    def _next(self) -> int:
        self._number += 1
        return self._number

    @staticmethod
    def _slice(category: str, name: str, pid: int, tid: int, start_ns: int, dur_ns: int, args: str = "") -> str:
        ts = f"{_BEGIN_US + start_ns // 1000}.{start_ns % 1000:03}"
        return (
            f'{{"ph":"X","cat":"{category}","name":"{name}","pid":{pid},"tid":{tid},"ts":{ts},'
            f'"dur":{dur_ns // 1000}.{dur_ns % 1000:03},"args":{{{args}}}}}'
        )


if __name__ == "__main__":
    sys.exit(main())
