"""Databases of Ascend PyTorch Profiler and msprof: operators, CANN calls, tasks and collectives of one rank on NPUs.

Format: "Profile Data File Reference (DB)" of gitcode.com/Ascend/msprof. Texts are numbers of the table STRING_IDS,
times are Unix times in ns. Calls and tasks with one connection id belong together; those of operators are in
CONNECTION_IDS.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import polars as pl

from tracekit.conventions.strategies import ALL_GATHER, REDUCE_SCATTER
from tracekit.errors import BadTraceError
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.normalize import communication_kernels, event_tables, numbers, sqlite_tables
from tracekit.ingest.readers.normalize.columns import ColumnBuilder
from tracekit.ingest.readers.normalize.events import Args, Event, Slice
from tracekit.ingest.readers.normalize.sqlite_tables import Database
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model import schema, units
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.trace import Trace

_BATCH = 1 << 14
_MOST_NAME = 4096
_MOST_GROUPS = 4096
_THREAD_BITS = 32
_NO_CONNECTION = (1 << 32) - 1
_STEP = "ProfilerStep#"
_COPY = re.compile(r"(?i)mem_?cpy|sdma|pcie_?dma")
_SET = re.compile(r"(?i)mem_?set")
_CATEGORIES: Mapping[object, str] = {50002: "enqueue", 50003: "python_function"}
"""Types of PYTORCH_API: entries of the task queue, whose other thread makes the CANN calls; Python. Others are ops."""
_OPERATOR_ARGS = ("sequenceNumber", "fwdThreadId", "inputShapes", "inputDtypes")
_DEFAULT_GROUP = "default_group"
_SHAPES = re.compile(r"[\d,;]*")
_MOST_DIGITS = 20
_DTYPES: Mapping[object, str] = {
    "INT8": "Char", "UINT8": "Byte", "INT16": "Short", "INT32": "Int", "INT64": "Long", "FP16": "Half",
    "BFP16": "BFloat16", "FP32": "Float", "FP64": "Double",
}  # fmt: skip
"""HCCL's element types as PyTorch's profiler names them."""
_START = "CAST(startNs AS INTEGER)"


def traces(path: str) -> Sequence[TraceInfo]:
    """Return the trace of the rank. Raises BadTraceError if the file is damaged, or has no task and no operator."""
    with sqlite_tables.open_database(path) as database:
        profile = _Profile(database)
        start_ns = profile.start_ns()
        if start_ns is None:
            raise BadTraceError(
                f"{path}: this database has no operator and no task on an NPU; record it with "
                "torch_npu.profiler, or msprof --type=db"
            )
        return [TraceInfo(rank=profile.rank, world_size=profile.world_size, start_ns=start_ns)]


def read(path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:  # noqa: ARG001  as other readers
    """Return the trace. Raises BadTraceError if the file is damaged."""
    with sqlite_tables.open_database(path) as database:
        profile = _Profile(database)
        profile.base_ns = profile.start_ns() or 0
        builder = ColumnBuilder(has_several_ranks=False)
        slices = profile.slices()
        while batch := list[Event](islice(slices, _BATCH)):
            builder.add(batch)
        builder.finish()
        header = profile.header(rank)
        issues = pl.DataFrame(list(profile.issues()), schema.DATA_QUALITY.schema, orient="row")
    return build_trace(event_tables.of_columns(builder, header), path, rank=rank, window=window, further=issues)


class _Profile:
    """The events of a database, as slices of PyTorch's profiler."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._texts = {
            key: text[:_MOST_NAME]
            for key, text in database.rows("STRING_IDS", ("id", "value"))
            if isinstance(key, int) and isinstance(text, str)
        }
        ranks = database.rows("RANK_DEVICE_MAP", ("rankId", "deviceId"), "LIMIT 2")
        rank = _whole(ranks[0][0]) if len(ranks) == 1 else None
        self.rank = rank if rank is not None and rank < MAX_RANKS else None
        self._device = (_whole(ranks[0][1]) if ranks else None) or 0
        self._groups = _stated_groups(database)
        of_world = [group for group in self._groups.values() if group["group_name"] == _DEFAULT_GROUP]
        self.world_size = len(of_world[0]["global_ranks"]) if of_world else None
        self.base_ns = self._bad_times = 0

    def start_ns(self) -> int | None:
        """First time of an operator, call or task; None without any."""
        firsts = [
            start_ns
            for table in ("PYTORCH_API", "CANN_API", "TASK", "COMMUNICATION_OP")
            for (stated,) in self._database.rows(table, ("startNs",), f"WHERE {_START} > 0 ORDER BY {_START} LIMIT 1")
            if (start_ns := _time_ns(stated)) is not None
        ]
        return min(firsts, default=None)

    def slices(self) -> Iterator[Slice]:
        """Yield all events, times in µs from `base_ns`."""
        op_of_connection: dict[int, int] = {}
        yield from self._operators(op_of_connection)
        for start, end, thread, connection, name in self._database.each(
            "CANN_API", ("startNs", "endNs", "globalTid", "connectionId", "name")
        ):
            if (span := self._span(start, end)) is not None:
                args = Args(correlation=_connection(connection))
                yield Slice("cuda_runtime", self._text(name), *_thread(thread), *span, args)
        for start, end, thread, message in self._database.each(
            "MSTX_EVENTS", ("startNs", "endNs", "globalTid", "message")
        ):
            if start != end and (span := self._span(start, end)) is not None:
                yield Slice("user_annotation", self._text(message), *_thread(thread), *span)
        yield from self._tasks(op_of_connection)
        yield from self._collectives(op_of_connection)

    def header(self, rank: int) -> dict[str, Any]:
        """The header that Kineto would write: start, devices, rank."""
        npus = self._database.rows("NPU_INFO", ("id", "name"), "LIMIT 1024")
        header: dict[str, Any] = {
            "baseTimeNanoseconds": self.base_ns,
            "deviceProperties": [
                {"id": number, "name": name[:_MOST_NAME]}
                for number, name in npus
                if _whole(number) is not None and isinstance(name, str)
            ],
        }
        if self.world_size is not None:
            header["distributedInfo"] = {"rank": rank, "world_size": self.world_size}
        return header

    def issues(self) -> Iterator[tuple[str, str, float]]:
        """Yield the data-quality issue of rows that were left out."""
        if self._bad_times:
            yield "bad_times", f"Left out {units.count(self._bad_times, 'row')} without a start and an end.", 0.0

    def _operators(self, op_of_connection: dict[int, int]) -> Iterator[Slice]:
        """Yield operators, Python functions and steps; note which operator each connection comes from."""
        connections = defaultdict[object, list[int]](list)
        for key, stated in self._database.each("CONNECTION_IDS", ("id", "connectionId")):
            if (connection := _connection(stated)) is not None:
                connections[key].append(connection)
        main_thread, has_steps = None, False
        columns = ("startNs", "endNs", "globalTid", "connectionId", "name", "type", *_OPERATOR_ARGS)
        for number, row in enumerate(self._database.each("PYTORCH_API", columns), 1):
            start, end, thread, key, name, kind, *stated_args = row
            if (span := self._span(start, end)) is None:
                continue
            text, category = self._text(name), _CATEGORIES.get(kind, "cpu_op")
            is_step = text.startswith(_STEP)
            if is_step or main_thread is None:
                main_thread, has_steps = _thread(thread), has_steps or is_step
            op_of_connection.update(dict.fromkeys(connections.get(key, ()), number))
            args = self._operator_args(number, *stated_args) if category == "cpu_op" else None
            yield Slice("user_annotation" if is_step else category, text, *_thread(thread), *span, args)
        for step, start, end in () if has_steps else self._database.each("STEP_TIME", ("id", "startNs", "endNs")):
            if (span := self._span(start, end)) is not None and (number_of_step := _whole(step)) is not None:
                yield Slice("user_annotation", f"{_STEP}{number_of_step}", *(main_thread or (0, 0)), *span)

    def _operator_args(self, number: int, sequence: object, forward: object, shapes: object, dtypes: object) -> Args:
        return Args(
            external_id=number,
            sequence=_whole(sequence),
            forward_thread=_whole(forward),
            input_dims=_shapes(self._texts.get(shapes) if isinstance(shapes, int) else None),
            input_type=_dtypes(self._texts.get(dtypes) if isinstance(dtypes, int) else None),
        )

    def _tasks(self, op_of_connection: Mapping[int, int]) -> Iterator[Slice]:
        """Yield kernels and copies, but for tasks that only wait, and those of collectives: these are other rows."""
        name_of = {
            key: self._text(name) for key, name in self._database.each("COMPUTE_TASK_INFO", ("globalTaskId", "name"))
        }
        of_collectives = {key for (key,) in self._database.each("COMMUNICATION_TASK_INFO", ("globalTaskId",))}
        columns = ("startNs", "endNs", "deviceId", "streamId", "connectionId", "globalTaskId", "taskType")
        for start, end, device, stream, stated, task, kind in self._database.each("TASK", columns):
            name = name_of.get(task)
            category = "kernel"
            if name is None:
                name = self._text(kind)
                category = "gpu_memcpy" if _COPY.search(name) else "gpu_memset" if _SET.search(name) else ""
            if not category or task in of_collectives or (span := self._span(start, end)) is None:
                continue
            yield self._work(category, name, device, _whole(stream) or 0, stated, span, op_of_connection)

    def _collectives(self, op_of_connection: Mapping[int, int]) -> Iterator[Slice]:
        """Yield collectives, each group on a stream of its own: they use several of the device's."""
        highest = self._database.rows("TASK", ("streamId",), 'ORDER BY "streamId" DESC LIMIT 1')
        first_stream = (_whole(highest[0][0]) or 0) + 1 if highest else 0
        types = self._database.rows("ENUM_HCCL_DATA_TYPE", ("id", "name"), "LIMIT 256")
        dtype_of: dict[object, object] = {key: name for key, name in types}  # noqa: C416  of pairs of any types
        streams: dict[str, int] = {}
        columns = ("startNs", "endNs", "deviceId", "connectionId", "opName", "groupName", "dataType", "count")
        for row in self._database.each("COMMUNICATION_OP", columns):
            start, end, device, stated, name, group_name, dtype, count = row
            if (span := self._span(start, end)) is None:
                continue
            group = self._text(group_name) if isinstance(group_name, int) else "?"
            stream = first_stream + streams.setdefault(group, min(len(streams), _MOST_GROUPS))
            work = self._work("kernel", self._text(name), device, stream, stated, span, op_of_connection)
            args = work.args
            assert args is not None
            stated_group = self._groups.get(group)
            args.group, args.dtype = group, _DTYPES.get(dtype_of.get(dtype))
            args.in_nelems, args.out_nelems = _elements(work.name, _whole(count), stated_group)
            if stated_group is not None:
                args.group_ranks, args.group_size = str(stated_group["global_ranks"]), len(stated_group["global_ranks"])
                args.group_description = stated_group["group_name"]
            yield work

    def _work(
        self,
        category: str,
        name: str,
        device: object,
        stream: int,
        stated: object,
        span: tuple[float, float],
        op_of_connection: Mapping[int, int],
    ) -> Slice:
        connection, number = _connection(stated), _whole(device)
        args = Args(
            device=self._device if number is None else number,
            stream=stream,
            correlation=connection,
            external_id=None if connection is None else op_of_connection.get(connection),
        )
        return Slice(category, name, args.device, stream, *span, args)

    def _text(self, key: object) -> str:
        if isinstance(key, str):
            return key[:_MOST_NAME]
        return self._texts.get(key, "unnamed") if isinstance(key, int) else "unnamed"

    def _span(self, start: object, end: object) -> tuple[float, float] | None:
        start_ns, end_ns = _time_ns(start), _time_ns(end)
        if start_ns is None or end_ns is None or end_ns < start_ns:
            self._bad_times += 1
            return None
        return (start_ns - self.base_ns) / 1000, (end_ns - start_ns) / 1000


