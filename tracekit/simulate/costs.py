"""How long each part of a step takes alone, in seconds, from sizes and rates.

Every function takes numbers, or arrays of them for many machines at once: the simulator and the fit of the
published table share these formulas.
"""

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from tracekit.conventions.strategies import ALL_GATHER, GATHERED_BYTES, REDUCED_BYTES, ring_hops
from tracekit.plan.hardware import Hardware
from tracekit.plan.models import Model
from tracekit.simulate.job import Job

Quantity: TypeAlias = Any
"""A float, or an array of floats."""

CAST_BYTES = GATHERED_BYTES + REDUCED_BYTES
DIVIDE_BYTES = 2 * REDUCED_BYTES
COPY_BYTES = 2 * GATHERED_BYTES
OPTIMIZER_BYTES = 60  # per parameter: clip, then Adam on an fp32 weight and two moments, and a 16-bit weight written
_LOSS_BYTES = 14  # per logit: softmax and cross-entropy, and the same backward
_ATTENTION_BACKWARD = 2.5  # times forward: flash attention recomputes its products
_INDEXABLE_BYTES = 1 << 31


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second; each a number or an array."""

    flops_per_s: Quantity
    memory_bytes_per_s: Quantity
    elementwise_bytes: Quantity
    bus_bytes_per_s: Quantity
    hop_s: Quantity
    overhead_s: Quantity
    give_way: Quantity
    give_way_high_priority: Quantity


@dataclass(frozen=True)
class Parts:
    """Device time of the compute of one micro-batch's step, in seconds."""

    matrices_s: Quantity
    """Matrix products of a layer's forward pass; backward takes twice as long."""
    attention_s: Quantity
    elementwise_s: Quantity
    head_s: Quantity
    """Matrix product of the head's forward pass."""
    loss_s: Quantity
    optimizer_s: Quantity

    @property
    def layer_forward_s(self) -> Quantity:
        """Return the forward pass of one layer."""
        return self.matrices_s + self.attention_s + self.elementwise_s

    @property
    def layer_backward_s(self) -> Quantity:
        """Return the backward pass of one layer, recomputation left out."""
        return 2 * self.matrices_s + self.attention_backward_s + 2 * self.elementwise_s

    @property
    def attention_backward_s(self) -> Quantity:
        """Return attention's part in the backward pass of one layer."""
        return _ATTENTION_BACKWARD * self.attention_s

    @property
    def head_forward_s(self) -> Quantity:
        """Return head and loss, forward."""
        return self.head_s + self.loss_s

    @property
    def head_backward_s(self) -> Quantity:
        """Return head and loss, backward."""
        return 2 * self.head_s + self.loss_s


def rates(hardware: Hardware, *, spans_nodes: bool, overhead_s: float = 0.0) -> Rates:
    """Return the rates of a machine, for rings inside a node or across nodes."""
    return Rates(
        flops_per_s=hardware.flops_per_s,
        memory_bytes_per_s=hardware.memory_bytes_per_s,
        elementwise_bytes=hardware.elementwise_bytes,
        bus_bytes_per_s=hardware.network_bytes_per_s if spans_nodes else hardware.node_bytes_per_s,
        hop_s=hardware.network_hop_s if spans_nodes else hardware.node_hop_s,
        overhead_s=overhead_s,
        give_way=hardware.give_way,
        give_way_high_priority=hardware.give_way_high_priority,
    )


def parts(model: Model, speeds: Rates, *, batch: int, seq: int, shards: int) -> Parts:
    """Return the compute of a step: `batch` sequences of `seq` tokens a GPU, the optimizer's work over `shards`.

    A product of n parameters and t tokens takes 2nt operations; causal attention 2bs²h. What is neither moves
    `elementwise_bytes` per token and unit of width.
    """
    tokens = batch * seq
    return Parts(
        matrices_s=2 * model.layer_parameters * tokens / speeds.flops_per_s,
        attention_s=2 * batch * seq * seq * model.width / speeds.flops_per_s,
        elementwise_s=speeds.elementwise_bytes * tokens * model.width / speeds.memory_bytes_per_s,
        head_s=2 * model.outer_parameters * tokens / speeds.flops_per_s,
        loss_s=_LOSS_BYTES * tokens * model.vocabulary / speeds.memory_bytes_per_s,
        optimizer_s=speeds.overhead_s + OPTIMIZER_BYTES * model.parameters / shards / speeds.memory_bytes_per_s,
    )


def parts_of(job: Job) -> Parts:
    """Return the compute of a job's step."""
    speeds = rates(job.hardware, spans_nodes=False, overhead_s=job.step_overhead_ns / 1e9)
    return parts(job.model, speeds, batch=job.batch, seq=job.seq, shards=job.shards)


def ring_s(size_bytes: Quantity, speeds: Rates, ranks: Quantity) -> Quantity:
    """Return the time of a ring of `ranks` to gather or reduce-scatter `size_bytes` in all (nccl-tests' formula)."""
    hops = ring_hops(ALL_GATHER, ranks)
    return hops / ranks * size_bytes / speeds.bus_bytes_per_s + hops * speeds.hop_s


def moved_s(bytes_per_parameter: float, parameters: Quantity, speeds: Rates) -> Quantity:
    """Return the time of a kernel that only moves data."""
    return bytes_per_parameter * parameters / speeds.memory_bytes_per_s


def pieces(parameters: int) -> int:
    """Return into how many kernels PyTorch splits an elementwise op on reduced gradients: none may pass 2^31 bytes.

    >>> pieces(202_000_000), pieces(855_000_000)
    (1, 2)
    """
    return int(np.ceil(REDUCED_BYTES * parameters / _INDEXABLE_BYTES))
