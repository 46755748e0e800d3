"""Checksums of modules: a recorded training in which one module computes something else names it, and the step."""

from pathlib import Path

import polars as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tracekit
from tests.support import process_group
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


def trained(*, gradient_factor: float = 1.0, decay: float = 0.0, rate_factor: float = 1.0) -> pl.DataFrame:
    """Numbers of six steps, in which module 1 is changed from step 3 on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    groups = [{"params": [*module.parameters()], "weight_decay": 0.0} for module in model]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    checksums = ModuleChecksums(model)
    rows = []
    for step in range(6):
        if step == 3:
            model[1].weight.register_hook(lambda gradient: gradient * gradient_factor)
            optimizer.param_groups[1]["weight_decay"] = decay
            for group in optimizer.param_groups:
                group["lr"] *= rate_factor
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        names_and_values = [(name, value.value()) for name, value in checksums.of_step().items()]
        rows += [(step, name, 0, value, place) for place, (name, value) in enumerate(names_and_values)]
    checksums.close()
    return pl.DataFrame(rows, numbers.NUMBER_COLUMNS, orient="row")


@pytest.mark.parametrize(
    ("change", "metric", "other_modules"),
    [
        ({"gradient_factor": 1.0001}, "reduced_gradient_checksum/1", 0),
        ({"decay": 0.1}, "weight_checksum/1", 0),
        ({"rate_factor": 1.0001}, "weight_checksum/0", 2),  # below rounding, in a training that has none
    ],
)
def test_a_changed_update_is_named_in_its_step(change: dict[str, float], metric: str, other_modules: int) -> None:
    assert numbers.agreement(trained(), trained()).first is None
    first = numbers.agreement(trained(), trained(**change)).first
    assert (first.metric, first.step, first.other_modules) == (metric, 3, other_modules)
    assert (first.ranks, first.is_of_all_ranks) == ((0,), True)


def sharded_gradient_checksum() -> float:
    """Checksum of the gradient that this rank computes of a weight which is sharded over the ranks."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    checksums = ModuleChecksums(model)
    model(torch.full((1, 4), 1.0 + dist.get_rank())).sum().backward()
    (value,) = (value for name, value in checksums.of_step().items() if name == "gradient_checksum/0")
    return float(value.value())


def test_gradients_of_sharded_weights_are_those_of_the_rank() -> None:
    outcomes = process_group.run_cases(2, {"sharded": sharded_gradient_checksum})
    assert outcomes["sharded"].results() == [16.0, 32.0]


def test_hooks_on_optimizers_are_removed() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checksums = ModuleChecksums(nn.Sequential(model))
    checksums.close()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert checksums.of_step() == {}


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
