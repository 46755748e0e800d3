"""`fully_shard`: make a module a unit: all-gather before use, reduce-scatter of its gradients after."""

import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from instrumented_trainers.parallelism.options import device_of
from instrumented_trainers.parallelism.yafsdp.checkpoint import hook_model, hook_optimizer
from instrumented_trainers.parallelism.yafsdp.communication_lane import Ranks
from instrumented_trainers.parallelism.yafsdp.dtensor_parameters import refuse_division
from instrumented_trainers.parallelism.yafsdp.engine import Engine
from instrumented_trainers.parallelism.yafsdp.gather_hooks import has_gather_hooks, refuse_gather_hooks
from instrumented_trainers.parallelism.yafsdp.mixed_precision import MixedPrecisionPolicy
from instrumented_trainers.parallelism.yafsdp.module import YaFSDPModule
from instrumented_trainers.parallelism.yafsdp.optimizer_support import (
    SHARDED_IN,
    begin_plain_step,
    end_plain_step,
    refuse_originals,
    refuse_whole_tensor_optimizer,
    step_description,
    units_of,
)
from instrumented_trainers.parallelism.yafsdp.refusals import (
    refuse_training_unsharded,
    refuse_transforms,
    refuse_unreduced_gradients,
)
from instrumented_trainers.parallelism.yafsdp.registrations import watch_registrations
from instrumented_trainers.parallelism.yafsdp.shard_tensor import Shard
from instrumented_trainers.parallelism.yafsdp.sharded_functions import replace_functions
from instrumented_trainers.parallelism.yafsdp.unit import Unit, UnitEngine
from instrumented_trainers.parallelism.yafsdp.whole_tensor_optimizer import WholeTensorOptimizer

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
_known: WeakSet[Optimizer] = WeakSet()
# Accelerate, and so Hugging Face's Trainer, wrap a module with this mark in nothing.
_MARK_FOR_ACCELERATE = "_is_accelerate_prepared"
# With the first Hugging Face's `generate` goes on until the last rank is done, as all ranks must take part in its
# collectives; torch.compile takes that mark for FSDP's and refuses it without the second.
_MARKS_FOR_GENERATE = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 -- frozen, and as FSDP2 spells it
    reshard_after_forward: bool | None = None,
    buffers: int = 2,
    left_out: Collection[nn.Parameter] = (),
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 -- it has no fields
    keep_whole_gradients: bool = False,
) -> nn.Module:
    """Shard the parameters of `module` that no unit inside it has, as one flat tensor, and return the module.

    Applied as FSDP2's function of that name: to the blocks first, then to the model, the root, and before the optimizer
    is made. Units run one after the other and share `buffers` buffers for unsharded weights and as many for unsharded
    gradients, allocated in the first forward pass and each as large as the largest unit; so memory is constant from
    step to step, and layers of equal size fit best. The root has its own buffers and keeps its weights from forward to
    backward. So does a unit with ``reshard_after_forward=False``, and one that encloses other units.

    `reshard_after_forward` is True by default, as None means, but for the root.

    `mesh` has one dim, the ranks to shard over, or two: how many replicas of the shards there are, and the ranks to
    shard over (hybrid sharding, HSDP); without it, all ranks are sharded over. Shards have the dtype of their
    parameters; precision of computation and reduction is that of `mp_policy`, which may be FSDP2's. Frozen parameters
    have no gradient shard and are not reduced: freeze them before. The parameters in `left_out` belong to the enclosing
    unit: norms, for example, which the root then gathers once a step for all layers. Each rank must run the same units
    in the same order; within a unit, ranks may use different parameters.

    Parameters that are DTensors, as of tensor or expert parallelism over other ranks, stay such in the modules: this
    rank's part of each is sharded. A unit of experts may have a mesh of some of the root's ranks. Parameters of a class
    with FSDP2's hooks ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` are gathered by these.

    With ``offload_policy=CPUOffloadPolicy()`` (FSDP2's own) shards of weights and gradients lie in host memory, pinned
    for CUDA, and so does the optimizer's state, which steps them there. Copies run on a CUDA stream of their own; the
    host waits for them at the end of forward and of backward.

    With `keep_whole_gradients`, micro-batches after ``set_requires_gradient_sync(False)`` are not reduced: each rank
    adds up whole gradients, in memory of their own, until a backward pass with sync. It saves communication.

    A module on the meta device is sharded without ever having its weights: give it shards by ``to_empty`` and then
    weights by a checkpoint, or both by `materialize`.

    Optimizers see one-dimensional shards: element-wise ones (SGD, Adam and their kin) work as they are, those that need
    whole matrices by `WholeTensorOptimizer`. Raises NotImplementedError or ValueError, by name, for what is not
    supported.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"YaFSDP shards one module at a time, not {type(module).__name__}")
    if isinstance(module, YaFSDPModule):
        raise ValueError(f"YaFSDP: {type(module).__name__} is sharded already")
    if not isinstance(reshard_after_forward, bool | None):
        raise NotImplementedError(
            f"YaFSDP: reshard_after_forward is True, False or None, not {reshard_after_forward!r}: it does not reshard "
            "to fewer ranks, as FSDP2 does for a number"
        )
    if buffers < 1:
        raise ValueError(f"YaFSDP needs at least 1 buffer (2 to overlap), not {buffers}")
    mesh = mesh if mesh is not None else _world_mesh()
    ranks = Ranks.of(mesh)
    device = device_of(mesh)
    parameters = _own_parameters(module, left_out)
    _refuse_unsupported(module, parameters, ranks)
    policy = MixedPrecisionPolicy.of(mp_policy)
    unit = Unit(module, parameters, ranks=ranks, device=device, policy=policy, buffers=buffers, offload=offload_policy)
    replace_functions(unit)
    _hook_optimizers()
    watch_registrations()
    unit.owns_slots, unit.left_out = reshard_after_forward is False, bool(left_out)
    unit.keeps_whole_gradients = keep_whole_gradients
    for parameter in parameters:
        setattr(parameter, SHARDED_IN, type(module).__name__)
    for buffer in module.buffers():
        if not buffer.is_meta:
            buffer.data = buffer.data.to(device)
    _add_hooks(module)
    module._yafsdp_unit = unit  # type: ignore[assignment]
    # In place, as FSDP2 does: parents, optimizers and hooks hold this module.
    module.__class__ = _sharded_class(type(module))
    hook_model(module)  # type: ignore[arg-type]
    marks = (_MARK_FOR_ACCELERATE, *(_MARKS_FOR_GENERATE if callable(getattr(module, "generate", None)) else ()))
    for mark in marks:
        setattr(module, mark, True)
    return module


def _world_mesh() -> DeviceMesh:
    device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _own_parameters(
    module: nn.Module, left_out: Collection[nn.Parameter]
) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Return the parameters that no unit inside `module` has, each with every place where it stands."""
    excluded = {
        id(parameter.shard)
        for inner in module.modules()
        if isinstance(inner, YaFSDPModule)
        for parameter in inner._yafsdp_unit.parameters
    }
    excluded |= {id(parameter) for parameter in left_out}
    sites: dict[nn.Parameter, list[tuple[nn.Module, str]]] = defaultdict(list)
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None and id(parameter) not in excluded:
                sites[parameter].append((inner, name))
    return dict(sites)


