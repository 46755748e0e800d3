"""Activities: what ran on device streams, or, where no device activity was recorded, on host threads."""

import re
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import communication_kernels, event_categories, name_patterns
from tracekit.ingest.readers.normalize.event_tables import Events
from tracekit.ingest.readers.normalize.events import Args
from tracekit.ingest.readers.normalize.host_slices import Host, id_column
from tracekit.model import intervals, nesting
from tracekit.model.nesting import Flags, Ints

_KINDS = pl.Series(("compute", "communication", "memcpy", "memset"))
_COMPUTE, _COMMUNICATION, _MEMCPY, _UNDECIDED = 0, 1, 2, -1
_KIND_OF = np.array([_COMPUTE, 2, 3, _COMMUNICATION], np.int64)  # in the order of event_categories.DEVICE_KINDS
_KIND_BY_NAME = {"compute": _COMPUTE, "communication": _COMMUNICATION, "copy": _MEMCPY, "undecided": _UNDECIDED}
_MAX_DEPTH = 64
_MOST_SIZES, _MOST_DIGITS = 3, 10  # of a grid or block
_KERNEL = event_categories.DEVICE_KINDS.index("kernel")


@dataclass(frozen=True)
class CommunicationActivity:
    """A communication activity with what may describe it: its own arguments, and the op that issued it."""

    activity_id: int
    name: str
    args: Args | None
    issuer: int
    """Id of the host slice that issued it; -1 where not known."""


def streams(device: pl.DataFrame, threads: list[tuple[str | None, str | None]], first_lane: int) -> pl.DataFrame:
    """Return `device` with columns device, stream filled in and lane numbered from `first_lane`, by device and stream.

    Where the arguments name no device or stream, process and thread ids are used.
    """
    ids = pl.DataFrame(
        {
            "lane": np.arange(len(threads), dtype=np.int32),
            "pid": [p for p, _ in threads],
            "tid": [t for _, t in threads],
        },
        schema_overrides={"pid": pl.String, "tid": pl.String},
    )
    by_pid = pl.col("pid").cast(pl.Int64, strict=False)
    by_tid = pl.col("tid").str.extract(r"(\d+)").cast(pl.Int64, strict=False)
    device_rows = device.join(ids, on="lane", how="left", maintain_order="left").with_columns(
        pl.coalesce("device", by_pid, 0).alias("device"), pl.coalesce("stream", by_tid, 0).alias("stream")
    )
    lane = pl.struct("device", "stream").rank("dense").cast(pl.Int64) - 1 + first_lane
    return device_rows.with_columns(lane.alias("lane"))


def lanes_of(device_rows: pl.DataFrame) -> pl.DataFrame:
    """Return the lanes table's rows for the streams that `streams` numbered."""
    lanes = device_rows.select("lane", "device", "stream").unique().sort("lane")
    return lanes.with_columns(
        pl.col("device").cast(pl.String).alias("pid"),
        pl.col("stream").cast(pl.String).alias("tid"),
        pl.format("stream {}", "stream").alias("name"),
    )


