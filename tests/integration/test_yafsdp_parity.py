"""YaFSDP computes what one process would compute, whatever the model does: fp64, 1 to 4 ranks, 1e-12 relative."""

import dataclasses
import functools

import pytest
import torch

from instrumented_trainers.parallelism.yafsdp import MixedPrecisionPolicy
from tests.integration import parity
from tests.integration.parity import Case
from tests.integration.toy import PATHS, Toy
from tests.support import process_group

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


ALL_CASES = {path: Case(path) for path in PATHS} | {
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
CASES = ALL_CASES


BF16 = {
    "computed in bf16, summed in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "computed and summed in bf16": MixedPrecisionPolicy(torch.bfloat16),
}


# On three ranks, where rounding hides nothing, a third step shows what the order of the second predicts. The others
# need it only where that order changes.
STEPS = {1: 2, 2: 2, 3: 3, 4: 2}
CHANGING_PATHS = ("conditional", "shuffled", "spare on one rank")
# Four ranks add replicas of shards, and more ranks to differ in what they use; other cases divide as on two.
ON_FOUR = {"plain", *CHANGING_PATHS, *(name for name, case in CASES.items() if case.replicas > 1)}
RUNS = [(size, name) for size in WORLD_SIZES for name in CASES if size < 4 or name in ON_FOUR]


@functools.cache
def all_outcomes() -> dict[int, dict[str, process_group.Outcome]]:
    cases = CASES | {name: Case(dtype=torch.float32, policy=policy) for name, policy in BF16.items()}
    cases["divisor off by a thousandth"] = Case(divisor_error=1.001)
    return process_group.run_worlds(
        {
            size: {
                name: functools.partial(parity.compare, dataclasses.replace(case, steps=steps(case, size)))
                for name, case in cases.items()
                if size < 4 or name in ON_FOUR or name not in CASES
            }
            for size in WORLD_SIZES
        },
        timeout_s=480,
    )


def steps(case: Case, world_size: int) -> int:
    return case.steps if case.path in CHANGING_PATHS else STEPS[world_size]


def outcomes(world_size: int) -> dict[str, process_group.Outcome]:
    return all_outcomes()[world_size]


@pytest.mark.parametrize(("world_size", "name"), RUNS)
def test_equals_one_process(world_size: int, name: str) -> None:
    for difference in outcomes(world_size)[name].results():
        assert difference.largest < TOLERANCE, difference


@pytest.mark.parametrize("name", BF16)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_is_as_near_to_one_process_as_bf16_allows(world_size: int, name: str) -> None:
    for difference in outcomes(world_size)[name].results():
        assert difference.loss < BF16_LOSS_TOLERANCE, difference
        assert difference.gradient < BF16_GRADIENT_TOLERANCE, difference


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_divisor_off_by_a_thousandth_is_seen(world_size: int) -> None:
    for difference in outcomes(world_size)["divisor off by a thousandth"].results():
        assert difference.gradient > TOLERANCE
        assert difference.parameter > TOLERANCE
