"""Subgroups of ranks, where traces do not name the process groups of their collectives.

No rank leaves a synchronizing collective before all ranks have arrived. If a rank ends a call before another rank
begins its own, these are not one collective: calls of that kind belong to smaller groups. So they do where two ranks
share less than half of the instances. Two stages of a pipeline call the same collectives one micro-batch apart: a wrong
clock offset pairs them, but their ends coincide several times less exactly than those of ranks of one group.
"""

import warnings
from collections.abc import Mapping
from itertools import combinations

import numpy as np
import numpy.typing as npt
import polars as pl

_MIN_GAP_NS = 200_000
"""Clocks are aligned less exactly than that before all collectives are matched."""
_MIN_COUNT, _MIN_SHARE = 2, 0.5
"""Two ranks are apart if so many of their common instances contradict each other, or such a share of few."""
_MIN_ALONE_SHARE = 0.3
"""A rank is in no group of the others if such a share of its common instances with each of them contradicts."""
_MIN_SHIFT_NS = 1_000_000
"""Clocks that differ by less, as aligned, agree: only a larger difference may stem from calls of other groups."""
_MIN_SCATTER, _MIN_SCATTER_NS, _MIN_SCATTERED = 4.0, 200_000, 8
"""Ends of two ranks scatter if by so many times as much as either's and its nearest rank's, and by so much; in so many
common instances."""
_MIN_CALLS = 4
"""Of fewer calls of two ranks, how many they share says nothing."""
_MAX_INSTANCES = 1.25
"""With so many instances per call of a rank, or fewer, ranks miss some calls, but are in one group."""
_MAX_RANKS = 512
_MAX_CELLS = 1 << 22
"""Instances x ranks x ranks that are compared: of more, only some instances, evenly spaced."""

_Floats = npt.NDArray[np.float64]
_Flags = npt.NDArray[np.bool_]
_Counts = npt.NDArray[np.int64]


def subgroups(matched: pl.DataFrame, offset_ns: Mapping[int, int] | None = None) -> dict[int, list[list[int]]]:
    """Return the kinds of calls that belong to smaller groups than `matched` assumes, each with its groups of ranks.

    `matched` has a row for each synchronizing call of one group: token (its kind), rank, instance, and start_ns and
    end_ns on a common clock. `offset_ns` is what was added to each rank's clock by these calls (none if known). Kinds
    are left out whose calls agree, that would leave a rank alone by little evidence, or that have more than 512 ranks.
    A rank is alone where its peers have no trace.
    """
    groups_by_token = {}
    offset_ns = offset_ns or {}
    shifts_ns = list(offset_ns.values()) or [0]
    for token in _doubtful(matched, has_shifts=max(shifts_ns) - min(shifts_ns) > _MIN_SHIFT_NS):
        calls = matched.filter(pl.col("token") == token)
        ranks, start_ns, end_ns = _by_instance(calls)
        # Count the instances in which one of two ranks ended its call before the other began, and the common ones.
        last_ns = np.maximum(start_ns[:, :, None], start_ns[:, None, :])
        first_ns = np.minimum(end_ns[:, :, None], end_ns[:, None, :])
        gaps = (last_ns - first_ns > _MIN_GAP_NS).sum(axis=0)  # NaN compares as false
        common = np.isfinite(last_ns).sum(axis=0)
        rarely_meet = _rarely_meet(start_ns, end_ns)
        is_apart = (gaps > 0) & ((gaps >= _MIN_COUNT) | (gaps >= _MIN_SHARE * common)) | rarely_meet
        is_apart |= _scatter([offset_ns.get(rank, 0) for rank in ranks], end_ns)
        if is_apart.any():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # a median of nothing
                median_ns = np.nanmedian(np.abs(end_ns[:, :, None] - end_ns[:, None, :]), axis=0)
            groups = _nearest_groups(is_apart, np.asarray(np.nan_to_num(median_ns, nan=np.inf)))
            is_far = rarely_meet | (gaps >= np.maximum(_MIN_COUNT, _MIN_ALONE_SHARE * common))
            np.fill_diagonal(is_far, val=True)
            if all(len(group) > 1 or is_far[group].all() for group in groups):  # otherwise calls show no groups
                groups_by_token[token] = [[ranks[index] for index in group] for group in groups]
    return groups_by_token


