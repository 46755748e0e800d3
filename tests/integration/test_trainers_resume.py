"""A training that goes on from a checkpoint: exactly as if it had never stopped, or not at all."""

import contextlib
import functools
import io
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from instrumented_trainers import loop
from instrumented_trainers.checkpoints import seal
from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.faults import Fault
from instrumented_trainers.loop import StopRequest
from tests.integration import trainings
from tests.integration.trainings import case, micro
from tests.support import process_group
from tests.support.selection import OutcomesOnDemand, others_in_accuracy

STEPS = 7
THIRD = "step-000003"
OTHERS = ("ddp", "zero1", "fsdp1", "yafsdp")
EVERYDAY = ("fsdp2", "zero1", "yafsdp")
LONG = {"steps": STEPS, "checkpoint_every": 3, "keep": 5, "dropout": 0.1, "profile_wait": 99}


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


def error_message(config: TrainingConfig) -> str:
    """Train and return what this rank said on stdout."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    with contextlib.redirect_stdout(io.StringIO()) as words:
        loop.train(config, init_device_mesh("cpu", (dist.get_world_size(),)), ["train"], StopRequest())
    return words.getvalue()


def train_limited(run: Path) -> tuple[list[float], str]:
    """Train while rank 1 may write files of a size that its first checkpoint just fits; the second is larger."""
    import resource

    import torch
    import torch.distributed as dist

    def add_more(fault: Fault, rank: int) -> dict[str, torch.Tensor]:
        saved_before = (run / "checkpoints" / "step-000002" / seal.SEAL_FILE).exists()
        return {"more": torch.ones(1_000_000)} if rank == 1 and saved_before else {}

    limits, add_state = resource.getrlimit(resource.RLIMIT_FSIZE), Fault.add_state
    Fault.add_state = add_more  # type: ignore[method-assign]
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, limits[1]))
    try:
        return trainings.train(micro("fsdp2", run, steps=9, checkpoint_every=2, fault=("host-sync",)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        Fault.add_state = add_state  # type: ignore[method-assign]


def train_watched(run: Path) -> dict[str, int]:
    """Train with one save and return how large each file and folder was when this rank synced it last."""
    import os

    sizes: dict[str, int] = {}
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        sizes[str(Path(f"/proc/self/fd/{descriptor}").readlink())] = os.fstat(descriptor).st_size

    os.fsync = watched  # type: ignore[assignment]
    try:
        trainings.train(micro("fsdp2", run, steps=2, checkpoint_every=2))
    finally:
        os.fsync = fsync
    return sizes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> Mapping[str, process_group.Outcome]:
    third = str(folder / "fsdp2" / "checkpoints" / THIRD)
    cases = {
        "fsdp2": case(micro("fsdp2", folder / "fsdp2", **LONG)),
        **{name: case(micro(name, folder / name, **LONG)) for name in OTHERS},
        "without dropout": case(micro("fsdp2", folder / "dry", **{**LONG, "dropout": 0.0})),
        "prepare": functools.partial(prepare, folder),
        "from the third step": case(micro("fsdp2", folder / "on", **LONG, resume=third)),
        "from its newest": case(micro("fsdp2", folder / "on", **LONG, resume="newest")),
        **{
            f"{name} on": case(
                micro(name, folder / f"{name} on", **LONG, resume=str(folder / name / "checkpoints" / THIRD))
            )
            for name in OTHERS
        },
        "done": functools.partial(
            error_message, micro("fsdp2", folder / "done", **{**LONG, "steps": 3}, resume=third, override=("steps=3",))
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
        "watched": functools.partial(train_watched, folder / "watched"),
        "limited": functools.partial(train_limited, folder / "limited"),
        "another text": case(micro("fsdp2", folder / "text", **{**LONG, "tokens": 16}, resume=third)),
    }
    others = {name for strategy in OTHERS if strategy not in EVERYDAY for name in (strategy, f"{strategy} on")}
    return OutcomesOnDemand(2, cases, cases.keys() - others)


def losses(outcomes: Mapping[str, process_group.Outcome], name: str) -> list[list[float]]:
    """Return each rank's losses."""
    found = [value for value, _ in outcomes[name].results()]
    assert all(found), outcomes[name].results()
    return found


