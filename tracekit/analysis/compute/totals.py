"""Durations summed by name and other keys, over steps, ranks and windows: exact percentiles and rank spread."""

from collections.abc import Sequence

import polars as pl

from tracekit.errors import ConfigError

_DURATIONS = "durations_ns"
MEASURES = ("count", "total_ns", "mean_ns", "p50_ns", "p95_ns", "max_ns", "spread_ratio", "most_rank")


def collect_durations(work: pl.DataFrame, keys: Sequence[str], sums: Sequence[str] = ()) -> pl.DataFrame:
    """Return one trace's durations by `keys`: columns keys, durations_ns (a list) and the sum of each of `sums`.

    `work` needs the keys, dur_ns and `sums`. One row per combination of keys that occurs, a null being a value too.
    """
    return work.group_by(*keys, maintain_order=True).agg(
        pl.col("dur_ns").alias(_DURATIONS), *(pl.col(name).sum() for name in sums)
    )


def merge_durations(
    parts: pl.DataFrame, keys: Sequence[str], *, ranks: Sequence[int], sums: Sequence[str] = ()
) -> pl.DataFrame:
    """Merge the tables that `collect_durations` returned: one row per combination of keys, most total time first.

    `parts` has columns window and rank too; `rank` may be one of the keys. Columns keys, MEASURES and `sums`: count,
    total_ns, mean_ns (rounded), p50_ns, p95_ns (the shortest recorded duration that at least 50 and 95% do not exceed),
    max_ns, spread_ratio (largest less smallest total over ranks, over the mean of `ranks`; a rank without any counts as
    0), most_rank (the rank with the largest total). The last two are null for a single rank.
    """
    ordered = pl.col("dur_ns").sort()
    merged = (
        parts.select(*keys, pl.col(_DURATIONS).alias("dur_ns"))
        .explode("dur_ns")
        .group_by(*keys)
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("dur_ns").sum().alias("total_ns"),
            pl.col("dur_ns").mean().round().cast(pl.Int64).alias("mean_ns"),
            *(ordered.get((pl.len() * share).ceil().cast(pl.Int64) - 1).alias(name) for name, share in _SHARES),
            pl.col("dur_ns").max().alias("max_ns"),
        )
    )
    summed = parts.group_by(*keys).agg(pl.col(name).sum() for name in sums)
    return (
        merged.join(_spread(parts, keys, ranks), on=keys, nulls_equal=True)
        .join(summed, on=keys, nulls_equal=True)
        .sort("total_ns", *keys, descending=[True, *(False for _ in keys)])
        .select(*keys, *MEASURES, *sums)
    )


_SHARES = (("p50_ns", 0.5), ("p95_ns", 0.95))


def require_known(option: str, names: Sequence[str], allowed: Sequence[str]) -> None:
    """Raise ConfigError where an option has no names, or one that is not `allowed`."""
    unknown = next((name for name in names if name not in allowed), None)
    if unknown is not None or not names:
        raise ConfigError(f"{option} {unknown or ''}: expected some of {', '.join(allowed)}".replace(" :", ":"))


def _spread(parts: pl.DataFrame, keys: Sequence[str], ranks: Sequence[int]) -> pl.DataFrame:
    if len(ranks) < 2 or "rank" in keys:
        return parts.select(
            *keys, pl.lit(None, pl.Float64).alias("spread_ratio"), pl.lit(None, pl.Int64).alias("most_rank")
        ).unique(keys)
    rank_total_ns = pl.col("rank_total_ns")
    least_ns = pl.when(pl.len() < len(ranks)).then(0).otherwise(rank_total_ns.min())
    spread_ns, mean_ns = rank_total_ns.max() - least_ns, rank_total_ns.sum() / len(ranks)
    return (
        parts.group_by(*keys, "rank")
        .agg(pl.col(_DURATIONS).list.sum().sum().alias("rank_total_ns"))
        .sort("rank")
        .group_by(*keys)
        .agg(
            pl.when(mean_ns > 0).then(spread_ns / mean_ns).otherwise(0.0).alias("spread_ratio"),
            pl.col("rank").get(rank_total_ns.arg_max()).alias("most_rank"),
        )
    )
