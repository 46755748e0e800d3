"""Tables of an Nsight Systems report to the columns that a Kineto trace is built from."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import numbers
from tracekit.ingest.readers.normalize.columns import Codes, CollectiveArgs
from tracekit.ingest.readers.normalize.event_categories import DEVICE_KINDS, HOST_KINDS
from tracekit.ingest.readers.normalize.event_tables import Damage, Events
from tracekit.ingest.readers.normalize.events import Args
from tracekit.ingest.readers.normalize.numbers import MISSING, Ints
from tracekit.ingest.readers.normalize.sqlite_tables import Database
from tracekit.ingest.readers.nsight import mpi_calls, nccl_ranges, report_texts
from tracekit.ingest.readers.nsight.mpi_calls import MpiCalls, OsCalls
from tracekit.ingest.readers.nsight.nccl_ranges import Communicators, Fields, NcclRange, Payloads
from tracekit.ingest.readers.nsight.processes import THREAD_BITS, rows_of
from tracekit.ingest.readers.nsight.report_texts import Texts
from tracekit.model.nesting import Flags

_TABLE = "NVTX_EVENTS"
_RANGES = (59, 60)
"""Event types: a range that was pushed and popped on one thread, and one that was started and ended."""
_NUMBERS = ("rowid", "start", "end", "globalTid", "textId")
PAYLOAD = ("jsonText", "jsonTextId", "binaryData")


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges as arrays, in the order of the table. Times in ns since the report's start; MISSING where not known.

    `thread` are serialized ids with hardware and process; `name_id` is the place of each range's name in `names`.
    `fields` has the payloads by place.
    """

    names: pl.Series
    name_id: Ints
    start: Ints
    end: Ints
    thread: Ints
    fields: dict[int, Fields]

    @property
    def process(self) -> Ints:
        """Return the serialized id of the process of each range; 0 where not known."""
        return np.where(self.thread == MISSING, 0, self.thread) >> THREAD_BITS << THREAD_BITS

    @property
    def is_whole(self) -> Flags:
        """Flag the ranges that have a start and an end."""
        return np.asarray((self.start != MISSING) & (self.end != MISSING))


_RUNTIME, _OVERHEAD = HOST_KINDS.index("runtime"), HOST_KINDS.index("overhead")
_OP, _ANNOTATION, _OS_CALL = (HOST_KINDS.index(kind) for kind in ("cpu_op", "annotation", "os_call"))
_KERNEL, _MEMCPY, _MEMSET = (DEVICE_KINDS.index(kind) for kind in ("kernel", "memcpy", "memset"))
_GRID = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
_DEVICE = ("start", "end", "deviceId", "streamId", "contextId", "correlationId")
_SYNC = ("start", "end", "deviceId", "streamId", "correlationId", "syncType", "eventId")
_RECORD = ("streamId", "correlationId", "eventId")
_SYNC_NAMES = {1: "Event Sync", 2: "Stream Wait Event", 3: "Stream Sync", 4: "Context Sync"}
_UNKNOWN_STREAM = -1
_HOST_COLUMNS = (
    "name", "lane", "start_ns", "dur_ns", "kind", "external_id", "sequence", "forward_thread", "inputs", "correlation",
)  # fmt: skip
_TYPES = {"name": np.uint32, "lane": np.int32, "kind": np.uint8, "inputs": np.int32, "details": np.int32}


