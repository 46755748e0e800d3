"""Functions of torch that compute over all gradients, made to see those of all ranks where these are shards.

A clipping norm and a gradient scaler's search for infinities look at a rank's own tensors, and a full state dict
gathers DTensors only; with shards each rank would come to another result without a word. torch has no hooks for these,
so its functions are replaced by ones that add a collective for shards, and do as before for everything else.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict
from torch.distributed.pipelining import stage
from torch.nn.utils import clip_grad
from torch.utils._pytree import tree_map_only

from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard
from instrumented_trainers.parallelism.yafsdp.optimizer_support import is_shard, owner_of
from instrumented_trainers.parallelism.yafsdp.refusals import name_missing_weight
from instrumented_trainers.parallelism.yafsdp.unit import Unit

_units: WeakSet[Unit] = WeakSet()


def see_all_ranks(unit: Unit) -> None:
    """Let torch's functions know the gradients of the unit as shards."""
    _units.add(unit)
    _replace_functions()


@functools.cache
def _replace_functions() -> None:
    _replace_total_norm()
    scaler = torch.amp.grad_scaler.GradScaler
    scaler._unscale_grads_ = _infinities_over_ranks(scaler._unscale_grads_)  # type: ignore[method-assign]
    stage.stage_backward_input = _refusing_shards(stage.stage_backward_input)
    torch.autograd._engine_run_backward = _naming_units(torch.autograd._engine_run_backward)
    state_dict._gather_state_dict = _gathering_shards(state_dict._gather_state_dict)


def _replace_total_norm() -> None:
    """Replace the function inside torch's own, which others may have imported by name before."""
    wrapper: Any = clip_grad._get_total_norm
    cells = [cell for cell in wrapper.__closure__ or () if callable(cell.cell_contents)]
    if len(cells) == 1:
        cells[0].cell_contents = _norm_over_ranks(cells[0].cell_contents)
    else:
        clip_grad._get_total_norm = nn.utils.get_total_norm = _norm_over_ranks(wrapper)


_Others: TypeAlias = tuple[dist.ProcessGroup, torch.device]
"""The ranks that have the other shards, and the device of their collectives: shards may lie in host memory."""


def _shard_groups(gradients: Iterable[Tensor]) -> dict[int, _Others]:
    """Return, by the id of each of the gradients that is a shard, who has the others."""
    groups, unmarked = {}, set()
    for gradient in gradients:
        if (owner := owner_of(gradient)) is not None:
            groups[id(gradient)] = owner.ranks.shards, owner.device
        else:
            unmarked.add(id(gradient))
    if unmarked:  # set by somebody else, or not those of shards
        groups |= {
            id(parameter.shard.grad): (unit.ranks.shards, unit.device)
            for unit in _units
            for parameter in unit.parameters
            if parameter.shard.grad is not None and id(parameter.shard.grad) in unmarked
        }
    return groups


# The norm of gradients -----------------------------------------------------------------------------------------------


