"""YaFSDP computes what one process would compute, whatever the model does: fp64, 1 to 4 ranks, 1e-12 relative."""

import dataclasses
import functools
import itertools

import pytest
import torch

from instrumented_trainers.parallelism.yafsdp import MixedPrecisionPolicy
from tests.integration import parity
from tests.integration.parity import Case
from tests.integration.toy import PATHS, Toy
from tests.support import process_group
from tests.support.selection import others_in_accuracy

WORLD_SIZES = (1, 2, 3, 4)
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
    "norms gathered once": Case(norms_once=True),
    "norms gathered once, checkpointed": Case("reentrant checkpoint of 2", norms_once=True),
    "norms gathered once, reused, micro-batches": Case("reused", norms_once=True, micro_batches=2),
    "replicated shards": Case(replicas=2),
    "replicated shards, three micro-batches, clipping": Case(replicas=2, micro_batches=3, max_norm=0.1),
    "replicated shards, spare on one rank": Case("spare on one rank", replicas=2),
    "replicas only": Case(replicas=4),
    "from the meta device": Case(meta=True, tied=True),
    "adamw": Case(optimizer="adamw"),
    "tied": Case(tied=True),
    "frozen": Case(prepare=freeze),
    "three micro-batches": Case(micro_batches=3),
    "three micro-batches, reused, tied": Case("reused", micro_batches=3, tied=True),
    "three micro-batches, checkpointed": Case("reentrant checkpoint of 2", micro_batches=3),
    "three micro-batches, one reduction": Case(micro_batches=3, whole_gradients=True, max_norm=0.1),
    "three micro-batches, one reduction, reused, tied": Case(
        "reused", micro_batches=3, whole_gradients=True, tied=True
    ),
    "micro-batches, one reduction, spare on one rank": Case("spare on one rank", micro_batches=2, whole_gradients=True),
    "micro-batches, one reduction, checkpointed": Case(
        "reentrant checkpoint of 2", micro_batches=2, whole_gradients=True, passes=2
    ),
    "micro-batches, one reduction, conditional, offloaded": Case(
        "conditional", micro_batches=3, whole_gradients=True, offload=True, clear_every=2
    ),
    "replicated shards, micro-batches, one reduction": Case(replicas=2, micro_batches=2, whole_gradients=True),
    "two passes forward, one back": Case(passes=2),
    "two passes forward, a backward each": Case(passes=2, backwards="each"),
    "backward twice through one pass": Case(backwards="two"),
    "backward twice, checkpointed": Case("non-reentrant checkpoint of 2", backwards="two"),
    "clipping": Case(max_norm=0.1),
    "clipping that does not bite": Case(max_norm=1e9),
    "evaluation in between": Case(evaluate=True, micro_batches=2),
    "evaluation in between, conditional": Case("conditional", evaluate=True),
    "one buffer": Case(buffers=1),
    "three buffers": Case(buffers=3),
    "three buffers, conditional": Case("conditional", buffers=3),
    "weights not resharded after forward": Case(reshard_after_forward=False),
    "gradients zeroed, not dropped": Case(set_to_none=False),
    "gradients of two steps add up": Case(clear_every=2),
    "offloaded": Case(offload=True, max_norm=0.1, evaluate=True),
    "offloaded, three micro-batches, reused, tied": Case("reused", offload=True, micro_batches=3, tied=True),
    "offloaded, replicated shards": Case(offload=True, replicas=2, clear_every=2),
    "offloaded, from the meta device": Case(offload=True, meta=True, optimizer="adamw"),
}


BF16 = {
    "computed in bf16, summed in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "computed and summed in bf16": MixedPrecisionPolicy(torch.bfloat16),
}
CONTROL = "divisor off by a thousandth"