@dataclass
class Tables:
    """Collects the rows of one process."""

    database: Database
    texts: Texts
    process: int | None
    _names: Codes = field(default_factory=Codes)
    _threads: Codes = field(default_factory=Codes)
    _details: Codes = field(default_factory=lambda: Codes({(b"", b"", ""): 0}))
    _inputs: Codes = field(default_factory=lambda: Codes({(b"", b"", b"", b""): 0}))
    _host: list[dict[str, Ints]] = field(default_factory=list)
    _device: list[dict[str, Ints]] = field(default_factory=list)
    _collectives: list[CollectiveArgs] = field(default_factory=list)
    counts: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    unmatched: int = 0

    def add_calls(self) -> None:
        """Add calls of the CUDA runtime and driver, and the profiler's own overhead."""
        for table, kind in (("CUPTI_ACTIVITY_KIND_RUNTIME", _RUNTIME), ("PROFILER_OVERHEAD", _OVERHEAD)):
            columns = ("start", "end", "globalTid", "correlationId", "nameId")
            calls = self.database.integers(table, columns, rows_of(self.database, table, self.process))
            rows = len(calls["start"])
            correlation = calls["correlationId"] if kind == _RUNTIME else np.zeros(rows, np.int64)
            self._add_host(
                calls,
                name=self._name_codes(calls["nameId"], report_texts.of_call),
                kind=np.full(rows, kind),
                correlation=np.where(correlation == MISSING, 0, correlation),
            )
            self.counts["X", "cuda_runtime" if kind == _RUNTIME else "overhead"] += rows

    def add_ranges(self, ranges: Ranges, communicators: nccl_ranges.Communicators) -> None:
        """Add NVTX ranges: operators of PyTorch's emit_nvtx, steps, other annotations."""
        is_own = np.ones(len(ranges.start), np.bool_) if self.process is None else ranges.process == self.process
        rows = np.flatnonzero(is_own & ranges.is_whole)
        first = sum(len(part["kind"]) for part in self._host)
        name_ids, inverse = np.unique(ranges.name_id[rows], return_inverse=True)
        texts = ranges.names.gather(name_ids).to_list()
        operators = [report_texts.operator(text) for text in texts]
        total_ns = np.bincount(inverse, np.maximum(ranges.end[rows] - ranges.start[rows], 0), len(name_ids))
        step_of = report_texts.step_names(zip(texts, total_ns.astype(np.int64).tolist(), strict=True))
        labels = [step_of.get(text, text) if op is None else op.name for text, op in zip(texts, operators, strict=True)]
        self._add_host(
            {"start": ranges.start[rows], "end": ranges.end[rows], "globalTid": ranges.thread[rows]},
            name=np.array([self._names[name] for name in labels], np.int64)[inverse],
            kind=np.array([_ANNOTATION if op is None else _OP for op in operators], np.int64)[inverse],
            sequence=np.array([0 if op is None else op.sequence for op in operators], np.int64)[inverse],
            inputs=np.array([0 if op is None else self._shapes(op.sizes) for op in operators], np.int64)[inverse],
        )
        # Before 2023.4 calls of MPI are ranges, too.
        for number, text in enumerate(texts):
            if (op := mpi_calls.op_of(text)) is not None:
                calls = first + np.flatnonzero(inverse == number)
                self._collectives += [CollectiveArgs(row, Args(collective=op)) for row in calls.tolist()]
        place = dict(zip(rows.tolist(), range(first, first + len(rows)), strict=True)) if ranges.fields else {}
        for row, fields in ranges.fields.items():
            args = nccl_ranges.args_of(ranges.names[int(ranges.name_id[row])], fields, communicators)
            if args is not None and row in place:
                self._collectives.append(CollectiveArgs(place[row], args))
        self.counts["X", "user_annotation"] += len(rows)
        self.unmatched += int(np.count_nonzero(is_own & ~ranges.is_whole))

    def add_os_calls(self, calls: OsCalls) -> None:
        """Add calls of the OS runtime."""
        self._add_named(calls.names, calls, _OS_CALL)
        self.counts["X", "os_call"] += len(calls.start)

    def add_mpi(self, calls: MpiCalls) -> None:
        """Add calls of MPI as annotations, with what they say of communication."""
        first = sum(len(part["kind"]) for part in self._host)
        self._collectives += [CollectiveArgs(first + row, args) for row, args in calls.args()]
        self._add_named(calls.names, calls, _ANNOTATION)
        self.counts["X", "mpi"] += len(calls.start)
        self.unmatched += calls.unfinished

    def add_device(self) -> None:
        """Add kernels, whole CUDA graphs, copies and memory sets."""
        self._add_device("CUPTI_ACTIVITY_KIND_KERNEL", _KERNEL, (*_GRID, "demangledName", "shortName"))
        self._add_device("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", _KERNEL, ("graphId",))
        self._add_device("CUPTI_ACTIVITY_KIND_MEMCPY", _MEMCPY, ("bytes", "copyKind", "srcKind", "dstKind"))
        self._add_device("CUPTI_ACTIVITY_KIND_MEMSET", _MEMSET, ("bytes", "memKind"))

    def events(self, header: dict[str, Any]) -> Events:
        """Return the collected rows. Times are in ns since the report's start."""
        syncs = self._syncs()
        threads: list[tuple[str | None, str | None]] = [(str(pid), str(tid)) for pid, tid in self._threads]
        clock = numbers.Clock()
        clock.thousandths = True
        return Events(
            header=header,
            host=self._frame(self._host, _HOST_COLUMNS),
            device=_with_nulls(self._frame(self._device, _DEVICE_COLUMNS), "device", "stream", "bytes"),
            memory=pl.DataFrame(schema=_MEMORY_TABLE),
            syncs=syncs,
            names=pl.Series("name", list(self._names), dtype=pl.String),
            inputs=list(self._inputs),
            kernel_details=list(self._details),
            threads=threads,
            thread_names=self._thread_names(),
            host_collectives=self._collectives,
            device_collectives=[],
            counts=self.counts,
            unread=0,
            unmatched=self.unmatched,
            has_several_ranks=False,
            damage=Damage(),
            clock=clock,
            read_bytes=0,
        )

    def _add_host(self, spans: Mapping[str, Ints], **columns: Ints) -> None:
        rows = len(spans["start"])
        zero = np.zeros(rows, np.int64)
        thread = np.where(spans["globalTid"] == MISSING, 0, spans["globalTid"])
        start, end = spans["start"], spans["end"]
        usable = (start != MISSING) & (end != MISSING)
        self._host.append(
            dict.fromkeys(_HOST_COLUMNS, zero)
            | {
                "lane": self._lanes(thread),
                "start_ns": np.where(usable, start, numbers.BAD),
                "dur_ns": _difference(start, end, usable),
            }
            | columns
        )

    def _add_named(self, texts: pl.Series, calls: OsCalls | MpiCalls, kind: int) -> None:
        codes = np.array([self._names[text] for text in texts.to_list()], np.int64)
        self._add_host(
            {"start": calls.start, "end": calls.end, "globalTid": calls.thread},
            name=codes[calls.name_id],
            kind=np.full(len(calls.start), kind),
        )

    def _lanes(self, thread: Ints) -> Ints:
        mask = (1 << THREAD_BITS) - 1
        distinct, inverse = np.unique(thread, return_inverse=True)
        codes = [self._threads[thread_id >> THREAD_BITS & mask, thread_id & mask] for thread_id in distinct.tolist()]
        return np.array(codes, np.int64)[inverse]

    def _add_device(self, table: str, kind: int, columns: tuple[str, ...]) -> None:
        work = self.database.integers(table, (*_DEVICE, *columns), self._of_process(table))
        start, end, rows = work["start"], work["end"], len(work["start"])
        usable = (start != MISSING) & (end != MISSING)
        correlation = work["correlationId"]
        device, queue = work["deviceId"], _stream_of(work)
        self._device.append(
            {
                "name": self._device_names(table, work),
                "lane": self._device_lanes(device, queue),
                "start_ns": np.where(usable, start, numbers.BAD),
                "dur_ns": _difference(start, end, usable),
                "device": device,
                "stream": queue,
                "bytes": work.get("bytes", np.full(rows, MISSING)),
                "kind": np.full(rows, kind),
                "correlation": np.where(correlation == MISSING, 0, correlation),
                "external_id": np.zeros(rows, np.int64),
                "details": self._detail_codes(work) if "gridX" in work else np.zeros(rows, np.int64),
            }
        )
        self.counts["X", {_MEMCPY: "gpu_memcpy", _MEMSET: "gpu_memset"}.get(kind, "kernel")] += rows

    def _device_lanes(self, device: Ints, queue: Ints) -> Ints:
        pairs = zip(device.tolist(), queue.tolist(), strict=True)
        return np.fromiter((self._threads[pair] for pair in pairs), np.int64, len(device))

    def _detail_codes(self, kernels: Mapping[str, Ints]) -> Ints:
        sizes = zip(*(kernels[name].tolist() for name in _GRID), strict=True)
        codes = (self._details[_list(size[:3]), _list(size[3:]), ""] for size in sizes)
        return np.fromiter(codes, np.int64, len(kernels["gridX"]))

    def _device_names(self, table: str, work: Mapping[str, Ints]) -> Ints:
        if table.endswith("KERNEL"):
            best = np.where(work["demangledName"] == MISSING, work["shortName"], work["demangledName"])
            return self._name_codes(best, str)
        if table.endswith("GRAPH_TRACE"):
            texts = [f"CUDA graph {graph}" for graph in work["graphId"].tolist()]
        elif table.endswith("MEMCPY"):
            kinds = zip(*(work[name].tolist() for name in ("copyKind", "srcKind", "dstKind")), strict=True)
            texts = [report_texts.of_copy(*kind) for kind in kinds]
        else:
            texts = [report_texts.of_memset(kind) for kind in work["memKind"].tolist()]
        return np.fromiter((self._names[text] for text in texts), np.int64, len(texts))

    def _name_codes(self, ids: Ints, convert: Callable[[str], str]) -> Ints:
        texts, inverse = self.texts.of_all(ids)
        codes = [self._names[convert(text)] for text in texts.to_list()]
        return np.array(codes, np.int64)[inverse]

    def _shapes(self, sizes: str | None) -> int:
        return 0 if sizes is None else self._inputs[sizes.encode(), b"", b"", b""]

    def _syncs(self) -> pl.DataFrame:
        """Return the waits that CUDA reports, each with the last record of its event before the call that waits."""
        table = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
        waits = self.database.integers(
            table,
            ("start", "end", "deviceId", "streamId", "correlationId", "syncType", "eventId"),
            self._of_process(table),
        )
        records = self.database.integers(
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT",
            ("streamId", "correlationId", "eventId"),
            self._of_process("CUPTI_ACTIVITY_KIND_CUDA_EVENT"),
        )
        waited, stream_of = _last_records(waits, records)
        usable = (waits["start"] != MISSING) & (waits["end"] != MISSING)
        called = [self._names[_SYNC_NAMES.get(kind, "Unknown Sync")] for kind in waits["syncType"].tolist()]
        frame = pl.DataFrame(
            {
                "name": np.array(called, np.uint32),
                "lane": self._device_lanes(waits["deviceId"], waits["streamId"]).astype(np.int32),
                "start_ns": np.where(usable, waits["start"], numbers.BAD),
                "dur_ns": _difference(waits["start"], waits["end"], usable),
                "device": waits["deviceId"],
                "stream": waits["streamId"],
                "awaited_stream": stream_of,
                "correlation": np.where(waits["correlationId"] == MISSING, 0, waits["correlationId"]),
                "awaited_correlation": waited,
            }
        )
        self.counts["X", "cuda_sync"] += frame.height
        return _with_nulls(frame, "device", "stream", "awaited_stream")

    def _thread_names(self) -> dict[tuple[str | None, str | None], str]:
        threads = self.database.integers(
            "ThreadNames", ("globalTid", "nameId"), rows_of(self.database, "ThreadNames", self.process)
        )
        mask = (1 << THREAD_BITS) - 1
        return {
            (str(thread >> THREAD_BITS & mask), str(thread & mask)): self.texts.get(name)
            for thread, name in zip(threads["globalTid"].tolist(), threads["nameId"].tolist(), strict=True)
        }

    def _of_process(self, table: str) -> str:
        is_filtered = self.process is not None and self.database.has(table, "globalPid")
        return f"WHERE globalPid = {self.process}" if is_filtered else ""

    def _frame(self, parts: list[dict[str, Ints]], names: tuple[str, ...]) -> pl.DataFrame:
        return pl.DataFrame(
            {name: np.concatenate([part[name] for part in parts]).astype(_TYPES.get(name, np.int64)) for name in names}
        )


