"""Ranks and their recordings: collectives go on while a trace is written, and all find the same run."""

import functools
import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import process_group
from tracekit.capture import Recorder, auto_recorder
from tracekit.capture.launch_settings import Settings

TIMEOUT_S = 30.0
STEPS = 12


def train(folder: Path) -> int:
    """Train with collectives that give up some time; rank 1 alone records, onto a disk that hangs until the end."""
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
    if dist.get_rank() == 1:
        stuck = folder / "rank00001.pt.trace.json.gz.partial"
        folder.mkdir()
        os.mkfifo(stuck)
        with Recorder(folder, steps="2:4", leads=True) as recorder:
            _steps(group, recorder)
            threading.Thread(target=stuck.read_bytes).start()
        return recorder.steps_done
    _steps(group, None)
    return STEPS


def _steps(group: dist.ProcessGroup, recorder: Recorder | None) -> None:
    for _ in range(STEPS):
        value = torch.ones(1000)
        dist.all_reduce(value, group=group)
        assert value[0] == dist.get_world_size()
        if recorder is not None:
            recorder.step()


def names() -> list[str]:
    """Return the job name on this rank: from two calls, and from one after a restart by torchrun."""
    found = []
    for attempt in ("0", "0", "1"):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = attempt
        found.append(auto_recorder.training_name(Settings(out="", launch="launch", notes="", scratch="")))
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("recorded")
    cases = {"train": functools.partial(train, folder / "run"), "name": names, "name again": names}
    done = {name: outcome.results() for name, outcome in process_group.run_cases(2, cases).items()}
    assert (folder / "run" / "run.json").exists()
    return done


def test_ranks_agree_on_the_training_that_they_are_of(outcomes: dict[str, list[Any]]) -> None:
    first, second = outcomes["name"]
    assert first == second
    assert first[0] == first[1] != first[2]
    assert set(first).isdisjoint(outcomes["name again"][0])  # another process group is another training


def test_a_trace_that_hangs_while_it_is_written_times_out_no_collective(outcomes: dict[str, list[Any]]) -> None:
    assert outcomes["train"] == [STEPS, STEPS]
