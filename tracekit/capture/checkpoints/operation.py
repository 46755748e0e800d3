"""One save or load on one rank: the stage of each of its threads at any moment, and the bytes moved."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.checkpoints.io_counters import WrittenFiles

AT_WORK = "at work"  # the part in which several threads go through stages, each with its own clock

Row = dict[str, Any]
Stage = str | None
Transitions = Mapping[tuple[str, str], Stage]


@dataclass(frozen=True)
class OperationKind:
    """The course of one kind of operation: the stages in torch's own log, by function and event.

    It begins in `first_stage`; None in `transitions` ends the stages. Files opened outside of the work contain metadata
    and count in `metadata_stage` as a whole.
    """

    first_stage: str
    transitions: Transitions
    metadata_stage: str


_PLANNING: dict[tuple[str, str], Stage] = {
    ("local_step", "end"): conventions.WAIT,
    ("global_step", "start"): conventions.PLAN,
    ("global_step", "end"): conventions.WAIT,
}

SAVE = OperationKind(
    conventions.PLAN,
    {
        **_PLANNING,
        ("write_data", "start"): AT_WORK,
        ("write_data", "end"): conventions.WAIT,
        ("finish_checkpoint", "start"): conventions.FINISH,
        ("finish_checkpoint", "end"): conventions.WAIT,
    },
    conventions.FINISH,
)

LOAD = OperationKind(
    conventions.PLAN,
    {**_PLANNING, ("read_data", "start"): AT_WORK, ("read_data", "end"): conventions.WAIT},
    conventions.PLAN,
)

ASYNC_SAVE = OperationKind(
    conventions.PLAN,
    {
        ("stage_state_dict", "start"): conventions.STAGE,
        ("stage_state_dict", "end"): conventions.WAIT,
        ("maybe_synchronize_staging", "start"): conventions.STAGE,
        ("maybe_synchronize_staging", "end"): conventions.WAIT,
    },
    conventions.FINISH,
)

FILE_SAVE = OperationKind(conventions.SERIALIZE, {}, conventions.FINISH)

FILE_LOAD = OperationKind(conventions.DESERIALIZE, {}, conventions.PLAN)


# A thread that waits for another one (Thread.join, Future.result, Queue.get) is inside one of these.
_WAITING = ("wait", "join", "acquire")

_JOINING = "_wait_for_tstate_lock"  # which `is_alive` calls as well

_ON_DEMAND = "KINETO_USE_DAEMON" in os.environ  # a profile may begin without Python's knowledge

_COUNTED_IN_TOTAL = (conventions.WRITE, conventions.READ, conventions.FINISH, conventions.PLAN)


class ThreadSampler:
    """Samples the training thread, assumed to be the main thread, from the thread that created this.

    `step` returns the optimizer steps done, or None where they are not counted.
    """

    def __init__(self, step: Callable[[], int | None]) -> None:
        self.step = step()
        self._count_steps = step
        self._training = threading.main_thread().ident
        self._is_other = threading.get_ident() != self._training
        self._always_waited = True
        self._samples = 0

    def sample(self) -> None:
        """Take one sample. Costs microseconds, and nothing on the training thread itself."""
        if not self._is_other or not self._always_waited:
            return
        frame = sys._current_frames().get(self._training or 0)
        self._samples += 1
        self._always_waited = frame is not None and _waits(frame)

    def is_blocked(self) -> bool:
        """Return whether training waited in every sample and finished no step meanwhile."""
        return not self._is_other or (self._always_waited and self._samples > 0 and self._count_steps() == self.step)


class StageClock:
    """The time of one thread, each nanosecond counted in its current `stage`; None is no stage.

    `spent_ns` and `first_ns` give by stage the time spent there and the Unix time of the first entry. Callers
    that switch to a stage and back use `previous_stage`: it runs several times per tensor, so each call counts.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.spent_ns: dict[Stage, int] = {stage: 0}
        self.previous_stage: Stage = None
        self._outer: list[Stage] = []
        self._since_ns = time.time_ns()
        self.first_ns: dict[Stage, int] = {stage: self._since_ns}

    def switch(self, stage: Stage) -> None:
        """Leave the current stage for `stage`."""
        now_ns = time.time_ns()
        # The system's clock may be set back; a stage never lasts less than no time.
        if now_ns > self._since_ns:
            self.spent_ns[self.stage] += now_ns - self._since_ns
        self._since_ns = now_ns
        self.stage = stage
        if stage not in self.first_ns:
            self.spent_ns[stage] = 0
            self.first_ns[stage] = now_ns

    def enter(self, stage: Stage) -> None:
        """Count what follows in `stage`, until `leave`."""
        self._outer.append(self.stage)
        self.switch(stage)

    def leave(self) -> None:
        """Return to the stage before the last `enter`."""
        self.switch(self._outer.pop())

    @contextlib.contextmanager
    def inside(self, stage: Stage) -> Iterator[None]:
        """Count the block in `stage`, then return to the current one."""
        self.enter(stage)
        try:
            yield
        finally:
            self.leave()

    def stop(self) -> int:
        """Count the time until now, and return now, in Unix ns."""
        self.switch(self.stage)
        return self._since_ns


