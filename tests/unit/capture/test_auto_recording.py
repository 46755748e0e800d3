"""A script's own saves and loads in one process: what is logged of them, and that they are what they were."""

import inspect
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter, state_dict_loader, state_dict_saver

from tracekit import conventions
from tracekit.capture import record_load
from tracekit.capture.checkpoints import auto_recording, single_file

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

MANY = 700  # squared floats are more than the least that is logged
SLOW_S = 0.05
Case = Callable[[Path], Any]


class Run:
    """Where the calls of a test are logged."""

    def __init__(self, folder: Path) -> None:
        self.folder: Path | None = folder
        self.log = folder / conventions.rank_file(3, conventions.CHECKPOINT_LOG_SUFFIX)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def stages(self) -> dict[str, dict[str, Any]]:
        lines = self.lines()
        assert len({line["stage"] for line in lines}) == len(lines)
        return {line["stage"]: line for line in lines}


def watch(folder: Callable[[], Path | None]) -> None:
    for entry in (
        auto_recording.watch_torch_files,
        auto_recording.watch_distributed_checkpoints,
        auto_recording.watch_safetensors,
    ):
        entry(folder, lambda: 3, lambda: 12)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path / "run")
    watch(lambda: found.folder)
    yield found
    watch(lambda: None)


class Slow:
    """Something of a few bytes that takes its time to be pickled."""

    def __reduce__(self) -> Any:
        time.sleep(SLOW_S)
        return Slow, ()


def tensors(size: int = MANY) -> dict[str, torch.Tensor]:
    return {name: torch.full((size, size), float(index)) for index, name in enumerate("ab")}


def save(path: Path) -> None:
    torch.save(tensors(), path)


def save_by_name(path: Path) -> None:
    torch.serialization.save(obj=tensors(), f=str(path))


def save_to_open_file(path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors(), file)


def save_module(path: Path) -> None:
    torch.save(torch.nn.Linear(MANY, MANY), path)


def save_the_old_way(path: Path) -> None:
    torch.save(tensors(), path, _use_new_zipfile_serialization=False)


def save_to_memory(path: Path) -> None:
    buffer = io.BytesIO(b"before")
    buffer.seek(6)
    torch.save(tensors(), buffer)
    path.write_bytes(buffer.getvalue()[6:])


def save_safetensors(path: Path) -> None:
    safetensors.torch.save_file(tensors(), path)


def load(path: Path) -> Any:
    return torch.load(path)


def load_weights_only(path: Path) -> Any:
    return torch.load(str(path), weights_only=True, map_location="cpu")


def load_open_file(path: Path) -> Any:
    with path.open("rb") as file:
        return torch.load(file, weights_only=False)


def load_mapped(path: Path) -> Any:
    return torch.load(path, mmap=True)


def load_from_memory(path: Path) -> Any:
    return torch.load(io.BytesIO(path.read_bytes()))


def load_safetensors(path: Path) -> Any:
    return safetensors.torch.load_file(path)


SAVES = (save, save_by_name, save_to_open_file, save_module, save_the_old_way, save_to_memory, save_safetensors)
LOADS = (load, load_weights_only, load_open_file, load_mapped, load_from_memory, load_safetensors)