def on_device(
    device_rows: pl.DataFrame, events: Events, host: Host, kernel_args: dict[int, Args], slice_args: dict[int, Args]
) -> tuple[pl.DataFrame, list[CommunicationActivity], pl.DataFrame]:
    """Return the activities of the streams, what may describe the collectives among them, and the undecided kernels.

    Column host_id is the slice whose step and phase an activity has.
    Undecided are kernels that count as compute although their names hint at communication: columns name, dur_ns.

    `kernel_args` holds what kernels say of collectives by row, `slice_args` what host slices say by id.
    """
    work, distinct = device_rows.sort("start_ns", maintain_order=True), events.names
    launch = host.find("runtime", "correlation", work["correlation"].to_numpy())
    owner = host.find("cpu_op", "external_id", work["external_id"].to_numpy())
    kind = _kinds(work, distinct)
    kernel = work["kind"].to_numpy() == _KERNEL
    kind[kernel & np.isin(work["row"].to_numpy(), np.array(list(kernel_args), np.int64))] = _COMMUNICATION
    kind[_by_annotation(host, launch, kernel & (kind != _MEMCPY), kind == _COMMUNICATION)] = _COMMUNICATION
    kind[_by_launching_op(host, np.where(launch >= 0, launch, owner), kind == _UNDECIDED)] = _COMMUNICATION
    kind[_by_stream(work["lane"].to_numpy(), kind)] = _COMMUNICATION
    undecided = kind == _UNDECIDED
    kind[undecided] = _COMPUTE
    sizes = [(_sizes(grid), _sizes(block), annotation or None) for grid, block, annotation in events.kernel_details]
    grids, blocks, annotations = (pl.Series(texts, dtype=pl.String) for texts in zip(*sizes, strict=True))
    table = pl.DataFrame(
        {
            "id": np.arange(len(work), dtype=np.int64),
            "launch_id": id_column(launch),
            "lane": work["lane"],
            "name": distinct.gather(work["name"]),
            "kind": _KINDS.gather(kind),
            "start_ns": work["start_ns"],
            "dur_ns": work["dur_ns"],
            "bytes": work["bytes"],
            "grid": grids.gather(work["details"]),
            "block": blocks.gather(work["details"]),
            "graph_annotation": annotations.gather(work["details"]),
            "host_id": id_column(np.where(launch >= 0, launch, owner)),
        }
    ).with_columns(host.context(launch, owner))
    doubtful = table.select("name", "dur_ns").filter(undecided)
    which = np.flatnonzero(kind == _COMMUNICATION)
    issuers = [_climb(host, index, slice_args) for index in np.where(launch >= 0, launch, owner)[which].tolist()]
    rows, called = work["row"].gather(which).to_list(), table["name"].gather(which).to_list()
    return (
        table,
        [
            CommunicationActivity(i, name, kernel_args.get(row), issuer)
            for i, row, name, issuer in zip(which.tolist(), rows, called, issuers, strict=True)
        ],
        doubtful,
    )


def on_host(host: Host, slice_args: dict[int, Args]) -> tuple[pl.DataFrame, list[CommunicationActivity]]:
    """Return the activities of a CPU run, and what may describe the collectives among them.

    Communication: slices that run a collective. Compute: outermost dispatcher ops on the other threads, minus the c10d
    slices inside them; what a compiler runs to trace the program is none. A collective takes step, phase, unit and span
    of the op that issued it. A gloo send or receive is recorded on the requesting thread, which also computes; it
    begins with the op that issued it. Column host_id is the slice whose step and phase an activity has.
    """
    names, name_id = host.names, host.name_id
    running = np.flatnonzero(names.runs_collective[name_id])
    running = running[np.argsort(host.start_ns[running], kind="stable")]
    issuer = _issuers_in_order(host, running)
    within_issuer = _within_issuer(host, running, issuer)
    # A thread on which some of them begin within their issuers makes the requests; what is not tied to one is its too.
    busy = np.setdiff1d(host.lane[running[~within_issuer]], host.lane[running[within_issuer]])
    in_compiler = nesting.nearest(host.parent, names.is_compiler[name_id]) >= 0
    computes = names.is_compute_op[name_id] & ~in_compiler
    dispatches = host.is_kind("cpu_op") & computes & ~np.isin(host.lane, busy)
    above = nesting.nearest(host.parent, dispatches)
    inside = (host.parent >= 0) & (above[np.maximum(host.parent, 0)] >= 0) if len(name_id) else dispatches
    compute = _without_waits(host, np.flatnonzero(dispatches & ~inside))
    kinds = np.repeat([_COMPUTE, _COMMUNICATION], (len(compute), len(running)))
    host_id = np.concatenate((compute[:, 0], np.where(issuer >= 0, issuer, running)))
    began = host.start_ns[np.where(within_issuer, issuer, running)]
    spans = np.concatenate((compute[:, 1:], np.stack((began, host.end_ns[running]), axis=1)))
    slices = np.concatenate((compute[:, 0], running))
    order = np.argsort(spans[:, 0], kind="stable")
    table = pl.DataFrame(
        {
            "id": np.arange(len(order), dtype=np.int64),
            "launch_id": id_column(np.concatenate((compute[:, 0], issuer))[order]),
            "lane": host.lane[slices[order]],
            "name": names.name.gather(name_id[slices[order]]),
            "kind": _KINDS.gather(kinds[order]),
            "start_ns": spans[order, 0],
            "dur_ns": spans[order, 1] - spans[order, 0],
            "host_id": host_id[order],
        }
    ).with_columns(host.context(host_id[order]))
    which = np.flatnonzero(kinds[order] == _COMMUNICATION)
    called = table["name"].gather(which).to_list()
    return table, [
        CommunicationActivity(int(i), name, slice_args.get(int(slices[order[i]])), int(host_id[order[i]]))
        for i, name in zip(which, called, strict=True)
    ]


