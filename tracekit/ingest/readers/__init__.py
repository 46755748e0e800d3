"""Input formats. READERS lists them; discovery, loader, cache, error messages and documentation derive from it.

A new format is one module with a `Reader` and one entry here, or a plug-in with an entry point in `tracekit.readers`.
"""

import functools

from tracekit.ingest.readers import foreign_formats
from tracekit.ingest.readers.dftracer import DFTracerLogs
from tracekit.ingest.readers.execution_trace import ExecutionTraces
from tracekit.ingest.readers.kineto.format import KinetoTraces
from tracekit.ingest.readers.logs import CheckpointLogs, Manifests, MemorySnapshots, MetricsLogs
from tracekit.ingest.readers.nsight.format import NsightExports
from tracekit.ingest.readers.perfetto.format import PerfettoTraces
from tracekit.ingest.readers.reader import Reader
from tracekit.model import plugins

# Kineto is last: it takes every JSON file that no other reader recognizes, to say what is wrong with it.
READERS: tuple[Reader, ...] = (
    Manifests(),
    CheckpointLogs(),
    MetricsLogs(),
    MemorySnapshots(),
    ExecutionTraces(),
    DFTracerLogs(),
    PerfettoTraces(),
    NsightExports(),
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


def companion_suffixes() -> tuple[str, ...]:
    """Return the endings of the names of files of other tools that add to traces."""
    return tuple(s for reader in available() if reader.is_companion for s in reader.suffixes)


def companions(rank: int) -> dict[str, Reader]:
    """Return the readers of the files that belong to a rank's trace, by file name."""
    return {name: reader for reader in available() for name in reader.companions(rank)}


def unknown_format(head: bytes, name: str) -> str:
    """A description of a file that no reader knows, and what to do about it."""
    names = ", ".join(reader.name for reader in available() if reader.has_traces)
    return foreign_formats.describe(head, name) or f"unknown format; tracekit reads: {names}"


def as_markdown() -> str:
    """Return the table of formats of the documentation."""
    rows = [f"| {r.name} | {', '.join(f'`*{s}`' for s in r.suffixes)} | {r.contents} |" for r in available()]
    return "\n".join(("| format | files | what is read |", "|---|---|---|", *rows, ""))
