"""The models by name are those that the trainers train."""

import pytest

from instrumented_trainers.model_config import PRESETS
from tests.support.wording import Wording
from tracekit.errors import InputError
from tracekit.plan import models

UNTRAINED = ("405b", "gpt3-175b", "deepseek-v3")


@pytest.mark.parametrize("name", [name for name in models.MODELS if name not in UNTRAINED])
def test_sizes_are_the_trainers(name: str) -> None:
    ours, theirs = models.find(name), PRESETS[name]
    assert (ours.width, ours.layers, ours.heads, ours.key_value_heads, ours.hidden_width, ours.vocabulary) == (
        *(theirs.width, theirs.layers, theirs.heads),
        *(theirs.key_value_heads, theirs.hidden_width, theirs.vocabulary),
    )
    norms = (2 * ours.layers + 1) * ours.width
    assert ours.parameters + norms == theirs.parameters
    assert ours.tied == theirs.tied
    experts = (ours.experts.count, ours.experts.active) if ours.experts else (0, theirs.active_experts)
    assert experts == (theirs.experts, theirs.active_experts)


def test_llamas_are_found_by_their_own_names_and_others_are_not(wording: Wording) -> None:
    assert models.find("llama2-70b") is models.find("70b")
    assert models.find("llama3-8b", layers=2).layers == 2
    with wording.raises(InputError):
        models.find("llama4")
    with pytest.raises(InputError, match="has 32"):
        models.find("llama2-7b", layers=33)
