"""Clock alignment: all ranks leave a collective together, so its ends align clocks where its starts cannot.

Ranks with too few collectives are aligned by what they send to each other, see `message_clocks`.
"""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import units
from tracekit.model.fact import run_fact
from tracekit.model.run import OFFSETS, RUN_DATA_QUALITY, Run
from tracekit.sync import clock_offsets, collective_matching

RESIDUAL_QUANTILE = 0.9
MIN_DRIFT_SPAN_NS = 10_000_000_000
_MIN_DRIFT_PAIRS = 16
_ROUNDS = 20
_MAX_SHARE = 0.5
_ODD_RATE = 10.0
"""Units differ by a factor of 1,000; collectives that are matched one period off make short spans differ by a few."""
_LEAST_RATE_SPAN_NS = 10_000_000
_MOST_OTHERS = 8
"""Ranks of each collective that others are compared with: their number would grow with the square of the ranks."""

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


@run_fact
def offsets(run: Run) -> pl.DataFrame:
    """Return the clock offset of each trace: what to add to its times to get the run's clock.

    Columns as OFFSETS; one row per window and rank. The run's clock is the first rank's in each domain. The offsets
    minimise the absolute differences between the ends of shared collectives, as far as no rank then leaves a collective
    before all have arrived. Ranks leave all-to-alls at different times, so their ends count only for ranks that share
    fewer than three other collectives. residual_ns bounds the error: it is the 90th percentile of the distance of a
    rank's ends from the median of the other ranks' ends or, if that is less or only all-to-alls are shared, how far the
    clock could be moved at most until a rank left a collective before another arrived (ends scatter where hosts are
    busy; this limit does not). Drift is fitted
    where a rank's collectives span 10 s or more. Ranks that share fewer than three collectives are aligned by sends and
    receives in both directions, where they have such; otherwise such a rank keeps its own clock, and its residual is
    null.
    """
    calls = run.table(collective_matching.matched_calls)
    places = pl.DataFrame([(s.window, s.rank) for s in run.sources], schema=["window", "rank"], orient="row")
    parts = []
    for (window,), window_ranks in places.group_by("window", maintain_order=True):
        of_window = calls.filter(pl.col("window") == window)
        rough = of_window.group_by("rank").agg(pl.col("rough_ns", "message_error_ns", "clock_domain").first())
        rank_clocks = window_ranks.join(rough, on="rank", how="left", maintain_order="left").with_columns(
            pl.col("rough_ns").fill_null(0), pl.col("clock_domain").fill_null(pl.col("rank"))
        )
        ends = (
            of_window.filter(pl.col("instance").is_not_null(), pl.col("op").is_in(collective_matching.SYNCHRONIZING))
            .filter(pl.len().over("instance") > 1)
            .select("rank", "instance", "start_ns", "end_ns", "matched_by", is_together=_is_together())
        )
        parts.append(_solve_window(rank_clocks, ends))
    return pl.concat(parts) if parts else OFFSETS.empty()


def on_run_clock(table: pl.DataFrame, offsets: pl.DataFrame, columns: tuple[str, ...]) -> pl.DataFrame:
    """Return `table`, which has columns window and rank, with the times in `columns` on the run's clock."""
    place = offsets.select("window", "rank", "offset_ns", "drift", "at_ns")
    joined = table.join(place, on=["window", "rank"], how="left", maintain_order="left")
    shifted = [
        (pl.col(name) + pl.col("offset_ns") + correction.round().fill_null(0).cast(pl.Int64)).cast(pl.Int64).alias(name)
        for name in columns
        for correction in [pl.col("drift") * (pl.col(name) - pl.col("at_ns"))]
    ]
    return joined.with_columns(shifted).drop("offset_ns", "drift", "at_ns")


def on_trace_clock(table: pl.DataFrame, offsets: pl.DataFrame, columns: tuple[str, ...]) -> pl.DataFrame:
    """Return `table`, which has columns window and rank, with the times in `columns` back on their traces' clocks.

    The inverse of `on_run_clock`, within a nanosecond.
    """
    place = offsets.select("window", "rank", "offset_ns", "drift", "at_ns")
    joined = table.join(place, on=["window", "rank"], how="left", maintain_order="left")
    drift = pl.col("drift") / (1 + pl.col("drift"))
    moved = [
        (time_ns - (drift * (time_ns - pl.col("at_ns"))).round().fill_null(0).cast(pl.Int64)).cast(pl.Int64).alias(name)
        for name in columns
        for time_ns in [pl.col(name) - pl.col("offset_ns")]
    ]
    return joined.with_columns(moved).drop("offset_ns", "drift", "at_ns")