def said(outcomes: Mapping[str, process_group.Outcome], name: str) -> str:
    return str(outcomes[name].results()[0][1])


@pytest.mark.parametrize("strategy", others_in_accuracy(["fsdp2", *OTHERS], EVERYDAY))
def test_a_resumed_training_is_the_uninterrupted_one_random_numbers_included(
    outcomes: Mapping[str, process_group.Outcome], strategy: str
) -> None:
    name = "from the third step" if strategy == "fsdp2" else f"{strategy} on"
    assert losses(outcomes, name) == [of_rank[3:] for of_rank in losses(outcomes, strategy)]
    # Random numbers matter here: each step draws new dropout masks.
    assert losses(outcomes, "without dropout")[0][3:] != losses(outcomes, "fsdp2")[0][3:]


def test_a_run_knows_every_checkpoint_it_stands_on(folder: Path, outcomes: Mapping[str, process_group.Outcome]) -> None:
    assert losses(outcomes, "from its newest") == [of_rank[3:] for of_rank in losses(outcomes, "fsdp2")]
    lineage = trainings.manifest(folder / "on")["lineage"]
    assert [Path(link["checkpoint"]).parts[-3:] for link in lineage] == [
        ("fsdp2", "checkpoints", "step-000003"),
        ("on", "checkpoints", "step-000006"),
    ]
    assert [link["step"] for link in lineage] == [3, 6]
    assert trainings.manifest(folder / "fsdp2")["lineage"] == []


def test_a_flipped_bit_is_refused_and_the_checkpoint_before_it_used(
    outcomes: Mapping[str, process_group.Outcome],
) -> None:
    assert losses(outcomes, "past the damage") == [of_rank[3:] for of_rank in losses(outcomes, "fsdp2")]
    words = said(outcomes, "past the damage")
    assert words.count("\n") == 1
    assert "step-000006 is damaged: rank 1: __1_0.distcp differs from the saved file; trying the previous one" in words


def test_a_damaged_checkpoint_that_was_requested_is_refused(outcomes: Mapping[str, process_group.Outcome]) -> None:
    assert "no complete checkpoint" in said(outcomes, "nothing there")
    words = said(outcomes, "the damaged one by name")
    assert words.startswith("InvalidConfigError: --resume step-000006: damaged: rank 1: __1_0.distcp")


def test_no_checkpoint_is_used_if_all_are_damaged_also_in_their_seals(
    outcomes: Mapping[str, process_group.Outcome],
) -> None:
    assert "every checkpoint is damaged" in said(outcomes, "all damaged")


def test_other_settings_need_an_override_and_another_training_is_refused(
    folder: Path, outcomes: Mapping[str, process_group.Outcome]
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


def test_a_rank_that_cannot_save_ends_the_training_with_the_last_good_checkpoint(
    folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    words = {said for _, said in outcomes["limited"].results()}
    assert words == {
        "TrainingFailedError: step-000004 could not be saved: rank 1: __1_0.distcp: File too large; "
        "step-000002 is the last complete one: free the disk or fix its permissions, and continue with --resume"
    }
    assert [path.name for path in (folder / "limited" / "checkpoints").iterdir()] == ["step-000002"]


def test_all_of_a_checkpoint_is_on_disk_once_it_has_its_seal(
    folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    path = folder / "watched" / "checkpoints" / "step-000002"
    synced: dict[str, int] = {}
    for of_rank in outcomes["watched"].results():
        synced |= of_rank
    sizes = {str(file): file.stat().st_size for file in path.iterdir()}
    assert {Path(name).name for name in sizes} == {".metadata", "__0_0.distcp", "__1_0.distcp", "seal.json"}
    sizes[f"{path / seal.SEAL_FILE}.partial"] = sizes.pop(str(path / seal.SEAL_FILE))  # its name until it was synced
    assert {name: synced.get(name) for name in sizes} == sizes  # torch syncs its metadata while it is empty
    assert {str(path), str(path.parent)} <= set(synced)


def test_a_training_that_is_done_says_so_and_leaves_the_run_alone(
    folder: Path, outcomes: Mapping[str, process_group.Outcome]
) -> None:
    first, second = outcomes["done"].results()
    assert first.endswith("step-000003 was saved after step 3 of 3; to train on, --override steps=N, N over 3\n")
    assert second == ""
    assert not (folder / "done").exists()
