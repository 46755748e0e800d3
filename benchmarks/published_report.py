"""The published table and its prediction, as Markdown."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.published_baselines import INDICATORS, ROOFLINE
from benchmarks.published_fit import Row
from tracekit.plan.hardware import GIB, find
from tracekit.simulate import memory
from tracekit.simulate.job import FSDP1, YAFSDP_V1, Job
from tracekit.simulate.kernels import Rates

_FAR_POINTS = 4.0
_NAMES = {YAFSDP_V1: "YaFSDP", FSDP1: "FSDP"}
_PICTURED_MS = {YAFSDP_V1: (52, 14.8, 30.3), FSDP1: (74, 14.8, 38.3)}
"""Of the pictures in Yandex's article: a layer's period in backward, its all-gather, its reduce-scatter."""

if TYPE_CHECKING:
    from benchmarks.published_table import Errors, Result

_TITLE = """# The published FSDP / YaFSDP table, predicted

Printed by `python -m benchmarks.published_table`. The left numbers are Yandex's (A100 80 GB, one sequence per GPU,
against FSDP of PyTorch of late 2023); the right ones are **simulated**: `tracekit simulate`'s model of FSDP1 and of
YaFSDP as published, with eight constants of the machine fitted on the four rows marked with a star. The other twelve
rows were not seen by the fit. But the model's *structure* (what waits for what) was chosen with knowledge of all rows.
"""
_UNITS = {
    "flops_per_s": ("matrix products", "TFLOP/s", 1e-12),
    "memory_bytes_per_s": ("memory", "TB/s", 1e-12),
    "elementwise_bytes": ("elementwise traffic", "B per token and unit of width", 1.0),
    "bus_bytes_per_s": ("bus bandwidth of a ring", "GB/s", 1e-9),
    "hop_s": ("one hop of a ring", "µs", 1e6),
    "overhead_s": ("fixed time of a step", "s", 1.0),
    "give_way": ("give-way, per piece", "times the kernel's own time", 1.0),
    "give_way_high_priority": ("the same on YaFSDP's stream", "times the kernel's own time", 1.0),
}


def markdown(rows: Sequence[Row], fitted: Sequence[int], result: "Result") -> str:
    """Return the whole page."""
    parts = (
        _table(rows, fitted, result),
        _machine(result.machine),
        _errors(result),
        _events(result),
        _explain(rows, result),
    )
    return "\n".join([_TITLE, "\n\n".join("\n".join(part) for part in parts), ""])


def _table(rows: Sequence[Row], fitted: Sequence[int], result: "Result") -> Iterator[str]:
    yield (
        "| model | GPUs | seq | recomputed layers | YaFSDP s | simulated "
        "| FSDP s | simulated | speedup | simulated | off |"
    )
    yield f"|{'---|' * 11}"
    for index, (row, yafsdp_s, fsdp_s) in enumerate(zip(rows, result.yafsdp_s, result.fsdp_s, strict=True)):
        speedup = 1 - yafsdp_s / fsdp_s
        case = row.setting
        points = 100 * (speedup - row.speedup)
        name = f"{case.model.name}{' *' if index in fitted else ''}"
        yield (
            f"| {name} | {case.gpus} | {case.seq} | {case.checkpoint_layers} | {row.yafsdp_s:.2f} | {yafsdp_s:.2f} | "
            f"{row.fsdp_s:.2f} | {fsdp_s:.2f} | {row.speedup:.1%} | {speedup:.1%} | {points:+.1f} points |"
        )


def _machine(machine: Rates) -> Iterator[str]:
    yield "Constants as fitted on the four rows:"
    yield ""
    for name, (what, unit, scale) in _UNITS.items():
        yield f"- {what}: {float(np.squeeze(getattr(machine, name))) * scale:.3g} {unit}"


def _errors(result: "Result") -> Iterator[str]:
    yield "Errors on rows not fitted; over all 1,820 choices of four rows the medians:"
    yield ""
    yield "| | speedup, mean | speedup, most | step time, mean | step time, most |"
    yield "|---|---|---|---|---|"
    yield _line("these four rows", result.of_named_rows)
    yield _line("all choices of four", result.of_all_fits)
    yield _line("refitted without give-way", result.without_give_way)
    yield _line(f"baseline: {INDICATORS}", result.baselines[INDICATORS], times=False)
    yield _line(f"baseline: {ROOFLINE}", result.baselines[ROOFLINE])


def _events(result: "Result") -> Iterator[str]:
    yield (
        "The fit uses the model in closed form. Simulated event by event on the same machine, no step time differs by "
        f"more than {result.event_difference:.1%}."
    )
    yield ""
    yield (
        "The published pictures, probably of 34B on 128 GPUs at 2,048 tokens, were not fitted. A layer's backward pass "
        "in them, and simulated:"
    )
    yield ""
    yield "| | period | simulated | all-gather | simulated | reduce-scatter | simulated |"
    yield f"|{'---|' * 7}"
    for strategy, published_ms in _PICTURED_MS.items():
        layer = result.layers[strategy]
        pairs = zip(published_ms, (layer.period_s, layer.gather_s, layer.reduce_s), strict=True)
        cells = " | ".join(f"{published} ms | {1e3 * simulated:.1f} ms" for published, simulated in pairs)
        yield f"| {_NAMES[strategy]} | {cells} |"


def _explain(rows: Sequence[Row], result: "Result") -> Iterator[str]:
    """Yield what may be behind the rows that are far off."""
    for row, yafsdp_s, fsdp_s in zip(rows, result.yafsdp_s, result.fsdp_s, strict=True):
        points = 100 * (1 - yafsdp_s / fsdp_s - row.speedup)
        if abs(points) < _FAR_POINTS:
            continue
        setting, hardware = row.setting, find("a100-80")
        layers = setting.checkpoint_layers
        job = Job(FSDP1, setting.model, hardware, setting.gpus, setting.seq, checkpoint_layers=layers)
        needed, limit = memory.peak_bytes(job) / GIB, hardware.memory_bytes / GIB
        yield (
            f"{setting.model.name} at {setting.seq} tokens is off by {points:+.1f} points, all of it in FSDP's time "
            f"({fsdp_s:.2f} s for {row.fsdp_s:.2f} s). By the simulator's count FSDP needs {needed:.0f} of "
            f"{limit:.0f} GiB there, before what fragmentation takes. So near the limit its caching allocator may free "
            "and allocate memory again in every step, which the model omits; the published numbers cannot show whether "
            "it did. The published speedups themselves have changed by up to 1.8 points between versions."
        )


def _line(what: str, errors: "Errors", *, times: bool = True) -> str:
    points = [f"{np.median(column):.1f} points" for column in (errors.speedup_mean, errors.speedup_max)]
    shares = [f"{np.median(column):.1%}" if times else "" for column in (errors.time_mean, errors.time_max)]
    return f"| {' | '.join([what, *points, *shares])} |"
