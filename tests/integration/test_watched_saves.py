"""Scripts' own saves and loads on 2 real ranks, recorded without their knowing: the log, the files, the exceptions."""

import functools
import hashlib
import json
import multiprocessing
import os
import resource
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tests.support import process_group
from tracekit import conventions
from tracekit.capture.checkpoints import auto_recording

ROWS = 256
Lines = list[dict[str, Any]]
UNSHARED = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=False
)


class Holder:
    """A Stateful: what is loaded for it, it takes by itself."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((ROWS, ROWS), value)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def state() -> dict[str, Any]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    return {f"rank{rank}.{name}": torch.randn(ROWS, ROWS, generator=generator) for name in "abcd"} | {"step": 7}


def empty() -> dict[str, Any]:
    return {key: torch.zeros_like(value) if torch.is_tensor(value) else 0 for key, value in state().items()}


def sync(path: Path) -> None:
    dcp.save(state(), checkpoint_id=path)


def sync_by_old_arguments(path: Path) -> None:
    dcp.state_dict_saver.save(
        state(), storage_writer=FileSystemWriter(path, thread_count=2), planner=DefaultSavePlanner()
    )


def load(path: Path) -> None:
    loaded = empty()
    dcp.load(loaded, checkpoint_id=path.with_name("sync"))
    for key, value in state().items():
        assert torch.equal(loaded[key], value) if torch.is_tensor(value) else loaded[key] == value


def load_by_reader(path: Path) -> None:
    saved = Holder(1.0)
    dcp.save({"tensor": saved}, checkpoint_id=path)
    other = Holder(0.0)
    dcp.load({"tensor": other}, storage_reader=FileSystemReader(path), planner=DefaultLoadPlanner())
    assert torch.equal(saved.tensor, other.tensor)


def train_while(future: Any) -> None:
    # Training goes on, so the thread that saves does not find it waiting.
    while not future.done():
        torch.ones(64, 64) @ torch.ones(64, 64)
        time.sleep(0.001)
    future.result()


def by_thread(path: Path) -> None:
    train_while(dcp.async_save(state(), checkpoint_id=path))


def by_thread_and_stager(path: Path) -> None:
    stager = DefaultStager(UNSHARED)
    response = dcp.async_save(state(), storage_writer=FileSystemWriter(path), async_stager=stager)
    train_while(response.upload_completion)
    response.staging_completion.result()
    stager.close()


def by_process(path: Path) -> None:
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # to have a process itself
    for name in (path, path.with_name(path.name + " again")):
        train_while(dcp.async_save(state(), checkpoint_id=name, async_checkpointer_type=AsyncCheckpointerType.PROCESS))


def in_own_thread(path: Path, *, waiting: bool) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            dcp.save(state(), checkpoint_id=path)
        except BaseException as error:  # noqa: BLE001 raised again below
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while not waiting and thread.is_alive():
        time.sleep(0.001)
    thread.join()
    if failures:
        raise failures[0]


def to_a_full_disk(path: Path) -> None:
    with files_no_larger_than(1 << 16):
        dcp.save(state(), checkpoint_id=path)


def to_a_full_disk_by_thread(path: Path) -> None:
    with files_no_larger_than(1 << 16):
        dcp.async_save(state(), checkpoint_id=path).result()


def without_pickling(path: Path) -> None:
    dcp.save({**state(), "lock": threading.Lock()}, checkpoint_id=path)


def without_a_path(path: Path) -> None:
    dcp.save(state())


def from_nowhere(path: Path) -> None:
    dcp.load(empty(), checkpoint_id=path)


@contextmanager
def files_no_larger_than(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


GOOD: dict[str, Callable[[Path], None]] = {
    "sync": sync,
    "sync by old arguments": sync_by_old_arguments,
    "load": load,
    "load by reader": load_by_reader,
    "by thread": by_thread,
    "by thread and stager": by_thread_and_stager,
    "by process": by_process,
    "own thread": functools.partial(in_own_thread, waiting=False),
    "own thread waited for": functools.partial(in_own_thread, waiting=True),
}
SAVES_IN_BACKGROUND = {"by thread": 1, "by thread and stager": 1, "by process": 2}
BAD: dict[str, Callable[[Path], None]] = {
    "full disk": to_a_full_disk,
    "full disk by thread": to_a_full_disk_by_thread,
    "unpicklable": without_pickling,
    "no path": without_a_path,
    "nowhere": from_nowhere,
}


def run(case: Callable[[Path], None], folder: Path, name: str, *, recorded: bool) -> dict[str, Any]:
    """Run a case; return what it raised, what it logged, and the hashes of the files it left."""
    log = folder / "logs" / name / ("with" if recorded else "without")
    rank = dist.get_rank()
    watch = (lambda: log if recorded else None), (lambda: rank), (lambda: 3)
    auto_recording.watch_torch_files(*watch)
    auto_recording.watch_distributed_checkpoints(*watch)
    fsync = os.fsync
    path = folder / ("with" if recorded else "without") / name
    path.parent.mkdir(exist_ok=True)
    raised = ""
    try:
        case(path)
    except BaseException as error:  # noqa: BLE001 whatever it is, it must be the same twice
        raised = words(error).replace(str(path), "PATH")
    dist.barrier()
    assert os.fsync is fsync
    lines = log / conventions.rank_file(rank, conventions.CHECKPOINT_LOG_SUFFIX)
    # A future wakes its waiters before it runs its callbacks.
    deadline = time.monotonic() + 300
    while recorded and lines.exists() and lines.read_text().count('"complete"') < SAVES_IN_BACKGROUND.get(name, 0):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    shards = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in path.glob(f"__{rank}_*")}
    logged = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    return {"raised": raised, "lines": logged, "shards": shards, "sizes": sizes(path)}


def words(error: BaseException) -> str:
    """Return the text of an exception without its source locations, which include ours."""
    failures = getattr(error, "failures", None)
    parts = (
        [f"{rank}: {type(each).__name__}: {each}" for rank, (each, _) in sorted(failures.items())] if failures else []
    )
    return "\n".join(parts or traceback.format_exception_only(error))


def sizes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*")) if path.is_dir() else 0


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict[str, Any]]]]:
    folder = Path(tempfile.mkdtemp(dir=tmp_path_factory.mktemp("saves")))
    cases = {
        f"{name} {recorded}": functools.partial(run, case, folder, name, recorded=recorded)
        for name, case in {**GOOD, **BAD}.items()
        for recorded in (True, False)
    }
    found = process_group.run_cases(2, cases, case_timeout_s=100)
    return {name: [found[f"{name} {recorded}"].results() for recorded in (True, False)] for name in {**GOOD, **BAD}}


def of(lines: Lines, **wanted: Any) -> dict[str, dict[str, Any]]:
    """Return the lines with these values, by stage."""
    picked = [line for line in lines if all(line[key] == value for key, value in wanted.items())]
    stages = [line["stage"] for line in picked]
    assert len(stages) == len(set(stages)), stages
    return {line["stage"]: line for line in picked}


@pytest.mark.parametrize("name", {**GOOD, **BAD})
def test_results_and_exceptions_are_the_same_with_and_without(outcomes: Any, name: str) -> None:
    recorded, alone = outcomes[name]
    for with_us, without in zip(recorded, alone, strict=True):
        assert with_us["raised"] == without["raised"]
        assert bool(with_us["raised"]) == (name in BAD)
        assert with_us["shards"] == without["shards"]
        assert without["lines"] == []


@pytest.mark.parametrize("name", BAD)
def test_what_failed_leaves_no_total(outcomes: Any, name: str) -> None:
    for rank in outcomes[name][0]:
        stages = {line["stage"] for line in rank["lines"] if line["blocking"] is False or "thread" not in name}
        assert not stages & {conventions.COMPLETE, conventions.WRITE}


@pytest.mark.parametrize("name", GOOD)
def test_the_stages_of_each_worker_are_parts_of_its_total(outcomes: Any, name: str) -> None:
    totals = totals_and_parts(outcomes[name][0])
    assert all(totals)
    assert all(parts_ns <= total_ns for of_rank in totals for total_ns, parts_ns in of_rank)


@pytest.mark.accuracy  # a busy machine may pause a worker between two stages
@pytest.mark.parametrize("name", GOOD)
def test_the_stages_of_each_worker_sum_to_its_total(outcomes: Any, name: str) -> None:
    totals = totals_and_parts(outcomes[name][0])
    assert all(parts_ns >= 0.97 * total_ns for of_rank in totals for total_ns, parts_ns in of_rank)


def totals_and_parts(ranks: list[dict[str, Any]]) -> list[list[tuple[int, int]]]:
    """Return by rank, of each worker that has one, the total and the sum of its stages in ns."""
    found: list[list[tuple[int, int]]] = []
    for rank in ranks:
        by_worker: dict[tuple[Any, ...], Lines] = {}
        for line in rank["lines"]:
            key = ("checkpoint", "operation", "process", "thread")
            by_worker.setdefault(tuple(line[k] for k in key), []).append(line)
        found.append([])
        for lines in by_worker.values():
            stages = {line["stage"]: line["dur_ns"] for line in lines}
            stages.pop(conventions.COMPLETE, None)
            if total_ns := stages.pop(conventions.TOTAL, 0):
                found[-1].append((total_ns, sum(stages.values())))
    return found


@pytest.mark.parametrize("name", ["sync", "sync by old arguments"])
def test_a_save_that_names_only_a_folder_is_taken_apart(outcomes: Any, name: str) -> None:
    first, second = (of(rank["lines"], operation="save", blocking=True) for rank in outcomes[name][0])
    assert set(first) == set(conventions.SAVE_STAGES)
    assert set(second) == set(conventions.SAVE_STAGES) - {conventions.FINISH}
    written = [stages[conventions.TOTAL] for stages in (first, second)]
    assert sum(line["bytes"] for line in written) == outcomes[name][0][0]["sizes"]
    assert [line["durable"] for line in written] == [False, True]  # torch syncs its metadata before it is flushed
    for line in (*first.values(), *second.values()):
        assert (line["call"], line["worker"], line["step"]) == ("dcp.save", "main", 3)
        assert line["checkpoint"] == f"with/{name}"
        assert line["path"].endswith(f"/with/{name}")
    assert first["stage"]["bytes"] >= 4 * 4 * ROWS**2
    assert first["write"]["calls"] > first["write"]["files"] > 0


@pytest.mark.parametrize("name", ["load", "load by reader"])
def test_a_load_is_taken_apart(outcomes: Any, name: str) -> None:
    for rank in outcomes[name][0]:
        stages = of(rank["lines"], operation="load")
        assert set(stages) == set(conventions.LOAD_STAGES)
        tensors = 4 if name == "load" else 1
        assert stages["copy"]["bytes"] == tensors * 4 * ROWS**2
        assert stages["read"]["bytes"] >= stages["copy"]["bytes"]
        assert stages["read"]["files"] >= 1
        assert stages["plan"]["files"] == 1
        assert stages["total"]["bytes"] == stages["read"]["bytes"] + stages["plan"]["bytes"]
        assert {line["call"] for line in stages.values()} == {"dcp.load"}


@pytest.mark.parametrize("name", ["by thread", "by thread and stager"])
def test_a_save_by_thread_has_two_clocks(outcomes: Any, name: str) -> None:
    for rank in outcomes[name][0]:
        lines = rank["lines"]
        assert {line["call"] for line in lines} == {"dcp.async_save"}
        assert {line["checkpoint"] for line in lines} == {f"with/{name}"}
        blocked = of(lines, worker="main", blocking=True)
        assert {conventions.PLAN, conventions.STAGE, conventions.TOTAL} <= set(blocked)
        assert blocked["stage"]["bytes"] in (4 * 4 * ROWS**2, None)
        saved = of([line for line in lines if line["stage"] not in ("complete", "stage")], worker="thread")
        assert saved[conventions.TOTAL]["blocking"] is False
        assert saved[conventions.TOTAL]["thread"] != blocked[conventions.TOTAL]["thread"]
        complete = of(lines, stage="complete")["complete"]
        assert complete["start_ns"] == blocked["total"]["start_ns"]
        assert complete["dur_ns"] > blocked["total"]["dur_ns"]
        assert complete["start_ns"] + complete["dur_ns"] >= saved["total"]["start_ns"] + saved["total"]["dur_ns"]
        assert complete["bytes"] == saved["total"]["bytes"]


def test_a_stager_of_its_own_thread_stages_during_training(outcomes: Any) -> None:
    for rank in outcomes["by thread and stager"][0]:
        staged = [line for line in rank["lines"] if line["stage"] == "stage" and line["bytes"] is None]
        assert [line["blocking"] for line in staged] == [True, False]  # handing it over, and the copying


def test_a_save_by_process_is_seen_on_both_sides(outcomes: Any) -> None:
    for rank in outcomes["by process"][0]:
        first = [line for line in rank["lines"] if line["checkpoint"] == "with/by process"]
        again = [line for line in rank["lines"] if line["checkpoint"] == "with/by process again"]
        assert of(first, worker="main", blocking=True)["stage"]["bytes"] == 4 * 4 * ROWS**2
        assert "launch" in of(first, worker="thread")
        assert "launch" not in {line["stage"] for line in again}
        for lines in (first, again):
            there = of([line for line in lines if line["stage"] != "complete"], worker="process")
            assert {"plan", "stage", "serialize", "write", "fsync", "total"} <= set(there)
            assert not any(line["blocking"] for line in there.values())
            main = of(lines, worker="main")
            assert there["total"]["process"] != main["total"]["process"]
            complete = of(lines, stage="complete")["complete"]
            assert complete["worker"] == "process"
            assert complete["durable"] is None
            assert complete["start_ns"] + complete["dur_ns"] >= there["total"]["start_ns"] + there["total"]["dur_ns"]


@pytest.mark.parametrize(("name", "blocking"), [("own thread", False), ("own thread waited for", True)])
def test_a_save_in_a_thread_blocks_only_where_training_waits_for_it(outcomes: Any, name: str, blocking: bool) -> None:
    for rank in outcomes[name][0]:
        assert {(line["blocking"], line["worker"]) for line in rank["lines"]} == {(blocking, "thread")}
