"""Optimizers of shards: element-wise ones step them as plain tensors. A trial shows which optimizers are element-wise.

The trial steps a matrix, and its two parts, as on two ranks. An element-wise optimizer (SGD, Adam and similar ones)
makes the same of both. One that differs is refused. One that cannot be tried steps shards as what they are: tensors of
the whole shape, whose functions compute over all ranks or raise.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from instrumented_trainers.parallelism.yafsdp.shard_tensor import Shard, ShardParameter, plain_tensors
from instrumented_trainers.parallelism.yafsdp.unit import Unit

# By the end of the class's name, for most come from packages that need not be installed.
NEED_WHOLE_TENSORS = frozenset(
    ("adafactor", "distributedshampoo", "galoreadamw", "kfac", "lamb", "lars", "lbfgs", "muon", "novograd", "psgd")
) | {"shampoo", "soap"}

_ROWS, _COLUMNS = 72, 64
"""More than 4096 elements: optimizers that keep their state in eight bits do so in blocks, of large tensors alone."""
_TRIALS = (
    ("unlike", 1.0, 30),
    ("alike", 1.0, 30),
    ("orthogonal", 1.0, 6),
    *((gradient_kind, scale, 6) for scale in (1e-4, 1e4) for gradient_kind in ("unlike", "alike", "orthogonal")),
)
"""Kind of gradients, their scale, number of steps. What an optimizer does to large gradients, such as clipping by
their norm, it may not do to small ones; rates that it estimates grow while gradients are alike, and projections work on
those that are orthogonal to weights; some precondition from the 25th step on."""
_COUPLING_STEPS = 20
_LEAST_RATE = 0.1
_WITHOUT_TENSORS = ("instrumented_trainers", "tracekit")
"""Whose hooks of all optimizers, such as the recorder's that counts steps, look at no parameter."""
_PLAIN = "_yafsdp_steps_plain_tensors"  # on an optimizer
SHARDED_IN = "_yafsdp_sharded_in"  # on an original parameter: which module's unit took it


def units_of(optimizer: Optimizer) -> list[Unit]:
    """Return the units whose shards the optimizer steps, in the order of its parameters."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    owners = (parameter.owner() for parameter in parameters if isinstance(parameter, ShardParameter))
    return list(dict.fromkeys(owner for owner in owners if owner is not None))


def step_description(optimizer: Optimizer) -> str:
    """What must be the same on all ranks in an optimizer's step: options of each group, and of how many parameters."""
    groups = (
        [f"{name}={value}" for name, value in group.items() if _is_plain(value)]
        + [f"{len(group['params'])} parameters"]
        for group in optimizer.param_groups
    )
    return f"step of {type(optimizer).__name__} ({'; '.join(', '.join(options) for options in groups)})"


def _is_plain(value: Any) -> bool:
    """Return whether an option can be read without a wait for a device."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str)


def refuse_originals(optimizer: Optimizer) -> None:
    """Raise RuntimeError if the optimizer holds parameters that `fully_shard` has replaced by shards since."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if (kind := getattr(parameter, SHARDED_IN, None)) is not None:
                raise RuntimeError(
                    f"YaFSDP: {type(optimizer).__name__} was made before fully_shard and holds a parameter of {kind} "
                    "that is sharded since, so it would never train it; make optimizers after fully_shard"
                )


def refuse_whole_tensor_optimizer(optimizer: Optimizer) -> bool:
    """Return whether the optimizer, which has shards to step, is known to be element-wise.

    Raises NotImplementedError if it needs whole tensors.
    """
    kind = type(optimizer)
    outcomes = {_outcome(kind, _options(optimizer, group)) for group in optimizer.param_groups}
    if True in outcomes:
        raise NotImplementedError(
            f"YaFSDP: {kind.__name__} needs whole tensors, and a rank has one-dimensional shards of them; hand it to "
            "WholeTensorOptimizer, which gathers them, or use an element-wise optimizer (AdamW, SGD and their kin)"
        )
    return outcomes == {False}


# Steps on plain tensors -----------------------------------------------------------------------------------------------

_running: list[AbstractContextManager[Any]] = []
"""The context of an optimizer's first step, which begins in one hook and ends in another."""


def begin_plain_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let this step take shards for plain tensors, and later ones, too: it is faster, and the same element by element.

    Called by a hook that runs before the step, with its arguments; returns them for it.
    """
    if _has_hooks(optimizer):
        _show_state(optimizer)
        return None
    if getattr(optimizer, _PLAIN, False):
        return None
    setattr(optimizer, _PLAIN, True)
    for name in ("step", "zero_grad"):
        # A bound method with the marks of the one before, as schedulers of torch look for both.
        setattr(optimizer, name, types.MethodType(_on_plain_tensors(getattr(optimizer, name)), optimizer))
    _running.append(plain_tensors())
    _running[-1].__enter__()
    return tuple(map(_on_shards, args)), {name: _on_shards(value) for name, value in kwargs.items()}


def end_plain_step() -> None:
    """End what `begin_plain_step` began, after the step or after it raised."""
    while _running:
        _running.pop().__exit__(None, None, None)


def _has_hooks(optimizer: Optimizer) -> bool:
    """Return whether code of the user's runs within a step, such as a hook that clips: it must see shards."""
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return True
    hooks = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    modules = {getattr(hook, "__module__", "") for group in hooks for hook in group.values()}
    return any(module.partition(".")[0] not in _WITHOUT_TENSORS for module in modules)


def _show_state(optimizer: Optimizer) -> None:
    """Let state be shards that was made in a step on plain tensors, before there was a hook."""
    for parameter, values in optimizer.state.items():
        if isinstance(parameter, ShardParameter):
            numel = parameter.to_local().numel()
            for key, value in values.items():
                if isinstance(value, Tensor) and not isinstance(value, Shard) and value.shape == (numel,):
                    values[key] = Shard.of(value, parameter.place)


