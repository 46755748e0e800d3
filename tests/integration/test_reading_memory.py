"""Memory use of reading: that of the requested tables, whatever else the file contains. Simulated files."""

import gzip
import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from tests.support.kineto_files import slice_

MIB = 1 << 20
STATUS = Path("/proc/self/status")
# Not by getrusage: its peak includes the memory of the parent at the fork.
PEAK = """
import sys
from tracekit.ingest.readers.kineto import reader
trace = reader.read(sys.argv[1], rank=0)
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak) * 1024, trace.ops.height, trace.activities.height)
"""
pytestmark = pytest.mark.skipif(not STATUS.exists(), reason="needs /proc to know a process's peak memory")
FLOW = {"ph": "s", "pid": 1, "tid": 1, "ts": 1.5, "cat": "ac2g", "name": "ac2g", "args": {"note": "x" * 300}}
UNUSED = (
    FLOW,
    FLOW | {"ph": "f", "bp": "e"},
    FLOW | {"ph": "C", "cat": None, "name": "GPU power", "args": {"W": 300}},
    FLOW | {"ph": "X", "dur": 2.0, "cat": "gpu_user_annotation", "name": "forward"},
    FLOW | {"ph": "X", "dur": 2.0, "cat": "cuda_sync", "name": "Stream Wait Event"},
)


def work(count, **more):
    """Yield `count` launches and their kernels, as JSON."""
    for i in range(count):
        yield json.dumps(slice_("cuda_runtime", "cudaLaunchKernel", 10.0 * i, 2, tid=1, correlation=i + 1))
        yield json.dumps(
            slice_("kernel", f"gemm {i % 50}", 10 * i + 5, 4, tid=7, device=0, stream=7, correlation=i + 1, **more)
        )


def python_functions(count):
    event = slice_("python_function", "module.py({}): forward", 0, 0.25, tid=1, **{"Python id": 7, "Ev Idx": 7})
    before, after = json.dumps(event | {"ts": "TS"}).replace("{}", "NAME").split('"TS"')
    for i in range(count):
        yield before.replace("NAME", str(i % 900)) + f"{i / 2}" + after


def write(path, events):
    text = '{"traceEvents": [\n' + ",\n".join(events) + "]}"
    path.write_bytes(gzip.compress(text.encode(), 1) if path.suffix == ".gz" else text.encode())
    return path


def peak_of(path: Path):
    """Return the peak memory of a process that reads a file, in bytes, and the rows of its ops and activities.

    With one thread: each further one keeps a heap of its own, as large as the machine's load lets it grow (150,000
    slices: 532 to 551 bytes each with one thread, 553 to 609 with two).
    """
    env = os.environ | {"POLARS_MAX_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", PEAK, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return tuple(map(int, done.stdout.split()))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return peak_of(write(tmp_path_factory.mktemp("plain") / "trace.json", work(5_000)))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_events_that_no_table_needs_cost_nothing(tmp_path, plain, name):
    unused = [json.dumps(event) for event in UNUSED] * 30_000
    path = write(tmp_path / name, chain(work(5_000), unused))
    peak, *rows = peak_of(path)
    assert rows == list(plain[1:])
    assert sum(map(len, unused)) > 45 * MIB
    assert peak - plain[0] < 8 * MIB


def test_arguments_that_no_table_needs_cost_nothing(tmp_path, plain):
    path = write(tmp_path / "trace.json", work(5_000, stack="frame;" * 2_000))
    peak, *rows = peak_of(path)
    assert rows == list(plain[1:])
    assert path.stat().st_size > 50 * MIB
    assert peak - plain[0] < 8 * MIB


def test_slices_cost_their_row_and_not_their_text(tmp_path, plain):
    count = 150_000
    path = write(tmp_path / "trace.json", chain(work(5_000), python_functions(count)))
    peak, ops, _ = peak_of(path)
    assert ops == plain[1] + count
    assert peak - plain[0] < 600 * count


def test_damage_does_not_make_reading_hold_the_file(tmp_path, plain):
    unused = [json.dumps(event) for event in UNUSED] * 30_000
    broken = [text if i % 1000 else text.replace('"pid": 1', '"pid": "1') for i, text in enumerate(unused)]
    peak, *rows = peak_of(write(tmp_path / "trace.json", chain(work(5_000), broken)))
    assert rows == list(plain[1:])
    assert peak - plain[0] < 24 * MIB
