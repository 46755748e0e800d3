"""Stalled collectives: single ones that take far longer than the same ones usually do, without a late rank."""

import math

import numpy as np
import polars as pl

from tracekit.analysis.communication import group_bandwidth
from tracekit.analysis.host import host_stalls
from tracekit.analysis.parallelism import outlier_steps
from tracekit.analysis.time import breakdown
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import TraceFact
from tracekit.sync import alignment, collective_matching

_RANKS = pl.List(pl.Int64)
_WHAT = "event window step op group group_size bytes transfer_ns usual_ns"
CALL_COLUMNS = {
    **schema.columns(f"{_WHAT} rank activity_id start_ns dur_ns excess_ns exposed_ns excess_start_ns others"),
    "ranks": _RANKS,
}
COLUMNS = {
    **schema.columns(f"{_WHAT} start_ns end_ns lost_ns is_whole collectives groups step_ns reference_ns window_ns"),
    **schema.columns("steps name", name=pl.String),
    "ranks": _RANKS,
    "silent_ranks": _RANKS,
}
_GROUP = ["group", "members"]
_SIZED = [*_GROUP, "op", "dtype", "size_class"]
_KIND = [*_SIZED, "unsized_place", "unsized_calls"]
"""What equal collectives have in common. Of unknown size, those at one place of steps with as many calls are equal."""
_ONE = ["window", "step"]
_MIN_EXCESS_NS = 1_000_000
_MIN_RATIO = 4.0
"""How many times as long as usual a collective must take: contention and jitter slow one down a few times at most."""
_MIN_OTHERS, _MIN_OTHERS_AT_PLACE = 5, 2
"""How many others must be compared, and how many at the same place of other steps where the kind is rare."""
_FEW, _MANY = 3, 20
_USUAL_QUANTILE, _TAIL_QUANTILE = 0.75, 0.95
_TAIL_RATIO = 2.0
"""Among many collectives some take long now and then: how many times as long as these a stalled one must take."""
_MAX_CALLS = 1000
_JUDGED = (*collective_matching.SYNCHRONIZING, *collective_matching.ROOTED, *collective_matching.EXPERT)
_SILENT, _ALIVE = 0.9, 0.5
_EXPLAINED = 0.5

FACTS: tuple[TraceFact, ...] = (*group_bandwidth.FACTS, host_stalls.host_silences)
"""The facts that the run tables of this module read, in addition to those of `outlier_steps`."""


