"""The benchmark cases: folders of traces, some public, some generated here."""

import gzip
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRACES = "TRACEKIT_BENCHMARK_TRACES"
COPIES = (1, 8, 64)
STACK_STEPS = 43  # about 480 MB of JSON and 1.5 million events
_RANK = re.compile(rb'("rank"\s*:\s*)\d+')
_HEADER_BYTES = 1 << 16
_FEW_COPIES = 8


class SkippedError(Exception):
    """A case is not available here; the message says why."""


@dataclass(frozen=True)
class Case:
    """A folder of traces. `find(traces, work)` returns it and generates it in `work` if necessary."""

    name: str
    description: str
    find: Callable[[Path, Path], Path]
    has_device: bool = True
    is_large: bool = False
    """Slow subjects measure large cases only once."""


def _public_traces(name: str) -> Callable[[Path, Path], Path]:
    def find(traces: Path, work: Path) -> Path:
        if not (traces / name).is_dir():
            raise SkippedError(f"no folder {name} in {traces}; pass its folder with --traces or {TRACES}")
        copy = work / name
        if not copy.is_dir():  # HTA reads every .json and .gz file as a trace, and writes into the folder
            shutil.copytree(traces / name, copy)
        return copy

    return find


def _stacks(_: Path, work: Path) -> Path:
    out = work / "stacks"
    traced = work / "stacks-trace"
    if traced.is_dir():
        return traced
    if find_spec("torch") is None:
        raise SkippedError("recording this case needs PyTorch: pip install 'torch-tracekit[train]'")
    options = {"--strategy": "fsdp2", "--world-size": 1, "--steps": STACK_STEPS + 5, "--profile-active": STACK_STEPS}
    options |= {"--tokens": 16, "--batch": 1, "--micro-batches": 2, "--out": out}
    command = [sys.executable, "-m", "instrumented_trainers", "--stacks", "--overwrite"]
    command += [str(word) for option in options.items() for word in option]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # In a separate folder, since HTA would read the manifest as a trace.
    partial = work / "stacks-trace.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for path in out.glob("*.trace.json.gz"):
        path.rename(partial / path.name)
    partial.rename(traced)
    return traced


def _copies(count: int) -> Callable[[Path, Path], Path]:
    return lambda traces, work: copies_of_rank(next(_candidates(traces)), work, count)


def _candidates(traces: Path) -> Iterator[Path]:
    yield from sorted((traces / "nanogpt_h100_8ranks").glob("rank0-*.gz"))
    yield from sorted((ROOT / "sample_traces").glob("*/rank00000.pt.trace.json.gz"))


def _sample(_: Path, work: Path) -> Path:
    folder = work / "sample"
    folder.mkdir(exist_ok=True)
    for path in (ROOT / "sample_traces" / "demo-yafsdp").glob("*.trace.json.gz"):
        shutil.copy(path, folder)
    return folder


CASES = (
    Case("sample", "two ranks on a CPU, YaFSDP (sample_traces)", _sample, has_device=False),
    Case("hta_ddp_v100_memory", "one rank, DDP on V100, allocator events", _public_traces("hta_ddp_v100_memory")),
    Case("nanogpt_h100_8ranks", "eight ranks, DDP on H100", _public_traces("nanogpt_h100_8ranks")),
    Case("stacks_500mb", "one rank with Python stacks, recorded here", _stacks, has_device=False, is_large=True),
    *(Case(f"copies_{n}", f"copies of one rank: {n}", _copies(n), is_large=n > _FEW_COPIES) for n in COPIES),
)


def default_traces_folder() -> Path:
    """Return the folder that is searched for public traces."""
    return Path(os.environ.get(TRACES) or ROOT.parent / "shared" / "traces")


def copies_of_rank(original: Path, work: Path, count: int) -> Path:
    """Return a folder in `work` with `count` copies of a gzipped trace, each with a different rank."""
    folder, partial = work / f"copies-{count}", work / f"copies-{count}.partial"
    if folder.is_dir():
        return folder
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    raw = gzip.decompress(original.read_bytes())
    head, rest = raw[:_HEADER_BYTES], raw[_HEADER_BYTES:]
    for rank in range(count):
        rank_head = _RANK.sub(rb"\g<1>%d" % rank, head, count=1)
        (partial / f"rank{rank:05d}.pt.trace.json.gz").write_bytes(gzip.compress(rank_head + rest, compresslevel=1))
    partial.rename(folder)
    return folder
