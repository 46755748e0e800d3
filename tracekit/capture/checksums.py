"""Checksums of what modules compute in a step, by which `tracekit compare` names the first module that differs.

checksums = ModuleChecksums(model)
...
recorder.step({"loss": loss, "grad_norm": norm, **checksums.of_step()})
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tracekit import conventions
from tracekit.capture.metrics import Number, PendingScalar
from tracekit.capture.profiler_session import module_path

_Hook = Callable[..., None]


class ModuleChecksums:
    """Sums of absolute values of modules in a step, in the order in which the step computes them.

    What each module returned; the gradients of its parameters on this rank; the gradients that the optimizer read,
    after reduction and clipping; and the parameters after the optimizer's step. By default of the modules with
    parameters of their own. Each costs one more pass over its values on the device. Sums are in fp64, so that only the
    module's own rounding is in them; calls of all micro-batches, and those that are computed again in backward, add up.
    """

    def __init__(self, model: nn.Module) -> None:
        """Register hooks on modules, parameters and all optimizers, which `close` removes."""
        self._sums: dict[str, Tensor] = {}
        named = [(".".join(module_path(model, name)), module) for name, module in model.named_modules()]
        owners = [(name, module, own) for name, module in named if (own := [*module.parameters(recurse=False)])]
        self._module_of = {parameter: name for name, _, own in reversed(owners) for parameter in own}
        self._hooks = [module.register_forward_hook(self._output_hook(name)) for name, module, _ in owners]
        self._hooks += [module.register_forward_pre_hook(self._parameter_hook(name)) for name, module, _ in owners]
        # By tensor: parameters live as long as the model, gathered weights of FSDP as long as a pass.
        self._gradient_hooks = WeakIdKeyDictionary()
        self._hooks += [
            optimizers.register_optimizer_step_pre_hook(self._add_reduced_gradients),
            optimizers.register_optimizer_step_post_hook(self._add_weights),
        ]

    def of_step(self) -> Mapping[str, Number]:
        """Metrics of the step that ends: checksums by kind and module. The next step begins."""
        sums, self._sums = self._sums, {}
        return {name: PendingScalar(value) for name, value in sums.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in (*self._hooks, *self._gradient_hooks.values()):
            hook.remove()

    def _output_hook(self, name: str) -> _Hook:
        def add(_module: nn.Module, _arguments: Any, output: Any) -> None:
            tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
            if (tensor := next(tensors, None)) is not None:
                self._add(conventions.CHECKSUM_PREFIX + name, tensor)

        return add

    def _parameter_hook(self, name: str) -> _Hook:
        """Hook that watches the gradients of the weights which a module is about to use: of FSDP, the whole weights."""

        def watch(module: nn.Module, _arguments: Any) -> None:
            for weight in module._parameters.values() if torch.is_grad_enabled() else ():
                if weight is not None and weight.requires_grad and weight not in self._gradient_hooks:
                    self._gradient_hooks[weight] = weight.register_hook(self._gradient_hook(name))

        return watch

    def _gradient_hook(self, name: str) -> _Hook:
        def add(gradient: Tensor) -> None:
            self._add(conventions.GRADIENT_CHECKSUM_PREFIX + name, gradient)

        return add

    def _add_reduced_gradients(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        for parameter in _parameters(optimizer):
            if parameter in self._module_of and parameter.grad is not None:
                name = self._module_of[parameter]
                self._add(conventions.REDUCED_GRADIENT_CHECKSUM_PREFIX + name, parameter.grad)

    def _add_weights(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        for parameter in _parameters(optimizer):
            if parameter in self._module_of:
                self._add(conventions.WEIGHT_CHECKSUM_PREFIX + self._module_of[parameter], parameter)

    def _add(self, name: str, tensor: Tensor) -> None:
        with torch.no_grad():
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor  # a rank's part of a DTensor
            value = local.detach().abs().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + value if name in self._sums else value


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
