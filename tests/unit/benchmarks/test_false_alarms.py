"""Pairs of recordings of one training: pieces by steps, replays with other steps' durations, and the tables' marks."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks import false_alarms
from benchmarks.documents import put_between
from tests.support import recorded_jobs
from tests.support.wording import Wording

TORCHREC = Path(__file__).parents[4] / "shared" / "traces" / "torchrec_v100_4ranks"


def event(category: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    arguments = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": arguments}


def test_a_piece_holds_the_device_work_that_its_steps_launched() -> None:
    # time     0         10        20        30
    # host     [step 4   ][step 5   ]
    # launch      3           13
    # kernel         8----------18  20--25
    document = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
            event("user_annotation", "ProfilerStep#4", 0, 10),
            event("user_annotation", "ProfilerStep#5", 10, 10),
            event("cuda_runtime", "cudaLaunchKernel", 3, 1, 7),
            event("cuda_runtime", "cudaLaunchKernel", 13, 1, 8),
            event("kernel", "first", 8, 10, 7),
            event("kernel", "second", 20, 5, 8),
            {"ph": "s", "cat": "ac2g", "id": 8, "ts": 13},
        ]
    }
    names = [each["name"] for each in false_alarms.piece(document, [5])["traceEvents"] if "name" in each]
    assert names == ["process_name", "ProfilerStep#5", "cudaLaunchKernel", "second"]
    assert [len(false_alarms.piece(document, steps)["traceEvents"]) for steps in ([4], [4, 5])] == [4, 8]


def test_a_replay_takes_about_as_long_and_another_seed_differs() -> None:
    if not TORCHREC.is_dir():
        pytest.skip("the shared traces are not installed")
    lost_us = {}
    for seed in (1, 1, 2):
        job = recorded_jobs.job(TORCHREC)
        false_alarms.resample(job, random.Random(seed))
        job.replay()
        length_us = max(rank.end for rank in job.ranks) - min(rank.start for rank in job.ranks)
        assert abs(job.lost_us) < 0.05 * length_us
        assert lost_us.setdefault(seed, job.lost_us) == job.lost_us
    assert lost_us[1] != lost_us[2]


def test_a_table_is_put_between_its_marks_only(tmp_path: Path, wording: Wording) -> None:
    path = tmp_path / "page.md"
    path.write_text("a\n<!-- measured by b.x -->\nold\n<!-- end -->\nc\n", encoding="utf-8")
    put_between(path, "b.x", ["new", "rows"])
    assert path.read_text(encoding="utf-8") == "a\n<!-- measured by b.x -->\nnew\nrows\n<!-- end -->\nc\n"
    with wording.raises(ValueError):
        put_between(path, "b.y", [])
