"""Logs of NCCL Inspector: each collective that a process took part in, one JSON object a line.

Format: github.com/NVIDIA/nccl ext-profiler/inspector (inspector.cc), versions v4.0 to v5.1, and RCCL's copy. A line has
the communicator (`header`), the process (`metadata`), and a collective (`coll_perf`), a send or receive (`p2p_perf`) or
counts of what was lost (`dump_stats`). Its size is that of one rank's part. The duration is that of the kernel. Only
verbose logs (NCCL_INSPECTOR_DUMP_VERBOSE=1) state when it ran; others state when the line was written.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest.decompression import Blocks, lines
from tracekit.ingest.readers.normalize import event_tables, nccl_calls, numbers
from tracekit.ingest.readers.normalize.columns import ColumnBuilder
from tracekit.ingest.readers.normalize.events import Args, Slice
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model import schema, units
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.trace import Trace

_MARK = b'"inspector_output_format_version"'
_HEAD_BYTES = 64 << 10
_MAX_LINE_BYTES = 1 << 20
_BATCH = 1 << 14
_COMMUNICATOR = re.compile(rb'"rank"\s*:\s*(\d{1,7})\s*,\s*"n_ranks"\s*:\s*(\d{1,7})\s*[,}]')
_PROCESS_ID = re.compile(rb'"pid"\s*:\s*(\d{1,9})\s*[,}]')
_WRITTEN = re.compile(rb'"dump_timestamp_us"\s*:\s*(\d{1,16})\s*[,}]')
_NAME = re.compile(r"-pid\d+\.(log|jsonl?)(\.gz|\.zst)?$", re.I)
_MOST_US = numbers.MOST_NS // 1000
_US_NS = 1000
_MOST_BYTES = numbers.MOST_BYTES
_MOST_TEXT = 200


class NCCLInspectorLogs(Reader):
    """Reads the JSON lines of NCCL Inspector, plain, gzip or zstd: the collectives of one process."""

    name = "NCCL Inspector log"
    suffixes = tuple(f"{ending}{packed}" for ending in (".log", ".jsonl") for packed in ("", ".gz", ".zst"))
    contents = "collectives, sends and receives of a process: communicator, bytes, duration; no compute"

    is_log = True

    def has_name(self, name: str) -> bool:
        """Return whether a file is named as the plugin names it (HOST-pid123.log): other logs are of all kinds."""
        return _NAME.search(name) is not None

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether the first lines state the version of NCCL Inspector's format."""
        start = head[:_HEAD_BYTES]
        return start.lstrip()[:1] == b"{" and _MARK in start and b'"header"' in start

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:
        """Return the process of a log. Its rank is that in its largest communicator, wherever in the log that is."""
        rank, size = None, 0
        for block in Blocks(path, head) if is_complete else (head,):
            for stated_rank, stated_size in set(_COMMUNICATOR.findall(block)):
                if size < int(stated_size) <= MAX_RANKS and int(stated_rank) < int(stated_size):
                    rank, size = int(stated_rank), int(stated_size)
        process, written = _PROCESS_ID.search(head), _WRITTEN.search(head)
        return [
            TraceInfo(
                rank=rank,
                world_size=size or None,
                process_id=None if process is None else int(process[1]),
                start_ns=None if written is None else int(written[1]) * _US_NS,
            )
        ]

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
        """Return a trace with collectives only. Raises BadTraceError if no line states one."""
        return _Log(path, info).trace(rank, window)


class _Header(msgspec.Struct, gc=False):
    id: Any = None
    comm_name: Any = None
    rank: Any = None
    n_ranks: Any = None


class _Metadata(msgspec.Struct, gc=False):
    dump_timestamp_us: Any = None


class _KernelTimes(msgspec.Struct, gc=False):
    kernel_start_ts: Any = None
    kernel_stop_ts: Any = None


class _Times(msgspec.Struct, gc=False):
    kernel_events: list[_KernelTimes] = []


