"""Events whose duration cannot be right: they contain, or cross, what runs before or after them."""

import functools

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.ingest.readers.normalize import name_patterns
from tracekit.ingest.readers.normalize.host_slices import Host, first_of
from tracekit.ingest.readers.normalize.odd_slices import (
    KIND,
    LEAST_CROSSINGS,
    LEAST_DISORDER_NS,
    LONGEST_NS,
    LONGEST_SPANS,
    MOST_RATIO,
    OddValues,
    Overlong,
    Slices,
    streams,
)
from tracekit.model import nesting
from tracekit.model.nesting import Flags, Ints

_LEAST_SWALLOWED = 3
"""Activities of a stream within another one. In recordings of H100s, kernels that overlap the next one's start occur,
kernels that contain two do not."""
_LONG_TIMES = 10
"""Times the longest duration that the same work has elsewhere."""
_MOST_LONG_RATIO = 0.25
"""Share of a stream's activities that contain others from which on the stream runs several at once."""
_MOST_AT_ONCE = 10
"""Activities that a stream runs at once in the mean: one in recordings, a few where a tool has merged streams."""
_DEVICE_WAIT = r"^(cuda|hip)DeviceSynchronize$|^cuCtxSynchronize$"
"""Calls that return when all work of the device that was launched before has ended."""
_MOST_UNAWAITED_RATIO, _FEW_UNAWAITED = 0.01, 3
"""Share of a device's activities from which on its clock differs from the host's; of short recordings, so many."""
_LEAST_OUTLASTING_NS = 1_000_000
"""In 35 recordings no slice of the host ends after the profiler stopped; clocks may be rounded."""
_LEAST_OVERLAP_NS = 10_000
"""Times may be rounded to whole µs."""
_ROUNDING_NS = 1_000
"""By so much a slice may end after the one around it where starts and durations are whole µs."""
DEEP_RATIO = 0.1
"""Share of the shorter one of two annotations from which on they cross: one ends up to 100 µs after the next begins."""
_LEAST_STEP_OVERLAP_NS = 1_000_000
"""Steps follow each other; in recordings one ends up to 100 µs after the next begins."""
_CROSSING_RATIOS = {"cpu_op": 0.02, "annotation": 0.2}
"""Share of the overlapping slices of a kind on a thread that may cross: programs close spans in any order."""
_MESSAGE = r"(?i):i?(send|recv)"
"""Slices of a backend that wait for one peer, such as gloo:recv."""
_FOREIGN_CHILDREN, _FOREIGN_RATIO = 3, 0.1
"""Distinct operators within another one that few of its calls contain, and that stand next to such calls elsewhere."""


def without_absurd(slices: Slices, names: pl.Series, odd: OddValues) -> Slices:
    """Leave out slices of days within a recording that is a thousand times shorter."""
    start, dur, hosts = slices.start_ns, slices.dur_ns, slices.host.height
    if not len(dur) or dur.max() <= LONGEST_NS:
        return slices
    is_absurd = dur > max(LONGEST_NS, LONGEST_SPANS * int(start.max() - start.min()))
    return _without_overlong(slices, is_absurd[:hosts], is_absurd[hosts:], names, odd)


def without_instants(slices: Slices, odd: OddValues) -> Slices:
    """Leave out all work of the devices if most of it takes no time: then its durations were not recorded.

    Clocks of whole µs round few kernels down to nothing, 7% in a recording of a V100.
    """
    device = slices.device
    instants = device.filter(dur_ns=0).height
    if device.height < LEAST_CROSSINGS or instants < MOST_RATIO * device.height:
        return slices
    odd.instant_work = instants
    return slices.without(np.zeros(slices.host.height, bool), np.ones(device.height, bool))


def without_outlasting(slices: Slices, names: pl.Series, odd: OddValues, recorded_until_ns: int | None) -> Slices:
    """Leave out slices of the host that end long after the profiler stopped, when it ends all that is open.

    Long is longer than it recorded: on demand it stops at a set time, and collects what ends soon after. Unless many
    do: then the clock of that moment is another one.
    """
    host = slices.host
    if host.is_empty() or recorded_until_ns is None:
        return slices
    recorded_ns = recorded_until_ns - int(slices.start_ns.min())
    late_ns = (host["start_ns"] + host["dur_ns"]).to_numpy() - recorded_until_ns
    is_late = late_ns > max(recorded_ns, _LEAST_OUTLASTING_NS)
    if not is_late.any() or is_late.sum() > max(_MOST_UNAWAITED_RATIO * len(is_late), _FEW_UNAWAITED):
        return slices
    return _without_overlong(slices, is_late, np.zeros(slices.device.height, bool), names, odd)


