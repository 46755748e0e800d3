"""Odd values in a recording: events that a few wrong numbers put at impossible times, or that were written twice.

Each is left out and counted, so that the rest is judged as if it were not there. Every check is one that recordings of
PyTorch, HTA, Megatron and Nsight Systems pass without a single event: values that could be right stay.
"""

import bisect
import functools
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.ingest.readers.normalize import name_patterns
from tracekit.ingest.readers.normalize.event_categories import HOST_KINDS
from tracekit.ingest.readers.normalize.host_slices import Host, first_of
from tracekit.model import nesting
from tracekit.model.nesting import Flags, Ints

_LEAST_DISTANCE_NS = 1_000_000_000
"""Less is a pause of the program: loading kernels or compiling takes seconds."""
_FAR_SPANS = 100
"""Times the length of the recording between it and an event that does not belong to it."""
_FEW_RATIO = 0.01
"""Share of all events below which those at another time are odd, whatever they look like."""
_MOST_RATIO = 0.5
"""From this share on nothing says which of the times are right."""
_LEAST_DISORDER_NS = 50_000
"""Times of devices are converted to the host's clock: 17 µs of error occur in traces of V100s."""
_MOST_DISORDER_RATIO = 0.25
"""Share of launched work from which on calls have the numbers of other work."""
_LEAST_SWALLOWED = 3
"""Activities of a stream within another one. In recordings of H100s, kernels that overlap the next one's start occur,
kernels that contain two do not."""
_LONG_TIMES = 10
"""Times the longest duration that the same work has elsewhere."""
_MOST_LONG_RATIO = 0.25
"""Share of a stream's activities that contain others from which on the stream runs several at once."""
_MOST_AT_ONCE = 10
"""Activities that a stream runs at once in the mean: one in recordings, a few where a tool has merged streams."""
_LEAST_CROSSINGS = 3
"""Pairs of slices of a thread of which the later one ends last, by which durations of a kind are wrong: operators have
none in recordings."""
_LEAST_OVERLAP_NS = 10_000
"""Times may be rounded to whole µs."""
_DEEP_RATIO = 0.1
"""Share of the shorter one of two annotations from which on they cross: one ends up to 100 µs after the next begins."""
_CROSSING_RATIOS = {"cpu_op": 0.02, "annotation": 0.2}
"""Share of the overlapping slices of a kind on a thread that may cross: programs close spans in any order."""
_LONGEST_NS = 86_400 * 10**9
"""No slice takes a day and a thousand times the rest of its recording."""
_LONGEST_SPANS = 1000
_MOST_CROSSING_RATIO = 0.1
"""Slices of threads nest; of slices with scaled or random times a third do not."""
_FOREIGN_CHILDREN, _FOREIGN_RATIO = 3, 0.1
"""Distinct operators within another one that few of its calls contain, and that stand next to such calls elsewhere."""
_WORK = len(HOST_KINDS)
"""Number of a kind for all of the device's activities."""
_KIND = {kind: index for index, kind in enumerate(HOST_KINDS)}


@dataclass(frozen=True)
class Overlong:
    """An event whose duration cannot be right."""

    name: str
    dur_ns: int


@dataclass
class OddValues:
    """What was left out of a trace."""

    bad_times: int = 0
    """Events whose time or duration is no number, or negative."""
    distant: int = 0
    """Events far before or after all others."""
    out_of_order: int = 0
    """Device activities at a time that contradicts the order in which their stream was given work."""
    overlong: list[Overlong] = field(default_factory=list)
    duplicates: int = 0
    """Events that the file has before."""
    unplaced: int = 0
    """Events of the allocator that state no device."""


@dataclass(frozen=True)
class Slices:
    """Slices of the host and of the device with usable times, on the run's clock; row is their place in the file."""

    host: pl.DataFrame
    device: pl.DataFrame

    def without(self, host_flags: Flags, device_flags: Flags) -> "Slices":
        """Slices without those that are flagged."""
        frames = (
            frame.filter(pl.Series(~flags)) if flags.any() else frame
            for frame, flags in ((self.host, host_flags), (self.device, device_flags))
        )
        return Slices(*frames)

    @property
    def start_ns(self) -> Ints:
        """Starts of all, those of the host first."""
        return np.concatenate([frame["start_ns"].to_numpy() for frame in (self.host, self.device)])

    @property
    def dur_ns(self) -> Ints:
        """Durations of all, those of the host first."""
        return np.concatenate([frame["dur_ns"].to_numpy() for frame in (self.host, self.device)])