def _doubtful(matched: pl.DataFrame, *, has_shifts: bool) -> list[int]:
    """Return the kinds with calls that are not one collective, or with many instances that some ranks are not in.

    If they shifted clocks, also those whose ends scatter.
    """
    gap_ns = (pl.col("start_ns").max() - pl.col("end_ns").min()).alias("gap_ns")
    spread_ns = (pl.col("end_ns").max() - pl.col("end_ns").min()).alias("spread_ns")
    by_instance = matched.group_by("token", "instance").agg(gap_ns, spread_ns, pl.len().alias("calls"))
    ranks = matched.group_by("token").agg(pl.col("rank").n_unique().alias("ranks"))
    of_token = by_instance.group_by("token").agg(
        pl.col("gap_ns").max(), pl.col("spread_ns").median(), pl.col("calls").sum(), pl.len().alias("of")
    )
    scatters = (pl.col("spread_ns") > _MIN_SCATTER_NS) & has_shifts
    is_doubtful = (pl.col("gap_ns") > _MIN_GAP_NS) | (pl.col("of") * pl.col("ranks") > _MAX_INSTANCES * pl.col("calls"))
    doubtful = of_token.join(ranks, on="token").filter(is_doubtful | scatters, pl.col("ranks") <= _MAX_RANKS)
    return sorted(doubtful["token"].to_list())


def _by_instance(calls: pl.DataFrame) -> tuple[list[int], _Floats, _Floats]:
    """Return the ranks, and the starts and ends of their calls, shape (instances, ranks); NaN for no call."""
    ranks, rank = np.unique(calls["rank"].to_numpy(), return_inverse=True)
    _, instance = np.unique(calls["instance"].to_numpy(), return_inverse=True)
    origin_ns = calls["start_ns"].min()
    times = []
    for column in ("start_ns", "end_ns"):
        table = np.full((int(instance.max()) + 1, len(ranks)), np.nan)
        table[instance, rank] = (calls[column] - origin_ns).to_numpy()
        times.append(table)
    step = -(-times[0].size * len(ranks) // _MAX_CELLS)
    return ranks.tolist(), times[0][::step], times[1][::step]


def _rarely_meet(start_ns: _Floats, end_ns: _Floats) -> _Flags:
    """Mark each two ranks that share less than half of the instances of the time that both recorded."""
    is_there = np.isfinite(end_ns)
    common = is_there.T.astype(np.int64) @ is_there.astype(np.int64)
    first_ns, last_ns = np.nanmin(start_ns, axis=0), np.nanmax(end_ns, axis=0)
    within = (start_ns[:, :, None] >= first_ns[None, None, :]) & (end_ns[:, :, None] <= last_ns[None, None, :])
    calls = within.sum(axis=0)  # of the first rank, while the second recorded
    call_count = np.minimum(calls, calls.T)
    return np.asarray((call_count >= _MIN_CALLS) & (common < _MIN_SHARE * call_count))


def _scatter(offset_ns: list[int], end_ns: _Floats) -> _Flags:
    """Mark each two ranks, of clocks that their calls shifted, whose ends scatter."""
    shift_ns = np.abs(np.subtract.outer(offset_ns, offset_ns))
    if shift_ns.max() <= _MIN_SHIFT_NS:
        return np.zeros(shift_ns.shape, np.bool_)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a median of nothing
        late_ns = end_ns[:, :, None] - end_ns[:, None, :]
        scatter_ns = np.nanmedian(np.abs(late_ns - np.nanmedian(late_ns, axis=0)), axis=0)
    has_enough = np.isfinite(late_ns).sum(axis=0) >= _MIN_SCATTERED
    others_ns = np.where(has_enough & ~np.eye(len(offset_ns), dtype=np.bool_), scatter_ns, np.inf)
    nearest_ns = others_ns.min(axis=0)
    usual_ns = np.maximum(nearest_ns[:, None], nearest_ns[None, :])
    is_wide = scatter_ns > np.maximum(_MIN_SCATTER * usual_ns, _MIN_SCATTER_NS)
    return np.asarray(has_enough & is_wide & (shift_ns > _MIN_SHIFT_NS))


def _nearest_groups(is_apart: _Flags, distance_ns: _Floats) -> list[list[int]]:
    """Return groups in which no two are apart: those whose calls end nearest to each other are joined first."""
    group_of = [[index] for index in range(len(is_apart))]
    for first, second in sorted(combinations(range(len(is_apart)), 2), key=lambda pair: distance_ns[pair]):
        near, far = group_of[first], group_of[second]
        if near is not far and np.isfinite(distance_ns[first, second]) and not is_apart[np.ix_(near, far)].any():
            near.extend(far)
            for rank in far:
                group_of[rank] = near
    return [sorted(group) for index, group in enumerate(group_of) if index == min(group)]