_DEVICE_COLUMNS = (
    "name", "lane", "start_ns", "dur_ns", "device", "stream", "bytes", "kind", "correlation", "external_id", "details",
)  # fmt: skip
_MEMORY_TABLE = {
    "lane": pl.Int32, "at_ns": pl.Int64, "device_type": pl.Int64, "device_id": pl.Int64, "address": pl.Int64,
    "delta_bytes": pl.Int64, "allocated_bytes": pl.Int64, "reserved_bytes": pl.Int64,
}  # fmt: skip


def _difference(start: Ints, end: Ints, usable: Ints) -> Ints:
    """Return durations; -1, which is left out as a bad time, where one is missing or the difference overflows."""
    near = usable & (np.abs(start) < numbers.MOST_NS) & (np.abs(end) < numbers.MOST_NS)
    return np.where(near, np.where(near, end, 0) - np.where(near, start, 0), -1)


def _stream_of(work: Mapping[str, Ints]) -> Ints:
    """Return the stream of each row; its number counts within its context, of which a device may have several."""
    context, queue = work["contextId"], work["streamId"]
    first: dict[int, int] = {}
    for device, context_id in sorted(set(zip(work["deviceId"].tolist(), context.tolist(), strict=True))):
        first.setdefault(device, context_id)
    if len(set(context.tolist())) <= len(first):
        return queue
    first_context = np.array([first[device] for device in work["deviceId"].tolist()], np.int64)
    return np.where((context == first_context) | (queue == MISSING), queue, queue + (context << 32))