@run_fact(table=OFFSETS, is_cached=False)
def run_offsets(run: Run) -> pl.DataFrame:
    """Offsets that the run uses, which are all 0 for a run that is not aligned."""
    return run.offsets


@run_fact(table=RUN_DATA_QUALITY, is_cached=False)  # a trace that cannot be read later adds a row
def run_data_quality(run: Run) -> pl.DataFrame:
    """Data-quality issues of the run, of its files and of its clock."""
    return pl.concat([run.data_quality, data_quality(run)])


def data_quality(run: Run) -> pl.DataFrame:
    """Return the data-quality issues of the run's clock, columns as RUN_DATA_QUALITY.

    The kinds are clock_skew, clock_unaligned and clock_rate.

    The affected share of clock_skew is that of calls shorter than the residual: their waits are unknown. It is reported
    where a clock differs by more than the residual, or where most calls are that short.
    """
    if len(run.ranks) < 2:
        return RUN_DATA_QUALITY.empty()
    if run.table(collective_matching.calls).is_empty():
        return RUN_DATA_QUALITY.empty()  # without collectives, no result depends on the clocks
    offsets = run.offsets
    rows = [*_rate_issues(run), *_skew_issues(run, offsets), *_unaligned_issues(offsets)]
    return RUN_DATA_QUALITY.conform(pl.DataFrame(rows, infer_schema_length=None)) if rows else RUN_DATA_QUALITY.empty()


# Solving -------------------------------------------------------------------------------------------------------------


def _is_together() -> pl.Expr:
    return pl.col("op").is_in(collective_matching.TOGETHER)


