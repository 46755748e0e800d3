"""YaFSDP computes what one process would compute, whatever the model does: fp64, three ranks, 1e-12 relative."""

import functools

import pytest
import torch

from instrumented_trainers.strategies.yafsdp import MixedPrecisionPolicy
from tests import ranks
from tests.integration import parity
from tests.integration.parity import Case
from tests.integration.toy import PATHS, Toy

WORLD_SIZE = 3
TOLERANCE = 1e-12

# bf16 has 8 bits of mantissa: each of the ten or so operations that an activation passes through rounds it by up to
# 2 ** -9 of its size, and a gradient comes back the same way. An error of scale or a lost gradient would be of order 1.
BF16_LOSS_TOLERANCE, BF16_GRADIENT_TOLERANCE = 0.01, 0.1


def freeze(toy: Toy) -> None:
    """One layer wholly, one in part, and the embedding."""
    toy.layers[1].requires_grad_(False)
    toy.layers[2].feed_forward.requires_grad_(False)
    toy.embedding.requires_grad_(False)


CASES = {path: Case(path) for path in PATHS} | {
    "one unit for all": Case(units="root"),
    "no parameters in the root": Case(units="all"),
    "units inside units": Case(units="nested"),
    "adamw": Case(optimizer="adamw"),
    "tied": Case(tied=True),
    "frozen": Case(prepare=freeze),
    "three micro-batches": Case(micro_batches=3),
    "three micro-batches, reused, tied": Case("reused", micro_batches=3, tied=True),
    "three micro-batches, checkpointed": Case("reentrant checkpoint of 2", micro_batches=3),
    "two passes forward, one back": Case(passes=2),
    "clipping": Case(max_norm=0.1),
    "clipping that does not bite": Case(max_norm=1e9),
    "evaluation in between": Case(evaluate=True, micro_batches=2),
    "evaluation in between, conditional": Case("conditional", evaluate=True),
    "one buffer": Case(buffers=1),
    "three buffers": Case(buffers=3),
    "three buffers, conditional": Case("conditional", buffers=3),
    "weights kept after forward": Case(reshard_after_forward=False),
    "gradients zeroed, not dropped": Case(set_to_none=False),
    "gradients of two steps add up": Case(clear_every=2),
}


BF16 = {
    "computed in bf16, summed in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "computed and summed in bf16": MixedPrecisionPolicy(torch.bfloat16),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, ranks.Outcome]:
    cases = CASES | {name: Case(dtype=torch.float32, policy=policy) for name, policy in BF16.items()}
    cases["divisor off by a thousandth"] = Case(divisor_error=1.001)
    return ranks.run_cases(WORLD_SIZE, {name: functools.partial(parity.compare, case) for name, case in cases.items()})


@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(outcomes: dict[str, ranks.Outcome], name: str) -> None:
    for difference in outcomes[name].results():
        assert difference.largest < TOLERANCE, difference


@pytest.mark.parametrize("name", BF16)
def test_is_as_near_to_one_process_as_bf16_allows(outcomes: dict[str, ranks.Outcome], name: str) -> None:
    for difference in outcomes[name].results():
        assert difference.loss < BF16_LOSS_TOLERANCE, difference
        assert difference.gradient < BF16_GRADIENT_TOLERANCE, difference


def test_a_divisor_off_by_a_thousandth_is_seen(outcomes: dict[str, ranks.Outcome]) -> None:
    for difference in outcomes["divisor off by a thousandth"].results():
        assert difference.loss > TOLERANCE
        assert difference.gradient > TOLERANCE
        assert difference.parameter > TOLERANCE
