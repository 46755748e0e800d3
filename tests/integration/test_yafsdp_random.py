"""80 random models, sharded and trained in random ways, are what one process makes of them, or are refused by all."""

import functools

import pytest

from tests.integration import random_models, yafsdp_attacks
from tests.support import process_group

SEEDS = {2: range(40), 3: range(40, 80)}
TOLERANCE, FP32_TOLERANCE = 1e-12, 1e-5
REFUSALS = (
    "RuntimeError: YaFSDP: backward came to ",
    "RuntimeError: YaFSDP: backward needs a weight of ",
)


def outcome(seed: int) -> float | str:
    return yafsdp_attacks.outcome_of(random_models.attack(seed))


@functools.cache
def all_outcomes() -> dict[int, dict[str, process_group.Outcome]]:
    return process_group.run_worlds(
        {size: {str(seed): functools.partial(outcome, seed) for seed in seeds} for size, seeds in SEEDS.items()},
        timeout_s=900,
    )


@pytest.mark.parametrize(("world_size", "seed"), [(size, seed) for size, seeds in SEEDS.items() for seed in seeds])
def test_a_random_model_is_right_or_refused_by_all(world_size: int, seed: int) -> None:
    found = all_outcomes()[world_size][str(seed)].results()
    if all(isinstance(each, float) for each in found):
        assert max(found) < (FP32_TOLERANCE if random_models.has_fp32(seed) else TOLERANCE)
    else:
        assert all(isinstance(each, str) and each.startswith(REFUSALS) for each in found), found


def test_most_random_models_are_right() -> None:
    outcomes = [outcome.results()[0] for of_size in all_outcomes().values() for outcome in of_size.values()]
    assert sum(isinstance(each, float) for each in outcomes) > 0.8 * len(outcomes)
