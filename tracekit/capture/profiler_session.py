"""torch's profiler for one window; the training's own profiler always has priority."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import ProfilerActivity, _KinetoProfile, record_function

from tracekit.capture.module_spans import ModuleSpans
from tracekit.capture.profiler_stderr import without_profiler_noise

_STARTS, _ENDS = ("_prepare_profiler", "_enable_profiler"), ("_disable_profiler",)


class ProfilerBusyError(RuntimeError):
    """The training's own profiler is running, and torch has only one per process."""


@dataclass(frozen=True)
class ProfilingOptions:
    """The device, cuda or cpu, what a trace contains in addition to times, and the folder before compression."""

    device: str
    memory: bool
    stacks: bool
    shapes: bool
    snapshot: bool
    warmup: int
    scratch: Path | None
    modules: bool = False


class ProfilerSession:
    """The profiler of one window of steps on the calling thread: `prepare`, `start`, `mark` each step, `stop`, `save`.

    The methods raise ProfilerBusyError where the training's own profiler runs.
    """

    def __init__(self, options: ProfilingOptions) -> None:
        cuda = options.device == "cuda"
        self._profiler = _KinetoProfile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            profile_memory=options.memory,
            with_stack=options.stacks,
            record_shapes=options.shapes or options.stacks,
            # Waits between streams, which only CUDA has.
            experimental_config=torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True) if cuda else None,
        )
        self._span: Any = None
        self._modules = ModuleSpans() if options.modules else None
        self.prepared = self.started = False

    def prepare(self) -> None:
        """Let the profiler warm up: what it records is discarded."""
        _refuse_second_profiler()
        with _own_call(), without_profiler_noise():
            self._profiler.prepare_trace()
        self.prepared = True

    def start(self) -> None:
        """Begin to record."""
        if not self.prepared:
            self.prepare()
        _refuse_second_profiler()
        block = torch.empty(1)
        with _own_call(), without_profiler_noise():
            self._profiler.start_trace()
            # torch warns about the first freed block with an unseen allocation: free one here, with stderr filtered.
            del block
        self.started = True
        if self._modules is not None:
            self._modules.open()

    def mark(self, step: int) -> None:
        """End the span of the previous step, if there is one, and begin that of `step`."""
        self.unmark()
        self._span = record_function(f"ProfilerStep#{step}")
        self._span.__enter__()

    def unmark(self) -> None:
        """End the span of a step."""
        span, self._span = self._span, None
        if span is not None:
            span.__exit__(None, None, None)

    def stop(self) -> None:
        """End the recording, or the warm-up."""
        if self._modules is not None:
            self._modules.close()
        self.unmark()
        if self.prepared:
            self.prepared = False
            with _own_call(), without_profiler_noise():
                if not self.started:
                    self._profiler.start_trace()  # a prepared profiler can only be stopped after a start
                self._profiler.stop_trace()

    def save(self, path: Path) -> None:
        """Write what was recorded as plain JSON. Raises OSError where that fails."""
        with without_profiler_noise():
            self._profiler.export_chrome_trace(str(path))
        if not path.exists():  # Kineto removes a file that it could not write completely
            raise OSError("the profiler could not write it; is the disk full?")


def before_foreign_profiler(callback: Callable[[], None]) -> None:
    """Call `callback` before any profiler other than a `ProfilerSession` starts in this process.

    torch.profiler, torch.autograd.profiler and emit_nvtx all start and stop through the functions wrapped here.
    """
    if _foreign.watched:
        return
    _foreign.watched = True
    for name in _STARTS:
        setattr(torch_profiler, name, _watch(getattr(torch_profiler, name), callback, running=True))
    for name in _ENDS:
        setattr(torch_profiler, name, _watch(getattr(torch_profiler, name), None, running=False))


class _ForeignProfiler:
    watched = False
    running = False


_foreign = _ForeignProfiler()
_own = threading.local()


def _watch(call: Callable[..., Any], before: Callable[[], None] | None, *, running: bool) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if getattr(_own, "acting", False):
            return call(*args, **kwargs)
        if before is not None and not _foreign.running:
            before()
        _foreign.running = running
        return call(*args, **kwargs)

    return wrapper


@contextlib.contextmanager
def _own_call() -> Iterator[None]:
    _own.acting = True
    try:
        yield
    finally:
        _own.acting = False


def _refuse_second_profiler() -> None:
    if _foreign.running or torch.autograd._profiler_enabled():
        raise ProfilerBusyError("another profiler is running")
