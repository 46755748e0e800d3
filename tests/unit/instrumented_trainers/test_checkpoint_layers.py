"""`--checkpoint-layers N`: which layers recompute their activations, and what that saves."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from instrumented_trainers import config
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import ModelConfig
from instrumented_trainers.sizes import model_config

SMALL = ModelConfig(width=32, layers=4, heads=4, key_value_heads=2, hidden_width=48, vocabulary=64)
TOKENS = torch.randint(SMALL.vocabulary, (2, 24), generator=torch.Generator().manual_seed(1))


def layer_settings(*options: str) -> list[tuple[bool, bool]]:
    """Return, by layer, whether it recomputes and in which of the two ways, as the command line asks."""
    wanted = config.parse(["--strategy", "yafsdp", "--out", "runs/x", "--device", "cpu", "--model", "tiny", *options])
    with torch.device("meta"):
        model = Llama(model_config(wanted))
    return [(layer.recomputed, layer.reentrant) for layer in model.layers]


@pytest.fixture(autouse=True)
def _not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_only_the_first_layers_recompute(count: int) -> None:
    assert layer_settings("--checkpoint-layers", str(count)) == [(index < count, False) for index in range(4)]


def test_reentrant_checkpointing_is_optional() -> None:
    assert layer_settings("--checkpoint-layers", "2", "--reentrant") == [(index < 2, True) for index in range(4)]


def test_the_help_explains_recomputation(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.parse(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--checkpoint-layers N" in words
    assert "recompute activations in backward" in words


def saved_bytes(model: nn.Module) -> int:
    """Return how much autograd keeps from forward to backward, the weights themselves left out."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    storages: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in weights:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten())
    del loss
    return sum(storages.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_each_recomputed_layer_saves_memory(reentrant: bool) -> None:
    storages = []
    for count in range(SMALL.layers + 1):
        torch.manual_seed(0)
        model = Llama(dataclasses.replace(SMALL, checkpointed_layers=count, reentrant=reentrant))
        storages.append(saved_bytes(model))
    saved = [before - after for before, after in itertools.pairwise(storages)]
    assert min(saved) > 0.1 * storages[0]


class ProductCount(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += operator is torch.ops.aten.mm.default
        return operator(*args, **(kwargs or {}))


def test_selective_recomputation_repeats_no_matrix_product_and_changes_no_gradient() -> None:
    counts, gradients, storages = [], [], []
    for settings in ({}, {"checkpointed_layers": 4}, {"checkpointed_layers": 4, "selective": True}):
        torch.manual_seed(0)
        model = Llama(dataclasses.replace(SMALL, **settings)).double()
        storages.append(saved_bytes(model))
        with ProductCount() as products:
            functional.cross_entropy(model(TOKENS).flatten(0, 1), TOKENS.flatten()).backward()
        counts.append(products.count)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert counts[0] == counts[2] < counts[1]
    for others in gradients[1:]:
        assert all(torch.equal(one, other) for one, other in zip(gradients[0], others, strict=True))
    assert storages[1] <= storages[2] < storages[0]


@pytest.mark.parametrize("options", [["--recompute", "selective"], ["--checkpoint-layers", "1", "--reentrant"]])
def test_selective_recomputation_is_refused_where_it_does_nothing(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        layer_settings("--recompute", "selective", *options)
    assert "--recompute selective: needs --checkpoint-layers N, and not --reentrant" in capsys.readouterr().err
