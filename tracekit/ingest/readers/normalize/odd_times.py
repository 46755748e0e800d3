"""Events at impossible times: far from all others, or against the order in which a stream was given its work."""

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize.event_categories import HOST_KINDS
from tracekit.ingest.readers.normalize.host_slices import first_of
from tracekit.ingest.readers.normalize.odd_durations import DEEP_RATIO, crossings
from tracekit.ingest.readers.normalize.odd_slices import (
    KIND,
    LEAST_CROSSINGS,
    LEAST_DISORDER_NS,
    LONGEST_NS,
    LONGEST_SPANS,
    MOST_RATIO,
    OddValues,
    Slices,
    streams,
)
from tracekit.model import nesting
from tracekit.model.nesting import Flags, Ints

_LEAST_DISTANCE_NS = 1_000_000_000
"""Less is a pause of the program: loading kernels or compiling takes seconds."""
_FAR_SPANS = 100
"""Times the length of the recording between it and an event that does not belong to it."""
_FEW_RATIO = 0.01
"""Share of all events below which those at another time are odd, whatever they look like."""
_MOST_DISORDER_RATIO = 0.25
"""Share of launched work from which on calls have the numbers of other work."""
_MOST_CROSSING_RATIO = 0.1
"""Slices of threads nest; of slices with scaled or random times a third do not."""
_SHIFTED_KINDS = {"cpu_op", "annotation", "python"}
"""Kinds of host slices that run throughout a recording."""
_WORK = len(HOST_KINDS)
"""Number of a kind for all of the device's activities."""


def without_distant(slices: Slices, odd: OddValues) -> Slices:
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
    if far.sum() >= MOST_RATIO * len(start) and not is_decided:
        return slices
    odd.distant += int(far.sum())
    return slices.without(far[:hosts], far[hosts:])


def without_shifted_kinds(slices: Slices, odd: OddValues) -> Slices:
    """Leave out a kind of host slices that lies wholly before or after everything else: its clock differs.

    The pause between both is longer than either, which no program makes for one kind alone. Calls stay, since their
    work shows the difference of clocks; so do ops where no device was recorded, since they are the work.
    """
    kind = np.concatenate([slices.host["kind"].to_numpy(), np.full(slices.device.height, _WORK)])
    begin_ns, end_ns = slices.start_ns, slices.start_ns + slices.dur_ns
    is_shifted = np.zeros(len(kind), bool)
    for name in _SHIFTED_KINDS if slices.device.height else _SHIFTED_KINDS - {"cpu_op"}:
        is_of_kind = kind == KIND[name]
        if is_of_kind.sum() < LEAST_CROSSINGS or is_of_kind.all():
            continue
        (first_ns, last_ns), (others_first_ns, others_last_ns) = (
            (int(begin_ns[flags].min()), int(end_ns[flags].max())) for flags in (is_of_kind, ~is_of_kind)
        )
        pause_ns = max(first_ns - others_last_ns, others_first_ns - last_ns)
        if pause_ns > max(last_ns - first_ns, others_last_ns - others_first_ns):
            is_shifted |= is_of_kind
    odd.shifted += int(is_shifted.sum())
    return slices.without(is_shifted[: slices.host.height], is_shifted[slices.host.height :])


def in_launch_order(slices: Slices, odd: OddValues) -> Slices:
    """Leave out device activities whose time contradicts their launch: work of a stream runs in the order of its calls.

    An activity begins after its call, and after all that was put on its stream by calls that had returned before. The
    fewest activities that contradict are left out, unless they are so many that clocks or numbers of calls are wrong.
    """
    host, device = slices.host, slices.device
    is_call = host["kind"].to_numpy() == KIND["runtime"]
    call = first_of(host["correlation"].to_numpy()[is_call], device["correlation"].to_numpy())
    launched = np.flatnonzero(call >= 0)
    if not len(launched):
        return slices
    call_ns = host["start_ns"].to_numpy()[is_call][call[launched]]
    returned_ns = call_ns + host["dur_ns"].to_numpy()[is_call][call[launched]]
    start_ns, stream = device["start_ns"].to_numpy()[launched], streams(device)[launched]
    is_early = call_ns - start_ns > LEAST_DISORDER_NS
    # A clock that differs keeps the order, and differs for many.
    wrong = is_early & (is_early.mean() <= _FEW_RATIO)
    order = np.lexsort((start_ns, call_ns, stream))
    order = order[~wrong[order]]
    falls = (stream[order[1:]] == stream[order[:-1]]) & (np.diff(start_ns[order]) < -LEAST_DISORDER_NS)
    for which in np.unique(stream[order[1:]][falls]):
        rows = order[stream[order] == which]
        wrong[rows] = _contradicts(start_ns[rows], call_ns[rows], returned_ns[rows])
    if wrong.sum() > _MOST_DISORDER_RATIO * len(launched):
        return slices
    odd.out_of_order += int(wrong.sum())
    flags = np.zeros(device.height, bool)
    flags[launched[wrong]] = True
    return slices.without(np.zeros(host.height, bool), flags)


