"""Spans of the modules' forward calls in a trace, while a window is recorded: what `record --modules` adds.

Hooks on all modules exist only between `open` and `close`; outside of windows nothing is called. The backward of a
module needs no span: autograd's sequence numbers tie its operators to those of the forward.
"""

import threading
import warnings
from typing import Any, TypeAlias

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from tracekit import conventions
from tracekit.capture import notices

_WRAPPING = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
_PARALLEL = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
_FSDP = "FSDP"
_COMPILE_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks on modules"
_is_compiling = torch.compiler.is_compiling
_Span = torch._C._profiler._RecordFunctionFast  # a twentieth of the time that record_function takes

Calls: TypeAlias = list[tuple[torch.nn.Module, Any]]
"""The calls that are open on a thread: module and span."""


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
        """Return the span's name for a module that was not seen before, and remember those of all modules in it.

        A module that is not part of the one that calls it, such as a shared loss, gets a path in the caller's. Of a
        module inside a wrapper the name is empty: the span is the wrapper's.
        """
        around = next((name for caller, _ in reversed(calls) if (name := self._names.get(caller))), None)
        root = type(_unwrap(module)).__name__.removeprefix(_FSDP) or _FSDP
        prefix = conventions.MODULE_PREFIX + root if around is None else f"{around}.{root}"
        used_names = set()
        for path, part in module.named_modules():
            span_name = ".".join([prefix, *_parts(module, path)])
            self._names.setdefault(part, "" if span_name in used_names else span_name)
            used_names.add(span_name)
        return self._names[module]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.calls: Calls = []


def _unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module of the training inside torch's wrappers."""
    for name in ("module", *_WRAPPING) if isinstance(module, _PARALLEL) else _WRAPPING:
        inner = module._modules.get(name)
        if inner is not None:
            return _unwrap(inner)
    return module


def _parts(root: torch.nn.Module, path: str) -> list[str]:
    """Return the names on a path below the root without those of wrappers."""
    names = path.split(".") if path else []
    if names and names[0] == "module" and isinstance(root, _PARALLEL):
        names = names[1:]
    return [name for name in names if name not in _WRAPPING]
