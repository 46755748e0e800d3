"""Checksums of what modules compute in a step, by which `tracekit compare` names the first module that differs.

checksums = ModuleChecksums(model)
...
recorder.step({"loss": loss, "grad_norm": norm, **checksums.of_step()})
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tracekit import conventions
from tracekit.capture.metrics import Number, PendingScalar
from tracekit.capture.profiler_session import module_path


class ModuleChecksums:
    """Sums of the absolute values that modules returned, in the order of their first calls in the step.

    By default of the modules with parameters of their own. Each call costs one more pass over its output on the
    device. Sums are in fp64, so that only the module's own rounding is in them; calls of all micro-batches, and those
    that are computed again in backward, add up.
    """

    def __init__(self, model: nn.Module) -> None:
        """Register hooks on the modules, which `close` removes."""
        self._sums: dict[str, Tensor] = {}
        self._hooks = [
            module.register_forward_hook(self._hook(".".join(module_path(model, name))))
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        ]

    def of_step(self) -> Mapping[str, Number]:
        """Metrics of the step that ends: a checksum by module. The next step begins."""
        sums, self._sums = self._sums, {}
        return {conventions.CHECKSUM_PREFIX + name: PendingScalar(value) for name, value in sums.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Any:
        def add(_module: nn.Module, _arguments: Any, output: Any) -> None:
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
            if (tensor := next(tensors, None)) is None:
                return
            with torch.no_grad():
                local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a rank's part of a DTensor
                value = local.detach().abs().sum(dtype=torch.float64)
                self._sums[name] = self._sums[name] + value if name in self._sums else value

        return add
