"""Compare what a step costs the host: YaFSDP, FSDP2 and DDP, with and without clipping, on 2 ranks.

    python -m benchmarks.yafsdp_host_time --rounds 20

The model is so small that nearly all of a step is the host's work for it. All train in the same two processes, in
stints that take turns. Times are CPU times of the main thread, which other load of the machine affects little.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import ModelConfig
from instrumented_trainers.parallelism import STRATEGIES, ShardOptions, clip_grad_norm, make_optimizer
from tests.support import process_group

WORLD_SIZE, WARM_UP_STEPS, TOKENS = 2, 3, 8
COMPARED = ("yafsdp", "fsdp2", "ddp")
MODEL = ModelConfig(width=32, layers=8, heads=4, key_value_heads=4, hidden_width=64, vocabulary=64)
COPY_OPS = frozenset(("aten::copy_", "aten::_foreach_copy_", "aten::cat", "aten::clone", "aten::split_with_sizes_copy"))


@dataclass(frozen=True)
class HostCost:
    """What a step of one training costs the host of one rank."""

    step_ns: tuple[float, ...]
    """By round, the CPU time of the main thread for a step."""
    clipping_ns: tuple[float, ...]
    """By round, the part of it that clips; 0 without clipping."""
    op_count: int
    """Calls of ATen functions in a step, nested ones included."""
    copy_count: int
    """Those of them that copy tensors."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.yafsdp_host_time", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20, help="stints of each training (default: 20)")
    parser.add_argument("--stint-steps", type=int, default=5, help="steps of a stint (default: 5)")
    options = parser.parse_args(arguments)
    measure = functools.partial(host_costs, options.rounds, options.stint_steps)
    print(table(process_group.run(WORLD_SIZE, measure, timeout_s=1500)))
    return 0


def host_costs(rounds: int, stint_steps: int) -> dict[str, HostCost]:
    """Train with each strategy, with and without clipping, in stints that take turns; return the costs of this rank."""
    trainings = {
        f"{strategy}{', clipped' if clips else ''}": Training(strategy, clips=clips)
        for strategy in COMPARED
        for clips in (False, True)
    }
    for training in trainings.values():
        training.stint(WARM_UP_STEPS)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trainings}
    for number in range(rounds):
        for name in list(trainings)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(trainings[name].stint(stint_steps))
    return {
        name: HostCost(*zip(*times[name], strict=True), *_op_counts(training.step))
        for name, training in trainings.items()
    }


class Training:
    """A small model under one strategy, and what trains it: forward, backward, clipping if asked for, fused AdamW."""

    def __init__(self, strategy: str, *, clips: bool) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (WORLD_SIZE,))
        self.model: nn.Module = STRATEGIES[strategy](Llama(MODEL), mesh, ShardOptions())
        self.optimizer = make_optimizer(self.model, torch.optim.AdamW, lr=1e-3, fused=True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(MODEL.vocabulary, (1, TOKENS + 1), generator=generator)
        self.clips, self.clipping_ns = clips, 0

    def step(self) -> None:
        """Train one step."""
        logits = self.model(self.tokens[:, :-1])
        functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
        if self.clips:
            began_ns = time.thread_time_ns()
            clip_grad_norm(self.model, 1.0)
            self.clipping_ns += time.thread_time_ns() - began_ns
        self.optimizer.step()
        self.optimizer.zero_grad()

    def stint(self, count: int) -> tuple[float, float]:
        """Train some steps; return the mean CPU time of this thread for a step and for its clipping, in ns."""
        dist.barrier()
        self.clipping_ns, began_ns = 0, time.thread_time_ns()
        for _ in range(count):
            self.step()
        return (time.thread_time_ns() - began_ns) / count, self.clipping_ns / count


def _op_counts(step: Callable[[], None]) -> tuple[int, int]:
    with profile(activities=[ProfilerActivity.CPU]) as recording:
        step()
    names = [event.name for event in recording.events() if event.name.startswith("aten::")]
    return len(names), sum(name in COPY_OPS for name in names)


def table(by_rank: Sequence[dict[str, HostCost]]) -> str:
    """Return a row per training: times over the stints of all ranks, ratio to FSDP2 by stint, and calls of rank 0."""
    lines = [f"{'':20}{'median':>10}{'10th pct':>10}{'x fsdp2':>9}{'clipping':>10}{'aten ops':>10}{'copies':>8}"]
    for name, cost in by_rank[0].items():
        base = name.replace(name.partition(",")[0], "fsdp2")
        times = sorted(value for rank in by_rank for value in rank[name].step_ns)
        ratios = [a / b for rank in by_rank for a, b in zip(rank[name].step_ns, rank[base].step_ns, strict=True)]
        clipping_ns = statistics.median(value for rank in by_rank for value in rank[name].clipping_ns)
        lines.append(
            f"{name:20}{statistics.median(times) / 1e6:>7.2f} ms{times[len(times) // 10] / 1e6:>7.2f} ms"
            f"{statistics.median(ratios):>9.2f}{clipping_ns / 1e6:>7.2f} ms{cost.op_count:>10}{cost.copy_count:>8}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
