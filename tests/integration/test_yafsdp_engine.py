"""YaFSDP's memory, its behaviour on failures, and the models and options that it refuses by name."""

import functools
import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from instrumented_trainers.parallelism.yafsdp import MixedPrecisionPolicy, fully_shard, materialize
from instrumented_trainers.parallelism.yafsdp.meta_init import reset_parameters
from instrumented_trainers.parallelism.yafsdp.module import units_in
from instrumented_trainers.parallelism.yafsdp.shard_tensor import Shard, plain_tensors
from tests.integration import parity
from tests.integration.parity import Case
from tests.integration.toy import LAYERS, VOCABULARY, WIDTH, Block, Toy
from tests.support import process_group

WORLD_SIZE = 2
GUIDE = Path(__file__).parents[2] / "docs" / "yafsdp.md"


def tokens() -> Tensor:
    return torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(dist.get_rank()))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(tokens()).logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def sharded_toy(case: Case | None = None) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = parity.shard(Toy(), case or Case(dtype=torch.float32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


# Memory --------------------------------------------------------------------------------------------------------------


def buffer_addresses(case: Case) -> list[Any]:
    """After each of some steps: the addresses of all buffers, and of the gradients in them."""
    model, optimizer = sharded_toy(case)
    seen = []
    for _ in range(4):
        model(tokens()).logsumexp(-1).sum().backward()
        buffers = model.communication_buffers
        gradients = [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]
        kinds = (buffers.weights, buffers.gradients, buffers.own_weights, buffers.own_gradients)
        seen.append(([[buffer.data_ptr() for buffer in kind] for kind in kinds], gradients))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def weights_in_buffers() -> list[tuple[int, int]]:
    """By layer, which weight and which gradient buffer it uses."""
    model, optimizer = sharded_toy()
    train_step(model, optimizer)
    buffers = model.communication_buffers
    weights = [buffer.data_ptr() for buffer in buffers.weights]
    gradients = [buffer.data_ptr() for buffer in buffers.gradients]
    units = [unit for unit in units_in(model) if unit.name.startswith("layers.")]
    return [
        (weights.index(u.slots.weights.buffer.data_ptr()), gradients.index(u.slots.gradients.buffer.data_ptr()))
        for u in units
    ]


def shard_sizes() -> tuple[int, int]:
    model, _ = sharded_toy()
    whole = sum(parameter.numel() for parameter in Toy().parameters())
    return whole, sum(flat.master.numel() for unit in units_in(model) for flat in unit.flats)


def gradient_of_a_stored_activation() -> bool:
    """Run backward from a tensor that a hook stored, not from the model's output."""
    model, _ = sharded_toy()
    stored: list[Tensor] = []
    model.embedding.register_forward_hook(lambda _, args, output: stored.append(output))
    model(tokens())
    stored[0].sum().backward()
    return model.embedding.weight.grad is not None and all(p.grad is None for p in model.layers.parameters())


def materialized(device: str) -> list[Tensor]:
    """Return this rank's shards of a toy that was sharded on that device, drawn module by module."""
    with torch.device(device):
        toy = Toy(tied=True)
    if device == "meta":
        parity.shard(toy, Case(norms_once=True))
        torch.manual_seed(1)
        materialize(toy)
    else:
        torch.manual_seed(1)
        for module in toy.modules():
            if list(module.parameters(recurse=False)):
                reset_parameters(module)
        parity.shard(toy, Case(norms_once=True))
    return [parameter.detach().to_local() for parameter in toy.parameters()]  # type: ignore[attr-defined]


def peak_while_materializing() -> tuple[int, int]:
    """Return the most elements that modules saw whole at once, and how many the model has."""
    with torch.device("meta"):
        toy = Toy()
    whole = sum(parameter.numel() for parameter in toy.parameters())
    parity.shard(toy, Case())
    most = 0

    def reset(module: nn.Module) -> None:
        nonlocal most
        parameters = [p for p in toy.parameters() if not isinstance(p, Shard)]
        materialized = [parameter for parameter in parameters if parameter.dim() > 1]
        most = max(most, sum(parameter.numel() for parameter in materialized))
        reset_parameters(module)

    materialize(toy, reset)
    return most, whole


# Failures ------------------------------------------------------------------------------------------------------------


def forgotten() -> list[bool]:
    """Return whether model and engine are gone once nobody holds the model."""
    model, optimizer = sharded_toy()
    train_step(model, optimizer)
    references = [weakref.ref(model), weakref.ref(units_in(model).__next__().engine)]
    del model, optimizer
    gc.collect()
    return [reference() is None for reference in references]


def follow_the_guide() -> tuple[float, float, int]:
    """Run the code of docs/yafsdp.md and return its first and last loss and how many weight buffers there are."""
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(GUIDE), "exec"), names)
    return names["losses"][0], names["losses"][-1], len(names["model"].communication_buffers.weights)


