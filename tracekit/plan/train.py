"""Time, money and energy of a training: tokens, model and GPUs give days.

A token costs 6 floating-point operations per active weight, and 12 s h a layer for attention (arXiv 2204.02311,
appendix B). The MFU is given, measured by a run, or predicted of a layout (`tracekit.plan.layouts`): then each part of
a step is a term with its formula and source. Published trainings are compared in docs/plan.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tracekit.errors import ConfigError
from tracekit.plan import layouts
from tracekit.plan.checkpoint import check_positive
from tracekit.plan.layouts import Job, LayoutPlan

GIVEN, MEASURED, PREDICTED = MFU_SOURCES = ("given", "measured", "predicted")
HOURS_PER_MONTH = 730.0
"""A twelfth of a year of 8,760 hours."""
_OFFLOAD = "offload"
_COMPUTE_AT_MFU = "step at the MFU"
OFFLOAD_HOST_BYTES = 28
"""Per weight: the CPU's Adam reads a gradient (2 B) and three fp32 numbers, and writes these and a weight (2 B)."""
OFFLOAD_LINK_BYTES = 2
"""Per weight, back to the GPU. Gradients go to the host while backward runs."""


@dataclass(frozen=True)
class TermSource:
    """How a part of a step is computed, and where that is from."""

    formula: str
    source: str


TERM_SOURCES: Mapping[str, TermSource] = {
    layouts.COMPUTE: TermSource(
        "m L (3 or, recomputed, 4) 2 N b s / (t F), other ops at memory bandwidth", "arXiv 2104.04473; 2205.05198"
    ),
    layouts.BUBBLE: TermSource("(p − 1) / (v m) of the rest", "arXiv 2104.04473, section 2.2"),
    layouts.PP: TermSource("2 v b s h / t numbers per micro-batch over the network", "arXiv 2104.04473, section 3.2"),
    layouts.TP: TermSource("8 b s h (t − 1)/t numbers per layer and micro-batch", "arXiv 2104.04473, section 3.2"),
    layouts.CP: TermSource("3 b s · 2 h (kv heads / heads) (c − 1)/t numbers per layer", "arXiv 2310.01889"),
    layouts.EP: TermSource("4 b s h k (e − 1)/e numbers per expert layer", "arXiv 2101.03961"),
    layouts.DP: TermSource("ZeRO-1: 2 + 4 B per weight; FSDP: 4 + 4 B per micro-batch; less what compute hides",
                           "arXiv 1910.02054, section 7"),
    _COMPUTE_AT_MFU: TermSource("tokens · (6 N + 12 L s h) / (GPUs · peak · MFU)", "arXiv 2204.02311, appendix B"),
    _OFFLOAD: TermSource("weights per GPU · (28 B / host memory + 2 B / PCIe)", "ZeRO-Offload, arXiv 2101.06840"),
}  # fmt: skip


@dataclass(frozen=True)
class Term:
    """A part of a step, in s."""

    name: str
    seconds: float
    formula: str
    source: str


@dataclass(frozen=True)
class Work:
    """What is trained on what: operations per token, tokens per step, GPUs and the peak of one in operations/s."""

    flops_per_token: float
    step_tokens: float
    gpus: int
    peak_flops_per_s: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_positive(name.replace("_", " "), value)

    def mfu_ratio(self, step_s: float) -> float:
        """Model FLOPs utilization of a step that takes so many seconds."""
        return self.step_tokens * self.flops_per_token / (step_s * self.gpus * self.peak_flops_per_s)


@dataclass(frozen=True)
class Step:
    """A step's terms, and where its MFU is from (one of MFU_SOURCES)."""

    terms: tuple[Term, ...]
    mfu_source: str

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return math.fsum(term.seconds for term in self.terms)


@dataclass(frozen=True)
class Offload:
    """The optimizer on the host: weights per GPU, and what each GPU gets of host memory and PCIe, in bytes/s."""

    params_per_gpu: float
    host_bytes_per_s: float
    pcie_bytes_per_s: float


@dataclass(frozen=True)
class Prices:
    """What a GPU-hour costs, in money, and what a GPU draws, in W; `pue`: of the data center per W of a GPU."""

    gpu_hour: float | None = None
    power_w: float | None = None
    pue: float = 1.0


