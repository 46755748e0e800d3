"""Ranks that do not run the same program: each raises within the step and names what the others did, and none hangs."""

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from instrumented_trainers.parallelism.yafsdp import rank_programs, set_patience
from tests.integration.yafsdp_attacks import Model, batch, shard_layers
from tests.support import process_group

WORLD_SIZE, PATIENCE_S = 2, 3.0


def is_last() -> bool:
    return dist.get_rank() == WORLD_SIZE - 1


def backward(model: nn.Module) -> None:
    model(batch(0, 0, dist.get_rank()).float()).square().mean().backward()


def another_micro_batch(model: Any, optimizer: Any) -> None:
    for _ in range(2 if is_last() else 1):
        backward(model)
    optimizer.step()


def no_backward(model: Any, optimizer: Any) -> None:
    if is_last():
        model(batch(0, 0, 0).float())
    else:
        backward(model)
    optimizer.step()


def clipping(model: Any, optimizer: Any) -> None:
    backward(model)
    if is_last():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    backward(model)


def logged_norm(model: Any, optimizer: Any) -> None:
    backward(model)
    if not is_last():
        print(float(model.head.weight.norm()))
    optimizer.step()
    backward(model)


def evaluation(model: Any, optimizer: Any) -> None:
    if is_last():
        with torch.no_grad():
            model(batch(0, 0, 0).float())
    backward(model)
    optimizer.step()


def ends_early(model: Any, optimizer: Any) -> None:
    for step in range(3):
        if is_last() and step == 1:
            return
        backward(model)
        optimizer.step()


def saves_alone(model: Any, optimizer: Any) -> None:
    backward(model)
    if not is_last():
        for value in model.state_dict().values():
            value.full_tensor()
    optimizer.step()
    backward(model)


def skips_a_step(model: Any, optimizer: Any) -> None:
    backward(model)
    if not is_last():
        optimizer.step()
    backward(model)


PROGRAMS: dict[str, Callable[[Any, Any], None]] = {
    "another micro-batch": another_micro_batch,
    "no backward": no_backward,
    "clipping on one rank": clipping,
    "a norm logged by one rank": logged_norm,
    "an evaluation on one rank": evaluation,
    "an end on one rank": ends_early,
    "a checkpoint on one rank": saves_alone,
    "a step on one rank": skips_a_step,
}


def run(program: Callable[[Any, Any], None]) -> str:
    set_patience(PATIENCE_S)
    try:
        model = shard_layers(Model())
        program(model, torch.optim.SGD(model.parameters(), lr=0.05))
    except RuntimeError as error:
        dist.distributed_c10d._abort_process_group()  # else its end waits for collectives that nobody else calls
        return str(error)
    finally:
        set_patience(rank_programs.PATIENCE_S)
    return "ended"


EVERYDAY = ("another micro-batch", "a norm logged by one rank", "a step on one rank")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.accuracy) for name in PROGRAMS]
)
def test_a_difference_is_named(name: str) -> None:
    # In processes of its own: gloo ends a process that receives more than it expects, and then the other one explains.
    words = process_group.run_cases(WORLD_SIZE, {name: functools.partial(run, PROGRAMS[name])})[name].values
    explained = [str(text) for text in words if re.search("waited in vain|the ranks did not do the same", str(text))]
    assert explained, words
    assert all("rank 0: " in text and "rank 1: " in text for text in explained if "waited in vain" in text), explained


def test_the_first_difference_of_programs_is_found_among_what_all_know() -> None:
    same = [(number, f"thing {number}") for number in range(5, 9)]
    other = [*same[1:3], (8, "another")]
    assert rank_programs.first_difference({0: same, 1: other}) == 8
    assert rank_programs.first_difference({0: same, 1: same[2:]}) is None
    assert rank_programs.first_difference({0: same, 1: same[:3]}) == 8
    assert rank_programs.first_difference({0: same}) is None
