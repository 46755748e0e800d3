"""Models and training loops of public repositories train as on one process."""

import functools

import pytest

from tests.integration import yafsdp_more_recipes
from tests.integration.yafsdp_more_recipes import RECIPES
from tests.support import process_group

TOLERANCE = 1e-12
EVERYDAY = {  # one of each kind
    *("LoRA", "weight norm", "spectral norm", "LSTM", "tied embedding", "quantized"),
    *("DINO", "GAN", "diffusion", "unfrozen gradually", "micro-batches", "resumed"),
}
CASES = [
    pytest.param(size, name, marks=() if size == 3 and name in EVERYDAY else pytest.mark.accuracy)
    for size in (2, 3)
    for name in RECIPES
]


@functools.cache
def outcomes(world_size: int, *, everyday: bool) -> dict[str, process_group.Outcome]:
    names = [name for name in RECIPES if (name in EVERYDAY and world_size == 3) == everyday]
    return process_group.run_cases(
        world_size, {name: functools.partial(yafsdp_more_recipes.outcome, name) for name in names}
    )


@pytest.mark.parametrize(("world_size", "name"), CASES)
def test_trains_as_one_process_does(world_size: int, name: str) -> None:
    everyday = world_size == 3 and name in EVERYDAY
    for difference in outcomes(world_size, everyday=everyday)[name].results():
        assert isinstance(difference, float), difference
        assert difference < TOLERANCE
