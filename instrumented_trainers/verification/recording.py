"""What one step of a training computes: outputs of modules, loss, gradients, weights and buffers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MOST_OUTPUT_BYTES = 1 << 29
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class Outputs:
    """The first floating-point tensor that each call of a module returned, in the order in which calls ended."""

    def __init__(self, model: nn.Module) -> None:
        self._values: dict[str, Tensor] = {}
        self._bytes, self._is_recording = 0, False
        for name, module in model.named_modules():
            module.register_forward_hook(self._hook(plain_name(name)))

    @contextmanager
    def recording(self) -> Iterator[dict[str, Tensor]]:
        """Outputs of the calls inside. What is computed again in backward is not recorded."""
        self._values, self._bytes, self._is_recording = {}, 0, True
        try:
            yield self._values
        finally:
            self._is_recording = False

    def _hook(self, name: str) -> Any:
        def record(_module: nn.Module, _arguments: Any, output: Any) -> None:
            if not self._is_recording or self._bytes > _MOST_OUTPUT_BYTES:
                return
            tensor = next((leaf for leaf in tree_leaves(output) if _is_floating(leaf)), None)
            if tensor is not None:
                calls = sum(key.partition("#")[0] == name for key in self._values)
                self._values[f"{name}#{calls + 1}" if calls else name] = tensor.detach().clone()
                self._bytes += tensor.nbytes

        return record


class CoarsestDtype(TorchDispatchMode):
    """The floating-point dtype of fewest digits that an operator inside returns."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if _is_floating(leaf) and torch.finfo(leaf.dtype).eps > torch.finfo(self.dtype).eps:
                self.dtype = leaf.dtype
        return output


def plain_name(name: str) -> str:
    """Name of a parameter or module without those of wrappers of torch."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def inner_model(model: nn.Module) -> nn.Module:
    """The model with the names that the user gave."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by every name that they have."""
    named = inner_model(model).named_parameters(remove_duplicate=False)
    return {plain_name(name): parameter for name, parameter in named}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers by name."""
    return {plain_name(name): buffer.detach() for name, buffer in inner_model(model).named_buffers()}


def whole(tensor: Tensor) -> Tensor:
    """The tensor over all ranks, which must all call this."""
    gathered: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach()


def gradient(parameter: nn.Parameter) -> Tensor:
    """Whole gradient; zeros where there is none, as which it counts."""
    if parameter.grad is None:
        return torch.zeros(parameter.shape)
    value = whole(parameter.grad)
    return value.to_dense() if value.is_sparse else value


def tied_names(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in parameters(model).items():
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
