"""Ranks that hang for real are recorded and diagnosed: by the watch, and by `tracekit record --hang-timeout`."""

import json
import sys
from pathlib import Path

import pytest

from tests.integration import recorded
from tests.support import hung_jobs
from tests.support.selection import others_in_accuracy
from tracekit.analysis.hangs.causes import Kind
from tracekit.analysis.hangs.diagnosis import diagnose
from tracekit.ingest.hang_dumps import folder

TRAINING = """
import datetime, sys, time, torch
from torch import distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
for step in range(5):
    dist.all_reduce(torch.ones(4))
if sys.argv[1] == "hang" and dist.get_rank() == 1:
    time.sleep(300)  # in one call: whenever a busy machine looks, the rank sleeps
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("case", "kind", "rank"),
    others_in_accuracy(
        [("killed", Kind.DIED, 1), ("dead_disk", Kind.HOST, 0), ("opposite_barriers", Kind.DEADLOCK, 3)],
        [("killed", Kind.DIED, 1), ("dead_disk", Kind.HOST, 0)],
    ),
)
def test_a_real_hang_is_dumped_and_diagnosed(case: str, kind: Kind, rank: int, tmp_path: Path) -> None:
    found = diagnose(folder.read(hung_jobs.run(case, tmp_path / "run")))
    assert (found.kind, [each.rank for each in found.culprits]) == (kind, [rank])


@pytest.mark.parametrize("how", ["hang", "end"])
def test_record_with_a_hang_timeout_reports_a_hang_and_leaves_nothing_without_one(how: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    training = [*recorded.TORCHRUN, "2", "train.py", how] if how == "hang" else [sys.executable, "train.py", how]
    command = [
        sys.executable,
        "-m",
        "tracekit",
        "record",
        "--hang-timeout",
        "6" if how == "hang" else "100",  # so that a start on a busy machine is no hang
        "--steps",
        "none",
        "--out",
        "run",
        "--",
    ]
    done = recorded.do([*command, *training], tmp_path, **(recorded.of_rank(0, 1) if how == "end" else {}))
    if how == "end":
        assert done.code == 0, done.err
        assert not (tmp_path / "run").exists()
        return
    assert done.code != 0
    assert "for rank 1, which sleeps in <module> (train.py:" in " ".join(done.err.split()), done.err
    dump = json.loads((tmp_path / "run" / "hang" / "rank00001.hang.json").read_text())
    assert dump["pg_config"]["0"]["ranks"] == "[0, 1]"