class _Collective(msgspec.Struct, gc=False):
    coll: Any = None
    coll_sn: Any = None
    coll_msg_size_bytes: Any = None
    coll_exec_time_us: Any = None
    event_trace_ts: _Times | None = None


class _Message(msgspec.Struct, gc=False):
    p2p: Any = None
    p2p_sn: Any = None
    p2p_peer: Any = None
    p2p_msg_size_bytes: Any = None
    p2p_exec_time_us: Any = None
    event_trace_ts: _Times | None = None


class _Losses(msgspec.Struct, gc=False):
    coll_dropped_since_last_dump: Any = None
    p2p_dropped_since_last_dump: Any = None


class _Line(msgspec.Struct, gc=False):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None
    p2p_perf: _Message | None = None
    dump_stats: _Losses | None = None


_DECODER = msgspec.json.Decoder(_Line)


@dataclass
class _Call:
    """A collective, send or receive; times in µs since 1970."""

    function: str
    communicator: str
    description: str | None
    size: int | None
    sequence: int | None
    part_bytes: int | None
    peer: int | None
    dur_us: float
    end_us: float
    is_end_written: bool
    """Whether the end is the time at which the line was written, so the call ended before."""


class _Log:
    """The lines of one file."""

    def __init__(self, path: str, info: TraceInfo) -> None:
        self._path, self._info = path, info
        self._calls: list[_Call] = []
        self._bad_lines = self._lost_calls = 0
        blocks = Blocks(path)
        for line in lines(blocks, _MAX_LINE_BYTES):
            self._add(line)
        self._broken = blocks.broken

    def trace(self, rank: int, window: int) -> Trace:
        """Return the trace. Raises BadTraceError if there is no call."""
        if not self._calls:
            raise BadTraceError(
                f"{self._path}: this NCCL Inspector log states no collective; record for longer than "
                "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS"
            )
        _separate_ends(self._calls)
        base_us = min(call.end_us - call.dur_us for call in self._calls)
        builder = ColumnBuilder(has_several_ranks=False)
        builder.clock.thousandths = True  # whole µs are the resolution of the format
        streams: dict[str, int] = {}
        for first in range(0, len(self._calls), _BATCH):
            batch = self._calls[first : first + _BATCH]
            builder.add(
                [self._slice(call, streams.setdefault(call.communicator, len(streams)), base_us) for call in batch]
            )
        builder.finish()
        read = event_tables.of_columns(builder, self._trace_header(rank, base_us))
        issues = pl.DataFrame(list(self._issues()), schema.DATA_QUALITY.schema, orient="row")
        return build_trace(read, self._path, rank=rank, window=window, further=issues)

    def _add(self, text: bytes) -> None:
        if not text.strip():
            return
        try:
            line = _DECODER.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._bad_lines += 1
            return
        if line.dump_stats is not None:
            lost = (line.dump_stats.coll_dropped_since_last_dump, line.dump_stats.p2p_dropped_since_last_dump)
            self._lost_calls += sum(_whole(count) or 0 for count in lost)
        elif (call := _call(line)) is not None:
            self._calls.append(call)
        else:
            self._bad_lines += 1

    def _slice(self, call: _Call, stream: int, base_us: float) -> Slice:
        op = nccl_calls.OPS[call.function]
        args = Args(
            device=0, stream=stream, collective=op, group=call.communicator, group_description=call.description,
            group_size=call.size, seq=call.sequence,
        )  # fmt: skip
        if call.part_bytes is not None:
            args.message_bytes = nccl_calls.message_bytes(op, call.part_bytes, call.size)
        if call.peer is not None and call.size == self._info.world_size:  # of smaller groups it is no global rank
            setattr(args, "destination" if op == "send" else "source", call.peer)
        start_us = call.end_us - call.dur_us - base_us
        return Slice("kernel", f"nccl{call.function}", 0, stream, start_us, call.dur_us, args)

    def _trace_header(self, rank: int, base_us: float) -> dict[str, Any]:
        groups = {call.communicator: call for call in self._calls}
        listed = [
            {"pg_name": name, "pg_desc": call.description, "pg_size": call.size, "backend_config": "nccl"}
            for name, call in groups.items()
        ]
        info = {"backend": "nccl", "rank": rank, "world_size": self._info.world_size, "pg_config": listed}
        return {"baseTimeNanoseconds": round(base_us * _US_NS), "distributedInfo": info}

    def _issues(self) -> Iterator[tuple[str, str, float]]:
        message = "NCCL Inspector logs collectives only: neither compute nor steps nor the host is known."
        yield schema.COLLECTIVES_ONLY, message, 0.0
        if any(call.is_end_written for call in self._calls):
            message = (
                "The log states how long collectives took and when their lines were written, not when they ran: ranks "
                "are compared by durations, and gaps between collectives are not known."
            )
            yield schema.WRITE_TIMES, message, 0.0
        if self._bad_lines:
            message = f"{self._path}: {units.count(self._bad_lines, 'line')} state no collective and were left out."
            yield "bad_log", message, 0.0
        if self._broken:
            yield "truncated", f"{self._path}: {self._broken}.", 0.0
        if self._lost_calls:
            message = (
                f"NCCL Inspector lost {units.count(self._lost_calls, 'call')} of "
                f"{self._lost_calls + len(self._calls):,} before they were written."
            )
            yield "dropped_events", message, self._lost_calls / (self._lost_calls + len(self._calls))