def without_odd_values(slices: Slices, names: pl.Series, odd: OddValues) -> Slices:
    """Return the slices without odd ones, which are counted in `odd`."""
    slices = _without_repeated(slices, odd)
    slices = _without_distant(slices, odd)
    slices = _without_absurd(slices, names, odd)
    slices = _without_crossing_calls(slices, names, odd)
    slices = _in_launch_order(slices, odd)
    return _without_overlong_work(slices, names, odd)


def within_recording(frame: pl.DataFrame, at_ns: Ints, slices: Slices, odd: OddValues) -> pl.DataFrame:
    """Return events of other kinds, at `at_ns`, without those far before or after all slices."""
    start_ns = slices.start_ns
    if frame.is_empty() or not len(start_ns):
        return frame
    begin_ns, end_ns = int(start_ns.min()), int((start_ns + slices.dur_ns).max())
    least_ns = max(_LEAST_DISTANCE_NS, _FAR_SPANS * (end_ns - begin_ns))
    is_far = (at_ns < begin_ns - least_ns) | (at_ns > end_ns + least_ns)
    if not is_far.any() or is_far.mean() >= _MOST_RATIO:
        return frame
    odd.distant += int(is_far.sum())
    return frame.filter(pl.Series(~is_far))


# Events that are written twice --------------------------------------------------------------------------------------


def _without_repeated(slices: Slices, odd: OddValues) -> Slices:
    host_flags = _is_repetition(slices.host) | _aliases(slices.host)
    device_flags = _is_repetition(slices.device)
    odd.duplicates += int(host_flags.sum()) + int(device_flags.sum())
    return slices.without(host_flags, device_flags)


def _is_repetition(frame: pl.DataFrame) -> Flags:
    """Flag slices with the identity and times of an earlier one. Those without ids count only if others are repeated.

    Equal calls of Python at one instant may be a recursion, unless all of a file is repeated.
    """
    if not frame["start_ns"].is_duplicated().any():
        return np.zeros(frame.height, bool)
    identity = ["name", "kind", "lane", "start_ns", "dur_ns", "correlation", "external_id"]
    identity += [name for name in ("device", "stream", "sequence", "rank") if name in frame.columns]
    is_again = frame.select(~pl.struct(identity).is_first_distinct()).to_series().to_numpy()
    has_id = frame.select((pl.col("correlation") > 0) | (pl.col("external_id") > 0)).to_series().to_numpy()
    if not (is_again & has_id).any():
        return np.zeros(frame.height, bool)
    return np.asarray(is_again & (has_id | (frame["dur_ns"].to_numpy() > 0)))


def _aliases(host: pl.DataFrame) -> Flags:
    """Flag calls of the device's runtime within another one of the same number: one call under two names.

    Nsight Systems exports cudaMemcpy and cudaMemcpy_v3020 of one call.
    """
    flags = np.zeros(host.height, bool)
    places = np.flatnonzero((host["kind"].to_numpy() == _KIND["runtime"]) & (host["correlation"].to_numpy() > 0))
    number = host["correlation"].to_numpy()[places]
    if len(np.unique(number)) == len(number):
        return flags
    start, lane = host["start_ns"].to_numpy()[places], host["lane"].to_numpy()[places].astype(np.int64)
    end = start + host["dur_ns"].to_numpy()[places]
    # In a file of several ranks, each has numbers of its own.
    rank = host["rank"].fill_null(-1).to_numpy()[places] if "rank" in host.columns else np.zeros(len(places), np.int64)
    order = np.lexsort((-end, start, lane, rank, number))
    keys = np.stack([number, rank, lane])[:, order]
    start, end = start[order], end[order]
    is_inside = (keys[:, 1:] == keys[:, :-1]).all(axis=0) & (start[1:] <= end[:-1])
    flags[places[order[1:][is_inside]]] = True
    return flags


# Times --------------------------------------------------------------------------------------------------------------


