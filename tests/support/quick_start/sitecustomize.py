"""Runs at the start of processes that tests launch: imports of torch and of frameworks collect no garbage.

What they build stays, and repeated collections took a quarter of their time. After them all is as without this file,
except that later collections leave out what `import torch` has built.
"""

import gc
import sys
from importlib.machinery import ModuleSpec
from typing import Any

_FROZEN = "torch"
_LARGE = {_FROZEN, "torch._dynamo", "torch.distributed.fsdp", "accelerate", "transformers", "pytorch_lightning"}


class _Pause:
    """Finds large modules as the other finders do, and pauses the collector while they are executed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in _LARGE:
            return None
        _LARGE.discard(name)
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            _pause_in(spec.loader, name)
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


sys.meta_path.insert(0, _Pause())
