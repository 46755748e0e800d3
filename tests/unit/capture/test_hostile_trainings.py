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
weight = torch.ones(4, requires_grad=True)
with Recorder(sys.argv[1], steps="2:4", warmup=1) as recorder:
    for step in range(6):
        weight.sum().backward()
        if str(step) in sys.argv[3:]:
            if sys.argv[2] == "stderr":
                sys.stderr.close()
            elif os.fork() == 0:
                recorder.step()
                recorder.__exit__(None, None, None)
                os._exit(0)
            else:
                os.wait()
        recorder.step()
print("trained")
"""


# Before, in and after the recorded window: steps 2 and 3.
@pytest.mark.parametrize(("what", "steps"), [("stderr", "0"), ("stderr", "2"), ("fork", "025")])
def test_a_training_that_closes_stderr_or_forks_is_recorded(tmp_path, what, steps):
    words = [sys.executable, "-c", TRAINING, str(tmp_path / "run"), what, *steps]
    done = subprocess.run(words, env=cli_runner.environment(), capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    lines = (tmp_path / "run" / "rank00000.metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(6))
    assert (tmp_path / "run" / "rank00000.pt.trace.json.gz").exists()


@pytest.mark.parametrize("stream", [None, object()])
def test_a_notice_without_a_stderr_is_not_printed(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    notices.notify("a line")
    notices.flush()