def _issuers_in_order(host: Host, running: Ints) -> Ints:
    """Return, for slices that run collectives on the host, by start, the c10d op that issued each; -1 where not known.

    Nothing in a trace ties them. As many are issued as run, so the i-th issued is the i-th run: of each kind where the
    numbers of a kind agree, for threads run sends and receives at once and others later; else of all, if these agree.
    A call of MPI that no op issued issues itself.
    """
    issued = np.flatnonzero(host.names.issues_collective[host.name_id]) if len(host.name_id) else running
    issued = issued[np.argsort(host.start_ns[issued], kind="stable")]
    run_as = np.array([_ran(name) for name in host.names.name.gather(host.name_id[running])], str)
    issued_as = np.array([_runs_as(name) for name in host.names.name.gather(host.name_id[issued])], str)
    if len(issued) == len(running) and not np.array_equal(np.sort(run_as), np.sort(issued_as)):
        return issued
    called = host.names.name.gather(host.name_id[running]).str.starts_with(name_patterns.MPI).to_numpy()
    issuers = np.where(called, running, -1)
    for kind in np.unique(run_as):
        runs, issues = np.flatnonzero(run_as == kind), issued[issued_as == kind]
        if len(runs) == len(issues):
            issuers[runs] = issues
    return issuers


def _climb(host: Host, index: int, slice_args: dict[int, Args]) -> int:
    """Return the nearest slice around a launching slice that states what it communicates; -1 for none."""
    for _ in range(_MAX_DEPTH):
        if index < 0 or index in slice_args:
            return index
        index = int(host.parent[index])
    return -1


def _ran(name: str) -> str:
    function = name.removeprefix(name_patterns.MPI) if name.startswith(name_patterns.MPI) else name.partition(":")[2]
    return re.sub(r"[^a-z]", "", function.lower())


def _runs_as(name: str) -> str:
    kind = re.sub(r"[^a-z]", "", name.removeprefix("c10d::").lower().replace("base", ""))
    return "allreduce" if kind.startswith("reducescatter") else kind  # gloo makes one of the other


def _within_issuer(host: Host, running: Ints, issuer: Ints) -> Flags:
    """Flag the slices that run collectives and begin within the op that issued them, on its thread."""
    if not len(running):
        return np.zeros(0, bool)
    begins = (host.start_ns[issuer] <= host.start_ns[running]) & (host.start_ns[running] <= host.end_ns[issuer])
    return np.asarray((issuer >= 0) & (host.lane[issuer] == host.lane[running]) & begins)


def roles(activities: pl.DataFrame) -> pl.DataFrame:
    """Return the role of each lane that did work, the kind with most busy time on it. Columns lane, role."""
    time = (
        activities.group_by("lane", "kind").agg(pl.col("dur_ns").sum()).sort("dur_ns", "kind", descending=[True, False])
    )
    return time.group_by("lane", maintain_order=True).first().select("lane", pl.col("kind").alias("role"))


