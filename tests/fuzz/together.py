"""Two processes at the same time on one history and on one cache, and whether each did as if it were alone.

    python -m tests.fuzz.together --rounds 100

In each round two `history add` write to one history, which may be new, and two `check` share one cache while a third
process clears it or not. Both runs must be in the history once, and both reports must be that of a single process.
"""

import argparse
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.support import cli_runner, kineto_files
from tracekit.regression.history import store

RUN, OTHER = "run", "other"
_TIMEOUT_S = 300


class Place:
    """A folder with two runs, and the report on one of a process that is alone."""

    def __init__(self, folder: Path, processes: ProcessPoolExecutor) -> None:
        self.folder = folder
        self._processes = processes
        for name, starts_us in ((RUN, 100.0), (OTHER, 140.0)):
            for rank in (0, 1):
                trace = kineto_files.trace(rank, start_us=starts_us + rank, steps=6)
                kineto_files.write(folder / name / f"rank{rank:05}.pt.trace.json", trace)
        (alone,) = self.at_once([("check", RUN, "--format", "json", "--no-cache")], cache="alone")
        self.report = alone.stdout

    def at_once(self, commands: Sequence[Sequence[str]], *, cache: str) -> list["subprocess.CompletedProcess[str]"]:
        """Run commands at the same time in a process each, on one cache."""
        where = {"TRACEKIT_CACHE_DIR": str(self.folder / cache), "POLARS_MAX_THREADS": "1"}
        started = [
            self._processes.submit(cli_runner.tracekit, *command, cwd=self.folder, **where) for command in commands
        ]
        return [each.result(_TIMEOUT_S) for each in started]


@contextmanager
def place() -> Iterator[Place]:
    """Give a folder, and processes for commands that run at the same time."""
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory(prefix="tracekit-together-") as folder,
        ProcessPoolExecutor(3, mp_context=spawn) as processes,
    ):
        yield Place(Path(folder), processes)


def history(where: Place, seed: int) -> str | None:
    """Return what is wrong after two processes have added to one history; None if nothing."""
    name = f"history-{seed}.duckdb"
    is_same = random.Random(seed).random() < 0.3
    added = [
        ("history", "add", run, "--db", name, "--commit", letter * 40) for run, letter in ((RUN, "a"), (OTHER, "b"))
    ]
    if is_same:  # one run twice is one entry
        added[1] = added[0]
    ended = where.at_once(added, cache=f"cache-{seed}")
    if bad := [each.stderr for each in ended if each.returncode != 0]:
        return f"history add fails: {bad[0][-300:]}"
    rows = store.read(where.folder / name).runs.height
    return None if rows == (1 if is_same else 2) else f"the history has {rows} runs"


def cache(where: Place, seed: int) -> str | None:
    """Return what is wrong after two processes have used one cache; None if nothing."""
    check = ("check", RUN, "--format", "json")
    others = [("cache", "clear")] if random.Random(seed).random() < 0.5 else []
    ended = where.at_once([check, check, *others], cache=f"cache-{seed // 3}")  # new in every third round
    for each in ended[:2]:
        if each.returncode not in (0, 1):
            return f"check ends with {each.returncode}: {each.stderr[-300:]}"
        if each.stdout != where.report:
            return "check reports something else"
    return next(
        (f"cache clear ends with {each.returncode}: {each.stderr}" for each in ended[2:] if each.returncode), None
    )


ROUNDS = {"history": history, "cache": cache}


def main() -> int:
    """Run the command; return 1 if a process did not do as if it were alone."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.together", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each kind (default: 20)")
    parser.add_argument("--seed", type=int, default=time.time_ns() // 10**9, help="of the first round")
    options = parser.parse_args()
    wrong: Counter[str] = Counter()
    with place() as where:
        for seed in range(options.seed, options.seed + options.rounds):
            for name, once in ROUNDS.items():
                if problem := once(where, seed):
                    wrong[name] += 1
                    print(f"{name}, seed {seed}: {problem}", flush=True)
    print("| on one | rounds | wrong |\n|---|---|---|")
    for name in ROUNDS:
        print(f"| {name} | {options.rounds} | {wrong[name]} |")
    return wrong.total() > 0


if __name__ == "__main__":
    sys.exit(main())
