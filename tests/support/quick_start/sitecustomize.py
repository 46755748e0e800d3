"""Runs at the start of processes that tests launch: they import torch and frameworks in less time.

Imports of torch and of frameworks collect no garbage: what they build stays, and repeated collections took a quarter of
their time. Later collections leave out what `import torch` has built.

The first step of an optimizer imports torch's compiler, only to keep it away from the step, and a profiler its
settings, which imports the rest; that takes as long as `import torch`. DDP imports it for one setting, FSDP2 for its
settings alone. Here the compiler is imported when anything else of it is used, such as by torch.compile.
"""

import gc
import importlib.util
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_FROZEN = "torch"
_COMPILER, _BACKEND = "torch._dynamo", "torch._inductor"
_LARGE = {_FROZEN, _COMPILER, _BACKEND, "torch.distributed.fsdp", "accelerate", "transformers", "pytorch_lightning"}


_started: set[str] = set()
"""The postponed modules that are executed, or were."""


class _Fast:
    """Finds large modules as the other finders do, and has them executed without collections or later."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _LARGE:
            return None
        _LARGE.discard(name)
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            _pause_in(spec.loader, name)
            if name in (_COMPILER, _BACKEND):
                _postpone(spec.loader, name)
        return spec


def _pause_in(loader: Any, name: str) -> None:
    execute = loader.exec_module

    def exec_module(module: Any) -> None:
        vars(loader).pop("exec_module", None)
        was_on = gc.isenabled()
        gc.disable()
        try:
            execute(module)
            if name == _FROZEN:
                gc.freeze()
        finally:
            if was_on:
                gc.enable()

    loader.exec_module = exec_module


class _Postponed(ModuleType):
    """A module that is executed when one of its attributes is used that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        execute = vars(self)["_execute"]
        execute()
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None


class _DdpUtils:
    """What DDP uses of `torch._dynamo.utils`; anything else of it executes the compiler."""

    def __init__(self, compiler: ModuleType) -> None:
        self._compiler = compiler

    def get_optimize_ddp_mode(self) -> str:
        return "ddp_optimizer"  # the default of the setting

    def __getattr__(self, name: str) -> Any:
        vars(self._compiler)["_execute"]()
        return getattr(sys.modules[f"{_COMPILER}.utils"], name)


def _settings(folder: str) -> ModuleType:
    """The settings of the compiler, which FSDP2 reads: they need nothing else of it."""
    name = f"{_COMPILER}.config"
    spec = importlib.util.spec_from_file_location(name, f"{folder}/config.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _postpone(loader: Any, name: str) -> None:
    execute, lock = loader.exec_module, threading.RLock()

    def exec_module(module: Any) -> None:
        path = vars(module)["__path__"]
        if name == _COMPILER:
            module.disable, module.graph_break = partial(_disable, module), lambda *_, **__: None
            module.utils, module.config = _DdpUtils(module), _settings(path[0])
        if name == _COMPILER or _COMPILER in _started:
            del module.__path__  # a submodule needs it; the settings of the backend do not

        def execute_once() -> None:
            with lock:
                if name in _started:
                    return
                _started.add(name)
                module.__path__ = path
                if _BACKEND not in _started:
                    vars(sys.modules.get(_BACKEND, ModuleType(""))).pop("__path__", None)
                execute(module)
                module.__class__ = ModuleType

        vars(module)["_execute"] = execute_once
        module.__class__ = _Postponed

    loader.exec_module = exec_module


def _disable(compiler: Any, function: Callable[..., Any], recursive: bool = True, **options: Any) -> Callable[..., Any]:
    """Return what calls a function and keeps the compiler away from it, once that is there."""
    disabled: Callable[..., Any] | None = None

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal disabled
        if disabled is None and type(compiler) is ModuleType:
            disabled = compiler.disable(function, recursive, **options)
        return (disabled or function)(*arguments, **named)

    return call


sys.meta_path.insert(0, _Fast())
