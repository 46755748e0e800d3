"""Tokens per second, model FLOP/s and their share of the device's peak (MFU)."""

from dataclasses import dataclass

import torch

from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.model_config import ModelConfig
from instrumented_trainers.sizes import model_config
from tracekit import conventions
from tracekit.capture.metrics import Pending
from tracekit.conventions import devices

_SCALES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6))


def flops_per_token(sizes: ModelConfig, tokens: int) -> int:
    """Return the floating-point operations of training on one token in a sequence of `tokens`, recomputation left out.

    6 per weight that multiplies (of experts the active ones), and 12 T D a layer for attention, by
    https://arxiv.org/abs/2204.02311, appendix B.
    """
    looked_up = 0 if sizes.tied else sizes.vocabulary * sizes.width  # an embedding multiplies nothing
    return 6 * (sizes.active_parameters - looked_up) + 12 * sizes.layers * sizes.width * tokens


def peak_flops(device: str, precision: str) -> float | None:
    """Return the peak of a device of that name in FLOP/s; None where it is not known.

    >>> peak_flops("NVIDIA H100 80GB HBM3", "bf16")
    989000000000000.0
    """
    peaks = devices.find(device)
    return None if peaks is None else peaks.peak(precision)


@dataclass(frozen=True)
class Throughput:
    """How fast the steps of a training are. `peak`: that of one device in FLOP/s, or None where it is not known."""

    tokens_per_step: int
    flops_per_token: int
    devices: int
    peak: float | None

    @classmethod
    def of(cls, config: TrainingConfig) -> "Throughput":
        """Return that of a configuration; the peak is the configuration's, else that of this rank's GPU."""
        peak = config.peak_flops
        if peak is None and config.device == "cuda":
            peak = peak_flops(torch.cuda.get_device_name(), config.precision)
        flops = flops_per_token(model_config(config), config.tokens)
        return cls(config.tokens_per_step, flops, config.world_size, peak)

    def scalars(self, step_time_ns: float) -> dict[str, float]:
        """Return tokens of all ranks and per GPU, model FLOP/s of all ranks, and MFU where the peak is known."""
        values = conventions.throughput(self.tokens_per_step, step_time_ns, ranks=self.devices)
        flops_per_s = values[conventions.TOKENS_METRIC] * self.flops_per_token
        values["model_flops_per_second"] = flops_per_s
        if self.peak:
            values["mfu_ratio"] = flops_per_s / self.devices / self.peak
        return values

    def pending_scalars(self, step_time_ns: Pending) -> dict[str, Pending]:
        """Return `scalars` of a step whose time is not known yet."""
        return {name: step_time_ns.map(lambda ns, scalar=name: self.scalars(ns)[scalar]) for name in self.scalars(1)}

    def describe(self, step_time_ns: float) -> str:
        """Return tokens and model FLOP/s of all ranks, and MFU where the peak is known, in words."""
        values = self.scalars(step_time_ns)
        flops_per_s = values["model_flops_per_second"]
        prefix, scale = next(((p, s) for p, s in _SCALES if flops_per_s >= s), ("", 1.0))
        words = f"{values[conventions.TOKENS_METRIC]:,.0f} tokens/s   {flops_per_s / scale:.1f} {prefix}FLOP/s"
        return f"{words}   MFU {values['mfu_ratio']:.1%}" if "mfu_ratio" in values else words
