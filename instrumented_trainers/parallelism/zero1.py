"""ZeRO stage 1: data parallel, but each rank stores the optimizer state of, and steps, only a part of the parameters.

Whole parameters are assigned, the largest first, to the rank with the fewest elements so far; after its step each
rank broadcasts its parameters. https://arxiv.org/abs/1910.02054 names the stages.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from instrumented_trainers.parallelism import ddp
from instrumented_trainers.parallelism.host_optimizer import HostOptimizer
from instrumented_trainers.parallelism.optimizer import begin_missing_state
from instrumented_trainers.parallelism.options import ShardOptions


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Replicate the model over the mesh's ranks; `make_optimizer` then shares out the optimizer state."""
    return Zero1DataParallel(*ddp.replicated(model, mesh, options), offload=options.offload)


class Zero1DataParallel(ddp.AutocastDataParallel):
    """A model whose parameters are replicated and whose optimizer is not."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None, *, offload: bool) -> None:
        super().__init__(module, mesh, dtype)
        self._offload = offload

    def make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: Iterable[Any], **options: Any
    ) -> ZeroRedundancyOptimizer:
        """Return this rank's part of an optimizer of that kind over `parameters`, or groups of them.

        It is in host memory if the model's options ask for it.
        """
        make = functools.partial(HostOptimizer, kind=kind) if self._offload else kind
        return ZeroRedundancyOptimizer(parameters, make, process_group=self.process_group, **options)


def optimizer_state(model: nn.Module, optimizers: Sequence[ZeroRedundancyOptimizer]) -> dict[str, Any]:
    """Return the optimizers' state of this rank's parameters, whole tensors by name, in the form of `checkpoint_state`.

    Other ranks' parameters have no entry: each rank saves its own, and a load asks for what the rank has then.
    """
    names, state = _names(model), {}
    for optimizer in optimizers:
        begin_missing_state(optimizer.optim)
        state |= {name: dict(optimizer.optim.state[p]) for name, p in _own_parameters(names, optimizer)}
    groups = [_group(group, names) for optimizer in optimizers for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


def restore_optimizer(model: nn.Module, optimizers: Sequence[ZeroRedundancyOptimizer], state: dict[str, Any]) -> None:
    """Give this rank's part of the optimizers what was loaded into `state`."""
    for optimizer in optimizers:
        for name, parameter in _own_parameters(_names(model), optimizer):
            optimizer.optim.state[parameter] = state["state"][name]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, saved in zip(groups, state["param_groups"], strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})


def _own_parameters(
    names: dict[nn.Parameter, str], optimizer: ZeroRedundancyOptimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.optim.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}


def _group(group: dict[str, Any], names: dict[nn.Parameter, str]) -> dict[str, Any]:
    return {**group, "params": [names[parameter] for parameter in group["params"]]}