def without_overlong_work(slices: Slices, names: pl.Series, odd: OddValues) -> Slices:
    """Leave out activities that contain several later ones of their stream, which runs one thing at a time.

    Only where the same kernel is at least ten times shorter elsewhere, or else all other work of the stream: streams of
    some devices, and those that a tool merged, run several at once.
    """
    device = slices.device
    if device.height <= _LEAST_SWALLOWED:
        return slices
    start, dur, name = (device[column].to_numpy().astype(np.int64) for column in ("start_ns", "dur_ns", "name"))
    stream = streams(device)
    order = nesting.order(stream, start, start + dur)
    stream, start, dur, name = stream[order], start[order], dur[order], name[order]
    swallows = _swallows(stream, start, dur)
    if not swallows.any():
        return slices
    kernel_ns, stream_ns = (_longest_by(keys, dur, ~swallows) for keys in (np.stack([stream, name]), stream[None]))
    swallowing_ratio = (np.bincount(stream, swallows) / np.maximum(np.bincount(stream), 1))[stream]
    is_odd = swallows & (dur > _LONG_TIMES * np.where(kernel_ns >= 0, kernel_ns, stream_ns))
    is_odd &= (swallowing_ratio <= _MOST_LONG_RATIO) | _is_crowded(stream, start, dur)
    flags = np.zeros(len(order), bool)
    flags[order] = is_odd
    flags[order[~is_odd]] = _is_crowded(stream[~is_odd], start[~is_odd], dur[~is_odd])
    return _without_overlong(slices, np.zeros(slices.host.height, bool), flags, names, odd)


def without_unawaited_work(slices: Slices, names: pl.Series, odd: OddValues) -> Slices:
    """Leave out activities that last on after a call that waits for all of the device has returned.

    Or, where no such call follows, that last on after all else for longer than the rest of the recording takes: the
    host records until the profiler stops, and what has not ended then is not recorded. Only single ones that are ten
    times longer than the same kernel, or else all other work, is elsewhere: clocks of host and device may differ.
    """
    host, device = slices.host, slices.device
    if host.is_empty() or device.height < 2:
        return slices
    start, dur, name = (device[column].to_numpy().astype(np.int64) for column in ("start_ns", "dur_ns", "name"))
    end = start + dur
    is_late = end > _awaited_until(host, device, names)
    latest = int(np.argmax(end))
    others_ns = np.concatenate([np.delete(end, latest), host.select(pl.col("start_ns") + pl.col("dur_ns")).to_series()])
    begin_ns = int(slices.start_ns.min())
    is_late[latest] |= end[latest] - others_ns.max() > max(others_ns.max() - begin_ns, _LEAST_OVERLAP_NS)
    if not is_late.any() or is_late.sum() > max(_MOST_UNAWAITED_RATIO * len(is_late), _FEW_UNAWAITED):
        return slices
    kernel_ns, device_ns = _longest_by(name[None], dur, ~is_late), int(dur[~is_late].max(initial=0))
    flags = is_late & (dur > _LONG_TIMES * np.where(kernel_ns >= 0, kernel_ns, device_ns))
    return _without_overlong(slices, np.zeros(host.height, bool), flags, names, odd)


def _awaited_until(host: pl.DataFrame, device: pl.DataFrame, names: pl.Series) -> Ints:
    """When the first call returned that waits for all of the device after the launch of each activity; never: 2^63.

    Of several devices the call waits for one that it does not state.
    """
    never = np.iinfo(np.int64).max
    is_call = (host["kind"] == KIND["runtime"]).to_numpy()
    waits_for_all = is_call & names.str.contains(_DEVICE_WAIT).to_numpy()[host["name"].to_numpy()]
    if not waits_for_all.any() or device["device"].n_unique() > 1:
        return np.full(device.height, never)
    waits = host.filter(pl.Series(waits_for_all)).sort("start_ns")
    calls = host.filter(pl.Series(is_call))
    call = first_of(calls["correlation"].to_numpy(), device["correlation"].to_numpy())
    launched_ns = np.where(
        call >= 0, (calls["start_ns"] + calls["dur_ns"]).to_numpy()[np.maximum(call, 0)], device["start_ns"].to_numpy()
    )
    returns = (waits["start_ns"] + waits["dur_ns"]).to_numpy() + LEAST_DISORDER_NS
    earliest = np.append(np.minimum.accumulate(returns[::-1])[::-1], never)
    return np.asarray(earliest[np.searchsorted(waits["start_ns"].to_numpy(), launched_ns)])


