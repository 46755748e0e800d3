"""Random models, sharded and trained in random ways, are what one process makes of them, or are refused by all."""

import functools

import pytest

from tests.integration import random_models, yafsdp_attacks
from tests.support import process_group
from tests.support.selection import others_in_accuracy

SEEDS = {2: range(40), 3: range(40, 80)}
RUNS = [(size, seed) for size, seeds in SEEDS.items() for seed in seeds]
EVERYDAY = {(size, seed) for size, seeds in SEEDS.items() for seed in seeds[: 12 if size == 3 else 4]}
TOLERANCE, FP32_TOLERANCE = 1e-12, 1e-5
REFUSALS = (
    "RuntimeError: YaFSDP: backward came to ",
    "RuntimeError: YaFSDP: backward needs a weight of ",
)


def outcome(seed: int) -> float | str:
    return yafsdp_attacks.outcome_of(random_models.attack(seed))


@functools.cache
def all_outcomes(*, everyday: bool) -> dict[int, dict[str, process_group.Outcome]]:
    """Train the models of every day, or the others."""
    seeds = {size: [seed for seed in SEEDS[size] if everyday == ((size, seed) in EVERYDAY)] for size in SEEDS}
    return process_group.run_worlds(
        {size: {str(seed): functools.partial(outcome, seed) for seed in seeds[size]} for size in seeds},
        timeout_s=900,
    )


@pytest.mark.parametrize(("world_size", "seed"), others_in_accuracy(RUNS, EVERYDAY))
def test_a_random_model_is_right_or_refused_by_all(world_size: int, seed: int) -> None:
    found = all_outcomes(everyday=(world_size, seed) in EVERYDAY)[world_size][str(seed)].results()
    if all(isinstance(each, float) for each in found):
        assert max(found) < (FP32_TOLERANCE if random_models.has_fp32(seed) else TOLERANCE)
    else:
        assert all(isinstance(each, str) and each.startswith(REFUSALS) for each in found), found


@pytest.mark.parametrize("everyday", [True, pytest.param(False, marks=pytest.mark.accuracy)])
def test_most_random_models_are_right(everyday: bool) -> None:
    by_size = all_outcomes(everyday=everyday).values()
    outcomes = [outcome.results()[0] for of_size in by_size for outcome in of_size.values()]
    assert sum(isinstance(each, float) for each in outcomes) > 0.8 * len(outcomes)
