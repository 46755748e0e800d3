"""Inputs for checkpoint planning from recorded saves: size per parameter, storage bandwidth, interval."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import saves as of_saves
from tracekit.errors import InputError
from tracekit.model.fact import trace_fact
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import Trace

_MOVED = (conventions.WRITE, conventions.FSYNC)


@dataclass(frozen=True)
class PlanningInputs:
    """Medians over a run's saves. The time of a save is that of its slowest rank; None where unknown.

    A save is everything written after one step, in any number of files: the unit of checkpoint planning.
    `write_bytes_per_second` is of all ranks together: bytes over the time in writes and syncs, so storage speed, not
    page-cache speed. `is_durable`: each file was synced, so that this holds.
    """

    saves: int
    ranks: int
    world_size: int
    strategy: str
    params: float | None
    checkpoint_bytes: float
    bytes_per_param: float | None
    write_bytes_per_second: float
    write_bytes_per_second_per_rank: float
    blocked_seconds: float
    interval_seconds: float | None
    step_seconds: float | None
    is_durable: bool


def planning_inputs(run: Run) -> PlanningInputs:
    """Return planning inputs from the run's checkpoint logs, metrics and manifest. Raises InputError without saves."""
    saves = _by_save(run.table(of_saves.stages).with_columns(of_saves.save_without_step("save")))
    if saves.is_empty():
        raise InputError(f"{run.path}: no save is recorded there; record a run that saves (docs/record.md)")
    manifest = Manifest.of(run.manifest)
    params = manifest.model.parameters
    size = float(_median(saves, "bytes") or 0)
    starts = saves["start_ns"].sort().diff().drop_nulls()
    ranks = int(str(saves["ranks"].max()))
    return PlanningInputs(
        saves=saves.height,
        ranks=ranks,
        world_size=manifest.world_size or ranks,
        strategy=manifest.strategy or "",
        params=params,
        checkpoint_bytes=size,
        bytes_per_param=size / params if params is not None and params > 0 else None,
        write_bytes_per_second=float(_median(saves, "rate") or 0),
        write_bytes_per_second_per_rank=float(_median(saves, "slowest_rate") or 0),
        blocked_seconds=float(_median(saves, "blocked_ns") or 0) / 1e9,
        interval_seconds=_seconds(starts.median()),
        step_seconds=_seconds(run.table(_step_times)["value"].median()),
        is_durable=bool(saves["is_durable"].all()),
    )


@trace_fact
def _step_times(trace: Trace) -> pl.DataFrame:
    return trace.metrics.filter(pl.col("name") == conventions.STEP_TIME_METRIC).select(pl.col("value").cast(pl.Float64))


def _by_save(stages: pl.DataFrame) -> pl.DataFrame:
    """Return one row per save: bytes, bandwidths of all ranks and of the slowest, blocked time."""
    stage, dur_ns, size = pl.col("stage"), pl.col("dur_ns"), pl.col("bytes")
    save = ["step", "save_without_step"]
    by_file = stages.group_by(*save, "rank", "checkpoint").agg(
        # Some savers report bytes for the whole save only, not for the write stage.
        pl.coalesce(
            size.filter((stage == conventions.WRITE) & (size > 0)).sum().replace(0, None),
            size.filter(stage == conventions.TOTAL).max(),
        ).alias("bytes"),
        dur_ns.filter(stage.is_in(_MOVED)).sum().alias("moving_ns"),
        dur_ns.filter((stage == conventions.TOTAL) & pl.col("blocking")).max().alias("blocked_ns"),
        pl.col("start_ns").filter(stage == conventions.TOTAL).min().alias("start_ns"),
        ((stage == conventions.FSYNC).any() & pl.col("durable").fill_null(value=True).all()).alias("is_durable"),
    )
    by_rank = by_file.group_by(*save, "rank").agg(
        pl.col("bytes", "moving_ns", "blocked_ns").sum(), pl.col("start_ns").min(), pl.col("is_durable").all()
    )
    wrote = by_rank.filter(pl.col("bytes") > 0, pl.col("moving_ns") > 0)
    return wrote.group_by(save).agg(
        pl.col("bytes").sum(),
        (pl.col("bytes").sum() / pl.col("moving_ns").max() * 1e9).alias("rate"),
        (pl.col("bytes") / pl.col("moving_ns")).min().mul(1e9).alias("slowest_rate"),
        pl.col("blocked_ns").max(),
        pl.col("start_ns").min(),
        pl.col("is_durable").all(),
        pl.len().alias("ranks"),
    )


def _median(table: pl.DataFrame, column: str) -> Any:
    return table[column].median()


def _seconds(ns: Any) -> float | None:
    return None if ns is None else float(ns) / 1e9