def without_crossing_calls(slices: Slices, names: pl.Series, odd: OddValues) -> Slices:
    """Leave out all slices of a kind if most are on threads where they cross rather than nest.

    Calls of the runtime have a clock of their own in recordings of 2021: only those of which ten run at once are wrong.
    """
    columns = slices.host.select(pl.col("lane", "start_ns", "dur_ns", "kind", "name").cast(pl.Int64))
    lane, start, dur, kind, name = (columns[column].to_numpy() for column in columns.columns)
    flags = np.zeros(len(kind), bool)
    calls = np.flatnonzero(kind == KIND["runtime"])
    flags[calls] = _is_crowded(lane[calls], start[calls], dur[calls])
    for kind_name, most_ratio in _CROSSING_RATIOS.items():
        rows = np.flatnonzero(kind == KIND[kind_name])
        deep_ratio = DEEP_RATIO if kind_name == "annotation" else 0.0
        if crossings(lane[rows], start[rows], dur[rows], deep_ratio)[1].sum() < LEAST_CROSSINGS:
            continue
        named = name_patterns.host_names(names)
        steps = rows[named.step.is_not_null().to_numpy()[name[rows]]]
        overlaps = crossings(lane[steps], start[steps], dur[steps], 0.0, _LEAST_STEP_OVERLAP_NS)[1]
        if kind_name == "annotation" and not overlaps.any():
            continue  # Lightning's callbacks close spans in any order, but no step ends after the next one begins
        rows = rows[~named.runs_collective[name[rows]]]
        lane_of, start_of, dur_of = lane[rows], start[rows], dur[rows]
        order, crosses, overlaps = crossings(lane_of, start_of, dur_of, deep_ratio)
        around = order[:-1]
        lanes = int(lane_of.max(initial=0)) + 1
        crossing, overlapping = (np.bincount(lane_of[around[pairs]], minlength=lanes) for pairs in (crosses, overlaps))
        least = np.full(lanes, np.iinfo(np.int64).max)
        np.minimum.at(least, lane_of[around[crosses]], dur_of[around[crosses]])
        is_wrong = (crossing >= LEAST_CROSSINGS) & (crossing > most_ratio * overlapping)
        is_long = is_wrong[lane_of] & (dur_of >= least[lane_of])
        # Single ones are found by other calls of their name. The rest may be on other threads, or collectives.
        if is_long.mean() >= MOST_RATIO:
            flags |= (kind == KIND[kind_name]) & (dur >= dur_of[is_long].min())
    return _without_overlong(slices, flags, np.zeros(slices.device.height, bool), names, odd)


def overlong_calls(host: Host, work_end_ns: int) -> Flags:
    """Flag host slices whose duration contradicts others, and is ten times that of the same call elsewhere.

    They end after the slice in which they began, and contain what follows on the thread: slices of a thread nest. They
    contain operators that stand next to such a call elsewhere, and in no other one. They are collectives of a thread of
    the backend, and contain later ones of it. Or they contain all that follows on the thread, and end long after all
    others and the device's work (`work_end_ns`).
    """
    flags = np.zeros(len(host.row), bool)
    times = _times_as_long(host)
    leaving, left = _leaving(host)
    late, crossing = np.unique(leaving), _worse_of_crossing(host, times, flags)
    lasting = np.flatnonzero(host.end_ns > host.start_ns.max()) if len(flags) else late
    # The profiler closes what is open when it stops, such as an annotation around the hook that stops it.
    late = np.setdiff1d(late, lasting)
    swallowing = np.union1d(_swallowing_operators(host, times), _swallowing_collectives(host))
    lasting = lasting[~host.is_kind("annotation")[lasting]]
    candidates = functools.reduce(np.union1d, (late, swallowing, lasting, crossing))
    if not len(candidates):
        return flags
    usual = ~flags
    usual[candidates] = False
    dur_ns = host.end_ns - host.start_ns
    longest_ns = _longest_by(host.name_id[None], dur_ns, usual)
    is_long = (longest_ns >= 0) & (dur_ns > _LONG_TIMES * np.maximum(longest_ns, 1))
    others = lasting[~is_long[lasting]]
    end_ns = max(int(host.start_ns.max()), work_end_ns, int(host.end_ns[others].max(initial=0)))
    lane_end = np.cumsum(np.bincount(host.lane))[host.lane[lasting]]
    contains = lane_end - lasting > _LEAST_SWALLOWED
    lasting = lasting[contains & (host.end_ns[lasting] - end_ns > longest_ns[lasting])]
    flags[np.union1d(swallowing, lasting)] = True
    flags &= is_long
    # What ends after a wrong end may be right. Slices come after those around them.
    is_candidate, is_worse = (np.isin(np.arange(len(flags)), places) for places in (late, crossing))
    is_candidate &= is_long
    for place, around in zip(leaving.tolist(), left.tolist(), strict=True):
        flags[place] |= is_candidate[place] and not (flags[around] or is_worse[around])
    flags[_worse_of_crossing(host, times, flags)] = True
    return flags


