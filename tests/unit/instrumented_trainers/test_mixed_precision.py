"""Modules under autocast, as CUDA and the CPU apply it: which operators it casts differs between devices."""

import types

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from instrumented_trainers.experts import MixtureOfExperts
from instrumented_trainers.parallelism import ring_attention

TOLERANCE = 0.02  # bf16 has 8 bits of mantissa


class _Arrived:
    """A tensor that came back at once: the ring of one rank."""

    def __init__(self, values: Tensor, *_: object) -> None:
        self._values = values

    def receive(self) -> Tensor:
        return self._values


def attention(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return the outputs of attention and the gradients of queries, keys and values by torch, in 64 bits."""
    inputs = [each.detach().double().requires_grad_() for each in (query, key, value)]
    output = functional.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    output.square().sum().backward()
    return [output.detach(), *(each.grad for each in inputs if each.grad is not None)]


@pytest.mark.parametrize("query_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ring_attention_is_right_in_every_mix_of_precisions(
    monkeypatch: pytest.MonkeyPatch, query_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(ring_attention, "_Passing", _Arrived)
    torch.manual_seed(0)
    query = torch.randn(2, 4, 16, 8).to(query_dtype).requires_grad_()
    key, value = (torch.randn(2, 2, 16, 8).to(dtype).requires_grad_() for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        output = ring_attention.ring_attention(query, key, value, types.SimpleNamespace(size=1, index=0))  # type: ignore[arg-type]
    output.double().square().sum().backward()
    got = [output, query.grad, key.grad, value.grad]
    assert [each.dtype for each in got if each is not None] == [query_dtype, query_dtype, dtype, dtype]
    for each, wanted in zip(got, attention(query, key, value), strict=True):
        assert each is not None
        assert (each.double() - wanted).norm() < TOLERANCE * wanted.norm()


def test_experts_add_up_in_the_precision_of_their_input() -> None:
    torch.manual_seed(0)
    experts = MixtureOfExperts(16, 32, experts=4, active=2, balance=0.01)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    stream = torch.randn(2, 8, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = experts(stream)
    mixed.square().sum().backward()
    assert mixed.dtype is torch.float32
    wanted = experts(stream)
    assert (mixed - wanted).norm() < 2 * TOLERANCE * wanted.norm()