def _solve_window(rank_clocks: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """Return rows of OFFSETS for the ranks of one window, from initial offsets and shared ends."""
    ranks = rank_clocks["rank"].to_numpy()
    rank = np.searchsorted(ranks, ends["rank"].to_numpy())
    rough_ns = rank_clocks["rough_ns"].to_numpy().astype(np.int64)
    # On nearly one clock, and relative to the first end: float64 represents ns within a run exactly, but neither Unix
    # time in ns nor the difference between clocks of which one counts since its host started.
    roughly_ended_ns, roughly_started_ns = (ends[name].to_numpy() + rough_ns[rank] for name in ("end_ns", "start_ns"))
    origin = int(roughly_ended_ns.min()) if len(rank) else 0
    _, instance = np.unique(ends["instance"].to_numpy(), return_inverse=True)
    end_ns = (roughly_ended_ns - origin).astype(np.float64)
    start_ns = (roughly_started_ns - origin).astype(np.float64)
    ends_of_rank = np.bincount(rank, minlength=len(ranks))
    is_aligned = ends_of_rank >= clock_offsets.MIN_PAIRS
    # The ends of all-to-alls only limit the clocks, unless a rank shares nothing else.
    is_together = ends["is_together"].to_numpy()
    is_exact = np.bincount(rank, is_together, minlength=len(ranks)) >= clock_offsets.MIN_PAIRS
    decides = is_together | ~is_exact[rank]
    decides &= np.bincount(instance, decides)[instance] > 1
    judged = rank[decides], np.unique(instance[decides], return_inverse=True)[1], end_ns[decides]
    offset = np.where(is_aligned, _refine_offsets(np.zeros(len(ranks)), *judged), 0.0)
    offset = np.where(is_aligned, _possible_offsets(offset, rank, instance, start_ns, end_ns), offset)
    drift, at_ns = _drifts(len(ranks), offset, *judged)
    correction = offset[rank] + drift[rank] * (end_ns - at_ns[rank])
    common = end_ns + correction
    deviation = _deviation_from_others(judged[1], common[decides])
    limit = _limits(rank, instance, *_room(instance, start_ns + correction, common), len(ranks))
    domain, message_error = rank_clocks["clock_domain"].to_numpy(), rank_clocks["message_error_ns"].to_list()
    by_ends = [0] * len(ranks)
    for i in np.flatnonzero(is_aligned).tolist():
        scatter = np.abs(deviation[judged[0] == i])
        scatter_ns = float(np.quantile(scatter, RESIDUAL_QUANTILE)) if len(scatter) else np.inf
        # A rank that always leaves all-to-alls later looks like a clock that is late: only the limit is certain.
        error_ns = limit[i] if np.isfinite(limit[i]) and not is_exact[i] else min(scatter_ns, limit[i])
        by_ends[i] = int(np.ceil(error_ns))
    rows, rough_of = [], rough_ns.tolist()
    for i, number in enumerate(ranks):
        matched_by = ends.filter(pl.col("rank") == number)["matched_by"]
        error = message_error[i]
        without_ends = collective_matching.NONE if error is None else collective_matching.MESSAGES
        is_linked = bool(is_aligned[i]) or error is not None
        first = int(np.flatnonzero(domain == domain[i])[0])
        rows.append(
            {
                "rank": int(number),
                "offset_ns": round(offset[i] - offset[first]) + rough_of[i] - rough_of[first] if is_linked else 0,
                "residual_ns": _error_ns(i, by_ends, message_error, domain) if is_linked else None,
                "drift": float(drift[i] - drift[first]) if drift[i] or drift[first] else None,
                "at_ns": round(at_ns[i]) + origin - rough_of[i] if drift[i] or drift[first] else None,
                "pairs": int(ends_of_rank[i]),
                "clock_domain": int(domain[i]),
                "matched_by": matched_by.mode().sort()[0] if is_aligned[i] else without_ends,
            }
        )
    # Conformed per window: where no rank is aligned, residual_ns has only nulls and no type that concat accepts.
    return OFFSETS.conform(pl.DataFrame(rows, infer_schema_length=None).with_columns(rank_clocks["window"]))


def _error_ns(i: int, by_ends: list[int], by_messages: list[int | None], domain: _Ints) -> int:
    """Return the error of a rank's clock. Messages add theirs to that of the ranks which they align it to."""
    error = by_messages[i]
    if not error:
        return by_ends[i]
    peer_errors = [by_ends[j] for j in range(len(by_ends)) if domain[j] == domain[i] and not by_messages[j]]
    return max(by_ends[i], error + max(peer_errors, default=0))


def _refine_offsets(offset: _Floats, rank: _Ints, instance: _Ints, end_ns: _Floats) -> _Floats:
    """Minimise the absolute differences of ends within instances: alternately estimate instance ends and offsets."""
    for _ in range(_ROUNDS if len(end_ns) else 0):
        common = end_ns + offset[rank]
        late = _median_by(instance, common)[instance] - common
        step = _median_by(rank, late, len(offset))
        offset = offset + step
        if np.abs(step).max() < 1:
            break
    return offset


def _possible_offsets(offset: _Floats, rank: _Ints, instance: _Ints, start_ns: _Floats, end_ns: _Floats) -> _Floats:
    """Return the offsets, moved until no rank leaves a collective before all have arrived; unmoved if that fails."""
    moved = offset
    for _ in range(_ROUNDS):
        room = []
        for call_room in _room(instance, start_ns + moved[rank], end_ns + moved[rank]):
            room.append(np.full(len(offset), np.inf))
            np.minimum.at(room[-1], rank, call_room)
        earliest, latest = room
        if min(earliest.min(initial=0), latest.min(initial=0)) >= 0:
            return moved
        step = np.minimum(latest, 0) - np.minimum(earliest, 0)
        step[0] = 0  # the clock of the first rank is the run's
        moved = moved + np.where(np.isfinite(step), step, 0)
    return offset


def _room(instance: _Ints, start_ns: _Floats, end_ns: _Floats) -> tuple[_Floats, _Floats]:
    """Room to set the clock of each call's rank earlier and later: (n,), (n,); below 0: impossible.

    Earlier until it left before the last of the others arrived, later until it arrived after the first of them left.
    """
    last_arrival = -_least_of_others(instance, -start_ns)
    return end_ns - last_arrival, _least_of_others(instance, end_ns) - start_ns


def _limits(rank: _Ints, instance: _Ints, earlier: _Floats, later: _Floats, count: int) -> _Floats:
    """Largest possible error of each rank's clock, shape (count,); infinity where calls give no limit.

    Each set of ranks that share collectives limits its members relative to each other only, so the widest limit counts.
    """
    members = pl.col("rank").sort().cast(pl.String).str.join(",")
    rooms = pl.DataFrame({"rank": rank, "instance": instance, "earlier": earlier, "later": later})
    sets = rooms.group_by("instance").agg(members.alias("ranks"))
    is_possible = pl.min_horizontal("earlier", "later") >= 0
    limit_ns = pl.when(is_possible).then(pl.max_horizontal("earlier", "later")).otherwise(np.inf)
    of_set = rooms.join(sets, on="instance").group_by("rank", "ranks").agg(pl.col("earlier", "later").min())
    widest = of_set.with_columns(limit_ns.alias("limit")).group_by("rank").agg(pl.col("limit").max())
    limit = np.full(count, np.inf)
    limit[widest["rank"].to_numpy()] = widest["limit"].to_numpy()
    return limit


def _least_of_others(instance: _Ints, value: _Floats) -> _Floats:
    """Return the least value of the other ranks in each instance, shape (n,); each instance has two ranks or more."""
    order = np.lexsort((value, instance))
    ordered, instances = value[order], instance[order]
    first = np.searchsorted(instances, instances, side="left")
    minima = np.empty(len(value))
    minima[order] = ordered[first + (np.arange(len(instances)) == first)]
    return minima


def _drifts(count: int, offset: _Floats, rank: _Ints, instance: _Ints, end_ns: _Floats) -> tuple[_Floats, _Floats]:
    """Return each rank's drift relative to the others (a median of slopes) and the time at which its offset holds."""
    drift, at_ns = np.zeros(count), np.zeros(count)
    common = end_ns + offset[rank]
    late = _median_by(instance, common)[instance] - common
    for i in range(count):
        is_rank = rank == i
        if is_rank.sum() < _MIN_DRIFT_PAIRS or np.ptp(end_ns[is_rank]) < MIN_DRIFT_SPAN_NS:
            continue
        order = np.argsort(end_ns[is_rank], kind="stable")
        time, behind = end_ns[is_rank][order], late[is_rank][order]
        half = len(time) // 2
        slopes = (behind[-half:] - behind[:half]) / np.maximum(time[-half:] - time[:half], 1)
        drift[i], at_ns[i] = np.median(slopes), np.median(time)
    return drift, at_ns


def _median_by(key: _Ints, value: _Floats, count: int | None = None) -> _Floats:
    """Return the median of the values of each key from 0 to `count`; 0 for a key without values."""
    frame = pl.DataFrame({"key": key, "value": value}).group_by("key").agg(pl.col("value").median())
    medians = np.zeros(count if count is not None else int(key.max(initial=-1)) + 1)
    medians[frame["key"].to_numpy()] = frame["value"].to_numpy()
    return medians


def _deviation_from_others(instance: _Ints, common: _Floats) -> _Floats:
    """Return the distance of each end from the median of the other ranks' ends of the same instance."""
    order = np.lexsort((common, instance))
    sorted_ends, instances = common[order], instance[order]
    first = np.searchsorted(instances, instances, side="left")
    peer_count = np.searchsorted(instances, instances, side="right") - first - 1
    place = np.arange(len(instances)) - first

    def without_own(k: _Ints) -> _Floats:
        return np.asarray(sorted_ends[first + k + (k >= place)])

    median = (without_own((peer_count - 1) // 2) + without_own(peer_count // 2)) / 2
    deviation = np.empty(len(common))
    deviation[order] = sorted_ends - median
    return deviation


# Data quality --------------------------------------------------------------------------------------------------------


def _skew_issues(run: Run, offsets: pl.DataFrame) -> list[dict[str, object]]:
    aligned = offsets.filter(pl.col("residual_ns").is_not_null())
    if aligned.is_empty():
        return []
    calls = run.table(collective_matching.matched_calls).filter(pl.col("instance").is_not_null())
    timed = calls.join(aligned.select("window", "rank", "residual_ns"), on=["window", "rank"])
    share = timed.select((pl.col("end_ns") - pl.col("start_ns") < pl.col("residual_ns")).mean()).item() or 0.0
    worst = aligned.sort(pl.col("offset_ns").abs(), descending=True).row(0, named=True)
    skew_ns, residual_ns = abs(worst["offset_ns"]), int(aligned["residual_ns"].max())  # type: ignore[arg-type]
    if skew_ns <= residual_ns and share <= _MAX_SHARE:
        return []
    state = (
        f"The clock of rank {worst['rank']} was {units.duration(skew_ns)} off and is corrected"
        if skew_ns > residual_ns
        else "Clocks agree"
    )
    by_messages = (aligned["matched_by"] == collective_matching.MESSAGES).any()
    source = "sends and receives" if by_messages else "the ends of collectives"
    message = (
        f"{state}, with an error of up to {units.duration(residual_ns)} (from {source}). Differences between ranks "
        f"below that are within clock error; {share:.0%} of collectives are shorter."
    )
    return [{"kind": "clock_skew", "message": message, "affected_ratio": float(share)}]


def _rate_issues(run: Run) -> list[dict[str, object]]:
    """Ranks on which much more or less time passes between two collectives than on those that share both."""
    calls = run.table(collective_matching.matched_calls)
    shared = (
        calls.filter(pl.col("instance").is_not_null(), pl.col("op").is_in(collective_matching.SYNCHRONIZING))
        .select("window", "instance", "rank", "end_ns")
        .unique(["window", "instance", "rank"])
    )
    spans = shared.group_by("window", "rank").agg(
        pl.col("instance").sort_by("end_ns").first().alias("first"),
        pl.col("instance").sort_by("end_ns").last().alias("last"),
        (pl.col("end_ns").max() - pl.col("end_ns").min()).alias("own_ns"),
    )
    peers = shared.filter(pl.int_range(pl.len()).over("window", "instance", order_by="rank") < _MOST_OTHERS)
    peers = peers.rename({"rank": "other"})
    between = (
        spans.join(peers, left_on=["window", "first"], right_on=["window", "instance"])
        .join(peers, left_on=["window", "last", "other"], right_on=["window", "instance", "other"], suffix="_last")
        .filter(pl.col("other") != pl.col("rank"))
        .group_by("window", "rank", "own_ns")
        .agg((pl.col("end_ns_last") - pl.col("end_ns")).abs().median().alias("others_ns"))
    )
    ratio = pl.max_horizontal("own_ns", "others_ns") / pl.min_horizontal("own_ns", "others_ns").clip(1)
    odd = between.filter(pl.max_horizontal("own_ns", "others_ns") > _LEAST_RATE_SPAN_NS, ratio >= _ODD_RATE)
    if odd.is_empty():
        return []
    worst = odd.sort(ratio, pl.col("window"), -pl.col("rank"), descending=True).row(0, named=True)
    message = (
        f"Between the same two collectives, {units.duration(worst['own_ns'])} pass on rank {worst['rank']} and "
        f"{units.duration(int(worst['others_ns']))} on ranks that take part in both: the times of these ranks have "
        "different units, or one clock is wrong."
    )
    return [{"kind": "clock_rate", "message": message, "affected_ratio": odd.height / spans.height}]


def _unaligned_issues(offsets: pl.DataFrame) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    unaligned = offsets.filter(pl.col("residual_ns").is_null(), pl.len().over("window") > 1)
    if unaligned.height:
        ranks = units.numbers("rank", unaligned["rank"])
        message = (
            f"The clock of {ranks}{_in_windows(unaligned, offsets)} is not aligned with other ranks: too few shared "
            "collectives, sends and receives."
        )
        share = unaligned.height / offsets.height
        rows.append({"kind": "clock_unaligned", "message": message, "affected_ratio": share})
    aligned = offsets.filter(pl.col("residual_ns").is_not_null())
    parts = int(aligned.group_by("window").agg(pl.col("clock_domain").n_unique())["clock_domain"].max() or 0)  # type: ignore[arg-type]
    if parts > 1:
        message = f"{parts} sets of ranks share no collective, so each set has its own clock."
        rows.append({"kind": "clock_unaligned", "message": message, "affected_ratio": 0.0})
    return rows


def _in_windows(unaligned: pl.DataFrame, offsets: pl.DataFrame) -> str:
    windows = unaligned["window"].unique()
    return f" in {units.numbers('window', windows)}" if offsets["window"].n_unique() > len(windows) else ""
