"""Input formats. READERS lists them; discovery, loader, cache, error messages and documentation derive from it.

A new format is one module with a `Reader` and one entry here, or a plug-in with an entry point in `tracekit.readers`.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from tracekit.conventions import log_parts
from tracekit.conventions import perfetto as perfetto_conventions
from tracekit.ingest.readers import foreign_formats
from tracekit.ingest.readers.dftracer import DFTracerLogs
from tracekit.ingest.readers.execution_trace import ExecutionTraces
from tracekit.ingest.readers.flight_recorder import FlightRecorderDumps
from tracekit.ingest.readers.kineto.format import KinetoTraces
from tracekit.ingest.readers.logs import (
    AttemptsLogs,
    CheckpointLogs,
    Manifests,
    MemorySnapshots,
    MetricsLogs,
)
from tracekit.ingest.readers.nccl_inspector import NCCLInspectorLogs
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.ingest.readers.rocprofv3 import Rocprofv3Results
from tracekit.ingest.readers.torchtitan import TorchtitanLogs
from tracekit.model import plugins
from tracekit.model.trace import Trace


class _BinaryFormat(Reader):
    """A format whose reader is imported when there is such a file. Where a trace is in the file is known at its end."""

    package: str

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:  # noqa: ARG002
        """Return the traces of a file. Raises BadTraceError if it is damaged, or has no trace."""
        traces: Sequence[TraceInfo] = self._reader().traces(path) if is_complete else [TraceInfo()]
        return traces

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
        """Return a trace of a file."""
        trace: Trace = self._reader().read(path, info, rank=rank, window=window)
        return trace

    def _reader(self) -> Any:
        return importlib.import_module(f"tracekit.ingest.readers.{self.package}.reader")


class NsightExports(_BinaryFormat):
    """Reads the SQLite files of `nsys export`, plain, gzip or zstd: a trace for each process."""

    name = "Nsight Systems export (SQLite)"
    suffixes = (".sqlite", ".sqlite.gz", ".sqlite.zst")
    contents = "kernels, copies, CUDA, MPI and OS calls, waits, NVTX ranges, GPU metrics; a trace for each process"
    package = "nsight"

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether a file is a SQLite database with the table of texts that all exports have."""
        return head.startswith(b"SQLite format 3\0") and b"StringIds" in head


class AscendDatabases(_BinaryFormat):
    """Reads the SQLite files of Ascend PyTorch Profiler and msprof: one rank."""

    name = "Ascend PyTorch Profiler database (SQLite)"
    suffixes = (".db",)
    contents = "operators, CANN calls, tasks, copies and collectives of a rank on NPUs, its steps and mstx ranges"
    is_log = True  # the profiler may also write trace_view.json to its folder, with the same events
    package = "ascend"

    def has_name(self, name: str) -> bool:
        """Return whether a file in a folder has a name that the profilers give; other databases may lie there."""
        return name.endswith(".db") and name.startswith(("ascend_pytorch_profiler", "msprof_"))

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether a file is a SQLite database with the tables of texts and tasks."""
        return head.startswith(b"SQLite format 3\0") and b"STRING_IDS" in head and b"TASK" in head


class XPlaneProfiles(_BinaryFormat):
    """Reads the protobuf files of XLA's profiler, plain, gzip or zstd: a trace for each GPU or TPU."""

    name = "XPlane profile"
    suffixes = tuple(f".xplane.pb{packed}" for packed in ("", ".gz", ".zst"))
    contents = "work of each GPU or TPU, its steps, launches and annotations of the host; JAX, TensorFlow, PyTorch/XLA"
    package = "xplane"
    has_ranks_of_host = True

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether a file is named as profiles are, and begins with a plane."""
        return head.startswith(b"\x0a") and name.lower().endswith(self.suffixes)


class PerfettoTraces(_BinaryFormat):
    """Reads Perfetto's protobuf files, plain, gzip or zstd: the ranks of an export, or one trace for each rank."""

    name = "Perfetto trace"
    suffixes = tuple(f"{name}{packed}" for name in perfetto_conventions.SUFFIXES for packed in ("", ".gz", ".zst"))
    contents = "exports of tracekit: all tables of all ranks; others: slices in PyTorch profiler's categories, counters"
    package = "perfetto"

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether a file begins with Perfetto's packets, or has its name and may."""
        if not head.startswith(b"\x0a"):  # the field of a packet
            return False
        from tracekit.ingest.readers.perfetto import packets

        return name.lower().endswith(self.suffixes) or packets.is_perfetto(head)


# Kineto is last: it takes every JSON file that no other reader recognizes, to say what is wrong with it.
READERS: tuple[Reader, ...] = (
    Manifests(),
    CheckpointLogs(),
    MetricsLogs(),
    AttemptsLogs(),
    FlightRecorderDumps(),
    MemorySnapshots(),
    ExecutionTraces(),
    DFTracerLogs(),
    NCCLInspectorLogs(),
    TorchtitanLogs(),
    XPlaneProfiles(),
    PerfettoTraces(),
    NsightExports(),
    AscendDatabases(),
    Rocprofv3Results(),
    KinetoTraces(),
)


@functools.cache
def available() -> tuple[Reader, ...]:
    """Return the readers of plug-ins, then READERS; the first whose `sniff` returns True reads a file."""
    return (*(point.load() for point in plugins.entry_points(group="tracekit.readers")), *READERS)


def find(head: bytes, name: str) -> Reader | None:
    """Return the reader of a file, by its first bytes and its name; None if no reader knows the format."""
    return next((reader for reader in available() if reader.sniff(head, name)), None)


def trace_suffixes() -> tuple[str, ...]:
    """Return the endings of the names of files that may have traces."""
    return tuple(dict.fromkeys(s for reader in available() if reader.has_traces for s in reader.suffixes))


def may_have_traces(name: str) -> bool:
    """Return whether a file in a folder may have traces, by its name in lower case."""
    return any(reader.has_traces and reader.has_name(name) for reader in available())


def is_of_log_or_companion(name: str) -> bool:
    """Return whether a file's name is that of a log or of another tool's file, which lie beside traces."""
    candidates = [reader for reader in available() if reader.has_traces and reader.has_name(name)]
    return name.endswith(companion_suffixes()) or bool(candidates and all(reader.is_log for reader in candidates))


def companion_suffixes() -> tuple[str, ...]:
    """Return the endings of the names of files of other tools that add to traces."""
    return tuple(s for reader in available() if reader.is_companion for s in reader.suffixes)


def companions(rank: int, exists: Callable[[str], bool]) -> dict[str, Reader]:
    """Readers of the files that belong to a rank's trace, by file name, parts of a log in order.

    `exists` says of a name whether the file is there.
    """
    return {
        file: reader
        for reader in available()
        for name in reader.companions(rank)
        for file in log_parts.files(name, exists)
    }


def unknown_format(head: bytes, name: str) -> str:
    """A description of a file that no reader knows, and what to do about it."""
    names = ", ".join(reader.name for reader in available() if reader.has_traces)
    return foreign_formats.describe(head, name) or f"unknown format; tracekit reads: {names}"


def as_markdown() -> str:
    """Return the table of formats of the documentation."""
    rows = [f"| {r.name} | {', '.join(f'`*{s}`' for s in r.suffixes)} | {r.contents} |" for r in available()]
    return "\n".join(("| format | files | what is read |", "|---|---|---|", *rows, ""))
