"""Checkpoints that are whole, and what is said of each way in which they can be damaged. No torch reads them here."""

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from instrumented_trainers.checkpoints import seal
from tests.support.cli_runner import ROOT, environment, only_line, tracekit
from tests.support.wording import Wording
from tracekit.ingest import checkpoint_files, pickle_child, pickles
from tracekit.ingest.pickles import PickleError

NUMBERS = {"weight": torch.arange(4096.0), "step": 3}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model = torch.nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "more": NUMBERS}
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    torch.save(NUMBERS, folder / "alone.pt")
    return folder


@pytest.fixture
def step(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved / "dcp", tmp_path / "step-000002")


def sealed(path: Path, source: Path) -> Path:
    """Make a sealed checkpoint of two ranks' shards, as the trainers leave it."""
    path.mkdir(parents=True)
    for name, found in ((".metadata", ".metadata"), ("__0_0.distcp", "__0_0.distcp"), ("__1_0.distcp", "__0_0.distcp")):
        shutil.copy(source / found, path / name)
    files = {file.name: seal.describe(path, file.name) for file in path.iterdir()}
    seal.write(path, seal.Seal(2, 64, "fsdp2", 2, {"model": "micro"}, files=files))
    return path


def flip(path: Path, at: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def safetensors(path: Path, **tensors: int) -> Path:
    """Write tensors of so many bytes, one after the other."""
    header, at = {}, 0
    for name, size in tensors.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    words = json.dumps(header).encode()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(len(words).to_bytes(8, "little") + words + bytes(at))
    return path


def only_problem(path: Path) -> checkpoint_files.Problem:
    (each,) = checkpoint_files.verify(path)
    assert each.status == checkpoint_files.DAMAGED
    assert each.remedy
    (problem,) = each.problems
    return problem


def test_a_distributed_checkpoint_is_whole_and_most_of_it_verified_by_checksums(step: Path) -> None:
    (each,) = checkpoint_files.verify(step)
    assert (each.status, each.kinds, each.files) == (checkpoint_files.WHOLE, ("torch.distributed.checkpoint",), 2)
    assert each.total_bytes == sum(file.stat().st_size for file in step.iterdir())
    assert each.checked_bytes == (step / "__0_0.distcp").stat().st_size


def test_every_flipped_bit_in_the_tensor_of_a_shard_is_found(step: Path) -> None:
    shard = step / "__0_0.distcp"
    whole = shard.read_bytes()
    first = whole.index(NUMBERS["weight"].numpy().tobytes())
    for at in range(first, first + 4 * 4096, 1237):
        flip(shard, at)
        problem = only_problem(step)
        assert (problem.rank, problem.file) == (0, "__0_0.distcp")
        assert "Bad CRC-32" in problem.what
        shard.write_bytes(whole)


def test_a_shard_that_is_cut_or_gone_is_named_with_its_rank(step: Path) -> None:
    shard = step / "__0_0.distcp"
    size = shard.stat().st_size
    os.truncate(shard, size - 1)
    assert only_problem(step).what.startswith(f"has {size - 1:,} bytes, {size:,} are needed: it was cut, and 1 of ")
    shard.unlink()
    problem = only_problem(step)
    assert (problem.rank, problem.file, problem.what) == (0, "__0_0.distcp", "is missing")


def test_a_save_that_did_not_complete_is_damaged(step: Path, saved: Path, wording: Wording) -> None:
    sealed(step.parent / "step-000001", saved / "dcp")
    wording(only_problem(step).what)
    (step / ".metadata").unlink()
    whole, cut = checkpoint_files.verify(step.parent)
    assert whole.status == checkpoint_files.WHOLE
    assert {problem.file for problem in cut.problems} == {".metadata", seal.SEAL_FILE}
    wording(cut.remedy)


@pytest.mark.parametrize(
    ("harm", "rank", "file", "what"),
    [
        (lambda path: flip(path / "__1_0.distcp"), 1, "__1_0.distcp", "holds other bytes than were saved"),
        (lambda path: flip(path / ".metadata"), 0, ".metadata", "holds other bytes than were saved"),
        (lambda path: os.truncate(path / "__1_0.distcp", 100), 1, "__1_0.distcp", "has 100 bytes"),
        (lambda path: (path / "__0_0.distcp").unlink(), 0, "__0_0.distcp", "is missing"),
        (lambda path: flip(path / "seal.json"), 0, "seal.json", "is damaged"),
    ],
    ids=["flipped bit", "flipped bit in the metadata", "cut", "gone", "seal"],
)
def test_every_byte_of_a_sealed_checkpoint_is_verified(tmp_path: Path, saved: Path, harm, rank, file, what) -> None:
    path = sealed(tmp_path / "step-000002", saved / "dcp")
    (each,) = checkpoint_files.verify(path)
    assert each.status == checkpoint_files.WHOLE
    assert each.checked_bytes == each.total_bytes
    harm(path)
    problem = only_problem(path)
    assert (problem.rank, problem.file) == (rank, file)
    assert problem.what.startswith(what)


class _Runs:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (self.command,)


def test_metadata_that_would_run_code_is_refused(step: Path, wording: Wording) -> None:
    (step / ".metadata").write_bytes(pickle.dumps({"storage_data": _Runs(f"touch {step}/ran")}))
    problem = only_problem(step)
    wording(problem.what)
    assert not (step / "ran").exists()


def test_deeply_nested_metadata_does_not_crash_the_process() -> None:
    nested = b"\x80\x04}" + b")" + b"\x85" * 50_000 + b"K\x01s."
    with pytest.raises(PickleError, match="no storage index"):
        pickles.read(pickle_child.METADATA, io.BytesIO(nested))


def test_metadata_cannot_refer_to_files_outside_its_folder(step: Path, wording: Wording) -> None:
    data = (step / ".metadata").read_bytes()
    (step / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../secret"))
    wording(only_problem(step).what)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_garbled_metadata_is_reported_as_damaged(saved: Path, data: st.DataObject) -> None:
    raw = bytearray((saved / "dcp" / ".metadata").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    del raw[data.draw(st.integers(len(raw) // 2, len(raw))) :]
    with contextlib.suppress(PickleError):
        pickles.read(pickle_child.METADATA, io.BytesIO(bytes(raw)))


def test_a_file_of_torch_save_is_verified_by_its_checksums(saved: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(saved / "alone.pt", tmp_path))
    assert checkpoint_files.verify(file)[0].checked_bytes == file.stat().st_size
    flip(file)
    assert "Bad CRC-32" in only_problem(file).what
    os.truncate(file, 500)
    assert only_problem(file).what.startswith("is damaged")


def test_a_file_of_torch_save_without_checksums_is_reported_as_unverified(tmp_path: Path, wording: Wording) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(NUMBERS, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    (each,) = checkpoint_files.verify(tmp_path)
    assert (each.status, each.checked_bytes) == (checkpoint_files.WHOLE, 0)
    wording(*each.notes)


def test_safetensors_are_compared_with_header_and_index(tmp_path: Path, wording: Wording) -> None:
    one = safetensors(tmp_path / "m" / "model-1.safetensors", a=40, b=24)
    safetensors(tmp_path / "m" / "model-2.safetensors", c=8)
    places = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert checkpoint_files.verify(tmp_path / "m")[0].status == checkpoint_files.WHOLE
    size = one.stat().st_size
    os.truncate(one, size - 5)
    assert only_problem(tmp_path / "m").what == f"has {size - 5:,} bytes, {size:,} by its header: it was cut"
    one.unlink()
    wording(only_problem(tmp_path / "m").what)
    safetensors(one, a=40)
    wording(only_problem(tmp_path / "m").what)
    os.truncate(one, 4)
    wording(only_problem(tmp_path / "m").what)


def test_the_command_says_what_is_wrong_where_and_what_to_do(saved: Path, tmp_path: Path) -> None:
    for name in ("step-000002", "step-000004"):
        sealed(tmp_path / "checkpoints" / name, saved / "dcp")
    done = tracekit("checkpoint", "verify", tmp_path)
    assert (done.returncode, done.stdout.count("100.0% by checksum (seal)")) == (0, 2)
    flip(tmp_path / "checkpoints" / "step-000004" / "__1_0.distcp")
    done = tracekit("checkpoint", "verify", tmp_path)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        "  rank 1: __1_0.distcp holds other bytes than were saved",
        f"  what to do: do not load it; restore what is wrong from a copy, or go on from "
        f"{tmp_path}/checkpoints/step-000002, which is whole",
    ]
    report = json.loads(tracekit("checkpoint", "verify", tmp_path, "--format", "json").stdout)
    assert [each["status"] for each in report["checkpoints"]] == ["whole", "damaged"]
    assert report["checkpoints"][1]["problems"] == [
        {"rank": 1, "file": "__1_0.distcp", "what": "holds other bytes than were saved"}
    ]


def test_an_unreadable_file_is_not_reported_as_damaged(step: Path) -> None:
    shard = step / "__0_0.distcp"
    shard.unlink()
    shard.symlink_to(shard)  # the one thing that nobody can read, root included
    done = tracekit("checkpoint", "verify", step)
    assert done.returncode == 2
    assert done.stdout.startswith("unreadable")
    assert "rank 0: __0_0.distcp cannot be read: Too many levels" in done.stdout
    assert "what to do: make the files readable to you and verify again" in done.stdout


def test_a_folder_without_a_checkpoint_is_a_one_line_error(tmp_path: Path) -> None:
    done = tracekit("checkpoint", "verify", tmp_path)
    assert done.returncode == 2
    assert "no checkpoint here" in only_line(done)
    assert tracekit("checkpoint", "verify", tmp_path / "none").returncode == 2


def test_verification_needs_no_torch(step: Path) -> None:
    script = (
        "import sys; sys.modules['torch'] = None; from tracekit.cli import main; "
        f"sys.argv = ['tracekit', 'checkpoint', 'verify', {str(step)!r}]; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