def _refuse_unsupported(
    module: nn.Module, parameters: dict[nn.Parameter, list[tuple[nn.Module, str]]], ranks: Ranks
) -> None:
    kind = type(module).__name__
    for parameter, sites in parameters.items():
        name = f"parameter {sites[0][1]!r} of {type(sites[0][0]).__name__} in {kind}"
        if isinstance(parameter, Shard):
            raise ValueError(
                f"YaFSDP: {name} is a shard already: a module around {kind} was sharded before it; shard the blocks "
                "first, then the module that holds them"
            )
        if (other := getattr(parameter, SHARDED_IN, None)) is not None:
            raise ValueError(
                f"YaFSDP: {name} is tied to one that the unit of {other} has; parameters that are tied must be in one "
                "unit, so shard a module that holds both places, or neither"
            )
        refuse_division(parameter, name, [group for group in (ranks.shards, ranks.replicas) if group is not None])
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise NotImplementedError(
                f"YaFSDP: {name} has a hook on its gradient, which would be lost with the whole parameter; register it "
                "after fully_shard, by register_post_accumulate_grad_hook: it is called with the shard"
            )
        _refuse_changing_weights(parameter, sites, name, ranks.shards.size())
    if len({parameter.is_meta for parameter in parameters}) > 1:
        raise NotImplementedError(f"YaFSDP: of the parameters of {kind} some are on the meta device, but not all")


