"""Dumps of torch's flight recorder as traces: each collective of a process that is complete, and how long it took.

`hang_dumps.flight_recorder` reads the dumps. NCCL's states durations, by CUDA events around the kernel, where
TORCH_NCCL_ENABLE_TIMING=1 is set; not when the kernel ran, only when the host called it. Gloo's states no durations.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import polars as pl

from tracekit.conventions import regular_files
from tracekit.errors import BadTraceError
from tracekit.ingest.hang_dumps import flight_recorder
from tracekit.ingest.pickles import ManyPickles
from tracekit.ingest.readers.logs import PICKLE_STARTS
from tracekit.ingest.readers.normalize import event_tables
from tracekit.ingest.readers.normalize.columns import ColumnBuilder
from tracekit.ingest.readers.normalize.events import Args, Slice
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model import schema, units
from tracekit.model.hang_dump import Call, RankDump
from tracekit.model.trace import Trace

_GROUPS, _CALL = (b"pg_config", b"pg_status"), b"collective_seq_id"
_HEAD_BYTES = 64 << 10
_MAX_BYTES = 256 << 20
_US_NS = 1000
_NAME = re.compile(r"(?:nccl|comm_lib)_trace_(?:rank_)?(?P<rank>\d{1,7})$")
"""Names of torch's defaults of TORCH_FR_DUMP_TEMP_FILE and TORCH_NCCL_DEBUG_INFO_TEMP_FILE, with the rank."""


class FlightRecorderDumps(Reader):
    """Reads dumps of torch's flight recorder, pickle or JSON: the completed collectives of one rank."""

    name = "dump of torch's flight recorder"
    suffixes = ("_trace_rank_0",)
    contents = "collectives of a rank with durations, if TORCH_NCCL_ENABLE_TIMING=1; of jobs that hang: `tracekit hang`"
    is_log = True

    def has_name(self, name: str) -> bool:
        """Return whether a file has a name that torch gives; tracekit's dumps are of jobs that hang."""
        return _NAME.search(name) is not None

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether the file is a pickle or JSON object with the flight recorder's process groups."""
        start = head[:_HEAD_BYTES]
        has_dump = all(key in start for key in _GROUPS) or _CALL in start
        return has_dump and (start.startswith(PICKLE_STARTS) or start.lstrip()[:1] == b"{")

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:  # noqa: ARG002
        """Return the rank of a dump. Raises BadTraceError if it is damaged, or states no duration."""
        if not is_complete:
            return [TraceInfo()]
        dump = _read(path)
        calls = _timed_calls(dump, path)
        rank = dump.rank if dump.rank >= 0 else None
        return [TraceInfo(rank=rank, world_size=_world_size(dump), start_ns=calls[0].created_ns)]

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:  # noqa: ARG002
        """Return a trace with collectives only. Raises BadTraceError if no call states its duration."""
        dump = _read(path)
        calls = _timed_calls(dump, path)
        base_ns = calls[0].created_ns or 0
        builder = ColumnBuilder(has_several_ranks=False)
        builder.clock.thousandths = True
        builder.add(list(_slices(calls, dump, base_ns)))
        builder.finish()
        listed = [
            {"pg_name": name, "pg_desc": description, "ranks": None if ranks is None else list(ranks)}
            for name, (description, ranks) in dump.groups.items()
        ]
        about = {"backend": "nccl", "rank": rank, "world_size": _world_size(dump), "pg_config": listed}
        read = event_tables.of_columns(builder, {"baseTimeNanoseconds": base_ns, "distributedInfo": about})
        issues = pl.DataFrame(list(_issues(dump, calls)), schema.DATA_QUALITY.schema, orient="row")
        return build_trace(read, path, rank=rank, window=window, further=issues)


