"""State of a sharded model through torch's own ways: whole names and shapes leave and enter, or an error says why."""

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.integration.yafsdp_attacks import Model, WithEmpty, batch, shard_layers
from tests.support import process_group

WORLD_SIZE = 3  # division by 2 is exact, and most tensors divide by it without padding
FULL, FULL_ON_HOST = StateDictOptions(full_state_dict=True), StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def trained(steps: int = 2, seed: int = 0) -> tuple[Any, Any, nn.Module, Any]:
    """Return a model sharded and its optimizer, and the same of one process, trained alike."""
    models, optimizers = [], []
    for is_sharded in (True, False):
        torch.manual_seed(seed)
        models.append(shard_layers(Model().double()) if is_sharded else Model().double())
        optimizers.append(torch.optim.AdamW(models[-1].parameters(), lr=0.01))
    for step in range(steps):
        models[0](batch(step, 0, dist.get_rank())).square().mean().backward()
        for rank in range(dist.get_world_size()):
            (models[1](batch(step, 0, rank)).square().mean() / dist.get_world_size()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return models[0], optimizers[0], models[1], optimizers[1]


def largest(found: Any, expected: Any) -> float:
    """Return the largest difference of two state dicts, which must have the same keys and shapes."""
    assert list(found) == list(expected)
    differences = [0.0]
    for name, value in expected.items():
        if isinstance(value, dict):
            differences.append(largest(found[name], value))
        elif isinstance(value, Tensor):
            assert found[name].shape == value.shape, name
            differences.append(float((found[name] - value).abs().max()))
        else:
            assert found[name] == value, name
    return max(differences)


def full_model() -> float:
    sharded, _, reference, _ = trained()
    return largest(get_model_state_dict(sharded, options=FULL), reference.state_dict())


def full_model_on_host() -> float:
    sharded, _, reference, _ = trained()
    found = get_model_state_dict(sharded, options=FULL_ON_HOST)
    if dist.get_rank():
        assert found == {}
        return 0.0
    return largest(found, reference.state_dict())


def full_optimizer() -> float:
    sharded, optimizer, reference, other = trained()
    found = get_optimizer_state_dict(sharded, optimizer, options=FULL)
    return largest(found["state"], get_optimizer_state_dict(reference, other)["state"])


def shards_on_host() -> float:
    sharded, _, reference, _ = trained()
    found = get_model_state_dict(sharded, options=StateDictOptions(cpu_offload=True))
    return largest({name: value.full_tensor() for name, value in found.items()}, reference.state_dict())


def load_whole() -> float:
    sharded, _, _, _ = trained(steps=0)
    _, _, reference, _ = trained(seed=1)
    sharded.load_state_dict(reference.state_dict())
    return largest(get_model_state_dict(sharded, options=FULL), reference.state_dict())


def set_whole() -> float:
    return _set(lambda state: state, FULL)


def set_from_rank_0() -> float:
    return _set(lambda state: state if dist.get_rank() == 0 else {}, FROM_RANK_0)


def _set(given: Callable[[Any], Any], options: StateDictOptions) -> float:
    sharded, optimizer, _, _ = trained(steps=1)
    _, _, reference, other = trained(seed=1)
    set_model_state_dict(sharded, given(dict(reference.state_dict())), options=options)
    set_optimizer_state_dict(sharded, optimizer, given(get_optimizer_state_dict(reference, other)), options=options)
    found = get_optimizer_state_dict(sharded, optimizer, options=FULL)["state"]
    return max(
        largest(get_model_state_dict(sharded, options=FULL), reference.state_dict()),
        largest(found, get_optimizer_state_dict(reference, other)["state"]),
    )


def save_and_load(path: str) -> float:
    """Save what ``state_dict`` gives, load it into another model, and train both on."""
    sharded, optimizer, _, _ = trained()
    saved = {"model": sharded.state_dict(), "optimizer": get_optimizer_state_dict(sharded, optimizer)}
    dcp.save(saved, checkpoint_id=path)
    other, its_optimizer, _, _ = trained(steps=1, seed=1)
    model_state, optimizer_state = get_state_dict(other, its_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for model, its in ((sharded, optimizer), (other, its_optimizer)):
        model(batch(9, 0, dist.get_rank())).square().mean().backward()
        its.step()
    return largest(*(get_model_state_dict(model, options=FULL) for model in (sharded, other)))


def save_and_load_empty(path: str) -> float:
    """Save a model with a parameter without elements, and load it into another one."""
    saved, loaded = (shard_layers(Model(WithEmpty)) for _ in range(2))
    dcp.save(saved.state_dict(), checkpoint_id=path)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=path)
    loaded.load_state_dict(state)
    pairs: Any = zip(saved.parameters(), loaded.parameters(), strict=True)
    return 0.0 if all(torch.equal(a.full_tensor(), b.full_tensor()) for a, b in pairs) else 1.0


def save_by_torch() -> str:
    sharded, optimizer, _, _ = trained()
    states = sharded.state_dict(), optimizer.state_dict()
    return " / ".join(_words(functools.partial(torch.save, state, io.BytesIO())) for state in states)


def load_a_shard_of_unknown_place() -> str:
    sharded, _, _, _ = trained()
    shards = {name: value.local for name, value in sharded.state_dict().items()}
    return _words(lambda: sharded.load_state_dict(shards))


def compute_with_a_shard() -> str:
    sharded, _, _, _ = trained()
    return _words(lambda: sharded.state_dict()["head.weight"] + 1)


def _words(do: Callable[[], Any]) -> str:
    try:
        do()
    except Exception as error:  # noqa: BLE001 -- the error is the result
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


EXACT: dict[str, Callable[[], float]] = {
    "a full state dict of the model": full_model,
    "the same on the host of rank 0": full_model_on_host,
    "a full state dict of the optimizer": full_optimizer,
    "shards on the host": shards_on_host,
    "whole tensors loaded": load_whole,
    "whole tensors set": set_whole,
    "whole tensors set from rank 0": set_from_rank_0,
}
REFUSED: dict[str, tuple[Callable[[], str], list[str]]] = {
    "saved by torch.save": (save_by_torch, ["part of the tensor only", "torch.distributed.checkpoint"]),
    "a shard of unknown place loaded": (load_a_shard_of_unknown_place, ["ValueError", "cannot be loaded from"]),
    "a shard computed with": (compute_with_a_shard, ["part of the tensor only", "full_tensor"]),
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, process_group.Outcome]:
    refused = {name: case for name, (case, _) in REFUSED.items()}
    cases = {"saved and loaded": save_and_load, "a parameter without elements": save_and_load_empty}
    saved = {name: functools.partial(case, str(tmp_path_factory.mktemp("saved"))) for name, case in cases.items()}
    return process_group.run_cases(WORLD_SIZE, {**EXACT, **refused, **saved})


@pytest.mark.parametrize("name", [*EXACT, "saved and loaded", "a parameter without elements"])
def test_is_what_one_process_has(outcomes: Any, name: str) -> None:
    for difference in outcomes[name].results():
        assert difference < 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(outcomes: Any, name: str) -> None:
    for words in outcomes[name].results():
        assert all(part in words for part in REFUSED[name][1]), words
