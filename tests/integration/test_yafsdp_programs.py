"""Ranks that do not run the same program: each raises within the step and names what the others did, and none hangs."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from instrumented_trainers.parallelism.yafsdp import MixedPrecisionPolicy, rank_programs, set_patience
from tests.integration.yafsdp_attacks import DEPTH, Model, batch, shard_layers
from tests.support import process_group
from tests.support.selection import others_in_accuracy

WORLD_SIZES = (2, 3)
PATIENCE_S = 3.0


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


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


def raises(model: Any, optimizer: Any) -> None:
    backward(model)
    if is_last():
        raise ValueError("on purpose")
    optimizer.step()
    backward(model)


def unshards_alone(model: Any, optimizer: Any) -> None:
    backward(model)
    if is_last():
        with model.unshard():
            pass
    optimizer.step()
    backward(model)


def leaves_a_layer_out(model: Any, optimizer: Any) -> None:
    for step in range(2):
        if is_last() and step:
            model.layers = model.layers[:-1]
        backward(model)
        optimizer.step()


def syncs_alone(model: Any, optimizer: Any) -> None:
    model.set_requires_gradient_sync(is_last())
    backward(model)
    optimizer.step()
    backward(model)


def freezes_a_layer(model: Any, optimizer: Any) -> None:
    backward(model)
    if is_last():
        model.layers[0].requires_grad_(False)
    optimizer.step()
    backward(model)


def another_order(model: Any, optimizer: Any) -> None:
    for step in range(2):
        if is_last() and step:
            model.layers = nn.ModuleList(list(model.layers)[::-1])
        backward(model)
        optimizer.step()


def loss_of_early_layers(model: Any, optimizer: Any) -> None:
    """The last rank's loss is one on the first layer's output: autograd never comes to the layers after it."""
    for step in range(2):
        outputs: list[Any] = []
        handle = model.layers[0].register_forward_hook(lambda _m, _a, output, to=outputs: to.append(output))
        out = model(batch(step, 0, dist.get_rank()).float())
        handle.remove()
        (outputs[0] if is_last() else out).square().mean().backward()
        optimizer.step()


def another_forward(model: Any, optimizer: Any) -> None:
    if is_last():
        model(batch(0, 1, 0).float())
    for _ in range(2):
        backward(model)
        optimizer.step()


def scaler(model: Any, optimizer: Any) -> None:
    gradient_scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=is_last())
    for step in range(2):
        loss = model(batch(step, 0, dist.get_rank()).float()).square().mean()
        gradient_scaler.scale(loss).backward()
        gradient_scaler.step(optimizer)
        gradient_scaler.update()


def recomputation(model: Any, optimizer: Any) -> None:
    """Layers are recomputed in backward on the last rank: three at a time, which share two buffers."""

    def run_layers(x: Any) -> Any:
        for layer in model.layers:
            x = layer(x)
        return x

    def forward(x: Any) -> Any:
        x = model.inlet(x)
        return model.head(checkpoint(run_layers, x, use_reentrant=False) if is_last() else run_layers(x))

    model.forward = forward
    for _ in range(2):
        backward(model)
        optimizer.step()


def another_model_first(model: Any, optimizer: Any, depth: int = 2) -> None:
    """Two models of layers of the same size train in turns, in another order on the last rank from step 1 on."""
    other = shard_layers(Model(depth=depth))
    optimizers = (torch.optim.SGD(other.parameters(), lr=0.05), optimizer)
    for step in range(2):
        for trained in (model, other) if is_last() and step else (other, model):
            backward(trained)
        for model_optimizer in optimizers:
            model_optimizer.step()
            model_optimizer.zero_grad()


def average_written_alone(model: Any, optimizer: Any) -> None:
    average = AveragedModel(model)
    for _ in range(2):
        backward(model)
        optimizer.step()
        average.update_parameters(model)
        if is_last():
            average.module.head.weight.full_tensor()


PROGRAMS: dict[str, Callable[[Any, Any], None]] = {
    "another order": another_order,
    "an exception on one rank": raises,
    "weights unsharded by one rank": unshards_alone,
    "a layer left out": leaves_a_layer_out,
    "a reduction by one rank": syncs_alone,
    "a layer frozen on one rank": freezes_a_layer,
    "another micro-batch": another_micro_batch,
    "no backward": no_backward,
    "clipping on one rank": clipping,
    "a norm logged by one rank": logged_norm,
    "an evaluation on one rank": evaluation,
    "an end on one rank": ends_early,
    "a checkpoint on one rank": saves_alone,
    "a step on one rank": skips_a_step,
    "a loss of early layers": loss_of_early_layers,
    "another forward": another_forward,
    "a gradient scaler on one rank": scaler,
    "layers recomputed on one rank": recomputation,
    "another model first": another_model_first,
    "another model of the same size first": functools.partial(another_model_first, depth=DEPTH),
    "an average written by one rank": average_written_alone,
}


# Programs that differ without a wait: no collective is missing, and none has another size.


def build(**options: Any) -> Any:
    return shard_layers(Model(), **options)


def two_steps(change: Callable[[Any, Any], None] = lambda _model, _optimizer: None) -> Callable[..., None]:
    """A program that does something on the last rank after its first backward pass."""

    def program(model: Any, optimizer: Any) -> None:
        for step in range(3):
            backward(model)
            if is_last() and step == 0:
                change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()

    return program


def other_rate(_: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.1


def other_group(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"].pop()


def one_parameter_frozen(model: Any, _: Any) -> None:
    model.layers[1].scale.requires_grad_(False)


def keeps_gradients(_: Any, optimizer: Any) -> None:
    optimizer.zero_grad = lambda: None


def steps_twice(_: Any, optimizer: Any) -> None:
    optimizer.step()


def another_optimizer(model: Any, optimizer: Any) -> None:
    torch.optim.Adam(model.parameters(), lr=0.05).step()
    optimizer.step = lambda: None


def clips_otherwise(model: Any, optimizer: Any) -> None:
    for _ in range(2):
        backward(model)
        model.clip_grad_norm_(1.0 if is_last() else 2.0)
        optimizer.step()


def _where_last(yes: Callable[[], Any], no: Callable[[], Any] = build) -> Callable[[], Any]:
    return lambda: yes() if is_last() else no()


WITHOUT_WAIT: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], None], str]] = {
    "another depth": (_where_last(lambda: shard_layers(Model(depth=3))), two_steps(), "rank [01]: unit layers.3"),
    "another dtype": (_where_last(lambda: shard_layers(Model().bfloat16())), two_steps(), "torch.bfloat16"),
    "another precision": (
        _where_last(lambda: build(mp_policy=MixedPrecisionPolicy(torch.bfloat16))),
        two_steps(),
        "as torch.bfloat16",
    ),
    "other buffers": (_where_last(lambda: build(reshard_after_forward=False)), two_steps(), "keeps its weights"),
    "a frozen model": (
        _where_last(lambda: shard_layers(Model().requires_grad_(False))),
        two_steps(),
        "frozen torch.float32",
    ),
    "another rate": (build, two_steps(other_rate), r"SGD \(lr=0.1"),
    "another group": (build, two_steps(other_group), r"23 parameters\)"),
    "one parameter frozen": (build, two_steps(one_parameter_frozen), "23 parameters trained"),
    "gradients kept": (build, two_steps(keeps_gradients), "gradients that were not cleared"),
    "two steps": (build, two_steps(steps_twice), "step of SGD"),
    "another optimizer": (build, two_steps(another_optimizer), "step of Adam"),
    "another norm": (build, clips_otherwise, "clipping by the norm 2.0"),
}


def run_without_wait(name: str) -> str:
    make, program, _ = WITHOUT_WAIT[name]
    return run(program, make)


def run(program: Callable[[Any, Any], None], make: Callable[[], Any] | None = None) -> str:
    set_patience(PATIENCE_S)
    try:
        model = (make or functools.partial(build, keep_whole_gradients=True))()
        program(model, torch.optim.SGD(model.parameters(), lr=0.05))
    except ValueError:  # this rank ends, and the process with it
        dist.distributed_c10d._abort_process_group()
        return "raised on purpose"
    except RuntimeError as error:
        dist.distributed_c10d._abort_process_group()  # else its end waits for collectives that nobody else calls
        return str(error)
    finally:
        set_patience(rank_programs.PATIENCE_S)
    return "ended"


@functools.cache
def outcomes_without_wait(world_size: int) -> dict[str, process_group.Outcome]:
    return process_group.run_cases(
        world_size, {name: functools.partial(run_without_wait, name) for name in WITHOUT_WAIT}
    )


@pytest.mark.parametrize("name", WITHOUT_WAIT)
@pytest.mark.parametrize("world_size", others_in_accuracy(WORLD_SIZES, {2}))
def test_a_difference_that_makes_nobody_wait_is_named(world_size: int, name: str) -> None:
    for words in outcomes_without_wait(world_size)[name].results():
        assert re.search("YaFSDP: the ranks (did not do the same|shard different models)", str(words)), words
        assert re.search(WITHOUT_WAIT[name][2], str(words)), words


EVERYDAY = [(2, "another micro-batch"), (2, "a norm logged by one rank"), (2, "a step on one rank")]


@pytest.mark.parametrize(("world_size", "name"), others_in_accuracy(itertools.product(WORLD_SIZES, PROGRAMS), EVERYDAY))
def test_a_difference_is_named(world_size: int, name: str) -> None:
    # In processes of its own: gloo ends a process that receives more than it expects, and then the other one explains.
    words = process_group.run_cases(world_size, {name: functools.partial(run, PROGRAMS[name])})[name].values
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
