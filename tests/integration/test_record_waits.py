"""No rank waits for another's recording: collectives go on while one rank's trace is written, or not at all."""

import functools
import os
import threading
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests import ranks
from tracekit.capture import Recorder

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


def test_a_trace_that_hangs_while_it_is_written_times_out_no_collective(tmp_path: Path) -> None:
    assert ranks.run(2, functools.partial(train, tmp_path / "run")) == [STEPS, STEPS]
    assert (tmp_path / "run" / "run.json").exists()
