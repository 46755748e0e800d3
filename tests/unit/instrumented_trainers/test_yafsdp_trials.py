"""Trials of optimizers before YaFSDP lets them step shards: of what they are, and without traces."""

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from instrumented_trainers.parallelism.yafsdp.optimizer_support import couples_parameters, refuse_whole_tensor_optimizer


class NormalisedByRow(Optimizer):
    """Steps by a row's norm, which a part of a matrix does not have."""

    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / parameter.grad.norm(), alpha=group["lr"])


def test_a_trial_leaves_the_random_numbers_of_every_device_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[str] = []
    for name, device in (("cuda", torch.cuda), ("xpu", torch.xpu), ("mps", torch.mps)):
        function = "manual_seed" if name == "mps" else "manual_seed_all"
        monkeypatch.setattr(device, function, lambda seed, name=name: seeded.append(name))
    torch.manual_seed(7)
    seeded.clear()
    before = torch.get_rng_state()
    # Options that no other test has, so that the trial is made here.
    assert refuse_whole_tensor_optimizer(torch.optim.SGD([torch.zeros(2)], lr=0.5, momentum=0.123))
    assert not couples_parameters(torch.optim.SGD, {"lr": 0.5, "momentum": 0.123})
    assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []


def test_an_optimizer_that_a_part_of_a_matrix_steps_otherwise_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="NormalisedByRow"):
        refuse_whole_tensor_optimizer(NormalisedByRow([torch.zeros(2)], lr=0.1))
