"""Faults of the training step: slow compute, launches, gathers, allocations, syncs or data loading."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from instrumented_trainers.faults.fault import Fault, count, duration_ns
from instrumented_trainers.parallelism import ShardOptions
from tracekit.conventions.strategies import STRATEGIES

_COMPUTED = 240  # rows of the square matrices that a slow rank multiplies: less than 1 ms a product, so few events


@dataclass(frozen=True)
class SlowRank(Fault):
    """One rank computes longer than the others, in each forward pass: a GPU that is throttled or shared.

    The others wait for it in the next collective. Found by the RANK family (straggler); COMM001 sees the waits.
    """

    name: ClassVar[str] = "slow-rank"
    usage: ClassVar[str] = "slow-rank=RANK:DURATION, such as slow-rank=1:20ms"
    seen_by: ClassVar[tuple[str, ...]] = ("RANK", "COMM001")
    rank: int
    delay_ns: int

    @classmethod
    def parse(cls, text: str) -> "SlowRank":
        rank, _, delay = text.partition(":")
        if not rank.isdecimal():
            raise ValueError(f"{rank!r} is not a rank")
        return cls(int(rank), duration_ns(delay))

    def problem(self, strategy: str, world_size: int) -> str | None:
        return None if self.rank < world_size else f"rank {self.rank} does not exist: there are {world_size} ranks"

    def prepare(self, layers: Sequence[nn.Module], rank: int, device: str) -> None:
        if rank == self.rank:
            layers[0].register_forward_hook(lambda *_: compute(self.delay_ns, device))


@dataclass(frozen=True)
class LateLaunch(Fault):
    """The host is busy in Python before each layer's forward, so kernels and gathers are launched late.

    On a GPU the device becomes idle; on the CPU nothing else runs. Found by the HOST family (late launch).
    """

    name: ClassVar[str] = "late-launch"
    usage: ClassVar[str] = "late-launch[=DURATION], before each layer, 2ms"
    seen_by: ClassVar[tuple[str, ...]] = ("HOST",)
    argument = staticmethod(duration_ns)
    delay_ns: int = 2_000_000

    def prepare(self, layers: Sequence[nn.Module], rank: int, device: str) -> None:
        for layer in layers:
            # Before the strategy's own hook, which issues the gather.
            layer.register_forward_pre_hook(lambda *_: _spin(self.delay_ns), prepend=True)


@dataclass(frozen=True)
class NoPrefetch(Fault):
    """Every layer's weights are gathered only when the layer runs: nothing hides the gathers.

    FSDP1 and FSDP2 run without prefetching; YaFSDP gets one buffer, so that no other is free. Found by
    COMM001.
    """

    name: ClassVar[str] = "no-prefetch"
    usage: ClassVar[str] = "no-prefetch"
    seen_by: ClassVar[tuple[str, ...]] = ("COMM001",)

    def problem(self, strategy: str, world_size: int) -> str | None:
        return None if STRATEGIES[strategy].shards_parameters else f"{strategy} gathers no weights"

    def change_options(self, options: ShardOptions) -> ShardOptions:
        return replace(options, prefetch=0, buffers=1)


@dataclass(frozen=True)
class Churn(Fault):
    """Each layer allocates and frees a buffer, larger every step; on a GPU the cache is emptied every step.

    So the allocator cannot reuse blocks: cudaMalloc and cudaFree in steady state. Found by MEM001; on the CPU,
    which has no such calls, by MEM010 as sizes that change from step to step.
    """

    name: ClassVar[str] = "churn"
    usage: ClassVar[str] = "churn[=MIB], the buffer, 4"
    seen_by: ClassVar[tuple[str, ...]] = ("MEM001", "MEM010")
    argument = staticmethod(count)
    buffer_mib: int = 4

    def prepare(self, layers: Sequence[nn.Module], rank: int, device: str) -> None:
        passes = [0]

        def take(*_: Any) -> None:
            passes[0] += 1
            size_bytes = (self.buffer_mib << 20) + (passes[0] // len(layers) << 16)
            torch.empty(size_bytes, dtype=torch.uint8, device=device).zero_()

        for layer in layers:
            layer.register_forward_hook(take)

    def end_step(self, device: str) -> None:
        if device == "cuda":
            torch.cuda.empty_cache()


@dataclass(frozen=True)
class HostSync(Fault):
    """Each layer's output is checked for NaN on the host, like leftover debugging code.

    On a GPU the host waits for the device each time and launches nothing ahead. Found by the HOST family (blocking
    sync).
    """

    name: ClassVar[str] = "host-sync"
    usage: ClassVar[str] = "host-sync"
    seen_by: ClassVar[tuple[str, ...]] = ("HOST",)

    def prepare(self, layers: Sequence[nn.Module], rank: int, device: str) -> None:
        def check(_layer: nn.Module, _inputs: Any, output: Tensor) -> None:
            if not output.detach().isfinite().all().item():
                raise FloatingPointError("a layer's output is not finite")

        for layer in layers:
            layer.register_forward_hook(check)


@dataclass(frozen=True)
class SlowData(Fault):
    """Each batch is prepared in Python for longer while nothing trains.

    Found by the HOST family (data loading).
    """

    name: ClassVar[str] = "dataloader"
    usage: ClassVar[str] = "dataloader[=DURATION], for each batch, 50ms"
    seen_by: ClassVar[tuple[str, ...]] = ("HOST",)
    argument = staticmethod(duration_ns)
    delay_ns: int = 50_000_000

    def delay_batch(self) -> None:
        _spin(self.delay_ns)


def compute(time_ns: int, device: str) -> None:
    """Keep the device computing for `time_ns`."""
    if device == "cuda":
        torch.cuda._sleep(int(time_ns * torch.cuda.get_device_properties().clock_rate / 1e6))
        return
    matrix, end_ns = torch.ones(_COMPUTED, _COMPUTED), time.perf_counter_ns() + time_ns
    with torch.no_grad():
        while time.perf_counter_ns() < end_ns:
            matrix @ matrix


def _spin(time_ns: int) -> None:
    """Keep Python busy for `time_ns`."""
    end_ns = time.perf_counter_ns() + time_ns
    while time.perf_counter_ns() < end_ns:
        pass
