"""The last line of a training whose rank was killed: what was being saved, and where to resume."""

from pathlib import Path

from instrumented_trainers.checkpoints import seal
from instrumented_trainers.checkpoints.seal import Seal
from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.launch import recovery_hint
from tests.support.wording import Wording


def begin(run: Path, step: int, *files: str) -> Path:
    path = run / "checkpoints" / f"step-{step:06d}"
    path.mkdir(parents=True)
    for name in files:
        (path / name).touch()
    return path


def test_there_is_no_hint_for_a_rank_killed_outside_of_a_save(tmp_path: Path) -> None:
    assert recovery_hint(TrainingConfig("ddp", tmp_path), 1) == ""
    seal.write(begin(tmp_path, 2, "__0_0.distcp"), Seal(2, 8, "ddp", 2, {}))
    assert recovery_hint(TrainingConfig("ddp", tmp_path), 1) == ""


def test_there_is_no_checkpoint_to_resume_from_after_a_rank_is_killed_in_the_first_save(
    tmp_path: Path, wording: Wording
) -> None:
    begin(tmp_path, 2, "__0_0.distcp", "__1_0.distcp")
    hint = recovery_hint(TrainingConfig("ddp", tmp_path), 1)
    wording(hint)


def test_a_rank_killed_before_its_first_file_is_reported_with_the_checkpoint(tmp_path: Path, wording: Wording) -> None:
    whole = begin(tmp_path, 2, "__0_0.distcp")
    seal.write(whole, Seal(2, 8, "ddp", 2, {}))
    begin(tmp_path, 4, "__0_0.distcp")
    hint = recovery_hint(TrainingConfig("ddp", tmp_path), 1)
    wording(hint)
