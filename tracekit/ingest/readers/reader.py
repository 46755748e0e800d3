"""Reader: the protocol of an input format."""
# ruff: noqa: ARG002  # what a method of the protocol does not use, a reader may

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tracekit.errors import BadTraceError
from tracekit.model.trace import Trace


@dataclass(frozen=True)
class Companion:
    """A file that another tool recorded of a trace's process; `path` is that of its content on this machine."""

    reader: "Reader"
    path: str
    info: "TraceInfo"


@dataclass(frozen=True)
class TraceInfo:
    """One trace in a file, as far as it is known before the trace is read; None where the file does not state it."""

    rank: int | None = None
    window: int | None = None
    world_size: int | None = None
    job_id: str | None = None
    start_ns: int | None = None
    """About when the recording began."""
    recording_id: str | None = None
    """The same for copies of one recording."""
    process_id: int | None = None
    """Of the process that was recorded."""
    parent_process_id: int | None = None
    """Of the process that started it; only for companions, which may be of a rank's workers."""
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Versions of software and names of devices, by name."""
    shares_file: bool = False
    """Whether the file may hold traces of other ranks too."""
    part: tuple[int, int] | None = None
    """Offset and size of the bytes of the (decompressed) file that hold the trace, where it has others too."""
    manifest: Mapping[str, Any] | None = field(default=None, hash=False)
    """The manifest of the run, if the file states it."""
    run_issues: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    """What the file says was wrong with the files of the run, fields as those of a run's data_quality."""
    trace: Trace | None = field(default=None, repr=False, compare=False)
    """The trace itself, if the reader had to read it to know the above."""
    companions: tuple[Companion, ...] = ()
    """The files of other tools that belong to the trace; the loader sets them for `read`."""


class Reader(Protocol):
    """One input format. Subclass it, and list an instance in READERS or as an entry point of `tracekit.readers`."""

    name: str
    """What a file of this format is, such as "PyTorch profiler trace (Kineto JSON)"."""
    suffixes: tuple[str, ...]
    """Endings of file names, in lower case. A folder is searched for them where the format has traces."""
    contents: str
    """What tracekit reads from such a file, for the documentation."""
    has_traces: bool = True
    is_companion: bool = False
    """Whether such a file adds to the trace of the process that `traces` states, whatever its name."""
    is_joined_by_record_ids: bool = False
    """Whether a companion adds to operators only, by the ids of their record functions."""
    has_record_ids: bool = False
    """Whether operators state the ids of their record functions, as PyTorch's profiler writes them."""
    is_log: bool = False
    """Whether such a file, which has a part of what a profiler records, is read only where there is no other trace."""
    has_ranks_of_host: bool = False
    """Whether the ranks that a file states count the devices of one host, by whose name the file is called."""
    usage: str = ""
    """What to do with such a file where a trace is expected; only for formats without traces."""

    def has_name(self, name: str) -> bool:
        """Return whether a file in a folder may have this format, by its name in lower case."""
        return name.endswith(self.suffixes)

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether a file has this format, from its first bytes (decompressed, 256 KiB at most) and its name."""

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:
        """Return the traces in a file, in one cheap pass; `head` is what `sniff` was given.

        If not `is_complete`, the file is only the start of another. Raises BadTraceError if it has no trace.
        """
        raise BadTraceError(f"{path}: this is a {self.name}, not a trace; {self.usage}")

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
        """Return the trace `info` of a file, as this rank and window. Raises BadTraceError if it cannot be read.

        Of a companion, that is what is added to the tables of the trace.
        """
        raise BadTraceError(f"{path}: this is a {self.name}, not a trace; {self.usage}")

    def companions(self, rank: int) -> Sequence[str]:
        """Return the names of files of this format that belong to a rank's trace and lie in its folder or one above.

        What `read` returns for such a file is added to the tables of the trace.
        """
        return ()
