"""Work on devices whose profiler writes no category that PyTorch's own profilers write.

Vendors write device work into a process of its own, with a thread for each stream, and arrows from the calls that
launched it. So a thread is a stream if its process is labelled as something other than the CPU or named as a device,
if it is called a stream, or if arrows from other processes lead to most of its slices. No rule here knows a vendor.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.ingest.readers.normalize import communication_kernels, event_categories
from tracekit.ingest.readers.normalize.arrows import Arrows, HostSlices, meeting
from tracekit.ingest.readers.normalize.columns import CollectiveArgs
from tracekit.ingest.readers.normalize.event_tables import Events
from tracekit.ingest.readers.normalize.numbers import Ints
from tracekit.model import units

_DEVICE = re.compile(
    r"(?i)(?<![a-z])([gnxhtid]pu|mlu|gcu|dcu|mtia|gaudi|ascend|neuron(core)?|accelerator|device|hardware)(?![a-z])"
)
_HOST = re.compile(r"(?i)(?<![a-z])(cpu|host)(?![a-z])")
_STREAM = re.compile(r"(?i)(?<![a-z])stream\b\D{0,3}(\d{1,9})?")
_NUMBER = re.compile(r"(\d{1,4})\D*$")
_COPY, _SET = re.compile(r"(?i)mem_?cpy|^dma\b"), re.compile(r"(?i)mem_?set")
_WAIT = re.compile(r"(?i)\b(event|notify|semaphore|stream)[ _]?(wait|record|sync)")
"""Tasks that keep a stream waiting and do no work."""
_LINKED = 0.5
"""Share of a thread's slices to which arrows lead: all but those that others launched before the recording."""
_CONTAINED = 0.9
_MOST_LANES = 64
_LEAST_DOUBTFUL = 0.02
"""Share of the time of the recording in which slices of unknown processes make it doubtful where the work ran."""
_KERNEL, _MEMCPY, _MEMSET = (event_categories.DEVICE_KINDS.index(kind) for kind in ("kernel", "memcpy", "memset"))


@dataclass(frozen=True)
class _Lane:
    """A thread with slices of unknown categories."""

    index: int
    pid: str | None
    tid: str | None
    name: str
    rows: Ints
    """Rows of `Events.unknown`, by start."""
    is_called_stream: bool
    is_host: bool
    is_device: bool


def read(events: Events, find_flows: Callable[[], pl.DataFrame]) -> Events:
    """Events with the work of unknown devices, and the calls that launch it, in place of unknown slices.

    `find_flows` returns the ends of arrows in the file, columns `arrows.FLOWS`. Where slices may be device work, but
    nothing shows it, and no other device work was recorded, an issue says that the run cannot be judged.
    """
    if events.unknown.is_empty():
        return events
    flows = find_flows()
    arrows = Arrows(events, flows)
    lanes = list(_lanes(events, arrows))
    streams = _without_summaries(events, [lane for lane in lanes if lane.is_device])
    if not streams:
        return _doubtful(events, lanes)
    left_out = [lane for lane in lanes if lane.is_device and lane not in streams]
    launching = {events.threads[index][0] for index in arrows.tails_of({lane.index for lane in streams})}
    host_processes = {events.threads[index][0] for index in events.host["lane"].unique().to_list()}
    of_runtime = launching - host_processes
    calls = [lane for lane in lanes if not lane.is_device and lane.pid in of_runtime]
    return _with_work(events, arrows, streams, calls, left_out)


# Which threads are streams ------------------------------------------------------------------------------------------


def _lanes(events: Events, arrows: Arrows) -> Iterator[_Lane]:
    host_processes = {events.threads[index][0] for index in events.host["lane"].unique().to_list()}
    host_threads = {events.threads[index][1] for index in events.host["lane"].unique().to_list()}
    lane, start_ns = events.unknown["lane"].to_numpy(), events.unknown["start_ns"].to_numpy()
    linked = {
        events.threads[index][0]
        for index in np.unique(lane).tolist()
        if np.isin(start_ns[lane == index], arrows.to(index)["at_ns"].to_numpy()).mean() >= _LINKED
    }
    for index in np.unique(lane).tolist():
        rows = np.flatnonzero(lane == index)
        rows = rows[np.argsort(start_ns[rows], kind="stable")]
        pid, tid = events.threads[index]
        name = events.thread_names.get((pid, tid), tid or "")
        label, process = events.process_labels.get(pid, ""), events.process_names.get(pid, pid or "")
        is_called_stream = bool(_STREAM.search(name)) or events.unknown["stream"].gather(rows).null_count() < len(rows)
        is_host = pid in host_processes or bool(_HOST.search(label) or _HOST.search(process)) or tid in host_threads
        is_of_device = bool(label.strip()) or _DEVICE.search(process) is not None or pid in linked
        is_device = is_called_stream or (is_of_device and not is_host)
        yield _Lane(index, pid, tid, name, rows, is_called_stream, is_host, is_device)


