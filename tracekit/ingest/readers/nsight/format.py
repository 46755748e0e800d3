"""Nsight Systems exports (SQLite): how one is recognized. What reads them is imported when there is one."""

from collections.abc import Sequence

from tracekit.ingest.readers.reader import Reader, TraceInfo
from tracekit.model.trace import Trace

_SQLITE = b"SQLite format 3\0"


class NsightExports(Reader):
    """Reads the SQLite files of `nsys export`, plain, gzip or zstd."""

    name = "Nsight Systems export (SQLite)"
    suffixes = (".sqlite", ".sqlite.gz", ".sqlite.zst")
    contents = "kernels, copies, CUDA, MPI and OS calls, waits, NVTX ranges, GPU metrics; a trace for each process"

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether a file is a SQLite database with the table of texts that all exports have."""
        return head.startswith(_SQLITE) and b"StringIds" in head

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:  # noqa: ARG002
        """Return the traces of a file. Raises BadTraceError if it is damaged, or has neither work nor ranges."""
        if not is_complete:
            return [TraceInfo()]  # the tables may be anywhere
        from tracekit.ingest.readers.nsight import reader

        return reader.traces(path)

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
        """Return the trace of a process."""
        from tracekit.ingest.readers.nsight import reader

        return reader.read(path, info, rank=rank, window=window)