@run_fact
def stalled_calls(run: Run) -> pl.DataFrame:
    """Return the collectives that take far longer than the same ones usually do; use ``run.table``.

    Columns CALL_COLUMNS: transfer_ns (of `group_bandwidth`: from the last known arrival to the end), usual_ns and
    others (of the other ones: at the same place of other steps, and of the same op, group and size within a factor of
    two; of unknown size, only at the same place of steps with as many calls), excess_ns (beyond that), excess_start_ns
    (when it begins, on the run's clock), rank, start_ns and dur_ns (of the rank with the shortest wait), event (those
    that stall at once have one number), ranks (with a trace); one row per collective. One of few of its size must also
    take longer than larger ones do. Sends and receives, saves and the first collective of a group are left out.
    """
    calls = _classify_calls(run)
    # Collectives that take far longer than the others, with usual_ns and others (how many).
    middle_ns = pl.col("transfer_ns").quantile(0.5, "lower").over(_KIND)
    long = calls.filter(~pl.col("is_first"), pl.col("transfer_ns") >= _MIN_RATIO * middle_ns)
    candidates = long.sort("transfer_ns", descending=True).head(_MAX_CALLS)
    of_kind = _of_others(calls, candidates, _KIND).rename({"usual_ns": "of_kind_ns"})
    at_place = _of_others(calls, candidates, [*_KIND, "place"]).select(
        "row", at_place_ns="usual_ns", others_at_place="others"
    )
    of_few = of_kind.filter(pl.col("others") < _MIN_OTHERS)
    as_large = _of_as_large(calls, candidates.join(of_few, on="row", how="semi"))
    compared = candidates.join(of_kind, on="row").join(at_place, on="row").join(as_large, on="row", how="left")
    most_ns = pl.max_horizontal("of_kind_ns", "at_place_ns")
    is_longest = pl.col("transfer_ns") >= _MIN_RATIO * pl.col("as_large_ns")
    # On a CPU run, ops that compute slow a collective down as it happens, so that few others show little.
    has_larger = (pl.col("others_as_large") >= _MIN_OTHERS) & is_longest & breakdown.is_on_device(run)
    has_other_sizes = pl.col("size_class").is_null() | has_larger
    usual = compared.with_columns(pl.coalesce("at_place_ns", "of_kind_ns").cast(pl.Int64).alias("usual_ns")).filter(
        (pl.col("others") >= _MIN_OTHERS) | (pl.col("others_at_place") >= _MIN_OTHERS_AT_PLACE) & has_other_sizes,
        pl.col("transfer_ns") >= _MIN_RATIO * most_ns,
        pl.col("transfer_ns") >= _TAIL_RATIO * pl.col("tail_ns").fill_null(0),
    )
    usual = _without_usual_waits(run, usual)
    if usual.is_empty():
        return schema.empty(CALL_COLUMNS)
    excess_ns = pl.col("transfer_ns") - pl.col("usual_ns")
    stalls = usual.with_columns(excess_ns.alias("excess_ns")).filter(
        pl.col("excess_ns") >= _MIN_EXCESS_NS, pl.col("exposed_ns") > 0
    )
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    aligned = alignment.on_run_clock(
        stalls.with_columns((end_ns - pl.col("excess_ns")).alias("excess_start_ns")), run.offsets, ("excess_start_ns",)
    ).sort("window", "excess_start_ns")
    reach_ns = (pl.col("excess_start_ns") + pl.col("excess_ns")).cum_max().shift(1).over("window")
    begins = (pl.col("excess_start_ns") > reach_ns).fill_null(value=True)
    return aligned.with_columns(begins.cum_sum().cast(pl.Int64).alias("event")).pipe(schema.select, CALL_COLUMNS)


@run_fact
def stalled_collectives(run: Run) -> pl.DataFrame:
    """Return the times in which collectives stalled, with the cost for the job; use ``run.table``.

    Columns COLUMNS: op, group, group_size, bytes, transfer_ns, usual_ns and ranks (with a trace) of the longest
    collective, collectives and groups (how many stalled at once), start_ns and end_ns (of the excess, on the run's
    clock), lost_ns (the part of the excess in which nothing is computed), is_whole (every rank of the groups has a
    trace, so none came late), silent_ranks (whose host did nothing while those of others did) and name (of the op in
    which such a host was), step_ns and reference_ns (of the step, and the median), window_ns and steps (of the window);
    one row per event. Stalls of hosts that `outlier_steps` explains are left out.
    """
    calls = run.table(stalled_calls)
    if calls.is_empty():
        return schema.empty(COLUMNS)
    lengths = outlier_steps.step_lengths(run)
    windows = lengths.group_by("window").agg(
        pl.col("duration_ns").sum().alias("window_ns"), pl.len().cast(pl.Int64).alias("steps"),
        pl.when(pl.len() > 1).then(pl.col("duration_ns").quantile(0.5, "lower")).cast(pl.Int64).alias("reference_ns"),
    )  # fmt: skip
    key = ["window", "step"]
    events = _without_host_stalls(run, _events(calls))
    priced = events.join(lengths, on=key, how="left", nulls_equal=True).join(windows, on="window", how="left")
    table = priced.rename({"duration_ns": "step_ns"}).join(_silent_hosts(run, events), on="event", how="left")
    return table.with_columns(pl.col("silent_ranks").fill_null([])).pipe(schema.select, COLUMNS).sort("event")


