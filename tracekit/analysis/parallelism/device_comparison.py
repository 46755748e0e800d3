"""The GPUs of late ranks compared with those of the others: are they slower, and why?"""

from collections.abc import Collection
from dataclasses import dataclass

import polars as pl

from tracekit.analysis.compute import device_counters
from tracekit.conventions import device_metrics as names
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact

FACTS: tuple[TraceFact, ...] = (device_counters.device_counters,)
"""The facts that the functions of this module read."""

THERMAL, POWER_BRAKE, POWER_CAP, HARDWARE, CLOCK_SETTING, SYNC_BOOST = (
    "thermal slowdown",
    "power brake",
    "power cap",
    "hardware slowdown",
    "clock setting",
    "sync boost",
)
_CAUSE_OF_REASON = {
    names.REASONS[names.SW_THERMAL]: THERMAL,
    names.REASONS[names.HW_THERMAL]: THERMAL,
    names.REASONS[names.POWER_BRAKE]: POWER_BRAKE,
    names.REASONS[names.POWER_CAP]: POWER_CAP,
    names.REASONS[names.HW_SLOWDOWN]: HARDWARE,
    names.REASONS[names.CLOCK_SETTING]: CLOCK_SETTING,
    names.REASONS[names.SYNC_BOOST]: SYNC_BOOST,
}
_CAUSES = (THERMAL, POWER_BRAKE, POWER_CAP, HARDWARE, CLOCK_SETTING, SYNC_BOOST)
_MAX_CLOCK_RATIO = 0.97
"""A GPU is slower if its clock is below this share of the others' in at least half of the steps."""
_STEP = ["window", "step"]


@dataclass(frozen=True)
class DeviceComparison:
    """Late ranks and the median of the other ranks: medians over `steps` steps, None where not recorded.

    `cause` limits the late ranks' clock in `cause_steps` of these: one that most of the other ranks do not have, if
    there is one.
    """

    steps: int
    is_slower: bool
    clock_mhz: float
    others_clock_mhz: float
    temperature_c: float | None
    others_temperature_c: float | None
    power_limit_w: float | None
    others_power_limit_w: float | None
    cause: str | None
    cause_steps: int


@dataclass(frozen=True)
class MemoryErrors:
    """Uncorrected memory errors of GPUs since their drivers were loaded, and whether a row is to be replaced."""

    uncorrected: int
    is_remap_pending: bool


def compare(run: Run, late: Collection[int], steps: pl.DataFrame) -> DeviceComparison | None:
    """Compare the GPUs of late ranks with those of the others in `steps` (columns window, step).

    Steps that are null stand for all logged steps. None where either side has no clocks there.
    """
    counters = _counters(run, late, steps)
    is_late = pl.col("is_late")
    clock = pl.col("clock_mhz")
    by_step = (
        counters.group_by(_STEP)
        .agg(
            clock.filter(is_late).mean(),
            clock.filter(~is_late).median().alias("others_clock_mhz"),
            *(pl.col(name).filter(is_late).mean() for name in (names.TEMPERATURE, names.POWER_LIMIT)),
            pl.col(names.TEMPERATURE).filter(~is_late).median().alias("others_temperature_c"),
            pl.col(names.POWER_LIMIT).filter(~is_late).median().alias("others_power_limit_w"),
        )
        .drop_nulls(["clock_mhz", "others_clock_mhz"])
    )
    if by_step.is_empty():
        return None
    slower = by_step.filter(clock < _MAX_CLOCK_RATIO * pl.col("others_clock_mhz"))
    is_slower = slower.height * 2 >= by_step.height
    cause, cause_steps = _cause(counters.join(by_step, on=_STEP, how="semi")) if is_slower else (None, 0)
    medians = by_step.select(pl.exclude(_STEP).median()).row(0, named=True)
    return DeviceComparison(
        steps=by_step.height,
        is_slower=is_slower,
        temperature_c=medians.pop(names.TEMPERATURE),
        power_limit_w=medians.pop(names.POWER_LIMIT),
        cause=cause,
        cause_steps=cause_steps,
        **medians,
    )


def memory_errors(run: Run, late: Collection[int]) -> MemoryErrors:
    """Return the memory errors of the GPUs of these ranks, by their latest counters; 0 where not recorded."""
    counters = run.table(device_counters.device_counters).filter(pl.col("rank").is_in(list(late)))
    latest = counters.group_by("rank").agg(
        pl.col(names.ECC_UNCORRECTED, names.PENDING_ROW_REMAP).sort_by("step").drop_nulls().last()
    )
    return MemoryErrors(int(latest[names.ECC_UNCORRECTED].sum()), bool((latest[names.PENDING_ROW_REMAP] > 0).any()))


def _counters(run: Run, late: Collection[int], steps: pl.DataFrame) -> pl.DataFrame:
    """Return the counters of all ranks with a clock, in these steps: columns of the table, is_late and clock_mhz."""
    logged = run.table(device_counters.device_counters)
    if not steps["step"].is_null().any():
        logged = logged.join(steps.select(_STEP).unique(), on=_STEP, how="semi")
    clock = device_counters.busy_clock()
    return logged.with_columns(pl.col("rank").is_in(list(late)).alias("is_late"), clock.alias("clock_mhz")).drop_nulls(
        "clock_mhz"
    )


def _cause(counters: pl.DataFrame) -> tuple[str | None, int]:
    """Limit of the clock of the late ranks, and the number of its steps; None where nothing is stated.

    A limit that most of the other ranks have as well, such as the power cap of a busy GPU, counts if there is no other.
    """
    reasons = counters.explode(names.THROTTLE_REASONS).with_columns(
        pl.col(names.THROTTLE_REASONS).replace_strict(_CAUSE_OF_REASON, default=None).alias("cause")
    )
    by_step = reasons.group_by(*_STEP, "cause").agg(
        pl.col("rank").filter("is_late").n_unique().alias("late"),
        pl.col("rank").filter(~pl.col("is_late")).n_unique().alias("others"),
    )
    sizes = counters.group_by(_STEP).agg((~pl.col("is_late")).sum().alias("of_others"))
    late_limits = by_step.drop_nulls("cause").filter(pl.col("late") > 0).join(sizes, on=_STEP)
    only_late = late_limits.filter(pl.col("others") * 2 <= pl.col("of_others"))
    for limits in (only_late, late_limits):
        if limits.height:
            order = pl.col("cause").replace_strict({cause: rank for rank, cause in enumerate(_CAUSES)})
            commonest = limits.group_by("cause").len().sort(pl.col("len"), order, descending=[True, False]).row(0)
            return str(commonest[0]), int(commonest[1])
    return None, 0
