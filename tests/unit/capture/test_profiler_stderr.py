import os
import subprocess
import sys
import time

import pytest
import torch

from tracekit.capture.profiler_session import without_profiler_noise


def test_only_the_profilers_own_lines_are_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    with without_profiler_noise():
        os.write(2, b"before\nUSDT:2026 profiler_start\nafter\nlast, without an end of line")
    os.write(2, b" and outside\n")
    assert capfd.readouterr().err == "before\nafter\nlast, without an end of line and outside\n"


def test_a_child_process_started_meanwhile_keeps_its_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with without_profiler_noise():
        script = "import sys; sys.stdin.read(); sys.stderr.write('from the child\\n')"
        child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE)
    child.communicate()
    assert child.returncode == 0
    seen, deadline = capfd.readouterr().err, time.monotonic() + 120
    while "from the child" not in seen and time.monotonic() < deadline:
        seen += capfd.readouterr().err
    assert seen == "from the child\n"


def test_kinetos_markers_do_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    def profile_once() -> None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.ones(1).add(1)

    profile_once()
    if "USDT:" not in capfd.readouterr().err:
        pytest.skip("this torch prints no markers")
    with without_profiler_noise():
        profile_once()
    assert "USDT:" not in capfd.readouterr().err