def _classify_calls(run: Run) -> pl.DataFrame:
    """Return the collectives of `group_bandwidth.collective_times` with the class of their size, and place and row."""
    calls = run.table(group_bandwidth.collective_times).filter(pl.col("op").is_in(_JUDGED))
    size_class = pl.col("bytes").cast(pl.Float64).log(2).floor().alias("size_class")
    # Each call has the start of one of its ranks, whose clocks may be far apart.
    aligned = alignment.on_run_clock(calls.with_columns(begin_ns=pl.col("start_ns")), run.offsets, ("begin_ns",))
    ordered = aligned.with_columns(pl.when(pl.col("bytes") > 0).then(size_class)).sort("window", "begin_ns")
    nth = pl.int_range(pl.len()).over(*_ONE, *_SIZED).alias("place")
    is_first = pl.int_range(pl.len()).over(_GROUP) == 0
    is_unsized = pl.col("size_class").is_null()
    return ordered.with_columns(
        nth,
        is_first.alias("is_first"),
        (pl.col("ranks").list.len() < pl.col("ranks").list.len().max().over(_GROUP)).alias("is_partial"),
        pl.when(is_unsized).then(nth).alias("unsized_place"),
        pl.when(is_unsized).then(pl.len().over(*_ONE, *_SIZED)).alias("unsized_calls"),
    ).with_row_index("row")


def _without_usual_waits(run: Run, long: pl.DataFrame) -> pl.DataFrame:
    """Leave out collectives that ranks lack, and that last no longer than others do with the wait for these.

    A rank whose call was not recorded, or could not be matched, may have arrived late, as it does elsewhere.
    """
    if not long["is_partial"].any():
        return long
    same = ["window", "rank", "group", "op", "dtype", "bytes"]
    calls = run.table(collective_matching.calls).with_columns(lasted_ns=pl.col("end_ns") - pl.col("start_ns"))
    others = long.select("row", "activity_id", *same).join(calls, on=same, nulls_equal=True, suffix="_of_other")
    others = others.filter(pl.col("activity_id") != pl.col("activity_id_of_other"))
    usual = others.group_by("row").agg(with_waits_ns=pl.col("lasted_ns").quantile(_USUAL_QUANTILE, "higher"))
    compared = long.join(usual, on="row", how="left", maintain_order="left")
    is_usual = pl.col("is_partial") & (pl.col("dur_ns") < _MIN_RATIO * pl.col("with_waits_ns"))
    return compared.filter(~is_usual.fill_null(value=False)).drop("with_waits_ns")


def _of_others(calls: pl.DataFrame, candidates: pl.DataFrame, key: list[str]) -> pl.DataFrame:
    """Usual time of the other collectives with the same key, for each candidate.

    Columns row, usual_ns, tail_ns (null among few), others (how many); one row per candidate. A run may have tens of
    thousands of one kind, so they are not joined in pairs.
    """
    alike = calls.join(candidates.select(key).unique(), on=key, how="semi", nulls_equal=True)
    times = {
        place: np.sort(group_calls["transfer_ns"].drop_nulls().to_numpy())
        for place, group_calls in alike.partition_by(key, as_dict=True).items()
    }
    rows = []
    for row, own_ns, *place in candidates.select("row", "transfer_ns", *key).iter_rows():
        ascending = times[tuple(place)]
        other_ns = np.delete(ascending, np.searchsorted(ascending, own_ns))
        usual_ns = _quantile(other_ns, 1.0 if len(other_ns) <= _FEW else _USUAL_QUANTILE)
        tail_ns = _quantile(other_ns, _TAIL_QUANTILE) if len(other_ns) >= _MANY else None
        rows.append((row, usual_ns, tail_ns, len(other_ns)))
    types = {"row": candidates.schema["row"], **schema.columns("usual_ns tail_ns others")}
    return pl.DataFrame(rows, schema=types, orient="row")


def _of_as_large(calls: pl.DataFrame, candidates: pl.DataFrame) -> pl.DataFrame:
    """Usual time of the other collectives of a group, op and type that are as large as each candidate, or larger.

    Such ones usually take as long, or longer. Columns row, as_large_ns (null without others), others_as_large; one row
    per candidate of known size.
    """
    key = [*_GROUP, "op", "dtype"]
    sized = calls.drop_nulls(["size_class", "transfer_ns"])
    alike = sized.join(candidates.select(key).unique(), on=key, how="semi", nulls_equal=True)
    times = {
        place: (same["size_class"].to_numpy(), same["transfer_ns"].to_numpy())
        for place, same in alike.partition_by(key, as_dict=True).items()
    }
    rows = []
    known = candidates.drop_nulls("size_class")
    for row, own_ns, own_class, *place in known.select("row", "transfer_ns", "size_class", *key).iter_rows():
        size_class, transfer_ns = times[tuple(place)]
        ascending = np.sort(transfer_ns[size_class >= own_class])
        other_ns = np.delete(ascending, np.searchsorted(ascending, own_ns))
        rows.append((row, _quantile(other_ns, _USUAL_QUANTILE), len(other_ns)))
    types = {"row": candidates.schema["row"], **schema.columns("as_large_ns others_as_large")}
    return pl.DataFrame(rows, schema=types, orient="row")


