"""A shard as users and optimizers see it: a tensor of the whole shape, of which this rank has a range of elements.

Functions of torch that come to such a tensor do what they would to the whole one: element-wise ones compute this rank's
elements, reductions such as ``norm`` and ``sum`` compute over all ranks, random ones draw what one process draws. All
others would be wrong on a part, and raise with the function's name. In its memory a shard is a plain tensor of one dim:
inside `plain_tensors`, as for an element-wise optimizer's step, it costs nothing to be one.

Reductions are collectives: all ranks must call them, in the same order.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_flatten, tree_unflatten

from instrumented_trainers.parallelism.yafsdp.communication_lane import all_gather_single
from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard, Place
from instrumented_trainers.parallelism.yafsdp.rank_programs import note, waiting

# As `plain_tensors`, for one call: many times a step.
_do_plain: Callable[..., Any] = torch._C._disabled_torch_function_impl

Handler: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def plain_tensors() -> AbstractContextManager[Any]:
    """Context in which functions of torch take shards for what they are in memory: tensors of one dim."""
    return torch._C.DisableTorchFunctionSubclass()


class Shard(Tensor):
    """A rank's elements of a tensor; `place` says which ones of which."""

    place: Place

    @staticmethod
    def of(local: Tensor, place: Place) -> "Shard":
        """Shard with these elements, one dim: an alias of the same memory that autograd knows."""
        with plain_tensors():
            shard = local.as_subclass(Shard)
        shard.place = place
        return shard

    def to_local(self) -> Tensor:
        """Return this rank's elements, one dim, in the same memory."""
        with plain_tensors():
            return self.as_subclass(Tensor)

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, on every rank. All ranks must call it."""
        whole: Tensor = _Whole.apply(self.to_local(), self.place)
        return whole

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types  # any tensor may take part
        if (handler := _HANDLERS_OF.get(function)) is None:
            handler = _HANDLERS_OF[function] = _HANDLERS.get(_name(function), _refuse)
        return handler(function, args, dict(kwargs) if kwargs else {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotImplementedError(
            "YaFSDP: this rank has a part of the tensor only, so torch.save would lose the others; save state_dict() "
            "with torch.distributed.checkpoint, or full_tensor()"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        with plain_tensors():
            kind, shape = type(self).__name__, tuple(self.place.visible_shape)
            return f"{kind}({self.numel()} elements of {shape}: {self.to_local()})"


class ShardParameter(Shard, nn.Parameter):
    """A parameter that is sharded."""

    owner: Callable[[], Any] = staticmethod(lambda: None)
    """Returns the unit that has it; None of a copy, or where that has been deleted."""

    @staticmethod
    def of(local: Tensor, place: Place, *, requires_grad: bool = True) -> "ShardParameter":
        """Parameter with these elements, one dim, in the same memory."""
        with plain_tensors():
            shard: ShardParameter = Tensor._make_subclass(ShardParameter, local, requires_grad)
        shard.place = place
        return shard

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) not in memo:
            with plain_tensors():
                copied = ShardParameter.of(self.detach().clone(), self.place, requires_grad=self.requires_grad)
            memo[id(self)] = copied
        return memo[id(self)]  # type: ignore[no-any-return]


# torch's optimizers and its clipping compute on many tensors at once only where they know the tensors' types.
for _types in (torch_optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
    _types += [kind for kind in (Shard, ShardParameter) if kind not in _types]


def _name(function: Any) -> str:
    """Name of a function of torch: "add_", or of an attribute with how it is used: "shape.get"."""
    name: str = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        return f"{function.__self__.__name__}.{name.strip('_')}"
    return name


# Whole tensors and their parts ----------------------------------------------------------------------------------------


class _Whole(torch.autograd.Function):
    """The whole tensor; its gradient, the mean over ranks, goes to each rank's part."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, place: Place) -> Tensor:
        ctx.place, ctx.numel = place, local.numel()
        return place.gather_visible(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        mean = _mean_over_ranks(gradients[0], ctx.place)
        return ctx.place.cut_visible(mean, ctx.numel), None


class _Gathered(torch.autograd.Function):
    """Each rank's numbers, one row a rank. The gradient is the mean over ranks, as those of weights are."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, place: Place) -> Tensor:
        ctx.place = place
        rows = numbers.to(place.device).contiguous().unsqueeze(0)
        note(f"reduction of {len(numbers)} numbers of shards, such as norms")
        for group in place.groups:
            received = rows.new_empty(group.size() * len(rows), len(numbers))
            waiting(all_gather_single, received, rows, group=group)
            rows = received
        return rows.to(numbers.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own = 0
        for group in reversed(ctx.place.groups):
            own = own * group.size() + group.rank()
        return _mean_over_ranks(gradients[0], ctx.place)[own], None


def _mean_over_ranks(gradient: Tensor, place: Place) -> Tensor:
    mean = gradient.to(place.device, copy=True).contiguous()
    for group in (place.ranks, place.replicas):
        if group is not None:
            note("mean of a gradient of shards")
            waiting(dist.all_reduce, mean, group=group)
            mean /= group.size()
    return mean.to(gradient.device)


def _place_of(values: Iterable[Any]) -> Place:
    """Place of the shards among these values. Raises NotImplementedError where they lie at different places."""
    shards = [value for value in values if isinstance(value, Shard)]
    if any(shard.place != shards[0].place for shard in shards[1:]):
        raise NotImplementedError(
            "YaFSDP: an operation of shards of different parameters, or of other shapes, needs whole tensors; call "
            "full_tensor() on all ranks"
        )
    return shards[0].place


def _local(value: Any, place: Place, numel: int) -> Any:
    """Return what an element-wise operation on shards at a place takes for one of its arguments."""
    if isinstance(value, Shard):
        return value.to_local()
    if isinstance(value, FlatShard) and value.place == place:  # of a state dict
        return value.local
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value.reshape(()) if isinstance(value, Tensor) and value.dim() else value
    if value.shape != place.visible_shape:
        raise NotImplementedError(
            f"YaFSDP: an operation of a shard of {tuple(place.visible_shape)} and a tensor of {tuple(value.shape)} "
            "needs the whole tensor; call full_tensor() on all ranks"
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "YaFSDP: the gradient of a whole tensor that meets a shard would be one rank's part; call full_tensor() on "
            "the shard, on all ranks"
        )
    return place.cut_visible(value, numel)


def _first_shard(values: Iterable[Any]) -> Shard:
    return next(value for value in values if isinstance(value, Shard))


def _refuse(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del args, kwargs
    name = _name(function)
    raise NotImplementedError(
        f"YaFSDP: {name} needs the whole tensor, and a rank has only a part of it; call full_tensor() on all ranks to "
        f"read it, or change whole weights within `with model.unshard():`{_ADVICE.get(name, '')}"
    )


# Functions of every shard ---------------------------------------------------------------------------------------------


def _on_memory(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what does not ask for the shape: on the tensor as it is in memory."""
    return _do_plain(function, (), args, kwargs)


def _element_wise(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    written = kwargs.get("out", args[0]) if args and (_is_in_place(function) or "out" in kwargs) else None
    if isinstance(written, Tensor) and not isinstance(written, Shard):
        raise NotImplementedError(
            f"YaFSDP: {_name(function)} would write one rank's part to a whole tensor; call full_tensor() on all ranks"
        )
    leaves, tree = tree_flatten((args, kwargs))
    place, shard = _place_of(leaves), _first_shard(leaves)
    with plain_tensors():
        numel = shard.numel()
    values = [_local(leaf, place, numel) for leaf in leaves]
    args, kwargs = tree_unflatten(values, tree)
    result = function(*args, **kwargs)
    if written is not None:
        return written
    unchanged = [leaf for leaf, value in zip(leaves, values, strict=True) if value is result]
    return unchanged[0] if unchanged else Shard.of(result, place)


def _is_in_place(function: Callable[..., Any]) -> bool:
    name = _name(function)
    return (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")


def _foreach(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do an element-wise function of lists, whose tensors correspond by number."""
    firsts = args[0]
    if not all(isinstance(first, Shard) for first in firsts):
        raise NotImplementedError(f"YaFSDP: {_name(function)} of shards and of whole tensors together is not supported")
    for values in (*args[1:], *kwargs.values()):
        for first, value in zip(firsts, values, strict=False) if isinstance(values, list | tuple) else ():
            if isinstance(value, Tensor) and value.dim() and not isinstance(value, Shard):
                raise NotImplementedError(
                    f"YaFSDP: {_name(function)} of shards and of whole tensors together is not supported"
                )
            _place_of((first, value))
    with plain_tensors():
        results = function(*args, **kwargs)
    if results is None:
        return None
    return [Shard.of(result, first.place) for result, first in zip(results, firsts, strict=True)]


def _shape(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Answer what asks for the shape, by a tensor of that shape and without memory."""
    with plain_tensors():
        return function(_without_memory(args[0].place.visible_shape, args[0].dtype), *args[1:], **kwargs)


@functools.lru_cache(maxsize=4096)
def _without_memory(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _fill(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill a shard with its part of what the function fills a whole tensor with, and draws as one process does."""
    shard = kwargs.pop("tensor", None)
    shard, args = (args[0], args[1:]) if args else (shard, args)
    local = shard.to_local()
    whole = torch.empty(shard.place.visible_shape, dtype=local.dtype, device=local.device)
    function(whole, *args, **kwargs)
    with torch.no_grad():
        local.copy_(shard.place.cut_visible(whole, local.numel()))
    return shard


def _filled_like(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a tensor like a shard that holds random numbers: those that one process draws."""
    local, place = args[0].to_local(), args[0].place
    whole = function(torch.empty(place.visible_shape, dtype=local.dtype, device=local.device), *args[1:], **kwargs)
    return Shard.of(place.cut_visible(whole, local.numel()).clone(), place)


def _same_shape(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the shard itself for a view of its own shape."""
    shard, *sizes = args
    wanted = sizes[0].shape if sizes and isinstance(sizes[0], Tensor) else torch.Size(_flat(sizes))
    if kwargs or wanted != shard.place.visible_shape:
        raise NotImplementedError(
            f"YaFSDP: {_name(function)} to another shape needs the whole tensor; call full_tensor() on all ranks"
        )
    with plain_tensors():
        is_in_graph = shard.requires_grad and torch.is_grad_enabled()
    if is_in_graph:
        raise NotImplementedError(
            f"YaFSDP: {_name(function)} of a shard has no gradient. Of pipelines, those whose schedule splits backward "
            "(InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) compute gradients of weights apart from their units; "
            "use GPipe, 1F1B, Interleaved1F1B or LoopedBFS"
        )
    return shard


def _flat(sizes: Sequence[Any]) -> list[int]:
    return list(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], Sequence) else list(sizes)


def _new(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make a plain tensor of sizes that are given, with the shard's dtype and device."""
    with plain_tensors():
        return function(args[0].to_local(), *args[1:], **kwargs)


# Attributes -----------------------------------------------------------------------------------------------------------


def _get_gradient(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the gradient as a shard; autograd leaves a plain tensor of one dim, of a loss over the shard itself."""
    gradient = _do_plain(function, (), args, kwargs)
    if gradient is None or isinstance(gradient, Shard):
        return gradient
    with plain_tensors():
        args[0].grad = shard = Shard.of(gradient, args[0].place)
        return shard


def _set_gradient(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    shard, gradient = args
    if gradient is not None and not isinstance(gradient, Shard):
        with plain_tensors():
            part = shard.place.cut_visible(_of_whole_shape(gradient, shard), shard.numel())
            gradient = Shard.of(part.clone(), shard.place)
    with plain_tensors():
        function(shard, gradient)


def _of_whole_shape(value: Tensor, shard: Shard) -> Tensor:
    if value.shape != shard.place.visible_shape:
        raise ValueError(
            f"YaFSDP: a shard of {tuple(shard.place.visible_shape)} takes a shard or a tensor of that shape, not of "
            f"{tuple(value.shape)}"
        )
    return value


def _get_data(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    with plain_tensors():
        return Shard.of(function(*args), args[0].place)


def _set_data(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the values to where the shard lies: the engine gathers from there."""
    del function, kwargs
    shard, values = args
    local = shard.to_local().detach()
    if values.dtype != local.dtype or values.device != local.device:
        raise NotImplementedError(
            f"YaFSDP: a shard in {local.dtype} on {local.device} cannot become {values.dtype} on {values.device}; cast "
            "and move the model before fully_shard"
        )
    local.copy_(_local(values, shard.place, local.numel()))


# Reductions over all ranks --------------------------------------------------------------------------------------------


def _reduce_over_ranks(
    numbers: Tensor, place: Place, over_ranks: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
) -> Tensor:
    """Return numbers of all ranks, one dim on each, reduced over the ranks."""
    gathered: Tensor = _Gathered.apply(numbers, place)
    result = over_ranks(gathered)
    return result if dtype is None else result.to(dtype)


def _refuse_dims(name: str, dims: object) -> None:
    if dims is not None and dims != ():
        raise NotImplementedError(f"YaFSDP: {name} along a dim needs the whole tensor; call full_tensor() on all ranks")


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype in which parts of a sum lose nothing that the sum of all would keep."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _sum(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    shard = args[0]
    local = shard.to_local().to(_wide(shard.dtype))
    _refuse_dims(_name(function), args[1:] or kwargs.get("dim") or kwargs.get("axis"))
    dtype = function(torch.zeros((), dtype=local.dtype if "dtype" in kwargs else shard.dtype), **kwargs).dtype
    divisor = shard.place.visible_shape.numel() if _name(function) == "mean" else 1
    part = local.sum(dtype=kwargs.get("dtype")).reshape(1)
    return _reduce_over_ranks(
        part, shard.place, lambda rows: rows.sum() / divisor if divisor != 1 else rows.sum(), dtype
    )


def _norm(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    del function
    shard, *rest = args
    options = dict(zip(("p", "dim"), rest, strict=False)) | kwargs
    order = options.pop("p", options.pop("ord", 2))
    dtype = options.pop("dtype", None)
    _refuse_dims("norm", options.pop("dim", None))
    if options.pop("keepdim", False) or options.pop("out", None) is not None or options:
        raise NotImplementedError("YaFSDP: norm of a shard takes the order and the dtype; call full_tensor() instead")
    if order not in (None, "fro") and not isinstance(order, int | float):
        raise NotImplementedError(f"YaFSDP: norm {order!r} needs the whole tensor; call full_tensor() on all ranks")
    order = 2.0 if order in (None, "fro") else float(order)
    return _norms([shard], order, dtype)[0]


def _foreach_norm(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del function
    options = dict(zip(("ord", "dtype"), args[1:], strict=False)) | kwargs
    return _norms(args[0], float(options.get("ord", 2)), options.get("dtype"))


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Norm of each tensor, by one collective for all shards that the same ranks have."""
    results: list[Tensor | None] = [None] * len(tensors)
    by_ranks: dict[Any, list[int]] = {}
    with plain_tensors():
        for number, tensor in enumerate(tensors):
            if isinstance(tensor, Shard):
                place = tensor.place
                by_ranks.setdefault((place.groups, place.device, tensor.device, tensor.dtype), []).append(number)
            else:
                results[number] = torch.linalg.vector_norm(tensor, order, dtype=dtype)
        for (*_, kind), numbers in by_ranks.items():
            parts = torch.stack(_local_norms([tensors[number] for number in numbers], order, dtype or _wide(kind)))
            place = tensors[numbers[0]].place  # type: ignore[attr-defined]
            norms = _reduce_over_ranks(parts, place, functools.partial(_norm_of_norms, order=order), dtype or kind)
            for number, norm in zip(numbers, norms.unbind(), strict=True):
                results[number] = norm
    return [norm for norm in results if norm is not None]


def _local_norms(shards: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Norm of this rank's elements of each shard: of many it has none, as each rank has whole parameters of a unit."""
    parts = [shard for shard in shards if shard.numel()]
    norms = iter(torch._foreach_norm(parts, order, dtype) if parts else ())
    # Of no elements torch knows no maximum.
    empty = torch.full((), math.inf if order == -math.inf else 0.0, dtype=dtype, device=shards[0].device)

    def norm(shard: Tensor) -> Tensor:
        if shard.numel():
            return next(norms)
        return shard.sum(dtype=dtype) + empty if shard.requires_grad else empty

    return [norm(shard) for shard in shards]


def _norm_of_norms(rows: Tensor, order: float) -> Tensor:
    return rows.sum(0) if order == 0 else torch.linalg.vector_norm(rows, order, dim=0)


def _extreme(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the largest or smallest element, or do the element-wise function of that name.

    Of elements that are equal, those of each rank share the gradient of their rank.
    """
    if len(args) > 1 and isinstance(args[1], Tensor):
        return _element_wise(function, args, kwargs)
    _refuse_dims(_name(function), args[1:] or kwargs.get("dim"))
    is_largest = "max" in _name(function)
    local, dtype = args[0].to_local(), args[0].dtype
    local = local if local.is_floating_point() else local.double()
    if local.numel():
        extreme = local.amax() if is_largest else local.amin()
    else:  # a sum, as each rank must take part in backward
        extreme = local.sum() + (-math.inf if is_largest else math.inf)
    return _reduce_over_ranks(
        extreme.reshape(1), args[0].place, lambda rows: rows.amax() if is_largest else rows.amin(), dtype
    )


def _product(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _refuse_dims(_name(function), args[1:] or kwargs.get("dim"))
    return _reduce_over_ranks(args[0].to_local().prod(**kwargs).reshape(1), args[0].place, lambda rows: rows.prod())


def _truth(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return whether any or all elements are true."""
    _refuse_dims(_name(function), args[1:] or kwargs.get("dim"))
    local = function(args[0].to_local()).to(torch.int32).reshape(1)
    return _reduce_over_ranks(local, args[0].place, lambda rows: function(rows.bool()))


def _count_nonzero(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _refuse_dims(_name(function), args[1:] or kwargs.get("dim"))
    return _reduce_over_ranks(function(args[0].to_local()).reshape(1), args[0].place, lambda rows: rows.sum())


def _dot(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    del kwargs
    place, shard = _place_of(args), _first_shard(args)
    if len(place.visible_shape) != 1:
        raise NotImplementedError(f"YaFSDP: {_name(function)} of matrices needs whole tensors; call full_tensor()")
    return (args[0] * args[1]).sum() if isinstance(args[0], Shard) else (shard * args[0]).sum()


def _are_equal(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    place, shard = _place_of(args), _first_shard(args)
    with plain_tensors():
        numel = shard.numel()
    if any(isinstance(arg, Tensor) and not isinstance(arg, Shard) and arg.shape != place.visible_shape for arg in args):
        return False
    answer = function(*(_local(arg, place, numel) for arg in args), **kwargs)
    equal = torch.tensor([int(answer)], device=shard.device)
    return bool(_reduce_over_ranks(equal, place, lambda rows: rows.amin()))


def _scalar(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number of a tensor of one element, which one rank has."""
    if args[0].place.visible_shape.numel() != 1:
        raise ValueError(f"YaFSDP: a tensor of {tuple(args[0].place.visible_shape)} is no single number")
    return function(args[0].detach().full_tensor(), *args[1:], **kwargs)


def _unscale(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what a gradient scaler does: divide gradients, and note whether a rank's are infinite."""
    gradients, found_infinity, *_ = args
    with plain_tensors():
        function(*args, **kwargs)
    for groups, device in {(g.place.groups, g.place.device): None for g in gradients if isinstance(g, Shard)}:
        over_ranks = found_infinity.to(device)
        note("search of a gradient scaler for infinities")
        for group in groups:
            waiting(dist.all_reduce, over_ranks, op=dist.ReduceOp.MAX, group=group)
        found_infinity.copy_(over_ranks)


# What is done by name -------------------------------------------------------------------------------------------------

_UNARY = (
    "abs absolute acos acosh angle asin asinh atan atanh bitwise_not ceil clamp clamp_max clamp_min clip clone "
    "contiguous cos cosh deg2rad detach digamma double erf erfc erfinv exp exp2 expm1 fill_ float floor frac gelu half "
    "bfloat16 hardtanh isfinite "
    "isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not "
    "logit logsigmoid nan_to_num neg negative positive pow rad2deg real reciprocal relu round rsqrt sgn sigmoid sign "
    "signbit silu sin sinc sinh softplus sqrt square tan tanh threshold trunc zero_ empty_like "
    "zeros_like ones_like full_like alias"
)
_BINARY = (
    "add addcdiv addcmul atan2 bitwise_and bitwise_or bitwise_xor copy_ copysign div divide eq float_power "
    "floor_divide fmax fmin fmod ge greater greater_equal gt heaviside hypot isclose le lerp less less_equal logaddexp "
    "logical_and logical_or logical_xor lt masked_fill maximum minimum mul multiply ne nextafter not_equal pow "
    "remainder rsub sub subtract true_divide where xlogy"
)
_OPERATORS = (
    "abs add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv div rdiv idiv floordiv rfloordiv "
    "ifloordiv mod rmod imod pow rpow ipow neg pos eq ne lt le gt ge and rand iand or ror ior xor rxor ixor invert"
)
_ANY_MEMORY = (
    "dtype.get device.get requires_grad.get requires_grad.set grad_fn.get is_leaf.get is_cuda.get is_cpu.get "
    "is_meta.get is_mps.get is_xpu.get is_quantized.get is_sparse.get is_sparse_csr.get is_mkldnn.get is_nested.get "
    "is_vulkan.get layout.get _version.get _backward_hooks.get _backward_hooks.set _post_accumulate_grad_hooks.get "
    "_post_accumulate_grad_hooks.set _base.get _grad.get names.get name.get output_nr.get retains_grad.get "
    "itemsize.get "
    "element_size is_floating_point is_complex is_contiguous is_conj is_neg is_inference is_signed is_pinned is_shared "
    "is_distributed get_device data_ptr untyped_storage storage_offset register_hook "
    "register_post_accumulate_grad_hook retain_grad has_names _is_view __hash__ _typed_storage storage "
    "_has_symbolic_sizes_strides requires_grad_ __dir__ is_tensor volatile.get share_memory_ record_stream"
)
_SHAPES = "shape.get size dim ndim.get ndimension numel nelement __len__ nbytes.get stride"
_RANDOM = (
    "normal_ uniform_ bernoulli_ cauchy_ exponential_ geometric_ log_normal_ random_ constant_ ones_ zeros_ "
    "kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ trunc_normal_ orthogonal_ sparse_ dirac_ eye_"
)
_FOREACH = frozenset(name for name in dir(torch) if name.startswith("_foreach_")) - frozenset(
    f"_foreach_{name}" for name in ("max", "mm", "norm", "powsum")
)

_FUSED = ("_fused_adagrad_", "_fused_adam_", "_fused_adamw_", "_fused_sgd_")

_HANDLERS: dict[str, Handler] = (
    dict.fromkeys([*_UNARY.split(), *_BINARY.split()], _element_wise)
    | dict.fromkeys([f"{name}_" for name in f"{_UNARY} {_BINARY}".split() if not name.endswith("_")], _element_wise)
    | dict.fromkeys([f"__{name}__" for name in _OPERATORS.split()], _element_wise)
    | dict.fromkeys(["to", "type", "type_as", "cpu", "cuda"], _element_wise)
    | dict.fromkeys(_ANY_MEMORY.split(), _on_memory)
    | dict.fromkeys(_SHAPES.split(), _shape)
    | dict.fromkeys(_RANDOM.split(), _fill)
    | dict.fromkeys(["rand_like", "randn_like", "randint_like"], _filled_like)
    | dict.fromkeys(["view_as", "reshape_as", "expand_as", "view", "reshape"], _same_shape)
    | dict.fromkeys(["new", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"], _new)
    | dict.fromkeys([*_FOREACH, *_FUSED], _foreach)
    | dict.fromkeys(["norm", "linalg_vector_norm", "vector_norm"], _norm)
    | dict.fromkeys(["max", "min", "amax", "amin"], _extreme)
    | dict.fromkeys(["any", "all"], _truth)
    | dict.fromkeys(["dot", "vdot", "inner"], _dot)
    | dict.fromkeys(["equal", "allclose"], _are_equal)
    | dict.fromkeys(["item", "__bool__", "__float__", "__int__", "__index__", "__complex__"], _scalar)
    | {
        "grad.get": _get_gradient,
        "grad.set": _set_gradient,
        "data.get": _get_data,
        "data.set": _set_data,
        "sum": _sum,
        "mean": _sum,
        "prod": _product,
        "count_nonzero": _count_nonzero,
        "_foreach_norm": _foreach_norm,
        "_amp_foreach_non_finite_check_and_unscale_": _unscale,
    }
)

_HANDLERS_OF: dict[Any, Handler] = {}
"""The handlers by function, of those that have been called."""

_ADVICE = {
    **dict.fromkeys(
        ("grad", "backward"),
        ". backward(inputs=…) and autograd.grad give no gradients of sharded parameters, as modules compute with whole "
        "weights; call loss.backward(), then read .grad",
    ),
    **dict.fromkeys(
        ("all_reduce", "reduce", "broadcast"),
        ". Gradients are means over all ranks already, and weights are of one model: leave such collectives out",
    ),
}