def _refuse_changing_weights(
    parameter: nn.Parameter, sites: list[tuple[nn.Module, str]], name: str, world_size: int
) -> None:
    """Raise NotImplementedError for a parameter whose class, dtype or module does what a shard of it would not."""
    if isinstance(parameter, DTensor) and has_gather_hooks(parameter._local_tensor):
        raise NotImplementedError(
            f"YaFSDP: {name} is a DTensor of {type(parameter._local_tensor).__name__}, which is gathered in a form of "
            "its own (fsdp_pre_all_gather): YaFSDP takes such parameters without tensor parallelism; use FSDP2"
        )
    if has_gather_hooks(parameter):
        refuse_gather_hooks(parameter, name, world_size)
    elif type(parameter) not in (nn.Parameter, DTensor):
        raise NotImplementedError(
            f"YaFSDP: {name} is of the class {type(parameter).__name__}, which a shard of it would not be; shard plain "
            "parameters"
        )
    if not parameter.is_floating_point():
        raise NotImplementedError(f"YaFSDP: {name} is {parameter.dtype}, not floating-point")
    for owner, _ in sites:
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag) and owner.max_norm is not None:
            raise NotImplementedError(
                f"YaFSDP: {name} has max_norm, which changes whole weights in forward, and they are copies; make it "
                "without max_norm and scale its rows between steps, within `with model.unshard():`"
            )


