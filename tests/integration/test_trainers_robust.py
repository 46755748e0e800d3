"""Trainings that something happens to: a signal, a rank that dies or hangs, a disk that is full."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from instrumented_trainers import launch
from instrumented_trainers.checkpoints import seal
from instrumented_trainers.config import TrainingConfig
from tests.integration import recorded, trainings
from tests.integration.launched import MICRO, ranks_of, read_until, start, train
from tracekit import conventions
from tracekit.ingest import checkpoint_files

ENDLESS = ["--steps", "100000", *MICRO]


def trace_steps(run: Path, rank: int) -> set[str]:
    with gzip.open(run / conventions.rank_file(rank, conventions.TRACE_SUFFIX)) as packed:
        names = {event["name"] for event in json.load(packed)["traceEvents"]}
    return {name for name in names if name.startswith("ProfilerStep#")}


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if seal.is_sealed(path))


def test_sigterm_ends_a_training_well_and_says_how_to_go_on(tmp_path: Path) -> None:
    # In the profiled window, which is to be as long as the training.
    window = ["--profile-wait", "0", "--profile-warmup", "1", "--profile-active", "90000"]
    process = start("--strategy", "fsdp2", "--out", str(tmp_path), *ENDLESS, *window)
    read_until(process, "step    3 of")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (0, "")
    (name,) = checkpoints(tmp_path)
    steps = seal.read(tmp_path / "checkpoints" / name).step
    assert f"stopped by SIGTERM after {steps} steps; resume with --resume {tmp_path / 'checkpoints' / name}" in out
    assert [len(trainings.rows(tmp_path, rank, conventions.METRICS_SUFFIX)) for rank in (0, 1)] == [steps, steps]
    for rank in (0, 1):
        assert trace_steps(tmp_path, rank) == {f"ProfilerStep#{step}" for step in range(1, steps)}
    assert trainings.manifest(tmp_path)["windows"] == [{"window": 0, "first_step": 1, "steps": steps - 1}]


def test_a_rank_that_hangs_is_named_when_the_time_is_up(tmp_path: Path) -> None:
    process = start("--strategy", "ddp", "--out", str(tmp_path), *ENDLESS, "--timeout-s", "10")
    read_until(process, "step    1 of")
    os.kill(ranks_of(process.pid)[1], signal.SIGSTOP)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1
    assert err == "instrumented_trainers: rank 1 did not respond within 10 s, while the other ranks waited\n"
    assert ranks_of(process.pid) == []


def on_a_disk_of(size_bytes: int, place: Path, copy: Path) -> tuple[str, ...]:
    """Return what runs a command with a small disk of its own at `place`, and keeps afterwards what is there."""
    script = (
        f'mount -t tmpfs -o size={size_bytes} tmpfs {place} || exit 77; "$@"; code=$?; cp -r {place} {copy}; exit $code'
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


def test_a_full_disk_costs_the_trace_and_a_save_but_nothing_that_was_whole(small_disk: Path, tmp_path: Path) -> None:
    # A trace, and a third checkpoint, are more than fits.
    copy = tmp_path / "copy"
    run = small_disk / "run"
    window = ["--profile-wait", "0", "--profile-warmup", "1", "--profile-active", "4"]
    saves = ["--checkpoint-every", "3", "--keep", "9", "--steps", "30"]
    code, out, err = train(
        "--strategy",
        "fsdp2",
        "--out",
        str(run),
        *MICRO,
        *window,
        *saves,
        prefix=on_a_disk_of(4_000_000, small_disk, copy),
    )
    left = {path.name for path in (copy / "run").iterdir()}
    # Of the metrics there is what the disk had room for.
    begun = {name for name in left if name.endswith(conventions.PARTIAL_SUFFIX) and "metrics" not in name}
    assert not begun
    assert not [name for name in left if name.endswith(conventions.TRACE_SUFFIX)]
    # As it is, or when it is compressed.
    assert re.search(r"rank 0: (steps 1:5 were|rank00000\.pt\.trace\.json\.gz was) not written: OSError", err)
    assert "step    3 of 30" in out
    assert code == 1
    last = err.splitlines()[-1]
    assert "could not be saved: rank" in last
    assert "No space left on device" in last
    assert f"{checkpoints(copy / 'run')[-1]} is the last complete one" in last
    assert last.endswith("continue with --resume")
    for name in checkpoints(copy / "run"):
        folder = copy / "run" / "checkpoints" / name
        assert not any(seal.damage(folder, file, was) for file, was in seal.read(folder).files.items())


def test_a_rank_killed_in_a_save_ends_the_run_and_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    saves = ["--checkpoint-every", "2", "--keep", "9", "--profile-wait", "99", "--fault", "slow-disk=0.3MB/s:1"]
    process = start("--strategy", "fsdp2", "--out", str(tmp_path), "--steps", "100000", *MICRO, *saves)
    shard = tmp_path / "checkpoints" / "step-000004" / "__1_0.distcp"
    recorded.wait_until(lambda: shard.exists() or process.poll() is not None)
    assert process.poll() is None
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    _, err = process.communicate(timeout=300)
    whole = tmp_path / "checkpoints" / "step-000002"
    assert (process.returncode, err.splitlines()[-1]) == (
        1,
        "instrumented_trainers: rank 1 was killed by SIGKILL while step-000004/__1_0.distcp was written, so that "
        f"step-000004 is incomplete and will not be loaded; resume with --resume {whole}",
    )
    sound, cut = checkpoint_files.verify(tmp_path)
    assert (sound.path, sound.status, cut.status) == (str(whole), checkpoint_files.WHOLE, checkpoint_files.DAMAGED)
    assert cut.remedy.endswith(f"go on from {whole}, which is whole")
    assert seal.complete(tmp_path / "checkpoints") == [whole]  # what --resume chooses from
    assert ranks_of(process.pid) == []


def test_a_run_without_a_place_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert launch.run(TrainingConfig("ddp", tmp_path / "file" / "run"), ["train"]) == 2
    assert capsys.readouterr().err == (
        f"instrumented_trainers: --out {tmp_path / 'file' / 'run'}: cannot be written: Not a directory\n"
    )


def test_a_rank_that_is_done_does_not_take_the_interpreter_down() -> None:
    """gloo's threads would want its lock while it goes, and abort: seldom enough that no test could wait for it."""
    script = (
        "import atexit, os\n"
        "from instrumented_trainers import launch\n"
        "class Holder:\n"
        "    def __del__(self, write=os.write): write(1, b'taken down')\n"
        "holder = Holder()\n"
        "atexit.register(print, 'as Python does')\n"
        "print('all done')\n"
        "launch.leave(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 3, done.stderr
    assert done.stdout.split("\n") == ["all done", "as Python does", ""]
