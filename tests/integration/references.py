"""References that rank 0 computes alone, as one process does, and gives to the other ranks to compare with. Not a test.

If every rank computed the same reference on the data of all, most of the time of a parity test would be spent on it.
"""

from collections.abc import Callable
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

_Result = TypeVar("_Result")


def on_first_rank(compute: Callable[[], _Result]) -> _Result:
    """Return what `compute` returns on rank 0, which calls it alone. All ranks must call this."""
    results = [compute() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(results)
    result: _Result = results[0]  # type: ignore[assignment]
    return result


def follow_first_rank(reference: nn.Module, train: Callable[[], _Result]) -> _Result:
    """Call `train` on rank 0, and give the other ranks' `reference` the weights and gradients of rank 0's.

    Return what `train` returned. All ranks must call this with the same model.
    """

    def compute() -> tuple[_Result, list[tuple[np.ndarray, np.ndarray | None]]]:
        result = train()
        parameters = list(reference.parameters())
        return result, [(array(each.detach()), None if each.grad is None else array(each.grad)) for each in parameters]

    result, values = on_first_rank(compute)
    if dist.get_rank() != 0:
        for parameter, (weight, gradient) in zip(reference.parameters(), values, strict=True):
            parameter.data.copy_(torch.from_numpy(weight))
            parameter.grad = None if gradient is None else torch.from_numpy(gradient).to(parameter.device)
    return result


def array(tensor: Tensor) -> np.ndarray:
    """Return a tensor's values, which are pickled in a tenth of the time that a tensor takes."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return dense.cpu().numpy()


def state_arrays(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the values of a model's parameters and buffers by name."""
    return {name: array(value) for name, value in model.state_dict().items()}
