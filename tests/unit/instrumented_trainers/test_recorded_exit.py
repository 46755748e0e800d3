"""What the launcher adds to the attempts log when its ranks have ended."""

from pathlib import Path

import pytest

from instrumented_trainers import launch
from instrumented_trainers.config import TrainingConfig
from tracekit import conventions
from tracekit.ingest import job_attempts


def test_an_exit_is_added_to_a_run_and_leaves_an_empty_folder_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(conventions.LAUNCHED_VARIABLE, "1000")
    end = launch._RanksEnd(1, "rank 1 was killed by SIGKILL\nmore", 2000)
    config = TrainingConfig(strategy="ddp", out=tmp_path)
    launch._record_exit(config, end)
    assert not list(tmp_path.iterdir())
    (tmp_path / "run.json").write_text("{}")
    launch._record_exit(config, end)
    (attempt,), _ = job_attempts.read([tmp_path])
    assert (attempt.exit_code, attempt.exit_reason) == (1, "rank 1 was killed by SIGKILL")
    assert (attempt.failed_ns, attempt.launched_ns, attempt.has_begun) == (2000, 1000, False)
