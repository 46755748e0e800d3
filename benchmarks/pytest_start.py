"""``python -m benchmarks.pytest_start``: what the pytest plugin costs where no test uses it.

Processor time of `pytest --collect-only` on 200 tests, with the plugin and without, in turns. Prints Markdown.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TESTS = 200
WITHOUT = ("-p", "no:tracekit")
WITH = ("-p", "tracekit.testing.plugin")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pytest_start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="times to measure each (default: 15)")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_many.py").write_text("".join(f"def test_{n}(): pass\n" for n in range(TESTS)))
        pairs = [(_cpu_s(folder, *WITHOUT), _cpu_s(folder, *WITHOUT, *WITH)) for _ in range(rounds)]
    bare, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    more = statistics.median(b - a for a, b in pairs)
    sys.stdout.write("| pytest --collect-only | CPU |\n|---|---|\n")
    sys.stdout.write(f"| without the plugin | {bare * 1e3:.0f} ms |\n| with it | {ours * 1e3:.0f} ms |\n")
    sys.stdout.write(f"| median difference of {rounds} pairs | {more * 1e3:+.0f} ms |\n")


def _cpu_s(folder: str, *words: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *words, folder]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
