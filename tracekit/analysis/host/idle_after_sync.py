"""Idle time after a wait for the device: what all ranks have alike, and what one rank's host adds to it."""

import polars as pl

_PLACE = ["window", "step", "name", "nth"]
_MOST = 0.5
"""Share of a rank's idle time after waits that the other ranks do not have, from which its host is the reason, and not
the wait. A host that alone pauses for 4 ms has 99% of it; the longest of similar pauses, less than a third.
"""


def with_pauses_of_one_rank(gaps: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Rows of `launch_delay.host_gaps` of several ranks, where pauses that one rank has alone are not `synced`.

    `waits` has the columns of `launch_delay.wait_counts`, of all ranks.
    """
    rank_count = gaps["rank"].n_unique() if gaps["synced"].any() else 0
    if rank_count < 2:
        return gaps
    by_place = gaps.filter("synced").drop_nulls("name").group_by(*_PLACE, "rank").agg(pl.col("dur_ns").sum())
    pauses = by_place.join(with_alike(waits), on=["window", "step", "rank"], how="left", nulls_equal=True)
    alone = pauses_of_one_rank(pauses, rank_count).select(*_PLACE, "rank", is_alone=pl.lit(value=True))
    marked = gaps.join(alone, on=[*_PLACE, "rank"], how="left", nulls_equal=True, maintain_order="left")
    return marked.with_columns(synced=pl.col("synced") & pl.col("is_alone").is_null()).drop("is_alone")


def with_alike(waits: pl.DataFrame) -> pl.DataFrame:
    """Number of ranks that wait for the device at least as often in a step: columns window, step, rank, alike."""
    alike = pl.col("waits").rank("max", descending=True).over("window", "step").cast(pl.Int64)
    return waits.select("window", "step", "rank", alike=alike)


def is_of_most(rank_count: int) -> pl.Expr:
    """Whether most ranks wait as often: of a table with `alike`."""
    return pl.col("alike") > _MOST * rank_count


def pauses_of_one_rank(pauses: pl.DataFrame, rank_count: int) -> pl.DataFrame:
    """Pauses of hosts after waits for the device that one rank has alone, with usual_ns: those of most ranks.

    `pauses` has columns window, step, name, nth, rank, dur_ns and alike (as `with_alike`; null where it is not known),
    one row per rank and place: before the same kernel or call of the same step. Where most ranks wait for the device as
    often, the wait makes none of them late; what a rank pauses for beyond the others is its own host's time. A rank
    that waits more often, such as for values that it alone reads, has no rows.
    """
    paused = pl.len().over(_PLACE).cast(pl.Int64)
    waiting = pl.coalesce("alike", paused)
    # Of two ranks the lower median is the shorter pause, of three or more what most have; those without a row have 0.
    middle = (waiting - 1) // 2 - (waiting - paused).clip(0)
    sorted_ns = pl.col("dur_ns").sort().implode().over(_PLACE)
    usual_ns = pl.when(middle >= 0).then(sorted_ns.list.get(middle, null_on_oob=True)).otherwise(0)
    shared = pauses.with_columns(usual_ns=usual_ns.cast(pl.Int64), alike=waiting).filter(is_of_most(rank_count))
    excess_ns = (pl.col("dur_ns") - pl.col("usual_ns")).clip(0)
    is_of_rank = excess_ns.sum().over("window", "rank") > _MOST * pl.col("dur_ns").sum().over("window", "rank")
    return shared.filter(is_of_rank, excess_ns > 0)
