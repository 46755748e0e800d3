"""Ranks onto one clock: ranks leave a collective together, so ends align clocks where starts cannot."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import units
from tracekit.model.run import OFFSETS, RUN_DATA_QUALITY, Run
from tracekit.sync import clock_offsets, collective_matching

RESIDUAL_QUANTILE = 0.9
MIN_DRIFT_SPAN_NS = 10_000_000_000
_MIN_DRIFT_PAIRS = 16
_ROUNDS = 20
_MAX_SHARE = 0.5

_Ints = npt.NDArray[np.int64]
_Floats = npt.NDArray[np.float64]


def offsets(run: Run) -> pl.DataFrame:
    """Return what to add to each trace's times to be on the run's clock, which is that of the first rank of each part.

    Columns as OFFSETS; one row per window and rank. The offsets minimise the absolute differences of the ends of all
    collectives that ranks share. residual_ns is what nine of ten ends of the rank lie within of the median of the other
    ranks' ends. Drift is fitted where a rank's collectives span 10 s or more. A rank that shares fewer than three
    collectives stays on its own clock: its residual is null.
    """
    calls = run.run_table(collective_matching.matched_calls)
    places = pl.DataFrame([(s.window, s.rank) for s in run.sources], schema=["window", "rank"], orient="row")
    parts = []
    for (window,), there in places.group_by("window", maintain_order=True):
        of_window = calls.filter(pl.col("window") == window)
        rough = of_window.group_by("rank").agg(pl.col("rough_ns", "part").first())
        known = there.join(rough, on="rank", how="left", maintain_order="left").with_columns(
            pl.col("rough_ns").fill_null(0), pl.col("part").fill_null(pl.col("rank"))
        )
        parts.append(_solved(known, _ends(of_window)))
    return OFFSETS.conform(pl.concat(parts)) if parts else OFFSETS.empty()


def on_run_clock(table: pl.DataFrame, offsets: pl.DataFrame, columns: tuple[str, ...]) -> pl.DataFrame:
    """Return `table`, which has columns window and rank, with the times in `columns` on the run's clock."""
    place = offsets.select("window", "rank", "offset_ns", "drift", "at_ns")
    joined = table.join(place, on=["window", "rank"], how="left", maintain_order="left")
    drifted = [
        (pl.col(name) + pl.col("offset_ns") + _drifted(pl.col(name))).cast(pl.Int64).alias(name) for name in columns
    ]
    return joined.with_columns(drifted).drop("offset_ns", "drift", "at_ns")


def data_quality(run: Run) -> pl.DataFrame:
    """Return the data-quality issues of the run's clock, columns as RUN_DATA_QUALITY: clock_skew, clock_unaligned.

    The share of clock_skew is that of the calls shorter than the residual: who waited for whom in them, nobody can say.
    It is told where a clock is off by more than the residual, or where most calls are so short.
    """
    if len(run.ranks) < 2:
        return RUN_DATA_QUALITY.empty()
    if run.table(collective_matching.calls).is_empty():
        return RUN_DATA_QUALITY.empty()  # nothing goes from rank to rank, so nothing rests on their clocks
    found = run.offsets
    rows = [*_skew(run, found), *_apart(found)]
    return RUN_DATA_QUALITY.conform(pl.DataFrame(rows, infer_schema_length=None)) if rows else RUN_DATA_QUALITY.empty()


# Solving -------------------------------------------------------------------------------------------------------------


