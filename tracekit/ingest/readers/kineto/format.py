"""Kineto trace files: how one is recognized, and what its start says of the trace.

The modules that build tables of the events are imported when a file is read: tables in the cache need none of them.
"""

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tracekit.errors import BadTraceError
from tracekit.ingest.readers.kineto.header import read_header
from tracekit.ingest.readers.normalize import event_categories, numbers
from tracekit.ingest.readers.normalize.numbers import distributed_info, stated_rank
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model import environment
from tracekit.model.trace import Trace

_TIME = re.compile(rb'"ts"\s*:\s*"?(\d+(?:\.\d+)?)')
_FIRST_TIMES = 9
_RANK = re.compile(rb'"rank"\s*:\s*"?\d')
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{0,80})"')
_HOST_SLICE = re.compile(
    rb'"cat"\s*:\s*"(?:cpu_op|user_annotation|python_function|(?:cuda|hip)_(?:runtime|driver)|Operator|Runtime)"'
    rb'[^{}]{0,500}?"pid"\s*:\s*(\d{1,9})\s*[,}]'
)


_XLA_PROCESS = re.compile(rb'"name"\s*:\s*"/(?:device:(?:CPU|GPU|TPU|CUSTOM):|host:CPU)')
"""Name of a process in the trace viewer's format of XLA's profiler (tsl/profiler/utils/xplane_schema.h)."""


class KinetoTraces(Reader):
    """Reads the JSON files of torch.profiler: plain, gzip or zstd, of one rank or merged of several."""

    name = "PyTorch profiler trace (Kineto JSON)"
    suffixes = (".json", ".json.gz", ".json.zst")
    contents = "all tables of a trace; of a merged file, a trace of each rank"
    has_record_ids = True

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether the file may be JSON, by its name or its first bytes; `traces` then searches for events."""
        return name.lower().endswith(self.suffixes) or head.lstrip()[:1] in (b"{", b"[") or b'"traceEvents"' in head

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:
        """Return the trace of a file, from its header and first event; a merged file is read to know its ranks.

        Raises BadTraceError for a trace without PyTorch events, and a merged one without usable ranks.
        """
        header = read_header(path, head)
        categories = (match[1].decode("utf-8", "replace") for match in _CATEGORY.finditer(head))
        if is_complete and not any(map(event_categories.is_known, categories)):
            _refuse_foreign_trace(path, head)
        info, start_ns = distributed_info(header), _start_ns(head, header)
        merged = _read_merged(path) if is_complete and (not info or _may_state_ranks(head)) else None
        if merged is not None and not merged:
            raise BadTraceError(f"{path}: its events state ranks, but none from 0 on; merge the traces again")
        if merged is not None and (len(merged) > 1 or not info):  # the header may be that of one of the merged files
            return [
                TraceInfo(
                    rank,
                    world_size=stated_rank(info.get("world_size"), lowest=1),
                    start_ns=start_ns,
                    process_id=_only_process(trace),
                    shares_file=True,
                    trace=trace,
                )
                for rank, trace in sorted(merged.items())
            ]
        trace_id, job_id = header.get("trace_id"), header.get("tw_job")
        host_slice = _HOST_SLICE.search(head)  # kernels have a device's number in place of the process id
        return [
            TraceInfo(
                rank=stated_rank(info.get("rank"), lowest=0),
                world_size=stated_rank(info.get("world_size"), lowest=1),
                job_id=job_id if isinstance(job_id, str) else None,
                start_ns=start_ns,
                recording_id=None if trace_id is None else str(trace_id),
                process_id=None if host_slice is None else int(host_slice[1]),
                environment=environment.environment(header),
            )
        ]

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
        """Return the trace of a file, or of one rank of a merged file."""
        from tracekit.ingest.readers.kineto import reader

        if info.shares_file:
            return reader.read_of_merged(path, rank=rank, window=window, companions=info.companions)
        return reader.read(path, rank=rank, window=window, companions=info.companions)


def _read_merged(path: str) -> dict[int, Trace] | None:
    """Return the traces of a file whose events state ranks, by rank; None if they do not."""
    from tracekit.ingest.readers.kineto import reader
    from tracekit.ingest.readers.kineto.scan import Scan
    from tracekit.ingest.readers.normalize import columns

    return reader.read_merged(path) if columns.states_ranks(next(filter(None, Scan(path)), [])) else None


def _may_state_ranks(head: bytes) -> bool:
    """Return whether the head names more ranks than that of the header: those of its events."""
    return len(_RANK.findall(head)) > 1


def _start_ns(head: bytes, header: Mapping[str, Any]) -> int | None:
    """Return about when the recording began: the median of the first times in the file, of which one may be wrong."""
    times = sorted(float(match[1]) for match in itertools.islice(_TIME.finditer(head), _FIRST_TIMES))
    base_ns = header.get("baseTimeNanoseconds")
    base_ns = base_ns if isinstance(base_ns, int) and not isinstance(base_ns, bool) else 0
    if abs(base_ns) >= numbers.MOST_NS:
        base_ns = 0
    if not times:
        return None
    start_us = times[len(times) // 2]
    return base_ns + round(start_us * 1000) if start_us < numbers.MOST_NS else None


def _only_process(trace: Trace) -> int | None:
    """Return the process of a trace's host threads; None if they are of several, or not numbered."""
    processes = trace.lanes.filter(trace.lanes["device"].is_null())["pid"].drop_nulls().unique().to_list()
    return int(processes[0]) if len(processes) == 1 and processes[0].isdecimal() and len(processes[0]) < 10 else None


def _refuse_foreign_trace(path: str, head: bytes) -> None:
    """Raise BadTraceError if a file has slices, but no event of a category that PyTorch writes."""
    from tracekit.ingest.readers.kineto.scan import Scan
    from tracekit.ingest.readers.normalize import columns

    counts: Counter[tuple[str | None, str | None]] = Counter()
    for batch in Scan(path):
        columns.count(counts, batch)
        if any(event_categories.is_known(category) for _, category in counts):
            return
    if counts and all(phase is None for phase, _ in counts):
        raise BadTraceError(
            f"{path}: a list of {counts.total():,} objects that are no events of a profiler (no phase, ph); name a "
            "trace file, or a folder of them"
        )
    slices = Counter({category: n for (phase, category), n in counts.items() if phase in ("X", "B", "b")})
    if not slices:
        return
    if _XLA_PROCESS.search(head):
        raise BadTraceError(
            f"{path}: this is the Chrome trace of an XLA program, as JAX's and TensorFlow's profilers export it "
            f"({slices.total():,} slices), without the calls that launch its work; name the .xplane.pb file that they "
            "write next to it (in JAX: jax.profiler.trace(FOLDER))"
        )
    categories = [repr(category)[:40] for category, _ in slices.most_common(4) if category]
    listed = f"; its categories: {', '.join(categories)}" if categories else ""
    raise BadTraceError(
        f"{path}: this is a Chrome trace without PyTorch events ({slices.total():,} slices{listed}); record with "
        "torch.profiler, or: tracekit record -- python train.py"
    )
