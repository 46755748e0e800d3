"""The published rows event by event: the simulation itself on a fitted machine, compared with its closed form."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from benchmarks.closed_form import Setting
from benchmarks.published_fit import Row
from tracekit.plan import hardware
from tracekit.plan.hardware import Hardware
from tracekit.simulate import engine
from tracekit.simulate.job import Job
from tracekit.simulate.kernels import Rates
from tracekit.simulate.recording import RankRecord


@dataclass(frozen=True)
class Layer:
    """What a layer's backward pass takes in the steady state, in seconds."""

    period_s: float
    gather_s: float
    reduce_s: float


def machine(rates: Rates) -> Hardware:
    """Return an A100 with fitted rates, without what the closed form omits: host, jitter, collectives on processors."""

    def number(name: str) -> float:
        return float(np.squeeze(getattr(rates, name)))

    return replace(
        hardware.find("a100-80"),
        peak_flops_per_s=number("flops_per_s"),
        peak_memory_bytes_per_s=number("memory_bytes_per_s"),
        achieved_ratio=1.0,
        memory_ratio=1.0,
        network_bytes_per_s=number("bus_bytes_per_s"),
        network_hop_s=number("hop_s"),
        elementwise_bytes=number("elementwise_bytes"),
        give_way=number("give_way"),
        give_way_high_priority=number("give_way_high_priority"),
        collective_slows_compute=0.0,
        launch_s=1e-9,
        op_s=0.0,
        jitter_ratio=0.0,
    )


def step_s(strategy: str, setting: Setting, rates: Rates) -> float:
    """Return the time from one step's first kernel to the next one's, in seconds."""
    windows = _simulate_rank(strategy, setting, rates).account.windows
    return (windows[1][0] - windows[0][0]) / 1e9


def largest_difference(rows: Sequence[Row], rates: Rates, times: dict[str, Sequence[float]]) -> float:
    """Return by how much, as a ratio, the simulation differs at most from `times` of the rows by strategy."""
    return max(
        abs(step_s(strategy, row.setting, rates) / closed - 1)
        for strategy, of_rows in times.items()
        for row, closed in zip(rows, of_rows, strict=True)
    )


def layer(strategy: str, setting: Setting, rates: Rates) -> Layer:
    """Times of a layer's backward pass: from one reduce-scatter to the next, and of its collectives."""
    record = _simulate_rank(strategy, setting, rates)
    collectives = [a for a in record.activities if a.kernel.collective is not None]
    reduces = [a for a in collectives if a.kernel.name.startswith("ncclDevKernel_Reduce")]
    first = min(a.start_ns for a in reduces)
    gathers = [a for a in collectives if a not in reduces and a.start_ns > first]

    def typical(durations: list[int]) -> float:
        return median(durations) / 1e9

    return Layer(
        typical([b.start_ns - a.start_ns for a, b in pairwise(reduces)]),
        typical([a.end_ns - a.start_ns for a in gathers]),
        typical([a.end_ns - a.start_ns for a in reduces]),
    )


def _simulate_rank(strategy: str, setting: Setting, rates: Rates) -> RankRecord:
    overhead_ns = round(1e9 * float(np.squeeze(rates.overhead_s)))
    job = Job(strategy, setting.model, machine(rates), setting.gpus, setting.seq, setting.batch, ranks_written=1)
    job = replace(job, steps=2, checkpoint_layers=setting.checkpoint_layers, step_overhead_ns=overhead_ns)
    return engine.simulate(job).ranks[0]
