"""Parameters that FSDP2 gathers in a form of their own (fp8 and its kin): YaFSDP refuses them before the first step."""

from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree

from instrumented_trainers.parallelism.yafsdp import fully_shard
from tests.support import process_group

WIDTH = 8
KEEPING_CLASS = ("new_zeros", "slice", "copy_", "view", "as_strided", "split", "chunk", "clone", "detach")


class Int8Weight(Tensor):
    """Weights in fp32 whose all-gather sends int8 and has one scale on all ranks: fp8 as a CPU can have it."""

    @staticmethod
    def __new__(cls, values: Tensor) -> Self:
        return Tensor._make_wrapper_subclass(cls, values.shape, strides=values.stride(), dtype=values.dtype)

    def __init__(self, values: Tensor) -> None:
        self.values_in_full = values

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values_in_full"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> "Int8Weight":
        return Int8Weight(parts["values_in_full"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            return value.values_in_full if isinstance(value, Int8Weight) else value

        result = func(*_pytree.tree_map(plain, args), **_pytree.tree_map(plain, kwargs or {}))
        if func.overloadpacket.__name__ in KEEPING_CLASS:
            return _pytree.tree_map_only(Tensor, Int8Weight, result)
        return result

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        largest = self.values_in_full.abs().max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=mesh.get_group())
        scale = largest / 127
        return ((self.values_in_full / scale).round().to(torch.int8),), (scale,)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        whole = outputs[0].to(param_dtype) * metadata[0]
        if out is None:
            return whole, outputs
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


def layer() -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Linear(WIDTH, WIDTH, bias=False)
    made.weight = nn.Parameter(Int8Weight(made.weight.detach()))
    return made


def fsdp2_outputs() -> tuple[float, float]:
    """The largest error of an output, by int8 and in full, and the largest output."""
    sharded, inputs = layer(), torch.eye(WIDTH)
    whole_weight = sharded.weight.detach().values_in_full.clone()
    fsdp2(sharded)
    outputs = sharded(inputs)
    outputs.square().mean().backward()
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    return (outputs - whole_weight.t()).abs().max().item(), whole_weight.abs().max().item()


def refusal() -> str:
    try:
        fully_shard(layer())
    except NotImplementedError as error:
        return str(error)
    return "accepted"


def refusal_beneath_a_dtensor() -> str:
    made = nn.Linear(WIDTH, WIDTH, bias=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    weight = DTensor.from_local(Int8Weight(made.weight.detach()), mesh["tp"], [Replicate()], run_check=False)
    made.weight = nn.Parameter(weight)
    try:
        fully_shard(made, mesh["dp"])
    except NotImplementedError as error:
        return str(error)
    return "accepted"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, process_group.Outcome]:
    cases = {"fsdp2": fsdp2_outputs, "yafsdp": refusal, "dtensor": refusal_beneath_a_dtensor}
    return process_group.run_cases(2, cases)


def test_fsdp2_gathers_such_a_parameter_in_its_own_form(outcomes: dict[str, process_group.Outcome]) -> None:
    for error, largest in outcomes["fsdp2"].results():
        assert 0 < error <= largest / 127


@pytest.mark.parametrize("case", ["yafsdp", "dtensor"])
def test_yafsdp_refuses_it_by_the_name_of_the_hook(outcomes: dict[str, process_group.Outcome], case: str) -> None:
    for reason in outcomes[case].results():
        assert "fsdp_pre_all_gather" in reason
        assert "Int8Weight" in reason
