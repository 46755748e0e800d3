"""What a module can do once it is sharded."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from instrumented_trainers.parallelism.yafsdp.copies import copy_module
from instrumented_trainers.parallelism.yafsdp.flat_parameters import FlatParameters
from instrumented_trainers.parallelism.yafsdp.shard_tensor import plain_tensors
from instrumented_trainers.parallelism.yafsdp.unit import Unit
from instrumented_trainers.parallelism.yafsdp.whole_weights import WholeWeights

_PATIENCE_S = 60
_calls = itertools.count()


@dataclass(frozen=True)
class CommunicationBuffers:
    """The buffers that a model gathers weights into and reduces gradients from, in bytes, allocated once.

    `weights` and `gradients` are shared by the units in turn, `own_weights` and `own_gradients` belong to one unit
    each: the root, and units that hold other units or keep their weights after forward.
    """

    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    own_weights: tuple[Tensor, ...]
    own_gradients: tuple[Tensor, ...]


class YaFSDPModule:
    """A module that `fully_shard` was applied to: its class was swapped for one that has this one as a base."""

    _yafsdp_unit: Unit
    _whole_weights: WholeWeights | None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Build a module of the original class: a sharded container that makes a part of itself makes a plain one."""
        original = cls.__mro__[2]
        module = original.__new__(original)
        module.__init__(*args, **kwargs)  # type: ignore[misc]
        return module

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Say whether the next backward passes reduce gradients, as FSDP2's method of this name.

        It does nothing for units without ``keep_whole_gradients``: there each micro-batch is reduce-scattered, as the
        buffers hold the whole gradients of two units only, and the means over ranks add up in the gradient shards. So
        gradients are complete after each backward pass.
        """
        for unit in self._units() if recurse else [self._yafsdp_unit]:
            unit.requires_sync = requires_gradient_sync or not unit.keeps_whole_gradients

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide this module's own summed gradients by `factor` instead of the number of ranks that it is sharded over.

        As FSDP2's method of this name: for experts that are divided over data-parallel ranks, whose gradients hold
        the tokens of more ranks than have the same experts. Raises ValueError unless it is positive.
        """
        if not factor > 0:
            raise ValueError(f"YaFSDP: gradients cannot be divided by {factor:g}: takes more than 0")
        for flat in self._yafsdp_unit.flats:
            flat.divisor = factor

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of this module so that their norm over all ranks is at most `max_norm`.

        Returns the norm before, the same on every rank: as `torch.nn.utils.clip_grad_norm_` does on this module's
        parameters, for which it is another name.
        """
        assert isinstance(self, nn.Module)
        if self._yafsdp_unit.engine is not None:
            self._yafsdp_unit.engine.note(f"clipping by the norm {max_norm}")
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def unshard(self, *, writeback: bool = True) -> WholeWeights:
        """Gather the weights of this module and those inside it, until `reshard` or the end of a ``with`` block.

        All ranks must call it, and each needs memory for all these weights in the shards' dtype. What is written to
        them stays: each rank takes over its part of what it wrote, so write the same on all. Without `writeback` it is
        discarded. The module may run meanwhile, without gradients: in the shards' dtype and without communication.
        """
        self._whole_weights = WholeWeights(self._units(), writeback=writeback)
        return self._whole_weights

    def reshard(self) -> None:
        """End what `unshard` began; do nothing where it did not."""
        if (weights := getattr(self, "_whole_weights", None)) is not None:
            weights.reshard()
            self._whole_weights = None

    @property
    def communication_buffers(self) -> CommunicationBuffers:
        """Return the model's buffers. Raises RuntimeError before the first forward pass, which allocates them."""
        engine = self._yafsdp_unit.engine
        if engine is None:
            raise RuntimeError("YaFSDP: buffers are allocated in the first forward pass; run one first")
        shared, own_slots = engine.shared_slots, tuple(engine.own_slots.values())
        return CommunicationBuffers(
            tuple(slots.weights.buffer for slots in shared),
            tuple(slots.gradients.buffer for slots in shared),
            tuple(slots.weights.buffer for slots in own_slots),
            tuple(slots.gradients.buffer for slots in own_slots),
        )

    def save_pretrained(self, *args: Any, is_main_process: bool | None = None, **options: Any) -> None:
        """Save a Hugging Face model whole, as its own ``save_pretrained`` does; all ranks must call it.

        Rank 0 writes, or the ranks of which `is_main_process` says so, and all return when the files are there. With a
        `state_dict` among the options, each rank that calls it saves that, alone.
        """
        assert isinstance(self, nn.Module)
        if not callable(save := getattr(super(), "save_pretrained", None)):
            raise AttributeError(f"{type(self).__name__} has no save_pretrained: it is no Hugging Face model")
        if options.get("state_dict") is not None:
            save(*args, is_main_process=is_main_process is not False, **options)
            return
        _await_all_ranks("save_pretrained")
        options["state_dict"] = full_state_dict(self)
        if is_main_process or (is_main_process is None and dist.get_rank() == 0):
            save(*args, is_main_process=True, **options)
        dist.barrier()

    def _get_name(self) -> str:
        return f"YaFSDP{type(self).__name__}"  # when printed; saved models bear their own name

    def _units(self) -> list[Unit]:
        assert isinstance(self, nn.Module)
        return list(units_in(self))

    def _flats(self) -> list[FlatParameters]:
        return [flat for unit in self._units() for flat in unit.flats]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if any(unit.is_meta for unit in self._units()):
            return self._leave_meta(fn)
        for flat in self._flats():
            before, after = flat.master[:0], fn(flat.master[:0])
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise NotImplementedError(
                    f"YaFSDP: a sharded module cannot become {after.dtype} on {after.device}; cast and move it before "
                    "fully_shard"
                )
        with plain_tensors():
            super()._apply(fn, recurse)  # type: ignore[misc]
        for unit in self._units():
            unit.adopt_moved_shards()
        return self

    def _leave_meta(self, fn: Callable[[Tensor], Tensor]) -> Any:
        assert isinstance(self, nn.Module)
        for flat in self._flats():
            after = fn(flat.master[:0])
            devices = (flat.device.type, flat.shard_device.type)
            if after.is_meta or after.device.type not in devices or after.dtype != flat.dtype:
                raise NotImplementedError(
                    f"YaFSDP: a module that was sharded on the meta device can only leave it, for {flat.device} and "
                    f"in {flat.dtype}: call to_empty(device={str(flat.device)!r})"
                )
            flat.leave_meta()
        for inner in self.modules():
            for name, buffer in inner._buffers.items():
                if buffer is not None and buffer.is_meta:
                    inner._buffers[name] = fn(buffer).to(self._yafsdp_unit.device)
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy it: sharded in the same way, with shards and buffers of its own, and without gradients."""
        assert isinstance(self, nn.Module)
        return copy_module(self, self._units(), memo)


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return all weights whole, on the host of rank 0; on other ranks nothing. All ranks must call it."""
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def _await_all_ranks(what: str) -> None:
    """Raise RuntimeError if a rank does not call this within a minute: its collectives would wait for it longer."""
    store, number = dist.distributed_c10d._get_default_store(), next(_calls)
    store.set(f"yafsdp/{what}/{number}/{dist.get_rank()}", "")
    keys = [f"yafsdp/{what}/{number}/{rank}" for rank in range(dist.get_world_size())]
    try:
        store.wait(keys, timedelta(seconds=_PATIENCE_S))
    except RuntimeError as error:
        raise RuntimeError(
            f"YaFSDP: {what} gathers the weights of all ranks, but not all of them called it within {_PATIENCE_S} s; "
            "call it on every rank (in Hugging Face's Trainer: use "
            "instrumented_trainers.parallelism.yafsdp.huggingface.Trainer)"
        ) from error


def units_in(module: nn.Module) -> Iterator[Unit]:
    """Yield the units of a module and the modules inside it, the enclosing ones first."""
    for inner in module.modules():
        if isinstance(inner, YaFSDPModule):
            yield inner._yafsdp_unit