def train_on_after(failure: str) -> tuple[str, float]:
    """Fail on every rank at the same place, then train on; return the failure and how far off one process it is."""
    model, _ = sharded_toy()
    torch.manual_seed(0)
    reference = Toy()
    message = ""
    try:
        FAILURES[failure](model)
    except RuntimeError as error:
        message = str(error)
    model(tokens()).logsumexp(-1).sum().backward()
    for rank in range(WORLD_SIZE):
        data = torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(rank))
        (reference(data).logsumexp(-1).sum() / WORLD_SIZE).backward()
    norm = nn.utils.get_total_norm(
        [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
    )
    return message, abs(model.clip_grad_norm_(1e9).item() / norm.item() - 1)


def fail_in_forward(model: Any) -> None:
    handle = model.layers[2].norm.register_forward_pre_hook(_raise)
    try:
        model(tokens())
    finally:
        handle.remove()


def fail_in_backward(model: Any) -> None:
    handle = model.layers[1].norm.register_full_backward_pre_hook(_raise)
    logits = model(tokens())
    try:
        logits.logsumexp(-1).sum().backward()
    finally:
        handle.remove()


def only_forward(model: Any) -> None:
    model(tokens())
    model(tokens()).sum()


def move_memory(model: Any) -> None:
    """Do as ``model.to(memory_format=…)`` and others that create all tensors again."""
    model(tokens())
    model._apply(torch.clone)


FAILURES: dict[str, Callable[[Any], None]] = {
    "in forward": fail_in_forward,
    "in backward": fail_in_backward,
    "never went backward": only_forward,
    "moved to other memory": move_memory,
}


def _raise(*_: Any) -> None:
    raise RuntimeError("raised on purpose")


# Refusals ------------------------------------------------------------------------------------------------------------


def refuse(name: str) -> str:
    """Do what is not supported and return the error's class and words."""
    try:
        REFUSALS[name][0]()
    except Exception as error:  # noqa: BLE001 -- the error is the result
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def tie_across_units() -> None:
    toy = Toy()
    toy.layers[1].norm.weight = toy.norm.weight
    parity.shard(toy, Case())


def meta_toy() -> Any:
    with torch.device("meta"):
        return parity.shard(Toy(tied=True), Case())


def run_without_weights() -> None:
    meta_toy()(tokens())


def cast_without_weights() -> None:
    meta_toy().to_empty(device="cpu").bfloat16()


def leave_weights_unfilled() -> None:
    def reset(module: nn.Module) -> None:
        if not isinstance(module, nn.LayerNorm):
            reset_parameters(module)

    materialize(meta_toy(), reset)


def draw_what_cannot_be_drawn() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(3, device="meta"))

    materialize(fully_shard(Scale()))


def shard_in_three_dims() -> None:
    fully_shard(Block(), init_device_mesh("cpu", (1, 1, WORLD_SIZE)))


def leave_out_for_nobody() -> None:
    block = Block()
    fully_shard(block, left_out=list(block.norm.parameters()))(torch.ones(1, 2, WIDTH))


def run_by_itself_without_norms() -> None:
    model, _ = sharded_toy(Case(norms_once=True))
    model(tokens())
    model.layers[0](torch.ones(1, 2, WIDTH))


def step_with(kind: type[torch.optim.Optimizer]) -> None:
    model, _ = sharded_toy()
    train_step(model, kind(model.parameters()))


