"""Checksums of modules: a recorded training in which one module computes something else names it, and the step."""

from pathlib import Path

import torch
from torch import nn

import tracekit
from tracekit.capture import Recorder
from tracekit.capture.checksums import ModuleChecksums
from tracekit.regression import numbers


class Scaled(nn.Module):
    """A linear layer that is off by a factor from a step on."""

    def __init__(self, factor: float, first: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.factor, self.first, self.calls = factor, first, 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return rows @ self.weight * (self.factor if self.calls > self.first else 1.0)


def train(out: Path, factor: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Scaled(factor, first=3), nn.LayerNorm(8), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    checksums = ModuleChecksums(model)
    with Recorder(out, steps=(1, 5), warmup=0) as recorder:
        for step in range(6):
            loss = model(torch.randn(4, 8)).pow(2).mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            values = {"loss": loss.item(), "grad_norm": norm.item(), **checksums.of_step()}
            recorder.step(values, last=step == 5)
    checksums.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_the_first_module_that_computes_something_else_is_named(tmp_path: Path) -> None:
    for name, factor in (("before", 1.0), ("same", 1.0), ("after", 1.0001)):
        train(tmp_path / name, factor)
    before, same, after = (
        numbers.run_numbers(tracekit.load(str(tmp_path / name), cache=False)) for name in ("before", "same", "after")
    )
    agreement = numbers.agreement(before, same)
    assert agreement is not None
    assert (agreement.first, agreement.rounding_ratio, agreement.steps) == (None, 0.0, 6)
    assert agreement.metrics == ("grad_norm", "loss", "checksums")
    agreement = numbers.agreement(before, after)
    assert agreement is not None
    assert agreement.first is not None
    assert (agreement.first.metric, agreement.first.step, agreement.agreed_steps) == ("checksum/1", 3, 3)


def test_a_checksum_is_the_sum_over_all_calls_of_a_step() -> None:
    model = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, -2.0]]))
    checksums = ModuleChecksums(nn.Sequential(model))
    for rows in ([[1.0, 1.0]], [[2.0, 3.0]]):
        model(torch.tensor(rows))
    (value,) = checksums.of_step().values()
    assert value.value() == 1 + 2 + 2 + 6
    assert checksums.of_step() == {}
