"""What users do with a sharded model gives what one process gives, or is refused on every rank."""

import functools
import re

import pytest

from tests.integration import yafsdp_attacks
from tests.support import process_group
from tests.support.selection import others_in_accuracy

WORLD_SIZES = (2, 3)  # division by 2 is exact, so a wrong order of dividing and summing could hide
TOLERANCE, FP32_TOLERANCE = 1e-12, 1e-5

_USED_OTHERWISE = "RuntimeError: YaFSDP: backward needs a weight of unit 'layers.0' or .*captured inside it"
_DIFFERENT_RANKS = "RuntimeError: YaFSDP: the ranks did not do the same"
REFUSED = {
    "a captured activation alone": _USED_OTHERWISE,
    "a parameter returned in an object": "RuntimeError: .*unit 'layers.0'.*attribute 'value' of Box.*keep a copy",
    "a parameter stored as an attribute": "RuntimeError: .*unit 'layers.0'.*attribute 'stored' of Stores.*keep a copy",
    "a gradient hook before sharding": "NotImplementedError: .*'weight' of Linear.*hook.*after fully_shard",
    "a post-accumulate hook before sharding": "NotImplementedError: .*'weight' of Linear.*hook.*after fully_shard",
    "a gradient hook after sharding": "NotImplementedError: .*unit 'layers.1'.*register_post_accumulate_grad_hook",
    "a zero-bubble schedule": "NotImplementedError: .*splits backward.*1F1B",
    "a method other than forward, not registered": "NotImplementedError: .*linear needs the whole tensor",
    "another order on one rank": _DIFFERENT_RANKS,
    "a step on one rank only": _DIFFERENT_RANKS,
    "backward before and after a step": "RuntimeError: .*changed in place.*all backward passes before the step",
}
NAMES = [*yafsdp_attacks.ATTACKS, *yafsdp_attacks.SPECIAL]


@functools.cache
def outcomes(world_size: int) -> dict[str, process_group.Outcome]:
    cases = {name: functools.partial(yafsdp_attacks.outcome, name) for name in NAMES}
    return process_group.run_cases(world_size, cases, timeout_s=480)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in REFUSED])
@pytest.mark.parametrize("world_size", others_in_accuracy(WORLD_SIZES, {3}))
def test_gives_what_one_process_gives(world_size: int, name: str) -> None:
    tolerance = FP32_TOLERANCE if name == "a gradient scaler" else TOLERANCE
    for difference in outcomes(world_size)[name].results():
        assert isinstance(difference, float), difference
        assert difference < tolerance


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("world_size", others_in_accuracy(WORLD_SIZES, {3}))
def test_is_refused_on_every_rank(world_size: int, name: str) -> None:
    for words in outcomes(world_size)[name].results():
        assert re.match(REFUSED[name], str(words)), words