def _ends(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the ends that align: of collectives that nobody leaves early, with two ranks or more, one end a rank."""
    return (
        calls.filter(pl.col("instance").is_not_null(), pl.col("op").is_in(collective_matching.SYNCHRONIZING))
        .filter(pl.len().over("instance") > 1)
        .select("rank", "instance", "end_ns", "how")
    )


def _solved(known: pl.DataFrame, ends: pl.DataFrame) -> pl.DataFrame:
    """Return rows of OFFSETS for the ranks of one window, from rough offsets and the ends they share."""
    ranks = known["rank"].to_numpy()
    # Relative to the first end: a float holds ns of a run, not of an epoch.
    origin = int(ends["end_ns"].min() or 0)  # type: ignore[arg-type]
    rank = np.searchsorted(ranks, ends["rank"].to_numpy())
    _, instance = np.unique(ends["instance"].to_numpy(), return_inverse=True)
    own = (ends["end_ns"].to_numpy() - origin).astype(np.float64)
    offset = known["rough_ns"].to_numpy().astype(np.float64)
    offset = _refined(offset, rank, instance, own)
    drift, at = _drifts(len(ranks), offset, rank, instance, own)
    common = own + offset[rank] + drift[rank] * (own - at[rank])
    apart = _from_others(instance, common)
    part = known["part"].to_numpy()
    rows = []
    for i, each in enumerate(ranks):
        mine = apart[rank == i]
        how = ends.filter(pl.col("rank") == each)["how"]
        is_aligned = len(mine) >= clock_offsets.MIN_PAIRS
        first = int(np.flatnonzero(part == part[i])[0])
        rows.append(
            {
                "rank": int(each),
                "offset_ns": round(offset[i] - offset[first]) if is_aligned else 0,
                "residual_ns": int(np.ceil(np.quantile(np.abs(mine), RESIDUAL_QUANTILE))) if is_aligned else None,
                "drift": float(drift[i] - drift[first]) if drift[i] or drift[first] else None,
                "at_ns": round(at[i]) + origin if drift[i] or drift[first] else None,
                "pairs": len(mine),
                "part": int(part[i]),
                "how": how.mode().sort()[0] if is_aligned else collective_matching.NONE,
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None).with_columns(known["window"])


def _refined(offset: _Floats, rank: _Ints, instance: _Ints, own: _Floats) -> _Floats:
    """Minimise the absolute differences of ends within instances, by turns: when each ended, what each clock is off."""
    for _ in range(_ROUNDS if len(own) else 0):
        common = own + offset[rank]
        late = _median_by(instance, common)[instance] - common
        step = _median_by(rank, late, len(offset))
        offset = offset + step
        if np.abs(step).max() < 1:
            break
    return offset


def _drifts(count: int, offset: _Floats, rank: _Ints, instance: _Ints, own: _Floats) -> tuple[_Floats, _Floats]:
    """Return each rank's drift against the others (Theil and Sen's slope) and the time around which it turns."""
    drift, at = np.zeros(count), np.zeros(count)
    common = own + offset[rank]
    late = _median_by(instance, common)[instance] - common
    for i in range(count):
        mine = rank == i
        if mine.sum() < _MIN_DRIFT_PAIRS or np.ptp(own[mine]) < MIN_DRIFT_SPAN_NS:
            continue
        order = np.argsort(own[mine], kind="stable")
        time, behind = own[mine][order], late[mine][order]
        half = len(time) // 2
        slopes = (behind[-half:] - behind[:half]) / np.maximum(time[-half:] - time[:half], 1)
        drift[i], at[i] = np.median(slopes), np.median(time)
    return drift, at


def _median_by(key: _Ints, value: _Floats, count: int | None = None) -> _Floats:
    """Return the median of the values of each key from 0 to `count`; 0 where a key has none."""
    frame = pl.DataFrame({"key": key, "value": value}).group_by("key").agg(pl.col("value").median())
    medians = np.zeros(count if count is not None else int(key.max(initial=-1)) + 1)
    medians[frame["key"].to_numpy()] = frame["value"].to_numpy()
    return medians


def _from_others(instance: _Ints, common: _Floats) -> _Floats:
    """Return how far each end lies from the median of the other ranks' ends of the same instance."""
    order = np.lexsort((common, instance))
    sorted_ends, of = common[order], instance[order]
    first = np.searchsorted(of, of, side="left")
    others = np.searchsorted(of, of, side="right") - first - 1
    place = np.arange(len(of)) - first

    def without_own(k: _Ints) -> _Floats:
        return np.asarray(sorted_ends[first + k + (k >= place)])

    median = (without_own((others - 1) // 2) + without_own(others // 2)) / 2
    apart = np.empty(len(common))
    apart[order] = sorted_ends - median
    return apart


def _drifted(time: pl.Expr) -> pl.Expr:
    return (pl.col("drift") * (time - pl.col("at_ns"))).round().fill_null(0).cast(pl.Int64)


# Data quality --------------------------------------------------------------------------------------------------------


def _skew(run: Run, found: pl.DataFrame) -> list[dict[str, object]]:
    aligned = found.filter(pl.col("residual_ns").is_not_null())
    if aligned.is_empty():
        return []
    calls = run.run_table(collective_matching.matched_calls).filter(pl.col("instance").is_not_null())
    timed = calls.join(aligned.select("window", "rank", "residual_ns"), on=["window", "rank"])
    share = timed.select((pl.col("end_ns") - pl.col("start_ns") < pl.col("residual_ns")).mean()).item() or 0.0
    worst = aligned.sort(pl.col("offset_ns").abs(), descending=True).row(0, named=True)
    apart_ns, residual_ns = abs(worst["offset_ns"]), int(aligned["residual_ns"].max())  # type: ignore[arg-type]
    if apart_ns <= residual_ns and share <= _MAX_SHARE:
        return []
    told = (
        f"the clock of rank {worst['rank']} was {_us(apart_ns)} off and is corrected"
        if apart_ns > residual_ns
        else "clocks agree"
    )
    message = (
        f"By the ends of collectives, {told}, to within {_us(residual_ns)}. Nothing across ranks is told below that: "
        f"{share:.0%} of collectives are shorter."
    )
    return [{"kind": "clock_skew", "message": message, "affected_ratio": float(share)}]


def _apart(found: pl.DataFrame) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    alone = found.filter(pl.col("residual_ns").is_null(), pl.len().over("window") > 1)
    if alone.height:
        told = f"rank{'s' * (alone['rank'].n_unique() > 1)} {units.ranges(alone['rank'].unique())}"
        message = f"Too few collectives tie {told} to the clock of others; nothing is told across them."
        rows.append({"kind": "clock_unaligned", "message": message, "affected_ratio": alone.height / found.height})
    tied = found.filter(pl.col("residual_ns").is_not_null())
    parts = int(tied.group_by("window").agg(pl.col("part").n_unique())["part"].max() or 0)  # type: ignore[arg-type]
    if parts > 1:
        message = (
            f"{parts} sets of ranks share no collective, so each has a clock of its own; nothing is told across them."
        )
        rows.append({"kind": "clock_unaligned", "message": message, "affected_ratio": 0.0})
    return rows


def _us(ns: int) -> str:
    return f"{ns / 1000:,.1f} µs"