def without_calls(slices: pl.DataFrame, host: Host, flags: Flags, odd: OddValues) -> pl.DataFrame:
    """Return slices without those of the host that are flagged, which are counted in `odd`."""
    dur_ns = (host.end_ns - host.start_ns)[flags].tolist()
    odd.overlong += map(Overlong, host.names.name.gather(host.name_id[flags]).to_list(), dur_ns)
    return slices.filter(~pl.col("row").is_in(host.row[flags].tolist()))


def crossings(
    lane: Ints, start: Ints, dur: Ints, deep_ratio: float, least_ns: int = _LEAST_OVERLAP_NS
) -> tuple[Ints, Flags, Flags]:
    """Order by lane and start; for each slice but the last whether the next ends after it, and whether both overlap.

    Those that cross overlap by more than `deep_ratio` of the shorter one's duration.
    """
    order = nesting.order(lane, start, start + dur)
    lane_of, start_of, dur_of = lane[order], start[order], dur[order]
    end_of = start_of + dur_of
    overlap_ns = np.where(lane_of[1:] == lane_of[:-1], end_of[:-1] - start_of[1:], 0)
    crosses = (overlap_ns > deep_ratio * np.minimum(dur_of[1:], dur_of[:-1])) & (end_of[1:] > end_of[:-1])
    return order, crosses & (overlap_ns > least_ns), overlap_ns > 0


