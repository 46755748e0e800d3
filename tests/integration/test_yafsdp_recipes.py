"""Programs that handle parameters and gradients by hand train as on one process, or are refused with the reason."""

import functools
import re

import pytest

from tests.integration import yafsdp_recipes
from tests.integration.yafsdp_recipes import EXACT, REFUSED
from tests.support.selection import OutcomesOnDemand, others_in_accuracy

TOLERANCE = 1e-11  # a norm of norms is rounded otherwise than one norm
EVERYDAY = set(EXACT) - {
    # Their functions of weights and gradients are those of penalties on norms, means and the largest.
    *("watched", "near the first weights", "penalty on absolute values", "penalty on logarithms"),
    *("norms of gradients", "clipped by hand"),
    # They write weights as "weights swapped" and "averaged by torch" do.
    *("averaged by hand", "lookahead", "sharpness-aware", "on a sphere", "a schedule made late"),
    # They step element by element, as Adam, fused AdamW, Rprop and Lion do.
    *(f"optimizer {name}" for name in ("SGD", "AdamW, foreach", "AdamW, one by one", "Adagrad", "Adadelta", "Adamax")),
    *(f"optimizer {name}" for name in ("ASGD", "NAdam", "RAdam", "RMSprop")),
}


@functools.cache
def outcomes(world_size: int) -> OutcomesOnDemand:
    cases = {name: functools.partial(yafsdp_recipes.outcome, name) for name in (*EXACT, *REFUSED)}
    return OutcomesOnDemand(world_size, cases, {*EVERYDAY, *REFUSED})


@pytest.mark.parametrize("name", others_in_accuracy(EXACT, EVERYDAY))
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
