"""``tracekit verify-training``: whether a user's training computes over ranks what it computes in one process."""

import importlib.util
import os
import subprocess
import sys
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli.options import DocumentOptions, expand_options
from tracekit.conventions import python_child
from tracekit.errors import InputError, MissingExtraError

DIFFERS = 1
_MODULE = "instrumented_trainers.verification"  # a process of its own: the commands never import torch
_START_S = 120
_LAST_CHARACTERS = 300


class Strategy(StrEnum):
    """What a training is verified under."""

    DDP = "ddp"
    FSDP2 = "fsdp2"
    YAFSDP = "yafsdp"


@expand_options
def verify_training(
    target: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT.py:FUNCTION",
            help="Your function, also as module:function. It returns model, loss and batches. It is run.",
        ),
    ],
    *,
    strategy: Annotated[
        list[Strategy] | None, typer.Option(help="Only this strategy; repeatable.  [default: all of them]")
    ] = None,
    ranks: Annotated[int, typer.Option(metavar="N", min=2, max=16, help="Ranks, each a process on this CPU.")] = 2,
    steps: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Steps, each on a batch of its own.")] = 3,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, max=86_400.0, help="Of each strategy in each precision.")
    ] = 120.0,
    table: DocumentOptions,
) -> None:
    """Verify that your training computes the same in one process and over ranks: DDP, FSDP2 and YaFSDP, on the CPU.

    The same steps run in fp64, where only rounding of 1e-16 may differ, and in the model's own precision. The report
    names the first value that differs: output of a module, loss, gradient, weight or buffer, its step, by how much, and
    whether a constant factor explains it. This runs your code: name only files that you trust.

    Exit codes: 0 all strategies are right, 1 one differs, refuses the model or fails, 2 there is nothing to verify.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtraError("verify-training needs PyTorch: pip install 'torch-tracekit[train]'")
    names = [name.value for name in strategy or Strategy]
    words = ["--ranks", str(ranks), "--steps", str(steps), "--timeout-s", f"{time_limit:g}", "--strategies", *names]
    from tracekit.report import training_verification as report

    verification = report.read(_verification_json(target, words, limit_s=_START_S + 2 * (1 + len(names)) * time_limit))
    table.write_document(report.document(verification))
    verdicts = [report.verdict(results) for results in report.by_strategy(verification).values()]
    if any(verdict != report.RIGHT for verdict in verdicts):
        raise typer.Exit(DIFFERS)


def _verification_json(target: str, words: list[str], *, limit_s: float) -> bytes:
    """What the ranks reported, in JSON. What the user's code prints is shown with --debug only."""
    with tempfile.TemporaryDirectory(prefix="tracekit-") as folder:
        out, log = Path(folder, "verification.json"), Path(folder, "log")
        with log.open("wb") as printed:
            stream = sys.stderr if "TRACEKIT_DEBUG" in os.environ else printed
            environment = python_child.environment()
            environment.setdefault("OMP_NUM_THREADS", "1")  # ranks share this node's cores
            command = python_child.module_command(_MODULE, target, str(out), *words)
            try:
                done = subprocess.run(  # noqa: S603 our own module; it runs the function that the user named
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    env=environment,
                    timeout=limit_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise InputError(
                    f"{target}: no result within {limit_s:g} s; take a smaller model, or a longer --time-limit"
                ) from None
        if out.exists():
            return out.read_bytes()
        last = log.read_text(errors="replace").strip().rpartition("\n")[2][-_LAST_CHARACTERS:]
        raise InputError(f"{target}: the verification ended with exit code {done.returncode}: {last or 'see --debug'}")
