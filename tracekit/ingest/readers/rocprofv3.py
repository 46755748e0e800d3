"""JSON results of rocprofv3 (`--output-format json`): kernels, copies and calls of one process on AMD GPUs.

Format: github.com/ROCm/rocprofiler-sdk source/lib/output/generateJSON.cpp. Records have the numbers of their kind and
operation, whose names the file lists; times are in ns since the machine started. Sizes of a grid are in work-items.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec
import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest.budget import OverBudgetError
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers.normalize import event_tables, numbers
from tracekit.ingest.readers.normalize.columns import ColumnBuilder
from tracekit.ingest.readers.normalize.events import Args, Event, Slice
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model import environment, schema, units
from tracekit.model.trace import Trace

_MARK = b'"rocprofiler-sdk-tool"'
_HEAD_BYTES = 4096
_MAX_BYTES = 2 << 30
_BATCH = 1 << 14
_GPU = 2  # type of an agent, as rocprofiler_agent_type_t numbers them
_CALLS = ("hip_api", "hsa_api", "rccl_api", "marker_api")
_MOST_NAME = 4096
_BYTES_PER_RECORD = 64  # no record with its two times is shorter


class Rocprofv3Results(Reader):
    """Reads the JSON files of rocprofv3, plain, gzip or zstd: one process."""

    name = "rocprofv3 results (JSON)"
    suffixes = ("_results.json", "_results.json.gz", "_results.json.zst")
    contents = "kernels, copies, HIP, HSA and RCCL calls, and markers of a process on AMD GPUs"

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether a file is a JSON object with the results of rocprofiler-sdk's tool."""
        start = head[:_HEAD_BYTES].lstrip()
        return start[:1] == b"{" and start[1:].lstrip().startswith(_MARK)

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:  # noqa: ARG002
        """Return the trace of the process: its rank is that of the file's name."""
        return [TraceInfo()]

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:  # noqa: ARG002
        """Return the trace. Raises BadTraceError if the file is damaged, or no kernel or copy ran on a GPU."""
        results = _Results(path)
        builder = ColumnBuilder(has_several_ranks=False)
        slices = results.slices()
        while batch := list[Event](islice(slices, _BATCH)):
            builder.add(batch)
        builder.finish()
        if not results.work_count:
            raise BadTraceError(
                f"{path}: these rocprofv3 results have no kernel or copy on a GPU; record them with: rocprofv3 "
                "--sys-trace --output-format json -- python train.py"
            )
        header = {
            "baseTimeNanoseconds": results.base_ns,
            "deviceProperties": results.devices,
            environment.RECORDS_ANY_PROGRAM: True,
        }
        issues = pl.DataFrame(list(results.issues()), schema.DATA_QUALITY.schema, orient="row")
        return build_trace(event_tables.of_columns(builder, header), path, rank=rank, window=window, further=issues)


class _Handle(msgspec.Struct, gc=False):
    handle: Any = None


class _Correlation(msgspec.Struct, gc=False):
    internal: Any = None


class _Size(msgspec.Struct, gc=False):
    x: Any = None
    y: Any = None
    z: Any = None


class _Dispatch(msgspec.Struct, gc=False):
    agent_id: _Handle | None = None
    queue_id: _Handle | None = None
    kernel_id: Any = None
    workgroup_size: _Size | None = None
    grid_size: _Size | None = None


class _Record(msgspec.Struct, gc=False):
    kind: Any = None
    operation: Any = None
    thread_id: Any = None
    correlation_id: _Correlation | None = None
    start_timestamp: Any = None
    end_timestamp: Any = None
    dispatch_info: _Dispatch | None = None
    stream_id: _Handle | None = None
    dst_agent_id: _Handle | None = None
    src_agent_id: _Handle | None = None
    bytes: Any = None


class _Agent(msgspec.Struct, gc=False):
    id: _Handle | None = None
    type: Any = None
    name: Any = None
    product_name: Any = None
    cu_count: Any = None


class _Symbol(msgspec.Struct, gc=False):
    kernel_id: Any = None
    formatted_kernel_name: Any = None
    kernel_name: Any = None


class _Kind(msgspec.Struct, gc=False):
    kind: Any = None
    operations: list[Any] = []


class _Marker(msgspec.Struct, gc=False):
    key: Any = None
    value: Any = None


class _Strings(msgspec.Struct, gc=False):
    buffer_records: list[_Kind] = []
    marker_api: list[_Marker] = []


class _Tool(msgspec.Struct):
    agents: list[_Agent] = []
    strings: _Strings = msgspec.field(default_factory=_Strings)
    kernel_symbols: list[_Symbol] = []
    buffer_records: dict[str, list[_Record]] = {}


class _File(msgspec.Struct):
    tools: list[_Tool] = msgspec.field(default=[], name="rocprofiler-sdk-tool")


