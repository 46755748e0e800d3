"""Compare optimizers under YaFSDP in the same processes: time of their steps, and state, on 2 ranks.

    python -m benchmarks.yafsdp_optimizers --rounds 10

AdamW steps shards. Muon (with AdamW for what is no matrix of a layer), SOAP and LAMB step whole tensors, by
WholeTensorOptimizer; SOAP and LAMB are the tests' own, after their papers. Stints take turns.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import PRESETS
from instrumented_trainers.parallelism import STRATEGIES, ShardOptions
from instrumented_trainers.parallelism.yafsdp import WholeTensorOptimizer
from tests.integration.matrix_optimizers import Lamb, Soap
from tests.support import process_group

BASE, WORLD_SIZE, STEPS = "AdamW", 2, 2
KINDS: dict[str, Any] = {"Muon": torch.optim.Muon, "SOAP": functools.partial(Soap, frequency=10), "LAMB": Lamb}


@dataclass(frozen=True)
class OptimizerCost:
    """What an optimizer costs on one rank."""

    state_numel: int
    """Elements of state tensors."""
    owned_numel: int
    """Elements of the weights that this rank steps."""
    optimizer_ns: tuple[float, ...]
    """By round, the time of an optimizer step, all ranks together."""
    step_ns: tuple[float, ...]
    """By round, the time of a training step."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.yafsdp_optimizers", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="stints of each optimizer (default: 10)")
    parser.add_argument("--model", default="tiny", help="a size that the trainers know (default: tiny)")
    options = parser.parse_args(arguments)
    train = functools.partial(costs, options.model, options.rounds)
    by_rank = process_group.run(WORLD_SIZE, train, timeout_s=1500)
    print(table(by_rank))
    return 0


def costs(preset: str, rounds: int) -> dict[str, OptimizerCost]:
    """Train one model with each optimizer, in stints that take turns, and return what each costs on this rank."""
    trainings = {name: Training(preset, name) for name in (BASE, *KINDS)}
    for training in trainings.values():
        training.stint()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in trainings}
    for number in range(rounds):
        for name in list(trainings)[:: 1 if number % 2 == 0 else -1]:
            times[name].append(trainings[name].stint())
    return {
        name: OptimizerCost(training.state_numel(), training.owned_numel(), *zip(*times[name], strict=True))
        for name, training in trainings.items()
    }


class Training:
    """A sharded model and what steps it."""

    def __init__(self, preset: str, name: str) -> None:
        torch.manual_seed(0)
        config = PRESETS[preset]
        model = Llama(config)
        self.model = STRATEGIES["yafsdp"](model, init_device_mesh("cpu", (WORLD_SIZE,)), ShardOptions())
        self.optimizers = _optimizers(self.model, name, {n for n, p in Llama(config).named_parameters() if p.dim() > 1})
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(config.vocabulary, (4, 129), generator=generator)

    def stint(self) -> tuple[float, float]:
        """Train some steps; return the mean time of the optimizers' step and of the whole step, in ns."""
        optimizing_ns, began_ns = 0.0, _together_ns()
        for _ in range(STEPS):
            logits = self.model(self.tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten()).backward()
            before_ns = _together_ns()
            for optimizer in self.optimizers:
                optimizer.step()
            optimizing_ns += _together_ns() - before_ns
            self.model.zero_grad()
        return optimizing_ns / STEPS, (_together_ns() - began_ns) / STEPS

    def state_numel(self) -> int:
        """Number of elements of state that this rank keeps."""
        states = [getattr(optimizer, "_inner", optimizer).state for optimizer in self.optimizers]
        return sum(leaf.numel() for leaf in tree_leaves([dict(state) for state in states]) if isinstance(leaf, Tensor))

    def owned_numel(self) -> int:
        """Number of elements that this rank steps."""
        inner = [getattr(optimizer, "_inner", optimizer) for optimizer in self.optimizers]
        groups = [group for optimizer in inner for group in optimizer.param_groups]
        return sum(parameter.numel() for group in groups for parameter in group["params"])


def _optimizers(model: nn.Module, name: str, matrices: set[str]) -> list[Optimizer]:
    if name == BASE:
        return [torch.optim.AdamW(model.parameters(), lr=1e-3)]
    if name != "Muon":
        return [WholeTensorOptimizer(model.parameters(), KINDS[name], lr=1e-3)]
    in_layers = {matrix for matrix in matrices if matrix.startswith("layers.")}
    hidden = [parameter for key, parameter in model.named_parameters() if key in in_layers]
    rest = [parameter for key, parameter in model.named_parameters() if key not in in_layers]
    return [WholeTensorOptimizer(hidden, KINDS[name], lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


def _together_ns() -> int:
    dist.barrier()
    return time.perf_counter_ns()


def table(by_rank: Sequence[dict[str, OptimizerCost]]) -> str:
    """Return a row per optimizer: elements by rank, and times as multiples of the base's, medians over rounds."""
    columns = f"{'elements stepped':>24}{'elements of state':>24}{'its step':>12}{'x ' + BASE:>9}{'training step':>15}"
    lines = [f"{'':8}{columns}"]
    for name, cost in by_rank[0].items():
        base = by_rank[0][BASE]
        owned = " / ".join(f"{rank[name].owned_numel:,}" for rank in by_rank)
        state = " / ".join(f"{rank[name].state_numel:,}" for rank in by_rank)
        lines.append(
            f"{name:8}{owned:>24}{state:>24}{statistics.median(cost.optimizer_ns) / 1e6:>9.1f} ms"
            f"{_ratio(cost.optimizer_ns, base.optimizer_ns):>9.2f}{_ratio(cost.step_ns, base.step_ns):>13.2f} x"
        )
    return "\n".join(lines)


def _ratio(times: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(candidate / other for candidate, other in zip(times, base, strict=True))


if __name__ == "__main__":
    raise SystemExit(main())
