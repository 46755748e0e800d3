"""What a rank left of a hang: its last collectives by the flight recorder, the stacks of its threads."""

import math
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

_WINDOWS_PATH = re.compile(r"(?:[A-Za-z]:)?\\[^/]*$|[A-Za-z]:\\")


class CallState(StrEnum):
    """How far a call of a collective is."""

    SCHEDULED = "scheduled"
    STARTED = "started"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    function: str
    file: str
    line: int
    source: str = ""
    """The text of the line; "" where it is not known."""

    def __post_init__(self) -> None:
        """Write a path of Windows with slashes, as all that reads its parts expects."""
        if _WINDOWS_PATH.match(self.file):
            object.__setattr__(self, "file", self.file.replace("\\", "/"))

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def brief(self) -> str:
        """Return the frame without the folder of its file."""
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


@dataclass(frozen=True)
class Call:
    """One collective, send or receive as one rank called it."""

    rank: int
    order: int
    """Its position among the calls of the rank."""
    group: str
    description: str
    seq: int
    """Its number in its group: of collectives the same on all ranks, of sends and receives the rank's own."""
    op: str
    backend: str
    state: CallState
    is_p2p: bool = False
    source: int | None = None
    """Of a send or receive, the sender's rank in the group."""
    target: int | None = None
    input_sizes: tuple[tuple[int, ...], ...] = ()
    output_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    created_ns: int | None = None
    ended_ns: int | None = None
    duration_ns: int | None = None
    """How long the collective took on the device; None where the recorder did not measure it."""
    timeout_ms: int | None = None
    frames: tuple[Frame, ...] = ()
    """The stack of the call, innermost frame first."""
    parts: "tuple[Call, ...]" = ()
    """The calls that were coalesced into this one."""
    error: str = ""
    is_recorded: bool = True
    """Whether the flight recorder has it; False for a call in which the host was blocked before it was recorded."""

    @property
    def is_pending(self) -> bool:
        """Return whether the call is not complete."""
        return self.state is not CallState.COMPLETED

    @cached_property
    def input_numel(self) -> int:
        """Return the number of elements of all inputs."""
        return sum(map(math.prod, self.input_sizes))

    @cached_property
    def output_numel(self) -> int:
        """Return the number of elements of all outputs."""
        return sum(map(math.prod, self.output_sizes))


@dataclass(frozen=True)
class SystemCall:
    """The system call that a thread is in."""

    name: str
    path: str = ""
    """The file that it reads, writes or opens; "" where it is not known."""


@dataclass(frozen=True)
class ThreadStack:
    """What one thread does."""

    name: str
    frames: tuple[Frame, ...]
    """Innermost frame first."""
    is_main: bool = False
    cpu_ratio: float | None = None
    """The share of the time in which the thread ran on a processor."""
    system_call: SystemCall | None = None


@dataclass(frozen=True)
class RankDump:
    """All that is known of one rank."""

    rank: int
    paths: tuple[str, ...]
    calls: tuple[Call, ...] = ()
    groups: dict[str, tuple[str, tuple[int, ...] | None]] = field(default_factory=dict)
    """Description and ranks of each group by name; None where the dump does not have the ranks."""
    has_recorder: bool = False
    """Whether a flight recorder dump was read, not only stacks."""
    threads: tuple[ThreadStack, ...] = ()
    world_size: int | None = None
    written_ns: int | None = None
    """Unix time at which the dump was written."""
    modified_ns: int | None = None
    """Unix time at which its file was last modified."""
    reason: str = ""
    """Why: "timeout", "error", "exit"; "" where the dump does not say."""
    error: str = ""
    host: str = ""
    process_id: int | None = None
    stalled_ns: int | None = None
    """Time without progress before the dump."""
    dead_ranks: tuple[int, ...] = ()
    """Ranks on the same host whose processes did not exist any more."""

    @property
    def main_thread(self) -> ThreadStack | None:
        """Return the main thread's stack; the only thread's, where none is marked."""
        main = next((thread for thread in self.threads if thread.is_main), None)
        return main or (self.threads[0] if len(self.threads) == 1 else None)

    @property
    def pending(self) -> tuple[Call, ...]:
        """Return the calls that are not complete, oldest first."""
        return tuple(call for call in self.calls if call.is_pending)

    @cached_property
    def span_ns(self) -> tuple[int, int] | None:
        """Return the times of the first and last event; None without any."""
        times = [t for call in self.calls for t in (call.created_ns, call.ended_ns) if t]
        return (min(times), max(times)) if times else None

    @property
    def latest_ns(self) -> int:
        """Return a time at which the dump was written, or later: as stated, else of its file; 0 if unknown."""
        return self.written_ns or max(self.modified_ns or 0, (self.span_ns or (0, 0))[1])

    def with_stacks(self, other: "RankDump") -> "RankDump":
        """Return this dump with the stacks of another one of the same rank, if it has none itself."""
        return replace(self, threads=self.threads or other.threads, paths=(*self.paths, *other.paths))


@dataclass(frozen=True)
class HangDumps:
    """The dumps of a job, by rank, and what is to be said of its files."""

    ranks: dict[int, RankDump]
    notes: tuple[str, ...] = ()
