"""The clocks and counts of one save: which stage each of its threads is in, moment by moment."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.stages import Stage, StageClock, share_out

_WRITING = "write_data"  # the part of a save in which staging, serializing, writing and syncing take turns

# What torch's log says has begun or ended, and the stage that the saving thread is in from then on.
_TURNS: dict[tuple[str, str], Stage] = {
    ("local_step", "end"): conventions.WAIT,
    ("global_step", "start"): conventions.PLAN,
    ("global_step", "end"): conventions.WAIT,
    ("write_data", "start"): _WRITING,
    ("write_data", "end"): conventions.WAIT,
    ("finish_checkpoint", "start"): conventions.FINISH,
    ("finish_checkpoint", "end"): conventions.WAIT,
    ("save", "end"): None,
}


class Save:
    """One save on one rank, from the moment this is made to `stop`, both on the thread that saves.

    `streams` says whether the writer's streams are timed: without, its writing is one stage. `paired_tells` says
    whether the writer asks a stream for its position both before and after each item.
    """

    def __init__(self, *, streams: bool, paired_tells: bool) -> None:
        self._first_stage = conventions.STAGE if streams else conventions.WRITE
        self._paired_tells = paired_tells
        self._thread = threading.get_ident()
        self._clock = StageClock(conventions.PLAN)
        self._writers: dict[int, StageClock] = {}
        self._counts = _Counts()
        self._end_ns = 0
        self._span = _open_span(conventions.PLAN)

    def turn(self, function: str, event: str) -> None:
        """Take note of what torch's log says; what other threads do is not of this save."""
        if not self._on_saving_thread() or (function, event) not in _TURNS:
            return
        stage = _TURNS[function, event]
        self.close_span()
        self._clock.switch(stage)
        self._span = _open_span(stage)
        if stage == _WRITING:
            self._writers[self._thread] = StageClock(self._first_stage)
        elif function == _WRITING:
            self._writers[self._thread].switch(None)

    def close_span(self) -> None:
        """End the span of the present stage, if it has one."""
        if self._span is not None:
            self._span.__exit__(None, None, None)
            self._span = None

    def stop(self) -> None:
        """End the save."""
        self._end_ns = self._clock.stop()

    def is_mine(self) -> bool:
        """Return whether the calling thread has a part in this save."""
        return self._on_saving_thread() or threading.get_ident() in self._writers

    @contextlib.contextmanager
    def syncing(self) -> Iterator[None]:
        """Charge the block, which syncs one file on a thread of this save, to fsync."""
        span = torch.profiler.record_function(_span_name(conventions.FSYNC))
        with self._clock_here().inside(conventions.FSYNC), span:
            yield
        self._counts.add(conventions.FSYNC, None, 1)

    def timed_create_stream(self, create_stream: Callable[..., Any]) -> Callable[..., Any]:
        """Return a file system's `create_stream` with its streams timed and counted."""

        @contextlib.contextmanager
        def create(*args: Any, **kwargs: Any) -> Iterator[Any]:
            clock = self._clock_here()
            # The metadata file belongs to finish as a whole, the shards are taken apart.
            stage = conventions.FINISH if clock.stage == conventions.FINISH else conventions.WRITE
            with contextlib.ExitStack() as stream:
                with clock.inside(stage):
                    raw = stream.enter_context(create_stream(*args, **kwargs))
                timed = _Stream(raw, clock, stage, paired_tells=self._paired_tells)
                yield timed
                with clock.inside(stage):
                    stream.close()
            if stage == conventions.WRITE:
                clock.switch(None)  # until there is another item: a thread may be done and wait for the others
            self._counts.add(stage, timed.written_bytes, 1)

        return create

    def timed_resolve_data(self, resolve_data: Callable[..., Any]) -> Callable[..., Any]:
        """Return a planner's `resolve_data` timed, with the bytes that it gives counted."""

        @functools.wraps(resolve_data)
        def resolve(write_item: Any) -> Any:
            with self._clock_here().inside(conventions.STAGE):
                data = resolve_data(write_item)
            self._counts.add(conventions.STAGE, _size_bytes(data), None)
            return data

        return resolve

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each stage that was entered, and the total: stage, start_ns, dur_ns, bytes, files."""
        times = self._times()
        return [
            {
                "stage": stage,
                "start_ns": times[stage][0],
                "dur_ns": times[stage][1],
                "bytes": self._counts.bytes_of(stage),
                "files": self._counts.files_of(stage),
            }
            for stage in conventions.CHECKPOINT_STAGES
            if stage in times
        ]

    def _times(self) -> dict[str, tuple[int, int]]:
        start_ns = self._clock.first_ns[conventions.PLAN]
        times = share_out(self._clock.spent_ns.get(_WRITING, 0), self._writers.values())
        for stage, spent_ns in self._clock.spent_ns.items():
            if stage is not None and stage != _WRITING:
                # Rank 0 syncs its shard inside the writing, and the metadata inside finish.
                first_ns, other_ns = times.get(stage, (self._clock.first_ns[stage], 0))
                times[stage] = (min(first_ns, self._clock.first_ns[stage]), other_ns + spent_ns)
        times[conventions.TOTAL] = (start_ns, self._end_ns - start_ns)
        return times

    def _on_saving_thread(self) -> bool:
        return threading.get_ident() == self._thread

    def _clock_here(self) -> StageClock:
        """Return the clock of the calling thread, which is at work for this save from now on."""
        if self._on_saving_thread() and self._clock.stage != _WRITING:
            return self._clock
        thread = threading.get_ident()
        if thread not in self._writers:
            self._writers[thread] = StageClock(self._first_stage)
        clock = self._writers[thread]
        if clock.stage is None:
            clock.switch(self._first_stage)
        return clock


class _Counts:
    """Bytes and files by stage, counted from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: dict[str, int] = {}
        self._files: dict[str, int] = {}

    def add(self, stage: str, size_bytes: int | None, files: int | None) -> None:
        totals = (stage, conventions.TOTAL) if stage in (conventions.WRITE, conventions.FINISH) else (stage,)
        with self._lock:
            for name in totals:
                if size_bytes is not None:
                    self._bytes[name] = self._bytes.get(name, 0) + size_bytes
                if files is not None:
                    self._files[name] = self._files.get(name, 0) + files

    def bytes_of(self, stage: str) -> int | None:
        return self._bytes.get(stage)

    def files_of(self, stage: str) -> int | None:
        return self._files.get(stage)