@pytest.fixture
def of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count time only while this process runs: on a busy machine it may pause between two stages."""
    began_ns = time.time_ns() - time.process_time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: began_ns + time.process_time_ns())


@pytest.mark.usefixtures("of_this_process")
@pytest.mark.parametrize("case", SAVES, ids=lambda case: case.__name__)
def test_a_save_is_split_into_stages_and_writes_the_same_file(tmp_path: Path, run: Run, case: Case) -> None:
    run_folder, run.folder = run.folder, None
    (tmp_path / "alone").mkdir()
    torch.manual_seed(0)
    case(tmp_path / "alone" / "x.pt")
    assert not run.lines()
    run.folder = run_folder
    torch.manual_seed(0)
    case(tmp_path / "x.pt")
    run.folder = None
    if case is save_the_old_way:  # which writes addresses of memory into the file
        assert all(torch.equal(value, tensors()[name]) for name, value in torch.load(tmp_path / "x.pt").items())
    else:
        assert (tmp_path / "x.pt").read_bytes() == (tmp_path / "alone" / "x.pt").read_bytes()
    stages = run.stages()
    total = stages.pop("total")
    assert 0.97 * total["dur_ns"] <= sum(line["dur_ns"] for line in stages.values()) <= total["dur_ns"]
    assert total["bytes"] == (tmp_path / "x.pt").stat().st_size
    assert (total["operation"], total["step"], total["blocking"], total["worker"]) == ("save", 12, True, "main")
    to_memory = case is save_to_memory
    assert total["durable"] is (None if to_memory else False)
    assert total["files"] == (0 if to_memory else 1)
    assert total["path"] == (None if to_memory else str(tmp_path / "x.pt"))
    assert total["checkpoint"].startswith("memory" if to_memory else f"{tmp_path.name}/x.pt")
    assert {"serialize"} <= set(stages)
    if case is not save_the_old_way:
        assert stages["write"]["bytes"] == total["bytes"]


@pytest.mark.usefixtures("of_this_process")
@pytest.mark.parametrize("case", LOADS, ids=lambda case: case.__name__)
def test_a_load_is_split_into_stages_and_returns_the_same_state(tmp_path: Path, run: Run, case: Case) -> None:
    run_folder, run.folder = run.folder, None
    path = tmp_path / "x.pt"
    (save_safetensors if case is load_safetensors else save)(path)
    alone = case(path)
    run.folder = run_folder
    loaded = case(path)
    assert all(torch.equal(loaded[name], alone[name]) for name in "ab")
    stages = run.stages()
    total = stages.pop("total")
    assert 0.97 * total["dur_ns"] <= sum(line["dur_ns"] for line in stages.values()) <= total["dur_ns"]
    assert (total["operation"], total["blocking"], total["durable"]) == ("load", True, None)
    if case is not load_mapped:  # which reads when its tensors are used
        assert stages["read"]["bytes"] >= 2 * 4 * MANY**2
    assert total["files"] == (0 if case is load_from_memory else 1)


def test_small_and_fast_saves_are_not_logged(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_file, "MIN_NS", 10_000_000_000)  # no busy machine is as slow as that
    for size in (1, 64):
        torch.save(tensors(size), tmp_path / "x.pt")
        torch.load(tmp_path / "x.pt")
        torch.save(tensors(size), io.BytesIO())
    assert run.lines() == []


def test_a_small_but_slow_save_is_logged_with_its_duration(tmp_path: Path, run: Run) -> None:
    torch.save(Slow(), tmp_path / "x.pt")
    stages = run.stages()
    assert set(stages) == {"serialize", "total"}
    assert stages["total"]["dur_ns"] >= SLOW_S * 1e9
    assert stages["total"]["bytes"] == (tmp_path / "x.pt").stat().st_size


def unpicklable(path: Path) -> None:
    torch.save({**tensors(), "lock": threading.Lock()}, path)


def no_folder(path: Path) -> None:
    torch.save(tensors(), path / "missing" / "x.pt")


def no_arguments(path: Path) -> None:
    torch.save()  # type: ignore[call-arg]


def disk_full(path: Path) -> None:
    with files_no_larger_than(1 << 20):
        torch.save(tensors(), path)


def disk_full_for_safetensors(path: Path) -> None:
    with files_no_larger_than(1 << 20):
        safetensors.torch.save_file(tensors(), path)


def no_file(path: Path) -> None:
    torch.load(path)


def no_weights(path: Path) -> None:
    run_of = [path, *tensors().values()]
    with path.open("wb") as file:
        torch.save(run_of, file)
    torch.load(path, weights_only=True)


@contextmanager
def files_no_larger_than(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    "case",
    [unpicklable, no_folder, no_arguments, disk_full, disk_full_for_safetensors, no_file, no_weights],
    ids=lambda case: case.__name__,
)
def test_an_exception_reaches_the_script_unchanged(tmp_path: Path, run: Run, case: Case) -> None:
    run_folder, run.folder = run.folder, None
    raised = []
    for folder in (None, run_folder):
        run.folder = folder
        with pytest.raises(Exception) as caught:  # noqa: PT011 whichever it is, it must be the same twice
            case(tmp_path / "x")
        raised.append((type(caught.value), str(caught.value)))
    assert raised[0] == raised[1]
    failed = "load" if case is no_weights else None
    assert not [line for line in run.lines() if line["operation"] == failed or failed is None]


def test_a_wrapped_function_keeps_its_signature_and_docstring() -> None:
    for function, module in (
        (torch.save, torch.serialization),
        (torch.load, torch.serialization),
        (dcp.save, state_dict_saver),
        (dcp.async_save, state_dict_saver),
        (dcp.load, state_dict_loader),
        (safetensors.torch.save_file, safetensors.torch),
    ):
        watch(lambda: None)
        now = getattr(module, function.__name__)
        assert getattr(sys.modules[module.__name__], function.__name__) is now
        assert pickle.loads(pickle.dumps(now)) is now
        original = inspect.unwrap(now)
        assert original.__code__.co_filename == inspect.getsourcefile(module)
        assert (now.__doc__, now.__module__, now.__qualname__) == (
            original.__doc__,
            original.__module__,
            original.__qualname__,
        )
        assert inspect.signature(now) == inspect.signature(original)
    assert dcp.save is state_dict_saver.save
    assert torch.save is torch.serialization.save


def test_watching_twice_records_each_save_once(tmp_path: Path, run: Run) -> None:
    before = torch.save
    watch(lambda: run.folder)
    assert torch.save is before
    save(tmp_path / "x.pt")
    assert [line["stage"] for line in run.lines()].count("total") == 1


def test_files_saved_inside_a_checkpoint_get_no_lines_of_their_own(tmp_path: Path, run: Run) -> None:
    class AlsoByTorch(FileSystemWriter):
        def write_data(self, *args: Any, **kwargs: Any) -> Any:
            torch.save(tensors(), tmp_path / "also.pt")
            return super().write_data(*args, **kwargs)

    dcp.save(tensors(), storage_writer=AlsoByTorch(tmp_path / "c", thread_count=2))
    assert {line["call"] for line in run.lines()} == {"dcp.save"}
    loaded = tensors()
    with record_load(run.folder or "", tmp_path / "c", checkpoint="by hand", step=4, rank=3):
        dcp.load(loaded, checkpoint_id=tmp_path / "c")
    loads = [line for line in run.lines() if line["operation"] == "load"]
    assert {line["checkpoint"] for line in loads} == {"by hand"}
    assert [line["stage"] for line in loads].count("total") == 1


def test_durability_is_null_without_a_file_descriptor(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = []
    monkeypatch.setattr(os, "sync", lambda: syncs.append(1))
    dcp.save(tensors(), checkpoint_id=f"memory://{tmp_path.name}/c")
    stages = run.stages()
    assert stages["fsync"]["files"] == len(syncs) == 2
    assert stages["total"]["durable"] is None
    assert stages["write"]["bytes"] >= 2 * 4 * MANY**2


def test_repeated_checkpoint_names_are_numbered(tmp_path: Path, run: Run) -> None:
    for _ in range(2):
        save(tmp_path / "x.pt")
    names = [line["checkpoint"] for line in run.lines() if line["stage"] == "total"]
    assert names == [f"{tmp_path.name}/x.pt", f"{tmp_path.name}/x.pt#2"]


def test_a_failed_recording_is_reported_once_and_the_save_continues(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Path | None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr("tracekit.capture.checkpoints.recording._reported", set())
    watch(fail)
    for _ in range(2):
        save(tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt")["b"].mean() == 1
        dcp.save(tensors(2), checkpoint_id=tmp_path / str(time.time_ns()), no_dist=True)
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "tracekit" in line] == [
        "tracekit: a checkpoint was not recorded: RuntimeError: no such luck; training continues"
    ]


NOTHING_MORE = """
import sys
import torch
from tracekit.capture.checkpoints import auto_recording
quiet = (lambda: None), (lambda: 0), (lambda: None)
before = set(sys.modules)
auto_recording.watch_torch_files(*quiet)
auto_recording.watch_distributed_checkpoints(*quiet)
auto_recording.watch_safetensors(*quiet)
assert set(sys.modules) == before
assert "torch.distributed.checkpoint" not in before and "safetensors" not in before
from torch import save
import torch.distributed.checkpoint as dcp
assert save is torch.serialization.save and hasattr(save, auto_recording._MARK)
assert not hasattr(dcp.save, auto_recording._MARK)
auto_recording.watch_distributed_checkpoints(*quiet)
assert hasattr(dcp.save, auto_recording._MARK) and hasattr(dcp.state_dict_loader.load, auto_recording._MARK)
"""


def test_watching_imports_no_module_that_the_script_has_not_imported() -> None:
    subprocess.run([sys.executable, "-c", NOTHING_MORE], check=True)
