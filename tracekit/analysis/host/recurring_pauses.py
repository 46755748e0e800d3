"""Pauses of the host between ops that recur at one place of a step, on a run whose ops run on the host."""

from collections.abc import Sequence

import polars as pl

PAUSE_NS = 200_000
"""Shorter pauses between ops belong to the ops: of a healthy eager training on a quiet host, such pauses that recur
take 1 ms of each step, whatever its size."""

LOOP_PAUSE_NS = 50_000
"""Pauses before ops of one name are those of one loop: where one of a step is long, its others count from here on."""

MAJORITY_PAUSE_RATIO = 0.03
"""Share of the mean step from which a pause need occur in more than half of the steps only: a lock or a queue that is
sometimes free. Interruptions by other processes hit single steps: half of eight steps at one place, hardly ever."""

_DEVIATIONS = 2
"""A pause counts up to its place's median and this many times the median deviation from it: waits of a lock or a
server, uniform between nothing and their longest, count whole, and a single interruption counts as any other step."""


def recurring(pauses: pl.DataFrame, place: Sequence[str], is_absent_at_edge: pl.Expr) -> pl.DataFrame:
    """Pauses at places that have one in all steps, or a long one in most; pause_ns is the time in ns that counts.

    `pauses` has the columns of `place`, step, pause_ns, and of the place's device steps (their number) and mean_ns (of
    a step). `is_absent_at_edge` marks places without a pause in the first or last step of a window, where it is before
    the window or after it.
    """
    pause_ns = pl.col("pause_ns")
    is_longer = pause_ns >= MAJORITY_PAUSE_RATIO * pl.col("mean_ns")
    in_most = (pl.col("step").filter(is_longer).n_unique().over(place) * 2 > pl.col("steps")) & is_longer
    seen_steps = pl.col("step").n_unique().over(place)
    in_all = seen_steps == pl.col("steps") - is_absent_at_edge.cast(pl.Int64)
    median_ns = pause_ns.quantile(0.5, "lower").over(place)
    deviation_ns = (pause_ns - median_ns).abs().quantile(0.5, "lower").over(place)
    counted_ns = pl.min_horizontal(pause_ns, median_ns + _DEVIATIONS * deviation_ns).cast(pl.Int64)
    return pauses.filter((in_all | in_most) & (seen_steps > 1)).with_columns(counted_ns.alias("pause_ns"))
