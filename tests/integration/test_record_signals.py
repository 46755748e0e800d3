"""Each signal to a recorded training, or to the process group that it is in, reaches it exactly once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.integration import recorded
from tests.integration.recorded import command

COUNTING = """
import signal, time
from pathlib import Path
signals = []
signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
while signal.SIGTERM not in signals:
    Path("signals").write_text(" ".join(signal.Signals(number).name for number in signals) + " end")
    time.sleep(0.01)
print(*(signal.Signals(number).name for number in signals))
"""


def test_a_signal_reaches_the_training_once(tmp_path: Path) -> None:
    words = command("--quiet", "--out", "run", "--", sys.executable, "-c", COUNTING)
    launcher = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def wait_for(count: int) -> None:
        recorded.wait_until(lambda: len(_words(tmp_path / "signals")) == count + 1)

    wait_for(0)
    for count in range(1, 6):
        os.killpg(launcher.pid, signal.SIGINT)
        wait_for(count)
    launcher.send_signal(signal.SIGINT)
    wait_for(6)
    launcher.send_signal(signal.SIGTERM)
    out, _ = launcher.communicate()
    assert out.split() == ["SIGINT"] * 6 + ["SIGTERM"]
    assert launcher.returncode == 0


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