@dataclass(frozen=True)
class TrainingPlan:
    """A training. Times in s, of which `duration_seconds` is with what failures and restarts cost (`goodput_ratio`).

    Cost is in the money of the price; None where no price or power is known. `energy_kwh` is at full power.
    """

    steps: float
    step_seconds: float
    tokens_per_second: float
    flops: float
    mfu_ratio: float
    mfu_source: str
    duration_seconds: float
    gpu_hours: float
    cost: float | None
    cost_per_month: float | None
    energy_kwh: float | None
    goodput_ratio: float


@dataclass(frozen=True)
class EqualThroughput:
    """GPUs that another strategy needs for the throughput of this one, if it scales as far, and what that saves."""

    speedup_ratio: float
    gpus: float
    saved_gpus: float
    saved_cost_per_month: float | None


def step_at_mfu(work: Work, mfu_ratio: float, source: str) -> Step:
    """Step of a training with this MFU. Raises ConfigError for one that is not above 0 and at most 1."""
    if not 0 < mfu_ratio <= 1:
        raise ConfigError(f"an MFU of {mfu_ratio:g} is not possible: it is above 0 and at most 1")
    seconds = work.step_tokens * work.flops_per_token / (work.gpus * work.peak_flops_per_s * mfu_ratio)
    return Step((_term(_COMPUTE_AT_MFU, seconds),), source)


def step_of_layout(job: Job, layout: LayoutPlan) -> Step:
    """Step on a layout, with a term for each part that takes time."""
    parts = layouts.step_seconds_by_part(job, layout)
    return Step(tuple(_term(name, seconds) for name, seconds in parts.items() if seconds > 0), PREDICTED)


def with_offload(step: Step, offload: Offload) -> Step:
    """Step whose optimizer runs on the host after backward, and whose weights then go back to the GPU."""
    for name, value in vars(offload).items():
        check_positive(name.replace("_", " "), value)
    host_s = OFFLOAD_HOST_BYTES / offload.host_bytes_per_s
    seconds = offload.params_per_gpu * (host_s + OFFLOAD_LINK_BYTES / offload.pcie_bytes_per_s)
    return Step((*step.terms, _term(_OFFLOAD, seconds)), step.mfu_source)


def plan(
    work: Work, step: Step, tokens: float, *, prices: Prices = Prices(), goodput_ratio: float = 1.0
) -> TrainingPlan:
    """Plan of a training on so many tokens. Raises ConfigError for invalid input."""
    check_positive("tokens", tokens)
    if not 0 < goodput_ratio <= 1:
        raise ConfigError(f"a goodput of {goodput_ratio:g} is not possible: it is above 0 and at most 1")
    for name, value in (("price", prices.gpu_hour), ("power", prices.power_w), ("PUE", prices.pue)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} of {value:g} is not possible: it must be 0 or more")
    steps = tokens / work.step_tokens
    duration_s = steps * step.seconds / goodput_ratio
    gpu_hours = duration_s * work.gpus / 3600
    power_kw = None if prices.power_w is None else prices.power_w * prices.pue / 1000
    return TrainingPlan(
        steps=steps,
        step_seconds=step.seconds,
        tokens_per_second=work.step_tokens / step.seconds,
        flops=tokens * work.flops_per_token,
        mfu_ratio=work.mfu_ratio(step.seconds),
        mfu_source=step.mfu_source,
        duration_seconds=duration_s,
        gpu_hours=gpu_hours,
        cost=None if prices.gpu_hour is None else gpu_hours * prices.gpu_hour,
        cost_per_month=None if prices.gpu_hour is None else work.gpus * HOURS_PER_MONTH * prices.gpu_hour,
        energy_kwh=None if power_kw is None else gpu_hours * power_kw,
        goodput_ratio=goodput_ratio,
    )


def equal_throughput(gpus: int, speedup_ratio: float, gpu_hour_price: float | None = None) -> EqualThroughput:
    """GPUs for equal throughput where each GPU does `speedup_ratio` times as many tokens a second.

    >>> round(equal_throughput(564, 9.76 / 7.17).saved_gpus)
    150
    """
    check_positive("speedup", speedup_ratio)
    needed = gpus / speedup_ratio
    saved = gpus - needed
    money = None if gpu_hour_price is None else saved * HOURS_PER_MONTH * gpu_hour_price
    return EqualThroughput(speedup_ratio, needed, saved, money)


def _term(name: str, seconds: float) -> Term:
    return Term(name, seconds, TERM_SOURCES[name].formula, TERM_SOURCES[name].source)