def _without_distant(slices: Slices, odd: OddValues) -> Slices:
    """Leave out slices far before or after most others, unless they are a window of their own."""
    start, dur, hosts = slices.start_ns, slices.dur_ns, slices.host.height
    clusters = _clusters(start, dur)
    if clusters is None:
        return slices
    cluster, counts, begins, ends = clusters

    def part(which: int) -> Slices:
        return slices.without(cluster[:hosts] != which, cluster[hosts:] != which)

    launched_with = _launches_by_cluster(slices, cluster, len(counts))
    by_size = np.argsort(-(launched_with if launched_with.any() else counts), kind="stable").tolist()
    core = next((which for which in by_size if launched_with.any() or _is_window(part(which))), by_size[0])
    least_ns = max(_LEAST_DISTANCE_NS, _FAR_SPANS * int(ends[core] - begins[core]))
    is_far = np.maximum(begins[core] - ends, begins - ends[core]) > least_ns
    for which in np.flatnonzero(is_far & (counts >= _FEW_RATIO * len(start))).tolist():
        rows = part(which)
        lacks_work = any(
            not whole.is_empty() and of_part.is_empty()
            for whole, of_part in ((slices.device, rows.device), (_operators(slices), _operators(rows)))
        )
        is_far[which] = lacks_work or not _is_window(rows)
    is_far |= _is_apart(slices, cluster, core)
    far = is_far[cluster]
    # Work at the time of its calls, or slices that nest, say which times are right, even if other events are more.
    is_decided = not far[hosts:].any() if launched_with.any() else core != by_size[0]
    if far.sum() >= _MOST_RATIO * len(start) and not is_decided:
        return slices
    odd.distant += int(far.sum())
    return slices.without(far[:hosts], far[hosts:])


def _is_apart(slices: Slices, cluster: Ints, core: int) -> Flags:
    """Flag clusters of kinds of which the core has none, or of calls whose work is in the core: they belong into it."""
    kind = np.concatenate([slices.host["kind"].to_numpy(), np.full(slices.device.height, _WORK)])
    counts = np.zeros((int(cluster.max()) + 1, _WORK + 1), np.int64)
    np.add.at(counts, (cluster, kind), 1)
    is_whole = ((counts == 0) | (counts == counts.sum(axis=0))).all(axis=1)
    is_apart = is_whole & ~((counts > 0) & (counts[core] > 0)).any(axis=1)
    calls, hosts = np.flatnonzero(slices.host["kind"].to_numpy() == _KIND["runtime"]), slices.host.height
    number = slices.host["correlation"].to_numpy()[calls]
    work = first_of(slices.device["correlation"].to_numpy(), number)
    launching = work >= 0
    in_core = cluster[hosts:][work[launching]] == core
    launches, launches_into_core = (
        np.bincount(cluster[calls[launching]], weights, len(counts)) for weights in (None, in_core)
    )
    is_only_calls = counts[:, _KIND["runtime"]] == counts.sum(axis=1)
    is_apart |= is_only_calls & (launches > 0) & (launches_into_core == launches)
    is_apart[core] = False
    return np.asarray(is_apart & (counts.sum(axis=1) >= _LEAST_CROSSINGS))


def _launches_by_cluster(slices: Slices, cluster: Ints, cluster_count: int) -> Ints:
    """Number of device activities in each cluster whose call is in it, too."""
    host = slices.host
    is_call = host["kind"].to_numpy() == _KIND["runtime"]
    of_host, of_device = cluster[: host.height], cluster[host.height :]
    call = first_of(host["correlation"].to_numpy()[is_call], slices.device["correlation"].to_numpy())
    launched = np.flatnonzero(call >= 0)
    together = of_device[launched] == of_host[is_call][call[launched]]
    return np.bincount(of_device[launched[together]], minlength=cluster_count)


