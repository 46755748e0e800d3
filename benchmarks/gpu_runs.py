"""Record trainings on one GPU that their ranks share: strategies, layouts, single ranks, faults and a healthy run.

    python -m benchmarks.gpu_runs --out runs/gpu

takes about 8 minutes on an H100 and needs torch only; `tracekit check` and `compare` judge what it leaves. The numbers
of docs/lab/gpu_runs.md are of these runs.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_STEPS = "--precision bf16 --steps 12 --profile-wait 6 --profile-warmup 2 --profile-active 3"
_SMALL = f"--model small --batch 8 --tokens 512 {_STEPS}"
_PIPELINE = f"--strategy zero1 --world-size 4 --no-memory {_SMALL}"
_RUNS = {
    **{name: f"--strategy {name} --world-size 2 {_SMALL}" for name in ("ddp", "zero1", "fsdp1", "fsdp2", "yafsdp")},
    "tp": f"--strategy fsdp2 --world-size 4 --tp 2 --sequence-parallel --loss-parallel {_SMALL}",
    "pp": f"{_PIPELINE} --pp 4 --micro-batches 8",
    "pp-interleaved": f"{_PIPELINE} --pp 2 --schedule interleaved --micro-batches 4",
    "cp-ring": f"--strategy ddp --world-size 4 --cp 4 --cp-method ring {_SMALL} --batch 2 --tokens 4096 --no-memory",
    "ep": f"--strategy ddp --world-size 4 --experts 4 --ep 2 --no-memory {_SMALL}",
    "large": f"--strategy ddp --world-size 1 --model 1.3b --batch 4 --tokens 2048 --stacks --no-memory {_STEPS}",
    "fp32": "--strategy ddp --world-size 1 --model 125m --batch 8 --tokens 1024 --no-memory --steps 10",
}
_FAULTS = (
    "slow-rank=1:20ms",
    "late-launch=5ms",
    "no-prefetch",
    "churn=64",
    "host-sync",
    "dataloader=50ms",
    "more-compute=8",
    "more-communication=4096",
    "more-memory",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Record all runs, or those named, one after the other; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("names", nargs="*", metavar="NAME", help="runs to record; by default all")
    options = parser.parse_args(arguments)
    failed = False
    for name, line in _lines():
        if options.names and name not in options.names:
            continue
        began_s = time.monotonic()
        command = [
            "--device",
            "cuda",
            "--share-gpus",
            *shlex.split(line),
            "--overwrite",
            "--out",
            str(options.out / name),
        ]
        done = subprocess.run(
            [sys.executable, "-m", "instrumented_trainers", *command], check=False, capture_output=True, text=True
        )
        failed |= done.returncode != 0
        result = (done.stdout if done.returncode == 0 else done.stderr).strip().rpartition("\n")[2]
        print(f"{name}: exit code {done.returncode}, {time.monotonic() - began_s:.0f} s: {result.strip()}", flush=True)
    return int(failed)


def _lines() -> Iterator[tuple[str, str]]:
    """Yield the name and options of each run. The fault that switches prefetching off needs it to be off."""
    yield from _RUNS.items()
    faulty = f"--strategy fsdp2 --world-size 2 {_SMALL}"
    yield "healthy", f"{faulty} --prefetch 1"
    for fault in _FAULTS:
        prefetch = "" if fault == "no-prefetch" else " --prefetch 1"
        yield fault.partition("=")[0], f"{faulty}{prefetch} --fault {fault}"


if __name__ == "__main__":
    sys.exit(main())
