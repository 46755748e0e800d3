"""Checkpoint saves of a run over all ranks: blocked and written time, interval, bandwidth, effect on later steps.

Both times are reported: how long training was blocked, and how long until everything was written and synced. The
duration of a save is the longest over its ranks, as in MLPerf: an average hides the rank that all others wait for.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import save_stages
from tracekit.errors import InputError
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run

# One call writes one file, and a checkpoint is a folder of several.
_FILE_CALLS = (conventions.TORCH_SAVE, conventions.SAFETENSORS_SAVE)
_WHOLES = (conventions.TOTAL, conventions.COMPLETE)
RANK_COLUMNS = schema.columns(
    "save step rank window start_ns background blocked_ns stages_ns written_ns durable durable_ns bytes "
    "storage_ns storage_bytes_per_s",
    background=pl.Boolean,
)

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


@run_fact
def stages(run: Run) -> pl.DataFrame:
    """Log lines of all saves, without duplicates, with the files of one save grouped.

    Columns save, window, rank and those of `save_stages.saves`; one row per line of the log. A save by torch.save or
    safetensors is everything written after one step into one folder.
    """
    lines = run.table(save_stages.saves)
    # Every window of a rank reads the same log.
    lines = lines.unique(lines.columns[1:], keep="first", maintain_order=True)
    name = pl.col("checkpoint")
    folder, again = name.str.replace(r"/[^/]*$", ""), name.str.extract(r"(#\d+)$").fill_null("")
    counted = pl.col("step").is_not_null()
    of_files = pl.when(counted).then(pl.format("{} (step {})", folder, "step")).otherwise(folder + again)
    save = pl.when(pl.col("call").is_in(_FILE_CALLS)).then(of_files).otherwise(name).alias("save")
    return lines.select(save, pl.all())


@run_fact
def by_rank(run: Run) -> pl.DataFrame:
    """Times of each save on each rank; one row per save and rank, in order of time. Columns RANK_COLUMNS.

    `blocked_ns` is the blocked time of the training thread, and `stages_ns` the sum of its stages; `written_ns` runs to
    the end of all work, and `durable_ns` is the same where every file was synced after its last byte. `storage_ns` is
    the time in writing and syncing and `storage_bytes_per_s` their combined rate: null where nothing was synced, since
    a page cache is faster than storage.
    """
    lines = run.table(stages)
    if lines.is_empty():
        return schema.empty(RANK_COLUMNS)
    stage, blocking, dur_ns = pl.col("stage"), pl.col("blocking"), pl.col("dur_ns")
    total, complete = stage == conventions.TOTAL, stage == conventions.COMPLETE
    moved = stage.is_in((conventions.WRITE, conventions.FSYNC))
    end_ns = pl.col("start_ns") + dur_ns
    table = lines.group_by("save", "rank", maintain_order=True).agg(
        pl.col("step").min(),
        pl.col("window").min(),
        pl.col("start_ns").filter(stage.is_in(_WHOLES)).min(),
        (~blocking).any().alias("background"),
        dur_ns.filter(blocking & total).sum().alias("blocked_ns"),
        dur_ns.filter(blocking & ~stage.is_in(_WHOLES)).sum().alias("stages_ns"),
        dur_ns.filter(total).sum().alias("worked_ns"),
        (end_ns.filter(total | complete).max() - pl.col("start_ns").filter(total | complete).min()).alias("span_ns"),
        pl.col("durable").filter(total & (pl.col("bytes") > 0) | complete).all(ignore_nulls=False).alias("durable"),
        pl.col("bytes").filter(total).sum().alias("bytes"),
        dur_ns.filter(moved).sum().alias("storage_ns"),
        (pl.col("bytes").filter(stage == conventions.WRITE).sum()).alias("written_bytes"),
        (stage == conventions.FSYNC).any().alias("synced"),
        pl.col("call").is_in(_FILE_CALLS).any().alias("of_files"),
    )
    # Training work between the files of a save does not belong to it.
    is_split = pl.col("of_files").fill_null(value=False) & ~pl.col("background")
    written = pl.when(is_split).then("worked_ns").otherwise("span_ns")
    rate = pl.col("written_bytes") / (pl.col("storage_ns") / 1e9)
    has_rate = pl.col("synced") & (pl.col("storage_ns") > 0) & (pl.col("written_bytes") > 0)
    return (
        table.drop_nulls("start_ns")
        .with_columns(
            written.alias("written_ns"),
            pl.when("durable").then(written).alias("durable_ns"),
            pl.when(has_rate).then(rate).alias("storage_bytes_per_s"),
        )
        .pipe(schema.select, RANK_COLUMNS)
        .sort("start_ns", "save", "rank")
    )


@run_fact
def by_save(run: Run) -> pl.DataFrame:
    """Saves of a run; one row per save, in order of time.

    Columns save, step, start_ns, ranks, background, blocked_ns, written_ns, durable, durable_ns, bytes (the longest
    over ranks and, of bytes, the sum), bytes_per_s (all bytes over the longest time in writing and syncing; null where
    not all ranks synced), interval_steps and interval_ns (training between saves), overhead_ratio (blocked over blocked
    and interval), next_step_extra_ns (how much longer the next step took than the median step), start_interval_ns (from
    the start of the previous save), slack_ns (from the end of the previous save's work) and previous_written_ns (how
    long that work took). The previous save is the last background save of a background save, else the last blocking
    one.
    """
    rank_rows = run.table(by_rank)
    durable = pl.col("durable").all(ignore_nulls=False)
    table = rank_rows.group_by("save", maintain_order=True).agg(
        pl.col("step", "start_ns").min(),
        pl.col("rank").n_unique().alias("ranks"),
        pl.col("background").any(),
        pl.col("blocked_ns", "written_ns").max(),
        durable,
        pl.when(durable).then(pl.col("durable_ns").max()).alias("durable_ns"),
        pl.col("bytes").sum(),
        pl.when(pl.col("storage_bytes_per_s").is_not_null().all())
        .then(pl.col("bytes").sum() / (pl.col("storage_ns").max() / 1e9))
        .alias("bytes_per_s"),
    )
    # The slowest rank's time of each step, and its median over steps without a save.
    times = run.table(save_stages.step_times).group_by("step").agg(pl.col("step_time_ns").max())
    plain = times.filter(~pl.col("step").is_in((table["step"].drop_nulls() - 1).to_list()))
    plain_ns = None if plain.is_empty() else float(str(plain["step_time_ns"].median()))
    after = times.select(
        "step", (pl.col("step_time_ns") - (plain_ns or 0)).round().cast(pl.Int64).alias("next_step_extra_ns")
    )
    steps, start_ns, written_ns = _interval_steps(table, times), pl.col("start_ns"), pl.col("written_ns")
    return (
        table.join(after if plain_ns else after.clear(), on="step", how="left", maintain_order="left")
        .with_columns(
            pl.lit(steps, pl.Float64).alias("interval_steps"),
            pl.lit(_interval_ns(_after_steps(table, rank_rows), steps, plain_ns), pl.Int64).alias("interval_ns"),
            start_ns.diff().over("background").alias("start_interval_ns"),
            (start_ns - (start_ns + written_ns).shift()).over("background").alias("slack_ns"),
            written_ns.shift().over("background").alias("previous_written_ns"),
        )
        .with_columns((pl.col("blocked_ns") / (pl.col("interval_ns") + pl.col("blocked_ns"))).alias("overhead_ratio"))
        .select(
            "save", "step", "start_ns", "ranks", "background", "blocked_ns", "written_ns", "durable", "durable_ns",
            "bytes", "bytes_per_s", "interval_steps", "interval_ns", "overhead_ratio", "next_step_extra_ns",
            "start_interval_ns", "slack_ns", "previous_written_ns",
        )
    )  # fmt: skip


def by_training_step(some: pl.DataFrame, by_rank: pl.DataFrame) -> pl.DataFrame:
    """Cost of all saves after one step together; one row per step, in order of time.

    Takes rows of `by_save`, and `by_rank`. Columns step, save (that blocked longest), start_ns, interval_steps,
    interval_ns, saves (how many), blocked_ns (of the rank that all of them blocked longest) and overhead_ratio (of
    that). A small save next to a large one thus does not count as half of all saves. Saves without a step number are
    separate.
    """
    blocked_ns, interval_ns = pl.col("blocked_ns"), pl.col("interval_ns")
    often = some.select("interval_steps", "interval_ns").unique()
    return (
        _after_steps(some, by_rank)
        .join(often, how="cross", maintain_order="left")
        .with_columns((blocked_ns / (interval_ns + blocked_ns)).alias("overhead_ratio"))
    )


def median_cost(run: Run) -> dict[str, Any]:
    """Medians over all steps after which the run saves and training waits, as comparisons state them.

    Of an even number of saves it is the mean of the middle two. Keys saves (how many such steps), blocked_ns (float),
    overhead_ratio, interval_ns and interval_steps; None where unknown, and in a run without such saves.
    """
    blocking = run.table(by_save).filter(pl.col("blocked_ns") > 0)
    costs = by_training_step(blocking, run.table(by_rank))
    medians = pl.col("blocked_ns", "overhead_ratio", "interval_ns", "interval_steps").median()
    return costs.select(pl.len().alias("saves"), medians).row(0, named=True)


def _after_steps(some: pl.DataFrame, by_rank: pl.DataFrame) -> pl.DataFrame:
    """Columns of `by_training_step` except those of the interval."""
    blocked_ns, key = pl.col("blocked_ns"), ["step", "save_without_step"]
    table = some.with_columns(save_without_step("save"))
    # Independent ranks save at the same time, so their times do not add up.
    sums = by_rank.select("save", "rank", "blocked_ns").join(table.select("save", *key), on="save")
    longest = sums.group_by(*key, "rank").agg(blocked_ns.sum()).group_by(key).agg(blocked_ns.max())
    return (
        table.group_by(key, maintain_order=True)
        .agg(pl.col("save").get(blocked_ns.arg_max()), pl.col("start_ns").min(), pl.len().alias("saves"))
        .join(longest, on=key, nulls_equal=True, maintain_order="left")
        .drop("save_without_step")
    )


def save_without_step(name: str) -> pl.Expr:
    """Grouping key next to the step that identifies saves without a step number: the column `name`."""
    return pl.when(pl.col("step").is_null()).then(name).alias("save_without_step")


@run_fact
def duplicate_files(run: Run) -> pl.DataFrame:
    """Files that several ranks wrote in one save; one row per save and path, in order of time.

    Columns save, path, step, window, rank (the slowest), start_ns, dur_ns, ranks, bytes (of all) and repeated_bytes (of
    all but one).
    """
    is_total = (pl.col("stage") == conventions.TOTAL) & pl.col("call").is_in(_FILE_CALLS) & pl.col("path").is_not_null()
    written = run.table(stages).filter(is_total).sort("dur_ns", "rank", descending=[True, False])
    return (
        written.group_by("save", "checkpoint", "path", maintain_order=True)
        .agg(
            pl.col("step").min(),
            pl.col("window", "rank").first(),
            pl.col("start_ns").min(),
            pl.col("dur_ns").first(),
            pl.col("rank").n_unique().alias("ranks"),
            pl.col("bytes").sum(),
            (pl.col("bytes").sum() - pl.col("bytes").max()).alias("repeated_bytes"),
        )
        .filter(pl.col("ranks") > 1)
        .drop("checkpoint")
        .sort("start_ns", "path")
    )


@run_fact
def background_slowdown(run: Run) -> pl.DataFrame:
    """Training time lost during each background save; one row per save and rank with a metrics log.

    Columns save, rank, window, step, start_ns, dur_ns (of the save), worker (thread or process; null: unknown), steps
    (that ran during it), baseline_step_ns (the median step of that rank otherwise), lost_ns, python_ns (of the save in
    plan, staging and serializing, which mostly hold the GIL), waited_ratio (share of that time in which the training
    thread was neither running nor runnable) and delayed_ratio (runnable without a processor); null where the log has no
    such counters.
    """
    lines, table = run.table(stages), run.table(by_rank).filter("background")
    if table.is_empty():
        return schema.empty(_SLOWDOWN_COLUMNS)
    stage = pl.col("stage")
    spent = pl.col("dur_ns").filter(stage.is_in(_PYTHON) & ~pl.col("blocking")).sum()
    counted = stage == conventions.COMPLETE
    counters = lines.group_by("save", "rank").agg(
        spent.alias("python_ns"),
        pl.col("worker").filter(~pl.col("blocking")).drop_nulls().unique().sort().first(),
        *(pl.col(name).filter(counted).first() for name in ("cpu_ns", "run_delay_ns")),
        pl.col("dur_ns").filter(counted).first().alias("wall_ns"),
    )
    wall, cpu, delay = pl.col("wall_ns"), pl.col("cpu_ns"), pl.col("run_delay_ns")
    # The steps that ran during each background save and rank, and their extra time.
    times = run.table(save_stages.step_times).unique(["rank", "step"], keep="first").drop_nulls().sort("rank", "step")
    by_times = times.partition_by("rank", as_dict=True)
    counted_saves = table.drop_nulls("step").group_by("rank", maintain_order=True)
    slowdowns = schema.concat(
        [_concurrent_steps(saves, by_times[rank]) for rank, saves in counted_saves if rank in by_times],
        _CONCURRENT_STEP_COLUMNS,
    )
    return (
        table.join(counters, on=["save", "rank"], how="left", maintain_order="left")
        .join(slowdowns, on=["save", "rank"], how="inner", maintain_order="left")
        .with_columns(
            ((wall - cpu - delay) / wall).clip(0, 1).alias("waited_ratio"),
            (delay / wall).clip(0, 1).alias("delayed_ratio"),
            pl.col("written_ns").alias("dur_ns"),
        )
        .pipe(schema.select, _SLOWDOWN_COLUMNS)
    )


def planning_inputs(run: Run) -> PlanningInputs:
    """Return planning inputs from the run's checkpoint logs, metrics and manifest. Raises InputError without saves."""
    saves = _bandwidths_by_save(run.table(stages).with_columns(save_without_step("save")))
    if saves.is_empty():
        raise InputError(f"{run.path}: no save is recorded there; record a run that saves (docs/record.md)")
    manifest = Manifest.of(run.manifest)
    params = manifest.model.parameters
    size, rate, slowest_rate, blocked_ns = (
        float(str(saves[name].median() or 0)) for name in ("bytes", "rate", "slowest_rate", "blocked_ns")
    )
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
        write_bytes_per_second=rate,
        write_bytes_per_second_per_rank=slowest_rate,
        blocked_seconds=blocked_ns / 1e9,
        interval_seconds=_seconds(starts.median()),
        step_seconds=_seconds(run.table(save_stages.step_times)["step_time_ns"].median()),
        is_durable=bool(saves["is_durable"].all()),
    )


