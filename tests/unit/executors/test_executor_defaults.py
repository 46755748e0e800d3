"""What measures a run by default: processes for many traces, and one Polars thread for small ones."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tracekit import executors

_PRINT_LIMIT = """
import os, sys
from tracekit import executors
assert "polars" not in sys.modules
executors.limit_polars_threads(sys.argv[1:])
print(os.environ.get(executors.POLARS_THREADS, "unset"))
"""


def _run_folder(folder: Path, files: int, size_bytes: int = 10) -> str:
    folder.mkdir(parents=True)
    for number in range(files):
        with (folder / f"rank{number:05}.pt.trace.json.gz").open("wb") as file:
            file.truncate(size_bytes)  # sparse: takes no space
    return str(folder)


def _limit(*paths: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != executors.POLARS_THREADS}
    command = [sys.executable, "-c", _PRINT_LIMIT, *paths]
    return subprocess.run(
        command, env=inherited | environment, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def four_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "processors", lambda: 4)


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize(("files", "expected"), [(1, None), (31, None), (32, 4)])
def test_many_traces_are_measured_by_processes(tmp_path: Path, files: int, expected: int | None) -> None:
    assert executors.process_count([_run_folder(tmp_path / "run", files)]) == expected


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize(
    ("files", "size_bytes", "expected"),
    [
        (8, 7 << 20, None),
        (8, 8 << 20, 4),
        (2, 32 << 20, 2),
        (8, 30 << 20, 2),
        (8, 33 << 20, None),
        (1, 64 << 20, None),
    ],
)
def test_few_large_traces_are_measured_by_as_many_processes_as_have_room(
    tmp_path: Path, files: int, size_bytes: int, expected: int | None
) -> None:
    assert executors.process_count([_run_folder(tmp_path / "run", files, size_bytes)]) == expected


@pytest.mark.usefixtures("four_processors")
def test_a_trace_that_is_not_compressed_counts_a_tenth(tmp_path: Path) -> None:
    for rank in range(8):
        with (tmp_path / f"rank{rank}.json").open("wb") as file:
            file.truncate(79 << 20)
    assert executors.process_count([str(tmp_path)]) is None
    with (tmp_path / "rank8.json").open("wb") as file:
        file.truncate(79 << 20)
    assert executors.process_count([str(tmp_path)]) == 4


@pytest.mark.usefixtures("four_processors")
def test_traces_in_a_folder_for_each_node_count(tmp_path: Path) -> None:
    for node in range(4):
        _run_folder(tmp_path / f"node{node}", 8)
    assert executors.process_count([str(tmp_path)]) == 4


@pytest.mark.usefixtures("four_processors")
def test_the_largest_of_several_runs_decides(tmp_path: Path) -> None:
    small, large = _run_folder(tmp_path / "small", 2), _run_folder(tmp_path / "large", 40)
    assert executors.process_count([small, large]) == 4


@pytest.mark.usefixtures("four_processors")
@pytest.mark.parametrize("path", ["s3://bucket/run", "no such folder", "nul\0byte", ""])
def test_what_cannot_be_listed_is_measured_by_threads(path: str) -> None:
    assert executors.process_count([path]) is None


def test_one_processor_starts_no_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "processors", lambda: 1)
    assert executors.process_count([_run_folder(tmp_path / "run", 64)]) is None


def test_many_processors_start_a_bounded_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "processors", lambda: 128)
    assert executors.process_count([_run_folder(tmp_path / "run", 64)]) == executors.MAX_PROCESSES


def test_polars_uses_one_thread_only_where_all_traces_are_small(tmp_path: Path) -> None:
    small, large = _run_folder(tmp_path / "small", 3), _run_folder(tmp_path / "large", 3, 40 << 20)
    assert _limit(small) == "1"
    assert _limit(large) == "unset"
    assert _limit(small, large) == "unset"
    assert _limit("s3://bucket/run") == "unset"


def test_a_number_of_polars_threads_that_the_user_set_stays(tmp_path: Path) -> None:
    assert _limit(_run_folder(tmp_path / "run", 3), **{executors.POLARS_THREADS: "3"}) == "3"
