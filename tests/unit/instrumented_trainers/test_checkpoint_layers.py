"""`--checkpoint-layers N`: which layers recompute their activations, and what that saves."""

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from instrumented_trainers import config
from instrumented_trainers.model import Llama, ModelConfig
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
