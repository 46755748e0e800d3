"""Models, losses, optimizers and training loops of public repositories and papers train as on one process."""

import functools

import pytest

from tests.integration import yafsdp_more_recipes, yafsdp_paper_recipes
from tests.support import process_group

TOLERANCE = 1e-12
EVERYDAY = {  # one of each kind
    *("LoRA", "weight norm", "spectral norm", "LSTM", "tied embedding", "quantized"),
    *("DINO", "GAN", "diffusion", "unfrozen gradually", "micro-batches", "resumed"),
    *("cautious AdamW", "Prodigy", "ASAM", "PPO", "LayerDrop", "experts by rows"),
}
CASES = {
    name: functools.partial(module.outcome, name)
    for module in (yafsdp_more_recipes, yafsdp_paper_recipes)
    for name in module.RECIPES
}
PARAMETERS = [
    pytest.param(size, name, marks=() if size == 3 and name in EVERYDAY else pytest.mark.accuracy)
    for size in (2, 3)
    for name in CASES
]


@functools.cache
def outcomes(world_size: int, *, everyday: bool) -> dict[str, process_group.Outcome]:
    cases = {name: case for name, case in CASES.items() if (name in EVERYDAY and world_size == 3) == everyday}
    return process_group.run_cases(world_size, cases)


@pytest.mark.parametrize(("world_size", "name"), PARAMETERS)
def test_trains_as_one_process_does(world_size: int, name: str) -> None:
    everyday = world_size == 3 and name in EVERYDAY
    for difference in outcomes(world_size, everyday=everyday)[name].results():
        assert isinstance(difference, float), difference
        assert difference < TOLERANCE