def _clusters(start: Ints, dur: Ints) -> tuple[Ints, Ints, Ints, Ints] | None:
    """Cluster of each slice between long gaps in which no slice runs, size, begin and end of each; None for only one.

    A duration longer than all of the recording's starts are apart closes no gap.
    """
    if not _has_pause(start):
        return None
    order = np.argsort(start, kind="stable")
    begin = start[order]
    middle = begin[[len(begin) // 10, len(begin) - 1 - len(begin) // 10]]
    longest_ns = max(_LONGEST_NS, _LONGEST_SPANS * int(middle[1] - middle[0]))
    reach = np.maximum.accumulate(begin + np.where(dur[order] > longest_ns, 0, dur[order]))
    is_gap = begin[1:] - reach[:-1] > _LEAST_DISTANCE_NS
    if not is_gap.any():
        return None
    number = np.concatenate([[0], np.cumsum(is_gap)])
    cluster = np.empty(len(start), np.int64)
    cluster[order] = number
    first = np.concatenate([[0], np.flatnonzero(is_gap) + 1])
    last = np.concatenate([np.flatnonzero(is_gap), [len(begin) - 1]])
    return cluster, np.bincount(number), begin[first], reach[last]


def _has_pause(start: Ints) -> bool:
    """Return whether starts may be far apart, without sorting them."""
    if not len(start) or start.max() - start.min() <= _LEAST_DISTANCE_NS:
        return False
    halves = np.unique((start - start.min()) // (_LEAST_DISTANCE_NS // 2))
    return bool((np.diff(halves) > 1).any())


def _operators(slices: Slices) -> pl.DataFrame:
    return slices.host.filter(pl.col("kind") == _KIND["cpu_op"])


def _is_window(slices: Slices) -> bool:
    """Return whether slices are a recording by themselves: work with its calls, slices that nest, no instant."""
    host, device = slices.host, slices.device
    start = slices.start_ns
    if len(np.unique(start)) <= _MOST_RATIO * len(start):
        return False
    calls = host.filter(pl.col("kind") == _KIND["runtime"])["correlation"].to_numpy()
    launched = device.filter(pl.col("correlation") > 0)["correlation"].to_numpy()
    if len(launched) and np.isin(launched, calls).mean() < _MOST_RATIO:
        return False
    if host.height < 2:
        return not len(launched)
    lane, start, dur = (host[name].to_numpy().astype(np.int64) for name in ("lane", "start_ns", "dur_ns"))
    return bool(_crossings(lane, start, dur, _DEEP_RATIO, 0)[1].sum() < _MOST_CROSSING_RATIO * host.height)


def _in_launch_order(slices: Slices, odd: OddValues) -> Slices:
    """Leave out device activities whose time contradicts their launch: work of a stream runs in the order of its calls.

    An activity begins after its call, and after all that was put on its stream by calls that had returned before. The
    fewest activities that contradict are left out, unless they are so many that clocks or numbers of calls are wrong.
    """
    host, device = slices.host, slices.device
    is_call = host["kind"].to_numpy() == _KIND["runtime"]
    call = first_of(host["correlation"].to_numpy()[is_call], device["correlation"].to_numpy())
    launched = np.flatnonzero(call >= 0)
    if not len(launched):
        return slices
    call_ns = host["start_ns"].to_numpy()[is_call][call[launched]]
    returned_ns = call_ns + host["dur_ns"].to_numpy()[is_call][call[launched]]
    start_ns, stream = device["start_ns"].to_numpy()[launched], _streams(device)[launched]
    is_early = call_ns - start_ns > _LEAST_DISORDER_NS
    # A clock that differs keeps the order, and differs for many.
    wrong = is_early & (is_early.mean() <= _FEW_RATIO)
    order = np.lexsort((start_ns, call_ns, stream))
    order = order[~wrong[order]]
    falls = (stream[order[1:]] == stream[order[:-1]]) & (np.diff(start_ns[order]) < -_LEAST_DISORDER_NS)
    for which in np.unique(stream[order[1:]][falls]):
        rows = order[stream[order] == which]
        wrong[rows] = _contradicts(start_ns[rows], call_ns[rows], returned_ns[rows])
    if wrong.sum() > _MOST_DISORDER_RATIO * len(launched):
        return slices
    odd.out_of_order += int(wrong.sum())
    flags = np.zeros(device.height, bool)
    flags[launched[wrong]] = True
    return slices.without(np.zeros(host.height, bool), flags)


def _streams(device: pl.DataFrame) -> Ints:
    """Number of the stream of each activity; where none is named, its thread is one."""
    columns = ("device", "stream", "lane")
    keys = device.select(pl.struct(columns).rank("dense").cast(pl.Int64) if device.height else pl.lit(0)).to_series()
    return keys.to_numpy()


def _contradicts(start: Ints, call: Ints, returned: Ints) -> Flags:
    """Flag the fewest activities of a stream, by call, without which starts rise; calls that overlap have no order."""
    rises = np.zeros(len(start), bool)
    rises[_longest_rise(start)] = True
    latest_before = np.maximum.accumulate(np.where(rises, start, np.iinfo(np.int64).min))
    earliest_after = np.minimum.accumulate(np.where(rises, start, np.iinfo(np.int64).max)[::-1])[::-1]
    # Calls that began after this one returned, and those that had returned when it began.
    later = np.searchsorted(call, returned, side="right")
    earlier = np.searchsorted(np.maximum.accumulate(returned), call, side="right")
    after_ns = np.append(earliest_after, np.iinfo(np.int64).max)[later]
    before_ns = np.append(np.iinfo(np.int64).min, latest_before)[earlier]
    is_late = after_ns < start - _LEAST_DISORDER_NS
    is_early = before_ns > start + _LEAST_DISORDER_NS
    return np.asarray(~rises & (is_late | is_early))


def _longest_rise(values: Ints) -> Ints:
    """Indices of a longest sequence of values that do not fall.

    >>> _longest_rise(np.array([1, 9, 2, 3, 0, 4])).tolist()
    [0, 2, 3, 5]
    """
    tails: list[int] = []
    at: list[int] = []
    before = np.full(len(values), -1, np.int64)
    for index, value in enumerate(values.tolist()):
        place = bisect.bisect_right(tails, value)
        before[index] = at[place - 1] if place else -1
        tails[place : place + 1] = [value]
        at[place : place + 1] = [index]
    chain = []
    index = at[-1] if at else -1
    while index >= 0:
        chain.append(index)
        index = int(before[index])
    return np.array(chain[::-1], np.int64)


# Durations ----------------------------------------------------------------------------------------------------------


def _without_absurd(slices: Slices, names: pl.Series, odd: OddValues) -> Slices:
    """Leave out slices of days within a recording that is a thousand times shorter."""
    start, dur, hosts = slices.start_ns, slices.dur_ns, slices.host.height
    if not len(dur) or dur.max() <= _LONGEST_NS:
        return slices
    is_absurd = dur > max(_LONGEST_NS, _LONGEST_SPANS * int(start.max() - start.min()))
    return _without_overlong(slices, is_absurd[:hosts], is_absurd[hosts:], names, odd)


def _without_overlong_work(slices: Slices, names: pl.Series, odd: OddValues) -> Slices:
    """Leave out activities that contain several later ones of their stream, which runs one thing at a time.

    Only where the same kernel is at least ten times shorter elsewhere, or else all other work of the stream: streams of
    some devices, and those that a tool merged, run several at once.
    """
    device = slices.device
    if device.height <= _LEAST_SWALLOWED:
        return slices
    start, dur, name = (device[column].to_numpy().astype(np.int64) for column in ("start_ns", "dur_ns", "name"))
    stream = _streams(device)
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


def _without_crossing_calls(slices: Slices, names: pl.Series, odd: OddValues) -> Slices:
    """Leave out all slices of a kind if most are on threads where they cross rather than nest.

    Calls of the runtime have a clock of their own in recordings of 2021: only those of which ten run at once are wrong.
    """
    columns = slices.host.select(pl.col("lane", "start_ns", "dur_ns", "kind", "name").cast(pl.Int64))
    lane, start, dur, kind, name = (columns[column].to_numpy() for column in columns.columns)
    flags = np.zeros(len(kind), bool)
    calls = np.flatnonzero(kind == _KIND["runtime"])
    flags[calls] = _is_crowded(lane[calls], start[calls], dur[calls])
    for kind_name, most_ratio in _CROSSING_RATIOS.items():
        rows = np.flatnonzero(kind == _KIND[kind_name])
        deep_ratio = _DEEP_RATIO if kind_name == "annotation" else 0.0
        if _crossings(lane[rows], start[rows], dur[rows], deep_ratio)[1].sum() < _LEAST_CROSSINGS:
            continue
        named = name_patterns.host_names(names)
        steps = rows[named.step.is_not_null().to_numpy()[name[rows]]]
        if kind_name == "annotation" and not _crossings(lane[steps], start[steps], dur[steps], deep_ratio)[1].any():
            continue  # Lightning's callbacks close spans in any order, but no step ends after the next one begins
        rows = rows[~named.runs_collective[name[rows]]]
        lane_of, start_of, dur_of = lane[rows], start[rows], dur[rows]
        order, crosses, overlaps = _crossings(lane_of, start_of, dur_of, deep_ratio)
        around = order[:-1]
        lanes = int(lane_of.max(initial=0)) + 1
        crossing, overlapping = (np.bincount(lane_of[around[pairs]], minlength=lanes) for pairs in (crosses, overlaps))
        least = np.full(lanes, np.iinfo(np.int64).max)
        np.minimum.at(least, lane_of[around[crosses]], dur_of[around[crosses]])
        is_wrong = (crossing >= _LEAST_CROSSINGS) & (crossing > most_ratio * overlapping)
        is_long = is_wrong[lane_of] & (dur_of >= least[lane_of])
        # Single ones are found by other calls of their name. The rest may be on other threads, or collectives.
        if is_long.mean() >= _MOST_RATIO:
            flags |= (kind == _KIND[kind_name]) & (dur >= dur_of[is_long].min())
    return _without_overlong(slices, flags, np.zeros(slices.device.height, bool), names, odd)


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


def _crossings(
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


def _swallows(lane: Ints, start: Ints, dur: Ints) -> Flags:
    """Flag the rows, sorted by lane and start, that contain the starts of several later ones of their lane."""
    flags = np.zeros(len(lane), bool)
    flags[:-_LEAST_SWALLOWED] = (lane[_LEAST_SWALLOWED:] == lane[:-_LEAST_SWALLOWED]) & (
        (start + dur)[:-_LEAST_SWALLOWED] > start[_LEAST_SWALLOWED:]
    )
    return flags


def overlong_calls(host: Host, work_end_ns: int) -> Flags:
    """Flag host slices whose duration contradicts others, and is ten times that of the same call elsewhere.

    They end after the slice in which they began, and contain what follows on the thread: slices of a thread nest. They
    contain operators that stand next to such a call elsewhere, and in no other one. Or they contain all that follows on
    the thread, and end long after all others and the device's work (`work_end_ns`).
    """
    flags = np.zeros(len(host.row), bool)
    times = _times_as_long(host)
    late, crossing = _leaving(host), _worse_of_crossing(host, times)
    lasting = np.flatnonzero(host.end_ns > host.start_ns.max()) if len(flags) else late
    # The profiler closes what is open when it stops, such as an annotation around the hook that stops it.
    late = np.union1d(np.setdiff1d(late, lasting), _swallowing_operators(host, times))
    lasting = lasting[~host.is_kind("annotation")[lasting]]
    candidates = functools.reduce(np.union1d, (late, lasting, crossing))
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
    flags[np.union1d(late, lasting)] = True
    flags &= is_long
    flags[crossing] = True
    return flags


def _leaving(host: Host) -> Ints:
    """Host slices that end after one in which they began, and contain what follows that one on the thread.

    What need not nest: calls of Python, whose ends are not exact; calls of the runtime, which have a clock of their own
    in recordings of 2021; and collectives of gloo, which end when their data has arrived.
    """
    late, around = host.crossings
    nests = (host.is_kind("cpu_op") | host.is_kind("annotation")) & ~host.names.runs_collective[host.name_id]
    is_certain = nests[around] & (nests | host.is_kind("runtime"))[late]
    late, around = late[is_certain], around[is_certain]
    if not len(late):
        return late
    lane_end = np.cumsum(np.bincount(host.lane))
    # The next slice of the thread after the end of the enclosing one.
    following = np.array([
        place + np.searchsorted(host.start_ns[place : lane_end[host.lane[place]]], end_ns)
        for place, end_ns in zip(late.tolist(), host.end_ns[around].tolist(), strict=True)
    ], np.int64)  # fmt: skip
    inside = np.minimum(following, len(host.row) - 1)
    contains = (following < len(host.row)) & (host.lane[inside] == host.lane[late])
    return np.unique(late[contains & (host.start_ns[inside] < host.end_ns[late])])


def _times_as_long(host: Host) -> npt.NDArray[np.float64]:
    """Duration of each slice as a multiple of the median of its name."""
    frame = pl.DataFrame({"name": host.name_id, "dur_ns": host.end_ns - host.start_ns})
    usual_ns = pl.col("dur_ns").median().over("name").clip(lower_bound=1)
    return frame.select(pl.col("dur_ns") / usual_ns).to_series().to_numpy()


def _worse_of_crossing(host: Host, times: npt.NDArray[np.float64]) -> Ints:
    """Of operators that cross each other or annotations, the slices that last more `times` as long as usual.

    One of two that cross has a wrong time; the calls of one operator may differ by more than ten times.
    """
    late, around = host.crossings
    is_op = host.is_kind("cpu_op")
    nests = (is_op | host.is_kind("annotation")) & ~host.names.runs_collective[host.name_id]
    is_certain = nests[late] & nests[around] & (is_op[late] | is_op[around])
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


def without_calls(slices: pl.DataFrame, host: Host, flags: Flags, odd: OddValues) -> pl.DataFrame:
    """Return slices without those of the host that are flagged, which are counted in `odd`."""
    dur_ns = (host.end_ns - host.start_ns)[flags].tolist()
    odd.overlong += map(Overlong, host.names.name.gather(host.name_id[flags]).to_list(), dur_ns)
    return slices.filter(~pl.col("row").is_in(host.row[flags].tolist()))


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