def _norm_over_ranks(local: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(local)
    @torch.no_grad()
    def total_norm(
        tensors: Tensor | Iterable[Tensor],
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        groups = _shard_groups(gradients)
        by_group: dict[_Others, list[Tensor]] = {}
        for gradient in gradients:
            if (group := groups.get(id(gradient))) is not None:
                by_group.setdefault(group, []).append(gradient)
        if not by_group:
            return local(gradients, norm_type, error_if_nonfinite, foreach)
        unsharded = [gradient for gradient in gradients if id(gradient) not in groups]
        norms = [_sharded_norm(shards, float(norm_type), *ranks) for ranks, shards in by_group.items()]
        norms += [local(unsharded, norm_type, foreach=foreach).to(norms[0])] if unsharded else []
        return local(norms, norm_type, error_if_nonfinite)

    return total_norm


def _sharded_norm(shards: list[Tensor], norm_type: float, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """Return the norm of gradients of which this rank has the shards, at least in fp32, where the shards are."""
    dtype = torch.promote_types(shards[0].dtype, torch.float32)
    nonempty = [shard for shard in shards if shard.numel()]
    norm = torch.zeros((), dtype=dtype, device=shards[0].device)
    if nonempty:
        norms = torch.stack([shard_norm.to(norm) for shard_norm in torch._foreach_norm(nonempty, norm_type, dtype)])
        norm = torch.linalg.vector_norm(norms, norm_type)
    over_ranks = norm.to(device)
    if norm_type == torch.inf:
        dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX, group=group)
    else:
        over_ranks.pow_(norm_type)
        dist.all_reduce(over_ranks, group=group)
        over_ranks.pow_(1 / norm_type)
    return over_ranks.to(norm.device)


# The infinities that a gradient scaler looks for ---------------------------------------------------------------------


def _infinities_over_ranks(local: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(local)
    def unscale(scaler: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found_by_device = local(scaler, optimizer, *args, **kwargs)
        for group, device in _groups_of(optimizer):
            for found_inf in found_by_device.values():
                over_ranks = found_inf.to(device)
                dist.all_reduce(over_ranks, op=dist.ReduceOp.MAX, group=group)
                found_inf.copy_(over_ranks)
        return found_by_device

    return unscale


def _groups_of(optimizer: torch.optim.Optimizer) -> list[_Others]:
    """Return the groups of ranks that have the shards of the optimizer's parameters, in the parameters' order."""
    return list(dict.fromkeys((unit.ranks.shards, unit.device) for unit in units_of(optimizer)))


def units_of(optimizer: torch.optim.Optimizer) -> list[Unit]:
    """Return the units whose shards the optimizer steps, in the order of its parameters."""
    owners = (owner_of(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return list(dict.fromkeys(owner for owner in owners if isinstance(owner, Unit)))


# Split backward passes ------------------------------------------------------------------------------------------------


def _refusing_shards(backward_input: Callable[..., Any]) -> Callable[..., Any]:
    """Return the first half of a zero-bubble schedule's backward, which leaves the weights' gradients to a second."""

    @functools.wraps(backward_input)
    def refuse(outputs: Any, output_gradients: Any, inputs: Any, weights: Iterable[nn.Parameter]) -> Any:
        weights = list(weights)
        if any(is_shard(weight) for weight in weights):
            raise NotImplementedError(
                "YaFSDP: a schedule that splits backward (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) computes "
                "the gradients of weights in a second pass, without the weights' units; use GPipe, 1F1B, "
                "Interleaved1F1B or LoopedBFS"
            )
        return backward_input(outputs, output_gradients, inputs, iter(weights))

    return refuse


# Weights that backward needs and that are not there ------------------------------------------------------------------


def _naming_units(run_backward: Callable[..., Any]) -> Callable[..., Any]:
    """Runner of backward passes that explains errors of autograd on versions of weights."""

    @functools.wraps(run_backward)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return run_backward(*args, **kwargs)
        except RuntimeError as error:
            if (words := name_missing_weight(str(error), _units)) is not None:
                raise RuntimeError(words) from error
            raise

    return run


# Full state dicts ----------------------------------------------------------------------------------------------------


def _gathering_shards(gather: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(gather)
    def gather_state_dict(
        state: dict[str, Any], *, cpu_offload: bool = False, ranks_only: tuple[int, ...] = (), **options: Any
    ) -> Any:
        is_returned = not ranks_only or dist.get_rank() in ranks_only

        def gather_whole(shard: FlatShard) -> Tensor | None:
            tensor = shard.full_tensor()  # on every rank, one after the other
            tensor = tensor.cpu() if cpu_offload and is_returned else tensor
            return tensor if is_returned else None

        state = tree_map_only(FlatShard, gather_whole, state)
        return gather(state, cpu_offload=cpu_offload, ranks_only=ranks_only, **options)

    return gather_state_dict
