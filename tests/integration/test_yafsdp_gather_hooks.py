"""Parameters that are gathered in a form of their own (fp8 and others): FSDP2's losses and weights, or a refusal."""

import copy
import functools
from collections.abc import Callable
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree

from instrumented_trainers.parallelism.yafsdp import fully_shard
from tests.integration.parity import relative
from tests.support import process_group

WIDTH, DEPTH, STEPS, TOLERANCE = 12, 4, 4, 1e-12
KEEPING_CLASS = ("new_zeros", "slice", "copy_", "view", "as_strided", "split", "chunk", "clone", "detach")


class Weight(Tensor):
    """Weights whose class says how they are gathered: computed with as plain tensors otherwise."""

    def __new__(cls, values: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, values.shape, strides=values.stride(), dtype=values.dtype)

    def __init__(self, values: Tensor) -> None:
        self.values_in_full = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_in_full"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Self:
        return cls(parts["values_in_full"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.values_in_full if isinstance(value, Weight) else value

        result = func(*_pytree.tree_map(plain, args), **_pytree.tree_map(plain, kwargs or {}))
        if func.overloadpacket.__name__ in KEEPING_CLASS:
            return _pytree.tree_map_only(Tensor, cls, result)
        return result


class Int8Weight(Weight):
    """Sends int8 with one scale on all ranks: fp8 as a CPU can have it. The whole weight has memory of its own."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        largest = self.values_in_full.abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / 127
        return ((self.values_in_full / scale).round().to(torch.int8),), (scale,)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        whole = outputs[0].to(param_dtype) * metadata[0]
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class ScaledByRow(Weight):
    """Sends int8 and a scale for each row, which are two inputs of an all-gather."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert outer_size == (WIDTH, WIDTH)
        assert isinstance(module, nn.Linear)
        scale = self.values_in_full.abs().amax(1, keepdim=True) / 127
        return ((self.values_in_full / scale).round().to(torch.int8), scale), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        whole = outputs[0].to(param_dtype) * outputs[1]
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class Rounded(Weight):
    """Sends what bf16 keeps of the weights, in their own dtype: the whole weight is what was gathered."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values_in_full.to(torch.bfloat16).to(self.dtype),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (outputs[0], outputs)


class Layer(nn.Module):
    """A linear layer whose weight is of a class, beside plain parameters."""

    def __init__(self, kind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.linear.weight = nn.Parameter(kind(self.linear.weight.detach().double()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).tanh()


def model_of(kind: Callable[[Tensor], Tensor], shard: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Layer(kind) for _ in range(DEPTH)))
    model.double()
    for layer in model[1:]:
        shard(layer)
    shard(model)
    return model


def whole_of(tensor: Any) -> Tensor:
    whole = tensor.full_tensor().detach()
    return whole.values_in_full if isinstance(whole, Weight) else whole  # type: ignore[no-any-return]


def train(model: Any, optimizer: Any, first: int = 0) -> list[Tensor]:
    losses = []
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        loss = model(torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)


def differences_from_fsdp2(kind: type[Weight]) -> dict[str, float]:
    """Largest relative differences of losses and of weights from FSDP2's, and of losses from plain weights'."""
    models = {
        "fsdp2": model_of(kind, fsdp2),
        "yafsdp": model_of(kind, fully_shard),
        "plain": model_of(lambda values: values, fully_shard),
    }
    losses = {name: train(model, sgd(model)) for name, model in models.items()}
    weights = {name: [whole_of(value) for value in models[name].parameters()] for name in ("fsdp2", "yafsdp")}
    pairs = zip(weights["yafsdp"], weights["fsdp2"], strict=True)
    return {
        "losses": max(map(relative, losses["yafsdp"], losses["fsdp2"])),
        "weights": max(relative(own, other) for own, other in pairs),
        "effect": max(map(relative, losses["yafsdp"], losses["plain"])),
    }


def continued() -> dict[str, float]:
    """What becomes of such a model beside training: a copy, whole weights, its state, memory between passes."""
    model = model_of(Int8Weight, fully_shard)
    train(model, sgd(model))
    copied = copy.deepcopy(model)
    with model.unshard():
        classes = {type(layer.linear.weight).__name__ for layer in model[1:]}
        whole = model[1].linear.weight.detach().values_in_full.clone()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    loaded = model_of(Int8Weight, fully_shard)
    loaded.load_state_dict(get_model_state_dict(copied))
    own = train(model, sgd(model), STEPS)
    kept = [flat._own_memory for flat in model[1]._yafsdp_unit.flats if hasattr(flat, "_own_memory")]
    return {
        "is of its class": float(classes == {"Int8Weight"}),
        "bytes between steps": float(sum(t.untyped_storage().nbytes() for tensors in kept for t in tensors)),
        "tensors of their own": float(sum(map(len, kept))),
        "copy": max(map(relative, own, train(copied, sgd(copied), STEPS))),
        "loaded": max(map(relative, own, train(loaded, sgd(loaded), STEPS))),
        "whole": 0.0 if dist.get_rank() else relative(whole, state["1.linear.weight"]),
    }


class WithoutSecondHook(Weight):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.values_in_full,), None


class OfTwoTensors(Int8Weight):
    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_in_full", "values_in_full"], None


def refusal(kind: type[Weight], rows: int = WIDTH) -> str:
    linear = nn.Linear(WIDTH, rows)
    linear.weight = nn.Parameter(kind(linear.weight.detach()))
    return words_of(lambda: fully_shard(linear))


def refusal_beneath_a_dtensor() -> str:
    linear = nn.Linear(WIDTH, WIDTH, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    weight = DTensor.from_local(Int8Weight(linear.weight.detach()), mesh["tp"], [Replicate()], run_check=False)
    linear.weight = nn.Parameter(weight)
    return words_of(lambda: fully_shard(linear, mesh["dp"]))


def words_of(shard: Callable[[], Any]) -> str:
    try:
        shard()
    except NotImplementedError as error:
        return str(error)
    return "accepted"


KINDS = {kind.__name__: kind for kind in (Int8Weight, ScaledByRow, Rounded)}
REFUSED: dict[str, tuple[Callable[[], str], str]] = {
    "one hook": (functools.partial(refusal, WithoutSecondHook), "no fsdp_post_all_gather"),
    "two tensors": (functools.partial(refusal, OfTwoTensors), "not one inner tensor"),
    "uneven rows": (functools.partial(refusal, Int8Weight, rows=WIDTH + 1), "cannot be divided"),
    "beneath a DTensor": (refusal_beneath_a_dtensor, "fsdp_pre_all_gather"),
}


@functools.cache
def outcomes(world_size: int) -> dict[str, process_group.Outcome]:
    cases: dict[str, Callable[[], Any]] = {
        name: functools.partial(differences_from_fsdp2, kind) for name, kind in KINDS.items()
    }
    cases |= {name: refuse for name, (refuse, _) in REFUSED.items()}
    return process_group.run_cases(world_size, cases | {"continued": continued})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_trains_as_fsdp2_does_with_the_same_class(world_size: int, kind: str) -> None:
    for differences in outcomes(world_size)[kind].results():
        assert differences["losses"] < TOLERANCE
        assert differences["weights"] < TOLERANCE
        assert differences["effect"] > 1e-5  # what is gathered is not what the shards hold


@pytest.mark.parametrize("world_size", [2, 3])
def test_copies_whole_weights_and_state_keep_the_class(world_size: int) -> None:
    for result in outcomes(world_size)["continued"].results():
        assert result["is of its class"] == 1
        assert result["tensors of their own"] == 1
        assert result["bytes between steps"] == 0
        assert max(result["copy"], result["loaded"], result["whole"]) < TOLERANCE


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_cannot_gather_is_refused_by_name(case: str) -> None:
    for reason in outcomes(2)[case].results():
        assert reason.startswith("YaFSDP: parameter 'weight' of Linear")
        assert REFUSED[case][1] in reason
