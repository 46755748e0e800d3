"""Shares of each rank in its steps; of many ranks the typical one, the extremes and quantiles."""

from collections.abc import Mapping

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model.run import Run

_EXTREME_RATIO = 0.01
"""How far the share of an extreme rank is above the median: where all ranks are alike, none is extreme."""
_QUANTILES = {"5th percentile": 0.05, "median": 0.5, "95th percentile": 0.95}


def shares(run: Run) -> pl.DataFrame:
    """Use of each rank's steps, or of its windows where no trace marks steps; one row per rank, in order.

    Columns rank, time_ns, then ratios of it: compute_ratio, exposed comm_ratio, exposed copy_ratio, idle_ratio; and
    comm hidden_ratio, the share of communication that compute hides (null without communication).
    """
    duration_ns, communication_ns = pl.col("duration_ns"), pl.col("communication_ns")
    return breakdown.slowest_device_in_steps(run).select(
        "rank",
        pl.col("duration_ns").alias("time_ns"),
        (pl.col("compute_ns") / duration_ns).alias("compute_ratio"),
        (pl.col("exposed_communication_ns") / duration_ns).alias("exposed comm_ratio"),
        (pl.col("exposed_copy_ns") / duration_ns).alias("exposed copy_ratio"),
        (pl.col("idle_ns") / duration_ns).alias("idle_ratio"),
        pl.when(communication_ns > 0).then(pl.col("overlapped_ns") / communication_ns).alias("comm hidden_ratio"),
    )


def with_quantiles(ranks: pl.DataFrame) -> pl.DataFrame:
    """The typical rank, the extreme ones, and quantiles of each column over all ranks (rank null).

    `ranks` as from `shares`; the column "" in front says what a row is.
    """
    labels = notable(ranks)
    labelled = pl.DataFrame({"rank": list(labels), "": list(labels.values())})
    rows = [labelled.join(ranks, on="rank", maintain_order="left").select("", *ranks.columns)]
    for name, quantile in _QUANTILES.items():
        values = ranks.select(pl.lit(name).alias(""), pl.lit(None, pl.Int64).alias("rank"), _quantiles(ranks, quantile))
        rows.append(values.cast(ranks.schema))
    return pl.concat(rows)


def notable(ranks: pl.DataFrame) -> Mapping[int, str]:
    """The typical rank and the extreme ones, with what each is; `ranks` as from `shares`, with a row or more.

    The typical one is nearest to the median of all shares. A rank that is several things is listed once.
    """
    parts = [name for name in ranks.columns if name.endswith("_ratio") and name != "comm hidden_ratio"]
    distance = pl.sum_horizontal((pl.col(name) - pl.col(name).median()).abs() for name in parts)
    labels: dict[int, list[str]] = {ranks.sort(distance, "rank")["rank"][0]: ["typical"]}
    extremes = {f"most {name.removesuffix('_ratio')}": pl.col(name) for name in parts} | {
        "least comm hidden": -pl.col("comm hidden_ratio")
    }
    for why, size in extremes.items():
        above = (size - size.median()).alias("above")
        by_size = ranks.select("rank", above).drop_nulls().sort("above", "rank", descending=[True, False])
        for rank, above_median in by_size.head(1).iter_rows():
            if above_median >= _EXTREME_RATIO:
                labels.setdefault(rank, []).append(why)
    return {rank: ", ".join(why) for rank, why in labels.items()}


def _quantiles(ranks: pl.DataFrame, quantile: float) -> pl.Expr:
    return pl.col(name for name in ranks.columns if name != "rank").quantile(quantile, "nearest")