class _Stream:
    """A stream whose writing is charged to `stage` of a clock, and its caller's work on an item to serialize."""

    def __init__(self, raw: Any, clock: StageClock, stage: str, *, paired_tells: bool) -> None:
        self._raw = raw
        self._clock = clock
        self._stage = stage
        self._paired_tells = paired_tells
        self.written_bytes = 0

    def write(self, data: Any) -> Any:
        with self._clock.inside(self._stage):
            written = self._raw.write(data)
        self.written_bytes += memoryview(data).nbytes
        return written

    def tell(self) -> Any:
        # torch asks for the position before and after each item; between two items it fetches the next.
        if self._stage == conventions.WRITE:
            ends = self._paired_tells and self._clock.stage == conventions.SERIALIZE
            self._clock.switch(conventions.STAGE if ends else conventions.SERIALIZE)
        return self._raw.tell()

    def flush(self) -> None:
        with self._clock.inside(self._stage):
            self._raw.flush()

    def close(self) -> None:
        with self._clock.inside(self._stage):
            self._raw.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def _span_name(stage: str) -> str:
    return conventions.span_name(f"{conventions.CHECKPOINT}.{stage}")


def _open_span(stage: Stage) -> Any:
    if stage is None or stage == _WRITING:
        return None
    span = torch.profiler.record_function(_span_name(stage))
    span.__enter__()
    return span


def _size_bytes(data: Any) -> int:
    return int(data.nbytes) if isinstance(data, torch.Tensor) else memoryview(data.getbuffer()).nbytes
