"""Tensor, sequence, context and expert parallelism train as one process does: fp64, 3 steps of SGD, 1e-10 relative."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest

from instrumented_trainers.parallelism import ShardOptions
from tests.integration import configured, hybrid
from tests.integration.hybrid import CONFIG, Hybrid
from tests.support import process_group
from tests.support.selection import others_in_accuracy

TOLERANCE = 1e-10
TIED = dataclasses.replace(CONFIG, tied=True)
RECOMPUTED = dataclasses.replace(CONFIG, checkpointed_layers=1)
REENTRANT = dataclasses.replace(RECOMPUTED, reentrant=True)
DROPPED = dataclasses.replace(RECOMPUTED, dropout=0.3)
SELECTIVE = dataclasses.replace(CONFIG, checkpointed_layers=1, selective=True)
EXPERTS = dataclasses.replace(CONFIG, experts=4)
CAPACITY = dataclasses.replace(EXPERTS, capacity=0.75)  # about a third of the choices is dropped
SEQUENCE = {"tp": 2, "sequence_parallel": True}

ON_TWO = {
    "tp": Hybrid(tp=2),
    "tp, sequence": Hybrid(**SEQUENCE),
    "tp, sequence and loss": Hybrid(**SEQUENCE, loss_parallel=True),
    "tp, loss, tied": Hybrid(tp=2, loss_parallel=True, config=TIED),
    "tp, sequence, selectively recomputed": Hybrid(**SEQUENCE, config=SELECTIVE),
    "tp, sequence, recomputed reentrantly": Hybrid(**SEQUENCE, config=REENTRANT),
    "tp, dropout": Hybrid(tp=2, config=DROPPED),
    "tp, experts": Hybrid(tp=2, config=EXPERTS),
    "tp, sequence, experts": Hybrid(**SEQUENCE, config=EXPERTS),
    "cp": Hybrid(cp=2),
    "cp, selectively recomputed": Hybrid(cp=2, config=SELECTIVE),
    "cp, ring": Hybrid(cp=2, cp_method="ring"),
    "cp, ring, selectively recomputed": Hybrid(cp=2, cp_method="ring", config=SELECTIVE),
    "cp, ring, recomputed": Hybrid(cp=2, cp_method="ring", config=RECOMPUTED),
    "ep": Hybrid(ep=2, config=EXPERTS),
    "ep, capacity": Hybrid(ep=2, config=CAPACITY),
    "tp, sequence, experts with capacity": Hybrid(**SEQUENCE, config=CAPACITY),
}
_WAYS = {
    "tp": Hybrid(tp=2, micro_batches=2, max_norm=0.1),
    "tp, sequence and loss": Hybrid(**SEQUENCE, loss_parallel=True, max_norm=0.1),
    "cp": Hybrid(cp=2, micro_batches=2, max_norm=0.1),
    "cp, ring": Hybrid(cp=2, cp_method="ring", micro_batches=2, max_norm=0.1),
    "cp, ring of four": Hybrid(cp=4, cp_method="ring"),
    "tp x cp": Hybrid(**SEQUENCE, cp=2),
    "ep": Hybrid(ep=2, config=EXPERTS, micro_batches=2, max_norm=0.1),
    "ep x tp": Hybrid(**SEQUENCE, ep=2, config=EXPERTS, max_norm=0.1),
    "ep, capacity": Hybrid(ep=2, config=CAPACITY, micro_batches=2, max_norm=0.1),
    "all experts once": Hybrid(ep=4, config=EXPERTS, max_norm=0.1),
}
_UNDER = {
    "ddp": ("tp", "cp", "cp, ring", "cp, ring of four", "ep", "ep, capacity"),
    "zero1": ("tp, sequence and loss", "ep"),
    "fsdp2": ("tp, sequence and loss", "cp", "ep", "ep x tp", "all experts once", "ep, capacity"),
    "yafsdp": ("tp", "tp, sequence and loss", "tp x cp", "cp, ring"),
}
ON_FOUR = {
    f"{name} x {strategy}": dataclasses.replace(_WAYS[name], strategy=strategy)
    for strategy, names in _UNDER.items()
    for name in names
} | {
    "tp, from meta x fsdp2": Hybrid(tp=2, strategy="fsdp2", meta=True),
    "tp, from meta x yafsdp": Hybrid(tp=2, strategy="yafsdp", meta=True, config=TIED),
    "tp, offloaded x yafsdp": Hybrid(tp=2, strategy="yafsdp", options=ShardOptions(offload=True), max_norm=0.1),
    "tp of four": Hybrid(tp=4, sequence_parallel=True, config=dataclasses.replace(CONFIG, key_value_heads=4)),
}
# As the trainers' options say, pipelines among them.
_DIVIDED = {"tp": 2, "sequence_parallel": True, "loss_parallel": True}
_STAGES = {"pp": 2, "micro_batches": 4}
_EXPERTS = {"ep": 2, "experts": 4, "balance_loss": 0.0}
CONFIGURED: dict[str, dict[str, Any]] = {
    "replicas x cp": {"strategy": "fsdp2", "replicate": 2, "cp": 2, "micro_batches": 2},
    "pp x cp, ring": {"strategy": "zero1", "cp": 2, "cp_method": "ring", **_STAGES},
    "pp x tp, zero bubble": {"strategy": "zero1", "schedule": "zb-h1", **_STAGES, **_DIVIDED},
    "pp x tp x yafsdp": {"strategy": "yafsdp", **_STAGES, **_DIVIDED},
    "pp x ep": {"strategy": "zero1", **_EXPERTS, **_STAGES},
    "pp x ep, capacity": {"strategy": "zero1", **_EXPERTS, **_STAGES, "capacity": 0.75},
}
EIGHT = {"strategy": "zero1", "pp": 2, "micro_batches": 4, **_DIVIDED}
WRONG = Hybrid(**SEQUENCE, strategy="fsdp2", divisor_error=1.0001)


# Every day: each axis and each way of it once, and each strategy with an axis that divides its weights.
EVERYDAY: dict[int, set[str]] = {
    2: {
        "tp, loss, tied",
        "tp, sequence, recomputed reentrantly",
        "tp, dropout",
        "tp, sequence, experts with capacity",
        "cp, selectively recomputed",
        "cp, ring, recomputed",
        "ep, capacity",
    },
    4: {
        "cp, ring of four x ddp",
        "tp, sequence and loss x zero1",
        "ep x tp x fsdp2",
        "cp x fsdp2",
        "tp x cp x yafsdp",
        "tp, from meta x yafsdp",
        "tp, offloaded x yafsdp",
    },
}
EVERYDAY_CONFIGURED = {"replicas x cp", "pp x tp, zero bubble", "pp x tp x yafsdp", "pp x ep, capacity"}


@functools.cache
def outcomes(*, everyday: bool) -> dict[int, dict[str, process_group.Outcome]]:
    """Train the cases of every day, or the others."""
    functions: dict[int, dict[str, Callable[[], float]]] = {
        size: {
            name: functools.partial(hybrid.difference, case)
            for name, case in of_size.items()
            if everyday == (name in EVERYDAY[size])
        }
        for size, of_size in ((2, ON_TWO), (4, ON_FOUR))
    }
    functions[4] |= {
        name: functools.partial(configured.difference, case)
        for name, case in CONFIGURED.items()
        if everyday == (name in EVERYDAY_CONFIGURED)
    }
    if everyday:
        functions[4]["wrong"] = functools.partial(hybrid.difference, WRONG)
    return process_group.run_worlds(functions, timeout_s=480)


@pytest.mark.parametrize("name", others_in_accuracy(ON_TWO, EVERYDAY[2]))
def test_two_ranks_train_as_one_process(name: str) -> None:
    assert max(outcomes(everyday=name in EVERYDAY[2])[2][name].results()) < TOLERANCE


@pytest.mark.parametrize("name", others_in_accuracy(ON_FOUR, EVERYDAY[4]))
def test_four_ranks_train_as_one_process(name: str) -> None:
    assert max(outcomes(everyday=name in EVERYDAY[4])[4][name].results()) < TOLERANCE


@pytest.mark.parametrize("name", others_in_accuracy(CONFIGURED, EVERYDAY_CONFIGURED))
def test_trainings_by_options_are_as_one_process(name: str) -> None:
    assert max(outcomes(everyday=name in EVERYDAY_CONFIGURED)[4][name].results()) < TOLERANCE


@pytest.mark.accuracy
def test_eight_ranks_of_three_axes_train_as_one_process() -> None:
    outcome = process_group.run_cases(8, {"pp x dp x tp": functools.partial(configured.difference, EIGHT)})
    assert max(outcome["pp x dp x tp"].results()) < TOLERANCE


def test_a_wrong_scale_of_gradients_shows() -> None:
    assert max(outcomes(everyday=True)[4]["wrong"].results()) > 1000 * TOLERANCE