# On three ranks, where rounding hides nothing, a third step shows what the order of the second predicts. The others
# need it only where that order changes.
STEPS = {1: 2, 2: 2, 3: 3, 4: 2}
CHANGING_PATHS = ("conditional", "shuffled", "spare on one rank")
# Four ranks add replicas of shards, and more ranks to differ in what they use; other cases divide as on two.
ON_FOUR = {"plain", *CHANGING_PATHS, *(name for name, case in CASES.items() if case.replicas > 1)}
RUNS = [(size, name) for size in WORLD_SIZES for name in CASES if size < 4 or name in ON_FOUR]
# Every day: each idea once, on three ranks; on the others what depends on how many there are.
LIKE_ANOTHER = {
    "reentrant checkpoint of 1",
    "reentrant checkpoint of 4",
    "non-reentrant checkpoint of 1",
    "non-reentrant checkpoint of 2",
    "non-reentrant checkpoint of the first two",
    "norms gathered once, reused, micro-batches",
    "three micro-batches, checkpointed",
    "backward twice, checkpointed",
    "clipping that does not bite",
    "evaluation in between, conditional",
    "three buffers, conditional",
    "offloaded, from the meta device",
    "three micro-batches, one reduction, reused, tied",
    "micro-batches, one reduction, checkpointed",
    # Two ideas together, each of which has a case of its own.
    "two passes forward, a backward each",
    "offloaded, three micro-batches, reused, tied",
    "three micro-batches, reused, tied",
    "micro-batches, one reduction, spare on one rank",
    "replicated shards, micro-batches, one reduction",
    "offloaded, replicated shards",
}
EVERYDAY = {
    *((1, name) for name in ("plain", "offloaded")),
    *((2, name) for name in ("plain", "conditional", "replicated shards")),
    *((3, name) for name in CASES if name not in LIKE_ANOTHER and CASES[name].replicas == 1),
    *((4, name) for name in ON_FOUR - LIKE_ANOTHER if CASES[name].replicas > 1 or name == "spare on one rank"),
}
EVERYDAY_BF16 = {(3, name) for name in BF16}
EVERYDAY_CONTROL = {3}


@functools.cache
def all_outcomes(*, everyday: bool) -> dict[int, dict[str, process_group.Outcome]]:
    """Train the cases of every day, or the others."""
    bf16 = {name: Case(dtype=torch.float32, policy=policy) for name, policy in BF16.items()}
    cases: dict[int, dict[str, Case]] = {size: {} for size in WORLD_SIZES}
    for size, name in RUNS:
        if everyday == ((size, name) in EVERYDAY):
            cases[size][name] = CASES[name]
    for size in WORLD_SIZES:
        if everyday == (size in EVERYDAY_CONTROL):
            cases[size] |= {CONTROL: Case(divisor_error=1.001)}
        cases[size] |= {name: case for name, case in bf16.items() if everyday == ((size, name) in EVERYDAY_BF16)}
    return process_group.run_worlds(
        {
            size: {
                name: functools.partial(parity.compare, dataclasses.replace(case, steps=steps(case, size)))
                for name, case in of_size.items()
            }
            for size, of_size in cases.items()
        },
        timeout_s=480,
    )


def steps(case: Case, world_size: int) -> int:
    return case.steps if case.path in CHANGING_PATHS else STEPS[world_size]


def differences(world_size: int, name: str, *, everyday: bool) -> list[parity.Difference]:
    return all_outcomes(everyday=everyday)[world_size][name].results()


@pytest.mark.parametrize(("world_size", "name"), others_in_accuracy(RUNS, EVERYDAY))
def test_equals_one_process(world_size: int, name: str) -> None:
    for difference in differences(world_size, name, everyday=(world_size, name) in EVERYDAY):
        assert difference.largest < TOLERANCE, difference


@pytest.mark.parametrize(
    ("world_size", "name"), others_in_accuracy(itertools.product(WORLD_SIZES, BF16), EVERYDAY_BF16)
)
def test_is_as_near_to_one_process_as_bf16_allows(world_size: int, name: str) -> None:
    for difference in differences(world_size, name, everyday=(world_size, name) in EVERYDAY_BF16):
        assert difference.loss < BF16_LOSS_TOLERANCE, difference
        assert difference.gradient < BF16_GRADIENT_TOLERANCE, difference


@pytest.mark.parametrize("world_size", others_in_accuracy(WORLD_SIZES, EVERYDAY_CONTROL))
def test_a_divisor_off_by_a_thousandth_is_seen(world_size: int) -> None:
    for difference in differences(world_size, CONTROL, everyday=world_size in EVERYDAY_CONTROL):
        assert difference.gradient > TOLERANCE
        assert difference.parameter > TOLERANCE
