"""A training that goes on from a checkpoint: exactly as if it had never stopped, or not at all."""

import functools
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests import ranks
from tests.integration import trainings
from tests.integration.trainings import case, micro

STEPS = 7
LONG = {"steps": STEPS, "checkpoint_every": 3, "keep": 5, "dropout": 0.1}


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damaged_copy(run: Path, copy: Path, checkpoint: str) -> None:
    """Copy a run's checkpoints and flip one bit in rank 1's shard of one of them. One rank does it."""
    shutil.copytree(run / "checkpoints", copy / "checkpoints")
    flip_a_bit(copy / "checkpoints" / checkpoint / "__1_0.distcp")


def prepare(folder: Path) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        damaged_copy(folder / "fsdp2", folder / "damaged", "step-000006")
        damaged_copy(folder / "fsdp2", folder / "ruined", "step-000006")
        flip_a_bit(folder / "ruined" / "checkpoints" / "step-000003" / "seal.json")
    dist.barrier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Mapping[str, ranks.Outcome]:
    third = str(folder / "fsdp2" / "checkpoints" / "step-000003")
    cases = {
        "fsdp2": case(micro("fsdp2", folder / "fsdp2", **LONG)),
        "zero1": case(micro("zero1", folder / "zero1", **LONG)),
        "without dropout": case(micro("fsdp2", folder / "dry", **{**LONG, "dropout": 0.0})),
        "prepare": functools.partial(prepare, folder),
        "from the third step": case(micro("fsdp2", folder / "on", **LONG, resume=third)),
        "from its newest": case(micro("fsdp2", folder / "on", **LONG, resume="newest")),
        "zero1 from the third step": case(
            micro("zero1", folder / "zero1 on", **LONG, resume=str(folder / "zero1" / "checkpoints" / "step-000003"))
        ),
        "past the damage": case(micro("fsdp2", folder / "damaged", **LONG, resume="newest")),
        "nothing there": case(micro("fsdp2", folder / "new", **LONG, resume=str(folder / "nowhere"))),
        "the damaged one by name": case(micro("fsdp2", folder / "ruined", **LONG, resume="step-000006")),
        "all damaged": case(micro("fsdp2", folder / "ruined", **LONG, resume="newest")),
        "another rate": case(micro("fsdp2", folder / "rate", **{**LONG, "learning_rate": 1e-3}, resume=third)),
        "another rate, overridden": case(
            micro(
                "fsdp2",
                folder / "rate",
                **{**LONG, "learning_rate": 1e-3, "weight_decay": 0.0},
                resume=third,
                override=("learning_rate=0.001", "weight_decay=0.0"),
            )
        ),
        "another text": case(micro("fsdp2", folder / "text", **{**LONG, "tokens": 16}, resume=third)),
    }
    return ranks.run_cases(2, cases)


def losses(outcomes: Mapping[str, ranks.Outcome], name: str) -> list[list[float]]:
    """Return each rank's losses."""
    found = [value for value, _ in outcomes[name].results()]
    assert all(found), outcomes[name].results()
    return found


def said(outcomes: Mapping[str, ranks.Outcome], name: str) -> str:
    return str(outcomes[name].results()[0][1])


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1"])
def test_a_resumed_training_is_the_uninterrupted_one_random_numbers_included(
    outcomes: Mapping[str, ranks.Outcome], strategy: str
) -> None:
    name = {"fsdp2": "from the third step", "zero1": "zero1 from the third step"}[strategy]
    assert losses(outcomes, name) == [of_rank[3:] for of_rank in losses(outcomes, strategy)]
    # Random numbers matter here: the masks of dropout are drawn anew in each step.
    assert losses(outcomes, "without dropout")[0][3:] != losses(outcomes, "fsdp2")[0][3:]


def test_a_run_knows_every_checkpoint_it_stands_on(folder: Path, outcomes: Mapping[str, ranks.Outcome]) -> None:
    assert losses(outcomes, "from its newest") == [of_rank[3:] for of_rank in losses(outcomes, "fsdp2")]
    lineage = trainings.manifest(folder / "on")["lineage"]
    assert [Path(link["checkpoint"]).parts[-3:] for link in lineage] == [
        ("fsdp2", "checkpoints", "step-000003"),
        ("on", "checkpoints", "step-000006"),
    ]
    assert [link["step"] for link in lineage] == [3, 6]
    assert trainings.manifest(folder / "fsdp2")["lineage"] == []


def test_a_flipped_bit_is_refused_and_the_checkpoint_before_it_used(outcomes: Mapping[str, ranks.Outcome]) -> None:
    assert losses(outcomes, "past the damage") == [of_rank[3:] for of_rank in losses(outcomes, "fsdp2")]
    words = said(outcomes, "past the damage")
    assert words.count("\n") == 1
    assert "step-000006 is damaged: __1_0.distcp holds other bytes than were saved; trying the one before it" in words


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(outcomes: Mapping[str, ranks.Outcome]) -> None:
    assert "no whole checkpoint" in said(outcomes, "nothing there")
    words = said(outcomes, "the damaged one by name")
    assert words.startswith("RefusedError: --resume step-000006: damaged: __1_0.distcp")


def test_no_checkpoint_is_used_if_all_are_damaged_also_in_their_seals(outcomes: Mapping[str, ranks.Outcome]) -> None:
    assert "every checkpoint is damaged" in said(outcomes, "all damaged")


def test_other_settings_need_an_override_and_another_training_is_refused(
    folder: Path, outcomes: Mapping[str, ranks.Outcome]
) -> None:
    words = said(outcomes, "another rate")
    assert "learning_rate 0.003, not 0.001" in words
    assert "--override learning_rate=0.001" in words
    assert losses(outcomes, "another rate, overridden")[0][0] == losses(outcomes, "fsdp2")[0][3]
    assert losses(outcomes, "another rate, overridden")[0][1:] != losses(outcomes, "fsdp2")[0][4:]
    overrides = trainings.manifest(folder / "rate")["lineage"][-1]["overrides"]
    assert overrides == ["learning_rate=0.001", "weight_decay=0.0"]
    assert "tokens 32, not 16" in said(outcomes, "another text")
    assert "override" not in said(outcomes, "another text")
