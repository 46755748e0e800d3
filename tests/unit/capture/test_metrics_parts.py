"""A metrics log of several files: what the recorder writes, after a resume and a kill too, and all who read it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pytest

from tests.support import kineto_files
from tracekit.capture.metrics import MetricsLog
from tracekit.cli.watch.rank_log import LogTail
from tracekit.conventions import log_parts
from tracekit.ingest import loader
from tracekit.report.export import step_metrics

NAME = "rank00000.metrics.jsonl"


def write(log: MetricsLog, steps: Sequence[int]) -> None:
    for step in steps:
        log.add({"step": step, "loss": step / 2})
        log.collect()
        log._write()


def recorded(folder: Path, steps: Sequence[int], *, first_step: int = 0) -> list[str]:
    """Names of the files of a log after these steps, of parts of three lines or more."""
    log = MetricsLog(folder / NAME, first_step=first_step, part_bytes=60)
    write(log, steps)
    log.close()
    return files(folder)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if ".metrics." in path.name)


def steps_of(folder: Path) -> list[int]:
    names = log_parts.files(NAME, lambda name: (folder / name).exists())
    return [json.loads(line)["step"] for name in names for line in (folder / name).read_text().splitlines()]


def test_a_log_becomes_parts_that_have_all_steps_in_order(tmp_path: Path) -> None:
    names = recorded(tmp_path, range(8))
    assert names == [NAME, "rank00000.part001.metrics.jsonl", "rank00000.part002.metrics.jsonl"]
    assert steps_of(tmp_path) == list(range(8))
    assert all((tmp_path / name).stat().st_size >= 60 for name in names[1:])


@pytest.mark.parametrize("first_step", range(1, 10))
def test_a_resumed_training_keeps_the_steps_before_it(tmp_path: Path, first_step: int) -> None:
    recorded(tmp_path, range(8))
    recorded(tmp_path, range(first_step, 12), first_step=first_step)
    assert steps_of(tmp_path) == [*range(min(first_step, 8)), *range(first_step, 12)]


def test_another_training_in_the_folder_replaces_all_parts(tmp_path: Path) -> None:
    recorded(tmp_path, range(20))
    recorded(tmp_path, range(2))
    assert files(tmp_path) == [NAME]
    assert steps_of(tmp_path) == [0, 1]


def test_a_training_resumes_after_a_kill_within_a_line(tmp_path: Path) -> None:
    recorded(tmp_path, range(5))
    (tmp_path / NAME).rename(tmp_path / f"{NAME}.partial")
    with (tmp_path / f"{NAME}.partial").open("a") as log:
        log.write('{"step":5,"lo')
    recorded(tmp_path, range(5, 7), first_step=5)
    assert steps_of(tmp_path) == list(range(7))


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.capture.test_metrics_parts import write
from tracekit.capture.metrics import MetricsLog
write(MetricsLog(Path(sys.argv[1]), part_bytes=60), range(8))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_all_steps_of_a_killed_rank_are_read_and_a_finding_says_so(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / NAME)], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    kineto_files.write(tmp_path / "rank00000.pt.trace.json.gz", kineto_files.trace(0))
    assert files(tmp_path)[0] == f"{NAME}.partial"
    run = loader.load(tmp_path)
    metrics = run.trace(0, 0).metrics.filter(name="loss")
    assert metrics["step"].to_list() == list(range(8))
    assert metrics["value"].to_list() == [step / 2 for step in range(8)]
    (issue,) = run.trace(0, 0).data_quality.filter(kind="growing_log")["message"]
    assert "rank 0" in issue
    assert "step 7" in issue
    exported = step_metrics.samples(tmp_path).filter(pl.col("name") == "loss")
    assert exported["step"].to_list() == list(range(8))


def test_a_stored_trace_is_read_again_after_a_part_is_closed(tmp_path: Path) -> None:
    kineto_files.write(tmp_path / "rank00000.pt.trace.json.gz", kineto_files.trace(0))
    log = MetricsLog(tmp_path / NAME, part_bytes=60)
    for last in (2, 3, 9):
        write(log, range(last - 1, last))
        assert loader.load(tmp_path).trace(0, 0).metrics["step"].max() == last - 1
    log.close()


@pytest.mark.parametrize("first_bytes", [20, 100, 1 << 20])
@pytest.mark.parametrize("every", [1, 2, 7])
def test_a_tail_follows_into_the_next_part(tmp_path: Path, first_bytes: int, every: int) -> None:
    log = MetricsLog(tmp_path / NAME, part_bytes=60)
    tail = LogTail(tmp_path / NAME, first_bytes=first_bytes)
    steps = []
    for step in range(30):
        write(log, [step])
        if step % every == 0:
            steps += followed(tail)
    log.close()
    steps += followed(tail)
    assert steps == list(range(steps[0], 30))
    assert steps[0] == (first_bytes == 20)  # the first read begins within the first line
    assert (tail.starts, tail.is_closed, tail.bad_lines) == (1, True, 0)


def test_a_tail_begins_with_the_end_of_the_log_across_parts(tmp_path: Path) -> None:
    recorded(tmp_path, range(30))
    tail = LogTail(tmp_path / NAME, first_bytes=130)
    steps = followed(tail)
    assert steps == list(range(steps[0], 30))
    assert 4 <= len(steps) <= 6
    assert tail.skipped_beginning


def test_a_tail_starts_again_where_another_training_replaced_the_log(tmp_path: Path) -> None:
    recorded(tmp_path, range(30))
    tail = LogTail(tmp_path / NAME, first_bytes=1 << 20)
    followed(tail)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    recorded(tmp_path, range(100, 105))
    assert followed(tail) == list(range(100, 105))
    assert tail.starts == 2


def followed(tail: LogTail) -> list[int]:
    steps = [row["step"] for row in tail.read()]
    while tail.is_behind:
        steps += [row["step"] for row in tail.read()]
    return steps
