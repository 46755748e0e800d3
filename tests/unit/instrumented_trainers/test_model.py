import dataclasses

import pytest
import torch
from torch.nn import functional

from instrumented_trainers.model import Llama, rotate, rotations
from instrumented_trainers.model_config import PRESETS, ModelConfig

SMALL = ModelConfig(width=32, layers=3, heads=4, key_value_heads=2, hidden_width=48, vocabulary=64)

# As the models' authors publish them.
PUBLISHED_PARAMETERS = {
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "7b": 6_738_415_616,
    "8b": 8_030_261_248,
    "13b": 13_015_864_320,
    "34b": 33_743_970_304,
    "70b": 68_976_648_192,
    "70b-llama3": 70_553_706_496,
}


def build(config: ModelConfig = SMALL) -> Llama:
    torch.manual_seed(0)
    return Llama(config).double()


def some_tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(SMALL.vocabulary, (batch, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_has_the_parameters_it_says(name: str) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS[name])
    assert sum(parameter.numel() for parameter in model.parameters()) == PRESETS[name].parameters


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_the_large_presets_are_the_published_models(name: str) -> None:
    assert PRESETS[name].parameters == PUBLISHED_PARAMETERS[name]


def test_every_unit_of_the_smallest_model_is_visible_in_a_trace() -> None:
    model = Llama(PRESETS["tiny"])
    layer_bytes = [sum(p.nbytes for p in layer.parameters()) for layer in model.layers]
    root_bytes = sum(p.nbytes for p in model.parameters()) - sum(layer_bytes)
    assert len(layer_bytes) >= 4
    assert min(*layer_bytes, root_bytes) >= 1 << 20


def test_logits_have_a_row_for_each_token() -> None:
    assert build()(some_tokens()).shape == (2, 12, SMALL.vocabulary)


def test_attention_is_causal() -> None:
    model, tokens = build(), some_tokens()
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % SMALL.vocabulary
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_attention_depends_on_distance_not_on_position() -> None:
    query, key = torch.randn(2, 1, 1, 1, SMALL.head_width, dtype=torch.float64).unbind()
    turned = rotations(torch.arange(64), SMALL)

    def score(query_position: int, key_position: int) -> float:
        at_query, at_key = turned[:, [query_position]], turned[:, [key_position]]
        return float((rotate(query, at_query) * rotate(key, at_key)).sum())

    assert score(9, 4) == pytest.approx(score(45, 40), abs=1e-12)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-6)


def test_shared_key_heads_equal_repeated_ones() -> None:
    shared = build()
    repeated = build(dataclasses.replace(SMALL, key_value_heads=4))
    weights = shared.state_dict()
    for name in list(weights):
        if name.endswith(("attention.key.weight", "attention.value.weight")):
            heads = weights[name].unflatten(0, (SMALL.key_value_heads, -1))
            weights[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    repeated.load_state_dict(weights)
    torch.testing.assert_close(shared(some_tokens()), repeated(some_tokens()), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_activations_give_the_same_gradients(reentrant: bool) -> None:
    plain = build()
    recomputing = build(dataclasses.replace(SMALL, checkpointed_layers=2, reentrant=reentrant))
    for model in (plain, recomputing):
        functional.cross_entropy(model(some_tokens()).flatten(0, 1), some_tokens().flatten()).backward()
    for one, other in zip(plain.parameters(), recomputing.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_tied_model_learns_one_weight_for_both_ends() -> None:
    model = build(dataclasses.replace(SMALL, tied=True))
    assert model.head.weight is model.embedding.weight


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        dataclasses.replace(SMALL, key_value_heads=3)
