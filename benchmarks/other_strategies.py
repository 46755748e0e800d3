"""What `tracekit whatif --strategy` predicts from a recording, against simulating the other strategy.

    python -m benchmarks.other_strategies --out docs/whatif_strategies.md

Both runs are simulated; the prediction sees the first one's traces alone. For hsdp it is told what a ring inside a node
carries, as nccl-tests would say.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import tracekit
from tracekit.plan import models
from tracekit.simulate import hardware, run
from tracekit.simulate.hardware import Hardware
from tracekit.simulate.job import FSDP1, FSDP2, HSDP, YAFSDP, Job
from tracekit.whatif import strategies
from tracekit.whatif.replicas import Node

_PAIRS = ((FSDP1, FSDP2), (FSDP1, YAFSDP), (FSDP2, YAFSDP), (FSDP1, HSDP), (FSDP2, HSDP))
_JOBS = (("llama2-7b", 16, 2048), ("llama2-7b", 32, 1024), ("llama2-7b", 64, 2048), ("llama2-13b", 64, 4096))
_LAYERS, _STEPS = 6, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, predict, print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.other_strategies", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the table to this file besides")
    asked = parser.parse_args(arguments)
    lines = [
        "# Another strategy, predicted and simulated",
        "",
        "    python -m benchmarks.other_strategies",
        "",
        f"**Simulated** runs of {_LAYERS} layers: a step as recorded under one strategy, as",
        "`tracekit whatif --strategy` predicts it from that recording for another, and as simulating that gives it.",
        "",
        "| machine, job | from | to | recorded | predicted | simulated |",
        "|---|---|---|---|---|---|",
    ]
    for machine, (model, gpus, tokens) in product(("a100-80", "h100-80"), _JOBS):
        for line in _rows(hardware.find(machine), model, gpus, tokens):
            lines.append(f"| {machine}, {model}, {gpus} GPUs, {tokens:,} tokens | {line}")
            print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    if asked.out:
        asked.out.write_text(text, encoding="utf-8")
    return 0


def _rows(machine: Hardware, model: str, gpus: int, tokens: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        took_ms = {}
        for strategy in dict.fromkeys(name for pair in _PAIRS for name in pair):
            job = Job(
                strategy,
                models.find(model, layers=_LAYERS),
                machine,
                gpus,
                tokens,
                steps=_STEPS,
                seed=5,
                ranks_written=2,
            )
            done = run.simulate(job, (), Path(folder) / strategy, arguments={}, force=True)
            took_ms[strategy] = done.recording.total_ns / _STEPS / 1e6
        node = Node(machine.gpus_per_node, machine.node_bytes_per_s)
        for before, after in _PAIRS:
            recorded = tracekit.load(str(Path(folder) / before), cache=False)
            told_ms = strategies.predicted(recorded, after, node).predicted_ns / 1e6
            yield (
                f"{before} | {after} | {took_ms[before]:.0f} ms | {_against(told_ms, took_ms[before])} | "
                f"{_against(took_ms[after], took_ms[before])} |"
            )


def _against(ms: float, before_ms: float) -> str:
    return f"{ms:.0f} ms ({ms / before_ms - 1:+.1%})"


if __name__ == "__main__":
    sys.exit(main())
