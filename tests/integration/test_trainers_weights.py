"""The trainers' initial weights: the same under every strategy, and never whole on a rank that is to have a shard."""

import functools
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.profiler import ProfilerActivity, profile

from instrumented_trainers import build as trainer_build
from instrumented_trainers import parallelism
from instrumented_trainers.memory.measured import _allocations, _highest
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import PRESETS
from instrumented_trainers.parallelism import STRATEGIES
from tests.integration.trainings import micro
from tests.support import process_group
from tracekit.capture.profiler_session import without_profiler_noise

WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    **{name: (name, {}) for name in STRATEGIES},
    **{f"{name}, offloaded": (name, {"offload": True}) for name in ("fsdp2", "yafsdp")},
    **{f"{name}, not resharded": (name, {"keep_gathered": True}) for name in ("fsdp2", "yafsdp")},
}
SHARDED = ("fsdp2", "yafsdp", "fsdp2, offloaded", "yafsdp, offloaded")
SEED = 7


def weights(strategy: str, settings: Mapping[str, Any]) -> dict[str, Tensor]:
    """Build the model as the training does and return, on rank 0, its weights, whole."""
    model, _ = build(strategy, {"model": "micro", **settings})
    if isinstance(model, FullyShardedDataParallel):  # on the CPU its full state dict lies in memory that it frees
        with FullyShardedDataParallel.summon_full_params(model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()
            }
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return dict(state)


def peak_bytes(strategy: str, settings: Mapping[str, Any]) -> int:
    """Build the model as the training does and return the most memory that tensors took meanwhile."""
    gc.collect()  # or models of earlier cases are freed meanwhile
    with without_profiler_noise():
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        profiler.start()
        build(strategy, {"model": "tiny", **settings})
        profiler.stop()
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    events = sorted(_allocations(roots, "cpu"), key=lambda event: event.at_ns)
    return _highest(event.size_bytes for event in events)


def build(strategy: str, settings: Mapping[str, Any]) -> Any:
    config = micro(strategy, Path("unused"), seed=SEED, **settings)
    mesh = parallelism.make_mesh(config.layout, "cpu", data_axes=config.data_axes)
    axes = trainer_build.model_axes(config, mesh)
    return trainer_build.build(config, trainer_build.shard_options(config, ()), mesh, (), axes)


@functools.cache
def outcomes() -> Mapping[str, process_group.Outcome]:
    cases: dict[str, Callable[[], Any]] = {name: functools.partial(weights, *way) for name, way in WAYS.items()}
    cases |= {f"peak of {name}": functools.partial(peak_bytes, *WAYS[name]) for name in ("ddp", *SHARDED)}
    return process_group.run_cases(2, cases)


@pytest.mark.parametrize("name", WAYS)
def test_every_strategy_starts_from_the_same_weights(name: str) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS["micro"])
    model.materialize(torch.device("cpu"), model.initializer(SEED))
    found, expected = outcomes()[name].results()[0], model.state_dict()
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", SHARDED)
def test_no_rank_has_the_whole_model_while_it_is_built(name: str) -> None:
    model = PRESETS["tiny"]
    largest = max(model.vocabulary, model.hidden_width) * model.width
    for peak in outcomes()[f"peak of {name}"].results():
        assert 4 * model.parameters / 2 <= peak < 4 * (model.parameters / 2 + 3 * largest)
    assert outcomes()["peak of ddp"].results()[0] >= 4 * model.parameters


def test_a_tied_weight_stays_one_and_other_seeds_draw_other_weights() -> None:
    with torch.device("meta"):
        models = [Llama(PRESETS["micro"].__class__(64, 2, 4, 2, 176, 512, tied=True)) for _ in range(2)]
    for seed, model in enumerate(models):
        model.materialize(torch.device("cpu"), model.initializer(seed))
        assert model.head.weight is model.embedding.weight
    assert not torch.equal(models[0].head.weight, models[1].head.weight)
    assert models[0].layers[0].feed_forward.down.weight.std().item() == pytest.approx(0.02 / 2, rel=0.1)