class Operation:
    """One operation, from the moment this is made to `stop`, both on the thread that it runs on.

    `step` returns the optimizer steps done, or None. A thread at work begins in `worker_stage`.
    """

    def __init__(self, kind: OperationKind, step: Callable[[], int | None], *, worker_stage: str = "") -> None:
        self.worker_stage = worker_stage or kind.first_stage
        self.files = WrittenFiles()
        self.sampler = ThreadSampler(step)
        self.whole_bytes: int | None = None  # of the checkpoint that is loaded from, by its metadata
        self.kind = kind
        self._thread = threading.get_ident()
        self._clock = StageClock(kind.first_stage)
        self._workers: dict[int, StageClock] = {}
        self._counts = _Counts()
        self._end_ns = 0
        self._span = _open_span(kind.first_stage) if kind.transitions else None

    @property
    def start_ns(self) -> int:
        """Unix time at which it began."""
        return self._clock.first_ns[self.kind.first_stage]

    def on_log_event(self, function: str, event: str) -> None:
        """Handle an event of torch's log; other threads' events belong to other operations."""
        if self._on_own_thread() and (function, event) in self.kind.transitions:
            self.switch(self.kind.transitions[function, event])

    def switch(self, stage: Stage) -> None:
        """Go on with `stage` on the operation's own thread."""
        previous = self._clock.stage
        self.close_span()
        self._clock.switch(stage)
        self.sampler.sample()
        self._span = _open_span(stage)
        if stage == AT_WORK:
            self._workers[self._thread] = StageClock(self.worker_stage)
        elif previous == AT_WORK:
            self._workers[self._thread].switch(None)

    def close_span(self) -> None:
        """End the span of the current stage, if it has one."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def stop(self) -> None:
        """End the operation."""
        self._end_ns = self._clock.stop()
        self.sampler.sample()

    def includes_this_thread(self) -> bool:
        """Return whether the calling thread takes part in this operation."""
        return self._on_own_thread() or threading.get_ident() in self._workers

    @contextlib.contextmanager
    def syncing(self, descriptor: int | None) -> Iterator[None]:
        """Count the block, which syncs one file (None: all) on a thread of this operation, as fsync."""
        with self.thread_clock().inside(conventions.FSYNC), span(conventions.FSYNC):
            yield
        self.files.sync(descriptor)
        self.count(conventions.FSYNC, None, 1, 1 if descriptor is None else None)

    def thread_clock(self) -> StageClock:
        """Clock of the calling thread, which takes part in this operation from now on."""
        thread = threading.get_ident()
        if thread == self._thread and self._clock.stage != AT_WORK:
            return self._clock
        clock = self._workers.get(thread)
        if clock is None:
            clock = self._workers[thread] = StageClock(self.worker_stage)
        elif clock.stage is None:
            clock.switch(self.worker_stage)
        return clock

    def count(self, stage: str, size_bytes: int | None, files: int | None, calls: int | None = None) -> None:
        """Add to the counts of `stage`."""
        self._counts.add(stage, size_bytes, files, calls)
        if stage in _COUNTED_IN_TOTAL:
            self._counts.add(conventions.TOTAL, size_bytes, files, calls)

    def counted_bytes(self, stage: str) -> int | None:
        """Bytes that `stage` has moved so far; None where not known."""
        return self._counts.of(stage)["bytes"]

    def counted_files(self, stage: str) -> int | None:
        """Files of `stage` so far; None where not known."""
        return self._counts.of(stage)["files"]

    def rows(self) -> list[Row]:
        """Row for each stage that was entered, and the total: stage, start_ns, dur_ns, bytes, files, calls."""
        total_ns = self._end_ns - self.start_ns
        times = apportion(self._clock.spent_ns.get(AT_WORK, 0), self._workers.values())
        for stage, spent_ns in self._clock.spent_ns.items():
            if stage is None or stage == AT_WORK:
                continue
            start_ns = self._clock.first_ns[stage]
            # Rank 0 syncs its shard at work, and the metadata inside finish.
            first_ns, other_ns = times.get(stage, (start_ns, 0))
            times[stage] = (min(first_ns, start_ns), other_ns + spent_ns)
        times[conventions.TOTAL] = (self.start_ns, total_ns)
        return [
            {"stage": stage, "start_ns": times[stage][0], "dur_ns": times[stage][1], **self._counts.of(stage)}
            for stage in conventions.CHECKPOINT_STAGES
            if stage in times
        ]

    def _on_own_thread(self) -> bool:
        return threading.get_ident() == self._thread


class _Counts:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._files: dict[str, int] = {}
        self._calls: dict[str, int] = {}

    def add(self, stage: str, size_bytes: int | None, files: int | None, calls: int | None) -> None:
        with self._lock:
            for counts, more in ((self._bytes, size_bytes), (self._files, files), (self._calls, calls)):
                if more is not None:
                    counts[stage] = counts.get(stage, 0) + more

    def of(self, stage: str) -> dict[str, int | None]:
        return {"bytes": self._bytes.get(stage), "files": self._files.get(stage), "calls": self._calls.get(stage)}


_here = threading.local()

_running: list[Operation] = []

_running_lock = threading.Lock()


@contextlib.contextmanager
def running(operation: Operation) -> Iterator[None]:
    """Make `operation` the calling thread's current one."""
    _here.operation = operation
    with _running_lock:
        _running.append(operation)
    try:
        yield
    finally:
        _here.operation = None
        with _running_lock:
            _running.remove(operation)


