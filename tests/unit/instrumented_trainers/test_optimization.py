"""Schedules, decay groups and Lion, against their definitions."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from instrumented_trainers.config import LR_SCHEDULES, TrainingConfig
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import PRESETS
from instrumented_trainers.optimization.lion import Lion
from instrumented_trainers.optimization.parameter_roles import ParameterRoles
from instrumented_trainers.optimization.schedules import learning_rate
from tests.support.wording import Wording

BASE = TrainingConfig("ddp", Path("x"), steps=101, warmup_steps=10, learning_rate=1.0)


def rates(schedule: str, **settings: int) -> list[float]:
    config = dataclasses.replace(BASE, lr_schedule=schedule, **settings)
    return [learning_rate(step, config) for step in range(config.steps)]


@pytest.mark.parametrize("schedule", LR_SCHEDULES)
def test_every_schedule_rises_in_a_line_to_the_highest_rate(schedule: str) -> None:
    assert rates(schedule)[:11] == pytest.approx([0.1 * (step + 1) for step in range(10)] + [1.0])


@pytest.mark.parametrize(
    ("schedule", "middle", "last"), [("constant", 1.0, 1.0), ("cosine", 0.55, 0.1), ("linear", 0.55, 0.1)]
)
def test_the_rate_falls_to_its_floor(schedule: str, middle: float, last: float) -> None:
    after = rates(schedule)[10:]
    assert (after[45], after[-1]) == pytest.approx((middle, last))
    assert after == sorted(after, reverse=True)


def test_wsd_is_stable_and_falls_in_the_last_steps_only() -> None:
    assert rates("wsd", decay_steps=10)[10:91] == [1.0] * 81
    assert rates("wsd", decay_steps=10)[90:] == pytest.approx([1 - 0.09 * step for step in range(11)])
    assert rates("wsd")[79:82] == pytest.approx([1.0, 1.0, 1 - 0.9 / 20])
    assert rates("wsd", decay_steps=0)[100] == pytest.approx(1.0)


@pytest.mark.parametrize("tied", [False, True])
def test_norms_and_embeddings_do_not_decay(tied: bool) -> None:
    roles = ParameterRoles.of(Llama(dataclasses.replace(PRESETS["micro"], tied=tied)))
    others = set(roles.numels) - roles.decayed
    assert others == {"embedding.weight", "norm.weight"} | {
        f"layers.{layer}.{norm}.weight" for layer in (0, 1) for norm in ("attention_norm", "feed_forward_norm")
    }
    assert ("head.weight" in roles.decayed) is not tied
    assert roles.hidden_matrices == roles.decayed - {"head.weight"}


def test_biases_do_not_decay_and_the_line_has_their_sizes(wording: Wording) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 4)])

    line = ParameterRoles.of(Small()).describe(0.1)
    wording(line)


def test_lion_is_the_papers_algorithm() -> None:
    torch.manual_seed(0)
    weight, gradients = torch.randn(5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    parameter = nn.Parameter(weight.clone())
    optimizer = Lion([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    momentum = torch.zeros(5, dtype=torch.float64)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
        update = torch.sign(0.9 * momentum + 0.1 * gradient)
        weight = weight - 0.1 * (update + 0.5 * weight)
        momentum = 0.99 * momentum + 0.01 * gradient
    torch.testing.assert_close(parameter.detach(), weight, rtol=1e-12, atol=1e-12)
