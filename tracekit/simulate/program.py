"""What a rank's host does, as a list of instructions, and the kernels it launches."""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tracekit.conventions.pipeline_schedules import Action

COMPUTE, COMMUNICATION, COPY = "compute", "communication", "copy"
MAIN_STREAM, GATHER_STREAM, REDUCE_STREAM, COPY_IN_STREAM, ALL_REDUCE_STREAM = 7, 20, 24, 28, 32
EXPERT_STREAM, TENSOR_STREAM, WORLD_STREAM = 36, 40, 44
SEND_STREAMS, RECEIVE_STREAMS = {"F": 48, "B": 52}, {"F": 56, "B": 60}
"""Of activations (F) and of gradients (B)."""
SECOND_CHUNK = 16
"""What is added to such a stream for transfers of the second stages of a V-shaped schedule, which go the other way."""
MAIN_THREAD, AUTOGRAD_THREAD = 4242, 4243

_READ_BYTES = 4

SHARD, REPLICATE = "shard", "replicate"
"""Process groups: the ranks over which units are sharded, and those that hold the same shard."""


class Collective(NamedTuple):
    """A collective's message: `op` as NCCL's kernels name it, elements in and out per rank."""

    op: str
    group: str
    dtype: str
    sent: int
    received: int
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Of an all-to-all: the rows sent to and received from each rank of the group."""
    slowest: int = 0
    """Of an all-to-all: the elements that its busiest rank sends or receives."""
    peer: int | None = None
    """Of a send or receive: the other rank's place in the group."""


class Kernel(NamedTuple):
    """Work on a stream. `work_ns` is what it takes alone; a collective's follows from its message.

    `pieces` is the number of kernels that its tensor is split into; each must get multiprocessors again.
    """

    name: str
    kind: str
    stream: int
    work_ns: int = 0
    pieces: int = 1
    blocks: int = 1
    bytes: int | None = None
    collective: Collective | None = None


class OpenSlice(NamedTuple):
    """A host slice begins. `category` is Kineto's."""

    name: str
    category: str
    cost_ns: int
    args: dict[str, object] | None = None


class CloseSlice(NamedTuple):
    """The innermost open slice of the thread ends."""


class SwitchThread(NamedTuple):
    """Another thread continues; the current one waits."""

    thread: int


class PassTime(NamedTuple):
    """Host time passes: Python, or waiting for data."""

    ns: int


class Stall(NamedTuple):
    """The host of a rank stops here, if `Impairments.host_stalls` says so for the current step."""


class Call(NamedTuple):
    """A runtime call that takes host time. `drains` makes it wait until the device has done all that was launched."""

    name: str
    ns: int
    drains: bool = False


class Launch(NamedTuple):
    """A kernel is launched. `key` stays the same whatever else the program holds, so that jitter does too."""

    kernel: Kernel
    key: int


class Record(NamedTuple):
    """An event is recorded on a stream."""

    event: int
    stream: int


class Wait(NamedTuple):
    """A stream waits for an event."""

    event: int
    stream: int


class Synchronize(NamedTuple):
    """The host waits for an event."""

    event: int
    call: str


class Allocate(NamedTuple):
    """The allocator gives memory to `buffer`."""

    buffer: str
    bytes: int


class Free(NamedTuple):
    """The memory of `buffer` goes back to the allocator."""

    buffer: str


class Flush(NamedTuple):
    """The allocator returns its cache to the device (True), or allocates it again (False)."""

    empties: bool


class Step(NamedTuple):
    """A training step begins; what is launched from here on belongs to it."""

    number: int


class Act(NamedTuple):
    """A pipeline action begins: what is launched from here on belongs to it; None ends it."""

    action: Action | None


Instruction: TypeAlias = (
    OpenSlice | CloseSlice | SwitchThread | PassTime | Stall | Call | Launch | Record | Wait | Synchronize | Allocate
    | Free | Flush | Step | Act
)  # fmt: skip