def _read(path: str) -> RankDump:
    """The dump in a file; its rank is -1 if neither the file nor its name states it. Raises BadTraceError."""
    try:
        with regular_files.open_to_read(path) as file:
            if (size := regular_files.size(file)) > _MAX_BYTES:
                raise BadTraceError(f"{path}: the dump has {size:,} bytes; at most {_MAX_BYTES:,} are read")
            data = file.read()
        with ManyPickles() as many:
            value = flight_recorder.load(data, many)
        if not flight_recorder.is_dump(value):
            raise flight_recorder.BadDumpError("has no entries")
        rank = flight_recorder.stated_rank(value)
        if rank is None:
            name = _NAME.search(PurePath(path).name.lower())
            rank = -1 if name is None else int(name["rank"])
        return flight_recorder.parse(value, rank=rank, path=path)
    except flight_recorder.BadDumpError as error:
        raise BadTraceError(f"{path}: the dump of torch's flight recorder {error}; copy or write it again") from None
    except OSError as error:
        raise BadTraceError(f"{path}: {error.strerror or error}; check the path and its permissions") from None


def _timed_calls(dump: RankDump, path: str) -> list[Call]:
    """The completed calls with a duration, in the order of calls. Raises BadTraceError if there is none."""
    calls = [call for call in dump.calls if call.duration_ns is not None and call.created_ns and not call.is_pending]
    if not calls:
        raise BadTraceError(
            f"{path}: this is a dump of torch's flight recorder without durations of collectives: set "
            "TORCH_NCCL_ENABLE_TIMING=1 in the job (NCCL only); whether it hangs, and where, says: tracekit hang FOLDER"
        )
    return sorted(calls, key=lambda call: call.created_ns or 0)


def _world_size(dump: RankDump) -> int | None:
    """Ranks of the largest group; None where the dump lists the ranks of no group."""
    return max((len(ranks) for _, ranks in dump.groups.values() if ranks), default=None)


def _slices(calls: Sequence[Call], dump: RankDump, base_ns: int) -> Iterator[Slice]:
    """Kernels of the calls: each begins with its call, or after the one before it in its group, on the same stream."""
    streams: dict[str, int] = {}
    ends_ns: dict[str, int] = {}
    for call in calls:
        duration_ns = call.duration_ns or 0
        start_ns = max(call.created_ns or 0, ends_ns.get(call.group, 0))
        ends_ns[call.group] = start_ns + duration_ns
        stream = streams.setdefault(call.group, len(streams))
        args = _args(call, dump, stream)
        name = f"nccl:{args.collective}"
        yield Slice("kernel", name, 0, stream, (start_ns - base_ns) / _US_NS, duration_ns / _US_NS, args)


def _args(call: Call, dump: RankDump, stream: int) -> Args:
    description, ranks = dump.groups.get(call.group, (call.description, None))
    parts = call.parts or (call,)
    dtypes = {dtype for part in parts for dtype in (*part.input_dtypes, *part.output_dtypes)}
    args = Args(
        device=0, stream=stream, collective=parts[0].op, group=call.group, group_description=description, seq=call.seq,
        group_ranks=None if ranks is None else list(ranks), group_size=None if ranks is None else len(ranks),
    )  # fmt: skip
    if len(dtypes) == 1:
        args.dtype = dtypes.pop()
        args.in_nelems = sum(part.input_numel for part in parts)
        args.out_nelems = sum(part.output_numel for part in parts)
    if call.is_p2p and len(parts) == 1:
        args.source, args.destination = (None, call.target) if call.op == "send" else (call.source, None)
    return args


def _issues(dump: RankDump, calls: Sequence[Call]) -> Iterator[tuple[str, str, float]]:
    message = "A flight recorder states collectives only: neither compute nor steps nor the host's other work is known."
    yield schema.COLLECTIVES_ONLY, message, 0.0
    message = (
        "The dump states how long collectives took and when the host called them, not when they ran: ranks are "
        "compared by durations, and gaps between collectives are not known."
    )
    yield schema.WRITE_TIMES, message, 0.0
    if untimed := len(dump.calls) - len(calls):
        message = f"{units.count(untimed, 'call')} of {len(dump.calls):,} are not complete or state no duration."
        yield "dropped_events", message, untimed / len(dump.calls)