def _without_summaries(events: Events, lanes: list[_Lane]) -> list[_Lane]:
    """Streams without threads that say the same again: states named as their thread, and spans around other slices.

    Where the spans communicate (an all-reduce around its copies), the slices in them are left out instead.
    """
    name_id = events.unknown["name"].to_numpy()
    distinct = {lane.index: np.unique(name_id[lane.rows]) for lane in lanes}
    streams = [
        lane
        for lane in lanes
        if len(distinct[lane.index]) > 1
        or events.names[int(distinct[lane.index][0])].casefold() != lane.name.casefold()
        or lane.is_called_stream
    ]
    unnamed = [lane for lane in streams if not lane.is_called_stream][:_MOST_LANES]
    dropped = set[int]()
    for outer in unnamed:
        for inner in unnamed:
            if outer is inner or outer.pid != inner.pid or {outer.index, inner.index} & dropped:
                continue
            if len(outer.rows) <= len(inner.rows) and _contained_ratio(events, outer.rows, inner.rows) >= _CONTAINED:
                named = events.names.gather(distinct[outer.index])
                communicates = any(communication_kernels.kind_of(name) != "compute" for name in named)
                dropped.add(inner.index if communicates else outer.index)
    return [lane for lane in streams if lane.index not in dropped]


def _contained_ratio(events: Events, outer: Ints, inner: Ints) -> float:
    """Share of slices that lie in one of the outer slices, both by start."""
    start_ns = events.unknown["start_ns"].to_numpy()
    end_ns = start_ns + events.unknown["dur_ns"].to_numpy()
    place = np.searchsorted(start_ns[outer], start_ns[inner], side="right") - 1
    inside = (place >= 0) & (end_ns[outer][np.maximum(place, 0)] >= end_ns[inner])
    return float(inside.mean())


def _doubtful(events: Events, lanes: list[_Lane]) -> Events:
    """Events with an issue if slices of processes that nobody knows take much of a recording without device work."""
    foreign = [lane for lane in lanes if not lane.is_host]
    if not foreign or not events.device.is_empty() or events.host.is_empty():
        return events
    start_ns, dur_ns = events.host["start_ns"], events.host["dur_ns"]
    begin_ns, end_ns = int(start_ns.min()), int((start_ns + dur_ns).max())  # type: ignore[arg-type]
    rows = np.concatenate([lane.rows for lane in foreign])
    begun = events.unknown.filter(pl.Series(np.isin(np.arange(len(events.unknown)), rows)))
    inside = begun.filter(pl.col("start_ns").is_between(begin_ns, end_ns))
    if int(inside["dur_ns"].sum()) < _LEAST_DOUBTFUL * (end_ns - begin_ns):
        return events
    named = dict.fromkeys(events.process_names.get(lane.pid) or f"process {lane.pid}" for lane in foreign)
    message = (
        f"{units.count(inside.height, 'slice')} of {', '.join(named)} may be the work of a device: neither a category, "
        "label nor arrow says so. Times are of the host."
    )
    return replace(events, issues=(*events.issues, ("no_device_activity", message, 1.0)))


_MOST_STREAM = 2**62
"""A larger number is none of a stream; those that follow it would not fit into 64 bits."""

# Their work -----------------------------------------------------------------------------------------------------------


def _with_work(
    events: Events, arrows: Arrows, streams: list[_Lane], calls: list[_Lane], left_out: list[_Lane]
) -> Events:
    rows = np.concatenate([lane.rows for lane in streams])
    names = events.names.gather(events.unknown["name"].gather(rows))
    works = ~names.str.contains(_WAIT.pattern).to_numpy()
    rows, names = rows[works], names.filter(pl.Series(works))
    device_of, stream_of = _numbers(events, streams)
    lane = events.unknown["lane"].gather(rows)
    kind = np.where(names.str.contains(_SET.pattern), _MEMSET, _KERNEL)
    kind = np.where(names.str.contains(_COPY.pattern), _MEMCPY, kind)
    call_rows = np.concatenate([np.empty(0, np.int64), *(lane.rows for lane in calls)])
    host = pl.concat([events.host, _as_calls(events, call_rows)])
    host, correlation, external_id = _with_calls(events, arrows, host, rows, lane.to_numpy())
    work = events.unknown[rows].with_columns(
        pl.Series("kind", kind, events.device["kind"].dtype),
        lane.replace_strict(device_of, return_dtype=pl.Int64).alias("device"),
        lane.replace_strict(stream_of, return_dtype=pl.Int64).alias("stream"),
        pl.Series("correlation", correlation),
        pl.Series("external_id", external_id),
    )
    place = {row: events.device.height + number for number, row in enumerate(rows.tolist())}
    collectives = [CollectiveArgs(place[c.row], c.args) for c in events.unknown_collectives if c.row in place]
    summed = sum(len(lane.rows) for lane in left_out)
    return replace(
        events,
        host=host,
        device=pl.concat([events.device.match_to_schema(work.schema, missing_columns="insert"), work]),
        device_collectives=[*events.device_collectives, *collectives],
        unread=events.unread - sum(len(lane.rows) for lane in (*streams, *calls)) - summed,
        issues=(*events.issues, _issue(events, streams, len(rows), len(call_rows), summed)),
    )


