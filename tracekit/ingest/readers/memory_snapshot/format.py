"""CUDA memory snapshots: how one is recognized."""

from tracekit import conventions
from tracekit.ingest.readers.reader import Reader

_PICKLES = tuple(b"\x80" + bytes([protocol]) for protocol in range(2, 6))


class MemorySnapshots(Reader):
    """Recognizes memory snapshots; `reader.read` returns their tables."""

    name = "CUDA memory snapshot (pickle)"
    suffixes = (conventions.MEMORY_SNAPSHOT_SUFFIX, ".pickle")
    contents = "segments, blocks, allocator history and call stacks (`tracekit memory`)"
    has_traces = False
    usage = "analyze it with: tracekit memory"

    def sniff(self, head: bytes, name: str) -> bool:  # noqa: ARG002
        """Return whether the file is a pickle."""
        return head.startswith(_PICKLES)
