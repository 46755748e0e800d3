"""torch's profiler for one window; the training's own profiler always has priority."""

import contextlib
import functools
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.autograd import profiler as torch_profiler
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, _KinetoProfile, record_function

from tracekit import conventions
from tracekit.capture import notices

_STARTS, _ENDS = ("_prepare_profiler", "_enable_profiler"), ("_disable_profiler",)
_STDERR = 2
_FULL_COLLECTION = 2  # the oldest generation
_NOISE = (
    b"Memory block of unknown size was allocated before the profiling",
    b"gpuGetDeviceCount failed",  # a torch built for CUDA, profiled on a machine without a driver
    b"External init callback must run in same thread",  # a loop that does not run on the main thread
    b"Failed to write to log file",  # the recorder reports it, with the file's name
)
_WRAPPING = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_FSDP = "FSDP"
_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks on modules"
_is_compiling = torch.compiler.is_compiling
_Span = torch._C._profiler._RecordFunctionFast  # a twentieth of the time that record_function takes

Calls: TypeAlias = list[tuple[torch.nn.Module, Any]]
"""The calls that are open on a thread: module and span."""


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
        self._collections = GarbageSpans()
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
        self._collections.open()
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
        self._collections.close()
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


@contextlib.contextmanager
def without_profiler_noise() -> Iterator[None]:
    """Drop Kineto's ``USDT:`` lines and its remarks on what it cannot profile here; pass all other lines on.

    They go to the file descriptor, which is therefore replaced by a pipe. (Log levels would silence errors too, and
    are the user's to set.)
    """
    notices.flush()
    try:
        terminal, (out, into) = os.dup(_STDERR), os.pipe()
    except OSError:  # no stderr, nothing to filter
        yield
        return
    os.dup2(into, _STDERR)
    os.close(into)
    # A child process started meanwhile inherits the pipe as its stderr: the thread serves it as long as it lives.
    reader = threading.Thread(target=_pass_on, args=(out, terminal), name="tracekit-stderr", daemon=True)
    reader.start()
    try:
        yield
    finally:
        notices.flush()
        os.dup2(terminal, _STDERR)
        reader.join(timeout=1.0)


class ModuleSpans:
    """Opens a span ``nn.Module: Model.layers.0`` around each forward call of a module, from `open` to `close`.

    A path begins with the class of the outermost module. A module that torch wraps (DistributedDataParallel, FSDP,
    torch.compile, activation checkpointing) and its wrapper are one, with the name of the module; inside of a compiled
    module nothing is called. torch writes these spans as operators; readers of tracekit take them for annotations, by
    their names. A failure ends the spans with a line on stderr, and never reaches the training.
    """

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._names: dict[torch.nn.Module, str] = {}  # modules are alive: a window is short
        self._thread = _Thread()

    def open(self) -> None:
        """Add the hooks."""
        warnings.filterwarnings("ignore", message=_COMPILE_WARNING)
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]

    def close(self) -> None:
        """Remove the hooks, end the spans that are open on this thread, and forget all modules."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()
        while self._thread.calls:
            _, span = self._thread.calls.pop()
            if span is not None:
                span.__exit__(None, None, None)
        self._names.clear()

    def _before(self, module: torch.nn.Module, _inputs: Any) -> None:
        if _is_compiling():  # the module is traced, not called
            return
        try:
            calls = self._thread.calls
            name = self._names.get(module)
            if name is None:
                name = self._name_modules(module, calls)
            span = _Span(name) if name else None
            if span is not None:
                span.__enter__()
            calls.append((module, span))
        except Exception as error:  # noqa: BLE001 whatever fails here, the training continues
            notices.report_failure("modules are not recorded", error)
            self.close()

    def _after(self, module: torch.nn.Module, _inputs: Any, _outputs: Any) -> None:
        if _is_compiling():
            return
        calls = self._thread.calls
        # Calls inside whose hook was not called are over too; one that began before the hooks has no span.
        if calls and (calls[-1][0] is module or any(other is module for other, _ in calls)):
            called = None
            while called is not module:
                called, span = calls.pop()
                if span is not None:
                    span.__exit__(None, None, None)

    def _name_modules(self, module: torch.nn.Module, calls: "Calls") -> str:
        """Name the span of a module that was not seen before, and those of all modules in it.

        A module that is not part of the one that calls it, such as a shared loss, gets a path in the caller's. Of a
        module inside a wrapper the name is empty: the span is the wrapper's.
        """
        around = next((name for caller, _ in reversed(calls) if (name := self._names.get(caller))), None)
        root = type(_unwrap(module)).__name__.removeprefix(_FSDP) or _FSDP
        prefix = conventions.MODULE_PREFIX + root if around is None else f"{around}.{root}"
        used_names = set()
        for path, part in module.named_modules():
            span_name = ".".join([prefix, *module_path(module, path)])
            self._names.setdefault(part, "" if span_name in used_names else span_name)
            used_names.add(span_name)
        return self._names[module]


class GarbageSpans:
    """Opens a span around each full collection of Python's garbage collector, from `open` to `close`.

    Younger generations have a few thousand objects and take less than a millisecond: they are not recorded.
    """

    def __init__(self) -> None:
        self._span: Any = None

    def open(self) -> None:
        """Watch the collector."""
        gc.callbacks.append(self._on_collection)

    def close(self) -> None:
        """Stop watching the collector."""
        if self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] < _FULL_COLLECTION:
            return
        span, self._span = self._span, None
        if phase == "start":
            self._span = _Span(conventions.GARBAGE_SPAN)
            self._span.__enter__()
        elif span is not None:
            span.__exit__(None, None, None)


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: Calls = []


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


def _pass_on(out: int, terminal: int) -> None:
    with open(out, "rb") as lines, open(terminal, "wb", buffering=0) as target:
        for line in lines:
            if not (line.startswith(b"USDT:") or any(remark in line for remark in _NOISE)):
                target.write(line)


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    for name in ("module", *_WRAPPING) if isinstance(module, _PARALLEL) else _WRAPPING:
        inner = module._modules.get(name)
        if inner is not None:
            return _unwrap(inner)
    return module


def module_path(root: torch.nn.Module, path: str) -> list[str]:
    """Names on a module's path below the root, without those of wrappers."""
    names = path.split(".") if path else []
    if names and names[0] == "module" and isinstance(root, _PARALLEL):
        names = names[1:]
    return [name for name in names if name not in _WRAPPING]
