"""A mixture of experts against a loop over tokens, and its balancing loss against one that is added."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from instrumented_trainers.experts import MixtureOfExperts, balancing_loss, drop_ratio
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import PRESETS, ModelConfig
from tests.support.wording import Wording

WIDTH, HIDDEN, EXPERTS, ACTIVE = 8, 12, 5, 2


def mixture(
    balance: float = 0.0, experts: int = EXPERTS, active: int = ACTIVE, capacity: float | None = None
) -> MixtureOfExperts:
    torch.manual_seed(0)
    sizes = {"experts": experts, "active": active}
    made = MixtureOfExperts(WIDTH, HIDDEN, **sizes, balance=balance, capacity=capacity).double()
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


def tokens(sequences: int = 3) -> Tensor:
    return torch.randn(sequences, 7, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_token(layer: MixtureOfExperts, stream: Tensor) -> Tensor:
    outputs = []
    for token in stream.flatten(0, 1):
        chances = (layer.router.weight @ token).softmax(dim=0)
        best = sorted(range(layer.experts), key=lambda number: -chances[number].item())[: layer.active]
        parts = [
            chances[number]
            * (layer.down[number] @ (functional.silu(layer.gate[number] @ token) * (layer.up[number] @ token)))
            for number in best
        ]
        outputs.append(sum(parts) / sum(chances[number] for number in best))
    return torch.stack(outputs).view_as(stream)


@pytest.mark.parametrize("active", [1, 2, 5])
def test_each_token_goes_through_its_best_experts(active: int) -> None:
    layer, stream = mixture(active=active), tokens()
    assert torch.allclose(layer(stream), by_token(layer, stream), rtol=1e-12, atol=1e-14)


def with_capacity(layer: MixtureOfExperts, stream: Tensor) -> tuple[Tensor, int]:
    """Return the outputs of a loop over sequences, choices and tokens, and how many choices found no room."""
    assert layer.capacity is not None
    outputs, dropped = torch.zeros_like(stream), 0
    for sequence, tokens_of in enumerate(stream):
        chances = (tokens_of @ layer.router.weight.T).softmax(dim=1)
        best = chances.argsort(dim=1, descending=True)[:, : layer.active]
        room = [math.ceil(layer.capacity * len(tokens_of) * layer.active / layer.experts)] * layer.experts
        for choice in range(layer.active):
            for at, token in enumerate(tokens_of):
                number = int(best[at, choice])
                room[number] -= 1
                dropped += room[number] < 0
                if room[number] >= 0:
                    hidden = functional.silu(layer.gate[number] @ token) * (layer.up[number] @ token)
                    weight = chances[at, number] / chances[at, best[at]].sum()
                    outputs[sequence, at] += weight * (layer.down[number] @ hidden)
    return outputs, dropped


@pytest.mark.parametrize(("capacity", "active"), [(0.1, 2), (0.5, 1), (1.0, 2), (1.5, 2), (float(EXPERTS), 2)])
def test_experts_take_no_more_than_their_capacity(capacity: float, active: int) -> None:
    layer, stream = mixture(capacity=capacity, active=active), tokens()
    wanted, dropped = with_capacity(layer, stream)
    assert torch.allclose(layer(stream), wanted, rtol=1e-12, atol=1e-14)
    assert (dropped > 0) == (capacity <= 1)
    ratio = drop_ratio(layer)
    assert ratio is not None
    assert ratio.item() == pytest.approx(dropped / (stream.shape[0] * stream.shape[1] * active))
    assert drop_ratio(layer) is None


def test_capacity_does_not_depend_on_which_sequences_are_in_a_batch() -> None:
    layer, stream = mixture(capacity=0.7), tokens()
    assert torch.allclose(layer(stream), torch.cat([layer(each) for each in stream.split(1)]), rtol=1e-12, atol=1e-14)


def test_only_training_counts_what_is_dropped() -> None:
    layer = mixture(capacity=0.5).eval()
    layer(tokens())
    assert drop_ratio(layer) is None


def test_gradients_are_those_of_a_loop_over_tokens() -> None:
    layer, stream = mixture(), tokens()
    wanted = torch.autograd.grad(by_token(layer, stream).square().sum(), list(layer.parameters()))
    found = torch.autograd.grad(layer(stream).square().sum(), list(layer.parameters()))
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    layer = mixture(experts=EXPERTS, active=1)
    layer(tokens(1)[:, :1]).sum().backward()
    assert layer.gate.grad is not None
    idle = [number for number in range(EXPERTS) if not layer.gate.grad[number].any()]
    assert len(idle) == EXPERTS - 1


def test_the_balancing_loss_is_part_of_backward_and_not_of_the_output() -> None:
    stream, plain, balanced = tokens(), mixture(), mixture(balance=0.3)
    assert torch.equal(plain(stream), balanced(stream))
    chances = plain.router(stream.flatten(0, 1)).softmax(dim=-1)
    chosen = chances.topk(ACTIVE).indices.flatten()
    shares = torch.bincount(chosen, minlength=EXPERTS) / len(chosen)
    (plain(stream).square().sum() + 0.3 * balancing_loss(chances, shares)).backward()
    balanced(stream).square().sum().backward()
    for one, other in zip(plain.parameters(), balanced.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_the_balancing_loss_is_one_where_all_experts_have_as_much_and_grows_with_the_difference() -> None:
    even = torch.full((10, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    assert balancing_loss(even, even[0]) == pytest.approx(1)
    one = functional.one_hot(torch.zeros(10, dtype=torch.int64), EXPERTS).double()
    assert balancing_loss(one, one[0]) == pytest.approx(EXPERTS)


@pytest.mark.parametrize("config", [PRESETS["8x7b"], ModelConfig(64, 2, 4, 2, 96, 128, experts=3, active_experts=1)])
def test_parameters_are_those_of_the_model(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = Llama(config)
    assert config.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_mixtral_has_as_many_parameters_as_published() -> None:
    config = PRESETS["8x7b"]  # 46.7 B, 12.9 B of them active (https://mistral.ai/news/mixtral-of-experts)
    assert config.parameters / 1e9 == pytest.approx(46.7, abs=0.05)
    assert config.active_parameters / 1e9 == pytest.approx(12.9, abs=0.05)


def test_more_active_experts_than_there_are_is_an_error(wording: Wording) -> None:
    with wording.raises(ValueError):
        ModelConfig(64, 2, 4, 2, 96, 128, experts=3, active_experts=4)