def _sizes(raw: bytes) -> str | None:
    """Return the sizes in a JSON array as text such as 4096x1x1; None where it holds none, or what no launch has."""
    sizes = re.findall(r"[0-9]+", raw.decode("utf-8", "replace"))
    return "x".join(sizes) if 0 < len(sizes) <= _MOST_SIZES and max(map(len, sizes)) <= _MOST_DIGITS else None


def _kinds(work: pl.DataFrame, distinct: pl.Series) -> Ints:
    """Return the kind of each piece of work: of a kernel by its name, of others by what the profiler calls them."""
    recorded, name_id = work["kind"].to_numpy(), work["name"].to_numpy()
    kind: Ints = _KIND_OF[recorded]
    used, inverse = np.unique(name_id[recorded == _KERNEL], return_inverse=True)
    names = distinct.gather(used) if len(used) else ()
    by_name = np.array([_KIND_BY_NAME[communication_kernels.kind_of(name)] for name in names], np.int64)
    kind[recorded == _KERNEL] = by_name[inverse]
    return kind


def _by_annotation(host: Host, launch: Ints, kernel: Flags, is_communication: Flags) -> Flags:
    """Return the kernels that a custom backend's slice launched (mybackend:all_reduce), if it launched no known one.

    Launched by an op inside the slice they are that op's: the slice of an asynchronous collective may stay open while
    the thread goes on.
    """
    if not len(host.name_id) or not host.names.runs_collective.any():
        return np.zeros(len(launch), bool)
    runs = host.names.runs_collective[host.name_id]
    around = nesting.nearest(host.parent, runs | (host.is_kind("cpu_op") & host.names.is_compute_op[host.name_id]))
    slice_of = np.where(launch >= 0, around[np.maximum(launch, 0)], -1)
    slice_of = np.where(runs[np.maximum(slice_of, 0)], slice_of, -1)
    return kernel & (slice_of >= 0) & ~np.isin(slice_of, slice_of[is_communication & (slice_of >= 0)])


def _by_launching_op(host: Host, launch: Ints, undecided: Flags) -> Flags:
    """Flag the undecided kernels that were launched by an op that communicates."""
    if not undecided.any() or not len(host.name_id):
        return np.zeros(len(launch), bool)
    around = nesting.nearest(host.parent, host.names.is_communication_op[host.name_id])
    return undecided & (launch >= 0) & (around[np.maximum(launch, 0)] >= 0)


def _by_stream(lane: Ints, kind: Ints) -> Flags:
    """Flag the undecided kernels on streams that communicate and compute nothing."""
    communicates, computes = (np.unique(lane[kind == which]) for which in (_COMMUNICATION, _COMPUTE))
    return np.asarray((kind == _UNDECIDED) & np.isin(lane, np.setdiff1d(communicates, computes)))


def _without_waits(host: Host, compute: Ints) -> Ints:
    """Return id, start and end of the given slices; those with c10d slices inside in pieces outside of these."""
    rows = np.stack((compute, host.start_ns[compute], host.end_ns[compute]), axis=1)
    waits = np.flatnonzero(host.names.is_collective_op[host.name_id]) if len(host.name_id) else compute
    pieces = []
    for lane in np.unique(host.lane[waits]):
        lane_waits = waits[host.lane[waits] == lane]
        blocked = intervals.union(np.stack((host.start_ns[lane_waits], host.end_ns[lane_waits]), axis=1))
        lane_compute = np.flatnonzero(host.lane[compute] == lane)
        cut = lane_compute[intervals.coverage(rows[lane_compute, 1:], blocked) > 0]
        for row in cut:
            rest = intervals.subtract(rows[row : row + 1, 1:], blocked)
            pieces.append(np.column_stack((np.full(len(rest), rows[row, 0]), rest)))
        rows[cut, 0] = -1
    return np.concatenate([rows[rows[:, 0] >= 0], *pieces])