def _add_hooks(module: nn.Module) -> None:
    def pre_forward(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _pre_forward(module._yafsdp_unit, args, kwargs)  # a copy of the module has the hook, but its own unit

    def post_forward(module: Any, args: Any, outputs: Any) -> Any:  # noqa: ARG001 -- the signature of a hook
        return _post_forward(module._yafsdp_unit, outputs)

    # Compiled code ends before a hook and goes on after it: buffers and collectives are not for a compiler to move.
    module.register_forward_pre_hook(torch.compiler.disable(pre_forward), prepend=True, with_kwargs=True)
    module.register_forward_hook(torch.compiler.disable(post_forward))


def _pre_forward(unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if unit.is_unsharded:
        refuse_training_unsharded(unit)
        return args, kwargs
    refuse_transforms(unit)
    return _engine(unit).pre_forward(unit, args, kwargs)


def _post_forward(unit: Unit, outputs: Any) -> Any:
    return outputs if unit.is_unsharded else _engine(unit).post_forward(unit, outputs)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method of a sharded module be called as its forward is: with its weights, and as a part of backward.

    As FSDP2's ``register_fsdp_forward_method``, and as that it does nothing for a module that is not sharded. Raises
    ValueError if the module has no such method.
    """
    if not isinstance(module, YaFSDPModule):
        return
    if not callable(method := getattr(module, name, None)):
        raise ValueError(f"YaFSDP: {type(module).__name__} has no method {name!r}")
    setattr(module, name, _ForwardMethod(module._yafsdp_unit, method))


class _ForwardMethod:
    """A method that runs as the forward of a unit does."""

    def __init__(self, unit: Unit, method: Callable[..., Any]) -> None:
        self._unit, self._method = unit, method
        functools.update_wrapper(self, method)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _pre_forward(self._unit, args, kwargs)
        return _post_forward(self._unit, self._method(*args, **kwargs))


@functools.cache
def _hook_optimizers() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
    end_plain_step()
    units = units_of(optimizer)
    if optimizer not in _known:
        refuse_originals(optimizer)
        _known.add(optimizer)
    if not units:
        return None
    for unit in units:
        refuse_unreduced_gradients(unit)
    what = step_description(optimizer)
    for engine in {unit.engine for unit in units} - {None}:
        engine.note(what)  # type: ignore[union-attr]
    if isinstance(optimizer, WholeTensorOptimizer):
        return None
    hook_optimizer(optimizer)
    return begin_plain_step(optimizer, args, kwargs) if refuse_whole_tensor_optimizer(optimizer) else None


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 -- the signature of a hook
    end_plain_step()


def _engine(unit: Unit) -> UnitEngine:
    """Return the engine of a unit's model. The first module to run is the root: its engine is made then."""
    if unit.engine is None:
        with torch.inference_mode(mode=False):  # buffers made in that mode could never be trained with
            unit.engine = _make_engine(unit)
    return unit.engine


def _make_engine(root: Unit) -> Engine:
    units = []
    for name, inner in root.module.named_modules():
        if isinstance(inner, YaFSDPModule):
            inner._yafsdp_unit.name = name
            units.append(inner._yafsdp_unit)
    if any(unit.engine is not None for unit in units):
        raise RuntimeError("YaFSDP: a sharded module inside ran before its root did; run the root first")
    _check_units(units)
    _find_outer_units(root.module, None)
    for unit in units:
        unit.encloses_units = sum(isinstance(inner, YaFSDPModule) for inner in unit.module.modules()) > 1
        unit.own_modules = tuple(_own_modules(unit.module))
        unit.owns_slots = unit.owns_slots or unit.encloses_units or unit is root
    return Engine(root, units)


def _check_units(units: list[Unit]) -> None:
    if any(unit.is_meta for unit in units):
        raise RuntimeError(
            "YaFSDP: the model has no weights yet, only shapes; call yafsdp.materialize(model), or to_empty and load a "
            "checkpoint, before it runs"
        )
    if len({(unit.buffers, unit.device, unit.shard_device) for unit in units}) > 1:
        raise ValueError(
            "YaFSDP: all units of a model must have the same device, the same number of buffers and the same "
            "offload_policy"
        )
    ranks_of_root = set(units[0].ranks.all)
    for unit in units:
        if not ranks_of_root.issuperset(unit.ranks.all):
            raise ValueError(
                f"YaFSDP: {unit.name} is sharded over ranks {sorted(unit.ranks.all)}, but the root over "
                f"{sorted(ranks_of_root)}: a unit inside takes some of the root's ranks, as experts do, and no others"
            )


def _find_outer_units(module: nn.Module, around: Unit | None) -> None:
    """Set the outer unit of each unit that left parameters out."""
    if isinstance(module, YaFSDPModule):
        unit = module._yafsdp_unit
        if unit.left_out and around is None:
            raise ValueError(
                f"YaFSDP: {type(module).__name__} left parameters out, but no unit around it has them; shard the model "
                "that holds it, too"
            )
        unit.outer_unit = around if unit.left_out else None
        around = unit
    for child in module.children():
        _find_outer_units(child, around)


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the module and those inside it, but for units inside and what is in them."""
    yield module
    for child in module.children():
        if not isinstance(child, YaFSDPModule):
            yield from _own_modules(child)


def _sharded_class(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _CLASSES:
        _CLASSES[kind] = type(kind.__name__, (YaFSDPModule, kind), {"__module__": kind.__module__})
    return _CLASSES[kind]