def run_inside_another() -> None:
    class Caller(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.linear, self.others = nn.Linear(4, 4), [other]

        def forward(self, x: Tensor) -> Tensor:
            return self.others[0](self.linear(x))

    inner = nn.Linear(4, 4)
    model = nn.Sequential(Caller(inner), inner)
    for module in model:
        fully_shard(module, buffers=1)
    fully_shard(model, buffers=1)(torch.ones(2, 4))


def differentiate_twice() -> None:
    sharded_toy()[0](tokens()).logsumexp(-1).sum().backward(create_graph=True)


def run_another_layer_in_backward() -> None:
    model, _ = sharded_toy()
    first, third = model.layers[0], model.layers[2]

    def run_first(*_: Any) -> None:
        with torch.no_grad():
            first(torch.ones(1, 2, WIDTH))

    third.feed_forward.register_full_backward_hook(run_first)
    model(tokens()).logsumexp(-1).sum().backward()


def run_a_layer_first() -> None:
    model, _ = sharded_toy()
    model.layers[0](torch.ones(1, 2, WIDTH))
    model(tokens())


def mix_buffers() -> None:
    model = nn.Sequential(fully_shard(nn.Linear(4, 4), buffers=3), nn.Linear(4, 4))
    fully_shard(model)(torch.ones(2, 4))


def shard_the_root_first() -> None:
    model, _ = sharded_toy(Case(units="root"))
    fully_shard(model.layers[0])


def shard_outside_the_mesh() -> None:
    meshes = [DeviceMesh("cpu", [rank]) for rank in range(WORLD_SIZE)]
    fully_shard(Block(), meshes[1 - dist.get_rank()])


def give_other_memory() -> None:
    model, _ = sharded_toy()
    with plain_tensors():
        model.layers[1].norm.weight.data = model.layers[1].norm.weight.data.clone()
    model(tokens())


def give_another_dtype() -> None:
    model, _ = sharded_toy()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model(tokens())


def load_in_place_of_the_shards() -> None:
    model, _ = sharded_toy()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(tokens())


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "root sharded before its blocks": (shard_the_root_first, "ValueError: .*is a shard already.*blocks first"),
    "a rank outside the mesh": (shard_outside_the_mesh, r"ValueError: .*rank \d is not in the mesh"),
    "other memory": (give_other_memory, "RuntimeError: .*'weight' of LayerNorm in unit 'layers.1' was replaced"),
    "another dtype, by hand": (
        give_another_dtype,
        "NotImplementedError: .*cannot become torch.bfloat16.*before",
    ),
    "parameters assigned": (load_in_place_of_the_shards, "RuntimeError: .*was replaced.*in place"),
    "tied across units": (tie_across_units, "ValueError: .*'weight' of LayerNorm in Toy is tied"),
    "tied across sharded parts": (
        lambda: parity.shard(Toy(tied=True), Case(units="all")),
        "ValueError: .*'weight' of Linear in .* is tied to one that the unit of Embedding has",
    ),
    "run without weights": (run_without_weights, "RuntimeError: .*no weights yet.*materialize"),
    "cast without weights": (cast_without_weights, "NotImplementedError: .*bfloat16"),
    "weights left unfilled": (leave_weights_unfilled, "ValueError: .*'weight' of LayerNorm was not filled"),
    "nothing to draw with": (draw_what_cannot_be_drawn, "NotImplementedError: .*Scale has no reset_parameters"),
    "left out for nobody": (leave_out_for_nobody, "ValueError: .*Block left parameters out"),
    "run by itself without norms": (run_by_itself_without_norms, "RuntimeError: .*unit 'layers.0' was called directly"),
    "an optimizer of whole matrices": (
        functools.partial(step_with, torch.optim.Adafactor),
        "NotImplementedError: .*Adafactor needs whole tensors",
    ),
    "muon": (functools.partial(step_with, torch.optim.Muon), "ValueError: Muon only supports 2D parameters"),
    "sharded twice": (lambda: fully_shard(fully_shard(Block())), "ValueError: .*sharded already"),
    "a list": (lambda: fully_shard([Block()]), "TypeError: .*one module at a time"),
    "no buffers": (lambda: fully_shard(Block(), buffers=0), "ValueError: .*at least 1 buffer"),
    "three-dim mesh": (shard_in_three_dims, "NotImplementedError: .*3 dims"),
    "cast": (lambda: sharded_toy()[0].double(), "NotImplementedError: .*float64"),
    "run inside another unit": (run_inside_another, "RuntimeError: .*reshard_after_forward=False"),
    "another layer run in backward": (
        run_another_layer_in_backward,
        "RuntimeError: .*(evicted the weights|backward needs a weight)",
    ),
    "create_graph": (differentiate_twice, "NotImplementedError: .*create_graph"),
    "layer before root": (run_a_layer_first, "RuntimeError: .*run the root first"),
    "unequal buffers": (mix_buffers, "ValueError: .*same number of buffers"),
}


