"""What a training does to its own process while it is recorded: it closes stderr, or forks."""

import json
import subprocess
import sys

import pytest

from tests.support import cli_runner
from tracekit.capture import notices

TRAINING = """
import os, sys, torch
from tracekit.capture import Recorder
weight, stderr = torch.ones(4, requires_grad=True), os.dup(2)
def train(folder, what, steps):
    with Recorder(folder, steps="2:4", warmup=1) as recorder:
        for step in range(6):
            weight.sum().backward()
            if str(step) in steps:
                if what == "stderr":
                    sys.stderr.close()
                elif os.fork() == 0:
                    recorder.step()
                    recorder.__exit__(None, None, None)
                    os._exit(0)
                else:
                    os.wait()
            recorder.step()
for training in sys.argv[2:]:
    train(os.path.join(sys.argv[1], training), *training.split("-"))
    os.dup2(stderr, 2)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    print("trained")
"""
# What each does, and in which steps: before, in and after the recorded window, which has steps 2 and 3.
TRAININGS = ("fork-025", "stderr-0", "stderr-2")


def test_a_training_that_closes_stderr_or_forks_is_recorded(tmp_path):
    words = [sys.executable, "-c", TRAINING, str(tmp_path), *TRAININGS]
    done = subprocess.run(words, env=cli_runner.environment(), capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "trained\n" * len(TRAININGS)), done.stderr
    for run in TRAININGS:
        lines = (tmp_path / run / "rank00000.metrics.jsonl").read_text(encoding="utf-8").splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(6)), run
        assert (tmp_path / run / "rank00000.pt.trace.json.gz").exists(), run


@pytest.mark.parametrize("stream", [None, object()])
def test_a_notice_without_a_stderr_is_not_printed(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    notices.notify("a line")
    notices.flush()