def current() -> Operation | None:
    """Operation that the calling thread runs or takes part in; None if there is none."""
    of_thread: Operation | None = getattr(_here, "operation", None)
    if of_thread is not None or not _running:
        return of_thread
    return next((operation for operation in tuple(_running) if operation.includes_this_thread()), None)


def timed_sync(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `os.fsync` or `os.sync` timed on the threads of operations."""

    def sync(*args: Any) -> Any:
        operation = current()
        if operation is None:
            return original(*args)
        descriptor = args[0] if args else None
        if descriptor is not None and not isinstance(descriptor, int):
            descriptor = int(descriptor.fileno())
        with operation.syncing(descriptor):
            return original(*args)

    return sync


def span(stage: str = "") -> contextlib.AbstractContextManager[Any]:
    """Span of a stage, "" being the whole, around a block; nothing where no profile is recorded.

    A span takes tens of microseconds and releases the GIL, for which a saving thread may be waiting.
    """
    if not (torch.autograd.profiler._is_profiler_enabled or _ON_DEMAND):
        return contextlib.nullcontext()
    name = ".".join((conventions.CHECKPOINT, stage)) if stage else conventions.CHECKPOINT
    recorded: contextlib.AbstractContextManager[Any] = torch.profiler.record_function(conventions.span_name(name))
    return recorded


def apportion(duration_ns: int, clocks: Iterable[StageClock]) -> dict[str, tuple[int, int]]:
    """Divide a time among the stages of concurrent threads, in proportion to the threads' own time in each.

    Returns by stage the Unix time of its first entry and its share, in ns; the shares sum to `duration_ns` at most.
    """
    spent_ns: dict[str, int] = {}
    first_ns: dict[str, int] = {}
    for clock in clocks:
        for stage, own_ns in clock.spent_ns.items():
            if stage is not None:
                spent_ns[stage] = spent_ns.get(stage, 0) + own_ns
                first_ns[stage] = min(first_ns.get(stage, clock.first_ns[stage]), clock.first_ns[stage])
    total_ns = max(1, sum(spent_ns.values()))
    return {stage: (first_ns[stage], duration_ns * own_ns // total_ns) for stage, own_ns in spent_ns.items()}


def _waits(frame: FrameType) -> bool:
    if frame.f_code.co_filename != threading.__file__:
        return False
    caller = frame.f_back if frame.f_code.co_name == _JOINING else frame
    return caller is not None and caller.f_code.co_name in _WAITING


def _open_span(stage: Stage) -> Any:
    if stage is None or stage == AT_WORK:
        return None
    opened = span(stage)
    opened.__enter__()
    return opened