def within_recording(frame: pl.DataFrame, at_ns: Ints, slices: Slices, odd: OddValues) -> pl.DataFrame:
    """Return events of other kinds, at `at_ns`, without those far before or after all slices."""
    start_ns = slices.start_ns
    if frame.is_empty() or not len(start_ns):
        return frame
    begin_ns, end_ns = int(start_ns.min()), int((start_ns + slices.dur_ns).max())
    least_ns = max(_LEAST_DISTANCE_NS, _FAR_SPANS * (end_ns - begin_ns))
    is_far = (at_ns < begin_ns - least_ns) | (at_ns > end_ns + least_ns)
    if not is_far.any() or is_far.mean() >= MOST_RATIO:
        return frame
    odd.distant += int(is_far.sum())
    return frame.filter(pl.Series(~is_far))


def _is_apart(slices: Slices, cluster: Ints, core: int) -> Flags:
    """Flag clusters of kinds of which the core has none, or of calls whose work is in the core: they belong into it."""
    kind = np.concatenate([slices.host["kind"].to_numpy(), np.full(slices.device.height, _WORK)])
    counts = np.zeros((int(cluster.max()) + 1, _WORK + 1), np.int64)
    np.add.at(counts, (cluster, kind), 1)
    is_whole = ((counts == 0) | (counts == counts.sum(axis=0))).all(axis=1)
    is_apart = is_whole & ~((counts > 0) & (counts[core] > 0)).any(axis=1)
    calls, hosts = np.flatnonzero(slices.host["kind"].to_numpy() == KIND["runtime"]), slices.host.height
    number = slices.host["correlation"].to_numpy()[calls]
    work = first_of(slices.device["correlation"].to_numpy(), number)
    launching = work >= 0
    in_core = cluster[hosts:][work[launching]] == core
    launches, launches_into_core = (
        np.bincount(cluster[calls[launching]], weights, len(counts)) for weights in (None, in_core)
    )
    is_only_calls = counts[:, KIND["runtime"]] == counts.sum(axis=1)
    is_apart |= is_only_calls & (launches > 0) & (launches_into_core == launches)
    is_apart[core] = False
    return np.asarray(is_apart & (counts.sum(axis=1) >= LEAST_CROSSINGS))


def _launches_by_cluster(slices: Slices, cluster: Ints, cluster_count: int) -> Ints:
    """Number of device activities in each cluster whose call is in it, too."""
    host = slices.host
    is_call = host["kind"].to_numpy() == KIND["runtime"]
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
    longest_ns = max(LONGEST_NS, LONGEST_SPANS * int(middle[1] - middle[0]))
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
    return slices.host.filter(pl.col("kind") == KIND["cpu_op"])


def _is_window(slices: Slices) -> bool:
    """Return whether slices are a recording by themselves: work with its calls, slices that nest, no instant."""
    host, device = slices.host, slices.device
    start = slices.start_ns
    if len(np.unique(start)) <= MOST_RATIO * len(start):
        return False
    calls = host.filter(pl.col("kind") == KIND["runtime"])["correlation"].to_numpy()
    launched = device.filter(pl.col("correlation") > 0)["correlation"].to_numpy()
    if len(launched) and np.isin(launched, calls).mean() < MOST_RATIO:
        return False
    if host.height < 2:
        return not len(launched)
    lane, start, dur = (host[name].to_numpy().astype(np.int64) for name in ("lane", "start_ns", "dur_ns"))
    return bool(crossings(lane, start, dur, DEEP_RATIO, 0)[1].sum() < _MOST_CROSSING_RATIO * host.height)


def _contradicts(start: Ints, call: Ints, returned: Ints) -> Flags:
    """Flag the fewest activities of a stream, by call, without which starts rise; calls that overlap have no order."""
    rises = np.zeros(len(start), bool)
    rises[nesting.longest_rise(start)] = True
    latest_before = np.maximum.accumulate(np.where(rises, start, np.iinfo(np.int64).min))
    earliest_after = np.minimum.accumulate(np.where(rises, start, np.iinfo(np.int64).max)[::-1])[::-1]
    # Calls that began after this one returned, and those that had returned when it began.
    later = np.searchsorted(call, returned, side="right")
    earlier = np.searchsorted(np.maximum.accumulate(returned), call, side="right")
    after_ns = np.append(earliest_after, np.iinfo(np.int64).max)[later]
    before_ns = np.append(np.iinfo(np.int64).min, latest_before)[earlier]
    is_late = after_ns < start - LEAST_DISORDER_NS
    is_early = before_ns > start + LEAST_DISORDER_NS
    return np.asarray(~rises & (is_late | is_early))