def _last_records(waits: Mapping[str, Ints], records: Mapping[str, Ints]) -> tuple[Ints, Ints]:
    """Return correlation id and stream of the last record of each wait's event before it; 0 and -1 for none.

    Correlation ids count the calls of a process.
    """
    correlation, queue = np.zeros(len(waits["start"]), np.int64), np.full(len(waits["start"]), _UNKNOWN_STREAM)
    order = np.lexsort((records["correlationId"], records["eventId"]))
    event, call = records["eventId"][order], records["correlationId"][order]
    pairs = zip(waits["eventId"].tolist(), waits["correlationId"].tolist(), strict=True)
    for i, (event_id, call_id) in enumerate(pairs):
        first, end = np.searchsorted(event, event_id), np.searchsorted(event, event_id, side="right")
        last = first + int(np.searchsorted(call[first:end], call_id)) - 1
        if last >= first and MISSING not in (event_id, call_id):
            correlation[i], queue[i] = call[last], records["streamId"][order][last]
    return correlation, queue


def _list(size: Sequence[int]) -> bytes:
    """Return a size as Kineto's files write it."""
    return f"[{', '.join(map(str, size))}]".encode()


def _with_nulls(frame: pl.DataFrame, *names: str) -> pl.DataFrame:
    return frame.with_columns(pl.when(pl.col(name) != MISSING).then(pl.col(name)).alias(name) for name in names)


