"""State of a sharded model and its optimizer for ``torch.distributed.checkpoint``, which can reshard it.

A rank's shard of a parameter is a range of the flattened parameter; the checkpoint wants boxes. `FlatShard` says which
boxes a range is, through the three methods that the checkpoint's planner asks any tensor for.
"""

from collections.abc import Iterator
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.optim import Optimizer

from instrumented_trainers.parallelism.optimizer import begin_missing_state
from instrumented_trainers.parallelism.yafsdp.layout import boxes
from instrumented_trainers.parallelism.yafsdp.module import units_in
from instrumented_trainers.parallelism.yafsdp.unit import UnitParameter

_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.")


class FlatShard(Tensor):
    """A tensor of which this rank has the elements from `origin` on, in row-major order. It can be saved and loaded.

    `local` is not copied: what is loaded lands in it.
    """

    pieces: list[tuple[torch.Size, Tensor]]
    """The boxes that this rank has: each one's offsets and its elements, a view of `local`."""

    @staticmethod
    def __new__(cls, local: Tensor, shape: torch.Size, origin: int) -> Self:
        shard = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        shard.pieces = []
        offset = 0
        for offsets, sizes in boxes(shape, origin, origin + local.numel()):
            size = torch.Size(sizes)
            shard.pieces.append((torch.Size(offsets), local[offset : offset + size.numel()].view(size)))
            offset += size.numel()
        return shard

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets, piece.size()),
                    properties=TensorProperties.create_from_tensor(piece),
                    size=self.size(),
                ),
            )
            for offsets, piece in self.pieces
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, piece.size()) for offsets, piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, piece in self.pieces:
            if offsets == index.offset:
                return piece
        raise ValueError(f"{index.fqn}: this rank has no part that begins at {index.offset}")

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        shard = args[0]
        if function is torch.ops.aten.detach.default:
            return shard
        if function is torch.ops.aten.new_empty.default:
            # How asynchronous saving copies: it makes an empty one on the host, then copies the attributes into it.
            return cls(torch.empty(0, dtype=shard.dtype, device=(kwargs or {}).get("device")), shard.shape, 0)
        raise NotImplementedError(f"a FlatShard can be saved and loaded, not computed with: {function}")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FlatShard(shape={tuple(self.shape)}, pieces={[tuple(piece.shape) for _, piece in self.pieces]})"


def model_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied parameter under each of its names."""
    shards = {id(parameter.shard): parameter for parameter in _parameters(model)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {
        _clean(name): _flat_shard(shards[id(parameters[name])], value) if name in parameters else value
        for name, value in model.state_dict().items()
    }


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state by parameter name, and its parameter groups.

    Parameters that were never stepped get the state they would start with, so that what is saved doesn't depend on it.
    """
    names = _names(model)
    shards = {id(parameter.shard): parameter for parameter in _parameters(model)}
    begin_missing_state(optimizer)
    state = {
        names[id(shard)]: {
            key: _optimizer_tensor(shards[id(shard)], value, f"{names[id(shard)]}.{key}")
            for key, value in values.items()
        }
        for shard, values in optimizer.state.items()
    }
    groups = [group | {"params": [names[id(shard)] for shard in group["params"]]} for group in optimizer.param_groups]
    return {"state": state, "param_groups": groups}


@torch.no_grad()
def restore_model(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Load `state` into the model: shards were loaded in place already, buffers may not have been.

    `state` may hold whole tensors, too, such as another model's ``state_dict()``; each rank takes its part of them.
    """
    own = model_state(model)
    if missing := own.keys() - state.keys():
        raise KeyError(f"YaFSDP: the loaded state lacks {', '.join(sorted(missing))}")
    for name, value in own.items():
        _copy(value, state[name])


@torch.no_grad()
def restore_optimizer(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give the optimizer what was loaded. Its parameter groups must hold the same parameters as when saved."""
    own = optimizer_state(model, optimizer)
    names = _names(model)
    shards = {names[id(shard)]: shard for shard in optimizer.state}
    for name, values in own["state"].items():
        for key, value in values.items():
            loaded = state["state"][name][key]
            if isinstance(value, Tensor):
                _copy(value, loaded)
            else:
                optimizer.state[shards[name]][key] = loaded
    for group, own_group, loaded in zip(
        optimizer.param_groups, own["param_groups"], state["param_groups"], strict=True
    ):
        if own_group["params"] != loaded["params"]:
            raise ValueError("YaFSDP: the optimizer's parameter groups are not those of the loaded state")
        group.update({key: value for key, value in loaded.items() if key != "params"})


def _copy(target: Tensor, source: Tensor) -> None:
    if isinstance(target, FlatShard) and isinstance(source, FlatShard):
        for (_, own), (_, loaded) in zip(target.pieces, source.pieces, strict=True):
            if own.data_ptr() != loaded.data_ptr():
                own.copy_(loaded)
    elif isinstance(target, FlatShard):
        if source.shape != target.shape:
            raise ValueError(f"YaFSDP: cannot load {tuple(source.shape)} into a parameter of {tuple(target.shape)}")
        for offsets, own in target.pieces:
            own.copy_(source[tuple(slice(o, o + n) for o, n in zip(offsets, own.shape, strict=True))])
    elif source is not target:
        target.copy_(source)


def _parameters(model: nn.Module) -> Iterator[UnitParameter]:
    return (parameter for unit in units_in(model) for parameter in unit.parameters)


def _names(model: nn.Module) -> dict[int, str]:
    """Return the first name of each shard by its id."""
    return {id(shard): _clean(name) for name, shard in model.named_parameters()}


def _clean(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _flat_shard(parameter: UnitParameter, local: Tensor) -> FlatShard:
    return FlatShard(local.detach(), parameter.shape, parameter.part.origin)


def _optimizer_tensor(parameter: UnitParameter, value: Any, name: str) -> Any:
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if value.shape != parameter.shard.shape:
        raise NotImplementedError(f"YaFSDP: optimizer state {name} is not one value per element: {tuple(value.shape)}")
    return _flat_shard(parameter, value)
