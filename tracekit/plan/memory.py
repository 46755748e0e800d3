"""Memory of one rank: what ZeRO shards (arXiv 1910.02054) and what activations take (arXiv 2205.05198)."""

from dataclasses import dataclass

from tracekit.errors import ConfigError

WEIGHT_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 2, 12  # per parameter: mixed-precision Adam
GQA_SWIGLU_FACTOR = 40.5
"""Bytes per s·b·h of a layer of Llama 2 70B: flash attention, bf16, 8 key-value heads, SwiGLU."""
FULL_RECOMPUTATION_FACTOR = 2.0
"""Bytes per s·b·h of a layer of which only the input is kept, in 2-byte numbers."""


@dataclass(frozen=True)
class StateMemory:
    """Bytes of one rank, without activations and buffers."""

    weight_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    total_bytes: float


def state(params: float, *, ranks: int, zero: int) -> StateMemory:
    """Return what `params` parameters take on each of `ranks` under a ZeRO stage; 0 is DDP, 3 is FSDP."""
    if not (0 < params < float("inf")) or ranks < 1 or zero not in (0, 1, 2, 3):
        raise ConfigError("parameters must be above 0, ranks 1 or more, the ZeRO stage 0, 1, 2 or 3")
    weight = params * WEIGHT_BYTES / (ranks if zero >= 3 else 1)
    gradient = params * GRADIENT_BYTES / (ranks if zero >= 2 else 1)
    optimizer = params * OPTIMIZER_BYTES / (ranks if zero >= 1 else 1)
    return StateMemory(weight, gradient, optimizer, weight + gradient + optimizer)


def activation_bytes(factor: float, *, sequence: int, batch: int, width: int, layers: int) -> float:
    """Return factor · s · b · h · L, in bytes; one of the factors above, or 34 + 5 a s / h without flash attention."""
    return factor * sequence * batch * width * layers
