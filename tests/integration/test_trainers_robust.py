"""Trainings that something happens to: a signal, a rank that dies or hangs, a disk that is full."""

import gzip
import json
import os
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest

from instrumented_trainers import seal
from tests.integration import launched, trainings
from tests.integration.launched import MICRO, ranks_of, read_until, start, train
from tracekit import conventions

ENDLESS = ["--steps", "100000", *MICRO]
WINDOW = ["--profile-wait", "1", "--profile-warmup", "1", "--profile-active", "2"]


def trace_steps(run: Path, rank: int) -> set[str]:
    with gzip.open(run / conventions.rank_file(rank, conventions.TRACE_SUFFIX)) as packed:
        names = {event["name"] for event in json.load(packed)["traceEvents"]}
    return {name for name in names if name.startswith("ProfilerStep#")}


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if seal.is_sealed(path))


def test_sigterm_ends_a_training_well_and_it_can_go_on(tmp_path: Path) -> None:
    # In the profiled window, which is to be as long as the training.
    window = ["--profile-wait", "0", "--profile-warmup", "1", "--profile-active", "90000"]
    process = start("--strategy", "fsdp2", "--out", str(tmp_path), *ENDLESS, *window)
    read_until(process, "step    3 of")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    (name,) = checkpoints(tmp_path)
    steps = seal.read(tmp_path / "checkpoints" / name).step
    assert f"stopped by SIGTERM after {steps} steps" in out
    assert [len(trainings.rows(tmp_path, rank, conventions.METRICS_SUFFIX)) for rank in (0, 1)] == [steps, steps]
    for rank in (0, 1):
        assert trace_steps(tmp_path, rank) == {f"ProfilerStep#{step}" for step in range(1, steps)}
    assert trainings.manifest(tmp_path)["windows"] == [{"window": 0, "first_step": 1, "steps": steps - 1}]
    code, out, err = train(
        "--strategy", "fsdp2", "--out", str(tmp_path), *ENDLESS, "--resume", "--override", f"steps={steps + 1}"
    )
    assert (code, err) == (0, "")
    assert f"from step {steps}" in out


def test_a_rank_that_hangs_is_named_when_the_time_is_up(tmp_path: Path) -> None:
    process = start("--strategy", "ddp", "--out", str(tmp_path), *ENDLESS, "--timeout-s", "4")
    read_until(process, "step    1 of")
    os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == "instrumented_trainers: rank 1 did not answer within 4 s, for which the other ranks waited\n"
    assert ranks_of(process.pid) == []


def test_a_rank_that_cannot_save_ends_the_training_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    # Rank 1 may write files of a size that its first checkpoint just fits: then another fault makes it larger.
    script = tmp_path / "train.py"
    run = tmp_path / "run"
    script.write_text(
        textwrap.dedent(f"""
            import multiprocessing, resource, sys
            from pathlib import Path
            from instrumented_trainers import launch
            from instrumented_trainers.config import TrainingConfig
            from instrumented_trainers.faults.fault import Fault

            def limit(self, rank):
                if rank == 1 and (Path({str(run)!r}) / "checkpoints" / "step-000002").exists():
                    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
                return {{}}

            Fault.add_state = limit
            if __name__ == "__main__":
                config = TrainingConfig("fsdp2", Path({str(run)!r}), model="micro", steps=9, batch=1, tokens=16,
                                        checkpoint_every=2, fault=("host-sync",))
                sys.exit(launch.run(config, ["train.py"]))
        """)
    )
    code, _, err = train(program=(str(script),))
    assert code == 1
    assert err.splitlines()[-1] == (
        "instrumented_trainers: step-000004 could not be saved: rank 1: File too large; "
        "step-000002 is the last whole one"
    )
    assert checkpoints(run) == ["step-000002"]
    assert not (run / "checkpoints" / "step-000004").exists()


def on_a_disk_of(size_bytes: int, place: Path, kept: Path) -> tuple[str, ...]:
    """Return what runs a command with a small disk of its own at `place`, and keeps afterwards what is there."""
    script = (
        f'mount -t tmpfs -o size={size_bytes} tmpfs {place} || exit 77; "$@"; code=$?; cp -r {place} {kept}; exit $code'
    )
    return ("unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh")


@pytest.fixture
def small_disk(tmp_path: Path) -> Path:
    place = tmp_path / "disk"
    place.mkdir()
    probe = [*on_a_disk_of(1 << 20, place, tmp_path / "probe"), "true"]
    try:
        possible = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        possible = False
    if not possible:
        pytest.skip("needs to mount a small disk, which takes user namespaces")
    return place


@pytest.mark.parametrize(("size_bytes", "windowed"), [(4_000_000, False), (2_000_000, True)], ids=["save", "trace"])
def test_a_full_disk_leaves_what_was_whole(small_disk: Path, tmp_path: Path, size_bytes: int, windowed: bool) -> None:
    kept = tmp_path / "kept"
    prefix = on_a_disk_of(size_bytes, small_disk, kept)
    window = ["--profile-wait", "3" if windowed else "100", "--profile-warmup", "1", "--profile-active", "8"]
    saves = ["--checkpoint-every", "16"] if windowed else ["--checkpoint-every", "2", "--keep", "9"]
    run = small_disk / "run"
    code, out, err = train(
        "--strategy", "fsdp2", "--out", str(run), "--steps", "12", *MICRO, *window, *saves, prefix=prefix
    )
    left = {path.name for path in (kept / "run").iterdir()}
    assert not [name for name in left if name.endswith(conventions.PARTIAL_SUFFIX)]
    if windowed:
        assert code == 0
        assert "was not written: OSError" in err
        assert "step   11 of 12" in out
        assert not [name for name in left if name.endswith(conventions.TRACE_SUFFIX)]
    else:
        assert code == 1
        assert "No space left on device" in err.splitlines()[-1]
        assert f"{checkpoints(kept / 'run')[-1]} is the last whole one" in err.splitlines()[-1]
        for name in checkpoints(kept / "run"):
            folder = kept / "run" / "checkpoints" / name
            assert not any(seal.damage(folder, file, was) for file, was in seal.read(folder).files.items())


def test_what_is_launched_finds_no_place_to_write_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = launched.train("--strategy", "ddp", "--out", str(tmp_path / "file" / "run"), *MICRO)
    assert code == 2
    assert len(err.splitlines()) == 1