class _Closing(AbstractContextManager[None]):
    """Closes the innermost open slice of a program at its end; programs open too many for a generator each."""

    def __init__(self, program: list[Instruction]) -> None:
        self._program = program

    def __exit__(self, *error: object) -> None:
        self._program.append(_CLOSE)


_CLOSE = CloseSlice()


def timed_program(program: Iterable[Instruction], space_ns: int) -> list[Instruction]:
    """Return a program that takes the same time, without what only describes it: slices, threads, actions, memory.

    A slice passes its own host time, and `space_ns` where it begins and where it ends.
    """
    timed: list[Instruction] = []
    passed_ns = 0
    for instruction in program:
        if isinstance(instruction, OpenSlice):
            passed_ns += space_ns + instruction.cost_ns
        elif isinstance(instruction, CloseSlice):
            passed_ns += space_ns
        elif isinstance(instruction, PassTime):
            passed_ns += instruction.ns
        elif not isinstance(instruction, SwitchThread | Act | Allocate | Free | Flush):
            timed += [PassTime(passed_ns), instruction] if passed_ns else [instruction]
            passed_ns = 0
    return timed


@dataclass
class Host:
    """Builds a program, in the order of the host's actions."""

    op_ns: int
    program: list[Instruction] = field(default_factory=list)
    thread: int = MAIN_THREAD
    _events: int = 0
    _position: str = ""
    _launched: dict[str, int] = field(default_factory=dict)

    def begin(self, position: str) -> None:
        """Set the position of the next launches in the training: step, micro-batch, phase and unit."""
        self._position = position
        self._launched = {}

    def __post_init__(self) -> None:
        self._closing = _Closing(self.program)

    def span(
        self, name: str, category: str = "user_annotation", *, cost_ns: int = 0, args: dict[str, object] | None = None
    ) -> AbstractContextManager[None]:
        """Surround what is written meanwhile by a slice, which begins with this call."""
        self.program.append(OpenSlice(name, category, cost_ns, args))
        return self._closing

    def op(self, name: str, args: dict[str, object] | None = None) -> AbstractContextManager[None]:
        """Surround what is written meanwhile by a dispatcher op, with the host time of one."""
        return self.span(name, "cpu_op", cost_ns=self.op_ns, args=args)

    @contextmanager
    def on(self, thread: int) -> Iterator[None]:
        """Let another thread do what is written meanwhile."""
        before, self.thread = self.thread, thread
        self.program.append(SwitchThread(thread))
        yield
        self.thread = before
        self.program.append(SwitchThread(before))

    def launch(self, kernel: Kernel) -> None:
        """Launch a kernel."""
        count = self._launched[kernel.name] = self._launched.get(kernel.name, -1) + 1
        self.program.append(Launch(kernel, zlib.crc32(f"{self._position} {kernel.name} {count}".encode())))

    def record(self, stream: int) -> int:
        """Record an event on a stream and return its number."""
        self._events += 1
        self.program.append(Record(self._events, stream))
        return self._events

    def wait(self, stream: int, event: int) -> None:
        """Let a stream wait for an event."""
        self.program.append(Wait(event, stream))

    def follow(self, stream: int, leader: int) -> None:
        """Let a stream wait for all that another has been given so far (wait_stream)."""
        self.wait(stream, self.record(leader))

    def read_item(self) -> None:
        """Copy a number to the host, which waits for the main stream (.item())."""
        copy = Kernel("Memcpy DtoH (Device -> Pageable)", COPY, MAIN_STREAM, 1_500, bytes=_READ_BYTES)
        with self.op("aten::item"), self.op("aten::_local_scalar_dense"):
            self.launch(copy)
            self.add(Synchronize(self.record(MAIN_STREAM), "cudaStreamSynchronize"))

    def add(self, instruction: Instruction) -> None:
        """Write any other instruction down."""
        self.program.append(instruction)
