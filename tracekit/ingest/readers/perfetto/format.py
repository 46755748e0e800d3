"""Perfetto files: how one is recognized. What reads them is imported when there is one."""

from collections.abc import Sequence

from tracekit.conventions import perfetto as conventions
from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model.trace import Trace

_FIRST_BYTE = b"\x0a"  # the field of a packet


class PerfettoTraces(Reader):
    """Reads Perfetto's protobuf files, plain, gzip or zstd."""

    name = "Perfetto trace"
    suffixes = tuple(f"{name}{packed}" for name in conventions.SUFFIXES for packed in ("", ".gz", ".zst"))
    contents = "exports of tracekit: all tables of all ranks; others: slices in PyTorch profiler's categories, counters"

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether a file begins with Perfetto's packets, or has its name and may."""
        if not head.startswith(_FIRST_BYTE):
            return False
        from tracekit.ingest.readers.perfetto import packets

        return name.lower().endswith(self.suffixes) or packets.is_perfetto(head)

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:  # noqa: ARG002
        """Return the traces of a file: those of an export with their ranks, else one for each rank."""
        if not is_complete:
            return [TraceInfo()]  # which ranks there are is known at its end
        from tracekit.ingest.readers.perfetto import reader

        return reader.traces(path)

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
        """Return the trace of a file, or of one rank of it."""
        from tracekit.ingest.readers.perfetto import reader

        return reader.read(path, info, rank=rank, window=window)
