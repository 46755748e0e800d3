"""Loops that read or write weights and gradients by hand do as on one process, or are refused with the reason."""

import functools

import pytest

from tests.integration import yafsdp_weight_recipes
from tests.integration.yafsdp_weight_recipes import READ_PREFIX, RECIPES, REFUSED
from tests.support import process_group

TOLERANCE = 1e-12
EVERYDAY = {  # one of each kind
    *("EWC", "SWAG", "weights as a vector", "clipped by foreach", "warm restarts"),
    *(f"{READ_PREFIX}{name}" for name in ("sparsity", "median", "by columns")),
}
PARAMETERS = [
    pytest.param(size, name, marks=() if size == 3 and name in EVERYDAY else pytest.mark.accuracy)
    for size in (2, 3)
    for name in RECIPES
]


@functools.cache
def outcomes(world_size: int, *, everyday: bool) -> dict[str, process_group.Outcome]:
    names = [name for name in RECIPES if (name in EVERYDAY and world_size == 3) == everyday]
    return process_group.run_cases(
        world_size, {name: functools.partial(yafsdp_weight_recipes.outcome, name) for name in names}
    )


@pytest.mark.parametrize(("world_size", "name"), PARAMETERS)
def test_does_as_one_process_or_is_refused_on_every_rank(world_size: int, name: str) -> None:
    results = outcomes(world_size, everyday=world_size == 3 and name in EVERYDAY)[name].results()
    refusals = [str(result).startswith("NotImplementedError: YaFSDP: ") for result in results]
    if name in REFUSED or (name.startswith(READ_PREFIX) and any(refusals)):
        assert all(refusals), results
        assert all("full_tensor()" in str(result) for result in results), results
    else:
        assert [result for result in results if not isinstance(result, float) or not result < TOLERANCE] == []