def _quantile(ascending: Ints, ratio: float) -> int | None:
    """Return the smallest value that is not below a quantile; None without values."""
    return int(ascending[math.ceil(ratio * (len(ascending) - 1))]) if len(ascending) else None


def _events(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the events of stalled collectives with the time that the job loses in each."""
    is_whole = (pl.col("ranks").list.len() == pl.col("group_size")).fill_null(value=False)
    end_ns = pl.col("excess_start_ns") + pl.col("excess_ns")
    lost_ns = pl.min_horizontal("excess_ns", "exposed_ns").sum()
    longest = calls.sort("excess_ns", descending=True)
    return longest.group_by("event", maintain_order=True).agg(
        pl.col("window", "step", "op", "group", "group_size", "bytes", "transfer_ns", "usual_ns").first(),
        pl.col("ranks").explode().unique().sort(), is_whole.all().alias("is_whole"),
        pl.len().cast(pl.Int64).alias("collectives"),
        pl.struct("group", "ranks").n_unique().cast(pl.Int64).alias("groups"),
        pl.col("excess_start_ns").min().alias("start_ns"), end_ns.max().alias("end_ns"),
        pl.min_horizontal(lost_ns, end_ns.max() - pl.col("excess_start_ns").min()).alias("lost_ns"),
    )  # fmt: skip


def _without_host_stalls(run: Run, events: pl.DataFrame) -> pl.DataFrame:
    """Return the events without those in which hosts stall for most of the time: these are reported as such."""
    stalls = run.table(outlier_steps.outlier_stalls).select("window", "rank", "run_start_ns", "dur_ns")
    pairs = events.join(stalls, on="window").filter(pl.col("ranks").list.contains(pl.col("rank")))
    until_ns = pl.min_horizontal("end_ns", pl.col("run_start_ns") + pl.col("dur_ns"))
    both_ns = until_ns - pl.max_horizontal("start_ns", "run_start_ns")
    explained = pairs.filter(both_ns >= _EXPLAINED * (pl.col("end_ns") - pl.col("start_ns")))
    return events.join(explained, on="event", how="anti", maintain_order="left")


def _silent_hosts(run: Run, events: pl.DataFrame) -> pl.DataFrame:
    """Ranks whose hosts did nothing in an event while others did. Columns event, silent_ranks, name.

    A host that waits is silent, too, so it shows nothing where all are silent: unless one is in an op that computes.
    """
    silences = alignment.on_run_clock(
        run.table(host_stalls.host_silences).with_columns(from_ns=pl.col("start_ns")), run.offsets, ("from_ns",)
    ).select("window", "rank", "from_ns", "dur_ns", "name")
    pairs = events.select("event", "window", "start_ns", "end_ns", rank="ranks").explode("rank")
    until_ns = pl.min_horizontal("end_ns", pl.col("from_ns") + pl.col("dur_ns"))
    both_ns = (until_ns - pl.max_horizontal("start_ns", "from_ns")).clip(0)
    # A rank without a long silence has a row of nulls.
    share = pl.when(pl.col("from_ns").is_null()).then(0.0).otherwise(both_ns / (pl.col("end_ns") - pl.col("start_ns")))
    of_rank = (
        pairs.join(silences, on=["window", "rank"], how="left")
        .with_columns(share.alias("share"))
        .sort("share", descending=True)
        .group_by("event", "rank", maintain_order=True)
        .agg(pl.col("share", "name").first())
    )
    computes = pl.col("name").is_not_null() & (pl.col("share") >= _SILENT)
    others_go_on = (pl.col("share") < _ALIVE).any().over("event")
    is_silent = (
        pl.when(computes.any().over("event")).then(computes).otherwise((pl.col("share") >= _SILENT) & others_go_on)
    )
    return (
        of_rank.filter(is_silent)
        .group_by("event")
        .agg(pl.col("rank").sort().alias("silent_ranks"), pl.col("name").drop_nulls().first())
    )