def _stated_groups(database: Database) -> dict[str, dict[str, Any]]:
    """Name and global ranks of each process group, by the name that collectives have."""
    rows = database.rows("META_DATA", ("value",), "WHERE name = 'parallel_group_info' LIMIT 1")
    try:
        stated = untrusted_json.parse(rows[0][0]) if rows and isinstance(rows[0][0], str) else None
    except ValueError:
        return {}
    groups = {}
    for key, group in list(stated.items())[:_MOST_GROUPS] if isinstance(stated, dict) else ():
        ranks = group.get("global_ranks") if isinstance(group, dict) else None
        if isinstance(ranks, list) and ranks and all(_whole(rank) is not None for rank in ranks):
            groups[key] = {"global_ranks": ranks, "group_name": str(group.get("group_name"))[:_MOST_NAME]}
    return groups


def _elements(name: str, count: int | None, group: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """Elements that a rank sends and receives: HCCL counts those of one rank's part."""
    op = communication_kernels.op_of(name)
    if count is None or op not in (ALL_GATHER, REDUCE_SCATTER):
        return count, count
    of_all = count * len(group["global_ranks"]) if group is not None else None
    return (count, of_all) if op == ALL_GATHER else (of_all, count)


def _thread(value: object) -> tuple[int, int]:
    """Process and thread of a global thread id: high and low 32 bits."""
    number = value if isinstance(value, int) else 0
    return number >> _THREAD_BITS, number & (1 << _THREAD_BITS) - 1


def _connection(value: object) -> int | None:
    """A connection id as a correlation id, which is not 0; None where there is none."""
    connection = _whole(value)
    return None if connection is None or connection == _NO_CONNECTION else connection + 1


def _shapes(text: str | None) -> msgspec.Raw:
    """Shapes as PyTorch's profiler writes them, of "2,3;3"; none where they are of another form.

    >>> bytes(_shapes("2,3;;4"))
    b'[[2,3],[],[4]]'
    """
    is_known = text is not None and _SHAPES.fullmatch(text) is not None
    return msgspec.Raw(f"[[{text.replace(';', '],[')}]]".encode() if is_known and text is not None else b"")


def _dtypes(text: str | None) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(text.split(";")) if text else b"")


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _time_ns(value: object) -> int | None:
    """A time; torch_npu writes those of operators as text."""
    if isinstance(value, str) and value.isdecimal() and len(value) < _MOST_DIGITS:
        value = int(value)
    return value if type(value) is int and 0 < value < numbers.MOST_NS else None