def _issue(
    events: Events, streams: list[_Lane], work_count: int, call_count: int, summed: int
) -> tuple[str, str, float]:
    named = dict.fromkeys(events.process_names.get(lane.pid) or f"process {lane.pid}" for lane in streams)
    calls = f", and {units.count(call_count, 'slice')} as calls that launch them" if call_count else ""
    rest = f" {units.count(summed, 'slice')} that sum up others were left out." if summed else ""
    message = (
        f"{units.count(work_count, 'slice')} of {', '.join(named)} without a known category were read as work on "
        f"{units.count(len(streams), 'stream')} of a device{calls}.{rest}"
    )
    issue = ("unknown_device", message, 0.0)
    return issue  # noqa: RET504


def _numbers(events: Events, streams: list[_Lane]) -> tuple[dict[int, int], dict[int, int]]:
    """Device and stream of each thread: stated in arguments or names, else numbered; no two threads share both.

    What states no device is on none of those that known work of other processes runs on, whatever a name's number is.
    """
    devices: dict[int, int] = {}
    stream_numbers: dict[int, int] = {}
    unnumbered: dict[str, int] = {}
    # Work of known categories: its devices, by process.
    known = events.device.drop_nulls("device")
    device_of_pid = {events.threads[lane][0]: device for lane, device in known.select("lane", "device").unique().rows()}
    first_unused = 1 + max(device_of_pid.values(), default=-1)
    used = set[tuple[int, int]]()
    for lane in streams:
        label, process = events.process_labels.get(lane.pid, ""), events.process_names.get(lane.pid, "")
        stated = events.unknown["device"].gather(lane.rows).drop_nulls()
        number = _NUMBER.search(label) or (_NUMBER.search(process) if _DEVICE.search(process) else None)
        if len(stated):
            device = int(stated[0])
        elif lane.pid in device_of_pid:
            device = device_of_pid[lane.pid]
        elif number and int(number[1]) not in device_of_pid.values():
            device = int(number[1])
        else:
            device = unnumbered.setdefault(label or process or str(lane.pid), first_unused + len(unnumbered))
        streams_stated = events.unknown["stream"].gather(lane.rows).drop_nulls()
        named = _STREAM.search(lane.name) or _NUMBER.search(lane.tid or "")
        stream = int(streams_stated[0]) if len(streams_stated) else int(named[1]) if named and named[1] else 0
        stream = stream if stream <= _MOST_STREAM else 0
        while (device, stream) in used:
            stream += 1
        used.add((device, stream))
        devices[lane.index], stream_numbers[lane.index] = device, stream
    return devices, stream_numbers


def _as_calls(events: Events, rows: Ints) -> pl.DataFrame:
    """Unknown slices as calls of the device's runtime, columns as `Events.host`."""
    slices = events.unknown[rows].with_columns(kind=pl.lit(event_categories.RUNTIME))
    zeros = (pl.lit(0).alias(name) for name in ("external_id", "sequence", "forward_thread", "inputs", "correlation"))
    return slices.with_columns(*zeros).select(pl.col(name).cast(dtype) for name, dtype in events.host.schema.items())


def _with_calls(
    events: Events, arrows: Arrows, host: pl.DataFrame, rows: Ints, lane: npt.NDArray[np.int32]
) -> tuple[pl.DataFrame, Ints, Ints]:
    """Host slices with numbers, and for each piece of work the number of its call and of its operator.

    Numbers that the file states stay. Arrows from calls and operators add others.
    """
    start_ns = events.unknown["start_ns"].to_numpy()[rows]
    correlation = events.unknown["correlation"].to_numpy()[rows].copy()
    external_id = events.unknown["external_id"].to_numpy()[rows].copy()
    kind = host["kind"].to_numpy()
    numbers_of = {
        event_categories.RUNTIME: (correlation, host["correlation"].to_numpy().copy()),
        event_categories.CPU_OP: (external_id, host["external_id"].to_numpy().copy()),
    }
    around = HostSlices(host)
    for index in np.unique(lane).tolist():
        incoming = arrows.to(index)
        work = np.flatnonzero(lane == index)
        work = work[np.argsort(start_ns[work], kind="stable")]
        met, pieces = meeting(start_ns[work], incoming["at_ns"].to_numpy())
        issuers = around.at(*(incoming[name].to_numpy()[met] for name in ("lane_tail", "at_ns_tail")))
        for piece, issuer in zip(work[pieces].tolist(), issuers.tolist(), strict=True):
            if issuer < 0 or int(kind[issuer]) not in numbers_of:
                continue
            of_work, of_host = numbers_of[int(kind[issuer])]
            if of_host[issuer] == 0:
                of_host[issuer] = of_host.max() + 1
            if of_work[piece] == 0:
                of_work[piece] = of_host[issuer]
    (_, calls), (_, ops) = numbers_of.values()
    return host.with_columns(pl.Series("correlation", calls), pl.Series("external_id", ops)), correlation, external_id
