"""``tracekit watch`` as a process: during a training in another process, on a terminal, in a pipe."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.support import sample_logs
from tracekit.cli.commands import watch as watch_command
from tracekit.errors import InputError

ROOT = Path(__file__).parents[2]
SAMPLE = ROOT / "sample_traces" / "demo-fsdp2"
TIMEOUT_S = 300

# Writes the log of a rank as the recorder does: under a partial name, in pieces, renamed at the end. In the middle it
# waits until the test has read that much.
TRAINING = """
import json, os, sys, time
folder, steps = sys.argv[1], int(sys.argv[2])
os.makedirs(folder, exist_ok=True)
json.dump({"world_size": 1, "strategy": "ddp"}, open(folder + "/run.json", "w"))
log = folder + "/rank00000.metrics.jsonl"
with open(log + ".partial", "w") as file:
    for step in range(steps):
        ns = 400_000_000 if step == 50 else 100_000_000 + step % 7 * 1_000_000
        line = json.dumps({"step": step, "step_time_ns": ns, "loss": 5 - step / 50}) + "\\n"
        for part in (line[:20], line[20:]):
            file.write(part)
            file.flush()
            time.sleep(0.002)
        while step == steps // 2 and not os.path.exists(folder + "/go"):
            time.sleep(0.01)
os.rename(log + ".partial", log)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}


def start(*arguments: object, **options: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "tracekit", "watch", *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def watch(*arguments: object) -> subprocess.CompletedProcess[str]:
    process = start(*arguments)
    out, err = process.communicate(timeout=TIMEOUT_S)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def train(folder: Path, steps: int) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, "-c", TRAINING, str(folder), str(steps)])


class Terminal:
    """A process on a pseudo-terminal of 100 by 30, and what it wrote there."""

    def __init__(self, *arguments: object) -> None:
        self._own, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        command = [sys.executable, "-m", "tracekit", "watch", *map(str, arguments)]
        self.process = subprocess.Popen(command, env=environment(), stdout=its, stderr=its, stdin=its)
        os.close(its)
        self.written = ""

    def read_until(self, words: str) -> None:
        end_s = time.monotonic() + TIMEOUT_S
        while words not in self.written:
            assert time.monotonic() < end_s, self.written
            if not self._read():
                raise AssertionError(f"ended without {words!r}: {self.written}")

    def leave(self) -> int:
        while self._read():
            pass
        code = self.process.wait(timeout=TIMEOUT_S)
        os.close(self._own)
        return code

    def _read(self) -> bool:
        if not select.select([self._own], [], [], 1)[0]:
            return self.process.poll() is None
        try:
            data = os.read(self._own, 1 << 16)
        except OSError:  # the other end is closed
            return False
        self.written += data.decode()
        return bool(data)


def test_a_growing_training_is_followed_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "today"
    watching = start(run, "--wait", "--interval", "0.2", "--format", "json")
    training = train(run, 120)
    assert watching.stdout is not None
    rows = [json.loads(watching.stdout.readline())]
    while rows[-1].get("steps_done") != 61:
        rows.append(json.loads(watching.stdout.readline()))
    (run / "go").touch()
    out, err = watching.communicate(timeout=TIMEOUT_S)
    assert (watching.returncode, err, training.wait(timeout=TIMEOUT_S)) == (0, "", 0)
    rows += [json.loads(line) for line in out.splitlines()]
    states = [each for each in rows if each["kind"] == "state"]
    done = [each["steps_done"] for each in states]
    assert done == sorted(done)
    assert (done[-1], states[-1]["is_over"], states[-1]["bad_lines"]) == (120, True, 0)
    assert [(each["step"], each["symptom"]) for each in rows if each["kind"] == "outlier"] == [(50, "slow")]


def test_on_a_terminal_the_display_updates_in_place_and_the_last_one_remains(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path / "today", "--wait", "--interval", "0.1")
    terminal.read_until("waiting for a training that records into")
    training = train(tmp_path / "today", 120)
    terminal.read_until("61 steps done")
    (tmp_path / "today" / "go").touch()
    code = terminal.leave()
    assert (code, training.wait(timeout=TIMEOUT_S)) == (0, 0)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.written.rpartition("\x1b[2K")[2])
    for words in ("today", "ended", "120 steps done", "loss", "step 50", "400 ms"):
        assert words in last
    assert "\x1b[1A" in terminal.written  # frames overwrite each other
    assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l")  # the cursor is back


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_exits_quietly_and_restores_the_cursor(tmp_path: Path, number: signal.Signals, code: int) -> None:
    sample_logs.write(tmp_path, sample_logs.steady(30), live=True)
    terminal = Terminal(tmp_path)
    terminal.read_until("30 steps done")
    terminal.process.send_signal(number)
    assert terminal.leave() == code
    assert "Traceback" not in terminal.written
    assert terminal.written.rindex("\x1b[?25h") > terminal.written.rindex("\x1b[?25l")


def test_in_a_pipe_an_ended_run_is_its_outlier_steps_and_one_state_line() -> None:
    done = watch(SAMPLE)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["outlier", "outlier", lines[2].partition(":")[0]]
    assert lines[2].startswith("step 47 · ")
    assert lines[2].endswith("ended")


def test_once_shows_the_state_and_exits_while_the_training_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample_logs.write(tmp_path, sample_logs.steady(30), live=True)
    watch_command.watch(tmp_path, once=True)
    assert "30 steps done" in capsys.readouterr().out
    watch_command.watch(tmp_path, once=True, watch_format=watch_command.WatchFormat.JSON)
    assert json.loads(capsys.readouterr().out)["steps_done"] == 30


def test_the_guide_shows_the_output_for_the_sample(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    guide = (ROOT / "docs" / "watch.md").read_text(encoding="utf-8")
    watch_command.watch(SAMPLE, once=True)
    watch_command.watch(SAMPLE)
    for line in capsys.readouterr().out.splitlines():
        assert f"    {line}".rstrip() in guide


def test_a_run_that_is_not_there_exits_with_2_and_one_line(tmp_path: Path) -> None:
    done = watch(tmp_path / "absent")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "there is no such folder; --wait waits" in done.stderr


def test_an_error_about_the_folder_names_what_to_do(tmp_path: Path) -> None:
    sample_logs.write(tmp_path / "runs" / "today", sample_logs.steady(3))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    for path, words in (
        (tmp_path / "runs", f"is a folder of runs; name one of them, such as {tmp_path / 'runs' / 'today'}"),
        (tmp_path / "other", "no metrics log in it"),
        (tmp_path / "other" / "notes", "is not a folder"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            watch_command.watch(path)
