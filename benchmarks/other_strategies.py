"""Predictions of `tracekit whatif --strategy` and `--network-times`, compared with simulations of the same change.

    python -m benchmarks.other_strategies --out docs/lab/whatif_strategies.md

Both runs are simulated; the prediction reads the first one's traces only. For hsdp it is given the bandwidth of a ring
inside a node, as nccl-tests would measure it.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import tracekit
from tracekit.plan import hardware, models
from tracekit.plan.hardware import Hardware
from tracekit.replay.graph import strategies
from tracekit.replay.graph.strategies import NodeSpec, Prediction
from tracekit.simulate import run
from tracekit.simulate.job import FSDP1, FSDP2, HSDP, YAFSDP, Job

_PAIRS = ((FSDP1, FSDP2), (FSDP1, YAFSDP), (FSDP2, YAFSDP), (FSDP1, HSDP), (FSDP2, HSDP))
_JOBS = (("llama2-7b", 16, 2048), ("llama2-7b", 32, 1024), ("llama2-7b", 64, 2048), ("llama2-13b", 64, 4096))
_NETWORKS = (0.5, 2, 4)
_LAYERS, _STEPS = 6, 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Simulate, predict, print the table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.other_strategies", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    options = parser.parse_args(arguments)
    lines = [
        "# Another strategy or network, predicted and simulated",
        "",
        "    python -m benchmarks.other_strategies",
        "",
        f"**Simulated** runs of {_LAYERS} layers: the step time recorded under one strategy, the",
        "prediction of `tracekit whatif --strategy` for another, or of `--network-times` for another bandwidth, and",
        "the simulation of that change.",
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
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return 0


def _rows(machine: Hardware, model: str, gpus: int, tokens: int) -> Iterator[str]:
    spec = models.find(model, layers=_LAYERS)
    job = Job(FSDP2, spec, machine, gpus, tokens, steps=_STEPS, seed=5, ranks_written=2)
    with tempfile.TemporaryDirectory() as folder:
        names = dict.fromkeys(name for pair in _PAIRS for name in pair)
        took_ms = {name: _step_ms(replace(job, strategy=name), Path(folder) / name) for name in names}
        runs = {name: tracekit.load(str(Path(folder) / name), cache=False) for name in names}
        node = NodeSpec(machine.gpus_per_node, machine.node_bytes_per_s)
        for before, after in _PAIRS:
            prediction = strategies.predict_strategy(runs[before], after, node)
            yield f"{before} | {after} | {_row(took_ms[before], prediction, took_ms[after])}"
        for times in _NETWORKS:
            prediction = strategies.predict_network(runs[FSDP2], times)
            true_ms = _step_ms(replace(job, hardware=_faster(machine, times)), Path(folder) / "network")
            yield f"{FSDP2} | network × {times:g} | {_row(took_ms[FSDP2], prediction, true_ms)}"


def _step_ms(job: Job, folder: Path) -> float:
    """Simulate a job into a folder and return what a step takes, in ms."""
    return run.simulate(job, (), folder, arguments={}, force=True).recording.total_ns / _STEPS / 1e6


def _faster(machine: Hardware, times: float) -> Hardware:
    return replace(
        machine,
        node_bytes_per_s=machine.node_bytes_per_s * times,
        network_bytes_per_s=machine.network_bytes_per_s * times,
    )


def _row(recorded_ms: float, prediction: Prediction, true_ms: float) -> str:
    predicted_ms = prediction.predicted_ns / 1e6
    return f"{recorded_ms:.0f} ms | {_relative(predicted_ms, recorded_ms)} | {_relative(true_ms, recorded_ms)} |"


def _relative(ms: float, before_ms: float) -> str:
    return f"{ms:.0f} ms ({ms / before_ms - 1:+.1%})"


if __name__ == "__main__":
    sys.exit(main())
