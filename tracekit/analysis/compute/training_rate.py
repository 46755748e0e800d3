"""The rate at which a recorded run trains: tokens a second and GPU, and its MFU."""

from dataclasses import dataclass

import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import efficiency
from tracekit.conventions import devices
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import Trace

_COLUMNS = {"step": pl.Int64, "name": pl.String, "value": pl.Float64}


@dataclass(frozen=True)
class TrainingRate:
    """Medians over the steps of a run; None where the run does not state them.

    `mfu_ratio` is that of the kernels' known operations; without these, 6 per parameter and token over the peak of the
    device in bf16 or fp16.
    """

    tokens_per_second_per_gpu: float | None
    mfu_ratio: float | None


@trace_fact
def logged_rates(trace: Trace) -> pl.DataFrame:
    """Tokens per second in the metrics log, of all ranks and of one. Columns step, name, value; one row per value."""
    names = (conventions.TOKENS_METRIC, conventions.TOKENS_PER_GPU_METRIC)
    return schema.select(trace.metrics.filter(pl.col("name").is_in(names)), _COLUMNS)


FACTS = (logged_rates, efficiency.by_step)
"""The facts that `training_rate` reads."""


def training_rate(run: Run) -> TrainingRate:
    """Rate of a run."""
    manifest = Manifest.of(run.manifest)
    rates = {name: _median(values["value"]) for (name,), values in run.table(logged_rates).group_by("name")}
    rate, rate_of_all = rates.get(conventions.TOKENS_PER_GPU_METRIC), rates.get(conventions.TOKENS_METRIC)
    if rate is None and rate_of_all is not None and manifest.world_size:  # logs of older recorders
        rate = rate_of_all / manifest.world_size
    mfu_ratio = _median(run.table(efficiency.by_step)["mfu_ratio"])
    if mfu_ratio is None and rate is not None:
        name = run.manifest.get("device_name")
        device = devices.find(name) if isinstance(name, str) else None
        peak = None if device is None else device.peak(devices.BF16) or device.peak(devices.FP16)
        if manifest.model.parameters and peak:
            mfu_ratio = 6 * manifest.model.parameters * rate / peak
    return TrainingRate(rate, mfu_ratio)


def _median(values: pl.Series) -> float | None:
    median = values.drop_nulls().median()
    return float(median) if isinstance(median, int | float) and median > 0 else None
