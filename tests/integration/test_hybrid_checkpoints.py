"""A checkpoint has whole names and shapes: another layout of the ranks, or one process, trains on from it."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.integration import configured, hybrid
from tests.integration.hybrid import CONFIG, Hybrid
from tests.support import process_group
from tests.support.selection import OutcomesOnDemand, others_in_accuracy

TOLERANCE = 1e-10
EXPERTS = dataclasses.replace(CONFIG, experts=4)
PLAIN = Hybrid(optimizer="adamw")
# Each trains on the same sequences per step: micro-batches make up for data-parallel ranks.
LAYOUTS = {
    "alone": dataclasses.replace(PLAIN, micro_batches=4),
    "fsdp2": dataclasses.replace(PLAIN, strategy="fsdp2"),
    "tp x zero1": dataclasses.replace(PLAIN, tp=2, micro_batches=2, strategy="zero1"),
    "tp x fsdp2": dataclasses.replace(PLAIN, tp=2, sequence_parallel=True, micro_batches=2, strategy="fsdp2"),
    "tp x yafsdp": dataclasses.replace(PLAIN, tp=2, loss_parallel=True, micro_batches=2, strategy="yafsdp"),
    "cp x yafsdp": dataclasses.replace(PLAIN, cp=2, micro_batches=2, strategy="yafsdp"),
}
WITH_EXPERTS = {
    "experts, alone": dataclasses.replace(PLAIN, config=EXPERTS, micro_batches=4),
    "experts, ep x zero1": dataclasses.replace(PLAIN, config=EXPERTS, ep=2, strategy="zero1"),
    "experts, ep x tp x fsdp2": dataclasses.replace(
        PLAIN, config=EXPERTS, ep=2, tp=2, sequence_parallel=True, micro_batches=2, strategy="fsdp2"
    ),
}
ALL = {**LAYOUTS, **WITH_EXPERTS}
MOVES = [
    ("tp x zero1", "fsdp2"),
    ("tp x yafsdp", "alone"),
    ("tp x fsdp2", "cp x yafsdp"),
    ("fsdp2", "tp x yafsdp"),
    ("alone", "tp x fsdp2"),
    ("experts, ep x zero1", "experts, ep x tp x fsdp2"),
    ("experts, alone", "experts, ep x zero1"),
]
# Every day each strategy and each axis once; the others begin with other checkpoints.
EVERYDAY = [
    ("tp x zero1", "fsdp2"),
    ("tp x yafsdp", "alone"),
    ("tp x fsdp2", "cp x yafsdp"),
    ("experts, ep x zero1", "experts, ep x tp x fsdp2"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, process_group.Outcome]:
    folder: Path = tmp_path_factory.mktemp("checkpoints")
    saves = {
        name: functools.partial(hybrid.save_alone if name.endswith("alone") else hybrid.save, ALL[name], folder / name)
        for name in dict.fromkeys(origin for origin, _ in MOVES)
    }
    loads = {
        f"{origin} to {name}": functools.partial(
            hybrid.load_alone if name.endswith("alone") else hybrid.load, ALL[name], folder / origin
        )
        for origin, name in MOVES
    }
    everyday = {case for origin, name in EVERYDAY for case in (origin, f"{origin} to {name}")}
    return OutcomesOnDemand(4, {**saves, **loads}, everyday)


@pytest.mark.parametrize(("origin", "name"), others_in_accuracy(MOVES, EVERYDAY))
def test_the_next_losses_are_those_of_the_training_that_saved(
    outcomes: Mapping[str, process_group.Outcome], origin: str, name: str
) -> None:
    expected = outcomes[origin].results()[0]
    for losses in outcomes[f"{origin} to {name}"].results():
        assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3), "a step must change the loss, or it says little"


# By the trainers' options, on 4 ranks or 1. All train on the same 16 sequences a step.
_ADAM = {"optimizer": "adamw", "learning_rate": 0.01}
PIPELINE = {"strategy": "zero1", "pp": 2, "micro_batches": 4, **_ADAM}
RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "tp": (4, {"strategy": "zero1", "tp": 2, "sequence_parallel": True, "micro_batches": 4, **_ADAM}),
    "fsdp2": (4, {"strategy": "fsdp2", "micro_batches": 2, **_ADAM}),
    "one process": (1, {"strategy": "ddp", "micro_batches": 8, **_ADAM}),
}


def test_a_checkpoint_of_a_pipeline_resumes_under_tensor_parallelism_fsdp2_and_alone(tmp_path: Path) -> None:
    path = tmp_path / "pipeline"
    expected = process_group.run(4, functools.partial(configured.save, PIPELINE, path))[0]
    worlds: dict[int, dict[str, Any]] = {4: {}, 1: {}}
    for name, (ranks, options) in RESUMED.items():
        worlds[ranks][name] = functools.partial(configured.load, options, path)
    outcomes = process_group.run_worlds(worlds)
    for name, (ranks, _) in RESUMED.items():
        for losses in outcomes[ranks][name].results():
            assert losses == pytest.approx(expected, rel=TOLERANCE)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3), "a step must change the loss, or it says little"