def _call(line: _Line) -> _Call | None:
    """The call of a line; None if it states none, or no duration or time of it."""
    if line.header is None or line.metadata is None:
        return None
    if line.coll_perf is not None:
        perf = line.coll_perf
        stated = (perf.coll, perf.coll_sn, perf.coll_msg_size_bytes, perf.coll_exec_time_us, None)
        times = perf.event_trace_ts
    elif line.p2p_perf is not None:
        message = line.p2p_perf
        stated = (message.p2p, message.p2p_sn, message.p2p_msg_size_bytes, message.p2p_exec_time_us, message.p2p_peer)
        times = message.event_trace_ts
    else:
        return None
    function, sequence, part_bytes, dur_us, peer = stated
    ended_us = max((end for k in _kernels(times) if (end := _time_us(k.kernel_stop_ts))), default=None)
    end_us = _time_us(line.metadata.dump_timestamp_us) if ended_us is None else ended_us
    usable_dur_us = _time_us(dur_us)
    is_known = isinstance(function, str) and function in nccl_calls.OPS and isinstance(line.header.id, str | int)
    if not is_known or usable_dur_us is None or end_us is None or usable_dur_us > end_us:
        return None
    size, bytes_of_part = _whole(line.header.n_ranks), _whole(part_bytes)
    size = size if size is not None and 0 < size <= MAX_RANKS else None
    return _Call(
        function=function,
        communicator=str(line.header.id)[:_MOST_TEXT],
        description=line.header.comm_name[:_MOST_TEXT] if isinstance(line.header.comm_name, str) else None,
        size=size,
        sequence=_whole(sequence),
        part_bytes=bytes_of_part if bytes_of_part is not None and bytes_of_part * (size or 1) <= _MOST_BYTES else None,
        peer=_whole(peer),
        dur_us=usable_dur_us,
        end_us=end_us,
        is_end_written=ended_us is None,
    )


def _kernels(times: _Times | None) -> Sequence[_KernelTimes]:
    return () if times is None else times.kernel_events


def _separate_ends(calls: Sequence[_Call]) -> None:
    """Let no call of a communicator, whose kernels run one after another, end after the start of the next.

    Lines that were written together state the same time.
    """
    next_start_us: dict[str, float] = {}
    for call in reversed(calls):
        if call.is_end_written:
            call.end_us = min(call.end_us, next_start_us.get(call.communicator, call.end_us))
        next_start_us[call.communicator] = call.end_us - call.dur_us


def _whole(value: object) -> int | None:
    """A count that a line states; None for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 62 else None


def _time_us(value: object) -> float | None:
    """A time or duration in µs; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST_US:
        return None
    return value
