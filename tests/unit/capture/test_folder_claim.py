import threading
from pathlib import Path

from tracekit import conventions
from tracekit.capture.atomic_files import claim_folder, folder_owner


def test_the_ranks_of_a_training_share_a_folder_and_another_training_has_its_own(tmp_path: Path) -> None:
    first = [claim_folder(tmp_path / "run", "one") for _ in range(3)]
    assert set(first) == {tmp_path / "run"}
    (tmp_path / "run" / "rank00000.metrics.jsonl.partial").touch()
    assert claim_folder(tmp_path / "run", "two") == tmp_path / "run-2"
    assert claim_folder(tmp_path / "run", "three") == tmp_path / "run-3"
    assert claim_folder(tmp_path / "run", "two") == tmp_path / "run-2"
    assert claim_folder(tmp_path / "run", "one") == tmp_path / "run"
    assert folder_owner(tmp_path / "run-2") == "two"


def test_a_folder_that_is_not_empty_is_not_claimed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("notes")
    assert claim_folder(tmp_path, "one") == tmp_path.with_name(tmp_path.name + "-2")
    assert folder_owner(tmp_path) is None


def test_concurrent_ranks_claim_the_same_folder(tmp_path: Path) -> None:
    found: dict[int, Path] = {}

    def come(rank: int) -> None:
        folder = claim_folder(tmp_path / "run", f"training {rank % 3}")
        (folder / conventions.rank_file(rank, ".x")).touch()
        found[rank] = folder

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_training = [{found[rank] for rank in range(30) if rank % 3 == training} for training in range(3)]
    assert all(len(folders) == 1 for folders in by_training)
    assert len(set.union(*by_training)) == 3
