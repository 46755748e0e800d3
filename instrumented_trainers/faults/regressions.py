"""Regressions: real but useless work, which is wrong only in comparison with an earlier recording.

No rule can find these in one recording; a comparison with an earlier one does. The size of each is a count of work, not
a time, so that a busy machine makes it no smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from instrumented_trainers.faults.fault import Fault, count


@dataclass(frozen=True)
class MoreCompute(Fault):
    """Each layer's output is multiplied COUNT more times, like a leftover statistic."""

    name: ClassVar[str] = "more-compute"
    usage: ClassVar[str] = "more-compute[=COUNT], products in each layer, 4"
    seen_by: ClassVar[tuple[str, ...]] = ()
    argument = staticmethod(count)
    count: int = 4

    def prepare(self, layers: Sequence[nn.Module], rank: int, device: str) -> None:
        product = torch.empty(0, device=device)  # one for all: what takes time here is to compute, not to allocate

        def multiply(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
            rows = output.detach().flatten(0, 1).float()
            for _ in range(self.count):
                torch.mm(rows.T, rows, out=product)

        for layer in layers:
            layer.register_forward_hook(multiply)


@dataclass(frozen=True)
class MoreCommunication(Fault):
    """After each layer's forward the ranks all-reduce an unused buffer of KIB KiB."""

    name: ClassVar[str] = "more-communication"
    usage: ClassVar[str] = "more-communication[=KIB], in each layer, 256"
    seen_by: ClassVar[tuple[str, ...]] = ()
    argument = staticmethod(count)
    buffer_kib: int = 256

    def prepare(self, layers: Sequence[nn.Module], rank: int, device: str) -> None:
        statistics = torch.zeros(self.buffer_kib << 8, device=device)

        def add_up(*_: Any) -> None:
            dist.all_reduce(statistics)

        for layer in layers:
            layer.register_forward_hook(add_up)


@dataclass(frozen=True)
class MoreMemory(Fault):
    """Each layer's output is copied COUNT times, and the copies stay allocated until the step ends."""

    name: ClassVar[str] = "more-memory"
    usage: ClassVar[str] = "more-memory[=COUNT], copies in each layer, 8"
    seen_by: ClassVar[tuple[str, ...]] = ()
    argument = staticmethod(count)
    count: int = 8

    def prepare(self, layers: Sequence[nn.Module], rank: int, device: str) -> None:
        copies: list[Tensor] = []

        def let_go(*_: Any) -> None:
            copies.clear()

        def keep(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
            copies.extend(output.detach().clone() for _ in range(self.count))

        layers[0].register_forward_pre_hook(let_go)
        for layer in layers:
            layer.register_forward_hook(keep)
