"""Programs that handle parameters and gradients by hand train as on one process, or are refused with the reason."""

import functools
import re

import pytest

from tests.integration import yafsdp_recipes
from tests.integration.yafsdp_recipes import EXACT, REFUSED
from tests.support import process_group
from tests.support.selection import others_in_accuracy

TOLERANCE = 1e-11  # a norm of norms is rounded otherwise than one norm


@functools.cache
def outcomes(world_size: int) -> dict[str, process_group.Outcome]:
    names = (*EXACT, *REFUSED)
    return process_group.run_cases(
        world_size, {name: functools.partial(yafsdp_recipes.outcome, name) for name in names}
    )


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("world_size", others_in_accuracy([2, 3], [3]))
def test_trains_as_one_process_does(world_size: int, name: str) -> None:
    for difference in outcomes(world_size)[name].results():
        assert isinstance(difference, float), difference
        assert difference < TOLERANCE


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("world_size", others_in_accuracy([2, 3], [3]))
def test_is_refused_on_every_rank(world_size: int, name: str) -> None:
    for words in outcomes(world_size)[name].results():
        assert re.match(REFUSED[name][1], str(words)), words
