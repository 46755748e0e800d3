"""Pretrained weights in safetensors files, loaded into a sharded model part by part."""

import functools
import gc
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.profiler import ProfilerActivity, profile

from instrumented_trainers.memory.measured import _allocations, _highest
from instrumented_trainers.parallelism.yafsdp import fully_shard, load_pretrained, materialize
from tests.support import process_group
from tracekit.capture.profiler_session import without_profiler_noise

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install transformers"
)
TOKENS = torch.arange(16).view(2, 8)
SIZES = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4}


def config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{"vocab_size": 101, "num_key_value_heads": 2, "tie_word_embeddings": True, **SIZES, **changes})


def saved(folder: Path, *, shard_size: str = "40KB") -> Tensor:
    """Save a model of plain transformers, in several files, and return its logits."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(1)
    model = LlamaForCausalLM(config())
    model.save_pretrained(folder, max_shard_size=shard_size)
    with torch.no_grad():
        logits: Tensor = model(input_ids=TOKENS).logits
    return logits


def sharded(**changes: Any) -> Any:
    """Return a model of other weights, sharded on the meta device."""
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(config(**changes))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.manual_seed(2)
    materialize(model, model._init_weights)
    return model


def loaded(folder: str) -> tuple[Tensor, dict[str, Tensor], int]:
    """Load and return the logits, the whole state, and the most memory that loading took."""
    model = sharded()
    gc.collect()
    with without_profiler_noise():
        profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        profiler.start()
        load_pretrained(model, folder)
        profiler.stop()
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    events = sorted(_allocations(roots, "cpu"), key=lambda event: event.at_ns)
    with torch.no_grad():
        logits = model(input_ids=TOKENS).logits.clone()
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return logits, {name: value.clone() for name, value in state.items()}, _highest(e.size_bytes for e in events)


def refusal(folder: str, changes: dict[str, Any]) -> str:
    model = sharded(**changes)
    try:
        load_pretrained(model, folder)
    except (ValueError, FileNotFoundError) as error:
        return str(error)
    return "nothing was refused"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pretrained")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[int, dict[str, process_group.Outcome]]:
    saved(folder / "several")
    saved(folder / "one", shard_size="1GB")
    cases = {name: functools.partial(loaded, str(folder / name)) for name in ("several", "one")}
    cases |= {
        "no folder": functools.partial(refusal, str(folder / "none"), {}),
        "other layers": functools.partial(refusal, str(folder / "one"), {"num_hidden_layers": 2}),
        "more layers": functools.partial(refusal, str(folder / "one"), {"num_hidden_layers": 4}),
        "other width": functools.partial(refusal, str(folder / "one"), {"intermediate_size": 64}),
    }
    return process_group.run_worlds({2: cases, 3: {"several": cases["several"]}})


@pytest.mark.parametrize(("ranks", "name"), [(2, "several"), (2, "one"), (3, "several")])
def test_logits_are_those_of_plain_transformers(
    folder: Path, outcomes: dict[int, dict[str, process_group.Outcome]], ranks: int, name: str
) -> None:
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / name)
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
    assert len(list((folder / "several").glob("*.safetensors"))) > 1
    for logits, state, _ in outcomes[ranks][name].results():
        assert torch.allclose(logits, expected, atol=1e-6)
        for key, value in model.state_dict().items():
            assert torch.equal(state[key], value), key


def test_no_rank_reads_the_whole_of_a_large_weight(
    folder: Path, outcomes: dict[int, dict[str, process_group.Outcome]]
) -> None:
    embedding_bytes = 4 * 101 * SIZES["hidden_size"]
    # The files are mapped into memory: torch counts that as allocated, though only what is read is loaded.
    mapped_bytes = sum(path.stat().st_size for path in (folder / "several").glob("*.safetensors"))
    for _, _, peak in outcomes[3]["several"].results():
        assert peak - mapped_bytes < 0.6 * embedding_bytes


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no folder", "no such file; name a folder that has model.safetensors"),
        ("other layers", "the model has no weight 'model.layers.2.input_layernorm.weight'"),
        ("more layers", "has no weight 'model.layers.3."),
        ("other width", "is (64, 48) and cannot be loaded from (80, 48)"),
    ],
)
def test_other_files_are_refused_on_all_ranks(
    outcomes: dict[int, dict[str, process_group.Outcome]], name: str, words: str
) -> None:
    for said in outcomes[2][name].results():
        assert words in said