def _is_crowded(lane: Ints, start: Ints, dur: Ints) -> Flags:
    """Flag the rows of lanes on which more than ten run at once in the mean: those as long as any that swallow."""
    if not len(lane):
        return np.zeros(0, bool)
    first, last = np.full(lane.max() + 1, start.max()), np.full(lane.max() + 1, start.min())
    np.minimum.at(first, lane, start)
    np.maximum.at(last, lane, start + dur)
    at_once = np.bincount(lane, dur) / np.maximum(last - first, 1)
    order = np.lexsort((start, lane))
    swallows = _swallows(lane[order], start[order], dur[order])
    least = np.full(lane.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(least, lane[order[swallows]], dur[order[swallows]])
    return np.asarray((at_once > _MOST_AT_ONCE)[lane] & (dur >= least[lane]))


def _swallows(lane: Ints, start: Ints, dur: Ints) -> Flags:
    """Flag the rows, sorted by lane and start, that contain the starts of several later ones of their lane."""
    flags = np.zeros(len(lane), bool)
    flags[:-_LEAST_SWALLOWED] = (lane[_LEAST_SWALLOWED:] == lane[:-_LEAST_SWALLOWED]) & (
        (start + dur)[:-_LEAST_SWALLOWED] > start[_LEAST_SWALLOWED:]
    )
    return flags


def _leaving(host: Host) -> tuple[Ints, Ints]:
    """Host slices that end after one in which they began, and contain what follows that one; and the latter.

    A row of both arrays is a pair; they are sorted by the former.

    What need not nest: calls of Python, whose ends are not exact; calls of the runtime, which have a clock of their own
    in recordings of 2021; and collectives of gloo, which end when their data has arrived.
    """
    late, around = host.crossings
    nests = (host.is_kind("cpu_op") | host.is_kind("annotation")) & ~host.names.runs_collective[host.name_id]
    is_certain = nests[around] & (nests | host.is_kind("runtime"))[late]
    late, around = late[is_certain], around[is_certain]
    lane_end = np.cumsum(np.bincount(host.lane))
    # The next slice of the thread after the end of the enclosing one.
    following = np.array([
        place + np.searchsorted(host.start_ns[place : lane_end[host.lane[place]]], end_ns)
        for place, end_ns in zip(late.tolist(), host.end_ns[around].tolist(), strict=True)
    ], np.int64)  # fmt: skip
    inside = np.minimum(following, len(host.row) - 1)
    contains = (following < len(host.row)) & (host.lane[inside] == host.lane[late])
    pairs = np.flatnonzero(contains & (host.start_ns[inside] < host.end_ns[late]))
    pairs = pairs[np.argsort(late[pairs], kind="stable")]
    return late[pairs], around[pairs]


def _times_as_long(host: Host) -> npt.NDArray[np.float64]:
    """Duration of each slice as a multiple of the median of its name; 0 within a compiler.

    A compiler calls operators to trace them: then they, and dispatch modes around them, contain what it does meanwhile,
    and its spans are closed in any order.
    """
    frame = pl.DataFrame({"name": host.name_id, "dur_ns": host.end_ns - host.start_ns})
    usual_ns = pl.col("dur_ns").median().over("name").clip(lower_bound=1)
    times = frame.select(pl.col("dur_ns") / usual_ns).to_series().to_numpy()
    in_compiler = nesting.nearest(host.parent, host.names.is_compiler[host.name_id]) >= 0
    return np.where(in_compiler, 0.0, times)


def _worse_of_crossing(host: Host, times: npt.NDArray[np.float64], is_wrong: Flags) -> Ints:
    """Of operators that cross each other or annotations, the slices that last more `times` as long as usual.

    One of two that cross has a wrong time, unless one `is_wrong` anyway; the calls of one operator may differ by more
    than ten times.
    """
    late, around = host.crossings
    is_rounded = host.end_ns[late] - host.end_ns[around] <= _ROUNDING_NS
    late, around = late[~is_rounded], around[~is_rounded]
    is_op = host.is_kind("cpu_op")
    nests = (is_op | host.is_kind("annotation")) & ~host.names.runs_collective[host.name_id]
    is_certain = nests[late] & nests[around] & (is_op[late] | is_op[around]) & ~is_wrong[late] & ~is_wrong[around]
    late, around = late[is_certain], around[is_certain]
    worse = np.where(times[late] >= times[around], late, around)
    return np.unique(worse[times[worse] > _LONG_TIMES])


def _swallowing_operators(host: Host, times: npt.NDArray[np.float64]) -> Ints:
    """Long operators with several distinct ones in them that hardly any other call of theirs contains: these follow it.

    What an operator calls, it calls again; a duration that is too long contains what follows the call.
    """
    is_op = host.is_kind("cpu_op")
    is_long = is_op & (times > _LONG_TIMES)
    has_long = np.bincount(host.name_id, is_long) > 0
    inner = np.flatnonzero(is_op & (host.parent >= 0))
    inner = inner[is_op[host.parent[inner]]]
    inner = inner[has_long[host.name_id[host.parent[inner]]]]
    outer = host.parent[inner]
    if not is_long[outer].any():
        return np.empty(0, np.int64)
    # Names of parents begin with 1; 0 stands for none.
    name_count = len(host.names.name) + 1
    parent_name = np.where(host.parent >= 0, host.name_id[host.parent] + 1, 0)
    pair = host.name_id * name_count + parent_name
    as_sibling = host.name_id[inner] * name_count + parent_name[outer]
    _, number = np.unique(pair[inner], return_inverse=True)
    calls, first = np.unique(number * len(host.row) + outer, return_index=True)
    call_count = np.bincount(calls // len(host.row))[number]
    most = np.maximum(_FOREIGN_RATIO * np.bincount(host.name_id)[host.name_id[outer]], 1)
    is_foreign = (call_count <= most) & np.isin(as_sibling, pair) & is_long[outer]
    operators, foreign_count = np.unique(outer[first[is_foreign[first]]], return_counts=True)
    return operators[foreign_count >= _FOREIGN_CHILDREN]


def _swallowing_collectives(host: Host) -> Ints:
    """Collectives during which several later ones of their thread begin: a thread of a backend runs one at a time.

    Sends and receives may all wait at once.
    """
    is_collective = host.names.runs_collective & ~host.names.name.str.contains(_MESSAGE).to_numpy()
    places = np.flatnonzero(is_collective[host.name_id] & host.is_kind("annotation"))
    dur_ns = host.end_ns[places] - host.start_ns[places]
    return places[_swallows(host.lane[places], host.start_ns[places], dur_ns)]


def _longest_by(keys: Ints, dur: Ints, usual: Flags) -> Ints:
    """Longest duration of the usual rows with the same keys; -1 where there is none."""
    _, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.reshape(-1)
    longest = np.full(int(group.max()) + 1, -1, np.int64)
    np.maximum.at(longest, group[usual], dur[usual])
    return longest[group]


def _without_overlong(
    slices: Slices, host_flags: Flags, device_flags: Flags, names: pl.Series, odd: OddValues
) -> Slices:
    for frame, flags in ((slices.host, host_flags), (slices.device, device_flags)):
        rows = frame.filter(pl.Series(flags)) if flags.any() else frame.clear()
        odd.overlong += [Overlong(names[name], dur_ns) for name, dur_ns in rows.select("name", "dur_ns").iter_rows()]
    return slices.without(host_flags, device_flags)
