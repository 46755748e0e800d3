"""The whole product on real input: train under FSDP2 and under YaFSDP, then compare them with `tracekit`.

What `make demo` runs. The analysis is called as a user would call it, by its command line.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from tracekit.conventions import python_child

STRATEGIES = ("fsdp2", "yafsdp")

# The profiled window, steps 20 to 26, holds the first of the two checkpoints. The steps around it, whose metrics are
# logged too, are enough for a comparison of tokens per second to separate a difference from noise.
_RUN = shlex.split("--steps 48 --checkpoint-every 24 --keep 1 --profile-wait 18 --profile-warmup 2 --profile-active 7")
_ON_CPU = shlex.split("--device cpu --world-size 2 --model tiny")
_ON_GPUS = shlex.split("--device cuda --model 125m --precision bf16 --batch 4 --tokens 1024")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return the exit code: that of the first command that failed, or 0."""
    parser = argparse.ArgumentParser(prog="python -m instrumented_trainers.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for both runs and the report")
    out = parser.parse_args(arguments).out
    began_s = time.monotonic()
    where = _ON_GPUS if torch.cuda.device_count() > 1 else _ON_CPU
    runs = [out / strategy for strategy in STRATEGIES]
    _print(_machine(torch.cuda.device_count()))
    for strategy, run in zip(STRATEGIES, runs, strict=True):
        _print(f"training under {strategy}, with a profiled window and two checkpoints, into {run}")
        shutil.rmtree(run, ignore_errors=True)
        code = _call("instrumented_trainers", "--strategy", strategy, "--out", str(run), *_RUN, *where)
        if code:
            _print(f"the training under {strategy} failed (exit code {code})")
            return code
    code = _analyze(runs, out / "report.html")
    if code == 0:
        _print(f"done in {time.monotonic() - began_s:.0f} s. To browse the runs: tracekit dashboard {out}")
    return code


def _analyze(runs: list[Path], report: Path) -> int:
    """Print findings and comparison of the runs and write the HTML report; return the first exit code that is not 0."""
    check = ["check", *map(str, runs), "--fail-on", "never"]
    for what, words in (
        ("findings in both runs", check),
        (f"{STRATEGIES[1]} against {STRATEGIES[0]}", ["compare", *map(str, runs)]),
        ("the findings as an HTML page", [*check, "--format", "html", "--out", str(report)]),
    ):
        _print(f"{what}\n$ tracekit {shlex.join(words)}")
        code = _call("tracekit", *words)
        if code:
            _print(f"tracekit {words[0]} failed (exit code {code})")
            return code
    return 0


def _call(module: str, *arguments: str) -> int:
    command = python_child.module_command(module, *arguments)
    return subprocess.run(command, env=python_child.environment(), check=False).returncode  # noqa: S603 our own


def _machine(gpus: int) -> str:
    if gpus > 1:
        return f"training on {gpus} GPUs, one process each (NCCL)"
    processes = "training on 2 CPU processes (gloo)"
    return processes if gpus == 0 else f"with only one GPU there is nothing to shard over: {processes}"


def _print(words: str) -> None:
    sys.stdout.write(f"\ndemo: {words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