_PYTHON = (conventions.PLAN, conventions.STAGE, conventions.SERIALIZE)
_SLOWDOWN_COLUMNS = schema.columns(
    "save rank window step start_ns dur_ns worker steps baseline_step_ns lost_ns python_ns waited_ratio delayed_ratio"
)

_CONCURRENT_STEP_COLUMNS = {
    "save": pl.String, "rank": pl.Int64, "steps": pl.Int64, "baseline_step_ns": pl.Float64, "lost_ns": pl.Float64,
}  # fmt: skip


def _concurrent_steps(rank_saves: pl.DataFrame, times: pl.DataFrame) -> pl.DataFrame:
    """Steps that ran during the background saves of one rank, and their extra time; `times` are its steps in order."""
    step, took_ns = times["step"].to_numpy(), times["step_time_ns"].to_numpy()
    saved = rank_saves["step"].to_numpy()
    # Step starts are not logged: the next step begins when the save unblocks training.
    begun_ns = np.concatenate(([0.0], np.cumsum(took_ns)))
    first = np.searchsorted(step, saved)
    until_ns = begun_ns[first] + (rank_saves["written_ns"] - rank_saves["blocked_ns"]).to_numpy()
    past = np.maximum(first, np.searchsorted(begun_ns[:-1], until_ns))
    edges = np.zeros(len(begun_ns), np.int64)
    np.add.at(edges, first, 1)
    np.add.at(edges, past, -1)
    plain_ns = took_ns[(np.cumsum(edges)[:-1] == 0) & ~np.isin(step, saved - 1)]
    if not len(plain_ns):
        return schema.empty(_CONCURRENT_STEP_COLUMNS)
    median_ns, steps = float(np.median(plain_ns)), past - first
    lost_ns = np.round(begun_ns[past] - begun_ns[first] - steps * median_ns)
    baseline_ns = pl.lit(np.round(median_ns))
    concurrent = rank_saves.select("save", "rank", steps=steps, baseline_step_ns=baseline_ns, lost_ns=lost_ns)
    return concurrent.filter(pl.col("steps") > 0).pipe(schema.select, _CONCURRENT_STEP_COLUMNS)


def _interval_steps(table: pl.DataFrame, times: pl.DataFrame) -> float | None:
    """Steps between saves; for a single save, those of this run before it; None where unknown.

    A resumed run begins at another step than 0.
    """
    steps = table["step"].drop_nulls().unique().sort()
    begun = int(str(times["step"].min() or 0))
    gap = float(str((steps.diff().drop_nulls().median() if len(steps) > 1 else (steps - begun).first()) or 0))
    return gap if gap > 0 else None


def _interval_ns(after_steps: pl.DataFrame, steps: float | None, plain_ns: float | None) -> int | None:
    """Training time between saves, from steps or else from the clock; None where unknown."""
    if plain_ns and steps:
        return round(steps * plain_ns)
    between = (after_steps["start_ns"].diff() - after_steps["blocked_ns"].shift()).drop_nulls()
    return round(float(str(between.median()))) if len(between) else None


def _bandwidths_by_save(stages: pl.DataFrame) -> pl.DataFrame:
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


def _seconds(ns: Any) -> float | None:
    return None if ns is None else float(ns) / 1e9