def _on_plain_tensors(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _has_hooks(optimizer):
            return method(*args, **kwargs)
        args, kwargs = tuple(map(_on_shards, args)), {name: _on_shards(value) for name, value in kwargs.items()}
        with plain_tensors():
            return method(*args, **kwargs)

    return call


def _on_shards(value: Any) -> Any:
    """Return a closure such that it sees shards, not plain tensors: it is the user's code."""
    if not inspect.isroutine(value) and not isinstance(value, functools.partial):
        return value

    @functools.wraps(value)
    def closure(*args: Any, **kwargs: Any) -> Any:
        with torch._C._EnableTorchFunction():
            return value(*args, **kwargs)

    return closure


# A trial --------------------------------------------------------------------------------------------------------------

_outcomes: dict[tuple[type[Optimizer], str], bool | None] = {}


def _outcome(kind: type[Optimizer], options: dict[str, Any]) -> bool | None:
    """Return whether such an optimizer needs whole tensors; None if it cannot be tried."""
    key = kind, str(sorted(options.items(), key=str))
    if key not in _outcomes:
        _outcomes[key] = _differs_on_parts(kind, options)
    return _outcomes[key]


def _options(optimizer: Optimizer, group: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a group to make such an optimizer with, and a rate at which it moves."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {name: group.get(name, value) for name, value in optimizer.defaults.items() if name in accepted}
    for name in ("capturable", "fused", "foreach"):  # how it computes, not what
        options.pop(name, None)
    rate = options.get("lr")
    if rate is not None and not (isinstance(rate, float) and rate > _LEAST_RATE):
        options["lr"] = _LEAST_RATE
    return options


def _differs_on_parts(kind: type[Optimizer], options: dict[str, Any]) -> bool | None:
    if any(base.__name__.lower().endswith(tuple(NEED_WHOLE_TENSORS)) for base in kind.__mro__):
        return True  # some begin to precondition after many steps
    matrix = _matrix()
    cut = matrix.numel() // 3 + 8  # as two ranks have it, and no multiple of a block
    with _without_plain_tensors():
        for gradient_kind, scale, steps in _TRIALS:
            gradients = _gradients(gradient_kind, matrix, scale, steps)
            try:
                (expected,) = _train(kind, options, [matrix], [gradients])
            except Exception:  # noqa: BLE001 -- an optimizer of any make, made from its options alone
                return None
            try:
                parts = [
                    _train(kind, options, [matrix.flatten()[part]], [[g.flatten()[part] for g in gradients]])[0]
                    for part in (slice(cut), slice(cut, None))
                ]
            except Exception:  # noqa: BLE001 -- such as torch.optim.Muon's, which takes matrices only
                return True
            if not _are_alike(expected.flatten(), torch.cat(parts)):
                return True
    return False


def couples_parameters(kind: Callable[..., Optimizer], options: dict[str, Any]) -> bool:
    """Return whether what such an optimizer does to a matrix depends on the others that it steps.

    As where it clips by the norm of all, or estimates a rate from all (Prodigy). False where it cannot be tried.
    """
    matrix = _matrix()
    matrices = [matrix, matrix.flip(0) * 3]
    with _without_plain_tensors():
        for gradient_kind, scale in (("unlike", 1.0), ("alike", 1.0), ("alike", 1e4)):
            gradients = [
                _gradients(gradient_kind, value, scale * (1 + 2 * number), _COUPLING_STEPS, seed=1 + number)
                for number, value in enumerate(matrices)
            ]
            try:
                joint_results = _train(kind, options, matrices, gradients)
                single_results = [
                    _train(kind, options, [value], [value_gradients])[0]
                    for value, value_gradients in zip(matrices, gradients, strict=True)
                ]
            except Exception:  # noqa: BLE001 -- an optimizer of any make
                return False
            if not all(map(_are_alike, joint_results, single_results)):
                return True
    return False


@contextmanager
def _without_plain_tensors() -> Iterator[None]:
    """Context of a trial: functions of torch do what they usually do, and random numbers continue as before it."""
    with torch._C._EnableTorchFunction(), torch.random.fork_rng(devices=[]):
        yield


def _matrix() -> Tensor:
    return torch.randn(_ROWS, _COLUMNS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _gradients(gradient_kind: str, matrix: Tensor, scale: float, steps: int, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    unlike = list(torch.randn(steps, *matrix.shape, generator=generator, dtype=matrix.dtype) * scale)
    if gradient_kind == "unlike":
        return unlike
    first = unlike[0]
    if gradient_kind == "orthogonal":
        first = first - matrix * ((first * matrix).sum(1, keepdim=True) / matrix.square().sum(1, keepdim=True))
    return [first] * steps


def _are_alike(values: Tensor, others: Tensor) -> bool:
    return torch.allclose(values, others, rtol=1e-9, atol=1e-12, equal_nan=True)


def _train(
    kind: Callable[..., Optimizer], options: dict[str, Any], values: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    """Return the values after a step on each of their gradients."""
    parameters = [nn.Parameter(value.clone()) for value in values]
    torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the devices' generators, too, for good
    optimizer = kind(parameters, **options)
    closure = ((lambda: 0.0),) if _needs_closure(type(optimizer)) else ()
    for step_gradients in zip(*gradients, strict=True):
        for parameter, gradient in zip(parameters, step_gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step(*closure)
    return [parameter.detach() for parameter in parameters]


def _needs_closure(kind: type[Optimizer]) -> bool:
    """Return whether a step cannot be made without a function that computes the loss, as of L-BFGS."""
    closure = inspect.signature(inspect.unwrap(kind.step)).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