class _Results:
    """The records of a file."""

    def __init__(self, path: str) -> None:
        self._tool = _load(path)
        self._bad_times = self.work_count = 0
        records = [r for kind in ("kernel_dispatch", "memory_copy", *_CALLS) for r in self._records(kind)]
        self.base_ns = min((start for r in records if (start := _time_ns(r.start_timestamp)) is not None), default=0)
        gpus = [agent for agent in self._tool.agents if agent.type == _GPU and _handle(agent.id) is not None]
        self._device_of = {_handle(agent.id): place for place, agent in enumerate(gpus)}
        self._symbols = {
            symbol.kernel_id: _name(symbol.formatted_kernel_name or symbol.kernel_name)
            for symbol in self._tool.kernel_symbols
            if type(symbol.kernel_id) is int
        }
        self._markers = {m.key: m.value for m in self._tool.strings.marker_api if type(m.key) is int}
        self.devices = [_properties(place, agent) for place, agent in enumerate(gpus)]

    def slices(self) -> Iterator[Slice]:
        """Yield the records as slices of PyTorch's profiler, times in µs from `base_ns`."""
        for record in self._records("kernel_dispatch"):
            if (span := self._span(record)) is not None and record.dispatch_info is not None:
                yield self._kernel(record, record.dispatch_info, *span)
        for record in self._records("memory_copy"):
            if (span := self._span(record)) is not None:
                yield self._copy(record, *span)
        for category in _CALLS:
            for record in self._records(category):
                if (span := self._span(record)) is not None:
                    args = Args(correlation=_correlation(record))
                    yield Slice(category, self._operation(record), "host", _whole(record.thread_id) or 0, *span, args)

    def issues(self) -> Iterator[tuple[str, str, float]]:
        """Yield the data-quality issue of records that were left out."""
        if self._bad_times:
            message = f"Left out {units.count(self._bad_times, 'record')} without a start and an end."
            yield "bad_times", message, 0.0

    def _records(self, kind: str) -> Sequence[_Record]:
        return self._tool.buffer_records.get(kind, [])

    def _span(self, record: _Record) -> tuple[float, float] | None:
        start_ns, end_ns = _time_ns(record.start_timestamp), _time_ns(record.end_timestamp)
        if start_ns is None or end_ns is None or end_ns < start_ns:
            self._bad_times += 1
            return None
        return (start_ns - self.base_ns) / 1000, (end_ns - start_ns) / 1000

    def _kernel(self, record: _Record, dispatch: _Dispatch, start_us: float, dur_us: float) -> Slice:
        self.work_count += 1
        args = Args(
            device=self._device_of.get(_handle(dispatch.agent_id), 0),
            stream=_stream(record, dispatch),
            correlation=_correlation(record),
            block=_raw(_sizes(dispatch.workgroup_size)),
            grid=_raw(_blocks(dispatch.grid_size, dispatch.workgroup_size)),
        )
        number = _whole(dispatch.kernel_id)
        name = f"kernel {number}"
        if number is not None:
            name = self._symbols.get(number, name)
        return Slice("kernel_dispatch", name, args.device, args.stream, start_us, dur_us, args)

    def _copy(self, record: _Record, start_us: float, dur_us: float) -> Slice:
        self.work_count += 1
        ends = (_handle(record.src_agent_id), _handle(record.dst_agent_id))
        device = next((self._device_of[end] for end in ends if end in self._device_of), 0)
        stream = _stream(record, None)
        args = Args(device=device, stream=stream, correlation=_correlation(record), bytes=_whole(record.bytes))
        return Slice("memory_copy", f"Memcpy {self._operation(record)}", device, stream, start_us, dur_us, args)

    def _operation(self, record: _Record) -> str:
        """The name of a record's operation: a marker's text, else that of its kind and number."""
        correlation = _correlation(record)
        marker = None if correlation is None else self._markers.get(correlation)
        if isinstance(marker, str):
            return _name(marker)
        kinds, kind, operation = self._tool.strings.buffer_records, _whole(record.kind), _whole(record.operation)
        if kind is None or operation is None or kind >= len(kinds) or operation >= len(kinds[kind].operations):
            return f"operation {kind}.{operation}"
        return _name(kinds[kind].operations[operation])


def _load(path: str) -> _Tool:
    """The results in a file. Raises BadTraceError if it is damaged, has none or has those of several processes."""
    blocks = Blocks(path)
    content = bytearray()
    for block in blocks:
        content += block
        if len(content) > _MAX_BYTES:
            raise OverBudgetError(f"{path}: more than {_MAX_BYTES >> 30} GiB (decompressed); record fewer steps")
    blocks.budget.build(len(content) // _BYTES_PER_RECORD)
    try:
        tools = msgspec.json.decode(bytes(content), type=_File).tools
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        reason = blocks.broken or str(error)[:200]
        raise BadTraceError(f"{path}: cannot be read as results of rocprofv3 ({reason}); record them again") from None
    if len(tools) != 1:
        raise BadTraceError(f"{path}: has results of {len(tools)} processes, not of one; write a file for each")
    return tools[0]


def _properties(place: int, agent: _Agent) -> Mapping[str, Any]:
    stated = {"id": place, "name": _name(agent.product_name or agent.name)}
    return stated | ({"numSms": agent.cu_count} if _whole(agent.cu_count) else {})


def _name(stated: object) -> str:
    return stated[:_MOST_NAME] if isinstance(stated, str) else "unnamed"


def _stream(record: _Record, dispatch: _Dispatch | None) -> int:
    """The HIP stream where it is stated, else the queue, else 0."""
    queue = None if dispatch is None else _handle(dispatch.queue_id)
    return next((number for number in (_handle(record.stream_id), queue) if number is not None), 0)


def _sizes(size: _Size | None) -> list[int]:
    sizes = [] if size is None else [_whole(size.x), _whole(size.y), _whole(size.z)]
    return [axis for axis in sizes if axis] if all(sizes) else []


def _blocks(grid: _Size | None, group: _Size | None) -> list[int]:
    """The work-groups of a grid, which is stated in work-items."""
    pairs = zip(_sizes(grid), _sizes(group), strict=False)
    return [-(-items // in_group) for items, in_group in pairs]


def _raw(sizes: list[int]) -> msgspec.Raw:
    return msgspec.Raw(str(sizes).encode() if sizes else b"")


def _handle(stated: _Handle | None) -> int | None:
    return None if stated is None else _whole(stated.handle)


def _correlation(record: _Record) -> int | None:
    return None if record.correlation_id is None else _whole(record.correlation_id.internal)


def _whole(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _time_ns(value: object) -> int | None:
    return value if type(value) is int and 0 < value < numbers.MOST_NS else None