def read_ranges(database: Database, texts: Texts) -> Ranges:
    """Return the ranges of all processes of a report."""
    where = f"WHERE eventType IN ({', '.join(map(str, _RANGES))})" if database.has(_TABLE, "eventType") else ""
    columns = database.integers(_TABLE, _NUMBERS, where)
    names, name_id = texts.of_all(columns["textId"])
    inline_texts: dict[str, int] = {}
    for row, (text,) in _rows(database, columns["rowid"], ("text",)):
        if isinstance(text, str):
            name_id[row] = len(names) + inline_texts.setdefault(text, len(inline_texts))
    all_names = pl.concat([names, pl.Series("name", list(inline_texts), dtype=pl.String)])
    payloads, fields = Payloads(database, texts), dict[int, Fields]()
    for row, payload in _rows(database, columns["rowid"], PAYLOAD):
        if read_fields := payloads.read(*payload):
            fields[row] = read_fields
    return Ranges(all_names, name_id, columns["start"], columns["end"], columns["globalTid"], fields)


def read_communicators(database: Database, texts: Texts) -> Communicators:
    """The communicators that the ranges of NCCL state."""
    payloads, stated = Payloads(database, texts), []
    for start, thread, *payload in database.each(
        _TABLE, ("start", "globalTid", *PAYLOAD), _with_any(database, PAYLOAD)
    ):
        if isinstance(start, int) and isinstance(thread, int) and (fields := payloads.read(*payload)):
            stated.append(NcclRange(thread >> THREAD_BITS << THREAD_BITS, start, fields))
    return Communicators(sorted(stated, key=lambda nccl_range: nccl_range.start_ns))


def _rows(database: Database, ids: Ints, columns: tuple[str, ...]) -> Iterator[tuple[int, list[object]]]:
    """Yield the place in `ids` of each row that has a value in one of the columns, and its values."""
    for row, *values in database.each(_TABLE, ("rowid", *columns), _with_any(database, columns)):
        place = int(np.searchsorted(ids, row)) if isinstance(row, int) else len(ids)
        if place < len(ids) and ids[place] == row:
            yield place, values


def _with_any(database: Database, columns: tuple[str, ...]) -> str:
    conditions = [f'"{name}" IS NOT NULL' for name in columns if database.has(_TABLE, name)]
    return f"WHERE {' OR '.join(conditions) or '0'}"