# Tests ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def outcomes() -> dict[str, process_group.Outcome]:
    cases: dict[str, Callable[[], Any]] = {
        "addresses": functools.partial(buffer_addresses, Case()),
        "addresses, micro-batches in bf16": functools.partial(
            buffer_addresses, Case(policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        ),
        "weights in buffers": weights_in_buffers,
        "shard sizes": shard_sizes,
        "stored activation": gradient_of_a_stored_activation,
        "drawn on meta": functools.partial(materialized, "meta"),
        "drawn on cpu": functools.partial(materialized, "cpu"),
        "peak while materializing": peak_while_materializing,
        "forgotten": forgotten,
        "guide": follow_the_guide,
    }
    cases |= {failure: functools.partial(train_on_after, failure) for failure in FAILURES}
    cases |= {name: functools.partial(refuse, name) for name in REFUSALS}
    return process_group.run_cases(WORLD_SIZE, cases)


@pytest.mark.parametrize("name", ["addresses", "addresses, micro-batches in bf16"])
def test_buffers_are_allocated_once(outcomes: dict[str, process_group.Outcome], name: str) -> None:
    for seen in outcomes[name].results():
        (weights, gradients, own_weights, own_gradients), _ = seen[0]
        assert [len(kind) for kind in (weights, gradients, own_weights, own_gradients)] == [2, 2, 1, 1]
        assert all(step == seen[0] for step in seen)


def test_layers_use_the_two_buffers_in_turn(outcomes: dict[str, process_group.Outcome]) -> None:
    for by_layer in outcomes["weights in buffers"].results():
        assert by_layer == [(index % 2, index % 2) for index in range(LAYERS)]


def test_a_rank_keeps_its_share_of_the_weights_and_little_more(outcomes: dict[str, process_group.Outcome]) -> None:
    for whole, shard in outcomes["shard sizes"].results():
        padding = 8 * len(list(Toy().parameters())) + 8 * (LAYERS + 1)
        assert whole / WORLD_SIZE <= shard <= whole / WORLD_SIZE + padding


def test_weights_drawn_after_sharding_on_meta_are_those_drawn_before_sharding(
    outcomes: dict[str, process_group.Outcome],
) -> None:
    for found, expected in zip(outcomes["drawn on meta"].results(), outcomes["drawn on cpu"].results(), strict=True):
        assert all(torch.equal(actual, other) for actual, other in zip(found, expected, strict=True))


def test_one_module_at_a_time_is_whole_while_weights_are_drawn(outcomes: dict[str, process_group.Outcome]) -> None:
    for most, whole in outcomes["peak while materializing"].results():
        assert 0 < most <= whole / LAYERS


def test_gradients_need_no_output_of_the_model(outcomes: dict[str, process_group.Outcome]) -> None:
    assert all(outcomes["stored activation"].results())


def test_a_model_that_nobody_holds_gives_its_buffers_back(outcomes: dict[str, process_group.Outcome]) -> None:
    assert outcomes["forgotten"].results() == [[True, True]] * WORLD_SIZE


def test_the_code_in_the_guide_trains(outcomes: dict[str, process_group.Outcome]) -> None:
    for first, last, buffers in outcomes["guide"].results():
        assert last < 0.9 * first
        assert buffers == 2


@pytest.mark.parametrize("failure", FAILURES)
def test_trains_on_after(outcomes: dict[str, process_group.Outcome], failure: str) -> None:
    for message, difference in outcomes[failure].results():
        assert message == ("raised on purpose" if failure.startswith("in ") else "")
        assert difference < 1e-5


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses_by_name(outcomes: dict[str, process_group.Outcome], name: str) -> None:
    for words in outcomes[name].results():
        assert re.match(REFUSALS[name][1], words), words
