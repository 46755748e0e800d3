"""Start ranks as torchrun does, without its two seconds: ``python launch.py RANKS SCRIPT ARGUMENT…``.

If a rank fails, the others are ended and the exit code is 1.
"""

import os
import subprocess
import sys
import time

from tests.support import ports


def main() -> None:
    ranks, *command = sys.argv[1:]
    port = str(ports.free_port())
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    running = [
        subprocess.Popen(
            [sys.executable, *command], env={**os.environ, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        )
        for rank in range(int(ranks))
    ]
    while any(rank.poll() is None for rank in running) and not any(rank.poll() for rank in running):
        time.sleep(0.05)
    if has_failed := any(rank.poll() for rank in running):
        for rank in running:
            rank.terminate()
    for rank in running:
        rank.wait()
    sys.exit(int(has_failed))


if __name__ == "__main__":
    main()
